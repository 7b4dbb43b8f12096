"""A simulated rank's memory, of which every byte is looked at: a KV pool, and a staging buffer."""

from typing import Any

import numpy as np
import torch

from prefixkv.conformance.pattern import KVPattern
from prefixkv.memory.kv_layout import BLOCK_BYTES, KVLayout, RelayArea
from prefixkv.memory.mesh import Mesh
from tests.support.mesh_pools import mesh_layout, moved, slab_views

CANARY = 0xA5
SALT = 7


class Memory:
    """A rank's share of the KV, canaries round every region. `pattern` writes and checks it."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        order: str,
        num_pages: int,
        page_size: int,
        attention: str,
        head_bytes: int,
    ) -> None:
        shard = mesh.shard(rank)
        sizes = num_pages, page_size, shard.num_layers, shard.num_heads
        layout, num_bytes = mesh_layout(order, *sizes, attention, head_bytes)
        self.bytes = np.zeros((num_bytes,), np.uint8)
        self.bytes[:] = CANARY
        self.layout: KVLayout = moved(layout, self.bytes.ctypes.data)
        self._is_canary = np.ones(num_bytes, bool)
        for kv in slab_views(layout, self._is_canary):
            kv[:] = False
        self.bytes[~self._is_canary] = 0
        self._kv = slab_views(layout, self.bytes)
        self.pattern = KVPattern(self.layout, SALT, self.bytes, (mesh, rank))

    def read(self, pages: list[int]) -> bytes:
        """What `KVPool.read_pages` would read."""
        return np.stack([kv[pages] for kv in self._kv], axis=1).tobytes()

    def scribble(self, pages: Any, value: int) -> None:
        for kv in self._kv:
            kv[pages] = value

    def check(self) -> None:
        assert (self.bytes[self._is_canary] == CANARY).all(), "a canary of a pool is dead"


class Buffer:
    """A RelayBuffer with a canary before and behind it."""

    device = "cpu"

    def __init__(self, num_bytes: int, lease_bytes: int) -> None:
        self._all = torch.from_numpy(np.zeros((num_bytes + 3 * BLOCK_BYTES,), np.uint8)).fill_(
            CANARY
        )
        self._first = BLOCK_BYTES + -self._all.data_ptr() % BLOCK_BYTES
        self.area = RelayArea(self._all.data_ptr() + self._first, num_bytes, lease_bytes)

    def slice(self, offset: int, num_bytes: int) -> torch.Tensor:
        assert 0 <= offset <= offset + num_bytes <= self.area.num_bytes
        return self._all[self._first + offset : self._first + offset + num_bytes]

    def check(self) -> None:
        end = self._first + self.area.num_bytes
        assert (self._all[: self._first] == CANARY).all(), "a canary before a staging area is dead"
        assert (self._all[end:] == CANARY).all(), "a canary behind a staging area is dead"
