"""Whatever a peer sends, in whatever order and however damaged: nothing is raised out of
`on_frame`, every room ends at most once and only forwards, nothing is called drained or free
without proof, and no page is written twice.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from prefixkv.control import decode as decode_endpoint
from prefixkv.control import prefill as prefill_endpoint
from prefixkv.errors import RequestError
from prefixkv.protocol import messages
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import HelloReply, HelloWanted, Outcome, Topology
from prefixkv.protocol.tags import ChunkTag
from tests.control.wire import (
    ADDRESS,
    DECODE,
    DIGEST,
    HELLO,
    PREFILL,
    ROUTE,
    TOPOLOGY,
    DecodePeer,
    PrefillPeer,
    newer,
    promise,
)

ROOMS = st.builds(RoomKey, st.integers(0, 1), st.integers(0, 1))
PAUSES = st.sampled_from([0.0, 0.1, 0.6, 3.0, 11.0])
DAMAGE = st.one_of(
    st.none(), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3)
)


def damaged(raw: bytes, damage: list[tuple[float, int]] | None) -> bytes:
    out = bytearray(raw)
    for place, byte in damage or ():
        out[min(int(place * len(out)), len(out) - 1)] = byte
    return bytes(out)


def room_bodies(key: RoomKey, ok: bool, drained: bool, num_pages: int) -> list[Any]:
    return [
        messages.PromiseAck(*key, 0), messages.Drained(*key, 0), messages.Abort(*key, ""),
        messages.OutcomeAck(*key, 0), Outcome(*key, 0, ok, 1, num_pages, b"", "", drained),
        Outcome(*key, 3, ok, 1, num_pages, b"", "", drained), promise(*key),
        promise(*key, pages=(3, 9) if ok else (3, 99)),
    ]  # fmt: skip


ROOM_BODIES = st.builds(
    room_bodies, ROOMS, st.booleans(), st.booleans(), st.integers(0, 3)
).flatmap(st.sampled_from)
OTHER_BODIES = st.sampled_from(
    [
        messages.Heartbeat(),
        messages.Fenced(),
        HelloWanted(),
        HELLO,
        HelloReply(DIGEST, TOPOLOGY, ()),
        HelloReply(DIGEST, Topology(8), ()),
        HelloReply(DIGEST, TOPOLOGY, (), "no"),
    ]
)
FRAMES = st.tuples(st.just("frame"), st.one_of(ROOM_BODIES, ROOM_BODIES, OTHER_BODIES), DAMAGE)
JUNK = st.tuples(st.just("junk"), st.binary(max_size=60))
TICKS = st.tuples(st.just("tick"), PAUSES)


class RoomLaws:
    """The promises of pages that may be written, each with who might write it."""

    def __init__(self, peer: PrefillPeer) -> None:
        self.endpoint = peer.endpoint
        self.ended: Counter[RoomKey] = Counter()
        self.drained: Counter[RoomKey] = Counter()
        self.opened: Counter[RoomKey] = Counter()
        self.polls: dict[int, KVPoll] = {}

    def see(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, receiver.RoomEnded):
                self.ended[action.key] += 1
            elif isinstance(action, receiver.RoomDrained):
                self.drained[action.key] += 1
        for key, opened in self.opened.items():
            assert self.drained[key] <= self.ended[key] <= opened
        machines = {id(machine): machine for machine in self.endpoint.rooms()}
        for name, machine in machines.items():
            assert machine.poll >= self.polls.get(name, KVPoll.BOOTSTRAPPING)
            assert machine.wake_s < float("inf"), "a room waits without a deadline"
        self.polls = {name: machine.poll for name, machine in machines.items()}
        assert (
            sum(not machine.drained for machine in machines.values()) == self.endpoint.num_expected
        )
        for key in self.opened:  # one that is forgotten has ended and is drained, or succeeded
            assert self.endpoint.poll(key) is not None or self.ended[key] == self.opened[key]


@given(
    st.lists(
        st.one_of(
            FRAMES, FRAMES, JUNK, TICKS,
            st.tuples(st.sampled_from(["open", "abort", "arrival"]), ROOMS),
            st.tuples(st.sampled_from(["fence", "restart", "unreachable"])),
        ),
        max_size=40,
    )
)  # fmt: skip
@example([("open", RoomKey(0, 0)), ("tick", 0.6), ("tick", 3.0), ("tick", 3.0), ("tick", 3.0)])
def test_decodes_endpoint_survives_any_prefill_worker(steps: list[tuple[Any, ...]]) -> None:
    peer = PrefillPeer()
    laws = RoomLaws(peer)
    me = PREFILL
    for what, *args in [
        ("open", RoomKey(0, 0)),
        ("frame", HelloReply(DIGEST, TOPOLOGY, ()), None),
        *steps,
    ]:
        if what == "frame":
            actions = peer.call("on_frame", ADDRESS, damaged(peer.raw(args[0], me), args[1]))
        elif what == "junk":
            actions = peer.call("on_frame", ADDRESS, args[0])
        elif what == "tick":
            actions = peer.after(args[0])
        elif what == "open":
            try:
                actions = peer.open(promise(*args[0]))
            except RequestError:
                assert peer.endpoint.poll(args[0]) is not None
                continue
            laws.opened[args[0]] += 1
        elif what == "abort":
            actions = peer.call("abort", args[0], OSError("enough"))
        elif what == "arrival":
            actions = peer.call("on_arrival", ChunkTag(me.incarnation, *args[0], 0, 0).pack())
        elif what == "restart":
            me, actions = newer(me), []
        elif what == "fence":
            actions = peer.call("fence", me)
        else:
            actions = peer.call("unreachable", ADDRESS, OSError("gone"))
        laws.see(actions)
    for _ in range(60):  # every deadline passes, then every worker there ever was is fenced
        laws.see(peer.after(1.0))
    for incarnation in range(PREFILL.incarnation, me.incarnation + 1):
        laws.see(peer.call("fence", PeerId(PREFILL.name, incarnation)))
    assert all(machine.poll is KVPoll.FAILED for machine in peer.endpoint.rooms())
    assert laws.ended == laws.opened


class WriteLaws:
    """What prefill's endpoint writes, and when it lets go of it."""

    def __init__(self, peer: DecodePeer) -> None:
        self.endpoint = peer.endpoint
        self.in_flight: dict[int, RoomKey] = {}
        self.added: Counter[RoomKey] = Counter()
        self.ended: Counter[RoomKey] = Counter()
        self.freed: Counter[RoomKey] = Counter()
        self.written: set[tuple[int, int]] = (
            set()
        )  # (machine, page): a page is written once a promise

    def see(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, sender.PostWrite):
                [machine] = [
                    machine for machine in self.endpoint.rooms() if machine.key == action.key
                ]
                for page in action.dst_pages.tolist():
                    assert (id(machine), page) not in self.written
                    assert page in (3, 9)
                    self.written.add((id(machine), page))
                self.in_flight[action.job_id] = action.key
            elif isinstance(action, sender.RoomEnded):
                self.ended[action.key] += 1
            elif isinstance(action, sender.SourceFree):
                self.freed[action.key] += 1
                assert action.key not in self.in_flight.values(), "a write still reads the source"
            elif isinstance(action, messages.Drained | Outcome) and getattr(
                action, "drained", True
            ):
                key = RoomKey(action.room, action.generation)
                assert key not in self.in_flight.values(), (
                    "called drained while a write is in flight"
                )
        for key in self.ended:
            assert self.freed[key] <= self.ended[key] <= self.added[key], (
                "the engine is told once, of what it added"
            )


