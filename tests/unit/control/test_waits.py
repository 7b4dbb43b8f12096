"""A wait in the queue of a peer that is heard has no end of its own; one of a silent peer has.
Requests on prefill whose decode worker is dead before it has promised pages: they end as soon as
that is known, and no request of another worker or of a later life does. It was killed, and is
started anew under its name: then they end soon after it has introduced itself."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.effects import FrameReceived, SendFrame
from prefixkv.errors import PeerLostError, TransferError, TransferTimeoutError
from prefixkv.protocol import messages
from prefixkv.protocol.commands import Fence, OfferRoom, OpenRoom, RefuseRoom
from prefixkv.protocol.events import Bootstrapped, RoomDrained, RoomEnded
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId, RoomKey
from prefixkv.protocol.machine import RoomTick
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Fenced,
    Heartbeat,
    Hello,
    HelloRefused,
    HelloWanted,
    Outcome,
    Promise,
    PromiseAck,
    Topology,
)
from prefixkv.protocol.receiver_machine import ChunkLanded, PeerReady, ReceiverMachine
from prefixkv.transport.base import Arrived, WriteDrained
from tests.unit.control import mesh_wire
from tests.unit.control.wire import (
    ADDRESS,
    DECODE,
    HELLO,
    KEY,
    PAGE_SIZE,
    PREFILL,
    ROUTE,
    SENT,
    TIMING,
    DecodePeer,
    PrefillPeer,
    add_room,
    kinds,
    newer,
    of,
    promise,
)
from tests.unit.protocol.rooms import PROMPT

BEATS = 20 * int(TIMING.waiting_timeout_s)


def beats(peer: Any, seconds: int = BEATS) -> list[Any]:
    """The peer says a heartbeat a second; what is said and what becomes of rooms meanwhile."""
    out = []
    for _ in range(seconds):
        out += peer.after(1.0) + peer.say(Heartbeat())
    return [effect for effect in out if not isinstance(effect, Heartbeat)]


LONGEST_S = 50
SHORT = replace(TIMING, longest_wait_s=float(LONGEST_S))


def silence(peer: Any, seconds: float) -> list[RoomEnded]:
    return [ended for _ in range(round(seconds)) for ended in of(peer.after(1.0), RoomEnded)]


# --- decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING])
def test_decode_waits_while_prefill_is_heard_and_no_longer_than_its_patience_after(
    state: KVPoll,
) -> None:
    peer = PrefillPeer().opened()
    peer.say(PromiseAck(*KEY.numbers, 0))
    patience_s = TIMING.waiting_timeout_s
    if state is KVPoll.TRANSFERRING:
        peer.on(Arrived(ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, 0).pack()))
        patience_s = TIMING.transfer_timeout_s
    for _ in range(BEATS):
        assert not of(peer.after(1.0), RoomEnded)
        peer.say(Heartbeat())
        peer.say(PromiseAck(*KEY.numbers, 0))
    assert peer.poll() is state
    assert silence(peer, patience_s - 1) == []
    [ended] = silence(peer, 1)
    assert isinstance(ended.error, TransferTimeoutError)


def test_prefill_is_asked_whether_it_has_the_room_still_once_a_deadline() -> None:
    peer = PrefillPeer().opened()
    peer.say(PromiseAck(*KEY.numbers, 0))
    [again] = beats(peer, int(TIMING.waiting_timeout_s))
    assert again == promise()
    assert len(of(beats(peer, 4), Promise)) > 1, "until it answers"
    peer.say(PromiseAck(*KEY.numbers, 0))
    assert beats(peer, int(TIMING.waiting_timeout_s) - 6) == []


def test_a_room_that_prefill_has_lost_fails_though_prefill_is_heard() -> None:
    """Its outcome was lost, and repeated for `ack_timeout_s` only."""
    peer = DecodePeer().bootstrapped()
    peer.chunk(1, [30, 31], last=True)
    peer.ended(1)
    for _ in range(int(TIMING.ack_timeout_s) + 1):
        peer.after(1.0)
        peer.say(Heartbeat())
    assert peer.control.num_rooms == 0
    [outcome] = peer.say(promise())
    assert (outcome.ok, outcome.drained) == (False, True)
    assert outcome.error.startswith("room 7 is over")


def test_a_rank_whose_outcome_is_here_is_not_asked_again() -> None:
    """It may have dropped the room, and would take the promise for that of another use."""
    machine = ReceiverMachine(promise(), TIMING, 0.0)
    machine.on(PeerReady((0, 1)), 0.0)
    machine.on(ChunkLanded(0, 0, 0), 0.0)
    machine.on(Outcome(*KEY.numbers, 0, True, 1, 2, b"", "", True), 0.0)
    late_s = TIMING.transfer_timeout_s
    said = machine.on(RoomTick(late_s - 1), late_s)
    assert [say.rank for say in said] == [1]


def test_one_silent_rank_of_two_ends_the_wait() -> None:
    peer = PrefillPeer().opened()
    [room] = peer.control._rooms.all()
    assert room.heard_s == peer.now_s
    room.links[1] = type(room.link)("tcp://other", type(room.link.live)(7.0, 7.0), room.link.hello)
    room.peers[1] = newer(PREFILL)
    assert room.heard_s == float("-inf"), "another life answers there, or none"
    room.links[1].peer = newer(PREFILL)
    assert room.heard_s == 7.0


def test_a_refusal_is_said_for_as_long_as_prefill_is_heard() -> None:
    peer = PrefillPeer().opened()
    peer.on(RefuseRoom(RoomKey(8, 0), 9, "tcp://prefill", "no"))
    assert any(isinstance(word, Abort) for word in beats(peer)[-20:])
    assert peer.say(Drained(8, 0, 0, 9)) == [RoomDrained(RoomKey(8, 0))]


@pytest.mark.parametrize("waits_for", ["its first chunk", "its next chunk"])
def test_decode_waits_no_longer_than_the_longest_though_prefill_is_heard(waits_for: str) -> None:
    peer = PrefillPeer(SHORT).opened()
    peer.say(PromiseAck(*KEY.numbers, 0))
    if waits_for == "its next chunk":
        peer.after(7.0)
        peer.on(Arrived(ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, 0).pack()))
    assert of(beats(peer, LONGEST_S - 1), RoomEnded) == []
    [ended] = of(beats(peer, 1), RoomEnded)
    assert isinstance(ended.error, TransferTimeoutError)
    assert "longest_wait_s passed in" in str(ended.error)


def test_a_refusal_is_said_no_longer_than_the_longest() -> None:
    peer = PrefillPeer(SHORT).opened()
    peer.on(RefuseRoom(RoomKey(8, 0), 9, "tcp://prefill", "no"))
    assert of(beats(peer, LONGEST_S - 1), RoomDrained) == []
    assert RoomDrained(RoomKey(8, 0)) in beats(peer, 1)


# --- prefill --------------------------------------------------------------------------------------


def test_prefill_waits_for_the_promise_of_a_decode_worker_that_is_heard() -> None:
    peer = DecodePeer().known()
    peer.on(add_room())
    assert beats(peer) == []
    assert silence(peer, TIMING.bootstrap_timeout_s - 1) == []
    [ended] = silence(peer, 1)
    assert isinstance(ended.error, TransferTimeoutError)


def test_prefill_waits_for_an_unknown_decode_worker_for_its_time_only() -> None:
    peer = DecodePeer().known()
    peer.on(add_room(RoomKey(7, 0, "decode-1")))
    [ended] = of(beats(peer, int(TIMING.bootstrap_timeout_s)), RoomEnded)
    assert isinstance(ended.error, TransferTimeoutError)


def test_prefill_waits_for_its_own_engine_while_decode_is_heard() -> None:
    peer = DecodePeer().bootstrapped()
    assert beats(peer) == []
    peer.chunk(1, [30])
    peer.ended(1)
    assert beats(peer) == [], "and between two chunks"
    assert silence(peer, TIMING.transfer_timeout_s - 1) == []
    assert len(silence(peer, 1)) == 1


def test_a_write_in_flight_has_its_deadline_whoever_is_heard() -> None:
    peer = DecodePeer().bootstrapped()
    peer.chunk(1, [30])
    assert of(beats(peer, int(TIMING.transfer_timeout_s) - 1), RoomEnded) == []
    assert len(of(beats(peer, 1), RoomEnded)) == 1


def test_a_promise_that_no_request_claims_has_its_deadline_though_decode_is_heard() -> None:
    peer = DecodePeer().known()
    peer.say(promise())
    said = beats(peer, int(TIMING.parked_timeout_s))
    assert [word.ok for word in of(said, Outcome)] == [False]
    ended, _ = peer.on(add_room(SENT))
    assert isinstance(ended.error, TransferTimeoutError)


def test_a_rank_of_decode_that_is_silent_ends_prefills_wait() -> None:
    peer = DecodePeer().known()
    heard_s = peer.control._peers.heard_s
    assert heard_s("decode-0", (0,), peer.now_s) == peer.now_s
    assert heard_s("decode-0", (0, 1), peer.now_s) == float("-inf"), "rank 1 is not known"


def test_a_request_that_a_former_life_of_decode_was_to_promise_for_is_not_waited_for() -> None:
    peer = DecodePeer().known()
    peer.on(add_room())
    peer.after(1.0)
    peer.me = newer(DECODE)
    peer.known()
    peer.on(add_room(RoomKey(8, 0, DECODE.name)))
    ended = of(beats(peer), RoomEnded)
    assert [room.key for room in ended] == [SENT]


@pytest.mark.parametrize("waits_for", ["a promise", "its first chunk", "its next chunk"])
def test_prefill_waits_no_longer_than_the_longest_though_decode_is_heard(waits_for: str) -> None:
    peer = DecodePeer(SHORT)
    if waits_for == "a promise":
        peer.known().on(add_room())
    else:
        peer.bootstrapped()
    if waits_for == "its next chunk":
        peer.after(7.0)
        peer.chunk(1, [30])
        peer.ended(1)
    assert beats(peer, LONGEST_S - 1) == []
    [ended] = of(beats(peer, 1), RoomEnded)
    assert isinstance(ended.error, TransferTimeoutError)


def test_the_wait_for_the_second_reader_begins_with_the_request() -> None:
    """Not with the first promise, which may have waited for the request."""
    peer = DecodePeer(
        hello=msgspec.structs.replace(HELLO, topology=Topology(PAGE_SIZE, 2), worker=DECODE)
    )
    peer.known().say(promise())
    peer.after(TIMING.parked_timeout_s - 1)
    peer.on(add_room())
    assert silence(peer, TIMING.bootstrap_timeout_s - 1) == []
    assert len(silence(peer, 1)) == 1


def test_the_pages_of_a_room_that_is_over_are_drained_once_what_kernels_hold_has_settled() -> None:
    """A write of it failed, its agent was renewed, and what was said of both was lost. So decode
    has to ask by an abort, and is told to let it settle."""
    peer = DecodePeer().bootstrapped()
    peer.chunk(1, [30, 31], last=True)
    peer.ended(1, TransferError("broke"), drained=False)
    for _ in range(int(TIMING.ack_timeout_s) + 1):
        peer.after(1.0)
    peer.on(WriteDrained(1))
    assert peer.control.num_rooms == 0
    [outcome] = peer.say(promise())
    assert (outcome.ok, outcome.drained) == (False, False)
    assert peer.say(Abort(*KEY.numbers, "failed", 0)) == [Drained(*KEY.numbers, 0, 0, True)]


OTHER = PeerId("decode-1", 7)
THEIRS = RoomKey(8, 0, OTHER.name)
GRACE_S = TIMING.suspect_after_s


def ended(effects: list) -> list[RoomKey]:
    return [end.key for end in of(effects, RoomEnded)]


def both_known() -> DecodePeer:
    """Two decode workers; a request that names each, and one that is promised."""
    peer = DecodePeer().known()
    peer.say(HELLO, OTHER, route=ROUTE + b"2")
    peer.on(add_room())
    peer.on(add_room(THEIRS))
    peer.take_said()
    return peer


def told(peer: DecodePeer) -> int:
    return peer.control.counters["never_promised"]


@pytest.mark.parametrize("how", ["fenced", "proved dead", "has left", "holds us for dead"])
def test_they_end_as_the_death_is_known(how: str) -> None:
    peer = both_known()
    if how == "has left":
        said = peer.say(Fenced())
    elif how == "holds us for dead":
        said = peer.say(HelloRefused(PREFILL.incarnation, "was fenced", is_over=True))
    else:
        said = peer.on(Fence(DECODE, proved=how == "proved dead"))
    (end,) = of(said, RoomEnded)
    assert end.key == SENT
    assert isinstance(end.error, PeerLostError)
    assert end.error.peer == DECODE
    assert "had not promised pages" in str(end.error)
    assert told(peer) == 1
    assert peer.control.num_rooms == 1, "the other worker's"


def test_of_a_worker_that_prefill_has_never_met() -> None:
    peer = DecodePeer()
    peer.on(add_room())
    peer.on(add_room(THEIRS))
    assert ended(peer.on(Fence(DECODE))) == [SENT]


def test_what_is_added_after_that_is_for_the_next_life() -> None:
    peer = both_known()
    peer.on(Fence(DECODE, proved=True))
    again = RoomKey(9, 0, DECODE.name)
    peer.on(add_room(again))
    assert ended(peer.on(Fence(DECODE))) == [], "the operator says it too"
    assert ended(peer.after(TIMING.bootstrap_timeout_s - 0.25)) == []
    assert again in ended(peer.after(0.5))


def test_a_former_lifes_death_ends_nothing_of_the_present_one() -> None:
    peer = both_known()
    peer.me = newer(DECODE)
    peer.say(HELLO)
    assert ended(peer.on(Fence(DECODE, proved=True))) == []
    unheard = PeerId(DECODE.name, 99)
    assert ended(peer.on(Fence(unheard))) == [], "of whichever life, it is not the present one's"
    assert ended(peer.on(Fence(newer(DECODE), proved=True))) == [SENT]


def test_one_that_is_promised_ends_by_its_promise() -> None:
    peer = DecodePeer().bootstrapped()
    assert ended(peer.on(Fence(DECODE))) == [SENT]
    assert told(peer) == 0


def test_a_worker_that_is_killed_again_and_again() -> None:
    """Each life gives the requests of all former ones no more time than the first one did."""
    peer = both_known()
    keys, ends = [SENT], []
    for number in range(5):
        peer.pause(1.0)
        peer.me = newer(peer.me)
        peer.say(msgspec.structs.replace(HELLO, age_ms=500))
        keys.append(RoomKey(20 + number, 0, DECODE.name))
        peer.on(add_room(keys[-1]))
        for _ in range(2):
            peer.say(Heartbeat(), OTHER, route=ROUTE + b"2")
            ends += ended(peer.after(0.5))
    assert ends == keys[:4], "those that are known to be of former lives for long enough"
    for _ in range(round(GRACE_S / 0.5)):
        peer.say(Heartbeat(), OTHER, route=ROUTE + b"2")
        peer.say(Heartbeat())
        ends += ended(peer.after(0.5))
    assert ends == keys[:-1], "the last life may ask for its own"
    assert told(peer) == 5
    assert peer.control.num_rooms == 2


def test_by_its_deadline_where_nothing_is_known() -> None:
    peer = DecodePeer()
    peer.on(add_room())
    peer.on(OfferRoom(RoomKey(5, 0), 10, PROMPT, TIMING.bootstrap_timeout_s))
    ends = of(peer.after(TIMING.bootstrap_timeout_s), RoomEnded)
    assert {end.key for end in ends} == {SENT, RoomKey(5, 0)}
    assert all(isinstance(end.error, TransferTimeoutError) for end in ends)
    assert told(peer) == 2


@pytest.mark.parametrize("dead", [0, 1])
def test_a_worker_with_a_rank_that_is_dead_promises_nothing_more(dead: int) -> None:
    """The other rank may have promised already."""
    peer = mesh_wire.Readers()
    ranks = peer.greet(2)
    peer.on(mesh_wire.add_room())
    peer.say(ranks[1 - dead], mesh_wire.promise())
    assert ended(peer.on(Fence(ranks[dead], proved=True))) == [mesh_wire.SENT]
    assert peer.control.counters["never_promised"] == 1


def test_a_rank_of_prefill_that_knows_no_rank_0_of_decode() -> None:
    peer = mesh_wire.Readers(2, rank=1)
    leader, second = PeerId("d", 5), PeerId("d/1", 5)
    peer.say(second, mesh_wire.hello(2, 1, leader))
    peer.on(mesh_wire.add_room())
    assert ended(peer.on(Fence(second, proved=True))) == [mesh_wire.SENT]


# --- started anew -------------------------------------------------------------------------------


def greet(peer: DecodePeer, age_s: float | None) -> None:
    age_ms = None if age_s is None else int(1000 * age_s)
    peer.say(msgspec.structs.replace(HELLO, age_ms=age_ms))


def added_then(passed_s: float) -> DecodePeer:
    peer = DecodePeer()
    peer.on(add_room())
    peer.pause(passed_s)
    return peer


def ends_within(peer: DecodePeer, seconds: float) -> list[RoomEnded]:
    """What ends while decode is heard all the time."""
    ends = []
    for _ in range(round(seconds / 0.25)):
        peer.say(Heartbeat())
        ends += of(peer.after(0.25), RoomEnded)
    return ends


def test_a_request_from_before_the_life_ends_soon_and_names_it() -> None:
    peer = added_then(3.0)
    greet(peer, 1.0)
    assert ends_within(peer, GRACE_S - 0.25) == []
    (ended,) = ends_within(peer, 0.5)
    assert isinstance(ended.error, PeerLostError)
    assert ended.error.peer == DECODE
    assert "was started after the request had come" in str(ended.error)
    # Who asks for it after all hears how it ended, at once.
    assert kinds(peer.say(promise()))[-1] == "Outcome"


@pytest.mark.parametrize("known_before", [False, True])
def test_whether_the_former_life_was_known_or_not(known_before: bool) -> None:
    peer = DecodePeer()
    if known_before:
        greet(peer, 5.0)
    peer.on(add_room())
    peer.pause(2.0)
    peer.me = newer(DECODE)
    greet(peer, 1.0)
    (ended,) = ends_within(peer, GRACE_S + 0.25)
    assert isinstance(ended.error, PeerLostError)
    assert ended.error.peer == newer(DECODE)


@pytest.mark.parametrize("age_s", [4.0, None])
def test_a_life_that_was_there_before_the_request_is_waited_for(age_s: float | None) -> None:
    peer = added_then(3.0)
    greet(peer, age_s)
    assert ends_within(peer, 2 * TIMING.bootstrap_timeout_s) == []


def test_a_life_that_asks_in_time_is_served() -> None:
    """A router may name a worker that is about to start."""
    peer = added_then(3.0)
    greet(peer, 1.0)
    ends_within(peer, GRACE_S - 0.25)
    assert len(of(peer.say(promise()), Bootstrapped)) == 1
    assert ends_within(peer, 2 * GRACE_S) == []


def test_decode_says_how_old_it_is_when_it_says_it() -> None:
    control = DecodeControl(DECODE, HELLO, TIMING, born_s=90.0)

    def ages(effects: list) -> list[int | None]:
        bodies = [messages.decode(one.raw).body for one in effects if isinstance(one, SendFrame)]
        return [body.age_ms for body in bodies if isinstance(body, Hello)]

    assert ages(control.on(OpenRoom(promise(), ADDRESS), 100.0)) == [10_000]
    raw = messages.encode(PREFILL, 1, HelloWanted(nonce=5))
    assert ages(control.on(FrameReceived(ADDRESS, raw), 101.5)) == [11_500]
    unknown = DecodeControl(DECODE, HELLO, TIMING)
    assert ages(unknown.on(OpenRoom(promise(), ADDRESS), 100.0)) == [None]
