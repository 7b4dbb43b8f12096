"""Numpy arrays as an engine's tensors: their memory is the pool's, or they are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool

SHAPE = (8, 4, 2, 16)  # pages, tokens, heads, elements


def zeros(dtype: Any = np.float32) -> Any:
    return np.zeros(SHAPE, dtype)


def test_a_pool_shares_the_memory_of_numpy_arrays(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "kv", np.float32, "w+", shape=SHAPE)
    for k, v in (
        ([zeros()], [zeros()]),
        ([mapped], [zeros()]),
        (zeros()[None], torch.zeros(1, *SHAPE)),
    ):
        pool = KVPool.from_tensors(k, v, page_size=4)
        assert pool.layout.slabs[0].base == (k[0] if isinstance(k, list) else k).ctypes.data
        pool.k(0)[3] = 7.0
        assert (np.asarray(k[0])[3] == 7.0).all()
        k[0][5] = 2.0
        pool.write_pages([1], pool.read_pages([5]).numpy())
        assert (np.asarray(k[0])[1] == 2.0).all()


def test_a_state_pool_shares_the_memory_of_numpy_arrays() -> None:
    view = np.zeros((3, 2, 4), np.float32)
    pool = StatePool([StateTensor("conv", 0, 2, (4,))], [view])
    pool.view("conv", 0)[1] = 5.0
    assert (view[1] == 5.0).all()
    assert pool.num_slots == 3


def test_pages_to_write_may_be_read_only() -> None:
    pool = KVPool.from_tensors([zeros()], [zeros()])
    data = pool.read_pages([0]).numpy()
    data.flags.writeable = False
    pool.write_pages([2], data)
