"""Returns of each class of paths, counted by age, and the worth of keeping a page.

A start is a use that left pages behind. It ends in a return (the next use goes on there) or in a
loss (its ghost was forgotten). Counts are halved now and then, since traffic changes. A class with
few observations is taken to be like its group, a group like all classes, and all like `UNTAUGHT`,
which is the order of LRU.

Worth is the Gittins index (Bandit processes and dynamic allocation indices, 1979): the best ratio
of expected uses to expected seconds of residence. That is the steepest slope from an age to a later
one. The sums have a fixed order, so every machine gets the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf, ldexp
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

NUM_BINS = 24
"""Age bins; the last has no end."""

EDGES_S = (
    1.5, 2.36, 3.70, 5.82, 9.14, 14.4, 22.6, 35.4, 55.7, 87.5, 137.0, 216.0, 339.0, 533.0, 837.0,
    1315.0, 2066.0, 3246.0, 5100.0, 8013.0, 12_590.0, 19_780.0, 31_080.0,
)  # fmt: skip
"""Ages at which a bin ends and the next begins."""

BEGINS_S = (0.0, *EDGES_S)
LENGTHS_S = (
    *(end - begin for begin, end in zip(BEGINS_S, EDGES_S, strict=False)),
    EDGES_S[-1],
)

UNTAUGHT = tuple(
    min(0.5, length_s / (8 * (begin_s + 60)))
    for begin_s, length_s in zip(BEGINS_S, LENGTHS_S, strict=True)
)
"""Assumed chance of a return in each bin before anything was seen."""

RESOLUTION = 0.05
"""Precision, as a share of their age, to which starts without an end are counted."""

_UNTAUGHT, _LENGTHS_S = np.array(UNTAUGHT), np.array(LENGTHS_S)
_EDGES_S, _BEGINS_S = np.array(EDGES_S), np.array(BEGINS_S)
_LEAST_S = np.where(np.arange(NUM_BINS)[:, None] < np.arange(NUM_BINS + 1), 1e-300, np.inf)
"""[age, end of keeping]: the least seconds to divide by; infinite where the end is not later, so
that the ratio there is 0."""

Table: TypeAlias = npt.NDArray[Any]
Chances = list[float]


class Hazards:
    """Counts of returns, and the worths that follow. Deterministic, without a clock.

    Starts and ends are noted as they happen, at O(1), and counted before the counts are needed.
    Memory O(rows x 300). Working out the worths costs O(classes x bins squared), some 200 us, as a
    rule where nothing waits (`Policy.work_ahead`).

    Args:
        groups: classes that are alike, one list each; all classes occur once.
        trust: observations that a group's chances count for in its classes, and those of all
            classes in a group. `UNTAUGHT` counts five times as many in all classes.
        period: starts after which worths are worked out again.
        half_life_s: time after which counts are halved. A start's return or loss weighs as much as
            the start does by then, so neither is favoured.
        rows: for each row, the classes that its starts count in; by default one row per class.
        num_common: number of classes, from the first, that stand for all; by default all of them.
    """

    def __init__(
        self,
        groups: list[list[int]],
        trust: float,
        period: int,
        half_life_s: float,
        rows: Sequence[Sequence[int]] = (),
        num_common: int | None = None,
    ) -> None:
        self._trust = trust
        self._period = period
        self._half_life_s = half_life_s
        num_classes = sum(map(len, groups))
        rows = rows or [[kind] for kind in range(num_classes)]
        self._num_rows = len(rows)
        self._by_class = _Sums(
            [
                [row for row, kinds in enumerate(rows) if kind in kinds]
                for kind in range(num_classes)
            ]
        )
        self._by_group = _Sums(groups)
        self._num_common = num_common or num_classes
        self._group_of = [
            next(at for at, kinds in enumerate(groups) if kind in kinds)
            for kind in range(num_classes)
        ]
        self.reset()

    def reset(self) -> None:
        num_rows = self._num_rows
        self.now_s = 0.0
        self._halves_s = self._half_life_s  # time of the next halving
        self._num_halved = 0  # halvings so far
        # Noted and not counted yet.
        self._started: list[tuple[int, float]] = []  # row and time
        self._returned: list[tuple[int, float, float]] = []  # row, time of the start and age
        self._lost: list[tuple[int, float, float]] = []
        # Starts that have not ended, by row, from each of these times to the next; rising.
        self._times_s: Table = np.zeros(0)
        self._out: Table = np.zeros((0, num_rows))
        self._returns: Table = np.zeros((num_rows, NUM_BINS))
        self._losses: Table = np.zeros((num_rows, NUM_BINS))
        # Worths of an empty table: those of `UNTAUGHT`.
        self.work_out()

    # --- what happens -----------------------------------------------------------------------------

    def start(self, row: int, now_s: float) -> None:
        """Note a start in `row`. O(1), unless the worths are long due."""
        # Before the start is noted: it is of the new half-life.
        if now_s >= self._halves_s:
            self._halve(int(now_s // self._half_life_s))
        self.now_s = now_s
        self._started.append((row, now_s))
        self.due -= 1
        if self.due <= self._overdue:
            self.work_out()

    def returned(self, row: int, start_s: float, now_s: float) -> None:
        # The given time is that of the last use, which may be later than the last start of all:
        # `_count` needs a time at which starts were counted.
        began_s = self.now_s if start_s > self.now_s else start_s
        self._returned.append((row, began_s, now_s - start_s))

    def lost(self, row: int, start_s: float) -> None:
        """Note that the ghost of a start was forgotten: its return will not be noticed."""
        began_s = self.now_s if start_s > self.now_s else start_s
        self._lost.append((row, began_s, self.now_s - began_s))

    def _count(self) -> None:
        # Starts first: an end is taken out of the slot of its start.
        self._count_starts()
        self._count_ends(self._returned, self._returns)
        self._count_ends(self._lost, self._losses)

    def _count_starts(self) -> None:
        started = self._started
        if not started:
            return
        num_slots, new_s = len(self._times_s), []
        last_s = self._times_s[-1] if num_slots else -inf
        slots = []
        for _, now_s in started:
            if now_s - last_s >= 1.0:
                new_s.append(now_s)
                last_s = now_s
            slots.append(num_slots + len(new_s) - 1)
        # Rows for the new slots.
        self._times_s = np.concatenate([self._times_s, new_s])
        out = np.zeros((len(self._times_s), self._out.shape[1]))
        out[:num_slots] = self._out
        rows = np.array([row for row, _ in started], np.intp)
        np.add.at(out, (np.array(slots), rows), 1.0)
        self._out = out
        started.clear()

    def _count_ends(self, ends: list[tuple[int, float, float]], table: Table) -> None:
        """Count each end into the bin of its age, and out of the slot of its start; forget it."""
        if not ends:
            return
        found = np.array(ends)
        rows, starts_s = found[:, 0].astype(np.intp), found[:, 1]
        # A start of an earlier half-life was halved since, so its end counts as little: 2 **
        # -(halvings since).
        halved = starts_s // self._half_life_s - self._num_halved
        counts = np.ldexp(1.0, halved.astype(np.intc))
        np.add.at(table, (rows, _EDGES_S.searchsorted(found[:, 2], "right")), counts)
        # The last slot that begins no later than the start.
        begun = self._times_s.searchsorted(starts_s, "right") - 1
        np.subtract.at(self._out, (begun, rows), counts)
        ends.clear()

    def _halve(self, times: int) -> None:
        # What is noted is of the time before.
        self._count()
        share = ldexp(1.0, self._num_halved - times)
        self._num_halved = times
        self._halves_s = (times + 1) * self._half_life_s
        for table in (self._out, self._returns, self._losses):
            table *= share

    def counts(self) -> tuple[Table, Table, Table]:
        """Return three float [classes, bins] tables: starts that reached each bin, returned in it,
        were lost in it."""
        self._count()
        return self._entered(), self._by_class(self._returns), self._by_class(self._losses)

    def broken_laws(self) -> list[str]:
        """Return every law that does not hold. O(classes x bins)."""
        self._count()
        tables = {"returned": self._returns, "lost": self._losses}
        laws = {
            "worth rises up to its peak, and falls from there": all(
                worth[:peak] == sorted(worth[:peak])
                and worth[peak:] == sorted(worth[peak:], reverse=True)
                and worth[peak] == max(worth)
                for worth, peak in zip(self.worth, self.peak, strict=True)
            ),
            "times rise": bool((np.diff(self._times_s) > 0).all()),
            "every time has its starts": len(self._times_s) == len(self._out),
            **{
                f"no fewer than none are {what}": bool((table >= 0).all())
                for what, table in tables.items()
            },
        }
        return [law for law, holds in laws.items() if not holds]

    # --- what it says -----------------------------------------------------------------------------

    def work_out(self) -> None:
        """`worth[kind][bin]` rises up to `peak[kind]` and falls from there, so the leaf of a class
        that is worth least is its oldest or newest. Both lists are new objects (see
        `LeastWorth.first`)."""
        self.due, self._overdue = self._period, -(self._period // 8)
        self._count()
        self._thin_out(self.now_s)
        # The chances of each class, from all to groups to classes. Each level starts from the one
        # above, which counts as `trust` observations.
        entered, returns = self._entered(), self._by_class(self._returns)
        common = _chances(
            entered[: self._num_common].sum(0), returns[: self._num_common].sum(0),
            _UNTAUGHT, 5 * self._trust,
        )  # fmt: skip
        in_group = self._by_group
        alike = _chances(in_group(entered), in_group(returns), common, self._trust)
        chances = _chances(entered, returns, alike[self._group_of], self._trust)
        indices = steepest_slopes(*expected_sums(chances))
        peaks = indices.argmax(1)
        self.peak: list[int] = peaks.tolist()
        self.worth: list[Chances] = rise_and_fall(indices, peaks).tolist()

    def _thin_out(self, now_s: float) -> None:
        """Merge slots of starts that lie closer together than their age requires."""
        firsts: list[int] = []
        last_s = -inf
        for at, time_s in enumerate(self._times_s.tolist()):
            if time_s - last_s >= RESOLUTION * (now_s - time_s):
                firsts.append(at)
                last_s = time_s
        if len(firsts) < len(self._times_s):
            self._out = np.add.reduceat(self._out, firsts)
            self._times_s = self._times_s[firsts]

    def _entered(self) -> Table:
        """Starts that reached each bin: those that ended there or later, and those still out."""
        ended = self._by_class(self._returns + self._losses)
        return ended[:, ::-1].cumsum(1)[:, ::-1] + self._still_out(self.now_s)

    def _still_out(self, now_s: float) -> Table | float:
        """Return float [classes, bins]: starts that have not ended and at `now_s` are at least as
        old as each bin's beginning; 0 before the first start."""
        if not len(self._times_s):
            return 0.0
        # For each bin: the slots that are at least as old as its beginning, summed from the
        # oldest.
        until = self._times_s.searchsorted(now_s - _BEGINS_S, "right")
        out = np.zeros((len(self._out) + 1, self._out.shape[1]))
        self._out.cumsum(0, out=out[1:])
        # Ends may be subtracted from the wrong slot: a request's last use may be later than its
        # first, which is its start, and two prefixes may be taken for one. So a sum may be too
        # small by a few, even negative.
        return np.maximum(self._by_class(out[until].T), 0.0)


