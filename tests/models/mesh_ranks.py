"""The processes of a mesh simulation: prefill and decode ranks with the real control threads' code
(`kv_manager`), but no thread: the simulation hands over one item at a time. Sockets, copy pool and
transport are in memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from prefixkv.config import ControlConfig, TransportConfig
from prefixkv.control.decode import DecodeEndpoint
from prefixkv.control.prefill import PrefillEndpoint
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.staging_area import BLOCK_BYTES, StagingArea
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import Hello, ModelDigest, Topology
from prefixkv.ranks.rooms import Fenced, RoomOrder, command_of, pack_news
from prefixkv.runtime.control_thread import DecodeManager, Fence, PrefillManager
from prefixkv.runtime.copy_pool import CopyDone
from prefixkv.runtime.staging import ReceiveStaging, Scattered, SendStaging
from prefixkv.staging.receiver import Scatter
from prefixkv.testing.fabric import FakeFabric
from tests.models.mesh_pools import elements, mesh_layout, moved

HEAD_BYTES = 128
CANARY = 0xA5
TIMING = ControlConfig(
    heartbeat_s=1.0, suspect_after_s=4.0, forget_after_s=50.0, resend_s=0.3,
    bootstrap_timeout_s=20.0, waiting_timeout_s=30.0, transfer_timeout_s=30.0, ack_timeout_s=10.0,
    drain_timeout_s=8.0, parked_timeout_s=10.0,
)  # fmt: skip


class World(Protocol):
    """What a rank sees of the simulation."""

    now_s: float
    fabric: FakeFabric

    def send(self, source: Any, to: Any, raw: bytes) -> None: ...

    def prefill_said(self, rank: PrefillRank, event: Any) -> None: ...


class Queue:
    """An Inbox without a descriptor."""

    def __init__(self, heard: Callable[[Any], None] | None = None) -> None:
        self.items: deque[Any] = deque()
        self._heard = heard or self.items.append

    def put(self, item: Any) -> None:
        self._heard(item)


class Memory:
    """A rank's pool, canaries round every region, and its pages as arrays."""

    def __init__(
        self, mesh: Mesh, rank: int, order: str, num_pages: int, page_size: int, attention: str
    ) -> None:
        self.shard = mesh.shard(rank)
        layout, num_bytes = mesh_layout(
            order,
            num_pages,
            page_size,
            self.shard.num_layers,
            self.shard.num_heads,
            attention,
            HEAD_BYTES,
        )
        self._virtual = layout
        self.bytes = np.full(num_bytes, CANARY, np.uint8)
        self.layout: KVLayout = moved(layout, self.bytes.ctypes.data)
        everything = self._at(np.arange(num_pages), 0, num_pages * page_size)
        self._is_canary = np.ones(num_bytes, bool)
        self._is_canary[everything] = False

    def _at(self, pages: np.ndarray, start: int, stop: int) -> np.ndarray:
        known = elements.__wrapped__(self._virtual, tuple(pages.tolist()), stop)
        return known[:, start:]

    def write(self, pages: np.ndarray, kv: np.ndarray, start: int, stop: int) -> None:
        """Tokens `start` to `stop` of a request in these pages, from the whole model's KV."""
        self.bytes[self._at(pages, start, stop)] = self._part(kv, start, stop)

    def wrong_bytes(self, pages: np.ndarray, kv: np.ndarray, skip: int) -> int:
        """Of the tokens behind `skip`, the first of which is the first of `pages`."""
        stop = kv.shape[2] - skip
        if not stop:
            return 0
        return int(
            (self.bytes[self._at(pages, 0, stop)] != self._part(kv, skip, kv.shape[2])).sum()
        )

    def scribble(self, pages: np.ndarray, value: int) -> None:
        if len(pages):
            self.bytes[self._at(pages, 0, len(pages) * self._virtual.page_size)] = value

    def _part(self, kv: np.ndarray, start: int, stop: int) -> np.ndarray:
        shard = self.shard
        layers = slice(shard.first_layer, shard.first_layer + shard.num_layers)
        heads = slice(shard.first_head, shard.first_head + shard.num_heads)
        part = kv[layers, :, start:stop, heads]
        return part.reshape(-1, stop - start, shard.num_heads, HEAD_BYTES)

    def check(self) -> None:
        assert (self.bytes[self._is_canary] == CANARY).all(), "a canary of a pool is dead"


class Buffer:
    """A StagingBuffer with a canary before and behind it."""

    device = "cpu"

    def __init__(self, num_bytes: int, lease_bytes: int) -> None:
        self._all = torch.full((num_bytes + 3 * BLOCK_BYTES,), CANARY, dtype=torch.uint8)
        self._first = BLOCK_BYTES + -self._all.data_ptr() % BLOCK_BYTES
        self.area = StagingArea(self._all.data_ptr() + self._first, num_bytes, lease_bytes)

    def slice(self, offset: int, num_bytes: int) -> torch.Tensor:
        assert 0 <= offset <= offset + num_bytes <= self.area.num_bytes
        return self._all[self._first + offset : self._first + offset + num_bytes]

    def check(self) -> None:
        end = self._first + self.area.num_bytes
        assert (self._all[: self._first] == CANARY).all(), "a canary before a staging area is dead"
        assert (self._all[end:] == CANARY).all(), "a canary behind a staging area is dead"


