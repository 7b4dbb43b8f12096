"""A prefill rank that several decode ranks read from: its machine, and the endpoint that checks who
speaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import count, permutations
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.config import CurveConfig
from prefixkv.control.prefill import AddPeer, LeaseGranted, RemovePeer
from prefixkv.errors import AbortedError, PeerLostError, TransferError, TransferTimeoutError
from prefixkv.memory.staging_area import BLOCK_BYTES, StagingArea
from prefixkv.protocol import sender_events as sm
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Fenced,
    HelloReply,
    LeaseGrant,
    Outcome,
    OutcomeAck,
    PromiseAck,
)
from prefixkv.protocol.sender_machine import (
    Bootstrapped,
    CancelWrite,
    PostWrite,
    RoomEnded,
    Say,
    SenderMachine,
    SourceFree,
)  # fmt: skip
from tests.control.mesh_wire import AREA, DIGEST, KEY, TIMING, Readers, bodies, hello, of, promise

A, B = PeerId("d/0", 5), PeerId("d/1", 5)
WHY = AbortedError("enough")


# --- the machine ----------------------------------------------------------------------------------


class Machine:
    """Two readers of four unit pages each, in a room of 16 tokens and pages of 4."""

    def __init__(
        self,
        page_size: int = 4,
        unit_tokens: int = 0,
        fold: int = 1,
        fill_len: int = 16,
        prefix: int = 0,
    ):
        self.machine = SenderMachine(KEY, 0, page_size, count(1).__next__, TIMING, 0.0)
        self.now_s = 0.0
        self.changes = {"unit_tokens": unit_tokens, "fold": fold}
        self.fill_len, self.prefix = fill_len, prefix
        unit = unit_tokens or page_size
        self.units = np.arange(40, 40 - (-(fill_len - prefix) // unit), dtype=np.int32)

    def on(self, event: Any) -> list[Any]:
        return self.machine.on(event, self.now_s)

    def promised(
        self, reader: int, ticket: int = 1, writes: bool = True, **changes: Any
    ) -> sm.Promised:
        fields = {
            "fill_len": self.fill_len,
            "prefix_len": self.prefix,
            "units": self.units,
            **self.changes,
            **changes,
        }
        return sm.Promised(
            peer=(A, B)[reader], ticket=ticket, reader=reader, readers=(0, 1), writes=writes,
            **fields
        )  # fmt: skip

    def begun(self, **changes: Any) -> Machine:
        self.on(sm.Added(self.fill_len))
        for reader in (0, 1):
            self.on(self.promised(reader, **changes))
        return self

    def chunk(self, first_page: int, src_pages: Sequence[int], last: bool = True) -> list[Any]:
        src = np.array(src_pages, np.int32)
        return self.on(sm.ChunkQueued(first_page, src, last, b"aux" if last else b"", None))


def said(actions: list[Any], kind: type) -> list[tuple[PeerId, Any]]:
    return [
        (action.peer, action.body)
        for action in actions
        if isinstance(action, Say) and isinstance(action.body, kind)
    ]


@pytest.mark.parametrize("order", list(permutations(["added", 0, 1])))
def test_a_room_begins_when_the_engine_and_all_readers_have_named_it(
    order: tuple[Any, ...],
) -> None:
    room = Machine()
    for i, who in enumerate(order):
        actions = room.on(sm.Added(16) if who == "added" else room.promised(who))
        assert of(actions, Bootstrapped) == ([Bootstrapped(KEY, A, 0)] if i == 2 else [])
        if who != "added":
            assert said(actions, PromiseAck) == [((A, B)[who], PromiseAck(*KEY, 0, 1))]


def test_each_reader_gets_every_chunk_and_the_outcome() -> None:
    room = Machine().begun()
    first, second = of(room.chunk(0, [5, 6], last=False), PostWrite)
    assert [(post.peer, post.chunk, post.dst_pages.tolist()) for post in (first, second)] == [
        (A, 0, [40, 41]), (B, 0, [40, 41])]  # fmt: skip
    third, fourth = of(room.chunk(2, [7, 8]), PostWrite)
    for post in (first, third, fourth):
        assert room.on(sm.WriteEnded(post.job_id)) == []
    actions = room.on(sm.WriteEnded(second.job_id))
    assert of(actions, RoomEnded) == [RoomEnded(KEY, KVPoll.SUCCESS)]
    assert [(to, body.ok, body.num_pages) for to, body in said(actions, Outcome)] == [
        (A, True, 4),
        (B, True, 4),
    ]
    room.on(sm.OutcomeAcked(1))
    assert not room.machine.over
    room.now_s += TIMING.resend_s
    assert [to for to, _ in said(room.on(sm.Tick()), Outcome)] == [A], "the other has answered"
    room.on(sm.OutcomeAcked(0))
    assert room.machine.over


def test_who_is_written_nothing_hears_the_outcome_all_the_same() -> None:
    room = Machine().begun(writes=False)
    actions = room.chunk(0, [5, 6, 7, 8])
    assert of(actions, PostWrite) == []
    assert [(to, body.num_pages) for to, body in said(actions, Outcome)] == [(A, 4), (B, 4)]


def test_an_abort_of_one_reader_fails_the_other_and_drains_for_both_with_the_last_write() -> None:
    room = Machine().begun()
    posts = of(room.chunk(0, [5, 6, 7, 8]), PostWrite)
    actions = room.on(sm.AbortSaid(A, "no", 1, 0, (0, 1)))
    assert of(actions, CancelWrite) == [CancelWrite(post.job_id) for post in posts]
    assert [(to, body.ok, body.drained) for to, body in said(actions, Outcome)] == [
        (B, False, False)
    ]
    assert said(actions, Drained) == []
    assert room.on(sm.AbortSaid(B, "no", 1, 1, (0, 1))) == []
    assert room.on(sm.WriteEnded(posts[1].job_id, WHY)) == []
    actions = room.on(sm.WriteEnded(posts[0].job_id))
    assert [to for to, _ in said(actions, Drained)] == [A, B]
    assert of(actions, SourceFree) == [SourceFree(KEY)]
    assert room.machine.over


def test_a_write_to_one_reader_that_proves_nothing_keeps_the_pages_of_both() -> None:
    room = Machine().begun()
    first, second = of(room.chunk(0, [5, 6, 7, 8]), PostWrite)
    room.on(sm.WriteEnded(first.job_id, WHY, False))
    for reader in (0, 1):
        room.on(sm.AbortSaid((A, B)[reader], "no", 1, reader, (0, 1)))
    assert said(room.on(sm.WriteEnded(second.job_id)), Drained) == []
    drained = said(room.on(sm.WriteDrained(first.job_id)), Drained)
    assert [(to, body.settle) for to, body in drained] == [(A, True), (B, True)]


def test_a_reader_that_is_gone_waits_for_nothing() -> None:
    room = Machine().begun()
    actions = room.on(sm.Fail(WHY, gone=1))
    assert [to for to, _ in said(actions, Outcome)] == [A]
    room.on(sm.OutcomeAcked(0))
    assert room.machine.over


def test_a_promise_after_the_failure_is_told_at_once() -> None:
    room = Machine()
    room.on(sm.Added(16))
    room.on(room.promised(0))
    room.on(sm.Fail(WHY))
    assert not room.machine.over
    room.on(sm.OutcomeAcked(0))
    assert not room.machine.over, "the other's promise is on its way"
    actions = room.on(room.promised(1))
    assert [(to, body.ok, body.drained) for to, body in said(actions, Outcome)] == [
        (B, False, True)
    ]
    room.on(sm.OutcomeAcked(1))
    assert room.machine.over


def test_a_reader_that_never_promises_is_not_waited_for_for_ever() -> None:
    room = Machine()
    room.on(sm.Added(16))
    room.on(room.promised(0))
    room.now_s = TIMING.bootstrap_timeout_s
    (ended,) = of(room.on(sm.Tick()), RoomEnded)
    assert isinstance(ended.error, TransferTimeoutError)
    room.now_s += TIMING.parked_timeout_s
    room.on(sm.Tick())
    assert room.machine.over


@pytest.mark.parametrize(
    "changes", [{"prefix_len": 4}, {"fill_len": 17}, {"ticket": 2}, {"units": np.arange(3)}]
)
def test_promises_that_are_not_alike_are_known_for_that(changes: dict[str, Any]) -> None:
    room = Machine()
    room.on(room.promised(0))
    assert room.machine.same_promise(room.promised(0))
    assert room.machine.same_promise(room.promised(1))
    assert not room.machine.same_promise(room.promised(1, **changes))


def test_smaller_pages_of_decode_of_which_it_has_some_of_our_first_page() -> None:
    """Ours hold 16 tokens, decode's 4; it has 20 tokens of 58: the rest of our page 1 and pages 2
    and 3."""
    room = Machine(page_size=16, unit_tokens=4, fill_len=58, prefix=20).begun()
    posts = of(room.chunk(1, [5, 6], last=False), PostWrite)
    assert posts[0].src_pages.tolist() == [21, 22, 23, 24, 25, 26, 27], (
        "page 5 without its first unit, and page 6"
    )
    assert (posts[0].first_unit, posts[0].dst_pages.tolist()) == (0, [40, 41, 42, 43, 44, 45, 46])
    posts = of(room.chunk(3, [9]), PostWrite)
    assert posts[0].src_pages.tolist() == [36, 37, 38], "10 tokens of 16: three units"
    assert (posts[0].first_unit, posts[0].dst_pages.tolist()) == (7, [47, 48, 49])


def test_larger_pages_of_decode_are_counted_in_its_own() -> None:
    """Ours hold 4 tokens, decode's 16; it has 16 of 58: 42 tokens are 11 units, three pages."""
    room = Machine(page_size=4, unit_tokens=4, fold=4, fill_len=58, prefix=16).begun()
    posts = of(room.chunk(4, range(11)), PostWrite)
    for post in posts:
        assert post.src_pages.tolist() == list(range(11))
        assert post.dst_pages.tolist() == list(range(40, 51))
        actions = room.on(sm.WriteEnded(post.job_id))
    assert [body.num_pages for _, body in said(actions, Outcome)] == [3, 3]


