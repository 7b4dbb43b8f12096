"""The staging ring against a naive model: it paints bytes, and looks for room by trying every
offset."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixkv.errors import LeaseError, ProtocolError
from prefixkv.protocol.ids import RoomKey
from prefixkv.staging.ring import MAX_PASSED, Lease, LeaseState, StagingRing

ROOMS = [RoomKey(room, 0) for room in range(5)]
CAPACITY = 24


class RingMachine(RuleBasedStateMachine):
    """`paint` has the lease of each byte; grants have to come in the order and at the offset that
    the model names."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = StagingRing(CAPACITY, alignment_bytes=2)
        self.paint: list[Lease | None] = [None] * CAPACITY
        self.state: dict[RoomKey, str] = {}  # open or closed
        self.waiting: list[tuple[RoomKey, int, int]] = []  # in the order of asking
        self.turns: list[RoomKey] = []
        self.passed: dict[RoomKey, int] = {}
        self.next_chunk: dict[RoomKey, int] = {}

    # what the model thinks

    def live(self) -> list[Lease]:
        found: list[Lease] = []
        for lease in self.paint:
            if lease is not None and lease not in found:
                found.append(lease)
        return found

    def place(self, size: int, blocked: tuple[LeaseState, ...] = tuple(LeaseState)) -> int | None:
        for at in range(CAPACITY - size + 1):
            if all(
                byte is None or byte.state not in blocked for byte in self.paint[at : at + size]
            ):
                return at
        return None

    def head(self, room: RoomKey) -> tuple[RoomKey, int, int]:
        return next(ask for ask in self.waiting if ask[0] == room)

    def expect(self, leases: list[Lease]) -> None:
        """These were granted, and no more: one after the other as the rule says."""
        left = list(leases)
        while (choice := self.choose()) is not None:
            ask, at, overtaken = choice
            lease = left.pop(0)
            assert (lease.room, lease.chunk, lease.num_bytes, lease.offset) == (*ask, at)
            assert lease.state is LeaseState.GRANTED
            assert all(byte is None for byte in self.paint[at : lease.end])
            self.paint[at : lease.end] = [lease] * lease.num_bytes
            self.waiting.remove(ask)
            for room in overtaken:
                self.passed[room] += 1
            self.turns.remove(lease.room)
            if any(room == lease.room for room, _, _ in self.waiting):
                self.turns.append(lease.room)
            self.passed[lease.room] = 0
        assert left == []

    def choose(self) -> tuple[tuple[RoomKey, int, int], int, list[RoomKey]] | None:
        overtaken: list[RoomKey] = []
        for room in self.turns:
            ask = self.head(room)
            at = self.place(ask[2])
            if at is not None:
                return ask, at, overtaken
            if self.place(ask[2], blocked=(LeaseState.HELD,)) is None:
                continue  # no lease that ends would help it
            if self.passed[room] >= MAX_PASSED:
                return None
            overtaken.append(room)
        return None

    def wipe(self, lease: Lease) -> None:
        self.paint = [None if byte is lease else byte for byte in self.paint]
        self.forget()

    def forget(self) -> None:
        for room in [room for room, state in self.state.items() if state == "closed"]:
            if all(lease.room != room for lease in self.live()):
                del self.state[room]

    # what happens

    @rule(room=st.sampled_from(ROOMS))
    def open_room(self, room: RoomKey) -> None:
        if room in self.state:
            with pytest.raises(LeaseError):
                self.ring.open_room(room)
        else:
            self.ring.open_room(room)
            self.state[room] = "open"
            self.next_chunk[room] = 0
            self.passed[room] = 0

    @rule(
        room=st.sampled_from(ROOMS),
        size=st.integers(1, CAPACITY),
        writers=st.sets(st.integers(0, 2), min_size=1),
    )
    def ask(self, room: RoomKey, size: int, writers: set[int]) -> None:
        chunk = self.next_chunk.get(room, 0)
        if self.state.get(room) != "open":
            with pytest.raises(ProtocolError):
                self.ring.ask(room, chunk, size, frozenset(writers))
            return
        self.next_chunk[room] += 1
        self.waiting.append((room, chunk, size + size % 2))
        if room not in self.turns:
            self.turns.append(room)
        self.expect(self.ring.ask(room, chunk, size, frozenset(writers)))

    @rule(room=st.sampled_from(ROOMS), back=st.integers(1, 3))
    def ask_again(self, room: RoomKey, back: int) -> None:
        chunk = self.next_chunk.get(room, 0) - back
        if self.state.get(room) == "open" and chunk >= 0:
            same = [
                ls
                for ls in self.live()
                if (ls.room, ls.chunk, ls.state) == (room, chunk, LeaseState.GRANTED)
            ]
            assert self.ring.ask(room, chunk, 1, frozenset({0})) == same

    @precondition(lambda self: self.live())
    @rule(data=st.data(), writer=st.integers(0, 2), room=st.sampled_from([None, *ROOMS]))
    def arrive(self, data: st.DataObject, writer: int, room: RoomKey | None) -> None:
        lease = data.draw(st.sampled_from(self.live()))
        room = lease.room if room is None else room
        missing, state = set(lease.missing), lease.state
        landed, served = self.ring.arrived(room, lease.lease_id, writer)
        if room != lease.room or missing != {writer}:
            assert (landed, served) == (None, [])
            assert lease.missing == (missing - {writer} if room == lease.room else missing)
        elif state is LeaseState.HELD:
            assert landed is None
            self.wipe(lease)
            self.expect(served)
        else:
            assert (landed, served) == (lease, [])

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.live()))
        if lease.state is LeaseState.LANDED:
            served = self.ring.end(lease.lease_id)
            self.wipe(lease)
            self.expect(served)
        with pytest.raises(LeaseError):
            self.ring.end(lease.lease_id)

    @rule(room=st.sampled_from(ROOMS))
    def close_room(self, room: RoomKey) -> None:
        served = self.ring.close_room(room)
        if self.state.get(room) == "open":
            self.state[room] = "closed"
            self.waiting = [ask for ask in self.waiting if ask[0] != room]
            self.turns = [other for other in self.turns if other != room]
            assert all(ls.state is not LeaseState.GRANTED for ls in self.live() if ls.room == room)
            self.forget()
        self.expect(served)

    @rule(room=st.sampled_from(ROOMS))
    def drained(self, room: RoomKey) -> None:
        served = self.ring.drained(room)
        if self.state.get(room) == "closed":
            for lease in [
                ls for ls in self.live() if ls.room == room and ls.state is LeaseState.HELD
            ]:
                self.wipe(lease)
        self.expect(served)

    @invariant()
    def laws(self) -> None:
        self.ring.check_invariants()
        assert self.ring.leases() == sorted(self.live(), key=lambda lease: lease.offset)
        assert self.ring.num_waiting == len(self.waiting)
        assert self.ring.num_rooms == len(self.state)
        assert all(self.ring.knows(room) == (room in self.state) for room in ROOMS)

    def teardown(self) -> None:
        """Everything ends: nothing is left behind."""
        for room in ROOMS:
            self.close_room(room)
        for room in ROOMS:
            self.drained(room)
        for lease in self.ring.leases():
            assert self.ring.end(lease.lease_id) == []
        assert (self.ring.num_rooms, self.ring.num_waiting, self.ring.leases()) == (0, 0, [])
