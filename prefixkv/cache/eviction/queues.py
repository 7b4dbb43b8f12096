"""Eviction queues: evictable leaves in the order in which they go.

Queues are lazy. A node's `entry` is its only valid place. A queue may still hold older places of a
node, which are dead: it drops them when they come to its front, or all at once when there are too
many.
"""

from __future__ import annotations

from collections import deque
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

    Most uses only raise a rank, so they leave the heap alone; `first` corrects the head. What comes
    in order stands in a run before the heap: O(1). Else `add` costs O(log leaves).
    """

    most_pages = MAX_INDEX

    def __init__(self, rank: Callable[[Mark], LeafRank]) -> None:
        self._rank = rank
        self._heap: list[tuple[LeafRank, TreeNode, LeafHeap]] = []
        self._run: deque[tuple[LeafRank, TreeNode, LeafHeap]] = deque()
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
        run = self._run
        if not run or run[-1][0] < rank:
            run.append(entry)
        else:
            heappush(self._heap, entry)

    def first(self, now_s: float = 0.0) -> TreeNode | None:
        """Return the leaf with the lowest rank. Amortised O(log leaves)."""
        heap, run = self._heap, self._run
        while heap or run:
            in_run = not heap or (run and run[0] < heap[0])
            entry = run[0] if in_run else heap[0]
            node = entry[1]
            # 1. A living leaf at its true rank is the answer; at a higher one it moves down.
            # 2. A node that was locked or got children leaves the queue. It is added again when it
            #    is an evictable leaf again.
            # 3. A dead entry is dropped.
            moves = False
            if node.entry is entry:
                if not node.children and not node.lock_ref:
                    moves = entry[0] < self._rank(node.mark)
                    if not moves:  # not `==`: of ranks with `<` alone, or NaN, none is equal
                        return node
                node.entry = None
            else:
                self._num_dead -= 1
            if in_run:
                run.popleft()
            else:
                heappop(heap)
            if moves:
                self.add(node)
        return None

    def count_dead(self) -> None:
        """Count a dead entry, and sweep when more than half are. Amortised O(1)."""
        self._num_dead += 1
        if self._num_dead > 1024 and 2 * self._num_dead > len(self._heap) + len(self._run):
            self._heap = [entry for entry in self._heap if entry[1].entry is entry]
            self._run = deque(entry for entry in self._run if entry[1].entry is entry)
            heapify(self._heap)
            self._num_dead = 0

    def broken_laws(self) -> list[str]:
        return []