class Copies:
    """The copy pool: a copy runs when the simulation says so."""

    def __init__(self, sink: Callable[[Any], None]) -> None:
        self.jobs: list[tuple[Any, Callable[[], None]]] = []
        self._sink = sink

    def submit(self, token: Any, copy: Callable[[], None]) -> None:
        self.jobs.append((token, copy))

    def run(
        self, number: int, before: Callable[[Any], None], error: Exception | None = None
    ) -> None:
        token, copy = self.jobs.pop(number)
        before(token)
        try:  # as CopyPool does: what cannot be copied, its peer being gone, say, has failed
            if error is None:
                copy()
        except Exception as raised:
            error = raised
        self._sink(CopyDone(token, error))


class _Receive(ReceiveStaging):
    """Remembers what its copies write."""

    def scatter(self, action: Scatter) -> None:
        self.scatters = {**getattr(self, "scatters", {}), action.lease_id: action}
        super().scatter(action)


class _Channel:
    """A socket: what is sent goes into the simulation's wire."""

    def __init__(self, world: World, rank: Any) -> None:
        self._world, self._rank = world, rank

    def send(self, to: Any, raw: bytes) -> None:
        self._world.send(self._rank, to, raw)

    def connect(self, address: str) -> None:
        pass

    disconnect = connect


@dataclass(frozen=True)
class Side:
    """What the ranks of one worker have in common."""

    mesh: Mesh
    order: str
    num_pages: int
    page_size: int
    attention: str
    transport: TransportConfig

    @property
    def digest(self) -> ModelDigest:
        mesh = self.mesh
        return ModelDigest(
            "m", "1", "none", "uint8", self.attention, mesh.num_layers, mesh.num_kv_heads,
            HEAD_BYTES
        )  # fmt: skip

    @property
    def topology(self) -> Topology:
        return Topology(self.page_size, self.mesh.tp_size, self.mesh.pp_size)

    def memory(self, rank: int) -> Memory:
        return Memory(self.mesh, rank, self.order, self.num_pages, self.page_size, self.attention)

    def buffer(self) -> Buffer | None:
        config = self.transport
        return Buffer(config.staging_bytes, config.lease_bytes) if config.staging_bytes else None


class PrefillRank(PrefillManager):
    """One life of a prefill rank. `sendings` is the engine's side, kept by the simulation."""

    def __init__(
        self, world: World, side: Side, rank: int, incarnation: int, addresses: tuple[str, ...]
    ) -> None:
        self.me = PeerId(f"prefill/{rank}", incarnation)
        self.alive = True
        self._world = world
        self._now = lambda: world.now_s
        self._rank = rank
        self.memory, self.buffer = side.memory(rank), side.buffer()
        self.inbox, self.counters = Queue(), Counter()
        self.events = Queue(lambda event: world.prefill_said(self, event))
        self._channel = _Channel(world, self)
        area = None if self.buffer is None else self.buffer.area
        self.transport = world.fabric.transport(
            self.me, self.memory.layout, self.inbox.put, side.transport, self.memory, area
        )
        slot_bytes = 0 if area is None else area.lease_bytes
        endpoints = addresses if rank == 0 else ()
        self.endpoint = PrefillEndpoint(
            self.me, side.digest, side.topology, TIMING, endpoints, rank, slot_bytes
        )
        self.copies = Copies(self.inbox.put)
        self._staging = self._copies = None
        if self.buffer is not None:
            self._staging = self._copies = SendStaging(
                self.memory.layout, self.buffer, side.transport, self.me.name
            )
            self._staging._pool = self.copies
            self._staging.start_sending(rank, TIMING.resend_s, self.endpoint.next_job_id)

    @property
    def rank(self) -> int:
        return self._rank

    def _failed(self, error: Exception) -> None:
        raise error

    def frame(self, route: bytes, raw: bytes) -> None:
        self._act_frame(route, "", raw, self._now())

    def work(self) -> None:
        """One thing the control thread may do."""
        if self.inbox.items:
            self._take(self.inbox.items.popleft(), self._now())
            return
        self._act(self.endpoint.tick(self._now()))
        if self._staging is not None:
            self._act_staged(self._staging.machine.tick(self._now()), self._now())

    def copy(self, number: int, error: Exception | None) -> None:
        self.copies.run(number, lambda token: None, error)

    def leave(self) -> None:
        """Close in good order: the farewell may be lost."""
        self.transport.close()
        self._farewell()

    def check(self) -> None:
        if self._staging is not None:
            self._staging.machine.check_invariants()

    def leftovers(self) -> dict[str, Any]:
        """What has to be nothing at rest."""
        endpoint = self.endpoint
        left: dict[str, Any] = {
            "rooms": list(endpoint._rooms), "claims": endpoint._claims, "jobs": endpoint._jobs,
            "unclaimed": endpoint._unclaimed, "aborted early": endpoint._aborted_early,
            "parked": [peer.id for peer in endpoint._peers.values() if peer.num_parked],
            "rooms of peers": [peer.id for peer in endpoint._peers.values() if peer.rooms],
            "copies": self.copies.jobs, "in flight": self._world.fabric.in_flight(self.me),
            "unproven": self.transport._unproven, "inbox": list(self.inbox.items),
        }  # fmt: skip
        if self._staging is not None:
            machine = self._staging.machine
            left["staged"] = (
                machine.num_jobs,
                machine.num_rooms,
                machine.num_slots - machine.free_slots,  # those of undrained writes too
            )
            known = {peer.id for peer in endpoint._peers.values()}
            left["forgotten peers"] = (machine.peers | set(self._staging._peers)) - known
        return {name: what for name, what in left.items() if what and what != (0, 0, 0)}


