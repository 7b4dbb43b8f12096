"""Every route of a write (pages, windows, staging, state) on every transport: what arrives where,
that nothing lands elsewhere, what is refused, and peers whose memory is not what they say."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError, HandshakeError, PageStateError, PeerLostError
from prefixkv.memory.kv_layout import BLOCK_BYTES, RelayArea
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Mesh, Shard
from prefixkv.memory.state_layout import (
    StateBlock,
    StateEntry,
    StateLayout,
    StateLink,
    state_blocks,
)
from prefixkv.transport.base import PeerMemory, PeerUnreachable, WriteDone, window_route
from tests.support.state_memory import TENSORS, StateMemory
from tests.support.transport_driver import Driver, Gate, Node, ShmDriver

CONFIG = TransportConfig(post_bytes=200)
ONE = Mesh(2, 4)
JOBS = {
    "pages": ([1, 2, 7], [6, 0, 3]),
    window_route(0): ([4, 0], [0, 2]),
    window_route(1): ([5], [4]),
    "staging": ([5, 0, 1], [2, 4, 3]),
    "state": ([2], [3]),
}
GROUPS = {"": "pages", "draft": "pages", "last": window_route(0), "other": window_route(1)}


def grouped(driver: Driver, seed: int, window: int = 9, ranks: int = 1, **first: Any) -> KVPool:
    """Pools of unequal heads, full of random bytes: of one rank of one or two."""
    of: dict[str, Any] = {"dtype": "uint8", "shared": isinstance(driver, ShmDriver)}
    pool = KVPool.create(8, 4, 2, 2 // ranks, 8, **of, **first)
    last = KVPool.create(5, 4, 3, 4 // ranks, 4, **of)
    other = KVPool.create(6, 4, 1, 2 // ranks, 16, **of)
    draft = KVPool.create(8, 4, 1, 6 // ranks, 4, **of)
    chance = torch.Generator().manual_seed(seed)
    for one in (pool, last, other, draft):
        every = range(one.layout.num_pages)
        shape = one.read_pages(every).shape
        one.write_pages(every, torch.randint(0, 256, shape, generator=chance, dtype=torch.uint8))
    return pool.with_groups(
        PoolGroup("last", last, window), PoolGroup("draft", draft), PoolGroup("other", other, 5)
    )


def whole(driver: Driver, name: str, seed: int, **of: Any) -> Node:
    """A node with memory for every route."""
    state = StateMemory(TENSORS, 4, ONE, zeros=driver.zeros)
    node = driver.node_of(name, grouped(driver, seed, **of), CONFIG, driver.staging(6), state)
    node.transport.expect(1)
    return node


def link_to(target: Node) -> StateLink | None:
    if target.state is None:
        return None
    return StateLink(target.state.layout, state_blocks(TENSORS, ONE, 0, ONE, 0))


@pytest.fixture
def pair(driver: Driver) -> tuple[Node, Node]:
    writer, target = whole(driver, "p", 1), whole(driver, "d", 2, order="page_major")
    writer.add(target, state=link_to(target))
    writer.state.fill(2, owner=17)
    return writer, target


def groups_of(node: Node) -> dict[str, Any]:
    pool: Any = node.pool
    all_of = {"": pool, **{group.name: group.pool for group in pool.groups}}
    return {
        name: one.read_pages(range(one.layout.num_pages)).numpy() for name, one in all_of.items()
    }


def memory_of(node: Node) -> dict[str, Any]:
    """All of a node's memory, canaries too, by name."""
    state = {f"state {at}": raw.copy() for at, raw in enumerate(node.state.raw)}
    return {**groups_of(node), **state, "staging": node.staging.memory.copy()}


def is_like(found: dict[str, Any], want: dict[str, Any]) -> bool:
    return all(np.array_equal(found[name], want[name]) for name in want)


def test_each_route_writes_its_own_memory_and_nothing_else_changes(
    driver: Driver, pair: tuple[Node, Node]
) -> None:
    """In many parts, each notified with its tag."""
    writer, target = pair
    want, mine = memory_of(target), memory_of(writer)
    for number, (route, (src, dst)) in enumerate(JOBS.items()):
        job = writer.job(number, target, src, dst, route=route)
        job = dataclasses.replace(job, tag=job.tag._replace(lease_id=77 if number == 3 else 0))
        driver.done(writer, job)
    for name, route in {**GROUPS, **{name: "state" for name in want if "state" in name}}.items():
        src, dst = JOBS[route]
        want[name][dst] = mine[name][src]
    want["staging"][1:-1][JOBS["staging"][1]] = mine["staging"][1:-1][JOBS["staging"][0]]
    assert is_like(memory_of(target), want)
    assert target.state.is_of(3, owner=17)
    driver.until(lambda: {tag.room for tag in target.tags()} == {*range(5)})
    staged = [tag for tag in target.tags() if tag.lease_id == 77]
    assert {(tag.room, tag.num_parts, tag.num_pages) for tag in staged} == {(3, len(staged), 3)}


