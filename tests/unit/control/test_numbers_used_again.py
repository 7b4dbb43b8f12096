"""A room's number is used again as soon as its request has ended on both sides: whatever is still
on its way of a former use, in any order, ends nothing of the next one."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import pytest

from prefixkv.control.effects import FrameFailed, FrameReceived
from prefixkv.digest import prompt_digest
from prefixkv.errors import InternalError, PromptMismatchError, RequestError
from prefixkv.protocol.commands import AbortRoom, DeclineRoom, OfferRoom, OpenRoom
from prefixkv.protocol.events import Bootstrapped, RoomDrained, RoomEnded
from prefixkv.protocol.ids import ChunkTag, KVPoll
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Outcome,
    OutcomeAck,
    Promise,
    PromiseAck,
)
from prefixkv.transport.base import Arrived, WriteJob
from tests.unit.control.wire import (
    ADDRESS,
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
    of,
    promise,
)
from tests.unit.protocol.rooms import PROMPT

OTHER_PROMPT = prompt_digest(range(50, 60))
FORMER, NEXT = 2**64 - 1, 12  # tickets


def of_use(ticket: int, **changes: Any) -> Promise:
    return msgspec.structs.replace(promise(), ticket=ticket, **changes)


# --- decode ---------------------------------------------------------------------------------------


def landed(ticket: int, num_units: int, chunk: int = 0) -> Arrived:
    tag = ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, chunk, num_pages=num_units, ticket=ticket)
    return Arrived(tag.pack())


def used_again() -> PrefillPeer:
    """The number was promised for seven pages, aborted and drained, and is promised again."""
    seven = of_use(FORMER, fill_len=28, prefix_len=0, pages=ids(range(7)))
    peer = PrefillPeer()
    peer.open(seven)
    peer.greet()
    peer.on(AbortRoom(KEY, "enough"))
    assert of(peer.say(Drained(*KEY.numbers, 0, FORMER)), RoomDrained) == [RoomDrained(KEY)]
    assert of(peer.open(of_use(NEXT)), Promise) == [of_use(NEXT)]
    return peer


def test_a_room_that_waits_is_not_kept_waiting_by_a_former_notification() -> None:
    """It is no sign that prefill has the promise, or writes."""
    peer = used_again()
    peer.on(landed(FORMER, 7))
    assert "Promise" in kinds(peer.after(TIMING.resend_s)), "repeated, as it is not acknowledged"


@pytest.mark.parametrize("order", [*permutations(["former", "acked", "own", "outcome"])])
def test_a_notification_that_its_drained_has_overtaken_counts_for_no_other_use(
    order: tuple[str, ...],
) -> None:
    peer = used_again()
    outcome = msgspec.structs.replace(peer.outcome(), num_units=2, ticket=NEXT)
    ends = []
    for what in order:
        if what == "former":
            assert peer.on(landed(FORMER, 7)) == []
            ends += of(peer.on(landed(FORMER, 2, chunk=1)), RoomEnded)
        elif what == "acked":
            ends += of(peer.say(PromiseAck(*KEY.numbers, 0, NEXT)), RoomEnded)
        elif what == "own":
            ends += of(peer.on(landed(NEXT, 2)), RoomEnded)
        else:
            ends += of(peer.say(outcome), RoomEnded)
    assert ends == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")]
    assert peer.control.counters == {"tags_dropped": 2}


def test_a_number_is_used_a_thousand_times() -> None:
    peer = PrefillPeer()
    peer.open(of_use(1))
    peer.greet()
    for ticket in range(1, 1000):
        peer.on(AbortRoom(KEY, "enough"))
        peer.say(Drained(*KEY.numbers, 0, ticket))
        peer.open(of_use(ticket + 1))
        assert peer.on(landed(ticket, 7)) == []
        assert peer.poll() is KVPoll.WAITING_FOR_INPUT
    assert peer.control.counters == {"tags_dropped": 999}


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
    assert of(peer.say(Drained(*KEY.numbers, 0, FORMER)), RoomDrained) == [RoomDrained(KEY)]
    assert of(peer.open(of_use(NEXT)), Promise) == [of_use(NEXT)]


def test_a_frame_of_a_former_use_that_raises_ends_no_other_on_decode() -> None:
    peer = used_again()
    for ticket, polls in ((FORMER, KVPoll.WAITING_FOR_INPUT), (NEXT, KVPoll.FAILED)):
        raw = peer.raw(Drained(*KEY.numbers, 0, ticket))
        peer.on(FrameFailed(FrameReceived(ADDRESS, raw), OSError("broken")))
        assert peer.poll() is polls


# --- prefill --------------------------------------------------------------------------------------


def test_each_write_carries_the_ticket_of_its_promise() -> None:
    peer = DecodePeer()
    for ticket in (FORMER, NEXT):
        peer.bootstrapped(of_use(ticket))
        (job,) = of(peer.chunk(1, [5, 6], last=True), WriteJob)
        assert job.tag.ticket == ticket
        assert ChunkTag.unpack(job.tag.pack()) == job.tag
        peer.say(Abort(*KEY.numbers, "enough", ticket))
        assert of(peer.ended(job.job_id), Drained) == [Drained(*KEY.numbers, 0, ticket)]


def test_a_frame_of_a_former_use_that_raises_ends_no_other_on_prefill() -> None:
    peer = DecodePeer().bootstrapped(of_use(NEXT))
    for ticket, num_ends in ((FORMER, 0), (NEXT, 1)):
        raw = peer.raw(Abort(*KEY.numbers, "enough", ticket))
        said = peer.on(FrameFailed(FrameReceived(ROUTE, raw), OSError("broken")))
        assert len(of(said, RoomEnded)) == num_ends


OFFER = OfferRoom(KEY, 10, PROMPT, 30.0)


def opens(peer: DecodePeer, ticket: int = NEXT) -> bool:
    return bool(of(peer.say(of_use(ticket)), Bootstrapped))


def test_a_number_with_a_write_under_way_is_not_used_again() -> None:
    peer = DecodePeer().bootstrapped(of_use(FORMER))
    (job,) = of(peer.chunk(1, [5, 6], last=True), WriteJob)
    peer.say(Abort(*KEY.numbers, "enough", FORMER))
    (told,) = peer.say(of_use(NEXT))
    assert (type(told), told.ok, told.ticket) == (Outcome, False, NEXT)
    for again in (OFFER, add_room()):
        (ended,) = of(peer.on(again), RoomEnded)
        assert isinstance(ended.error, RequestError)
    assert of(peer.ended(job.job_id), Drained) == [Drained(*KEY.numbers, 0, FORMER)]
    assert of(peer.on(OFFER), RoomEnded) == []


def test_a_late_abort_ends_no_request_for_another_prompt() -> None:
    peer = DecodePeer().known()
    peer.on(add_room())
    late = Abort(*KEY.numbers, "enough", FORMER, digest=OTHER_PROMPT)
    assert kinds(peer.say(late)) == ["Drained"]
    assert opens(peer)


def test_a_late_abort_of_a_room_ends_no_offer_of_its_number() -> None:
    peer = DecodePeer().bootstrapped(of_use(FORMER))
    for _ in range(2):  # repeated, since its Drained was lost
        peer.say(Abort(*KEY.numbers, "enough", FORMER))
        assert of(peer.on(OFFER), RoomEnded) == []
        assert kinds(peer.say(Abort(*KEY.numbers, "enough", FORMER))) == ["Drained"]
        peer.on(AbortRoom(KEY, "once more"))
    peer.on(OFFER)
    assert opens(peer)


def test_a_repeated_abort_of_an_offer_ends_no_later_offer_of_its_number() -> None:
    peer = DecodePeer().known()
    peer.on(OFFER)
    assert kinds(peer.say(Abort(*KEY.numbers, "no", FORMER))) == [
        "RoomEnded", "SourceFree", "Drained",
    ]  # fmt: skip
    peer.on(OFFER)
    assert kinds(peer.say(Abort(*KEY.numbers, "no", FORMER))) == ["Drained"]
    assert opens(peer)


@pytest.mark.parametrize("how", ["withdrawn", "opened", "overdue"])
def test_an_offer_that_is_over_refuses_no_other_prompt_under_its_number(how: str) -> None:
    peer = DecodePeer().known()
    peer.on(OfferRoom(KEY, 10, OTHER_PROMPT, 1.0))
    if how == "withdrawn":
        peer.on(AbortRoom(KEY, "the blocks are needed"))
    elif how == "overdue":
        peer.after(1.0)
    else:
        peer.say(of_use(FORMER, digest=OTHER_PROMPT))
        peer.say(Abort(*KEY.numbers, "enough", FORMER))
    assert kinds(peer.say(of_use(NEXT))) == ["PromiseAck"]
    assert of(peer.on(add_room()), Bootstrapped)


def test_a_promise_that_waited_in_vain_ends_no_request_for_another_prompt() -> None:
    """Decode's acknowledgement of that end is still on its way."""
    peer = DecodePeer().known()
    peer.say(of_use(FORMER, digest=OTHER_PROMPT))
    (told,) = of(peer.after(TIMING.parked_timeout_s), Outcome)
    assert (told.ok, told.drained, told.ticket) == (False, True, FORMER)
    assert of(peer.on(add_room()), RoomEnded) == []
    assert opens(peer)


