"""Whatever a peer sends, in whatever order and however damaged, and whatever else is put in:
nothing is raised out of `on` but what the input's sender did wrong, every room ends at most once
and only forwards, nothing is called drained or free without proof, and no page is written twice.

Each side is run where its pages are written directly, and where slices of heads are staged.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixkv.control.decode.control import DecodeEffect, DecodeInput
from prefixkv.control.decode.looks import LookAt, PagesLookedAt
from prefixkv.control.effects import (
    AgentDestroyed,
    ConnectFailed,
    CopyDone,
    FrameFailed,
    FrameReceived,
    Reached,
    Renew,
    Settle,
    Tick,
    Unreached,
)
from prefixkv.control.prefill.control import PrefillEffect, PrefillInput
from prefixkv.errors import ChecksumError, InternalError, RequestError
from prefixkv.protocol import messages
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    Fence,
    MeetPrefill,
    MoveWeights,
    OfferRoom,
    OpenRoom,
    RefuseRoom,
    SendChunk,
)
from prefixkv.protocol.events import (
    Bootstrapped,
    PrefillAway,
    PrefillLost,
    PrefillReady,
    RoomDrained,
    RoomEnded,
    SourceFree,
)
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import (
    HelloRefused,
    HelloReply,
    HelloWanted,
    LeaseAsk,
    LeaseGrant,
    Outcome,
    Topology,
)
from prefixkv.protocol.receiver_machine import ReceiverMachine
from prefixkv.staging.receiver import Scatter
from prefixkv.staging.sender import Gather
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    Settled,
    WriteDone,
    WriteDrained,
    WriteFailed,
    WriteJob,
)
from tests.unit.control import mesh_wire
from tests.unit.control.mesh_wire import AREA, SLOTS
from tests.unit.control.wire import (
    ADDRESS,
    DECODE,
    HELLO,
    PAGE_SIZE,
    PREFILL,
    ROUTE,
    TIMING,
    TOPOLOGY,
    Alike,
    DecodePeer,
    PrefillPeer,
    add_room,
    members,
    newer,
    promise,
    send_chunk,
    write_ended,
)
from tests.unit.protocol.rooms import PROMPT

VERSIONS = st.sampled_from(["", "v2"])
ROOMS = st.builds(RoomKey, st.integers(0, 1), st.integers(0, 1), st.just(""))
PAUSES = st.sampled_from([0.0, 0.1, 0.6, 3.0, 11.0])
DAMAGE = st.one_of(
    st.none(), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3)
)
KEY_0 = RoomKey(0, 0)
NTH = st.integers(0, 3)
LEASES = st.integers(-1, 4)  # as decode numbers them: from 1; -1: none
RESET = OSError("reset")


def damaged(raw: bytes, damage: list[tuple[float, int]] | None) -> bytes:
    out = bytearray(raw)
    for place, byte in damage or ():
        out[min(int(place * len(out)), len(out) - 1)] = byte
    return bytes(out)


def room_bodies(key: RoomKey, ok: bool, drained: bool, number: int) -> list[Any]:
    block = number * AREA.lease_bytes // 4
    return [
        messages.PromiseAck(*key.numbers, 0), messages.Drained(*key.numbers, 0, settle=ok),
        messages.Abort(*key.numbers, ""), messages.OutcomeAck(*key.numbers, 0),
        Outcome(*key.numbers, 0, ok, 1, number, b"", "", drained),
        Outcome(*key.numbers, 3, ok, 1, number, b"", "", drained), promise(*key.numbers),
        promise(*key.numbers, pages=(3, 9) if ok else (3, 99)),
        LeaseAsk(*key.numbers, 0, number, number, 1),
        LeaseAsk(*key.numbers, 0, 0, 0, 1 + ok), LeaseGrant(*key.numbers, number, 1 + ok, block),
        LeaseGrant(*key.numbers, 0, number, block),
    ]  # fmt: skip


def sent(key: RoomKey) -> RoomKey:
    """The same room, as prefill knows it."""
    return RoomKey(*key.numbers, DECODE.name)


DONE = Outcome(0, 0, 0, True, 1, 2, b"", "", True, num_units=2)
ROOM_BODIES = st.builds(
    room_bodies, ROOMS, st.booleans(), st.booleans(), st.integers(0, 3)
).flatmap(st.sampled_from)
# What stands for the reply or Hello that fits, and for those that do not.
OTHER_BODIES = st.sampled_from(
    [
        messages.Heartbeat(),
        messages.Fenced(),
        HelloWanted(),
        HelloRefused(PREFILL.incarnation, "no"),
        HelloRefused(PREFILL.incarnation, "fenced", True),
        DONE,
        "hello",
        "reply",
        "reply of another mesh",
        "reply that refuses",
        "reply that does not stage",
    ]
)
BODIES = st.tuples(st.one_of(ROOM_BODIES, ROOM_BODIES, OTHER_BODIES), DAMAGE)
JUNK = st.tuples(st.binary(max_size=60), st.none())

Feed = dict[type, tuple[st.SearchStrategy[Any], Callable[..., Any]]]
Step = tuple[Any, ...]


def steps_of(feed: Feed) -> st.SearchStrategy[list[Step]]:
    """Frames half of the time, then inputs of all kinds alike, and restarts of the peer."""
    frames = st.tuples(st.just(FrameReceived), st.one_of(BODIES, BODIES, BODIES, JUNK))
    inputs = [st.tuples(st.just(kind), args) for kind, (args, _) in feed.items()]
    restarts = st.just(("restart", ()))
    step = st.one_of(*[frames] * len(inputs), *inputs, restarts)
    # Hypothesis's lists are short where they may be.
    return st.sampled_from([0, 10, 30]).flatmap(lambda n: st.lists(step, min_size=n, max_size=40))


def nth(waiting: list[Any], number: int) -> Any:
    """One of those that wait, None where there is none."""
    return waiting[number % len(waiting)] if waiting else None


# --- decode ---------------------------------------------------------------------------------------


class DecodeWorld:
    """Decode's control object, all that may be put into it, and the promises of pages that may be
    written, each with the peers that may write it."""

    def __init__(self, *, staged: bool, settles: bool) -> None:
        timing = dataclasses.replace(TIMING, fence_settle_s=0.5 if settles else 0.0)
        hello = mesh_wire.hello(2, 0, DECODE, relay=AREA) if staged else HELLO
        self.sums = b"" if settles else bytes(8)  # two, of each chunk
        if self.sums:
            hello = msgspec.structs.replace(hello, checksums=("crc32",))
        self.peer = PrefillPeer(timing, hello)
        checksum = "crc32" if self.sums else ""
        self.peer.reply = msgspec.structs.replace(
            self.peer.reply, relayed=staged, checksum=checksum
        )
        self.looks: dict[int, tuple[RoomKey, int]] = {}  # by room and its use, not ended
        self.control = self.peer.control
        self.me = PREFILL
        self.met: set[PeerId] = {PREFILL}
        self.opened: Counter[RoomKey] = Counter()
        self.refused: Counter[RoomKey] = Counter()
        self.ended: Counter[RoomKey] = Counter()
        self.failed: Counter[RoomKey] = Counter()
        self.drained: Counter[RoomKey] = Counter()
        self.polls: dict[ReceiverMachine, KVPoll] = {}
        self.settling: list[Any] = []
        self.leases: dict[int, RoomKey] = {}
        self.scatters: dict[int, RoomKey] = {}  # that have not ended
        self.scattered: set[tuple[RoomKey, int, int]] = set()  # a page, once a use of a room
        self.worker = ""  # what was said of the worker last; "": nothing since it was asked

    # --- what is put in ---

    def body(self, body: Any) -> Any:
        reply, replace = self.peer.reply, msgspec.structs.replace
        named = {
            "hello": HELLO,
            "reply": reply,
            "reply of another mesh": replace(reply, topology=Topology(8)),
            "reply that refuses": replace(reply, refused="no"),
            "reply that does not stage": replace(reply, relayed=False),
        }
        return named[body] if isinstance(body, str) else body

    def frame(self, body: Any, damage: Any) -> FrameReceived[str]:
        raw = body if isinstance(body, bytes) else self.peer.raw(self.body(body), self.me)
        raw = damaged(raw, damage)
        return FrameReceived(ADDRESS, raw)

    def frame_failed(self, body: Any, _: Any) -> FrameFailed[str]:
        return FrameFailed(self.frame("reply" if isinstance(body, bytes) else body, None), RESET)

    def arrival(self, key: RoomKey, part: int, num_parts: int, slot: int) -> Arrived:
        num_pages, sums = (1, b"") if slot >= 0 else (2, self.sums if part == 0 else b"")
        numbers = self.me.incarnation, *key.numbers, 0, 0, part, num_parts, slot, num_pages
        return Arrived(ChunkTag(*numbers, sums=sums).pack())

    def looked_at(self, number: int, ok: bool) -> PagesLookedAt:
        look_id = nth(list(self.looks), number)
        self.looks.pop(look_id, None)
        return PagesLookedAt(look_id or 0, None if ok else ChecksumError("differs"))

    def copied(self, number: int, ok: bool) -> CopyDone:
        lease_id = nth(list(self.scatters), number)
        self.scatters.pop(lease_id, None)
        return CopyDone(99 if lease_id is None else lease_id, None if ok else RESET)

    def settled(self, number: int) -> Settled:
        token = nth(self.settling, number)
        if token in self.settling:
            self.settling.remove(token)
        return Settled(token)

    def may_use(self, key: RoomKey) -> bool:
        """Whether the scheduler may open or refuse this room, or is to be told that it is open."""
        over = self.opened[key] == self.ended[key]
        over = over and self.drained[key] == self.failed[key] + self.refused[key]
        return over or self.peer.poll(key) is not None

    def feed(self, kind: Any, args: tuple[Any, ...]) -> None:
        if kind == "restart":
            self.me = newer(self.me)
            return
        what = DECODE_FEED[kind][1](self, *args)
        match what:
            case OpenRoom():
                self.enter(what.promise.key, what, self.opened)
            case RefuseRoom(key):
                self.enter(key, what, self.refused)
            case MeetPrefill():
                self.worker = "away"
                self.see(self.peer.on(what))
            case WriteDone() | WriteFailed() | WriteDrained():
                with pytest.raises(InternalError):
                    self.peer.on(what)
            case _:
                self.see(self.peer.on(what))

    def enter(self, key: RoomKey, what: OpenRoom | RefuseRoom, counted: Counter[RoomKey]) -> None:
        if not self.may_use(key):
            return
        was = self.peer.poll(key)
        try:
            effects = self.peer.on(what)
        except InternalError:
            assert was is not None
            return
        counted[key] += 1
        self.see(effects)

    # --- the laws ---

    def see(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case RoomEnded(key, poll):
                    self.ended[key] += 1
                    self.failed[key] += poll is KVPoll.FAILED
                    if poll is KVPoll.SUCCESS:
                        assert key not in self.scatters.values(), "a copy writes the pages"
                        use = key, self.opened[key]
                        assert use not in self.looks.values(), "its pages are not looked at"
                case LookAt():
                    numbers = map(int, re.findall(r"\d+", effect.what)[:2])
                    self.looks[effect.look_id] = (key := RoomKey(*numbers)), self.opened[key]
                case RoomDrained(key):
                    self.drained[key] += 1
                    assert key not in self.scatters.values(), "a copy writes the pages"
                case LeaseGrant():
                    self.leases[effect.lease_id] = RoomKey(effect.room, effect.generation)
                case Scatter():
                    key = self.leases[effect.lease_id]
                    self.scatters[effect.lease_id] = key
                    for page in effect.units.tolist():
                        assert page in (3, 9)
                        assert (key, self.opened[key], page) not in self.scattered
                        self.scattered.add((key, self.opened[key], page))
                case Settle():
                    assert effect.token not in self.settling
                    self.settling.append(effect.token)
                case PrefillReady():
                    assert self.worker == "away", "said twice, or of what nobody asked about"
                    self.worker = "ready"
                case PrefillAway():
                    assert self.worker == "ready"
                    self.worker = "away"
                case PrefillLost():
                    assert self.worker in ("away", "ready")
                    self.worker = ""
        for key in {*self.opened, *self.refused}:
            assert self.ended[key] <= self.opened[key]
            assert self.drained[key] <= self.failed[key] + self.refused[key]
        machines = list(self.control.rooms())
        for machine in machines:
            assert machine.poll >= self.polls.get(machine, KVPoll.BOOTSTRAPPING)
            assert machine.wake_s < float("inf"), "a room waits without a deadline"
        self.polls = {machine: machine.poll for machine in machines}
        assert sum(machine.is_written for machine in machines) == self.control._rooms.num_expected
        held = 0
        if self.control.relay is not None:
            self.control.relay.check_invariants()
            held = self.control.relay.num_waiting
        for key in self.opened:  # one that is forgotten has ended and is drained, or succeeded
            known = self.peer.poll(key) is not None or held
            assert known or self.ended[key] == self.opened[key]
        self.met |= {peer for peer, _ in self.control.peers(0.0).values() if peer is not None}

    def end(self) -> None:
        """Every deadline passes, and every worker there ever was is fenced: then all is over."""
        for _ in range(60):
            self.see(self.peer.after(1.0))
        for peer in sorted(self.met):
            self.feed(Fence, (peer,))
        while self.settling or self.scatters:
            self.feed(*((Settled, (0,)) if self.settling else (CopyDone, (0, True))))
        assert list(self.control.rooms()) == []
        assert self.peer.expected == 0
        assert self.ended == self.opened
        assert self.drained == self.failed + self.refused
        if self.control.relay is not None:
            assert self.control.relay.num_rooms == 0
            assert self.control.relay.leases.all() == []


DECODE_FEED: Feed = {
    OpenRoom: (st.tuples(ROOMS), lambda _, key: OpenRoom(promise(*key.numbers), ADDRESS)),
    MeetPrefill: (st.just(()), lambda _: MeetPrefill(ADDRESS)),
    RefuseRoom: (st.tuples(ROOMS), lambda _, key: RefuseRoom(key, 0, ADDRESS, "no room")),
    AbortRoom: (st.tuples(ROOMS), lambda _, key: AbortRoom(key, "enough")),
    MoveWeights: (st.tuples(VERSIONS), lambda _, version: MoveWeights(version)),
    Fence: (st.just(()), lambda world, peer=None: Fence(peer or world.me)),
    FrameReceived: (BODIES, DecodeWorld.frame),
    FrameFailed: (BODIES, DecodeWorld.frame_failed),
    Arrived: (
        st.tuples(ROOMS, st.integers(0, 1), st.just(2), LEASES)
        | st.tuples(ROOMS, st.just(0), st.just(1), LEASES),
        DecodeWorld.arrival,
    ),
    Settled: (st.tuples(NTH), DecodeWorld.settled),
    PeerUnreachable: (st.just(()), lambda world: PeerUnreachable(world.me, RESET)),
    WriteDone: (st.just(()), lambda _: WriteDone(1, 64)),
    WriteFailed: (st.just(()), lambda _: WriteFailed(1, RESET, True)),
    WriteDrained: (st.just(()), lambda _: WriteDrained(1)),
    CopyDone: (st.tuples(NTH, st.booleans()), DecodeWorld.copied),
    PagesLookedAt: (st.tuples(NTH, st.booleans()), DecodeWorld.looked_at),
    ConnectFailed: (st.just(()), lambda _: ConnectFailed(ADDRESS, RESET)),
    Reached: (st.just(()), lambda _: Reached(ADDRESS)),
    Unreached: (st.just(()), lambda _: Unreached(ADDRESS, "no answer")),
    Tick: (st.tuples(PAUSES), lambda world, pause_s: world.peer.pause(pause_s)),
    AgentDestroyed: (st.just(()), lambda _: AgentDestroyed()),
}


@pytest.mark.slow
@given(steps_of(DECODE_FEED), st.booleans(), st.booleans())
@example([(Tick, (0.6,)), (Tick, (3.0,)), (Tick, (3.0,)), (Tick, (3.0,))], False, False)
@example([(Fence, ()), ("restart", ()), (FrameReceived, ("reply", None))], True, True)
@example([(FrameReceived, (DONE, None)), (CopyDone, (0, True))], True, True)
@example([(FrameReceived, (DONE, None)), (CopyDone, (0, False))], True, True)
@example([(FrameReceived, (b"", None)), (FrameReceived, ("reply", [(0.875, 0)]))], False, False)
@example([(Arrived, (KEY_0, 0, 1, -1)), (FrameReceived, (DONE, None))], False, False)
def test_decodes_control_survives_any_prefill_worker(
    steps: list[Step], staged: bool, settles: bool
) -> None:
    world = DecodeWorld(staged=staged, settles=settles)
    first = RoomKey(0, 0)
    start: list[Step] = [(OpenRoom, (first,)), (FrameReceived, ("reply", None))]
    if staged:
        start += [
            (FrameReceived, (LeaseAsk(*first.numbers, 0, 0, 0, 2), None)),
            (Arrived, (first, 0, 1, 1)),
        ]
    for kind, args in [*start, *steps]:
        world.feed(kind, args)
    world.end()


# --- prefill --------------------------------------------------------------------------------------


def source_page(key: RoomKey, page: int) -> int:
    """Of prefill's pool; the pages of no two rooms are alike."""
    return 100 + 20 * key.room + 10 * key.generation + page


