"""The gittins policy, page by page, with a list of everything that ever happened in the place of
tables."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.policies.return_tables import (
    BEGINS_S,
    LENGTHS_S,
    NUM_BINS,
    SNAPSHOT_S,
    UNTAUGHT,
)
from tests.laws.ghost_model import GhostModel
from tests.laws.radix_model import ModelPage, ModelUse, Place, Prefix

TINY_PAGES, LONG_PAGES = 1, 3
POWER, TRUST, PERIOD = 0.7, 2.0, 3

Kind = tuple[int, int]  # class of the turn, class of how much was new


@dataclass(frozen=True)
class Known:
    kind: Kind
    turn: int
    path: int  # 0: it brought nothing of its own
    now_s: float
    tick: int


class GittinsModel(GhostModel):
    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__(page_size, policy)
        self.forget_all()

    def forget_all(self) -> None:
        super().forget_all()
        self.starts: list[tuple[float, Kind]] = []
        self.returns: list[tuple[Kind, float]] = []
        self.losses: list[tuple[Kind, float]] = []
        self.worths = self.work_out()

    # --- uses -------------------------------------------------------------------------------------

    def look_up(self, use: ModelUse, tokens: Prefix, namespace: Hashable, old: int) -> list[int]:
        found = self.find(tokens, old)
        before = use.goes_on_from or self.before(tokens, namespace, old)
        if not use.visit and before is not None:
            kind, turn = before.known.kind, before.known.turn
            has_end = before.known.path > 0 or use.brings
        else:
            known = old
            last: Known | None = before.known if before is not None else None
            if found:
                known, last = found[-1]
            goes_on = last is not None and last.path == known
            turn = last.turn + 1 if goes_on and last is not None else 1
            if goes_on and last is not None:
                self.returns.append((last.kind, use.now_s - last.now_s))
                self.goes_on_after(last.tick)
            new = self.whole(tokens) - known
            kind = (
                min([turn, 4]) if turn < 6 else 5,
                0 if new <= TINY_PAGES else 1 if new <= LONG_PAGES else 2,
            )
            has_end = turn > 1 or new > 0
            if has_end:
                self.starts.append((use.now_s, kind))
                if len(self.starts) % PERIOD == 0:
                    self.worths = self.work_out()
        use.known = Known(kind, turn, use.covers if has_end else 0, use.now_s, use.tick)
        use.marks = {use.covers: "unknown"}
        if use.brings:
            use.marks[old] = "unknown"
            self.remove_found(tokens, found)
        return [0] * use.covers

    def gone(self, place: Place, page: ModelPage) -> None:
        for depth, known in self.add_ghosts(place, page.last.known.path, page.last.known):
            if depth == known.path:
                self.losses.append((known.kind, self.starts[-1][0] - known.now_s))

    # --- what it is worth -------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        """After which starts it was written down how many there were."""
        taken: list[int] = []
        for number, (start_s, _) in enumerate(self.starts):
            if not taken or start_s - self.starts[taken[-1]][0] >= SNAPSHOT_S:
                taken.append(number)
        return taken

    def counts(self, kinds: list[Kind]) -> list[tuple[int, int]]:
        """(entered, returned) for each bin, of these classes together."""
        snapshots = self.snapshots()
        rows = []
        for at in range(NUM_BINS):
            entered = returned = 0
            for kind in kinds:
                old_enough = self.starts
                if at:
                    limit_s = self.starts[-1][0] - BEGINS_S[at] if self.starts else 0.0
                    until = [number for number in snapshots if self.starts[number][0] <= limit_s]
                    old_enough = self.starts[: until[-1] + 1] if until else []
                started = sum(other == kind for _, other in old_enough)
                ended = sum(
                    other == kind and age_s < BEGINS_S[at]
                    for other, age_s in self.returns + self.losses
                )
                here = sum(other == kind and in_bin(age_s) == at for other, age_s in self.returns)
                entered += max(started - ended, here)
                returned += here
            rows.append((entered, returned))
        return rows

    def work_out(self) -> dict[Kind, tuple[int, list[float]]]:
        """(peak, worth by bin) of each class."""
        sizes, turns = range(3), (1, 2, 3, 4, 5)
        common = smooth(
            self.counts([(turn, size) for turn in turns for size in sizes]), UNTAUGHT, 5 * TRUST
        )
        worths = {}
        for turn in turns:
            alike = smooth(self.counts([(turn, size) for size in sizes]), common, TRUST)
            for size in sizes:
                own = smooth(self.counts([(turn, size)]), alike, TRUST)
                mixed = [
                    index(alike, at) ** (1 - POWER) * index(own, at) ** POWER
                    for at in range(NUM_BINS)
                ]
                peak = mixed.index(max(mixed))
                worths[turn, size] = (
                    peak,
                    [
                        max(mixed[: at + 1]) if at < peak else max(mixed[at:])
                        for at in range(NUM_BINS)
                    ],
                )
        return worths

    def rank(self, page: ModelPage, now_s: float) -> tuple[Any, ...]:
        last = page.last
        age_s = now_s - last.now_s
        peak, worth = self.worths[last.known.kind]
        at = in_bin(age_s)
        if now_s and at < peak:
            return worth[at], 1, -last.tick
        return worth[at], 0, last.tick

    def choose(self, unwanted: list[Place], now_s: float, order: Sequence[int]) -> Place:
        return min(unwanted, key=lambda place: self.rank(self.pages[place], now_s))


def in_bin(age_s: float) -> int:
    return max(at for at in range(NUM_BINS) if BEGINS_S[at] <= age_s)


def smooth(counts: list[tuple[int, int]], chance: Any, trust: float) -> list[float]:
    return [
        (returned + trust * chance[at]) / (entered + trust)
        for at, (entered, returned) in enumerate(counts)
    ]


def index(chance: list[float], first: int) -> float:
    ratios = []
    out, uses, seconds = 1.0, 0.0, 0.0
    for at in range(first, NUM_BINS):
        uses += out * chance[at]
        seconds += out * LENGTHS_S[at] * (1 - 0.5 * chance[at])
        ratios.append(uses / seconds)
        out *= 1 - chance[at]
    return max(ratios)
