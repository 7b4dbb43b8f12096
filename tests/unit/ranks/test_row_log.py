"""The rows of rank 0 on the ranks that follow its log: equal at every look, of one process or of
several; what is damaged, left out or of other sizes changes nothing. What the ranks above 0 say:
test_leader.py. Whole workers of several ranks: tests/unit/control/test_engine_sim.py."""

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import PageOptions
from prefixkv.errors import CallerError, ConfigError, InternalError, OutOfPagesError, RequestError
from prefixkv.pages.groups import GroupSpec, GroupStart
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.paging import pages_for
from prefixkv.prefill.request import PrefillRequest
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    Fence,
    GroupChunk,
    MeetPrefill,
    MoveWeights,
    OfferRoom,
    RefuseRoom,
    SendChunk,
)
from prefixkv.protocol.events import Bootstrapped, HostCopy, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.ranks.row_log import RankLog, RankSizes, RowFollower
from prefixkv.request import Request
from tests.support.schedulers import prefill_scheduler

PAGE_SIZE = 4
ROWS = 4
KEY = RoomKey(7, 1, "decode-0")
SPEC = GroupSpec("last", 6, 20, 8)
DECODE = RankSizes("decode", 16, PAGE_SIZE, ROWS, ROWS, 8, (SPEC,))
PREFILL = RankSizes("prefill", 16, PAGE_SIZE, ROWS, 3, 0, (SPEC,))


class Ranks:
    """Rank 0's pages, and a decode rank that follows them."""

    def __init__(self, sizes: RankSizes = DECODE, num_pages: int = 16) -> None:
        self.log = RankLog()
        self.log.sizes = sizes._replace(num_pages=num_pages)
        self.pages = PageManager(
            num_pages,
            PAGE_SIZE,
            ROWS,
            options=PageOptions(num_slots=sizes.num_slots, windows=sizes.windows, spare_rows=1),
        )
        self.follower = RowFollower(self.log.sizes)

    def open(self, tokens: Any, num_pages: int) -> tuple[RequestPages, RadixKey]:
        """A request of `num_pages` in all, none of them cached by now if others have its prompt."""
        key = RadixKey(tokens)
        match = self.pages.match(key)
        assert match is not None
        start = GroupStart(match.prefix_len, num_pages) if self.pages.groups else None
        num_new = num_pages - match.prefix_len // PAGE_SIZE
        return self.pages.open(match, num_new, 1.0, start=start), key

    def follow(self) -> None:
        self.follower.apply(self.log.take(self.pages))
        assert self.follower.is_like(self.pages)


def rows_of(pages: PageManager) -> list[list[int]]:
    lengths = pages.table.lengths[:ROWS].tolist()
    return [pages.table.pages(row).tolist() if lengths[row] >= 0 else [] for row in range(ROWS)]


def test_a_follower_has_the_array_that_its_kernels_read() -> None:
    ranks = Ranks()
    one, key = ranks.open(range(8), 3)
    ranks.open(range(50, 59), 4)
    ranks.follow()
    table = ranks.follower.page_table
    assert table.shape == (ROWS, 16)
    assert np.array_equal(table, ranks.pages.table.array[:ROWS])
    assert ranks.follower.pages(one.row).tolist() == ranks.pages.pages(one).tolist() != []
    assert ranks.follower.state_slot(one.row) == ranks.pages.state_slot(one.row) >= 0
    mine, its = (
        ranks.pages.windows.named("last").row(one.row),
        ranks.follower.window_pages(one.row, "last"),
    )
    assert (its.first_page, its.ids.tolist()) == (mine.first_page, mine.ids.tolist())
    with pytest.raises(ValueError, match="read-only"):
        ranks.follower.pages(one.row)[0] = 5
    ranks.pages.cache_finished(one, key, 2.0)
    ranks.follow()
    assert ranks.follower.page_table is table
    assert len(ranks.follower) == 1
    for row in (0, 3, -1, 4, "0", None, [1]):
        with pytest.raises(CallerError, match="has no request on this rank"):
            ranks.follower.pages(row)  # type: ignore[arg-type]
    with pytest.raises(CallerError, match="no window group"):
        ranks.follower.window_pages(1, "draft")