def room_of_page(page: int) -> RoomKey:
    """Inverse of `source_page`."""
    return RoomKey((page - 100) // 20, (page - 100) % 20 // 10)


class PrefillWorld:
    """Prefill's control object, all that may be put into it, what it writes, and when it lets go of
    it."""

    def __init__(self, *, staged: bool) -> None:
        if staged:
            hello = mesh_wire.hello(1, 0, DECODE, relay=AREA)
            self.peer = DecodePeer(hello=hello, topology=Topology(PAGE_SIZE, 2), staging=SLOTS)
        else:
            self.peer = DecodePeer()
        self.control = self.peer.control
        self.me = DECODE
        self.in_flight: dict[int, WriteJob] = {}
        self.undrained: dict[int, WriteJob] = {}
        self.gathers: dict[int, Gather] = {}
        self.added: Counter[RoomKey] = Counter()
        self.ended: Counter[RoomKey] = Counter()
        self.freed: Counter[RoomKey] = Counter()
        self.written: set[tuple[Any, int]] = set()  # (machine, page): once a promise

    # --- what is put in ---

    def body(self, body: Any) -> Any:
        if not isinstance(body, str):
            return body
        reply = HelloReply(self.peer.hello.digest, TOPOLOGY, ())
        return self.peer.hello if body == "hello" else reply

    def frame(self, body: Any, damage: Any) -> FrameReceived[bytes]:
        raw = body if isinstance(body, bytes) else self.peer.raw(self.body(body), self.me)
        return FrameReceived(ROUTE, damaged(raw, damage))

    def frame_failed(self, body: Any, _: Any) -> FrameFailed[bytes]:
        return FrameFailed(self.frame("hello" if isinstance(body, bytes) else body, None), RESET)

    def chunk(self, key: RoomKey, page: int, last: bool, clip: bool) -> SendChunk:
        return send_chunk(sent(key), page, [source_page(key, page)], last, b"first", clip=clip)

    def too_early(self, chunk: SendChunk) -> bool:
        """Whether the engine must not hand this over yet, since it may not be clipped."""
        return not chunk.clip and any(
            machine.added and machine.poll is KVPoll.BOOTSTRAPPING
            for machine in self.control.rooms()
            if machine.key == chunk.key
        )

    def write_ended(self, number: int, drained: bool | None) -> WriteDone | WriteFailed:
        """The end of one of the writes in flight, `drained` None where it is DONE; or of no
        write."""
        job_id = nth(sorted(self.in_flight), number)
        if job_id is None:
            job_id = 10**6
        elif drained is False:
            self.undrained[job_id] = self.in_flight.pop(job_id)
        else:
            del self.in_flight[job_id]
        return write_ended(job_id, None if drained is None else RESET, drained is not False)

    def write_drained(self, number: int) -> WriteDrained:
        job_id = nth(sorted(self.undrained), number)
        self.undrained.pop(job_id, None)
        return WriteDrained(10**6 if job_id is None else job_id)

    def copied(self, number: int, ok: bool) -> CopyDone | None:
        if self.control.relay is None:
            return None
        copy_id = nth(sorted(self.gathers), number)
        self.gathers.pop(copy_id, None)
        return CopyDone(10**6 if copy_id is None else copy_id, None if ok else RESET)

    def feed(self, kind: Any, args: tuple[Any, ...]) -> None:
        if kind == "restart":
            self.me = newer(self.me)
            return
        what = PREFILL_FEED[kind][1](self, *args)
        if what is None:
            return
        if isinstance(what, SendChunk) and self.too_early(what):
            with pytest.raises(InternalError):
                self.peer.on(what)
            return
        effects = self.peer.on(what)
        undrained = isinstance(what, WriteFailed) and not what.drained
        assert effects.count(Renew()) == undrained
        if isinstance(what, AddRoom | OfferRoom):
            if self.is_refused(what, effects):
                return
            self.added[what.key] += 1
        self.see(effects)

    def is_refused(self, what: AddRoom | OfferRoom, effects: list[Any]) -> bool:
        key, is_offer = what.key, isinstance(what, OfferRoom)
        text = "is in use already" if is_offer else "was added already"
        error = Alike(RequestError(f"room {key.room} generation {key.generation} {text}"))
        if effects != [RoomEnded(key, KVPoll.FAILED, error), SourceFree(key)]:
            return False
        added = self.added[key]
        if is_offer:
            assert self.lives(key) or self.added[sent(key)] > 0
        else:
            assert added > self.freed[key] or added == self.ended[key]
        return True

    # --- the laws ---

    def lives(self, key: RoomKey) -> bool:
        return self.added[key] > self.ended[key]

    def opened(self, key: RoomKey) -> None:
        """The engine hears of this room: where it has not added it, it was an offer, once."""
        offer = RoomKey(*key.numbers)
        if key.decode and not self.lives(key) and self.lives(offer):
            self.added[offer] -= 1
            self.added[key] += 1

    def see(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case WriteJob(route="pages"):
                    self.post(effect)
                    self.write_once(self.key_of(effect), effect.dst_pages.tolist(), (3, 9))
                case WriteJob(route="staging"):
                    blocks = effect.dst_pages.tolist()
                    assert 0 <= min(blocks) <= max(blocks) < 8, "outside the reader's area"
                    self.post(effect)
                case WriteJob():
                    raise AssertionError(f"no state is written here: {effect}")
                case Gather():
                    pages = effect.src_units.tolist()
                    key = sent(room_of_page(pages[0]))
                    self.write_once(key, pages, [source_page(key, page) for page in (1, 2)])
                    self.gathers[effect.gather_id] = effect
                case Bootstrapped(key):
                    self.opened(key)
                    assert self.lives(key)
                case RoomEnded(key):
                    self.opened(key)
                    self.ended[key] += 1
                case SourceFree(key):
                    self.freed[key] += 1
                    assert key not in self.read(), "the source is still read"
                case messages.Drained() | Outcome():
                    key = sent(effect.key)
                    if getattr(effect, "drained", True):
                        assert key not in self.writing(), "called drained, and may be written"
        for key in self.ended:
            assert self.freed[key] <= self.ended[key] <= self.added[key], (
                "the engine is told once, of what it added"
            )
        if self.control.relay is not None:
            self.control.relay.check_invariants()
        self.check_slots()

    def post(self, job: WriteJob) -> None:
        assert job.job_id not in self.in_flight
        assert job.tag.incarnation == PREFILL.incarnation
        self.in_flight[job.job_id] = job

    def write_once(self, key: RoomKey, pages: list[int], allowed: Any) -> None:
        [machine] = [machine for machine in self.control.rooms() if machine.key == key]
        for page in pages:
            assert page in allowed
            assert (machine, page) not in self.written
            self.written.add((machine, page))

    def key_of(self, job: WriteJob) -> RoomKey:
        return RoomKey(job.tag.room, job.tag.generation, DECODE.name)

    def read(self) -> set[RoomKey]:
        """The rooms whose source pages something reads."""
        jobs = {self.key_of(job) for job in self.in_flight.values()}
        return jobs | {sent(room_of_page(gather.src_units[0])) for gather in self.gathers.values()}

    def writing(self) -> set[RoomKey]:
        """The rooms whose pages a write may land in, of peers that are still there."""
        known = self.control.peers(0.0)
        jobs = [*self.in_flight.values(), *self.undrained.values()]
        return {self.key_of(job) for job in jobs if job.peer in known}

    def check_slots(self) -> None:
        """No slot is gathered into that is read, and none is read by two writes."""
        blocks = SLOTS.slot_bytes // 4096
        jobs = [*self.in_flight.values(), *self.undrained.values()]
        slots = [job.src_pages[0] // blocks for job in jobs if job.route == "staging"]
        slots += [gather.slot for gather in self.gathers.values()]
        assert len(set(slots)) == len(slots)

    def let_end(self) -> None:
        while self.in_flight or self.gathers:
            self.feed(*((WriteDone, (0,)) if self.in_flight else (CopyDone, (0, True))))

    def end(self) -> None:
        """All writes end, every deadline passes, and the peer leaves: then nothing is left."""
        self.let_end()
        for _ in range(60):
            self.see(self.peer.after(1.0))
        self.let_end()
        assert self.ended == self.freed == self.added, (
            "all that was added has ended, and its source is free"
        )
        self.see(self.peer.say(self.peer.hello, newer(self.me)))
        assert self.control.num_rooms == 0, "no tombstone lives longer than its peer"
        while self.undrained:
            self.feed(WriteDrained, (0,))
        if self.control.relay is not None:
            staging = self.control.relay
            assert (len(staging.jobs), len(staging.free_slots)) == (0, SLOTS.num_slots)


PREFILL_FEED: Feed = {
    AddRoom: (st.tuples(ROOMS), lambda _, key: add_room(sent(key))),
    OfferRoom: (
        st.tuples(ROOMS, st.sampled_from([0.5, 30.0])),
        lambda _, key, timeout_s: OfferRoom(RoomKey(*key.numbers), 10, PROMPT, timeout_s),
    ),
    SendChunk: (
        st.tuples(ROOMS, st.just(1), st.just(False), st.booleans())
        | st.tuples(ROOMS, st.just(2), st.just(True), st.booleans()),
        PrefillWorld.chunk,
    ),
    DeclineRoom: (st.tuples(ROOMS), lambda _, key: DeclineRoom(sent(key), "no room")),
    AbortRoom: (
        st.tuples(ROOMS, st.booleans()),
        lambda _, key, offer: AbortRoom(RoomKey(*key.numbers) if offer else sent(key), "enough"),
    ),
    MoveWeights: (
        st.tuples(VERSIONS, st.booleans()),
        lambda _, version, ends: MoveWeights(version, ends),
    ),
    Fence: (st.just(()), lambda world: Fence(world.me)),
    FrameReceived: (BODIES, PrefillWorld.frame),
    FrameFailed: (BODIES, PrefillWorld.frame_failed),
    WriteDone: (st.tuples(NTH), lambda world, number: world.write_ended(number, None)),
    WriteFailed: (st.tuples(NTH, st.booleans()), PrefillWorld.write_ended),
    WriteDrained: (st.tuples(NTH), PrefillWorld.write_drained),
    Arrived: (st.just(()), lambda _: Arrived(b"junk")),
    Settled: (st.just(()), lambda world: Settled(world.me)),
    PeerUnreachable: (st.just(()), lambda world: PeerUnreachable(world.me, RESET)),
    CopyDone: (st.tuples(NTH, st.booleans()), PrefillWorld.copied),
    ConnectFailed: (st.just(()), lambda _: ConnectFailed(ADDRESS, RESET)),
    Reached: (st.just(()), lambda _: Reached(ADDRESS)),
    Unreached: (st.just(()), lambda _: Unreached(ADDRESS, "no answer")),
    Tick: (st.tuples(PAUSES), lambda world, pause_s: world.peer.pause(pause_s)),
    AgentDestroyed: (st.just(()), lambda _: AgentDestroyed()),
}


@pytest.mark.slow
@given(steps_of(PREFILL_FEED), st.booleans())
@example([(CopyDone, (0, True)), (WriteFailed, (0, False)), (Tick, (11.0,))], True)
@example([(AddRoom, (RoomKey(0, 0),)), (SendChunk, (RoomKey(0, 0), 2, True, False))], True)
@example([(WriteFailed, (0, False)), (FrameReceived, (messages.Abort(0, 0, ""), None))], False)
def test_prefills_control_survives_any_decode_worker(steps: list[Step], staged: bool) -> None:
    world = PrefillWorld(staged=staged)
    first = RoomKey(0, 0)
    start: list[Step] = [
        (FrameReceived, ("hello", None)),
        (FrameReceived, (promise(*first.numbers), None)),
        (AddRoom, (first,)),
        (SendChunk, (first, 1, False, False)),
    ]
    if staged:
        start.append((FrameReceived, (LeaseGrant(*first.numbers, 0, 1, 0), None)))
    for kind, args in [*start, *steps]:
        world.feed(kind, args)
    world.end()


# --- both -----------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_random_bytes_change_nothing(raw: bytes) -> None:
    for peer, source in ((PrefillPeer().opened(), ADDRESS), (DecodePeer().bootstrapped(), ROUTE)):
        before = [machine.poll for machine in peer.control.rooms()]
        assert peer.on(FrameReceived(source, raw)) in ([], [HelloWanted()])
        assert [machine.poll for machine in peer.control.rooms()] == before
        assert peer.control.counters["frames_dropped"] == 1


def test_the_inputs_fed_here_are_all_there_are() -> None:
    """A new input would need a law above."""
    assert set(DECODE_FEED) == {*members(DecodeInput), PagesLookedAt}
    assert set(PREFILL_FEED) == members(PrefillInput)


def test_the_effects_seen_here_are_all_there_are() -> None:
    """A new effect would need a law above. Examine's are in test_peer_changes.py: no peer here
    names a process."""
    decode = {
        "SendFrame", "Connect", "Disconnect", "Expect", "Settle", "LookAt", "Scatter", "RoomEnded",
        "RoomDrained", "RoomOverdue", "Examine", "PrefillReady", "PrefillAway", "PrefillLost",
        "Raised",
    }  # fmt: skip
    prefill = {
        "SendFrame", "AddPeer", "RemovePeer", "WriteJob", "Cancel", "Renew", "Gather",
        "Examine", "Bootstrapped", "RoomEnded", "SourceFree", "Raised",
    }  # fmt: skip
    assert {effect.__name__ for effect in (*members(DecodeEffect), Scatter, LookAt)} == decode
    assert {effect.__name__ for effect in (*members(PrefillEffect), Gather)} == prefill
