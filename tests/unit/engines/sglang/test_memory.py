"""Pools and rows at addresses."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkv.engines.sglang.memory import Rows, pool_of
from prefixkv.errors import ConfigError, RequestError
from tests.unit.engines.sglang.conftest import BUFFERS, PAGE, PAGE_BYTES, PAGES, Memory


def test_a_pool_is_sglangs_memory_and_no_copy() -> None:
    memory = Memory(filled=True)
    layout = memory.pool.layout
    assert (layout.num_pages, layout.page_size, layout.opaque) == (PAGES, PAGE, "test")
    assert layout.num_layers == BUFFERS
    assert layout.regions == tuple(
        sorted((buffer.ctypes.data, buffer.nbytes) for buffer in memory.buffers)
    )
    before = memory.pool.read_pages([7]).reshape(BUFFERS, PAGE_BYTES).numpy()
    assert [row.tolist() for row in before] == [buffer[7].tolist() for buffer in memory.buffers]
    memory.buffers[2][7] = 9
    assert memory.pool.read_pages([7]).reshape(BUFFERS, PAGE_BYTES)[2].eq(9).all()


def test_what_is_behind_the_last_whole_page_is_not_the_pools() -> None:
    buffer = np.zeros(10 * 64 + 16, np.uint8)
    pool = pool_of([buffer.ctypes.data], [buffer.nbytes], [64], page_size=4, device="cpu", tag="t")
    assert pool.layout.num_pages == 10
    assert pool.layout.regions == ((buffer.ctypes.data, 640),)


@pytest.mark.parametrize(
    ("lengths", "page_bytes", "told"),
    [
        ([640, 640], [64, 32], "10 pages of 64 bytes, 20 pages of 32 bytes"),
        ([640, 320], [64, 64], "5 pages of 64 bytes, 10 pages of 64 bytes"),
        ([], [], "no pages"),
    ],
)
def test_buffers_that_differ_are_refused_by_what_they_have(
    lengths: list[int], page_bytes: list[int], told: str
) -> None:
    buffers = [np.zeros(length, np.uint8) for length in lengths]
    addresses = [buffer.ctypes.data for buffer in buffers]
    with pytest.raises(ConfigError, match=told):
        pool_of(addresses, lengths, page_bytes, page_size=4, device="cpu", tag="t")


def test_rows_go_over_as_they_are() -> None:
    sizes, rng = [64, 512, 8], np.random.default_rng(1)
    both = [[np.zeros((5, size), np.uint8) for size in sizes] for _ in range(2)]
    for buffer in both[0]:
        buffer[:] = rng.integers(0, 255, buffer.shape)
    source, target = (
        Rows([one.ctypes.data for one in side], [one.nbytes for one in side], sizes)
        for side in both
    )
    target.write(3, source.read(1))
    for mine, theirs in zip(*both, strict=True):
        assert theirs[3].tolist() == mine[1].tolist()
        assert not theirs[[0, 1, 2, 4]].any()
    with pytest.raises(RequestError, match="583 bytes, decode's rows have 584"):
        target.write(0, bytes([1] * 583))
    assert not any(buffer[0].any() for buffer in both[1])
