"""Requests that prefill's engine does not take: decode hears why, whether it has promised already
or promises later, and no room that is in use is harmed."""

from __future__ import annotations

import pytest
from msgspec import structs

from prefixkv.protocol.commands import DeclineRoom
from prefixkv.protocol.messages import Abort, Drained, Outcome, OutcomeAck, PromiseAck
from tests.unit.control.wire import (
    DECODE,
    KEY,
    PROMPT,
    SENT,
    TIMING,
    DecodePeer,
    add_room,
    kinds,
    newer,
    promise,
)

NO = DeclineRoom(SENT, "the prompt is too long")
TOLD = Outcome(*KEY.numbers, 0, False, 0, 0, b"", "the prompt is too long", True, promise().ticket)
ACK = OutcomeAck(*KEY.numbers, 0, promise().ticket)


def test_a_promise_that_waits_for_the_request_is_answered_at_once() -> None:
    peer = DecodePeer().known()
    peer.say(promise())
    assert peer.on(NO) == [TOLD], "the engine is told nothing: it has never had the room"
    peer.say(ACK)
    assert peer.control.num_rooms == 0
    assert list(peer.control.rooms()) == []


def test_a_promise_that_comes_later_hears_the_reason_each_time_that_it_is_said() -> None:
    peer = DecodePeer()
    assert peer.on(NO) == []
    assert peer.control.num_rooms == 0, "nothing to wait for here"
    peer.after(TIMING.parked_timeout_s - 1.0)
    peer.known()
    assert peer.say(promise()) == [TOLD]
    peer.after(1.0)
    assert peer.say(promise()) == [TOLD], "the first answer may be lost"
    peer.say(ACK)
    assert list(peer.control.rooms()) == []


def test_the_reason_is_kept_for_so_long_only() -> None:
    peer = DecodePeer().known()
    peer.on(NO)
    peer.after(TIMING.parked_timeout_s)
    assert list(peer.control.rooms()) == []
    peer.say(peer.hello)
    assert kinds(peer.say(promise())) == ["PromiseAck"]


@pytest.mark.parametrize("is_acked", [False, True])
@pytest.mark.parametrize("digest", [b"", PROMPT])
def test_the_number_of_a_promise_that_was_declined_may_be_used_again(
    is_acked: bool, digest: bytes
) -> None:
    """What was declined was its request: the next one is of the next use, of the same prompt."""
    peer = DecodePeer().known()
    peer.say(promise())
    assert peer.on(DeclineRoom(SENT, NO.reason, digest)) == [TOLD]
    if is_acked:
        peer.say(ACK)
    assert peer.on(add_room()) == []
    assert peer.say(promise()) == [TOLD], "a late repeat"
    again = structs.replace(promise(), ticket=promise().ticket + 1)
    assert kinds(peer.say(again)) == ["PromiseAck", "Bootstrapped"]


def test_a_promise_of_the_next_use_may_come_before_its_request() -> None:
    peer = DecodePeer().known()
    peer.say(promise())
    peer.on(NO)
    again = structs.replace(promise(), ticket=promise().ticket + 1)
    assert kinds(peer.say(again)) == ["PromiseAck"]
    assert kinds(peer.on(add_room())) == ["Bootstrapped"]


def test_what_decode_has_given_up_already_is_kept_no_longer() -> None:
    peer = DecodePeer().known()
    abort = Abort(*KEY.numbers, "enough", 9)
    assert peer.say(abort) == [Drained(*KEY.numbers, 0, 9)]
    assert peer.on(NO) == []
    assert list(peer.control.rooms()) == []
    assert kinds(peer.say(promise())) == ["PromiseAck"], "of the number's next use"
    assert kinds(peer.on(add_room())) == ["Bootstrapped"], "and the abort is forgotten with it"


def test_only_the_worker_that_it_was_for_hears_of_it() -> None:
    peer = DecodePeer().known()
    peer.on(NO)
    other = newer(DECODE)._replace(name="decode-1")
    peer.say(peer.hello, other)
    assert peer.say(promise(), other) == [PromiseAck(*KEY.numbers, 0, promise().ticket)]


def test_a_number_of_which_only_the_acknowledgement_is_awaited_may_be_declined() -> None:
    """Decode has used it again; what it says of the room before comes late."""
    peer = DecodePeer().bootstrapped()
    [post] = peer.chunk(1, [30, 31], last=True)
    assert kinds(peer.ended(post.job_id)) == ["RoomEnded", "Outcome", "SourceFree"]
    assert peer.on(NO) == []
    again = structs.replace(promise(), ticket=promise().ticket + 1)
    [told] = peer.say(again)
    assert (told.ticket, told.error) == (again.ticket, "the prompt is too long")
    assert peer.say(ACK) == []
    peer.say(OutcomeAck(*KEY.numbers, 0, again.ticket))
    assert list(peer.control.rooms()) == []


def test_a_number_that_decode_gave_up_fails_once_on_both_sides() -> None:
    """The request that comes next is taken for the other half of the one that decode has aborted.
    What decode promises then is of another use, and does not wait for its timeout."""
    peer = DecodePeer().known()
    peer.say(Abort(*KEY.numbers, "enough", 9))
    ended, free = peer.on(add_room())
    assert (str(ended.error), kinds([free])) == ("decode: enough", ["SourceFree"])
    [told] = peer.say(promise())
    assert (told.ok, told.error, told.ticket) == (False, "decode: enough", promise().ticket)
    peer.say(ACK)
    assert list(peer.control.rooms()) == []
    again = structs.replace(promise(), ticket=promise().ticket + 1)
    assert kinds(peer.say(again)) == ["PromiseAck"]
    assert kinds(peer.on(add_room())) == ["Bootstrapped"]
