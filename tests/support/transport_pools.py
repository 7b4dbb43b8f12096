"""KV pools in numpy, in several memory orders, for tests of the transports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv.memory.kv_layout import KVLayout
from tests.support.mesh_pools import mesh_layout, moved, slab_views

ORDERS = ("layer_major", "page_major", "heads_first", "page_kv", "padded", "tokens_outer")


@dataclass(frozen=True)
class Shape:
    """A small model. The item is one byte, so a byte is an element."""

    num_layers: int = 2
    page_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    attention: str = "mha"


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


_ORDERS = {
    "heads_first": "heads before tokens", "page_kv": "K and V of a page together",
    "padded": "padded pages", "tokens_outer": "tokens before pages",
}  # fmt: skip


def make_pool(
    order: str,
    num_pages: int,
    shape: Shape = Shape(),
    dtype: str = "uint8",
    zeros: Zeros = np.zeros,
) -> NumpyPool:
    """A zeroed pool, in an order of `mesh_pools`, without canaries."""
    sizes = num_pages, shape.page_size, shape.num_layers, shape.num_kv_heads
    of = shape.attention, shape.head_dim
    layout, num_bytes = mesh_layout(_ORDERS.get(order, order), *sizes, *of, gap=0)
    memory = zeros((num_bytes,), np.uint8)
    real = moved(layout, memory.ctypes.data)
    return NumpyPool(real, slab_views(layout, memory), [memory])
