"""A room's number is used again as soon as its request has ended on both sides, or was not taken:
whatever is still on its way of a former use, in any order, ends nothing of the next one. What is
remembered of numbers is bounded."""

from itertools import permutations
from typing import Any

import msgspec
import pytest

from prefixkv.control.effects import FrameFailed, FrameReceived
from prefixkv.control.prefill.rooms import Half, Tombs
from prefixkv.digest import prompt_digest
from prefixkv.errors import AbortedError, InternalError, PromptMismatchError, RequestError
from prefixkv.protocol.commands import AbortRoom, DeclineRoom, Fence, OfferRoom, OpenRoom
from prefixkv.protocol.events import Bootstrapped, RoomDrained, RoomEnded
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import (
    Abort,
    Body,
    Drained,
    Outcome,
    OutcomeAck,
    Promise,
    PromiseAck,
)
from prefixkv.transport.base import Arrived, WriteDrained, WriteJob
from tests.unit.control.wire import (
    ADDRESS,
    DECODE,
    KEY,
    PREFILL,
    ROUTE,
    SENT,
    TIMING,
    DecodePeer,
    PrefillPeer,
    add_room,
    ids,
    kinds,
    newer,
    of,
    promise,
)
from tests.unit.protocol.rooms import PROMPT

OTHER_PROMPT = prompt_digest(range(50, 60))
FORMER, NEXT = 2**64 - 1, 12  # tickets: of no order
NO = DeclineRoom(SENT, "the prompt is too long")
OFFER = OfferRoom(KEY, 10, PROMPT, 30.0)


def of_use(ticket: int, room: int = KEY.room, **changes: Any) -> Promise:
    return msgspec.structs.replace(promise(room), ticket=ticket, **changes)


def ack(ticket: int) -> OutcomeAck:
    return OutcomeAck(*KEY.numbers, 0, ticket)


def abort(ticket: int, **changes: Any) -> Abort:
    return Abort(*KEY.numbers, "enough", ticket, **changes)


def drained(ticket: int) -> Drained:
    return Drained(*KEY.numbers, 0, ticket)


def told(ticket: int = 0) -> Outcome:
    """That the request was declined."""
    return Outcome(*KEY.numbers, 0, False, 0, 0, b"", NO.reason, True, ticket)


# --- decode ---------------------------------------------------------------------------------------


def used_again() -> PrefillPeer:
    """The number was promised for seven pages, aborted and drained, and is promised again."""
    seven = of_use(FORMER, fill_len=28, prefix_len=0, pages=ids(range(7)))
    peer = PrefillPeer()
    peer.open(seven)
    peer.greet()
    peer.on(AbortRoom(KEY, "enough"))
    assert of(peer.say(drained(FORMER)), RoomDrained) == [RoomDrained(KEY)]
    assert of(peer.open(of_use(NEXT)), Promise) == [of_use(NEXT)]
    return peer


def landed(ticket: int, num_units: int, chunk: int = 0) -> Arrived:
    tag = ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, chunk, num_pages=num_units, ticket=ticket)
    return Arrived(tag.pack())


@pytest.mark.parametrize("order", [*permutations(["former", "acked", "own", "outcome"])])
def test_a_notification_that_its_drained_has_overtaken_counts_for_no_other_use(
    order: tuple[str, ...],
) -> None:
    peer, ends = used_again(), []
    for what in order:
        if what == "former":
            assert peer.on(landed(FORMER, 7)) == []
            ends += of(peer.on(landed(FORMER, 2, chunk=1)), RoomEnded)
        elif what == "acked":
            ends += of(peer.say(PromiseAck(*KEY.numbers, 0, NEXT)), RoomEnded)
        elif what == "own":
            ends += of(peer.on(landed(NEXT, 2)), RoomEnded)
        else:
            outcome = msgspec.structs.replace(peer.outcome(), num_units=2, ticket=NEXT)
            ends += of(peer.say(outcome), RoomEnded)
    assert ends == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")]
    assert peer.control.counters == {"tags_dropped": 2}


