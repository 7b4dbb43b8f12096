"""Eviction queues: evictable leaves in the order in which they go.

Queues are lazy. A node's `entry` is its only valid place. A queue may still hold older places of a
node, which are dead: it drops them when they come to its front, or all at once when there are too
many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


LeafPlace: TypeAlias = tuple[int, LeafRank, tuple[int, LeafRank] | None]
"""(order, key, maybe (another order, key)): where a leaf stands; in each order the least key comes
first.

Leaves that agree in the first order and key agree in the second.
"""


class LeafOrders:
    """Several orders over the same leaves, for policies that choose between heads as time passes.

    A leaf's entry is (key, node, queue, order). The heap of its first order holds the entry itself;
    the heap of a second one holds (other key, entry), so that a leaf costs little memory. Within a
    batch time stands still, so all orders are one: before a large batch the leaves are sorted by
    it.
    """

    most_pages = MAX_INDEX

    def __init__(self, num_orders: int) -> None:
        self._heaps: list[list[tuple[Any, ...]]] = [[] for _ in range(num_orders)]
        self._num_entries = 0  # living
        self._num_dead = 0
        self._batch_s: float | None = None  # the time of the batch under way, if it is large
        self._run: list[tuple[Any, ...]] = []  # entries of its leaves, falling in rank
        self._late: list[
            tuple[LeafRank, TreeNode, Any]
        ] = []  # those that became leaves in it: a heap

    def place(self, history: Mark) -> LeafPlace:
        """Return the place in the orders of a leaf with this history."""
        raise NotImplementedError

    def choose(self, now_s: float) -> TreeNode | None:
        """Return the leaf that is evicted first, by the heads of the orders."""
        raise NotImplementedError

    def rank_at(self, leaf: TreeNode, now_s: float) -> LeafRank:
        """Combine all orders into one rank at `now_s`; the lowest goes first."""
        raise NotImplementedError

    def ranked(self, now_s: float) -> list[tuple[Any, ...]]:
        """Return all leaves' entries, falling in rank at `now_s`. O(leaves log leaves)."""
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
        # A parent may become a leaf in the middle of a batch, and may be due at once.
        if self._batch_s is not None:
            heappush(self._late, (self.rank_at(leaf, self._batch_s), leaf, entry))

    def first(self, now_s: float) -> TreeNode | None:
        """Return the leaf that goes first: of a large batch's run, else by `choose`."""
        if self._batch_s is None:
            return self.choose(now_s)
        # 1. The first of the run that is still an evictable leaf.
        run, late = self._run, self._late
        first: TreeNode | None = None
        while run:
            entry = run[-1]
            node = entry[1]
            if node.entry is entry and not node.lock_ref and not node.children:
                first = node
                break
            run.pop()
        # 2. As a rule no leaf has come since. Else the first of those may go before it.
        while late:
            rank, node, entry = late[0]
            if node.entry is entry and not node.lock_ref and not node.children:
                if first is None or rank < self.rank_at(first, self._batch_s):
                    return node
                break
            heappop(late)
        return first

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
        """Count a dead entry; sweep, except within a batch, when the dead outnumber the living."""
        self._num_entries -= 1
        self._num_dead += 1
        if self._num_dead > 1024 and self._num_dead > self._num_entries and self._batch_s is None:
            self._sweep()

    def expect(self, num_leaves: int, now_s: float) -> None:
        """Begin a large batch by sorting all leaves at its time, or end it."""
        if num_leaves > 64 and 4 * num_leaves > self._num_entries:
            self._run = self.ranked(now_s)
            self._batch_s = now_s
        # The batch has killed many entries, and none was swept meanwhile.
        elif self._batch_s is not None and not num_leaves:
            self._batch_s = None
            self._run, self._late = [], []
            self._sweep()

    def broken_laws(self) -> list[str]:
        found, living = 0, 0
        for entry in self._entries():
            found += 1
            living += entry is entry[1].entry
        laws = {
            f"the living entries are counted: {living}": living == self._num_entries,
            f"most dead entries are swept: {found - living}": self._batch_s is not None
            or found - living <= 1 + max(1024, living),
        }
        return [law for law, holds in laws.items() if not holds]

    def _entries(self) -> Iterable[tuple[Any, ...]]:
        # An item of two is an entry's second place, behind another key.
        return (entry for heap in self._heaps for entry in heap if len(entry) == 4)

    def _sweep(self) -> None:
        if not self._num_entries:
            self._heaps = [[] for _ in self._heaps]
        for order, heap in enumerate(self._heaps):
            self._heaps[order] = [item for item in heap if _entry(item)[1].entry is _entry(item)]
            heapify(self._heaps[order])
        self._num_dead = 0


def _entry(item: tuple[Any, ...]) -> tuple[Any, ...]:
    return item if len(item) == 4 else item[1]
