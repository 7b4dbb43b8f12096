"""Decode's staged rooms, rule by rule."""

from __future__ import annotations

import pytest

from prefixkv.errors import LeaseError, ProtocolError, TransferError
from prefixkv.memory.staging_area import BLOCK_BYTES
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import LeaseAsk
from prefixkv.protocol.tags import ChunkTag
from prefixkv.staging.cut import LeaseCut
from prefixkv.staging.ring import LeaseState
from prefixkv.staging.rooms import (
    Action,
    RoomBroken,
    RoomQuiet,
    RoomScattered,
    SayGrant,
    Scatter,
    Section,
    StagedRooms,
)

A, B = RoomKey(1, 0), RoomKey(2, 5)
TICKET = 9
# Two writers, four units a piece: each has one block of a lease of two.
CUT = LeaseCut(((0, 1000), (2, 1024)), units_per_piece=4, area_bytes=4 * BLOCK_BYTES)
LEASE = 2 * BLOCK_BYTES


def rooms_of(num_units: int, *keys: RoomKey, leases: int = 2) -> StagedRooms:
    rooms = StagedRooms(leases * LEASE)
    for key in keys:
        assert rooms.open(key, TICKET, num_units, CUT) == []
    return rooms


def ask(
    rooms: StagedRooms, key: RoomKey, rank: int, piece: int, first: int, count: int = 4
) -> list[Action]:
    out = rooms.on_ask(rank, LeaseAsk(*key, rank, piece, first, count, TICKET))
    rooms.check_invariants()
    return out


def grants(actions: list[Action]) -> list[tuple[int, int, int, int]]:
    """(room, rank, piece, offset) of each; nothing else may be among them."""
    assert all(isinstance(action, SayGrant) for action in actions)
    said = [action for action in actions if isinstance(action, SayGrant)]
    assert all((action.grant.room, action.grant.generation) == action.key for action in said)
    assert all(action.grant.ticket == TICKET for action in said)
    return [
        (action.key.room, action.rank, action.grant.piece, action.grant.offset) for action in said
    ]


def lease_of(actions: list[Action]) -> int:
    (lease_id,) = {action.grant.lease_id for action in actions if isinstance(action, SayGrant)}
    return lease_id


def arrive(
    rooms: StagedRooms,
    key: RoomKey,
    rank: int,
    piece: int,
    lease: int,
    part: int = 0,
    parts: int = 1,
) -> list[Action]:
    out = rooms.on_arrival(ChunkTag(1, *key, rank, piece, part, parts, lease))
    rooms.check_invariants()
    return out


def granted(rooms: StagedRooms, key: RoomKey, piece: int, first: int, count: int = 4) -> int:
    ask(rooms, key, 0, piece, first, count)
    return lease_of(ask(rooms, key, 2, piece, first, count))


# --- asks -----------------------------------------------------------------------------------------


def test_a_lease_is_granted_to_all_writers_when_the_last_has_asked() -> None:
    rooms = rooms_of(8, A)
    assert ask(rooms, A, 2, 0, 0) == []
    assert rooms.bytes_in(LeaseState.GRANTED) == 0
    assert grants(ask(rooms, A, 0, 0, 0)) == [(1, 0, 0, 0), (1, 2, 0, 0)]
    assert rooms.bytes_in(LeaseState.GRANTED) == LEASE


def test_an_ask_for_what_is_granted_is_answered_again_until_it_is_written() -> None:
    rooms = rooms_of(8, A)
    assert ask(rooms, A, 0, 0, 0) == []
    assert ask(rooms, A, 0, 0, 0) == []  # not granted yet
    lease = lease_of(ask(rooms, A, 2, 0, 0))
    assert grants(ask(rooms, A, 2, 0, 0)) == [(1, 2, 0, 0)]
    arrive(rooms, A, 2, 0, lease)
    assert ask(rooms, A, 2, 0, 0) == []
    assert grants(ask(rooms, A, 0, 0, 0)) == [(1, 0, 0, 0)]
    assert rooms.counters["asked_again"] == 4


