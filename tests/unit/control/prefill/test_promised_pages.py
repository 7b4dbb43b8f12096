"""A decode worker promises no more pages at once than its pool has, and one key is one worker."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.config import CurveConfig
from prefixkv.memory.kv_layout import Slab
from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    HelloReply,
    Outcome,
    Promise,
    PromiseAck,
    Topology,
)
from prefixkv.transport.base import WriteDrained
from tests.unit.control.mesh_wire import Readers, bodies
from tests.unit.control.mesh_wire import hello as rank_hello
from tests.unit.control.wire import (
    HELLO,
    LAYOUT,
    NUM_PAGES,
    PAGE_SIZE,
    SENT,
    TIMING,
    DecodePeer,
    add_room,
    ids,
    kinds,
    newer,
    of,
)
from tests.unit.protocol.rooms import PROMPT

OTHER = PeerId("decode-1", 1)
PARKED = dataclasses.replace(TIMING, max_parked_per_peer=10_000)
MIB = 1 << 20


def whole(room: int, first_page: int, num_pages: int, ticket: int = 0) -> Promise:
    """That many pages from `first_page` on."""
    pages = np.arange(first_page, first_page + num_pages, dtype="<i4").tobytes()
    return Promise(room, 0, num_pages * PAGE_SIZE, 0, pages, ticket, digest=PROMPT)


def error_of(effects: list[Any]) -> str:
    [outcome] = effects
    assert isinstance(outcome, Outcome)
    assert (outcome.ok, outcome.drained) == (False, True)
    return outcome.error


# --- pages ----------------------------------------------------------------------------------------


def test_a_peers_undrained_rooms_have_no_more_pages_than_its_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = DecodePeer(PARKED).known()
    peer.say(HELLO, OTHER)
    assert kinds(peer.say(whole(1, 0, 10))) == ["PromiseAck"]
    with monkeypatch.context() as patch:
        patch.setattr(Promise, "page_ids", lambda _: pytest.fail("an array was built"))
        error = error_of(peer.say(whole(2, 0, 7)))
        assert "10 pages are promised in rooms that are not drained and 7 more are" in error
        assert f"the pool has {NUM_PAGES}" in error
    assert peer.control.counters["dropped: OverpromisedError"] == 1
    assert kinds(peer.say(whole(2, 10, 6, ticket=1))) == ["PromiseAck"], "the rest of it is"
    assert kinds(peer.say(whole(1, 0, 10))) == ["PromiseAck"], "said again"
    assert kinds(peer.say(whole(2, 0, 16), OTHER)) == ["PromiseAck"], "each its own pool"


@pytest.mark.parametrize("proved", [True, False])
@pytest.mark.parametrize("by_decode", [True, False])
def test_pages_come_back_with_the_last_write_and_not_with_the_outcome(
    by_decode: bool, proved: bool
) -> None:
    peer = DecodePeer(PARKED).bootstrapped(whole(7, 0, 16))
    [post] = peer.chunk(0, range(16), last=True)
    word = Abort(*SENT.numbers, "enough")
    if by_decode:
        peer.say(word)
    else:
        peer.on(AbortRoom(SENT, "enough"))
    assert "16 pages" in error_of(peer.say(whole(8, 0, 1)))
    said = peer.ended(post.job_id, None if proved else OSError("lost"), drained=proved)
    if not by_decode:
        said += peer.say(word)
    if not proved:
        assert "16 pages" in error_of(peer.say(whole(8, 0, 1, ticket=1))), "it may still land"
        said = peer.on(WriteDrained(post.job_id))
    [drained] = of(said, Drained)
    assert drained.settle is not proved
    assert kinds(peer.say(whole(8, 0, 16, ticket=2))) == ["PromiseAck"]


def test_pages_of_a_room_that_is_not_acknowledged_may_be_promised_again() -> None:
    """Decode has its outcome, and not said so yet."""
    peer = DecodePeer(PARKED).bootstrapped(whole(7, 0, 16))
    [post] = peer.chunk(0, range(16), last=True)
    assert of(peer.ended(post.job_id), Outcome)
    assert peer.say(whole(8, 0, 16)) == [PromiseAck(8, 0, 0)]
    assert len(list(peer.control.rooms())) == 2


def test_the_next_use_of_a_number_stands_in_the_place_of_the_one_before() -> None:
    peer = DecodePeer(PARKED).bootstrapped(whole(7, 0, 16, ticket=1))
    [post] = peer.chunk(0, range(16), last=True)
    peer.ended(post.job_id)
    assert peer.say(whole(7, 0, 16, ticket=2)) == [PromiseAck(7, 0, 0, 2)]
    peer.say(Abort(7, 0, "no", 2))
    assert peer.say(whole(9, 0, 16)) == [PromiseAck(9, 0, 0)]


def test_a_promise_for_a_page_size_a_thousand_times_ours_is_a_refusal() -> None:
    """As of page 2^30, whose first unit page no int32 names."""
    topology = Topology(1024 * PAGE_SIZE)
    big = msgspec.structs.replace(
        LAYOUT, page_size=1024 * PAGE_SIZE, num_pages=2**20,
        slabs=tuple(Slab(base, 32768, 8, 8) for base in (2**40, 2**41)), regions=((2**40, 2**42),),
    )  # fmt: skip
    hello = msgspec.structs.replace(HELLO, topology=topology, layout=big)
    peer = DecodePeer().known()
    assert not of(peer.say(hello, OTHER), HelloReply)[0].refused
    fill_len = 1024 * PAGE_SIZE
    for page in (2**30, 2**31 - 1, 2**20):
        said = peer.say(Promise(1, 0, fill_len, 0, ids([page]), digest=PROMPT), OTHER)
        assert f"page ids {page}" in error_of(said)
    too_big = msgspec.structs.replace(big, num_pages=2**30)
    changed = msgspec.structs.replace(hello, layout=too_big)
    assert of(peer.say(changed, newer(OTHER)), HelloReply)[0].refused
    last = Promise(1, 0, fill_len, 0, ids([2**20 - 1]), 1, digest=PROMPT)
    assert kinds(peer.say(last, OTHER)) == ["PromiseAck"]
    theirs = RoomKey(1, 0, OTHER.name)
    peer.on(add_room(theirs, fill_len))
    [post] = peer.chunk(0, range(1024), last=True, key=theirs)
    assert post.dst_pages[-1] == 2**30 - 1


# --- names ----------------------------------------------------------------------------------------


def test_a_thousand_names_under_one_key_keep_no_other_out() -> None:
    curve = CurveConfig("p" * 40, "s" * 40, allowed_clients={"key a": "a", "key b": "b"})
    peer = Readers(tp=1, timing=dataclasses.replace(TIMING, curve=curve))  # of two workers
    for number in range(1024):
        for name in (f"x{number}", f"a/{number}", f"a/{number}/0"):
            peer.say(PeerId(name, 5), rank_hello(1, 0, PeerId(name, 5)), "key a")
    assert peer.control.peers(0.0) == {}
    for rank in range(1, 1024):
        me = PeerId("a" if rank == 1 else f"a/{rank - 1}", 5)
        peer.say(me, rank_hello(4, 0 if rank == 1 else (rank - 1) % 4, PeerId("a", 5)), "key a")
    assert len(peer.control.peers(0.0)) <= 4, "at most its mesh's ranks"
    b = PeerId("b", 5)
    said = peer.say(b, rank_hello(1, 0, b), "key b")
    assert [body.refused for _, body in bodies(said, HelloReply)] == [""]
