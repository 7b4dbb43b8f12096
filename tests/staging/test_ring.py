"""The ring of staging leases: its rules one by one, and against a naive model that paints bytes."""

from __future__ import annotations

from collections import deque

import pytest

from prefixkv.errors import ConfigError, InternalError, LeaseError, ProtocolError
from prefixkv.protocol.ids import RoomKey
from prefixkv.staging.ring import MAX_LEASE_ID, MAX_PASSED, Lease, LeaseState, StagingRing
from tests.models.ring_machine import RingMachine

A, B, C, D = (RoomKey(room, 0) for room in range(4))
ONE = frozenset({0})


def ring_of(capacity: int, *rooms: RoomKey) -> StagingRing:
    ring = StagingRing(capacity, alignment_bytes=1)
    for room in rooms:
        ring.open_room(room)
    return ring


def granted(leases: list[Lease]) -> list[tuple[int, int, int]]:
    """(room, chunk, offset) of each."""
    return [(lease.room.room, lease.chunk, lease.offset) for lease in leases]


def finish(ring: StagingRing, lease: Lease) -> list[Lease]:
    """All writers arrive and the copy ends."""
    for writer in sorted(lease.missing):
        ring.arrived(lease.room, lease.lease_id, writer)
    return ring.end(lease.lease_id)


# --- grants ---------------------------------------------------------------------------------------


def test_leases_are_granted_while_there_is_room_and_then_wait() -> None:
    ring = ring_of(10, A, B)
    (first,) = ring.ask(A, 0, 4, ONE)
    (second,) = ring.ask(A, 1, 4, ONE)
    assert granted([first, second]) == [(0, 0, 0), (0, 1, 4)]
    assert first.lease_id != second.lease_id
    assert ring.ask(B, 0, 4, ONE) == []
    assert ring.num_waiting == 1
    assert granted(finish(ring, first)) == [(1, 0, 0)]
    assert ring.num_waiting == 0
    ring.check_invariants()


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    ring = StagingRing(16, alignment_bytes=8)
    ring.open_room(A)
    (lease,) = ring.ask(A, 0, 1, ONE)
    assert (lease.offset, lease.num_bytes) == (0, 8)
    assert ring.ask(A, 1, 9, ONE) == []


def test_freed_neighbours_are_one_gap_and_the_lowest_gap_is_taken_first() -> None:
    ring = ring_of(9, A, B)
    leases = [ring.ask(A, chunk, 3, ONE)[0] for chunk in range(3)]
    finish(ring, leases[1])
    finish(ring, leases[0])
    assert granted(ring.ask(B, 0, 6, ONE)) == [(1, 0, 0)]
    assert granted(finish(ring, leases[2])) == []
    assert granted(ring.ask(B, 1, 3, ONE)) == [(1, 1, 6)]


def test_rooms_take_turns_and_the_chunks_of_a_room_go_in_order() -> None:
    ring = ring_of(4, A, B, C)
    (lease,) = ring.ask(A, 0, 4, ONE)
    for room, chunk in ((A, 1), (A, 2), (B, 0), (C, 0), (B, 1)):
        assert ring.ask(room, chunk, 4, ONE) == []
    order = []
    while ring.num_waiting:
        (lease,) = finish(ring, lease)
        order += [(lease.room.room, lease.chunk)]
    assert order == [(0, 1), (1, 0), (2, 0), (0, 2), (1, 1)]


def test_smaller_chunks_pass_a_large_one_only_so_often() -> None:
    ring = ring_of(10, A, B, C)
    (small,) = ring.ask(B, 0, 4, ONE)
    ring.ask(C, 0, 4, ONE)
    assert ring.ask(A, 0, 10, ONE) == []
    for chunk in range(1, 9):
        ring.ask(B, chunk, 4, ONE)
    passed = 0
    while True:
        leases = finish(ring, small)
        if not leases:
            break
        (small,) = leases
        passed += 1
        ring.check_invariants()
    assert passed == MAX_PASSED
    (other,) = ring.leases()
    assert granted(finish(ring, other)) == [(0, 0, 0)]


def test_a_ring_of_one_and_a_half_chunks_serves_three_rooms_evenly() -> None:
    rounds = 5
    ring = ring_of(15, A, B, C)
    chunks = dict.fromkeys((A, B, C), 0)
    live: deque[Lease] = deque()
    for room in chunks:
        for chunk in range(rounds):
            live += ring.ask(room, chunk, 10, frozenset({0, 1}))
    most_apart = 0
    while live:
        lease = live.popleft()
        chunks[lease.room] += 1
        most_apart = max(most_apart, max(chunks.values()) - min(chunks.values()))
        live += finish(ring, lease)
        ring.check_invariants()
    assert set(chunks.values()) == {rounds}
    assert most_apart <= 2  # the first to ask got one at once, and its turn was on then
    assert ring.num_waiting == 0


