"""What only real NIXL shows of staging: merged descriptors, lists that are released, agents that
are replaced."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import PeerLostError
from prefixkv.memory.kv_layout import BLOCK_BYTES
from prefixkv.transport.base import (
    PeerMemory,
    PeerUnreachable,
    WriteDone,
    WriteDrained,
    WriteFailed,
    WriteJob,
)
from prefixkv.transport.nixl import agent as nixl_agent
from tests.support.patience import until
from tests.support.transport_driver import NixlDriver, Node

Api = nixl_agent.nixl_api


def staged_job(
    writer: Node, job_id: int, target: Node, src: list[int], dst: list[int], **more: Any
) -> WriteJob:
    return writer.job(job_id, target, src, dst, route="staging", **more)


def num_lists() -> int:
    """Prepared descriptor lists of this process that are not released."""
    kind = Api.nixl_prepped_dlist_handle
    return sum(type(found) is kind and not found._released for found in gc.get_objects())


def wrap_posts(monkeypatch: pytest.MonkeyPatch, post: Callable[..., Any]) -> None:
    """`post(transfer, agent, handle, tag)` in place of every agent's `transfer`."""
    transfer = Api.nixl_agent.transfer
    monkeypatch.setattr(Api.nixl_agent, "transfer", lambda *args: post(transfer, *args))


def written(driver: NixlDriver, job_id: int, writer: Node, target: Node, staged: bool) -> None:
    """Write two pages or blocks, and see that they arrive."""
    writer.transport.write(
        writer.job(job_id, target, [2, 3], [3, 1], route="staging" if staged else "pages")
    )
    driver.until(lambda: writer.ends(job_id))
    assert isinstance(writer.ends(job_id)[0], WriteDone), writer.ends(job_id)
    if staged:
        assert np.array_equal(target.staging.blocks[[3, 1]], writer.staging.blocks[[2, 3]])
    else:
        assert [target.pool.page(3), target.pool.page(1)] == [
            writer.pool.page(2),
            writer.pool.page(3),
        ]


@pytest.mark.parametrize(
    ("src", "dst", "descriptors"),
    [
        (list(range(10)), list(range(10, 20)), [1, 1, 1]),
        ([0, 1, 2, 3, 8, 9, 10, 11, 16, 17], list(range(10)), [1, 1, 1]),
        ([0, 1, 5, 6], [4, 5, 6, 7], [2]),
        ([3, 2, 1, 0], [0, 1, 2, 3], [2, 2]),
    ],
)
def test_neighbouring_blocks_reach_nixl_as_one_descriptor(
    nixl_driver: NixlDriver,
    monkeypatch: pytest.MonkeyPatch,
    src: list[int],
    dst: list[int],
    descriptors: list[int],
) -> None:
    """And are counted as one: a part holds as many bytes as `post_bytes` allows, in at most
    `post_descriptors`."""
    counted: list[int] = []

    def counting(transfer: Any, agent: Any, handle: Any, tag: bytes) -> Any:
        state = transfer(agent, handle, tag)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        counted.append(agent.get_xfer_telemetry(handle).descCount)
        return state

    config = Api.nixl_agent_config
    monkeypatch.setattr(
        Api, "nixl_agent_config", lambda **more: config(capture_telemetry=True, **more)
    )
    wrap_posts(monkeypatch, counting)
    writer, target = nixl_driver.pair(
        config=TransportConfig(post_bytes=4 * BLOCK_BYTES, post_descriptors=2), num_blocks=20
    )
    writer.transport.write(staged_job(writer, 1, target, src, dst))
    nixl_driver.until(writer.ends)
    assert writer.ends() == [WriteDone(1, len(src) * BLOCK_BYTES)]
    assert counted == descriptors
    assert np.array_equal(target.staging.blocks[dst], writer.staging.blocks[src])


@pytest.mark.slow
def test_both_pairs_of_lists_go_with_their_peer(nixl_driver: NixlDriver) -> None:
    assert num_lists() == 0
    writer, target = nixl_driver.pair(num_blocks=8)
    other = nixl_driver.node("other", num_blocks=8)
    other.transport.expect(1)
    until(lambda: num_lists() == 4)
    writer.add(other)
    written(nixl_driver, 1, writer, other, staged=True)
    assert num_lists() == 8
    layout = target.pool.layout
    writer.transport.add_peer(
        target.me, target.transport.metadata, PeerMemory(layout)
    )  # without its area
    written(nixl_driver, 2, writer, target, staged=False)
    assert num_lists() == 6
    writer.add(target)
    written(nixl_driver, 3, writer, target, staged=True)
    assert num_lists() == 8
    writer.transport.remove_peer(target.me)
    until(lambda: num_lists() == 4)
    writer.transport.remove_peer(other.me)
    until(lambda: num_lists() == 0)


@pytest.mark.slow
@pytest.mark.parametrize("staged", [True, False])
def test_a_lost_peer_and_a_renewed_agent_have_staging_again(
    nixl_driver: NixlDriver, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    broken: list[bool] = []

    def breaking(transfer: Any, agent: Any, handle: Any, tag: bytes) -> Any:
        if broken:
            broken.pop()
            raise nixl_agent.nixl_errors.nixlRemoteDisconnectError("cut by the test")
        return transfer(agent, handle, tag)

    wrap_posts(monkeypatch, breaking)
    writer, target = nixl_driver.pair(num_blocks=8)
    until(lambda: num_lists() == 4)

    broken.append(True)
    writer.transport.write(writer.job(1, target, [0], [0], route="staging" if staged else "pages"))
    nixl_driver.until(lambda: writer.ends(1) and writer.of(PeerUnreachable))
    (failed,) = writer.ends(1)
    assert isinstance(failed, WriteFailed)
    assert isinstance(failed.error, PeerLostError)
    assert failed.error.peer == target.me
    assert not failed.drained
    written(nixl_driver, 2, writer, target, staged=True)
    written(nixl_driver, 3, writer, target, staged=False)
    assert num_lists() == 4

    writer.transport.renew()
    nixl_driver.until(lambda: writer.of(WriteDrained))
    assert writer.of(WriteDrained) == [WriteDrained(1)]
    assert num_lists() == 0
    written(nixl_driver, 4, writer, target, staged=True)
    written(nixl_driver, 5, writer, target, staged=False)
    assert num_lists() == 4
    writer.transport.close()
    assert num_lists() == 0
