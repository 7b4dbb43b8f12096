"""How soon paths of each class are used again, and what keeping their pages is worth by that.

A start is a use that left pages behind. It ends in a return (the next use goes on where it ended)
or in a loss (its ghost was forgotten). For each class and age bin are counted the starts that
reached the bin, and those that returned in it. A class of which little was seen is taken to be like
its group, a group like all, and all like `UNTAUGHT`, whose worth falls with age: the order of LRU.

Worth is the Gittins index: of all times that a page might be kept from now on, the best ratio of
expected uses to expected seconds of residence. Bins are of equal ratio and reach from seconds to
eight hours, so a large pool is ranked by what was seen as well as a small one.

Only sums, products and quotients, in a fixed order: every machine works out the same.

Source: Gittins, Bandit processes and dynamic allocation indices (1979). Of expected uses and
seconds, both summed up from age 0, the index is the steepest slope from an age to any later one, so
it is read off a convex hull.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

NUM_BINS = 24
"""Age bins; the last has no end."""

EDGES_S = (
    1.5, 2.36, 3.70, 5.82, 9.14, 14.4, 22.6, 35.4, 55.7, 87.5, 137.0, 216.0, 339.0, 533.0, 837.0,
    1315.0, 2066.0, 3246.0, 5100.0, 8013.0, 12_590.0, 19_780.0, 31_080.0,
)  # fmt: skip
"""Where a bin ends and the next begins."""

BEGINS_S = (0.0, *EDGES_S)
LENGTHS_S = (
    *(end - begin for begin, end in zip(BEGINS_S, EDGES_S, strict=False)),
    EDGES_S[-1],
)

UNTAUGHT = tuple(
    min(0.5, length_s / (8 * (begin_s + 60)))
    for begin_s, length_s in zip(BEGINS_S, LENGTHS_S, strict=True)
)
"""How likely a return in each bin is taken to be before anything was seen."""

RESOLUTION = 0.05
"""Starts are counted to this share of their age."""

Counts = list[int]
Chances = list[float]


class Hazards:
    """Counts, and the worths worked out from them now and then. Deterministic; it reads no clock.

    Memory O(classes), and some 300 snapshots of the starts. A start, a return and a loss cost
    O(log bins), working out the worths O(classes x bins).

    Args:
        groups: classes that are alike, one list each; all classes occur once.
        trust: how many observations the chances of its group count as in a class, and the chances
            of all classes in a group. In all classes together `UNTAUGHT` counts five times as many.
        period: after how many starts worths are worked out anew.
    """

    def __init__(self, groups: list[list[int]], trust: float, period: int) -> None:
        self._groups = groups
        self._trust = trust
        self._period = period
        self.reset()

    def reset(self) -> None:
        """Forget all that was seen."""
        num_classes = sum(map(len, self._groups))
        self.now_s = 0.0
        self._num_starts = 0
        self._started = [0] * num_classes
        self._snapshots: list[tuple[float, Counts]] = []  # (time, starts before it), rising
        self._returns = [[0] * NUM_BINS for _ in range(num_classes)]
        self._losses = [[0] * NUM_BINS for _ in range(num_classes)]
        self._work_out()

    # --- what happens -----------------------------------------------------------------------------

    def start(self, kind: int, now_s: float) -> None:
        if not self._snapshots or now_s - self._snapshots[-1][0] >= 1.0:
            self._snapshots.append((now_s, self._started.copy()))
        self._started[kind] += 1
        self.now_s = now_s
        self._num_starts += 1
        if self._num_starts % self._period == 0:
            self._thin_out()
            self._work_out()

    def returned(self, kind: int, age_s: float) -> None:
        self._returns[kind][bisect_right(EDGES_S, age_s)] += 1

    def lost(self, kind: int, age_s: float) -> None:
        self._losses[kind][bisect_right(EDGES_S, age_s)] += 1

    # --- what it says -----------------------------------------------------------------------------

    def _thin_out(self) -> None:
        """Drop snapshots that lie closer together than their age asks for."""
        kept: list[tuple[float, Counts]] = []
        for snapshot in self._snapshots:
            age_s = self.now_s - snapshot[0]
            if not kept or snapshot[0] - kept[-1][0] >= RESOLUTION * age_s:
                kept.append(snapshot)
        self._snapshots = kept

    def _work_out(self) -> None:
        """`worth[kind][bin]`, which rises up to `peak[kind]` and falls from there: a class's least
        is at an end."""
        num_classes = len(self._started)
        entered = self._entered()
        everything = range(num_classes)
        common = _chances(
            _total(entered, everything),
            _total(self._returns, everything),
            UNTAUGHT,
            5 * self._trust,
        )
        self.worth: list[Chances] = [[] for _ in everything]
        self.peak = [0] * num_classes
        for group in self._groups:
            shared = _chances(
                _total(entered, group), _total(self._returns, group), common, self._trust
            )
            for kind in group:
                own = _chances(entered[kind], self._returns[kind], shared, self._trust)
                index = gittins_index(own)
                self.peak[kind] = peak = index.index(max(index))
                self.worth[kind] = rise_and_fall(index, peak)

    def _entered(self) -> list[Counts]:
        """How many starts of each class reached each bin."""
        times_s = [time_s for time_s, _ in self._snapshots]
        never = [0] * len(self._started)
        old_enough = [self._started]
        for begin_s in EDGES_S:
            at = bisect_right(times_s, self.now_s - begin_s)
            old_enough.append(self._snapshots[at - 1][1] if at else never)
        entered: list[Counts] = []
        for kind, (returns, losses) in enumerate(zip(self._returns, self._losses, strict=True)):
            ended, row = 0, []
            for place, started in enumerate(old_enough):
                # Starts are counted to a share of their age, so the difference may be too small; at
                # least those that returned in a bin had reached it.
                row.append(max(started[kind] - ended, returns[place]))
                ended += returns[place] + losses[place]
            entered.append(row)
        return entered


def _chances(
    entered: Counts, returns: Counts, before: Chances | tuple[float, ...], trust: float
) -> Chances:
    """How likely a start returns in a bin it reaches; `before` counts as `trust` observations."""
    return [
        (came_back + trust * chance) / (came + trust)
        for came, came_back, chance in zip(entered, returns, before, strict=True)
    ]  # fmt: skip


def gittins_index(chance: Chances) -> Chances:
    """Of each bin: the best ratio, over how long to keep, of expected uses to expected seconds
    until then. O(bins).

    >>> index = gittins_index([0.1, *[0.0] * (NUM_BINS - 2), 0.5])
    >>> index[0] > index[1] < index[-1]
    True
    """
    still_out, uses, seconds = 1.0, 0.0, 0.0
    points = [(0.0, 0.0)]
    for length_s, likely in zip(LENGTHS_S, chance, strict=True):
        uses += still_out * likely
        seconds += still_out * length_s * (1 - 0.5 * likely)
        still_out *= 1 - likely
        points.append((seconds, uses))
    index = [0.0] * NUM_BINS
    hull = [points[NUM_BINS]]  # from the last point back, the part seen from the left
    for first in range(NUM_BINS - 1, -1, -1):
        x, y = points[first]
        slope = _slope(x, y, hull[-1])
        while len(hull) > 1 and (steeper := _slope(x, y, hull[-2])) >= slope:
            hull.pop()
            slope = steeper
        index[first] = slope
        hull.append((x, y))
    return index


def _slope(x: float, y: float, to: tuple[float, float]) -> float:
    return (to[1] - y) / (to[0] - x) if to[0] > x else 0.0


def rise_and_fall(values: Chances, peak: int) -> Chances:
    """Lift what dips on the way up to the peak and on the way down from it."""
    down_reversed = list(accumulate(values[:peak:-1], max))
    return [*accumulate(values[:peak], max), values[peak], *down_reversed[::-1]]


def _total(rows: list[Counts], kinds: range | list[int]) -> Counts:
    return [sum(column) for column in zip(*(rows[kind] for kind in kinds), strict=True)]
