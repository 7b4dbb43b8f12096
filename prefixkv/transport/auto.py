"""Two transports side by side, for `TransportConfig(backend="auto")`: shm where a peer's memory can
be mapped, NIXL for all others.

A peer is written by one of the two, and that is settled once, when it is added: its jobs wait here
until its memory is mapped, or is known not to be. Decode receives by both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from contextlib import suppress
from typing import Final, Literal, NamedTuple

from prefixkv.config import TransportConfig
from prefixkv.errors import AbortedError, CallerError, ClosedError, PeerLostError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout, StateLink
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Settled, Sink, Transport, TransportEvent, WriteFailed, WriteJob
from prefixkv.transport.nixl.transport import NixlTransport
from prefixkv.transport.offers import MetadataOffers, split_offers
from prefixkv.transport.routes import PeerMemory
from prefixkv.transport.shm.transport import ShmTransport

_log = logging.getLogger("prefixkv.transport")

_DEFAULTS: Final = TransportConfig()


def make_transport(
    me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
    staging: StagingArea | None = None, state: StateLayout | None = None,
) -> Transport:  # fmt: skip
    """Return the transport of `config.backend`. Raises what its constructor raises."""
    parts = me, layout, sink, config, staging, state
    if config.backend == "nixl":
        return NixlTransport(*parts)
    return ShmTransport(*parts) if config.backend == "shm" else AutoTransport(*parts)


class _SettleNext(NamedTuple):
    """Token of shm's `settle` that asks for NIXL's to follow."""

    token: Hashable
    for_s: float


class _AutoPeer:
    """A peer. `way` is None while it is not settled; `waiting` jobs wait for that."""

    def __init__(self, metadata: bytes, memory: PeerMemory) -> None:
        self.metadata, self.memory = metadata, memory
        self.backend: Literal["nixl", "shm"] | None = None
        self.waiting: list[WriteJob] = []


class AutoTransport:
    """The contract of `base.Transport`, kept by one of two transports per peer. The sink is called
    from the threads of both, from one at a time."""

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
        staging: StagingArea | None = None, state: StateLayout | None = None,
    ) -> None:  # fmt: skip
        """Start both. Raises what either raises."""
        self._sink = sink
        self._telling = threading.Lock()  # held around each call of the sink
        self._sink_thread: int | None = None  # the thread that is in the sink
        # Over all below; inside it both transports are only asked to queue.
        self._lock = threading.Lock()
        self._peers: dict[PeerId, _AutoPeer] = {}
        self._closed = False
        self._nixl = NixlTransport(me, layout, self._tell, config, staging, state)
        try:
            self._shm = ShmTransport(
                me, layout, self._hear_shm, config, staging, state, met=self._met
            )
        # NIXL is running already: its thread and agent would outlive this object.
        except BaseException:
            self._nixl.close()
            raise
        self.metadata = MetadataOffers(self._nixl.metadata, self._shm.metadata).join()

    def add_peer(
        self, peer: PeerId, metadata: bytes, layout: KVLayout,
        parts: tuple[Shard, Shard] | None = None, staging: StagingArea | None = None,
        state: StateLink | None = None,
    ) -> None:  # fmt: skip
        """Add the peer to shm while that may map its memory, else to NIXL."""
        memory = PeerMemory(layout, parts, staging, state)
        offers = split_offers(metadata)
        with self._lock:
            if self._closed:
                raise ClosedError("the transport is closed")
            known = self._peers.get(peer)
            # 1. Known as it is. 2. Settled: it stays with its way, since jobs of the other
            # transport may be under way. 3. Not settled, or unknown: begins again; jobs that wait
            # stay if they are for the same memory.
            if known is not None and (known.metadata, known.memory) == (metadata, memory):
                return
            if known is not None and known.backend is not None:
                known.metadata, known.memory = metadata, memory
                self._add(peer, known)
                return
            made = self._peers[peer] = _AutoPeer(metadata, memory)
            if known is not None and known.memory == memory:
                made.waiting = known.waiting
            elif known is not None:
                lost = PeerLostError(f"the memory of {peer.name} is another now")
                for job in known.waiting:
                    self._end(job, lost)
            # Without an offer of shm there is nothing to wait for.
            made.backend = None if offers.shm else "nixl"
            self._add(peer, made)

    def remove_peer(self, peer: PeerId) -> None:
        """Remove the peer from both: shm may know it only to find out its way."""
        with self._lock:
            known = self._peers.pop(peer, None)
            self._nixl.remove_peer(peer)
            self._shm.remove_peer(peer)
            for job in known.waiting if known is not None else ():
                self._end(job, AbortedError(f"peer {peer.name} was removed"))

    def write(self, job: WriteJob) -> None:
        """Queue a job at the transport of its peer, or keep it until that is settled."""
        with self._lock:
            known = self._peers.get(job.peer)
            if known is not None and known.backend is None and not self._closed:
                known.waiting.append(job)
            else:
                # An unknown peer's job goes to NIXL, which ends it with the proper error.
                by_shm = known is not None and known.backend == "shm"
                (self._shm if by_shm else self._nixl).write(job)

    def cancel(self, job_id: int) -> None:
        """Cancel a job that waits here, or wherever it is."""
        with self._lock:
            for known in self._peers.values():
                for job in known.waiting:
                    if job.job_id == job_id:
                        known.waiting.remove(job)
                        self._end(job, AbortedError(f"job {job_id} was cancelled"))
                        return
            # One of the two has the job, the other does not know it.
            self._shm.cancel(job_id)
            self._nixl.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        self._shm.expect(num_rooms)
        self._nixl.expect(num_rooms)

    def settle(self, token: Hashable, for_s: float) -> None:
        """Settle shm first, then NIXL, see `_hear_shm`."""
        self._shm.settle(_SettleNext(token, for_s), for_s)

    def renew(self) -> None:
        """Renew NIXL alone: jobs by shm always end drained."""
        self._nixl.renew()

    def close(self) -> None:
        """Close both, after the jobs that wait here have ended. May be called again. Raises
        CallerError from the sink; InternalError if NIXL's agent was not destroyed, with shm ended
        all the same."""
        # The sink's thread would wait for itself.
        if self._sink_thread == threading.get_ident():
            raise CallerError("close() was called from the transport's own sink")
        # 1. Jobs that no transport has yet: they end by shm's thread, so before that is closed.
        with self._lock:
            self._closed = True
            waiting = [job for known in self._peers.values() for job in known.waiting]
            for known in self._peers.values():
                known.waiting = []
            for job in waiting:
                self._end(job, ClosedError("the transport was closed"))
        # 2. Outside the lock, which the threads that are joined may want (`_met`).
        try:
            self._shm.close()
        finally:
            self._nixl.close()

    # --- inside the lock --------------------------------------------------------------------------

    def _add(self, peer: PeerId, known: _AutoPeer) -> None:
        """To shm while the way is not settled, to find out."""
        offers = split_offers(known.metadata)
        if known.backend == "nixl":
            self._nixl.add_peer(peer, offers.nixl, *known.memory)
        else:
            self._shm.add_peer(peer, offers.shm, *known.memory)

    def _end(self, job: WriteJob, error: Exception) -> None:
        self._shm.say(WriteFailed(job.job_id, error, drained=True))

    # --- shm's thread -----------------------------------------------------------------------------

    def _met(self, peer: PeerId, error: Exception | None) -> bool:
        """shm has mapped a peer's memory, or has not for the reason `error`. Return True if NIXL
        takes the peer. Called by shm's thread."""
        with self._lock:
            known = self._peers.get(peer)
            # It was removed, or settled before: then it keeps its way, and shm reports the loss.
            if known is None or known.backend is not None or self._closed:
                return False
            goes_by_nixl = error is not None and bool(split_offers(known.metadata).nixl)
            known.backend = "nixl" if goes_by_nixl else "shm"
            # Away from shm first, so that no job can reach the peer by both.
            if goes_by_nixl:
                _log.info("%s is written over NIXL: %s", peer, error)
                self._shm.remove_peer(peer)
                self._add(peer, known)
            # The jobs in their order, under the lock: one that comes now must not overtake them.
            waiting, known.waiting = known.waiting, []
            transport = self._nixl if goes_by_nixl else self._shm
            for job in waiting:
                with suppress(ClosedError):
                    transport.write(job)
            return goes_by_nixl

    def _hear_shm(self, event: TransportEvent) -> None:
        """A `_SettleNext` becomes NIXL's `settle`, all else goes to the sink."""
        if isinstance(event, Settled) and isinstance(event.token, _SettleNext):
            with suppress(ClosedError):
                self._nixl.settle(*event.token)
        else:
            self._tell(event)

    def _tell(self, event: TransportEvent) -> None:
        with self._telling:
            self._sink_thread = threading.get_ident()
            try:
                self._sink(event)
            finally:
                self._sink_thread = None
