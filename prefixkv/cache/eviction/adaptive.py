"""The adaptive policy, the default: it learns from the cache's own traffic which pages come back.

Pages fall into classes by the number of their uses and by how much was new with the last use. Each
class has counts of when uses are followed by a return (`hazards.py`). They give a leaf its worth by
class and age. Worth first rises with age, then falls, so a class's least leaf is its oldest or its
newest. Only the end of a path counts a use; from the third turn on its old pages count too. Pages
where paths part have classes of their own, counted by how often paths part there again. Evicted
pages leave ghosts (`ghosts.py`), which show their return. O(1) per use.

Source: Gittins (1979); classes by use count and ghosts as in 2Q (Johnson and Shasha, 1994).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import Annotated, TypeAlias

from msgspec import Meta

from prefixkv.cache.eviction.ghosts import Ghost, GhostPolicy, staircase
from prefixkv.cache.eviction.hazards import Hazards
from prefixkv.cache.eviction.least_worth import LeastWorth
from prefixkv.cache.eviction.policy import EvictionQueue, Use, register_policy
from prefixkv.cache.node import TreeNode
from prefixkv.settings import Count, CountOrZero, check_order

COUNTS = (0, 0, 1, 2, 3, 3, 4)
"""Class by use count: 1, 2, 3, 4 to 5, 6 and more."""

SIZES = 3
"""Classes per use count, by how much was new."""

TRUNK_COUNTS = (0, 0, 0, 1, 1, 1, 2)
"""Class of a trunk by how often paths have parted there: up to 2, 3 to 5, 6 and more times."""

NUM_OWN = (COUNTS[-1] + 1) * SIZES
NUM_KINDS = NUM_OWN + (TRUNK_COUNTS[-1] + 1) * SIZES
"""Classes of the pages of one conversation come first, then those of trunks."""

MOST_TURNS = len(COUNTS) - 1

NO_END = 0
"""`path_pages` of a use that brought nothing of its own: it says nothing about returns."""


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """The kind of a use: turn and size. Equal ones are one object (`TRAITS`)."""

    number: int  # the row of `Hazards` that it is counted in
    turn: int  # turn of its conversation, at most `MOST_TURNS`
    kinds: tuple[int, ...]  # classes the row counts for: of its new pages, of those before them
    classes: tuple[int, ...]  # by visits, at most 6: class of pages that it is the last use of


def _traits(size: int, turn: int) -> Traits:
    turn = min(turn, MOST_TURNS)
    new = kind_of(min(turn, 2), size)
    classes = [kind_of(visits, size) for visits in range(len(COUNTS))]
    if turn > 1:
        classes[1] = classes[2]  # the new end of a next turn
    kinds = (new, kind_of(turn, size)) if turn > 2 else (new,)
    return Traits(size * MOST_TURNS + turn - 1, turn, kinds, tuple(classes))


def kind_of(visits: int, size: int) -> int:
    """Return the class of pages with this many visits, the last of them of this size class."""
    return COUNTS[min(visits, MOST_TURNS)] * SIZES + size


TRAITS = [[_traits(size, turn) for size in range(SIZES)] for turn in range(MOST_TURNS + 1)]
"""By turn, then by size. Row 0 is not used."""

TRAITS += TRAITS[-1:]  # the turn after the last is the last again

Trunk: TypeAlias = tuple[int, int, int, int]
"""(pages, times, row, class): the first pages of a path, where it parted from others, and how often
paths have parted there, at most `MOST_TURNS`."""

NO_TRUNK: Trunk = (0, 0, 0, 0)


def trunk_of(pages: int, length: int, times: int) -> Trunk:
    """Return the trunk of `pages` pages from which paths parted `times` times."""
    kind = NUM_OWN + SIZES * length + TRUNK_COUNTS[times]
    return pages, times, SIZES * MOST_TURNS + kind - NUM_OWN, kind


ROWS = [
    *(TRAITS[turn][size].kinds for size in range(SIZES) for turn in range(1, MOST_TURNS + 1)),
    *((kind,) for kind in range(NUM_OWN, NUM_KINDS)),
]
"""The classes that each row counts for: by `Traits.number`, then a row per class of trunks."""

NO_GHOSTS: list[Ghost] = []
"""Shared and never written to."""


Seen: TypeAlias = tuple[int, int, float, Traits, int, Trunk]
"""A mark: (tick, visits, now_s, traits, path_pages, trunk). All but the visits are the last use's;
visits add up, and are negative where others are taken off. A plain tuple: marks are made all the
time.
"""


def class_of(leaf: TreeNode) -> int:
    """Return the class of a leaf's last page: its trunk's, or by visits and its last use."""
    _, visits, _, of_use, _, trunk = leaf.mark
    # Within a trunk the class is the trunk's; below it counts by how often it was visited.
    if leaf.end <= trunk[0]:
        return trunk[3]  # type: ignore[no-any-return]
    return of_use.classes[visits if visits < MOST_TURNS else MOST_TURNS]  # type: ignore[no-any-return]


@register_policy
@dataclass(eq=False, repr=False)
class Adaptive(GhostPolicy):
    """The default policy: the least worth goes first, as learnt from the cache's own traffic.

    Args:
        short_tokens, long_tokens: the two bounds between the three classes of how much was new.
        ghosts, block_tokens, stride_blocks: see `GhostPolicy`.
        trust, period, half_life_s: see `Hazards`.

    Raises ConfigError: a setting below its bound.
    """

    name = "adaptive"

    short_tokens: CountOrZero = 4 * 512
    long_tokens: CountOrZero = 16 * 512
    trust: Annotated[float, Meta(ge=1)] = 10.0
    period: Count = 100
    half_life_s: Annotated[float, Meta(ge=1)] = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "short_tokens", "long_tokens")
        groups = [list(range(first, first + SIZES)) for first in range(0, NUM_KINDS, SIZES)]
        self.hazards = Hazards(groups, self.trust, self.period, self.half_life_s, ROWS, NUM_OWN)

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        super().bind(page_size, pool_pages)
        self._short_pages = self.short_tokens // self._page_tokens
        self._long_pages = self.long_tokens // self._page_tokens

    # --- uses -------------------------------------------------------------------------------------

    def mark(self, use: Use) -> Seen:
        of_use, end, trunk = self._begin(use, None)
        return use.tick, 1 if use.visit else 0, use.now_s, of_use, end, trunk

    def marks_of_new(self, use: Use, found: list[Ghost]) -> Sequence[tuple[int, Seen]]:
        """Return the marks (visits, traits, trunk); `found` are the ghosts of the new pages."""
        of_use, end, trunk = self._begin(use, found)
        tick, now_s = use.tick, use.now_s
        # 1. Nothing is remembered: the new pages begin with one visit. If the request was counted
        #    before, the old pages had that visit already, so it is subtracted above.
        if not found:
            above = (tick, 0 if use.visit else -1, now_s, of_use, end, trunk)
            return (use.old_pages, above), (use.num_pages, (tick, 1, now_s, of_use, end, trunk))
        # 2. Some pages come back: they go on from the visits of their ghosts.
        totals = [(depth, history[1] + 1) for history, depth, *_ in found]
        steps = staircase(use, totals, 1, 0, sub)
        if use.old_pages < trunk[0] < use.num_pages and trunk[0] not in dict(steps):
            # A trunk that was gone: the class of pages changes at its end, so a step has to.
            steps = sorted([*steps, (trunk[0], 0)])
        return [(depth, (tick, visits, now_s, of_use, end, trunk)) for depth, visits in steps]

    def _begin(self, use: Use, found: list[Ghost] | None) -> tuple[Traits, int, Trunk]:
        """Count the first use of a request; return its traits, where its path ends, and its trunk.
        `found`: ghosts beyond its old pages; None if they were not looked up."""
        before: Seen | None = use.before
        old_pages, now_s = use.old_pages, use.now_s
        # 1. Not the first use of its request: the request was counted, and this is the same turn.
        if before is not None:
            if not use.visit:
                has_end = before[4] != NO_END or use.num_pages > old_pages
                return before[3], use.num_pages if has_end else NO_END, before[5]
            if before[4] == old_pages and found is None:
                # 2. The usual next turn: it goes on where the last path there ended, so what lies
                # beyond counts as new. An older, longer path may have left ghosts there: too rare
                # to look for them at each next turn.
                found = NO_GHOSTS
                self.remembered.last = use.data, old_pages, found
        if found is None:
            found = self.remembered.find(use.data, old_pages)
        # 3. Else it may continue a path that was evicted.
        last, new_pages = self.goes_on(use, found)
        size = (new_pages > self._short_pages) + (new_pages > self._long_pages)
        hazards, turn, trunk = self.hazards, 1, NO_TRUNK
        # A return ends the start that it goes on from, and begins another, one turn later. A use
        # without new pages begins none. One that leaves a known path has a trunk.
        if last is not None:
            was: Traits = last[3]
            hazards.returned(was.number, last[2], now_s)
            turn, trunk = was.turn + 1, last[5]
        elif not new_pages:
            return TRAITS[1][size], NO_END, NO_TRUNK
        elif known := len(use.data) // self._page_bytes - new_pages:
            trunk = self._parts(found[-1][0] if found else before, known, now_s)
        of_use = TRAITS[turn][size]
        hazards.start(of_use.number, now_s)
        return of_use, use.num_pages, trunk

    def _parts(self, history: Seen | None, known: int, now_s: float) -> Trunk:
        """Count that a path parts from others after its `known` pages, and return their trunk.

        `history` is of the last known page. No path ends there, so trunks have rows of their own.
        """
        times = 1
        # Paths have parted at or below this place before: this is a return to that trunk.
        if history is not None and known <= history[5][0]:
            times = min(history[5][1] + 1, MOST_TURNS)
            self.hazards.returned(history[5][2], history[2], now_s)
        length = (known > self._short_pages) + (known > self._long_pages)
        trunk = trunk_of(known, length, times)
        self.hazards.start(trunk[2], now_s)
        return trunk

    def fold(self, upper: Seen, lower: Seen) -> Seen:
        """Take all of the later mark, with the visits of both."""
        if upper[0] > lower[0]:
            tick, visits, now_s, of_use, end, trunk = upper
            return tick, visits + lower[1], now_s, of_use, end, trunk
        tick, visits, now_s, of_use, end, trunk = lower
        return tick, upper[1] + visits, now_s, of_use, end, trunk

    # --- evictions --------------------------------------------------------------------------------

    def make_queue(self) -> EvictionQueue:
        return LeastWorth(self.hazards, class_of)

    def floor(self, steps: Sequence[tuple[int, Seen]], mark: Seen, low: int) -> int | None:
        """Return the first step from below where the class or the last use changes."""
        tick, visits, _, of_use, _, (trunk_pages, *_) = mark
        classes = of_use.classes
        kind = classes[visits if visits < MOST_TURNS else MOST_TURNS]
        # Above a step another use may be the last, the trunk may begin, or visits may give another
        # class. Going on to `low` is enough.
        for depth, above in reversed(steps):
            visits += above[1]
            if (
                above[0] > tick
                or depth <= trunk_pages
                or classes[visits if visits < MOST_TURNS else MOST_TURNS] != kind
                or depth <= low
            ):
                return depth
        return None

    def evicted(self, node: TreeNode, num_pages: int) -> None:
        """Leave ghosts of the pages. Path ends that are forgotten for them count as losses."""
        hazards = self.hazards
        for ghost in self.add_ghosts(node, num_pages):
            last: Seen = ghost[0]
            hazards.lost(last[3].number, last[2])

    def work_ahead(self) -> None:
        if self.hazards.due <= 0:
            self.hazards.work_out()

    def reset(self) -> None:
        super().reset()
        self.hazards.reset()

    def broken_laws(self) -> list[str]:
        return [*super().broken_laws(), *self.hazards.broken_laws()]
