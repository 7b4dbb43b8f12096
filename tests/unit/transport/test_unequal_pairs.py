"""Runs, indices and parts of them: every pair of small meshes, orders and page sizes against a
copy element by element, canaries around it all; how large blocks are, and what is refused."""

from functools import cache
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prefixkv.transport.nixl.loop  # noqa: F401  (sets up logging before nixl is loaded)
from prefixkv.errors import ConfigError, HandshakeError, PageStateError
from prefixkv.memory.kv_layout import KVLayout, Slab
from prefixkv.memory.mesh import Mesh, Shard, check_meshes
from prefixkv.paging import checked_pages, page_floor, unit_pages
from prefixkv.transport.runs import (
    Part,
    Positions,
    Runs,
    cut_parts,
    flat_indices,
    next_indices,
    paired_runs,
    part_indices,
)
from tests.support.mesh_pools import (
    BASE,
    ORDERS,
    STRIDED,
    Int64s,
    Side,
    elements,
    mesh_layout,
    moved,
    routes,
    shards,
)
from tests.support.transport_pools import Shape, make_pool

PAGE_SIZES = ((2, 2), (2, 4), (4, 2), (2, 8), (8, 2))
PAGES = {
    2: (3, 4, 5, 0, 7, 1, 6),
    4: (1, 2, 4, 0),
    8: (2, 0),
}  # of a request of 13 tokens; some are neighbours
MODELS = [*((heads, "mha") for heads in (1, 2, 4, 8)), (1, "mla")]
FRESH = {2: (1, 2, 3, 4, 5, 6, 7), 4: (1, 2, 3, 4), 8: (1, 2)}
FILL = 13


@cache
def _runs(src: tuple, dst: tuple, src_part: Shard, dst_part: Shard) -> Runs:
    return paired_runs(
        mesh_layout(*src)[0], mesh_layout(*dst)[0], src_part=src_part, dst_part=dst_part
    )


@cache
def _addresses(
    src: tuple, dst: tuple, src_part: Shard, dst_part: Shard, start: int, stop: int
) -> tuple[Int64s, Int64s]:
    """(from, to) of every byte of units `start` to `stop` of the request."""
    runs = _runs(src, dst, src_part, dst_part)
    unit = min(src[2], dst[2])
    src_pages, dst_pages = (
        unit_pages(np.array(PAGES[side[2]], np.int32), side[2] // unit, start, stop)
        for side in (src, dst)
    )
    found: list[tuple[Int64s, Int64s]] = []
    for group in runs.groups:
        whole = Part(group, 0, group.num_runs * (stop - start))
        pair = part_indices(runs, whole, src_pages, dst_pages)
        found.append(
            tuple(
                _bytes(table, index)
                for table, index in zip((runs.src, runs.dst), pair, strict=True)
            )
        )
    return np.concatenate([f for f, _ in found]), np.concatenate([t for _, t in found])


def _bytes(table: np.ndarray, index: np.ndarray) -> Int64s:
    """Every byte that NIXL reads or writes for these indices: rows in order, `count` blocks
    each."""
    assert index.dtype == np.int32
    address, length, _, stride, count = table.astype(np.int64).T
    assert len(set(count)) == 1
    row, block = np.divmod(index.astype(np.int64), count[0])
    assert row.max() < len(table)
    assert len(set(length[row])) == 1
    return (
        (address[row] + block * stride[row])[:, None] + np.arange(length[row[0]]) - BASE
    ).ravel()


QUICK = [(2, 1, 1, 1, 4, "mha"), (1, 2, 1, 2, 1, "mla")]
MESHES = [(*sizes, *model) for sizes in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2))
          for model in MODELS]  # fmt: skip


