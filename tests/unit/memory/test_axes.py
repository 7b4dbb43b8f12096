"""Tensors described by the names of their axes: what agrees is a pool, what does not is refused."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from prefixkv.errors import ConfigError
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


K = ("page", "token", "head", "dim")
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (K, {"page_size": HEADS}, r'page_size is 2, but axis 1 \("token"\) has 4'),
    (K, {"num_kv_heads": 8}, r'num_kv_heads is 8, but axis 2 \("head"\) has 2'),
    (K, {"head_dim": 2 * DIM}, r'head_dim is 16, but axis 3 \("dim"\) has 8'),
    (K, {"axes": ("page", "head", "token", "dim"), **SAID}, r"page_size is 4, but axis 2"),
    (K, {"axes": ("dim", "head", "token", "page")}, 'slab 0 has a stride of 64 in its axis "dim"'),
    (K, {"axes": ("page", "token", "head")}, r"axes are .*, must be page, token, head, dim in any"),
    (K, {"axes": ("page", "token", "head", "head")}, "must be different ones of page, token"),
    (K, {"axes": ("block", "token", "head", "dim")}, "must be different ones of page, token"),
    (K, {"axes": ("page", "token", "head", "packed")}, "must be page, token, head, dim in any"),
    (K, {"axes": ("kv", *K)}, 'with k and v apart no tensor has an axis "kv"'),
    (K[:3], {}, "the tensors have 3 dimensions, must have 4: page, token, head, dim"),
]


@pytest.mark.parametrize(("shape", "said", "message"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_does_not_agree_is_refused(
    shape: tuple[str, ...], said: dict[str, Any], message: str
) -> None:
    k, v = tensors(shape), tensors(shape)
    with pytest.raises(ConfigError, match=message):
        KVPool.from_tensors(k, v, **said)


def test_an_axis_of_k_and_v_has_two_and_one_head_is_no_latent_vector() -> None:
    axes = ("page", "kv", "token", "head", "dim")
    with pytest.raises(ConfigError, match=r'K and V is 2, but axis 1 \("kv"\) has 3'):
        KVPool.from_tensors(tensors(axes, kv=3), axes=axes)
    said = 'must be page, token, dim in any order, since v is missing: give v, or an axis "kv"'
    with pytest.raises(ConfigError, match=said):
        KVPool.from_tensors(tensors(K, head=1), axes=K)


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


OPAQUE: dict[str, Any] = {"page_size": TOKENS, "axes": VLLM, "opaque": "amx"}
NO_BLOCKS: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"num_kv_heads": heads, "axes": ("page", "token", "dim", "packed"), "page_size": HEADS},
            f"num_kv_heads is {heads}, must be in",
        )
        for heads in (0, -1)
    ),
    ({"page_size": 2 * TOKENS}, r'page_size is 8, but axis 2 \("token"\) has 4'),
    ({"num_kv_heads": 1}, r'num_kv_heads is 1, but axis 1 \("head"\) has 2'),
    ({"head_dim": DIM}, "has 128 elements, must have 8 for each of 4 tokens and 2 heads"),
    ({"page_size": None}, 'opaque pages need page_size and axes, among them "page"'),
    ({"axes": None}, "opaque pages need page_size and axes"),
    ({"axes": ("token", "head", "dim", "packed")}, 'axes, among them "page"'),
    ({"axes": ("page", "packed")}, "the tensors have 4 dimensions, must have 2: page, packed"),
    ({"axes": ("head", "page", "token", "dim")}, r"page_size is 4, but axis 2|stride of"),
    ({"opaque": True}, "opaque is True, must be a str, the name of the format"),
    ({"opaque": ""}, "must be page, token, dim in any order"),
    (
        {"page_size": 3, "axes": ("page", "head", "dim", "packed")},
        "has 128 elements, must have equally many for each of 3 tokens and 2 heads",
    ),
    (
        {"page_size": 0, "axes": ("page", "head", "dim", "packed")},
        r"page_size is 0, must be in \[1",
    ),
]


@pytest.mark.parametrize(("said", "message"), NO_BLOCKS, ids=[case[1] for case in NO_BLOCKS])
def test_opaque_pages_that_do_not_agree_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVPool.from_tensors(blocks(), **OPAQUE | said)


@pytest.mark.parametrize(
    ("axes", "row", "message"),
    [
        (VLLM, DIM, 'a stride of 16 in its axis "token", must be 8: an opaque page is one run'),
        (("head", "page", "token", "packed"), 2 * DIM, 'a stride of 320 in its axis "head", must'),
        (("page", "head", "token", "kv", "packed"), DIM, 'a stride of 16 in its axis "token"'),
    ],
)
def test_a_page_with_gaps_or_in_pieces_is_not_opaque(
    axes: tuple[str, ...], row: int, message: str
) -> None:
    padded = 2 * DIM if "kv" not in axes else DIM
    layers = [layer[..., :row] for layer in tensors(axes, packed=padded)]
    with pytest.raises(ConfigError, match=f"slab 0 has {message}"):
        KVPool.from_tensors(layers, page_size=TOKENS, axes=axes, opaque="amx")
