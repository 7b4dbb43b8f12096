"""How many pages ending some locks would leave without one: asked before any of them ends."""

from __future__ import annotations

from prefixkv.cache.node import Node
from prefixkv.cache.results import PrefixLock


class Releases:
    """Ends locks on paper, one after the other; the tree is not touched. Of use until the tree
    changes.

    Two locks that share a prefix free it only together, so the sum of what each frees alone would
    be too low.
    """

    def __init__(self) -> None:
        self._refs: dict[Node, int] = {}  # what `lock_ref` of a node would be, where it differs

    def end(self, lock: PrefixLock | None) -> int:
        """Pages that no lock would hold any more, once this one and those before have ended.
        O(nodes of them)."""
        if lock is None:
            return 0
        refs, node = self._refs, lock.node
        end = node.end
        refs[node] = left = refs.get(node, node.lock_ref) - 1
        while left == 0 and node.parent is not None:
            node = node.parent
            refs[node] = left = refs.get(node, node.lock_ref) - 1
        return end - node.end
