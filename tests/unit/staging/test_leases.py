"""The table of staging leases: its rules one by one, and against a naive model that paints
blocks."""

import pytest

from prefixkv.errors import InternalError, LeaseError
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.protocol.ids import RoomKey
from prefixkv.staging.leases import MAX_LEASE_ID, Lease, LeaseState, LeaseTable
from tests.laws.lease_machine import LeaseMachine

A, B, C = (RoomKey(room, 0) for room in range(3))
ONE = frozenset({0})


def table_of(blocks: int) -> LeaseTable:
    return LeaseTable(blocks * BLOCK_BYTES)


def ask(
    table: LeaseTable, key: RoomKey, piece: int, blocks: int, writers: frozenset[int] = ONE
) -> list[Lease]:
    return table.ask(key, piece, blocks * BLOCK_BYTES, writers)


def granted(leases: list[Lease]) -> list[tuple[int, int, int]]:
    """(room, piece, offset in blocks) of each."""
    return [(lease.key.room, lease.piece, lease.offset // BLOCK_BYTES) for lease in leases]


def finish(table: LeaseTable, lease: Lease) -> list[Lease]:
    """All writers arrive and the copy ends."""
    for writer in sorted(lease.missing):
        assert table.arrived(lease, writer) == []
    return table.end(lease)


# --- grants ---------------------------------------------------------------------------------------


def test_sizes_are_rounded_up_to_whole_blocks() -> None:
    table = table_of(2)
    (lease,) = table.ask(A, 0, 1, ONE)
    assert (lease.offset, lease.num_bytes) == (0, BLOCK_BYTES)
    assert table.ask(A, 1, BLOCK_BYTES + 1, ONE) == []


def test_only_the_first_of_many_rooms_are_looked_at_for_a_smaller_piece() -> None:
    large = [RoomKey(room, 1) for room in range(16)]
    table = table_of(10)
    ask(table, A, 0, 4)
    for room in large:
        assert ask(table, room, 0, 10) == []
    assert ask(table, B, 0, 4) == []  # it would fit, behind sixteen that do not
    table.close(large[3])
    assert granted(table.all()) == [(0, 0, 0), (1, 0, 4)]


# --- arrivals and ends ----------------------------------------------------------------------------


def test_a_lease_is_ended_once_and_only_when_it_has_landed() -> None:
    table = table_of(8)
    (lease,) = ask(table, A, 0, 8)
    with pytest.raises(LeaseError, match=r"GRANTED.* still written"):
        table.end(lease)
    finish(table, lease)
    with pytest.raises(LeaseError, match="ended before"):
        table.end(lease)
    assert table.get(lease.lease_id) is None
    table.check_invariants()


# --- rooms that end -------------------------------------------------------------------------------


def test_a_closed_room_waits_no_more_and_its_leases_are_held_until_drained() -> None:
    table = table_of(8)
    (lease,) = ask(table, A, 0, 8)
    ask(table, A, 1, 8)
    ask(table, B, 0, 8)
    assert table.close(A) == []
    assert table.close(A) == []
    assert lease.state is LeaseState.HELD
    assert table.all() == table.of_room(A) == [lease]
    assert table.num_waiting == 1
    with pytest.raises(LeaseError, match=r"HELD.* still written"):
        table.end(lease)
    assert granted(table.drained(A)) == [(1, 0, 0)]
    assert table.drained(A) == table.of_room(A) == []


def test_the_audit_sees_what_is_broken() -> None:
    table = table_of(8)
    (first,) = ask(table, A, 0, 4)
    ask(table, A, 1, 4)
    table.check_invariants()
    first.num_bytes = 5 * BLOCK_BYTES
    with pytest.raises(InternalError, match="overlap"):
        table.check_invariants()


TestLeases = LeaseMachine.TestCase


def test_lease_ids_fit_into_a_tag_and_go_round_those_that_live() -> None:
    table = table_of(10)
    (first,) = ask(table, A, 0, 1)
    table._last_id = MAX_LEASE_ID - 1
    (last,) = ask(table, A, 1, 1)
    (next_one,) = ask(table, A, 2, 1)
    assert (first.lease_id, last.lease_id, next_one.lease_id) == (1, MAX_LEASE_ID, 2)
