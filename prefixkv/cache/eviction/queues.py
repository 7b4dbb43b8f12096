"""Evictable leaves in the order in which they go.

Queues are lazy. A node's `entry` is its one living place; a queue may hold places of a node that
have died since, and drops them when they come to its front, or all at once when they are too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, TypeAlias

from prefixkv.cache.node import Mark, Node

Rank: TypeAlias = Any
"""Whatever compares with `<`; of all evictable leaves the one with the least goes first."""


class EvictionQueue(Protocol):
    """The evictable leaves in the order in which they go.

    `Node.entry` is a leaf's live place in one queue, (places, node, queue); what a heap holds of a
    node is dead unless it is, or names, this very object.
    """

    def add(self, leaf: Node) -> None:
        """A node became an evictable leaf, or its history has changed while it is one."""

    def first(self, now_s: float) -> Node | None:
        """The leaf that goes first, still in the queue; None if there is none."""

    def rank_at(self, leaf: Node, now_s: float) -> Rank:
        """Where a leaf in it stands: the least goes first. Asked only if the policy
        `tells_returns`."""

    def take(self, leaf: Node) -> None:
        """Take out what `first` has just returned."""

    def bury(self) -> None:
        """One entry of this queue has died."""

    def expect(self, num_leaves: int, now_s: float) -> None:
        """A batch begins, in which about `num_leaves` will be taken; 0: it is over."""

    def broken_laws(self) -> list[str]:
        """Laws of its own that do not hold; for tests."""


def forget(node: Node) -> None:
    """Take a node out of the queue it is in, if it is in one."""
    if node.entry is not None:
        queue: EvictionQueue = node.entry[2]
        node.entry = None
        queue.bury()


class LeafHeap:
    """A lazy heap by rank: a node's entry may rank it too low, but never too high.

    Uses only raise the rank under most policies, so they need not touch the heap at all; `first`
    sets an entry right when it comes to the top. `add` costs O(log leaves) and is needed only when
    a node becomes a leaf or ranks lower than before. The dead are swept when they outnumber the
    living.

    Before a large batch the heap is sorted into a run, from which taking is a pop; what is added
    later is a heap again, and the first is the lesser of both heads.
    """

    def __init__(self, rank: Callable[[Mark], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, Node, LeafHeap]] = []
        self._run: list[tuple[Rank, Node, LeafHeap]] = []  # falling, so that the first is the last
        self._num_dead = 0

    def add(self, leaf: Node) -> None:
        rank = self._rank(leaf.mark)
        entry = leaf.entry
        if entry is not None:
            if entry[2] is self and not rank < entry[0]:
                return
            forget(leaf)
        leaf.entry = entry = (rank, leaf, self)
        heappush(self._heap, entry)

    def first(self, now_s: float = 0.0) -> Node | None:
        heap, run = self._heap, self._run
        while heap or run:
            in_run = not heap or (run and run[-1] < heap[0])
            entry = run[-1] if in_run else heap[0]
            node = entry[1]
            if node.entry is entry and not node.lock_ref and not node.children:
                rank = self._rank(node.mark)
                if rank == entry[0]:
                    return node
                node.entry = moved = (rank, node, self)
                heappush(heap, moved)  # behind the one at the top, which goes next
            elif node.entry is entry:
                node.entry = None  # it is added again when it is an evictable leaf again
            else:
                self._num_dead -= 1
            if in_run:
                run.pop()
            else:
                heappop(heap)
        return None

    def rank_at(self, leaf: Node, now_s: float) -> Rank:
        return self._rank(leaf.mark)

    def take(self, leaf: Node) -> None:
        run = self._run
        if run and run[-1] is leaf.entry:
            run.pop()
        else:
            heappop(self._heap)
        leaf.entry = None

    def bury(self) -> None:
        self._num_dead += 1
        if self._num_dead > 1024 and 2 * self._num_dead > len(self._heap) + len(self._run):
            self._heap = [entry for entry in self._heap + self._run if entry[1].entry is entry]
            self._run = []
            heapify(self._heap)
            self._num_dead = 0

    def broken_laws(self) -> list[str]:
        return []

    def expect(self, num_leaves: int, now_s: float) -> None:
        if num_leaves > 64 and 4 * num_leaves > len(self._heap):
            self._run += self._heap
            self._run.sort(reverse=True)
            self._heap = []


Place: TypeAlias = tuple[int, Rank, tuple[int, Rank] | None]
"""(order, key, maybe (another order, key)): where a leaf stands; in each order the least key comes
first.

