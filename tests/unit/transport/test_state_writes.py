"""Writes of extra state on every transport: a rank's share goes from its slot to the peer's, and
nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import (
    StateBlock,
    StateEntry,
    StateLayout,
    StateLink,
    state_blocks,
)
from prefixkv.transport.base import PeerUnreachable, WriteDone
from tests.support.state_memory import TENSORS, StateMemory
from tests.support.transport_driver import Driver, Node

CONFIG = TransportConfig(post_bytes=100)


def link(writers: Mesh, writer: int, readers: Mesh, reader: int, target: Node) -> StateLink:
    return StateLink(target.state.layout, state_blocks(TENSORS, writers, writer, readers, reader))


def memory_of(node: Node) -> Any:
    return [raw.copy() for raw in node.state.raw]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)], ids=str)
def test_all_writers_together_fill_the_slot_and_nothing_else(
    driver: Driver, sizes: tuple[int, int]
) -> None:
    writers, readers = Mesh(2, 4, sizes[0]), Mesh(2, 4, sizes[1])
    sources = [
        driver.node(
            f"p{rank}", config=CONFIG, state=StateMemory(TENSORS, 3, writers, rank, driver.zeros)
        )
        for rank in range(sizes[0])
    ]
    targets = [
        driver.node(f"d{rank}", state=StateMemory(TENSORS, 5, readers, rank, driver.zeros))
        for rank in range(sizes[1])
    ]
    for target in targets:
        target.transport.expect(1)
    before = [memory_of(target) for target in targets]
    jobs: list[tuple[Node, int]] = []
    for rank, source in enumerate(sources):
        source.state.fill(2, owner=17)
        for reader, target in enumerate(targets):
            share = link(writers, rank, readers, reader, target)
            if share.blocks:
                source.add(target, state=share)
                jobs.append((source, len(jobs) + 1))
                source.transport.write(source.job(len(jobs), target, [2], [4], route="state"))
    driver.until(lambda: all(source.ends(job) for source, job in jobs))
    assert all(isinstance(source.ends(job)[0], WriteDone) for source, job in jobs)
    for target, was in zip(targets, before, strict=True):
        assert target.state.is_of(4, owner=17)
        target.state.scribble([4], 0xCA)
        assert all(
            np.array_equal(now, then) for now, then in zip(target.state.raw, was, strict=True)
        )


@pytest.fixture
def pair(driver: Driver) -> tuple[Node, Node]:
    one = Mesh(2, 4)
    writer, target = (
        driver.node(name, config=CONFIG, state=StateMemory(TENSORS, 4, one, zeros=driver.zeros))
        for name in ("p", "d")
    )
    writer.add(target, state=link(one, 0, one, 0, target))
    return writer, target


def test_what_a_peer_says_of_its_state_is_not_taken_for_granted(
    driver: Driver, pair: tuple[Node, Node]
) -> None:
    writer, target = pair
    layout = target.state.layout
    first = layout.entries[0]
    far = StateLayout(
        4, (StateEntry(first.base + (1 << 40), 500, 120), *layout.entries[1:]), layout.regions
    )
    long = StateLayout(5, layout.entries, layout.regions)
    lies = [
        StateLink(far, (StateBlock(0, 0, 0, 0, 120),)),
        StateLink(long, (StateBlock(0, 0, 0, 0, 120),)),
        StateLink(layout, (StateBlock(0, 0, 0, 1, 120),)),
        StateLink(layout, (StateBlock(0, 0, 9, 0, 120),)),
    ]
    for number, lie in enumerate(lies, 1):
        writer.transport.remove_peer(target.me)
        writer.add(target, state=lie)
        driver.until(lambda n=number: len(writer.of(PeerUnreachable)) == n)  # type: ignore[misc]
    assert all(isinstance(event.error, ConfigError) for event in writer.of(PeerUnreachable))
