"""Writes of what is not there, by every route of every transport: they end drained, nothing lands,
and others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError, PageStateError
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_layout import StateLink, state_blocks
from prefixkv.transport.base import window_route
from tests.support.state_memory import TENSORS, StateMemory
from tests.support.transport_driver import Driver, Node
from tests.unit.transport.test_group_writes import bytes_of, grouped

CONFIG = TransportConfig(post_bytes=512)
ONE = Mesh(2, 4)
COUNTS = {
    "pages": (8, "page"), "staging": (6, "block"), "state": (4, "slot"),
    window_route(0): (5, "page"),  # a page of the first group, which is larger, has this number
}  # fmt: skip


def whole(driver: Driver, name: str, seed: int) -> Node:
    """A node with memory for every route."""
    state = StateMemory(TENSORS, 4, ONE, zeros=driver.zeros)
    node = driver.node_of(name, grouped(driver, seed), CONFIG, driver.staging(6), state)
    node.transport.expect(1)
    return node


def link_to(target: Node) -> StateLink | None:
    if target.state is None:
        return None
    return StateLink(target.state.layout, state_blocks(TENSORS, ONE, 0, ONE, 0))


BAD: list[Callable[[int], tuple[Any, Any]]] = [
    lambda count: ([count], [0]),
    lambda count: ([0], [count]),
    lambda _: ([-1], [0]),
    lambda _: ([0], [-1]),
    lambda _: ([0, 1], [0]),
    lambda _: ([0], [0, 1]),
    lambda _: ([], []),
    lambda _: (np.array([2**33], np.int64), [0]),
    lambda _: ([0], np.array([0.0])),
]


@pytest.mark.parametrize("bad", BAD)
def test_bad_numbers_are_refused(driver: Driver, bad: Callable[[int], tuple[Any, Any]]) -> None:
    writer, target = whole(driver, "prefill", 1), whole(driver, "decode", 2)
    writer.add(target, state=link_to(target))
    before = bytes_of(target.pool)  # type: ignore[arg-type]
    arrays = [target.staging.memory, *target.state.raw]
    copies = [array.copy() for array in arrays]
    for number, (route, (count, what)) in enumerate(COUNTS.items(), 1):
        driver.end(writer, writer.job(number, target, *bad(count), route=route))
        failed = writer.drained(number, error=PageStateError)
        assert f" {what}" in str(failed.error)
    after = bytes_of(target.pool)  # type: ignore[arg-type]
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(np.array_equal(*pair) for pair in zip(arrays, copies, strict=True))
    for number, route in enumerate(COUNTS, 10):
        driver.done(writer, writer.job(number, target, [0], [0], route=route))


@pytest.mark.parametrize("lacking", ["writer", "target"])
def test_what_one_side_lacks_is_no_route(driver: Driver, lacking: str) -> None:
    nodes = [whole(driver, "whole", 1), driver.node_of("lacking", grouped(driver, 2), CONFIG)]
    writer, target = reversed(nodes) if lacking == "writer" else nodes
    target.transport.expect(1)
    writer.add(target, state=link_to(target))
    for number, route in enumerate(("staging", "state", window_route(2))):
        driver.end(writer, writer.job(number, target, [0], [0], route=route))
        failed = writer.drained(number, error=ConfigError)
        assert f"by way of {route}" in str(failed.error)
    driver.done(writer, writer.job(9, target, [0], [0]))