@pytest.mark.parametrize(
    ("src_tp", "dst_tp", "src_pp", "dst_pp", "num_heads", "attention"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in MESHES],
)
def test_every_byte_lands_once_and_nothing_else_is_touched(
    src_tp: int, dst_tp: int, src_pp: int, dst_pp: int, num_heads: int, attention: str
) -> None:
    meshes = Mesh(2, num_heads, src_tp, src_pp), Mesh(2, num_heads, dst_tp, dst_pp)
    check_meshes(*meshes)
    orders = ("layer_major", "page_major", "strided")
    for number, (src_order, dst_order, sizes) in enumerate(product(orders, orders, PAGE_SIZES)):
        # each strided order meets each other one somewhere
        src_order, dst_order = (
            STRIDED[(number + skip * (src_tp + dst_pp)) % len(STRIDED)]
            if order == "strided"
            else order
            for skip, order in enumerate((src_order, dst_order))
        )
        _check_copy(*meshes, (src_order, dst_order), sizes, attention, number)


def _check_copy(
    src_mesh: Mesh,
    dst_mesh: Mesh,
    orders: tuple[str, str],
    sizes: tuple[int, int],
    attention: str,
    seed: int,
) -> None:
    unit = min(sizes)
    stop = -(-FILL // unit) * unit  # the last unit page is copied whole
    kinds = 2 if attention == "mha" else 1
    shape = (src_mesh.num_layers, kinds, stop, src_mesh.num_kv_heads, 2)
    kv = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    src = Side.make(src_mesh, orders[0], sizes[0], PAGES[sizes[0]], attention, seed + 1)
    dst = Side.make(dst_mesh, orders[1], sizes[1], PAGES[sizes[1]], attention, seed + 2)
    src.put(kv, 0)
    for prefix in (0, page_floor(10, max(sizes))):
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
    src: Side,
    dst: Side,
    reader: int,
    route: tuple[int, Shard, Shard],
    memory: np.ndarray,
    start: int,
    stop: int,
) -> Int64s:
    writer, *parts = route
    keys = [
        (
            side.order,
            max(side.pages) + 2,
            side.page_size,
            shard.num_layers,
            shard.num_heads,
            side.attention,
        )
        for side, shard in ((src, shards(src.mesh)[writer]), (dst, shards(dst.mesh)[reader]))
    ]
    from_, to = _addresses(*keys, *parts, start, stop)
    memory[to] = src.memory[writer][from_]
    return to


def _num_descriptors(runs: Runs, part: Part, pages: list[np.ndarray]) -> int:
    """As NIXL merges them: neighbours on both sides, in one dense run."""
    i, j = part_indices(runs, part, *pages)
    run = i // int(runs.src[0, 4])
    merges = (np.diff(i) == 1) & (np.diff(j) == 1) & (np.diff(run) == 0) & part.group.dense
    return len(i) - np.count_nonzero(merges)


ORDER_PAIRS = st.tuples(st.sampled_from([*ORDERS]), st.sampled_from([*ORDERS]))