def test_pieces_are_granted_in_order_whatever_the_order_of_asks() -> None:
    rooms = rooms_of(12, A)
    for piece in (2, 1):
        for rank in (0, 2):
            assert ask(rooms, A, rank, piece, 4 * piece) == []
    assert ask(rooms, A, 0, 0, 0) == []
    assert grants(ask(rooms, A, 2, 0, 0)) == [
        (1, 0, 0, 0),
        (1, 2, 0, 0),
        (1, 0, 1, LEASE),
        (1, 2, 1, LEASE),
    ]
    assert rooms.num_waiting == 1


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
    rooms = rooms_of(12, A)
    ask(rooms, A, 2, 1, 4)
    with pytest.raises(ProtocolError, match=what):
        ask(rooms, A, rank, piece, first, count)
    for p in (0, 1, 2):
        ask(rooms, A, 2, p, 4 * p)
    assert [grants(ask(rooms, A, 0, p, 4 * p)) != [] for p in (0, 1, 2)] == [True, True, False]


def test_a_rank_speaks_for_itself_only() -> None:
    rooms = rooms_of(4, A)
    with pytest.raises(ProtocolError, match="as rank 2"):
        rooms.on_ask(0, LeaseAsk(*A, 2, 0, 0, 4, TICKET))


def test_asks_of_unknown_and_closed_rooms_and_of_another_use_are_counted() -> None:
    rooms = rooms_of(4, A)
    assert ask(rooms, B, 0, 0, 0) == []
    assert rooms.on_ask(0, LeaseAsk(*A, 0, 0, 0, 4, TICKET + 1)) == []
    granted(rooms, A, 0, 0)
    rooms.close(A)
    assert ask(rooms, A, 0, 0, 0) == []
    assert rooms.counters == {"asks_of_no_room": 3}


# --- arrivals and scatters ------------------------------------------------------------------------


def test_a_piece_is_scattered_when_every_part_of_every_writer_has_come() -> None:
    rooms = rooms_of(7, A)
    granted(rooms, A, 0, 0)
    lease = granted(rooms, A, 1, 4, 3)
    assert arrive(rooms, A, 0, 1, lease, part=1, parts=2) == []
    assert arrive(rooms, A, 2, 1, lease) == []
    assert arrive(rooms, A, 0, 1, lease, part=1, parts=2) == []
    (scatter,) = arrive(rooms, A, 0, 1, lease, part=0, parts=2)
    sections = (Section(0, LEASE, 3000), Section(2, LEASE + BLOCK_BYTES, 3072))
    assert scatter == Scatter(lease, A, first_unit=4, num_units=3, sections=sections)
    assert rooms.counters == {"arrivals_not_awaited": 1}
    assert arrive(rooms, A, 2, 1, lease) == []


def test_arrivals_that_fit_no_lease_are_counted_and_change_nothing() -> None:
    rooms = rooms_of(8, A, B)
    lease = granted(rooms, A, 0, 0)
    for key, rank, piece, slot in (
        (B, 0, 0, lease),
        (A, 0, 1, lease),
        (A, 0, 0, lease + 1),
        (A, 0, 0, -1),
    ):
        assert arrive(rooms, key, rank, piece, slot) == []
    assert rooms.counters["arrivals_of_no_lease"] == 4
    assert arrive(rooms, A, 1, 0, lease) == []  # no writer
    assert arrive(rooms, A, 0, 0, lease, part=0, parts=2) == []
    assert arrive(rooms, A, 0, 0, lease, part=1, parts=3) == []  # two or three?
    assert rooms.counters["arrivals_that_disagree"] == 1
    assert arrive(rooms, A, 2, 0, lease) == []
    assert len(arrive(rooms, A, 0, 0, lease, part=1, parts=2)) == 1


def test_the_end_of_a_scatter_frees_the_lease_and_the_next_is_granted() -> None:
    rooms = rooms_of(8, A, B, leases=1)
    lease = granted(rooms, A, 0, 0)
    for rank in (0, 2):
        assert ask(rooms, B, rank, 0, 0) == []
        arrive(rooms, A, rank, 0, lease)
    assert grants(rooms.on_scattered(lease, None)) == [(2, 0, 0, 0), (2, 2, 0, 0)]
    assert rooms.on_scattered(lease, None) == []
    rooms.check_invariants()


