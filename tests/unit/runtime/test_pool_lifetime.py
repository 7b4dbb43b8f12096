"""Transports write to addresses: the memory behind them stays as long as one may."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
from prefixkv.transfer import DecodeTransfers, PrefillTransfers

TENSORS = [StateTensor("conv", 0, 2, (8,))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DecodeTransfers, PrefillTransfers])
@pytest.mark.parametrize("backend", ["nixl", "shm"])
def test_a_pool_without_another_reference_stays_until_it_has_closed(
    kind: Any, backend: Any
) -> None:
    pool = KVPool.create(16, 4, 2, 2, 16, shared=backend == "shm")
    state = StatePool.create(TENSORS, 2, shared=backend == "shm")
    left = weakref.ref(pool), weakref.ref(state)
    transport = TransportConfig(backend=backend)
    config = (DecodeConfig if kind is DecodeTransfers else PrefillConfig)(transport=transport)
    transfers = kind(pool, config, state=state)
    thread = transfers.thread
    del pool, state
    gc.collect()
    assert all(one() is not None for one in left)
    del transfers  # and is not closed: its threads go on
    gc.collect()
    assert all(one() is not None for one in left)
    thread.close()
    del thread
    gc.collect()
    assert [one() for one in left] == [None, None], "nothing else keeps it"