Leaves that agree in the first order and key agree in the second.
"""


class LeafOrders:
    """Several orders over the same leaves, for policies that choose between the heads of each as
    time passes.

    A leaf's entry is (key, node, queue, order). The heap of its first order holds the entry itself;
    the heap of a second one holds (other key, entry), so that a leaf costs little memory. Within a
    batch time stands still, so all orders are one: before a large batch the leaves are sorted by
    it.
    """

    def __init__(self, num_orders: int) -> None:
        self._heaps: list[list[tuple[Any, ...]]] = [[] for _ in range(num_orders)]
        self._num_entries = 0  # living
        self._num_dead = 0
        self._batch_s: float | None = None  # the time of the batch under way, if it is large
        self._run: list[tuple[Rank, Node, Any]] = []  # its leaves, falling in rank
        self._late: list[tuple[Rank, Node, Any]] = []  # those that became leaves in it: a heap

    def place(self, history: Mark) -> Place:
        """Where a leaf with this history stands."""
        raise NotImplementedError

    def choose(self, now_s: float) -> Node | None:
        """The leaf that goes first, by the heads of the orders."""
        raise NotImplementedError

    def rank_at(self, leaf: Node, now_s: float) -> Rank:
        """The same as one rank, the least of which goes first; it holds at this time only."""
        raise NotImplementedError

    def add(self, leaf: Node) -> None:
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

    def first(self, now_s: float) -> Node | None:
        if self._batch_s is None:
            return self.choose(now_s)
        run, late = self._run, self._late
        while run or late:
            in_run = not late or (run and run[-1] < late[0])
            _, node, entry = run[-1] if in_run else late[0]
            if node.entry is entry and not node.lock_ref and not node.children:
                return node
            if in_run:
                run.pop()
            else:
                heappop(late)
        return None

    def head(self, order: int) -> Node | None:
        """The leaf that is first in one order; None if the order is empty."""
        heap = self._heaps[order]
        while heap:
            entry = _entry(heap[0])
            node: Node = entry[1]
            if node.entry is entry:
                if not node.lock_ref and not node.children:
                    return node
                forget(node)
                heap = self._heaps[order]
            else:
                heappop(heap)
        return None

    def take(self, leaf: Node) -> None:
        leaf.entry = None
        self.bury()

    def bury(self) -> None:
        self._num_entries -= 1
        self._num_dead += 1
        if self._num_dead > 1024 and self._num_dead > self._num_entries and self._batch_s is None:
            self._sweep()

    def expect(self, num_leaves: int, now_s: float) -> None:
        if num_leaves > 64 and 4 * num_leaves > self._num_entries:
            rank_at = self.rank_at
            self._run = [
                (rank_at(entry[1], now_s), entry[1], entry)
                for entry in self._entries()
                if entry is entry[1].entry
            ]
            self._run.sort(reverse=True)
            self._batch_s = now_s
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
        """All entries, the dead too, each once."""
        # Once: elsewhere it stands behind a key.
        return (entry for heap in self._heaps for entry in heap if len(entry) == 4)

    def _sweep(self) -> None:
        if not self._num_entries:
            self._heaps = [[] for _ in self._heaps]
        for order, heap in enumerate(self._heaps):
            self._heaps[order] = [item for item in heap if _entry(item)[1].entry is _entry(item)]
            heapify(self._heaps[order])
        self._num_dead = 0


def _entry(item: tuple[Any, ...]) -> tuple[Any, ...]:
    """The entry behind what stands in one of the heaps."""
    return item if len(item) == 4 else item[1]
