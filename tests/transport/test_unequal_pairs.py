"""Every pair of small meshes, orders and page sizes against a copy element by element, canaries around it all."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from prefixkv.pool.mesh import Mesh, Shard, check_meshes
from prefixkv.pool.unit_pages import shared_prefix, unit_pages
from prefixkv.transport.descriptors import Part, Runs, paired_runs, part_indices
from tests.models.mesh_pools import BASE, STRIDED, Int64s, Side, mesh_layout, routes, shards

PAGE_SIZES = ((2, 2), (2, 4), (4, 2), (2, 8), (8, 2))
PAGES = {2: (3, 4, 5, 0, 7, 1, 6), 4: (1, 2, 4, 0), 8: (2, 0)}  # of a request of 13 tokens; some are neighbours
MODELS = [*((heads, "mha") for heads in (1, 2, 4, 8)), (1, "mla")]
FILL = 13


@cache
def _runs(src: tuple, dst: tuple, src_part: Shard, dst_part: Shard) -> Runs:
    return paired_runs(mesh_layout(*src)[0], mesh_layout(*dst)[0], src_part=src_part, dst_part=dst_part)


@cache
def _addresses(
    src: tuple, dst: tuple, src_part: Shard, dst_part: Shard, start: int, stop: int
) -> tuple[Int64s, Int64s]:
    """(from, to) of every byte of units `start` to `stop` of the request."""
    runs = _runs(src, dst, src_part, dst_part)
    unit = min(src[2], dst[2])
    src_pages, dst_pages = (
        unit_pages(np.array(PAGES[side[2]], np.int32), side[2] // unit, start, stop) for side in (src, dst)
    )
    found: list[tuple[Int64s, Int64s]] = []
    for group in runs.groups:
        whole = Part(group, 0, group.num_runs * (stop - start))
        pair = part_indices(runs, whole, src_pages, dst_pages)
        found.append(tuple(_bytes(table, index) for table, index in zip((runs.src, runs.dst), pair, strict=True)))
    return np.concatenate([f for f, _ in found]), np.concatenate([t for _, t in found])


def _bytes(table: np.ndarray, index: np.ndarray) -> Int64s:
    """Every byte that NIXL reads or writes for these indices: rows in order, `count` blocks each."""
    assert index.dtype == np.int32
    address, length, _, stride, count = table.astype(np.int64).T
    assert len(set(count)) == 1
    row, block = np.divmod(index.astype(np.int64), count[0])
    assert row.max() < len(table)
    assert len(set(length[row])) == 1
    return ((address[row] + block * stride[row])[:, None] + np.arange(length[row[0]]) - BASE).ravel()


@pytest.mark.parametrize(("num_heads", "attention"), MODELS)
@pytest.mark.parametrize("dst_pp", [1, 2])
@pytest.mark.parametrize("src_pp", [1, 2])
@pytest.mark.parametrize("dst_tp", [1, 2, 4])
@pytest.mark.parametrize("src_tp", [1, 2, 4])
def test_every_byte_lands_once_and_nothing_else_is_touched(
    src_tp: int, dst_tp: int, src_pp: int, dst_pp: int, num_heads: int, attention: str
) -> None:
    meshes = Mesh(2, num_heads, src_tp, src_pp), Mesh(2, num_heads, dst_tp, dst_pp)
    check_meshes(*meshes)
    orders = ("layer_major", "page_major", "strided")
    for number, (src_order, dst_order, sizes) in enumerate(product(orders, orders, PAGE_SIZES)):
        # each strided order meets each other one somewhere
        src_order, dst_order = (
            STRIDED[(number + skip * (src_tp + dst_pp)) % len(STRIDED)] if order == "strided" else order
            for skip, order in enumerate((src_order, dst_order))
        )
        _check_copy(*meshes, (src_order, dst_order), sizes, attention, number)


def _check_copy(
    src_mesh: Mesh, dst_mesh: Mesh, orders: tuple[str, str], sizes: tuple[int, int], attention: str, seed: int
) -> None:
    unit = min(sizes)
    stop = -(-FILL // unit) * unit  # the last unit page is copied whole
    kinds = 2 if attention == "mha" else 1
    shape = (src_mesh.num_layers, kinds, stop, src_mesh.num_kv_heads, 2)
    kv = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    src = Side.make(src_mesh, orders[0], sizes[0], PAGES[sizes[0]], attention, seed + 1)
    dst = Side.make(dst_mesh, orders[1], sizes[1], PAGES[sizes[1]], attention, seed + 2)
    src.put(kv, 0)
    for prefix in (0, shared_prefix(10, *sizes)):
        expected = [memory.copy() for memory in dst.memory]
        got = [memory.copy() for memory in dst.memory]
        dst.put(kv, prefix, expected)
        for reader, memory in enumerate(got):
            targets = [
                _copy(src, dst, reader, route, memory, prefix // unit, stop // unit)
                for route in routes(src_mesh, dst_mesh, reader)
            ]
            num_bytes = dst.layouts[reader].kv_bytes_per_token * (stop - prefix)
            assert len(np.unique(np.concatenate(targets))) == sum(map(len, targets)) == num_bytes
            assert np.array_equal(memory, expected[reader]), (orders, sizes, prefix, reader)


def _copy(
    src: Side, dst: Side, reader: int, route: tuple[int, Shard, Shard], memory: np.ndarray, start: int, stop: int
) -> Int64s:
    writer, *parts = route
    keys = [
        (side.order, max(side.pages) + 2, side.page_size, shard.num_layers, shard.num_heads, side.attention)
        for side, shard in ((src, shards(src.mesh)[writer]), (dst, shards(dst.mesh)[reader]))
    ]
    from_, to = _addresses(*keys, *parts, start, stop)
    memory[to] = src.memory[writer][from_]
    return to
