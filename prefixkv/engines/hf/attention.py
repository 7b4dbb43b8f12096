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
from prefixkv.engines.hf.recurrent import StatePlan, StateRows
from prefixkv.errors import ConfigError
from prefixkv.spi import GroupPages, Pages, pages_for, slot_mapping

NAME: Final = "prefixkv"  # the attention's name in transformers
_QUERIES: Final = 256  # new tokens per mask: keys after the last of them are not computed


class FlatPool:
    """A pool's memory as rows of pages, to gather from, and of tokens, to write to. One thread's.

    Layers are numbered as the model's. `pages[layer]` is [R, page_size * heads * dim], and
    `tokens[layer]` the same memory as [R * page_size, heads * dim]. In all layers the K of page p
    is row `k_row + p * page_rows`, its V row `v_row + p * page_rows`. `sliding` is the memory of
    the layers with a window, where those are a group.
    """

    def __init__(
        self,
        pool: KVPool,
        layers: Sequence[int] | None = None,
        window: int = 0,
        sliding: FlatPool | None = None,
    ) -> None:
        """Make the flat views, without copies.

        Args:
            layers: the model's layers whose KV it has, in the pool's order; None: all, from 0.
            window: tokens that a token of these layers sees, itself among them; 0: all before it.
        Raises ConfigError where a page of K is not one run of memory, token by token, or K and V
        are not in one tensor (`KVPool.create` makes suitable pools); or for another number of
        layers.
        """
        self.pool, self.layout = pool, pool.layout
        self.window, self.sliding = window, sliding
        layout = pool.layout
        width = layout.page_size * layout.num_kv_heads * layout.head_dim
        layers = range(layout.num_layers) if layers is None else layers
        if len(layers) != layout.num_layers:
            raise ConfigError(
                f"the pool has {layout.num_layers} layers, the model {len(layers)} with KV"
            )
        self.pages: dict[int, torch.Tensor] = {}
        self.tokens: dict[int, torch.Tensor] = {}
        found = set()
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
            found.add((k_row, v_row, page_rows))
        # One plan serves all layers, so row numbers must be the same in all of them.
        if len(found) != 1:
            raise ConfigError("the engine needs a pool whose layers are alike")
        self.k_row, self.v_row, self.page_rows = found.pop()
        self._any = flat  # all layers have rows of one width
        self._buffer = flat.new_empty(0)

    def rows(self, pages: Pages) -> torch.Tensor:
        """Return int64 [2, *pages.shape], on the CPU: the row of each page's K, then of its V."""
        first = pages.astype(np.int64) * self.page_rows
        return torch.from_numpy(np.stack([first + self.k_row, first + self.v_row]))

    def scratch(self, num_rows: int) -> torch.Tensor:
        """Return [num_rows, page_size * heads * dim], the same memory as long as it is enough."""
        width = self._any.shape[1]
        if self._buffer.numel() < num_rows * width:
            self._buffer = self._any.new_empty(num_rows * width)
        return self._buffer[: num_rows * width].view(num_rows, width)


class _Block(NamedTuple):
    """Some new tokens of one sequence, and the keys that one of them sees at least, as views."""

    k: torch.Tensor  # [1, heads, keys, dim]
    v: torch.Tensor
    mask: torch.Tensor | None  # bool [queries, keys]; None: plainly causal, or one query


class _Part(NamedTuple):
    rows: torch.Tensor  # rows of the pages that hold all its KV, K then V: [2 * pages]
    copies: torch.Tensor  # the memory into which they are gathered
    blocks: list[_Block]


