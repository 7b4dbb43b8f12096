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
seconds, both summed up from age 0, the index is the steepest slope from an age to any later one.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

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

_UNTAUGHT, _LENGTHS_S = np.array(UNTAUGHT), np.array(LENGTHS_S)
_LATER = np.arange(NUM_BINS)[:, None] < np.arange(NUM_BINS + 1)
"""[age, later age]"""

Table: TypeAlias = npt.NDArray[Any]
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

    def broken_laws(self) -> list[str]:
        """Every law that does not hold; for tests. O(classes x bins + snapshots)."""
        times_s = [time_s for time_s, _ in self._snapshots]
        counts = [*(before for _, before in self._snapshots), self._started]
        laws = {
            "worth rises up to its peak, and falls from there": all(
                worth[:peak] == sorted(worth[:peak])
                and worth[peak:] == sorted(worth[peak:], reverse=True)
                and worth[peak] == max(worth)
                for worth, peak in zip(self.worth, self.peak, strict=True)
            ),
            "snapshots rise in time and in every class": times_s == sorted(times_s)
            and all(
                early <= late
                for first, second in pairwise(counts)
                for early, late in zip(first, second, strict=True)
            ),
            "starts are counted once, in one class": sum(self._started) == self._num_starts,
        }
        return [law for law, holds in laws.items() if not holds]

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
        is at an end. Both are new lists."""
        entered = self._entered()
        returns = np.array(self._returns)
        common = _chances(entered.sum(0), returns.sum(0), _UNTAUGHT, 5 * self._trust)
        before = np.empty(entered.shape)
        for group in self._groups:
            before[group] = _chances(
                entered[group].sum(0), returns[group].sum(0), common, self._trust
            )
        indices = gittins_indices(_chances(entered, returns, before, self._trust))
        self.peak = indices.argmax(1).tolist()
        self.worth: list[Chances] = [
            rise_and_fall(index, peak)
            for index, peak in zip(indices.tolist(), self.peak, strict=True)
        ]

    def _entered(self) -> Table:
        """int [classes, bins]: how many starts of each class reached each bin."""
        times_s = [time_s for time_s, _ in self._snapshots]
        old_enough = [self._started]
        for begin_s in EDGES_S:
            at = bisect_right(times_s, self.now_s - begin_s)
            old_enough.append(self._snapshots[at - 1][1] if at else [0] * len(self._started))
        returns = np.array(self._returns)
        ended = np.zeros_like(returns)
        np.cumsum((returns + self._losses)[:, :-1], 1, out=ended[:, 1:])
        # Starts are counted to a share of their age, so the difference may be too small; at least
        # those that returned in a bin had reached it.
        entered: Table = np.maximum(np.array(old_enough).T - ended, returns)
        return entered


def _chances(entered: Table, returns: Table, before: Table, trust: float) -> Table:
    """How likely a start returns in a bin it reaches; `before` counts as `trust` observations."""
    return (returns + trust * before) / (entered + trust)


def gittins_indices(chances: Table) -> Table:
    """Of each class and bin: the best ratio, over how long to keep, of expected uses to expected
    seconds until then. O(classes x bins squared), in numpy.

    Args:
        chances: [classes, bins], all below 1.

    >>> (index,) = gittins_indices(np.array([[0.1, *[0.0] * (NUM_BINS - 2), 0.5]]))
    >>> bool(index[0] > index[1] < index[-1])
    True
    """
    still_out = np.ones((len(chances), NUM_BINS))
    np.cumprod(1 - chances[:, :-1], 1, out=still_out[:, 1:])
    uses = np.zeros((len(chances), NUM_BINS + 1))
    np.cumsum(still_out * chances, 1, out=uses[:, 1:])
    seconds = np.zeros_like(uses)
    np.cumsum(still_out * _LENGTHS_S * (1 - 0.5 * chances), 1, out=seconds[:, 1:])
    gained = uses[:, None, :] - uses[:, :-1, None]
    took_s = seconds[:, None, :] - seconds[:, :-1, None]
    ratios = np.full(gained.shape, 0.0)
    np.divide(gained, took_s, out=ratios, where=_LATER & (took_s > 0))
    return ratios.max(2)  # type: ignore[no-any-return]


def rise_and_fall(values: Chances, peak: int) -> Chances:
    """Lift what dips on the way up to the peak and on the way down from it."""
    down_reversed = list(accumulate(values[:peak:-1], max))
    return [*accumulate(values[:peak], max), values[peak], *down_reversed[::-1]]
