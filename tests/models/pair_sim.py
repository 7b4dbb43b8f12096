"""A whole decode side and a whole prefill side in one process, joined by a bad network, all from
one seed.

Real: tree, allocator, page table, queues, machines, endpoints, KV bytes. Simulated: the network
(delay, reorder, duplicates, drops), the transport (`FakeFabric`), the clock, the two engines, and
the threads between scheduler and endpoint (their queues are emptied at random moments). Each `step`
lets one thing happen and audits all laws.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixkv.config import ControlConfig, TransportConfig
from prefixkv.control import decode as decode_endpoint
from prefixkv.control import prefill as prefill_endpoint
from prefixkv.control.decode import DecodeEndpoint
from prefixkv.control.prefill import PrefillEndpoint
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.errors import OutOfPagesError, PrefixKVError, RequestError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateLayout, StateTensor
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageBooks
from prefixkv.prefill import scheduler as prefill_scheduler
from prefixkv.prefill.request import PrefillRequest
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol import commands as decode_commands
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Hello, ModelDigest, Topology
from prefixkv.protocol.tags import ChunkTag
from prefixkv.request import Request
from prefixkv.testing.fabric import FakeFabric
from prefixkv.testing.hashing import PrefixHasher
from prefixkv.testing.pattern import KVPattern
from prefixkv.transport.base import Arrived, Settled, WriteDone, WriteDrained, WriteFailed, WriteJob
from tests.models.auditor import assert_at_rest, audit_decode, audit_prefill
from tests.models.state_memory import StateMemory

ADDRESS = "tcp://prefill"
PAGE_SIZE = 4
SALT = 7
_STATE = (StateTensor("a", 0, 1, (8,)), StateTensor("b", 0, 2, (3,), "uint8"))
TIMING = ControlConfig(
    heartbeat_s=1.0, suspect_after_s=4.0, forget_after_s=50.0, resend_s=0.3,
    bootstrap_timeout_s=20.0, waiting_timeout_s=30.0, transfer_timeout_s=30.0, ack_timeout_s=10.0,
    drain_timeout_s=8.0, parked_timeout_s=10.0,
)  # fmt: skip


@dataclass
class Chaos:
    """Probabilities, per frame or per step."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    abort: float = 0.0
    fail_at_post: float = 0.0
    fail_at_check: float = 0.0
    lose_notification: float = 0.0
    restart: float = 0.0
    junk: float = 0.0
    flush: float = 0.0


STORMS = {
    "calm": Chaos(),
    "network": Chaos(drop=0.08, duplicate=0.1, reorder=0.3),
    "late frames": Chaos(duplicate=0.4, reorder=0.6, abort=0.06),
    "junk": Chaos(junk=0.1, drop=0.02),
    "aborts": Chaos(abort=0.05, reorder=0.2, duplicate=0.1),
    "writes fail": Chaos(fail_at_post=0.05, fail_at_check=0.08, lose_notification=0.2),
    "restarts": Chaos(restart=0.006, drop=0.03),
    "flushes": Chaos(flush=0.02, abort=0.01),
    "everything": Chaos(
        drop=0.05, duplicate=0.05, reorder=0.2, abort=0.02, fail_at_post=0.02, fail_at_check=0.03,
        lose_notification=0.1, restart=0.003, junk=0.02, flush=0.003,
    ),
}  # fmt: skip