@pytest.mark.parametrize(
    ("src", "dst", "num_parts"),
    [
        (list(range(7)), list(range(13, 20)), 3),
        ([16, 17, 18, 19], [0, 1, 2, 3], 2),
        ([19, 0, 7, 3, 4], [0, 19, 2, 9, 10], 2),
        (list(range(20)), list(range(20)), 7),
    ],
)
def test_blocks_arrive_in_parts_of_as_many_bytes_as_a_post_may_have(
    driver: Driver, src: list[int], dst: list[int], num_parts: int
) -> None:
    config = TransportConfig(post_bytes=3 * BLOCK_BYTES)
    writer, target = driver.pair(config=config, num_blocks=20)
    want = target.staging.memory.copy()
    want[1:-1][dst] = writer.staging.blocks[src]
    job = writer.job(1, target, src, dst, route="staging")
    driver.end(writer, job)
    driver.until(lambda: len(target.tags()) >= num_parts)
    assert writer.ends() == [WriteDone(1, len(src) * BLOCK_BYTES)]
    assert np.array_equal(target.staging.memory, want)
    whole_tag = job.tag._replace(num_parts=num_parts, num_pages=len(dst))
    assert sorted(target.tags()) == [whole_tag._replace(part=at) for at in range(num_parts)]


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
    want, mine = groups_of(target), groups_of(writer)
    for number, route in enumerate(dict.fromkeys(GROUPS.values())):
        driver.done(writer, writer.job(number, target, *JOBS[route], route=route))
    for name, route in GROUPS.items():
        src, dst = JOBS[route]
        sent, half_of = mine[name][src], min(one[name].shape[3] for one in (mine, want))
        if is_split:
            want[name][dst] = sent[:, :, :, half_of:]
        else:
            want[name][dst, :, :, half_of:] = sent
    assert is_like(groups_of(target), want)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (4, 2), (2, 4)], ids=str)
def test_all_writers_together_fill_the_slot_and_nothing_else(
    driver: Driver, sizes: tuple[int, int]
) -> None:
    def nodes(name: str, mesh: Mesh) -> list[Node]:
        states = [StateMemory(TENSORS, 5, mesh, at, driver.zeros) for at in range(mesh.num_ranks)]
        return [driver.node(f"{name}{at}", state=one) for at, one in enumerate(states)]

    writers, readers = (Mesh(2, 4, size) for size in sizes)
    sources, targets = nodes("p", writers), nodes("d", readers)
    before = [[raw.copy() for raw in target.state.raw] for target in targets]
    for target in targets:
        target.transport.expect(1)
    for rank, source in enumerate(sources):
        source.state.fill(2, owner=17)
        for reader, target in enumerate(targets):
            blocks = state_blocks(TENSORS, writers, rank, readers, reader)
            if blocks:
                source.add(target, state=StateLink(target.state.layout, blocks))
                driver.done(source, source.job(reader, target, [2], [4], route="state"))
    for target, was in zip(targets, before, strict=True):
        assert target.state.is_of(4, owner=17)
        target.state.scribble([4], 0xCA)
        assert all(map(np.array_equal, target.state.raw, was))


# --- what is not there ----------------------------------------------------------------------------

COUNTS = {
    "pages": (8, "page"), "staging": (6, "block"), "state": (4, "slot"),
    window_route(0): (5, "page"),  # a page of the first group, which is larger, has this number
}  # fmt: skip
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


def test_bad_numbers_are_refused(driver: Driver, pair: tuple[Node, Node]) -> None:
    """They end drained, nothing lands, and others go on."""
    writer, target = pair
    before, number = memory_of(target), 0
    for bad in BAD:
        for route, (count, what) in COUNTS.items():
            number += 1
            driver.end(writer, writer.job(number, target, *bad(count), route=route))
            assert f" {what}" in str(writer.drained(number, error=PageStateError).error)
    assert is_like(memory_of(target), before)
    for number, route in enumerate(COUNTS, 100):
        driver.done(writer, writer.job(number, target, [0], [0], route=route))


@pytest.mark.parametrize("lacking", ["writer", "target"])
def test_what_one_side_lacks_is_no_route(driver: Driver, lacking: str) -> None:
    nodes = [whole(driver, "whole", 1), driver.node_of("lacking", grouped(driver, 2), CONFIG)]
    writer, target = reversed(nodes) if lacking == "writer" else nodes
    target.transport.expect(1)
    writer.add(target, state=link_to(target))
    for number, route in enumerate(("staging", "state", window_route(2))):
        driver.end(writer, writer.job(number, target, [0], [0], route=route))
        assert f"by way of {route}" in str(writer.drained(number, error=ConfigError).error)
    driver.done(writer, writer.job(9, target, [0], [0]))


