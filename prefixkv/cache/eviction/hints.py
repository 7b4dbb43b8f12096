"""Hints about sessions, under every policy: which of a namespace's leaves goes first.

The policy alone says whose turn it is: each leaf has a place in its order. When the place of a leaf
comes up, its namespace loses pages, and hints say which. Leaves of ended sessions go first, then
those of which nothing was said, in the policy's order, then those of sessions that return, the one
that is due last first. Once as many pages went as the leaf of that place has, it takes the place of
the leaf that went for it. So a hint takes no page of another namespace: a client that lies loses
its own hits, and is to others as one with more misses. Where two places become equal, or nodes
merge between single steps, a batch of evictions may take other pages than single steps.

A hint is about one use, and is kept by its tick: the next use there makes it void. A session that
is overdue counts as one of which nothing was said.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple, TypeAlias

from prefixkv.cache.eviction.policy import Policy
from prefixkv.cache.eviction.queues import EvictionQueue, forget
from prefixkv.cache.node import DEAD, Root, TreeNode
from prefixkv.paging import MAX_INDEX

MOST_HINTS: Final = 1 << 16
"""Limit for remembered hints; beyond it the oldest are forgotten."""

MOST_NAMESPACES: Final = 1 << 12
"""Limit for namespaces in the tree with hints; beyond it hints of others are not taken."""

ENDED: Final = 0.0
"""Stands for the time at which an ended session is due."""


class Hints:
    """All hints in force: by the tick of the use that each is about, when the session is due."""

    def __init__(self) -> None:
        self.due_s: dict[int, float] = {}  # in order of insertion
        self.namespaces: set[Hashable] = set()  # that hints were said of
        self.current: HintedQueue | None = None  # the last that was made

    def queue(self, policy: Policy, queue: EvictionQueue) -> EvictionQueue:
        self.current = HintedQueue(policy, self, queue)
        return self.current

    def note(self, tick: int, root: Root, returns_s: float, now_s: float) -> None:
        """Note that the session whose last use has this tick returns within `returns_s`; with 0,
        that it has ended. O(1), for the first hint of a namespace O(its nodes)."""
        if root.namespace not in self.namespaces:
            if len(self.namespaces) >= MOST_NAMESPACES:
                return
            self.namespaces.add(root.namespace)
            assert self.current is not None
            self.current.take_over(root)
        self.due_s.pop(tick, None)
        self.due_s[tick] = now_s + returns_s if returns_s > 0 else ENDED
        if len(self.due_s) > MOST_HINTS:
            del self.due_s[next(iter(self.due_s))]

    def forget(self, namespace: Hashable) -> None:
        self.namespaces.discard(namespace)
        assert self.current is not None
        self.current.spaces.pop(namespace, None)

    def clear(self) -> None:
        self.due_s.clear()
        self.namespaces.clear()


class Place(TreeNode):
    """A place in the policy's order, in the form of a leaf: that of `leaf` since its use `tick`."""

    __slots__ = ("leaf", "space", "tick")

    def __init__(self, leaf: TreeNode, space: Space, tick: int) -> None:
        super().__init__(b"", b"", leaf.end, None)
        self.leaf, self.space, self.tick = leaf, space, tick
        self.mark = leaf.mark


Entry: TypeAlias = tuple[tuple[float, int], TreeNode, "HintedQueue"]


@dataclass(slots=True, eq=False)
class Space:
    """The leaves of a namespace with hints."""

    unsaid: EvictionQueue
    ended: list[Entry] = field(default_factory=list)  # heaps, lazily
    returning: list[Entry] = field(default_factory=list)
    places: dict[TreeNode, Place] = field(default_factory=dict)
    most_entries: int = 64

    def first(self, now_s: float) -> TreeNode | None:
        return _first(self.ended) or self.unsaid.first(now_s) or _first(self.returning)

    def sweep(self) -> None:
        """Drop what is dead, when that may be half of all. Amortised O(1)."""
        if max(map(len, (self.places, self.ended, self.returning))) > self.most_entries:
            for leaf in [one for one, place in self.places.items() if not _stands(one)]:
                forget(self.places.pop(leaf))
            most = max(len(self.places), _sweep(self.ended), _sweep(self.returning))
            self.most_entries = max(64, 2 * most)


class Debt(NamedTuple):
    """A place that has come up, while others go for its leaf."""

    place: Place
    num_pages: int  # that are still to go
    victim: TreeNode
    start: int  # of the victim, and what it was when it was offered
    end: int
    own: TreeNode  # the place of the last that went


