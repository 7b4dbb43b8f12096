"""The staging buffer: aligned, described, sliced."""

from __future__ import annotations

import pytest
import torch

from prefixkv.memory.kv_pool import StagingBuffer
from prefixkv.memory.staging_area import BLOCK_BYTES
from tests.support.gpu import GPU

DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_area_describes_aligned_memory_and_slices_are_views(device: str) -> None:
    sizes = 5 * BLOCK_BYTES, 2 * BLOCK_BYTES
    for buffer in [StagingBuffer(*sizes, device) for _ in range(3)]:
        buffer.area.validate()
        assert buffer.area.base % BLOCK_BYTES == 0
        assert (buffer.area.num_bytes, buffer.area.lease_bytes) == sizes
        assert torch.device(buffer.device).type == device
        whole, piece = buffer.slice(0, 5 * BLOCK_BYTES), buffer.slice(BLOCK_BYTES, 100)
        assert whole.data_ptr() == buffer.area.base == piece.data_ptr() - BLOCK_BYTES
        assert (whole.dtype, whole.is_contiguous(), int(whole.sum())) == (torch.uint8, True, 0)
        assert piece.shape == (100,)
        piece.fill_(7)
        assert int(whole.sum()) == 700