class Plan:
    """The places of one forward's KV, and the keys that each new token attends to.

    `rows` are the page ids of each sequence, for at least `ends` tokens. Its new tokens are [start,
    end), at least one; the KV of earlier tokens is in the pages. `windows` are its pages in the
    window group, from the first token that the first new one sees. `positions` is int64 [1, N];
    `last` is int64 [sequences], the index of each sequence's last token in the packed row.
    """

    def __init__(
        self,
        flat: FlatPool,
        rows: Sequence[Pages],
        starts: Sequence[int],
        ends: Sequence[int],
        device: torch.device | str = "cpu",
        states: StateRows | None = None,
        windows: Sequence[GroupPages] = (),
    ) -> None:
        self.flat, self.ends = flat, ends
        self.states = None if states is None else StatePlan(states, starts, ends, device)
        at = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        self.positions = torch.from_numpy(np.concatenate(at))[None].to(device)
        self.last = torch.from_numpy(np.cumsum([len(one) for one in at]) - 1).to(device)
        self._groups = groups = [GroupPlan(flat, rows, starts, ends, device)]
        if flat.sliding is not None:
            seen = _seen_pages(windows, starts, ends, flat.sliding.window, flat.layout.page_size)
            groups.append(GroupPlan(flat.sliding, *seen, device))
        self._of_layer = {layer: group for group in groups for layer in group.flat.pages}

    def group(self, layer: int) -> GroupPlan | None:
        """Return the plan of the layers that keep what this one keeps; None: it has no KV."""
        return self._of_layer.get(layer)

    def erase(self, new: torch.Tensor) -> None:
        for group in self._groups:
            group.erase(new)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        group = self._of_layer[layer]
        # First, since a new token attends to itself, and is read from its page.
        group.write(layer, key, value)
        return group.attend(layer, query, scale, sinks)


def _seen_pages(
    windows: Sequence[GroupPages],
    starts: Sequence[int],
    ends: Sequence[int],
    window: int,
    page_size: int,
) -> tuple[list[Pages], list[int], list[int]]:
    """Return per sequence the pages of the window group that its new tokens see, and where these
    tokens begin and end, counted from the first token of those pages."""
    rows, firsts, lasts = [], [], []
    for (first, ids), start, end in zip(windows, starts, ends, strict=True):
        begin, stop = max(0, start + 1 - window) // page_size, pages_for(end, page_size)
        # Pages of other tokens would answer wrongly and raise nothing.
        assert first <= begin < stop <= first + len(ids), (first, len(ids), begin, stop)
        rows.append(ids[begin - first : stop - first])
        firsts.append(start - begin * page_size)
        lasts.append(end - begin * page_size)
    return rows, firsts, lasts


