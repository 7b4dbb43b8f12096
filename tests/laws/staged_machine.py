"""The staged path under hypothesis: any interleaving, with faults of every part around the two
machines."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.staged_world import World

PICKS = st.integers(0, 2**16)
CHUNKS = st.lists(st.tuples(st.integers(1, 11), st.booleans()), max_size=3)
ROOMS = st.integers(0, 4)


class StagedMachine(RuleBasedStateMachine):
    """Rooms of two readers, written by up to three writers; at the end all of it has to come to
    rest."""

    world: World

    @initialize(
        num_writers=st.integers(1, 3), num_readers=st.integers(1, 2),
        pieces=st.sampled_from([1, 1.5, 1.5, 3]), slots=st.integers(1, 4), window=st.integers(1, 4),
        rooms=st.lists(CHUNKS, min_size=3, max_size=3),
    )  # fmt: skip
    def start(
        self,
        num_writers: int,
        num_readers: int,
        pieces: float,
        slots: int,
        window: int,
        rooms: list[list[tuple[int, bool]]],
    ) -> None:
        self.world = World(num_writers, num_readers, pieces, slots, window)
        for room, chunks in enumerate(rooms):
            self.world.open(room, chunks)

    @rule(room=ROOMS, chunks=CHUNKS)
    def open(self, room: int, chunks: list[tuple[int, bool]]) -> None:
        self.world.open(room, chunks)

    @rule(picks=st.lists(PICKS, min_size=1, max_size=60))
    def go_on(self, picks: list[int]) -> None:
        for pick in picks:
            self.world.step(pick)
            self.world.check()

    # faults

    @rule(pick=PICKS)
    def go_wrong(self, pick: int) -> None:
        faults = self.world.faults()
        if faults:
            faults[pick % len(faults)]()

    @rule(
        seed=st.integers(0, 2**32),
        num_steps=st.integers(1, 200),
        fault_every=st.sampled_from([3, 10, 30]),
    )
    def storm(self, seed: int, num_steps: int, fault_every: int) -> None:
        self.world.storm(seed, num_steps, fault_every)

    @rule(pick=PICKS)
    def restart_writer(self, pick: int) -> None:
        if pick % 4 == 0:
            self.world.restart_writer(pick // 4 % len(self.world.writers))

    @rule(pick=PICKS)
    def restart_reader(self, pick: int) -> None:
        if pick % 4 == 0:
            self.world.restart_reader(pick // 4 % len(self.world.readers))

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
