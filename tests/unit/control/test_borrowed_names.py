"""A prefill process may answer at its own address under any name and life. What it says there
counts for what was promised there, and for nothing that another process was promised."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefixkv.control.effects import ConnectFailed, FrameFailed, FrameReceived, Left, Settle
from prefixkv.protocol import messages
from prefixkv.protocol.commands import AbortRoom, Fence, OpenRoom
from prefixkv.protocol.events import RoomDrained, RoomEnded
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Drained, Fenced, Heartbeat, LeaseAsk, Outcome, PromiseAck
from prefixkv.transport.base import Settled
from tests.unit.control.wire import ADDRESS, KEY, PrefillPeer, kinds, newer
from tests.unit.protocol.rooms import PREFILL, TIMING, promise

OTHER = "tcp://other"
TICKET = 77


def say_there(peer: PrefillPeer, body: Any, by: PeerId = PREFILL) -> list[Any]:
    return peer.on(FrameReceived(OTHER, peer.raw(body, by)))


def greet_there(peer: PrefillPeer, by: PeerId = PREFILL) -> list[Any]:
    """As `PrefillPeer.greet`, at the other address."""
    for _ in range(2):
        known = peer.known
        out = say_there(peer, msgspec.structs.replace(peer.reply, known=known), by)
        if kinds(out) != ["Hello"]:
            break
    return out


def two_addresses(first: PeerId = PREFILL) -> PrefillPeer:
    """A room of the worker at ADDRESS, and one of another process, which takes its name."""
    peer = PrefillPeer()
    peer.open(msgspec.structs.replace(promise(), ticket=TICKET))
    peer.greet()
    peer.on(OpenRoom(promise(8), OTHER))
    peer.known = 0  # as the Hello to the other address says
    assert kinds(greet_there(peer, first)) == ["Promise"]
    peer.take_said()
    return peer


def ends(effects: list[Any]) -> list[RoomKey]:
    return [effect.key for effect in effects if isinstance(effect, RoomEnded | RoomDrained)]


def check_untouched(peer: PrefillPeer) -> None:
    """The worker whose name was taken is still heard, and finishes its room."""
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT
    assert peer.control.peers(peer.now_s)[ADDRESS] == (PREFILL, "ready")
    drops = peer.control.counters["frames_dropped"]
    peer.say(messages.HelloWanted())
    peer.known = PREFILL.incarnation
    peer.greet()
    ok = Outcome(*KEY.numbers, 0, True, 1, 2, b"", "", True, TICKET)
    assert RoomEnded(KEY, KVPoll.SUCCESS) in peer.say(ok)
    assert peer.control.counters["frames_dropped"] == drops


def test_a_farewell_ends_what_was_promised_at_its_address_only() -> None:
    peer = two_addresses()
    assert ends(say_there(peer, Fenced())) == [RoomKey(8, 0)] * 2
    check_untouched(peer)


def test_a_farewell_settles_what_was_promised_at_its_address_only() -> None:
    peer = PrefillPeer(replace(TIMING, fence_settle_s=0.5)).opened()
    peer.on(OpenRoom(promise(8), OTHER))
    peer.known = 0
    greet_there(peer)
    out = say_there(peer, Fenced())
    assert Settle(Left(PREFILL, OTHER), 0.5) in out
    assert ends(out) == [RoomKey(8, 0)]
    peer.on(AbortRoom(KEY, "test"))
    assert ends(peer.on(Settled(Left(PREFILL, OTHER)))) == [RoomKey(8, 0)]
    assert peer.control.num_rooms == 1, "its writer may still write"
    assert ends(peer.say(Drained(*KEY.numbers, 0))) == [KEY]


def test_a_name_that_is_given_up_elsewhere_ends_no_life() -> None:
    peer = two_addresses()
    out = greet_there(peer, newer(PREFILL))
    assert ends(out) == [RoomKey(8, 0)], "it was promised to the life before, at that address"
    check_untouched(peer)


def test_a_life_that_is_over_at_both_addresses_is_over() -> None:
    peer = two_addresses()
    greet_there(peer, newer(PREFILL))
    peer.known = PREFILL.incarnation
    peer.greet(newer(PREFILL))
    assert peer.poll() is KVPoll.FAILED
    assert kinds(peer.greet()) == ["HelloRefused"]


WORDS = {
    "outcome": Outcome(*KEY.numbers, 0, True, 1, 2, b"", "", True),
    "failure": Outcome(*KEY.numbers, 0, False, 0, 0, b"", "broke", True),
    "drained": Drained(*KEY.numbers, 0),
    "ack": PromiseAck(*KEY.numbers, 0),
    "ask": LeaseAsk(*KEY.numbers, 0, 0, 0, 1),
    "heartbeat": Heartbeat(),
    "hello wanted": messages.HelloWanted(3),
    "not for decode": messages.HelloRefused(PREFILL.incarnation, "over", True),
}


@pytest.mark.parametrize("name", WORDS)
def test_no_word_there_counts_for_a_room_promised_here(name: str) -> None:
    peer = two_addresses()
    assert ends(say_there(peer, WORDS[name])) == []
    check_untouched(peer)


def test_a_frame_that_raises_ends_no_room_promised_elsewhere() -> None:
    peer = two_addresses()
    frame = FrameReceived(OTHER, peer.raw(PromiseAck(*KEY.numbers, 0, TICKET)))
    assert ends(peer.on(FrameFailed(frame, OSError("on purpose")))) == []
    check_untouched(peer)


def test_our_own_fence_ends_a_life_at_every_address() -> None:
    peer = two_addresses()
    assert ends(peer.on(Fence(PREFILL))) == [KEY, RoomKey(8, 0), KEY, RoomKey(8, 0)]
    assert kinds(greet_there(peer)) == kinds(peer.greet()) == ["HelloRefused"]


def test_a_connection_that_ends_elsewhere_ends_nothing_here() -> None:
    peer = two_addresses()
    assert ends(peer.on(ConnectFailed(OTHER, OSError("on purpose")))) == []
    check_untouched(peer)


def test_pages_are_free_by_the_word_of_the_one_that_was_told_of_them() -> None:
    """The ticket of a promise is said to the process that it is for, and no other can guess it."""
    peer = two_addresses()
    peer.on(AbortRoom(KEY, "test"))
    assert ends(say_there(peer, Drained(*KEY.numbers, 0))) == []
    assert ends(peer.say(Drained(*KEY.numbers, 0, TICKET))) == [KEY]