def test_of_the_same_prompt_it_is_that_request() -> None:
    peer = DecodePeer().known()
    peer.say(of_use(FORMER))
    peer.after(TIMING.parked_timeout_s)
    (ended,) = of(peer.on(add_room()), RoomEnded)
    assert (ended.key, ended.poll) == (SENT, KVPoll.FAILED)


def test_a_promise_of_another_prompt_has_ended_the_request_that_it_was_for() -> None:
    """Two requests, of which each side has one, under one number."""
    peer = DecodePeer().known()
    peer.on(add_room())
    peer.say(of_use(FORMER, digest=OTHER_PROMPT))
    peer.say(OutcomeAck(*KEY.numbers, 0, FORMER))
    (ended,) = of(peer.on(add_room(digest=OTHER_PROMPT)), RoomEnded)
    assert isinstance(ended.error, PromptMismatchError)


def test_an_abort_of_a_request_that_was_declined_ends_no_later_one() -> None:
    peer = DecodePeer().known()
    peer.on(DeclineRoom(SENT, "too long", PROMPT))
    assert kinds(peer.say(Abort(*KEY.numbers, "enough", FORMER))) == ["Drained"]
    assert of(peer.on(add_room()), RoomEnded) == []
    assert opens(peer)


def test_an_abort_before_its_promise_is_answered_under_its_own_ticket() -> None:
    peer = DecodePeer().known()
    peer.on(add_room())
    said = of(peer.say(Abort(*KEY.numbers, "enough", NEXT)), Drained)
    assert said == [Drained(*KEY.numbers, 0, NEXT)]
