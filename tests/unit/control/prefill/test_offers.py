"""Rooms that prefill draws itself: the first decode worker that proves the prompt opens one, once,
in whatever order things come, and at one cost however many rooms there are."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import msgspec
import pytest

from prefixkv.digest import prompt_digest
from prefixkv.protocol.commands import AbortRoom, OfferRoom
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import Abort, Drained, Outcome, OutcomeAck, Promise
from tests.support.steps import num_steps
from tests.unit.control.wire import (
    DECODE,
    KEY,
    ROUTE,
    SENT,
    TIMING,
    DecodePeer,
    add_room,
    kinds,
    promise,
)
from tests.unit.protocol.rooms import PROMPT

OTHER = PeerId("decode-1", 7)
THEIRS = RoomKey(*KEY.numbers, OTHER.name)
TIMEOUT_S = 30.0
OFFER = OfferRoom(KEY, 10, PROMPT, TIMEOUT_S)
WRONG = msgspec.structs.replace(promise(), digest=prompt_digest(range(9)), ticket=3)
SHORT = msgspec.structs.replace(promise(fill_len=9), ticket=4)


def both_known() -> DecodePeer:
    peer = DecodePeer().known()
    peer.say(peer.hello, OTHER, route=ROUTE + b"2")
    peer.take_said()
    return peer


def refusal(said: list[Any]) -> str:
    (outcome,) = said
    assert isinstance(outcome, Outcome)
    assert (outcome.ok, outcome.drained) == (False, True)
    return outcome.error


def send_all(peer: DecodePeer, key: RoomKey) -> None:
    """The engine sends, and decode hears that it has everything."""
    jobs = peer.chunk(0, [5, 30, 31], last=True, key=key, clip=True)
    (job,) = [one for one in jobs if type(one).__name__ == "WriteJob"]
    assert [type(one) for one in peer.ended(job.job_id)] == [RoomEnded, Outcome, SourceFree]


def test_whoever_proves_the_prompt_opens_the_room() -> None:
    peer = both_known()
    assert peer.on(OFFER) == []
    assert peer.control.num_rooms == 1
    assert kinds(peer.say(promise(), OTHER)) == ["PromiseAck", "Bootstrapped"]
    assert peer.say(promise(), OTHER) == peer.say(promise(), OTHER), "a repeat is acknowledged"
    send_all(peer, THEIRS)
    peer.say(OutcomeAck(*KEY.numbers, 0, promise().ticket), OTHER)
    assert peer.control.num_rooms == 0


def test_a_second_worker_is_refused_by_name() -> None:
    peer = both_known()
    peer.on(OFFER)
    peer.say(promise())
    assert "opened by another decode worker" in refusal(peer.say(promise(), OTHER))
    send_all(peer, SENT)


@pytest.mark.parametrize("wrong", [WRONG, SHORT])
def test_a_promise_that_proves_nothing_is_refused_and_the_offer_stands(wrong: Promise) -> None:
    peer = both_known()
    peer.on(OFFER)
    assert "does not" in refusal(peer.say(wrong, OTHER))
    assert peer.control.num_rooms == 1
    assert kinds(peer.say(promise())) == ["PromiseAck", "Bootstrapped"]


def test_promises_that_came_before_the_offer() -> None:
    """The one that proves the prompt opens the room; the others hear that they do not."""
    peer = both_known()
    peer.say(WRONG, OTHER)
    peer.say(promise())
    said = peer.on(OFFER)
    assert [one for one in said if isinstance(one, Bootstrapped)] == [
        Bootstrapped(SENT, DECODE, promise().prefix_len)
    ]
    (told,) = [one for one in said if isinstance(one, Outcome)]
    assert "another decode worker's" in told.error
    send_all(peer, SENT)


def test_a_number_that_is_in_use_is_not_offered() -> None:
    peer = both_known()
    peer.on(OFFER)
    for _ in range(2):  # as an offer, and as the room that it became
        ended, free = peer.on(OFFER)
        assert (ended.key, str(ended.error), free) == (
            KEY, "room 7 generation 0 is in use already", SourceFree(KEY),
        )  # fmt: skip
        peer.say(promise())
    send_all(peer, SENT)
    peer.say(OutcomeAck(*KEY.numbers, 0, promise().ticket))
    assert peer.on(OFFER) == []


def test_the_answer_of_a_former_use_of_its_number_leaves_the_offer() -> None:
    peer = both_known()
    peer.on(OFFER)
    peer.say(promise())
    send_all(peer, SENT)
    assert peer.on(OFFER) == []
    peer.say(OutcomeAck(*KEY.numbers, 0, promise().ticket))
    assert peer.control.num_rooms == 1
    again = msgspec.structs.replace(promise(), ticket=5)
    assert kinds(peer.say(again, OTHER)) == ["PromiseAck", "Bootstrapped"]


def test_it_is_withdrawn() -> None:
    peer = both_known()
    peer.on(OFFER)
    ended, free = peer.on(AbortRoom(KEY, "the blocks are needed"))
    assert (str(ended.error), free) == ("the blocks are needed", SourceFree(KEY))
    assert refusal(peer.say(promise())) == "the blocks are needed"
    assert peer.on(AbortRoom(KEY, "again")) == []


def test_what_is_open_already_is_not_withdrawn() -> None:
    peer = both_known()
    peer.on(OFFER)
    peer.say(promise())
    assert peer.on(AbortRoom(KEY, "the blocks are needed")) == []
    send_all(peer, SENT)


def test_a_worker_that_was_told_the_number_may_say_that_it_is_not_wanted() -> None:
    peer = both_known()
    peer.on(OFFER)
    said = peer.say(Abort(*KEY.numbers, "the request was refused", 5), OTHER)
    assert [type(one) for one in said] == [RoomEnded, SourceFree, Drained]
    assert "the request was refused" in str(said[0].error)
    assert peer.control.num_rooms == 0


def test_a_worker_may_say_so_before_the_offer_is_there() -> None:
    """The engine has told whoever places the request, and its word to the control object is later
    than decode's."""
    peer = both_known()
    said = peer.say(Abort(*KEY.numbers, "the request was refused", 5), OTHER)
    assert [type(one) for one in said] == [Drained]
    ended, free = peer.on(OFFER)
    assert "the request was refused" in str(ended.error)
    assert free == SourceFree(KEY)
    assert peer.control.num_rooms == 0
    assert peer.on(OFFER) == [], "one offer, and not the next of this number"


