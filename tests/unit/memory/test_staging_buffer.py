"""The staging buffer: aligned, described, sliced."""

from __future__ import annotations

import pytest
import torch

from prefixkv.errors import CapacityError, ConfigError
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


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(-1, 1), (0, -1), (0, BLOCK_BYTES + 1), (BLOCK_BYTES, 1)]
)
def test_a_slice_outside_is_refused(offset: int, num_bytes: int) -> None:
    with pytest.raises(ConfigError, match="of a staging area of 4096"):
        StagingBuffer(BLOCK_BYTES, BLOCK_BYTES).slice(offset, num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "lease_bytes"), [(0, 0), (100, 100), (BLOCK_BYTES, 2 * BLOCK_BYTES)]
)
def test_sizes_that_no_area_has_are_refused(num_bytes: int, lease_bytes: int) -> None:
    with pytest.raises(ConfigError):
        StagingBuffer(num_bytes, lease_bytes)


def test_too_much_memory_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError):
        StagingBuffer(1 << 60, BLOCK_BYTES)
