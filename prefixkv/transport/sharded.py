"""Several posting threads: transports over NIXL side by side, each with an agent and a thread of
its own.

A post over shared memory is a copy that holds its thread, and so may a peer that is being
connected. With more threads that holds up the rooms of one thread only. Rooms are shared out, so
the jobs of a room go in order. Peers write to the first agent alone: it says what arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Final

from prefixkv.config import TransportConfig
from prefixkv.errors import CallerError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout, StateLink
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Sink, Transport, TransportEvent, WriteJob
from prefixkv.transport.nixl import NixlTransport

_DEFAULTS: Final = TransportConfig()
# rooms may be numbered in steps that share a factor with the number of threads
_MIX: Final = 0x9E3779B97F4A7C15


def make_transport(
    me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
    staging: StagingArea | None = None, state: StateLayout | None = None,
) -> Transport:  # fmt: skip
    """The transport over NIXL with `config.posting_threads`. Raises what `NixlTransport` raises."""
    if config.posting_threads == 1:
        return NixlTransport(me, layout, sink, config, staging, state=state)
    return ShardedTransport(me, layout, sink, config, staging, state)


class ShardedTransport:
    """Keeps the contract of `base.Transport`. The sink is called from all of its threads, from one
    at a time."""

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
        staging: StagingArea | None = None, state: StateLayout | None = None,
    ) -> None:  # fmt: skip
        """Start the threads one by one; the memory is registered with each agent. Raises as
        `NixlTransport`."""
        self._sink = sink
        self._telling = threading.Lock()
        self._teller: int | None = None  # the thread that is in the sink
        self._shards: list[NixlTransport] = []
        try:
            for shard in range(config.posting_threads):
                self._shards.append(
                    NixlTransport(me, layout, self._tell, config, staging, shard, state)
                )
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> bytes:
        return self._shards[0].metadata

    def add_peer(
        self, peer: PeerId, metadata: bytes, layout: KVLayout,
        parts: tuple[Shard, Shard] | None = None, staging: StagingArea | None = None,
        state: StateLink | None = None,
    ) -> None:  # fmt: skip
        for shard in self._shards:
            shard.add_peer(peer, metadata, layout, parts, staging, state)

    def remove_peer(self, peer: PeerId) -> None:
        for shard in self._shards:
            shard.remove_peer(peer)

    def write(self, job: WriteJob) -> None:
        self._shards[shard_of(job.tag.room, len(self._shards))].write(job)

    def cancel(self, job_id: int) -> None:
        for shard in self._shards:
            shard.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        self._shards[0].expect(num_rooms)

    def settle(self, token: Hashable, for_s: float) -> None:
        self._shards[0].settle(token, for_s)

    def renew(self) -> None:
        for shard in self._shards:
            shard.renew()

    def close(self) -> None:
        """See `base.Transport.close`: a fence only if every agent was destroyed. May be called
        again.

        Raises: InternalError if one was not; the others have been, all the same.
        """
        if self._teller == threading.get_ident():
            raise CallerError("close() was called from the transport's own sink")
        errors: list[Exception] = []
        for shard in self._shards:
            try:
                shard.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _tell(self, event: TransportEvent) -> None:
        with self._telling:
            self._teller = threading.get_ident()
            try:
                self._sink(event)
            finally:
                self._teller = None


def shard_of(room: int, num_shards: int) -> int:
    """Which thread posts for a room.

    >>> [shard_of(room, 4) for room in (0, 4, 8, 12, 16)]
    [0, 1, 3, 1, 3]
    """
    return (room * _MIX & 0xFFFFFFFFFFFFFFFF) * num_shards >> 64