def test_a_row_that_is_overwritten_is_told() -> None:
    """Two requests compute the same prompt, and the second one's pages are replaced by the first
    one's: its row has as many pages as before."""
    ranks = Ranks()
    (one, key), (two, twin) = ranks.open(range(11), 3), ranks.open(range(11), 3)
    ranks.follow()
    ranks.pages.cache_unfinished(one, key, 2.0)
    ranks.follow()
    before = ranks.pages.pages(two).tolist()
    ranks.pages.cache_unfinished(two, twin, 3.0)
    after = ranks.pages.pages(two).tolist()
    assert len(after) == len(before)
    assert after[:2] == ranks.pages.pages(one).tolist()[:2] != before[:2]
    ranks.follow()
    assert ranks.follower.pages(two.row).tolist() == after
    # So also where it has grown in the same pass.
    three, other = ranks.open(range(100, 108), 2)
    four, again = ranks.open(range(100, 108), 2)
    ranks.follow()
    for pages, of_it in ((three, other), (four, again)):
        ranks.pages.cache_unfinished(pages, of_it, 4.0)
    ranks.pages.grow_many([four], 5.0)
    ranks.follow()
    assert ranks.follower.pages(four.row).tolist() == ranks.pages.pages(four).tolist()


def test_what_has_not_changed_is_not_told_again() -> None:
    ranks = Ranks()
    for begin in (0, 50):
        ranks.open(range(begin, begin + 9), 3)
    first = msgspec.msgpack.decode(ranks.log.take(ranks.pages))
    assert [row[0] for row in first[1]] == [0, 1]
    idle = ranks.log.take(ranks.pages)
    assert len(idle) < 20
    assert msgspec.msgpack.decode(idle)[1] == []
    grown, _ = ranks.open(range(90, 94), 1)
    ranks.log.take(ranks.pages)
    ranks.pages.grow_many([grown], 2.0)
    ((row, start, ids, groups),) = msgspec.msgpack.decode(ranks.log.take(ranks.pages))[1]
    assert (row, start, len(ids), groups) == (grown.row, 1, 4, None)
    assert not ranks.log.has_news(ranks.pages)
    assert RankLog().has_news(PageManager(8, PAGE_SIZE, 1)), "before the first message"
    ranks.pages.slide(grown, 9)
    assert ranks.log.has_news(ranks.pages)
    ((row, start, ids, groups),) = msgspec.msgpack.decode(ranks.log.take(ranks.pages))[1]
    assert (row, start, len(ids), len(groups)) == (grown.row, 2, 0, 2)


def test_pages_that_are_loaded_for_a_request_are_no_row_of_another_rank() -> None:
    ranks = Ranks()
    key = RadixKey(range(8))
    load = ranks.pages.open(ranks.pages.match(key), 2, 0.0, is_load=True)
    assert load.row >= ranks.pages.table.max_requests
    ranks.follow()
    assert not len(ranks.follower)


class Storm:
    """Requests that begin alike, by chance: opened, grown, cached, moved on, ended every way."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.has_windows = bool(seed % 2)
        sizes = DECODE if self.has_windows else DECODE._replace(windows=(), num_slots=0)
        self.ranks = Ranks(sizes, num_pages=24)
        self.live: list[tuple[RequestPages, RadixKey]] = []
        self.done = Counter[str]()

    def tokens(self, most: int) -> list[int]:
        return [self.chance.randint(0, 1) for _ in range(most)]

    def step(self) -> None:
        what = self.chance.choice(
            ["open", "open", "open", "grow", "cache", "cache", "slide", "end", "end", "flush"]
        )
        with suppress(OutOfPagesError):
            if what == "open" and self.ranks.pages.can_open:
                tokens = [1] * 4 + self.tokens(self.chance.randint(1, 12))
                self.live.append(self.ranks.open(tokens, pages_for(len(tokens), PAGE_SIZE)))
            elif what == "flush" and not self.chance.randrange(4):
                self.ranks.pages.flush()
            elif self.live and what not in ("open", "flush"):
                self._move(what, *self.chance.choice(self.live))
            else:
                return
            self.done[what] += 1

    def _move(self, what: str, pages: RequestPages, key: RadixKey) -> None:
        all_pages = self.ranks.pages
        match what:
            case "grow":
                all_pages.grow_many([pages], 2.0)
                key.extend(self.tokens(PAGE_SIZE))
            case "cache":
                all_pages.cache_unfinished(pages, key, 3.0)
            case "slide" if self.has_windows:
                with suppress(CallerError):  # it has grown past what it was opened for
                    all_pages.slide(pages, len(key))
            case "end":
                self.live.remove((pages, key))
                room = RoomKey(self.done.total(), 0)
                how = self.chance.randrange(3)
                if how == 0:
                    all_pages.drop(pages)
                elif how == 1:
                    all_pages.cache_finished(pages, key, 4.0)
                else:
                    all_pages.hold(pages, room)
                    all_pages.release(room)


@pytest.mark.parametrize("seed", range(12))
def test_after_any_pass_of_a_storm_the_rows_are_equal(seed: int) -> None:
    storm = Storm(seed)
    ranks, unread = storm.ranks, list[tuple[bytes, list[list[int]]]]()
    for _ in range(150):
        for _ in range(storm.chance.choice([1, 1, 2, 5])):
            storm.step()
        unread.append((ranks.log.take(ranks.pages), rows_of(ranks.pages)))
        # It applies late, and then has what rank 0 had.
        while unread and storm.chance.randrange(3):
            raw, rows = unread.pop(0)
            ranks.follower.apply(raw)
            found = [
                [page for page in row if page >= 0] for row in ranks.follower.page_table.tolist()
            ]
            assert found == rows
    for raw, _ in unread:
        ranks.follower.apply(raw)
    ranks.follow()
    assert set(storm.done) >= {"open", "grow", "cache", "end"}, storm.done


# --- what is carried out --------------------------------------------------------------------------


class Ready(msgspec.Struct):
    """An engine's event, of a class that msgspec can encode, as dataclasses and dicts are."""

    def query(self) -> bool:
        return True