@pytest.mark.parametrize(
    ("first_page", "src_pages"),
    [(1, [5, 6, 7, 8]), (0, [5, 6]), (2, [5, 6]), (1, [5, 6]), (1, [5])],
    ids=["a page too many", "a page that decode has", "a gap", "short", "shorter"],
)
def test_pages_that_are_not_the_promised_fail_the_room(
    first_page: int, src_pages: list[int]
) -> None:
    room = Machine(page_size=16, unit_tokens=4, fill_len=58, prefix=20).begun()
    (ended,) = of(room.chunk(first_page, src_pages), RoomEnded)
    assert isinstance(ended.error, TransferError)
    assert "units" in str(ended.error)


# --- the endpoint ---------------------------------------------------------------------------------


def test_claims_of_one_worker_are_joined_and_those_of_another_refused() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    other = peer.greet(2, "x")
    assert bodies(peer.say(a, promise()), PromiseAck)
    for stranger in other:
        ((_, refusal),) = bodies(peer.say(stranger, promise()), Outcome)
        assert (refusal.ok, refusal.drained) == (False, True)
        assert "belongs to" in refusal.error
    assert peer.call("add", KEY, 10) == []
    assert of(peer.say(b, promise()), Bootstrapped) == [Bootstrapped(KEY, a, 0)]
    for stranger in other:
        assert bodies(peer.say(stranger, Abort(*KEY, "no", 1)), Drained), "nothing goes there"
    assert peer.endpoint.num_rooms == 1
    posts = of(peer.chunk(0, [1, 2, 3], last=True), PostWrite)
    assert [post.peer for post in posts] == [a, b]


