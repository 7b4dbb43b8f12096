"""When a control object wants to know whether a peer's process has ended, and what it does then."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefixkv.config import ControlConfig
from prefixkv.control.effects import Examine, FrameReceived, Reached, RemovePeer, Tick, Unreached
from prefixkv.control.lives import EXAMINE_S
from prefixkv.errors import PeerLostError
from prefixkv.protocol.commands import Fence
from prefixkv.protocol.events import RoomDrained, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.protocol.messages import Fenced, Heartbeat, ProcessLife
from prefixkv.transport.base import PeerUnreachable
from tests.unit.control.wire import (
    ADDRESS,
    DECODE,
    HELLO,
    KEY,
    PREFILL,
    SENT,
    TIMING,
    DecodePeer,
    PrefillPeer,
    newer,
    of,
    promise,
)

LIFE = ProcessLife("boot", 1, 2, 4242, 17, "holder")
OTHER_LIFE = msgspec.structs.replace(LIFE, pid=4243)
GONE = Unreached(ADDRESS, "no answer")
ON = replace(TIMING, fence_settle_s=0.0)


class _Here:
    """The peer's words come from this machine."""

    is_local = True

    def on(self, what: Any) -> list[Any]:
        if isinstance(what, FrameReceived):
            what = msgspec.structs.replace(what, is_local=self.is_local)
        out: list[Any] = super().on(what)  # type: ignore[misc]
        return out


class LocalPrefill(_Here, PrefillPeer):
    def __init__(self, timing: ControlConfig = ON, life: ProcessLife | None = LIFE) -> None:
        super().__init__(timing)
        self.reply = msgspec.structs.replace(self.reply, life=life)


class LocalDecode(_Here, DecodePeer):
    def __init__(self, timing: ControlConfig = ON, life: ProcessLife | None = LIFE) -> None:
        super().__init__(timing, msgspec.structs.replace(HELLO, life=life))


def examined(effects: list[Any]) -> list[Examine]:
    return of(effects, Examine)


def looks(peer: PrefillPeer | DecodePeer, seconds: float) -> int:
    """How often something was to be looked at, the clock going on to each time that is wanted."""
    found, end_s = 0, peer.now_s + seconds
    while (wake_s := peer.control.wake_s) <= end_s:
        found += len(examined(peer.after(max(0.0, wake_s - peer.now_s))))
    peer.now_s = end_s
    return found


def begun(peer: Any) -> Any:
    """It is in a room."""
    return peer.opened() if isinstance(peer, PrefillPeer) else peer.bootstrapped()


def doubt(peer: Any) -> None:
    """It cannot be reached."""
    is_prefill = isinstance(peer, PrefillPeer)
    peer.on(GONE if is_prefill else PeerUnreachable(DECODE, OSError("the connection is reset")))


# --- either side's --------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("kind", [LocalPrefill, LocalDecode])


@BOTH
@pytest.mark.parametrize("how", ["unreachable", "silent"])
def test_a_peer_that_may_be_dead_is_looked_at_until_that_is_proved(kind: Any, how: str) -> None:
    peer = begun(kind())
    assert looks(peer, 1.0) == 0
    if how == "silent":
        peer.now_s += ON.suspect_after_s
    else:
        doubt(peer)
        assert peer.control.wake_s == peer.now_s, "at once"
    assert examined(peer.on(Tick())) == [Examine(peer.me, LIFE)]
    assert peer.control.wake_s <= peer.now_s + EXAMINE_S, "and again"
    assert examined(peer.on(Tick())) == [], "not more often"
    assert looks(peer, 1.0) == 4
    said = peer.on(Fence(peer.me, proved=True))
    [ended] = of(said, RoomEnded)
    assert ended.poll is KVPoll.FAILED
    assert isinstance(ended.error, PeerLostError)
    assert ended.error.peer == peer.me
    assert "proved dead" in str(ended.error)
    is_free = RoomDrained(KEY) if kind is LocalPrefill else SourceFree(SENT)
    assert of(said, RoomDrained | SourceFree) == [is_free]
    assert of(said, RemovePeer) == [RemovePeer(DECODE)] * (kind is LocalDecode)
    assert [news.why for news in peer.control.news.take() if news.kind == "over"] == [
        "was fenced, since it is proved dead"
    ]
    for _ in range(2):
        assert peer.control.counters["peers_proved_dead"] == 1, "another proof was on its way"
        peer.on(Fence(peer.me, proved=True))
    assert looks(peer, 30.0) == 0


@BOTH
def test_an_operators_fence_is_no_proof_and_ends_the_looking(kind: Any) -> None:
    peer = begun(kind())
    doubt(peer)
    peer.on(Fence(peer.me))
    peer.on(Fence(peer.me, proved=True))
    assert peer.control.counters["peers_proved_dead"] == 0
    assert looks(peer, 30.0) == 0
    assert "proved" not in str([news.why for news in peer.control.news.take()])


@BOTH
@pytest.mark.parametrize("why", ["not of this machine", "it says nothing"])
def test_what_is_no_evidence_is_not_looked_at(kind: Any, why: str) -> None:
    peer = kind(ON, None if why == "it says nothing" else LIFE)
    peer.is_local = why != "not of this machine"
    doubt(begun(peer))
    assert looks(peer, 30.0) == 0