def test_all_commands_of_schedulers_travel_in_order_and_no_other() -> None:
    of_both = [AbortRoom(KEY, "why"), MoveWeights("v2", ends_waiting=False),
               Fence(PeerId("decode-0", 3), proved=True)]  # fmt: skip
    of_decode = [RefuseRoom(KEY, 5, "tcp://p:1", "no", b"d" * 16), *of_both]
    ranks = Ranks()
    for command in of_decode:
        ranks.log.command(command)
    assert ranks.follower.apply(ranks.log.take(ranks.pages)).commands == of_decode
    of_prefill = [AddRoom(KEY, 9, b"d" * 16), DeclineRoom(KEY, "no", b"d" * 16), *of_both]
    scheduler, log, follower = leading()
    for sent in of_prefill:
        log.command(sent)
    window = GroupChunk(1, np.array([4, 2], np.int32))
    ids = np.array([5], np.int32)
    groups = window, GroupChunk(0, np.array([2], np.int32))
    log.command(SendChunk(KEY, 3, ids, True, b"a", Ready(), groups=groups))
    assert log.has_news(scheduler.pages)
    *others, chunk = follower.apply(log.take(scheduler.pages)).commands
    assert others == of_prefill
    assert isinstance(chunk, SendChunk)
    assert (chunk.key, chunk.first_page, chunk.last, chunk.aux) == (KEY, 3, True, b"a")
    assert (chunk.ready, chunk.clip) == (None, False)
    assert [(one.first, one.src_pages.tolist()) for one in chunk.groups] == [(1, [4, 2]), (0, [2])]
    assert not log.has_news(scheduler.pages)
    for other in (OfferRoom(KEY, 9, b"d" * 16, 1.0), MeetPrefill("tcp://p:1")):
        with pytest.raises(InternalError, match=type(other).__name__):
            log.command(other)


@pytest.mark.parametrize(
    ("host", "device", "why"),
    [
        ([8], [1], "page 8 is not"),
        ([0], [16], "page 16 is not"),
        ([0, 1], [1], "a copy of 2 to 1 pages"),
        ([], [], "a copy of 0 to 0 pages"),
    ],
)
def test_copies_of_pages_that_there_are_not_change_nothing(
    host: list[int], device: list[int], why: str
) -> None:
    ranks = Ranks()
    ranks.log.copy(HostCopy(1, False, np.array([3, 7]), np.array([2, 15])))
    (good,) = ranks.follower.apply(ranks.log.take(ranks.pages)).copies
    assert (good.host_pages.tolist(), good.device_pages.tolist()) == ([3, 7], [2, 15])
    ranks.open(range(8), 2)
    ranks.log.copy(HostCopy(2, True, np.array(host, np.int32), np.array(device, np.int32)))
    with pytest.raises(CallerError, match=why):
        ranks.follower.apply(ranks.log.take(ranks.pages))
    assert (ranks.follower.num_batches, len(ranks.follower)) == (1, 0)
    assert (ranks.follower.page_table == -1).all()


# --- requests of prefill --------------------------------------------------------------------------


def leading() -> tuple[PrefillScheduler, RankLog, RowFollower]:
    pages = PageManager(16, PAGE_SIZE, ROWS, options=PageOptions(num_saved=2, windows=[SPEC]))
    log = RankLog()
    log.sizes = PREFILL
    return prefill_scheduler(pages), log, RowFollower(PREFILL)


