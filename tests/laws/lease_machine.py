"""The table of leases against a naive model: it paints blocks, and looks for a gap by trying every
offset."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixkv.errors import LeaseError
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.protocol.ids import RoomKey
from prefixkv.staging.leases import MAX_PASSED, Lease, LeaseState, LeaseTable

ROOMS = [RoomKey(room, 0) for room in range(5)]
CAPACITY = 12  # blocks


class LeaseMachine(RuleBasedStateMachine):
    """`paint` has the lease of each block; grants have to come in the order and at the offset that
    the model names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(CAPACITY * BLOCK_BYTES)
        self.paint: list[Lease | None] = [None] * CAPACITY
        self.open: set[RoomKey] = set()
        self.waiting: list[tuple[RoomKey, int, int]] = []  # in the order of asking
        self.turns: list[RoomKey] = []
        self.passed: dict[RoomKey, int] = {}
        self.next_piece: dict[RoomKey, int] = {}

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
                block is None or block.state not in blocked for block in self.paint[at : at + size]
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
            key, piece, size = ask
            where = (lease.offset, lease.num_bytes)
            assert (lease.key, lease.piece, *where) == (
                key, piece, at * BLOCK_BYTES, size * BLOCK_BYTES,
            )  # fmt: skip
            assert lease.state is LeaseState.GRANTED
            assert all(block is None for block in self.paint[at : at + size])
            self.paint[at : at + size] = [lease] * size
            self.waiting.remove(ask)
            for room in overtaken:
                self.passed[room] += 1
            self.turns.remove(lease.key)
            if any(room == lease.key for room, _, _ in self.waiting):
                self.turns.append(lease.key)
            self.passed[lease.key] = 0
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
        self.paint = [None if block is lease else block for block in self.paint]

    # what happens

    @rule(
        room=st.sampled_from(ROOMS),
        size=st.integers(1, CAPACITY),
        short=st.integers(0, BLOCK_BYTES - 1),
        writers=st.sets(st.integers(0, 2), min_size=1),
    )
    def ask(self, room: RoomKey, size: int, short: int, writers: set[int]) -> None:
        """A new life of the room begins with an ask where nothing of the last one is left."""
        if room not in self.open:
            if any(lease.key == room for lease in self.live()):
                return
            self.open.add(room)
            self.next_piece[room] = self.passed[room] = 0
        piece = self.next_piece[room]
        self.next_piece[room] += 1
        self.waiting.append((room, piece, size))
        if room not in self.turns:
            self.turns.append(room)
        num_bytes = size * BLOCK_BYTES - short
        self.expect(self.table.ask(room, piece, num_bytes, frozenset(writers)))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        leases = [lease for lease in self.live() if lease.missing]
        if not leases:
            return
        lease = data.draw(st.sampled_from(leases))
        writer = data.draw(st.sampled_from(sorted(lease.missing)))
        missing, state = set(lease.missing), lease.state
        served = self.table.arrived(lease, writer)
        assert lease.missing == missing - {writer}
        if lease.missing:
            assert (lease.state, served) == (state, [])
        elif state is LeaseState.HELD:
            self.wipe(lease)
            self.expect(served)
        else:
            assert (lease.state, served) == (LeaseState.LANDED, [])

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.live()))
        if lease.state is LeaseState.LANDED:
            served = self.table.end(lease)
            self.wipe(lease)
            self.expect(served)
        with pytest.raises(LeaseError):
            self.table.end(lease)

    @rule(room=st.sampled_from(ROOMS))
    def close(self, room: RoomKey) -> None:
        served = self.table.close(room)
        self.open.discard(room)
        self.waiting = [ask for ask in self.waiting if ask[0] != room]
        self.turns = [other for other in self.turns if other != room]
        assert all(ls.state is not LeaseState.GRANTED for ls in self.live() if ls.key == room)
        self.expect(served)

    @rule(room=st.sampled_from(ROOMS))
    def drained(self, room: RoomKey) -> None:
        served = self.table.drained(room)
        for lease in self.live():
            if lease.key == room and lease.state is LeaseState.HELD:
                self.wipe(lease)
        self.expect(served)

    @invariant()
    def laws(self) -> None:
        self.table.check_invariants()
        live = self.live()
        assert self.table.all() == live
        assert all(self.table.get(lease.lease_id) is lease for lease in live)
        assert self.table.num_waiting == len(self.waiting)
        for room in ROOMS:
            mine = [lease for lease in live if lease.key == room]
            assert self.table.of_room(room) == sorted(mine, key=lambda lease: lease.piece)

    def teardown(self) -> None:
        """Everything ends: nothing is left behind."""
        for room in ROOMS:
            self.close(room)
        for room in ROOMS:
            self.drained(room)
        for lease in self.table.all():
            assert self.table.end(lease) == []
        assert (self.table.num_waiting, self.table.all()) == (0, [])
