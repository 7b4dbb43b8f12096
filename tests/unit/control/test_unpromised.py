"""Requests on prefill whose decode worker is dead before it has promised pages: they end as soon as
that is known, and no request of another worker or of a later life does. It was killed, and is
started anew under its name: then they end soon after it has introduced itself."""

import msgspec
import pytest

from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.effects import FrameReceived, SendFrame
from prefixkv.errors import PeerLostError, TransferTimeoutError
from prefixkv.protocol import messages
from prefixkv.protocol.commands import Fence, OfferRoom, OpenRoom
from prefixkv.protocol.events import Bootstrapped, RoomEnded
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import Fenced, Heartbeat, Hello, HelloRefused, HelloWanted
from tests.unit.control import mesh_wire
from tests.unit.control.wire import (
    ADDRESS,
    DECODE,
    HELLO,
    PREFILL,
    ROUTE,
    SENT,
    TIMING,
    DecodePeer,
    add_room,
    kinds,
    newer,
    of,
    promise,
)
from tests.unit.protocol.rooms import PROMPT

OTHER = PeerId("decode-1", 7)
THEIRS = RoomKey(8, 0, OTHER.name)
GRACE_S = TIMING.suspect_after_s


def ended(effects: list) -> list[RoomKey]:
    return [end.key for end in of(effects, RoomEnded)]


def both_known() -> DecodePeer:
    """Two decode workers; a request that names each, and one that is promised."""
    peer = DecodePeer().known()
    peer.say(HELLO, OTHER, route=ROUTE + b"2")
    peer.on(add_room())
    peer.on(add_room(THEIRS))
    peer.take_said()
    return peer


def told(peer: DecodePeer) -> int:
    return peer.control.counters["never_promised"]


@pytest.mark.parametrize("how", ["fenced", "proved dead", "has left", "holds us for dead"])
def test_they_end_as_the_death_is_known(how: str) -> None:
    peer = both_known()
    if how == "has left":
        said = peer.say(Fenced())
    elif how == "holds us for dead":
        said = peer.say(HelloRefused(PREFILL.incarnation, "was fenced", is_over=True))
    else:
        said = peer.on(Fence(DECODE, proved=how == "proved dead"))
    (end,) = of(said, RoomEnded)
    assert end.key == SENT
    assert isinstance(end.error, PeerLostError)
    assert end.error.peer == DECODE
    assert "had not promised pages" in str(end.error)
    assert told(peer) == 1
    assert peer.control.num_rooms == 1, "the other worker's"


def test_of_a_worker_that_prefill_has_never_met() -> None:
    peer = DecodePeer()
    peer.on(add_room())
    peer.on(add_room(THEIRS))
    assert ended(peer.on(Fence(DECODE))) == [SENT]


def test_what_is_added_after_that_is_for_the_next_life() -> None:
    peer = both_known()
    peer.on(Fence(DECODE, proved=True))
    again = RoomKey(9, 0, DECODE.name)
    peer.on(add_room(again))
    assert ended(peer.on(Fence(DECODE))) == [], "the operator says it too"
    assert ended(peer.after(TIMING.bootstrap_timeout_s - 0.25)) == []
    assert again in ended(peer.after(0.5))


def test_a_former_lifes_death_ends_nothing_of_the_present_one() -> None:
    peer = both_known()
    peer.me = newer(DECODE)
    peer.say(HELLO)
    assert ended(peer.on(Fence(DECODE, proved=True))) == []
    unheard = PeerId(DECODE.name, 99)
    assert ended(peer.on(Fence(unheard))) == [], "of whichever life, it is not the present one's"
    assert ended(peer.on(Fence(newer(DECODE), proved=True))) == [SENT]


def test_one_that_is_promised_ends_by_its_promise() -> None:
    peer = DecodePeer().bootstrapped()
    assert ended(peer.on(Fence(DECODE))) == [SENT]
    assert told(peer) == 0


def test_a_worker_that_is_killed_again_and_again() -> None:
    """Each life gives the requests of all former ones no more time than the first one did."""
    peer = both_known()
    keys, ends = [SENT], []
    for number in range(5):
        peer.pause(1.0)
        peer.me = newer(peer.me)
        peer.say(msgspec.structs.replace(HELLO, age_ms=500))
        keys.append(RoomKey(20 + number, 0, DECODE.name))
        peer.on(add_room(keys[-1]))
        for _ in range(2):
            peer.say(Heartbeat(), OTHER, route=ROUTE + b"2")
            ends += ended(peer.after(0.5))
    assert ends == keys[:4], "those that are known to be of former lives for long enough"
    for _ in range(round(GRACE_S / 0.5)):
        peer.say(Heartbeat(), OTHER, route=ROUTE + b"2")
        peer.say(Heartbeat())
        ends += ended(peer.after(0.5))
    assert ends == keys[:-1], "the last life may ask for its own"
    assert told(peer) == 5
    assert peer.control.num_rooms == 2


def test_by_its_deadline_where_nothing_is_known() -> None:
    peer = DecodePeer()
    peer.on(add_room())
    peer.on(OfferRoom(RoomKey(5, 0), 10, PROMPT, TIMING.bootstrap_timeout_s))
    ends = of(peer.after(TIMING.bootstrap_timeout_s), RoomEnded)
    assert {end.key for end in ends} == {SENT, RoomKey(5, 0)}
    assert all(isinstance(end.error, TransferTimeoutError) for end in ends)
    assert told(peer) == 2


@pytest.mark.parametrize("dead", [0, 1])
def test_a_worker_with_a_rank_that_is_dead_promises_nothing_more(dead: int) -> None:
    """The other rank may have promised already."""
    peer = mesh_wire.Readers()
    ranks = peer.greet(2)
    peer.on(mesh_wire.add_room())
    peer.say(ranks[1 - dead], mesh_wire.promise())
    assert ended(peer.on(Fence(ranks[dead], proved=True))) == [mesh_wire.SENT]
    assert peer.control.counters["never_promised"] == 1


def test_a_rank_of_prefill_that_knows_no_rank_0_of_decode() -> None:
    peer = mesh_wire.Readers(2, rank=1)
    leader, second = PeerId("d", 5), PeerId("d/1", 5)
    peer.say(second, mesh_wire.hello(2, 1, leader))
    peer.on(mesh_wire.add_room())
    assert ended(peer.on(Fence(second, proved=True))) == [mesh_wire.SENT]


# --- started anew -------------------------------------------------------------------------------


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
