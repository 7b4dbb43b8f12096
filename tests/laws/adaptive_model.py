"""The adaptive policy, page by page, with a list of everything that ever happened in the place of
tables; and the ghosts, page by page, of every policy that remembers evicted pages."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.cache.eviction.hazards import BEGINS_S, LENGTHS_S, NUM_BINS, RESOLUTION, UNTAUGHT
from tests.laws.radix_model import ModelPage, ModelUse, Place, Prefix, RadixModel, visits

BLOCK_PAGES, STRIDE_PAGES = 1, 3
GHOST_PAGES = 40


class GhostModel(RadixModel):
    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__(page_size, policy)
        self.ghosts: dict[
            tuple[int, Prefix], tuple[int, Any]
        ] = {}  # depth, what the policy wants to know again
        self.segments: dict[tuple[int, Prefix], tuple[int, Prefix]] = {}  # of ghosts of path ends

    def name(self, tokens: Prefix, depth: int) -> tuple[int, Prefix]:
        return depth, self.cut(tokens, depth)[-max(16, self.page_size) :]

    def segment(self, tokens: Prefix, depth: int) -> tuple[int, Prefix]:
        begin = max(BLOCK_PAGES, depth - depth % STRIDE_PAGES)
        return begin, self.cut(tokens, begin)[-8:]

    def find(self, tokens: Prefix, old: int) -> list[tuple[int, Any]]:
        """(depth, what is known) of the ghosts after the first `old` pages, rising."""
        total = self.whole(tokens)
        found = []
        depth = (old // STRIDE_PAGES + 1) * STRIDE_PAGES
        while depth <= total and self.name(tokens, depth) in self.ghosts:
            found.append(depth)
            depth += STRIDE_PAGES
        last = [at for at in range(max(old, depth - STRIDE_PAGES) + 1, min(depth - 1, total) + 1)
                if self.name(tokens, at) in self.ghosts
                and self.segment(tokens, at) in self.segments.values()]  # fmt: skip
        return [self.ghosts[self.name(tokens, at)] for at in found + last[-1:]]

    def remove_found(self, tokens: Prefix, found: list[tuple[int, Any]]) -> None:
        for depth, _ in found:
            self.drop(self.name(tokens, depth))

    def drop(self, name: tuple[int, Prefix]) -> tuple[int, Any]:
        self.segments.pop(name, None)
        return self.ghosts.pop(name)

    def add_ghosts(self, place: Place, path: int, known: Any) -> list[tuple[int, Any]]:
        """A page whose last path had `path` pages was evicted; returns the ghosts that are
        forgotten for it."""
        depth = self.whole(place[1])
        if depth % STRIDE_PAGES and depth != path:
            return []
        name = self.name(place[1], depth)
        if name in self.ghosts:
            self.drop(name)
        self.ghosts[name] = (depth, known)
        if depth % STRIDE_PAGES:
            self.segments[name] = self.segment(place[1], depth)
        forgotten = []
        while (
            sum((depth - 1) % STRIDE_PAGES + 1 for depth, _ in self.ghosts.values()) > GHOST_PAGES
        ):
            forgotten.append(self.drop(next(iter(self.ghosts))))
        return forgotten

    def forget_all(self) -> None:
        self.ghosts.clear()
        self.segments.clear()


HALF_LIFE_S = 20.0
TINY_PAGES, LONG_PAGES = 1, 3
TRUST, PERIOD = 2.0, 3

Kind = tuple[int, ...]  # class of the use count, class of how much was new; or of a trunk

NO_TRUNK = (0, 0)


@dataclass(frozen=True)
class Known:
    size: int
    turn: int
    path: int  # 0: it brought nothing of its own
    now_s: float
    trunk: tuple[int, int]  # pages, how often paths parted there
    tick: int


@dataclass(frozen=True)
class End:
    kind: Kind
    start_s: float
    age_s: float


class AdaptiveModel(GhostModel):
    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__(page_size, policy)
        self.forget_all()

    def forget_all(self) -> None:
        super().forget_all()
        self.starts: list[tuple[float, list[Kind]]] = []
        self.times_s: list[float] = []  # starts are told apart by the last of these before them
        self.returns: list[End] = []
        self.losses: list[End] = []
        self.worths = self.work_out()

    # --- uses -------------------------------------------------------------------------------------

    def look_up(self, use: ModelUse, tokens: Prefix, namespace: Hashable, old: int) -> list[int]:
        before = use.goes_on_from or self.before(tokens, namespace, old)
        # A lock at the end of the last path there goes on from that, whatever is remembered beyond.
        ends_here = use.visit and before is not None and before.known.path == old
        ghosts = [] if ends_here and not use.brings else self.find(tokens, old)
        if not use.visit and before is not None:
            was = before.known
            path = use.covers if was.path or use.brings else 0
            use.known = Known(was.size, was.turn, path, use.now_s, was.trunk, use.tick)
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
        if old < use.known.trunk[0] < use.covers:  # it was gone
            use.marks[use.known.trunk[0]] = "unknown"
        self.remove_found(tokens, ghosts)
        return bases

    def first_use(self, use: ModelUse, last: Known | None, known: int, new: int) -> None:
        goes_on = last is not None and last.path == known
        turn, trunk = 1, NO_TRUNK
        if goes_on and last is not None:
            turn, trunk = last.turn + 1, last.trunk
            self.returns += self.ends(counted(last), last, use.now_s)
        elif known and new:
            times = 1
            if last is not None and known <= last.trunk[0]:
                times = last.trunk[1] + 1
                self.returns += self.ends([trunk_kind(last.trunk)], last, use.now_s)
            trunk = known, times
            self.start(use.now_s, [trunk_kind(trunk)])
        has_end = goes_on or new > 0
        path = use.covers if has_end else 0
        use.known = Known(size_class(new), turn, path, use.now_s, trunk, use.tick)
        if has_end:
            self.start(use.now_s, counted(use.known))

    def start(self, now_s: float, kinds: list[Kind]) -> None:
        if not self.times_s or now_s - self.times_s[-1] >= 1.0:
            self.times_s.append(now_s)
        self.starts.append((now_s, kinds))
        if len(self.starts) % PERIOD == 0:
            self.thin_out()
            self.worths = self.work_out()

    def ends(self, kinds: list[Kind], last: Known, now_s: float) -> list[End]:
        began_s = min(last.now_s, self.starts[-1][0])
        return [End(kind, began_s, now_s - last.now_s) for kind in kinds]

    def gone(self, place: Place, page: ModelPage) -> None:
        known = (visits(page), page.last.known)
        for depth, (_, last) in self.add_ghosts(place, page.last.known.path, known):
            if depth == last.path:
                now_s = max(self.starts[-1][0], last.now_s)
                self.losses += self.ends(counted(last), last, now_s)

    # --- what it is worth -------------------------------------------------------------------------

    def thin_out(self) -> None:
        kept: list[float] = []
        for time_s in self.times_s:
            if not kept or time_s - kept[-1] >= RESOLUTION * (self.starts[-1][0] - time_s):
                kept.append(time_s)
        self.times_s = kept

    def counts(self, kinds: list[Kind]) -> list[tuple[float, float]]:
        """(entered, returned) for each bin, of these classes together."""
        now_s = self.starts[-1][0] if self.starts else 0.0

        def weight(start_s: float) -> float:
            return 0.5 ** (now_s // HALF_LIFE_S - start_s // HALF_LIFE_S)  # type: ignore[no-any-return]

        def old_enough(start_s: float, at: int) -> bool:
            return max(one for one in self.times_s if one <= start_s) <= now_s - BEGINS_S[at]

        rows = []
        for at in range(NUM_BINS):
            entered = returned = 0.0
            for kind in kinds:
                ends = [end for end in self.returns + self.losses if end.kind == kind]
                out = sum(
                    weight(s) for s, others in self.starts if kind in others and old_enough(s, at)
                )
                out -= sum(weight(end.start_s) for end in ends if old_enough(end.start_s, at))
                entered += max(0.0, out)
                entered += sum(weight(end.start_s) for end in ends if in_bin(end.age_s) >= at)
                returned += sum(
                    weight(end.start_s)
                    for end in self.returns
                    if end.kind == kind and in_bin(end.age_s) == at
                )
            rows.append((entered, returned))
        return rows

    def work_out(self) -> dict[Kind, tuple[int, list[float]]]:
        """(peak, worth by bin) of each class."""
        sizes, counts = range(3), (1, 2, 3, 4, 5)
        common = smooth(
            self.counts([(count, size) for count in counts for size in sizes]), UNTAUGHT, 5 * TRUST
        )
        worths = {}
        groups: list[list[Kind]] = [[(count, size) for size in sizes] for count in counts]
        groups += [[(0, length, times) for times in range(3)] for length in sizes]
        for group in groups:
            alike = smooth(self.counts(group), common, TRUST)
            for kind in group:
                own = smooth(self.counts([kind]), alike, TRUST)
                index = [best_ratio(own, at) for at in range(NUM_BINS)]
                peak = index.index(max(index))
                worths[kind] = (
                    peak,
                    [
                        max(index[: at + 1]) if at < peak else max(index[at:])
                        for at in range(NUM_BINS)
                    ],
                )
        return worths

    def kind(self, place: Place) -> Kind:
        page = self.pages[place]
        times, last = visits(page), page.last.known
        if self.whole(place[1]) <= last.trunk[0]:
            return trunk_kind(last.trunk)
        if times == 1 and last.turn > 1:
            times = 2
        return count_class(times), last.size

    def rank(self, place: Place, now_s: float) -> tuple[float, int, int]:
        last = self.pages[place].last
        age_s = now_s - last.now_s
        peak, worth = self.worths[self.kind(place)]
        at = in_bin(age_s)
        if now_s and at < peak:
            return worth[at], 1, -last.tick
        return worth[at], 0, last.tick

    def choose(self, unwanted: list[Place], now_s: float, order: Sequence[int]) -> Place:
        """Where rounding may decide between two classes, the one that went first."""
        ranks = {place: self.rank(place, now_s) for place in unwanted}
        leasts: dict[Kind, Place] = {}  # of each class
        for place in sorted(unwanted, key=lambda place: ranks[place]):
            leasts.setdefault(self.kind(place), place)
        most = min(ranks.values())[0] * (1 + 1e-9)
        went = {page_id: at for at, page_id in enumerate(order)}
        return min(
            (place for place in leasts.values() if ranks[place][0] <= most),
            key=lambda place: went.get(self.pages[place].page_id, len(order)),
        )


def count_class(times: int) -> int:
    return times if times < 4 else 4 if times < 6 else 5


def size_class(pages: int) -> int:
    return 0 if pages <= TINY_PAGES else 1 if pages <= LONG_PAGES else 2


def trunk_kind(trunk: tuple[int, int]) -> Kind:
    pages, times = trunk
    return 0, size_class(pages), 0 if times < 3 else 1 if times < 6 else 2


def counted(known: Known) -> list[Kind]:
    if known.turn > 2:
        return [(2, known.size), (count_class(known.turn), known.size)]
    return [(known.turn, known.size)]


def in_bin(age_s: float) -> int:
    return max(at for at in range(NUM_BINS) if BEGINS_S[at] <= age_s)


def smooth(counts: list[tuple[float, float]], chance: Any, trust: float) -> list[float]:
    return [
        (returned + trust * chance[at]) / (entered + trust)
        for at, (entered, returned) in enumerate(counts)
    ]


def best_ratio(chance: list[float], first: int) -> float:
    ratios = []
    out, uses, seconds = 1.0, 0.0, 0.0
    for at in range(first, NUM_BINS):
        uses += out * chance[at]
        seconds += out * LENGTHS_S[at] * (1 - 0.5 * chance[at])
        ratios.append(uses / seconds)
        out *= 1 - chance[at]
    return max(ratios)
