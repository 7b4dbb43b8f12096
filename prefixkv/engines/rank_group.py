"""Transfers of a server that has a process per rank: the ranks gather each other's addresses and
ids when they start."""

from __future__ import annotations

from collections.abc import Callable

from prefixkv import DecodeConfig, KVPool, Mesh, PrefillConfig, StatePool
from prefixkv.spi import MakeTransport, PeerId
from prefixkv.transfer import DecodeTransfers, PrefillTransfers

Gather = Callable[[object], list[object]]
"""Collective function, called on all ranks at once: returns each rank's object, by rank."""


def decode_transfers(
    pool: KVPool,
    config: DecodeConfig,
    mesh: Mesh | None,
    rank: int,
    gather: Gather,
    transport: MakeTransport | None = None,
    state: StatePool | None = None,
) -> DecodeTransfers:
    """Make one engine rank's decode transfers, together with all ranks of its server.

    `state` is the rank's share of the extra state of requests. Raises what `DecodeTransfers`
    raises.
    """
    # Rank 0 comes first: the others name it as their worker in the handshake.
    made: DecodeTransfers | None = None
    if rank == 0:
        made = DecodeTransfers(pool, config, mesh, state=state, transport=transport)
    first = gather(None if made is None else tuple(made.peer_id))[0]
    if made is not None:
        return made
    worker = PeerId(*first)  # type: ignore[misc]
    return DecodeTransfers(
        pool, config, mesh, rank, worker=worker, state=state, transport=transport
    )


def prefill_transfers(
    pool: KVPool,
    config: PrefillConfig,
    mesh: Mesh | None,
    rank: int,
    gather: Gather,
    transport: MakeTransport | None = None,
    reach: Callable[[str], str] = str,
    state: StatePool | None = None,
) -> PrefillTransfers:
    """Make one engine rank's prefill transfers, together with all ranks of its server.

    `reach` turns a rank's own endpoint into the address at which other hosts reach it. `state` is
    the rank's share of the extra state of requests. Raises what `PrefillTransfers` raises.
    """
    # Rank 0 comes last: decode connects to it alone, and learns the others' endpoints from it.
    made: PrefillTransfers | None = None
    if rank != 0:
        made = PrefillTransfers(pool, config, mesh, rank, state=state, transport=transport)
    endpoints = gather(None if made is None else reach(made.endpoint))[1:]
    if made is not None:
        return made
    others = [str(one) for one in endpoints]
    return PrefillTransfers(pool, config, mesh, 0, others, state=state, transport=transport)