@BOTH
def test_a_peer_that_has_left_is_not_looked_at(kind: Any) -> None:
    peer = begun(kind())
    doubt(peer)
    peer.say(Fenced())
    assert looks(peer, 30.0) == 0
    peer.on(Fence(peer.me, proved=True))
    assert peer.control.counters["peers_proved_dead"] == 0


# --- decode's -------------------------------------------------------------------------------------


def test_a_silent_prefill_is_looked_at_and_one_that_speaks_again_is_not() -> None:
    peer = LocalPrefill().opened()
    assert looks(peer, ON.suspect_after_s - 0.1) == 0
    assert looks(peer, 2.0) > 4
    peer.say(Heartbeat())
    looks(peer, ON.suspect_after_s)  # for as long as it may be silent
    for _ in range(20):
        peer.say(Heartbeat())
        assert looks(peer, 1.0) == 0
    assert peer.control.lost_peers(peer.now_s) == {}


def test_pages_held_for_a_former_life_are_why_it_is_looked_at() -> None:
    """Its successor is met at once; the proof is about the former."""
    peer = LocalPrefill().opened()
    successor = newer(PREFILL)
    peer.greet(successor, life=OTHER_LIFE)
    assert examined(peer.on(Tick())) == [Examine(PREFILL, LIFE)]
    for _ in range(30):  # well beyond the doubt
        peer.say(Heartbeat(), successor)
        assert looks(peer, 1.0) == 4
    assert of(peer.on(Fence(PREFILL, proved=True)), RoomDrained) == [RoomDrained(KEY)]
    for _ in range(10):
        peer.say(Heartbeat(), successor)
        assert looks(peer, 1.0) == 0
    assert peer.control.peers(peer.now_s)[ADDRESS] == (successor, "ready")


@pytest.mark.parametrize("first", [LIFE, None])
def test_a_prefill_that_has_said_two_things_is_not_looked_at(first: ProcessLife | None) -> None:
    peer = LocalPrefill(ON, first).opened()
    for _ in range(2):
        peer.greet(life=OTHER_LIFE)
    doubt(peer)
    assert looks(peer, 30.0) == 0


def test_one_at_another_address_cannot_have_a_prefill_fenced_by_lying() -> None:
    """It says that it is that prefill, and names a process that is dead."""
    peer = LocalPrefill().opened()
    elsewhere = "tcp://elsewhere:1"
    peer.open(msgspec.structs.replace(promise(), room=8), elsewhere)
    lie = msgspec.structs.replace(peer.reply, life=OTHER_LIFE, known=0)
    peer.on(FrameReceived(elsewhere, peer.raw(lie, PREFILL)))
    assert peer.control.peers(peer.now_s)[elsewhere][0] == PREFILL
    for address in (ADDRESS, elsewhere):
        peer.on(Unreached(address, "no answer"))
    assert looks(peer, 30.0) == 0


def test_a_connection_that_comes_back_ends_it() -> None:
    peer = LocalPrefill().opened()
    peer.on(GONE)
    assert looks(peer, 0.5) > 0
    peer.on(Reached(ADDRESS))
    peer.say(Heartbeat())
    looks(peer, ON.suspect_after_s)
    peer.say(Heartbeat())
    assert looks(peer, 1.0) == 0


def test_lives_that_are_of_no_use_are_forgotten() -> None:
    peer = LocalPrefill()
    peer.open()
    life = PREFILL
    for number in range(100):
        peer.greet(life, life=msgspec.structs.replace(LIFE, pid=number))
        peer.on(Fence(life))
        looks(peer, 1.0)
        life = newer(life)
    assert len(peer.control._links.watch._lives) <= 2


# --- prefill's ------------------------------------------------------------------------------------


def test_a_decode_worker_that_was_replaced_holds_nothing_here() -> None:
    peer = LocalDecode().bootstrapped()
    peer.say(msgspec.structs.replace(HELLO, life=OTHER_LIFE), newer(DECODE))
    peer.on(PeerUnreachable(DECODE, OSError("late")))
    assert looks(peer, 1.0) == 0
    peer.on(PeerUnreachable(newer(DECODE), OSError("now")))
    assert examined(peer.on(Tick())) == [Examine(newer(DECODE), OTHER_LIFE)]


def test_a_life_is_of_a_peer_that_was_let_in() -> None:
    """A Hello that is refused says nothing of the process that has the name."""
    peer = LocalDecode().bootstrapped()
    stranger = PeerId("d9", 9)
    refused = msgspec.structs.replace(HELLO, life=OTHER_LIFE, digest=msgspec.structs.replace(
        HELLO.digest, model="another"))  # fmt: skip
    peer.say(refused, stranger)
    assert set(peer.control._peers.watch._lives) == {DECODE}


def test_what_one_has_said_is_kept_while_others_come_and_go() -> None:
    peer = LocalDecode().bootstrapped()
    other = PeerId("d9", 9)
    peer.say(msgspec.structs.replace(HELLO, life=OTHER_LIFE), other)
    peer.on(PeerUnreachable(other, OSError("the connection is reset")))
    assert examined(peer.on(Tick())) == [Examine(other, OTHER_LIFE)]
    peer.on(Fence(other, proved=True))
    assert looks(peer, 3.0) == 0
    peer.on(PeerUnreachable(DECODE, OSError("the connection is reset")))
    assert examined(peer.on(Tick())) == [Examine(DECODE, LIFE)]
