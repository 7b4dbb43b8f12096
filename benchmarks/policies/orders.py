"""Several orders over the same leaves, for policies that choose between heads as time passes."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

from prefixkv.cache.eviction.least_worth import Batches
from prefixkv.cache.eviction.queues import LeafRank, forget
from prefixkv.cache.node import Mark, TreeNode

LeafPlace: TypeAlias = tuple[int, LeafRank, tuple[int, LeafRank] | None]
"""(order, key, maybe (another order, key)): where a leaf stands; in each order the least key comes
first.

Leaves that agree in the first order and key agree in the second.
"""


class LeafOrders(Batches):
    """A leaf's entry is (key, node, queue, order). The heap of its first order holds the entry
    itself; the heap of a second one holds (other key, entry), so that a leaf costs little
    memory."""

    def __init__(self, num_orders: int) -> None:
        super().__init__()
        self._heaps: list[list[tuple[Any, ...]]] = [[] for _ in range(num_orders)]

    def place(self, history: Mark) -> LeafPlace:
        """Return the place in the orders of a leaf with this history."""
        raise NotImplementedError

    def ranked(self, now_s: float) -> list[Any]:
        entries = [entry for entry in self._entries() if entry is entry[1].entry]
        # No two leaves have equal ranks.
        entries.sort(key=lambda entry: self.rank_at(entry[1], now_s), reverse=True)
        return entries

    def add(self, leaf: TreeNode) -> None:
        """Add or move a leaf. O(log leaves)."""
        order, key, second = self.place(leaf.mark)
        entry = leaf.entry
        if entry is not None:
            if entry[2] is self and entry[0] == key and entry[3] == order:
                return
            forget(leaf)
        leaf.entry = entry = (key, leaf, self, order)
        self._num_entries += 1
        heappush(self._heaps[order], entry)
        if second is not None:
            heappush(self._heaps[second[0]], (second[1], entry))
        if self._batch_s is not None:
            heappush(self._late, (self.rank_at(leaf, self._batch_s), leaf, entry))

    def head(self, order: int) -> TreeNode | None:
        """Return the leaf that is first in one order; None if the order is empty."""
        heap = self._heaps[order]
        while heap:
            entry = _entry(heap[0])
            node: TreeNode = entry[1]
            if node.entry is entry:
                if not node.lock_ref and not node.children:
                    return node
                # Locked, or no leaf any more. This may sweep, which replaces the heaps.
                forget(node)
                heap = self._heaps[order]
            else:
                heappop(heap)
        return None

    def _entries(self) -> Iterable[tuple[Any, ...]]:
        # An item of two is an entry's second place, behind another key.
        return (entry for heap in self._heaps for entry in heap if len(entry) == 4)

    def _sweep(self) -> None:
        if not self._num_entries:
            self._heaps = [[] for _ in self._heaps]
        for order, heap in enumerate(self._heaps):
            self._heaps[order] = [item for item in heap if _entry(item)[1].entry is _entry(item)]
            heapify(self._heaps[order])


def _entry(item: tuple[Any, ...]) -> tuple[Any, ...]:
    return item if len(item) == 4 else item[1]
