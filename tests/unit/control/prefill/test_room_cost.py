"""An offer, and the count of rooms, cost the same however many rooms there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixkv.protocol.commands import AbortRoom, OfferRoom
from prefixkv.protocol.ids import RoomKey
from tests.support.steps import num_steps
from tests.unit.control.wire import DecodePeer, add_room
from tests.unit.protocol.rooms import PROMPT

OFFER = OfferRoom(RoomKey(10**6, 0), 10, PROMPT, 30.0)
CALLS: dict[str, Callable[[DecodePeer], object]] = {
    "an offer": lambda peer: peer.control.on(OFFER, peer.now_s),
    "its withdrawal": lambda peer: peer.control.on(AbortRoom(OFFER.key, "no"), peer.now_s),
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
            peer.control.on(OFFER, peer.now_s)
    steps = [num_steps(lambda peer=peer: CALLS[call](peer)) for peer in (few, many)]
    assert steps[1] <= steps[0] + 50, "a timer more, say"


def test_the_number_of_rooms_is_that_of_the_rooms() -> None:
    peer = with_rooms(20)
    peer.on(OFFER)
    assert peer.control.num_rooms == 21
    peer.after(60.0)
    assert peer.control.num_rooms == 0, "all have ended, and wait for what decode may say"
    peer.after(60.0)
    assert (peer.control.num_rooms, list(peer.control.rooms())) == (0, [])
