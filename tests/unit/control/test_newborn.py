"""A decode worker that was killed before it had promised, and is started anew under its name, knows
nothing of the requests that prefill has for it: they end soon after it has introduced itself."""

from __future__ import annotations

import msgspec
import pytest

from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.effects import FrameReceived, SendFrame
from prefixkv.errors import PeerLostError
from prefixkv.protocol import messages
from prefixkv.protocol.commands import OpenRoom
from prefixkv.protocol.events import Bootstrapped, RoomEnded
from prefixkv.protocol.messages import Heartbeat, Hello, HelloWanted
from tests.unit.control.wire import (
    ADDRESS,
    DECODE,
    HELLO,
    PREFILL,
    TIMING,
    DecodePeer,
    add_room,
    kinds,
    newer,
    of,
    promise,
)

GRACE_S = TIMING.suspect_after_s


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
