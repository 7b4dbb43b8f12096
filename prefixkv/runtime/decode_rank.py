"""A decode rank above 0: its own pool, agent and rooms; what to do with them it hears from rank
0."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from prefixkv.config import DecodeConfig
from prefixkv.errors import ClosedError, ConfigError, InternalError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.replica import DecodeReplica
from prefixkv.ranks.rooms import Fenced, RoomEvent, command_of, pack_news
from prefixkv.runtime.control_thread import ControlFailed, DecodeManager, Fence
from prefixkv.runtime.place import Place, staging_buffer
from prefixkv.runtime.staging import ReceiveStaging
from prefixkv.transport.sharded import make_transport


class DecodeRank:
    """Used from one thread.

    Args:
        pool: this rank's share of the KV; as many pages, and of the same size, as rank 0's. It must
            outlive this.
        config: rank 0's.
        mesh: how the model is shared out over the decode worker's ranks.
        rank: from 1.
        worker: `DecodeNode.peer_id` of rank 0, in whose name this rank receives.
        state: this rank's share of the extra state, with as many slots as rank 0's; it must outlive
            this as well.
    Raises:
        ConfigError: an unknown policy, a pool that is not this rank's share or cannot be
        registered.
    """

    def __init__(
        self,
        pool: KVPool,
        config: DecodeConfig,
        mesh: Mesh,
        rank: int,
        worker: PeerId,
        state: StatePool | None = None,
    ) -> None:
        if rank < 1:
            raise ConfigError(f"rank is {rank}: rank 0 is a DecodeNode")
        self.pool, self.state = pool, state
        self.rank = rank
        self.peer_id = PeerId(f"{config.name}/{rank}", time.time_ns())
        place = Place.of(pool, config.model, mesh, rank, state)
        self.replica = DecodeReplica(
            pool.layout.num_pages, pool.layout.page_size, config, place.num_slots
        )
        self._num_news = 0
        self._untold: list[RoomEvent] = []
        self._closed = False
        buffer = staging_buffer(pool, config.transport)
        area = None if buffer is None else buffer.area
        staging = None
        if buffer is not None:
            staging = ReceiveStaging(pool.layout, buffer, config.transport, self.peer_id.name)
        self._manager = DecodeManager(
            self.peer_id,
            lambda metadata: place.hello(metadata, worker, area),
            config.control,
            lambda sink: make_transport(
                self.peer_id, pool.layout, sink, config.transport, area, place.state_layout
            ),
            staging,
        )

    def apply(self, raw: bytes) -> None:
        """Do what rank 0 did in one pass (`DecodeNode.take_log`). Raises what `DecodeReplica.apply`
        raises."""
        for order in self.replica.apply(raw):
            self._manager.submit(
                Fence(order.peer) if isinstance(order, Fenced) else command_of(order)
            )

    def take_news(self) -> bytes:
        """What became of this rank's rooms since the last call: for `DecodeNode.apply_news`, each
        in order.

        Empty if nothing did. Raises InternalError for what went wrong in the control thread; the
        news come next time.
        """
        if self._closed:
            raise ClosedError("the rank is closed")
        events = self._manager.events.drain() if self._manager.events.pending else []
        failed = [event.error for event in events if isinstance(event, ControlFailed)]
        self._untold += [event for event in events if not isinstance(event, ControlFailed)]
        if failed:
            raise InternalError(f"in the control thread: {failed[0]!r}") from failed[0]
        if not self._untold:
            return b""
        told, self._untold = self._untold, []
        self._num_news += 1
        return pack_news(self.rank, self._num_news - 1, told)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there is news, at most `timeout_s`. True if there may be some."""
        return self._manager.events.wait(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable while there is news."""
        return self._manager.events.fd

    def pages(self, row: int) -> npt.NDArray[np.int32]:
        """The page ids of the request in this row, as `DecodeReplica.pages`."""
        return self.replica.pages(row)

    def state_slot(self, row: int) -> int:
        """As `DecodeRequest.state_slot`, of the request in this row."""
        return self.replica.state_slot(row)

    def audit(self) -> None:
        """Check every law of tree, allocator and page table. Slow. Raises InternalError."""
        self.replica.audit()

    @property
    def num_rooms(self) -> int:
        """Rooms that are open here, or not drained yet. Any thread may ask."""
        return self._manager.endpoint.num_rooms

    def stats(self) -> dict[str, int]:
        """Counters of the control thread."""
        return {
            **self._manager.counters,
            **self._manager.endpoint.counters,
            "rooms": self.num_rooms,
        }

    def close(self) -> None:
        """As `DecodeNode.close`."""
        self._closed = True
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