class HintedQueue:
    """The policy's queue, which has the leaves so far, and the order that hints make of it.

    A leaf of a namespace without hints stands in the policy's queue itself. For another its place
    stands there, and the leaf in its `Space`.
    """

    def __init__(self, policy: Policy, hints: Hints, queue: EvictionQueue) -> None:
        self._policy, self._hints, self._queue = policy, hints, queue
        self.spaces: dict[Hashable, Space] = {}
        self._due: list[tuple[float, TreeNode, Entry]] = []  # that return: a heap, lazily
        self._most_due = 64
        self._debt: Debt | None = None
        self._now_s = 0.0
        self.most_pages = MAX_INDEX

    def take_over(self, root: Root) -> None:
        """Take the leaves of a namespace from the policy's queue."""
        nodes: list[TreeNode] = [root]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if _stands(node):
                self.add(node)

    def add(self, leaf: TreeNode) -> None:
        if isinstance(leaf, Place):  # of a queue before, in which a user's policy has raised
            leaf = leaf.leaf
        namespace = _namespace(leaf)
        if namespace not in self._hints.namespaces:
            self._queue.add(leaf)
            return
        if (space := self.spaces.get(namespace)) is None:
            space = self.spaces[namespace] = Space(self._policy.make_queue())
        # 1. Its place. One that it has taken over since its last use stays.
        tick, place = self._policy.last_tick(leaf.mark), space.places.get(leaf)
        if place is None or place.tick != tick:
            if place is not None:
                forget(place)
            space.places[leaf] = place = Place(leaf, space, tick)
        elif self._policy.last_tick(place.mark) == tick:
            place.mark, place.end = leaf.mark, leaf.end
        self._queue.add(place)
        if (current := self._hints.current) is not self and current is not None:
            current.add(leaf)  # the user's policy raised, so there is another queue
            return
        # 2. The leaf itself, by what was said of it.
        due_s = self._hints.due_s.get(tick)
        if due_s is not None and due_s != ENDED and due_s < self._now_s:
            due_s = None
        if due_s is None:
            space.unsaid.add(leaf)
            space.sweep()
            return
        key = -due_s, tick
        if leaf.entry is not None:
            if leaf.entry[2] is self and leaf.entry[0] == key:
                return
            forget(leaf)
        leaf.entry = entry = (key, leaf, self)
        heappush(space.ended if due_s == ENDED else space.returning, entry)
        if due_s != ENDED:
            heappush(self._due, (due_s, leaf, entry))
            if len(self._due) > self._most_due:
                self._most_due = max(64, 2 * _sweep(self._due))
        space.sweep()

    def first(self, now_s: float) -> TreeNode | None:
        self._end_promises(now_s)
        self._pay()
        self.most_pages = MAX_INDEX
        while isinstance(place := self._queue.first(now_s), Place):
            leaf, space = place.leaf, place.space
            stands = _stands(leaf) and space.places.get(leaf) is place
            is_wanted = stands and leaf.wants and leaf.deepest_want(leaf.end) == leaf.end
            if stands and not is_wanted:
                return self._victim(place, now_s)
            # Lazily: it may be gone or held by now. The tree puts a wanted one last.
            forget(place)
            if space.places.get(leaf) is place:
                del space.places[leaf]
            if is_wanted:
                return leaf
        return place

    def _victim(self, place: Place, now_s: float) -> TreeNode:
        leaf, debt = place.leaf, self._debt
        victim = place.space.first(now_s)
        assert victim is not None
        self.most_pages = _pages_of_last_use(victim)
        own = place.space.places.get(victim, victim)
        if debt is not None and debt.place is place:  # others went for a part of it
            num_pages, own = debt.num_pages, debt.own if victim is leaf else own
        elif victim is leaf:
            self._debt = None
            return leaf
        else:
            num_pages = _pages_of_last_use(leaf)
        self._debt = Debt(place, num_pages, victim, victim.start, victim.end, own)
        self.most_pages = min(num_pages, self.most_pages)
        return victim

    def _pay(self) -> None:
        """Count the pages that went instead of a leaf's. If that were enough, the leaf takes the
        place of the last that went."""
        if (debt := self._debt) is None:
            return
        end = debt.start if debt.victim.end == DEAD else debt.victim.end
        num_pages = debt.num_pages - max(0, debt.end - end)
        self._debt = debt._replace(num_pages=num_pages, end=end) if num_pages > 0 else None
        if num_pages <= 0:
            place = debt.place
            place.mark, place.end = debt.own.mark, debt.own.end
            self._queue.add(place)

    def count_dead(self) -> None:
        """The entry of a leaf has died. It is dropped when it comes first, or in a sweep."""

    def expect(self, num_leaves: int, now_s: float) -> None:
        self._end_promises(now_s)
        self._pay()  # before the pages that went may be inserted again
        self._queue.expect(num_leaves, now_s)

    def broken_laws(self) -> list[str]:
        laws = self._queue.broken_laws()
        for space in self.spaces.values():
            laws += space.unsaid.broken_laws()
            laws += [
                "each leaf of a namespace with hints has a place in the policy's order"
                for leaf in space.places
                if _stands(leaf) and space.places[leaf].entry is None
            ]
        return laws

    def _end_promises(self, now_s: float) -> None:
        """Of sessions that are overdue nothing is said any more."""
        self._now_s = max(self._now_s, now_s)
        while self._due and self._due[0][0] < self._now_s:
            _, leaf, entry = heappop(self._due)
            # Lazily: the leaf may be gone, held, or used again since. Said again, it stays.
            if leaf.entry is entry and _stands(leaf):
                self.add(leaf)


def _stands(leaf: TreeNode) -> bool:
    return leaf.entry is not None and not leaf.lock_ref and not leaf.children


def _pages_of_last_use(leaf: TreeNode) -> int:
    """Pages of a leaf above which another use counts, about which something else may be said."""
    return leaf.end - (leaf.steps[-1][0] if leaf.steps else leaf.start)


def _sweep(heap: list[Any]) -> int:
    heap[:] = [one for one in heap if one[1].entry is one or one[1].entry is one[-1]]
    heapify(heap)
    return len(heap)


def _first(heap: list[Entry]) -> TreeNode | None:
    while heap:
        leaf = heap[0][1]
        if leaf.entry is heap[0] and not leaf.lock_ref and not leaf.children:
            return leaf
        if leaf.entry is heap[0]:  # it is added again when it is an evictable leaf again
            leaf.entry = None
        heappop(heap)
    return None


def _namespace(node: TreeNode) -> Hashable:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node.namespace