class DecodeRank(DecodeManager):
    """One life of a decode rank. Above 0 it hears of rooms by `orders`, and answers with `news`."""

    def __init__(
        self, world: World, side: Side, rank: int, incarnation: int, worker: PeerId | None
    ) -> None:
        self.me = PeerId(f"decode/{rank}", incarnation)
        self.route = f"{rank}-{incarnation}".encode()
        self.alive = True
        self.rank = rank
        self._world = world
        self._now = lambda: world.now_s
        self.memory, self.buffer = side.memory(rank), side.buffer()
        self.inbox, self.events, self.counters = Queue(), Queue(), Counter()
        self.orders: deque[RoomOrder] = deque()
        self.news: deque[bytes] = deque()
        self._num_news = 0
        self._channel = _Channel(world, self)
        area = None if self.buffer is None else self.buffer.area
        self.transport = world.fabric.transport(
            self.me, self.memory.layout, self.inbox.put, side.transport, self.memory, area
        )
        hello = Hello(
            side.digest,
            side.topology,
            self.memory.layout,
            self.transport.metadata,
            rank,
            worker or self.me,
            area,
        )
        self.endpoint = DecodeEndpoint(self.me, hello, TIMING)
        self.copies = Copies(self.inbox.put)
        self._settle_s = TIMING.fence_settle_s
        self._expected = 0
        self._staging = self._copies = None
        if self.buffer is not None:
            self._staging = self._copies = _Receive(
                self.memory.layout, self.buffer, side.transport, self.me.name
            )
            self._staging._pool = self.copies

    def _failed(self, error: Exception) -> None:
        raise error

    def frame(self, address: str, raw: bytes) -> None:
        self._act_frame(address, raw, self._now())
        self._expect()

    def work(self) -> None:
        """One thing the control thread may do."""
        if self.inbox.items:
            self._take(self.inbox.items.popleft(), self._now())
        else:
            self._act(self.endpoint.tick(self._now()))
        self._expect()

    def _expect(self) -> None:
        if self.endpoint.num_expected != self._expected:
            self._expected = self.endpoint.num_expected
            self.transport.expect(self._expected)

    def apply(self) -> None:
        """The next order of rank 0, if there is one."""
        if self.orders:
            order = self.orders.popleft()
            self.inbox.put(Fence(order.peer) if isinstance(order, Fenced) else command_of(order))

    def take_news(self) -> None:
        if self.events.items:
            self.news.append(pack_news(self.rank, self._num_news, list(self.events.items)))
            self._num_news += 1
            self.events.items.clear()

    def copy(
        self, number: int, error: Exception | None, may_write: Callable[[RoomKey, np.ndarray], None]
    ) -> None:
        """Run a scatter; `may_write` is asked for the pages that it writes."""

        def before(token: Scattered) -> None:
            action = self._staging.scatters.pop(token.lease_id)
            lease = self.endpoint.staging.live_lease(token.lease_id)
            fold = self.memory.layout.page_size // action.unit_tokens
            may_write(lease.key, np.unique(action.units // fold))

        self.copies.run(number, before, error)

    def check(self) -> None:
        if self.endpoint.staging is not None:
            self.endpoint.staging.check_invariants()

    def leftovers(self) -> dict[str, Any]:
        """What has to be nothing at rest."""
        endpoint = self.endpoint
        left: dict[str, Any] = {
            "rooms": list(endpoint._rooms),
            "expected": endpoint.num_expected,
            "settling": endpoint._settling,
            "rooms of links": [
                link.address for link in endpoint._links.values() if link.rooms or link.waiting
            ],
            "copies": self.copies.jobs,
            "inbox": list(self.inbox.items),
            "orders": list(self.orders),
            "events": list(self.events.items),
            "news": list(self.news),
        }
        if endpoint.staging is not None:
            staging = endpoint.staging
            left |= {"staged rooms": staging.num_rooms, "leases": staging.leases()}
        return {name: what for name, what in left.items() if what}
