"""KV tensors as engines lay them out, each as per-layer views [page, token, head, dim] (mla: [page,
token, dim])."""

from __future__ import annotations

from collections.abc import Callable

import torch

PAGES, TOKENS, LAYERS, HEADS, DIM = 5, 4, 3, 2, 8
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8"]

Views = tuple[list[torch.Tensor], list[torch.Tensor] | None]


def distinct(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Bytes that repeat with no period that a stride could have."""
    element = getattr(torch, dtype)
    count = torch.Size(shape).numel() * element.itemsize
    raw = (torch.arange(count, dtype=torch.int64) * 2654435761 >> 13).to(torch.uint8)
    return raw.view(element).view(shape)


def _tensor_a_layer(dtype: str) -> Views:
    k = [distinct((PAGES, TOKENS, HEADS, DIM), dtype) for _ in range(LAYERS)]
    return k, [distinct((PAGES, TOKENS, HEADS, DIM), dtype) for _ in range(LAYERS)]


def _k_and_v_of_a_page_together(dtype: str) -> Views:
    tensors = [distinct((PAGES, 2, TOKENS, HEADS, DIM), dtype) for _ in range(LAYERS)]
    return [t[:, 0] for t in tensors], [t[:, 1] for t in tensors]


def _heads_before_tokens(dtype: str) -> Views:
    tensors = [distinct((2, PAGES, HEADS, TOKENS, DIM), dtype) for _ in range(LAYERS)]
    return [t[0].transpose(1, 2) for t in tensors], [t[1].transpose(1, 2) for t in tensors]


def _heads_before_pages(dtype: str) -> Views:
    tensors = [distinct((2, HEADS, PAGES, TOKENS, DIM), dtype) for _ in range(LAYERS)]
    return [t[0].permute(1, 2, 0, 3) for t in tensors], [t[1].permute(1, 2, 0, 3) for t in tensors]


def _all_layers_of_a_token_together(dtype: str) -> Views:
    whole = distinct((PAGES * TOKENS, LAYERS, 2, HEADS, DIM), dtype).unflatten(0, (PAGES, TOKENS))
    return [whole[:, :, layer, 0] for layer in range(LAYERS)], [
        whole[:, :, layer, 1] for layer in range(LAYERS)
    ]


def _k_and_v_of_a_head_together(dtype: str) -> Views:
    tensors = [distinct((PAGES, TOKENS, HEADS, 2 * DIM), dtype) for _ in range(LAYERS)]
    return [t[..., :DIM] for t in tensors], [t[..., DIM:] for t in tensors]


def _padded_heads_every_other_page(dtype: str) -> Views:
    tensors = [distinct((2, 2 * PAGES, TOKENS, HEADS, DIM + 5), dtype) for _ in range(LAYERS)]
    return [t[0, 1::2, :, :, :DIM] for t in tensors], [t[1, 1::2, :, :, :DIM] for t in tensors]


def _mla(dtype: str) -> Views:
    return [distinct((PAGES, TOKENS, DIM), dtype) for _ in range(LAYERS)], None


def _mla_padded(dtype: str) -> Views:
    return [
        distinct((PAGES, TOKENS, DIM + 3), dtype)[..., 1 : DIM + 1] for _ in range(LAYERS)
    ], None


ENGINES: dict[str, Callable[[str], Views]] = {
    "a tensor a layer": _tensor_a_layer,
    "K and V of a page together": _k_and_v_of_a_page_together,
    "heads before tokens": _heads_before_tokens,
    "heads before pages": _heads_before_pages,
    "all layers of a token together": _all_layers_of_a_token_together,
    "K and V of a head together": _k_and_v_of_a_head_together,
    "padded heads, every other page": _padded_heads_every_other_page,
    "mla": _mla,
    "mla, padded": _mla_padded,
}
