"""Attention on the paged pool, as transformers' `AttentionInterface` calls it.

A forward has the new tokens of several sequences, packed into one row: [1, N]. A `Plan`, made once
and used by every layer, has the places of their KV and the pages that each sequence reads.
Sequences attend one after the other: the K and V of each are gathered into one small buffer, which
on a CPU is still in its cache when attention reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from prefixkv import KVPool
from prefixkv.engines.hf.layers import Row, StateMemory, StatePlan
from prefixkv.errors import ConfigError
from prefixkv.spi import Pages, pages_for, slot_mapping

NAME: Final = "prefixkv"  # the attention's name in transformers
_QUERIES: Final = 256  # new tokens per mask: keys after the last of them are not computed


class FlatPool:
    """A pool's memory as rows of pages, to gather from, and of tokens, to write to. One thread's.

    Layers are numbered as the model's. `pages[layer]` is [R, page_size * heads * dim], and
    `tokens[layer]` the same memory as [R * page_size, heads * dim]. In all layers the K of page p
    is row `k_row + p * page_rows`, its V row `v_row + p * page_rows`.

    Args:
        layers: the model's layers whose KV it has, in the pool's order; None: all, from 0.
        window: tokens that a token of these layers sees, itself among them; 0: all before it.
        sliding: the memory of the layers with a window, where those are a group.
    Raises ConfigError where a page of K is not one run of memory, token by token, or K and V are
    not in one tensor (`KVPool.create` makes suitable pools); or for another number of layers.
    """

    def __init__(
        self,
        pool: KVPool,
        layers: Sequence[int] | None = None,
        window: int = 0,
        sliding: FlatPool | None = None,
    ) -> None:
        self.layout = layout = pool.layout
        self.window, self.sliding = window, sliding
        width = layout.page_size * layout.num_kv_heads * layout.head_dim
        layers = range(layout.num_layers) if layers is None else layers
        if len(layers) != layout.num_layers:
            raise ConfigError(
                f"the pool has {layout.num_layers} layers, the model {len(layers)} with KV"
            )
        self.pages: dict[int, torch.Tensor] = {}
        self.tokens: dict[int, torch.Tensor] = {}
        places = set()
        for place, layer in enumerate(layers):
            k, v = pool.k(place), pool.v(place)
            # One flat view over K and V together: both are then gathered by one `index_select`.
            # Every offset must be a whole number of rows for that.
            begin = min(k.storage_offset(), v.storage_offset())
            offsets = (k.storage_offset() - begin, v.storage_offset() - begin, k.stride(0))
            if (
                k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
                or k.stride() != v.stride()
                or not k[0].is_contiguous()
                or any(offset % width for offset in offsets)
            ):
                raise ConfigError("the engine needs a pool as KVPool.create makes them")
            k_row, v_row, page_rows = (offset // width for offset in offsets)
            rows = max(k_row, v_row) + (layout.num_pages - 1) * page_rows + 1
            flat = torch.as_strided(k, (rows, width), (width, 1), begin)
            self.pages[layer] = flat
            self.tokens[layer] = flat.view(rows * layout.page_size, -1)
            places.add((k_row, v_row, page_rows))
        # One plan serves all layers, so row numbers must be the same in all of them.
        if len(places) != 1:
            raise ConfigError("the engine needs a pool whose layers are alike")
        self.k_row, self.v_row, self.page_rows = places.pop()
        self._buffer = flat.new_empty(0, width)

    def scratch(self, num_rows: int) -> torch.Tensor:
        """Return [num_rows, page_size * heads * dim], the same memory as long as it is enough."""
        if len(self._buffer) < num_rows:
            self._buffer = self._buffer.new_empty(num_rows, self._buffer.shape[1])
        return self._buffer[:num_rows]


class _Block(NamedTuple):
    """Some new tokens of one sequence, and the keys that one of them sees at least, as views."""

    k: torch.Tensor  # [1, heads, keys, dim]
    v: torch.Tensor
    mask: torch.Tensor | None  # bool [queries, keys]; None: plainly causal, or one query


class _Part(NamedTuple):
    rows: torch.Tensor  # rows of the pages that hold all its KV, K then V: [2 * pages]
    copies: torch.Tensor  # the memory into which they are gathered
    blocks: list[_Block]


class _Span(NamedTuple):
    """New tokens [start, end) of a sequence, counted from the first token of its pages."""

    pages: Pages
    start: int
    end: int


class Plan:
    """The places of one forward's KV and states. `positions` is int64 [1, N]; `last` is int64
    [rows], the index of each row's last token among all. `groups` is by layer; a layer that is not
    there keeps no KV."""

    def __init__(
        self,
        flat: FlatPool,
        rows: Sequence[Row],
        memory: StateMemory | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.longest = max(row.end for row in rows)
        self.states = None if memory is None else StatePlan(memory, rows, device)
        at = [np.arange(row.start, row.end) for row in rows]
        self.positions = torch.from_numpy(np.concatenate(at))[None].to(device)
        self.last = torch.from_numpy(np.cumsum([len(row.tokens) for row in rows]) - 1).to(device)
        groups = [GroupPlan(flat, [_Span(row.pages, row.start, row.end) for row in rows], device)]
        if (sliding := flat.sliding) is not None:
            groups.append(GroupPlan(sliding, [_seen(row, sliding) for row in rows], device))
        self.groups = {layer: group for group in groups for layer in group.flat.pages}

    def erase(self, new: torch.Tensor) -> None:
        """Set what was written of some new tokens, bool [N], to zero: no mask hides a NaN."""
        for layer, group in self.groups.items():
            for to in group.places:
                group.flat.tokens[layer].index_fill_(0, to[new], 0)


def _seen(row: Row, flat: FlatPool) -> _Span:
    """Return the pages of the window group that the new tokens see."""
    assert row.window is not None
    size, (first, ids) = flat.layout.page_size, row.window
    begin, stop = max(0, row.start + 1 - flat.window) // size, pages_for(row.end, size)
    # Pages of other tokens would answer wrongly and raise nothing.
    assert first <= begin < stop <= first + len(ids), (first, len(ids), begin, stop)
    skipped = begin * size
    return _Span(ids[begin - first : stop - first], row.start - skipped, row.end - skipped)


class GroupPlan:
    """The part of a `Plan` for the layers of one pool."""

    def __init__(self, flat: FlatPool, spans: Sequence[_Span], device: torch.device | str) -> None:
        self.flat = flat
        size, heads, dim = flat.layout.page_size, flat.layout.num_kv_heads, flat.layout.head_dim
        # 1. Places to write to. Slots are counted in pages of the pool; a token's row is counted in
        # its memory, where K and V of a page need not be adjacent.
        rows, starts, ends = zip(*spans, strict=True)
        slots = slot_mapping(rows, starts, ends, size)
        tokens = slots // size * flat.page_rows * size + slots % size
        k_and_v = flat.k_row, flat.v_row
        self.places = [torch.from_numpy(tokens + row * size).to(device) for row in k_and_v]
        # 2. Pages to read. The memory of the longest sequence is made first: a later, larger one
        # would replace it.
        flat.scratch(2 * max(pages_for(span.end, size) for span in spans))
        self._parts: list[_Part] = []
        self._sizes: list[int] = []  # queries of each block
        for pages, start, end in spans:
            firsts = pages[: pages_for(end, size)].astype(np.int64) * flat.page_rows
            page_rows = torch.from_numpy(np.concatenate([firsts + row for row in k_and_v]))
            copies = flat.scratch(len(page_rows))
            kv = copies.view(2, 1, -1, heads, dim).transpose(2, 3)
            blocks: list[_Block] = []
            for first in range(start, end, _QUERIES):
                last = min(first + _QUERIES, end)
                seen_from = max(0, first + 1 - flat.window) if flat.window else 0
                k, v = kv[..., seen_from:last, :]
                mask = None
                if last - first > 1:  # one query sees all of these keys
                    mask = _mask(first, last, seen_from, window=flat.window, device=device)
                blocks.append(_Block(k, v, mask))
                self._sizes.append(last - first)
            self._parts.append(_Part(page_rows.to(device), copies, blocks))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new KV, and return [1, N, query heads, dim]: each new token attends to its
        sequence up to itself.

        query: [1, query heads, N, dim]; key and value: [1, heads, N, dim]; sinks: [query heads],
        one more logit of each head, of value zero.
        """
        # 1. Write first, since a new token attends to itself, and is read from its page.
        tokens = self.flat.tokens[layer]
        for to, new in zip(self.places, (key, value), strict=True):
            tokens.index_copy_(0, to, new[0].transpose(0, 1).flatten(1))
        # 2. Attend.
        source, outs = self.flat.pages[layer], list[torch.Tensor]()
        _, heads, num, dim = query.shape
        grouped = query[0].transpose(0, 1).reshape(num, self.flat.layout.num_kv_heads, -1, dim)
        queries = iter(torch.split(grouped, self._sizes))
        for part in self._parts:
            torch.index_select(source, 0, part.rows, out=part.copies)
            outs += [_attend_block(next(queries), block, scale, sinks) for block in part.blocks]
        return torch.cat(outs).reshape(1, num, heads, dim)