def begin(scheduler: PrefillScheduler, rid: str, tokens: list[int], room: int) -> PrefillRequest:
    req = scheduler.add(Request(rid, tokens, room=room, decode="decode-0"))
    scheduler.hear(Bootstrapped(req.room_key, PeerId("decode-0", 1), 0), 0.0)
    assert scheduler.pop_bootstrapped() == [req]
    return req


def is_like(follower: RowFollower, scheduler: PrefillScheduler) -> bool:
    return follower.is_like(scheduler.pages, scheduler.requests.values())


def take(log: RankLog, scheduler: PrefillScheduler) -> bytes:
    return log.take(scheduler.pages, scheduler.requests.values())


def test_a_rank_that_follows_knows_what_its_engine_needs() -> None:
    scheduler, log, follower = leading()

    def follow(ready: Any = None) -> list[Any]:
        for command in scheduler.take_commands():
            log.command(command)
        return follower.apply(take(log, scheduler), ready).commands

    waiting = scheduler.add(Request("w", [1] * 9, room=9, decode="decode-0"))
    assert follow() == [AddRoom(waiting.room_key, 9, waiting.request.digest)]
    assert not len(follower), "it has no pages yet"
    a = begin(scheduler, "a", list(range(11)), 1)
    follow()
    assert is_like(follower, scheduler)
    # A chunk up to a stop: the window's pages before it are kept, and the row has others.
    ready = object()
    scheduler.send_chunk(a, 8)
    assert not is_like(follower, scheduler), "it has slid"
    (chunk,) = follow(ready)
    assert isinstance(chunk, SendChunk)
    assert chunk.ready is ready
    assert chunk.src_pages.tolist() == a.pages[:2].tolist()
    assert is_like(follower, scheduler)
    scheduler.send_chunk(a, 11, last=True, aux=b"7")
    (chunk,) = follow()
    first, ids = a.window_pages("last")
    assert (chunk.last, chunk.aux, chunk.ready) == (True, b"7", None)
    assert [one.src_pages.tolist() for one in chunk.groups] == [ids[2 - first : 3 - first].tolist()]
    scheduler.pop_bootstrapped()
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
    scheduler.hear(RoomEnded(a.room_key, KVPoll.SUCCESS, None), 0.0)
    scheduler.hear(SourceFree(a.room_key), 0.0)
    scheduler.pop_sent()
    follow()
    for rid in ("a", "w", 7):
        with pytest.raises(RequestError, match="is not here"):
            follower.request(rid)  # type: ignore[arg-type]
    assert len(follower) == 1


def test_a_stop_that_comes_while_it_computes_is_told() -> None:
    """Another request waits for what both begin with, and nothing else has changed."""
    scheduler, log, follower = leading()
    first = begin(scheduler, "a", list(range(11)), 1)
    follower.apply(take(log, scheduler))
    assert follower.request("a").stops == [8]
    second = scheduler.add(Request("b", [*range(4), 50, 51], room=2, decode="decode-0"))
    scheduler.hear(Bootstrapped(second.room_key, PeerId("decode-0", 1), 0), 0.0)
    assert scheduler.pop_bootstrapped() == [], "it waits for the other"
    assert first.stops == [4, 8]
    follower.apply(take(log, scheduler))
    assert follower.request("a").stops == [4, 8]


def test_an_id_that_comes_again_in_the_same_row_has_its_pages_told() -> None:
    sizes = PREFILL._replace(num_slots=0, windows=())
    scheduler, log = prefill_scheduler(PageManager(16, PAGE_SIZE, ROWS)), RankLog()
    log.sizes, follower = sizes, RowFollower(sizes)
    before = begin(scheduler, "again", [1] * 11, 1)
    begun_in = (before.row, before.pages.tolist())
    other = begin(scheduler, "other", [2] * 11, 2)
    scheduler.send_chunk(other, 8)
    follower.apply(take(log, scheduler))
    scheduler.abort("again")
    assert scheduler.pop_failed() == [before]
    scheduler.hear(SourceFree(before.room_key), 0.0)
    after = begin(scheduler, "again", [2] * 8 + [3] * 3, 3)
    assert after.row == begun_in[0]
    assert len(after.pages) == len(begun_in[1])
    assert after.pages.tolist() != begun_in[1]
    follower.apply(take(log, scheduler))
    assert is_like(follower, scheduler)
    assert follower.request("again").pages.tolist() == after.pages.tolist()