# --- memory that is not what a peer says ----------------------------------------------------------


def lies_of(target: Node) -> list[tuple[dict[str, Any], Any]]:
    """Fields of what is said of the target's memory, and the error. The two areas whose error is
    not ours begin and end with a canary."""
    area, layout, heads = target.area, target.state.layout, Shard(0, 2, 0, 2)
    base, size = area.base, area.num_bytes
    first, rest = layout.entries[0], layout.entries[1:]
    far = StateLayout(4, (StateEntry(first.base + (1 << 40), 500, 120), *rest), layout.regions)
    long, block = StateLayout(5, layout.entries, layout.regions), StateBlock(0, 0, 0, 0, 120)
    return [
        *(({"relay": RelayArea(*wrong)}, ConfigError) for wrong in (
            (base, size + 1, size), (0, size, size), (base, size, 2 * size), (base, 0, 0),
            (4096, BLOCK_BYTES << 33, BLOCK_BYTES),  # more blocks than an index reaches
        )),
        ({"relay": RelayArea(base, size + BLOCK_BYTES, size)}, Exception),
        ({"relay": RelayArea(base - BLOCK_BYTES, size, size)}, Exception),
        ({"state": StateLink(far, (block,))}, ConfigError),
        ({"state": StateLink(long, (block,))}, ConfigError),
        ({"state": StateLink(layout, (StateBlock(0, 0, 0, 1, 120),))}, ConfigError),
        ({"state": StateLink(layout, (StateBlock(0, 0, 9, 0, 120),))}, ConfigError),
        ({"parts": (Shard(0, 2, 0, 1), heads)}, HandshakeError),
        ({"parts": (Shard(0, 2, 1, 2), heads)}, ConfigError),
        ({"parts": (Shard(0, 2, 0, 1), Shard(1, 2, 0, 1))}, ConfigError),
    ]  # fmt: skip


def test_a_peer_whose_memory_cannot_be_what_it_says_is_unreachable(
    driver: Driver, pair: tuple[Node, Node]
) -> None:
    writer, target = pair
    before, raw = memory_of(target), target.transport.metadata
    for number, (lie, error) in enumerate(lies_of(target), 1):
        writer.transport.remove_peer(target.me)
        writer.events.clear()
        memory = PeerMemory(target.pool.layout)._replace(**lie)
        writer.transport.add_peer(target.me, raw, memory)
        driver.end(writer, writer.job(number, target, [0], [0]))
        writer.drained(number, error=error)
        ours = number not in (6, 7) and error is ConfigError
        driver.until(
            lambda ours=ours: any(  # type: ignore[misc]
                isinstance(one.error, ConfigError) == ours for one in writer.of(PeerUnreachable)
            )
        )
    assert is_like(memory_of(target), before)
    writer.add(target, state=link_to(target))
    for number, route in enumerate(JOBS, 100):
        driver.done(writer, writer.job(number, target, *JOBS[route], route=route))


def test_peers_of_other_groups_are_no_peers(driver: Driver) -> None:
    writer = driver.node_of("p", grouped(driver, 1), CONFIG)
    target = driver.node_of("d", grouped(driver, 2, window=13), CONFIG)
    writer.add(target)
    driver.end(writer, writer.job(1, target, [0], [0]))
    writer.drained()
    assert any("groups" in str(event.error) for event in writer.of(PeerUnreachable))


def test_a_peer_may_come_to_have_staging(driver: Driver) -> None:
    """Its memory is another then: what still waits for the former fails."""
    writer, other = driver.node("prefill", num_blocks=8), driver.node("other", num_blocks=8)
    other.transport.expect(1)
    gate, half = Gate(driver), Shard(0, 2, 1, 1)
    writer.transport.add_peer(other.me, other.transport.metadata, PeerMemory(other.pool.layout))
    writer.transport.write(writer.job(1, other, [0], [0], ready=gate))
    writer.add(other)
    writer.add(other)  # as it is known: nothing changes
    driver.done(writer, writer.job(2, other, [0, 1], [6, 7], route="staging"))
    writer.drained(1, error=PeerLostError)
    assert np.array_equal(other.staging.blocks[[6, 7]], writer.staging.blocks[[0, 1]])
    mine, theirs = writer.pool.views[0], other.pool.views[0]
    writer.add(other, parts=(half, half))
    driver.end(writer, writer.job(3, other, [0], [0]))
    assert writer.ends(3) == [WriteDone(3, writer.pool.layout.page_bytes // 2)]
    assert np.array_equal(theirs[0, :, 1], mine[0, :, 1])
    assert not np.array_equal(theirs[0, :, 0], mine[0, :, 0])
