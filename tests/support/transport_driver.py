"""Drivers that let one contract suite run on the fake and on NIXL, in shared memory and over
TCP."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefixkv.config import TransportConfig
from prefixkv.memory.kv_layout import BLOCK_BYTES, RelayArea
from prefixkv.memory.mesh import Shard
from prefixkv.memory.state_layout import StateLink
from prefixkv.protocol.ids import ChunkTag, PeerId
from prefixkv.transport.base import (
    Arrived,
    PeerMemory,
    PeerUnreachable,
    RankMemory,
    Sink,
    Transport,
    TransportEvent,
    WriteDone,
    WriteFailed,
    WriteJob,
)
from tests.support import gates
from tests.support.fabric import FakeFabric
from tests.support.patience import PATIENCE_S
from tests.support.state_memory import StateMemory
from tests.support.transport_pools import NumpyPool, Zeros, make_pool, shared_zeros

NUM_PAGES = 24
NUM_BLOCKS = 20  # of a staging area
_incarnations = itertools.count(1000)
_seeds = itertools.count()


class Staging:
    """A staging area with a block of canaries on either side."""

    def __init__(self, num_blocks: int, seed: int, zeros: Zeros = np.zeros) -> None:
        self.memory = zeros((num_blocks + 2, BLOCK_BYTES), np.uint8)
        self.memory[:] = np.random.default_rng(seed).integers(1, 256, self.memory.shape, np.uint8)
        num_bytes = num_blocks * BLOCK_BYTES
        self.area = RelayArea(self.memory[1:].ctypes.data, num_bytes, lease_bytes=num_bytes)

    @property
    def blocks(self) -> Any:
        """[block, byte], without the canaries."""
        return self.memory[1:-1]


@dataclass(eq=False)
class Node:
    me: PeerId
    pool: NumpyPool
    transport: Any
    events: list[TransportEvent] = field(default_factory=list)
    staging: Staging | None = None
    state: StateMemory | None = None

    def __post_init__(self) -> None:
        self.hear: Callable[[TransportEvent], object] = self.events.append
        """What its transport's sink calls; a test may put another in."""

    @property
    def memory(self) -> RankMemory:
        state = None if self.state is None else self.state.layout
        return RankMemory(self.pool.layout, self.area, state)

    @property
    def area(self) -> RelayArea | None:
        return None if self.staging is None else self.staging.area

    def ends(self, *job_ids: int) -> list[WriteDone | WriteFailed]:
        """The end events, of these jobs only where some are named."""
        return [
            e for e in self.events
            if isinstance(e, WriteDone | WriteFailed) and (not job_ids or e.job_id in job_ids)
        ]  # fmt: skip

    def drained(
        self, *job_ids: int, error: type[Exception] | tuple[type[Exception], ...] = Exception
    ) -> WriteFailed:
        """The one end of these jobs: a failure by this error, after which nothing can land."""
        [end] = self.ends(*job_ids)
        assert isinstance(end, WriteFailed), end
        assert end.drained
        assert isinstance(end.error, error), end.error
        return end

    def tags(self) -> list[ChunkTag]:
        return [ChunkTag.unpack(e.tag) for e in self.events if isinstance(e, Arrived)]

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    def job(
        self, job_id: int, to: Node, src: Any, dst: Any, room: int | None = None, **more: Any
    ) -> WriteJob:
        tag = ChunkTag(
            self.me.incarnation,
            room=job_id if room is None else room,
            generation=1,
            rank=0,
            chunk=3,
        )
        src_pages = np.asarray(src) if isinstance(src, np.ndarray) else np.array(src, np.int32)
        dst_pages = np.asarray(dst) if isinstance(dst, np.ndarray) else np.array(dst, np.int32)
        return WriteJob(job_id, to.me, src_pages, dst_pages, tag, **more)

    def add(
        self,
        *others: Node,
        parts: tuple[Shard, Shard] | None = None,
        state: StateLink | None = None,
    ) -> None:
        for other in others:
            memory = PeerMemory(other.pool.layout, parts, other.area, state)
            self.transport.add_peer(other.me, other.transport.metadata, memory)