def test_a_promise_for_a_later_use_is_refused_while_this_one_may_write() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    peer.call("add", KEY, 10)
    for who in (a, b):
        peer.say(who, promise())
    posts = of(peer.chunk(0, [1, 2, 3], last=True), PostWrite)
    ((_, refusal),) = bodies(peer.say(a, promise(ticket=2)), Outcome)
    assert (refusal.ok, refusal.ticket) == (False, 2)
    for post in posts:
        actions = peer.ended(post.job_id)
    assert [body.ticket for _, body in bodies(actions, Outcome)] == [1, 1]
    assert bodies(peer.say(a, promise(ticket=2)), PromiseAck), (
        "the next use, though nobody has acknowledged this one"
    )


def test_two_that_say_they_are_one_rank_of_a_worker_are_not_joined() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    twin = PeerId("twin", 5)
    peer.say(twin, hello(2, 1, a))
    for who in (a, b):
        peer.say(who, promise())
    ((_, refusal),) = bodies(peer.say(twin, promise()), Outcome)
    assert not refusal.ok


def test_parked_promises_are_counted_by_reader_and_come_free_with_the_request() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    for room in range(TIMING.max_parked_per_peer):
        for who in (a, b):
            assert bodies(peer.say(who, msgspec.structs.replace(promise(), room=room)), PromiseAck)
    full = msgspec.structs.replace(promise(), room=50)
    assert "limit" in bodies(peer.say(a, full), Outcome)[0][1].error
    assert [known.num_parked for known in peer.endpoint._peers.values()] == [
        TIMING.max_parked_per_peer
    ] * 2
    peer.call("add", (0, 0), 10)
    assert [known.num_parked for known in peer.endpoint._peers.values()] == [
        TIMING.max_parked_per_peer - 1
    ] * 2
    peer.say(b, Abort(1, 0, "no", 1))
    assert [known.num_parked for known in peer.endpoint._peers.values()] == [
        TIMING.max_parked_per_peer - 2
    ] * 2
    peer.after(TIMING.parked_timeout_s)
    assert [known.num_parked for known in peer.endpoint._peers.values()] == [0, 0]


