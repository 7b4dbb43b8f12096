"""KV pools in numpy, in several memory orders, for tests of the transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv.memory.kv_layout import KVLayout, Slab

ORDERS = ("layer_major", "page_major", "heads_first", "page_kv", "padded", "tokens_outer")


@dataclass(frozen=True)
class Shape:
    """A small model. The item is one byte, so a byte is an element."""

    num_layers: int = 2
    page_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    attention: str = "mha"

    @property
    def num_slabs(self) -> int:
        return self.num_layers * (2 if self.attention == "mha" else 1)


@dataclass
class NumpyPool:
    """A pool and its layout. `views` is a [page, token, head, byte] array a slab, whatever the
    memory's order."""

    layout: KVLayout
    views: list[npt.NDArray[np.uint8]] = field(repr=False)
    memory: list[npt.NDArray[np.uint8]] = field(repr=False)

    def fill(self, seed: int) -> None:
        """Random bytes, none of them 0, so that a byte never written is seen."""
        rng = np.random.default_rng(seed)
        for view in self.views:
            view[...] = rng.integers(1, 256, view.shape, dtype=np.uint8)

    def page(self, page: int) -> bytes:
        """A page in the model's order: slab, token, head."""
        return b"".join(view[page].tobytes() for view in self.views)

    def pages(self) -> list[bytes]:
        return [self.page(p) for p in range(self.layout.num_pages)]


Zeros = Callable[[tuple[int, ...], Any], npt.NDArray[np.uint8]]


def shared_zeros(shape: tuple[int, ...], dtype: Any = np.uint8) -> npt.NDArray[np.uint8]:
    """As np.zeros, in memory that another process may map."""
    from prefixkv.memory.kv_pool import shared_bytes

    array: npt.NDArray[np.uint8] = shared_bytes(prod(shape)).numpy().view(dtype).reshape(shape)
    return array


def make_pool(
    order: str,
    num_pages: int,
    shape: Shape = Shape(),
    dtype: str = "uint8",
    zeros: Zeros = np.zeros,
) -> NumpyPool:
    """A zeroed pool.

    `layer_major`: a region a slab, [page, token, head]. `page_major`: one region, [page, slab,
    token, head]. `heads_first`: as layer_major with [page, head, token]. `page_kv`: a region a
    layer, [page, K or V, token, head]. `padded`: a gap after each page. `tokens_outer`: [token,
    page, head] in each slab.
    """
    slabs, layers = shape.num_slabs, shape.num_layers
    per_layer = slabs // layers
    pages, tokens, heads, dim = num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim
    if order == "page_major":
        memory = [zeros((pages, slabs, tokens, heads, dim), np.uint8)]
        views = [memory[0][:, s] for s in range(slabs)]
    elif order == "layer_major":
        memory = [zeros((pages, tokens, heads, dim), np.uint8) for _ in range(slabs)]
        views = list(memory)
    elif order == "heads_first":
        memory = [zeros((pages, heads, tokens, dim), np.uint8) for _ in range(slabs)]
        views = [m.transpose(0, 2, 1, 3) for m in memory]
    elif order == "page_kv":
        memory = [zeros((pages, per_layer, tokens, heads, dim), np.uint8) for _ in range(layers)]
        views = [memory[s // per_layer][:, s % per_layer] for s in range(slabs)]
    elif order == "padded":
        memory = [zeros((pages, tokens + 1, heads, dim), np.uint8) for _ in range(slabs)]
        views = [m[:, :tokens] for m in memory]
    elif order == "tokens_outer":
        memory = [zeros((tokens, pages, heads, dim), np.uint8) for _ in range(slabs)]
        views = [m.transpose(1, 0, 2, 3) for m in memory]
    else:
        raise ValueError(order)
    layout = KVLayout(
        num_pages=num_pages,
        page_size=tokens,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        attention=shape.attention,
        order=order if order in ("layer_major", "page_major") else "strided",
        slabs=tuple(Slab(v.ctypes.data, v.strides[0], v.strides[1], v.strides[2]) for v in views),
        regions=tuple((m.ctypes.data, m.nbytes) for m in memory),
    )
    layout.validate()
    return NumpyPool(layout, views, memory)
