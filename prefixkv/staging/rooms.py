"""Decode's side of staging: which piece was asked for, granted, has arrived, is to be scattered.
Pure, one a rank.

A room is promised to its writers with so many unit pages, which all writers cut alike (`LeaseCut`).
A piece of it goes

    asked by some --by all, in its turn--> the ring's --LeaseGrant--> granted --the last writer's
    last part-->
        landed, Scatter --on_scattered--> done

The ring is asked when all writers have asked: a lease then waits for nobody who has nothing to
write yet. A writer that asks again for what is granted and not written by it is answered again; so
a lost ask or grant does no harm.

A writer has arrived when every part of its write was notified, or when it said that the write is
DONE: with a later ask, or at the end of the room (`on_written`). So a lost notification does no
harm either.

**Two things hold an end back.** SUCCESS waits for the last scatter (`complete`, then
RoomScattered). After a failure nothing is scattered any more, but a copy that runs still writes our
pages: they are not drained until it has ended (`may_drain`, then RoomQuiet). The leases of such a
room are held until `drained`.

Who a frame or a tag is from was checked before: `rank` is a writer's, its incarnation the one that
was promised.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixkv.errors import InternalError, ProtocolError, TransferError
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import LeaseAsk, LeaseGrant
from prefixkv.protocol.tags import ChunkTag
from prefixkv.staging.cut import LeaseCut
from prefixkv.staging.ring import Lease, LeaseState, StagingRing

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SayGrant:
    """Send `grant` to this writer of the room."""

    key: RoomKey
    rank: int
    grant: LeaseGrant


class Section(NamedTuple):
    """What one writer wrote of a lease: `num_bytes` at `offset` of our area."""

    rank: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy the sections of a lease into unit pages `first_unit`.. of the room, counted from the
    first one promised.

    `on_scattered` answers.
    """

    lease_id: int
    key: RoomKey
    first_unit: int
    num_units: int
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class RoomScattered:
    """All units of the room are in its pages. Comes once."""

    key: RoomKey


@dataclass(frozen=True, slots=True)
class RoomBroken:
    """The room cannot succeed: fail it. Comes once, instead of RoomScattered."""

    key: RoomKey
    error: Exception


@dataclass(frozen=True, slots=True)
class RoomQuiet:
    """Of a room that was closed with a copy running: none runs any more, `may_drain` holds from now
    on."""

    key: RoomKey


Action = SayGrant | Scatter | RoomScattered | RoomBroken | RoomQuiet

# --- what is kept ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Piece:
    first_unit: int
    num_units: int
    asked: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.first_unit + self.num_units


@dataclass(slots=True, eq=False)
class _Live:
    """A lease and the parts that have come of each rank's write."""

    lease: Lease
    parts: dict[int, set[int]] = field(default_factory=dict)
    num_parts: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Room:
    key: RoomKey
    ticket: int
    num_units: int
    cut: LeaseCut
    pieces: dict[int, _Piece] = field(default_factory=dict)
    live: dict[int, _Live] = field(default_factory=dict)  # by piece
    next_piece: int = 0  # for which the ring is asked next
    num_scattering: int = 0
    num_scattered: int = 0  # units
    written: set[int] = field(default_factory=set)  # ranks whose writes are all DONE
    closed: bool = False
    broken: bool = False