def test_a_worker_that_does_not_want_it_ends_it_for_no_other_that_has_promised() -> None:
    peer = both_known()
    peer.say(Abort(*KEY.numbers, "the request was refused", 5), OTHER)
    peer.say(promise())
    assert kinds(peer.on(OFFER)) == ["Bootstrapped"]
    send_all(peer, SENT)


def test_many_offers_may_be_opened_by_a_worker_whose_promises_are_parked() -> None:
    peer = DecodePeer().known()
    for room in range(TIMING.max_parked_per_peer):
        assert kinds(peer.say(promise(100 + room, pages=(room,), prefix_len=8))) == ["PromiseAck"]
    peer.on(OFFER)
    assert kinds(peer.say(promise())) == ["PromiseAck", "Bootstrapped"]


EVENTS: dict[str, Any] = {
    "offer": lambda peer: peer.on(OFFER),
    "ours": lambda peer: peer.say(promise()),
    "theirs": lambda peer: peer.say(promise(), OTHER),
    "wrong": lambda peer: peer.say(WRONG, OTHER),
    "withdraw": lambda peer: peer.on(AbortRoom(KEY, "enough")),
    "abort": lambda peer: peer.say(Abort(*KEY.numbers, "no more", promise().ticket)),
    "late": lambda peer: peer.after(TIMEOUT_S),
}


@pytest.mark.slow
def test_in_every_order_the_engine_hears_of_one_end() -> None:
    for order in permutations(EVENTS):
        if order.index("late") > order.index("offer"):  # else it is as without it
            check_order(order)


def check_order(order: tuple[str, ...]) -> None:
    peer = both_known()
    heard: list[Any] = []
    for name in order:
        heard += EVENTS[name](peer)
        peer.control.check_invariants()
        peer.say(peer.hello)  # silence is not what this is about
        peer.say(peer.hello, OTHER, route=ROUTE + b"2")
    for _ in range(20):
        heard += peer.after(5.0)
    opened = [one.key for one in heard if isinstance(one, Bootstrapped)]
    ended = [one.key for one in heard if isinstance(one, RoomEnded)]
    free = [one.key for one in heard if isinstance(one, SourceFree)]
    assert len(opened) <= 1, f"{order}: one worker opens it, once"
    assert len(ended) == len(free) == 1, order
    assert ended == free
    assert opened in ([], ended), f"{order}: it ends for who opened it, or for nobody"
    assert peer.control._rooms.offers() == []


ANY_OFFER = OfferRoom(RoomKey(10**6, 0), 10, PROMPT, 30.0)
CALLS: dict[str, Callable[[DecodePeer], object]] = {
    "an offer": lambda peer: peer.control.on(ANY_OFFER, peer.now_s),
    "its withdrawal": lambda peer: peer.control.on(AbortRoom(ANY_OFFER.key, "no"), peer.now_s),
    "a request": lambda peer: peer.control.on(add_room(RoomKey(10**7, 0, "d1")), peer.now_s),
    "the number of rooms": lambda peer: peer.control.num_rooms,
}


def with_rooms(count: int) -> DecodePeer:
    peer = DecodePeer()
    for number in range(count):
        peer.control.on(add_room(RoomKey(number, 0, f"d{number % 8}")), peer.now_s)
    return peer


@pytest.mark.parametrize("call", CALLS)
def test_it_does_not_look_at_all_rooms(call: str) -> None:
    few, many = with_rooms(10), with_rooms(500)
    for peer in (few, many):
        if call == "its withdrawal":
            peer.control.on(ANY_OFFER, peer.now_s)
    steps = [num_steps(lambda peer=peer: CALLS[call](peer)) for peer in (few, many)]
    assert steps[1] <= steps[0] + 50, "a timer more, say"


def test_the_number_of_rooms_is_that_of_the_rooms() -> None:
    peer = with_rooms(20)
    peer.on(ANY_OFFER)
    assert peer.control.num_rooms == 21
    peer.after(60.0)
    assert peer.control.num_rooms == 0, "all have ended, and wait for what decode may say"
    peer.after(60.0)
    assert (peer.control.num_rooms, list(peer.control.rooms())) == (0, [])
