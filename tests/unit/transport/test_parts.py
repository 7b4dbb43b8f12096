"""Runs and indices: how large blocks are, what is refused. Parts of them against brute force, and
unequal sizes: test_unequal_pairs.py."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import ConfigError, HandshakeError, PageStateError
from prefixkv.memory.kv_layout import KVLayout, Slab
from prefixkv.memory.mesh import Shard
from prefixkv.paging import checked_pages
from prefixkv.transport.runs import cut_parts, flat_indices, next_indices, paired_runs, part_indices
from tests.support.transport_pools import Shape, make_pool

NUM_PAGES = 9
SLABS = 4  # of the default shape: 2 layers, K and V
PIECES = 4 * 2  # tokens and heads of a page


@pytest.mark.parametrize(
    ("src", "dst", "num_runs"),
    [
        ("page_major", "page_major", 1),
        ("layer_major", "layer_major", SLABS),
        ("page_major", "layer_major", SLABS),
        ("heads_first", "heads_first", SLABS),
        ("page_kv", "page_kv", SLABS // 2),
        ("page_kv", "page_major", SLABS // 2),
        ("padded", "page_major", SLABS),
        ("tokens_outer", "layer_major", SLABS * 4),
        ("heads_first", "page_major", SLABS * PIECES),
    ],
)
def test_blocks_are_as_large_as_both_sides_allow(src: str, dst: str, num_runs: int) -> None:
    for a, b in ((src, dst), (dst, src)):
        runs = paired_runs(make_pool(a, 5).layout, make_pool(b, 5).layout)
        assert runs.num_runs == num_runs
        assert {int(x) for x in runs.src[:, 1]} == {256 // num_runs}


@pytest.mark.parametrize(
    ("order", "dense"), [("page_major", True), ("layer_major", True), ("padded", False)]
)
def test_only_pages_that_touch_are_dense(order: str, dense: bool) -> None:
    runs = paired_runs(make_pool("layer_major", 5).layout, make_pool(order, 5).layout)
    # a slab's page of a page_major pool does not touch that of the next page
    assert [g.dense for g in runs.groups] == [dense and order == "layer_major"]
    same = paired_runs(make_pool(order, 5).layout, make_pool(order, 5).layout)
    assert [g.dense for g in same.groups] == [dense]


def test_blocks_never_cross_a_region() -> None:
    memory = np.zeros(64, np.uint8)
    base = memory.ctypes.data
    layout = KVLayout(
        num_pages=1, page_size=1, num_layers=1, num_kv_heads=1, head_dim=32, dtype="uint8",
        attention="mha", order="strided", slabs=(Slab(base, 0, 0, 0), Slab(base + 32, 0, 0, 0)),
        regions=((base, 64),),
    )  # fmt: skip
    assert paired_runs(layout, layout).num_runs == 1
    apart = msgspec.structs.replace(layout, regions=((base, 32), (base + 32, 32)))
    assert paired_runs(layout, apart).num_runs == 2
    assert paired_runs(apart, layout).num_runs == 2


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("num_layers", Shape(num_layers=3)),
        ("page_size", Shape(page_size=6)),
        ("num_kv_heads", Shape(num_kv_heads=4)),
        ("head_dim", Shape(head_dim=4)),
        ("attention", Shape(attention="mla", num_kv_heads=1)),
    ],
)
def test_another_model_is_named(field: str, other: Shape) -> None:
    with pytest.raises(HandshakeError) as caught:
        paired_runs(make_pool("layer_major", 3).layout, make_pool("layer_major", 3, other).layout)
    assert caught.value.field == field


def test_another_dtype_is_named() -> None:
    ours = make_pool("layer_major", 3).layout
    with pytest.raises(HandshakeError) as caught:
        paired_runs(ours, msgspec.structs.replace(ours, dtype="float8_e4m3fn"))
    assert (caught.value.field, caught.value.theirs) == ("dtype", "float8_e4m3fn")


def opaque_layout(num_pages: int = 3, **sizes: int) -> KVLayout:
    """Pages in one run each, a slab a layer."""
    pool = make_pool("layer_major", num_pages, Shape(**sizes)).layout
    return msgspec.structs.replace(pool, opaque="amx")


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("page_size", opaque_layout(page_size=8)),
        ("num_kv_heads", opaque_layout(num_kv_heads=4)),
        ("opaque", msgspec.structs.replace(opaque_layout(), opaque="avx2")),
        ("opaque", msgspec.structs.replace(opaque_layout(), opaque="")),
    ],
)
def test_other_opaque_pages_are_named(field: str, other: KVLayout) -> None:
    ours = opaque_layout()
    half = (None, Shard(0, other.num_layers, 0, ours.num_kv_heads))  # what its heads would allow
    with pytest.raises(HandshakeError) as caught:
        paired_runs(ours, other, *half)
    assert caught.value.field == field
    with pytest.raises(HandshakeError) as caught:
        paired_runs(other, ours, *half[::-1])
    assert caught.value.field == field


def test_heads_of_an_opaque_page_do_not_move_alone() -> None:
    ours = opaque_layout(num_kv_heads=2)
    one = Shard(0, ours.num_layers, 1, 1)
    paired_runs(msgspec.structs.replace(ours, opaque=""), msgspec.structs.replace(ours, opaque=""),
                one, one)  # fmt: skip
    with pytest.raises(HandshakeError, match="num_heads differs: ours 2, theirs 1"):
        paired_runs(ours, ours, one, one)


def test_an_opaque_page_is_one_block_a_slab() -> None:
    runs = paired_runs(opaque_layout(9), opaque_layout(5))
    layout = opaque_layout()
    assert {group.block_bytes for group in runs.groups} == {layout.slab_page_bytes}
    assert runs.num_runs == len(layout.slabs)


def test_a_lying_layout_of_a_peer_is_refused() -> None:
    ours = make_pool("layer_major", 3).layout
    with pytest.raises(ConfigError, match="not inside one region"):
        paired_runs(ours, msgspec.structs.replace(ours, num_pages=4))


def test_more_blocks_than_an_index_reaches_are_refused() -> None:
    pages = np.zeros(1, np.int32)
    assert flat_indices(pages, 4, 2**29)[-1] == 3 * 2**29
    # nothing is dereferenced, so a pool may be as large as it likes
    base, stride = 1 << 30, 64
    big = KVLayout(
        num_pages=2**30, page_size=1, num_layers=2, num_kv_heads=1, head_dim=stride, dtype="uint8",
        attention="mla", order="layer_major",
        slabs=(Slab(base, stride, 0, 0), Slab(base + (stride << 30), stride, 0, 0)),
        regions=((base, stride << 30), (base + (stride << 30), stride << 30)),
    )  # fmt: skip
    runs = paired_runs(big, big)
    with pytest.raises(ConfigError, match="int32"):
        runs.joined(runs)
    more = msgspec.structs.replace(
        big, num_layers=3, slabs=(*big.slabs, Slab(base + (stride << 31), stride, 0, 0)),
        regions=(*big.regions, (base + (stride << 31), stride << 30)),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="int32"):
        paired_runs(more, more)


@given(
    pages=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    num_runs=st.integers(1, 5),
    data=st.data(),
)
def test_a_slice_of_indices_is_a_slice_of_all(
    pages: list[int], num_runs: int, data: st.DataObject
) -> None:
    everything = [run * 10 + page for run in range(num_runs) for page in pages]
    start = data.draw(st.integers(0, len(everything) - 1))
    stop = data.draw(st.integers(start + 1, len(everything)))
    got = flat_indices(np.array(pages, np.int32), num_runs, 10, start, stop)
    assert got.dtype == np.int32
    assert got.tolist() == everything[start:stop]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (np.array([0, 8], np.int32), "target page 8 is not in"),
        (np.array([0, -1], np.int32), "target page -1 is not in"),
        (np.array([2**32], np.int64), "not in"),
        (np.array([], np.int32), "at least one"),
        (np.array([[1]], np.int32), "one-dimensional"),
        (np.array([1.0]), "integer"),
        (np.array([True]), "integer"),
    ],
)
def test_bad_page_ids_never_become_indices(pages: np.ndarray, message: str) -> None:
    with pytest.raises(PageStateError, match=message):
        checked_pages(pages, 8, "target")


def test_good_page_ids_become_int32() -> None:
    assert checked_pages(np.array([7, 0], np.uint64), 8, "target").dtype == np.int32


def test_parts_that_are_worked_out_together_are_of_one_group() -> None:
    small, large = (make_pool("layer_major", NUM_PAGES, Shape(2, 2, heads, 4)) for heads in (1, 3))
    runs = paired_runs(small.layout, small.layout).joined(paired_runs(large.layout, large.layout))
    pages = np.arange(NUM_PAGES, dtype=np.int32)[::-2].copy()
    parts = cut_parts(runs, pages, pages, 64, 2)
    at = next(at for at, part in enumerate(parts) if part.group != parts[0].group)
    assert len(next_indices(runs, parts, 0, len(parts), pages, pages)) == at > 1
    for number in (at, at + 1):
        (src, _), *_ = next_indices(runs, parts, number, 1, pages, pages)
        assert src.tolist() == part_indices(runs, parts[number], pages, pages)[0].tolist()
