"""What prefill ranks with one cache say of a room: one end of it, and its pages free when no rank
sends them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import CallerError, PeerLostError
from prefixkv.protocol.commands import (
    AbortRoom,
)
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.ranks.joined import pack_rank_events
from prefixkv.ranks.prefill_rooms import PrefillRankRooms

KEY = RoomKey(7, 1, "decode-0")
FREE = SourceFree(KEY)


def begun(rank: int) -> Bootstrapped:
    return Bootstrapped(KEY, PeerId(f"decode-0/{rank}", 1), 8)


SUCCESS = RoomEnded(KEY, KVPoll.SUCCESS)


def failure(rank: int) -> RoomEnded:
    return RoomEnded(KEY, KVPoll.FAILED, PeerLostError(f"{rank} broke", PeerId("decode-0", 1)))


def histories(rank: int) -> list[list[Any]]:
    """All that a rank may say of one room."""
    return [[begun(rank), SUCCESS, FREE], [begun(rank), failure(rank), FREE], [failure(rank), FREE]]


DEAD = "its process is dead"


@given(st.data())
def test_whatever_the_order_the_scheduler_hears_what_all_ranks_say(data: st.DataObject) -> None:
    """Also where the process of a rank dies between two of its words."""
    num_ranks = data.draw(st.integers(1, 3))
    said = [list(data.draw(st.sampled_from(histories(rank)))) for rank in range(num_ranks)]
    if (dead := data.draw(st.integers(0, num_ranks - 1))) > 0:
        del said[dead][data.draw(st.integers(0, len(said[dead]) - 1)) :]
        said[dead].append(DEAD)
    succeeds = all(SUCCESS in words for words in said)
    rooms, heard, aborts = PrefillRankRooms(num_ranks), list[Any](), list[Any]()
    numbers, num_begun = [0] * num_ranks, 0
    order: list[int] = []
    while any(said):
        rank = data.draw(st.sampled_from([rank for rank, words in enumerate(said) if words]))
        event = said[rank].pop(0)
        order.append(rank)
        if event is DEAD:
            events, commands = rooms.fence(rank)
            # What it said before that comes now.
            assert not list(rooms.unpack(pack_rank_events(rank, numbers[rank], [FREE])))
        else:
            if rank:
                raw = pack_rank_events(rank, numbers[rank], [event])
                numbers[rank] += 1
                ((_, event),) = rooms.unpack(raw)
            events, commands = rooms.on(rank, event)
        # 1. Begun once every rank is; free once every rank has said so, or is dead, with the last
        # word of all.
        num_begun += isinstance(event, Bootstrapped)
        assert num_begun == num_ranks or not any(isinstance(one, Bootstrapped) for one in events)
        assert (FREE in events) == (not any(said))
        heard += events
        aborts += commands
    kinds = [type(event) for event in heard]
    assert kinds.count(SourceFree) == 1
    assert kinds.count(Bootstrapped) <= 1
    # Before a room's first word it is not known here: its request ends without it.
    if dead and order[0] == dead and not numbers[dead]:
        assert kinds.count(RoomEnded) <= 1
        return
    (ended,) = [event for event in heard if isinstance(event, RoomEnded)]
    assert (ended.poll is KVPoll.SUCCESS) == succeeds
    if Bootstrapped in kinds:
        assert heard[0] == begun(0)
    assert succeeds <= (Bootstrapped in kinds)
    # 2. The first failure ends the room on all ranks, once.
    assert len(aborts) == (not succeeds)
    if not succeeds:
        assert isinstance(ended.error, PeerLostError)
        assert ended.error.peer == PeerId("decode-0", 1) or DEAD in str(ended.error)
        assert isinstance(aborts[0], AbortRoom)
    assert not len(rooms)


def test_what_a_rank_has_sent_before_it_died_is_free_once_it_is_dead() -> None:
    rooms = PrefillRankRooms(2)
    for rank in (0, 1):
        rooms.on(rank, begun(rank))
        rooms.on(rank, SUCCESS)
    assert rooms.on(0, FREE) == ([], [])
    assert rooms.fence(1) == ([FREE], [])
    assert not len(rooms)


def test_a_rank_that_alone_is_not_done_is_named() -> None:
    rooms = PrefillRankRooms(3)
    for rank in (0, 2):
        rooms.on(rank, begun(rank))
        assert rooms.awaited() == {}
        rooms.on(rank, FREE)
    rooms.on(0, SourceFree(KEY._replace(room=8)))
    assert rooms.awaited() == {1: 1}
    for bad in (0, 3, -1, "1", None):
        with pytest.raises(CallerError, match="rank"):
            rooms.death(bad)  # type: ignore[arg-type]
    rooms.fence(1)
    assert rooms.awaited() == {2: 1}
    assert len(rooms) == 1


def test_messages_of_ranks_come_in_order_and_are_of_ranks_that_there_are() -> None:
    rooms = PrefillRankRooms(2)
    first, second = (pack_rank_events(1, number, [begun(1)]) for number in (0, 1))
    for bad, why in [
        (b"junk", "no message of a rank"),
        (7, "bytes are needed"),
        (second, "0 is next"),
        (pack_rank_events(2, 0, [FREE]), "rank 2, which this worker has not"),
        (pack_rank_events(0, 0, [FREE]), "rank 0, which this worker has not"),
    ]:
        with pytest.raises(CallerError, match=why):
            list(rooms.unpack(bad))  # type: ignore[arg-type]
    assert list(rooms.unpack(first)) == [(1, begun(1))]
    with pytest.raises(CallerError, match="1 is next"):
        list(rooms.unpack(first))
    assert list(rooms.unpack(second)) == [(1, begun(1))]
