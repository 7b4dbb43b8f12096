"""KV tensors as engines lay them out, each as per-layer views [page, token, head, dim] (mla:
[page, token, dim]), in every order of `mesh_pools`; and memory in which a rank's pool lies, at
real addresses, for tests of the copies."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from tests.support.mesh_pools import BASE, ORDERS, elements, mesh_layout, moved

PAGES, TOKENS, LAYERS, HEADS, DIM = 5, 4, 3, 2, 8
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8"]

Views = tuple[list[torch.Tensor], list[torch.Tensor] | None]


def distinct(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Bytes that repeat with no period that a stride could have."""
    element = getattr(torch, dtype)
    count = torch.Size(shape).numel() * element.itemsize
    raw = (torch.arange(count, dtype=torch.int64) * 2654435761 >> 13).to(torch.uint8)
    return raw.view(element).view(shape)


def _views(order: str, attention: str, dtype: str) -> Views:
    size, heads = getattr(torch, dtype).itemsize, HEADS if attention == "mha" else 1
    sizes = PAGES, TOKENS, LAYERS, heads
    layout, num_bytes = mesh_layout(order, *sizes, attention, DIM * size)
    raw = distinct((num_bytes // size,), dtype)
    views = [
        raw.as_strided(
            (PAGES, TOKENS, heads, DIM),
            (slab.page_stride // size, slab.token_stride // size, slab.head_stride // size, 1),
            (slab.base - BASE) // size,
        )
        for slab in layout.slabs
    ]
    if attention == "mla":
        return [view[:, :, 0] for view in views], None
    return views[::2], views[1::2]


ENGINES: dict[str, Callable[[str], Views]] = {
    f"{attention}, {order}": partial(_views, order, attention)
    for order in ORDERS
    for attention in ("mha", "mla")
}


class Memory:
    """A rank's memory on a device, with the layout that says where it really is. Every byte
    random."""

    def __init__(self, made: tuple[KVLayout, int], device: str, seed: int = 0) -> None:
        virtual, num_bytes = made
        raw = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
        self.tensor = torch.from_numpy(raw).to(device)
        self.virtual = virtual
        self.layout = moved(virtual, self.tensor.data_ptr())

    def bytes(self) -> np.ndarray:
        return self.tensor.cpu().numpy().copy()

    def places(
        self, pages: tuple[int, ...], part: Shard, unit_tokens: int, start: int, stop: int
    ) -> np.ndarray:
        """Where units `start` to `stop` of a request in `pages` lie, in the order of the stage:
        flat."""
        kinds = self.virtual.slabs_per_layer
        at = elements(self.virtual, pages, stop * unit_tokens)[:, start * unit_tokens :]
        layers = slice(part.first_layer * kinds, (part.first_layer + part.num_layers) * kinds)
        return at[layers, :, part.first_head : part.first_head + part.num_heads].ravel()
