"""The eviction queue of `adaptive`: leaves by class; the one that is worth least goes first.

Of one class that is the oldest or the newest leaf (`Hazards`). What each class offers is written
down, with the time until which it holds, and worked out anew only if a leaf came to the class, an
age came into its next bin, or the tables changed. If leaves only went, what is written down is at
most what the class would offer now, so it is looked at again only when it is the least of all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from math import inf, nextafter
from typing import Any, TypeAlias

from prefixkv.cache.eviction.hazards import EDGES_S, Hazards
from prefixkv.cache.eviction.queues import LeafOrders, Rank, forget
from prefixkv.cache.node import Node

Entry: TypeAlias = tuple[int, Node, "LeastWorth", int]
"""(tick, leaf, queue, class)."""

MARGIN_S = 1e-6
"""An age is worked out anew so long before it is in its next bin: clocks round."""

AT_ONCE = -inf
WITH_A_CLOCK = nextafter(0.0, 1.0)
"""The first time there is."""

ENDS_S = (*EDGES_S, inf)
"""Where each bin ends."""


class Line:
    """The leaves of one class by tick. Most come in order; of those that do not, two heaps."""

    __slots__ = ("in_order", "newest", "oldest")

    def __init__(self) -> None:
        self.in_order: deque[Entry] = deque()
        self.oldest: list[Entry] = []
        self.newest: list[tuple[int, Entry]] = []

    def add(self, entry: Entry) -> None:
        """O(1) in order, else O(log leaves)."""
        in_order = self.in_order
        while in_order and (last := in_order[-1])[0] >= entry[0] and last[1].entry is not last:
            in_order.pop()
        if not in_order or in_order[-1][0] < entry[0]:
            in_order.append(entry)
        else:
            heappush(self.oldest, entry)
            heappush(self.newest, (-entry[0], entry))

    def first(self) -> Entry | None:
        """The oldest; drops what is dead before it."""
        if not self.oldest:  # as a rule
            in_order = self.in_order
            while in_order:
                entry = in_order[0]
                node = entry[1]
                if node.entry is entry and not node.lock_ref and not node.children:
                    break
                _stands(entry)
                in_order.popleft()
            return in_order[0] if in_order else None
        while (in_order := self.in_order) and not _stands(in_order[0]):
            in_order.popleft()
        while (heap := self.oldest) and not _stands(heap[0]):
            heappop(heap)
        if in_order and heap:
            return min(in_order[0], heap[0])
        return in_order[0] if in_order else heap[0] if heap else None

    def last(self) -> Entry | None:
        """The newest; drops what is dead behind it."""
        if not self.newest:  # as a rule
            in_order = self.in_order
            while in_order:
                entry = in_order[-1]
                node = entry[1]
                if node.entry is entry and not node.lock_ref and not node.children:
                    break
                _stands(entry)
                in_order.pop()
            return in_order[-1] if in_order else None
        while (in_order := self.in_order) and not _stands(in_order[-1]):
            in_order.pop()
        while (heap := self.newest) and not _stands(heap[0][1]):
            heappop(heap)
        if in_order and heap:
            return max(in_order[-1], heap[0][1])
        return in_order[-1] if in_order else heap[0][1] if heap else None

    def sweep(self) -> None:
        """Drop all that is dead."""
        self.in_order = deque(entry for entry in self.in_order if entry[1].entry is entry)
        self.oldest = [entry for entry in self.oldest if entry[1].entry is entry]
        heapify(self.oldest)
        self.newest = [(-entry[0], entry) for entry in self.oldest]
        heapify(self.newest)


def _stands(entry: Entry) -> bool:
    """Whether this is an evictable leaf's place still."""
    node = entry[1]
    if node.entry is not entry:
        return False
    if node.lock_ref or node.children:
        node.entry = None  # it is added again when it is an evictable leaf again
        entry[2].lost_one()
        return False
    return True


