"""Pages that would be without a lock if some locks ended."""

from __future__ import annotations

from prefixkv.cache.node import TreeNode
from prefixkv.cache.results import PrefixLock


class Releases:
    """Ends locks in a copy of the counts, one after the other; the tree is not touched. Valid until
    the tree changes.

    Two locks that share a prefix free it only together, so the sum of what each frees alone would
    be too low.
    """

    def __init__(self) -> None:
        self._refs: dict[TreeNode, int] = {}  # what `lock_ref` of a node would be, where it differs

    def end(self, lock: PrefixLock | None) -> int:
        """Release `lock` in the copy, and return the pages that it frees after those before it.
        O(nodes of them). None frees nothing. Mirrors `RadixTree._release`."""
        if lock is None:
            return 0
        # The first node that something else holds ends the walk, as in the tree; its count is lower
        # from here on, so the next lock may go further.
        refs, node = self._refs, lock.node
        end = node.end
        refs[node] = left = refs.get(node, node.lock_ref) - 1
        while left == 0 and node.parent is not None:
            node = node.parent
            refs[node] = left = refs.get(node, node.lock_ref) - 1
        return end - node.end
