"""Invariant tested: a room's number may be used again once its request has ended on both sides,
whatever decode said of the use before is still on its way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prefixkv.control.prefill.rooms import Half, Tombs
from prefixkv.errors import AbortedError
from prefixkv.protocol.commands import Fence
from prefixkv.protocol.events import Bootstrapped, RoomEnded
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Abort, Drained, Outcome, OutcomeAck
from prefixkv.transport.base import WriteDrained, WriteJob
from tests.unit.control.wire import (
    DECODE,
    SENT,
    TIMING,
    DecodePeer,
    add_room,
    kinds,
    newer,
    of,
    promise,
)


def of_use(ticket: int, room: int = SENT.room) -> Any:
    return msgspec.structs.replace(promise(room), ticket=ticket)


def ack(ticket: int) -> OutcomeAck:
    return OutcomeAck(*SENT.numbers, 0, ticket)


def abort(ticket: int) -> Abort:
    return Abort(*SENT.numbers, "enough", ticket)


def drained(ticket: int) -> Drained:
    return Drained(*SENT.numbers, 0, ticket)


def used_once(ticket: int = 1) -> DecodePeer:
    """The room was used; prefill has not heard yet that decode knows."""
    peer = DecodePeer().bootstrapped(of_use(ticket))
    [post] = of(peer.chunk(1, [5, 6], last=True), WriteJob)
    assert of(peer.ended(post.job_id), RoomEnded) == [RoomEnded(SENT, KVPoll.SUCCESS)]
    return peer


def goes_on(peer: DecodePeer, ticket: int = 2) -> bool:
    """Whether the request that was added is sent, once decode promises pages for it."""
    return of(peer.say(of_use(ticket)), Bootstrapped) == [Bootstrapped(SENT, DECODE, 4)]


def test_a_repeat_of_the_promise_before_is_not_the_next_ones() -> None:
    peer = used_once()
    assert peer.on(add_room()) == []
    [refused] = peer.say(of_use(1))
    assert isinstance(refused, Outcome)
    assert (refused.ok, refused.ticket, refused.drained) == (False, 1, True)
    assert "is over" in refused.error
    peer.say(ack(1))
    assert goes_on(peer)


def test_an_abort_of_the_use_before_does_not_end_the_next_one() -> None:
    peer = used_once()
    peer.on(add_room())
    for _ in range(2):  # until it is answered
        assert peer.say(abort(1)) == [drained(1)]
    assert goes_on(peer)


def test_an_abort_before_the_request_ends_one_request() -> None:
    peer = DecodePeer().known()
    peer.say(abort(1))
    assert kinds(peer.on(add_room())) == ["RoomEnded", "SourceFree"]
    assert peer.say(abort(1)) == [drained(1)]
    assert peer.on(add_room()) == []
    assert goes_on(peer)


def test_a_promise_that_was_refused_is_not_taken_when_it_is_said_again() -> None:
    """Decode has been told that nothing will land in its pages."""
    peer = DecodePeer().known()
    for room in range(TIMING.max_parked_per_peer):
        peer.say(of_use(9, room))
    late = of_use(1, 99)
    assert kinds(peer.say(late)) == ["Outcome"], "too many wait"
    peer.say(Abort(0, 0, "enough", 9))
    assert kinds(peer.say(late)) == ["Outcome"]
    assert kinds(peer.say(of_use(2, 99))) == ["PromiseAck"], "there is room for another"


def test_a_write_that_is_drained_at_last_is_of_its_own_use() -> None:
    """Its room went with the process that it wrote to, and the number is in use again."""
    peer = DecodePeer().bootstrapped(of_use(1))
    [post] = of(peer.chunk(1, [5, 6]), WriteJob)
    peer.ended(post.job_id, OSError("reset"), drained=False)
    peer.on(Fence(DECODE))
    assert not list(peer.control.rooms())
    peer.on(add_room())
    assert peer.on(WriteDrained(post.job_id)) == []
    assert not peer.control._rooms.jobs
    peer.say(peer.hello, newer(DECODE))
    assert of(peer.say(of_use(2), newer(DECODE)), Bootstrapped)


_MALFORMED = msgspec.structs.replace(promise(), pages=b"")


@pytest.mark.parametrize(
    ("word", "answer", "still"),
    [
        (_MALFORMED, None, False),
        (_MALFORMED, ack(9), True),
        (_MALFORMED, abort(9), True),
        (promise(), abort(9), True),
    ],
)
def test_what_is_answered_takes_no_place_of_what_is_not(
    word: Any, answer: Any, still: bool
) -> None:
    """Beyond the limit the oldest unanswered use is forgotten, and its promise is taken."""
    peer = used_once()
    peer.on(add_room())
    for room in range(100, 100 + TIMING.max_parked_per_peer):
        peer.say(msgspec.structs.replace(word, room=room, ticket=9))
        if answer is not None:
            peer.say(msgspec.structs.replace(answer, room=room))
    assert kinds(peer.say(of_use(1))) == (["Outcome"] if still else ["PromiseAck", "Bootstrapped"])


END, OTHER = AbortedError("over"), AbortedError("over too")
RANK = PeerId("d", 5)


def test_what_is_kept_is_bounded_and_what_is_answered_takes_no_place_of_the_rest() -> None:
    uses = [(RoomKey(room, 0, "d"), RANK, 1) for room in range(10)]
    kept = Tombs(3, 10.0)
    for use in uses[:3]:
        kept.bury(use, END)
    for use in uses[3:8]:
        kept.bury(use, END, answered=True)
    assert [kept.over(use) is END for use in uses[:8]] == [True] * 3 + [False] * 2 + [True] * 3
    kept.bury(uses[8], OTHER)
    assert kept.over(uses[0]) is None
    kept.answer(uses[1])
    kept.answer(uses[9])
    assert kept.over(uses[1]) is END
    assert kept.over(uses[5]) is None, "the oldest of those that were answered"
    assert kept.over(uses[9]) is None, "it was not here"
    kept.bury((uses[0][0], newer(RANK), 1), OTHER)
    kept.forget(RANK)
    assert [kept.over(use) for use in uses] == [None] * 10
    assert kept.over((uses[0][0], newer(RANK), 1)) is OTHER, "the next life's stay"


def test_the_halves_that_are_awaited_are_bounded_for_each_worker_and_expire() -> None:
    kept = Tombs(3, 10.0)
    one = [RoomKey(room, 0, "one") for room in range(5)]
    other = RoomKey(0, 0, "other")
    kept.await_half(other, Half.PROMISE, OTHER, 0.0)
    for now_s, key in enumerate(one):
        kept.await_half(key, Half.REQUEST, END, float(now_s))
    assert kept.awaited() == [other, *one[2:]], "the oldest of the same worker goes"
    assert kept.due_s == 10.0
    kept.expire(10.0)
    assert (kept.awaited(), kept.due_s) == (one[2:], 12.0)
    kept.await_half(one[2], Half.REQUEST, END, 12.5)
    assert (kept.awaited(), kept.due_s) == ([*one[3:], one[2]], 13.0), "anew, it is the youngest"
    kept.expire(22.5)
    assert (kept.awaited(), kept.due_s) == ([], float("inf"))


def test_the_half_that_comes_ends_with_the_error_unless_it_is_the_next_use() -> None:
    kept, key = Tombs(3, 10.0), RoomKey(1, 0, "d")

    def awaits(half: Half, digest: bytes = b"") -> Tombs:
        kept.await_half(key, half, END, 0.0, digest=digest)
        return kept

    assert awaits(Half.REQUEST).meet_promise(key, 1, b"") is None, "the other half is awaited"
    assert kept.meet_request(key, b"a") is END
    assert kept.meet_request(key, b"a") is None, "it is of one request"
    assert awaits(Half.REQUEST, b"a").meet_request(key, b"b") is None
    assert awaits(Half.PROMISE).meet_request(key, b"") is None
    awaits(Half.PROMISE)
    assert [kept.meet_promise(key, 1, b"a") for _ in range(2)] == [END, END], "each rank's"
    assert kept.meet_promise(key, 2, b"a") is None, "the next use"
    assert awaits(Half.PROMISE, b"a").meet_promise(key, 1, b"b") is None
    assert awaits(Half.PROMISE, b"a").meet_promise(key, 1, b"a") is END
    assert kept.meet_request(key, b"a") is END, "the next request of the prompt lost its promise"
    offer = RoomKey(1, 0)
    kept.await_half(offer, Half.PROMISE, OTHER, 0.0, digest=b"a")
    assert [kept.meet_promise(offer, 1, digest) for digest in (b"a", b"b", b"a")] == [
        OTHER, None, OTHER
    ]  # fmt: skip
    assert kept.meet_promise(offer, 2, b"a") is OTHER, "any worker's, under any ticket"
