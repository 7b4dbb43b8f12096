"""Extra state in the sender's room: it goes with the last chunk, and without it the room does not
succeed."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from prefixkv.config import ControlConfig
from prefixkv.memory.state_layout import StateBlock, StateEntry, StateLayout, StateLink, StateTensor
from prefixkv.protocol.commands import SendChunk
from prefixkv.protocol.events import RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Outcome, Promise
from prefixkv.protocol.sender_machine import (
    Added,
    Fail,
    JobEnded,
    PostWrite,
    Promised,
    SenderMachine,
)
from tests.unit.control import wire
from tests.unit.control.wire import DIGEST, HELLO, SENT, DecodePeer, add_room
from tests.unit.protocol.rooms import PROMPT

STATE = (StateTensor("a", 0, 1, (8,), "uint8"),)
WITH_STATE = msgspec.structs.replace(DIGEST, state=STATE)
MEMORY = StateLayout(4, (StateEntry(1 << 20, 16, 8),), ((1 << 20, 64),))
NO_PAGES = np.empty(0, np.int32)


def room(*promises: Promised) -> SenderMachine:
    machine = SenderMachine(RoomKey(1, 0), 0, 4, itertools.count(1).__next__, ControlConfig(), 0.0)
    machine.on(Added(8, PROMPT), 0.0)
    for promise in promises:
        machine.on(promise, 0.0)
    assert machine.poll is KVPoll.WAITING_FOR_INPUT
    return machine


def promise(
    state_slot: int, reader: int = 0, readers: tuple[int, ...] = (0,), takes_state: bool = True
) -> Promised:
    peer = PeerId(f"d{reader}", 1)
    return Promised(
        peer=peer, word=Promise(*SENT.numbers, 8, 8, b"", 5, PROMPT), pages=NO_PAGES, num_units=0,
        reader=reader, readers=readers, unit_tokens=4, takes_state=takes_state,
        groups=() if state_slot < 0 else (np.array([state_slot], np.int32),),
    )  # fmt: skip


def last_chunk(state_slot: int) -> SendChunk:
    """No pages, and the extra state."""
    return wire.send_chunk(SENT, 2, [], True, b"", state_slot)


def test_a_full_hit_posts_the_state_alone_and_waits_for_it() -> None:
    machine = room(promise(7))
    (post,) = machine.on(last_chunk(3), 0.0)
    assert isinstance(post, PostWrite)
    assert (post.group, post.src_pages.tolist(), post.dst_pages.tolist()) == (0, [3], [7])
    assert machine.poll is KVPoll.TRANSFERRING
    actions = machine.on(JobEnded(post.job_id), 0.0)
    assert [type(action) for action in actions if isinstance(action, RoomEnded | SourceFree)] == [
        RoomEnded,
        SourceFree,
    ]
    assert machine.poll is KVPoll.SUCCESS


def test_only_readers_that_take_state_get_some() -> None:
    both = (0, 1)
    machine = room(promise(7, 0, both), promise(7, 1, both, takes_state=False))
    posts = machine.on(last_chunk(3), 0.0)
    assert [(post.peer.name, post.group) for post in posts if isinstance(post, PostWrite)] == [
        ("d0", 0)
    ]


@pytest.mark.parametrize(("promised", "handed"), [(7, -1), (-1, 3)])
def test_state_on_one_side_only_fails_the_room(promised: int, handed: int) -> None:
    machine = room(promise(promised))
    actions = machine.on(last_chunk(handed), 0.0)
    assert machine.poll is KVPoll.FAILED
    assert "handed over" in str(machine.error)
    assert not any(isinstance(action, PostWrite) for action in actions)


def test_a_room_that_fails_frees_the_source_when_the_write_has_ended() -> None:
    machine = room(promise(7))
    (post,) = machine.on(last_chunk(3), 0.0)
    assert isinstance(post, PostWrite)
    assert not any(
        isinstance(action, SourceFree) for action in machine.on(Fail(RuntimeError("x")), 0.0)
    )
    assert any(isinstance(action, SourceFree) for action in machine.on(JobEnded(post.job_id), 0.0))


# --- the control object ---------------------------------------------------------------------------


GOOD = msgspec.structs.replace(HELLO, digest=WITH_STATE, state=MEMORY)


def test_a_room_with_state() -> None:
    peer = DecodePeer(hello=GOOD)
    added = peer.say(GOOD)[0]
    assert added.memory.state == StateLink(MEMORY, (StateBlock(0, 0, 0, 0, 8),))
    peer.say(msgspec.structs.replace(wire.promise(prefix_len=4), groups=(wire.ids([3]),)))
    peer.on(add_room())
    pages, state = peer.chunk(1, [30, 31], last=True, state_slot=2)
    assert (pages.route, state.route) == ("pages", "state")
    assert [post.tag.chunk for post in (pages, state)] == [0, 1]
    assert (state.src_pages.tolist(), state.dst_pages.tolist()) == ([2], [3])
    assert peer.ended(pages.job_id) == []
    assert [
        action.poll for action in peer.ended(state.job_id) if isinstance(action, RoomEnded)
    ] == [KVPoll.SUCCESS]


@pytest.mark.parametrize(
    ("with_state", "slots", "text"),
    [
        (True, None, "pages of 0 groups of 1"),
        (True, [-1], "page ids -1 to -1, the extra state has 4"),
        (True, [4], "page ids 4 to 4, the extra state has 4"),
        (True, [1, 2], "2 pages where 1 are needed in the extra state"),
        (True, [], "0 pages where 1 are needed in the extra state"),
        (False, [0], "pages of 1 groups of 0"),
    ],
)
def test_a_promise_of_a_slot_that_is_none_is_refused(
    with_state: bool, slots: list[int] | None, text: str
) -> None:
    peer = DecodePeer(hello=GOOD) if with_state else DecodePeer()
    peer.say(GOOD if with_state else HELLO)
    groups = () if slots is None else (wire.ids(slots),)
    (outcome,) = peer.say(msgspec.structs.replace(wire.promise(), groups=groups))
    assert isinstance(outcome, Outcome)
    assert text in outcome.error
    assert not list(peer.control.rooms())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state": None}, "on one side only"),
        ({"state": StateLayout(4, (StateEntry(1 << 20, 16, 9),), MEMORY.regions)}, "not the share"),
        ({"state": StateLayout(4, MEMORY.entries * 2, MEMORY.regions)}, "not the share"),
        ({"state": StateLayout(5, MEMORY.entries, MEMORY.regions)}, "not inside one region"),
        ({"digest": DIGEST}, "state[0]"),
    ],
)
def test_a_peer_that_describes_its_state_otherwise_is_refused(
    changes: dict[str, object], text: str
) -> None:
    peer = DecodePeer(hello=GOOD)
    [reply] = peer.say(msgspec.structs.replace(GOOD, **changes))
    assert text in reply.refused


def test_memory_for_state_that_the_model_has_not_is_refused() -> None:
    [reply] = DecodePeer().say(msgspec.structs.replace(HELLO, state=MEMORY))
    assert "on one side only" in reply.refused
