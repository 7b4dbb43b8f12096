"""A decode rank whose metadata is tried before it is answered."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from prefixkv.control.effects import AddPeer, PeerTried, TryPeer
from prefixkv.errors import MetadataError
from prefixkv.memory.staging_area import StagingArea
from prefixkv.protocol.messages import Heartbeat, HelloReply, HelloWanted
from tests.control.wire import HELLO, LAYOUT, DecodePeer, kinds, newer
from tests.protocol.rooms import DECODE, TIMING, promise

TRY = TryPeer(DECODE, HELLO.agent_metadata, LAYOUT.regions)


def on_trial(**options: object) -> DecodePeer:
    peer = DecodePeer(tries=True, **options)  # type: ignore[arg-type]
    assert peer.say(peer.hello) == [TRY]
    return peer


def test_a_peer_is_tried_before_it_is_answered_and_added() -> None:
    peer = on_trial()
    assert peer.control.peers(0.0) == {}
    [added, reply] = peer.on(PeerTried(DECODE))
    assert isinstance(added, AddPeer)
    assert isinstance(reply, HelloReply)
    assert not reply.refused
    assert list(peer.control.peers(0.0)) == [DECODE]


def test_a_peer_whose_trial_failed_is_told_why_and_never_added() -> None:
    peer = on_trial()
    [reply] = peer.on(PeerTried(DECODE, MetadataError("it ended in SIGABRT")))
    assert "SIGABRT" in reply.refused
    assert peer.control.peers(0.0) == {}
    assert peer.control.counters["handshakes_refused"] == 1
    assert peer.say(peer.hello) == [TRY], "another Hello is another try"


def test_a_hello_said_again_waits_for_the_trial_that_is_under_way() -> None:
    peer = on_trial()
    assert peer.say(peer.hello, route=b"newer route") == []
    [_, reply] = peer.control.on(PeerTried(DECODE), 0.0)
    assert reply.to == b"newer route"  # type: ignore[union-attr]


def test_what_a_peer_on_trial_says_is_not_heard() -> None:
    peer = on_trial()
    for body in (promise(), Heartbeat()):
        assert kinds(peer.say(body)) == [HelloWanted.__name__]
    assert peer.control.num_rooms == 0


def test_the_trial_of_a_former_life_says_nothing_of_the_present_one() -> None:
    peer, later = on_trial(), newer(DECODE)
    assert peer.say(peer.hello, by=later) == [try_of(later)]
    assert peer.on(PeerTried(DECODE)) == []
    assert peer.control.peers(0.0) == {}
    assert kinds(peer.on(PeerTried(later))) == ["AddPeer", "HelloReply"]


def test_a_newer_life_that_fails_its_trial_leaves_the_known_one_alone() -> None:
    peer, later = on_trial(), newer(DECODE)
    peer.on(PeerTried(DECODE))
    peer.say(peer.hello, by=later)
    peer.on(PeerTried(later, MetadataError("it ended in SIGABRT")))
    assert list(peer.control.peers(0.0)) == [DECODE]


def test_peers_on_trial_are_bounded() -> None:
    peer = on_trial(timing=replace(TIMING, max_peers=1))
    assert peer.say(peer.hello, by=DECODE._replace(name="another")) == []
    assert peer.control.counters["frames_dropped"] == 1


@pytest.mark.parametrize("staged", [False, True])
def test_all_memory_that_a_hello_names_is_in_the_trial(staged: bool) -> None:
    area = StagingArea(1 << 20, 1 << 16, 1 << 12)
    hello = msgspec.structs.replace(HELLO, staging=area if staged else None)
    [tried] = DecodePeer(tries=True, hello=hello).say(hello)
    expected = [*LAYOUT.regions, *([(area.base, area.num_bytes)] if staged else [])]
    assert list(tried.ranges) == expected


def try_of(peer: object) -> TryPeer:
    return TryPeer(peer, HELLO.agent_metadata, LAYOUT.regions)  # type: ignore[arg-type]
