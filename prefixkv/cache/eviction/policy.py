"""What goes first when room is needed: a policy says what a use leaves behind and how to rank
histories.

Eviction always takes the last page of some leaf, so a prompt outlives the output it led to under
every policy. A policy sees uses and histories, never the tree: it cannot break it. Write one by
deriving from `Policy`, and `register` it to use it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Protocol, TypeAlias, TypeVar

from prefixkv.cache.node import Mark as Mark
from prefixkv.cache.node import Node
from prefixkv.errors import ConfigError

DEFAULT_POLICY = "gated"
"""What held up best in replays, at every capacity (`gated.py`). It needs to be told the time."""

Rank: TypeAlias = Any
"""Whatever compares with `<`; of all evictable leaves the one with the least goes first."""


class Use:
    """One use of a path, as a policy sees it. One object, filled in anew for every use; copy what
    is to be kept.

    Attributes:
        tick: 1, 2, 3, ...: the order of uses. Two leaves never have the same last tick.
        now_s: the caller's clock; it never goes back.
        num_pages: pages that the use covers, from the root.
        old_pages: how many of them were in the tree before it; all of them for a lock.
        visit: whether it is the first use of its request. A request that locks, inserts and locks
            is seen once.
        priority: of an insertion; None for a lock.
        data: the packed tokens of the whole request, which may be more than the use covers.
        before: the mark on the last of the old pages, None if no use ended there.
        tree_pages: pages in the tree.
    """

    __slots__ = (
        "before",
        "data",
        "now_s",
        "num_pages",
        "old_pages",
        "priority",
        "tick",
        "tree_pages",
        "visit",
    )

    def __init__(self) -> None:
        self.tick = 0
        self.now_s = 0.0
        self.num_pages = 0
        self.old_pages = 0
        self.visit = True
        self.priority: int | None = None
        self.data = b""
        self.before: Mark = None
        self.tree_pages = 0


class Policy:
    """Least recently used, and the base of all policies.

    A use leaves one mark, on the last page it covers; the history of a page is the fold of all
    marks at it or below it, also of those below that are gone. `fold` therefore has to be
    associative. Keep it cheap: it runs in the scheduler's loop.
    """

    name = "lru"

    supersedes = True
    """Whether a later mark makes those above it in the same node worthless (true if only the last
    use counts)."""

    ghost_pages = 0
    """Call `evicted` when pages go that end at a multiple of this depth; 0: never."""

    token_scale = 1
    """How many tokens one token of the cache stands for: more than one in a replay of traces of
    blocks."""

    keeps_partial_blocks = True
    """Whether a replay of a block trace inserts the partial block at a prompt's end, which no
    engine would."""

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        """Called once, by the cache that the policy is for."""

    def mark(self, use: Use) -> Mark:
        """What this use leaves on the last page it covers."""
        return use.tick

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        """(depth, mark) that an insertion of new pages leaves: `old_pages` <= depth, rising, the
        last at `num_pages`.

        Histories add up downwards, so what is counted of the new pages only is taken off again at
        `old_pages`.
        """
        return ((use.num_pages, self.mark(use)),)

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        """The history that two marks make together."""
        return upper if upper > lower else lower

    def rank(self, history: Mark) -> Rank:
        """Where a page with this history stands: the least goes first. No two leaves may rank
        equal."""
        return history

    def last_tick(self, history: Mark) -> int:
        """The tick of the last use in a history."""
        return history  # type: ignore[no-any-return]

    def describe(self, history: Mark) -> str:
        """What a dump says of a history besides its age; begins with a comma if it says
        anything."""
        return ""

    def hinted(self, mark: Mark, depth: int, continues: bool) -> Mark:
        """The mark at `depth`, now that it is known whether the session goes on that ended there.
        May be ignored."""
        return mark

    def make_queue(self) -> EvictionQueue:
        """An empty queue; most policies need but one order, by rank."""
        return LeafHeap(self.rank)

    def evicted(self, node: Node, num_pages: int) -> None:
        """The last `num_pages` of a node, all with the history `node.mark`, are about to go."""

    def reset(self) -> None:
        """Forget everything."""


_POLICIES: dict[str, Callable[[], Policy]] = {}

P = TypeVar("P", bound=type[Policy])


def register(policy: P) -> P:
    """Make a policy class known by its `name`; a decorator. A later one of the same name replaces
    it."""
    _POLICIES[policy.name] = policy
    return policy


def policy_names() -> list[str]:
    return sorted(_POLICIES)


def make_policy(policy: str | Policy) -> Policy:
    """A policy object by name, or the object itself. Raises ConfigError for an unknown name."""
    if isinstance(policy, Policy):
        return policy
    if policy not in _POLICIES:
        raise ConfigError(f"policy {policy!r} is not one of {', '.join(policy_names())}")
    return _POLICIES[policy]()


register(Policy)


class EvictionQueue(Protocol):
    """The evictable leaves in the order in which they go.

    `Node.entry` is a leaf's live place in one queue, (places, node, queue); what a heap holds of a
    node is dead unless it is, or names, this very object.
    """

    def add(self, leaf: Node) -> None:
        """A node became an evictable leaf, or its history has changed while it is one."""
        ...

    def first(self, now_s: float) -> Node | None:
        """The leaf that goes first, still in the queue; None if there is none."""
        ...

    def take(self, leaf: Node) -> None:
        """Take out what `first` has just returned."""
        ...

    def bury(self) -> None:
        """One entry of this queue has died."""
        ...

    def expect(self, num_leaves: int, now_s: float) -> None:
        """A batch begins, in which about so many will be taken; 0: it is over."""
        ...


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
                node.entry = None  # whoever makes it an evictable leaf again, adds it again
            else:
                self._num_dead -= 1
            if in_run:
                run.pop()
            else:
                heappop(heap)
        return None

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

    A leaf's entry, (key, node, queue, order), stands itself in the heap of its first order, and
    behind another key in that of a second one: a million of them have to fit. Within a batch time
    stands still, so all orders are one: before a large batch the leaves are sorted by it.
    """

    def __init__(self, num_orders: int) -> None:
        self._heaps: list[list[tuple[Any, ...]]] = [[] for _ in range(num_orders)]
        self._num_entries = 0  # living
        self._num_dead = 0
        self._batch_s: float | None = (
            None  # the time of the batch that is under way, if it is large
        )
        self._run: list[tuple[Rank, Node, Any]] = []  # its leaves, falling in rank
        self._late: list[tuple[Rank, Node, Any]] = []  # those that became leaves in it: a heap

    def place(self, history: Mark) -> Place:
        """Where a leaf with this history stands."""
        raise NotImplementedError

    def choose(self, now_s: float) -> Node | None:
        """The leaf that goes first, by the heads of the orders."""
        raise NotImplementedError

    def rank_at(self, history: Mark, now_s: float) -> Rank:
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
            heappush(self._late, (self.rank_at(leaf.mark, self._batch_s), leaf, entry))

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
                (rank_at(entry[1].mark, now_s), entry[1], entry)
                for heap in self._heaps
                for entry in heap
                if len(entry) == 4
                and entry is entry[1].entry  # once: elsewhere it stands behind a key
            ]
            self._run.sort(reverse=True)
            self._batch_s = now_s
        elif self._batch_s is not None and not num_leaves:
            self._batch_s = None
            self._run, self._late = [], []
            self._sweep()

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
