"""The transports of one rank. The handshake chooses by which of them a peer is written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack
from typing import Final

from prefixkv.config import TransportConfig, Way
from prefixkv.errors import ConfigError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import PeerMemory, RankMemory, Sink, Transport, WriteJob
from prefixkv.transport.nixl.loop import NixlTransport

_log = logging.getLogger("prefixkv.transport")

MAKERS: Final[dict[Way, Callable[..., Transport]]] = {"nixl": NixlTransport}
"""The transports that there are; `assembly.py` adds to them."""


def make_transports(
    me: PeerId, memory: RankMemory, sink: Sink, config: TransportConfig
) -> dict[Way, Transport]:
    """Return the transports that `config.backend` asks for. Raises what a constructor raises, with
    none left open."""
    ways: Iterable[Way] = MAKERS if config.backend == "auto" else (config.backend,)
    made: dict[Way, Transport] = {}
    with ExitStack() as undo:
        for way in ways:
            if way not in MAKERS:
                raise ConfigError(f"backend: this installation has no transport {way!r}")
            made[way] = MAKERS[way](me, memory, sink, config)
            undo.callback(made[way].close)
        undo.pop_all()
    return made


class Transports:
    """Calls go to the transport of the peer, or to all. Owned by the control thread."""

    def __init__(self, by_way: Mapping[Way, Transport]) -> None:
        self._by_way = by_way
        self._of: dict[PeerId, Transport] = {}
        self._settling: Counter[Hashable] = Counter()  # answers that are missing, by token

    @property
    def offers(self) -> dict[Way, bytes]:
        """What a Hello says of each."""
        return {way: transport.metadata for way, transport in self._by_way.items()}

    def add_peer(self, way: Way, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        """As `Transport.add_peer`. A peer that another transport has moves: jobs there end."""
        transport = self._by_way[way]
        former = self._of.get(peer, transport)
        if former is not transport:
            _log.info("%s is written by %s from now on", peer, way)
            former.remove_peer(peer)
        self._of[peer] = transport
        transport.add_peer(peer, metadata, memory)

    def remove_peer(self, peer: PeerId) -> None:
        if (transport := self._of.pop(peer, None)) is not None:
            transport.remove_peer(peer)

    def write(self, job: WriteJob) -> None:
        """As `Transport.write`. Any transport ends a job for an unknown peer."""
        self._of.get(job.peer, next(iter(self._by_way.values()))).write(job)

    def cancel(self, job_id: int) -> None:
        # One of them has the job, the others do not know it.
        for transport in self._by_way.values():
            transport.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        for transport in self._by_way.values():
            transport.expect(num_rooms)

    def settle(self, token: Hashable, for_s: float) -> None:
        """Ask all: a peer does not say by which transport it has written."""
        for transport in self._by_way.values():
            self._settling[token] += 1
            transport.settle(token, for_s)

    def settled(self, token: Hashable) -> bool:
        """Count one answer to `settle`; return whether it was the last."""
        self._settling[token] -= 1
        if self._settling[token] > 0:
            return False
        del self._settling[token]
        return True

    def renew(self) -> None:
        for transport in self._by_way.values():
            transport.renew()

    def close(self) -> None:
        """Close all, whatever one raises."""
        with ExitStack() as stack:
            for transport in self._by_way.values():
                stack.callback(transport.close)