class PrefillSide:
    """One incarnation of the prefill worker: library and stand-in engine."""

    def __init__(self, sim: PairSim, num_pages: int) -> None:
        self.sim = sim
        self.me = PeerId("prefill-0", sim.next_incarnation())
        self.pool = _pool(num_pages)
        self.pattern = KVPattern(self.pool.layout, SALT, self.pool)
        self.state = sim.state_memory(2 * sim.num_slots)
        self.free_slots = list(range(2 * sim.num_slots))
        self.usable: dict[RoomKey, int] = {}
        self.scheduler = PrefillScheduler(
            PageBooks(num_pages, PAGE_SIZE, 8, policy=sim.policy), num_slots=2 * sim.num_slots,
            usable_prefix=self._usable_prefix if sim.num_slots else None,
        )  # fmt: skip
        digest = _digest(self.pool, self.state)
        self.endpoint = PrefillEndpoint(self.me, digest, Topology(PAGE_SIZE), TIMING, (ADDRESS,))
        self.commands: deque[Any] = deque()
        self.events: deque[Any] = deque()
        self.computing: dict[str, PrefillRequest] = {}
        self.ended: dict[RoomKey, KVPoll] = {}
        self.failed: set[RoomKey] = set()  # as the engine was told
        self.stopped = False
        self.transport = sim.fabric.transport(
            self.me, self.pool.layout, self.commands.append, TransportConfig(post_descriptors=3),
            (self.pool, self.state), state=_layout(self.state),
        )  # fmt: skip

    def tell(self) -> None:
        self.commands.extend(self.scheduler.take_commands())

    def work(self) -> None:
        """One thing the control thread may do."""
        now_s = self.sim.now_s
        if not self.commands:
            self.act(self.endpoint.tick(now_s))
            return
        match self.commands.popleft():
            case prefill_scheduler.AddRoom(key, num_tokens):
                try:
                    self.act(self.endpoint.add(key, num_tokens, now_s))
                except (
                    RequestError
                ) as error:  # as the control thread does: the number is in use still
                    self.act([sender.RoomEnded(key, KVPoll.FAILED, error), sender.SourceFree(key)])
            case prefill_scheduler.SendChunk() as chunk:
                self.act(
                    self.endpoint.chunk(
                        chunk.key,
                        chunk.first_page,
                        chunk.src_pages,
                        chunk.last,
                        chunk.aux,
                        chunk.ready,
                        now_s,
                        chunk.state_slot,
                    )
                )
            case prefill_scheduler.AbortRoom(key, error):
                self.act(self.endpoint.abort(key, error, now_s))
            case WriteDone(job_id, _):
                self.act(self.endpoint.on_write_ended(job_id, None, True, now_s))
            case WriteFailed(job_id, error, drained):
                self.act(self.endpoint.on_write_ended(job_id, error, drained, now_s))
                if not drained:
                    self.transport.renew()
            case WriteDrained(job_id):
                self.act(self.endpoint.on_write_drained(job_id, now_s))

    def act(self, actions: list[prefill_endpoint.Action]) -> None:
        for action in actions:
            match action:
                case prefill_endpoint.SendFrame(route, raw):
                    self.sim.send(("decode", route), self, raw)
                case sender.PostWrite():
                    tag = ChunkTag(self.me.incarnation, *action.key, rank=0, chunk=action.chunk)
                    what = (
                        action.job_id,
                        action.peer,
                        action.src_pages,
                        action.dst_pages,
                        tag,
                        action.ready,
                    )
                    self.transport.write(
                        WriteJob(*what, route="state" if action.state else "pages")
                    )
                case sender.CancelWrite(job_id):
                    self.transport.cancel(job_id)
                case prefill_endpoint.AddPeer(peer, metadata, layout):
                    self.transport.add_peer(peer, metadata, layout, state=action.state)
                case prefill_endpoint.RemovePeer(peer):
                    self.transport.remove_peer(peer)
                case _:
                    self.events.append(action)
                    if isinstance(action, sender.RoomEnded):
                        assert self.sim.may_end(action.key, self.ended), (
                            f"law 7: {action.key} ended twice"
                        )
                        self.ended[action.key] = action.poll

    def schedule(self) -> None:
        """One thing the engine's scheduler may do."""
        now_s = self.sim.now_s
        if self.events:
            match self.events.popleft():
                case sender.Bootstrapped(key, _, prefix_len):
                    self.scheduler.room_bootstrapped(key, prefix_len, "", now_s)
                case sender.RoomEnded(key, poll, error):
                    self.scheduler.room_ended(key, poll, error, now_s)
                case sender.SourceFree(key):
                    self.scheduler.source_free(key, now_s)
            return
        for req in self.scheduler.pop_bootstrapped(now_s):
            self.computing[req.rid] = req
        for req in self.scheduler.pop_failed(now_s):
            self.failed.add(req.room_key)
            self.computing.pop(req.rid, None)
            self._free_slot(req)
        for req in self.scheduler.pop_sent(now_s):
            self._free_slot(req)
        if self.computing:
            self._compute(self.sim.random.choice(list(self.computing.values())))

    def _usable_prefix(self, req: PrefillRequest, prefix_len: int) -> int:
        self.usable[req.room_key] = self.sim.random.choice([0, prefix_len // 2, prefix_len])
        return self.usable[req.room_key]

    def _free_slot(self, req: PrefillRequest) -> None:
        """Nobody may read it any more, so it is overwritten at once."""
        if req.state_slot >= 0 and self.state is not None:
            self.state.scribble([req.state_slot], 0xEE)
            self.free_slots.append(req.state_slot)

    def _compute(self, req: PrefillRequest) -> None:
        assert req.plan is not None
        assert req.prefix_len <= self.usable.get(req.room_key, req.num_tokens), (
            "the engine has no state behind that"
        )
        hashes = self.sim.hasher.prefixes(req.tokens)
        start = max(req.plan.computed, req.prefix_len)
        end = min(req.num_tokens, start + self.sim.random.randint(1, 3 * PAGE_SIZE))
        if req.plan.computed == 0 and req.prefix_len:
            assert self.pattern.mismatches(req.pages, hashes[: req.prefix_len]) == 0, (
                "law 8: prefill's own cache"
            )
        self.pattern.fill(req.pages, start, hashes[:end])
        last = end == req.num_tokens
        slot = -1
        if last and self.state is not None:
            if not self.free_slots:
                return
            slot = self.free_slots.pop(0)
            self.state.fill(slot, int(hashes[-1]))
        aux = self.sim.next_token(req.tokens).to_bytes(4, "little") if last else b""
        self.scheduler.send_chunk(req, end, self.sim.now_s, last=last, aux=aux, state_slot=slot)
        if last:
            del self.computing[req.rid]
        self.tell()

    def scribble(self) -> None:
        """Overwrite all free pages, so that a write that still reads one shows."""
        _scribble(self.pool, self.scheduler.books, 0xEE)


class DecodeSide:
    """One incarnation of the decode worker: library and stand-in engine."""

    def __init__(self, sim: PairSim, num_pages: int, failure_policy: str) -> None:
        self.sim = sim
        self.me = PeerId("decode-0", sim.next_incarnation())
        self.route = f"route-{self.me.incarnation}".encode()
        self.pool = _pool(num_pages)
        self.pattern = KVPattern(self.pool.layout, SALT, self.pool)
        self.state = sim.state_memory(sim.num_slots)
        self.scheduler = sim.decode_scheduler(num_pages, failure_policy)
        self.commands: deque[Any] = deque()
        self.events: deque[Any] = deque()
        self.running: dict[str, DecodeRequest] = {}
        self.ended: dict[RoomKey, KVPoll] = {}
        self.outcomes: dict[str, DecodeState] = {}
        memory, state, layout = (self.pool, self.state), _layout(self.state), self.pool.layout
        self.transport = sim.fabric.transport(
            self.me, layout, self.commands.append, memory=memory, state=state
        )
        digest = _digest(self.pool, self.state)
        hello = Hello(digest, Topology(PAGE_SIZE), layout, self.transport.metadata, state=state)
        self.endpoint = DecodeEndpoint(self.me, hello, TIMING)

    def tell(self) -> None:
        self.commands.extend(self.scheduler.take_commands())

    def work(self) -> None:
        """One thing the control thread may do."""
        now_s = self.sim.now_s
        if not self.commands:
            self.act(self.endpoint.tick(now_s))
            return
        match self.commands.popleft():
            case decode_commands.OpenRoom(promise, address):
                self.act(self.endpoint.open(promise, address, now_s))
            case decode_commands.AbortRoom(key, error):
                self.act(self.endpoint.abort(key, error, now_s))
            case decode_commands.RefuseRoom(key, ticket, address, error):
                self.act(self.endpoint.refuse(key, ticket, address, error, now_s))
            case Arrived(tag):
                self.act(self.endpoint.on_arrival(tag, now_s))
            case Settled(token):
                self.act(self.endpoint.settled(token, now_s))

    def act(self, actions: list[decode_endpoint.Action]) -> None:
        for action in actions:
            match action:
                case decode_endpoint.SendFrame(_, raw):
                    self.sim.send(("prefill", self.route), self, raw)
                case receiver.RoomEnded():
                    assert self.sim.may_end(action.key, self.ended), (
                        f"law 7: {action.key} ended twice"
                    )
                    self.ended[action.key] = action.poll
                    self.events.append(action)
                case receiver.RoomDrained() | receiver.RoomOverdue():
                    self.events.append(action)
                case decode_endpoint.Settle(token):
                    self.transport.settle(token, TIMING.fence_settle_s)
        self.transport.expect(self.endpoint.num_expected)

    def schedule(self) -> None:
        """One thing the engine's scheduler may do."""
        now_s = self.sim.now_s
        if self.events:
            match self.events.popleft():
                case receiver.RoomEnded(key, poll, error, aux):
                    self.scheduler.room_ended(key, poll, error, aux, now_s)
                case receiver.RoomDrained(key):
                    self.scheduler.room_drained(key)
                case receiver.RoomOverdue(key):
                    self.scheduler.room_overdue(key)
            return
        self.scheduler.pop_preallocated(now_s)
        self.tell()
        for ask in self.scheduler.pop_needs_prefill():
            self.sim.submit(
                Request(
                    f"{ask.rid}/{ask.generation}",
                    ask.tokens,
                    room=ask.room,
                    generation=ask.generation,
                )
            )
        for req in self.scheduler.pop_transferred(now_s):
            if (
                req.state is DecodeState.TRANSFERRED
            ):  # starting one of these may have retracted another
                self._start(req)
        for req in self.scheduler.pop_failed():
            self.running.pop(req.rid, None)
            self._ended(req)
        if self.running:
            self._step(self.sim.random.choice(list(self.running.values())))

    def verify(self, req: DecodeRequest) -> None:
        hashes = self.sim.hasher.prefixes(req.tokens[: req.kv_len])
        wrong = self.pattern.mismatches(req.pages, hashes)
        assert wrong == 0, f"law 8: {wrong} pages of {req} are wrong"
        if self.state is not None:
            assert self.state.is_of(req.state_slot, int(hashes[-1])), (
                f"law 8: the state of {req} is wrong"
            )

    def _start(self, req: DecodeRequest) -> None:
        self.verify(req)
        self.running[req.rid] = req
        if not req.resumed:
            token = int.from_bytes(req.aux, "little")
            assert token == self.sim.next_token(req.tokens), "aux is another request's"
            self._append(req, token)

    def _append(self, req: DecodeRequest, token: int) -> None:
        while True:
            try:
                self.scheduler.append_many([req], [token], self.sim.now_s)
                return
            except OutOfPagesError as error:
                if not error.retract or error.retract[0] == req.rid:
                    # Nobody else to take from: this one goes back itself, unless it is the oldest.
                    self._give_up(req)
                    return
                self._retract(error.retract[0])

    def _give_up(self, req: DecodeRequest) -> None:
        self.running.pop(req.rid, None)
        if not req.resumed:
            self.scheduler.abort(req.rid, self.sim.now_s)
            return
        try:
            self._retract(req.rid)
        except PrefixKVError:
            self.scheduler.abort(req.rid, self.sim.now_s)

    def _retract(self, rid: str) -> None:
        self.scheduler.retract(rid, self.sim.now_s)
        self.running.pop(rid, None)
        self.sim.retractions += 1

    def _step(self, req: DecodeRequest) -> None:
        """Write the KV of the token sampled last, sample the next one, and perhaps finish: that one
        has no KV then."""
        if len(req.output) < req.max_new_tokens:
            tokens = req.tokens
            hashes = self.sim.hasher.prefixes(tokens)
            self.pattern.fill(req.pages, len(tokens) - 1, hashes)
            if self.state is not None:
                self.state.fill(req.state_slot, int(hashes[-1]))
            self._append(req, self.sim.next_token(tokens))
        if req.rid not in self.running:  # its page went to somebody else
            return
        if (
            len(req.output) >= req.max_new_tokens
            or self.sim.random.random() < self.sim.finish_early
        ):
            self.verify(req)
            del self.running[req.rid]
            self.finish(req)
            self._ended(req)
            self.sim.continue_conversation(req)

    def finish(self, req: DecodeRequest) -> None:
        self.scheduler.finish(req, self.sim.now_s)

    def _ended(self, req: DecodeRequest) -> None:
        assert req.rid not in self.outcomes, f"{req} ended twice"
        self.outcomes[req.rid] = req.state

    def scribble(self) -> None:
        """Overwrite all free pages, so that one freed too early shows."""
        _scribble(self.pool, self.scheduler.books, 0xDD)
        if self.state is not None and self.scheduler.books.slots is not None:
            self.state.scribble(self.scheduler.books.slots.pages_in(PageState.FREE).tolist(), 0xDD)


@dataclass
class PairSim:
    """See the module's text. `conversations` are started one by one; each goes on for a few
    turns."""

    seed: int
    chaos: Chaos = field(default_factory=Chaos)
    decode_pages: int = 24
    prefill_pages: int = 32
    num_requests: int = 10
    failure_policy: str = "fail"
    chance: random.Random | None = None
    num_slots: int = 0  # of extra state on decode, twice as many on prefill; 0: there is none
    new_random: Callable[[int], random.Random] = random.Random  # recording.py has its own

    def __post_init__(self) -> None:
        self.random = self.chance or self.new_random(self.seed)
        self.num_steps = 0
        self.former: list[DecodeSide | PrefillSide] = []  # that a restart replaced
        self.now_s = 1000.0
        self.calm = False
        self.retractions = 0
        self.reuse_rooms = self.random.choice([0.0, 0.5])
        self.reused: set[int] = set()
        self.policy = self.random.choice(["gated", "gated", "lru", "aged", "slru"])
        self.finish_early = self.random.choice([0.03, 0.2])
        self.hasher = PrefixHasher()
        self.fabric = FakeFabric(
            self.seed,
            fail_at_post=self.chaos.fail_at_post,
            fail_at_check=self.chaos.fail_at_check,
            lose_notification=self.chaos.lose_notification,
            guard=self._guard,
            state_guard=self._state_guard,
        )
        self.fabric.random = self.chance or self.new_random(self.seed)
        self._incarnation = 0
        self._wire: list[tuple[tuple[str, bytes], Any, bytes]] = []
        self._to_submit: list[Request] = []
        self._next_room = 0
        self._histories: dict[str, list[int]] = {}
        self.finished = 0
        self.old_prefills: list[PrefillSide] = []
        self.prefill = PrefillSide(self, self.prefill_pages)
        self.decode = self.new_decode()

    def new_decode(self) -> DecodeSide:
        return DecodeSide(self, self.decode_pages, self.failure_policy)

    def decode_scheduler(self, num_pages: int, failure_policy: str) -> DecodeScheduler:
        books = PageBooks(num_pages, PAGE_SIZE, 8, policy=self.policy, num_slots=self.num_slots)
        return DecodeScheduler(
            books, reserve_tokens=self.random.choice([0, 4]), failure_policy=failure_policy,
            admission=("hit_aware", "fifo", "priority")[self.seed % 3], patience_s=2.0,
            waiting_timeout_s=0.8 * TIMING.bootstrap_timeout_s,
        )  # fmt: skip

    def state_memory(self, num_slots: int) -> StateMemory | None:
        return StateMemory(_STATE, num_slots, Mesh(1, 1)) if num_slots else None

    # --- chance and content -----------------------------------------------------------------------

    def next_incarnation(self) -> int:
        self._incarnation += 1
        return self._incarnation

    def next_token(self, tokens: np.ndarray) -> int:
        """The token 'sampled' after these: the same on both sides."""
        return int(self.hasher.prefixes(tokens)[-1] % np.uint64(5))

    def add_request(self) -> None:
        """A new conversation (all share a system prompt), submitted to decode and, some time, to
        prefill."""
        history = [1] * 6 + [self.random.randint(0, 1) for _ in range(self.random.randint(1, 14))]
        self._submit(history)

    def add_burst(self) -> None:
        """Conversations with one new system prompt, all at once; some go on with the same tokens
        for a while."""
        system = [
            2 + self.random.randint(0, 2)
            for _ in range(self.random.randint(PAGE_SIZE, 4 * PAGE_SIZE))
        ]
        for _ in range(self.random.randint(2, 5)):
            self._submit(
                system + [self.random.randint(0, 1)] * self.random.randint(0, 2 * PAGE_SIZE)
            )

    def continue_conversation(self, req: DecodeRequest) -> None:
        self.finished += 1
        if len(req.tokens) < 40 and not self.calm:
            self._submit(
                req.tokens.tolist()
                + [self.random.randint(0, 1) for _ in range(self.random.randint(1, 6))]
            )

    def _submit(self, tokens: list[int]) -> None:
        rid = f"r{self._next_room}"
        room = self._room_number()
        cacheable = self.random.random() < 0.9
        try:
            self.decode.scheduler.add(
                Request(
                    rid,
                    tokens,
                    max_new_tokens=self.random.randint(1, 24),
                    room=room,
                    prefill=ADDRESS,
                    cacheable=cacheable,
                ),
                self.now_s,
            )
        except PrefixKVError:
            return
        self.submit(Request(rid, tokens, room=room, cacheable=cacheable))

    def may_end(self, key: RoomKey, ended: dict[RoomKey, KVPoll]) -> bool:
        return key not in ended or key.room in self.reused

    def _room_number(self) -> int:
        """A new number, or one whose request has ended on both sides (words about it may still be
        under way)."""
        self._next_room += 1
        sides = (self.decode.scheduler, self.prefill.scheduler)
        live = {req.room for side in sides for req in side.requests.values()}
        live |= {request.room for request in self._to_submit}
        ended = sorted(set(range(self._next_room - 1)) - live)
        if ended and self.random.random() < self.reuse_rooms:
            room = self.random.choice(ended)
            self.reused.add(room)
            return room
        return self._next_room - 1

    def submit(self, request: Request) -> None:
        """The router hands a request to prefill, at some later step."""
        self._to_submit.append(request)

    # --- the network ------------------------------------------------------------------------------

    def send(self, to: tuple[str, bytes], source: Any, raw: bytes) -> None:
        if isinstance(source, PrefillSide) and source is not self.prefill and not source.stopped:
            return
        if not self.calm and self.random.random() < self.chaos.drop:
            return
        self._wire.append((to, source, raw))
        if not self.calm and self.random.random() < self.chaos.duplicate:
            self._wire.append((to, source, raw))

    def _deliver(self) -> None:
        reordered = not self.calm and self.random.random() < self.chaos.reorder
        (side, route), source, raw = self._wire.pop(
            self.random.randrange(len(self._wire)) if reordered else 0
        )
        if self.chaos.junk and not self.calm and self.random.random() < self.chaos.junk:
            raw = bytearray(raw)
            raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
            raw = bytes(raw[: self.random.randint(1, len(raw))])
        if side == "prefill":
            if source is self.decode:
                self.prefill.act(self.prefill.endpoint.on_frame(route, "", raw, self.now_s))
        elif route == self.decode.route:
            self.decode.act(self.decode.endpoint.on_frame(ADDRESS, raw, self.now_s))

    # --- faults -----------------------------------------------------------------------------------

    def restart_prefill(self, stop: bool) -> None:
        """A new incarnation answers at the same address. The old one is dead, or only stopped
        (`stop`): then its posted writes go on landing until `kill_old`.
        """
        old = self.prefill
        self.former.append(old)
        if stop:
            self.old_prefills.append(old)
        else:
            self.fabric.kill(old.me)
        self._wire = [
            frame for frame in self._wire if frame[1] is not old and frame[0][0] != "prefill"
        ]
        self.prefill = PrefillSide(self, self.prefill_pages)

    def kill_old(self) -> None:
        """The orchestrator makes sure that the stopped ones are dead."""
        for old in self.old_prefills:
            self.fabric.kill(old.me)
        self.old_prefills.clear()

    def restart_decode(self) -> None:
        self.fabric.kill(self.decode.me)
        self.former.append(self.decode)
        self._wire = [frame for frame in self._wire if frame[1] is not self.decode]
        self.decode = self.new_decode()

    # --- steps ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let one thing happen, then audit."""
        self.num_steps += 1
        roll = self.random.random
        choices: list[Any] = [
            self.prefill.work, self.decode.work, self.prefill.schedule, self.decode.schedule,
            self._tick, self._submit_one,
        ]  # fmt: skip
        choices += [self._deliver] * (3 if self._wire else 0)
        choices += [self.fabric.step] * 3
        self.random.choice(choices)()
        if not self.calm:
            if roll() < self.chaos.abort:
                self._abort_one()
            if roll() < self.chaos.flush:
                self.random.choice([self.decode, self.prefill]).scheduler.flush()
            if roll() < self.chaos.restart:
                self.random.choice(
                    [
                        lambda: self.restart_prefill(True),
                        lambda: self.restart_prefill(False),
                        self.restart_decode,
                    ]
                )()
        self.decode.tell()
        self.prefill.tell()
        self.audit()

    def audit(self) -> None:
        audit_decode(self.decode.scheduler, self.decode.endpoint)
        audit_prefill(self.prefill.scheduler)
        for key, poll in self.decode.ended.items():
            if poll is KVPoll.SUCCESS and key in self.prefill.ended and key.room not in self.reused:
                assert self.prefill.ended[key] is KVPoll.SUCCESS, (
                    f"law 7: {key} succeeded where prefill failed"
                )
                assert key not in self.prefill.failed, (
                    f"law 7: {key} succeeded and prefill's engine was told it failed"
                )
        if self.random.random() < 0.2:
            self.decode.scribble()
            self.prefill.scribble()

    def _tick(self) -> None:
        self.now_s += self.random.choice([0.01, 0.05, 0.2])

    def _submit_one(self) -> None:
        if self._to_submit:
            request = self._to_submit.pop(self.random.randrange(len(self._to_submit)))
            try:
                self.prefill.scheduler.add(request, self.now_s)
            except PrefixKVError:
                return
            self.prefill.tell()

    def _abort_one(self) -> None:
        live = list(self.decode.scheduler.requests)
        needed = [
            flight.owner.rid
            for flight in self.decode.scheduler.flights
            if flight.waiters and flight.owner
        ]
        if needed and self.random.random() < 0.3:
            self.decode.scheduler.abort(self.random.choice(needed), self.now_s)
        elif live and self.random.random() < 0.7:
            self.decode.scheduler.abort(self.random.choice(live), self.now_s)
        elif self.prefill.scheduler.requests:
            rid = self.random.choice(list(self.prefill.scheduler.requests))
            self.prefill.computing.pop(rid, None)
            self.prefill.scheduler.abort(rid, self.now_s)

    def _guard(self, target: PeerId, room: RoomKey, pages: np.ndarray) -> None:
        """Called as bytes land: every page must be the room's, in transfer or held for it."""
        if target != self.decode.me:
            return
        books = self.decode.scheduler.books
        flight = self.decode.scheduler.transfers.get(room)
        allowed: set[int] = set()
        if flight is not None:
            allowed = set(books.pages(flight.pages)[flight.pages.num_shared :].tolist())
        elif books.holds(room):
            allowed = set(books.allocator.held_by(room).tolist())
        assert set(pages.tolist()) <= allowed, (
            f"a write of {room} lands on pages that are not its own"
        )

    def _state_guard(self, target: PeerId, room: RoomKey, slots: np.ndarray) -> None:
        """As `_guard`, for the slots of extra state."""
        books = self.decode.scheduler.books
        if target == self.decode.me and books.slots is not None:
            flight = self.decode.scheduler.transfers.get(room)
            allowed = (
                [flight.pages.slot] if flight is not None else books.slots.held_by(room).tolist()
            )
            assert slots.tolist() == allowed, (
                f"a write of {room} lands in slots {slots}, its own is {allowed}"
            )

    def run(self, max_steps: int = 20_000) -> None:
        """Start all conversations in the storm, then let it calm down; at the end nothing may be
        left."""
        for _ in range(self.num_requests):
            self.random.choice([self.add_request, self.add_request, self.add_burst])()
            for _ in range(self.random.randint(0, 40)):
                self.step()
        for _ in range(400):
            self.step()
        self.calm = True
        self.fabric.fail_at_post = self.fabric.fail_at_check = self.fabric.lose_notification = 0.0
        for steps in range(max_steps):
            self.step()
            if steps % 20 == 0:
                self.now_s += 0.5
            if steps in (2_000, 4_000, 6_000):
                # Every deadline has passed by now: what is left is held for want of proof, which a
                # fence gives. What the current prefill worker wrote last, it proves itself.
                self._fence_old()
            if self._quiet():
                break
        for side in (self.decode, self.prefill):
            while side.events:
                side.schedule()
            side.schedule()
        assert_at_rest(self.decode.scheduler)
        assert_at_rest(self.prefill.scheduler)
        assert self.decode.endpoint.num_rooms == 0, list(self.decode.endpoint.rooms())

    def _fence_old(self) -> None:
        self.kill_old()
        for incarnation in range(self.prefill.me.incarnation):
            self.decode.act(
                self.decode.endpoint.fence(PeerId("prefill-0", incarnation), self.now_s)
            )

    def _fence_current(self) -> None:
        """Pages whose write failed after posting come back only when the writer's agent ends."""
        me = self.prefill.me
        self.restart_prefill(stop=False)
        self.decode.act(self.decode.endpoint.fence(me, self.now_s))

    def _quiet(self) -> bool:
        sides = (self.decode, self.prefill)
        return (
            not any(side.scheduler.requests or side.events or side.commands for side in sides)
            and self.decode.endpoint.num_rooms == 0
            and not self._to_submit
        )


def _pool(num_pages: int) -> KVPool:
    return KVPool.create(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        dtype="uint8",
    )


def _digest(pool: KVPool, state: StateMemory | None = None) -> ModelDigest:
    layout = pool.layout
    return ModelDigest(
        "m", "1", "none", layout.dtype, layout.attention, layout.num_layers, layout.num_kv_heads,
        layout.head_dim, () if state is None else state.tensors,
    )  # fmt: skip


def _layout(state: StateMemory | None) -> StateLayout | None:
    return None if state is None else state.layout


def _scribble(pool: KVPool, books: PageBooks, value: int) -> None:
    free = books.allocator.pages_in(PageState.FREE)
    if len(free):
        data = pool.read_pages(free)
        data.fill_(value)
        pool.write_pages(free, data)
