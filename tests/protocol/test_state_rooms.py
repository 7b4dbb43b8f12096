"""Extra state in the sender's room: it goes with the last chunk, and without it the room does not succeed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from prefixkv.config import ControlConfig
from prefixkv.protocol.sender_machine import (
    Added,
    ChunkQueued,
    Fail,
    PostWrite,
    Promised,
    RoomEnded,
    SenderMachine,
    SourceFree,
    WriteEnded,
)
from prefixkv.protocol.state import KVPoll, PeerId, RoomKey

NO_PAGES = np.empty(0, np.int32)


def room(*promises: Promised) -> SenderMachine:
    machine = SenderMachine(RoomKey(1, 0), 0, 4, itertools.count(1).__next__, ControlConfig(), 0.0)
    machine.on(Added(8), 0.0)
    for promise in promises:
        machine.on(promise, 0.0)
    assert machine.poll is KVPoll.WAITING_FOR_INPUT
    return machine


def promise(state_slot: int, reader: int = 0, readers: tuple[int, ...] = (0,), takes_state: bool = True) -> Promised:
    peer = PeerId(f"d{reader}", 1)
    return Promised(peer, 8, 8, NO_PAGES, 5, reader, readers, True, 4, 1, state_slot, takes_state)


def test_a_full_hit_posts_the_state_alone_and_waits_for_it() -> None:
    machine = room(promise(7))
    (post,) = machine.on(ChunkQueued(2, NO_PAGES, True, b"", None, 3), 0.0)
    assert isinstance(post, PostWrite)
    assert (post.state, post.src_pages.tolist(), post.dst_pages.tolist()) == (True, [3], [7])
    assert machine.poll is KVPoll.TRANSFERRING
    actions = machine.on(WriteEnded(post.job_id), 0.0)
    assert [type(action) for action in actions if isinstance(action, RoomEnded | SourceFree)] == [RoomEnded, SourceFree]
    assert machine.poll is KVPoll.SUCCESS


def test_only_readers_that_take_state_get_some() -> None:
    both = (0, 1)
    machine = room(promise(7, 0, both), promise(7, 1, both, takes_state=False))
    posts = machine.on(ChunkQueued(2, NO_PAGES, True, b"", None, 3), 0.0)
    assert [(post.peer.name, post.state) for post in posts if isinstance(post, PostWrite)] == [("d0", True)]


@pytest.mark.parametrize(("promised", "handed"), [(7, -1), (-1, 3)])
def test_state_on_one_side_only_fails_the_room(promised: int, handed: int) -> None:
    machine = room(promise(promised))
    actions = machine.on(ChunkQueued(2, NO_PAGES, True, b"", None, handed), 0.0)
    assert machine.poll is KVPoll.FAILED
    assert f"slot {handed} was handed over" in str(machine.error)
    assert not any(isinstance(action, PostWrite) for action in actions)


def test_readers_have_the_same_slot() -> None:
    both = (0, 1)
    machine = SenderMachine(RoomKey(1, 0), 0, 4, itertools.count(1).__next__, ControlConfig(), 0.0)
    machine.on(promise(7, 0, both), 0.0)
    assert machine.same_promise(promise(7, 1, both))
    assert not machine.same_promise(promise(6, 1, both))


def test_a_room_that_fails_frees_the_source_when_the_write_has_ended() -> None:
    machine = room(promise(7))
    (post,) = machine.on(ChunkQueued(2, NO_PAGES, True, b"", None, 3), 0.0)
    assert isinstance(post, PostWrite)
    assert not any(isinstance(action, SourceFree) for action in machine.on(Fail(RuntimeError("x")), 0.0))
    assert any(isinstance(action, SourceFree) for action in machine.on(WriteEnded(post.job_id), 0.0))
