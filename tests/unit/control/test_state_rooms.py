"""Extra state on prefill's control object: what is promised of it, and what a peer says it has."""

from __future__ import annotations

import msgspec
import pytest

from prefixkv.memory.state_layout import StateBlock, StateEntry, StateLayout, StateLink, StateTensor
from prefixkv.protocol.events import RoomEnded
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.messages import Outcome
from tests.unit.control import wire
from tests.unit.control.wire import DIGEST, HELLO, DecodePeer, add_room

STATE = (StateTensor("a", 0, 1, (8,), "uint8"),)
WITH_STATE = msgspec.structs.replace(DIGEST, state=STATE)
MEMORY = StateLayout(4, (StateEntry(1 << 20, 16, 8),), ((1 << 20, 64),))


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