def test_a_number_whose_pages_may_still_be_written_is_not_promised_again() -> None:
    """Its room has ended, and is not drained: nothing is said that could be taken for its proof."""
    peer = PrefillPeer()
    peer.open(of_use(FORMER))
    peer.greet()
    peer.on(AbortRoom(KEY, "enough"))
    said = peer.control.on(OpenRoom(of_use(NEXT), ADDRESS), peer.now_s)
    assert kinds(said) == ["Raised"]
    assert isinstance(said[0].error, InternalError)
    assert peer.expected == 1, "its writer is listened to"
    assert of(peer.say(drained(FORMER)), RoomDrained) == [RoomDrained(KEY)]
    assert of(peer.open(of_use(NEXT)), Promise) == [of_use(NEXT)]


# --- prefill -------------------------------------------------------------------------------------


def opens(peer: DecodePeer, ticket: int = NEXT) -> bool:
    return bool(of(peer.say(of_use(ticket)), Bootstrapped))


def test_a_number_with_a_write_under_way_is_not_used_again() -> None:
    peer = DecodePeer().bootstrapped(of_use(FORMER))
    (job,) = of(peer.chunk(1, [5, 6], last=True), WriteJob)
    peer.say(abort(FORMER))
    (said,) = peer.say(of_use(NEXT))
    assert (type(said), said.ok, said.ticket) == (Outcome, False, NEXT)
    for again in (OFFER, add_room()):
        (ended,) = of(peer.on(again), RoomEnded)
        assert isinstance(ended.error, RequestError)
    assert of(peer.ended(job.job_id), Drained) == [drained(FORMER)]
    assert of(peer.on(OFFER), RoomEnded) == []


