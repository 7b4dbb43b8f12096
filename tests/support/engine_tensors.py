"""KV tensors as engines lay them out, each as per-layer views [page, token, head, dim] (mla: [page,
token, dim]), in every order of `mesh_pools`."""

from collections.abc import Callable
from functools import partial

import torch

from tests.support.mesh_pools import BASE, ORDERS, mesh_layout

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
