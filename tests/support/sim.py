"""A prefill and a decode worker in one process, of any meshes, joined by a bad network, all from
one seed.

Real: control objects, machines, staging, gather and scatter, KV bytes. Simulated: the network
(delay, reorder, duplicates, drops, junk), the transport (`FakeFabric`), the clock, processes, and
all threads: each `step` lets one thing happen. What the ranks work on is a subclass's:
`sim_engines.py` has schedulers with stand-in engines.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from prefixkv.config import TransportConfig
from prefixkv.conformance.pattern import PrefixHasher
from prefixkv.memory.kv_layout import BLOCK_BYTES, whole_blocks
from prefixkv.memory.mesh import Mesh, sent_shares
from prefixkv.memory.state_layout import StateTensor
from prefixkv.protocol.commands import Fence
from prefixkv.protocol.ids import ChunkTag, PeerId, RoomKey
from prefixkv.ranks.leader import RankLeader
from tests.support.fabric import FakeFabric
from tests.support.sim_rank import DecodeRank, PrefillRank, Side, SimRank


def scrambled(number: int) -> int:
    """Another number for each, of no order: a life or a ticket, without drawing from `random`."""
    return int.from_bytes(blake2b(b"%d" % number, digest_size=7).digest())


@dataclass
class Storm:
    """Probabilities, per frame, copy, write or step."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    junk: float = 0.0
    abort: float = 0.0  # by decode's engine, or either
    fail_copy: float = 0.0
    fail_at_post: float = 0.0
    fail_at_check: float = 0.0
    lose_notification: float = 0.0
    restart: float = 0.0  # of a whole worker
    flush: float = 0.0
    # Of the steps in which a transport, or a copy thread, could do something: those that it lets
    # pass.
    slow_writes: float = 0.0
    slow_copies: float = 0.0


@dataclass
class Shape:
    """The two workers. `staging` is how many leases decode's areas take; 0: nothing is staged."""

    prefill: tuple[int, int] = (1, 1)  # tp, pp
    decode: tuple[int, int] = (1, 1)
    attention: str = "mha"
    page_sizes: tuple[int, int] = (4, 4)
    orders: tuple[str, str] = ("layer_major", "page_major")
    staging: float = 0.0
    units_per_lease: int = 2
    slots: int = 2
    window: int = 2
    num_layers: int = 2
    num_heads: int = 4
    head_bytes: int = 128
    post_descriptors: int = 5
    post_window: int = 3

    @property
    def meshes(self) -> tuple[Mesh, Mesh]:
        heads = 1 if self.attention == "mla" else self.num_heads
        sizes = self.num_layers, heads
        return Mesh(*sizes, *self.prefill), Mesh(*sizes, *self.decode)

    def sides(
        self,
        names: tuple[str, str],
        num_pages: tuple[int, int],
        tensors: tuple[StateTensor, ...] = (),
        num_slots: tuple[int, int] = (0, 0),
    ) -> tuple[Side, Side]:
        """Prefill's and decode's. Page counts are by side, as names and slots are."""
        lease = self._lease_bytes()

        def side(i: int) -> Side:
            leases = (self.slots, self.staging)[i] if self.staging else 0
            transport = TransportConfig(
                post_descriptors=self.post_descriptors, window=self.post_window,
                staging_bytes=whole_blocks(int(lease * leases)), lease_bytes=lease,
            )  # fmt: skip
            sizes = self.orders[i], num_pages[i], self.page_sizes[i]
            what = self.attention, self.head_bytes, transport, tensors, num_slots[i]
            return Side(names[i], self.meshes[i], *sizes, *what, staging_window=self.window)

        return side(0), side(1)

    def _lease_bytes(self) -> int:
        kinds = 1 if self.attention == "mla" else 2
        head_bytes = min(self.page_sizes) * self.head_bytes * kinds * self.units_per_lease
        writers, readers = self.meshes
        return max(
            sum(
                whole_blocks(share.num_layers * share.num_heads * head_bytes)
                for share in sent_shares(writers, readers, reader).values()
            )
            for reader in range(readers.num_ranks)
        )


SINGLE = Shape(
    orders=("layer_major", "layer_major"), num_layers=1, num_heads=1, head_bytes=8,
    post_descriptors=3, post_window=8,
)  # fmt: skip
_FENCE_RATE = 0.02  # of the steps in which a former life could be fenced
SIZES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


def shape_of(chance: random.Random, sizes: list[tuple[int, int]]) -> Shape:
    """Two workers that can work together."""
    return Shape(
        prefill=chance.choice(sizes), decode=chance.choice(sizes),
        attention=chance.choice(["mha", "mha", "mla"]),
        page_sizes=chance.choice([(4, 4), (4, 4), (4, 8), (8, 4)]),
        orders=chance.choice([("layer_major", "page_major"), ("page_major", "layer_major")]),
        staging=chance.choice([0, 1.5, 1.5, 4]), units_per_lease=chance.choice([1, 2]),
        slots=chance.choice([1, 2, 4]), window=chance.choice([1, 2, 4]),
    )  # fmt: skip