OPENED, TAKEN, GONE = "Bootstrapped", "PromiseAck Bootstrapped", "RoomEnded SourceFree"
OTHER_OFFER, THEIRS = OfferRoom(KEY, 10, OTHER_PROMPT, 1.0), of_use(FORMER, digest=OTHER_PROMPT)
SCENES: dict[str, list[tuple[Any, str]]] = {
    "a late abort of a request for another prompt": [
        (add_room(), ""), (abort(FORMER, digest=OTHER_PROMPT), "Drained"),
        (of_use(NEXT), OPENED),
    ],
    "a repeated abort of an offer ends no later one": [
        (OFFER, ""), (abort(FORMER), f"{GONE} Drained"), (OFFER, ""), (abort(FORMER), "Drained"),
        (of_use(NEXT), TAKEN),
    ],
    # An offer that is over refuses no other prompt.
    "withdrawn": [
        (OTHER_OFFER, ""), (AbortRoom(KEY, "the blocks are needed"), GONE),
        (of_use(NEXT), "PromiseAck"), (add_room(), OPENED),
    ],
    "overdue": [
        (OTHER_OFFER, ""), (1.0, f"Heartbeat {GONE}"), (of_use(NEXT), "PromiseAck"),
        (add_room(), OPENED),
    ],
    "opened": [
        (OTHER_OFFER, ""), (THEIRS, TAKEN), (abort(FORMER), "RoomEnded Drained SourceFree"),
        (of_use(NEXT), "PromiseAck"), (add_room(), OPENED),
    ],
    "an abort of what was declined": [
        (DeclineRoom(SENT, "too long", PROMPT), ""), (abort(FORMER), "Drained"), (add_room(), ""),
        (of_use(NEXT), OPENED),
    ],
    "an abort before the request ends one": [
        (abort(1), "Drained"), (add_room(), GONE), (abort(1), "Drained"), (add_room(), ""),
        (of_use(2), OPENED),
    ],
    "what decode has given up is declined, and kept no longer": [
        (abort(9), "Drained"), (NO, ""), (of_use(NEXT), "PromiseAck"), (add_room(), OPENED),
    ],
    # The request that comes next is taken for the other half of the one that decode has aborted.
    # What decode promises then is of another use, and does not wait for its timeout.
    "what decode gave up fails once on both sides": [
        (abort(9), "Drained"), (add_room(), GONE), (of_use(0), "Outcome"), (ack(0), ""),
        (of_use(1), "PromiseAck"), (add_room(), OPENED),
    ],
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_what_is_late_or_over_is_nothing_to_the_next_use(scene: list[tuple[Any, str]]) -> None:
    peer = DecodePeer().known()
    for what, follows in scene:
        put = peer.say if isinstance(what, Body) else peer.after if what == 1.0 else peer.on
        assert kinds(put(what)) == follows.split(), what


def test_an_abort_of_the_use_before_does_not_end_the_next_one() -> None:
    peer = used_once()
    peer.on(add_room())
    assert [peer.say(abort(1)), opens(peer, 2), peer.say(abort(1))] == [
        [drained(1)], True, [drained(1)]
    ]  # fmt: skip
    assert peer.chunk(1, [5, 6], last=True), "the present use goes on"


def test_a_late_abort_of_a_room_ends_no_offer_of_its_number() -> None:
    peer = DecodePeer().bootstrapped(of_use(FORMER))
    for _ in range(2):  # repeated, since its Drained was lost
        peer.say(abort(FORMER))
        assert of(peer.on(OFFER), RoomEnded) == []
        assert kinds(peer.say(abort(FORMER))) == ["Drained"]
        peer.on(AbortRoom(KEY, "once more"))
    peer.on(OFFER)
    assert opens(peer)


@pytest.mark.parametrize("digest", [OTHER_PROMPT, PROMPT])
def test_a_promise_that_waited_in_vain_ends_a_request_for_its_prompt_alone(digest: bytes) -> None:
    """Decode's acknowledgement of that end is still on its way."""
    peer = DecodePeer().known()
    peer.say(of_use(FORMER, digest=digest))
    (said,) = of(peer.after(TIMING.parked_timeout_s), Outcome)
    assert (said.ok, said.drained, said.ticket) == (False, True, FORMER)
    ends = of(peer.on(add_room()), RoomEnded)
    if digest == PROMPT:
        assert [(end.key, end.poll) for end in ends] == [(SENT, KVPoll.FAILED)]
    else:
        assert ends == []
        assert opens(peer)


def test_a_promise_of_another_prompt_has_ended_the_request_that_it_was_for() -> None:
    """Two requests, of which each side has one, under one number."""
    peer = DecodePeer().known()
    peer.on(add_room())
    peer.say(of_use(FORMER, digest=OTHER_PROMPT))
    peer.say(ack(FORMER))
    (ended,) = of(peer.on(add_room(digest=OTHER_PROMPT)), RoomEnded)
    assert isinstance(ended.error, PromptMismatchError)


def test_an_abort_before_its_promise_is_answered_under_its_own_ticket() -> None:
    peer = DecodePeer().known()
    peer.on(add_room())
    said = of(peer.say(abort(NEXT)), Drained)
    assert said == [drained(NEXT)]


def used_once(ticket: int = 1) -> DecodePeer:
    """The room was used; prefill has not heard yet that decode knows."""
    peer = DecodePeer().bootstrapped(of_use(ticket))
    [post] = of(peer.chunk(1, [5, 6], last=True), WriteJob)
    assert of(peer.ended(post.job_id), RoomEnded) == [RoomEnded(SENT, KVPoll.SUCCESS)]
    return peer


def test_a_repeat_of_the_promise_before_is_not_the_next_ones() -> None:
    peer = used_once()
    assert peer.on(add_room()) == []
    [refused] = peer.say(of_use(1))
    assert isinstance(refused, Outcome)
    assert (refused.ok, refused.ticket, refused.drained) == (False, 1, True)
    assert "is over" in refused.error
    peer.say(ack(1))
    assert opens(peer, 2)


def test_a_room_that_our_engine_ended_first_keeps_its_end_for_the_promise() -> None:
    peer = DecodePeer().known()
    peer.on(add_room())
    peer.on(AbortRoom(SENT, "enough"))
    [outcome] = of(peer.say(of_use(2)), Outcome)
    assert (outcome.ok, outcome.ticket) == (False, 2)


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
    assert kinds(peer.say(of_use(1))) == (["Outcome"] if still else ["Bootstrapped"])


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_frame_of_a_former_use_that_raises_ends_no_other(side: str) -> None:
    peer: Any = used_again() if side == "decode" else DecodePeer().bootstrapped(of_use(NEXT))
    source, word = (ADDRESS, drained) if side == "decode" else (ROUTE, abort)
    for ticket, num_ends in ((FORMER, 0), (NEXT, 1)):
        frame = FrameReceived(source, peer.raw(word(ticket)))
        assert len(of(peer.on(FrameFailed(frame, OSError("broken"))), RoomEnded)) == num_ends


# --- requests that prefill does not take ----------------------------------------------------------


def test_a_promise_that_waits_for_the_request_is_answered_at_once() -> None:
    peer = DecodePeer().known()
    peer.say(promise())
    assert peer.on(NO) == [told()], "the engine is told nothing: it has never had the room"
    peer.say(ack(0))
    assert peer.control.num_rooms == 0
    assert list(peer.control.rooms()) == []


def test_a_promise_that_comes_later_hears_the_reason_each_time_that_it_is_said() -> None:
    peer = DecodePeer()
    assert peer.on(NO) == []
    assert peer.control.num_rooms == 0, "nothing to wait for here"
    peer.after(TIMING.parked_timeout_s - 1.0)
    peer.known()
    assert peer.say(promise()) == [told()]
    peer.after(1.0)
    assert peer.say(promise()) == [told()], "the first answer may be lost"
    peer.say(ack(0))
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
@pytest.mark.parametrize("promise_first", [False, True])
def test_the_number_of_a_promise_that_was_declined_may_be_used_again(
    is_acked: bool, digest: bytes, promise_first: bool
) -> None:
    """What was declined was its request: the next one is of the next use, of the same prompt."""
    peer = DecodePeer().known()
    peer.say(promise())
    assert peer.on(DeclineRoom(SENT, NO.reason, digest)) == [told()]
    if is_acked:
        peer.say(ack(0))
    if promise_first:
        assert kinds(peer.say(of_use(1))) == ["PromiseAck"]
        assert kinds(peer.on(add_room())) == ["Bootstrapped"]
        return
    assert peer.on(add_room()) == []
    assert peer.say(promise()) == [told()], "a late repeat"
    assert kinds(peer.say(of_use(1))) == ["Bootstrapped"]


def test_only_the_worker_that_it_was_for_hears_of_it() -> None:
    peer = DecodePeer().known()
    peer.on(NO)
    peer.say(peer.hello, other := PeerId("decode-1", 1))
    assert kinds(peer.say(promise(), other)) == ["PromiseAck"]


def test_a_number_of_which_only_the_acknowledgement_is_awaited_may_be_declined() -> None:
    """Decode has used it again; what it says of the room before comes late."""
    peer = DecodePeer().bootstrapped()
    [post] = peer.chunk(1, [30, 31], last=True)
    assert kinds(peer.ended(post.job_id)) == ["RoomEnded", "Outcome", "SourceFree"]
    assert peer.on(NO) == []
    again = of_use(1)
    [said] = peer.say(again)
    assert (said.ticket, said.error) == (again.ticket, "the prompt is too long")
    assert peer.say(ack(0)) == []
    peer.say(ack(again.ticket))
    assert list(peer.control.rooms()) == []


# --- what is remembered ---------------------------------------------------------------------------


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
