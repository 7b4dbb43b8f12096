"""Prefill's side of staging, and the cut that both sides compute, rule by rule."""

from collections import defaultdict
from itertools import count
from typing import Any, TypeVar

import numpy as np
import pytest

from prefixkv.control.effects import Cancel, RelaySlots
from prefixkv.errors import AbortedError, HandshakeError, InternalError, PeerLostError
from prefixkv.memory.kv_layout import BLOCK_BYTES, RelayArea, whole_blocks
from prefixkv.memory.mesh import Mesh, sent_shares, writers_to
from prefixkv.protocol.ids import ChunkTag, PeerId, RoomKey
from prefixkv.protocol.messages import LeaseGrant
from prefixkv.protocol.sender_machine import JobDrained, JobEnded, PostWrite
from prefixkv.staging.leases import LeaseCut
from prefixkv.staging.sender import (
    READY_POLL_S,
    Gather,
    SendLeaseAsk,
    StagedWriteAction,
    StagingSender,
    Streams,
)
from prefixkv.transport.base import WriteJob
from tests.support.gates import Gate
from tests.unit.staging.conftest import Saying

ME = PeerId("prefill-0", 7)
P, Q = PeerId("decode-0", 1), PeerId("decode-1", 1)
A, B = RoomKey(1, 0), RoomKey(2, 5)
TICKET = 9
RANK = 2
# The second of two writers, four units a piece: its section is the second block of a lease of two.
CUT = LeaseCut(((0, 1000), (RANK, 1024)), units_per_piece=4, area_bytes=16 * BLOCK_BYTES)
LEASE = 2 * BLOCK_BYTES
RESEND_S = 1.0

T = TypeVar("T")


def chunk(
    job: int, units: int, first: int, key: RoomKey = A, ticket: int = TICKET, peer: PeerId = P,
    ready: Gate | None = None,
) -> PostWrite:  # fmt: skip
    src = np.arange(100 * job, 100 * job + units, dtype=np.int32)
    what = {"chunk": 0, "dst_pages": src, "ready": ready, "first_unit": first, "ticket": ticket}
    return PostWrite(job_id=job, key=key, peer=peer, src_pages=src, **what)


class Desk:
    """A sender with two peers, and short words for what its owner does."""

    def __init__(self, slots: int = 4, window: int = 3) -> None:
        ids = count(1000)
        sizes = RelaySlots(slots, BLOCK_BYTES, window)
        self.sender: Any = Saying(
            lambda say: StagingSender(ME, RANK, sizes, RESEND_S, lambda: next(ids), say)
        )
        self.sender.add_peer(P, CUT)
        self.sender.add_peer(Q, CUT)
        self.next_unit: dict[tuple[RoomKey, PeerId], int] = {}
        self.leases = count(50)
        self.rooms: dict[RoomKey, Streams] = defaultdict(dict)

    def checked(self, out: list[StagedWriteAction]) -> list[StagedWriteAction]:
        self.sender.check_invariants()
        return out

    def write(
        self,
        job: int,
        units: int,
        key: RoomKey = A,
        peer: PeerId = P,
        ready: Gate | None = None,
        now_s: float = 0.0,
    ) -> list[StagedWriteAction]:
        first = self.next_unit.get((key, peer), 0)
        self.next_unit[key, peer] = first + units
        post = chunk(job, units, first, key, peer=peer, ready=ready)
        return self.checked(self.sender.write(post, self.rooms[key], now_s))

    def grant(
        self, piece: int, key: RoomKey = A, peer: PeerId = P, offset: int = 0
    ) -> list[StagedWriteAction]:
        grant = LeaseGrant(*key.numbers, piece, next(self.leases), offset, TICKET)
        return self.checked(self.sender.on_grant(self.rooms[key].get(peer), grant))

    def gathered(self, gather: Gather, error: Exception | None = None) -> list[StagedWriteAction]:
        return self.checked(self.sender.on_gathered(gather.gather_id, error))

    def ended(
        self, post: WriteJob, error: Exception | None = None, drained: bool = True
    ) -> list[StagedWriteAction]:
        return self.checked(self.sender.on_write_ended(post.job_id, error, drained, 0.0))

    def posted(self, piece: int, key: RoomKey = A, peer: PeerId = P) -> WriteJob:
        gather = only(Gather, self.grant(piece, key, peer))
        return only(WriteJob, self.gathered(gather))

    def tick(self, now_s: float) -> list[StagedWriteAction]:
        return self.checked(self.sender.tick(now_s))


