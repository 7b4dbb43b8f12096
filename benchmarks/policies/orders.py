"""Several orders over the same leaves, for policies that choose between heads as time passes."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

from prefixkv.cache.eviction.policy import LeafRank, forget
from prefixkv.cache.node import Mark, TreeNode
from prefixkv.paging import MAX_INDEX

LeafPlace: TypeAlias = tuple[int, LeafRank, tuple[int, LeafRank] | None]
"""(order, key, maybe (another order, key)): where a leaf stands; in each order the least key comes
first.

Leaves that agree in the first order and key agree in the second.
"""


class LeafOrders:
    """A leaf's entry is (key, node, queue, order). The heap of its first order holds the entry
    itself; the heap of a second one holds (other key, entry), so that a leaf costs little
    memory."""

    most_pages = MAX_INDEX

    def __init__(self, num_orders: int) -> None:
        self._heaps: list[list[tuple[Any, ...]]] = [[] for _ in range(num_orders)]
        self._num_entries = self._num_dead = 0  # living ones, and others

    def place(self, history: Mark) -> LeafPlace:
        """Return the place in the orders of a leaf with this history."""
        raise NotImplementedError

    def first(self, now_s: float) -> TreeNode | None:
        """Return the leaf that is evicted first, by the heads of the orders."""
        raise NotImplementedError

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

    def count_dead(self) -> None:
        """Count a dead entry; sweep when the dead outnumber the living."""
        self._num_entries -= 1
        self._num_dead += 1
        if self._num_dead > 1024 and self._num_dead > self._num_entries:
            for order, heap in enumerate(self._heaps):
                self._heaps[order] = [one for one in heap if _entry(one)[1].entry is _entry(one)]
                heapify(self._heaps[order])
            self._num_dead = 0

    def broken_laws(self) -> list[str]:
        return []


def _entry(item: tuple[Any, ...]) -> tuple[Any, ...]:
    return item if len(item) == 4 else item[1]
