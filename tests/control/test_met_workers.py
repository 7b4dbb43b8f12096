"""What decode's control object says of prefill workers to a scheduler that has asked."""

from __future__ import annotations

from typing import Any

import msgspec

from prefixkv.control.effects import ConnectFailed, Unreached
from prefixkv.errors import ConfigError, HandshakeError, PeerLostError
from prefixkv.protocol.commands import MeetPrefill
from prefixkv.protocol.events import PrefillAway, PrefillLost, PrefillReady
from prefixkv.protocol.messages import Topology
from tests.control.wire import ADDRESS, TIMING, PrefillPeer

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
    assert said(peer.greet()) == [PrefillReady(ADDRESS)]


def test_where_nothing_listens_it_is_lost_and_may_be_there_when_asked_again() -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    peer.on(Unreached(ADDRESS, "connection refused"))
    lost: list[Any] = []
    for _ in range(8):
        lost += said(peer.after(TIMING.connect_timeout_s / 4))
    ((address, error),) = [(event.address, event.error) for event in lost]
    assert address == ADDRESS
    assert isinstance(error, PeerLostError)
    peer.on(MeetPrefill(ADDRESS))
    assert said(peer.greet()) == [PrefillReady(ADDRESS)]


def test_one_that_does_not_fit_is_lost_by_name() -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    [lost] = said(peer.greet(topology=Topology(3)))
    assert isinstance(lost.error, HandshakeError)


def test_an_address_that_is_none_is_lost() -> None:
    peer = PrefillPeer()
    peer.on(MeetPrefill(ADDRESS))
    error = ConfigError("no address")
    assert said(peer.on(ConnectFailed(ADDRESS, error))) == [PrefillLost(ADDRESS, error)]


def test_nothing_is_said_to_a_scheduler_that_has_not_asked() -> None:
    peer = PrefillPeer().opened()
    assert said(peer.after(10 * TIMING.suspect_after_s)) == []
