"""Window groups and their checkpoints against a naive model, and a memory that knows what each page
of each group was written with.

The model has sets: a page is free where no row and no checkpoint has it. It says which checkpoint
is found, what is evicted for a request, and whether one fits.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import prefixkv.assembly  # noqa: F401 - its parts, also where no conftest is loaded
from prefixkv.cache.checkpoints import NO_SLOT, Checkpoint, Checkpoints
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import PageOptions
from prefixkv.pages.groups import GroupSpec, GroupStart
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.paging import pages_for

P = 4  # tokens per page
Tokens = tuple[int, ...]


@dataclass(eq=False)
class Point:
    """A checkpoint, naively. `windows`: by group, its page ids."""

    windows: list[set[int]]
    real: Checkpoint
    uses: int = 0
    tick: int = 0
    superseded: bool = False
    locks: int = 0


@dataclass(eq=False)
class Live:
    """A request that computes its tokens, chunk by chunk."""

    tokens: Tokens
    pages: RequestPages
    done: int
    parent: Tokens | None
    point: Point | None
    locked: bool = False
    pending: list[tuple[int, int, list[set[int]]]] = field(default_factory=list)
    passed: list[set[int]] = field(default_factory=list)  # shared pages that its rows have left


class Machine:
    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.step_tokens = chance.choice([1, 3, 8])
        self.sizes = [chance.choice([1, 2, 5, 9, 13])]
        if chance.random() < 0.4:
            self.sizes.append(self.sizes[0] + chance.choice([0, 4, 7]))
        specs = []
        for number, window in enumerate(self.sizes):
            most = pages_for(window + self.step_tokens, P) + 1 + pages_for(window - 1, P)
            num = most + chance.randint(0, 12)
            specs.append(GroupSpec(f"w{number}", window, num, self.step_tokens))
        self.pages = PageManager(
            chance.choice([20, 40, 80]),
            P,
            4,
            options=PageOptions(
                policy="lru", num_saved=chance.choice([1, 3, 8, 30]), windows=specs
            ),
        )
        assert isinstance(self.pages.saves, Checkpoints)
        self.real = self.pages.saves
        self.groups = self.pages.windows
        self.memory: list[dict[int, dict[int, Tokens]]] = [{} for _ in self.groups]
        self.points: dict[Tokens, Point] = {}
        self.gone: list[Point] = []  # but locked
        self.live: list[Live] = []
        self.tick = 0
        self.stems = [[chance.randint(1, 2) for _ in range(30)] for _ in range(3)]
        self.rows: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # as last looked at
        self.seen = dict.fromkeys(["resumed", "evicted", "refused", "saved", "shared"], 0)

    # --- the model --------------------------------------------------------------------------------

    def row(self, live: Live, number: int) -> dict[int, int]:
        first, ids = self.groups[number].row(live.pages.row)
        return {first + at: page for at, page in enumerate(ids.tolist())}

    def used(self, number: int) -> tuple[set[int], set[int]]:
        """Pages of a group that something has, and those of them that cannot be given up."""
        pinned: set[int] = set()
        for live in self.live:
            pinned |= set(self.row(live, number).values()) | live.passed[number]
            pinned |= {page for _, _, windows in live.pending for page in windows[number]}
        kept: set[int] = set()
        for point in [*self.points.values(), *self.gone]:
            kept |= point.windows[number]
            if point.locks:
                pinned |= point.windows[number]
        return kept | pinned, pinned

    def free(self, number: int) -> int:
        return self.groups[number].allocator.num_pages - len(self.used(number)[0])

    def evict(self) -> bool:
        """The least worth keeping, superseded ones first. False: none can go."""
        may_go = {prefix: one for prefix, one in self.points.items() if not one.locks}
        if not may_go:
            return False
        least = min(may_go, key=lambda prefix: (not may_go[prefix].superseded, may_go[prefix].tick))
        del self.points[least]
        self.seen["evicted"] += 1
        return True

    def use(self, point: Point, counts: bool = True) -> None:
        self.tick += 1
        point.tick = self.tick
        if counts:
            point.uses += 1
            point.superseded = False

    def lose_dropped(self) -> None:
        """Checkpoints whose page has left the tree."""
        for prefix in list(self.points):
            if self.pages.cache.match_prefix(list(prefix)).prefix_len < len(prefix):
                point = self.points.pop(prefix)
                if point.locks:
                    self.gone.append(point)

    # --- what happens -----------------------------------------------------------------------------

    def prompt(self) -> Tokens:
        stem = self.chance.choice(self.stems)
        tokens = stem[: self.chance.randint(1, len(stem))]
        tokens = tokens + [self.chance.randint(1, 2) for _ in range(self.chance.randint(0, 12))]
        if self.chance.random() < 0.3 and len(tokens) < 44:
            stem[:] = tokens
        return tuple(tokens)

    def start(self) -> None:
        if len(self.live) == 4:
            return
        tokens = self.prompt()
        key = RadixKey(list(tokens)).prefix(len(tokens) - 1)
        match = self.pages.match(key)
        assert match is not None
        found = self.real.find(match)
        # 1. The deepest that the path has, and no other.
        depths = [len(prefix) for prefix in self.points if tokens[: len(prefix)] == prefix]
        deepest = max((depth for depth in depths if depth <= match.prefix_len), default=0)
        assert deepest == (0 if found is None else found.depth * P), "the deepest is found"
        point = self.points[tokens[:deepest]] if deepest else None
        assert point is None or point.real is found
        # 2. Whether it fits.
        shared = () if found is None else found.windows
        start = GroupStart(deepest, pages_for(len(tokens), P), shared)
        fits = True
        needs = []
        for number, window in enumerate(self.sizes):
            first = max(0, deepest - window + 1) // P
            has = set() if point is None else point.windows[number]
            assert len(has) == deepest // P - first, "a checkpoint has all of its window"
            needs.append(self.groups[number].own_pages(start, number))
            used, pinned = self.used(number)
            fits &= needs[-1] <= self.free(number) + len(used - pinned - has)
        assert (self.pages.windows.short_of(start) is None) == fits, f"{needs} of {start}"
        if not fits:
            self.seen["refused"] += 1
            return
        match = self.pages.match(key.prefix(deepest))
        assert match is not None
        new = pages_for(len(tokens), P) - deepest // P
        if new > self.pages.available_pages - match.unprotected_pages:
            return
        # 3. It holds its checkpoint, others go as far as they have to.
        if found is not None and point is not None:
            self.real.use(found)
            self.real.lock(found)
            point.locks += 1
            self.use(point)
            self.seen["resumed"] += 1
        while any(self.free(number) < need for number, need in enumerate(needs)) and self.evict():
            pass
        pages = self.pages.open(match, new, 1.0, start=start)
        parent = tokens[:deepest] if deepest else None
        self.live.append(
            Live(
                tokens,
                pages,
                deepest,
                parent,
                point,
                deepest > 0,
                passed=[set() for _ in self.groups],
            )
        )
        self.lose_dropped()

    def compute(self) -> None:
        live = self.chance.choice(self.live) if self.live else None
        if live is None or live.done == len(live.tokens):
            return
        end = min(len(live.tokens), live.done + self.chance.randint(1, self.step_tokens))
        self.read(live)
        for number in range(len(self.groups)):
            row, memory = self.row(live, number), self.memory[number]
            for at in range(live.done, end):
                assert at // P in row, f"token {at} has no page in {row}"
                memory.setdefault(row[at // P], {})[at % P] = live.tokens[: at + 1]
        live.done = end
        if end % P == 0 and self.chance.random() < 0.5:
            self.keep(live)
        self.move(live, lambda: self.pages.slide(live.pages, end))
        self.unlock(live)

    def move(self, live: Live, call: Callable[[], object]) -> None:
        """Own pages stay in the row. Shared ones that leave it are the request's until its end."""
        before = [set(self.row(live, number).values()) for number in range(len(self.groups))]
        call()
        for number, had in enumerate(before):
            live.passed[number] |= had - set(self.row(live, number).values())

    def unlock(self, live: Live) -> None:
        if live.locked:
            assert live.point is not None
            self.real.unlock(live.point.real)
            live.locked = False
            live.point.locks -= 1
            if not live.point.locks and live.point in self.gone:
                self.gone.remove(live.point)

    def keep(self, live: Live) -> None:
        """A checkpoint at the end of what is computed."""
        depth, end_pages = live.done // P, pages_for(len(live.tokens), P)
        windows = self.pages.windows
        needs = [one.num_replaced(live.pages.row, depth, end_pages) for one in windows]
        fits = all(
            need <= self.free(number) + len(self.used(number)[0] - self.used(number)[1])
            for number, need in enumerate(needs)
        )
        said = windows.num_replaced(live.pages.row, depth, end_pages)
        assert said == (needs if fits else None)
        if not fits:
            return
        before = [self.row(live, number) for number in range(len(self.groups))]
        has_slot = len(self.points) + len(self.gone) + self.num_pending < self.real.num_slots
        if not has_slot:
            has_slot = self.evict()
        slot = self.real.take()
        assert (slot != NO_SLOT) == has_slot
        if slot == NO_SLOT:
            return
        while any(self.free(number) < need for number, need in enumerate(needs)) and self.evict():
            pass
        self.real.make_room(needs)
        assert not windows.lacks(needs)
        self.move(
            live, lambda: self.real.attach(slot, windows.share(live.pages.row, depth, end_pages))
        )
        kept = []
        for number, window in enumerate(self.sizes):
            first = max(0, live.done - window + 1) // P
            kept.append({before[number][at] for at in range(first, depth)})
        live.pending.append((depth, slot, kept))
        self.seen["shared"] += 1

    @property
    def num_pending(self) -> int:
        return sum(len(live.pending) for live in self.live)

    def read(self, live: Live) -> None:
        """What the next chunk sees: whole, of this path, and of these positions."""
        for number, window in enumerate(self.sizes):
            row = self.row(live, number)
            for at in range(max(0, live.done - window + 1), live.done):
                assert at // P in row, f"token {at} is in no page of {row}"
                found = self.memory[number].get(row[at // P], {}).get(at % P)
                assert found == live.tokens[: at + 1], f"token {at} of group {number} is another's"

    def commit(self, live: Live) -> None:
        """What is computed goes to the tree, and then what was kept there to the checkpoints."""
        key = RadixKey(list(live.tokens[: live.done]))
        self.pages.cache_unfinished(live.pages, key, 1.0, being_read=True)
        left = []
        for depth, slot, windows in live.pending:
            if depth > live.pages.num_locked:
                left.append((depth, slot, windows))
                continue
            prefix = live.tokens[: depth * P]
            page = int(self.pages.pages(live.pages)[depth - 1])
            parent = None if live.point is None else live.point.real
            self.real.save(page, depth, slot, parent)
            if prefix in self.points:
                self.use(self.points[prefix])
                continue
            made = Point(windows, self.real._at[page])
            self.use(made, counts=False)
            self.points[prefix] = made
            self.seen["saved"] += 1
            is_there = live.point in self.points.values()
            if live.point is not None and is_there and live.point.uses <= 1:
                live.point.superseded = True
        live.pending = left

    def end(self) -> None:
        if not self.live:
            return
        live = self.chance.choice(self.live)
        self.unlock(live)
        if self.chance.random() < 0.8:
            self.commit(live)
        for _, slot, _ in live.pending:
            self.real.give_back(slot)
        self.live.remove(live)
        self.pages.drop(live.pages)

    def publish(self) -> None:
        if self.live:
            self.commit(self.chance.choice(self.live))

    def flush(self) -> None:
        self.pages.flush()
        self.gone += [point for point in self.points.values() if point.locks]
        self.points.clear()

    def turn(self) -> None:
        what = self.chance.random()
        if what < 0.25:
            self.start()
        elif what < 0.75:
            self.compute()
        elif what < 0.85:
            self.publish()
        elif what < 0.99:
            self.end()
        else:
            self.flush()
        self.check()

    def check(self) -> None:
        self.pages.check_invariants()
        for number, group in enumerate(self.groups):
            used, _ = self.used(number)
            assert group.allocator.free_pages == group.allocator.num_pages - len(used), (
                f"H11: {used} of group {number}"
            )
            for row in group.rows_in_use:
                first, ids = group.row(row)
                now = int(group.changes[row]), (first, *ids.tolist())
                num_changes, before = self.rows.get((number, row), (-1, ()))
                assert num_changes != now[0] or before == now[1], "a change that is not counted"
                self.rows[number, row] = now
            for live in self.live:
                own = {page for page in self.row(live, number).values() if not group.refs[page]}
                assert len(own) <= group.row_pages, "a request has a bounded number of pages"
        real = {point.real.page for point in self.points.values()}
        assert real == set(self.real._at), "checkpoints are those of the model"
        for prefix, point in self.points.items():
            assert not point.real.is_gone
            for number, window in enumerate(self.sizes):
                ids = point.real.windows[number].tolist()
                assert set(ids) == point.windows[number]
                first = max(0, len(prefix) - window + 1) // P
                for at, page in enumerate(ids, start=first):
                    whole = {slot: prefix[: at * P + slot + 1] for slot in range(P)}
                    assert self.memory[number].get(page) == whole, "H10: a window page is whole"

    def run(self, num_turns: int) -> dict[str, int]:
        for _ in range(num_turns):
            self.turn()
        while self.live:
            self.end()
            self.check()
        return self.seen


def run(seed: int, num_turns: int = 300) -> dict[str, int]:
    return Machine(seed).run(num_turns)
