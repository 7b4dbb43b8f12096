"""Chunks with checksums: a chunk counts as landed once its pages were looked at, and each page has
to have one checksum."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.control.decode.looks import LookAt, PagesLookedAt
from prefixkv.errors import ChecksumError
from prefixkv.protocol.events import RoomEnded
from prefixkv.protocol.ids import ChunkTag, KVPoll
from prefixkv.protocol.messages import FailureCode
from prefixkv.transport.base import Arrived
from tests.unit.control.wire import HELLO, KEY, PREFILL, PrefillPeer, kinds
from tests.unit.protocol.rooms import promise

PROMISE = promise(fill_len=20, pages=(5, 3, 9, 7))
WHAT = "room 7 generation 0, chunk 0 of prefill rank 0"


class Looker(PrefillPeer):
    """Four pages are promised to a prefill rank that sends checksums."""

    def __init__(self) -> None:
        super().__init__(hello=msgspec.structs.replace(HELLO, checksums=("xxh3", "crc32")))
        self.reply = msgspec.structs.replace(self.reply, checksum="crc32")
        self.open(PROMISE)
        self.greet()
        self.take_said()

    def lands(self, chunk: int, first: int, *sums: int, **fields: Any) -> list[Any]:
        raw = np.array(sums, "<u4").tobytes()
        fields = {"num_pages": len(sums), **fields}
        tag = ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, chunk, first=first, sums=raw, **fields)
        return self.on(Arrived(tag.pack()))


def test_a_chunk_has_landed_when_its_pages_have_passed() -> None:
    peer = Looker()
    (first,) = peer.lands(0, 0, 11, 12, part=0, num_parts=1)
    assert peer.lands(1, 2, 13, part=0, num_parts=2, num_pages=2) == [], "the other part is to come"
    assert peer.lands(1, 2, 13, part=0, num_parts=2, num_pages=2) == []
    (second,) = peer.lands(1, 3, 14, part=1, num_parts=2, num_pages=2)
    assert kinds([first, second]) == ["LookAt"] * 2
    assert (first.plan.algorithm, first.what) == ("crc32", WHAT)
    spans = [*first.spans, *second.spans]
    assert [page for span in spans for page in span.pages.tolist()] == [5, 3, 9, 7]
    assert np.frombuffer(b"".join(span.sums for span in spans), "<u4").tolist() == [11, 12, 13, 14]
    outcome = msgspec.structs.replace(peer.outcome(num_pages=4), num_chunks=2, num_units=4)
    assert kinds(peer.say(outcome)) == ["OutcomeAck"], "its word is not enough"
    assert peer.on(PagesLookedAt(second.look_id)) == []
    assert peer.lands(0, 0, 11, 12) == [], "repeated"
    assert peer.on(PagesLookedAt(first.look_id)) == [RoomEnded(KEY, KVPoll.SUCCESS, aux=b"first")]
    assert peer.control.counters == {"checksums": 7}


def test_a_page_that_differs_ends_the_room_and_prefill_hears_why() -> None:
    peer = Looker()
    (look,) = peer.lands(0, 0, 11, 12, 13, 14)
    error = ChecksumError(f"{WHAT}: page 3 does not hold what was written")
    ended, abort = peer.on(PagesLookedAt(look.look_id, error))
    assert ended == RoomEnded(KEY, KVPoll.FAILED, error)
    assert (abort.code, abort.reason) == (FailureCode.CHECKSUM, str(error))
    assert peer.on(PagesLookedAt(look.look_id, error)) == []
    assert peer.control.counters["checksum_mismatches"] == 1


def test_a_look_that_ends_behind_its_room_changes_nothing() -> None:
    peer = Looker()
    (look,) = peer.lands(0, 0, 11, 12, 13, 14)
    peer.say(peer.outcome(ok=False))
    assert peer.poll() is None
    peer.open(msgspec.structs.replace(PROMISE, ticket=2))
    assert peer.on(PagesLookedAt(look.look_id, ChecksumError("late"))) == []
    assert peer.poll() is KVPoll.WAITING_FOR_INPUT


@pytest.mark.parametrize(
    ("tags", "why"),
    [
        ([(0, 0, 11, 12), (1, 0, 11, 12)], "pages 0 to 2 of group -1 come twice"),
        ([(0, 2, 11, 12, 13)], "units 2 to 5 of 4 pages"),
        ([(0, 0)], "0 checksums for 2 pages"),
        ([(0, 0, 11)], "1 checksums for 2 pages"),
        ([(0, 0, 11, 12, {"group": 0})], "out of range"),
    ],
    ids=str,
)
def test_each_page_has_one_checksum_of_each_writer(tags: list[Any], why: str) -> None:
    peer = Looker()
    for chunk, first, *sums in tags:
        more = sums.pop() if sums and isinstance(sums[-1], dict) else {}
        more = more if len(sums) > 1 else {"num_pages": 2, **more}
        out = peer.lands(chunk, first, *sums, **more)
    assert kinds(out) == ["RoomEnded", "Abort"]
    assert isinstance(out[0].error, ChecksumError)
    assert why in str(out[0].error)


def test_where_nothing_is_agreed_a_chunk_lands_at_once() -> None:
    peer = PrefillPeer().opened()
    peer.on(Arrived(ChunkTag(PREFILL.incarnation, *KEY.numbers, 0, 0, num_pages=2).pack()))
    assert peer.poll() is KVPoll.TRANSFERRING


def test_an_algorithm_that_was_not_offered_is_refused() -> None:
    peer = PrefillPeer()
    peer.open()
    refused = peer.greet(checksum="crc32")
    assert kinds(refused)[0] == "HelloRefused"
    assert "checksums" in refused[0].reason
    assert not any(isinstance(one, LookAt) for one in refused)
