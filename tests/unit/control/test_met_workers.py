"""What decode's control object says of prefill workers to a scheduler that has asked."""

import re
from typing import Any

import msgspec
import pytest

from prefixkv.control.decode.links import _MOST_ANSWERED
from prefixkv.control.effects import Reached, Unreached
from prefixkv.errors import HandshakeError, PeerLostError
from prefixkv.protocol.commands import Fence, MeetPrefill
from prefixkv.protocol.events import PrefillAway, PrefillLost, PrefillReady
from prefixkv.protocol.messages import Heartbeat, Topology
from tests.unit.control.mesh_wire import ADDRESSES, Writers
from tests.unit.control.wire import ADDRESS, PREFILL, TIMING, PrefillPeer

SAID = PrefillReady | PrefillAway | PrefillLost


def said(effects: list[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, SAID)]


def test_a_worker_is_greeted_and_said_to_answer_once_with_what_it_holds() -> None:
    peer = PrefillPeer()
    peer.reply = msgspec.structs.replace(peer.reply, max_tokens=96)
    effects = peer.on(MeetPrefill(ADDRESS))
    assert said(effects) == []
    assert effects, "it connects, and says Hello"
    assert said(peer.greet()) == [PrefillReady(ADDRESS, 96)]
    assert said(peer.greet()) == []


def test_one_that_is_silent_is_away_until_it_is_heard() -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    peer.greet()
    heard: list[Any] = []
    for _ in range(20):
        heard += said(peer.after(TIMING.suspect_after_s / 4))
    assert heard[:1] == [PrefillAway(ADDRESS)]
    assert len(heard) == 1
    assert said(peer.say(Heartbeat())) == [PrefillReady(ADDRESS)], "at its first word"


def test_a_worker_is_away_while_one_of_its_ranks_is_silent() -> None:
    pair = Writers()
    pair.on(MeetPrefill(ADDRESSES[0]))
    assert said(pair.reply(0)) == []
    assert said(pair.reply(1)) == [PrefillReady(ADDRESSES[0])]
    heard: list[Any] = []
    for _ in range(8):
        pair.say(0, Heartbeat())
        heard += said(pair.after(TIMING.suspect_after_s / 4))
    assert heard == [PrefillAway(ADDRESSES[0])]
    assert said(pair.say(1, Heartbeat())) == [PrefillReady(ADDRESSES[0])]


def test_where_nothing_listens_it_is_lost_and_may_be_there_when_asked_again() -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    peer.on(Unreached(ADDRESS, "connection refused"))
    peer.on(Reached(ADDRESS))
    assert said(peer.pass_time(TIMING.connect_timeout_s)) == [], "it is there again"
    lost: list[Any] = []
    for _ in range(8):  # the first failure counts
        peer.on(Unreached(ADDRESS, "connection refused"))
        lost += said(peer.after(TIMING.connect_timeout_s / 4))
    ((address, error),) = [(event.address, event.error) for event in lost]
    assert address == ADDRESS
    assert isinstance(error, PeerLostError)
    peer.on(MeetPrefill(ADDRESS))
    assert said(peer.greet()) == [PrefillReady(ADDRESS)]


def lost_why(peer: PrefillPeer) -> str:
    """Let its address be without a connection until it counts as lost; the error's text."""
    peer.on(Unreached(ADDRESS, "no answer", "a wrong address"))
    lost = said(peer.pass_time(2 * TIMING.connect_timeout_s))
    (error,) = [event.error for event in lost if isinstance(event, PrefillLost)]
    assert isinstance(error, PeerLostError)
    return str(error)


def test_what_never_answered_is_lost_with_a_guess() -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    assert lost_why(peer) == f"prefill worker {ADDRESS}: no answer: a wrong address"


@pytest.mark.parametrize(
    ("proved", "how"), [(True, "was fenced, since it is proved dead"), (False, "was fenced")]
)
def test_what_answered_before_is_lost_with_what_is_known(proved: bool, how: str) -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    peer.greet()
    peer.after(2.0)
    assert said(peer.on(Fence(PREFILL, proved))) == [PrefillAway(ADDRESS)]
    why = lost_why(peer)
    seconds = re.fullmatch(
        rf"prefill worker {ADDRESS}: no answer; {re.escape(str(PREFILL))} answered there until "
        rf"(\d+\.\d) s ago, and {how}", why
    )  # fmt: skip
    assert seconds is not None, why
    assert float(seconds[1]) >= 2.0
    # Also the next time, when the link is another one: it is older then.
    peer.on(MeetPrefill(ADDRESS))
    again = re.search(r"until (\d+\.\d) s ago, and " + how, lost_why(peer))
    assert again is not None
    assert float(again[1]) > float(seconds[1])


def test_what_answered_and_may_live_is_lost_without_a_guess() -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    peer.greet()
    why = lost_why(peer)
    assert f"no answer; {PREFILL} answered there until " in why
    assert why.endswith(" s ago")


def test_only_some_addresses_are_remembered() -> None:
    peer = PrefillPeer()
    for number in range(_MOST_ANSWERED + 3):
        links = peer.control._links
        links.open(f"tcp://127.0.0.1:{number + 1}", 0.0)
        link = links.get(f"tcp://127.0.0.1:{number + 1}")
        assert link is not None
        link.peer = PREFILL
        links.close(link, 0.0)
    kept = [*links._answered]
    assert len(kept) == _MOST_ANSWERED
    assert kept[0] == "tcp://127.0.0.1:4"


def test_one_that_does_not_fit_is_lost_by_name() -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    [lost] = said(peer.greet(topology=Topology(3)))
    assert isinstance(lost.error, HandshakeError)


def test_nothing_is_said_to_a_scheduler_that_has_not_asked() -> None:
    peer = PrefillPeer().opened()
    assert said(peer.after(10 * TIMING.suspect_after_s)) == []