class _Sums:
    """Sums of chosen rows of a table, added in their order: the same on every machine, which a
    matrix product may not be."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = np.array([row for together in rows for row in together])
        self._firsts = np.array([0, *accumulate(len(together) for together in rows[:-1])])

    def __call__(self, table: Table) -> Table:
        return np.add.reduceat(table[self._rows], self._firsts)


def _chances(entered: Table, returns: Table, before: Table, trust: float) -> Table:
    """Chance that a start which reaches a bin returns in it; `before` counts as `trust` starts."""
    return (returns + trust * before) / (entered + trust)


def expected_sums(chances: Table) -> tuple[Table, Table]:
    """Return the expected uses, and seconds of residence, from age 0 to each bin's beginning and to
    the end of the last: float [classes, bins + 1]."""
    # The chance to be still out at each bin. A use in a bin comes in its middle on average.
    still_out = np.ones((len(chances), NUM_BINS))
    np.cumprod(1 - chances[:, :-1], 1, out=still_out[:, 1:])
    uses = np.zeros((len(chances), NUM_BINS + 1))
    np.cumsum(still_out * chances, 1, out=uses[:, 1:])
    seconds = np.zeros_like(uses)
    np.cumsum(still_out * _LENGTHS_S * (1 - 0.5 * chances), 1, out=seconds[:, 1:])
    return uses, seconds


def steepest_slopes(uses: Table, seconds: Table) -> Table:
    """Return the steepest slope from each bin's beginning to any later one: the Gittins index,
    float [classes, bins]. O(classes x bins squared)."""
    took_s = seconds[:, None, :] - seconds[:, :-1, None]
    np.maximum(took_s, _LEAST_S, out=took_s)
    gained = uses[:, None, :] - uses[:, :-1, None]
    gained /= took_s
    return gained.max(2)  # type: ignore[no-any-return]


def rise_and_fall(values: Table, peaks: Table) -> Table:
    """Lift the values so that each row rises to its peak and falls from there.

    >>> rise_and_fall(np.array([[2, 1, 5, 3, 4]]), np.array([2])).tolist()
    [[2, 2, 5, 4, 4]]
    """
    rising = np.maximum.accumulate(values, 1)
    falling = np.maximum.accumulate(values[:, ::-1], 1)[:, ::-1]
    return np.where(np.arange(values.shape[1]) <= peaks[:, None], rising, falling)