def _mask(
    first: int, last: int, seen_from: int, window: int, device: torch.device | str
) -> torch.Tensor | None:
    """Return which keys, from `seen_from` on, the new tokens [first, last) of a sequence see; None
    where all is plainly causal, which SDPA needs no mask for."""
    if not (first or (window and last > window)):
        return None
    seen = torch.ones(last - first, last - seen_from, dtype=torch.bool, device=device)
    mask = seen.tril_(first - seen_from)
    return mask.triu_(first - seen_from + 1 - window) if window else mask


def _attend_block(
    q: torch.Tensor, block: _Block, scale: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q and the result: [new, heads, group, dim], the query heads of a group beside each other."""
    num, kv_heads, group, dim = q.shape
    several = num > 1
    if sinks is not None:
        out = _attend_with_sinks(q, block, scale, sinks)
    else:
        # One token's query heads are the queries of a group, so that K is read once. Of several
        # tokens: [1, query heads, new, dim].
        out = F.scaled_dot_product_attention(
            q.flatten(1, 2).transpose(0, 1)[None] if several else q, block.k, block.v,
            attn_mask=block.mask, is_causal=several and block.mask is None, scale=scale,
            enable_gqa=several,
        )  # fmt: skip
    return out.view(kv_heads, group, num, dim).permute(2, 0, 1, 3) if several else out


def _attend_with_sinks(
    q: torch.Tensor, block: _Block, scale: float | None, sinks: torch.Tensor
) -> torch.Tensor:
    """Return [1, heads, group * new, dim]. SDPA has no sinks."""
    num, kv_heads, group, dim = q.shape
    k, v, mask = block.k[0], block.v[0], block.mask
    if mask is None and num > 1:
        mask = torch.ones(num, num, dtype=torch.bool, device=q.device).tril_()
    rows = q.permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = (rows @ k.mT).float() * (dim**-0.5 if scale is None else scale)
    scores = scores.view(kv_heads, group, num, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    sink = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, num, 1)
    shares = torch.cat([scores, sink], 3).softmax(3)[..., :-1]
    return (shares.flatten(1, 2).to(v.dtype) @ v)[None]


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    prefixkv_plan: Plan | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: see `GroupPlan.attend`. Raises ConfigError for a feature that is
    not supported: ignored, it would give wrong answers and wrong KV."""
    name = type(module).__name__
    if prefixkv_plan is None:
        raise ConfigError(f"{name} calls its attention without what the engine gave the model")
    if attention_mask is not None:
        raise ConfigError(f"{name} has an attention mask of its own")
    for what in ("softcap", "position_bias", "alibi"):
        if options.get(what) is not None:
            raise ConfigError(f"{name} needs {what} in attention, which the engine does not have")
    layer = module.layer_idx
    group = prefixkv_plan.groups.get(layer)
    if group is None:
        raise ConfigError(f"{name} attends in layer {layer}, which is to have no KV")
    window, ours = options.get("sliding_window"), group.flat.window
    # Where all layers keep every token, a window that is as long as the text hides nothing.
    if window != ours if ours else window is not None and prefixkv_plan.longest > window:
        raise ConfigError(f"{name} attends to {window} tokens, the engine to {ours or 'all'}")
    layout = group.flat.layout
    wanted = (layout.num_kv_heads, layout.head_dim)
    for kind, tensor in (("K", key), ("V", value)):
        if (tensor.shape[1], tensor.shape[3]) != wanted:
            shape = tuple(tensor.shape)
            raise ConfigError(f"{name} has {kind} of {shape}, the pool has heads and dim {wanted}")
    sinks = options.get("s_aux")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise ConfigError(f"{name} has sinks of {tuple(sinks.shape)}, not one of each head")
    return group.attend(layer, query, key, value, scaling, sinks), None


AttentionInterface.register(NAME, _paged_attention)
