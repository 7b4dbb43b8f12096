"""Pools against the memory itself: what a layout says lies at an address is read there."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
from pathlib import Path

import pytest
import torch

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import KVPool, check_device
from tests.support.engine_tensors import (
    DIM,
    DTYPES,
    ENGINES,
    HEADS,
    LAYERS,
    PAGES,
    TOKENS,
    distinct,
)
from tests.support.gpu import GPU

ORDERS = ["layer_major", "page_major"]
ATTENTION = ["mha", "mla"]


def make(
    dtype: str = "bfloat16", attention: str = "mha", order: str = "layer_major", **sizes: int
) -> KVPool:
    heads = 1 if attention == "mla" else HEADS
    shape = {
        "num_pages": PAGES,
        "page_size": TOKENS,
        "num_layers": LAYERS,
        "num_kv_heads": heads,
        "head_dim": DIM,
    }
    return KVPool.create(**{**shape, **sizes}, dtype=dtype, attention=attention, order=order)


def views_of(pool: KVPool) -> list[torch.Tensor]:
    kinds = [pool.k] if pool.layout.attention == "mla" else [pool.k, pool.v]
    return [kind(layer) for layer in range(pool.layout.num_layers) for kind in kinds]


def fill(pool: KVPool) -> None:
    """Other bytes in every slab."""
    for i, view in enumerate(views_of(pool)):
        view.view(torch.uint8).copy_(
            distinct((i + 1, *view.shape), pool.layout.dtype)[i].view(torch.uint8) + i
        )


def assert_described(pool: KVPool, views: list[torch.Tensor]) -> None:
    """Every element of `views` (slab by slab, [page, token, head, dim]) lies where the layout
    says."""
    layout = pool.layout
    layout.validate()
    assert len(views) == len(layout.slabs)
    for i, view in enumerate(views):
        layer, kv = divmod(i, layout.slabs_per_layer)
        raw = view.view(torch.uint8)
        for page, token, head in itertools.product(*map(range, view.shape[:3])):
            slab = layout.slab(layer, kv)
            at = page * slab.page_stride + token * slab.token_stride + head * slab.head_stride
            there = ctypes.string_at(slab.base + at, layout.head_bytes)
            assert there == bytes(raw[page, token, head].tolist())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", DTYPES)
def test_our_layouts_describe_the_memory(dtype: str, attention: str, order: str) -> None:
    pool = make(dtype, attention, order)
    views = views_of(pool)
    assert all(not view.view(torch.uint8).any() for view in views)
    fill(pool)
    assert_described(pool, views)
    assert pool.layout.order == order
    assert pool.layout.dtype == dtype
    assert all(start % 4096 == 0 for start, _ in pool.layout.regions)
    assert len(pool.layout.regions) == (1 if order == "page_major" else LAYERS)
    assert sum(size for _, size in pool.layout.regions) == PAGES * pool.layout.page_bytes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_engine_tensors_are_described(dtype: str, engine: str) -> None:
    k, v = ENGINES[engine](dtype)
    pool = KVPool.from_tensors(k, v)
    views = (
        [view.unsqueeze(2) for view in k]
        if v is None
        else [t for pair in zip(k, v, strict=True) for t in pair]
    )
    assert_described(pool, views)
    assert pool.layout.order == "strided"
    for layer, view in enumerate(k):
        same = pool.latent(layer) if v is None else pool.k(layer)
        assert (same.data_ptr(), same.shape, same.stride()) == (
            view.data_ptr(),
            view.shape,
            view.stride(),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
def test_pages_read_are_the_bytes_of_the_views(engine: str, dtype: str) -> None:
    k, v = ENGINES[engine](dtype)
    pool = KVPool.from_tensors(k, v)
    pages = [3, 0, 4]
    data = pool.read_pages(pages)
    layout = pool.layout
    assert tuple(data.shape) == (
        3,
        len(layout.slabs),
        TOKENS,
        layout.num_kv_heads,
        layout.head_bytes,
    )
    for i, view in enumerate(views_of(pool)):
        assert torch.equal(
            data[:, i], torch.stack([view[page].contiguous().view(torch.uint8) for page in pages])
        )


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_copied_between_layouts_keep_their_kv(dtype: str, attention: str) -> None:
    source, target = make(dtype, attention, "layer_major"), make(dtype, attention, "page_major")
    fill(source)
    target.write_pages([4, 1], source.read_pages([0, 2]))
    for there, here in zip(views_of(target), views_of(source), strict=True):
        there, here = there.view(torch.uint8), here.view(torch.uint8)
        assert torch.equal(there[4], here[0])
        assert torch.equal(there[1], here[2])
        assert not there[[0, 2, 3]].any()


def test_the_pool_keeps_an_engines_tensors_alive() -> None:
    k, v = ENGINES["mha, layer_major"]("uint8")
    expected = k[1].clone()
    pool = KVPool.from_tensors(k, v)
    del k, v
    gc.collect()
    assert torch.equal(pool.k(1), expected)


def test_regions_are_whole_storages_or_as_given() -> None:
    whole = distinct((2, PAGES, TOKENS, HEADS, DIM), "float16")
    pool = KVPool.from_tensors([whole[0]], [whole[1]])
    assert pool.layout.regions == ((whole.data_ptr(), whole.numel() * 2),)
    split = [
        (whole[0].data_ptr(), whole[0].numel() * 2),
        (whole[1].data_ptr(), whole[1].numel() * 2),
    ]
    assert KVPool.from_tensors([whole[0]], [whole[1]], regions=split).layout.regions == tuple(split)
    with pytest.raises(ConfigError, match=r"slab 1 is .* not inside one region"):
        KVPool.from_tensors([whole[0]], [whole[1]], regions=split[:1])


def test_two_storages_over_one_memory_are_one_region() -> None:
    buffer = bytearray(1024)
    k = torch.frombuffer(buffer, dtype=torch.uint8, count=600)[:256].view(4, 4, 2, 8)
    v = torch.frombuffer(buffer, dtype=torch.uint8, count=512, offset=512)[:256].view(4, 4, 2, 8)
    pool = KVPool.from_tensors([k], [v])
    assert pool.layout.regions == ((k.data_ptr(), 1024),)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_pool_says_where_its_tensors_are(device: str) -> None:
    pool = KVPool.create(PAGES, TOKENS, LAYERS, HEADS, DIM, device=device)
    found = str(torch.zeros(1, device=device).device)  # "cuda" by its number
    k, v = ([kind(layer) for layer in range(LAYERS)] for kind in (pool.k, pool.v))
    for described in (pool, KVPool.from_tensors(k, v)):
        assert (described.layout.device, described.device) == (found, found)


@GPU
def test_on_a_gpu_a_pool_and_written_pages_are_there_on_return() -> None:
    """A transport reads and writes them in no stream of torch's."""
    stream = torch.cuda.current_stream()
    torch.cuda._sleep(200_000_000)  # cycles: what is queued behind them is done much later
    pool = KVPool.create(PAGES, TOKENS, LAYERS, HEADS, DIM, device="cuda")
    assert stream.query()
    pool = KVPool.create(64, 64, 4, 8, 1024, device="cuda")
    data = torch.randint(0, 256, pool.read_pages(range(64)).shape, dtype=torch.uint8).cuda()
    pool.write_pages(range(64), data)  # 512 MiB: longer than launching it
    assert stream.query()
    assert torch.equal(pool.read_pages(range(64)), data.cpu())


def test_an_index_that_torch_would_wrap_round_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_device("cuda:0")
    with pytest.raises(ConfigError, match="finds 1 GPUs"):
        check_device("cuda:256")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_pool_on_cuda_without_a_gpu_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda', torch .* finds 0 GPUs"):
        make(device="cuda")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_a_pool_asks_for_huge_pages() -> None:
    """Copies between processes are 1.4 to 2.1 times as fast with them
    (results/transfer_small_pages.json)."""
    pool = KVPool.create(640, 16, 1, 8, 128)  # 40 MiB
    start, num_bytes = pool.layout.regions[0]
    asked, inside = 0, (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = max(int(match[1], 16), start), min(int(match[2], 16), start + num_bytes)
        elif line.startswith("VmFlags:") and "hg" in line.split() and inside[0] < inside[1]:
            asked += inside[1] - inside[0]
    assert asked >= num_bytes - 2 * (2 << 20)