def storm_of(chance: random.Random, most: dict[str, float]) -> Storm:
    """Each fault in half of the runs, with a probability of up to `most`."""
    return Storm(**{name: p * chance.random() for name, p in most.items() if chance.random() < 0.5})


@dataclass
class Sim:
    """See the module's text. `writers` and `readers` are the ranks that live, by rank.

    A subclass sets `sides` and starts the ranks, and `leader`. It has `choices`: what may happen
    besides what the world does by itself; `faults`, after a step in the storm; `after_step`:
    audits; `said`: a control object's word for its scheduler; `may_write`, which raises unless what
    may land is the room's; `start`: the storm; `is_over`, which lets time pass where nothing else
    happens; `assert_at_rest`.
    """

    seed: int
    storm: Storm = field(default_factory=Storm)
    shape: Shape = field(default_factory=Shape)
    chance: random.Random | None = None

    sides: tuple[Side, Side] = field(init=False)
    leader: RankLeader[Any] = field(init=False)
    prefill_version = ""  # of the weights that a life of prefill begins with

    def __post_init__(self) -> None:
        self.random = self.chance or random.Random(self.seed)
        self.num_steps = 0
        self.now_s = 1000.0
        self.calm = False
        self.counters: Counter[str] = Counter()
        self.hasher = PrefixHasher()
        storm = self.storm
        self.fabric = FakeFabric(
            self.seed, fail_at_post=storm.fail_at_post, fail_at_check=storm.fail_at_check,
            lose_notification=storm.lose_notification, guard=self._guard,
        )  # fmt: skip
        self.fabric.random = self.chance or random.Random(self.seed)
        self.wire: list[tuple[SimRank, str | bytes, bytes]] = []
        self.to_fence: list[tuple[PrefillRank, bool]] = []  # and whether it is only stopped yet
        self._incarnation = self._ticket = 0
        self.writers: list[PrefillRank] = []
        self.readers: list[DecodeRank] = []
        num_writers = self.shape.meshes[0].num_ranks
        self.addresses = tuple(f"tcp://prefill-{rank}" for rank in range(num_writers))

    # --- processes --------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[PrefillRank | DecodeRank]:
        return [*self.writers, *self.readers]

    def next_incarnation(self) -> int:
        """A number that says nothing of the order of lives, and none of `random`'s."""
        self._incarnation += 1
        return scrambled(self._incarnation)

    def new_writer(self, rank: int) -> PrefillRank:
        addresses = "", *self.addresses[1:]
        return PrefillRank(self, self.sides[0], rank, self.next_incarnation(), addresses)

    def start_readers(self) -> None:
        self.readers = []
        worker = None
        for rank in range(self.sides[1].mesh.num_ranks):
            incarnation = self.next_incarnation()
            if rank == 0:
                worker = PeerId(self.sides[1].name, incarnation)
            self.readers.append(DecodeRank(self, self.sides[1], rank, incarnation, worker))

    def end_writer(self, old: PrefillRank, how: str) -> None:
        """It is "killed", or has "left" in good order, or is only "stopped": then what it has
        posted goes on landing until it is fenced."""
        if how == "left":
            old.leave()
        elif how == "killed":
            self.fabric.kill(old.me)
        old.alive = False
        self.to_fence.append((old, how == "stopped"))
        self.counters[f"prefill {how}"] += 1

    def end_readers(self) -> None:
        self.counters["decode restarted"] += 1
        for rank in self.readers:
            self.fabric.kill(rank.me)
            rank.alive = False

    def fence(self) -> None:
        """The orchestrator makes sure that one is dead, and says so."""
        old, stopped = self.to_fence.pop(self.random.randrange(len(self.to_fence)))
        if stopped:
            self.fabric.kill(old.me)
        self.counters["fences"] += 1
        self.leader.command(Fence(old.me))

    def hear(self, rank: DecodeRank) -> None:
        """Rank 0's scheduler takes in what one rank has said, or that rank says it."""
        if rank.rank > 0 and not rank.for_rank_0:
            rank.take_rank_events()
        elif rank.rank > 0:
            self.leader.on_rank_events(rank.for_rank_0.popleft(), self.now_s)
        elif rank.events:
            self.leader.on(0, rank.events.popleft(), self.now_s)

    # --- the network ------------------------------------------------------------------------------

    def send(self, source: SimRank, to: str | bytes, raw: bytes) -> None:
        if not source.alive or self.happens(self.storm.drop):
            return
        for _ in range(2 if self.happens(self.storm.duplicate) else 1):
            self.wire.append((source, to, raw))

    def deliver(self) -> None:
        reordered = self.happens(self.storm.reorder)
        self.hand_over(self.random.randrange(len(self.wire)) if reordered else 0)

    def hand_over(self, at: int) -> None:
        source, to, raw = self.wire.pop(at)
        raw = self.spoilt(raw)
        if isinstance(to, str):
            assert isinstance(source, DecodeRank)
            self.writers[self.addresses.index(to or self.addresses[0])].frame(source.route, raw)
            return
        for rank in self.readers:
            if rank.route == to:
                rank.frame(self.addresses[source.rank], raw)

    def spoilt(self, raw: bytes) -> bytes:
        """Cut, not changed: a flipped bit may name a sequence number that nothing true comes
        after."""
        return raw[: self.random.randrange(len(raw))] if self.happens(self.storm.junk) else raw

    # --- steps ------------------------------------------------------------------------------------

    def happens(self, probability: float) -> bool:
        return not self.calm and self.random.random() < probability

    def step(self) -> None:
        """Let one thing happen."""
        self.num_steps += 1
        choices = self.choices()
        if self.wire:
            choices += [self.deliver] * 3
        if not self.happens(self.storm.slow_writes):
            choices += [self.fabric.step] * 3
        copies = [(rank, i) for rank in self.ranks for i in range(len(rank.copies.jobs))]
        if copies and not self.happens(self.storm.slow_copies):
            choices.append(lambda: self._copy(*self.random.choice(copies)))
        if self.to_fence and (self.calm or self.random.random() < _FENCE_RATE):
            choices.append(self.fence)
        self.random.choice(choices)()
        if not self.calm:
            self.faults()
        self.after_step()

    def tick(self) -> None:
        # Of all ranks one does something in a step.
        self.now_s += self.random.choice([0.02, 0.1, 0.4]) / len(self.ranks)

    def _copy(self, rank: PrefillRank | DecodeRank, number: int) -> None:
        error = OSError("the copy failed") if self.happens(self.storm.fail_copy) else None
        if isinstance(rank, DecodeRank):
            copy_id = rank.copies.jobs[number][0]
            scatter = rank.scatters.pop(copy_id)
            fold = rank.memory.layout.page_size // scatter.plan.unit_tokens
            lease = rank.control.relay.leases.get(copy_id)
            self.may_write(RoomKey(*lease.key), "pages", np.unique(scatter.units // fold))
        rank.copies.run(number, error)

    def check_ranks(self) -> None:
        for rank in self.ranks:
            rank.check()

    # --- what may land ----------------------------------------------------------------------------

    def sent(self, key: RoomKey) -> RoomKey:
        """The room as prefill knows it."""
        return RoomKey(*key.numbers, self.readers[0].me.name)

    def _guard(self, target: PeerId, route: str, tag: ChunkTag, pages: np.ndarray) -> None:
        """Called as bytes land: in pages, slots, or blocks of a staging area."""
        for rank in self.readers:
            if rank.me == target and route == "staging":
                self._may_write_lease(rank, tag, pages)
            elif rank.me == target:
                self.may_write(RoomKey(tag.room, tag.generation), route, pages)

    def _may_write_lease(self, rank: DecodeRank, tag: ChunkTag, blocks: np.ndarray) -> None:
        staging = rank.control.relay
        assert staging is not None
        lease = staging.leases.get(tag.lease_id)
        assert lease is not None, "a write lands in a lease that has ended"
        assert lease.key.numbers == (tag.room, tag.generation)
        assert lease.piece == tag.chunk
        assert tag.rank in lease.missing, "a write lands in a lease where it was counted"
        offset, size = next(
            (section.offset, section.num_bytes)
            for section in staging.sections_of(lease)
            if section.rank == tag.rank
        )
        first = offset // BLOCK_BYTES
        assert set(blocks.tolist()) <= set(range(first, first + -(-size // BLOCK_BYTES)))

    # --- a run ------------------------------------------------------------------------------------

    def run(self, max_steps: int = 60_000) -> None:
        """All that starts, starts in the storm; then it calms down, and nothing may be left."""
        self.start()
        self.calm = True
        self.fabric.fail_at_post = self.fabric.fail_at_check = self.fabric.lose_notification = 0.0
        for taken in range(max_steps):
            self.step()
            if self.is_over(taken):
                break
        self.assert_at_rest()
        for rank in self.ranks:
            rank.check_memory()

    def idle(self) -> bool:
        """Nothing will happen until time has passed."""
        return not (
            self.wire
            or self.to_fence
            or any(rank.inbox or rank.events or rank.copies.jobs for rank in self.ranks)
            or any(rank.for_rank_0 for rank in self.readers)
            or self.fabric.pending()
        )

    def leftovers(self) -> dict[str, Any]:
        left = {str(rank.me): rank.leftovers() for rank in self.ranks}
        left["fences"] = dict(enumerate(self.to_fence))
        return {name: what for name, what in left.items() if what}
