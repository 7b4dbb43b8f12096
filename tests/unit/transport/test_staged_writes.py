"""Staged writes on every transport: what arrives where, what is refused, and how they go beside
writes of pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError, PeerLostError
from prefixkv.memory.staging_area import BLOCK_BYTES, StagingArea
from prefixkv.transport.base import PeerMemory, PeerUnreachable, WriteDone, WriteJob
from tests.support.transport_driver import Driver, Gate, Node, Staging
from tests.support.transport_pools import make_pool

NUM_BLOCKS = 20
CONFIG = TransportConfig(post_bytes=3 * BLOCK_BYTES)


def staged_pair(driver: Driver) -> tuple[Node, Node]:
    return driver.pair(config=CONFIG, num_blocks=NUM_BLOCKS)


def staged_job(
    writer: Node, job_id: int, target: Node, src: Any, dst: Any, **more: Any
) -> WriteJob:
    """Into lease 77."""
    job = writer.job(job_id, target, src, dst, route="staging", **more)
    return dataclasses.replace(job, tag=job.tag._replace(lease_id=77))


def expected_memory(writer: Node, target: Node, src: list[int], dst: list[int]) -> Any:
    """The target's staging, canaries and all, once blocks `src` have been written to `dst`."""
    memory = target.staging.memory.copy()
    memory[1:-1][dst] = writer.staging.blocks[src]
    return memory


def memory_of(node: Node) -> Any:
    return node.staging.memory


@pytest.mark.parametrize(
    ("src", "dst", "num_parts"),
    [
        (list(range(7)), list(range(13, 20)), 3),
        ([16, 17, 18, 19], [0, 1, 2, 3], 2),
        ([19, 0, 7, 3, 4], [0, 19, 2, 9, 10], 2),
        ([5], [5], 1),
        (list(range(20)), list(range(20)), 7),
    ],
)
def test_blocks_arrive_whole_with_their_tags_and_nothing_else_changes(
    driver: Driver, src: list[int], dst: list[int], num_parts: int
) -> None:
    writer, target = staged_pair(driver)
    after, pages = expected_memory(writer, target, src, dst), target.pool.pages()
    job = staged_job(writer, 1, target, src, dst)
    writer.transport.write(job)
    driver.until(lambda: writer.ends() and len(target.tags()) >= num_parts)
    assert writer.ends() == [WriteDone(1, len(src) * BLOCK_BYTES)]
    assert np.array_equal(memory_of(target), after)
    assert target.pool.pages() == pages
    tags = sorted(target.tags())
    whole = job.tag._replace(num_parts=num_parts, num_pages=len(dst))
    assert tags == [whole._replace(part=part) for part in range(num_parts)]
    assert {tag.lease_id for tag in tags} == {77}


def test_a_room_s_pages_and_blocks_go_in_order_and_other_rooms_go_on(driver: Driver) -> None:
    writer, target = staged_pair(driver)
    gate = Gate(driver)
    after, page = expected_memory(writer, target, [1, 2, 3], [4, 5, 6]), target.pool.page(1)
    writer.transport.write(staged_job(writer, 1, target, [1, 2], [4, 5], room=1, ready=gate))
    writer.transport.write(writer.job(2, target, [0], [1], room=1))
    writer.transport.write(staged_job(writer, 3, target, [3], [6], room=2))
    driver.until(lambda: writer.ends(3) and gate.queries > 2)
    assert not writer.ends(1, 2)
    assert target.pool.page(1) == page
    gate.answer = True
    driver.until(lambda: len(writer.ends()) == 3)
    assert all(isinstance(end, WriteDone) for end in writer.ends())
    assert np.array_equal(memory_of(target), after)
    assert target.pool.page(1) == writer.pool.page(0)


def test_a_peer_may_come_to_have_staging(driver: Driver) -> None:
    """Its memory is another then: what still waits for the former fails."""
    writer = driver.node("prefill", config=CONFIG, num_blocks=NUM_BLOCKS)
    other = driver.node("other", num_blocks=8)
    other.transport.expect(1)
    gate = Gate(driver)
    writer.transport.add_peer(other.me, other.transport.metadata, PeerMemory(other.pool.layout))
    writer.transport.write(writer.job(1, other, [0], [0], ready=gate))
    writer.add(other)
    writer.add(other)  # as it is known: nothing changes
    after = expected_memory(writer, other, [0, 1], [6, 7])
    writer.transport.write(staged_job(writer, 2, other, [0, 1], [6, 7]))
    driver.until(lambda: len(writer.ends()) == 2)
    writer.drained(1, error=PeerLostError)
    assert writer.ends(2) == [WriteDone(2, 2 * BLOCK_BYTES)]
    assert np.array_equal(memory_of(other), after)


def test_an_area_that_breaks_its_laws_or_is_not_there_makes_the_peer_unreachable(
    driver: Driver,
) -> None:
    writer, target = staged_pair(driver)
    area = target.area
    lies = [
        StagingArea(area.base, area.num_bytes + 1, area.lease_bytes),
        StagingArea(0, area.num_bytes, area.lease_bytes),
        StagingArea(area.base, area.num_bytes, 2 * area.lease_bytes),
        StagingArea(area.base, 0, 0),
        StagingArea(4096, BLOCK_BYTES << 33, BLOCK_BYTES),  # more blocks than an index reaches
        StagingArea(
            area.base, area.num_bytes + BLOCK_BYTES, area.lease_bytes
        ),  # the canary behind it
        StagingArea(area.base - BLOCK_BYTES, area.num_bytes, area.lease_bytes),  # the one before it
    ]
    for number, lie in enumerate(lies, 1):
        writer.transport.remove_peer(target.me)
        writer.transport.add_peer(
            target.me, target.transport.metadata, PeerMemory(target.pool.layout, None, lie)
        )
        driver.until(lambda n=number: len(writer.of(PeerUnreachable)) == n)  # type: ignore[misc]
    errors = [event.error for event in writer.of(PeerUnreachable)]
    assert [isinstance(error, ConfigError) for error in errors] == [True] * 5 + [False] * 2
    writer.add(target)
    after = expected_memory(writer, target, [1], [2])
    writer.transport.write(staged_job(writer, 1, target, [1], [2]))
    driver.until(writer.ends)
    assert isinstance(writer.ends()[0], WriteDone)
    assert np.array_equal(memory_of(target), after)


def test_an_area_of_ours_that_breaks_its_laws_is_an_error_at_start(driver: Driver) -> None:
    staging = Staging(4, seed=1)
    staging.area = StagingArea(staging.area.base, 100, 100)
    with pytest.raises(ConfigError, match="num_bytes"):
        driver.node_of("decode", make_pool("page_major", 4), CONFIG, staging)
