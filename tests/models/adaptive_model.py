"""The adaptive policy, page by page, with a list of everything that ever happened in the place of
tables."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from prefixkv.cache.eviction.hazards import (
    BEGINS_S,
    LENGTHS_S,
    NUM_BINS,
    RESOLUTION,
    UNTAUGHT,
)
from tests.models.ghost_model import GhostModel
from tests.models.gittins_model import LONG_PAGES, PERIOD, TINY_PAGES, TRUST, smooth
from tests.models.radix_model import ModelPage, ModelUse, Place, Prefix, visits

Kind = tuple[int, int]  # class of the use count, class of how much was new


@dataclass(frozen=True)
class Known:
    size: int
    turn: int
    path: int  # 0: it brought nothing of its own
    now_s: float


class AdaptiveModel(GhostModel):
    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__(page_size, policy)
        self.forget_all()

    def forget_all(self) -> None:
        super().forget_all()
        self.starts: list[tuple[float, Kind]] = []
        self.snapshots: list[int] = []  # before which starts it was written down how many
        self.returns: list[tuple[Kind, float]] = []
        self.losses: list[tuple[Kind, float]] = []
        self.worths = self.work_out()

    # --- uses -------------------------------------------------------------------------------------

    def look_up(self, use: ModelUse, tokens: Prefix, namespace: Hashable, old: int) -> list[int]:
        ghosts = self.find(tokens, old)
        before = self.before(tokens, namespace, old)
        if not use.visit and before is not None:
            was = before.known
            path = use.covers if was.path or use.brings else 0
            use.known = Known(was.size, was.turn, path, use.now_s)
        else:
            known = old
            last: Known | None = before.known if before is not None else None
            if ghosts:
                known, (_, last) = ghosts[-1]
            self.first_use(use, last, known, self.whole(tokens) - known)
        use.marks = {use.covers: "unknown"}
        bases = [0] * use.covers
        if not use.brings:
            return bases
        if old:
            use.marks[old] = "unknown"
        least = 0 if ghosts and ghosts[-1][0] == use.covers else 1
        for depth, (before_it_went, _) in reversed(ghosts):
            if before_it_went + 1 > least:
                use.marks[depth] = "unknown"
                least = before_it_went + 1
            for at in range(old, depth):
                bases[at] = max(bases[at], before_it_went)
        self.come_back(tokens, ghosts)
        return bases

    def first_use(self, use: ModelUse, last: Known | None, known: int, new: int) -> None:
        goes_on = last is not None and last.path == known
        turn = 1
        if goes_on and last is not None:
            turn = last.turn + 1
            self.returns += [(kind, use.now_s - last.now_s) for kind in counted(last)]
        size = 0 if new <= TINY_PAGES else 1 if new <= LONG_PAGES else 2
        has_end = goes_on or new > 0
        use.known = Known(size, turn, use.covers if has_end else 0, use.now_s)
        for kind in counted(use.known) if has_end else ():
            if not self.snapshots or use.now_s - self.starts[self.snapshots[-1]][0] >= 1.0:
                self.snapshots.append(len(self.starts))
            self.starts.append((use.now_s, kind))
            if len(self.starts) % PERIOD == 0:
                self.thin_out()
                self.worths = self.work_out()

    def gone(self, place: Place, page: ModelPage) -> None:
        known = (visits(page), page.last.known)
        for depth, (_, last) in self.remember(place, page.last.known.path, known):
            if depth == last.path:
                age_s = self.starts[-1][0] - last.now_s
                self.losses += [(kind, age_s) for kind in counted(last)]

    # --- what it is worth -------------------------------------------------------------------------

    def thin_out(self) -> None:
        kept: list[int] = []
        for number in self.snapshots:
            age_s = self.starts[-1][0] - self.starts[number][0]
            if not kept or (
                self.starts[number][0] - self.starts[kept[-1]][0] >= RESOLUTION * age_s
            ):
                kept.append(number)
        self.snapshots = kept

    def counts(self, kinds: list[Kind]) -> list[tuple[int, int]]:
        """(entered, returned) for each bin, of these classes together."""
        rows = []
        for at in range(NUM_BINS):
            entered = returned = 0
            for kind in kinds:
                old_enough = self.starts
                if at:
                    limit_s = self.starts[-1][0] - BEGINS_S[at] if self.starts else 0.0
                    until = [n for n in self.snapshots if self.starts[n][0] <= limit_s]
                    old_enough = self.starts[: until[-1]] if until else []
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
        sizes, counts = range(3), (1, 2, 3, 4, 5)
        common = smooth(
            self.counts([(count, size) for count in counts for size in sizes]), UNTAUGHT, 5 * TRUST
        )
        worths = {}
        for count in counts:
            alike = smooth(self.counts([(count, size) for size in sizes]), common, TRUST)
            for size in sizes:
                own = smooth(self.counts([(count, size)]), alike, TRUST)
                index = [best_ratio(own, at) for at in range(NUM_BINS)]
                peak = index.index(max(index))
                worths[count, size] = (
                    peak,
                    [
                        max(index[: at + 1]) if at < peak else max(index[at:])
                        for at in range(NUM_BINS)
                    ],
                )
        return worths

    def kind(self, page: ModelPage) -> Kind:
        times, last = visits(page), page.last.known
        if times == 1 and last.turn > 1:
            times = 2
        return count_class(times), last.size

    def rank(self, page: ModelPage, now_s: float) -> tuple[float, int, int]:
        last, age_s = page.last, now_s - page.last.now_s
        peak, worth = self.worths[self.kind(page)]
        at = in_bin(age_s)
        if now_s and at < peak:
            return worth[at], 1, -last.tick
        return worth[at], 0, last.tick

    def choose(self, unwanted: list[Place], now_s: float, likely: set[int]) -> Place:
        """Where rounding may decide between two classes, the one that is likely."""
        ranks = {place: self.rank(self.pages[place], now_s) for place in unwanted}
        least = min(unwanted, key=lambda place: ranks[place])
        near = [
            place
            for place in unwanted
            if self.kind(self.pages[place]) != self.kind(self.pages[least])
            and ranks[place][0] <= ranks[least][0] * (1 + 1e-9)
        ]
        return next((place for place in near if self.pages[place].page_id in likely), least)


def count_class(times: int) -> int:
    return times if times < 4 else 4 if times < 6 else 5


def counted(known: Known) -> list[Kind]:
    if known.turn > 2:
        return [(2, known.size), (count_class(known.turn), known.size)]
    return [(known.turn, known.size)]


def in_bin(age_s: float) -> int:
    return max(at for at in range(NUM_BINS) if BEGINS_S[at] <= age_s)


def best_ratio(chance: list[float], first: int) -> float:
    ratios = []
    out, uses, seconds = 1.0, 0.0, 0.0
    for at in range(first, NUM_BINS):
        uses += out * chance[at]
        seconds += out * LENGTHS_S[at] * (1 - 0.5 * chance[at])
        ratios.append(uses / seconds)
        out *= 1 - chance[at]
    return max(ratios)
