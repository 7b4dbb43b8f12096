"""One life of a rank in a simulation: the real control object, and what carries out its effects as
`ControlThread` does, but without a thread: the simulation hands over one input at a time. Sockets,
copy threads and transport are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

import prefixkv.assembly  # noqa: F401 - its parts, also where no conftest is loaded
from prefixkv import ControlConfig, Mesh, StateTensor, TransportConfig
from prefixkv.conformance.pattern import Hashes
from prefixkv.control import effects
from prefixkv.control.decode.control import DecodeControl
from prefixkv.control.effects import RelaySlots
from prefixkv.control.handshake import OurSide
from prefixkv.control.prefill.control import PrefillControl
from prefixkv.memory.kv_layout import PageGroup
from prefixkv.pages.groups import GroupPages, GroupSpec
from prefixkv.paging import Pages
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import GroupDigest, Hello, ModelDigest, Topology
from prefixkv.ranks.leader import pack_rank_events
from prefixkv.runtime.staging import StagingCopies
from prefixkv.staging.receiver import Scatter
from prefixkv.staging.sender import Gather
from prefixkv.transport.base import RankMemory, WriteJob
from tests.support.control_effects import effects_of, leftovers_of
from tests.support.fabric import FakeFabric
from tests.support.sim_memory import Buffer, Memory
from tests.support.state_memory import StateMemory

TIMING = ControlConfig(
    heartbeat_s=1.0, suspect_after_s=4.0, forget_after_s=50.0, resend_s=0.3,
    bootstrap_timeout_s=20.0, waiting_timeout_s=30.0, transfer_timeout_s=30.0, ack_timeout_s=10.0,
    drain_timeout_s=8.0, parked_timeout_s=10.0,
)  # fmt: skip


class World(Protocol):
    """What a rank sees of the simulation."""

    now_s: float
    fabric: FakeFabric
    prefill_version: str

    def send(self, source: SimRank, to: str | bytes, raw: bytes) -> None: ...

    def said(self, rank: Any, event: Any) -> None: ...


class Copies:
    """The copy threads: a copy runs when the simulation says so."""

    def __init__(self, sink: Callable[[effects.CopyDone], None]) -> None:
        self.jobs: list[tuple[int, Callable[[], None]]] = []
        self._sink = sink

    def submit(self, copy_id: int, copy: Callable[[], None]) -> None:
        self.jobs.append((copy_id, copy))

    def close(self) -> None:
        pass

    def run(self, number: int, error: Exception | None = None) -> None:
        copy_id, copy = self.jobs.pop(number)
        try:  # as CopyPool does: what cannot be copied, its peer being gone, say, has failed
            if error is None:
                copy()
        except Exception as raised:
            error = raised
        self._sink(effects.CopyDone(copy_id, error))


@dataclass(frozen=True)
class Side:
    """What the ranks of one worker have in common. Rank r above 0 is `name`/r."""

    name: str
    mesh: Mesh
    order: str
    num_pages: int
    page_size: int
    attention: str
    head_bytes: int
    transport: TransportConfig
    tensors: tuple[StateTensor, ...] = ()
    num_slots: int = 0  # of extra state; 0: there is none
    staging_window: int = 2
    last: GroupSpec | None = None  # layers beside that keep a window
    last_heads: int = 1  # of these, for each head of the first layers
    checkpoints: int = 0

    def rank_name(self, rank: int) -> str:
        return f"{self.name}/{rank}" if rank else self.name

    @property
    def digest(self) -> ModelDigest:
        mesh = self.mesh
        return ModelDigest(
            "m", "none", "uint8", self.attention, mesh.num_layers, mesh.num_kv_heads,
            self.head_bytes, state=self.tensors if self.num_slots else (), groups=self.groups,
        )  # fmt: skip

    @property
    def last_mesh(self) -> Mesh:
        return replace(self.mesh, num_kv_heads=self.mesh.num_kv_heads * self.last_heads)

    @property
    def groups(self) -> tuple[GroupDigest, ...]:
        if self.last is None:
            return ()
        mesh, last = self.last_mesh, self.last
        sizes = mesh.num_layers, mesh.shard(0).num_heads, self.head_bytes
        return (GroupDigest(last.name, last.window, *sizes, "uint8", self.attention),)

    @property
    def topology(self) -> Topology:
        return Topology(self.page_size, self.mesh.tp_size, self.mesh.pp_size)


class SimRank:
    """See the module's text. A subclass makes `control`."""

    control: Any

    def __init__(self, world: World, side: Side, rank: int, incarnation: int) -> None:
        self.me = PeerId(side.rank_name(rank), incarnation)
        self.rank = rank
        self.alive = True
        self.world = world
        self.inbox: deque[Any] = deque()
        self.events: deque[Any] = deque()  # for the scheduler
        self.ended: dict[RoomKey, KVPoll] = {}
        self.copies = Copies(self.inbox.append)
        self.scatters: dict[int, Scatter] = {}  # asked for, and not run
        sizes = side.num_pages, side.page_size
        what: Any = side.attention, side.head_bytes
        self.memory = Memory(side.mesh, rank, side.order, *sizes, *what)
        self.state = None
        if side.num_slots:
            self.state = StateMemory(side.tensors, side.num_slots, side.mesh, rank)
        self.state_layout = None if self.state is None else self.state.layout
        config, layout = side.transport, self.memory.layout
        self.buffer = self.staging = self.area = None
        if config.staging_bytes:
            self.buffer = Buffer(config.staging_bytes, config.lease_bytes)
            self.area = self.buffer.area
            buffer: Any = self.buffer
            self.staging = StagingCopies(layout, buffer, config.lease_bytes, self.copies)
        self.last = None
        if side.last is not None:
            self.last = Memory(
                side.last_mesh, rank, side.order, side.last.num_pages, side.page_size,
                side.attention, side.head_bytes,
            )  # fmt: skip
            group = PageGroup(side.last.name, side.last.window, self.last.layout)
            regions = tuple(sorted({*layout.regions, *self.last.layout.regions}))
            layout = msgspec.structs.replace(layout, groups=(group,), regions=regions)
        self.layout = layout
        memory = RankMemory(layout, self.area, self.state_layout)
        what = self.me, memory, self.inbox.append, config
        owner = self.memory, self.state, self.last
        self.transport = world.fabric.transport(*what, owner=owner)

    def fill(self, pages: Pages, start: int, hashes: Hashes, slot: int = -1) -> None:
        """Compute the KV of tokens `start` to `len(hashes)`, and the state behind the last."""
        self.memory.pattern.fill(pages, start, hashes)
        if slot >= 0 and self.state is not None:
            self.state.fill(slot, int(hashes[-1]))

    def check_bytes(self, of: object, pages: Pages, hashes: Hashes, slot: int = -1) -> None:
        wrong = self.memory.pattern.mismatches(pages, hashes)
        assert wrong == 0, f"law 8: {wrong} pages of {of} are wrong on {self.me}"
        if slot >= 0 and self.state is not None:
            right = self.state.is_of(slot, int(hashes[-1]))
            assert right, f"law 8: the state of {of} is wrong on {self.me}"

    def fill_last(self, row: GroupPages, start: int, hashes: Hashes) -> None:
        """Compute the window layers' KV of tokens `start` to `len(hashes)`."""
        assert self.last is not None
        behind = row.first_page * self.last.layout.page_size
        self.last.pattern.fill(row.ids, start - behind, hashes[behind:])

    def check_last(self, of: object, row: GroupPages, hashes: Hashes, window: int) -> None:
        """What a token behind these sees in the window layers, and all of its first page."""
        assert self.last is not None
        behind = row.first_page * self.last.layout.page_size
        assert behind <= max(0, len(hashes) + 1 - window), f"the window of {of} is not all there"
        wrong = self.last.pattern.mismatches(row.ids, hashes[behind:])
        assert wrong == 0, f"law 8: {wrong} window pages of {of} are wrong on {self.me}"

    def scribble_last(self, pages: Pages, value: int) -> None:
        assert self.last is not None
        self.last.scribble(pages, value)

    def scribble(self, pages: Pages, slots: Sequence[int], value: int) -> None:
        """Overwrite what is free, so that a later read, or a write that still reads it, shows."""
        self.memory.scribble(pages, value)
        if self.state is not None:
            self.state.scribble(slots, value)

    def frame(self, source: Any, raw: bytes) -> None:
        self.take(effects.FrameReceived(source, raw))

    def work(self) -> None:
        """One thing the control thread may do."""
        self.take(self.inbox.popleft() if self.inbox else effects.Tick())

    def take(self, what: Any) -> None:
        self.carry_out(effects_of(self.control, what, self.world.now_s))

    def leave(self) -> None:
        """Close in good order: the farewell may be lost."""
        self.transport.close()
        self.take(effects.AgentDestroyed())

    def carry_out(self, wanted: list[Any]) -> None:
        rest = []
        for effect in wanted:
            if type(effect).__module__ == "prefixkv.protocol.events":
                self.world.said(self, effect)
            else:
                rest.append(effect)
        for effect in rest:
            self._do(effect)

    def _do(self, effect: Any) -> None:
        match effect:
            case effects.SendFrame():
                self.world.send(self, effect.to, effect.raw)
            case WriteJob():
                self.transport.write(effect)
            case effects.Cancel():
                self.transport.cancel(effect.job_id)
            case effects.Renew():
                self.transport.renew()
            case effects.AddPeer():
                self.transport.add_peer(effect.peer, effect.metadata, effect.memory)
                if self.staging is not None:
                    self.staging.add_peer(effect)
            case effects.RemovePeer():
                self.transport.remove_peer(effect.peer)
                if self.staging is not None:
                    self.staging.remove_peer(effect.peer)
            case effects.Expect():
                self.transport.expect(effect.num_rooms)
            case effects.Settle():
                self.transport.settle(effect.token, effect.for_s)
            case Gather():
                assert self.staging is not None
                self.staging.gather(effect)
            case Scatter():
                assert self.staging is not None
                self.scatters[effect.lease_id] = effect
                self.staging.scatter(effect)
            case effects.Connect() | effects.Disconnect():
                pass
            case _:
                raise AssertionError(f"nothing carries out {effect}")

    def check(self) -> None:
        if self.control.relay is not None:
            self.control.relay.check_invariants()

    def check_memory(self) -> None:
        self.check()
        self.memory.check()
        if self.last is not None:
            self.last.check()
        assert self.state is None or self.state.canaries_live(), "a canary of the state is dead"
        if self.buffer is not None:
            self.buffer.check()

    def leftovers(self) -> dict[str, Any]:
        """What has to be nothing at rest."""
        left = leftovers_of(self.control) | self._leftovers() | {
            "copies": self.copies.jobs,
            "scatters": self.scatters, "inbox": list(self.inbox), "events": list(self.events),
        }  # fmt: skip
        return {name: what for name, what in left.items() if what}

    def _leftovers(self) -> dict[str, Any]:
        raise NotImplementedError


