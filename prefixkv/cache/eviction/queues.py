"""Eviction queues: evictable leaves in the order in which they go.

Queues are lazy. A node's `entry` is its only valid place. A queue may still hold older places of a
node, which are dead: it drops them when they come to its front, or all at once when there are too
many.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Protocol, TypeAlias

from prefixkv.cache.node import Mark, TreeNode
from prefixkv.paging import MAX_INDEX

LeafRank: TypeAlias = Any
"""Any type with `<`; of all evictable leaves the one with the lowest rank goes first."""


class EvictionQueue(Protocol):
    """The evictable leaves in the order in which they go.

    `TreeNode.entry` is a leaf's valid place in one queue: (key, node, queue, ...). An item in a
    heap is dead unless it is this very object, or refers to it. Of the leaf that was named first at
    most `most_pages` go before the queue is asked again.
    """

    most_pages: int

    def add(self, leaf: TreeNode) -> None:
        """Add a node that became an evictable leaf, or move a leaf whose history has changed."""

    def first(self, now_s: float) -> TreeNode | None:
        """Return the leaf that is evicted first, and leave it in the queue; None if empty."""

    def count_dead(self) -> None:
        """Count that one entry has died."""

    def broken_laws(self) -> list[str]:
        """Return the queue's own laws that do not hold; for tests."""
        ...


def forget(node: TreeNode) -> None:
    """Remove a node from its queue, if any. O(1): the entry is left there, dead."""
    if node.entry is not None:
        queue: EvictionQueue = node.entry[2]
        node.entry = None
        queue.count_dead()


class LeafHeap:
    """A lazy heap by rank: an entry may rank its node too low, but never too high.

    Most uses only raise a rank, so they leave the heap alone; `first` corrects the top. `add` costs
    O(log leaves).
    """

    most_pages = MAX_INDEX

    def __init__(self, rank: Callable[[Mark], LeafRank]) -> None:
        self._rank = rank
        self._heap: list[tuple[LeafRank, TreeNode, LeafHeap]] = []
        self._num_dead = 0

    def add(self, leaf: TreeNode) -> None:
        """Add or move a leaf. O(1) if its rank has only risen."""
        rank = self._rank(leaf.mark)
        entry = leaf.entry
        if entry is not None:
            # It ranks too low at worst, which `first` corrects.
            if entry[2] is self and not rank < entry[0]:
                return
            forget(leaf)
        leaf.entry = entry = (rank, leaf, self)
        heappush(self._heap, entry)

    def first(self, now_s: float = 0.0) -> TreeNode | None:
        """Return the leaf with the lowest rank. Amortised O(log leaves)."""
        heap = self._heap
        while heap:
            entry = heap[0]
            node = entry[1]
            # 1. A living leaf at its true rank is the answer; at a higher one it moves down.
            # 2. A node that was locked or got children leaves the queue. It is added again when it
            #    is an evictable leaf again.
            # 3. A dead entry is dropped.
            if node.entry is entry and not node.lock_ref and not node.children:
                rank = self._rank(node.mark)
                if not entry[0] < rank:  # not `==`: of ranks with `<` alone, or NaN, none is equal
                    return node
                node.entry = moved = (rank, node, self)
                heapreplace(heap, moved)
                continue
            if node.entry is entry:
                node.entry = None
            else:
                self._num_dead -= 1
            heappop(heap)
        return None

    def count_dead(self) -> None:
        """Count a dead entry, and sweep when more than half are. Amortised O(1)."""
        self._num_dead += 1
        if self._num_dead > 1024 and 2 * self._num_dead > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].entry is entry]
            heapify(self._heap)
            self._num_dead = 0

    def broken_laws(self) -> list[str]:
        return []
