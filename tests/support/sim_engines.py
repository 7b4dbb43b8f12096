"""A simulation whose ranks are put to work by schedulers with stand-in engines: whole workers, in
which every KV byte follows from the tokens. On either side rank 0 has the scheduler, and the others
follow its log. All laws are audited.

Of the library's glue, `RankLeader`, `RankLog` and `RowFollower` are real. The engines, and the
queues between scheduler and control object, are simulated.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

import benchmarks.policies.gated
import benchmarks.policies.gittins  # noqa: F401
from prefixkv.config import ModelConfig, PageOptions
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.rooms import Workers
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.errors import (
    HandshakeError,
    NotFiniteError,
    OutOfPagesError,
    PrefixKVError,
)
from prefixkv.memory.state_layout import StateTensor, check_state_pairs
from prefixkv.pages.allocator import PageState
from prefixkv.pages.groups import GroupSpec
from prefixkv.pages.manager import PageManager
from prefixkv.prefill.request import PrefillRequest
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.events import RoomEnded
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.leader import RankLeader, pack_rank_events
from prefixkv.ranks.row_log import RankLog, RankSizes, RowFollower
from prefixkv.request import Request
from tests.laws.auditor import assert_at_rest, audit_decode, audit_prefill
from tests.support.schedulers import decode_scheduler, prefill_scheduler, timed_by
from tests.support.sim import SIZES, Shape, Sim, Storm, scrambled, shape_of, storm_of
from tests.support.sim_rank import TIMING, DecodeRank, PrefillRank
from tests.support.state_memory import TENSORS

PAGE_SIZE = 4
ROWS = 8
SPOILT = np.uint64(0xBAD)  # what differs in KV that must not be used
_NO_PAGES = np.empty(0, np.int32)


class FollowedLog:
    """Rank 0's log, and the rows of the ranks above it, each of which reads at its own pace."""

    def __init__(self, sizes: RankSizes, num_ranks: int) -> None:
        self.log = RankLog()
        self.log.sizes = sizes
        self.followers = [RowFollower(sizes) for _ in range(num_ranks - 1)]
        self._unread = [deque[bytes]() for _ in self.followers]

    def publish(self, pages: PageManager, requests: Iterable[Any] = ()) -> None:
        """One message for all."""
        raw = self.log.take(pages, requests)
        for unread in self._unread:
            unread.append(raw)

    @property
    def late(self) -> list[int]:
        """Who has something to read, by place in `followers`."""
        return [at for at, unread in enumerate(self._unread) if unread]

    def read(self, at: int) -> list[Any]:
        """A message; returns the commands in it."""
        return self.followers[at].apply(self._unread[at].popleft()).commands

    def check(self, pages: PageManager, requests: Iterable[Any] = ()) -> None:
        """All has been read: every rank's rows are what rank 0's are."""
        for follower in self.followers:
            assert follower.is_like(pages, requests), "ranks: rows differ"


class Ranked:
    """An engine's ranks, of which the first one's scheduler decides, and the others follow."""

    ranks: Any
    scheduler: Any
    logged: FollowedLog
    leader: RankLeader[Any]

    def requests(self) -> Iterable[Any]:
        """Those that the log tells of."""
        return ()

    def take_commands(self) -> None:
        for command in self.scheduler.take_commands():
            self.leader.command(command)

    def publish(self) -> None:
        self.logged.publish(self.scheduler.pages, self.requests())

    def read(self, at: int) -> None:
        self.ranks[at + 1].inbox.extend(self.logged.read(at))

    def catch_up(self) -> None:
        """The engine's broadcast before it computes: all have read all."""
        if self.logged.followers:
            self.take_commands()
            self.publish()
            while late := self.logged.late:
                self.read(late[0])

    def compare_ranks(self) -> None:
        self.catch_up()
        self.logged.check(self.scheduler.pages, self.requests())