def test_a_reader_that_leaves_fails_its_rooms_for_the_others() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    peer.call("add", KEY, 10)
    for who in (a, b):
        peer.say(who, promise())
    actions = peer.say(b, Fenced())
    assert [to for to, _ in bodies(actions, Outcome)] == [b"d/0"]
    (ended,) = of(actions, RoomEnded)
    assert isinstance(ended.error, PeerLostError)
    assert of(actions, RemovePeer) == [RemovePeer(b)]
    peer.say(a, OutcomeAck(*KEY, 0, 1))
    assert peer.endpoint.num_rooms == 0


def test_a_reader_that_leaves_takes_nobodys_proof_with_it() -> None:
    peer = Readers(tp=1)
    a, b = peer.greet(2)
    peer.call("add", KEY, 10)
    for who in (a, b):
        peer.say(who, promise())
    to_a, to_b = of(peer.chunk(0, [1, 2, 3]), PostWrite)
    peer.say(b, Fenced())
    peer.ended(to_b.job_id, WHY)
    peer.ended(to_a.job_id, TransferError("after its post"), drained=False)
    assert bodies(peer.say(a, Abort(*KEY, "no", 1)), Drained) == [], (
        "it may still land in the other's pages"
    )
    ((to, drained),) = bodies(peer.call("on_write_drained", to_a.job_id), Drained)
    assert (to, drained.settle) == (b"d/0", True)
    assert peer.endpoint.num_rooms == 0


def test_a_lone_reader_of_replicas_is_written_by_one_and_told_by_all() -> None:
    """MLA: rank 1 of two writes to nobody, and its engine waits for the room as well."""
    peer = Readers(tp=2, rank=1)
    digest = msgspec.structs.replace(DIGEST, attention="mla", num_kv_heads=1)
    peer.endpoint._digest, peer.endpoint._mesh = digest, peer.endpoint._topology.mesh(digest)
    layout = msgspec.structs.replace(
        hello(4, 0, A).layout, attention="mla", slabs=hello(4, 0, A).layout.slabs[::2]
    )  # fmt: skip
    said = peer.say(A, hello(1, 0, A, digest=digest, layout=layout))
    assert [body.refused for _, body in bodies(said, HelloReply)] == [""]
    assert of(said, AddPeer) == []
    peer.say(A, promise())
    assert of(peer.call("add", KEY, 10), Bootstrapped)
    actions = peer.chunk(0, [1, 2, 3], last=True)
    assert of(actions, PostWrite) == []
    assert [body.num_pages for _, body in bodies(actions, Outcome)] == [3]


def test_a_worker_of_several_ranks_has_one_key() -> None:
    peer = Readers()
    curve = CurveConfig(
        "p" * 40, "s" * 40, allowed_clients={"key d": "d", "key e": "e", "key r": "e/1"}
    )
    peer.endpoint._timing = dataclasses.replace(TIMING, curve=curve)

    def known(name: str, key: str) -> bool:
        me = PeerId(name, 5)
        return bool(of(peer.say(me, hello(1, 0, me), key), AddPeer))

    assert not known("d/1", "key e")
    assert not known("d/x", "key d")
    assert not known("d/", "key d")
    assert not known("/1", "key d")
    assert not known("/1", "")
    assert not known("e/1", "key e"), "another key's own name"
    assert known("e/1", "key r")
    assert known("d/1", "key d")
    peer.endpoint._peers.clear()
    assert known("d", "key d")


