"""Transfers of a server with a process per rank; the ranks gather addresses and ids at the start,
and take events all together. A rank that cannot gather closes what it has opened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from logging import Logger
from typing import TypeVar

from prefixkv import DecodeConfig, KVPool, Mesh, PrefillConfig, StatePool
from prefixkv.errors import InternalError
from prefixkv.spi import PeerId
from prefixkv.transfer import DecodeTransfers, PrefillTransfers, RankSpec

T = TypeVar("T")

Gather = Callable[[object], list[object]]
"""Collective function, called on all ranks at once: returns each rank's object, by rank."""


def taken(take: Callable[[], list[T]], log: Logger) -> list[T]:
    """Return the events of transfers; an internal error is only logged, since the control thread
    survives it, and so do the other requests."""
    try:
        return take()
    except InternalError as error:
        log.error("prefixkv: %s", error)
        return []


def decode_transfers(
    pool: KVPool, config: DecodeConfig, mesh: Mesh | None, rank: int, gather: Gather,
    state: StatePool | None = None,
) -> DecodeTransfers:  # fmt: skip
    """All ranks of the server call it together; `state` is the rank's share."""
    spec = RankSpec(pool, mesh, rank, state)
    # Rank 0 comes first: the others name it as their worker in the handshake.
    with ExitStack() as undo:
        made = undo.enter_context(DecodeTransfers(spec, config)) if rank == 0 else None
        first = gather(None if made is None else tuple(made.peer_id))[0]
        undo.pop_all()
    return made or DecodeTransfers(spec, config, PeerId(*first))  # type: ignore[misc]


def prefill_transfers(
    pool: KVPool, config: PrefillConfig, mesh: Mesh | None, rank: int, gather: Gather,
    reach: Callable[[str], str] = str, state: StatePool | None = None,
) -> PrefillTransfers:  # fmt: skip
    """All ranks of the server call it together; `state` is the rank's share. `reach` turns a rank's
    own endpoint into the address at which other hosts reach it."""
    spec = RankSpec(pool, mesh, rank, state)
    # Rank 0 comes last: decode connects to it alone, and learns the others' endpoints from it.
    with ExitStack() as undo:
        made = undo.enter_context(PrefillTransfers(spec, config)) if rank != 0 else None
        endpoints = gather(None if made is None else reach(made.endpoint))[1:]
        undo.pop_all()
    return made or PrefillTransfers(spec, config, [str(one) for one in endpoints])
