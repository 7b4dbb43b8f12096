"""Transfers of a server whose ranks are processes: what they have to know of each other is gathered
when they start."""

from __future__ import annotations

from collections.abc import Callable

from prefixkv import DecodeConfig, KVPool, Mesh, PrefillConfig
from prefixkv.spi import MakeTransport, PeerId
from prefixkv.transfer import DecodeTransfers, PrefillTransfers

Gather = Callable[[object], list[object]]
"""Called on all ranks of the server at once: what each of them gave, in the order of ranks."""


def decode_transfers(
    pool: KVPool,
    config: DecodeConfig,
    mesh: Mesh | None,
    rank: int,
    gather: Gather,
    transport: MakeTransport | None = None,
) -> DecodeTransfers:
    """Rank 0 first: the others name it in their handshake. Raises what `DecodeTransfers` raises."""
    made: DecodeTransfers | None = None
    if rank == 0:
        made = DecodeTransfers(pool, config, mesh, transport=transport)
    first = gather(None if made is None else tuple(made.peer_id))[0]
    if made is not None:
        return made
    worker = PeerId(*first)  # type: ignore[misc]
    return DecodeTransfers(pool, config, mesh, rank, worker=worker, transport=transport)


def prefill_transfers(
    pool: KVPool,
    config: PrefillConfig,
    mesh: Mesh | None,
    rank: int,
    gather: Gather,
    transport: MakeTransport | None = None,
    reach: Callable[[str], str] = str,
) -> PrefillTransfers:
    """Rank 0 last: it names the others' endpoints, as `reach` says how they are reached. Raises
    what `PrefillTransfers` raises."""
    made: PrefillTransfers | None = None
    if rank != 0:
        made = PrefillTransfers(pool, config, mesh, rank, transport=transport)
    endpoints = gather(None if made is None else reach(made.endpoint))[1:]
    if made is not None:
        return made
    others = [str(one) for one in endpoints]
    return PrefillTransfers(pool, config, mesh, 0, others, transport=transport)
