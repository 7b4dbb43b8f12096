"""Decode's side of staging, rule by rule: asks, arrivals, scatters, and what of a room's end waits
for copies."""

from typing import Any

import numpy as np
import pytest

from prefixkv.errors import LeaseError, ProtocolError, TransferError
from prefixkv.memory.kv_layout import BLOCK_BYTES, RelayArea
from prefixkv.memory.mesh import Shard
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId, RoomKey
from prefixkv.protocol.machine import Fail
from prefixkv.protocol.messages import Hello, HelloReply, LeaseAsk, Promise, Topology
from prefixkv.protocol.receiver_machine import RoomDrained, RoomEnded, RoomOverdue, UnitsRelayed
from prefixkv.staging.leases import LeaseCut, LeaseState, Section
from prefixkv.staging.receiver import (
    Grant,
    Scatter,
    StagedRoomAction,
    StagingPlan,
    StagingReceiver,
    ToRoom,
)
from tests.unit.control.mesh_wire import AREA, DIGEST, KEY, hello, promise
from tests.unit.staging.conftest import Saying

A, B = RoomKey(1, 0), RoomKey(2, 5)
TICKET = 9
# Two writers, four units a piece: each has one block of a lease of two.
CUT = LeaseCut(((0, 1000), (2, 1024)), units_per_piece=4, area_bytes=4 * BLOCK_BYTES)
PARTS = {0: Shard(0, 1, 0, 1), 2: Shard(0, 1, 1, 1)}
LEASE = 2 * BLOCK_BYTES


def area_of(num_bytes: int) -> RelayArea:
    return RelayArea(BLOCK_BYTES, num_bytes, num_bytes)


def receiver(area: RelayArea) -> Any:
    return Saying(lambda say: StagingReceiver(area, say))


def open_room(
    staging: Any, key: RoomKey, num_units: int, cut: LeaseCut = CUT, ticket: int = TICKET
) -> list[StagedRoomAction]:
    """A room whose unit pages are our pages 100.., each of one token."""
    pages = np.arange(100, 100 + num_units, dtype=np.int32)
    promise = Promise(*key.numbers, num_units, 0, pages.tobytes(), ticket)
    return staging.open(promise, 1, StagingPlan(cut, PARTS, unit_tokens=1))


def rooms_of(num_units: int, *keys: RoomKey, leases: int = 2) -> Any:
    staging = receiver(area_of(leases * LEASE))
    for key in keys:
        assert open_room(staging, key, num_units) == []
    return staging


def ask(
    staging: Any, key: RoomKey, rank: int, piece: int, first: int, count: int = 4
) -> list[StagedRoomAction]:
    out = staging.on_ask(rank, LeaseAsk(*key.numbers, rank, piece, first, count, TICKET))
    staging.check_invariants()
    return out


def grants(actions: list[StagedRoomAction]) -> list[tuple[int, int, int, int]]:
    """(room, rank, piece, offset) of each; nothing else may be among them."""
    assert all(isinstance(action, Grant) for action in actions)
    said = [action for action in actions if isinstance(action, Grant)]
    assert all(action.grant.key == action.key for action in said)
    assert all(action.grant.ticket == TICKET for action in said)
    return [
        (action.key.room, action.rank, action.grant.piece, action.grant.offset) for action in said
    ]


def lease_of(actions: list[StagedRoomAction]) -> int:
    (lease_id,) = {action.grant.lease_id for action in actions if isinstance(action, Grant)}
    return lease_id


def arrive(
    staging: Any,
    key: RoomKey,
    rank: int,
    piece: int,
    lease: int,
    part: int = 0,
    parts: int = 1,
    blocks: int = 1,
) -> list[StagedRoomAction]:
    """What follows but for what the room hears, which comes last and once."""
    tag = ChunkTag(1, *key.numbers, rank, piece, part, parts, lease, blocks)
    out = staging.on_arrival(tag)
    staging.check_invariants()
    if out and isinstance(out[-1], ToRoom):
        assert (out[-1].key, out[-1].event.rank) == (key, rank)
        out.pop()
    assert not any(isinstance(action, ToRoom) for action in out)
    return out


def all_arrive(staging: Any, key: RoomKey, piece: int, lease: int) -> Scatter:
    assert arrive(staging, key, 0, piece, lease) == []
    (scatter,) = arrive(staging, key, 2, piece, lease)
    assert isinstance(scatter, Scatter)
    return scatter


def asked_by_all(staging: Any, key: RoomKey, piece: int, first: int, count: int = 4) -> int:
    ask(staging, key, 0, piece, first, count)
    return lease_of(ask(staging, key, 2, piece, first, count))