class PrefillRank(SimRank):
    """`addresses`: of all ranks, "" for rank 0's own."""

    def __init__(
        self, world: World, side: Side, rank: int, incarnation: int, addresses: tuple[str, ...]
    ) -> None:
        super().__init__(world, side, rank, incarnation)
        config, slots = side.transport, None
        if self.buffer is not None:
            num_slots = config.staging_bytes // config.lease_bytes
            slots = RelaySlots(num_slots, config.lease_bytes, side.staging_window)
        endpoints = addresses if rank == 0 else ()
        ours = OurSide(side.digest, side.topology, rank)
        what = endpoints, slots, world.prefill_version
        self.control = PrefillControl(self.me, ours, TIMING, *what)

    def check(self) -> None:
        super().check()
        self.control.check_invariants()

    def _leftovers(self) -> dict[str, Any]:
        control = self.control
        left: dict[str, Any] = {
            "in flight": self.world.fabric.in_flight(self.me),
            "unproven": self.transport._unproven,
        }  # fmt: skip
        if control.relay is not None and self.staging is not None:
            machine = control.relay
            taken = machine.num_slots - len(machine.free_slots)
            left["staged"] = len(machine.jobs) + taken
            known = {peer.id for peer in control._peers.all()}
            left["forgotten peers"] = set(machine.peers) - known
            left["peers of the copies"] = len(self.staging.to_peers) - len(machine.peers)
        return left


class DecodeRank(SimRank):
    """`worker` is rank 0's identity."""

    def __init__(
        self, world: World, side: Side, rank: int, incarnation: int, worker: PeerId | None
    ) -> None:
        super().__init__(world, side, rank, incarnation)
        self.route = f"{rank}-{incarnation}".encode()
        self.for_rank_0: deque[bytes] = deque()  # for rank 0
        self._num_messages = 0
        memory = self.layout, self.transport.metadata
        what = side.digest, side.topology, *memory, rank, worker, self.area, self.state_layout
        self.control = DecodeControl(self.me, Hello(*what), TIMING)

    def take_rank_events(self) -> None:
        """As `runtime.DecodeRank.take_rank_events`."""
        if self.events:
            self.for_rank_0.append(
                pack_rank_events(self.rank, self._num_messages, list(self.events))
            )
            self._num_messages += 1
            self.events.clear()

    def _leftovers(self) -> dict[str, Any]:
        left: dict[str, Any] = {"for rank 0": list(self.for_rank_0)}
        if (staging := self.control.relay) is not None:
            left |= {
                "staged rooms": staging.num_rooms, "leases": staging.leases.all(),
                "waiting": staging.num_waiting,
            }  # fmt: skip
        return left
