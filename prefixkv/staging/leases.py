"""Leases of decode's staging area: which ranks may write which bytes, and until when. Pure.

A lease is written by the ranks that its ask named, each once; then our own copy scatters it:

    asked -> GRANTED --last arrival--> LANDED --end--> gone
                |  the room is closed      ^ the room may be closed meanwhile: our copy reads it
                v
              HELD --proof that no write can land: `drained`, or the last arrival--> gone

Everything that a peer sends has been checked before, by the `StagingReceiver`.

All writers of a reader and the reader itself compute the same cut (`LeaseCut`) from the two meshes
and the reader's staging area, so none of it travels: a chunk is cut from its first unit page on
into pieces of `units_per_piece`, the last one taking the rest, and in the lease of a piece the
writers' sections lie one behind the other, by rank.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, le
from typing import Final, NamedTuple

from prefixkv.errors import HandshakeError, LeaseError, check_laws
from prefixkv.memory.kv_layout import BLOCK_BYTES, KVLayout, RelayArea, whole_blocks
from prefixkv.memory.mesh import Mesh, sent_shares
from prefixkv.memory.stage_plan import stage_unit_bytes
from prefixkv.protocol.ids import RoomKey


class Section(NamedTuple):
    """Bytes of a lease that one writer writes: `num_bytes` at `offset`."""

    rank: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LeaseCut:
    """The cut of chunks into leases for one reader; `shares`: (rank, bytes of a unit page) per
    writer."""

    shares: tuple[tuple[int, int], ...]
    units_per_piece: int
    area_bytes: int

    @classmethod
    def into(
        cls, writers: Mesh, readers: Mesh, reader: int, layout: KVLayout, unit_tokens: int,
        area: RelayArea,
    ) -> LeaseCut:  # fmt: skip
        """Compute the cut for rank `reader`, which has a pool of this layout, whose aligned groups
        are staged with the pages, and the staging area `area`. The meshes have passed
        `check_meshes`. Raises HandshakeError as `of`."""
        mine = readers.shard(reader)
        shares = tuple(
            (rank, sum(stage_unit_bytes(layout, share.inside(mine), unit_tokens)))
            for rank, share in sent_shares(writers, readers, reader).items()
        )
        return cls.of(shares, area)

    @classmethod
    def of(cls, shares: tuple[tuple[int, int], ...], area: RelayArea) -> LeaseCut:
        """Compute the cut for these shares. O(log units per lease), with a sum over the writers
        each. Raises HandshakeError where a lease cannot take one unit page.

        >>> area = RelayArea(base=4096, num_bytes=65536, lease_bytes=32768)
        >>> LeaseCut.of(((0, 4096), (1, 4096)), area)
        LeaseCut(shares=((0, 4096), (1, 4096)), units_per_piece=4, area_bytes=65536)
        """
        # Without the rounding of sections to blocks `most` units would fit; with it maybe fewer.
        # The size grows with the units, so bisection finds the largest number that fits.
        most = area.lease_bytes // sum(unit_bytes for _, unit_bytes in shares)
        lease_bytes = cls(shares, most, area.num_bytes).lease_bytes
        fitting = bisect_right(range(1, most + 1), area.lease_bytes, key=lease_bytes)
        if fitting < 1:
            raise HandshakeError(
                "staging lease_bytes", lease_bytes(1), area.lease_bytes, "cannot take one unit page"
            )
        return cls(shares, fitting, area.num_bytes)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for rank, _ in self.shares)

    def pieces(self, num_units: int) -> Iterator[tuple[int, int]]:
        """Cut a chunk into pieces for a lease each; iterate over (first unit of the chunk, number
        of units).

        >>> list(LeaseCut(((0, 4096),), units_per_piece=4, area_bytes=16384).pieces(9))
        [(0, 4), (4, 4), (8, 1)]
        """
        for first in range(0, num_units, self.units_per_piece):
            yield first, min(self.units_per_piece, num_units - first)

    def sections(self, num_units: int, offset: int = 0) -> dict[int, Section]:
        """Return each writer's section by this cut, by rank, in a lease of `num_units` unit pages
        at `offset`.

        Offsets are whole blocks.

        >>> cut = LeaseCut(((0, 100), (2, 300)), units_per_piece=40, area_bytes=16384)
        >>> cut.sections(30)[2]
        Section(rank=2, offset=4096, num_bytes=9000)
        """
        sections = {}
        for rank, unit_bytes in self.shares:
            sections[rank] = Section(rank, offset, num_units * unit_bytes)
            offset += whole_blocks(num_units * unit_bytes)
        return sections

    def lease_bytes(self, num_units: int) -> int:
        """Bytes of a lease of `num_units` unit pages: its sections, each in whole blocks."""
        return sum(whole_blocks(num_units * unit_bytes) for _, unit_bytes in self.shares)

    def check_slots(self, rank: int, slot_bytes: int) -> None:
        """Raise HandshakeError where a writer's largest section does not fit into one of its slots.
        Smaller pieces would be no help: all writers have to cut alike."""
        num_bytes = self.sections(self.units_per_piece)[rank].num_bytes
        if num_bytes > slot_bytes:
            raise HandshakeError(
                "staging slot_bytes", slot_bytes, num_bytes, "cannot take our section of a lease"
            )


MAX_PASSED: Final = 4
MAX_LEASE_ID: Final = 2**31 - 1  # a tag carries it as an int32
_LOOK_AHEAD_ROOMS: Final = 16  # bounds the cost of a lease that ends


class LeaseState(enum.Enum):
    """The state of a lease: what may write it, and what reads it."""

    GRANTED = "granted"  # writers may write
    LANDED = "landed"  # all have, and only our own copy reads it
    HELD = "held"  # its room is closed, and writers may still write


@dataclass(slots=True, eq=False)
class Lease:
    """Bytes `offset` to `end` of the staging area, for one piece of one room. Only the table
    changes it.

    `lease_id` is not used again before 2^31 others. `missing` are the ranks that have yet to write.
    """

    lease_id: int
    key: RoomKey
    piece: int
    offset: int
    num_bytes: int
    missing: set[int]
    state: LeaseState = LeaseState.GRANTED

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(slots=True, eq=False)
class _Ask:
    piece: int
    num_bytes: int  # whole blocks
    writers: frozenset[int]
    passed: int = 0  # leases that overtook it in its turn


class LeaseTable:
    """All leases of one staging area. Owned by one thread.

    Every method that may free bytes returns the leases granted. A lease takes the first gap that is
    large enough, so memory that caches still hold is used again first.

    Rooms take turns, the pieces of a room go in order. While the next room does not fit, up to
    `MAX_PASSED` leases may go to smaller pieces behind it (a room's last piece is short); then
    nothing overtakes it. Where held leases alone keep it out it bars no other room, since no
    lease that ends would help it; its deadline does. Nothing is tried again before a lease ends.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """The capacity is whole blocks."""
        self.capacity_bytes = capacity_bytes
        # Waiting asks by room, granted leases by id and by offset; a lease that is gone is in none
        # of them.
        self._waiting: dict[RoomKey, deque[_Ask]] = {}  # in turn, the next one first
        self._leases: dict[int, Lease] = {}
        self._by_offset: list[Lease] = []
        self._last_id = 0

    def ask(self, key: RoomKey, piece: int, num_bytes: int, writers: frozenset[int]) -> list[Lease]:
        """Ask for a lease for the room's next piece, to be written by these ranks; granted now or
        by a later call, once. `num_bytes` are at most those of the area, by the cut."""
        asks = self._waiting.setdefault(key, deque())
        asks.append(_Ask(piece, whole_blocks(num_bytes), writers))
        return self._grant()

    def arrived(self, lease: Lease, writer: int) -> list[Lease]:
        """Note that all bytes of a missing writer are in this lease. With the last writer's it has
        landed, to be scattered and then ended; a held one is gone, for that was the proof."""
        lease.missing.remove(writer)
        # Held: its room is closed, so nothing is scattered. Every writer writes a lease once, and
        # all have: so nothing can land any more, also without a Drained.
        if not lease.missing and lease.state is LeaseState.HELD:
            self._free(lease)
            return self._grant()
        if not lease.missing:
            lease.state = LeaseState.LANDED
        return []

    def end(self, lease: Lease) -> list[Lease]:
        """Free a landed lease: our copy out of it has ended. Raises LeaseError for one that was
        ended before, or that writers may still write."""
        if self._leases.get(lease.lease_id) is not lease or lease.missing:
            raise LeaseError(f"{lease} is still written, or was ended before")
        self._free(lease)
        return self._grant()

    def close(self, key: RoomKey) -> list[Lease]:
        """Close a room that has ended: drop its waiting pieces, and hold its leases. Others are
        granted: a piece that barred them is gone."""
        self._waiting.pop(key, None)
        for lease in self.of_room(key):
            # Writers may still write, so only proof frees the bytes. A landed lease is read by our
            # copy alone.
            if lease.state is LeaseState.GRANTED:
                lease.state = LeaseState.HELD
        return self._grant()

    def drained(self, key: RoomKey) -> list[Lease]:
        """Free the held leases of a room, as proved: no write can land any more. One that has
        landed stays until its own copy has ended."""
        for lease in self.of_room(key):
            if lease.state is LeaseState.HELD:
                self._free(lease)
        return self._grant()

    @property
    def num_waiting(self) -> int:
        """Number of pieces that wait for a lease."""
        return sum(len(asks) for asks in self._waiting.values())

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    def all(self) -> list[Lease]:
        """Return the leases that are not gone, by offset."""
        return list(self._by_offset)

    def of_room(self, key: RoomKey) -> list[Lease]:
        """Return the leases of one room, by piece. O(leases)."""
        mine = [lease for lease in self._by_offset if lease.key == key]
        return sorted(mine, key=lambda lease: lease.piece)

    def _grant(self) -> list[Lease]:
        granted: list[Lease] = []
        while self._waiting and (lease := self._grant_one()) is not None:
            granted.append(lease)
        return granted

    def _grant_one(self) -> Lease | None:
        """To the first piece in turn that fits, if no room before it bars the way. O(leases)."""
        gaps = _gaps(self._by_offset, self.capacity_bytes)
        largest = max((end - start for start, end in gaps), default=0)
        overtaken: list[_Ask] = []
        # 1. It fits: granted, and counted against those that it overtakes.
        # 2. It does not, and only held leases keep it out: no lease that ends would help, so it
        # bars none.
        # 3. It does not, but leases that end will make room: others may pass, up to `MAX_PASSED`
        # times. From then on freed bytes add up for it.
        for key, asks in self._waiting.items():
            ask = asks[0]
            if ask.num_bytes <= largest:
                for passed in overtaken:
                    passed.passed += 1
                return self._take(key, next(s for s, end in gaps if s + ask.num_bytes <= end))
            if not self._kept_out_by_held(ask):
                overtaken.append(ask)
                if ask.passed >= MAX_PASSED or len(overtaken) == _LOOK_AHEAD_ROOMS:
                    return None
        return None

    def _take(self, key: RoomKey, offset: int) -> Lease:
        asks = self._waiting.pop(key)
        ask = asks.popleft()
        if asks:
            self._waiting[key] = asks  # its next turn comes after all others
        # Ids count up, so that a late notification does not name a lease of now; live ones are
        # skipped as the numbers begin again.
        self._last_id = self._last_id % MAX_LEASE_ID + 1
        while self._last_id in self._leases:
            self._last_id = self._last_id % MAX_LEASE_ID + 1
        lease = Lease(self._last_id, key, ask.piece, offset, ask.num_bytes, set(ask.writers))
        self._leases[lease.lease_id] = lease
        insort(self._by_offset, lease, key=attrgetter("offset"))
        return lease

    def _free(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        del self._by_offset[bisect_left(self._by_offset, lease.offset, key=attrgetter("offset"))]

    def _kept_out_by_held(self, ask: _Ask) -> bool:
        held = [lease for lease in self._by_offset if lease.state is LeaseState.HELD]
        return bool(held) and not _fits(ask, _gaps(held, self.capacity_bytes))

    def check_invariants(self) -> None:
        """Check every law. Raises InternalError that names the broken one, with the state."""
        for lease in self._by_offset:
            odd_bytes = lease.offset % BLOCK_BYTES + lease.num_bytes % BLOCK_BYTES
            landed = lease.state is LeaseState.LANDED
            laws = {
                "a lease is whole blocks": lease.num_bytes > 0 == odd_bytes,
                "a lease that misses no writer has landed": landed == (not lease.missing),
                "a lease is found by its id": self._leases.get(lease.lease_id) is lease,
            }
            check_laws(laws, lease)
        starts = [lease.offset for lease in self._by_offset] + [self.capacity_bytes]
        ends = [0] + [lease.end for lease in self._by_offset]
        gaps = _gaps(self._by_offset, self.capacity_bytes)
        in_turn = list(self._waiting.values())
        laws = {
            "leases overlap no other and lie inside": all(map(le, ends, starts)),
            "each lease has one id and one offset": len(self._leases) == len(self._by_offset),
            "a room that has a turn has pieces that wait": all(in_turn),
            "the piece whose turn it is does not fit": not in_turn
            or not _fits(in_turn[0][0], gaps),
        }
        check_laws(laws, self._by_offset, self._waiting)


def _gaps(leases: list[Lease], capacity_bytes: int) -> list[tuple[int, int]]:
    starts = [0, *(lease.end for lease in leases)]
    ends = [*(lease.offset for lease in leases), capacity_bytes]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _fits(ask: _Ask, gaps: list[tuple[int, int]]) -> bool:
    return any(ask.num_bytes <= end - start for start, end in gaps)
