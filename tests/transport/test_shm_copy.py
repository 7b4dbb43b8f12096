"""The copies of the shm transport, held against one that takes each head of a token by itself."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from prefixkv.errors import HandshakeError
from prefixkv.memory.mesh import Shard
from prefixkv.transport.parts import Part
from prefixkv.transport.runs import paired_runs
from prefixkv.transport.shm_copy import CopyPlan, Mapped, moved
from tests.models.transport_pools import ORDERS, NumpyPool, Shape, make_pool

PAGES = 9


def pools(order: str, heads: int, page_size: int, seed: int) -> NumpyPool:
    pool = make_pool(order, PAGES, Shape(page_size=page_size, num_kv_heads=heads, head_dim=8))
    pool.fill(seed)
    return pool


def expected(src: NumpyPool, dst: NumpyPool, parts: tuple[Shard, Shard], pairs: Any) -> Any:
    """[slab][page, token, head, byte] of the target; `pairs` are unit pages of both."""
    views = [view.copy() for view in dst.views]
    unit = min(src.layout.page_size, dst.layout.page_size)
    mine, theirs = parts
    for s, d in pairs:
        for view, source in zip(views, src.views, strict=True):
            for token, head in itertools.product(range(unit), range(mine.num_heads)):
                page, slot = divmod(d * unit + token, dst.layout.page_size)
                from_page, from_slot = divmod(s * unit + token, src.layout.page_size)
                row = source[from_page, from_slot, mine.first_head + head]
                view[page, slot, theirs.first_head + head] = row
    return views


@pytest.mark.parametrize("orders", [*itertools.product(ORDERS, ORDERS)], ids="-".join)
@pytest.mark.parametrize("sizes", [(16, 16), (8, 16), (16, 4)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (1, 4), (4, 2)], ids=str)
def test_parts_cut_anywhere_make_up_the_job(
    orders: tuple[str, str], sizes: tuple[int, int], heads: tuple[int, int]
) -> None:
    chance = random.Random(f"{orders} {sizes} {heads}")
    src, dst = (
        pools(order, count, size, seed)
        for order, count, size, seed in zip(orders, heads, sizes, (1, 2), strict=True)
    )
    few = min(heads)
    parts = tuple(Shard(0, 2, chance.randrange(count // few) * few, few) for count in heads)
    runs = paired_runs(src.layout, dst.layout, *parts)
    unit = min(sizes)
    in_order = chance.random() < 0.5
    counts = [PAGES * size // unit for size in sizes]
    length = min(counts) - 2
    pages = [
        list(range(2, 2 + length)) if in_order else chance.sample(range(count), length)
        for count in counts
    ]
    views = expected(src, dst, parts, list(zip(*pages, strict=True)))  # type: ignore[arg-type]
    plan = CopyPlan(runs, runs.dst)
    ids = [np.array(some, np.int32) for some in pages]
    todo = []
    for group in runs.groups:
        num_blocks = group.num_runs * length
        cuts = sorted({0, num_blocks, *(chance.randrange(num_blocks) for _ in range(5))})
        todo += [Part(group, *cut) for cut in itertools.pairwise(cuts)]
    chance.shuffle(todo)
    for part in todo:
        plan.copy(part, *ids)
    for found, right in zip(dst.views, views, strict=True):
        assert np.array_equal(found, right)


def test_a_slice_of_heads_goes_page_by_page_in_strided_copies() -> None:
    src, dst = pools("layer_major", 1, 16, 1), pools("layer_major", 4, 16, 2)
    runs = paired_runs(src.layout, dst.layout, Shard(0, 2, 0, 1), Shard(0, 2, 2, 1))
    plan = CopyPlan(runs, runs.dst)._plans[0]
    assert (plan.bundle, plan.steps) == (16, (1, 4))


def test_what_was_not_handed_over_is_no_target() -> None:
    src, dst = pools("layer_major", 2, 4, 1), pools("layer_major", 2, 4, 2)
    runs = paired_runs(src.layout, dst.layout)
    mapped = [Mapped(address, size, address + 4096) for address, size in dst.layout.regions]
    table = moved(runs.dst, mapped)
    assert np.array_equal(table[:, 0], runs.dst[:, 0] + 4096)
    for lie in (mapped[1:], [mapped[0]._replace(num_bytes=mapped[0].num_bytes - 1), *mapped[1:]]):
        with pytest.raises(HandshakeError, match="shared memory"):
            moved(runs.dst, lie)
