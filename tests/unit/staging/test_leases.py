"""The table of staging leases: its rules one by one, and against a naive model that paints
blocks."""

from __future__ import annotations

from collections import deque

import pytest

from prefixkv.errors import InternalError, LeaseError
from prefixkv.memory.staging_area import BLOCK_BYTES
from prefixkv.protocol.ids import RoomKey
from prefixkv.staging.leases import MAX_LEASE_ID, MAX_PASSED, Lease, LeaseState, LeaseTable
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


def test_leases_are_granted_while_there_is_room_and_then_wait() -> None:
    table = table_of(10)
    (first,) = ask(table, A, 0, 4)
    (second,) = ask(table, A, 1, 4)
    assert granted([first, second]) == [(0, 0, 0), (0, 1, 4)]
    assert first.lease_id != second.lease_id
    assert ask(table, B, 0, 4) == []
    assert table.num_waiting == 1
    assert granted(finish(table, first)) == [(1, 0, 0)]
    assert table.num_waiting == 0
    table.check_invariants()


def test_sizes_are_rounded_up_to_whole_blocks() -> None:
    table = table_of(2)
    (lease,) = table.ask(A, 0, 1, ONE)
    assert (lease.offset, lease.num_bytes) == (0, BLOCK_BYTES)
    assert table.ask(A, 1, BLOCK_BYTES + 1, ONE) == []


def test_freed_neighbours_are_one_gap_and_the_lowest_gap_is_taken_first() -> None:
    table = table_of(9)
    leases = [ask(table, A, piece, 3)[0] for piece in range(3)]
    finish(table, leases[1])
    finish(table, leases[0])
    assert granted(ask(table, B, 0, 6)) == [(1, 0, 0)]
    assert granted(finish(table, leases[2])) == []
    assert granted(ask(table, B, 1, 3)) == [(1, 1, 6)]


def test_rooms_take_turns_and_the_pieces_of_a_room_go_in_order() -> None:
    table = table_of(4)
    (lease,) = ask(table, A, 0, 4)
    for room, piece in ((A, 1), (A, 2), (B, 0), (C, 0), (B, 1)):
        assert ask(table, room, piece, 4) == []
    order = []
    while table.num_waiting:
        (lease,) = finish(table, lease)
        order += [(lease.key.room, lease.piece)]
    assert order == [(0, 1), (1, 0), (2, 0), (0, 2), (1, 1)]


def test_smaller_pieces_pass_a_large_one_only_so_often() -> None:
    table = table_of(10)
    (small,) = ask(table, B, 0, 4)
    ask(table, C, 0, 4)
    assert ask(table, A, 0, 10) == []
    for piece in range(1, 9):
        ask(table, B, piece, 4)
    passed = 0
    while True:
        leases = finish(table, small)
        if not leases:
            break
        (small,) = leases
        passed += 1
        table.check_invariants()
    assert passed == MAX_PASSED
    (other,) = table.all()
    assert granted(finish(table, other)) == [(0, 0, 0)]


def test_an_area_of_one_and_a_half_pieces_serves_three_rooms_evenly() -> None:
    rounds = 5
    table = table_of(15)
    asked = dict.fromkeys((A, B, C), 0)
    live: deque[Lease] = deque()
    for room in asked:
        for piece in range(rounds):
            live += ask(table, room, piece, 10, frozenset({0, 1}))
    most_apart = 0
    while live:
        lease = live.popleft()
        asked[lease.key] += 1
        most_apart = max(most_apart, max(asked.values()) - min(asked.values()))
        live += finish(table, lease)
        table.check_invariants()
    assert set(asked.values()) == {rounds}
    assert most_apart <= 2  # the first to ask got one at once, and its turn was on then
    assert table.num_waiting == 0


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


def test_a_lease_lands_with_its_last_writer_whatever_the_order() -> None:
    table = table_of(8)
    (lease,) = ask(table, A, 0, 8, frozenset({0, 3, 5}))
    assert table.arrived(lease, 3) == []
    assert table.arrived(lease, 0) == []
    assert lease.missing == {5}
    assert lease.state is LeaseState.GRANTED
    assert table.arrived(lease, 5) == []
    assert lease.state is LeaseState.LANDED
    assert table.get(lease.lease_id) is lease


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


def test_an_id_is_never_used_again() -> None:
    table = table_of(8)
    seen = set()
    for piece in range(5):
        (lease,) = ask(table, A, piece, 8)
        seen.add(lease.lease_id)
        finish(table, lease)
    assert len(seen) == 5


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


def test_the_last_arrival_proves_that_a_held_lease_is_free() -> None:
    table = table_of(8)
    (lease,) = ask(table, A, 0, 8, frozenset({0, 1}))
    ask(table, B, 0, 8)
    table.arrived(lease, 0)
    table.close(A)
    assert granted(table.arrived(lease, 1)) == [(1, 0, 0)]
    assert lease.state is LeaseState.HELD  # and never landed: nothing is scattered
    assert table.of_room(A) == []


def test_a_landed_lease_outlives_its_room_until_its_copy_has_ended() -> None:
    table = table_of(8)
    (lease,) = ask(table, A, 0, 8)
    ask(table, B, 0, 8)
    table.arrived(lease, 0)
    table.close(A)
    assert table.drained(A) == []  # the copy still reads
    assert table.of_room(A) == [lease]
    assert granted(table.end(lease)) == [(1, 0, 0)]
    assert table.of_room(A) == []


def test_closing_the_room_in_front_serves_the_others() -> None:
    table = table_of(10)
    ask(table, C, 0, 6)
    ask(table, A, 0, 10)
    leases = [ask(table, B, piece, 4) for piece in range(MAX_PASSED + 1)]
    while leases[0]:
        leases[0] = finish(table, leases[0][0])
    assert granted(table.close(A)) == [(1, MAX_PASSED, 6)]


def test_a_piece_that_only_held_leases_keep_out_bars_no_other() -> None:
    table = table_of(10)
    ask(table, C, 0, 4)
    table.close(C)
    assert ask(table, A, 0, 10) == []
    for piece in range(3 * MAX_PASSED):
        (lease,) = ask(table, B, piece, 6)
        finish(table, lease)
    assert granted(table.drained(C)) == [(0, 0, 0)]


def test_an_open_room_is_not_drained() -> None:
    table = table_of(8)
    (lease,) = ask(table, A, 0, 8)
    assert table.drained(A) == table.drained(B) == table.close(B) == []
    assert table.all() == [lease]
    assert lease.state is LeaseState.GRANTED


# --- what is refused ------------------------------------------------------------------------------


def test_an_ask_for_more_than_the_area_has_is_refused_and_changes_nothing() -> None:
    table = table_of(8)
    with pytest.raises(LeaseError, match="the area has 32768"):
        table.ask(A, 0, 8 * BLOCK_BYTES + 1, ONE)
    assert table.num_waiting == 0
    assert granted(ask(table, A, 0, 8)) == [(0, 0, 0)]


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
