"""The orders in which requests of decode's queue are tried: SGLang's is the order of arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from prefixkv.spi import RadixCache, RadixKey, TreeNode


class Depths:
    """Cache of how many pages of each waiting prompt are in the tree. A prompt is matched again
    only when pages came or went since."""

    def __init__(self, tree: RadixCache, key_of: Callable[[Any], RadixKey]) -> None:
        self._tree = tree
        self._key_of = key_of
        # By id(request): the request, kept alive so that its id stays its own, its key and depth.
        self._found: dict[int, tuple[Any, RadixKey, int]] = {}
        self._version = -1  # the tree's, at which `_found` is valid

    @property
    def version(self) -> int:
        return self._tree.version

    @property
    def page_size(self) -> int:
        return self._tree.page_size

    def of(self, request: Any) -> tuple[RadixKey, int]:
        """Return the packed prompt, not to be changed or kept, and its number of cached pages."""
        if self._version != self._tree.version:
            self._version = self._tree.version
            self._found.clear()
        found = self._found.get(id(request))
        if found is None:
            key = self._key_of(request)
            found = request, key, self._tree.match_prefix(key).depth
            self._found[id(request)] = found
        return found[1:]


class NewPagesFirst:
    """Fewest pages to send first. Requests that have waited for `patience_s` come before all
    others, in the order of arrival."""

    def __init__(self, depths: Depths, patience_s: float) -> None:
        self._depths = depths
        self._patience_s = patience_s
        self._since: dict[int, float] = {}  # by id(item): time at which it was first seen

    def order(self, queue: list[Any], now_s: float) -> None:
        """Sort in place, stably. `now_s` is the ranks' common time, so all sort alike."""
        # Forget items that left first: a new item may get the id of a former one.
        here = {id(item) for item in queue}
        for gone in self._since.keys() - here:
            del self._since[gone]
        # Group 0: out of patience, by arrival. Group 1: by new pages. Only group 1 needs a match.
        ranks: dict[int, tuple[int, float]] = {}
        for item in queue:
            ident = id(item)
            since = self._since.setdefault(ident, now_s)
            if now_s - since >= self._patience_s:
                ranks[ident] = (0, since)
                continue
            key, depth = self._depths.of(item.req)
            ranks[ident] = (1, len(key) // self._depths.page_size - depth)
        queue.sort(key=lambda item: ranks[id(item)])


def weight_order(ends: Sequence[TreeNode | None]) -> list[int]:
    """Return the indices of `ends` (None: the root) in the order that shares prefixes best: depth
    first, at each node the branch with most requests first. O(requests * nodes on their paths).

    Equal weights keep the order of `ends`, so that it is the same on every rank.
    """
    # 1. Weigh the nodes: each request counts for every node on its path to the root. Children are
    #    kept in dicts, not sets, so that their order does not depend on hashes.
    at: dict[TreeNode | None, list[int]] = {None: []}
    weight: Counter[TreeNode] = Counter()
    below: dict[TreeNode | None, dict[TreeNode, None]] = {None: {}}
    for place, end in enumerate(ends):
        at.setdefault(end, []).append(place)
        node = end
        while node is not None:
            weight[node] += 1
            below.setdefault(node, {})
            below.setdefault(node.parent, {})[node] = None
            node = node.parent
    # 2. Walk the tree with a stack, since a path may be deeper than Python's recursion limit. A
    #    node comes up twice: first its children are pushed, then its own requests are placed.
    order: list[int] = []
    stack: list[tuple[TreeNode | None, bool]] = [(None, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order += at.get(node, ())
            continue
        stack.append((node, True))
        # The heaviest is pushed last, so comes first; `sorted` keeps equals in order.
        children = sorted(below[node], key=lambda child: -weight[child])
        stack += [(child, False) for child in reversed(children)]
    return order
