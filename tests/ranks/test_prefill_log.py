"""The log that prefill ranks with one cache follow, and what comes back: one end of a room, and its
pages free when no rank sends them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import CallerError, ConfigError, InternalError, PeerLostError, RequestError
from prefixkv.pages.manager import PageManager
from prefixkv.pages.windows import WindowSpec
from prefixkv.prefill.request import PrefillRequest
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    Fence,
    MoveWeights,
    OfferRoom,
    SendChunk,
    WindowChunk,
)
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.ranks.prefill_log import (
    PrefillFollower,
    PrefillLog,
    PrefillRankRooms,
    pack_prefill_events,
    settings_of,
)
from prefixkv.request import Request

KEY = RoomKey(7, 1, "decode-0")
FREE = SourceFree(KEY)
SPEC = WindowSpec("last", 6, 20, 8)
SIZES: Any = (16, 4, 3, [SPEC])


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
            assert not list(rooms.unpack(pack_prefill_events(rank, numbers[rank], [FREE])))
        else:
            if rank:
                raw = pack_prefill_events(rank, numbers[rank], [event])
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
    first, second = (pack_prefill_events(1, number, [begun(1)]) for number in (0, 1))
    for bad, why in [
        (b"junk", "no message of a rank"),
        (7, "bytes are needed"),
        (second, "0 is next"),
        (pack_prefill_events(2, 0, [FREE]), "rank 2, which this worker has not"),
        (pack_prefill_events(0, 0, [FREE]), "rank 0, which this worker has not"),
    ]:
        with pytest.raises(CallerError, match=why):
            list(rooms.unpack(bad))  # type: ignore[arg-type]
    assert list(rooms.unpack(first)) == [(1, begun(1))]
    with pytest.raises(CallerError, match="1 is next"):
        list(rooms.unpack(first))
    assert list(rooms.unpack(second)) == [(1, begun(1))]


# --- the log --------------------------------------------------------------------------------------


def leading() -> tuple[PrefillScheduler, PrefillLog, PrefillFollower]:
    pages = PageManager(16, 4, 4, num_checkpoints=2, windows=[SPEC])
    log = PrefillLog()
    log.settings = settings_of(*SIZES)
    return PrefillScheduler(pages), log, PrefillFollower(*SIZES)


def begin(scheduler: PrefillScheduler, rid: str, tokens: list[int], room: int) -> PrefillRequest:
    req = scheduler.add(Request(rid, tokens, room=room, decode="decode-0"), 0.0)
    scheduler.room_bootstrapped(req.room_key, 0, "decode-0", 0.0)
    assert scheduler.pop_bootstrapped(0.0) == [req]
    return req


def test_a_rank_that_follows_knows_what_its_engine_needs() -> None:
    scheduler, log, follower = leading()

    def follow(ready: Any = None) -> list[Any]:
        for command in scheduler.take_commands():
            log.command(command)
        return follower.apply(log.take(scheduler.requests.values()), ready)

    waiting = scheduler.add(Request("w", [1] * 9, room=9, decode="decode-0"), 0.0)
    assert follow() == [AddRoom(waiting.room_key, 9, waiting.request.digest)]
    assert not len(follower), "it has no pages yet"
    a = begin(scheduler, "a", list(range(11)), 1)
    follow()
    assert follower.is_like(a)
    # A chunk up to a stop: the window's pages before it are kept, and the row has others.
    ready = object()
    scheduler.send_chunk(a, 8, 0.0)
    assert not follower.is_like(a), "it has slid"
    (chunk,) = follow(ready)
    assert isinstance(chunk, SendChunk)
    assert chunk.ready is ready
    assert chunk.src_pages.tolist() == a.pages[:2].tolist()
    assert follower.is_like(a)
    scheduler.send_chunk(a, 11, 0.0, last=True, aux=b"7")
    (chunk,) = follow()
    first, ids = a.window_pages("last")
    assert (chunk.last, chunk.aux, chunk.ready) == (True, b"7", None)
    assert [one.src_pages.tolist() for one in chunk.windows] == [
        ids[2 - first : 3 - first].tolist()
    ]
    scheduler.pop_bootstrapped(0.0)
    # What comes next goes on from its checkpoint, in the pages of its window.
    b = begin(scheduler, "b", [*range(11), 5, 6], 2)
    assert (b.prefix_len, b.stops) == (8, [12])
    follow()
    view = follower.request("b")
    assert (view.prefix_len, view.stops, view.checkpoint_slot) == (8, [12], -1)
    assert view.pages.tolist() == b.pages.tolist()
    row = b.window_pages("last")
    assert view.window_pages("last").ids.tolist() == row.ids.tolist()
    assert (row.first_page, row.ids[1]) == (0, ids[0]), "the page that the first one wrote"
    with pytest.raises(CallerError, match="no window group"):
        view.window_pages("draft")
    # It ends.
    scheduler.room_ended(a.room_key, KVPoll.SUCCESS, None, 0.0)
    scheduler.source_free(a.room_key, 0.0)
    scheduler.pop_sent(0.0)
    follow()
    for rid in ("a", "w", 7):
        with pytest.raises(RequestError, match="is not here"):
            follower.request(rid)  # type: ignore[arg-type]
    assert len(follower) == 1


def test_all_commands_of_a_scheduler_travel_and_no_other() -> None:
    _, log, follower = leading()
    commands = [
        AddRoom(KEY, 9, b"d" * 16), DeclineRoom(KEY, "no", b"d" * 16), AbortRoom(KEY, "why"),
        MoveWeights("v2", ends_waiting=False), Fence(PeerId("decode-0", 3), proved=True),
    ]  # fmt: skip
    for command in commands:
        log.command(command)
    window = WindowChunk(1, np.array([4, 2], np.int32))
    log.command(
        SendChunk(KEY, 3, np.array([5], np.int32), True, b"a", object(), 2, windows=(window,))
    )  # type: ignore[arg-type]
    *others, chunk = follower.apply(log.take([]), None)
    assert others == commands
    assert isinstance(chunk, SendChunk)
    assert (chunk.key, chunk.first_page, chunk.last, chunk.aux) == (KEY, 3, True, b"a")
    assert (chunk.ready, chunk.state_slot, chunk.clip) == (None, 2, False)
    assert (chunk.windows[0].first, chunk.windows[0].src_pages.tolist()) == (1, [4, 2])
    assert not log
    with pytest.raises(InternalError, match="OfferRoom"):
        log.command(OfferRoom(KEY, 9, b"d" * 16, 1.0))


def test_a_message_that_is_not_the_next_changes_nothing() -> None:
    scheduler, log, follower = leading()
    req = begin(scheduler, "a", list(range(11)), 1)
    first = log.take([req])
    log.command(AbortRoom(KEY, "why"))
    second = log.take([])
    for bad, why in [
        (second, "0 is the next"),
        (b"junk", "no message"),
        (None, "bytes are needed"),
    ]:
        with pytest.raises(CallerError, match=why):
            follower.apply(bad, None)  # type: ignore[arg-type]
    assert not len(follower)
    assert follower.apply(first, None) == []
    assert follower.is_like(req)
    with pytest.raises(CallerError, match="1 is the next"):
        follower.apply(first, None)
    assert follower.apply(second, None) == [AbortRoom(KEY, "why")]
    assert not len(follower)


@pytest.mark.parametrize(
    ("mine", "name"),
    [
        ((15, 4, 3, [SPEC]), "num_pages is 15 on this rank, 16 on rank 0"),
        ((16, 8, 3, [SPEC]), "page_size is 8"),
        ((16, 4, 0, [SPEC]), "slots is 0"),
        ((16, 4, 3, [SPEC._replace(num_pages=7)]), "windows is"),
    ],
)
def test_ranks_of_other_sizes_are_refused_by_name(mine: Any, name: str) -> None:
    _, log, _ = leading()
    with pytest.raises(ConfigError, match=name):
        PrefillFollower(*mine).apply(log.take([]), None)


# --- messages that are none of rank 0's ----------------------------------------------------------


def _damaged(path: tuple[int, ...], value: Any) -> bytes:
    """The first message of rank 0, of a request and a chunk, with another value in one place."""
    scheduler, log, _ = leading()
    req = begin(scheduler, "a", list(range(11)), 1)
    scheduler.take_commands()
    scheduler.send_chunk(req, 8, 0.0)
    for command in scheduler.take_commands():
        log.command(command)
    message = msgspec.msgpack.decode(log.take([req]))
    place = message
    for at in path[:-1]:
        place = place[at]
    place[path[-1]] = value
    return msgspec.msgpack.encode(message)


_IDS = [
    (b"123", "3 bytes of page ids"),
    (b"\x10\0\0\0", "page 16 is not"),
    (b"\xff" * 4, "page -1"),
]
_ROWS = [
    ([], "0 window groups of 1"),
    ([[0, b"\x14\0\0\0"]], "page 20 is not"),
    ([[-1, b""]], ">= 0"),
]


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        *(((1, 0, 3), ids, why) for ids, why in _IDS),
        *(((2, 0, 5), ids, why) for ids, why in [*_IDS, (None, "no pages of request 'a'")]),
        *(((1, 0, 7), rows, why) for rows, why in _ROWS),
        *(((2, 0, 6), rows, why) for rows, why in _ROWS),
        ((1, 0, 6), 3, "slot 3, there are 3"),
        ((2, 0, 3), 3, "slot 3, there are 3"),
        ((2, 0, 3), -2, ">= -1"),
        ((1, 0, 2), -1, ">= 0"),
        ((2, 0, 2), 2**31, "<= 2147483647"),
        ((2, 0, 4), [2**64 - 1], "<= 2147483647"),
        ((0,), 2**64 - 1, "0 is the next"),
        ((1, 0, 0), "open", "kind|tag|Invalid"),
    ],
)
def test_a_message_with_one_field_out_of_range_changes_nothing(
    path: tuple[int, ...], value: Any, why: str
) -> None:
    *_, follower = leading()
    with pytest.raises(CallerError, match=why):
        follower.apply(_damaged(path, value), None)
    assert (len(follower), follower.num_batches) == (0, 0)
    # The same place with what belongs there: the message as it was.
    follower.apply(_damaged((0,), 0), None)
    assert (len(follower), follower.num_batches) == (1, 1)


@given(st.data())
def test_a_damaged_message_is_taken_whole_or_refused_whole(data: st.DataObject) -> None:
    raw = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    *_, follower = leading()
    try:
        commands = follower.apply(bytes(raw), None)
    except CallerError:
        assert (len(follower), follower.num_batches) == (0, 0)
        return
    for chunk in commands:
        if isinstance(chunk, SendChunk):
            assert all(0 <= page < 16 for page in chunk.src_pages.tolist())


_GOOD = _damaged((0,), 0)


def test_a_stop_that_comes_while_it_computes_is_told() -> None:
    """Another request waits for what both begin with, and nothing else has changed."""
    scheduler, log, follower = leading()
    first = begin(scheduler, "a", list(range(11)), 1)
    follower.apply(log.take(scheduler.requests.values()), None)
    assert follower.request("a").stops == [8]
    second = scheduler.add(Request("b", [*range(4), 50, 51], room=2, decode="decode-0"), 0.0)
    scheduler.room_bootstrapped(second.room_key, 0, "decode-0", 0.0)
    assert scheduler.pop_bootstrapped(0.0) == [], "it waits for the other"
    assert first.stops == [4, 8]
    follower.apply(log.take(scheduler.requests.values()), None)
    assert follower.request("a").stops == [4, 8]


def test_what_has_not_changed_is_not_told_again() -> None:
    scheduler, log, follower = leading()
    reqs = [begin(scheduler, f"r{room}", [room] * 11, room) for room in (1, 2)]

    def told() -> list[Any]:
        raw = log.take(scheduler.requests.values())
        follower.apply(raw, None)
        assert all(map(follower.is_like, reqs))
        return list(msgspec.msgpack.decode(raw)[2])

    assert [view[0] for view in told()] == ["r1", "r2"]
    assert told() == []
    # A chunk moves its window on, and its stops: not its pages.
    scheduler.send_chunk(reqs[0], 8, 0.0)
    ((rid, *_, pages, windows),) = told()
    assert (rid, pages, len(windows)) == ("r1", None, 1)
    # So does one that ends at no stop.
    reqs.append(longer := begin(scheduler, "longer", [7] * 15, 4))
    told()
    for end, moves in ((8, False), (11, True)):
        scheduler.send_chunk(longer, end, 0.0)
        assert longer.stops == [12]
        assert [view[0] for view in told()] == ["longer"] * moves
    # Where another request has computed the same pages meanwhile, the row gets those.
    twin = scheduler.add(Request("twin", [2] * 11, room=3, decode="decode-0"), 0.0)
    scheduler.room_bootstrapped(twin.room_key, 0, "decode-0", 0.0)
    assert scheduler.pop_bootstrapped(0.0) == [], "it waits for the other"
    assert scheduler.pop_bootstrapped(9.0) == [twin], "for no longer than that"
    reqs.append(twin)
    told()
    for req in (reqs[1], twin):
        scheduler.send_chunk(req, 8, 9.0)
    scheduler.pop_bootstrapped(9.0)
    assert twin.pages[0] == reqs[1].pages[0]
    assert [(view[0], view[5] is None) for view in told()] == [("r2", True), ("twin", False)]


def test_an_id_that_comes_again_in_the_same_row_has_its_pages_told() -> None:
    scheduler, log = PrefillScheduler(PageManager(16, 4, 4)), PrefillLog()
    log.settings = settings_of(16, 4, 0, [])
    follower = PrefillFollower(16, 4, 0, [])
    before = begin(scheduler, "again", [1] * 11, 1)
    begun_in = (before.row, before.pages.tolist())
    other = begin(scheduler, "other", [2] * 11, 2)
    scheduler.send_chunk(other, 8, 0.0)
    follower.apply(log.take(scheduler.requests.values()), None)
    scheduler.abort("again", 0.0, PeerLostError("gone"))
    assert scheduler.pop_failed(0.0) == [before]
    scheduler.source_free(before.room_key, 0.0)
    after = begin(scheduler, "again", [2] * 8 + [3] * 3, 3)
    assert after.row == begun_in[0]
    assert len(after.pages) == len(begun_in[1])
    assert after.pages.tolist() != begun_in[1]
    follower.apply(log.take(scheduler.requests.values()), None)
    assert follower.is_like(after)
