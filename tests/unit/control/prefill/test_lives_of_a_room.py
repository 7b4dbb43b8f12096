"""A room is of one life of a decode worker, and each of its ranks is one process: what another life
or another process says of the room is no word on it, and it is told so."""

from __future__ import annotations

import pytest

from prefixkv.protocol.events import Bootstrapped, RoomEnded
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import Abort, Drained, Outcome, PromiseAck
from prefixkv.transport.base import WriteJob
from tests.unit.control.mesh_wire import SENT, Readers, add_room, bodies, hello, promise
from tests.unit.control.wire import of

A, B = PeerId("d", 5), PeerId("d/1", 5)
ABORT = Abort(*SENT.numbers, "no", 1)


def claimed_by_rank_1() -> Readers:
    """Rank 1 has promised its pages for the room; its worker's rank 0 has started again."""
    peer = Readers(tp=1)
    peer.greet(2)
    peer.on(add_room())
    assert bodies(peer.say(B, promise()), PromiseAck)
    assert not of(peer.say(PeerId("d", 6), hello(2, 0, PeerId("d", 6))), RoomEnded)
    return peer


def test_the_next_life_of_a_worker_shares_no_room_with_the_one_before() -> None:
    """Its rank 0 may draw the same ticket; its rank 1 never heard of these pages."""
    peer = claimed_by_rank_1()
    effects = peer.say(PeerId("d", 6), promise())
    assert not of(effects, Bootstrapped)
    ((to, refusal),) = bodies(effects, Outcome)
    assert (to, refusal.ok, refusal.drained) == (b"d", False, True)
    assert "another life's" in refusal.error


def test_the_next_life_of_a_worker_ends_no_room_of_the_one_before() -> None:
    peer = claimed_by_rank_1()
    effects = peer.say(PeerId("d", 6), ABORT)
    assert not of(effects, RoomEnded)
    assert [to for to, _ in bodies(effects, Drained)] == [b"d"], "nothing of ours goes there"


def rank_1_started_again() -> Readers:
    """Both ranks have promised their pages, a write to each is under way, and rank 1 is another
    process by now, of the same worker."""
    peer = Readers(tp=1)
    peer.on(add_room())
    for reader in peer.greet(2):
        peer.say(reader, promise())
    assert len(of(peer.chunk(0, [1, 2, 3]), WriteJob)) == 2
    assert of(peer.say(PeerId("d/1", 6), hello(2, 1, A)), RoomEnded)
    return peer


@pytest.mark.parametrize("word", ["promise", "abort"])
def test_another_process_of_a_rank_is_answered_for_itself(word: str) -> None:
    """What is under way goes to the pages of the process before it, so none of its own is at
    stake."""
    peer = rank_1_started_again()
    if word == "promise":
        ((to, refusal),) = bodies(peer.say(PeerId("d/1", 6), promise()), Outcome)
        assert (to, refusal.ok, refusal.drained) == (b"d/1", False, True)
    else:
        assert [to for to, _ in bodies(peer.say(PeerId("d/1", 6), ABORT), Drained)] == [b"d/1"]


def test_what_was_under_way_to_the_process_before_is_waited_for() -> None:
    peer = rank_1_started_again()
    peer.say(PeerId("d/1", 6), ABORT)
    assert not bodies(peer.say(A, ABORT), Drained)
    (first, second) = sorted(peer.control._rooms.jobs)
    assert not bodies(peer.ended(first), Drained)
    assert [to for to, _ in bodies(peer.ended(second), Drained)] == [b"d"]
    assert peer.control.num_rooms == 0
