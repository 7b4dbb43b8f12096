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
from itertools import accumulate

EDGES_S = tuple(1.5 * (1000 / 1.5) ** (at / 19) for at in range(20))
"""Ages at which one bin ends and the next begins; the last bin has no end."""

NUM_BINS = len(EDGES_S) + 1
BEGINS_S = (0.0, *EDGES_S)
LENGTHS_S = (*(end - begin for begin, end in zip(BEGINS_S, EDGES_S, strict=False)), 1000.0)

UNTAUGHT = tuple(
    min(0.5, length_s / (8 * (begin_s + 60)))
    for begin_s, length_s in zip(BEGINS_S, LENGTHS_S, strict=True)
)
"""Assumed chance of a return in each bin before anything was seen. Worth then falls with age, which
is the order of LRU."""

SNAPSHOT_S = 1.0
"""Starts are counted to this resolution in time."""

Counts = list[int]
Chances = list[float]


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
        self._started = [0] * num_classes
        # (time, starts of each class so far), rising: the difference of two says how many began
        # between.
        self._snapshots: deque[tuple[float, Counts]] = deque()
        self._returns = [[0] * NUM_BINS for _ in range(num_classes)]
        self._losses = [[0] * NUM_BINS for _ in range(num_classes)]
        self._work_out()

    # --- what happens -----------------------------------------------------------------------------

    def start(self, kind: int, now_s: float) -> None:
        """Note a start of class `kind` in the return tables."""
        self._started[kind] += 1
        self.now_s = now_s
        if not self._snapshots or now_s - self._snapshots[-1][0] >= SNAPSHOT_S:
            self._snapshots.append((now_s, self._started.copy()))
        self._num_starts += 1
        if self._num_starts % self._period == 0:
            self._work_out()

    def returned(self, kind: int, age_s: float) -> None:
        """Note in the tables that a start of this age was followed by a return."""
        self._returns[kind][bin_of(age_s)] += 1

    def lost(self, kind: int, age_s: float) -> None:
        """Note in the return tables that the ghost of a start of this age was forgotten."""
        self._losses[kind][bin_of(age_s)] += 1

    # --- what it says -----------------------------------------------------------------------------

    def _work_out(self) -> None:
        """Work out from the return tables `worth[kind][bin]`, which rises up to `peak[kind]` and
        falls from there, so that the leaf of a class that is worth least is its oldest or its
        newest."""
        num_classes = len(self._started)
        # Chances from all classes to groups to classes: each level starts from the one above.
        entered = self._entered()
        common = chances(_total(entered), _total(self._returns), UNTAUGHT, 5 * self._trust)
        self.worth: list[Chances] = [[] for _ in range(num_classes)]
        self.peak = [0] * num_classes
        for group in self._groups:
            came = _total([entered[kind] for kind in group])
            came_back = _total([self._returns[kind] for kind in group])
            shared = chances(came, came_back, common, self._trust)
            group_index = gittins_index(shared)
            for kind in group:
                own = chances(entered[kind], self._returns[kind], shared, self._trust)
                # A geometric mean of the class's own index and its group's.
                both = zip(group_index, gittins_index(own), strict=True)
                mixed = [whole ** (1 - self._power) * part**self._power for whole, part in both]
                self.peak[kind] = mixed.index(max(mixed))
                self.worth[kind] = _rise_and_fall(mixed, self.peak[kind])

    def _entered(self) -> list[Counts]:
        """Return from the return tables, per class and bin, the starts that were still out when
        they reached the bin."""
        snapshots = self._snapshots
        # Keep one snapshot that is older than the last bin's beginning; what is older yet is of no
        # use.
        while len(snapshots) > 1 and snapshots[1][0] <= self.now_s - BEGINS_S[-1]:
            snapshots.popleft()
        times_s = [time_s for time_s, _ in snapshots]
        never = [0] * len(self._started)
        old_enough = [self._started]
        for begin_s in EDGES_S:
            at = bisect_right(times_s, self.now_s - begin_s)
            old_enough.append(snapshots[at - 1][1] if at else never)
        entered: list[Counts] = []
        for kind, (returns, losses) in enumerate(zip(self._returns, self._losses, strict=True)):
            ended = 0
            entered.append([])
            for place, started in enumerate(old_enough):
                # Starts are counted to a second only, so the difference may be too small; at least
                # those that came back from a bin had entered it.
                entered[-1].append(max(started[kind] - ended, returns[place]))
                ended += returns[place] + losses[place]
        return entered


def bin_of(age_s: float) -> int:
    """Return the bin of the return tables that an age falls in."""
    return bisect_right(EDGES_S, age_s)


def chances(
    entered: Counts, returns: Counts, before: Chances | tuple[float, ...], trust: float
) -> Chances:
    """Return from the return tables, for each bin, the chance that a start which reaches it returns
    in it; `before` counts as `trust` observations."""
    return [
        (came_back + trust * chance) / (came + trust)
        for came, came_back, chance in zip(entered, returns, before, strict=True)
    ]  # fmt: skip


def gittins_index(chance: Chances) -> Chances:
    """Return per bin of the return tables the best ratio, over all times to keep a page, of
    expected uses to expected seconds."""
    index = []
    for first in range(NUM_BINS):
        still_out, uses, seconds, best = 1.0, 0.0, 0.0, 0.0
        for place in range(first, NUM_BINS):
            uses += still_out * chance[place]
            seconds += still_out * LENGTHS_S[place] * (1 - 0.5 * chance[place])
            best = max(best, uses / seconds)
            still_out *= 1 - chance[place]
        index.append(best)
    return index


def _rise_and_fall(values: Chances, peak: int) -> Chances:
    """Lift the worths of one class of the return tables so that they rise to the peak and fall from
    there."""
    down_reversed = list(accumulate(values[:peak:-1], max))
    return [*accumulate(values[:peak], max), values[peak], *down_reversed[::-1]]


def _total(rows: list[Counts]) -> Counts:
    """Add rows of the return tables up, column by column."""
    return [sum(column) for column in zip(*rows, strict=True)]