def test_a_room_is_scattered_with_its_last_unit() -> None:
    rooms = rooms_of(8, A)
    leases = [granted(rooms, A, 0, 0), granted(rooms, A, 1, 4)]
    for piece in (1, 0):
        for rank in (0, 2):
            arrive(rooms, A, rank, piece, leases[piece])
    assert rooms.on_scattered(leases[1], None) == []
    assert not rooms.complete(A)
    assert rooms.on_scattered(leases[0], None) == [RoomScattered(A)]
    assert rooms.complete(A)
    assert rooms.close(A) == []
    assert rooms.num_rooms == 0
    rooms.open(A, TICKET + 1, 8, CUT)
    assert not rooms.complete(A)


def test_a_room_without_units_is_scattered_at_once() -> None:
    rooms = StagedRooms(LEASE)
    assert rooms.open(A, TICKET, 0, CUT) == [RoomScattered(A)]
    assert rooms.complete(A)
    assert rooms.on_written(A, 0) + rooms.on_written(A, 2) == []


def test_a_scatter_that_failed_breaks_the_room_once() -> None:
    rooms = rooms_of(8, A)
    leases = [granted(rooms, A, 0, 0), granted(rooms, A, 1, 4)]
    for piece, lease in enumerate(leases):
        for rank in (0, 2):
            arrive(rooms, A, rank, piece, lease)
    error = OSError("no")
    assert rooms.on_scattered(leases[0], error) == [RoomBroken(A, error)]
    assert rooms.on_scattered(leases[1], error) == []
    assert not rooms.complete(A)
    assert rooms.bytes_in(LeaseState.LANDED) == 0


def test_a_later_ask_stands_for_notifications_that_were_lost() -> None:
    rooms = rooms_of(12, A, leases=1)
    lease = granted(rooms, A, 0, 0)
    arrive(rooms, A, 2, 0, lease)
    assert ask(rooms, A, 0, 1, 4) == []  # it has not said that piece 0 is written
    (scatter,) = rooms.on_ask(0, LeaseAsk(*A, 0, 1, 4, 4, TICKET, written=1))
    assert isinstance(scatter, Scatter)
    assert rooms.counters == {"arrivals_not_notified": 1, "asked_again": 1}
    assert rooms.on_ask(2, LeaseAsk(*A, 2, 1, 4, 4, TICKET, written=1)) == []
    assert grants(rooms.on_scattered(lease, None)) == [(1, 0, 1, 0), (1, 2, 1, 0)]
    with pytest.raises(ProtocolError, match="all below 3"):
        rooms.on_ask(0, LeaseAsk(*A, 0, 2, 8, 4, TICKET, written=3))
    rooms.check_invariants()


# --- outcomes -------------------------------------------------------------------------------------


def test_an_outcome_stands_for_notifications_that_were_lost() -> None:
    rooms = rooms_of(8, A, B)
    first, second = granted(rooms, A, 0, 0), granted(rooms, A, 1, 4)
    arrive(rooms, A, 0, 0, first)
    assert rooms.on_written(A, 0) == []
    assert [a.lease_id for a in rooms.on_written(A, 2) if isinstance(a, Scatter)] == [first, second]
    assert rooms.counters["arrivals_not_notified"] == 3
    assert arrive(rooms, A, 2, 0, first) == []
    rooms.on_scattered(first, None)
    assert rooms.on_scattered(second, None) == [RoomScattered(A)]


def test_a_room_that_is_short_when_all_have_written_is_broken() -> None:
    rooms = rooms_of(8, A)
    lease = granted(rooms, A, 0, 0)
    assert rooms.on_written(A, 0) == []
    (scatter,) = rooms.on_written(A, 2)
    assert isinstance(scatter, Scatter)
    with pytest.raises(ProtocolError, match="all is written"):
        ask(rooms, A, 0, 1, 4)
    (broken,) = rooms.on_scattered(lease, None)
    assert isinstance(broken, RoomBroken)
    assert isinstance(broken.error, TransferError)
    assert "4 of 8" in str(broken.error)