class StagedRooms:
    """See the module's text. Owned by the control thread; every method returns the actions to carry
    out, in order."""

    def __init__(self, capacity_bytes: int) -> None:
        """Raises ConfigError where the area is no positive number of whole blocks."""
        self.counters: Counter[str] = Counter()
        self._ring = StagingRing(capacity_bytes)
        self._rooms: dict[RoomKey, _Room] = {}
        self._live: dict[int, _Live] = {}  # by lease

    # --- rooms ------------------------------------------------------------------------------------

    def open(self, key: RoomKey, ticket: int, num_units: int, cut: LeaseCut) -> list[Action]:
        """The room's pages, of so many units, were promised to the writers of `cut`.

        Raises: LeaseError while the number's last use holds leases, or is open.
        """
        self._ring.open_room(key)
        self._rooms[key] = _Room(key, ticket, num_units, cut)
        return [] if num_units else [RoomScattered(key)]

    def close(self, key: RoomKey) -> list[Action]:
        """The room has ended: asks are dropped, granted leases held. Closed or unknown: no-op."""
        out: list[Action] = []
        room = self._rooms.get(key)
        if room is not None and not room.closed:
            room.closed = True
            self._say_grants(self._ring.close_room(key), out)
            self._forget_if_over(room)
        return out

    def drained(self, key: RoomKey) -> list[Action]:
        """Proof that no write of the closed room can land any more: its leases are free. Open or
        unknown: no-op."""
        out: list[Action] = []
        room = self._rooms.get(key)
        if room is not None and room.closed:
            held = [live for live in room.live.values() if live.lease.state is LeaseState.HELD]
            granted = self._ring.drained(key)
            for live in held:
                self._drop(live)
            self._say_grants(granted, out)
            self._forget_if_over(room)
        return out

    def complete(self, key: RoomKey) -> bool:
        """Whether every unit was scattered, so that the room may succeed. True also where nothing
        is staged."""
        room = self._rooms.get(key)
        return room is None or (room.num_scattered == room.num_units and not room.broken)

    def may_drain(self, key: RoomKey) -> bool:
        """Whether no copy of ours writes the room's pages. True also where nothing is staged."""
        room = self._rooms.get(key)
        return room is None or not room.num_scattering

    # --- what comes in ----------------------------------------------------------------------------

    def on_ask(self, rank: int, ask: LeaseAsk) -> list[Action]:
        """A writer wants to write a piece. Of a closed or unknown room, or another use of it:
        counted, no-op.

        Raises: ProtocolError for who is no writer, for units not promised, or a piece that differs
        from what another writer asked for or does not join its neighbours. Nothing was changed; the
        room should fail.
        """
        out: list[Action] = []
        room = self._rooms.get(RoomKey(ask.room, ask.generation))
        if room is None or room.closed or room.ticket != ask.ticket:
            self.counters["asks_of_no_room"] += 1
            return out
        _check_ask(room, rank, ask)
        self._written(room, rank, ask.written, out)
        piece = room.pieces.setdefault(ask.piece, _Piece(ask.first_unit, ask.num_units))
        if rank in piece.asked:
            self.counters["asked_again"] += 1
            self._repeat_grant(room, ask.piece, rank, out)
            return out
        piece.asked.add(rank)
        self._ask_ring(room, out)
        return out

    def on_arrival(self, tag: ChunkTag) -> list[Action]:
        """A part of a staged write has landed. Late, double, of no such lease or writer: counted,
        no-op."""
        out: list[Action] = []
        live = self._live.get(tag.slot)
        if live is None or (*live.lease.room, live.lease.chunk) != (
            tag.room,
            tag.generation,
            tag.chunk,
        ):
            self.counters["arrivals_of_no_lease"] += 1
            return out
        parts = live.parts.get(tag.rank, set())
        if tag.rank not in live.lease.missing or tag.part in parts:
            self.counters["arrivals_not_awaited"] += 1
        elif live.num_parts.setdefault(tag.rank, tag.num_parts) != tag.num_parts:
            self.counters["arrivals_that_disagree"] += 1
        else:
            live.parts[tag.rank] = parts | {tag.part}
            if len(parts) + 1 == tag.num_parts:
                self._arrived(live, tag.rank, out)
        return out

    def on_written(self, key: RoomKey, rank: int) -> list[Action]:
        """A writer's Outcome is ok: all its writes are DONE. Closed or unknown: no-op."""
        out: list[Action] = []
        room = self._rooms.get(key)
        if room is None or room.closed:
            return out
        room.written.add(rank)
        self._written(room, rank, room.next_piece, out)
        self._break_if_short(room, out)
        return out

    def on_scattered(self, lease_id: int, error: Exception | None) -> list[Action]:
        """A Scatter has ended. Unknown: no-op."""
        out: list[Action] = []
        live = self._live.get(lease_id)
        if live is None:
            return out
        room = self._rooms[live.lease.room]
        self._drop(live)
        room.num_scattering -= 1
        if error is None:
            room.num_scattered += room.pieces[live.lease.chunk].num_units
        self._say_grants(self._ring.end(lease_id), out)
        if room.closed:
            if not room.num_scattering:
                out.append(RoomQuiet(room.key))
            self._forget_if_over(room)
        elif error is not None:
            self._break(room, error, out)
        elif self.complete(room.key):
            out.append(RoomScattered(room.key))
        else:
            self._break_if_short(room, out)
        return out

    # --- leases -----------------------------------------------------------------------------------

    def _ask_ring(self, room: _Room, out: list[Action]) -> None:
        ranks = room.cut.ranks
        while (piece := room.pieces.get(room.next_piece)) is not None and piece.asked == ranks:
            leases = self._ring.ask(
                room.key, room.next_piece, room.cut.lease_bytes(piece.num_units), ranks
            )
            room.next_piece += 1
            self._say_grants(leases, out)

    def _say_grants(self, leases: list[Lease], out: list[Action]) -> None:
        for lease in leases:
            room = self._rooms[lease.room]
            room.live[lease.chunk] = self._live[lease.lease_id] = _Live(lease)
            out += [self._grant(room, lease, rank) for rank in sorted(lease.missing)]

    def _repeat_grant(self, room: _Room, piece: int, rank: int, out: list[Action]) -> None:
        live = room.live.get(piece)
        if live is not None and rank in live.lease.missing:
            out.append(self._grant(room, live.lease, rank))

    def _grant(self, room: _Room, lease: Lease, rank: int) -> SayGrant:
        grant = LeaseGrant(*room.key, lease.chunk, lease.lease_id, lease.offset, room.ticket)
        return SayGrant(room.key, rank, grant)

    def _written(self, room: _Room, rank: int, stop: int, out: list[Action]) -> None:
        """The writer's writes of all pieces below `stop` are DONE."""
        for live in [
            live for piece, live in room.live.items() if piece < stop and rank in live.lease.missing
        ]:
            self.counters["arrivals_not_notified"] += 1
            self._arrived(live, rank, out)

    def _arrived(self, live: _Live, rank: int, out: list[Action]) -> None:
        """All of a writer's bytes are in the lease."""
        lease = live.lease
        room = self._rooms[lease.room]
        landed, granted = self._ring.arrived(lease.room, lease.lease_id, rank)
        if landed is not None:
            room.num_scattering += 1
            out.append(self._scatter(room, lease))
        elif not lease.missing:  # it was held, and is free
            self._drop(live)
            self._forget_if_over(room)
        self._say_grants(granted, out)

    def _drop(self, live: _Live) -> None:
        del self._live[live.lease.lease_id], self._rooms[live.lease.room].live[live.lease.chunk]

    def _scatter(self, room: _Room, lease: Lease) -> Scatter:
        piece = room.pieces[lease.chunk]
        sections = tuple(
            Section(rank, lease.offset + offset, num_bytes)
            for rank, (offset, num_bytes) in room.cut.sections(piece.num_units).items()
        )
        return Scatter(lease.lease_id, room.key, piece.first_unit, piece.num_units, sections)

    # --- ends -------------------------------------------------------------------------------------

    def _break_if_short(self, room: _Room, out: list[Action]) -> None:
        """All writers have written all they will, and the last of it is scattered: no more will
        come."""
        if (
            room.written >= room.cut.ranks
            and not room.num_scattering
            and not self.complete(room.key)
        ):
            error = (
                f"{room.num_scattered} of {room.num_units} unit pages were staged when all "
                "writers were done"
            )
            self._break(room, TransferError(error), out)

    def _break(self, room: _Room, error: Exception, out: list[Action]) -> None:
        if not room.broken:
            room.broken = True
            out.append(RoomBroken(room.key, error))

    def _forget_if_over(self, room: _Room) -> None:
        if room.closed and not self._ring.knows(room.key):
            del self._rooms[room.key]

    # --- what there is ----------------------------------------------------------------------------

    @property
    def num_rooms(self) -> int:
        """Rooms that are open, or closed with leases left."""
        return len(self._rooms)

    @property
    def num_waiting(self) -> int:
        """Pieces that all writers have asked for, and that wait for a lease."""
        return self._ring.num_waiting

    def bytes_in(self, state: LeaseState) -> int:
        """Of the area, in leases of this state."""
        return self._ring.bytes_in(state)

    def check_invariants(self) -> None:
        """Raises InternalError naming the law that is broken, with the state."""
        self._ring.check_invariants()
        leases = self._ring.leases()
        laws = {
            "the ring's leases are ours": sorted(self._live)
            == sorted(lease.lease_id for lease in leases)
            and all(self._live[lease.lease_id].lease is lease for lease in leases)
            and all(
                self._rooms[lease.room].live[lease.chunk] is self._live[lease.lease_id]
                for lease in leases
            )
            and sum(len(room.live) for room in self._rooms.values()) == len(leases),
            "the ring's rooms are ours": len(self._rooms) == self._ring.num_rooms
            and all(self._ring.knows(key) for key in self._rooms),
            "a scatter runs for each landed lease": all(
                room.num_scattering
                == sum(lease.room == key and lease.state is LeaseState.LANDED for lease in leases)
                for key, room in self._rooms.items()
            ),
            "pieces lie inside and join": all(
                piece.end <= room.num_units and (after is None or after.first_unit == piece.end)
                for room in self._rooms.values()
                for number, piece in room.pieces.items()
                for after in [room.pieces.get(number + 1)]
            ),
            "what was scattered was promised": all(
                0 <= room.num_scattered <= room.num_units for room in self._rooms.values()
            ),
            "the ring was asked for what all writers asked for, in order": all(
                room.closed
                or (
                    all(
                        room.pieces[number].asked == room.cut.ranks
                        for number in range(room.next_piece)
                    )
                    and room.pieces.get(room.next_piece, _Piece(0, 0)).asked != room.cut.ranks
                )
                for room in self._rooms.values()
            ),
        }
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise InternalError(f"{'; '.join(broken)}: {self._rooms}, {self._live}")


