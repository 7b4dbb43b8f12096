"""Writes into pools of several groups, on every transport: pages of an aligned group go with those
of the same ids, those of a window group where its own ids say, and nothing lands elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixkv.config import TransportConfig
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Shard
from prefixkv.transport.base import PeerUnreachable, WriteDone, window_route
from tests.support.transport_driver import Driver, Node, ShmDriver

CONFIG = TransportConfig(post_bytes=200)
JOBS = {
    "pages": ([1, 2, 7], [6, 0, 3]),
    window_route(0): ([4, 0], [0, 2]),
    window_route(1): ([5], [4]),
}
GROUPS = ("", "pages"), ("draft", "pages"), ("last", window_route(0)), ("other", window_route(1))


def grouped(driver: Driver, seed: int, window: int = 9, ranks: int = 1, **first: Any) -> KVPool:
    """Pools of unequal heads, full of random bytes: of one rank of one or two."""
    is_shared = isinstance(driver, ShmDriver)
    of: dict[str, Any] = {"dtype": "uint8", "shared": is_shared}
    pool = KVPool.create(8, 4, 2, 2 // ranks, 8, **of, **first)
    last = KVPool.create(5, 4, 3, 4 // ranks, 4, **of)
    other = KVPool.create(6, 4, 1, 2 // ranks, 16, **of)
    draft = KVPool.create(8, 4, 1, 6 // ranks, 4, **of)
    chance = torch.Generator().manual_seed(seed)
    for one in (pool, last, other, draft):
        num_pages = one.layout.num_pages
        old = one.read_pages(range(num_pages))
        one.write_pages(
            range(num_pages), torch.randint(0, 256, old.shape, generator=chance, dtype=torch.uint8)
        )
    return pool.with_groups(
        PoolGroup("last", last, window), PoolGroup("draft", draft), PoolGroup("other", other, 5)
    )


def bytes_of(pool: KVPool) -> dict[str, Any]:
    all_of = {"": pool, **{group.name: group.pool for group in pool.groups}}
    return {name: one.read_pages(range(one.layout.num_pages)) for name, one in all_of.items()}


@pytest.fixture
def pair(driver: Driver) -> tuple[Node, Node]:
    writer = driver.node_of("p", grouped(driver, 1), CONFIG)
    target = driver.node_of("d", grouped(driver, 2, order="page_major"), CONFIG)
    target.transport.expect(1)
    writer.add(target)
    return writer, target


def write_all(driver: Driver, writer: Node, target: Node) -> None:
    for number, (route, (src, dst)) in enumerate(JOBS.items()):
        writer.transport.write(writer.job(number, target, src, dst, route=route))
    driver.until(lambda: len(writer.ends()) == 3)
    assert all(isinstance(end, WriteDone) for end in writer.ends())


def test_each_group_has_its_pages_and_nothing_else_changes(
    driver: Driver, pair: tuple[Node, Node]
) -> None:
    writer, target = pair
    want, mine = bytes_of(target.pool), bytes_of(writer.pool)  # type: ignore[arg-type]
    write_all(driver, writer, target)
    for name, route in GROUPS:
        src, dst = JOBS[route]
        want[name][dst] = mine[name][src]
    found = bytes_of(target.pool)  # type: ignore[arg-type]
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("is_split", [False, True])
def test_heads_of_each_group_are_cut_as_those_of_the_first_layers(
    driver: Driver, is_split: bool
) -> None:
    """The second half of the heads: of a rank that has all of them, or into one."""
    writer = driver.node_of("p", grouped(driver, 1, ranks=1 if is_split else 2), CONFIG)
    target = driver.node_of("d", grouped(driver, 2, ranks=2 if is_split else 1), CONFIG)
    target.transport.expect(1)
    half, rank = Shard(0, 2, 1, 1), Shard(0, 2, 0, 1)
    writer.add(target, parts=(half, rank) if is_split else (rank, half))
    want, mine = bytes_of(target.pool), bytes_of(writer.pool)  # type: ignore[arg-type]
    write_all(driver, writer, target)
    for name, route in GROUPS:
        src, dst = JOBS[route]
        sent, half_of = mine[name][src], min(one[name].shape[3] for one in (mine, want))
        if is_split:
            want[name][dst] = sent[:, :, :, half_of:]
        else:
            want[name][dst, :, :, half_of:] = sent
    found = bytes_of(target.pool)  # type: ignore[arg-type]
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_peers_of_other_groups_are_no_peers(driver: Driver) -> None:
    writer = driver.node_of("p", grouped(driver, 1), CONFIG)
    target = driver.node_of("d", grouped(driver, 2, window=13), CONFIG)
    target.transport.expect(1)
    writer.add(target)
    driver.end(writer, writer.job(1, target, [0], [0]))
    writer.drained()
    assert any("groups" in str(event.error) for event in writer.of(PeerUnreachable))