# --- messages that are none of rank 0's, or not the next ------------------------------------------


def test_messages_are_read_once_each_and_in_order() -> None:
    """A rank that starts late, or whose log has a gap, is refused by name."""
    scheduler, log, follower = leading()
    begin(scheduler, "a", list(range(11)), 1)
    first = take(log, scheduler)
    log.command(AbortRoom(KEY, "why"))
    second = log.take(scheduler.pages)
    for bad, why in [
        (second, "message 1 of rank 0 came where 0 is the next"),
        (b"junk", "no message of rank 0"),
        (b"", "no message of rank 0"),
        (None, "bytes are needed"),
    ]:
        with pytest.raises(CallerError, match=why):
            follower.apply(bad)  # type: ignore[arg-type]
    assert (len(follower), follower.num_batches) == (0, 0)
    assert follower.apply(first).commands == []
    assert is_like(follower, scheduler)
    with pytest.raises(CallerError, match="message 0 of rank 0 came where 1 is the next"):
        follower.apply(first)
    assert follower.apply(second).commands == [AbortRoom(KEY, "why")]
    assert len(follower) == 1
    with pytest.raises(RequestError):
        follower.request("a")


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"side": "decode"}, "side is decode on this rank, prefill on rank 0"),
        ({"num_pages": 15}, "num_pages is 15 on this rank, 16 on rank 0"),
        ({"page_size": 8}, "page_size is 8"),
        ({"max_running": 5}, "max_running is 5"),
        ({"num_slots": 0}, "num_slots is 0"),
        ({"host_pages": 9}, "host_pages is 9 on this rank, 0 on rank 0"),
        ({"windows": (SPEC._replace(num_pages=7),)}, "windows is"),
        ({"windows": ()}, "windows is"),
    ],
)
def test_ranks_of_other_sizes_are_refused_by_name(other: dict[str, Any], name: str) -> None:
    scheduler, log, _ = leading()
    follower = RowFollower(PREFILL._replace(**other))
    with pytest.raises(ConfigError, match=name):
        follower.apply(log.take(scheduler.pages))
    assert follower.num_batches == 0


def _damaged(path: tuple[int, ...], value: Any) -> bytes:
    """The first message of rank 0, of a request and a chunk, with another value in one place."""
    scheduler, log, _ = leading()
    begin(scheduler, "a", list(range(11)), 1)
    scheduler.take_commands()
    scheduler.send_chunk(*scheduler.requests.values(), 8)
    for command in scheduler.take_commands():
        log.command(command)
    message = msgspec.msgpack.decode(take(log, scheduler))
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
_GROUPS = [
    ([], "0 groups of 2"),
    ([[0, b""]] * 3, "3 groups of 2"),
    ([[0, b"\x14\0\0\0"]], "page 20 is not"),
    ([[0, b""], [0, b"\x03\0\0\0"]], r"page 3 is not in \[0, 3\)"),  # slots
    ([[-1, b""]], ">= 0"),
]


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        *(((1, 0, 2), ids, why) for ids, why in [*_IDS, (bytes(68), "17 pages in row 0")]),
        *(((5, 0, 3), ids, why) for ids, why in _IDS),
        *(((1, 0, 3), rows, why) for rows, why in [*_GROUPS, (None, "new of row 0")]),
        *(((5, 0, 8), rows, why) for rows, why in _GROUPS),
        ((1, 0, 0), 4, "pages in row 4: there are 4"),
        ((1, 0, 1), 1, "new of row 0"),
        ((3, 0, 4), 3, "slot 3, there are 3"),
        ((3, 0, 4), -2, ">= -1"),
        ((5, 0, 2), -1, ">= 0"),
        ((5, 0, 6), bytes(4), "does not travel"),
        ((3, 0, 2), 2**31, "<= 2147483647"),
        ((3, 0, 5), [2**64 - 1], "<= 2147483647"),
        ((2,), [-1], ">= 0"),
        ((0,), 2**64 - 1, "0 is the next"),
        ((5, 0, 0), "open", "kind|tag|Invalid"),
    ],
)
def test_a_message_with_one_field_out_of_range_changes_nothing(
    path: tuple[int, ...], value: Any, why: str
) -> None:
    *_, follower = leading()
    with pytest.raises(CallerError, match=why):
        follower.apply(_damaged(path, value))
    assert (len(follower), follower.num_batches) == (0, 0)
    assert (follower.page_table == -1).all()
    # The same place with what belongs there: the message as it was.
    follower.apply(_damaged((0,), 0))
    assert (len(follower), follower.num_batches) == (1, 1)