def test_only_the_first_of_many_rooms_are_looked_at_for_a_smaller_chunk() -> None:
    large = [RoomKey(room, 1) for room in range(16)]
    ring = ring_of(10, A, B, *large)
    ring.ask(A, 0, 4, ONE)
    for room in large:
        assert ring.ask(room, 0, 10, ONE) == []
    assert ring.ask(B, 0, 4, ONE) == []  # it would fit, behind sixteen that do not
    ring.close_room(large[3])
    assert granted(ring.leases()) == [(0, 0, 0), (1, 0, 4)]


# --- arrivals and ends ----------------------------------------------------------------------------


def test_a_lease_lands_with_its_last_writer_whatever_the_order() -> None:
    ring = ring_of(8, A)
    (lease,) = ring.ask(A, 0, 8, frozenset({0, 3, 5}))
    assert ring.arrived(A, lease.lease_id, 3) == (None, [])
    assert ring.arrived(A, lease.lease_id, 3) == (None, [])  # twice
    assert ring.arrived(A, lease.lease_id, 4) == (None, [])  # not a writer of it
    assert ring.arrived(A, lease.lease_id, 0) == (None, [])
    assert lease.missing == {5}
    assert lease.state is LeaseState.GRANTED
    assert ring.arrived(A, lease.lease_id, 5) == (lease, [])
    assert lease.state is LeaseState.LANDED
    assert ring.arrived(A, lease.lease_id, 5) == (None, [])
    assert ring.counters == {"arrivals_not_awaited": 3}


def test_arrivals_of_foreign_and_dead_leases_are_counted_and_change_nothing() -> None:
    ring = ring_of(8, A, B)
    (lease,) = ring.ask(A, 0, 4, ONE)
    (other,) = ring.ask(A, 1, 4, ONE)
    finish(ring, other)
    assert ring.arrived(B, lease.lease_id, 0) == (None, [])  # another room's
    assert ring.arrived(A, other.lease_id, 0) == (None, [])  # ended
    assert ring.arrived(A, 77, 0) == (None, [])
    assert ring.arrived(A, -1, 0) == (None, [])
    assert ring.counters["arrivals_of_no_lease"] == 4
    assert ring.leases() == [lease]
    assert lease.missing == {0}


def test_a_lease_is_ended_once_and_only_when_it_has_landed() -> None:
    ring = ring_of(8, A)
    (lease,) = ring.ask(A, 0, 8, ONE)
    with pytest.raises(LeaseError, match=r"is granted, ranks \[0\]"):
        ring.end(lease.lease_id)
    finish(ring, lease)
    for gone in (lease.lease_id, 99):
        with pytest.raises(LeaseError, match="ended, or never granted"):
            ring.end(gone)
    ring.check_invariants()


def test_an_id_is_never_used_again() -> None:
    ring = ring_of(8, A)
    seen = set()
    for chunk in range(5):
        (lease,) = ring.ask(A, chunk, 8, ONE)
        seen.add(lease.lease_id)
        finish(ring, lease)
    assert len(seen) == 5


def test_asking_again_repeats_the_word_of_a_granted_lease_and_nothing_else() -> None:
    ring = ring_of(8, A)
    (first,) = ring.ask(A, 0, 8, ONE)
    assert ring.ask(A, 1, 8, ONE) == []
    assert ring.ask(A, 0, 8, ONE) == [first]
    assert ring.ask(A, 1, 8, ONE) == []
    assert ring.num_waiting == 1
    ring.arrived(A, first.lease_id, 0)
    assert ring.ask(A, 0, 8, ONE) == []  # it is written already
    assert granted(ring.end(first.lease_id)) == [(0, 1, 0)]
    assert ring.ask(A, 0, 8, ONE) == []
    assert len(ring.leases()) == 1


# --- rooms that end -------------------------------------------------------------------------------


def test_a_closed_room_waits_no_more_and_its_leases_are_held_until_drained() -> None:
    ring = ring_of(8, A, B)
    (lease,) = ring.ask(A, 0, 8, ONE)
    ring.ask(A, 1, 8, ONE)
    ring.ask(B, 0, 8, ONE)
    assert ring.close_room(A) == []
    assert ring.close_room(A) == []
    assert lease.state is LeaseState.HELD
    assert ring.bytes_in(LeaseState.HELD) == 8
    assert ring.num_waiting == 1
    with pytest.raises(LeaseError, match="is held"):
        ring.end(lease.lease_id)
    with pytest.raises(ProtocolError, match="not open"):
        ring.ask(A, 2, 4, ONE)
    with pytest.raises(LeaseError, match="life"):
        ring.open_room(A)
    assert granted(ring.drained(A)) == [(1, 0, 0)]
    assert ring.drained(A) == []
    assert not ring.knows(A)
    ring.open_room(A)


