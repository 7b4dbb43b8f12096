"""The calls of a transport that has one thread for all its work: each is queued as a command for
that thread's loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLink
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import WriteJob
from prefixkv.transport.routes import PeerMemory


class Loop(Protocol):
    """The part of a loop that all transports share. Its methods run on the transport's thread."""

    def add_peer(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None: ...

    def remove_peer(self, peer: PeerId) -> None: ...

    def write(self, job: WriteJob) -> None: ...

    def cancel(self, job_id: int) -> None: ...


L = TypeVar("L", bound=Loop)


class Queued(ABC, Generic[L]):
    """The calls of `base.Transport` that every loop takes alike. Holds no state."""

    @abstractmethod
    def _call(self, command: Callable[[L], None], or_raise: bool = True) -> None:
        """Queue a command behind all before it. Closed: ClosedError, or nothing with `or_raise`
        False."""

    def add_peer(
        self, peer: PeerId, metadata: bytes, layout: KVLayout,
        parts: tuple[Shard, Shard] | None = None, staging: StagingArea | None = None,
        state: StateLink | None = None,
    ) -> None:  # fmt: skip
        """See `base.Transport.add_peer`."""
        memory = PeerMemory(layout, parts, staging, state)
        self._call(lambda loop: loop.add_peer(peer, metadata, memory))

    def remove_peer(self, peer: PeerId) -> None:
        """See `base.Transport.remove_peer`."""
        # Closing has ended all jobs and forgotten all peers: nothing to raise about, here and in
        # `cancel`.
        self._call(lambda loop: loop.remove_peer(peer), or_raise=False)

    def write(self, job: WriteJob) -> None:
        """See `base.Transport.write`."""
        self._call(lambda loop: loop.write(job))

    def cancel(self, job_id: int) -> None:
        """See `base.Transport.cancel`."""
        self._call(lambda loop: loop.cancel(job_id), or_raise=False)