def test_a_room_for_which_nothing_was_asked_is_broken_by_the_last_outcome() -> None:
    rooms = rooms_of(8, A)
    assert rooms.on_written(A, 2) == []
    (broken,) = rooms.on_written(A, 0)
    assert isinstance(broken, RoomBroken)
    assert rooms.on_written(A, 0) == []


# --- ends -----------------------------------------------------------------------------------------


def test_a_failed_room_holds_its_leases_until_it_is_drained() -> None:
    rooms = rooms_of(8, A, B, leases=1)
    lease = granted(rooms, A, 0, 0)
    for rank in (0, 2):
        ask(rooms, A, rank, 1, 4)
        ask(rooms, B, rank, 0, 0)
    assert rooms.close(A) == []
    assert rooms.close(A) == []
    assert rooms.may_drain(A)
    assert rooms.bytes_in(LeaseState.HELD) == LEASE
    assert rooms.num_waiting == 1
    with pytest.raises(LeaseError):
        rooms.open(A, TICKET + 1, 8, CUT)
    assert grants(rooms.drained(A)) == [(2, 0, 0, 0), (2, 2, 0, 0)]
    rooms.check_invariants()
    assert arrive(rooms, A, 0, 0, lease) == []
    assert rooms.num_rooms == 1
    assert rooms.open(A, TICKET + 1, 8, CUT) == []


def test_closing_a_room_lets_those_behind_it_pass() -> None:
    rooms = StagedRooms(3 * BLOCK_BYTES)
    small = LeaseCut(((0, BLOCK_BYTES),), 2, 3 * BLOCK_BYTES)
    for key in (A, B):
        rooms.open(key, TICKET, 8, small)
    assert len(ask(rooms, B, 0, 0, 0, 1)) == 1
    large = RoomKey(3, 0)
    rooms.open(large, TICKET, 4, CUT)
    assert len(ask(rooms, A, 0, 0, 0, 2)) == 1
    assert ask(rooms, large, 0, 0, 0) == []
    assert ask(rooms, large, 2, 0, 0) == []
    assert ask(rooms, B, 0, 1, 1, 2) == []
    assert grants(rooms.close(A)) == []  # its lease is held
    assert grants(rooms.drained(A)) == [(3, 0, 0, BLOCK_BYTES), (3, 2, 0, BLOCK_BYTES)]
    assert grants(rooms.close(large)) == []
    assert grants(rooms.drained(large)) == [(2, 0, 1, BLOCK_BYTES)]


def test_the_last_arrival_frees_a_held_lease_and_nothing_is_scattered() -> None:
    rooms = rooms_of(8, A)
    lease = granted(rooms, A, 0, 0)
    arrive(rooms, A, 0, 0, lease)
    rooms.close(A)
    assert arrive(rooms, A, 2, 0, lease) == []
    assert rooms.num_rooms == 0


def test_a_copy_that_runs_keeps_a_failed_room_from_being_drained() -> None:
    rooms = rooms_of(8, A)
    leases = [granted(rooms, A, 0, 0), granted(rooms, A, 1, 4)]
    for piece, lease in enumerate(leases):
        for rank in (0, 2):
            arrive(rooms, A, rank, piece, lease)
    assert rooms.may_drain(A) is False
    rooms.close(A)
    assert rooms.drained(A) == []
    assert rooms.bytes_in(LeaseState.LANDED) == 2 * LEASE
    assert rooms.on_scattered(leases[0], OSError("no")) == []
    assert not rooms.may_drain(A)
    assert rooms.on_scattered(leases[1], None) == [RoomQuiet(A)]
    assert rooms.may_drain(A)
    assert rooms.num_rooms == 0


def test_unknown_rooms_hold_nothing_back() -> None:
    rooms = rooms_of(8, A)
    assert rooms.complete(B)
    assert rooms.may_drain(B)
    assert rooms.close(B) + rooms.drained(B) + rooms.drained(A) + rooms.on_written(B, 0) == []
    rooms.check_invariants()
