"""Decode's checkpoints against a naive model, and a memory that knows what each slot and each page
was written with.

The model has a dictionary from paths (all tokens, from the first one) to what is kept there. By the
rules of docs/architecture.md it says which checkpoint a request goes on from, where it leaves
others, which of them get a slot, and which one goes for that. Of the real scheduler it is told what
happens (a request was admitted, a room has succeeded), and of the real tree, which has a model of
its own, what paths it has. Prefill and the engine are played by hand.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixkv.cache.checkpoints import NO_SLOT
from prefixkv.config import ComputeConfig
from prefixkv.decode.flights import Need, Segment
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.sources import Sources
from prefixkv.digest import prompt_digest
from prefixkv.errors import OutOfPagesError, TransferError
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager
from prefixkv.pages.windows import WindowSpec
from prefixkv.paging import pages_for
from prefixkv.protocol.commands import AbortRoom, OpenRoom
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.request import Request
from tests.support.timed import DecodeScheduler

P = 4  # tokens per page
STEP = 6  # most tokens of a chunk
OWN = 5  # slots of requests
Tokens = tuple[int, ...]


class Done:
    """A device event."""

    done = False

    def query(self) -> bool:
        return self.done


@dataclass(eq=False)
class Point:
    """A checkpoint, naively."""

    uses: int = 0
    tick: int = 0
    superseded: bool = False
    locks: int = 0


@dataclass(eq=False)
class Run:
    """What the model knows of a request: the point that it goes on from, slots that it has filled
    and that are of no point yet, and how deep the last point is that it knows of."""

    req: DecodeRequest
    epoch: int = 0
    point: Point | None = None
    locked: bool = False
    pending: list[tuple[int, int]] = field(default_factory=list)  # tokens, slot
    known: int = 0
    dense: int = 0  # tokens of its path that were cached when it was admitted
    done: int = -1  # of one that is computed here
    computes: bool = False  # all that it lacks is computed here
    sent_len: int = 0  # tokens up to which prefill sends it
    may_keep_sent: bool = False  # what it was sent became no older than the cache


class Machine:
    """One decode scheduler under a random engine. `tight`: of window pages there are few, so that
    checkpoints also go for these; the model then bounds what is lost, and in which order."""

    def __init__(
        self, seed: int, has_state: bool = True, window: int = 0, tight: bool = False
    ) -> None:
        chance = self.chance = random.Random(seed)
        self.has_state, self.tight = has_state, tight
        self.step = chance.choice([P, P, 2 * P])
        self.num_points = chance.choice([1, 2, 3, 6])
        specs = []
        if window:
            most = 2 * pages_for(window + STEP, P) + 2
            num = most + chance.randint(0, 10) if tight else 12 * most
            specs.append(WindowSpec("w", window, num, STEP))
        self.pages = PageManager(
            chance.choice([24, 32, 60]), P, 6, policy="lru", num_slots=OWN if has_state else 0,
            num_checkpoints=self.num_points, windows=specs,
        )  # fmt: skip
        self.pages.hash_every_pages = 1
        config = ComputeConfig(below=1000, ask=chance.choice(["late", "late", "both"]))
        self.scheduler = DecodeScheduler(
            self.pages, reserve_tokens=0, sources=Sources(config), checkpoint_tokens=self.step,
            max_retries=1,
        )  # fmt: skip
        compute = self.scheduler.compute
        self.reach = compute.reach
        compute.reach = self.reaches  # type: ignore[method-assign]
        compute.is_best = self.is_best  # type: ignore[method-assign]
        assert self.pages.checkpoints is not None
        self.real = self.pages.checkpoints
        self.now_s, self.rooms = 0.0, 0
        # Memory: by page (of the window group, by page) what each of its tokens was written with;
        # by slot the tokens that the state is of.
        self.kv: dict[int, dict[int, Tokens]] = {}
        self.last: dict[int, dict[int, Tokens]] = {}
        self.state: dict[int, Tokens] = {}
        # The model.
        self.points: dict[Tokens, Point] = {}
        self.gone: list[Point] = []  # but locked
        self.taken: list[int] = []
        self.tick = 0
        self.runs: dict[DecodeRequest, Run] = {}
        self.deferred: list[tuple[Done, Run, int | None]] = []
        self.opened: dict[RoomKey, tuple[OpenRoom, Tokens]] = {}
        self.failed: dict[RoomKey, OpenRoom] = {}  # a write may still land
        self.running: list[DecodeRequest] = []
        self.talks: list[Tokens] = [tuple(chance.choices([1, 2], k=chance.randint(6, 30)))]
        self.seen: Counter[str] = Counter()

    # --- the model --------------------------------------------------------------------------------

    def cached(self, path: Tokens) -> bool:
        return self.pages.cache.match_prefix(list(path)).prefix_len >= len(path) // P * P

    def deepest(self, req: DecodeRequest) -> Tokens:
        """Of all paths that have a point, the longest that a request could go on from."""
        if not req.request.cacheable:
            return ()
        tokens = tokens_of(req)
        usable = len(tokens) if req.resumed else len(tokens) - 1
        fits = [
            path for path in self.points
            if tokens[: len(path)] == path and len(path) <= usable and self.cached(path)
        ]  # fmt: skip
        return max(fits, key=len, default=())

    def use(self, point: Point) -> None:
        point.uses += 1
        point.superseded = False
        self.touch(point)

    def touch(self, point: Point) -> None:
        self.tick += 1
        point.tick = self.tick

    def in_order(self) -> list[Tokens]:
        """Those that may be given up, the first to go first."""
        may_go = [path for path, point in self.points.items() if not point.locks]
        return sorted(may_go, key=lambda at: (not self.points[at].superseded, self.points[at].tick))

    def take(self) -> bool:
        """A slot, if there is one; another point goes for it if none is free."""
        if len(self.points) + len(self.gone) + len(self.taken) == self.num_points:
            order = self.in_order()
            if not order:
                self.seen["without a slot"] += 1
                return False
            del self.points[order[0]]
            self.seen["given up"] += 1
        return True

    def took(self, run: Run, at: int, slot: int) -> None:
        """The real one has given it. `slot`: of the checkpoints."""
        assert slot in range(self.num_points)
        assert slot not in self.taken, "H12: another request fills it"
        run.pending.append((at, slot))
        self.taken.append(slot)

    def give_back(self, run: Run) -> None:
        for _, slot in run.pending:
            self.taken.remove(slot)
        run.pending.clear()

    def may_save(self, run: Run) -> bool:
        return run.req.request.cacheable and run.epoch == self.pages.epoch

    def enter(self, run: Run, kept: int) -> None:
        """Slots become points, as far as their path is cached: `kept` tokens of the request are."""
        for at, slot in run.pending:
            self.taken.remove(slot)
            path = tokens_of(run.req)[:at]
            if at > kept or run.epoch != self.pages.epoch:
                self.seen["given back"] += 1
                continue
            run.known = max(run.known, at)
            if (there := self.points.get(path)) is not None:
                self.use(there)
                continue
            point = self.points[path] = Point()
            self.seen["saved"] += 1
            self.touch(point)
            parent = run.point
            if parent is not None and parent in self.points.values() and parent.uses <= 1:
                parent.superseded = True
        run.pending.clear()

    def unlock(self, run: Run) -> None:
        if run.locked:
            assert run.point is not None
            run.locked = False
            run.point.locks -= 1
            if not run.point.locks and run.point in self.gone:
                self.gone.remove(run.point)

    def end(self, run: Run) -> None:
        self.unlock(run)
        self.give_back(run)
        run.point, run.known = None, 0

    def enter_came(self, run: Run, fill_len: int, kept: int) -> None:
        """What a request came with becomes a point before anything takes its slot."""
        if run.pending and run.pending[-1][0] == fill_len:
            self.enter(run, kept)

    def leave(self, run: Run, keep: int | None, before: dict[str, Any]) -> None:
        """A request has ended, of which `keep` tokens stay. `before`: what it had."""
        req, kv_len = run.req, before["kv_len"]
        kept = kv_len // P * P
        if keep is not None and keep < kv_len:
            kept = max(keep, before["fill_len"]) // P * P
        if not req.request.cacheable:
            self.end(run)
            return
        self.enter_came(run, before["fill_len"], kept)
        if self.pages.windows and self.may_save(run):
            if not self.has_state:
                at = kept // self.step * self.step
                if at > run.known and self.has_window(before["first"], at) and self.take():
                    self.note_left(run, at)
            else:
                for at, slot in list(run.pending):
                    if not self.has_window(before["first"], at):
                        run.pending.remove((at, slot))
                        self.taken.remove(slot)
        self.enter(run, kept)
        self.end(run)

    def note_left(self, run: Run, at: int) -> None:
        """A window that was kept, and is entered next: no call has told its slot."""
        self.taken.append(-1)
        run.pending.append((at, -1))

    def has_window(self, first: int, at: int) -> bool:
        return first <= self.pages.windows[0].first_page(at)

    # --- memory -----------------------------------------------------------------------------------

    def write(self, req: DecodeRequest, start: int, end: int, tokens: Tokens) -> None:
        for at in range(start, end):
            self.kv.setdefault(int(req.pages[at // P]), {})[at % P] = tokens[: at + 1]
            if self.pages.windows:
                first, ids = req.window_pages("w")
                self.last.setdefault(int(ids[at // P - first]), {})[at % P] = tokens[: at + 1]

    def read(self, req: DecodeRequest, end: int, tokens: Tokens) -> None:
        """What the engine would see behind `end` tokens."""
        for at in range(end):
            assert self.kv[int(req.pages[at // P])].get(at % P) == tokens[: at + 1], "law 8"
        if self.pages.windows:
            (group,) = self.pages.windows
            first, ids = req.window_pages("w")
            for at in range(max(0, end + 1 - group.window), end):
                page = self.last.get(int(ids[at // P - first]), {})
                assert page.get(at % P) == tokens[: at + 1], "law 8: in a window"

    def send(self, opened: OpenRoom, tokens: Tokens | None) -> None:
        """What prefill writes: the KV of these tokens; None: that of another prompt."""
        promise = opened.promise
        if tokens is None:
            tokens = (-1,) * promise.fill_len
        for number, page in enumerate(promise.page_ids().tolist(), promise.prefix_len // P):
            for at in range(number * P, min(promise.fill_len, number * P + P)):
                self.kv.setdefault(page, {})[at % P] = tokens[: at + 1]
        groups = promise.group_ids()
        for group, ids in zip(self.pages.windows, groups, strict=False):
            for number, page in enumerate(ids.tolist(), group.first_page(promise.fill_len)):
                for at in range(number * P, min(promise.fill_len, number * P + P)):
                    self.last.setdefault(page, {})[at % P] = tokens[: at + 1]
        if self.has_state:
            self.state[int(groups[-1][0])] = tokens

    def scribble(self) -> None:
        """What is free may be anything: nothing reads it."""
        for page in self.pages.allocator.pages_in(PageState.FREE).tolist():
            self.kv.pop(page, None)
        for group in self.pages.windows:
            for page in group.allocator.pages_in(PageState.FREE).tolist():
                self.last.pop(page, None)
        if self.pages.slots is not None:
            free = self.pages.slots.pages_in(PageState.FREE).tolist()
            for slot in [*free, *(OWN + slot for slot in self.real.free_slots)]:
                self.state.pop(slot, None)

    # --- what happens -----------------------------------------------------------------------------

    def arrive(self) -> None:
        """The next turn of a talk, with its last answer or without it; the same prompt again; or
        one that branches off."""
        if len(self.scheduler.requests) > 6:
            return
        tokens = self.chance.choice(self.talks)
        if self.chance.random() < 0.4:
            tokens = tokens[: self.chance.randint(1, len(tokens))]
        tokens = tokens + tuple(self.chance.choices([1, 2, 3], k=self.chance.choice([0, 1, 3, 9])))
        if len(tokens) > 44:
            return
        for _ in range(self.chance.choice([1, 1, 2])):
            self.rooms += 1
            request = Request(
                f"r{self.rooms}", list(tokens), max_new_tokens=self.chance.choice([1, 3, 12]),
                room=self.rooms, prefill="p", cacheable=self.chance.random() < 0.9,
                may_compute=self.chance.random() < 0.9,
            )  # fmt: skip
            req = self.scheduler.add(request, self.now_s)
            self.runs[req] = Run(req)

    def reaches(self, need: Need) -> Segment | None:
        """Called in the middle of an admission, with what the real one has found."""
        found, req = self.reach(need), need.req
        self.lose()
        path = self.deepest(req)
        if found is not None:
            assert found.start == len(path), f"{path} is what {req} could go on from"
        self.runs[req].dense = self.dense(req)
        assert (found is not None) == req.request.may_compute
        return found

    def is_best(self, need: Need, segment: Segment) -> bool:
        return segment.start == segment.end or self.chance.random() < 0.6

    def dense(self, req: DecodeRequest) -> int:
        found = self.pages.match(req.key, req.request.cacheable)
        return 0 if found is None else found.prefix_len

    def admit(self) -> None:
        self.release()
        admitted = self.scheduler.pop_preallocated(self.now_s)
        for req in admitted:
            run = self.runs[req]
            run.epoch, run.done = self.pages.epoch, -1
            flight = self.scheduler.flights.of(req)
            run.computes = flight is not None and flight.source is self.scheduler.compute
            if not run.computes:
                continue
            path = self.deepest(req)
            if path:
                run.point, run.locked = self.points[path], True
                self.use(run.point)
                run.point.locks += 1
            run.known = len(path)
            self.seen["gone on from"] += bool(path)
        for req in admitted:
            if self.runs[req].computes:
                at = len(self.path_of(self.runs[req]))
                assert req.prefix_len == at, "it goes on from the deepest"
        asks = {ask.rid: ask for ask in self.scheduler.pop_needs_prefill()}
        for command in self.scheduler.take_commands():
            if isinstance(command, OpenRoom):
                self.open(command, asks)
            elif isinstance(command, AbortRoom):
                self.fail(command.key)
            else:
                self.scheduler.room_drained(command.key)

    def open(self, command: OpenRoom, asks: dict[str, Any]) -> None:
        """What is promised names the prompt that prefill is to compute, and no more of it."""
        key = RoomKey(command.promise.room, command.promise.generation)
        flight = self.scheduler.prefill.open.get(key)
        if flight is None:
            return
        req = flight.owner
        assert req is not None
        end = command.promise.fill_len
        tokens = tokens_of(req)
        rest = len(tokens) - end
        assert command.digest == prompt_digest(req.key.prefix(end))
        is_asked = req.rid in asks
        if is_asked:
            ask = asks[req.rid]
            assert tuple(ask.tokens.tolist()) == tokens[:end]
            assert rest == 0 or ask.known_token == tokens[end]
        # As little of the end as makes the depth of a checkpoint; nothing where it could not be.
        can_keep = is_asked and req.request.cacheable and req.request.may_compute
        at = len(tokens) // self.step * self.step
        if can_keep and at and at >= command.promise.prefix_len:
            assert rest == len(tokens) - at, "what was sent leaves a checkpoint"
        else:
            assert rest == 0
        self.runs[req].sent_len = end
        self.opened[key] = command, tokens

    def path_of(self, run: Run) -> Tokens:
        return next((path for path, one in self.points.items() if one is run.point), ())

    def fail(self, key: RoomKey) -> None:
        command, _ = self.opened.pop(key, (None, ()))
        if command is not None:
            self.failed[key] = command
        self.scheduler.room_ended(key, KVPoll.FAILED, TransferError("broken"), b"", self.now_s)

    def room(self) -> None:
        """A room succeeds or fails; one that has failed may be written until it is drained."""
        if self.failed and self.chance.random() < 0.4:
            key = self.chance.choice(list(self.failed))
            if self.chance.random() < 0.5:
                self.send(self.failed[key], None)
            else:
                del self.failed[key]
                self.scheduler.room_drained(key)
            return
        if not self.opened:
            return
        key = self.chance.choice(list(self.opened))
        if self.chance.random() < 0.1:
            self.fail(key)
            return
        command, tokens = self.opened.pop(key)
        self.send(command, tokens[: command.promise.fill_len])
        flight = self.scheduler.prefill.open.get(key)
        owner = None if flight is None else flight.owner
        self.scheduler.room_ended(key, KVPoll.SUCCESS, None, b"", self.now_s)
        if owner is not None and command.promise.fill_len < len(tokens):
            self.seen["sent up to a checkpoint"] += 1
            run = self.runs[owner]
            run.may_keep_sent = self.may_save(run)
            if not self.has_state and run.may_keep_sent:
                self.kept(run, command.promise.fill_len)

    def kept(self, run: Run, at: int) -> None:
        """A window that has just been kept by itself, without a call that gives its slot."""
        if self.tight and (not run.req.saved or run.req.saved[-1][0] * P != at):
            self.seen["without room"] += 1
            return
        if self.take():
            self.took(run, at, run.req.saved[-1][1])
        else:
            assert all(depth * P != at for depth, _ in run.req.saved)

    def begin(self) -> None:
        for req in self.scheduler.pop_local(self.now_s):
            run, tokens = self.runs[req], tokens_of(req)
            run.done = start = req.prefix_len
            is_sent = not run.computes
            stops = {start} if is_sent and self.has_state and run.may_keep_sent else set()
            if not is_sent and req.request.cacheable:
                ends = (len(tokens), run.dense)
                stops = {end // self.step * self.step for end in ends}
                stops = {end for end in stops if end > start}
            assert req.stops == sorted(stops)
            if self.has_state and start:
                assert is_sent == (req.checkpoint_slot == req.state_slot)
                assert self.state.get(req.checkpoint_slot) == tokens[:start], "H12"
                self.state[req.state_slot] = self.state[req.checkpoint_slot]
            assert self.has_state or req.checkpoint_slot == NO_SLOT
            if start == req.fill_len:
                self.computed(run, start)

    def compute(self) -> None:
        runs = [run for run in self.runs.values() if run.done >= 0 and not run.req.state.ended]
        if not runs:
            return
        run = self.chance.choice(runs)
        req, tokens, start = run.req, tokens_of(run.req), run.done
        end = min(req.fill_len, start + self.chance.randint(1, STEP))
        if self.pages.windows:
            end = min([end, *(at for at in req.stops if at > start)])
        self.read(req, start, tokens)
        if self.has_state:
            assert start == 0 or self.state[req.state_slot] == tokens[:start]
            for at in [at for at in req.stops if start <= at <= end]:
                if self.chance.random() < 0.1:  # an engine need not
                    continue
                self.save(run, at, tokens[:at])
            self.state[req.state_slot] = tokens[:end]
        self.write(req, start, end, tokens)
        self.computed(run, end)

    def save(self, run: Run, at: int, tokens: Tokens) -> None:
        slot = self.scheduler.save_state(run.req, at, self.now_s)
        if self.tight and slot == NO_SLOT:
            self.seen["without room"] += 1
            return
        if self.take():
            self.took(run, at, slot - OWN)
            self.state[slot] = tokens
        else:
            assert slot == NO_SLOT

    def computed(self, run: Run, end: int) -> None:
        req = run.req
        is_stop = not self.has_state and end in req.stops
        self.scheduler.computed(req, end, self.now_s, b"")
        self.unlock(run)
        run.done = -1 if end == req.fill_len else end
        if is_stop:
            self.kept(run, end)

    def start(self) -> None:
        """What has arrived runs, and what it came with is entered."""
        came = self.scheduler.pop_transferred(self.now_s)
        for req in came:
            run, tokens = self.runs[req], tokens_of(req)
            self.read(req, len(tokens), tokens)
            assert not self.has_state or self.state[req.state_slot] == tokens
            whole = req.fill_len
            is_kept = self.pages.windows and not self.has_state and not run.computes
            if is_kept and whole % self.step == 0 and run.sent_len == whole and self.may_save(run):
                self.kept_at_once(run, whole)
            self.enter(run, whole // P * P)
        for req in came:
            # The page for a first token may be had only by the end of one behind it.
            if not req.state.ended and not req.resumed:
                self.append([req], [self.chance.randint(1, 3)])
            if not req.state.ended:
                self.running.append(req)

    def kept_at_once(self, run: Run, at: int) -> None:
        """A window of one that was sent to its end: kept, and entered."""
        if self.tight and run.req.goes_on_at != at:
            self.seen["without room"] += 1
        elif self.take():
            self.note_left(run, at)

    def keep(self, reqs: Sequence[DecodeRequest]) -> None:
        copies = self.scheduler.save_states(reqs, self.now_s)
        for req in reqs:
            run, at = self.runs[req], req.kv_len
            if not self.has_state or at % self.step or at <= run.known or not self.may_save(run):
                continue
            self.enter_came(run, req.fill_len, req.fill_len // P * P)
            if run.pending:
                run.pending = [(at, run.pending[-1][1])]
            elif self.tight and at == req.fill_len and not req.saved:
                self.seen["without room"] += 1
                continue
            elif self.take():
                ((depth, slot),) = req.saved
                assert depth * P == at
                self.took(run, at, slot)
            else:
                assert not req.saved
                continue
            assert copies.pop(0) == (req.state_slot, OWN + run.pending[-1][1])
            assert self.state[req.state_slot] == tokens_of(req)
            self.state[OWN + run.pending[-1][1]] = self.state[req.state_slot]
        assert not copies, "nothing else is copied"

    def steps(self) -> None:
        reqs = [req for req in self.running if self.chance.random() < 0.7]
        reqs = [req for req in reqs if len(req.output) < req.max_new_tokens]
        self.keep(reqs)
        for req in reqs:
            tokens = tuple(req.tokens.tolist())
            self.read(req, len(tokens) - 1, tokens)
            self.write(req, len(tokens) - 1, len(tokens), tokens)
            if self.has_state:
                assert self.state[req.state_slot] == tokens[:-1]
                self.state[req.state_slot] = tokens
        self.append(reqs, [self.chance.randint(1, 3) for _ in reqs])

    def append(self, reqs: list[DecodeRequest], sampled: list[int]) -> None:
        while reqs:
            try:
                self.scheduler.append_many(reqs, sampled, self.now_s)
                return
            except OutOfPagesError as error:
                if not error.retract:
                    for req in reqs:
                        self.abort(req)
                    return
                out = self.scheduler.requests[error.retract[0]]
                sampled = [
                    token for req, token in zip(reqs, sampled, strict=True) if req is not out
                ]
                reqs = [req for req in reqs if req is not out]
                if out in self.running:
                    self.retract(out)
                else:
                    self.abort(out)

    def finish(self) -> None:
        due = [req for req in self.running if len(req.output) >= req.max_new_tokens]
        if not due and self.running and self.chance.random() < 0.2:
            due = [self.chance.choice(self.running)]
        for req in due:
            self.finish_one(req)

    def finish_one(self, req: DecodeRequest) -> None:
        if self.chance.random() < 0.9:
            self.keep([req])
        keep = self.chance.choice([None, None, req.prompt_len])
        after = self.event()
        tokens = tuple(req.tokens.tolist())
        self.talks = [*self.talks[-7:], self.chance.choice([tokens, tokens_of(req)])]
        if keep is not None:
            self.talks[-1] = tokens[:keep]
        how = {"after": after, "keep_tokens": keep}
        self.leaves(req, keep, after, lambda: self.scheduler.finish(req, self.now_s, **how))

    def event(self) -> Done | None:
        return Done() if self.chance.random() < 0.2 else None

    def retract(self, req: DecodeRequest) -> None:
        after = self.event()
        self.leaves(req, None, after, lambda: self.scheduler.retract(req.rid, self.now_s, after))

    def leaves(
        self, req: DecodeRequest, keep: int | None, after: Done | None, call: Callable[[], None]
    ) -> None:
        self.running.remove(req)
        run = self.runs[req]
        before = self.before(req)
        call()
        if after is None:
            self.leave(run, keep, before)
        else:
            self.deferred.append((after, run, keep))

    def before(self, req: DecodeRequest) -> dict[str, Any]:
        first = req.window_pages("w").first_page if self.pages.windows else 0
        return {"kv_len": req.kv_len, "fill_len": req.fill_len, "first": first}

    def release(self) -> None:
        """The device is done with some that have ended."""
        for event, _, _ in self.deferred:
            event.done |= self.chance.random() < 0.5
        due = [one for one in self.deferred if one[0].done]
        self.deferred = [one for one in self.deferred if not one[0].done]
        had = [self.before(run.req) for _, run, _ in due]
        self.scheduler.release_deferred(self.now_s)
        for (_, run, keep), before in zip(due, had, strict=True):
            self.leave(run, keep, before)

    def abort(self, req: DecodeRequest) -> None:
        if any(run.req is req for _, run, _ in self.deferred):
            return
        if req in self.running:
            self.running.remove(req)
        self.scheduler.abort(req.rid, self.now_s)

    def pop_failed(self) -> None:
        for req in self.scheduler.pop_failed():
            if req in self.running:
                self.running.remove(req)

    def turn(self) -> None:
        self.now_s += 0.01
        what = self.chance.random()
        if what < 0.12:
            self.arrive()
        elif what < 0.24:
            self.admit()
        elif what < 0.40:
            self.room()
        elif what < 0.46:
            self.begin()
        elif what < 0.60:
            self.compute()
        elif what < 0.68:
            self.start()
        elif what < 0.86:
            self.steps()
        elif what < 0.93:
            self.finish()
        elif what < 0.95:
            younger = [req for req in self.running if req is not self.running[0]]
            oldest = next(self.scheduler._growth.running(), None)
            younger = [req for req in younger if req is not oldest]
            if younger:
                self.retract(self.chance.choice(younger))
        elif what < 0.965:
            live = list(self.scheduler.requests.values())
            if live:
                self.abort(self.chance.choice(live))
        elif what < 0.97:
            self.scheduler.flush()
        elif what < 0.98:
            self.pop_failed()
        else:
            self.scribble()
        self.check()

    # --- checks -----------------------------------------------------------------------------------

    def lose(self) -> None:
        """Points whose path is cached no more."""
        for path in list(self.points):
            page = self.page_of(path)
            if page is None:
                point = self.points.pop(path)
                self.seen["lost with a page"] += 1
                if point.locks:
                    self.gone.append(point)
        if self.tight:
            # Others went for window pages: the first in order.
            there = {self.page_of(path): path for path in self.points}
            lost = [path for page, path in there.items() if page not in self.real._at]
            # In the middle of a pass some are locked of which the model has not been told.
            held = {page for page, one in self.real._at.items() if one.locks}
            order = [path for path in self.in_order() if self.page_of(path) not in held]
            order = order[: len(lost)]
            assert sorted(order) == sorted(lost), "the least worth keeping goes first"
            for path in lost:
                del self.points[path]
                self.seen["given up for a window"] += 1

    def page_of(self, path: Tokens) -> int | None:
        """The page that a path ends on, if it is cached; None after a flush too, though the same
        path may have come back."""
        match = self.pages.cache.match_prefix(list(path))
        return int(match.pages[-1]) if match.prefix_len == len(path) else None

    def check(self) -> None:
        for run in self.runs.values():
            if run.req.pages_held is None:
                self.end(run)
                run.done = -1
        self.lose()
        self.scheduler.check_invariants()
        pages = {self.page_of(path): path for path in self.points}
        assert set(pages) == set(self.real._at), "checkpoints are those of the model"
        for page, path in pages.items():
            assert page is not None
            one, point = self.real._at[page], self.points[path]
            assert one.depth * P == len(path)
            assert one.locks == point.locks, "H13"
            if self.has_state:
                assert self.state.get(OWN + one.slot) == path, "H12: its slot has its state"
            for group, ids in zip(self.pages.windows, one.windows, strict=True):
                first = group.first_page(len(path))
                assert len(ids) == len(path) // P - first
                for number, last in enumerate(ids.tolist(), first):
                    whole = {at: path[: number * P + at + 1] for at in range(P)}
                    assert self.last.get(last) == whole, "H10: a window page is whole"
        assert len(self.real.taken) == len(self.taken), "no slot is lost"
        free = self.num_points - len(self.points) - len(self.gone) - len(self.taken)
        assert len(self.real.free_slots) == free, "no slot is lost"
        self.runs = {
            req: run for req, run in self.runs.items()
            if not req.state.ended or req.pages_held is not None
        }  # fmt: skip

    def run(self, num_turns: int) -> Counter[str]:
        for _ in range(num_turns):
            self.turn()
        if self.chance.random() < 0.5:
            self.scheduler.end_all(TransferError("a rank is dead"), self.now_s)
            self.running.clear()
        for req in list(self.scheduler.requests.values()):
            self.abort(req)
        self.check()
        for event, _, _ in self.deferred:
            event.done = True
        self.release()
        self.pop_failed()
        for command in self.scheduler.take_commands():
            if isinstance(command, AbortRoom):
                self.fail(command.key)
                self.scheduler.room_drained(command.key)
            elif not isinstance(command, OpenRoom):
                self.scheduler.room_drained(command.key)
        for key in [*self.failed, *self.opened]:
            self.scheduler.room_drained(key)
        self.check()
        assert (self.real.num_locks, self.real.taken) == (0, []), "nothing is left"
        for group in self.pages.windows:
            assert not group.pins.any()
            assert not group.allocator.owned_pages
        return self.seen


STATES: dict[str, Any] = {}
WINDOWS: dict[str, Any] = {"has_state": False, "window": 6}
BOTH: dict[str, Any] = {"window": 9}
FEW_PAGES: dict[str, Any] = {"has_state": False, "window": 6, "tight": True}
FEW_OF_BOTH: dict[str, Any] = {"window": 6, "tight": True}
KINDS = (STATES, WINDOWS, BOTH, FEW_PAGES, FEW_OF_BOTH)


def tokens_of(req: DecodeRequest) -> Tokens:
    """Those with KV, or that are to have it."""
    return tuple(req.key.tokens().tolist())


def run(seed: int, num_turns: int = 1500, **kind: Any) -> Counter[str]:
    return Machine(seed, **kind).run(num_turns)
