"""Copies of pages between a pool and host pages: each byte, and no other; on the CPU, and
staged as on a GPU."""

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
import torch
from msgspec import structs

from prefixkv.errors import ConfigError, PageStateError
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool, PoolGroup
from prefixkv.memory.mesh import Shard
from prefixkv.memory.page_copy import CpuPageCopy, PageCopy, StagedPageCopy, page_copy
from prefixkv.memory.stage_copy import CpuCopy
from prefixkv.memory.stage_plan import StagePlan
from tests.support.engine_tensors import Memory, distinct
from tests.support.gpu import GPU
from tests.support.mesh_pools import ORDERS, mesh_layout

Make = Callable[[KVLayout, HostPool], PageCopy]

HOST_PAGES = 9
ALL_HOST = np.arange(HOST_PAGES, dtype=np.int32)


def whole_plan(layout: KVLayout) -> StagePlan:
    return StagePlan.of(layout, Shard.whole(layout), layout.page_size)


@pytest.fixture(params=["moves", "staged", "triton"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    way = str(request.param)
    if way == "staged":
        return lambda layout, host: StagedPageCopy(
            [CpuCopy(whole_plan(one)) for one in layout.with_same_ids], layout, host, "cpu"
        )
    if way == "triton":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        from prefixkv.memory.copy_triton import TritonCopy

        return lambda layout, host: StagedPageCopy(
            [TritonCopy(whole_plan(one), "cpu") for one in layout.with_same_ids],
            layout, host, "cpu",
        )  # fmt: skip
    return page_copy


def host_bytes(host: HostPool) -> np.ndarray:
    return np.concatenate([memory.numpy() for _, memory in host.stretches(ALL_HOST)]).reshape(
        HOST_PAGES, -1
    )


def filled_host(layout: KVLayout) -> HostPool:
    """A host pool of three chunks, every byte random."""
    host = HostPool(layout, HOST_PAGES, chunk_bytes=4 * layout.page_bytes)
    rng = np.random.default_rng(7)
    for _, memory in host.stretches(ALL_HOST):
        memory.copy_(torch.from_numpy(rng.integers(0, 256, memory.numel(), np.uint8)))
    return host


@pytest.mark.parametrize(("attention", "head_bytes"), [("mha", 16), ("mha", 3), ("mla", 3)])
@pytest.mark.parametrize("order", ORDERS)
def test_pages_come_back_byte_by_byte_and_nothing_else_changes(
    make: Make, request: pytest.FixtureRequest, order: str, attention: str, head_bytes: int
) -> None:
    if "triton" in request.node.callspec.id and head_bytes != 16:
        pytest.skip("the interpreter is slow")
    heads = 4 if attention == "mha" else 1
    memory = Memory(mesh_layout(order, 7, 4, 3, heads, attention, head_bytes), "cpu")
    host = filled_host(memory.layout)
    copy = make(memory.layout, host)
    whole = Shard.whole(memory.layout)

    def places(pages: tuple[int, ...]) -> np.ndarray:
        """[page, byte]"""
        return np.stack([memory.places((page,), whole, 4, 0, 1) for page in pages])

    device, rows = (5, 2, 3, 0, 1), (8, 2, 3, 4, 0)
    before, host_before = memory.bytes(), host_bytes(host)
    copy.write(np.array(rows, np.int32), np.array(device, np.int32))
    assert np.array_equal(memory.bytes(), before)
    after = host_bytes(host)
    kept = [page for page in range(HOST_PAGES) if page not in rows]
    assert np.array_equal(after[kept], host_before[kept])
    # Each row has its own page's bytes, in whatever order.
    assert np.array_equal(np.sort(after[list(rows)]), np.sort(before[places(device)]))

    # Any part of what was written, into other pages.
    back, to = [3, 8, 0], (6, 5, 2)
    expected = before.copy()
    expected[places(to)] = before[places(tuple(device[rows.index(row)] for row in back))]
    copy.load(np.array(back, np.int32), np.array(to, np.int32))
    assert np.array_equal(memory.bytes(), expected)
    assert np.array_equal(host_bytes(host), after)
    host.close()


def test_layers_that_lie_differently(make: Make) -> None:
    shapes = (2, 5, 4, 2, 8), (2, 5, 4, 3, 8), (2, 5, 2, 4, 8)
    dense, padded, heads_first = (distinct(shape, "bfloat16") for shape in shapes)
    layers = [dense, padded[..., :2, :], heads_first.transpose(2, 3)]
    pool = KVPool.from_tensors([layer[0] for layer in layers], [layer[1] for layer in layers])
    host = filled_host(pool.layout)
    copy = make(pool.layout, host)
    expected = pool.read_pages([3, 1])
    copy.write(np.array([0, 5], np.int32), np.array([3, 1], np.int32))
    copy.load(np.array([0, 5], np.int32), np.array([0, 4], np.int32))
    assert torch.equal(pool.read_pages([0, 4, 3, 1]), torch.cat([expected, expected]))
    host.close()


@pytest.mark.parametrize("head_dim", [8, 3])
def test_aligned_groups_go_with_the_page_and_windows_do_not(make: Make, head_dim: int) -> None:
    """Of other heads, layers, order and dtype, in words and in single bytes."""
    full = KVPool.create(5, 4, 2, 2, 8)
    last = KVPool.create(6, 4, 1, 2, 8)
    drafts = KVPool.create(5, 4, 1, 3, head_dim, dtype="uint8", order="page_major")
    index = KVPool.create(5, 4, 3, 1, 16, attention="mla")
    pool = full.with_groups(
        PoolGroup("draft", drafts), PoolGroup("last", last, 9), PoolGroup("index", index)
    )
    parts = full, drafts, index
    chance = torch.Generator().manual_seed(3)
    for one in (*parts, last):
        every = range(one.layout.num_pages)
        shape = one.read_pages(every).shape
        one.write_pages(every, torch.randint(0, 256, shape, generator=chance, dtype=torch.uint8))
    host = filled_host(pool.layout)
    assert host.page_bytes == sum(one.layout.page_bytes for one in parts)
    copy, before = make(pool.layout, host), host_bytes(host)
    expected = [one.read_pages(range(5)) for one in parts]
    window = last.read_pages(range(6))
    copy.write(np.array([7, 8, 2], np.int32), np.array([3, 1, 4], np.int32))
    after = host_bytes(host)
    assert np.array_equal(after[[0, 1, 3, 4, 5, 6]], before[[0, 1, 3, 4, 5, 6]])
    for row, page in ((7, 3), (8, 1), (2, 4)):
        its = torch.cat([data[page].flatten() for data in expected]).numpy()
        assert np.array_equal(np.sort(after[row]), np.sort(its))
    copy.load(np.array([8, 7], np.int32), np.array([4, 0], np.int32))
    for one, data in zip(parts, expected, strict=True):
        data[[4, 0]] = data[[1, 3]]
        assert torch.equal(one.read_pages(range(5)), data)
    assert torch.equal(last.read_pages(range(6)), window)
    host.close()


def test_a_pool_of_one_page(make: Make) -> None:
    pool = KVPool.create(1, 4, 2, 2, 8)
    data = torch.arange(pool.layout.page_bytes).to(torch.uint8).view(1, 4, 4, 2, 16)
    pool.write_pages([0], data)
    # The stride from its page to the next may be any number.
    slabs = tuple(structs.replace(slab, page_stride=1 << 70) for slab in pool.layout.slabs)
    layout = structs.replace(pool.layout, slabs=slabs)
    host = filled_host(layout)
    copy = make(layout, host)
    copy.write(np.array([6], np.int32), np.array([0], np.int32))
    pool.write_pages([0], torch.zeros_like(data))
    copy.load(np.array([6], np.int32), np.array([0], np.int32))
    assert torch.equal(pool.read_pages([0]), data)
    host.close()


@pytest.mark.parametrize(
    ("host_pages", "device_pages", "message"),
    [
        ([0, HOST_PAGES], [0, 1], f"host page {HOST_PAGES} is not in"),
        ([-1, 0], [0, 1], "host page -1 is not in"),
        ([0, 1], [0, 7], "device page 7 is not in"),
        ([0, 1], [-1, 0], "device page -1 is not in"),
        ([0, 1], [0], "2 host pages for 1 of the device"),
        ([], [], "at least one"),
    ],
)
def test_pages_outside_a_pool_are_not_copied(
    make: Make, host_pages: list[int], device_pages: list[int], message: str
) -> None:
    memory = Memory(mesh_layout("layer_major", 7, 4, 3, 4), "cpu")
    host = filled_host(memory.layout)
    copy = make(memory.layout, host)
    before, host_before = memory.bytes(), host_bytes(host)
    for act in (copy.load, copy.write):
        with pytest.raises(PageStateError, match=message):
            act(np.array(host_pages, np.int32), np.array(device_pages, np.int32))
    assert np.array_equal(memory.bytes(), before)
    assert np.array_equal(host_bytes(host), host_before)
    host.close()


def test_a_host_pool_of_other_pages_is_refused(make: Make) -> None:
    host = HostPool(KVPool.create(2, 4, 2, 2, 8).layout, 3)
    with pytest.raises(ConfigError, match=r"host pages have 512 bytes, pages of the pool 256"):
        make(KVPool.create(2, 4, 2, 1, 8).layout, host)
    host.close()


# --- runs and calls -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "num_runs"),
    [
        ("layer_major", 6),
        ("page_major", 1),
        ("K and V of a page together", 3),
        ("heads before tokens", 6),
        ("heads before pages", 6 * 4),
        ("all layers of a token together", 1),
        ("padded pages", 6),
        ("padded tokens", 6 * 4),
    ],
)
def test_a_page_is_as_few_runs_as_its_bytes_lie_in(order: str, num_runs: int) -> None:
    layout = Memory(mesh_layout(order, 7, 4, 3, 4), "cpu").layout
    host = HostPool(layout, 1)
    assert len(CpuPageCopy(layout, host)._lengths) == num_runs
    host.close()


@GPU
@pytest.mark.parametrize("order", ["layer_major", "page_major"])
@pytest.mark.parametrize("attention", ["mha", "mla"])
def test_pages_of_a_gpu_come_back(order: str, attention: str) -> None:
    heads = 2 if attention == "mha" else 1
    pool = KVPool.create(7, 4, 3, heads, 8, attention=attention, order=order, device="cuda:0")
    shape = (7, len(pool.layout.slabs), 4, heads, pool.layout.head_bytes)
    data = torch.from_numpy(np.random.default_rng(2).integers(0, 256, shape, np.uint8))
    pool.write_pages(range(7), data)
    host = HostPool(pool.layout, HOST_PAGES, "cuda:0", chunk_bytes=4 * pool.layout.page_bytes)
    while host.ready_pages < HOST_PAGES:
        assert host.error is None
    copy = page_copy(pool.layout, host, "cuda:0")
    copy.write(np.array([8, 2, 3, 4], np.int32), np.array([5, 2, 3, 0], np.int32))
    torch.cuda.synchronize()
    pool.write_pages(range(7), torch.zeros_like(data))
    copy.load(np.array([3, 4, 8], np.int32), np.array([6, 1, 2], np.int32))
    torch.cuda.synchronize()
    assert torch.equal(pool.read_pages([6, 1, 2]), data[[3, 0, 5]])
    assert not pool.read_pages([0, 3, 4, 5]).any()
    host.close()
