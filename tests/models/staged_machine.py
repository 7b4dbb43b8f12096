"""The staged path under hypothesis: any interleaving, with faults of every part around the two machines."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.models.staged_world import World

PICKS = st.integers(0, 2**16)
CHUNKS = st.lists(st.tuples(st.integers(1, 11), st.booleans()), max_size=3)
ROOMS = st.integers(0, 4)


class StagedMachine(RuleBasedStateMachine):
    """Rooms of two readers, written by up to three writers; at the end all of it has to come to rest."""

    world: World

    @initialize(
        num_writers=st.integers(1, 3), num_readers=st.integers(1, 2), pieces=st.sampled_from([1, 1.5, 1.5, 3]),
        slots=st.integers(1, 4), window=st.integers(1, 4), rooms=st.lists(CHUNKS, min_size=3, max_size=3),
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
    def lose(self, pick: int) -> None:
        lossy = [mail for mail in self.world.mail if mail.lossy]
        if lossy:
            self.world.mail.remove(lossy[pick % len(lossy)])

    @rule(pick=PICKS)
    def repeat(self, pick: int) -> None:
        lossy = [mail for mail in self.world.mail if mail.lossy]
        if lossy:
            self.world.deliver(lossy[pick % len(lossy)], again=True)

    @rule(pick=PICKS)
    def fail_gather(self, pick: int) -> None:
        found = [(writer, gather) for writer in self.world.writers.values() for gather in writer.gathers]
        if found:
            writer, gather = found[pick % len(found)]
            writer.gather(gather, OSError("gather"))

    @rule(pick=PICKS)
    def fail_scatter(self, pick: int) -> None:
        found = [(reader, lease) for reader in self.world.readers for lease in reader.scatters]
        if found:
            reader, lease = found[pick % len(found)]
            reader.scatter(lease, OSError("scatter"))

    @rule(pick=PICKS, drained=st.booleans())
    def fail_write(self, pick: int, drained: bool) -> None:
        writers = self.world.writers.values()
        found = [(writer, write) for writer in writers for write in writer.writes.values() if not write.undrained]
        if found:
            writer, write = found[pick % len(found)]
            writer.end_write(write, OSError("write"), drained)

    @rule(room=ROOMS)
    def abort_at_reader(self, room: int) -> None:
        found = [use for reader in self.world.readers for use in reader.uses.values() if use.key.room == room]
        for use in found:
            use.reader.fail(use)

    @rule(room=ROOMS, pick=PICKS)
    def abort_at_writer(self, room: int, pick: int) -> None:
        writer = self.world.writers[pick % len(self.world.writers)]
        for sending in [sending for key, sending in writer.rooms.items() if key.room == room]:
            writer.fail(sending)
            writer.progress(sending)

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