class LeastWorth(LeafOrders):
    """See the module's text. A mark is (tick, anything, now_s, ...).

    Args:
        class_of: the class of a leaf.
    """

    def __init__(self, hazards: Hazards, class_of: Callable[[Node], int]) -> None:
        super().__init__(0)
        num_kinds = len(hazards.worth)
        self._hazards = hazards
        self._class_of = class_of
        self._lines = [Line() for _ in range(num_kinds)]
        self._worth = hazards.worth
        # What each class offers: (worth, whether it is the newest, +-tick, class), and of whom.
        self._offers: list[tuple[float, bool, int, int]] = [
            (inf, True, 0, kind) for kind in range(num_kinds)
        ]
        self._offered: list[Entry | None] = [None] * num_kinds
        self._least = [inf] * num_kinds  # the worths of the offers
        self._holds_s = [inf] * num_kinds  # until when
        self._all_hold_s = inf

    def add(self, leaf: Node) -> None:
        mark = leaf.mark
        kind, tick, old = self._class_of(leaf), mark[0], leaf.entry
        if old is not None:
            if old[2] is self and old[0] == tick and old[3] == kind:
                return
            forget(leaf)
        leaf.entry = entry = (tick, leaf, self, kind)
        self._num_entries += 1
        self._lines[kind].add(entry)
        # Where worth only falls, a newer leaf than the oldest changes nothing.
        offered = self._offered[kind]
        if offered is None or offered[0] > tick or self._hazards.peak[kind]:
            self._holds_s[kind] = self._all_hold_s = AT_ONCE
        if self._batch_s is not None:
            heappush(self._late, (self.rank_at(leaf, self._batch_s), leaf, entry))

    def choose(self, now_s: float) -> Node | None:
        if self._hazards.worth is not self._worth:
            self._worth = self._hazards.worth
            self._holds_s = [AT_ONCE] * len(self._lines)
            self._all_hold_s = AT_ONCE
        all_hold_s = self._all_hold_s
        if now_s >= all_hold_s:
            for kind, holds_s in enumerate(self._holds_s):
                if now_s >= holds_s:
                    self._look(kind, now_s)
            all_hold_s = min(self._holds_s)
        worths, offered = self._least, self._offered
        while True:
            least = min(worths)
            # Equal ones are rare, but as long as nothing was learnt.
            kind = worths.index(least) if worths.count(least) == 1 else min(self._offers)[3]
            entry = offered[kind]
            if entry is None:
                node = None
                break
            node = entry[1]
            if node.entry is entry and not node.lock_ref and not node.children:
                break
            self._look(kind, now_s)
            if self._holds_s[kind] < all_hold_s:
                all_hold_s = self._holds_s[kind]
        self._all_hold_s = all_hold_s
        return node

    def _look(self, kind: int, now_s: float) -> None:
        """Work out what a class offers."""
        line = self._lines[kind]
        oldest = line.first()
        if oldest is None:
            self._offers[kind] = (inf, True, 0, kind)
            self._least[kind] = self._holds_s[kind] = inf
            self._offered[kind] = None
            return
        worth, peak = self._worth[kind], self._hazards.peak[kind]
        used_s: float = oldest[1].mark[2]
        place = bisect_right(EDGES_S, now_s - used_s)
        holds_s = used_s + ENDS_S[place]
        offered, least, is_newest, key = oldest, worth[place], False, oldest[0]
        if peak and now_s > 0:
            newest = line.last()
            assert newest is not None
            if newest is not oldest:
                used_s = newest[1].mark[2]
                at = bisect_right(EDGES_S, now_s - used_s)
                if used_s + ENDS_S[at] < holds_s:
                    holds_s = used_s + ENDS_S[at]
            else:
                at = place
            if at < peak and (place < peak or worth[at] < least):
                offered, least, is_newest, key = newest, worth[at], True, -newest[0]
        self._offers[kind] = (least, is_newest, key, kind)
        self._least[kind] = least
        self._offered[kind] = offered
        # Without a clock the oldest goes, and ages count from the first time that is given.
        self._holds_s[kind] = holds_s - MARGIN_S if now_s > 0 else WITH_A_CLOCK

    def rank_at(self, leaf: Node, now_s: float) -> Rank:
        tick, _, used_s, *_ = leaf.mark
        kind, hazards = self._class_of(leaf), self._hazards
        place = bisect_right(EDGES_S, now_s - used_s)
        # Where worth rises with age the newest is worth least. Without a clock nothing has an age,
        # so the oldest goes.
        rises = now_s > 0 and place < hazards.peak[kind]
        return (hazards.worth[kind][place], rises, -tick if rises else tick)

    def lost_one(self) -> None:
        """As `bury`, in the middle of a look at a line: sweeps nothing."""
        self._num_entries -= 1
        self._num_dead += 1

    def _entries(self) -> Iterable[tuple[Any, ...]]:
        return (entry for line in self._lines for part in (line.in_order, line.oldest)
                for entry in part)  # fmt: skip

    def _sweep(self) -> None:
        for line in self._lines:
            line.sweep()
        self._num_dead = 0
