"""Returns of each class of paths, counted by age, and the worth of keeping a page that follows.

A start is a use that left pages behind. It ends in a return (the next use goes on where it ended)
or in a loss (its ghost was forgotten). A start that has had neither is still out. The starts that
entered an age bin are those at least as old as the bin's beginning, less those that ended before
that age.

Worth is the Gittins index: over all times for which a page might be kept from now on, the best
ratio of expected uses to expected seconds of residence. A page that is likely to be used in two
minutes is worth keeping for these two minutes, even if no use is expected in the next ten seconds.

Source: Gittins, Bandit processes and dynamic allocation indices (1979).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

import numpy as np
import numpy.typing as npt

EDGES_S = tuple(1.5 * (1000 / 1.5) ** (at / 19) for at in range(20))
"""Ages at which one bin ends and the next begins; the last bin has no end."""

NUM_BINS = len(EDGES_S) + 1
BEGINS_S = np.array([0.0, *EDGES_S])
LENGTHS_S = np.append(np.diff(BEGINS_S), 1000.0)

LATER = np.triu(np.ones((NUM_BINS, NUM_BINS), bool), 1)

UNTAUGHT = np.minimum(0.5, LENGTHS_S / (8 * (BEGINS_S + 60)))
"""Assumed chance of a return in each bin before anything was seen. Worth then falls with age, which
is the order of LRU."""

SNAPSHOT_S = 1.0
"""Starts are counted to this resolution in time."""

Counts = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float64]


class ReturnTables:
    """Counts of returns, and the index worked out from them now and then. Deterministic; reads no
    clock.

    Memory O(classes), and a snapshot of the starts for each of the last 1,000 seconds. A start, a
    return and a loss cost O(log bins). Working out the index takes some thousand operations.

    Args:
        groups: classes that are alike, one list each; all classes occur once.
        power: weight of a class's own index; its group's index has the rest.
        trust: number of observations that the chances of a group count as in its classes, and the
            chances of all classes in a group. In all classes together `UNTAUGHT` counts five times
            as many.
        period: starts after which the index is worked out again.
    """

    def __init__(self, groups: list[list[int]], power: float, trust: float, period: int) -> None:
        self._groups = groups
        self._power = power
        self._trust = trust
        self._period = period
        self.reset()

    def reset(self) -> None:
        """Forget all starts, returns and losses in these tables."""
        num_classes = sum(map(len, self._groups))
        self.now_s = 0.0
        self._num_starts = 0
        self._started = np.zeros(num_classes, np.int64)
        # (time, starts of each class so far), rising: the difference of two says how many began
        # between.
        self._snapshots: deque[tuple[float, Counts]] = deque()
        self._returns = np.zeros((num_classes, NUM_BINS), np.int64)
        self._losses = np.zeros((num_classes, NUM_BINS), np.int64)
        self._work_out()

    # --- what happens -----------------------------------------------------------------------------

    def start(self, kind: int, now_s: float) -> None:
        """Note a start of class `kind`."""
        self._started[kind] += 1
        self.now_s = now_s
        if not self._snapshots or now_s - self._snapshots[-1][0] >= SNAPSHOT_S:
            self._snapshots.append((now_s, self._started.copy()))
        self._num_starts += 1
        if self._num_starts % self._period == 0:
            self._work_out()

    def returned(self, kind: int, age_s: float) -> None:
        """Note that a start of this age was followed by a return."""
        self._returns[kind, bin_of(age_s)] += 1

    def lost(self, kind: int, age_s: float) -> None:
        """Note that the ghost of a start of this age was forgotten."""
        self._losses[kind, bin_of(age_s)] += 1

    # --- what it says -----------------------------------------------------------------------------

    def _work_out(self) -> None:
        """Work out `worth[kind][bin]`, which rises up to `peak[kind]` and falls from there, so that
        the leaf of a class that is worth least is its oldest or its newest."""
        num_classes = len(self._started)
        # Chances from all classes to groups to classes: each level starts from the one above.
        entered, returns = self._entered(), self._returns
        common = chances(entered.sum(0), returns.sum(0), UNTAUGHT, 5 * self._trust)
        self.worth: list[list[float]] = [[] for _ in range(num_classes)]
        self.peak = [0] * num_classes
        for group in self._groups:
            of_group = entered[group].sum(0), returns[group].sum(0)
            shared = chances(*of_group, common, self._trust)
            group_index = gittins_index(shared)
            for kind in group:
                own = gittins_index(chances(entered[kind], returns[kind], shared, self._trust))
                # A geometric mean of the class's own index and its group's.
                mixed = group_index ** (1 - self._power) * own**self._power
                self.peak[kind] = peak = int(mixed.argmax())
                self.worth[kind] = _rise_and_fall(mixed, peak).tolist()

    def _entered(self) -> Counts:
        """By class and bin, the starts that were still out when they reached the bin."""
        snapshots = self._snapshots
        # Keep one snapshot that is older than the last bin's beginning; what is older yet is of no
        # use.
        while len(snapshots) > 1 and snapshots[1][0] <= self.now_s - BEGINS_S[-1]:
            snapshots.popleft()
        times_s = [time_s for time_s, _ in snapshots]
        old_enough = [self._started]
        for begin_s in EDGES_S:
            at = bisect_right(times_s, self.now_s - begin_s)
            old_enough.append(snapshots[at - 1][1] if at else np.zeros_like(self._started))
        ended = self._returns + self._losses
        before = np.cumsum(ended, axis=1) - ended
        # Starts are counted to a second only, so the difference may be too small; at least those
        # that came back from a bin had entered it.
        entered: Counts = np.maximum(np.stack(old_enough, axis=1) - before, self._returns)
        return entered


def bin_of(age_s: float) -> int:
    return bisect_right(EDGES_S, age_s)


def chances(entered: Counts, returns: Counts, before: Chances, trust: float) -> Chances:
    """For each bin, the chance that a start which reaches it returns in it; `before` counts as
    `trust` observations."""
    return (returns + trust * before) / (entered + trust)


def gittins_index(chance: Chances) -> Chances:
    """For each bin the best ratio, over all times to keep a page, of expected uses to expected
    seconds."""
    # A row for each bin that a page is in, a column for each that it may be kept up to.
    stays = np.append(1.0, 1 - chance[:-1])
    still_out = np.cumprod(np.where(LATER, stays, 1.0), axis=1)
    uses = np.cumsum(np.triu(still_out * chance), axis=1)
    seconds = np.cumsum(np.triu(still_out * LENGTHS_S * (1 - 0.5 * chance)), axis=1)
    best: Chances = np.divide(uses, seconds, out=np.zeros_like(uses), where=seconds > 0).max(axis=1)
    return best


def _rise_and_fall(values: Chances, peak: int) -> Chances:
    """Lift the worths of a class so that they rise to the peak and fall from there."""
    rise = np.maximum.accumulate(values[: peak + 1])
    fall = np.maximum.accumulate(values[:peak:-1])
    return np.concatenate([rise, fall[::-1]])
