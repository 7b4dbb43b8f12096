"""The interface of eviction policies: the mark that a use leaves, and the rank of a history; and
the queues that put their order into practice.

Eviction always takes the last page of some leaf, so a prompt outlives the output it led to under
every policy. A policy sees uses and histories, never the tree: it cannot break it. After the first
exception of a user's policy its cache goes on with `lru` (`plain.py`).

To write one, derive from `Policy` or from a policy that is near it (`plain.LeastRecentlyUsed`).
Hand an object of it to a cache, or `register` the class to use it by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from prefixkv.cache.node import Mark, Packed, Root, TreeNode
from prefixkv.errors import ConfigError
from prefixkv.paging import MAX_INDEX
from prefixkv.settings import Registry

# --- queues ---------------------------------------------------------------------------------------

# Evictable leaves in the order in which they go. Queues are lazy. A node's `entry` is its only
# valid place. A queue may still hold older places of a node, which are dead: it drops them when
# they come to its front, or all at once when there are too many.

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
            is_leaf = node.entry is entry and not node.children and not node.lock_ref
            # Not `==`: of ranks with `<` alone, or NaN, none is equal.
            if is_leaf and not entry[0] < self._rank(node.mark):
                return node
            if node.entry is entry:
                node.entry = None
            else:
                self._num_dead -= 1
            if in_run:
                run.popleft()
            else:
                heappop(heap)
            if is_leaf:
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


# --- policies -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Use:
    """One use of a path, as a policy sees it. The same object serves every use: copy what you keep.

    Attributes:
        tick: 1, 2, 3, ...: the order of uses. Two leaves never have the same last tick.
        now_s: the caller's clock; it never goes back.
        num_pages: pages that the use covers, from the root.
        old_pages: those of them that were in the tree before it; all of them for a lock.
        visit: True for the first use of a request. A request that locks, inserts and locks is seen
            once.
        priority: of an insertion; None for a lock.
        data: the packed tokens of the whole request, which may be more than the use covers.
        before: the mark on the last of the old pages, None if no use ended there; a request's lock
            is a use, too. For an insertion that continues from a lock of its request, the mark as
            that lock found or left it.
        tree_pages: pages in the tree.
    """

    tick: int = 0
    now_s: float = 0.0
    num_pages: int = 0
    old_pages: int = 0
    visit: bool = True
    priority: int | None = None
    data: bytes = b""
    before: Mark = None
    tree_pages: int = 0


class Policy(ABC):
    """The base of all policies; an object of it serves one cache.

    A use leaves one mark, on the last page it covers; the history of a page is the fold of all
    marks at it or below it, also of those below that are gone. `fold` therefore has to be
    associative. Keep it cheap: it runs in the scheduler's loop.

    A policy defines `mark`, `fold` and `last_tick`, and of the other methods those it needs.
    """

    name: str
    """The name under which `register` makes the class available."""

    supersedes = False
    """True if only the last use counts: a later mark then replaces those above it in its node."""

    evicted_every_pages = 0
    """Call `evicted` when pages go that end at a multiple of this depth; 0: never."""

    error: Exception | None = None
    """What a user's policy has raised. Its cache goes on with `lru`."""

    token_scale: float = 1
    """Tokens that one token of the cache stands for: several in a replay of block traces, half a
    one where an engine's key has two words for each."""

    _serves_a_cache = False

    def serve(self, page_size: int, pool_pages: int | None) -> EvictionQueue:
        """Start to serve a cache, and return its queue. Raises ConfigError if the policy serves
        another one."""
        if self._serves_a_cache:
            raise ConfigError(
                f"policy {self.name!r} serves a cache already, each needs an object of its own"
            )
        # First: both may raise, and then the policy is still free for another cache.
        self.bind(page_size, pool_pages)
        queue = self.make_queue()
        self._serves_a_cache = True
        return queue

    def release(self) -> None:
        """Serve no cache: the node that was to be built could not be."""
        self._serves_a_cache = False

    def bind(self, page_size: int, pool_pages: int | None) -> None:  # noqa: B027
        """Learn the sizes of the cache, before its first use. Called once."""

    @abstractmethod
    def mark(self, use: Use) -> Mark:
        """Return the mark of this use, on the last page it covers."""

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        """Return (depth, mark) for each mark of an insertion of new pages.

        Depths rise from `old_pages` at least to `num_pages`, which is the last. A mark counts for
        all pages above it as well, so what is meant for the new pages alone has to be subtracted
        again at `old_pages`.
        """
        return ((use.num_pages, self.mark(use)),)

    @abstractmethod
    def fold(self, upper: Mark, lower: Mark) -> Mark:
        """Return the history that two marks make together. Must be associative."""

    def rank(self, history: Mark) -> LeafRank:
        """Return the rank of a page with this history: the lowest is evicted first. No two leaves
        may have equal ranks."""
        return history

    @abstractmethod
    def last_tick(self, history: Mark) -> int:
        """Return the tick of the last use in a history."""

    def make_queue(self) -> EvictionQueue:
        """Return an empty queue for the leaves. One order, by rank, is enough for most policies."""
        return LeafHeap(self.rank)

    def floor(self, steps: Sequence[tuple[int, Mark]], mark: Mark, low: int) -> int | None:
        """Return how far up the pages of a leaf have the same rank, and go one after the other.

        Args:
            steps: (depth, mark) inside the leaf, rising, at least one: the page at `depth` and
                those above it have this mark folded with all below.
            mark: the history of the leaf's last page.
            low: no more than down to this depth goes now.
        Returns:
            The depth of the first step, from below, that changes the rank, or any from the last
            step to there; None if no step does.
        """
        return steps[-1][0]

    def evicted(self, node: TreeNode, num_pages: int) -> None:  # noqa: B027
        """Note that the last `num_pages` of a node, down to `floor` at most, are to be evicted."""

    def work_ahead(self) -> None:  # noqa: B027
        """Do work ahead. Called when a lock has ended: nothing waits for it then."""

    def reset(self) -> None:  # noqa: B027
        """Forget everything learnt."""

    def broken_laws(self) -> list[str]:
        """Return the broken laws of the policy's own state, for tests
        (`RadixCache.check_invariants`)."""
        return []