def told(staging: Any, ending: RoomEnded | RoomDrained) -> list[StagedRoomAction]:
    """What follows from an end that is passed on at once."""
    out = staging.pass_on(ending)
    staging.check_invariants()
    out.remove(ending)
    return out


def success(key: RoomKey) -> RoomEnded:
    return RoomEnded(key, KVPoll.SUCCESS)


def failure(key: RoomKey) -> RoomEnded:
    return RoomEnded(key, KVPoll.FAILED, TransferError("broke"))


def states(staging: Any) -> list[LeaseState]:
    return [lease.state for lease in staging.leases.all()]


# --- asks -----------------------------------------------------------------------------------------


def test_an_ask_for_what_is_granted_is_answered_again_until_it_is_written() -> None:
    staging = rooms_of(8, A)
    assert ask(staging, A, 0, 0, 0) == []
    assert ask(staging, A, 0, 0, 0) == []  # not granted yet
    lease = lease_of(ask(staging, A, 2, 0, 0))
    assert grants(ask(staging, A, 2, 0, 0)) == [(1, 2, 0, 0)]
    arrive(staging, A, 2, 0, lease)
    assert ask(staging, A, 2, 0, 0) == []
    assert grants(ask(staging, A, 0, 0, 0)) == [(1, 0, 0, 0)]
    assert staging.counters["asked_again"] == 4


def test_pieces_are_granted_in_order_whatever_the_order_of_asks() -> None:
    staging = rooms_of(12, A)
    for piece in (2, 1):
        for rank in (0, 2):
            assert ask(staging, A, rank, piece, 4 * piece) == []
    assert ask(staging, A, 0, 0, 0) == []
    assert grants(ask(staging, A, 2, 0, 0)) == [
        (1, 0, 0, 0),
        (1, 2, 0, 0),
        (1, 0, 1, LEASE),
        (1, 2, 1, LEASE),
    ]


@pytest.mark.parametrize(
    ("rank", "piece", "first", "count", "what"),
    [
        (1, 0, 0, 4, "rank 1 asks"),
        (0, 0, 0, 5, "at most 4"),
        (0, 0, 0, 0, "at most 4"),
        (0, 3, 10, 3, "10 to 13 of 12"),
        (0, 0, 1, 4, "between None"),
        (0, 1, 4, 3, "another writer's"),
        (0, 2, 7, 4, "between"),
        (0, 2, 9, 3, "between"),
        (0, 0, 0, 3, "between"),
        (0, 5, 3, 1, "piece 5 is units 3"),
    ],
)
def test_an_ask_that_does_not_fit_is_refused_and_changes_nothing(
    rank: int, piece: int, first: int, count: int, what: str
) -> None:
    staging = rooms_of(12, A)
    ask(staging, A, 2, 1, 4)
    with pytest.raises(ProtocolError, match=what):
        ask(staging, A, rank, piece, first, count)
    for p in (0, 1, 2):
        ask(staging, A, 2, p, 4 * p)
    assert [grants(ask(staging, A, 0, p, 4 * p)) != [] for p in (0, 1, 2)] == [True, True, False]


def test_a_rank_speaks_for_itself_only() -> None:
    staging = rooms_of(4, A)
    with pytest.raises(ProtocolError, match="as rank 2"):
        staging.on_ask(0, LeaseAsk(*A.numbers, 2, 0, 0, 4, TICKET))


def test_asks_of_unknown_and_closed_rooms_and_of_another_use_are_counted() -> None:
    staging = rooms_of(4, A)
    assert ask(staging, B, 0, 0, 0) == []
    assert staging.on_ask(0, LeaseAsk(*A.numbers, 0, 0, 0, 4, TICKET + 1)) == []
    asked_by_all(staging, A, 0, 0)
    assert told(staging, failure(A)) == []
    assert ask(staging, A, 0, 0, 0) == []
    assert staging.counters == {"asks_of_no_room": 3}


# --- arrivals and scatters ------------------------------------------------------------------------


def test_a_piece_is_scattered_when_every_part_of_every_writer_has_come() -> None:
    staging = rooms_of(7, A)
    asked_by_all(staging, A, 0, 0)
    lease = asked_by_all(staging, A, 1, 4, 3)
    assert arrive(staging, A, 0, 1, lease, part=1, parts=2) == []
    assert arrive(staging, A, 2, 1, lease) == []
    assert arrive(staging, A, 0, 1, lease, part=1, parts=2) == []
    (scatter,) = arrive(staging, A, 0, 1, lease, part=0, parts=2)
    assert isinstance(scatter, Scatter)
    assert scatter.sections == (Section(0, LEASE, 3000), Section(2, LEASE + BLOCK_BYTES, 3072))
    assert (scatter.lease_id, scatter.units.tolist()) == (lease, [104, 105, 106])
    assert (scatter.plan.unit_tokens, scatter.plan.parts) == (1, PARTS)
    assert staging.counters == {"arrivals_not_awaited": 1}
    assert arrive(staging, A, 2, 1, lease) == []


