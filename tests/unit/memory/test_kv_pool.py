"""Pools against the memory itself: what a layout says lies at an address is read there. Of tensors
by the names of their axes, of numpy arrays, and of several groups of layers."""

import ctypes
import gc
import itertools
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool, PoolGroup, check_device
from prefixkv.memory.state_layout import StateTensor
from prefixkv.memory.state_pool import StatePool
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


SIZES = {"page": PAGES, "token": TOKENS, "head": HEADS, "dim": DIM, "kv": 2}
SAID: dict[str, Any] = {"page_size": TOKENS, "num_kv_heads": HEADS, "head_dim": DIM}
AXIS_ORDERS = [(*order, "dim") for order in permutations(("page", "token", "head", "kv"))]
VLLM = ("page", "head", "token", "packed")  # K and V of a block as its kernels pack them


def tensors(axes: tuple[str, ...], **sizes: int) -> list[torch.Tensor]:
    """A tensor a layer with these axes, in memory as named."""
    return [distinct(tuple((SIZES | sizes)[axis] for axis in axes), "uint8") for _ in range(LAYERS)]


def blocks(**sizes: int) -> list[torch.Tensor]:
    return tensors(VLLM, **({"packed": 2 * DIM} | sizes))


@pytest.mark.parametrize("axes", AXIS_ORDERS, ids="-".join)
def test_names_say_which_axis_is_which(axes: tuple[str, ...]) -> None:
    layers = tensors(axes)
    pool = KVPool.from_tensors(layers, axes=axes, **SAID)
    assert pool.layout.attention == "mha"
    assert pool.layout.num_layers == LAYERS
    order = [axes.index(axis) for axis in ("kv", "page", "token", "head", "dim")]
    for layer, tensor in enumerate(layers):
        k, v = tensor.permute(order)
        assert torch.equal(pool.k(layer), k)
        assert torch.equal(pool.v(layer), v)
        assert (pool.k(layer).data_ptr(), pool.v(layer).data_ptr()) == (k.data_ptr(), v.data_ptr())


@pytest.mark.parametrize(
    "axes", [("page", "head", "token", "dim"), ("head", "token", "page", "dim")]
)
def test_k_and_v_apart_and_latent_vectors_have_names_too(axes: tuple[str, ...]) -> None:
    k, v = tensors(axes), tensors(axes)
    pool = KVPool.from_tensors(k, v, axes=axes, **SAID)
    order = [axes.index(axis) for axis in ("page", "token", "head", "dim")]
    assert torch.equal(pool.v(1), v[1].permute(order))
    latent = tuple(axis for axis in axes if axis != "head")
    rows = tensors(latent)
    mla = KVPool.from_tensors(rows, axes=latent, **SAID | {"num_kv_heads": None})
    assert mla.layout.attention == "mla"
    order = [latent.index(axis) for axis in ("page", "token", "dim")]
    assert torch.equal(mla.latent(0), rows[0].permute(order))


# --- opaque pages ---------------------------------------------------------------------------------


def test_an_opaque_page_is_one_run_of_the_bytes_that_it_has() -> None:
    layers = blocks()
    pool = KVPool.from_tensors(layers, page_size=TOKENS, axes=VLLM, opaque="amx")
    layout = pool.layout
    assert (layout.opaque, layout.attention) == ("amx", "fused")
    assert (layout.page_size, layout.num_kv_heads, layout.head_dim) == (TOKENS, HEADS, 2 * DIM)
    assert len(layout.slabs) == LAYERS
    assert layout.slab_page_bytes == layers[0][0].numel()
    data = pool.read_pages([3, 1])
    for layer, tensor in enumerate(layers):
        assert torch.equal(data[:, layer].flatten(), tensor[[3, 1]].flatten())
    pool.write_pages([0, 2], data)
    assert all(torch.equal(tensor[[0, 2]], tensor[[3, 1]]) for tensor in layers)


def test_the_stride_of_an_axis_of_one_element_means_nothing() -> None:
    tensor = torch.zeros(3, 1, 64).as_strided((3, 1, 64), (64, 7, 1))
    axes = ("page", "head", "packed")
    layout = KVPool.from_tensors([tensor], page_size=4, axes=axes, opaque="x").layout
    assert (layout.num_kv_heads, layout.head_dim) == (1, 16)


@pytest.mark.parametrize(
    "axes", [("kv", "page", "head", "packed"), ("page", "kv", "packed", "head")]
)
def test_opaque_pages_may_keep_k_and_v_in_two_runs(axes: tuple[str, ...]) -> None:
    layers = tensors(axes, packed=TOKENS * DIM)
    pool = KVPool.from_tensors(layers, page_size=TOKENS, axes=axes, head_dim=DIM, opaque="isa")
    assert pool.layout.attention == "mha"
    for layer, tensor in enumerate(layers):
        for kv, half in enumerate(tensor.unbind(axes.index("kv"))):
            i = 2 * layer + kv
            assert torch.equal(pool.read_pages([4])[0, i].flatten(), half[4].flatten())