@settings(max_examples=200)
@given(
    orders=ORDER_PAIRS, sizes=st.sampled_from(PAGE_SIZES), data=st.data(),
    heads=st.sampled_from([Shard(0, 2, 0, 4), Shard(1, 1, 1, 2), Shard(0, 2, 3, 1)]),
    max_bytes=st.integers(1, 200), max_descriptors=st.integers(1, 12),
)  # fmt: skip
def test_parts_cover_each_byte_once_and_are_as_large_as_their_bounds_let_them(
    orders: tuple[str, str], sizes: tuple[int, int], heads: Shard, data: st.DataObject,
    max_bytes: int, max_descriptors: int,
) -> None:  # fmt: skip
    pages_of = data.draw(st.sampled_from([PAGES, FRESH]))
    unit, total = min(sizes), 7 * 2 // min(sizes)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    src = mesh_layout(orders[0], 9, sizes[0], 2, 4)[0]
    dst = mesh_layout(orders[1], 9, sizes[1], heads.num_layers, heads.num_heads)[0]
    runs = paired_runs(src, dst, src_part=heads)
    pages = [
        unit_pages(np.array(pages_of[size], np.int32), size // unit, start, stop) for size in sizes
    ]
    parts = cut_parts(runs, *pages, max_bytes, max_descriptors)
    ahead: list[Any] = []
    while len(ahead) < len(parts):  # three at once are as each by itself
        ahead += next_indices(runs, parts, len(ahead), 3, *pages)
    moved = []
    for part, (i, j), after in zip(parts, ahead, [*parts[1:], None], strict=True):
        assert [i.tolist(), j.tolist()] == [s.tolist() for s in part_indices(runs, part, *pages)]
        assert part.num_bytes <= max(max_bytes, part.group.block_bytes)
        assert len(i) * part.group.block_bytes == part.num_bytes
        assert _num_descriptors(runs, part, pages) <= max_descriptors
        if after is not None and after.group == part.group:
            more = part._replace(stop=part.stop + 1)
            many = _num_descriptors(runs, more, pages)
            assert more.num_bytes > max_bytes or many > max_descriptors
        moved.append(np.stack([_bytes(runs.src, i), _bytes(runs.dst, j)]))
    whole = [part_indices(runs, Part(group, 0, group.num_runs * (stop - start)), *pages)
             for group in runs.groups]  # fmt: skip
    every = [np.stack([_bytes(runs.src, i), _bytes(runs.dst, j)]) for i, j in whole]
    pairs = [np.concatenate(some, axis=1) for some in (moved, every)]
    assert np.array_equal(*(some[:, some[1].argsort(kind="stable")] for some in pairs))
    expected = elements(dst, pages_of[sizes[1]], stop * unit)[:, start * unit :]
    assert np.array_equal(np.sort(pairs[0][1]), np.sort(expected.ravel()))


def test_a_descriptor_ends_where_a_large_page_does() -> None:
    """In a page_major pool the units of a page touch, but pages that follow each other do not."""
    small, large = (
        mesh_layout(order, 9, size, 2, 4)[0]
        for order, size in (("layer_major", 2), ("page_major", 8))
    )
    pages = {size: unit_pages(np.array(FRESH[size], np.int32), size // 2, 0, 7) for size in (2, 8)}
    for pair in ((small, large), (large, small)):
        src, dst = (pages[layout.page_size] for layout in pair)
        runs = paired_runs(*pair)
        parts = cut_parts(runs, src, dst, max_bytes=2**30, max_descriptors=1)
        assert [part.stop - part.start for part in parts] == [4, 3] * 4


@pytest.mark.parametrize("orders", [("layer_major",) * 2, ("layer_major", "page_major")])
@pytest.mark.parametrize(("pages_of", "sizes"), [(FRESH, (2, 2)), (FRESH, (2, 8)), (PAGES, (8, 2))])
def test_nixl_merges_what_is_taken_for_one_descriptor(
    orders: tuple[str, str], pages_of: dict[int, tuple[int, ...]], sizes: tuple[int, int]
) -> None:
    """NIXL's own count of what an agent writes to itself."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("us", nixl_agent_config(backends=["UCX"], capture_telemetry=True))
    sides, held = [], []
    for order, size in zip(orders, sizes, strict=True):
        layout, num_bytes = mesh_layout(order, 9, size, 2, 4)
        held.append(np.zeros(num_bytes, np.uint8))
        sides.append(moved(layout, held[-1].ctypes.data))
        regions = [(*region, 0, "") for region in sides[-1].regions]
        agent.register_memory(regions, "DRAM", backends=["UCX"])
    runs = paired_runs(*sides)
    lists = [agent.prep_xfer_dlist(*one, "DRAM") for one in (("", runs.src), ("us", runs.dst))]
    pages = [unit_pages(np.array(pages_of[size], np.int32), size // 2, 0, 7) for size in sizes]
    for group in runs.groups:
        part = Part(group, 0, group.num_runs * 7)
        src, dst = part_indices(runs, part, *pages)
        write = agent.make_prepped_xfer("WRITE", lists[0], src, lists[1], dst)
        state = agent.transfer(write)
        while state == "PROC":
            state = agent.check_xfer_state(write)
        assert agent.get_xfer_telemetry(write).descCount == _num_descriptors(runs, part, pages)


# --- what is refused, and what a lie costs --------------------------------------------------------


def _latent(num_pages: int, page_size: int, page_stride: int = 0, region: int = 2**50) -> KVLayout:
    """One slab of MLA, a byte a token, anywhere in a region that nobody has."""
    return KVLayout(
        num_pages=num_pages, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1,
        dtype="uint8", attention="mla", order="strided",
        slabs=(Slab(BASE, page_stride or page_size, 1, 0),), regions=((BASE, region),),
    )  # fmt: skip


def test_units_step_through_a_larger_page_where_its_strides_allow() -> None:
    small = _latent(64, 2)
    for large, expected in (
        (_latent(16, 8), Positions(16, 4, 4, 64)),
        (_latent(16, 8, page_stride=24), Positions(16, 4, 12, 15 * 12 + 4)),
        (_latent(16, 8, page_stride=25), Positions(16, 4, 0, 64)),
        (_latent(1, 8), Positions(1, 4, 4, 4)),
    ):
        for runs in (paired_runs(small, large), paired_runs(large, small)):
            found = runs.dst_positions if runs.src_positions.fold == 1 else runs.src_positions
            assert found == expected
            assert len(runs.src) + len(runs.dst) == (2 if expected.step else 1 + 4)
            units = np.arange(large.num_pages * 4, dtype=np.int32)
            positions = found.of(units)
            assert positions.dtype == np.int32
            assert len(set(positions.tolist())) == len(units)
            assert 0 <= positions.min() <= positions.max() == found.num_positions - 1


def test_slots_that_an_index_would_not_reach_give_way_to_rows() -> None:
    small = _latent(64, 2)
    wide = _latent(2**20, 8, page_stride=2**14)  # 2**13 positions from page to page
    runs = paired_runs(small, wide)
    assert (runs.dst_positions.step, runs.dst_positions.num_positions) == (0, 2**22)
    units = np.array([0, 5, 2**22 - 1], np.int32)
    assert runs.dst_positions.of(units).tolist() == [0, 2**20 + 1, 2**22 - 1]


def test_more_units_than_an_index_names_are_refused() -> None:
    paired_runs(_latent(64, 2), _latent(2**29, 8))
    with pytest.raises(ConfigError, match="int32"):
        paired_runs(_latent(64, 2), _latent(2**29 + 1, 8))


def test_a_peer_with_absurd_pages_costs_nothing() -> None:
    with pytest.raises(HandshakeError, match="page_size one is more than 1024 times the other"):
        paired_runs(_latent(64, 2), _latent(2, 2**29, page_stride=2**30 + 1))


@pytest.mark.parametrize(
    ("src_part", "dst_part", "field"),
    [
        (Shard(0, 2, 0, 2), Shard(0, 1, 0, 2), "num_layers"),
        (Shard(0, 1, 0, 2), Shard(0, 1, 0, 1), "num_kv_heads"),
        (None, Shard(0, 1, 0, 4), "num_layers"),
    ],
)
def test_parts_of_two_sizes_are_refused(
    src_part: Shard | None, dst_part: Shard, field: str
) -> None:
    layout, _ = mesh_layout("layer_major", 4, 4, 2, 4)
    with pytest.raises(HandshakeError) as caught:
        paired_runs(layout, layout, src_part=src_part, dst_part=dst_part)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "part", [Shard(1, 2, 0, 4), Shard(0, 2, 1, 4), Shard(-1, 2, 0, 4), Shard(0, 2, -1, 4)]
)
def test_a_part_outside_its_pool_is_refused(part: Shard) -> None:
    layout, _ = mesh_layout("layer_major", 4, 4, 2, 4)
    for parts in ({"src_part": part}, {"dst_part": part}):
        with pytest.raises(ConfigError, match="not inside"):
            paired_runs(layout, layout, **parts)


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
