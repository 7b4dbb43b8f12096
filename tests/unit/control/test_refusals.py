"""Rooms that decode does not open: prefill is told until it answers, and is not waited for beyond
its own patience."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.control.effects import Connect, ConnectFailed
from prefixkv.errors import InternalError, TransferError
from prefixkv.protocol.commands import AbortRoom, Fence, RefuseRoom
from prefixkv.protocol.events import RoomDrained
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Abort, Drained, Hello
from tests.unit.control.wire import (
    ADDRESS,
    HELLO,
    KEY,
    PREFILL,
    TIMING,
    PrefillPeer,
    kinds,
    newer,
    promise,
)

WHY = "no room for it"
ENOUGH = AbortRoom(KEY, WHY)
TOLD = Abort(*KEY.numbers, WHY, 9)


def refuse(peer: PrefillPeer, key: RoomKey = KEY, ticket: int = 9) -> list[Any]:
    return peer.on(RefuseRoom(key, ticket, ADDRESS, WHY))


def test_prefill_is_told_as_soon_as_it_is_there_and_its_answer_frees_the_number() -> None:
    peer = PrefillPeer()
    assert refuse(peer) == [Connect(ADDRESS), HELLO]
    with pytest.raises(InternalError, match="room 7 generation 0 is open already"):
        peer.open()
    assert peer.greet() == [TOLD]
    assert peer.expected == 0, "no page of ours is known there"
    assert peer.say(Drained(*KEY.numbers, 0, 9)) == [RoomDrained(KEY)]
    assert peer.control.num_rooms == 0
    assert kinds(peer.open()) == ["Promise"]


def test_it_is_told_again_until_it_answers() -> None:
    peer = PrefillPeer().opened()
    assert refuse(peer, RoomKey(8, 0)) == [Abort(8, 0, "no room for it", 9)]
    again = [body for body in peer.pass_time(3.0) if isinstance(body, Abort)]
    assert len(again) >= 2
    assert peer.say(Drained(8, 0, 0, 8)) == [], "an answer to an earlier use of the number"
    assert peer.say(Drained(8, 0, 0, 9)) == [RoomDrained(RoomKey(8, 0))]
    assert not [body for body in peer.pass_time(3.0) if isinstance(body, Abort)]


@pytest.mark.parametrize("end", ["time", "no such address", "another model", "replaced", "fenced"])
def test_a_worker_that_cannot_answer_is_not_waited_for_long(end: str) -> None:
    peer = PrefillPeer()
    refuse(peer)
    if end in ("time", "replaced", "fenced"):
        peer.greet()
    said = {
        "time": lambda: peer.pass_time(TIMING.bootstrap_timeout_s),
        "no such address": lambda: peer.on(ConnectFailed(ADDRESS, TransferError("not found"))),
        "another model": lambda: peer.greet(refused="another model"),
        "replaced": lambda: peer.greet(by=newer(PREFILL)),
        "fenced": lambda: peer.on(Fence(PREFILL)),
    }[end]()
    assert [action for action in said if isinstance(action, RoomDrained)] == [RoomDrained(KEY)]
    assert peer.control.num_rooms == 0


def test_an_abort_before_prefill_is_there_frees_the_pages_at_once_and_is_told_later() -> None:
    peer = PrefillPeer()
    peer.open()
    assert kinds(peer.on(ENOUGH)) == ["RoomEnded", "RoomDrained"]
    assert peer.on(ENOUGH) == [], "again: no-op; the refusal goes on"
    assert peer.greet() == [Abort(*KEY.numbers, "no room for it", promise().ticket)]
    assert peer.on(ENOUGH) == []
    assert peer.control.num_rooms == 1, "it waits for the answer"
    assert peer.say(Drained(*KEY.numbers, 0, promise().ticket)) == [], (
        "which is no news: the number was free already"
    )
    assert peer.control.num_rooms == 0


def test_a_number_that_is_used_again_before_that_is_not_refused_any_more() -> None:
    peer = PrefillPeer()
    peer.open()
    peer.on(ENOUGH)
    assert [body for body in peer.open() if not isinstance(body, Hello)] == []
    assert peer.greet() == [promise()]
    assert peer.control.num_rooms == 1