class GroupPlan:
    """The part of a `Plan` for the layers of one pool. With `flat.window`, `rows`, `starts` and
    `ends` are counted from the first page that is needed: the distance of two tokens stays."""

    def __init__(
        self,
        flat: FlatPool,
        rows: Sequence[Pages],
        starts: Sequence[int],
        ends: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.flat = flat
        size = flat.layout.page_size
        # 1. Places to write to. Slots are counted in pages of the pool; a token's row is counted in
        # its memory, where K and V of a page need not be adjacent.
        slots = slot_mapping(rows, starts, ends, size)
        tokens = slots // size * flat.page_rows * size + slots % size
        self._k_to = torch.from_numpy(tokens + flat.k_row * size).to(device)
        self._v_to = torch.from_numpy(tokens + flat.v_row * size).to(device)
        # 2. Pages to read. The memory of the longest sequence is made first: a later, larger one
        # would replace it.
        used = [row[: pages_for(end, size)] for row, end in zip(rows, ends, strict=True)]
        flat.scratch(2 * max(map(len, used)))
        heads, dim = flat.layout.num_kv_heads, flat.layout.head_dim
        self._parts: list[_Part] = []
        self._sizes: list[int] = []  # queries of each block
        for row, start, end in zip(used, starts, ends, strict=True):
            page_rows = flat.rows(row).flatten().to(device)
            copies = flat.scratch(len(page_rows))
            kv = copies.view(2, 1, -1, heads, dim).transpose(2, 3)
            blocks: list[_Block] = []
            for first in range(start, end, _QUERIES):
                last = min(first + _QUERIES, end)
                seen_from = max(0, first + 1 - flat.window) if flat.window else 0
                k, v = kv[..., seen_from:last, :]
                mask = None
                if last - first > 1:  # SDPA needs none for one query
                    mask = _mask(first, last, seen_from, window=flat.window, device=device)
                blocks.append(_Block(k, v, mask))
                self._sizes.append(last - first)
            self._parts.append(_Part(page_rows, copies, blocks))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [1, heads, N, dim]."""
        tokens = self.flat.tokens[layer]
        for to, new in ((self._k_to, key), (self._v_to, value)):
            tokens.index_copy_(0, to, new[0].transpose(0, 1).flatten(1))

    def erase(self, new: torch.Tensor) -> None:
        """Set what was written of some new tokens, bool [N], to zero: no mask hides a NaN."""
        for tokens in self.flat.tokens.values():
            for to in (self._k_to, self._v_to):
                tokens.index_fill_(0, to[new], 0)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [1, N, query heads, dim]: each new token attends to its sequence up to itself.

        `write` comes first. query: [1, query heads, N, dim]; sinks: see `_attend_with_sinks`.
        """
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
    k, v, mask = block
    num, kv_heads, group, dim = q.shape
    # 1. One token: its query heads as the queries of a group, so that K is read once.
    if num == 1:
        if sinks is None:
            return F.scaled_dot_product_attention(q, k, v, scale=scale)
        return _attend_with_sinks(q, k, v, None, scale, sinks)
    # 2. Several: [1, query heads, new, dim].
    rows = q.flatten(1, 2).transpose(0, 1)[None]
    if sinks is None:
        out = F.scaled_dot_product_attention(
            rows, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    else:
        if mask is None:
            mask = torch.ones(num, num, dtype=torch.bool, device=q.device).tril_()
        rows, mask = rows.reshape(1, kv_heads, -1, dim), mask.repeat(group, 1)
        out = _attend_with_sinks(rows, k, v, mask, scale, sinks, num)
    return out.view(kv_heads, group, num, dim).permute(2, 0, 1, 3)


def _attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    sinks: torch.Tensor,
    num: int = 1,
) -> torch.Tensor:
    """Attend with a sink: one more logit of each query head, [query heads], of value zero.

    q and the result: [B, heads, group * num, dim]; k, v: [B, heads, keys, dim]; mask: bool, True
    where a query sees a key.
    """
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    sink = (
        sinks.float()
        .view(1, k.shape[1], -1, 1)
        .expand(-1, -1, -1, num)
        .reshape(1, k.shape[1], -1, 1)
    )
    most = torch.maximum(scores.amax(3, keepdim=True), sink)
    shares = (scores - most).exp()
    whole = shares.sum(3, keepdim=True) + (sink - most).exp()
    return (shares / whole).to(v.dtype) @ v


# --- what transformers calls ----------------------------------------------------------------------


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
    """Write the new KV and attend: query is [1, query heads, N, dim], key and value [1, heads, N,
    dim], the result [1, N, query heads, dim]. Raises ConfigError for a feature that is not
    supported."""
    # 1. Refuse: a feature that is silently ignored would give wrong answers and wrong KV.
    name = type(module).__name__
    if prefixkv_plan is None:
        raise ConfigError(f"{name} calls its attention without what the engine gave the model")
    if attention_mask is not None:
        raise ConfigError(f"{name} has an attention mask of its own")
    for what in ("softcap", "position_bias", "alibi"):
        if options.get(what) is not None:
            raise ConfigError(f"{name} needs {what} in attention, which the engine does not have")
    layer = module.layer_idx
    group = prefixkv_plan.group(layer)
    if group is None:
        raise ConfigError(f"{name} attends in layer {layer}, which is to have no KV")
    window, ours = options.get("sliding_window"), group.flat.window
    # Where all layers keep every token, a window that is as long as the text hides nothing.
    if window != ours if ours else window is not None and max(prefixkv_plan.ends) > window:
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
    # 2. Attend.
    return prefixkv_plan.attend(layer, query, key, value, scaling, sinks), None


AttentionInterface.register(NAME, _paged_attention)
