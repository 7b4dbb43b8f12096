"""Leases of decode's staging memory: who may write which bytes, and until when. Pure.

A chunk asks for a lease and gets it at once, or when room comes free. The lease is written by the
ranks that the asker named, each once; when the last has arrived our own copy scatters it, and then
it is ended:

    asked -> GRANTED --last arrival--> LANDED --end--> gone
                |  the room is closed      ^ the room may be closed meanwhile: our copy reads it
                v
              HELD --proof that no write can land: `drained`, or the last arrival--> gone

Despite its name it takes the first gap that is large enough, and not the next one round a ring: a
lease that is held for long keeps only its own bytes from use, where a ring would stand still behind
it, and memory that was used last is used again first, while caches still hold it.

**Who is served.** Rooms take turns, the chunks of a room go in order. While the room whose turn it
is needs more than is free, up to `MAX_PASSED` leases may go to smaller chunks of rooms behind it:
most chunks are of one size, so this serves the last, short chunk of a room. Then nothing overtakes
it, and the leases that are live make room for it as they end. Only where held leases alone keep it
out does it bar nobody, since no lease that ends would help it; its room has a deadline. A waiting
chunk costs nothing until a lease ends: nothing is tried again in between.

What a peer says of a lease that is not there, of a dead room, of a writer that is not awaited or
that has been counted already is counted and changes nothing.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from prefixkv.errors import ConfigError, InternalError, LeaseError, ProtocolError
from prefixkv.protocol.ids import RoomKey

ALIGNMENT_BYTES: Final = 4096
MAX_PASSED: Final = 4
MAX_LEASE_ID: Final = 2**31 - 1  # a tag's slot is an int32
_LOOK_AHEAD_ROOMS: Final = (
    16  # of those that wait, so that a lease that ends costs the same however many do
)


class LeaseState(enum.Enum):
    GRANTED = "granted"  # writers may write
    LANDED = "landed"  # all have, and only our own copy reads it
    HELD = "held"  # its room is closed, and writers may still write


@dataclass(slots=True, eq=False)
class Lease:
    """Bytes `offset` to `offset + num_bytes` of the staging memory, for one chunk of one room.

    `lease_id` is not used again before 2^31 others. `missing` are the ranks that have yet to write.
    Only the ring changes a lease.
    """

    lease_id: int
    room: RoomKey
    chunk: int
    offset: int
    num_bytes: int
    missing: set[int]
    state: LeaseState = LeaseState.GRANTED

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(slots=True, eq=False)
class _Ask:
    chunk: int
    num_bytes: int  # a multiple of the alignment
    writers: frozenset[int]
    passed: int = 0  # leases that went to rooms behind it while its turn was on


@dataclass(slots=True, eq=False)
class _Room:
    waiting: deque[_Ask] = field(default_factory=deque)
    leases: dict[int, Lease] = field(default_factory=dict)  # by chunk
    next_chunk: int = 0
    closed: bool = False


class StagingRing:
    """See the module's text. Owned by one thread. Every method that may make room returns the
    leases granted."""

    def __init__(self, capacity_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        """Raises ConfigError where the capacity is no positive multiple of the alignment."""
        if (
            alignment_bytes < 1
            or capacity_bytes < alignment_bytes
            or capacity_bytes % alignment_bytes
        ):
            raise ConfigError(
                f"capacity_bytes is {capacity_bytes}, must be a multiple of {alignment_bytes}"
            )
        self.capacity_bytes = capacity_bytes
        self.counters: Counter[str] = Counter()
        self._alignment = alignment_bytes
        self._rooms: dict[RoomKey, _Room] = {}
        self._turns: deque[RoomKey] = deque()  # rooms that wait, the next in turn first
        self._leases: dict[int, Lease] = {}
        self._offsets: list[int] = []  # of all leases, ascending
        self._by_offset: dict[int, Lease] = {}
        self._last_id = 0

    # --- rooms ------------------------------------------------------------------------------------

    def open_room(self, room: RoomKey) -> None:
        """Take asks of this room. Raises LeaseError if it is open, or closed with leases left."""
        if room in self._rooms:
            raise LeaseError(f"{room} has a life in the ring already")
        self._rooms[room] = _Room()

    def close_room(self, room: RoomKey) -> list[Lease]:
        """The room has ended: its chunks wait no more, and what it was granted is held. Closed or
        unknown: no-op.

        Leases are granted too: a chunk that barred others is gone.
        """
        known = self._rooms.get(room)
        if known is None or known.closed:
            return []
        known.closed = True
        if known.waiting:
            known.waiting.clear()
            self._turns.remove(room)
        for lease in known.leases.values():
            if lease.state is LeaseState.GRANTED:
                lease.state = LeaseState.HELD
        self._forget_if_empty(room, known)
        return self._grant()

    def drained(self, room: RoomKey) -> list[Lease]:
        """Proof that no write of the room can land any more: what was held for it is free. Unknown
        or open: no-op.

        A lease that has landed stays until its own copy has ended.
        """
        known = self._rooms.get(room)
        if known is None or not known.closed:
            return []
        for lease in [lease for lease in known.leases.values() if lease.state is LeaseState.HELD]:
            self._free(lease)
        return self._grant()

    # --- leases -----------------------------------------------------------------------------------

    def ask(
        self, room: RoomKey, chunk: int, num_bytes: int, writers: frozenset[int]
    ) -> list[Lease]:
        """A chunk wants a lease, to be written by these ranks. It is granted now or by a later
        call, once.

        Chunks of a room ask in order, from 0. Asking again is harmless: where the lease is still
        granted it is returned again, so that the word of it can be repeated; otherwise nothing
        happens.

        Raises: ProtocolError for a room that is not open, a chunk out of order, no writers, or more
        bytes than the ring has; nothing was changed.
        """
        known = self._rooms.get(room)
        if known is None or known.closed:
            raise ProtocolError(f"{room} has no staging, it is not open")
        if chunk < known.next_chunk:
            lease = known.leases.get(chunk)
            self.counters["asked_again"] += 1
            return [lease] if lease is not None and lease.state is LeaseState.GRANTED else []
        if chunk != known.next_chunk:
            raise ProtocolError(
                f"chunk {chunk} of {room} asks for staging, {known.next_chunk} is next"
            )
        rounded = -(-num_bytes // self._alignment) * self._alignment
        if not 0 < rounded <= self.capacity_bytes:
            raise ProtocolError(f"a lease of {num_bytes} bytes, the ring has {self.capacity_bytes}")
        if not writers:
            raise ProtocolError(f"a lease for chunk {chunk} of {room} that nobody writes")
        known.next_chunk += 1
        known.waiting.append(_Ask(chunk, rounded, writers))
        if len(known.waiting) == 1:
            self._turns.append(room)
        return self._grant()

    def arrived(
        self, room: RoomKey, lease_id: int, writer: int
    ) -> tuple[Lease | None, list[Lease]]:
        """A writer's bytes are in the lease. Returns the lease if it was the last, to be scattered
        and then ended; and what was granted, where the lease was held and this was the proof that
        it can be freed.

        A lease that is not there or not this room's, a writer not awaited or counted already:
        counted, no-op.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.room != room:
            self.counters["arrivals_of_no_lease"] += 1
            return None, []
        if writer not in lease.missing:
            self.counters["arrivals_not_awaited"] += 1
            return None, []
        lease.missing.discard(writer)
        if lease.missing:
            return None, []
        if lease.state is LeaseState.HELD:
            self._free(lease)
            return None, self._grant()
        lease.state = LeaseState.LANDED
        return lease, []

    def end(self, lease_id: int) -> list[Lease]:
        """Our copy out of a landed lease has ended: its bytes are free.

        Raises: LeaseError for a lease that was ended before, never granted, or that writers may
        still write.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseError(f"lease {lease_id} was ended, or never granted")
        if lease.state is not LeaseState.LANDED:
            raise LeaseError(
                f"lease {lease_id} is {lease.state.value}, ranks {sorted(lease.missing)} may "
                "write it"
            )
        self._free(lease)
        return self._grant()

    # --- what there is ----------------------------------------------------------------------------

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    def knows(self, room: RoomKey) -> bool:
        """Whether the room is open or has leases left: until then its pages are not drained, for a
        copy out of a lease may still write them.
        """
        return room in self._rooms

    @property
    def num_waiting(self) -> int:
        """Chunks that wait for a lease."""
        return sum(len(self._rooms[room].waiting) for room in self._turns)

    def leases(self) -> list[Lease]:
        """All that have not ended, by offset."""
        return [self._by_offset[offset] for offset in self._offsets]

    def bytes_in(self, state: LeaseState) -> int:
        return sum(lease.num_bytes for lease in self._leases.values() if lease.state is state)

    # --- granting ---------------------------------------------------------------------------------

    def _grant(self) -> list[Lease]:
        granted: list[Lease] = []
        while self._turns and (lease := self._grant_one()) is not None:
            granted.append(lease)
        return granted

    def _grant_one(self) -> Lease | None:
        """The lease of the first room in turn whose chunk fits, if no room before it bars the way.
        O(leases)."""
        gaps = _gaps(self.leases(), self.capacity_bytes)
        room_for = max((end - start for start, end in gaps), default=0)
        overtaken: list[_Ask] = []
        for room in self._turns:
            ask = self._rooms[room].waiting[0]
            if ask.num_bytes <= room_for:
                for passed in overtaken:
                    passed.passed += 1
                return self._take(room, ask, next(s for s, end in gaps if s + ask.num_bytes <= end))
            if not self._kept_out_by_held(ask):
                overtaken.append(ask)
                if ask.passed >= MAX_PASSED or len(overtaken) == _LOOK_AHEAD_ROOMS:
                    return None
        return None

    def _take(self, room: RoomKey, ask: _Ask, offset: int) -> Lease:
        known = self._rooms[room]
        known.waiting.popleft()
        self._turns.remove(room)
        if known.waiting:
            self._turns.append(room)
        self._last_id = self._last_id % MAX_LEASE_ID + 1
        while self._last_id in self._leases:
            self._last_id = self._last_id % MAX_LEASE_ID + 1
        lease = Lease(self._last_id, room, ask.chunk, offset, ask.num_bytes, set(ask.writers))
        known.leases[ask.chunk] = self._leases[lease.lease_id] = self._by_offset[offset] = lease
        self._offsets.insert(bisect_left(self._offsets, offset), offset)
        return lease

    def _free(self, lease: Lease) -> None:
        del self._leases[lease.lease_id], self._by_offset[lease.offset]
        del self._offsets[bisect_left(self._offsets, lease.offset)]
        known = self._rooms[lease.room]
        del known.leases[lease.chunk]
        self._forget_if_empty(lease.room, known)

    def _forget_if_empty(self, room: RoomKey, known: _Room) -> None:
        if known.closed and not known.leases:
            del self._rooms[room]

    def _kept_out_by_held(self, ask: _Ask) -> bool:
        """Whether the chunk would not fit even if all leases but the held ones ended."""
        held = [lease for lease in self.leases() if lease.state is LeaseState.HELD]
        return bool(held) and all(
            end - start < ask.num_bytes for start, end in _gaps(held, self.capacity_bytes)
        )

    # --- audit ------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raises InternalError naming the law that is broken, with the state."""
        leases = self.leases()
        live_rooms = {room for room, known in self._rooms.items() if known.waiting}
        laws = {
            "the indices of leases agree": sorted(self._leases)
            == sorted(lease.lease_id for lease in leases)
            and self._offsets == sorted(self._by_offset)
            and all(lease.offset == offset for offset, lease in self._by_offset.items()),
            "leases overlap no other and lie inside": all(
                start >= 0 for start, _ in _edges(leases, self.capacity_bytes)
            ),
            "leases are aligned and not empty": all(
                lease.offset % self._alignment == 0
                and lease.num_bytes > 0 == lease.num_bytes % self._alignment
                for lease in leases
            ),
            "a landed lease misses nobody, another does": all(
                bool(lease.missing) != (lease.state is LeaseState.LANDED) for lease in leases
            ),
            "a lease is its room's": all(
                self._rooms[lease.room].leases.get(lease.chunk) is lease for lease in leases
            )
            and sum(len(known.leases) for known in self._rooms.values()) == len(leases),
            "rooms are open or hold leases": all(
                not known.closed or (known.leases and not known.waiting)
                for known in self._rooms.values()
            ),
            "held leases are of closed rooms, granted ones of open rooms": all(
                lease.state is LeaseState.LANDED
                or (lease.state is LeaseState.HELD) == self._rooms[lease.room].closed
                for lease in leases
            ),
            "each room that waits has one turn": len(self._turns) == len(live_rooms)
            and set(self._turns) == live_rooms,
            "nobody waits whose turn it is and who fits": not self._turns
            or all(
                end - start < self._rooms[self._turns[0]].waiting[0].num_bytes
                for start, end in _gaps(leases, self.capacity_bytes)
            ),
        }
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise InternalError(
                f"{'; '.join(broken)}: {leases}, {self._rooms}, {list(self._turns)}"
            )


def _edges(leases: list[Lease], capacity_bytes: int) -> list[tuple[int, int]]:
    """(bytes, start) of what lies before each lease and behind the last."""
    found, at = [], 0
    for lease in leases:
        found.append((lease.offset - at, at))
        at = lease.end
    return [*found, (capacity_bytes - at, at)]


def _gaps(leases: list[Lease], capacity_bytes: int) -> list[tuple[int, int]]:
    """The free ranges (start, end) between leases that are sorted by offset."""
    return [
        (start, start + num_bytes)
        for num_bytes, start in _edges(leases, capacity_bytes)
        if num_bytes > 0
    ]
