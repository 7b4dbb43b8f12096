"""How soon paths of each class come back: counts by class and age, and what a page is worth by
them.

A start is a use that left pages behind. It ends in a return (the next use goes on where it ended)
or in a loss (its ghost was forgotten). A start that has had neither is still out. The number of
starts that entered an age bin is the number that are at least as old as the bin's beginning, less
those that ended before that age.

Worth is the Gittins index: of all times that a page might be kept from now on, the best ratio of
expected uses to expected seconds of residence. A page that is likely to be used in two minutes is
worth keeping for these two minutes, even if no use is expected in the next ten seconds.

Source: Gittins, Bandit processes and dynamic allocation indices (1979).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

EDGES_S = tuple(1.5 * (1000 / 1.5) ** (at / 19) for at in range(20))
"""Where one age bin ends and the next begins; the last bin has no end."""

NUM_BINS = len(EDGES_S) + 1
BEGINS_S = (0.0, *EDGES_S)
LENGTHS_S = (*(end - begin for begin, end in zip(BEGINS_S, EDGES_S, strict=False)), 1000.0)

UNTAUGHT = tuple(
    min(0.5, length_s / (8 * (begin_s + 60)))
    for begin_s, length_s in zip(BEGINS_S, LENGTHS_S, strict=True)
)
"""How likely a return in each bin is taken to be before anything was seen. It falls with age, which
is the order of LRU."""

SNAPSHOT_S = 1.0
"""Starts are counted to this resolution in time."""

Counts = list[int]
Chances = list[float]


class ReturnTables:
    """Counts, and the index worked out from them now and then. Deterministic; it reads no clock.

    Memory O(classes), and a snapshot of the starts for each of the last 1,000 seconds. A start, a
    return and a loss cost O(log bins). Working out the index takes some thousand operations.

    Args:
        groups: classes that are alike, one list each; all classes occur once.
        power: the weight of a class's own index; its group's index has the rest.
        trust: how many observations the chances of its group count as in a class, and the chances
            of all classes in a group. In all classes together `UNTAUGHT` counts five times as many.
        period: after how many starts the index is worked out anew.
    """

    def __init__(self, groups: list[list[int]], power: float, trust: float, period: int) -> None:
        self._groups = groups
        self._power = power
        self._trust = trust
        self._period = period
        self.reset()

    def reset(self) -> None:
        """Forget all that was seen."""
        num_classes = sum(map(len, self._groups))
        self.now_s = 0.0
        self._num_starts = 0
        self._started = [0] * num_classes
        self._snapshots: deque[tuple[float, Counts]] = deque()
        self._returns = [[0] * NUM_BINS for _ in range(num_classes)]
        self._losses = [[0] * NUM_BINS for _ in range(num_classes)]
        self._work_out()

    # --- what happens -----------------------------------------------------------------------------

    def start(self, kind: int, now_s: float) -> None:
        self._started[kind] += 1
        self.now_s = now_s
        if not self._snapshots or now_s - self._snapshots[-1][0] >= SNAPSHOT_S:
            self._snapshots.append((now_s, self._started.copy()))
        self._num_starts += 1
        if self._num_starts % self._period == 0:
            self._work_out()

    def returned(self, kind: int, age_s: float) -> None:
        self._returns[kind][bin_of(age_s)] += 1

    def lost(self, kind: int, age_s: float) -> None:
        self._losses[kind][bin_of(age_s)] += 1

    # --- what it says -----------------------------------------------------------------------------

    def _work_out(self) -> None:
        """`worth[kind][bin]`, which rises up to `peak[kind]` and falls from there: a class's least
        is at an end."""
        num_classes = len(self._started)
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
                both = zip(group_index, gittins_index(own), strict=True)
                mixed = [whole ** (1 - self._power) * part**self._power for whole, part in both]
                self.peak[kind] = mixed.index(max(mixed))
                self.worth[kind] = _rise_and_fall(mixed, self.peak[kind])

    def _entered(self) -> list[Counts]:
        """How many starts of each class were still out when they reached each bin."""
        snapshots = self._snapshots
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
    return bisect_right(EDGES_S, age_s)


def chances(
    entered: Counts, returns: Counts, before: Chances | tuple[float, ...], trust: float
) -> Chances:
    """How likely a start returns in a bin it reaches; `before` counts as `trust` observations."""
    return [
        (came_back + trust * chance) / (came + trust)
        for came, came_back, chance in zip(entered, returns, before, strict=True)
    ]  # fmt: skip


def gittins_index(chance: Chances) -> Chances:
    """Of each bin: the best ratio, over how long to keep, of expected uses to expected seconds
    until then."""
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
    """Lift what dips on the way up to the peak and on the way down from it."""
    down_reversed = list(accumulate(values[:peak:-1], max))
    return [*accumulate(values[:peak], max), values[peak], *down_reversed[::-1]]


def _total(rows: list[Counts]) -> Counts:
    return [sum(column) for column in zip(*rows, strict=True)]