# --- what is said wrongly -------------------------------------------------------------------------

BAD_AREAS = {
    "no memory": StagingArea(0, 8 * BLOCK_BYTES, BLOCK_BYTES),
    "negative": StagingArea(-BLOCK_BYTES, 8 * BLOCK_BYTES, BLOCK_BYTES),
    "beyond all memory": StagingArea(2**63 - 1, 8 * BLOCK_BYTES, BLOCK_BYTES),
    "no bytes": StagingArea(BLOCK_BYTES, 0, 0),
    "no whole blocks": StagingArea(BLOCK_BYTES, 8 * BLOCK_BYTES, 100),
    "lease larger than the area": StagingArea(BLOCK_BYTES, 8 * BLOCK_BYTES, 9 * BLOCK_BYTES),
    "a unit that does not fit a lease": StagingArea(BLOCK_BYTES, 8 * BLOCK_BYTES, BLOCK_BYTES),
    "a lease that does not fit a slot": StagingArea(BLOCK_BYTES, 2**40, 2**40),
}


@pytest.mark.parametrize("area", BAD_AREAS.values(), ids=BAD_AREAS)
def test_a_staging_area_that_cannot_be_is_refused_with_the_reason(area: StagingArea) -> None:
    peer = Readers(tp=1, slot_bytes=4 * BLOCK_BYTES)
    who = PeerId("d/0", 5)
    greeting = hello(2, 0, who, page_size=16, staging=area)
    peer.endpoint._topology = msgspec.structs.replace(peer.endpoint._topology, page_size=16)
    said = peer.say(who, greeting)
    assert of(said, AddPeer) == []
    assert "staging" in bodies(said, HelloReply)[0][1].refused
    assert peer.endpoint.counters["handshakes_refused"] == 1


def test_slices_are_staged_where_both_can() -> None:
    for slot_bytes, area, staged in (
        (4 * BLOCK_BYTES, AREA, True),
        (0, AREA, False),
        (4 * BLOCK_BYTES, None, False),
    ):
        peer = Readers(tp=1, slot_bytes=slot_bytes)
        who = PeerId("d/0", 5)
        said = peer.say(who, hello(2, 0, who, staging=area))
        (added,) = of(said, AddPeer)
        assert (added.cut is not None, bodies(said, HelloReply)[0][1].staged) == (staged, staged)
    whole = Readers(tp=2, slot_bytes=4 * BLOCK_BYTES)
    (added,) = of(whole.say(A, hello(2, 0, A, staging=AREA)), AddPeer)
    assert added.cut is None, "a whole rank needs no staging"


@pytest.mark.parametrize("rank", [2, 5000])
def test_a_rank_that_its_mesh_has_not_is_refused(rank: int) -> None:
    peer = Readers(tp=1)
    who = PeerId("d/9", 5)
    said = peer.say(who, msgspec.structs.replace(hello(2, 0, who), rank=rank))
    assert "rank" in bodies(said, HelloReply)[0][1].refused


def test_layouts_that_do_not_divide_or_hold_another_share_are_refused() -> None:
    good = hello(2, 0, A)
    changes: dict[str, dict[str, Any]] = {
        "tp_size": {"tensor_parallel": 3},
        "num_kv_heads": {"tensor_parallel": 4},
        "num_layers": {"pipeline_parallel": 2},
        "stage_layers": {"stage_layers": (1, 5)},
        "page_size": {"page_size": 6},
        "layout": {"page_size": 8},
        "tp_size * pp_size": {"tensor_parallel": 2**30, "pipeline_parallel": 2**20},
    }
    for text, fields in changes.items():
        greeting = msgspec.structs.replace(
            good, topology=msgspec.structs.replace(good.topology, **fields)
        )
        said = Readers(tp=1).say(A, greeting)
        assert of(said, AddPeer) == []
        assert text in bodies(said, HelloReply)[0][1].refused


def test_grants_are_handed_on_with_who_said_them() -> None:
    peer = Readers(tp=1)
    _, b = peer.greet(2)
    grant = LeaseGrant(*KEY, 0, 1, 0, 1)
    assert peer.say(b, grant) == [LeaseGranted(b, grant)]
