"""What of a room's end waits for copies: SUCCESS for the last scatter, RoomDrained until none
runs."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.errors import TransferError
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Hello, HelloReply, LeaseAsk, Promise, Topology
from prefixkv.protocol.receiver_machine import RoomDrained, RoomEnded, RoomOverdue
from prefixkv.protocol.tags import ChunkTag
from prefixkv.staging.receiver import BreakRoom, RoomStaging, ScatterLease, StagingPlan
from prefixkv.staging.rooms import SayGrant
from tests.control.mesh_wire import AREA, DIGEST, KEY, hello, promise

GOOD = RoomEnded(KEY, KVPoll.SUCCESS, aux=b"aux")
BAD = RoomEnded(KEY, KVPoll.FAILED, TransferError("broke"))
DRAINED = RoomDrained(KEY)
OTHER = RoomKey(8, 0)


def plan(page_size: int = 4, writers_page_size: int = 4) -> StagingPlan:
    """Two writers; a lease takes two units of each."""
    mine: Hello = hello(1, 0, PeerId("d", 5), page_size=page_size, staging=AREA)
    return StagingPlan.of(mine, HelloReply(DIGEST, Topology(writers_page_size, 2), ()))


def opened(fill_len: int = 10) -> RoomStaging:
    staging = RoomStaging(AREA)
    assert staging.open(promise(fill_len=fill_len), 4, plan()) == []
    return staging


def granted(staging: RoomStaging, piece: int = 0, first: int = 0, count: int = 1) -> int:
    for rank in (0, 1):
        said = staging.on_ask(rank, LeaseAsk(*KEY, rank, piece, first, count, 1))
    assert all(isinstance(action, SayGrant) for action in said)
    return said[0].grant.lease_id  # type: ignore[union-attr]


def landed(staging: RoomStaging, piece: int = 0, first: int = 0) -> int:
    """A lease whose scatter runs."""
    lease = granted(staging, piece, first)
    for rank in (0, 1):
        actions = staging.on_arrival(ChunkTag(5, *KEY, rank, piece, slot=lease))
    assert [type(action) for action in actions] == [ScatterLease]
    return lease


def scattered(staging: RoomStaging, lease: int, error: Exception | None = None) -> list[Any]:
    out = staging.on_scattered(lease, error)
    staging.rooms.check_invariants()
    return out


def test_success_is_held_back_until_the_last_unit_is_scattered() -> None:
    staging = opened(fill_len=10)
    leases = [landed(staging, piece, piece) for piece in range(2)]
    assert staging.pass_on(GOOD) == []
    assert staging.num_waiting == 1
    assert scattered(staging, leases[0]) == []
    leases.append(landed(staging, 2, 2))
    assert scattered(staging, leases[1]) == []
    assert scattered(staging, leases[2]) == [GOOD]
    assert (staging.num_waiting, staging.rooms.num_rooms) == (0, 0)


def test_success_that_comes_last_is_passed_on_at_once() -> None:
    staging = opened(fill_len=4)
    assert scattered(staging, landed(staging)) == []
    assert staging.pass_on(GOOD) == [GOOD]
    assert staging.rooms.num_rooms == 0


def test_a_failure_is_told_at_once_and_drained_when_no_copy_runs() -> None:
    staging = opened()
    first, second = landed(staging, 0, 0), landed(staging, 1, 1)
    assert staging.pass_on(BAD) == [BAD]
    assert staging.pass_on(DRAINED) == []
    assert scattered(staging, first) == []
    assert scattered(staging, second, TransferError("also")) == [DRAINED]
    assert (staging.num_waiting, staging.rooms.num_rooms) == (0, 0)


def test_leases_that_nothing_was_copied_from_are_free_with_the_proof() -> None:
    staging = opened()
    granted(staging)
    assert staging.pass_on(BAD) == [BAD]
    assert staging.rooms.num_rooms == 1
    assert staging.pass_on(DRAINED) == [DRAINED]
    assert staging.rooms.num_rooms == 0


def test_leases_that_come_free_are_granted_to_who_waits() -> None:
    staging = opened()
    other = Promise(*OTHER, 12, 0, promise().pages, 2)
    staging.open(other, 4, plan())
    for piece in range(2):
        granted(staging, piece, piece)
    for piece, first, count in ((0, 0, 1), (1, 1, 1), (2, 2, 1)):
        for rank in (0, 1):
            said = staging.on_ask(rank, LeaseAsk(*OTHER, rank, piece, first, count, 2))
    assert said == [], "the area takes four pieces"
    assert staging.pass_on(BAD) == [BAD]
    ended, *grants = [*staging.pass_on(DRAINED)][::-1]
    assert ended == DRAINED
    assert [(grant.key, grant.grant.piece) for grant in grants] == [(OTHER, 2)] * 2


def test_an_overdue_room_is_told_at_any_time() -> None:
    staging = opened()
    landed(staging)
    staging.pass_on(BAD)
    assert staging.pass_on(RoomOverdue(KEY)) == [RoomOverdue(KEY)]


def test_a_copy_that_fails_before_the_machine_has_ended_breaks_it() -> None:
    staging = opened()
    error = TransferError("the copy")
    assert scattered(staging, landed(staging), error) == [BreakRoom(KEY, error)]
    assert staging.pass_on(BAD) == [BAD]
    assert staging.pass_on(DRAINED) == [DRAINED]


@pytest.mark.parametrize("others", [0, 1])
def test_a_copy_that_fails_after_success_was_held_back_ends_and_drains_the_room_here(
    others: int,
) -> None:
    staging = opened()
    lease = landed(staging)
    more = [landed(staging, 1 + i, 1 + i) for i in range(others)]
    assert staging.pass_on(GOOD) == []
    error = TransferError("the copy")
    ended, *drained = scattered(staging, lease, error)
    assert (ended.poll, ended.error) == (KVPoll.FAILED, error)
    for other in more:
        assert drained == [], "its pages are still written"
        drained = scattered(staging, other)
    assert drained == [DRAINED]
    assert (staging.num_waiting, staging.rooms.num_rooms) == (0, 0)


def test_writers_that_are_done_with_less_than_all_break_the_room() -> None:
    staging = opened()
    scattered(staging, landed(staging))
    assert staging.on_written(KEY, 0) == []
    (broken,) = staging.on_written(KEY, 1)
    assert isinstance(broken, BreakRoom)


def test_writers_that_are_done_with_less_than_all_fail_a_success_that_was_held_back() -> None:
    staging = opened()
    assert staging.on_written(KEY, 0) == []
    assert staging.pass_on(GOOD) == []
    ended, drained = staging.on_written(KEY, 1)
    assert isinstance(ended, RoomEnded)
    assert ended.poll is KVPoll.FAILED
    assert drained == DRAINED


def test_rooms_that_are_not_staged_pass() -> None:
    staging = RoomStaging(AREA)
    for ending in (GOOD, BAD, DRAINED, RoomOverdue(KEY)):
        assert staging.pass_on(ending) == [ending]


def test_a_number_may_come_again_after_either_end() -> None:
    staging = opened(fill_len=4)
    scattered(staging, landed(staging))
    staging.pass_on(GOOD)
    staging.open(promise(ticket=1), 4, plan())
    granted(staging)
    staging.pass_on(BAD)
    staging.pass_on(DRAINED)
    assert staging.open(promise(ticket=3), 4, plan()) == []


def test_units_of_larger_pages_of_ours_and_of_the_writers() -> None:
    staging = RoomStaging(AREA)
    which = Promise(*KEY, 30, 8, promise(pages=(3, 9, 5)).pages, 1)
    staging.open(which, 8, plan(page_size=8))
    lease = granted(staging, 0, 0, 2)
    for rank in (0, 1):
        actions = staging.on_arrival(ChunkTag(5, *KEY, rank, 0, slot=lease))
    (scatter,) = actions
    assert isinstance(scatter, ScatterLease)
    assert (scatter.units.tolist(), scatter.unit_tokens) == ([6, 7], 4)
    assert plan(4, 16).unit_tokens == 4
