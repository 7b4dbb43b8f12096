"""The copies of the shm transport, held against one that takes each head of a token by itself."""

import itertools
import random
from typing import Any

import numpy as np
import pytest

from prefixkv.errors import HandshakeError
from prefixkv.memory.mesh import Shard
from prefixkv.transport.runs import Part, Positions, paired_runs
from prefixkv.transport.shm import copy as shm_copy
from prefixkv.transport.shm.copy import CopyPlan, Mapped, _Side, _step, moved
from tests.support.transport_pools import ORDERS, NumpyPool, Shape, make_pool

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


@pytest.mark.parametrize("moved_bytes", [0, 1 << 30], ids=["moved", "by rows"])
@pytest.mark.parametrize("in_order", ["neither", "source", "target"])
@pytest.mark.parametrize("heads", [(4, 4), (1, 4)], ids=str)
def test_blocks_that_touch_on_one_side_alone_are_copied_one_by_one(
    moved_bytes: int, in_order: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_copy, "_MOVED_BYTES", moved_bytes)
    monkeypatch.setattr(shm_copy, "_SCRATCH_BYTES", 100)  # fewer blocks than there are
    src, dst = (
        pools("layer_major", count, 4, seed) for count, seed in zip(heads, (1, 2), strict=True)
    )
    parts = Shard(0, 2, 0, min(heads)), Shard(0, 2, 0, min(heads))
    runs = paired_runs(src.layout, dst.layout, *parts)
    ascending, mixed = list(range(PAGES)), [3, 0, 8, 1, 5, 7, 2, 6, 4]
    pages = [
        ascending if side == in_order else mixed[::step]
        for side, step in (("source", 1), ("target", -1))
    ]
    views = expected(src, dst, parts, list(zip(*pages, strict=True)))
    plan = CopyPlan(runs, runs.dst)
    for group in runs.groups:
        whole = Part(group, 0, group.num_runs * PAGES)
        plan.copy(whole, *(np.array(some, np.int32) for some in pages))
    for found, right in zip(dst.views, views, strict=True):
        assert np.array_equal(found, right)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [(4, 4), (1, 4), (4, 2)], ids=str)
def test_a_part_writes_its_own_blocks_and_no_others(order: str, heads: tuple[int, int]) -> None:
    """Else a job that is cancelled has written more than it was told."""
    src, dst = (pools(order, count, 16, 1) for count in heads)
    few = min(heads)
    runs = paired_runs(src.layout, dst.layout, *(Shard(0, 2, 0, few) for _ in heads))
    plan, pages = CopyPlan(runs, runs.dst), np.arange(1, PAGES, dtype=np.int32)
    for group in runs.groups:
        num_blocks = group.num_runs * len(pages)
        for cut in ((0, 1), (0, num_blocks - 1), (num_blocks // 3, num_blocks // 2), (3, 21)):
            part = Part(group, cut[0], min(cut[1], num_blocks))
            if part.num_bytes <= 0:
                continue
            for view in dst.views:
                view[...] = 0
            plan.copy(part, pages, pages[::-1].copy())
            assert sum(np.count_nonzero(view) for view in dst.views) == part.num_bytes


def test_a_slice_of_heads_goes_page_by_page_in_strided_copies() -> None:
    src, dst = pools("layer_major", 1, 16, 1), pools("layer_major", 4, 16, 2)
    runs = paired_runs(src.layout, dst.layout, Shard(0, 2, 0, 1), Shard(0, 2, 2, 1))
    plan = CopyPlan(runs, runs.dst)._plans[0]
    assert (plan.bundle, plan.steps) == (16, (1, 4))


@pytest.mark.parametrize(
    ("firsts", "strides", "step"),
    [
        ([0, 2, 4, 6], [8, 8, 8, 8], 2),
        ([0, 2, 4, 7], [8, 8, 8, 8], 0),
        ([0, 2, 4, 6], [8, 8, 8, 16], 0),  # of the first page only
    ],
)
def test_strided_are_only_copies_that_go_on_so_on_every_page(
    firsts: list[int], strides: list[int], step: int
) -> None:
    column = [np.array(some, np.int64)[:, None] for some in (firsts, strides)]
    side = _Side(*column, positions=Positions.stepping(3, 1, 0), base=0, rows=None)
    assert _step(side, 2) == step


def test_each_row_moves_with_the_block_that_it_lies_in() -> None:
    src, dst = pools("layer_major", 2, 4, 1), pools("layer_major", 2, 4, 2)
    runs = paired_runs(src.layout, dst.layout)
    mapped = [
        Mapped(*region, region[0] + 4096 * n) for n, region in enumerate(dst.layout.regions, 1)
    ]
    right = [
        at + next(one.here - one.address for one in mapped if at < one.address + one.num_bytes)
        for at in runs.dst[:, 0].tolist()
    ]
    for blocks in (mapped, mapped[::-1]):
        assert moved(runs.dst, blocks)[:, 0].tolist() == right


def test_what_was_not_handed_over_is_no_target() -> None:
    src, dst = pools("layer_major", 2, 4, 1), pools("layer_major", 2, 4, 2)
    runs = paired_runs(src.layout, dst.layout)
    mapped = [Mapped(address, size, address + 4096) for address, size in dst.layout.regions]
    table = moved(runs.dst, mapped)
    assert np.array_equal(table[:, 0], runs.dst[:, 0] + 4096)
    for lie in (mapped[1:], [mapped[0]._replace(num_bytes=mapped[0].num_bytes - 1), *mapped[1:]]):
        with pytest.raises(HandshakeError, match="shared memory"):
            moved(runs.dst, lie)