def only(kind: type[T], actions: list[StagedWriteAction]) -> T:
    """The one action, which has to be of this kind."""
    (action,) = actions
    assert isinstance(action, kind)
    return action


def asks(actions: list[StagedWriteAction]) -> list[tuple[int, int, int]]:
    """(piece, first unit, units) of each ask; nothing else may be among them."""
    asks = [action.ask for action in actions if isinstance(action, SendLeaseAsk)]
    assert len(asks) == len(actions)
    assert all((ask.rank, ask.ticket) == (RANK, TICKET) for ask in asks)
    return [(ask.piece, ask.first_unit, ask.num_units) for ask in asks]


# --- the cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        (Mesh(3, 8, tp_size=4), Mesh(3, 8)),
        (Mesh(3, 8), Mesh(3, 8, tp_size=4)),
        (Mesh(3, 8, tp_size=4, pp_size=3), Mesh(3, 8, tp_size=2)),
        (Mesh(5, 2, tp_size=4, pp_size=2), Mesh(5, 2)),
    ],
)
@pytest.mark.parametrize("unit_head_bytes", [24, 100, 1024, 5000])
def test_the_cut_is_the_writers_shares_in_the_largest_lease_that_fits(
    writers: Mesh, readers: Mesh, unit_head_bytes: int
) -> None:
    area = RelayArea(BLOCK_BYTES, 1 << 21, 1 << 20)
    for reader in range(readers.num_ranks):
        shares = sent_shares(writers, readers, reader).items()
        heads = {rank: share.num_layers * share.num_heads for rank, share in shares}
        sizes = [count * unit_head_bytes for count in heads.values()]
        cut = LeaseCut.of(tuple(zip(heads, sizes, strict=True)), area)

        def end(units: int, sizes: list[int] = sizes) -> int:
            return sum(whole_blocks(units * size) for size in sizes)

        most = cut.units_per_piece
        assert end(most) <= area.lease_bytes < end(most + 1)
        for units in (1, 2, most // 2 + 1, most):
            assert [size for _, _, size in cut.sections(units).values()] == [
                units * s for s in sizes
            ]
            assert cut.lease_bytes(units) == end(units)
            stop = 0
            for _, offset, size in cut.sections(units).values():
                assert stop <= offset < stop + BLOCK_BYTES
                assert offset % BLOCK_BYTES == 0
                stop = offset + size
            assert end(units) - BLOCK_BYTES < stop <= end(units)
        assert tuple(cut.sections(1)) == writers_to(writers, readers, reader)
        assert cut.ranks == set(cut.sections(1))


def test_a_lease_that_takes_no_unit_is_refused_with_both_sizes() -> None:
    area = RelayArea(BLOCK_BYTES, 8 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    with pytest.raises(
        HandshakeError, match=r"lease_bytes cannot take one unit page: ours 12288, theirs 8192"
    ):
        LeaseCut.of(((0, 10), (1, 10), (2, 10)), area)


def test_a_section_larger_than_a_slot_is_refused() -> None:
    sender = Desk().sender
    with pytest.raises(HandshakeError, match=r"slot_bytes .* ours 4096, theirs 5120"):
        sender.add_peer(Q, LeaseCut(CUT.shares, 5, CUT.area_bytes))
    assert sender.write(chunk(1, 1, 0, peer=Q), {}, 0.0) != []


# --- from chunk to write --------------------------------------------------------------------------


def test_a_chunk_is_cut_asked_for_gathered_written_and_ends_once() -> None:
    desk = Desk()
    assert asks(desk.write(1, 6)) == [(0, 0, 4), (1, 4, 2)]
    first = only(Gather, desk.grant(0, offset=LEASE))
    assert (first.peer, first.src_units.tolist(), first.num_bytes) == (
        P,
        [100, 101, 102, 103],
        4096,
    )
    post = only(WriteJob, desk.gathered(first))
    assert (post.peer, post.route, post.ready) == (P, "staging", None)
    assert (post.src_pages.tolist(), post.dst_pages.tolist()) == ([first.slot], [3])  # blocks
    assert post.tag == ChunkTag(ME.incarnation, *A.numbers, RANK, 0, lease_id=50, ticket=TICKET)
    second = only(Gather, desk.grant(1, offset=2 * LEASE))
    assert second.slot != first.slot
    assert (second.src_units.tolist(), second.num_bytes) == ([104, 105], 2048)
    other = only(WriteJob, desk.gathered(second))
    assert desk.sender.owns(other.job_id)
    assert desk.ended(other) == []
    assert not desk.sender.owns(other.job_id)
    assert desk.ended(post) == [JobEnded(1)]
    assert desk.ended(post) == []
    assert (len(desk.sender.jobs), len(desk.sender.free_slots)) == (0, 4)
    assert desk.sender.counters == {"pieces_asked": 2, "pieces_written": 2, "bytes_staged": 6144}


def test_pieces_and_units_go_on_over_the_chunks_of_a_room_and_reader() -> None:
    desk = Desk(window=9)
    desk.write(1, 5)
    assert asks(desk.write(2, 4)) == [(2, 5, 4)]
    assert asks(desk.write(3, 1, peer=Q)) == [(0, 0, 1)]
    assert asks(desk.write(4, 1, key=B)) == [(0, 0, 1)]
    with pytest.raises(InternalError, match="unit 9 under 9 is next"):
        desk.sender.write(chunk(5, 1, 8), desk.rooms[A], 0.0)
    with pytest.raises(InternalError, match="under ticket 10"):
        desk.sender.write(chunk(5, 1, 9, ticket=TICKET + 1), desk.rooms[A], 0.0)


def test_the_window_bounds_what_is_asked_and_not_done() -> None:
    desk = Desk(window=2)
    assert len(asks(desk.write(1, 10))) == 2
    assert desk.write(2, 4) == []
    assert len(asks(desk.write(3, 4, key=B))) == 1  # a window of its own
    posts = [desk.posted(0), desk.posted(1)]
    assert asks(desk.ended(posts[1])) == [(2, 8, 2)]
    assert asks(desk.ended(posts[0])) == [(3, 10, 4)]


def test_asks_are_repeated_until_granted_ever_more_seldom() -> None:
    desk = Desk()
    desk.write(1, 8, now_s=10.0)
    assert desk.sender.wake_s == 11.0
    assert desk.tick(10.9) == []
    assert asks(desk.tick(11.0)) == [(0, 0, 4), (1, 4, 4)]
    assert desk.sender.wake_s == 13.0
    desk.grant(0)
    assert asks(desk.tick(13.0)) == [(1, 4, 4)]
    desk.grant(1)
    assert desk.tick(desk.sender.wake_s) == []
    assert desk.sender.wake_s == float("inf")
    assert desk.sender.counters["asks_repeated"] == 3


def test_grants_that_are_not_awaited_or_lie_outside_are_counted_and_ignored() -> None:
    desk = Desk()
    desk.write(1, 8)
    assert desk.grant(0, key=B) + desk.grant(0, peer=Q) + desk.grant(2) == []
    assert desk.sender.on_grant(desk.rooms[A][P], LeaseGrant(*A.numbers, 0, 1, 0, TICKET + 1)) == []
    assert desk.sender.counters["grants_not_awaited"] == 4
    assert desk.grant(0, offset=1) + desk.grant(0, offset=15 * BLOCK_BYTES) == []
    assert desk.sender.counters["grants_outside"] == 2
    only(Gather, desk.grant(0, offset=14 * BLOCK_BYTES))
    assert desk.grant(0) == []  # again
    assert desk.sender.counters["grants_not_awaited"] == 5


# --- KV that is not computed yet ------------------------------------------------------------------


def test_nothing_is_asked_before_the_kv_is_ready_and_the_event_is_polled() -> None:
    desk, event = Desk(), Gate()
    assert desk.write(1, 4, ready=event, now_s=5.0) == []
    assert desk.sender.wake_s == 5.0 + READY_POLL_S
    assert desk.tick(5.0) == []
    assert event.queries == 1
    assert desk.tick(6.0) == []
    assert desk.sender.wake_s == 6.0 + READY_POLL_S
    event.answer = True
    assert asks(desk.tick(6.1)) == [(0, 0, 4)]
    assert event.queries == 3
    desk.tick(7.0)
    assert event.queries == 3


def test_an_event_that_raises_fails_its_job() -> None:
    desk, event = Desk(), Gate()
    event.answer = OSError("lost")
    assert desk.write(1, 4, ready=event) == [JobEnded(1, event.answer)]
    later = Gate()
    assert desk.write(2, 4, key=B, ready=later) == []
    later.answer = OSError("later")
    assert desk.tick(1.0) == [JobEnded(2, later.answer)]
    assert desk.sender.wake_s == float("inf")


# --- slots ----------------------------------------------------------------------------------------


def test_slots_are_given_in_the_order_of_grants_and_wait_for_writes() -> None:
    desk = Desk(slots=2, window=9)
    desk.write(1, 12)
    desk.write(2, 8, peer=Q)
    first, second = only(Gather, desk.grant(0)), only(Gather, desk.grant(0, peer=Q))
    assert desk.grant(1) + desk.grant(1, peer=Q) + desk.grant(2) == []
    post = only(WriteJob, desk.gathered(first))
    other = only(WriteJob, desk.gathered(second))
    gather = only(Gather, desk.ended(post))
    assert (gather.peer, gather.src_units[0], gather.slot) == (P, 104, first.slot)
    gather = only(Gather, desk.ended(other)[:1])
    assert gather.peer == Q


def test_a_stuck_reader_leaves_half_of_the_slots_to_others() -> None:
    desk = Desk(slots=5, window=9)
    desk.write(1, 36)
    assert [len(desk.grant(piece)) for piece in range(5)] == [1, 1, 1, 0, 0]
    desk.write(2, 12, peer=Q)
    posts = [desk.posted(piece, peer=Q) for piece in range(2)]
    assert desk.grant(2, peer=Q) == []
    assert only(Gather, desk.ended(posts[0])).peer == Q
    assert desk.ended(posts[1]) == []
    # The last reader that is left may have all.
    assert [type(action) for action in desk.checked(desk.sender.remove_peer(Q))] == [Gather]


# --- errors and cancels ---------------------------------------------------------------------------


def test_a_gather_that_failed_fails_the_job_when_its_writes_have_ended() -> None:
    desk = Desk()
    desk.write(1, 12)
    post = desk.posted(0)
    gather = only(Gather, desk.grant(1))
    error = OSError("no")
    assert desk.gathered(gather, error) == [Cancel(post.job_id)]
    assert desk.grant(2) == []  # dropped
    assert desk.ended(post) == [JobEnded(1, error)]
    assert len(desk.sender.free_slots) == 4


def test_an_undrained_write_holds_its_slot_until_it_is_drained() -> None:
    desk = Desk(slots=1)
    desk.write(1, 8)
    post = desk.posted(0)
    desk.grant(1)
    desk.write(2, 4, key=B)
    assert desk.grant(0, key=B) == []
    error = OSError("no")
    assert desk.ended(post, error, drained=False) == [JobEnded(1, error, False)]
    assert desk.sender.owns(post.job_id)
    assert len(desk.sender.free_slots) == 0
    desk.sender.forget(desk.rooms[A])
    desk.sender.check_invariants()
    drained, gather = desk.checked(desk.sender.on_write_drained(post.job_id))
    assert drained == JobDrained(1)
    assert isinstance(gather, Gather)
    assert desk.sender.on_write_drained(post.job_id) == []


def test_a_job_is_drained_with_the_last_of_its_writes() -> None:
    desk = Desk()
    desk.write(1, 8)
    posts = [desk.posted(0), desk.posted(1)]
    errors = [OSError("first"), OSError("second")]
    desk.ended(posts[0], errors[0], drained=False)
    assert desk.ended(posts[1], errors[1], drained=False) == [JobEnded(1, errors[0], False)]
    assert desk.checked(desk.sender.on_write_drained(posts[1].job_id)) == []
    assert desk.checked(desk.sender.on_write_drained(posts[0].job_id)) == [JobDrained(1)]


def test_a_cancelled_job_drops_what_is_not_under_way() -> None:
    desk = Desk(slots=2, window=4)
    desk.sender.remove_peer(Q)
    desk.write(1, 20)  # written, gathered, granted, asked, queued
    desk.write(2, 4)
    post, gather = desk.posted(0), only(Gather, desk.grant(1))
    assert desk.grant(2) == []
    assert desk.checked(desk.sender.cancel(1)) == [Cancel(post.job_id)]
    assert desk.checked(desk.sender.cancel(1)) == []
    assert desk.gathered(gather) == []  # and not posted
    ended, *more = desk.ended(post)
    assert isinstance(ended, JobEnded)
    assert (ended.job_id, type(ended.error), ended.drained) == (1, AbortedError, True)
    assert more == []  # what comes behind a gap would never be granted
    late = only(JobEnded, desk.write(3, 4))
    assert (late.job_id, type(late.error), late.drained) == (3, AbortedError, True)
    assert desk.sender.cancel(1) == []
    assert [type(action) for action in desk.checked(desk.sender.cancel(2))] == [JobEnded]
    assert len(desk.sender.free_slots) == 2


def test_the_jobs_of_a_peer_that_is_removed_end() -> None:
    desk = Desk()
    desk.write(1, 4)
    desk.write(2, 4, key=B)
    desk.write(3, 4, peer=Q)
    post = desk.posted(0)
    cancel, ended = desk.checked(desk.sender.remove_peer(P))
    assert cancel == Cancel(post.job_id)
    assert isinstance(ended, JobEnded)
    assert (ended.job_id, type(ended.error)) == (2, PeerLostError)
    late = only(JobEnded, desk.write(4, 4))
    assert (late.job_id, type(late.error), late.drained) == (4, PeerLostError, True)
    assert desk.ended(post) == [JobEnded(1)]
    assert desk.sender.remove_peer(P) == []
    assert len(desk.sender.jobs) == 1


def test_a_room_that_is_over_is_forgotten_and_its_number_may_come_again() -> None:
    desk = Desk()
    desk.write(1, 4)
    with pytest.raises(InternalError, match="jobs under way"):
        desk.sender.forget(desk.rooms[A])
    desk.ended(desk.posted(0))
    desk.sender.forget(desk.rooms[A])
    desk.sender.forget(desk.rooms[A])
    assert not desk.rooms[A]
    assert desk.sender.wake_s == float("inf") or desk.tick(desk.sender.wake_s) == []
    out = desk.sender.write(chunk(2, 4, 0, ticket=TICKET + 1), desk.rooms[A], 0.0)
    assert isinstance(out[0], SendLeaseAsk)
    assert (out[0].ask.piece, out[0].ask.ticket) == (0, TICKET + 1)
