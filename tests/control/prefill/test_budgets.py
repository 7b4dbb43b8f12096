"""What a prefill rank holds for a decode worker is bounded, in bytes and in pages, whatever that
says; others are served."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.config import CurveConfig
from prefixkv.control.effects import FrameReceived, PeerTried
from prefixkv.control.prefill.budgets import ROOM_BYTES, hello_bytes
from prefixkv.memory.kv_layout import Slab
from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Fenced,
    HelloReply,
    HelloWanted,
    Outcome,
    OutcomeAck,
    Promise,
    PromiseAck,
    Topology,
)
from prefixkv.transport.base import WriteDrained
from tests.control.test_several_readers import Readers, bodies
from tests.control.test_several_readers import hello as rank_hello
from tests.control.wire import (
    DECODE,
    HELLO,
    LAYOUT,
    NUM_PAGES,
    PAGE_SIZE,
    ROUTE,
    SENT,
    TIMING,
    DecodePeer,
    add_room,
    ids,
    kinds,
    newer,
    of,
    promise,
)
from tests.protocol.rooms import PROMPT

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
    assert peer.control.counters["dropped: BudgetError"] == 1
    assert kinds(peer.say(whole(2, 10, 6, ticket=1))) == ["PromiseAck"], "the rest of it is"
    assert kinds(peer.say(whole(1, 0, 10))) == ["PromiseAck"], "said again"
    assert kinds(peer.say(whole(2, 0, 16), OTHER)) == ["PromiseAck"], "each its own pool"


def test_pages_come_back_with_the_last_write_and_not_with_the_outcome() -> None:
    peer = DecodePeer(PARKED).known()
    peer.say(whole(7, 0, 16))
    peer.on(add_room(SENT, 64))
    [post] = peer.chunk(0, range(16), last=True)
    peer.on(AbortRoom(SENT, "enough"))
    assert "16 pages" in error_of(peer.say(whole(8, 0, 1)))
    peer.ended(post.job_id, OSError("lost"), drained=False)
    assert "16 pages" in error_of(peer.say(whole(8, 0, 1, ticket=1))), "they may still be written"
    peer.say(Abort(*SENT.numbers, "enough"))
    [drained] = of(peer.on(WriteDrained(post.job_id)), Drained)
    assert drained.settle
    assert kinds(peer.say(whole(8, 0, 16, ticket=2))) == ["PromiseAck"]


def test_an_abort_leaves_the_pages_of_its_promise_until_the_last_write_has_ended() -> None:
    peer = DecodePeer(PARKED).bootstrapped(whole(7, 0, 16))
    [post] = peer.chunk(0, range(16), last=True)
    peer.say(Abort(*SENT.numbers, "enough"))
    assert "16 pages" in error_of(peer.say(whole(8, 0, 1)))
    assert of(peer.ended(post.job_id), Drained)
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


# --- bytes ----------------------------------------------------------------------------------------


@contextmanager
def growth(at_most: int) -> Iterator[None]:
    """What is traced grows by no more than that many bytes."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        assert tracemalloc.get_traced_memory()[0] - before < at_most
    finally:
        tracemalloc.stop()


def test_sixty_promises_of_a_million_pages_are_held_within_the_budget() -> None:
    num_pages = 2**26
    big = msgspec.structs.replace(
        LAYOUT, num_pages=num_pages, regions=((2**40, 2**42),),
        slabs=tuple(Slab(base, 32, 8, 8) for base in (2**40, 2**41)),
    )  # fmt: skip
    peer = DecodePeer(PARKED, msgspec.structs.replace(HELLO, layout=big)).known()
    peer.say(HELLO, OTHER)
    answers = []
    with growth(36 * MIB):
        for room in range(60):
            answers += peer.say(whole(room, room << 20, 1 << 20))
    assert kinds(answers) == ["PromiseAck"] * 7 + ["Outcome"] * 53
    assert "max_peer_bytes is 33554432" in answers[-1].error
    assert kinds(peer.say(promise(), OTHER)) == ["PromiseAck"], "another is served"


def test_rooms_are_bounded_by_bytes_until_they_are_forgotten() -> None:
    """Also those that are drained, whose reader never acknowledges them."""
    room_bytes = ROOM_BYTES + 4
    limit = hello_bytes(HELLO) + 3 * room_bytes
    peer = DecodePeer(dataclasses.replace(PARKED, max_peer_bytes=limit)).known()
    for room in range(3):
        assert kinds(peer.say(whole(room, room, 1))) == ["PromiseAck"]
    assert "max_peer_bytes" in error_of(peer.say(whole(3, 3, 1)))
    peer.after(TIMING.parked_timeout_s)
    assert "max_peer_bytes" in error_of(peer.say(whole(3, 3, 1, 1))), "their ends are not heard of"
    peer.say(OutcomeAck(0, 0, 0))
    assert kinds(peer.say(whole(3, 3, 1, 2))) == ["PromiseAck"]
    assert "max_peer_bytes" in error_of(peer.say(whole(4, 4, 1)))


def test_early_aborts_are_of_the_budget_and_still_answered() -> None:
    limit = hello_bytes(HELLO) + 3000
    peer = DecodePeer(dataclasses.replace(PARKED, max_peer_bytes=limit)).known()
    for room in range(5):
        assert peer.say(Abort(room, 0, "x" * 4000)) == [Drained(room, 0, 0)]
    failed = [room for room in range(5) if peer.on(add_room(RoomKey(room, 0, SENT.decode)))]
    assert failed == [0], "1,000 characters of a reason are kept, and of one there is room"
    peer.say(Abort(5, 0, "enough"))
    assert peer.on(add_room(RoomKey(5, 0, SENT.decode))), "its place is free again"
    peer.say(Abort(6, 0, "enough"))
    peer.after(TIMING.parked_timeout_s)
    peer.control.check_invariants()
    assert peer.control._peers.all()[0].budget.num_bytes < limit