class PrefillEngine(Ranked):
    """One life of the prefill worker. Rank 0's scheduler decides, and the others follow its log,
    each at its own pace; but all know what is computed before it is."""

    def __init__(self, sim: EngineSim) -> None:
        self.sim = sim
        side = sim.sides[0]
        self.ranks = [sim.new_writer(rank) for rank in range(side.mesh.num_ranks)]
        windows = () if side.last is None else (side.last,)
        pages = PageManager(
            side.num_pages,
            side.page_size,
            ROWS,
            options=PageOptions(policy=sim.policy, num_saved=side.checkpoints, windows=windows),
        )
        pages.hash_every_pages = 1
        self.scheduler = prefill_scheduler(
            pages, timed_by(sim, PrefillScheduler), num_slots=side.num_slots,
            usable_prefix=self._usable_prefix if side.num_slots else None,
            model=ModelConfig(weights_version=sim.prefill_version),
        )  # fmt: skip
        self.usable: dict[RoomKey, int] = {}
        self.free_slots = list(range(side.num_slots))
        self.computing: dict[str, PrefillRequest] = {}
        self.failed: set[RoomKey] = set()  # as the engine was told
        sizes = RankSizes(
            "prefill", side.num_pages, side.page_size, ROWS, side.num_slots, windows=windows
        )
        self.logged = FollowedLog(sizes, len(self.ranks))
        submit, hear = self.ranks[0].inbox.append, self.scheduler.hear
        self.leader = RankLeader("prefill", len(self.ranks), self.logged.log, submit, hear)
        self.num_messages = Counter[PrefillRank]()

    def requests(self) -> Iterable[Any]:
        return self.scheduler.requests.values()

    @property
    def log_waits(self) -> bool:
        return bool(self.logged.late)

    def tell(self) -> None:
        self.take_commands()
        if self.logged.log.has_news(self.scheduler.pages):
            self.publish()

    def schedule(self) -> None:
        """One thing the engine's scheduler may do."""
        behind = self.logged.late
        said = [rank for rank in self.ranks if rank.events]
        if behind and self.sim.random.random() < 0.5:
            self.read(self.sim.pick(behind))
        elif said:
            self._hear(self.sim.pick(said))
        else:
            self._pass()

    def _hear(self, rank: PrefillRank) -> None:
        event = rank.events.popleft()
        if rank.rank:
            raw = pack_rank_events(rank.rank, self.num_messages[rank], [event])
            self.num_messages[rank] += 1
            self.leader.on_rank_events(raw, self.sim.now_s)
        else:
            self.leader.on(0, event, self.sim.now_s)

    def _pass(self) -> None:
        """Take what the scheduler hands out, and compute a chunk."""
        for req in self.scheduler.pop_bootstrapped():
            self.computing[req.rid] = req
        for req in self.scheduler.pop_failed():
            self.failed.add(req.room_key)
            self.computing.pop(req.rid, None)
            self._free_slot(req)
        for req in self.scheduler.pop_sent():
            self._free_slot(req)
        if self.computing:
            self._compute(self.sim.random.choice(list(self.computing.values())))

    def add(self, request: Request) -> None:
        try:
            self.scheduler.add(request)
        except PrefixKVError:
            self.sim.counters["refused by prefill"] += 1

    def abort(self, rid: str) -> None:
        self.computing.pop(rid, None)
        self.scheduler.abort(rid)

    def flush(self) -> None:
        self.scheduler.flush()

    def _free_slot(self, req: PrefillRequest) -> None:
        """No write may read it any more, so it is overwritten at once."""
        if req.state_slot >= 0:
            for rank in self.ranks:
                rank.scribble(_NO_PAGES, [req.state_slot], 0xEE)
            self.free_slots.append(req.state_slot)

    def _compute(self, req: PrefillRequest) -> None:
        assert not req.popped, "its pages may be another's"
        if req.plan is None or req.pages_held is None:
            return
        self.catch_up()
        last, hashes = self.sim.sides[0].last, self.hashes(req.tokens)
        start = max(req.plan.computed, req.prefix_len)
        end = min(req.num_tokens, start + self.sim.random.randint(1, 3 * PAGE_SIZE))
        end = min([end, *(at for at in req.stops if at > start)])
        is_last = end == req.num_tokens
        slot = -1
        if is_last and self.scheduler.num_slots:
            if not self.free_slots:
                return
            slot = self.free_slots.pop(0)
        if req.plan.computed == 0 and not req.state.ended:
            self.check(req)
        spoils = self.sim.spoils()
        computed = hashes[:end] ^ SPOILT if spoils else hashes[:end]
        views = [req, *(follower.request(req.rid) for follower in self.logged.followers)]
        for rank, view in zip(self.ranks, views, strict=True):
            assert (view.prefix_len, view.stops) == (req.prefix_len, req.stops)
            # What is there, of a former request or of this one's chunks, is right on each rank.
            rank.check_bytes(req, view.pages, hashes[:start])
            rank.fill(view.pages, start, computed, slot)
            if last is not None:
                row = view.window_pages(last.name)
                rank.check_last(req, row, hashes[:start], last.window)
                rank.fill_last(row, start, computed)
        if spoils:
            self.free_slots += [slot] * (slot >= 0)
            self._fail(req, end, is_last)
            return
        token = self.sim.next_token(req.tokens, self.scheduler.weights_version)
        aux = token.to_bytes(4, "little") if is_last else b""
        self.scheduler.send_chunk(req, end, is_last, aux, None, slot)
        if is_last:
            del self.computing[req.rid]

    def _fail(self, req: PrefillRequest, end: int, last: bool) -> None:
        """The chunk up to `end` must not be used: that is found before it is handed over or, unless
        it is the last one, at once after."""
        self.sim.counters["spoilt on prefill"] += 1
        if not last and self.sim.random.random() < 0.5:
            self.scheduler.send_chunk(req, end)
        self.scheduler.fail(req.rid, NotFiniteError("spoilt"))

    def hashes(self, tokens: np.ndarray) -> np.ndarray:
        """What the KV of these tokens is under prefill's weights."""
        return self.sim.hashes(tokens, self.scheduler.weights_version)

    def check(self, req: PrefillRequest) -> None:
        """What is cached already is right, in the window layers too."""
        rank, known = self.ranks[0], req.prefix_len
        hashes = self.hashes(req.tokens)[:known]
        assert known <= self.usable.get(req.room_key, known), "there is no state behind that"
        rank.check_bytes(req, req.pages, hashes)
        if (last := self.sim.sides[0].last) is not None:
            rank.check_last(req, req.window_pages(last.name), hashes, last.window)

    def _usable_prefix(self, req: PrefillRequest, prefix_len: int) -> int:
        self.usable[req.room_key] = self.sim.random.choice([0, prefix_len // 2, prefix_len])
        return self.usable[req.room_key]

    def scribble(self) -> None:
        """Overwrite all free pages, so that a write that still reads one shows."""
        for rank in self.ranks:
            rank.scribble(self.scheduler.pages.allocator.pages_in(PageState.FREE), (), 0xEE)
            for group in self.scheduler.pages.windows:
                rank.scribble_last(group.allocator.pages_in(PageState.FREE), 0xEE)

    def check_at_rest(self) -> None:
        self.compare_ranks()
        assert not any(map(len, self.logged.followers)), "a rank knows a request that is over"
        assert not len(self.leader), "a room is not over on all ranks"


class DecodeEngine(Ranked):
    """One life of the decode worker."""

    def __init__(self, sim: EngineSim) -> None:
        self.sim = sim
        sim.start_readers()
        self.ranks = sim.readers
        side = sim.sides[1]
        self.scheduler = sim.decode_scheduler()
        windows = () if side.last is None else (side.last,)
        rows = self.scheduler.pages.table.max_requests
        sizes = RankSizes(
            "decode", side.num_pages, side.page_size, rows, side.num_slots, windows=windows
        )
        self.logged = FollowedLog(sizes, len(self.ranks))
        submit, hear = self.ranks[0].inbox.append, self.scheduler.hear
        self.leader = RankLeader("decode", len(self.ranks), self.logged.log, submit, hear)
        sim.leader = self.leader
        self.running: dict[str, DecodeRequest] = {}
        self.local: dict[DecodeRequest, int] = {}  # what is computed here: tokens with KV
        self.kept: dict[int, int] = {}  # states in the slots of checkpoints, on every rank
        # Rooms that have ended on some ranks: on which, and when the first of them failed.
        self.ending: dict[RoomKey, tuple[set[int], list[float]]] = {}
        self.outcomes: dict[str, DecodeState] = {}

    def tell(self) -> None:
        self.take_commands()

    def schedule(self) -> None:
        """One thing the engine's scheduler may do."""
        scheduler = self.scheduler
        if said := [rank for rank in self.ranks if rank.events or rank.for_rank_0]:
            self.sim.hear(self.sim.pick(said))
            return
        scheduler.pop_preallocated()
        for ask in scheduler.pop_needs_prefill():
            rid, room = f"{ask.rid}/{ask.generation}", ask.room
            attempt = {"room": room, "generation": ask.generation, "decode": ask.decode}
            self.sim.submit(Request(rid, ask.tokens, **attempt))
        for req in scheduler.pop_transferred():
            # Starting one of these may have retracted another.
            if req.state is DecodeState.TRANSFERRED:
                self._start(req)
        for req in scheduler.pop_local():
            self.local[req] = req.prefix_len
        for req in self.pop_failed():
            self.running.pop(req.rid, None)
            self._ended(req)
        self.local = {req: end for req, end in self.local.items() if not req.state.ended}
        if self.local:
            self._compute(self.sim.random.choice(list(self.local)))
        if self.running:
            self._step(self.sim.random.choice(list(self.running.values())))
        self.tell()
        if self.log_waits:  # the pass is over: one message for all other ranks
            self.publish()

    # --- ranks ------------------------------------------------------------------------------------

    def room_ended(self, rank: DecodeRank, event: RoomEnded) -> None:
        on, failed_s = self.ending.setdefault(event.key, (set(), []))
        on.add(rank.rank)
        if event.poll is KVPoll.FAILED:
            failed_s.append(self.sim.now_s)
        if len(on) == len(self.ranks):
            del self.ending[event.key]

    def audit(self) -> None:
        """What fails on one rank fails on all, long before any deadline."""
        for key, (on, failed_s) in self.ending.items():
            late = failed_s and self.sim.now_s - failed_s[0] > 5.0
            assert not late, f"{key} has failed, and has ended on ranks {on} only"

    @property
    def log_waits(self) -> bool:
        return len(self.ranks) > 1 and self.logged.log.has_news(self.scheduler.pages)

    def follow(self) -> None:
        """One of the other ranks reads a message."""
        if late := self.logged.late:
            self.read(self.sim.random.choice(late))

    def _each_rank(self, req: DecodeRequest) -> list[DecodeRank]:
        """They are about to touch the request's pages."""
        self.catch_up()
        for follower in self.logged.followers:
            alike = follower.pages(req.row).tolist() == req.pages.tolist()
            assert alike, "ranks: pages differ"
            assert follower.state_slot(req.row) == req.state_slot, "ranks: slots differ"
            if (last := self.sim.sides[1].last) is not None:
                mine, its = req.window_pages(last.name), follower.window_pages(req.row, "last")
                alike = (mine.first_page, mine.ids.tolist()) == (its.first_page, its.ids.tolist())
                assert alike, "ranks: window pages differ"
        return self.ranks

    # --- the engine -------------------------------------------------------------------------------

    def hashes(self, tokens: np.ndarray) -> np.ndarray:
        """What the KV of these tokens is under decode's weights."""
        return self.sim.hashes(tokens, self.scheduler.weights_version)

    def next_token(self, tokens: np.ndarray) -> int:
        return self.sim.next_token(tokens, self.scheduler.weights_version)

    def verify(self, req: DecodeRequest) -> None:
        hashes = self.hashes(req.tokens[: req.kv_len])
        for rank in self._each_rank(req):
            rank.check_bytes(req, req.pages, hashes, req.state_slot)
            if (last := self.sim.sides[1].last) is not None:
                rank.check_last(req, req.window_pages(last.name), hashes, last.window)

    def _start(self, req: DecodeRequest) -> None:
        self.verify(req)
        self.running[req.rid] = req
        if not req.resumed:
            token = int.from_bytes(req.aux, "little")
            assert token == self.next_token(req.tokens), "aux is another request's"
            self._append(req, token)

    def _append(self, req: DecodeRequest, token: int) -> None:
        while True:
            try:
                self.scheduler.append_many([req], [token])
                return
            except OutOfPagesError as error:
                if not error.retract or error.retract[0] == req.rid:
                    # No other to take from: this one goes back itself, unless it is the oldest.
                    self._give_up(req)
                    return
                self._retract(error.retract[0])

    def _give_up(self, req: DecodeRequest) -> None:
        self.running.pop(req.rid, None)
        if not req.resumed:
            self.scheduler.abort(req.rid)
            return
        try:
            self._retract(req.rid)
        except PrefixKVError:
            self.scheduler.abort(req.rid)

    def _retract(self, rid: str) -> None:
        self.retract(rid)
        self.running.pop(rid, None)
        self.sim.retractions += 1

    def _step(self, req: DecodeRequest) -> None:
        """Write the KV of the token sampled last, sample the next one, and perhaps finish: that one
        has no KV then."""
        sim = self.sim
        if len(req.output) < req.max_new_tokens:
            tokens = req.tokens
            hashes = self.hashes(tokens)
            self._keep(req)
            if spoils := sim.spoils():
                hashes = hashes ^ SPOILT
            for rank in self._each_rank(req):
                rank.fill(req.pages, len(tokens) - 1, hashes, req.state_slot)
                if (last := sim.sides[1].last) is not None:
                    rank.fill_last(req.window_pages(last.name), len(tokens) - 1, hashes)
            if spoils:
                del self.running[req.rid]
                self.fail(req)
                return
            self._append(req, self.next_token(tokens))
        if req.rid not in self.running:  # its page went to another
            return
        if len(req.output) >= req.max_new_tokens or sim.random.random() < sim.finish_early:
            self.verify(req)
            self._keep(req)
            del self.running[req.rid]
            self.finish(req)
            self._ended(req)
            sim.continue_conversation(req)

    def pop_failed(self) -> list[DecodeRequest]:
        return self.scheduler.pop_failed()

    def _compute(self, req: DecodeRequest) -> None:
        """Compute a chunk of a prompt here: what comes before it is right already."""
        sim, start = self.sim, self.local[req]
        end = min(req.fill_len, start + sim.random.randint(1, 2 * PAGE_SIZE))
        tokens = req.key.tokens()
        hashes = self.hashes(tokens)
        if (last := sim.sides[1].last) is not None:
            end = min([end, *(at for at in req.stops if at > start)])  # a window is kept there
        assert end > start or req.resumed, "the first token is sampled from something"
        flight = self.scheduler.flights.by_owner.get(req)
        assert flight is not None
        is_first = start == req.prefix_len
        is_sent = flight.rest is not None
        if hasattr(self.scheduler.sources.get("computed"), "points") and is_first and start:
            sim.counters["ends of what was sent" if is_sent else "checkpoints gone on from"] += 1
        if has_state := req.state_slot >= 0:
            if is_first and start and not is_sent:
                state = self.kept[req.checkpoint_slot]
                assert state == hashes[start - 1], f"H12: {req} goes on from another state"
            assert (req.checkpoint_slot >= 0) == (req.prefix_len > 0)
            assert not is_sent or req.checkpoint_slot == req.state_slot
        computed = hashes ^ SPOILT if (spoils := sim.spoils()) else hashes
        for rank in self._each_rank(req):
            slot = req.state_slot if has_state and (is_sent or not is_first) else -1
            rank.check_bytes(req, req.pages, hashes[:start], slot)
            rank.fill(req.pages, start, computed[:end], req.state_slot)
            if last is not None:
                rank.check_last(req, req.window_pages(last.name), hashes[:start], last.window)
                rank.fill_last(req.window_pages(last.name), start, computed[:end])
        for at in [at for at in req.stops if start <= at <= end]:
            assert at > start or is_sent
            if (slot := self.scheduler.save_state(req, at)) >= 0:
                self.kept[slot] = int(computed[at - 1])
        if spoils:
            if sim.random.random() < 0.5:
                self.computed(req, start, end)
            del self.local[req]
            self.fail(req)
            return
        self.local[req] = end
        aux = b""
        if end == req.fill_len:
            del self.local[req]
            if not req.resumed:
                aux = self.next_token(tokens).to_bytes(4, "little")
        self.computed(req, start, end, aux)
        sim.counters["chunks computed on decode"] += 1

    def _keep(self, req: DecodeRequest) -> None:
        """Copy the state of a request at a page boundary, which is right."""
        for source, slot in self.scheduler.save_states([req]):
            assert source == req.state_slot
            hashes = self.hashes(req.tokens[: req.kv_len])
            for rank in self._each_rank(req):
                rank.check_bytes(req, req.pages, hashes, source)
            self.kept[slot] = int(hashes[-1])

    def computed(self, req: DecodeRequest, start: int, end: int, aux: bytes = b"") -> None:
        self.scheduler.computed(req, end, aux)

    def finish(self, req: DecodeRequest) -> None:
        self.scheduler.finish(req)

    def fail(self, req: DecodeRequest) -> None:
        self.scheduler.fail(req.rid, NotFiniteError("spoilt"))
        self.sim.counters["spoilt on decode"] += 1

    def retract(self, rid: str) -> None:
        self.scheduler.retract(rid)

    def _ended(self, req: DecodeRequest) -> None:
        assert req.rid not in self.outcomes, f"{req} ended twice"
        self.outcomes[req.rid] = req.state

    def scribble(self) -> None:
        """Overwrite all free pages, so that one freed too early shows."""
        pages = self.scheduler.pages
        slots = [] if pages.slots is None else pages.slots.pages_in(PageState.FREE).tolist()
        if (points := pages.saves).num_slots and pages.slots is not None:
            for slot in points.free_slots:
                self.kept.pop(pages.slots.num_pages + slot, None)
        for rank in self.ranks:
            rank.scribble(pages.allocator.pages_in(PageState.FREE), slots, 0xDD)
            for group in pages.windows:
                rank.scribble_last(group.allocator.pages_in(PageState.FREE), 0xDD)


@dataclass
class EngineSim(Sim):
    """See the module's text. Conversations are started one by one; each goes on for a few turns.

    Page counts are in pages of 4 tokens. Of extra state, prefill has twice `num_slots`.
    """

    decode_pages: int = 24
    prefill_pages: int = 32
    num_requests: int = 10
    failure_policy: str = "fail"
    num_slots: int = 0  # 0: there is no extra state
    window: int = 0  # of layers beside, in tokens; 0: there are none
    window_pages: tuple[int, int] = (40, 30)  # prefill's and decode's, of these layers
    window_heads: int = 1  # of these layers, for each head of the first ones
    decode_step: int = 1  # most tokens of a chunk that decode computes, there
    checkpoints: int = 0
    tensors: tuple[StateTensor, ...] = TENSORS
    spoilt_rate: float = 0.0  # of forwards, on both sides
    audit_every: int = 1  # steps

    def __post_init__(self) -> None:
        super().__post_init__()
        self.retractions = self.finished = 0
        self.reuse_rooms = self.random.choice([0.0, 0.5])
        self.reused: set[int] = set()
        self.policy = self.random.choice(["adaptive", "gated", "lru", "gittins", "slru"])
        self.finish_early = self.random.choice([0.03, 0.2])
        sizes, slots = self.shape.page_sizes, self.num_slots
        num_pages = self.prefill_pages * 4 // sizes[0], self.decode_pages * 4 // sizes[1]
        names = "prefill-0", "decode-0"
        self.sides = self.shape.sides(names, num_pages, self.tensors, (2 * slots, slots))
        if self.window:
            steps = 3 * PAGE_SIZE, self.decode_step
            self.sides = tuple(
                replace(
                    side,
                    last=GroupSpec("last", self.window, self.window_pages[at], steps[at]),
                    last_heads=self.window_heads,
                    checkpoints=(self.checkpoints, 0)[at],
                )
                for at, side in enumerate(self.sides)
            )  # type: ignore[assignment]
        self._to_submit: list[Request] = []
        self._next_room = 0
        self.start_prefill()
        self.decode = self.new_decode()

    def start_prefill(self) -> None:
        self.prefill = PrefillEngine(self)
        self.writers = self.prefill.ranks

    def new_decode(self) -> DecodeEngine:
        return DecodeEngine(self)

    def decode_scheduler(self) -> DecodeScheduler:
        return decode_scheduler(
            self.decode_page_manager(), timed_by(self, DecodeScheduler),
            reserve_tokens=self.random.choice([0, 4]),
            max_retries=int(self.failure_policy == "retry"),
            admission=("hit_aware", "fifo", "priority")[self.seed % 3], patience_s=2.0,
            waiting_timeout_s=0.8 * TIMING.bootstrap_timeout_s, name=self.readers[0].me.name,
            ticket=self.next_ticket, workers=Workers(True, TIMING.bootstrap_timeout_s),
        )  # fmt: skip

    def next_ticket(self) -> int:
        self._ticket += 1
        return scrambled(self._ticket)

    def decode_page_manager(self) -> PageManager:
        side = self.sides[1]
        windows = () if side.last is None else (side.last,)
        options = PageOptions(policy=self.policy, num_slots=side.num_slots, windows=windows)
        pages = PageManager(side.num_pages, side.page_size, ROWS, options=options)
        pages.hash_every_pages = 1
        return pages

    # --- chance and content -----------------------------------------------------------------------

    def pick(self, of: list[Any]) -> Any:
        """Where there is but one, nothing is drawn."""
        return self.random.choice(of) if len(of) > 1 else of[0]

    def spoils(self) -> bool:
        """Whether a forward computes what must not be used: its engine then fails the request."""
        return self.spoilt_rate > 0 and self.happens(self.spoilt_rate)

    def hashes(self, tokens: np.ndarray, version: str) -> np.ndarray:
        """What KV follows from these tokens, under weights of this version."""
        salt = int.from_bytes(blake2b(version.encode(), digest_size=8).digest()) if version else 0
        return self.hasher.prefixes(tokens) ^ np.uint64(salt)

    def next_token(self, tokens: np.ndarray, version: str) -> int:
        """The token 'sampled' after these, under weights of this version: on both sides alike."""
        return int(self.hashes(tokens, version)[-1] % np.uint64(5))

    def _tokens(self, least: int, most: int, low: int = 0) -> list[int]:
        count = self.random.randint(least, most)
        return [low + self.random.randint(0, 2 if low else 1) for _ in range(count)]

    def add_request(self) -> None:
        """A new conversation (all share a system prompt), submitted to decode and, some time, to
        prefill."""
        self._submit([1] * 6 + self._tokens(1, 14))

    def add_burst(self) -> None:
        """Conversations with one new system prompt, all at once; some go on with the same tokens
        for a while."""
        system = self._tokens(PAGE_SIZE, 4 * PAGE_SIZE, low=2)
        for _ in range(self.random.randint(2, 5)):
            token = self.random.randint(0, 1)
            self._submit(system + [token] * self.random.randint(0, 2 * PAGE_SIZE))

    def continue_conversation(self, req: DecodeRequest) -> None:
        self.finished += 1
        if len(req.tokens) < 40 and not self.calm:
            self._submit(req.tokens.tolist() + self._tokens(1, 6))

    def _submit(self, tokens: list[int]) -> None:
        rid = f"r{self._next_room}"
        more: Any = {"room": self._room_number(), "cacheable": self.random.random() < 0.9}
        more["decode"] = self.readers[0].me.name
        most = self.random.randint(1, 24)
        address = self.addresses[0]
        request = Request(rid, tokens, max_new_tokens=most, prefill=address, **more)
        try:
            self.decode.scheduler.add(request)
        except PrefixKVError:
            return
        self.submit(Request(rid, tokens, **more))

    def _room_number(self) -> int:
        """A new number, or one whose request has ended on both sides (words about it may still be
        under way)."""
        self._next_room += 1
        live = {req.room for side in self.schedulers for req in side.requests.values()}
        live |= {request.room for request in self._to_submit}
        ended = sorted(set(range(self._next_room - 1)) - live)
        if ended and self.random.random() < self.reuse_rooms:
            room = self.random.choice(ended)
            self.reused.add(room)
            return room
        return self._next_room - 1

    def submit(self, request: Request) -> None:
        """The router hands a request to prefill, at some later step: perhaps when decode has done
        with it, and then its own deadline ends it there."""
        request.deadline_s = 2 * TIMING.bootstrap_timeout_s
        self._to_submit.append(request)

    def submit_one(self) -> None:
        if self._to_submit:
            self.prefill.add(self._to_submit.pop(self.random.randrange(len(self._to_submit))))

    # --- what is said -----------------------------------------------------------------------------

    def said(self, rank: Any, event: Any) -> None:
        rank.events.append(event)
        if isinstance(event, RoomEnded):
            again = event.key in rank.ended and event.key.room not in self.reused
            assert not again, f"law 7: {event.key} ended twice"
            rank.ended[event.key] = event.poll
            if isinstance(rank, DecodeRank):
                self.decode.room_ended(rank, event)

    # --- faults -----------------------------------------------------------------------------------

    def faults(self) -> None:
        storm, roll = self.storm, self.random.random
        if roll() < storm.abort / self.pace:
            self._abort_one()
        if roll() < storm.flush / self.pace:
            self.random.choice([self.decode.scheduler, self.prefill]).flush()
        if roll() < storm.restart / self.pace:
            ways = "stopped", "killed", "left"
            ends = [partial(self.restart_prefill, how) for how in ways]
            self.random.choice([*ends, self.restart_decode])()

    def restart_prefill(self, how: str) -> None:
        """A new life of all ranks answers at the same addresses."""
        for old in self.prefill.ranks:
            self.end_writer(old, how)
        self.start_prefill()

    def restart_decode(self) -> None:
        self.end_readers()
        self.decode = self.new_decode()

    def _abort_one(self) -> None:
        decode = self.decode.scheduler
        live, waits_on = list(decode.requests), [f for f in decode.flights if f.waiters]
        needed = [flight.owner.rid for flight in waits_on if flight.owner]
        if needed and self.random.random() < 0.3:
            decode.abort(self.random.choice(needed))
        elif live and self.random.random() < 0.7:
            decode.abort(self.random.choice(live))
        elif self.prefill.scheduler.requests:
            self.prefill.abort(self.random.choice(list(self.prefill.scheduler.requests)))

    # --- laws -------------------------------------------------------------------------------------

    def after_step(self) -> None:
        self.decode.tell()
        self.prefill.tell()
        if self.num_steps % self.audit_every:
            return
        self.audit()
        if self.random.random() < 0.2:
            self.decode.scribble()
            self.prefill.scribble()
            self.check_ranks()

    def audit(self) -> None:
        audit_decode(self.decode.scheduler, self.pick(self.readers).control)
        self.decode.audit()
        audit_prefill(self.prefill.scheduler)
        self.audit_outcomes()

    def audit_outcomes(self) -> None:
        for key in self.readers[0].ended:
            ends = {reader.ended.get(key) for reader in self.readers}
            if ends == {KVPoll.SUCCESS} and key.room not in self.reused:
                wrong = {writer.ended.get(self.sent(key)) for writer in self.writers} - {
                    None,
                    *ends,
                }
                assert not wrong, f"law 7: {key} succeeded where prefill failed"
                told = self.sent(key) in self.prefill.failed
                assert not told, f"law 7: {key} succeeded and prefill's engine was told it failed"

    def may_write(self, key: RoomKey, route: str, ids: np.ndarray) -> None:
        """Pages of the first group, slots of states, pages of a window."""
        pages = self.decode.scheduler.pages
        flight = self.decode.scheduler.prefill.open.get(key)
        of = pages.allocator if route == "pages" else pages.slots
        if route not in ("pages", "state"):
            of = pages.windows[0].allocator
        if flight is None:
            allowed = of.held_by(key).tolist()
        elif route == "pages":
            allowed = pages.pages(flight.pages)[flight.pages.num_shared :].tolist()
        elif route == "state":
            allowed = [pages.state_slot(flight.pages.row)]
        else:
            allowed = pages.windows[0].row(flight.pages.row).ids.tolist()
        assert set(ids.tolist()) <= set(allowed), f"{route} of {key} land in {ids}, not {allowed}"

    # --- a run ------------------------------------------------------------------------------------

    def choices(self) -> list[Callable[[], object]]:
        work = [self._busy(self.writers).work, self._busy(self.readers).work]
        work += [self.prefill.schedule, self.decode.schedule, self.tick, self.submit_one]
        return work + [self.decode.follow] * (len(self.readers) - 1)

    def _busy(self, ranks: list[Any]) -> Any:
        """One with something to do, if there is one."""
        return self.pick([rank for rank in ranks if rank.inbox] or ranks)

    @property
    def pace(self) -> int:
        """How many times as many steps as with one rank a side anything takes."""
        return len(self.ranks) // 2

    def start(self) -> None:
        for _ in range(self.num_requests):
            self.random.choice([self.add_request, self.add_request, self.add_burst])()
            for _ in range(self.random.randint(0, 40) * self.pace):
                self.step()
        for _ in range(400 * self.pace):
            self.step()

    @property
    def schedulers(self) -> list[Any]:
        return [self.decode.scheduler, self.prefill.scheduler]

    def quiet(self) -> bool:
        ranks = any(rank.inbox or rank.events for rank in self.ranks)
        rooms = any(reader.control.num_rooms for reader in self.readers)
        requests = any(scheduler.requests for scheduler in self.schedulers)
        logs = self.decode.log_waits or self.prefill.log_waits
        return not (ranks or rooms or requests or self._to_submit or logs)

    def idle(self) -> bool:
        decode = self.decode.running or self.decode.local
        engines = decode or self.prefill.computing or self._to_submit or self.decode.logged.late
        news = any(scheduler.has_results for scheduler in self.schedulers)
        return super().idle() and not engines and not news

    def is_over(self, taken: int) -> bool:
        if self.idle():
            self.now_s += 0.5
        return taken % 100 == 0 and self.quiet() and not self.leftovers()

    def assert_at_rest(self) -> None:
        assert not self.leftovers(), f"stuck: {self.leftovers()}"
        for engine in (self.decode, self.prefill):
            while any(rank.events for rank in engine.ranks):
                engine.schedule()
            engine.schedule()
        self.decode.compare_ranks()
        self.prefill.check_at_rest()
        for scheduler in self.schedulers:
            assert_at_rest(scheduler)
        rooms = [str(reader.me) for reader in self.readers if reader.control.num_rooms]
        assert not rooms, f"rooms are left on {rooms}"


# --- ranks, staging, everything -------------------------------------------------------------------

_STORM = {
    "drop": 0.06, "duplicate": 0.3, "reorder": 0.5, "junk": 0.03, "abort": 0.02, "fail_copy": 0.05,
    "fail_at_post": 0.03, "fail_at_check": 0.04, "lose_notification": 0.01, "restart": 0.004,
    "flush": 0.005, "slow_writes": 1.0, "slow_copies": 1.0,
}  # fmt: skip


def simulation(
    seed: int, storm: Storm | None = None, kind: Any = EngineSim,
    sizes: list[tuple[int, int]] = SIZES, **more: Any,
) -> Any:  # fmt: skip
    """Schedulers, ranks (tp and pp of each side are of `sizes`), staging, extra state: all follow
    from the seed."""
    chance = random.Random(seed)
    shape, storms = shape_of(chance, sizes), storm_of(chance, _STORM)
    num_slots = chance.choice([0, 0, 8, 3])
    try:
        check_state_pairs(TENSORS, *shape.meshes)
    except HandshakeError:
        num_slots = 0
    return kind(
        seed, storms if storm is None else storm, shape,
        decode_pages=chance.choice([14, 18, 40]), prefill_pages=chance.choice([16, 32]),
        failure_policy=chance.choice(["fail", "retry"]), num_slots=num_slots, **more,
    )  # fmt: skip


def with_windows(seed: int) -> EngineSim:
    """Workers of one to four ranks, of equal and of unequal sizes, and layers that keep a window,
    of as many heads as the first ones, or of twice as many; with checkpoints and without."""
    chance = random.Random(seed)
    ranks = chance.choice([(2, 2), (3, 3), (2, 1), (1, 2), (4, 2), (2, 4), (1, 3)])
    shape = Shape(
        prefill=(ranks[0], 1), decode=(ranks[1], 1), num_layers=1, head_bytes=8,
        num_heads=chance.choice([1, max(ranks), max(ranks)]), staging=chance.choice([0, 1.5]),
    )  # fmt: skip
    return EngineSim(
        seed, storm_of(chance, _STORM), shape,
        decode_pages=chance.choice([14, 18, 40]), prefill_pages=chance.choice([16, 32]),
        failure_policy=chance.choice(["fail", "retry"]),
        window=chance.choice([2, 5, 9, 14]), window_pages=(48, chance.choice([10, 30])),
        window_heads=1 if shape.num_heads == 1 else chance.choice([1, 2]),
        checkpoints=chance.choice([0, 2, 5]),
    )  # fmt: skip
