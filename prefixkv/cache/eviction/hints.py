"""Hints about sessions, under every policy: which of a namespace's leaves goes first.

The policy alone says whose turn it is: each leaf has a place in its order. When the place of a leaf
comes up, its namespace loses pages, and hints say which. Leaves of ended sessions go first, then
those of which nothing was said, in the policy's order, then those of sessions that return, the one
that is due last first. The leaf that was spared takes the place of the pages that went for it. So
the places are those of the pages that there would be without hints. Where one of them comes back,
a hint was wrong: without it nothing would go for it, so it is paid by a page of its own namespace,
at once. So a hint takes no page of another namespace, and a client that lies in every hint loses
its own hits alone. Where two places become equal, or nodes merge between single steps, a batch of
evictions may take other pages than single steps.

Sessions that are parked in host memory go right behind ended ones. A hint is about one use, and is
kept by its tick: the next use there makes it void. A session that is overdue counts as one of which
nothing was said.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, TypeAlias

from prefixkv.cache.eviction.policy import NOTHING_SAID, EvictionQueue, Policy, Said, forget
from prefixkv.cache.node import DEAD, Mark, Packed, Root, TreeNode, root_of
from prefixkv.paging import MAX_INDEX

MOST_HINTS: Final = 1 << 16
"""Limit for remembered hints; beyond it the oldest are forgotten."""

MOST_NAMESPACES: Final = 1 << 12
"""Limit for namespaces in the tree with hints; beyond it hints of others are not taken."""

NOBODY: Final = TreeNode(b"", b"", DEAD, None)
"""The leaf of a void place, so that nothing keeps the tokens of what has left the tree."""


class Hints:
    """All hints in force, by the tick of the use that each is about."""

    current: HintedQueue
    """The last queue that was made."""

    def __init__(self) -> None:
        self.said: dict[int, Said] = {}  # in order of insertion
        self.namespaces: set[Hashable] = set()  # that hints were said of

    def queue(self, policy: Policy, queue: EvictionQueue) -> EvictionQueue:
        self.current = HintedQueue(policy, self, queue)
        return self.current

    def note(self, tick: int, root: Root, said: Said) -> None:
        """Note what was said of the session whose last use has this tick. O(1), for the first hint
        of a namespace O(its nodes)."""
        if root.namespace not in self.namespaces:
            if len(self.namespaces) >= MOST_NAMESPACES:
                return
            self.namespaces.add(root.namespace)
            self.current.take_over(root)
        self.said.pop(tick, None)
        self.said[tick] = said
        if len(self.said) > MOST_HINTS:
            del self.said[next(iter(self.said))]

    def went(self, leaf: TreeNode, num_pages: int) -> None:
        self.current.went(leaf, num_pages)

    def came(self, root: Root, depth: int, above: Packed, data: Packed, num: int) -> None:
        if root.namespace in self.namespaces:
            self.current.came(root.namespace, depth, bytes(above), data, num)

    def goes_first(self, leaf: TreeNode) -> bool:
        return leaf.entry is not None and leaf.entry[2] is self.current and leaf.entry[3]

    def forget(self, namespace: Hashable) -> None:
        self.namespaces.discard(namespace)
        if (space := self.current.spaces.pop(namespace, None)) is not None:
            for leaf in [*space.places]:  # runs that went still name their places
                space.drop(leaf)

    def clear(self) -> None:
        self.said.clear()
        self.namespaces.clear()


class Place(TreeNode):
    """A place in the policy's order, in the form of a leaf. It `stands_for` a number of the last
    pages of `leaf`; 0: it is void.

    A leaf's own place has its history since its last use, `tick`. Those that it has `taken` are
    of pages that went for it.
    """

    __slots__ = ("leaf", "num_taken", "space", "stands_for", "taken", "tick")

    def __init__(
        self, leaf: TreeNode, space: Space, tick: int, mark: Mark, end: int, stands_for: int = 0
    ) -> None:
        super().__init__(b"", b"", end, None)
        self.leaf, self.space, self.tick = leaf, space, tick
        self.mark, self.stands_for, self.num_taken = mark, stands_for, 0
        self.taken: dict[Place, None] = {}  # of `num_taken` pages, in the order in which they were

    def shrink(self, place: Place, num_pages: int) -> None:
        """Take pages from one of the taken places."""
        place.stands_for -= num_pages
        self.num_taken -= num_pages
        if not place.stands_for:
            del self.taken[place]
            place.leaf = NOBODY
            forget(place)


Entry: TypeAlias = tuple[tuple[float, int], TreeNode, "HintedQueue", bool]
"""((-due, tick), leaf, queue, whether it goes first)."""


@dataclass(slots=True, eq=False)
class Space:
    """The leaves of a namespace with hints."""

    namespace: Hashable
    unsaid: EvictionQueue
    going: list[Entry] = field(default_factory=list)  # first; heaps, lazily
    returning: list[Entry] = field(default_factory=list)
    places: dict[TreeNode, Place] = field(default_factory=dict)
    most_entries: int = 64

    def first(self, now_s: float) -> TreeNode | None:
        return _first(self.going) or self.unsaid.first(now_s) or _first(self.returning)

    def sweep(self) -> None:
        """Drop what is dead, when that may be half of all. Amortised O(1)."""
        if max(map(len, (self.places, self.going, self.returning))) > self.most_entries:
            for leaf in [one for one in self.places if not _stands(one)]:
                self.drop(leaf)
            most = max(len(self.places), _sweep(self.going), _sweep(self.returning))
            self.most_entries = max(64, 2 * most)

    def drop(self, leaf: TreeNode) -> None:
        """Make the places of a leaf void."""
        if (own := self.places.pop(leaf, None)) is not None:
            for place in (own, *own.taken):
                place.stands_for, place.leaf = 0, NOBODY
                forget(place)


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
        self._turn: tuple[Place, TreeNode] | None = None  # the last: whose it was, and what goes
        # Runs of pages that went: by depth and tokens of the first. Its place, or None where it was
        # its own turn.
        self._gone: dict[int, tuple[Place | None, int]] = {}
        self._owed: list[tuple[Place, int]] = []  # places of pages that came back, and how many
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
        namespace = root_of(leaf).namespace
        if namespace not in self._hints.namespaces:
            self._queue.add(leaf)
            return
        if (space := self.spaces.get(namespace)) is None:
            space = self.spaces[namespace] = Space(namespace, self._policy.make_queue())
        # 1. Its place. Those that it has taken since its last use stay.
        tick, own = self._policy.last_tick(leaf.mark), space.places.get(leaf)
        if own is None or own.tick != tick:
            space.drop(leaf)
            own = space.places[leaf] = Place(leaf, space, tick, leaf.mark, leaf.end)
        self._settle(own)
        if (current := self._hints.current) is not self:
            current.add(leaf)  # the user's policy raised, so there is another queue
            return
        # 2. The leaf itself, by what was said of it.
        said = self._hints.said.get(tick, NOTHING_SAID)
        if said.due_s < self._now_s or leaf.end <= said.keep_pages:
            space.unsaid.add(leaf)
            space.sweep()
            return
        key = -said.due_s, tick
        if leaf.entry is not None:
            if leaf.entry[2] is self and leaf.entry[0] == key and leaf.entry[3] == said.goes_first:
                return
            forget(leaf)
        leaf.entry = entry = (key, leaf, self, said.goes_first)
        heappush(space.going if said.goes_first else space.returning, entry)
        if said.due_s < inf:
            heappush(self._due, (said.due_s, leaf, entry))
            if len(self._due) > self._most_due:
                self._most_due = max(64, 2 * _sweep(self._due))
        space.sweep()

    def _settle(self, own: Place) -> None:
        """Move a leaf's own place to that of its pages for which it has taken none."""
        leaf, mark = own.leaf, own.leaf.mark
        end = leaf.end - own.num_taken
        if end <= leaf.start:
            own.stands_for = 0
            forget(own)
            return
        start = leaf.start
        for depth, step in reversed(leaf.steps or ()):
            if depth < end:
                start = depth
                break
            mark = self._policy.fold(step, mark)
        own.mark, own.end, own.stands_for = mark, end, end - start
        self._queue.add(own)

    def first(self, now_s: float) -> TreeNode | None:
        self._end_promises(now_s)
        self.most_pages, self._turn = MAX_INDEX, None
        while self._owed:
            owing, num_pages = self._owed[-1]
            if owing.stands_for and num_pages and _stands(owing.leaf):
                victim = self._choose(owing, min(num_pages, owing.stands_for), now_s)
                if victim is not None:
                    return victim
            self._owed.pop()
        while isinstance(place := self._queue.first(now_s), Place):
            leaf, stands = place.leaf, _stands(place.leaf)
            is_wanted = stands and leaf.wants and leaf.deepest_want(leaf.end) == leaf.end
            if place.stands_for and stands and not is_wanted:
                return self._choose(place, place.stands_for, now_s)
            # Lazily: it may be gone or held by now. The tree puts a wanted one last.
            forget(place)
            if place.stands_for:
                place.space.drop(leaf)
                if is_wanted:
                    return leaf
        return place

    def _choose(self, place: Place, num_pages: int, now_s: float) -> TreeNode | None:
        """Return the leaf that goes at a place of `num_pages`; None if all are wanted."""
        if (victim := place.space.first(now_s)) is None:
            return None
        self._turn = place, victim
        own = place.space.places[victim]
        their_pages = next(reversed(own.taken), own).stands_for
        pages = _pages_of_last_use(victim)
        if self._hints.goes_first(victim):
            # Down to what is kept for others.
            said = self._hints.said.get(self._policy.last_tick(victim.mark), NOTHING_SAID)
            pages = min(pages, victim.end - said.keep_pages)
        self.most_pages = min(num_pages, pages, their_pages)
        return victim

    def went(self, leaf: TreeNode, num_pages: int) -> None:
        """Note that the last pages of the leaf of `first` go now. The leaf of the place takes their
        place for as many of its pages, if it is another."""
        if self._turn is None or self._turn[1] is not leaf:
            return
        place, run = self._turn[0], None
        space, spared = place.space, place.leaf
        own = space.places[spared]
        if place is not own:
            own.shrink(place, num_pages)
        if self._owed:
            self._owed[-1] = place, self._owed[-1][1] - num_pages
        if leaf is not spared:
            run = self._take(space.places[leaf], own, num_pages)
        page_bytes, at = len(leaf.key) // (leaf.end - leaf.start), leaf.end - num_pages
        begin = (at - leaf.start) * page_bytes
        name = hash((space.namespace, at, bytes(leaf.key[begin : begin + page_bytes])))
        self._gone[name] = run, num_pages
        if len(self._gone) > MOST_HINTS:
            del self._gone[next(iter(self._gone))]

    def _take(self, theirs: Place, own: Place, num_pages: int) -> Place | None:
        """Give a place of the last pages of one leaf to another. Return it if these pages would
        still be there without hints."""
        source = next(reversed(theirs.taken), theirs)
        last = next(reversed(own.taken), None)
        if last is None or last.mark != source.mark:
            last = Place(own.leaf, own.space, own.tick, source.mark, source.end)
            own.taken[last] = None
        last.stands_for += num_pages
        own.num_taken += num_pages
        self._queue.add(last)
        if source is not theirs:
            theirs.shrink(source, num_pages)
        self._settle(own)
        return last if source is theirs else None

    def came(self, namespace: Hashable, depth: int, above: bytes, data: Packed, num: int) -> None:
        """Note that there are `num` new pages from `depth` on, behind the page `above`. Those that
        went at the place of another leaf are to be paid."""
        at, page_bytes = 0, len(data) // num
        while at < num:
            page = bytes(data[at * page_bytes : (at + 1) * page_bytes])
            before = bytes(data[(at - 1) * page_bytes : at * page_bytes]) if at else above
            names = hash((namespace, depth + at, page)), hash((namespace, depth + at, before, ""))
            found = self._gone.pop(names[0], None) or self._gone.pop(names[1], None)
            if found is None:
                return
            place, run = found
            here = min(run, num - at)
            if place is not None and place.stands_for:
                self._owed.append((place, here))
            at += here
            if here < run:  # the rest may come behind it
                self._gone[hash((namespace, depth + num, bytes(data[-page_bytes:]), ""))] = (
                    place, run - here,
                )  # fmt: skip

    def count_dead(self) -> None:
        """The entry of a leaf has died. It is dropped when it comes first, or in a sweep."""

    def broken_laws(self) -> list[str]:
        laws = self._queue.broken_laws()
        for space in self.spaces.values():
            laws += space.unsaid.broken_laws()
            laws += [
                "each leaf of a namespace with hints has a place in the policy's order"
                for leaf in space.places
                if _stands(leaf)
                and space.places[leaf].stands_for
                and space.places[leaf].entry is None
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