def test_the_last_arrival_proves_that_a_held_lease_is_free() -> None:
    ring = ring_of(8, A, B)
    (lease,) = ring.ask(A, 0, 8, frozenset({0, 1}))
    ring.ask(B, 0, 8, ONE)
    ring.arrived(A, lease.lease_id, 0)
    ring.close_room(A)
    done, served = ring.arrived(A, lease.lease_id, 1)
    assert done is None  # nobody scatters for a dead room
    assert granted(served) == [(1, 0, 0)]
    assert not ring.knows(A)


def test_a_landed_lease_outlives_its_room_until_its_copy_has_ended() -> None:
    ring = ring_of(8, A, B)
    (lease,) = ring.ask(A, 0, 8, ONE)
    ring.ask(B, 0, 8, ONE)
    ring.arrived(A, lease.lease_id, 0)
    ring.close_room(A)
    assert ring.drained(A) == []  # the copy still reads
    assert ring.knows(A)
    assert granted(ring.end(lease.lease_id)) == [(1, 0, 0)]
    assert not ring.knows(A)


def test_closing_the_room_that_bars_the_way_serves_the_others() -> None:
    ring = ring_of(10, A, B, C)
    ring.ask(C, 0, 6, ONE)
    ring.ask(A, 0, 10, ONE)
    leases = [ring.ask(B, chunk, 4, ONE) for chunk in range(MAX_PASSED + 1)]
    while leases[0]:
        leases[0] = finish(ring, leases[0][0])
    assert granted(ring.close_room(A)) == [(1, MAX_PASSED, 6)]


def test_a_chunk_that_only_held_leases_keep_out_bars_nobody() -> None:
    ring = ring_of(10, A, B, C)
    ring.ask(C, 0, 4, ONE)
    ring.close_room(C)
    assert ring.ask(A, 0, 10, ONE) == []
    for chunk in range(3 * MAX_PASSED):
        (lease,) = ring.ask(B, chunk, 6, ONE)
        finish(ring, lease)
    assert granted(ring.drained(C)) == [(0, 0, 0)]


def test_an_open_room_is_not_drained() -> None:
    ring = ring_of(8, A)
    ring.ask(A, 0, 8, ONE)
    assert ring.drained(A) == ring.drained(B) == ring.close_room(B) == []
    assert ring.bytes_in(LeaseState.GRANTED) == 8


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "chunk", "num_bytes", "writers", "message"),
    [
        (D, 0, 1, ONE, "not open"),
        (A, 1, 1, ONE, "0 is next"),
        (A, 0, 9, ONE, "the ring has 8"),
        (A, 0, 0, ONE, "the ring has 8"),
        (A, 0, -1, ONE, "the ring has 8"),
        (A, 0, 1, frozenset(), "nobody writes"),
    ],
)
def test_bad_asks_are_a_peers_fault_and_change_nothing(
    room: RoomKey, chunk: int, num_bytes: int, writers: frozenset[int], message: str
) -> None:
    ring = ring_of(8, A)
    with pytest.raises(ProtocolError, match=message):
        ring.ask(room, chunk, num_bytes, writers)
    assert ring.num_waiting == 0
    assert granted(ring.ask(A, 0, 8, ONE)) == [(0, 0, 0)]


@pytest.mark.parametrize(("capacity", "alignment"), [(0, 1), (-8, 8), (12, 8), (8, 0)])
def test_a_capacity_is_whole_aligned_blocks(capacity: int, alignment: int) -> None:
    with pytest.raises(ConfigError):
        StagingRing(capacity, alignment)


def test_the_audit_sees_what_is_broken() -> None:
    ring = ring_of(8, A)
    (first,) = ring.ask(A, 0, 4, ONE)
    ring.ask(A, 1, 4, ONE)
    ring.check_invariants()
    first.num_bytes = 5
    with pytest.raises(InternalError, match="overlap"):
        ring.check_invariants()


TestRing = RingMachine.TestCase


def test_lease_ids_fit_into_a_tag_and_go_round_those_that_live() -> None:
    ring = ring_of(10, A)
    (first,) = ring.ask(A, 0, 1, ONE)
    ring._last_id = MAX_LEASE_ID - 1
    (last,) = ring.ask(A, 1, 1, ONE)
    (next_one,) = ring.ask(A, 2, 1, ONE)
    assert (first.lease_id, last.lease_id, next_one.lease_id) == (1, MAX_LEASE_ID, 2)