def test_pages_of_bytes_need_no_axis_but_the_page() -> None:
    """Rows with their scales inside, and the padding behind each page left out."""
    layers = [layer[:, :132] for layer in tensors(("page", "packed"), packed=140)]
    said = {"page_size": 4, "axes": ("page", "packed"), "opaque": "rows of 32 and a scale"}
    layout = KVPool.from_tensors(layers, **said).layout
    assert (layout.num_kv_heads, layout.head_dim, layout.page_bytes) == (1, 33, LAYERS * 132)
    two = KVPool.from_tensors([layer[:, :128] for layer in layers], **said, num_kv_heads=2).layout
    assert (two.num_kv_heads, two.head_dim, two.slabs[0].page_stride) == (2, 16, 140)


SHAPE = (8, 4, 2, 16)  # pages, tokens, heads, elements


def zeros(dtype: Any = np.float32) -> Any:
    return np.zeros(SHAPE, dtype)


def test_a_pool_shares_the_memory_of_numpy_arrays(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "kv", np.float32, "w+", shape=SHAPE)
    for k, v in (
        ([zeros()], [zeros()]),
        ([mapped], [zeros()]),
        (zeros()[None], torch.zeros(1, *SHAPE)),
    ):
        pool = KVPool.from_tensors(k, v, page_size=4)
        assert pool.layout.slabs[0].base == (k[0] if isinstance(k, list) else k).ctypes.data
        pool.k(0)[3] = 7.0
        assert (np.asarray(k[0])[3] == 7.0).all()
        k[0][5] = 2.0
        pool.write_pages([1], pool.read_pages([5]).numpy())
        assert (np.asarray(k[0])[1] == 2.0).all()


def test_a_state_pool_shares_the_memory_of_numpy_arrays() -> None:
    view = np.zeros((3, 2, 4), np.float32)
    pool = StatePool([StateTensor("conv", 0, 2, (4,))], [view])
    pool.view("conv", 0)[1] = 5.0
    assert (view[1] == 5.0).all()
    assert pool.num_slots == 3


def test_pages_to_write_may_be_read_only() -> None:
    pool = KVPool.from_tensors([zeros()], [zeros()])
    data = pool.read_pages([0]).numpy()
    data.flags.writeable = False
    pool.write_pages([2], data)


def pool(num_pages: int = 8, page_size: int = 4, heads: int = 2, dim: int = 8) -> KVPool:
    return KVPool.create(num_pages, page_size, 2, heads, dim)


def grouped() -> KVPool:
    draft = pool(heads=1, dim=4)
    return pool().with_groups(PoolGroup("last", pool(5, heads=4), 9), PoolGroup("draft", draft))


def test_a_pool_of_groups_describes_all_of_its_memory() -> None:
    made = grouped()
    layout = made.layout
    assert [group.name for group in layout.windows] == ["last"]
    assert [group.name for group in layout.aligned] == ["draft"]
    assert layout.num_pages == 8
    assert layout.windows[0].layout.num_pages == 5
    for group in made.groups:
        assert set(group.pool.layout.regions) <= set(layout.regions)
    assert made.group("last").layout.num_kv_heads == 4
    with pytest.raises(KeyError):
        made.group("none")


def test_a_layout_with_groups_travels_whole_and_one_without_costs_no_byte() -> None:
    plain, layout = pool().layout, grouped().layout
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout
    assert b"groups" not in msgspec.msgpack.encode(plain)
    layout.validate()


def one_arena(gap: int) -> tuple[KVPool, KVPool]:
    """Two pools in one storage, the second `gap` bytes behind the first one's begin."""
    arena = torch.zeros(4096, dtype=torch.uint8)
    views = [arena[at : at + 256].view(4, 4, 2, 8) for at in (0, 1024)]
    others = [arena[at : at + 256].view(4, 4, 2, 8) for at in (gap, 1024 + gap)]
    return KVPool.from_tensors(views[:1], views[1:]), KVPool.from_tensors(others[:1], others[1:])


def test_groups_may_lie_in_one_arena() -> None:
    first, second = one_arena(256)
    made = first.with_groups(PoolGroup("last", second, 9))
    assert len(made.layout.regions) == 1


def test_a_group_in_the_first_group_s_memory_has_all_of_its_pages() -> None:
    first = pool()
    layout = first.with_groups(PoolGroup("w", first, 9)).layout
    (window,) = layout.groups
    fewer = msgspec.structs.replace(window.layout, num_pages=7)
    group = msgspec.structs.replace(window, layout=fewer)
    with pytest.raises(ConfigError, match="as many pages, 8"):
        msgspec.structs.replace(layout, groups=(group,)).validate()


def test_a_peer_s_group_outside_the_pool_s_regions_is_refused() -> None:
    # All are kept: memory that was given back may be another pool's next.
    here, other, far = grouped(), pool(), pool(5, heads=4)
    layout = here.layout
    (last, draft) = layout.groups
    elsewhere = msgspec.structs.replace(layout, regions=other.layout.regions)
    with pytest.raises(ConfigError):
        elsewhere.validate()
    mine = msgspec.structs.replace(last, layout=far.layout)
    with pytest.raises(ConfigError, match=r"its region is .* not inside one region"):
        msgspec.structs.replace(layout, groups=(mine, draft)).validate()