class Said(NamedTuple):
    """What was said of a session's last use: when it returns, and whether its pages go first all
    the same; those behind the first `keep_pages` of the path."""

    due_s: float
    goes_first: bool = False
    keep_pages: int = 0


NOTHING_SAID: Final = Said(-inf)


class SessionHints(Protocol):
    """What keeps hints about sessions, and the order that they make."""

    def queue(self, policy: Policy, queue: EvictionQueue) -> EvictionQueue:
        """Return a queue of the policy's that heeds them. `queue` has the leaves so far."""
        ...

    def note(self, tick: int, root: Root, said: Said) -> None: ...

    def goes_first(self, leaf: TreeNode) -> bool:
        """Tell whether a hint says that this leaf is worth nothing here."""
        ...

    def went(self, leaf: TreeNode, num_pages: int) -> None:
        """Note that the last pages of a leaf go now."""

    def came(self, root: Root, depth: int, above: Packed, data: Packed, num: int) -> None:
        """Note that there are `num` new pages from `depth` on, behind the page `above`."""

    def forget(self, namespace: Hashable) -> None:
        """Note that this namespace has no pages any more."""

    def clear(self) -> None: ...


_POLICIES: Registry[Policy] = Registry("policy", Policy, "lru")  # type: ignore[type-abstract]
register_policy, policy_names, make_policy = _POLICIES.add, _POLICIES.names, _POLICIES.make
explain_policy, use_by_default = _POLICIES.explain, _POLICIES.use_by_default


def default_policy() -> str:
    """Return the name of the policy where none is given."""
    return _POLICIES.default
