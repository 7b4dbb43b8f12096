"""Decode's side of staging: pieces from their ask to the copy into our pages. Pure, one per rank.

A room's unit pages are promised to its writers, which all cut them alike (`LeaseCut`). A piece goes

    asked by some --by all, in its turn--> the table's --LeaseGrant--> granted
        --the last writer's last part--> landed, Scatter --on_scattered--> done

The sender of a frame or a tag was checked before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixkv.errors import LeaseError, ProtocolError, TransferError, check_laws
from prefixkv.memory.kv_layout import BLOCK_BYTES, RelayArea
from prefixkv.memory.mesh import Shard, sent_shares
from prefixkv.paging import Pages, pages_for, unit_pages
from prefixkv.protocol.events import RoomDrained, RoomEnded, RoomOverdue
from prefixkv.protocol.ids import ChunkTag, KVPoll, RoomKey
from prefixkv.protocol.machine import Fail
from prefixkv.protocol.messages import Hello, HelloReply, LeaseAsk, LeaseGrant, Promise
from prefixkv.protocol.receiver_machine import UnitsRelayed
from prefixkv.staging.leases import Lease, LeaseCut, LeaseState, LeaseTable, Section


class StagingPlan(NamedTuple):
    """How one prefill worker stages for us: `parts` are the parts of the model that its writers
    send, in our pool's own numbers."""

    cut: LeaseCut
    parts: dict[int, Shard]
    unit_tokens: int
    checksum: str = ""

    @classmethod
    def of(cls, hello: Hello, reply: HelloReply) -> StagingPlan:
        """Compute the plan from our Hello and the worker's answer. Raises HandshakeError where a
        lease takes no unit page."""
        assert hello.relay is not None
        readers = hello.topology.mesh(hello.digest)
        writers = reply.topology.mesh(reply.digest)
        unit_tokens = min(hello.topology.page_size, reply.topology.page_size)
        shares = sent_shares(writers, readers, hello.rank).items()
        parts = {rank: share.inside(readers.shard(hello.rank)) for rank, share in shares}
        cut = LeaseCut.into(writers, readers, hello.rank, hello.layout, unit_tokens, hello.relay)
        return cls(cut, parts, unit_tokens, reply.checksum)


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """Send `grant` to this writer of the room."""

    key: RoomKey
    rank: int
    grant: LeaseGrant


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Copy each section of a lease, the part `plan.parts[section.rank]` of the model, into these
    unit pages of our pool. `on_scattered` answers. Where the plan has a `checksum`, the algorithm
    of those in `tags`, they are compared with the pages behind that."""

    lease_id: int
    units: Pages
    sections: tuple[Section, ...]
    plan: StagingPlan
    tags: tuple[ChunkTag, ...]


@dataclass(frozen=True, slots=True)
class ToRoom:
    """Tell the room's machine: all bytes of units that a writer owes are in a lease; or it fails,
    since it cannot succeed. That comes once, and not for a held back end."""

    key: RoomKey
    event: UnitsRelayed | Fail


Ending = RoomEnded | RoomDrained | RoomOverdue
StagedRoomAction = Grant | Scatter | ToRoom | Ending


@dataclass(slots=True, eq=False)
class _RoomPiece:
    """Units, and how far the writers are."""

    first_unit: int
    num_units: int
    asked: set[int] = field(default_factory=set)
    # By rank: of how many parts its write is, and those that have landed.
    parts: dict[int, tuple[int, set[int]]] = field(default_factory=dict, repr=False)
    tags: list[ChunkTag] = field(default_factory=list, repr=False)

    @property
    def end(self) -> int:
        return self.first_unit + self.num_units


@dataclass(slots=True, eq=False)
class _StagedRoom:
    """A staged room from its promise until its end was passed on: SUCCESS, or RoomDrained."""

    key: RoomKey
    ticket: int
    units: Pages
    plan: StagingPlan
    pieces: dict[int, _RoomPiece] = field(default_factory=dict)
    next_piece: int = 0  # piece that the table is asked for next
    num_scattered: int = 0  # units
    closed: bool = False  # it has failed
    broken: bool = False  # it cannot succeed
    held: RoomEnded | RoomDrained | None = None  # the end that is held back

    @property
    def complete(self) -> bool:
        return self.num_scattered == len(self.units) and not self.broken


class StagingReceiver:
    """The staged rooms of one decode rank. Owned by the control object.

    What is to be done is said to `say`, in order. The table is asked when all writers have asked,
    so a lease waits for no writer without KV. A repeated ask for a granted, unwritten piece is
    answered again: a lost frame does no harm. A writer has arrived when every part was notified,
    with its section's blocks; its own outcome is never enough.

    A room's machine knows nothing of staging, so its end goes through `pass_on`. SUCCESS waits for
    the last scatter. After a failure RoomDrained waits for a copy that still writes our pages, and
    the leases are held until it comes.
    """

    def __init__(self, area: RelayArea, say: Callable[[StagedRoomAction], None]) -> None:
        """Begin with a free area. `leases` is only for reading."""
        self._say = say
        self.counters: Counter[str] = Counter()
        self.leases = LeaseTable(area.num_bytes)
        self._rooms: dict[RoomKey, _StagedRoom] = {}

    def open(self, promise: Promise, page_size: int, plan: StagingPlan) -> None:
        """Enter a room with pages promised to the writers of `plan`. Raises LeaseError while the
        number's last use is open, or not drained."""
        key = RoomKey(promise.room, promise.generation)
        if key in self._rooms:
            raise LeaseError(f"{key} has a life in staging already")
        num_units = pages_for(promise.fill_len - promise.prefix_len, plan.unit_tokens)
        units = unit_pages(promise.page_ids(), page_size // plan.unit_tokens, 0, num_units)
        self._rooms[key] = _StagedRoom(key, promise.ticket, units, plan)

    def pass_on(self, ending: Ending) -> None:
        """Say the machine's event of a room's end, if it may pass now, and what follows."""
        room = self._rooms.get(ending.key)
        if room is None or isinstance(ending, RoomOverdue):
            self._say(ending)
        else:
            self._pass_on(room, ending)

    # --- input ------------------------------------------------------------------------------------

    def on_ask(self, rank: int, ask: LeaseAsk) -> None:
        """Take a writer's ask for a piece. Of a closed or unknown room, or another use of it:
        counted, no-op.

        Raises ProtocolError, with nothing changed, for a rank that is no writer, for units not
        promised, or a piece that differs from another writer's or does not join its neighbours; the
        room has to fail.
        """
        room = self._rooms.get(RoomKey(ask.room, ask.generation))
        # 1. Late: the ticket tells this use of the number from another.
        if room is None or room.closed or room.ticket != ask.ticket:
            self.counters["asks_of_no_room"] += 1
            return
        _check_ask(room, rank, ask)
        asked = room.pieces.setdefault(ask.piece, _RoomPiece(ask.first_unit, ask.num_units)).asked
        # 2. Asked again: the ask or the grant was lost, or the piece waits. Only this writer is
        # answered.
        if rank in asked:
            self.counters["asked_again"] += 1
            again = [ls for ls in self.leases.of_room(room.key) if ls.piece == ask.piece]
            self._send_grants(again, rank)
            return
        # 3. The next pieces in order that all writers have asked for: each may have waited only for
        # this one. The table sees them in the order in which the writers write.
        asked.add(rank)
        cut = room.plan.cut
        while (due := room.pieces.get(room.next_piece)) and due.asked == cut.ranks:
            number, num_bytes = room.next_piece, cut.lease_bytes(due.num_units)
            room.next_piece += 1
            self._send_grants(self.leases.ask(room.key, number, num_bytes, cut.ranks))

    def on_arrival(self, tag: ChunkTag) -> None:
        """Take a notification of a part. Late, double, of no lease or writer: counted, no-op."""
        lease = self.leases.get(tag.lease_id)
        # 1. A lease id is not used again soon, so a tag of a lease that is gone finds none; room
        # and piece are compared as well, since the peer may send anything.
        named = tag.room, tag.generation, tag.chunk
        if lease is None or (*lease.key.numbers, lease.piece) != named:
            self.counters["arrivals_of_no_lease"] += 1
            return
        room = self._rooms[lease.key]
        piece = room.pieces[lease.piece]
        parts, due = piece.parts, room.plan.cut.sections(piece.num_units).get(tag.rank)
        num_parts, landed = parts.get(tag.rank, (tag.num_parts, set()))
        # 2. Repeated, or of a rank that does not write here.
        # 3. Contradicts the parts before, or our own cut.
        # 4. Counts.
        if due is None or tag.rank not in lease.missing or tag.part in landed:
            self.counters["arrivals_not_awaited"] += 1
        elif (num_parts, -(-due.num_bytes // BLOCK_BYTES)) != (tag.num_parts, tag.num_pages):
            self.counters["arrivals_that_disagree"] += 1
        else:
            landed.add(tag.part)
            parts[tag.rank] = num_parts, landed
            piece.tags.append(tag)
            if len(landed) == num_parts:
                self._arrived(lease, tag.rank)

    def on_scattered(self, lease_id: int, error: Exception | None) -> None:
        """Take the end of a Scatter. Unknown: no-op."""
        if (lease := self.leases.get(lease_id)) is None:
            return
        room = self._rooms[lease.key]
        # The lease first, whether the copy failed or not: nothing reads or writes its bytes any
        # more.
        self._send_grants(self.leases.end(lease))
        if error is None:
            room.num_scattered += room.pieces[lease.piece].num_units
        elif not room.closed:
            self._break(room, error)
            return
        # The last copy may be the one that the held end waits for.
        if room.held is not None:
            self._pass_on(room, room.held)

    def _send_grants(self, leases: list[Lease], only: int | None = None) -> None:
        for lease in leases:
            ticket = self._rooms[lease.key].ticket
            grant = LeaseGrant(
                *lease.key.numbers, lease.piece, lease.lease_id, lease.offset, ticket
            )
            ranks = [rank for rank in sorted(lease.missing) if only in (None, rank)]
            for rank in ranks:
                self._say(Grant(lease.key, rank, grant))

    def _arrived(self, lease: Lease, rank: int) -> None:
        """Scatter the lease if that was the last writer's."""
        room = self._rooms[lease.key]
        piece = room.pieces[lease.piece]
        piece.parts.pop(rank, None)
        granted = self.leases.arrived(lease, rank)
        if lease.state is LeaseState.LANDED:
            units, sections = room.units[piece.first_unit : piece.end], self.sections_of(lease)
            self._say(Scatter(lease.lease_id, units, sections, room.plan, tuple(piece.tags)))
        self._send_grants(granted)
        # Last: the room may end by it, and the actions above would then be of a closed room.
        self._say(ToRoom(lease.key, UnitsRelayed(rank, piece.num_units)))

    def _num_landed(self, room: _StagedRoom) -> int:
        leases = self.leases.of_room(room.key)
        landed = [lease.piece for lease in leases if lease.state is LeaseState.LANDED]
        return sum(room.pieces[piece].num_units for piece in landed)

    def _pass_on(self, room: _StagedRoom, ending: RoomEnded | RoomDrained) -> None:
        # FAILED is reported at once. SUCCESS waits for units that are not scattered, RoomDrained
        # for copies that still write the pages: the machine's proof is of writes into leases, not
        # of our copies.
        failed = isinstance(ending, RoomEnded) and ending.poll is KVPoll.FAILED
        if isinstance(ending, RoomDrained):
            self._send_grants(self.leases.drained(room.key))
            waits = self._num_landed(room) > 0
        else:
            waits = not failed and not room.complete
        room.held = ending if waits else None
        if waits and isinstance(ending, RoomEnded):
            coming = room.num_scattered + self._num_landed(room)
            if coming < len(room.units):
                # All that its writers say they owe is here, and it is not what they were promised.
                part = f"{coming} of {len(room.units)} unit pages were staged"
                self._break(room, TransferError(f"{part} when all writers were done"))
                return
        # `close` holds the leases that writers may still write; after SUCCESS there are none.
        if not waits:
            self._say(ending)
            room.closed = True
            self._send_grants(self.leases.close(room.key))
            if not failed:
                del self._rooms[room.key]

    def _break(self, room: _StagedRoom, error: Exception) -> None:
        """Fail a room that cannot succeed, once. Where SUCCESS was held back, only our copy failed,
        and nothing of its writers can land: the room ends and drains here."""
        if room.broken:
            return
        room.broken = True
        if room.held is None:
            self._say(ToRoom(room.key, Fail(error)))
        else:
            self._pass_on(room, RoomEnded(room.key, KVPoll.FAILED, error))
            self._pass_on(room, RoomDrained(room.key))

    @property
    def num_rooms(self) -> int:
        """Number of rooms with a last end that has not been passed on."""
        return len(self._rooms)

    @property
    def num_waiting(self) -> int:
        """Number of rooms with an end that is held back."""
        return sum(room.held is not None for room in self._rooms.values())

    def sections_of(self, lease: Lease) -> tuple[Section, ...]:
        room = self._rooms[lease.key]
        num_units = room.pieces[lease.piece].num_units
        return tuple(room.plan.cut.sections(num_units, lease.offset).values())

    def check_invariants(self) -> None:
        """Check every law. Raises InternalError that names the broken one, with the state."""
        self.leases.check_invariants()
        for lease in self.leases.all():
            check_laws({"a lease is of a room": lease.key in self._rooms}, lease)
            room = self._rooms[lease.key]
            states = LeaseState.LANDED, LeaseState.HELD if room.closed else LeaseState.GRANTED
            laws = {
                "a lease is of a piece that was asked for": lease.piece < room.next_piece,
                "HELD is of closed rooms, GRANTED of open ones": lease.state in states,
            }
            check_laws(laws, lease, room)
        for room in self._rooms.values():
            pieces, ranks = room.pieces, room.plan.cut.ranks
            ends = {number + 1: piece.end for number, piece in pieces.items()}
            apart = [n for n, p in pieces.items() if ends.get(n, p.first_unit) != p.first_unit]
            by_all = {number for number, piece in pieces.items() if piece.asked == ranks}
            next_waits = room.closed or room.next_piece not in by_all
            end_waits = self._num_landed(room) > 0 if room.closed else not room.complete
            laws = {
                "pieces lie inside": all(end <= len(room.units) for end in ends.values()),
                "pieces join": not apart,
                "what was scattered was promised": 0 <= room.num_scattered <= len(room.units),
                "all asked for what leases are for": by_all.issuperset(range(room.next_piece)),
                "what all asked for, in order, was asked of the table": next_waits,
                "an end is held back for a copy or for units to come": not room.held or end_waits,
            }
            check_laws(laws, room)


def _check_ask(room: _StagedRoom, rank: int, ask: LeaseAsk) -> None:
    """Raise ProtocolError for an ask that the room cannot take; see `on_ask`."""
    cut, same = room.plan.cut, room.pieces.get(ask.piece)
    first, count, end = ask.first_unit, ask.num_units, ask.first_unit + ask.num_units
    asks, piece = f"rank {rank} asks for", f"piece {ask.piece} is units {first} to {end}"
    # In order: the writer, the size, what other writers asked for, the neighbours. After these a
    # peer cannot get a lease beyond the promised units, or one unit twice.
    if rank not in cut.ranks or rank != ask.rank:
        raise ProtocolError(f"{asks} staging as rank {ask.rank}, {sorted(cut.ranks)} write")
    if not 0 < count <= cut.units_per_piece or end > len(room.units):
        what = f"a piece of units {first} to {end} of {len(room.units)}"
        raise ProtocolError(f"{what}, at most {cut.units_per_piece} at once")
    if same is not None and (same.first_unit, same.num_units) != (first, count):
        raise ProtocolError(f"{piece}, another writer's {same}")
    before, after = room.pieces.get(ask.piece - 1), room.pieces.get(ask.piece + 1)
    starts = first == 0 if ask.piece == 0 else first >= ask.piece
    if not starts or (before and before.end != first) or (after and after.first_unit != end):
        raise ProtocolError(f"{piece}, between {before} and {after}")
