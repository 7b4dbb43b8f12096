"""A wait in the queue of a peer that is heard has no end of its own; one of a silent peer has."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefixkv.errors import TransferError, TransferTimeoutError
from prefixkv.protocol.commands import RefuseRoom
from prefixkv.protocol.events import RoomDrained, RoomEnded
from prefixkv.protocol.ids import ChunkTag, KVPoll, RoomKey
from prefixkv.protocol.machine import RoomTick
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Heartbeat,
    Outcome,
    Promise,
    PromiseAck,
    Topology,
)
from prefixkv.protocol.receiver_machine import ChunkLanded, PeerReady, ReceiverMachine
from prefixkv.transport.base import Arrived, WriteDrained
from tests.unit.control.wire import (
    DECODE,
    HELLO,
    KEY,
    PAGE_SIZE,
    PREFILL,
    SENT,
    TIMING,
    DecodePeer,
    PrefillPeer,
    add_room,
    newer,
    of,
    promise,
)

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
