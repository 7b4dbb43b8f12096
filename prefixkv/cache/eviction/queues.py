"""Eviction queues: evictable leaves in the order in which they go.

Queues are lazy. A node's `entry` is its only valid place. A queue may still hold older places of a
node, which are dead: it drops them when they come to its front, or all at once when there are too
many.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
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

    def rank_at(self, leaf: TreeNode, now_s: float) -> LeafRank:
        """Return a leaf's rank at this time: the lowest goes first. Used where there are hints."""

    def count_dead(self) -> None:
        """Count that one entry has died."""

    def expect(self, num_leaves: int, now_s: float) -> None:
        """Begin a batch of evictions that takes about `num_leaves`; 0 ends it."""

    def broken_laws(self) -> list[str]:
        """Return the queue's own laws that do not hold; for tests."""


def forget(node: TreeNode) -> None:
    """Remove a node from its queue, if any. O(1): the entry is left there, dead."""
    if node.entry is not None:
        queue: EvictionQueue = node.entry[2]
        node.entry = None
        queue.count_dead()


class LeafHeap:
    """A lazy heap by rank: an entry may rank its node too low, but never too high.

    Most uses only raise a rank, so they leave the heap alone; `first` corrects the top. `add` costs
    O(log leaves). Before a large batch the heap is sorted into a run, and later entries form a heap
    again: the first leaf is the lesser of both heads.
    """

    most_pages = MAX_INDEX

    def __init__(self, rank: Callable[[Mark], LeafRank]) -> None:
        self._rank = rank
        self._heap: list[tuple[LeafRank, TreeNode, LeafHeap]] = []
        # Falling, so that the first is the last.
        self._run: list[tuple[LeafRank, TreeNode, LeafHeap]] = []
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
        heap, run = self._heap, self._run
        while heap or run:
            in_run = not heap or (run and run[-1] < heap[0])
            entry = run[-1] if in_run else heap[0]
            node = entry[1]
            # 1. A living leaf at its true rank is the answer; at a higher one it moves down.
            # 2. A node that was locked or got children leaves the queue. It is added again when it
            #    is an evictable leaf again.
            # 3. A dead entry is dropped.
            if node.entry is entry and not node.lock_ref and not node.children:
                rank = self._rank(node.mark)
                if rank == entry[0]:
                    return node
                # Its rank has risen, so the top of the heap is still the old entry, popped below.
                node.entry = moved = (rank, node, self)
                heappush(heap, moved)
            elif node.entry is entry:
                node.entry = None
            else:
                self._num_dead -= 1
            if in_run:
                run.pop()
            else:
                heappop(heap)
        return None

    def rank_at(self, leaf: TreeNode, now_s: float) -> LeafRank:
        return self._rank(leaf.mark)

    def count_dead(self) -> None:
        """Count a dead entry, and sweep when more than half are. Amortised O(1)."""
        self._num_dead += 1
        if self._num_dead > 1024 and 2 * self._num_dead > len(self._heap) + len(self._run):
            self._heap = [entry for entry in self._heap + self._run if entry[1].entry is entry]
            self._run = []
            heapify(self._heap)
            self._num_dead = 0

    def broken_laws(self) -> list[str]:
        return []

    def expect(self, num_leaves: int, now_s: float) -> None:
        """Sort before a large batch: quicker than a pop from the heap for each leaf."""
        if num_leaves > 64 and 4 * num_leaves > len(self._heap):
            self._run += self._heap
            self._run.sort(reverse=True)
            self._heap = []