def _check_ask(room: _Room, rank: int, ask: LeaseAsk) -> None:
    """Raises ProtocolError for an ask that does not fit the room, see `on_ask`."""
    if rank not in room.cut.ranks or rank != ask.rank:
        raise ProtocolError(
            f"rank {rank} asks for staging as rank {ask.rank}, {sorted(room.cut.ranks)} write"
        )
    first, count, end = ask.first_unit, ask.num_units, ask.first_unit + ask.num_units
    if not 0 < count <= room.cut.units_per_piece or end > room.num_units:
        raise ProtocolError(
            f"a piece of units {first} to {end} of {room.num_units}, at most "
            f"{room.cut.units_per_piece} at once"
        )
    known = room.pieces.get(ask.piece)
    if known is not None and (known.first_unit, known.num_units) != (first, count):
        raise ProtocolError(
            f"piece {ask.piece} is units {first} to {end}, another writer's {known}"
        )
    before, after = room.pieces.get(ask.piece - 1), room.pieces.get(ask.piece + 1)
    starts = first == 0 if ask.piece == 0 else first >= ask.piece
    if not starts or (before and before.end != first) or (after and after.first_unit != end):
        raise ProtocolError(
            f"piece {ask.piece} is units {first} to {end}, between {before} and {after}"
        )
    if ask.written > ask.piece:
        raise ProtocolError(
            f"rank {rank} asks for piece {ask.piece} and has written all below {ask.written}"
        )
    if rank in room.written and not (known and rank in known.asked):
        raise ProtocolError(
            f"rank {rank} asks for piece {ask.piece} and has said that all is written"
        )
