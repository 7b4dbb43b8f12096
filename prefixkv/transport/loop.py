"""The work of a transport's thread that does not depend on how bytes travel: its peers, its jobs,
and what it tells the sink. `nixl/loop.py` and `shm/loop.py` add the transfers."""

from __future__ import annotations

import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from prefixkv.config import TransportConfig
from prefixkv.errors import AbortedError, PeerLostError, TransferError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Sink, TransportEvent, WriteJob
from prefixkv.transport.jobs import ActiveJob, JobTable, Outbox
from prefixkv.transport.pace import Pace
from prefixkv.transport.routes import PeerMemory, Routes

_log = logging.getLogger("prefixkv.transport")

RECONNECT_S = 0.1  # between two attempts to connect to one peer


class LoopPeer:
    """A peer of a transport, and the jobs that go to it."""

    def __init__(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        self.peer = peer
        self.metadata = metadata
        self.memory = memory
        # Which of our memory goes where in the peer's; None: to be connected before its next part.
        self.routes: Routes | None = None
        self.outbox = Outbox()
        self.retry_at = 0.0  # monotonic: no attempt to connect before
        self.removed = False  # by the owner; it may be kept while something of it is under way


P = TypeVar("P", bound=LoopPeer)


class TransportLoop(ABC, Generic[P]):
    """The peers and jobs of one transport. Owned by the transport's thread; nothing of it leaves. A
    part has at most `max_descriptors` pages."""

    def __init__(
        self, layout: KVLayout, sink: Sink, config: TransportConfig,
        staging: StagingArea | None, state: StateLayout | None, max_descriptors: int,
    ) -> None:  # fmt: skip
        self._layout, self._staging, self._state = layout, staging, state
        self._sink = sink
        self._config = config
        self._peers: dict[PeerId, P] = {}
        self._pace = Pace(config.max_bytes_per_s)
        part_bytes = self._pace.part_bytes(config.post_bytes)
        self._jobs = JobTable(self.emit, part_bytes, max_descriptors)

    # --- commands ---------------------------------------------------------------------------------

    def add_peer(self, peer_id: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        """Add a peer, and connect it, again where its metadata or memory is another."""
        # Three cases: unknown; known with new metadata or memory (or removed and not gone yet);
        # known as it is.
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = self._new_peer(peer_id, metadata, memory)
            self._connect(peer)
        elif peer.removed or (peer.metadata, peer.memory) != (metadata, memory):
            # Its jobs were checked against the bounds of the former memory.
            if peer.memory != memory:
                lost = PeerLostError(f"the memory of {peer_id.name} is another now")
                self._jobs.drop(peer.outbox, lost)
            peer.metadata, peer.memory, peer.removed = metadata, memory, False
            self._connect_again(peer)

    def remove_peer(self, peer_id: PeerId) -> None:
        """Remove a peer: its jobs that are not posted end now."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        # Jobs that are not posted end now; the peer itself goes once nothing of it is under way.
        peer.removed = True
        self._jobs.drop(peer.outbox, AbortedError(f"peer {peer_id.name} was removed"))
        self._forget_if_unused(peer)

    def write(self, job: WriteJob) -> None:
        """Start a job, or park it until its peer is connected."""
        peer = self._peers.get(job.peer)
        if peer is None or peer.removed:
            self._jobs.refuse(job, PeerLostError(f"{job.peer} is no peer of this transport"))
        # Not connected: parked until the peer is, since pages are checked against its runs.
        elif peer.routes is None:
            self._jobs.park(peer.outbox, job)
        else:
            self._jobs.start(peer.outbox, peer.routes, job)

    def cancel(self, job_id: int) -> None:
        self._jobs.cancel(job_id)

    # --- peers ------------------------------------------------------------------------------------

    @abstractmethod
    def _new_peer(self, peer_id: PeerId, metadata: bytes, memory: PeerMemory) -> P:
        """Return a peer that is not connected."""

    @abstractmethod
    def _connect(self, peer: P) -> None:
        """Begin to connect. `_lose` takes what goes wrong."""

    @abstractmethod
    def _connect_again(self, peer: P) -> None:
        """Let go of a peer's former memory, and connect as soon as that may be."""

    @abstractmethod
    def _forget_if_unused(self, peer: P) -> None:
        """Drop a removed peer once nothing of it is under way."""

    # --- writes -----------------------------------------------------------------------------------

    def _serve_peer(self, peer: P, now_s: float) -> bool:
        """Transfer one part, of the first room in turn that is ready; connect first if that is due.
        One part only, so that peers take turns. Returns whether anything moved."""
        if peer.routes is None:
            if not self._may_connect(peer) or now_s < peer.retry_at:
                return False
            self._connect(peer)
            return True
        if not self._may_transfer(peer) or (self._pace and self._paced_until(now_s) is not None):
            return False
        for job in peer.outbox.round():
            try:
                ready = job.poll_ready()
            # `ready` is the engine's code: an error ends its job alone.
            except BaseException as error:
                self._jobs.stop(job, bare(error))
                return True
            if ready:
                if self._pace:
                    self._pace.spend(job.parts[job.next_part].num_bytes, time.monotonic())
                    # The bucket is the peers' in common, and those are looked at in this order: the
                    # one that has spent of it goes last. Before the transfer, which may lose it.
                    self._peers[peer.peer] = self._peers.pop(peer.peer)
                self._transfer(peer, job)
                return True
        return False

    def _paced_until(self, now_s: float) -> float | None:
        free_at = self._pace.free_at(now_s)
        return free_at if free_at > now_s else None

    def _may_connect(self, peer: P) -> bool:
        return True

    def _may_transfer(self, peer: P) -> bool:
        return True

    @abstractmethod
    def _transfer(self, peer: P, job: ActiveJob) -> None:
        """Transfer the next part of a job, and note how that ended if it did so at once."""

    # --- events -----------------------------------------------------------------------------------

    def emit(self, event: TransportEvent) -> None:
        """Hand an event to the sink; its exception is logged, since the thread goes on."""
        try:
            self._sink(event)
        except BaseException:
            _log.error("the sink of the transport failed on %r\n%s", event, traceback.format_exc())

    def _guarded(self, step: Callable[[], bool | None]) -> bool | None:
        """Log an exception of the step and return None: it is a bug of ours, but the thread serves
        other rooms too."""
        try:
            return step()
        except Exception:
            _log.error("the transport's thread raised\n%s", traceback.format_exc())
            return None


def bare(error: BaseException) -> Exception:
    """Return an error without tracebacks: their frames would keep NIXL agents and mapped memory. An
    exception that is no `Exception` (KeyboardInterrupt, say) comes back wrapped."""
    # Causes and contexts have tracebacks of their own.
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, Exception):
        return error
    wrapped = TransferError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
