"""The eviction queue of `adaptive`: leaves by class; the one that is worth least goes first.

Within a class that is the oldest or the newest leaf (`Hazards`). The offer of each class is kept
together with the time until which it holds. It is worked out again only if a leaf came to the
class, an age came into its next bin, or the tables changed. If leaves only went, the kept offer is
at most what the class would offer now, so it is looked at again only when it is the least of all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf, nextafter
from typing import TypeAlias

from prefixkv.cache.eviction.hazards import EDGES_S, Hazards
from prefixkv.cache.eviction.policy import forget
from prefixkv.cache.node import TreeNode
from prefixkv.paging import MAX_INDEX

Entry: TypeAlias = tuple[int, TreeNode, "LeastWorth", int]
"""(tick, leaf, queue, class)."""

MARGIN_S = 1e-6
"""Seconds before the end of its bin at which an age is worked out again: clocks round."""

AT_ONCE = -inf
WITH_A_CLOCK = nextafter(0.0, 1.0)
"""The least time above 0: an offer made without a clock holds until the first time is given."""

NO_CLASS = -1

ENDS_S = (*EDGES_S, inf)
"""End of each age bin, in seconds."""


class Line:
    """The leaves of one class by tick. Those that do not come in order are in two heaps."""

    __slots__ = ("in_order", "newest", "oldest")

    def __init__(self) -> None:
        # Rising ticks, so both ends are at hand.
        self.in_order: deque[Entry] = deque()
        # Leaves that came out of order, each in both: a pop from one leaves a dead item in the
        # other.
        self.oldest: list[Entry] = []
        self.newest: list[tuple[int, Entry]] = []

    def add(self, entry: Entry) -> None:
        """Add an entry. O(1) in order, else O(log leaves)."""
        in_order = self.in_order
        # Dead entries at the end would push a living one out of order for nothing.
        while in_order and (last := in_order[-1])[0] >= entry[0] and last[1].entry is not last:
            in_order.pop()
        if not in_order or in_order[-1][0] < entry[0]:
            in_order.append(entry)
        else:
            heappush(self.oldest, entry)
            heappush(self.newest, (-entry[0], entry))

    def first(self) -> Entry | None:
        """Return the oldest entry, or None. Drops dead entries before it."""
        in_order, heap = self.in_order, self.oldest
        while in_order and not _stands(in_order[0]):
            in_order.popleft()
        while heap and not _stands(heap[0]):
            heappop(heap)
        if in_order and heap:
            return min(in_order[0], heap[0])
        return in_order[0] if in_order else heap[0] if heap else None

    def last(self) -> Entry | None:
        """Return the newest entry, or None. Drops dead entries behind it."""
        in_order, heap = self.in_order, self.newest
        while in_order and not _stands(in_order[-1]):
            in_order.pop()
        while heap and not _stands(heap[0][1]):
            heappop(heap)
        if in_order and heap:
            return max(in_order[-1], heap[0][1])
        return in_order[-1] if in_order else heap[0][1] if heap else None

    def sweep(self) -> None:
        self.in_order = deque(entry for entry in self.in_order if entry[1].entry is entry)
        self.oldest = [entry for entry in self.oldest if entry[1].entry is entry]
        heapify(self.oldest)
        self.newest = [(-entry[0], entry) for entry in self.oldest]
        heapify(self.newest)


def _stands(entry: Entry) -> bool:
    """True if an entry is still the place of an evictable leaf; if it just ended, count it dead."""
    node = entry[1]
    if node.entry is not entry:
        return False
    if node.lock_ref or node.children:
        # Its entry dies here. The tree adds it again when it is an evictable leaf again.
        node.entry = None
        entry[2].count_dead_unswept()
        return False
    return True


class LeastWorth:
    """A line of leaves, and an offer, per class; a leaf's entry is (tick, leaf, queue, class).
    Marks are (tick, anything, now_s, ...).

    `class_of` returns the class of a leaf.
    """

    most_pages = MAX_INDEX

    def __init__(self, hazards: Hazards, class_of: Callable[[TreeNode], int]) -> None:
        num_kinds = len(hazards.worth)
        self._hazards = hazards
        self._class_of = class_of
        self._num_entries = self._num_dead = 0  # living ones, and others
        self._lines = [Line() for _ in range(num_kinds)]
        self._worth = hazards.worth
        # The offer of each class: (worth, True if it is the newest leaf, +-tick, class), the least
        # goes first. An empty class offers infinity.
        self._offers: list[tuple[float, bool, int, int]] = [
            (inf, True, 0, kind) for kind in range(num_kinds)
        ]
        # The entry that each class offers, and, for a quick search, the worths by themselves.
        self._offered: list[Entry | None] = [None] * num_kinds
        self._least = [inf] * num_kinds
        # The times until which each offer holds, and the least of them at most.
        self._holds_s = [inf] * num_kinds
        self._all_hold_s = inf
        self._lone = NO_CLASS  # the only class that offers the least, if known

    def add(self, leaf: TreeNode) -> None:
        """Add a leaf to the line of its class, or move it there. O(1) as a rule."""
        mark = leaf.mark
        kind, tick, old = self._class_of(leaf), mark[0], leaf.entry
        if old is not None:
            if old[2] is self and old[0] == tick and old[3] == kind:
                return
            forget(leaf)
        leaf.entry = entry = (tick, leaf, self, kind)
        self._num_entries += 1
        self._lines[kind].add(entry)
        # Where the oldest leaf is the offer, a newer one is not worth less: where worth only falls
        # with age, or where it begins with as much.
        offered = self._offered[kind]
        if (
            offered is None
            or offered[0] > tick
            or self._offers[kind][1]
            or (self._hazards.peak[kind] and self._worth[kind][0] < self._least[kind])
        ):
            self._holds_s[kind] = self._all_hold_s = AT_ONCE

    def first(self, now_s: float) -> TreeNode | None:
        """Return the leaf that is worth least. O(classes), and O(1) per class to look at again."""
        # 1. New tables: no offer holds any more. `Hazards` makes new lists, so identity is enough.
        if self._hazards.worth is not self._worth:
            self._worth = self._hazards.worth
            self._holds_s = [AT_ONCE] * len(self._lines)
            self._all_hold_s = AT_ONCE
        # 2. Look again at the classes of which an age may be in another bin.
        if now_s >= self._all_hold_s:
            for kind, holds_s in enumerate(self._holds_s):
                if now_s >= holds_s:
                    self._update_offer(kind, now_s)
            self._all_hold_s = min(self._holds_s)
            self._lone = NO_CLASS
        # 3. Take the least offer. If its leaf has gone since, the class offers at least as much
        #    now: look again at this class alone, and choose again unless it offers as little.
        worths, kind = self._least, self._lone
        while True:
            if kind < 0:
                least = min(worths)
                # Equal worths are rare once something was learnt; then the whole offers decide.
                if worths.count(least) == 1:
                    self._lone = kind = worths.index(least)
                else:
                    kind = min(self._offers)[3]
            entry = self._offered[kind]
            if entry is None:
                return None
            node = entry[1]
            if node.entry is entry and not node.lock_ref and not node.children:
                return node
            least = worths[kind]
            self._update_offer(kind, now_s)
            if self._holds_s[kind] < self._all_hold_s:
                self._all_hold_s = self._holds_s[kind]
            if kind != self._lone or worths[kind] > least:
                self._lone = kind = NO_CLASS

    def _update_offer(self, kind: int, now_s: float) -> None:
        line = self._lines[kind]
        oldest = line.first()
        if oldest is None:
            self._offers[kind] = (inf, True, 0, kind)
            self._least[kind] = self._holds_s[kind] = inf
            self._offered[kind] = None
            return
        # The oldest leaf, and the time at which its age enters the next bin.
        worth, peak = self._worth[kind], self._hazards.peak[kind]
        used_s: float = oldest[1].mark[2]
        place = bisect_right(EDGES_S, now_s - used_s)
        holds_s = used_s + ENDS_S[place]
        offered, least, is_newest, key = oldest, worth[place], False, oldest[0]
        # Where worth rises with age at first, the newest may be worth less than the oldest. If it
        # is the offer, that holds until the first of both ages changes its bin; else until that of
        # the oldest does, since what the newest is worth rises.
        if peak and now_s > 0 and (place < peak or worth[0] < least):
            newest = line.last()
            assert newest is not None
            if newest is not oldest:
                used_s = newest[1].mark[2]
                at = bisect_right(EDGES_S, now_s - used_s)
                end_s = used_s + ENDS_S[at]
            else:
                at, end_s = place, holds_s
            if at < peak and (place < peak or worth[at] < least):
                offered, least, is_newest, key = newest, worth[at], True, -newest[0]
                if end_s < holds_s:
                    holds_s = end_s
        self._offers[kind] = (least, is_newest, key, kind)
        self._least[kind] = least
        self._offered[kind] = offered
        # Without a clock the oldest goes, and ages count from the first time that is given.
        self._holds_s[kind] = holds_s - MARGIN_S if now_s > 0 else WITH_A_CLOCK

    def count_dead(self) -> None:
        """Count a dead entry; sweep when the dead outnumber the living."""
        self._num_entries -= 1
        self._num_dead += 1
        if self._num_dead > 1024 and self._num_dead > self._num_entries:
            for line in self._lines:
                line.sweep()
            self._num_dead = 0

    def count_dead_unswept(self) -> None:
        """Count a dead entry while a line is read: never sweeps, which would replace the line."""
        self._num_entries -= 1
        self._num_dead += 1

    def broken_laws(self) -> list[str]:
        entries = [*chain.from_iterable((*line.in_order, *line.oldest) for line in self._lines)]
        living = sum(entry is entry[1].entry for entry in entries)
        laws = {
            f"the living entries are counted: {living}": living == self._num_entries,
            f"most dead entries are swept: {len(entries) - living}": len(entries) - living
            <= 1 + max(1024, living),
        }
        return [law for law, holds in laws.items() if not holds]