@given(
    st.lists(
        st.one_of(
            FRAMES, FRAMES, JUNK, TICKS,
            st.tuples(st.sampled_from(["add", "abort", "chunk", "last"]), ROOMS),
            st.tuples(st.sampled_from(["add", "chunk", "last"]), ROOMS),
            st.tuples(st.just("ended"), st.integers(0, 3), st.booleans(), st.booleans()),
            st.tuples(st.just("restart")),
        ),
        max_size=40,
    )
)  # fmt: skip
def test_prefills_endpoint_survives_any_decode_worker(steps: list[tuple[Any, ...]]) -> None:
    peer = DecodePeer()
    laws = WriteLaws(peer)
    me = DECODE
    start = [
        ("frame", HELLO, None),
        ("frame", promise(0, 0), None),
        ("add", RoomKey(0, 0)),
        ("chunk", RoomKey(0, 0)),
    ]
    for what, *args in [*start, *steps]:
        if what == "frame":
            actions = peer.call("on_frame", ROUTE, "", damaged(peer.raw(args[0], me), args[1]))
        elif what == "junk":
            actions = peer.call("on_frame", ROUTE, "", args[0])
        elif what == "tick":
            actions = peer.after(args[0])
        elif what == "add":
            laws.added[args[0]] += 1
            try:
                actions = peer.call("add", args[0], 10)
            except RequestError:
                laws.added[args[0]] -= 1
                continue
        elif what == "abort":
            actions = peer.call("abort", args[0], OSError("enough"))
        elif what == "ended":
            jobs = sorted(laws.in_flight)[args[0] :][:1]
            for job_id in jobs:
                del laws.in_flight[job_id]
            error = None if args[1] else OSError("reset")
            actions = [
                action
                for job_id in jobs
                for action in peer.ended(job_id, error, drained=args[1] or args[2])
            ]
        elif what == "restart":
            me, actions = newer(me), []
        else:
            actions = peer.chunk(1 + (what == "last"), [30], last=what == "last", key=args[0])
        laws.see(actions)
    for job_id in sorted(laws.in_flight):
        del laws.in_flight[job_id]
        laws.see(peer.ended(job_id))
    for _ in range(60):
        laws.see(peer.after(1.0))
    assert laws.ended == laws.freed == laws.added, (
        "all that was added has ended, and its source is free"
    )
    laws.see(peer.say(HELLO, newer(me)))
    assert peer.endpoint.num_rooms == 0, "no tombstone lives longer than its peer"


@given(st.binary(max_size=200))
def test_random_bytes_change_nothing(raw: bytes) -> None:
    for peer, args in (
        (PrefillPeer().opened(), (ADDRESS,)),
        (DecodePeer().bootstrapped(), (ROUTE, "")),
    ):
        before = [machine.poll for machine in peer.endpoint.rooms()]
        assert peer.call("on_frame", *args, raw) == []
        assert [machine.poll for machine in peer.endpoint.rooms()] == before
        assert peer.endpoint.counters["frames_dropped"] == 1


def test_the_actions_seen_here_are_all_there_are() -> None:
    """A new action would need a law above."""
    seen = {
        "SendFrame", "Connect", "Disconnect", "Settle", "RoomEnded", "RoomDrained", "RoomOverdue",
        "AddPeer", "RemovePeer", "PostWrite", "CancelWrite", "Bootstrapped", "SourceFree",
        "LeaseGranted", "Scatter",
    }  # fmt: skip
    actions = (*decode_endpoint.Action.__args__, *prefill_endpoint.Action.__args__)
    assert {action.__name__ for action in actions} == seen
