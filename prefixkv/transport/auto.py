"""Two transports side by side, for `TransportConfig(backend="auto")`: shm where a peer's memory can
be mapped, NIXL for all others.

Which of the two a peer is written by is settled once, when it is added: its jobs wait here until
its memory is mapped, or is known not to be. Decode hears both.
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
from prefixkv.transport.offers import Offers, split_offers
from prefixkv.transport.routes import PeerMemory
from prefixkv.transport.shm.transport import ShmTransport

_log = logging.getLogger("prefixkv.transport")

_DEFAULTS: Final = TransportConfig()


def make_transport(
    me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
    staging: StagingArea | None = None, state: StateLayout | None = None,
) -> Transport:  # fmt: skip
    """The transport of `config.backend`. Raises what that raises."""
    parts = me, layout, sink, config, staging, state
    if config.backend == "nixl":
        return NixlTransport(*parts)
    return ShmTransport(*parts) if config.backend == "shm" else AutoTransport(*parts)


class _SettleNext(NamedTuple):
    """A token of shm's `settle`; NIXL's follows."""

    token: Hashable
    for_s: float


class _Peer:
    """`way` None: not settled, and `waiting` jobs wait for that."""

    def __init__(self, metadata: bytes, memory: PeerMemory) -> None:
        self.metadata, self.memory = metadata, memory
        self.way: Literal["nixl", "shm"] | None = None
        self.waiting: list[WriteJob] = []


class AutoTransport:
    """Keeps the contract of `base.Transport`. The sink is called from the threads of both, from one
    at a time."""

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS,
        staging: StagingArea | None = None, state: StateLayout | None = None,
    ) -> None:  # fmt: skip
        """Raises what either raises."""
        self._sink = sink
        self._telling = threading.Lock()
        self._teller: int | None = None  # the thread that is in the sink
        self._lock = threading.Lock()  # over all below; inside it both transports only queue
        self._peers: dict[PeerId, _Peer] = {}
        self._closed = False
        self._nixl = NixlTransport(me, layout, self._tell, config, staging, state)
        try:
            self._shm = ShmTransport(
                me, layout, self._hear_shm, config, staging, state, met=self._met
            )
        except BaseException:
            self._nixl.close()
            raise
        self.metadata = Offers(self._nixl.metadata, self._shm.metadata).join()

    def add_peer(
        self, peer: PeerId, metadata: bytes, layout: KVLayout,
        parts: tuple[Shard, Shard] | None = None, staging: StagingArea | None = None,
        state: StateLink | None = None,
    ) -> None:  # fmt: skip
        memory = PeerMemory(layout, parts, staging, state)
        offers = split_offers(metadata)
        with self._lock:
            if self._closed:
                raise ClosedError("the transport is closed")
            known = self._peers.get(peer)
            if known is not None and (known.metadata, known.memory) == (metadata, memory):
                return
            if known is not None and known.way is not None:  # it stays with its way
                known.metadata, known.memory = metadata, memory
                self._add(peer, known)
                return
            made = self._peers[peer] = _Peer(metadata, memory)
            if known is not None and known.memory == memory:
                made.waiting = known.waiting
            elif known is not None:
                lost = PeerLostError(f"the memory of {peer.name} is another now")
                for job in known.waiting:
                    self._end(job, lost)
            made.way = None if offers.shm else "nixl"
            self._add(peer, made)

    def remove_peer(self, peer: PeerId) -> None:
        with self._lock:
            known = self._peers.pop(peer, None)
            self._nixl.remove_peer(peer)
            self._shm.remove_peer(peer)
            for job in known.waiting if known is not None else ():
                self._end(job, AbortedError(f"peer {peer.name} was removed"))

    def write(self, job: WriteJob) -> None:
        with self._lock:
            known = self._peers.get(job.peer)
            if known is not None and known.way is None and not self._closed:
                known.waiting.append(job)
            else:
                by_shm = known is not None and known.way == "shm"
                (self._shm if by_shm else self._nixl).write(job)

    def cancel(self, job_id: int) -> None:
        with self._lock:
            for known in self._peers.values():
                for job in known.waiting:
                    if job.job_id == job_id:
                        known.waiting.remove(job)
                        self._end(job, AbortedError(f"job {job_id} was cancelled"))
                        return
            self._shm.cancel(job_id)
            self._nixl.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        self._shm.expect(num_rooms)
        self._nixl.expect(num_rooms)

    def settle(self, token: Hashable, for_s: float) -> None:
        self._shm.settle(_SettleNext(token, for_s), for_s)

    def renew(self) -> None:
        self._nixl.renew()

    def close(self) -> None:
        """See `base.Transport.close`. May be called again. Raises InternalError if NIXL's agent
        was not destroyed; shm has ended all the same."""
        if self._teller == threading.get_ident():
            raise CallerError("close() was called from the transport's own sink")
        with self._lock:
            self._closed = True
            waiting = [job for known in self._peers.values() for job in known.waiting]
            for known in self._peers.values():
                known.waiting = []
            for job in waiting:
                self._end(job, ClosedError("the transport was closed"))
        try:
            self._shm.close()
        finally:
            self._nixl.close()

    # --- inside the lock --------------------------------------------------------------------------

    def _add(self, peer: PeerId, known: _Peer) -> None:
        offers = split_offers(known.metadata)
        if known.way == "nixl":
            self._nixl.add_peer(peer, offers.nixl, *known.memory)
        else:
            self._shm.add_peer(peer, offers.shm, *known.memory)

    def _end(self, job: WriteJob, error: Exception) -> None:
        """Say so from a thread of the transport's own."""
        self._shm.say(WriteFailed(job.job_id, error, drained=True))

    # --- shm's thread -----------------------------------------------------------------------------

    def _met(self, peer: PeerId, error: Exception | None) -> bool:
        """Its memory is mapped, or (`error`) is not. Whether NIXL takes the peer over."""
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.way is not None or self._closed:
                return False
            goes_by_nixl = error is not None and bool(split_offers(known.metadata).nixl)
            known.way = "nixl" if goes_by_nixl else "shm"
            if goes_by_nixl:
                _log.info("%s is written over NIXL: %s", peer, error)
                self._shm.remove_peer(peer)
                self._add(peer, known)
            waiting, known.waiting = known.waiting, []
            transport = self._nixl if goes_by_nixl else self._shm
            for job in waiting:
                with suppress(ClosedError):
                    transport.write(job)
            return goes_by_nixl

    def _hear_shm(self, event: TransportEvent) -> None:
        if isinstance(event, Settled) and isinstance(event.token, _SettleNext):
            with suppress(ClosedError):
                self._nixl.settle(*event.token)
        else:
            self._tell(event)

    def _tell(self, event: TransportEvent) -> None:
        with self._telling:
            self._teller = threading.get_ident()
            try:
                self._sink(event)
            finally:
                self._teller = None