class Driver:
    """Makes nodes, and waits until something is true. `zeros` makes the memory that is written
    to."""

    zeros: Zeros = staticmethod(np.zeros)

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._changed = threading.Condition()

    def node(
        self,
        name: str,
        order: str = "layer_major",
        config: TransportConfig | None = None,
        **pool: Any,
    ) -> Node:
        blocks, state = pool.pop("num_blocks", 0), pool.pop("state", None)
        memory = make_pool(order, pool.pop("num_pages", NUM_PAGES), zeros=self.zeros, **pool)
        memory.fill(next(_seeds))
        return self.node_of(name, memory, config, self.staging(blocks) if blocks else None, state)

    def staging(self, num_blocks: int) -> Staging:
        return Staging(num_blocks, next(_seeds), self.zeros)

    def node_of(
        self, name: str, pool: Any, config: TransportConfig | None = None,
        staging: Staging | None = None, state: StateMemory | None = None,
    ) -> Node:  # fmt: skip
        """A node of a pool that there is. It has a `layout`, and lives as long as the node."""
        me = PeerId(name, next(_incarnations))
        node = Node(me, pool, None, staging=staging, state=state)

        def sink(event: TransportEvent) -> None:
            node.hear(event)
            self.touch()

        node.transport = self.make(node, sink, config or TransportConfig(post_bytes=512))
        self.nodes.append(node)
        return node

    def pair(
        self, src: str = "layer_major", dst: str = "page_major", **more: Any
    ) -> tuple[Node, Node]:
        writer, target = self.node("prefill", src, **more), self.node("decode", dst, **more)
        writer.add(target)
        target.transport.expect(1)
        return writer, target

    def touch(self) -> None:
        """Say that something `until` may wait for has changed."""
        with self._changed:
            self._changed.notify_all()

    def make(self, node: Node, sink: Sink, config: TransportConfig) -> Transport:
        """The transport of a node that has all the rest."""
        raise NotImplementedError

    def until(self, condition: Callable[[], object]) -> None:
        raise NotImplementedError

    def end(self, writer: Node, job: WriteJob) -> WriteDone | WriteFailed:
        """Write a job and wait for its end."""
        writer.transport.write(job)
        self.until(lambda: writer.ends(job.job_id))
        return writer.ends(job.job_id)[0]

    def done(self, writer: Node, job: WriteJob) -> None:
        end = self.end(writer, job)
        assert isinstance(end, WriteDone), end

    def unreachable(self, writer: Node) -> PeerUnreachable:
        """The one peer that the writer finds unreachable."""
        self.until(lambda: writer.of(PeerUnreachable))
        [event] = writer.of(PeerUnreachable)
        return event  # type: ignore[no-any-return]

    def close(self) -> None:
        for node in self.nodes:
            node.transport.close()


class FakeDriver(Driver):
    def __init__(self) -> None:
        super().__init__()
        self.fabric = FakeFabric(seed=1)

    def make(self, node: Node, sink: Sink, config: TransportConfig) -> Transport:
        return self.fabric.transport(node.me, node.memory, sink, config, node)

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert self.fabric.step(), "nothing more can happen"


class NixlDriver(Driver):
    def make(self, node: Node, sink: Sink, config: TransportConfig) -> Transport:
        from prefixkv.transport.nixl.loop import NixlTransport

        return NixlTransport(node.me, node.memory, sink, config)

    def until(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=PATIENCE_S), [
                node.events for node in self.nodes
            ]


class ShmDriver(NixlDriver):
    """Pools in memory that is shared, and the transport that maps it."""

    zeros = staticmethod(shared_zeros)

    def make(self, node: Node, sink: Sink, config: TransportConfig) -> Transport:
        from prefixkv.transport.shm.loop import ShmTransport

        return ShmTransport(node.me, node.memory, sink, config)


class Gate(gates.Gate):
    """A `ready=` that a driver's `until` may wait for."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(asked=driver.touch)