def test_arrivals_that_fit_no_lease_are_counted_and_change_nothing() -> None:
    staging = rooms_of(8, A, B)
    lease = asked_by_all(staging, A, 0, 0)
    for key, rank, piece, lease_id in (
        (B, 0, 0, lease),
        (A, 0, 1, lease),
        (A, 0, 0, lease + 1),
        (A, 0, 0, -1),
    ):
        assert arrive(staging, key, rank, piece, lease_id) == []
    assert staging.counters["arrivals_of_no_lease"] == 4
    assert arrive(staging, A, 1, 0, lease) == []  # no writer
    assert staging.counters["arrivals_not_awaited"] == 1
    assert arrive(staging, A, 0, 0, lease, part=0, parts=2) == []
    assert arrive(staging, A, 0, 0, lease, part=1, parts=3) == []  # two or three?
    assert staging.counters["arrivals_that_disagree"] == 1
    assert arrive(staging, A, 2, 0, lease) == []
    assert arrive(staging, A, 2, 0, lease) == []  # it has arrived
    assert staging.counters["arrivals_not_awaited"] == 2
    assert len(arrive(staging, A, 0, 0, lease, part=1, parts=2)) == 1


def test_a_room_succeeds_with_its_last_unit_whatever_the_order_of_scatters() -> None:
    staging = rooms_of(8, A)
    leases = [asked_by_all(staging, A, 0, 0), asked_by_all(staging, A, 1, 4)]
    for piece in (1, 0):
        all_arrive(staging, A, piece, leases[piece])
    assert scattered(staging, leases[1]) == []
    assert staging.pass_on(success(A)) == []
    assert scattered(staging, leases[0]) == [success(A)]
    assert staging.num_rooms == 0
    open_room(staging, A, 8, ticket=TICKET + 1)
    ended, _ = staging.pass_on(success(A))
    assert isinstance(ended, RoomEnded)
    assert "0 of 8" in str(ended.error), "nothing of its last use counts for it"


def test_a_scatter_that_failed_breaks_the_room_once() -> None:
    staging = rooms_of(8, A)
    leases = [asked_by_all(staging, A, 0, 0), asked_by_all(staging, A, 1, 4)]
    for piece, lease in enumerate(leases):
        all_arrive(staging, A, piece, lease)
    error = OSError("no")
    assert scattered(staging, leases[0], error) == [ToRoom(A, Fail(error))]
    assert scattered(staging, leases[1], error) == []
    assert staging.leases.all() == []


# --- what has arrived -----------------------------------------------------------------------------


def test_a_writer_has_arrived_when_each_part_is_notified_with_all_its_blocks() -> None:
    staging = rooms_of(8, A)
    lease = asked_by_all(staging, A, 0, 0)

    def tag(part: int, blocks: int, rank: int = 0) -> list[StagedRoomAction]:
        return staging.on_arrival(ChunkTag(1, *A.numbers, rank, 0, part, 2, lease, blocks))

    assert tag(0, 1) == []
    assert tag(1, 0) == tag(1, 2) == []  # a transport that posted less, or more, than the section
    assert staging.counters == {"arrivals_that_disagree": 2}
    assert tag(1, 1) == [ToRoom(A, UnitsRelayed(0, 4))]
    assert tag(1, 1) == []
    assert tag(0, 1, rank=2) == []
    scatter, arrived = tag(1, 1, rank=2)
    assert isinstance(scatter, Scatter)
    assert arrived == ToRoom(A, UnitsRelayed(2, 4))


def test_what_a_writer_says_stands_for_no_notification() -> None:
    staging = rooms_of(12, A, leases=1)
    lease = asked_by_all(staging, A, 0, 0)
    arrive(staging, A, 2, 0, lease)
    for rank in (0, 2):  # it asks for the next piece, as if this one were written
        assert ask(staging, A, rank, 1, 4) == []
    assert states(staging) == [LeaseState.GRANTED]
    ended, drained = staging.pass_on(success(A))
    assert isinstance(ended, RoomEnded)
    assert "0 of 12 unit pages were staged" in str(ended.error)
    assert drained == RoomDrained(A)
    assert staging.num_rooms == 0