def test_the_ranks_of_a_worker_share_one_budget() -> None:
    worker = PeerId("d", 5)
    own = hello_bytes(rank_hello(2, 0, worker))
    limit = 2 * own + ROOM_BYTES + 4 * 3
    peer = Readers(tp=1, timing=dataclasses.replace(PARKED, max_peer_bytes=limit))
    a, b = peer.greet(2)
    first, second = (Promise(room, 0, 10, 0, ids([1, 2, 3]), digest=PROMPT) for room in (1, 2))
    assert bodies(peer.say(a, first), PromiseAck)
    [(_, refusal)] = bodies(peer.say(b, second), Outcome)
    assert "max_peer_bytes" in refusal.error


def test_what_a_rank_that_has_left_introduced_itself_with_is_not_held() -> None:
    peer = Readers(tp=1, timing=PARKED)
    a, b = peer.greet(2)
    budget = peer.control._peers.all()[0].budget
    both = budget.num_bytes
    peer.say(b, Fenced())
    assert budget.num_bytes == both - hello_bytes(rank_hello(2, 1, a))
    peer.control.check_invariants()


def test_a_worker_whose_introductions_are_too_large_is_refused() -> None:
    peer = DecodePeer(dataclasses.replace(TIMING, max_peer_bytes=4000))
    large = msgspec.structs.replace(HELLO, agent_metadata=bytes(4000))
    assert "max_peer_bytes" in of(peer.say(large), HelloReply)[0].refused
    assert peer.control.peers(0.0) == {}
    assert not of(peer.say(HELLO), HelloReply)[0].refused
    for life in range(6, 10):
        [reply] = of(peer.say(HELLO, PeerId(DECODE.name, life)), HelloReply)
        assert not reply.refused, "a former life's is not held any more"


# --- what is on trial -----------------------------------------------------------------------------


def test_sixty_hellos_of_a_megabyte_are_held_within_the_budget() -> None:
    """Of names that are all one key's, in frames that are larger than what is in them."""
    peer = DecodePeer(dataclasses.replace(TIMING, max_peers=1000), tries=True)
    tried = 0
    with growth(38 * MIB):
        for number in range(60):
            body = msgspec.structs.replace(HELLO, agent_metadata=bytes([number]) * MIB)
            tried += kinds(peer.say(body, PeerId(f"d{number}", 1))).count("TryPeer")
    assert tried == 31
    assert peer.control.counters["dropped: BudgetError"] == 29
    large = msgspec.structs.replace(HELLO, agent_metadata=bytes(MIB))
    assert kinds(peer.say(large, OTHER, credential="another key")) == ["TryPeer"]
    peer.on(PeerTried(PeerId("d0", 1)))
    assert kinds(peer.say(body, PeerId("d59", 1))) == ["TryPeer"], "one has left its place"


def test_a_frame_on_trial_is_not_kept_with_what_it_is_padded_with() -> None:
    peer = DecodePeer(dataclasses.replace(TIMING, max_peers=1000), tries=True)
    with growth(4 * MIB):
        for number in range(20):
            me = PeerId(f"d{number}", 1)
            nonce = peer.say(HelloWanted(), me)[0].nonce
            hello = msgspec.structs.replace(HELLO, nonce=nonce)
            frame = msgspec.msgpack.decode(peer.raw(hello, me))
            frame[4][3]["padding"] = bytes(MIB)  # of the layout, a map
            effects = peer.on(FrameReceived(ROUTE, msgspec.msgpack.encode(frame)))
            assert kinds(effects) == ["TryPeer"]
            del frame, effects


def test_lives_that_follow_each_other_on_trial_are_bounded() -> None:
    peer = DecodePeer(tries=True)  # of two peers
    me, tries = DECODE, []
    for _ in range(10):
        tries += kinds(peer.say(HELLO, me))
        me = newer(me)
    assert tries == ["TryPeer"] * TIMING.max_peers
    assert peer.control.counters["dropped: ProtocolError"] == 8


def test_what_was_tried_is_what_is_loaded() -> None:
    """A second Hello of the same life, while the first is on trial, changes nothing of it."""
    peer = DecodePeer(tries=True)
    peer.say(HELLO)
    changes: dict[str, Any] = {"agent_metadata": b"evil", "known": 7}
    assert peer.say(msgspec.structs.replace(HELLO, **changes)) == []
    late = peer.raw(Fenced())
    peer.say(msgspec.structs.replace(HELLO, **changes))
    added, reply = peer.on(PeerTried(DECODE))
    assert added.metadata == HELLO.agent_metadata
    assert reply.known == 7
    assert len(peer.control._peers.all()) == 1
    assert peer.on(FrameReceived(ROUTE, late)) == [], "a word from before its last Hello is late"


def test_a_life_whose_trial_was_overtaken_does_not_take_its_verdict_for_another() -> None:
    peer = DecodePeer(dataclasses.replace(TIMING, max_peers=10), tries=True)
    peer.say(HELLO)
    peer.say(HELLO, newer(DECODE))
    peer.on(PeerTried(PeerId("unknown", 1)))
    assert peer.say(msgspec.structs.replace(HELLO, agent_metadata=b"evil")) == []
    assert peer.control.counters["dropped: ProtocolError"] == 1
    assert peer.on(PeerTried(DECODE)) == []
    assert kinds(peer.on(PeerTried(newer(DECODE)))) == ["AddPeer", "HelloReply"]


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
