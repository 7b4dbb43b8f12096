"""Tensors described by the names of their axes: what agrees is a pool, what does not is refused."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from prefixkv.memory.kv_pool import KVPool
from tests.support.engine_tensors import DIM, HEADS, LAYERS, PAGES, TOKENS, distinct

SIZES = {"page": PAGES, "token": TOKENS, "head": HEADS, "dim": DIM, "kv": 2}
SAID: dict[str, Any] = {"page_size": TOKENS, "num_kv_heads": HEADS, "head_dim": DIM}
ORDERS = [(*order, "dim") for order in permutations(("page", "token", "head", "kv"))]
VLLM = ("page", "head", "token", "packed")  # K and V of a block as its kernels pack them


def tensors(axes: tuple[str, ...], **sizes: int) -> list[torch.Tensor]:
    """A tensor a layer with these axes, in memory as named."""
    return [distinct(tuple((SIZES | sizes)[axis] for axis in axes), "uint8") for _ in range(LAYERS)]


def blocks(**sizes: int) -> list[torch.Tensor]:
    return tensors(VLLM, **({"packed": 2 * DIM} | sizes))


@pytest.mark.parametrize("axes", ORDERS, ids="-".join)
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