# --- rooms that fail ------------------------------------------------------------------------------


def test_a_failed_room_holds_its_leases_until_it_is_drained() -> None:
    staging = rooms_of(8, A, B, leases=1)
    lease = asked_by_all(staging, A, 0, 0)
    for rank in (0, 2):
        ask(staging, A, rank, 1, 4)
        ask(staging, B, rank, 0, 0)
    assert told(staging, failure(A)) == []
    assert states(staging) == [LeaseState.HELD]
    with pytest.raises(LeaseError, match="life"):
        open_room(staging, A, 8, ticket=TICKET + 1)
    assert grants(told(staging, RoomDrained(A))) == [(2, 0, 0, 0), (2, 2, 0, 0)]
    assert arrive(staging, A, 0, 0, lease) == []
    assert staging.num_rooms == 1
    assert open_room(staging, A, 8, ticket=TICKET + 1) == []


def test_a_copy_that_runs_keeps_a_failed_room_from_being_drained() -> None:
    staging = rooms_of(8, A)
    leases = [asked_by_all(staging, A, 0, 0), asked_by_all(staging, A, 1, 4)]
    for piece, lease in enumerate(leases):
        all_arrive(staging, A, piece, lease)
    assert told(staging, failure(A)) == []
    assert staging.pass_on(RoomDrained(A)) == []
    assert states(staging) == [LeaseState.LANDED] * 2
    assert scattered(staging, leases[0], OSError("no")) == []
    assert scattered(staging, leases[1]) == [RoomDrained(A)]
    assert staging.num_rooms == 0


# --- ends that wait -------------------------------------------------------------------------------


def scattered(staging: Any, lease: int, error: Exception | None = None) -> list[Any]:
    out = staging.on_scattered(lease, error)
    staging.check_invariants()
    return out


def test_an_overdue_room_is_told_at_any_time() -> None:
    staging = rooms_of(4, A)
    all_arrive(staging, A, 0, asked_by_all(staging, A, 0, 0))
    staging.pass_on(failure(A))
    assert staging.pass_on(RoomOverdue(A)) == [RoomOverdue(A)]


@pytest.mark.parametrize("others", [0, 1])
def test_a_copy_that_fails_after_success_was_held_back_ends_and_drains_the_room_here(
    others: int,
) -> None:
    staging = rooms_of(4 * (1 + others), A)
    leases = [asked_by_all(staging, A, piece, 4 * piece) for piece in range(1 + others)]
    for piece, lease in enumerate(leases):
        all_arrive(staging, A, piece, lease)
    assert staging.pass_on(success(A)) == []
    error = TransferError("the copy")
    ended, *drained = scattered(staging, leases[0], error)
    assert (ended.poll, ended.error) == (KVPoll.FAILED, error)
    for other in leases[1:]:
        assert drained == [], "its pages are still written"
        drained = scattered(staging, other)
    assert drained == [RoomDrained(A)]
    assert (staging.num_waiting, staging.num_rooms) == (0, 0)


def test_rooms_that_are_not_staged_pass() -> None:
    staging = receiver(AREA)
    for ending in (success(A), failure(A), RoomDrained(A), RoomOverdue(A)):
        assert staging.pass_on(ending) == [ending]


def plan(page_size: int = 4, writers_page_size: int = 4) -> StagingPlan:
    """Two writers; a lease takes two units of each."""
    mine: Hello = hello(1, 0, PeerId("d", 5), page_size=page_size, relay=AREA)
    return StagingPlan.of(mine, HelloReply(DIGEST, Topology(writers_page_size, 2), ()))


def test_units_of_larger_pages_of_ours_and_of_the_writers() -> None:
    staging = receiver(AREA)
    which = Promise(*KEY.numbers, 30, 8, promise(pages=(3, 9, 5)).pages, 1)
    staging.open(which, 8, plan(page_size=8))
    for rank in (0, 1):
        said = staging.on_ask(rank, LeaseAsk(*KEY.numbers, rank, 0, 0, 2, 1))
    lease = lease_of(said)
    for section in staging.sections_of(staging.leases.all()[0]):
        blocks = section.num_bytes // BLOCK_BYTES
        tag = ChunkTag(5, *KEY.numbers, section.rank, 0, lease_id=lease, num_pages=blocks)
        actions = staging.on_arrival(tag)
    scatter, _ = actions
    assert isinstance(scatter, Scatter)
    assert (scatter.units.tolist(), scatter.plan.unit_tokens) == ([6, 7], 4)
    assert plan(4, 16).unit_tokens == 4
