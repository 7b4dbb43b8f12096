"""Staged writes, on every transport: what arrives where, what is refused, and how they go beside writes of pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixkv.config import TransportConfig
from prefixkv.pool.staging_area import BLOCK_BYTES
from prefixkv.transport.base import WriteDone
from tests.models.transport_driver import NUM_BLOCKS, Driver, Node

CONFIG = TransportConfig(post_bytes=3 * BLOCK_BYTES)


def staged_pair(driver: Driver, **more: Any) -> tuple[Node, Node]:
    return driver.pair(config=CONFIG, num_blocks=NUM_BLOCKS, **more)


def staged_job(writer: Node, job_id: int, target: Node, src: Any, dst: Any, **more: Any) -> Any:
    job = writer.job(job_id, target, src, dst, **more)
    object.__setattr__(job, "tag", job.tag._replace(slot=77))
    return job


def expected_memory(writer: Node, target: Node, src: list[int], dst: list[int]) -> Any:
    """The target's staging, canaries and all, once blocks `src` have been written to `dst`."""
    memory = target.staging.memory.copy()
    memory[1:-1][dst] = writer.staging.blocks[src]
    return memory


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (list(range(7)), list(range(13, 20))),
        ([0, 1, 2, 3], [16, 17, 18, 19]),
        ([19, 0, 7, 3, 4], [0, 19, 2, 9, 10]),
        ([5], [5]),
    ],
)
def test_blocks_arrive_whole_and_nothing_else_changes(driver: Driver, src: list[int], dst: list[int]) -> None:
    writer, target = staged_pair(driver)
    after, pages = expected_memory(writer, target, src, dst), target.pool.pages()
    writer.transport.write(staged_job(writer, 1, target, src, dst, staged=True))
    driver.until(writer.ends)
    assert writer.ends() == [WriteDone(1, len(src) * BLOCK_BYTES)]
    assert np.array_equal(target.staging.memory, after)
    assert target.pool.pages() == pages
