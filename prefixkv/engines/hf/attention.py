"""Attention on the paged pool, as transformers' `AttentionInterface` calls it.

A forward has the new tokens of several sequences, packed into one row: [1, N]. A `Plan` has the
places to which their KV is written, and the pages that each sequence reads; it is made once and
used by every layer. On the CPU each sequence's K and V are gathered into one small buffer, which is
still in the processor's cache when attention reads it: as fast as views of adjacent pages, for any
order of pages.
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
from prefixkv.spi import ConfigError, Pages, WindowPages, page_table, pages_for, slot_mapping

NAME: Final = "prefixkv"  # the attention's name in transformers
BATCHED: Final = ("cuda",)  # devices on which a step of decode reads one padded batch
_QUERIES: Final = 256  # new tokens per mask: keys after the last of them are not computed


class FlatPool:
    """A pool's memory as rows of pages, to gather from, and of tokens, to write to. One thread's.

    Layers are numbered as the model's, of which only some may have KV. `pages[layer]` is
    [R, page_size * heads * dim], and `tokens[layer]` the same memory as
    [R * page_size, heads * dim]. The K of page p is row `k_row + p * page_rows`, its V is row
    `v_row + p * page_rows`, in all layers.

    `sliding` is the memory of the layers with a window, where those are a group of their own.
    """

    def __init__(
        self,
        pool: KVPool,
        layers: Sequence[int] | None = None,
        window: int = 0,
        sliding: FlatPool | None = None,
    ) -> None:
        """Make the HF engine's flat views of a pool, by page and by token, without copies.

        Args:
            pool: the pool.
            layers: the model's layers whose KV it has, in the pool's order; None: all, from 0.
            window: tokens that a token of these layers sees, itself among them; 0: all before it.
            sliding: see above.
        Raises ConfigError where a page of K is not one run of memory, token by token, or K and V
        are not in one tensor: `KVPool.create` makes suitable pools; or for another number of
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
        """Return the pages' row numbers in HF attention's flat pool: of K, then of V.

        Int64 [2, *pages.shape], on the CPU.
        """
        first = pages.astype(np.int64) * self.page_rows
        return torch.from_numpy(np.stack([first + self.k_row, first + self.v_row]))

    def scratch(self, num_rows: int) -> torch.Tensor:
        """Return memory for rows that attention gathers: [num_rows, page_size * heads * dim].

        Each call returns the same memory, until a call asks for more.
        """
        width = self._any.shape[1]
        if self._buffer.numel() < num_rows * width:
            self._buffer = self._any.new_empty(num_rows * width)
        return self._buffer[: num_rows * width].view(num_rows, width)

    def gather(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Gather one layer's rows of pages for attention: [rows, page_size * heads * dim].

        Valid until the next call.
        """
        return torch.index_select(self.pages[layer], 0, rows, out=self.scratch(len(rows)))

    def kv(self, copies: torch.Tensor, num: int) -> torch.Tensor:
        """Return gathered rows as K and V for attention: a view [2, num, heads, tokens, dim].

        `copies` has the rows of `num` sequences with equal numbers of pages, all K before all V.
        """
        heads, dim = self.layout.num_kv_heads, self.layout.head_dim
        return copies.view(2, num, -1, heads, dim).transpose(2, 3)


class _Block(NamedTuple):
    """Some new tokens of one sequence, as queries, and the keys that one of them sees at least."""

    queries: slice  # of the sequence's new tokens
    keys: slice  # of the tokens in its pages
    mask: torch.Tensor | None  # bool [queries, keys]; None: plainly causal


class _Part(NamedTuple):
    """The new tokens of one sequence in a forward."""

    first: int  # its tokens are [first, last) of the packed row
    last: int
    start: int  # place of the first of them in the tokens of `rows`
    rows: torch.Tensor  # rows of the pages that hold all its KV, K then V: [2 * pages]
    blocks: list[_Block]


class _Step(NamedTuple):
    """One sequence in a forward with one new token per sequence.

    The views are made once, not in each layer.
    """

    rows: torch.Tensor  # rows of the pages that hold all its KV, K then V: [2 * pages]
    copies: torch.Tensor  # the memory into which they are gathered
    k: torch.Tensor  # a view of `copies`: [1, heads, tokens, dim]
    v: torch.Tensor


class Plan:
    """The places of one forward's KV, and the keys that each new token attends to.

    Args:
        flat: the pool.
        rows: per sequence its page ids in order; they hold at least `ends` tokens.
        starts, ends: the new tokens of each sequence are [start, end), at least one. The KV of
            earlier tokens is in the pages.
        device: the model's device.
        states: the states of the sequences, where the model has recurrent layers.
        windows: per sequence its pages in the window group, where the model has layers with a
            window: they hold the tokens that the first new one sees, and those up to `ends`.

    `positions` is int64 [1, N], the position of each new token in its sequence; `last` is int64
    [sequences], the index of each sequence's last token in the packed row.
    """

    def __init__(
        self,
        flat: FlatPool,
        rows: Sequence[Pages],
        starts: Sequence[int],
        ends: Sequence[int],
        device: torch.device | str = "cpu",
        states: StateRows | None = None,
        windows: Sequence[WindowPages] = (),
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
        """Return the plan of the layers of an HF model that keep what this one keeps; None of a
        layer without KV."""
        return self._of_layer.get(layer)

    def erase(self, new: torch.Tensor) -> None:
        """Set the KV of some new tokens of an HF forward to zero, in all layers. See
        `GroupPlan.erase`."""
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
        """Write the new tokens' KV of one layer of an HF model, and return their attention. See
        `GroupPlan`."""
        group = self._of_layer[layer]
        # First, since a new token attends to itself, and is read from its page.
        group.write(layer, key, value)
        return group.attend(layer, query, key, value, scale, sinks)


def _seen_pages(
    windows: Sequence[WindowPages],
    starts: Sequence[int],
    ends: Sequence[int],
    window: int,
    page_size: int,
) -> tuple[list[Pages], list[int], list[int]]:
    """Return of each sequence of an HF forward the window group's pages that its new tokens see,
    and where these begin and end, counted from the first token of the first of those pages."""
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
    """The part of a `Plan` that is about the layers of one pool. They keep all tokens, or, with
    `flat.window`, the last ones.

    Args:
        flat: the pool of these layers.
        rows, starts, ends: as of `Plan`. With a window all are counted from the first page that is
            needed: the distance of two tokens is what it was.
        device: the model's device.
    """

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
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        behind = np.cumsum(lens)
        # 1. Places to write to. Slots are counted in pages of the pool; a token's row is counted in
        # its memory, where K and V of a page need not be adjacent.
        slots = slot_mapping(rows, starts, ends, size)
        first = slots // size * flat.page_rows * size + slots % size
        self._k_to = torch.from_numpy(first + flat.k_row * size).to(device)
        self._v_to = torch.from_numpy(first + flat.v_row * size).to(device)
        used = [row[: pages_for(end, size)] for row, end in zip(rows, ends, strict=True)]
        self._table: torch.Tensor | None = None
        # Indices of the sequences with one new token in the packed row; None: all of them have one.
        self._single: torch.Tensor | None = None
        self._parts: list[_Part] = []
        self._steps: list[_Step] = []
        # 2. Pages to read, by case: of sequences with one new token, as a padded batch on a GPU, or
        # one after the other; of those with several, each by itself, with masks. So a step of
        # decode costs as much beside a chunk of a prompt as alone.
        single = [number for number, num in enumerate(lens) if num == 1]
        if single:
            rows_of, ends_of = [used[at] for at in single], [ends[at] for at in single]
            if torch.device(device).type in BATCHED:
                self._plan_table(rows_of, ends_of, device)
            else:
                # The memory of the longest sequence first: a later, larger request would replace
                # it, and views of the shorter ones would keep the old memory.
                flat.scratch(2 * max(map(len, used)))
                self._plan_steps(rows_of, ends_of, device)
        if len(single) < len(lens):
            self._single = torch.from_numpy(behind[single] - 1).to(device)
        for row, start, num, end in zip(used, starts, lens, behind.tolist(), strict=True):
            if num > 1:
                blocks = _blocks(start, num, flat.window, device)
                page_rows = flat.rows(row).flatten().to(device)
                self._parts.append(_Part(end - num, end, start, page_rows, blocks))

    def _plan_table(
        self, rows: Sequence[Pages], ends: Sequence[int], device: torch.device | str
    ) -> None:
        """Plan attention with one new token per sequence as one padded batch, for GPUs."""
        table = page_table(rows)
        self._table = self.flat.rows(table).flatten().to(device)
        width = table.shape[1] * self.flat.layout.page_size
        lens = torch.tensor(ends, device=device)[:, None]
        places = torch.arange(width, device=device)
        seen = places < lens
        if self.flat.window:
            seen &= places >= lens - self.flat.window
        self._mask = seen[:, None, None]

    def _plan_steps(
        self, rows: Sequence[Pages], ends: Sequence[int], device: torch.device | str
    ) -> None:
        """Plan attention with one new token per sequence, one after the other, for CPUs."""
        flat = self.flat
        for row, end in zip(rows, ends, strict=True):
            page_rows = flat.rows(row).flatten().to(device)
            copies = flat.scratch(len(page_rows))
            seen = slice(max(0, end - flat.window) if flat.window else 0, end)
            k, v = flat.kv(copies, 1)[..., seen, :]
            self._steps.append(_Step(page_rows, copies, k, v))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the new tokens' KV of one layer into the pages, before HF attention reads them.

        key, value: [1, heads, N, dim].
        """
        tokens = self.flat.tokens[layer]
        for to, new in ((self._k_to, key), (self._v_to, value)):
            tokens.index_copy_(0, to, new[0].transpose(0, 1).flatten(1))

    def erase(self, new: torch.Tensor) -> None:
        """Set what was written of some new tokens, bool [N], to zero in these layers.

        NaN must not stay where pages are free again: a padded batch of HF attention reads slots
        that nothing has written since, and no mask hides NaN.
        """
        for tokens in self.flat.tokens.values():
            for to in (self._k_to, self._v_to):
                tokens.index_fill_(0, to[new], 0)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of each new token to its sequence up to itself, in one layer.

        `write` comes first. query: [1, query heads, N, dim]; key, value as in `write`; sinks: a
        logit of each query head, [query heads], that takes its share of the attention and gives
        nothing. Returns [1, N, query heads, dim].
        """
        if self._single is None:
            return self._attend_single(layer, query, scale, sinks)
        # 1. Into one tensor, in the order of the packed row.
        _, heads, num, dim = query.shape
        out = query.new_empty(1, num, heads, dim)
        if len(self._single):
            alone = query.index_select(2, self._single)
            found = self._attend_single(layer, alone, scale, sinks)
            out.index_copy_(1, self._single, found)
        # 2. The others.
        for part in self._parts:
            new = slice(part.first, part.last)
            # A sequence from its beginning has all its keys at hand, without reading pages.
            if part.start == 0:
                k, v = key[:, :, new], value[:, :, new]
            else:
                k, v = self.flat.kv(self.flat.gather(layer, part.rows), 1)
            out[:, new] = _attend_one(query[:, :, new], k, v, part, scale, sinks)
        return out

    def _attend_single(
        self, layer: int, query: torch.Tensor, scale: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with one new token per sequence, in one layer; query is of these alone."""
        if self._table is not None:
            return self._attend_batch(layer, query, scale, sinks)
        return self._attend_steps(layer, query, scale, sinks)

    def _attend_batch(
        self, layer: int, query: torch.Tensor, scale: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with one new token per sequence, as a padded batch; the mask hides the padding."""
        assert self._table is not None
        num = query.shape[2]
        k, v = self.flat.kv(self.flat.gather(layer, self._table), num)
        q = query[0].transpose(0, 1).reshape(num, k.shape[1], -1, k.shape[3])  # a group together
        if sinks is not None:
            out = _attend_with_sinks(q, k, v, self._mask, scale, sinks)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, scale=scale)
        return out.reshape(1, num, -1, out.shape[-1])

    def _attend_steps(
        self, layer: int, query: torch.Tensor, scale: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with one new token per sequence, one after the other.

        Each gather overwrites the memory of the one before.
        """
        source, num, dim = self.flat.pages[layer], query.shape[2], query.shape[3]
        # The heads of a group side by side as queries, so that K is read once.
        grouped = query[0].transpose(0, 1).reshape(num, 1, self.flat.layout.num_kv_heads, -1, dim)
        outs = []
        for q, step in zip(grouped.unbind(0), self._steps, strict=True):
            torch.index_select(source, 0, step.rows, out=step.copies)
            if sinks is not None:
                outs.append(_attend_with_sinks(q, step.k, step.v, None, scale, sinks))
            else:
                outs.append(F.scaled_dot_product_attention(q, step.k, step.v, scale=scale))
        return torch.cat(outs).view(1, num, -1, dim)


def _blocks(start: int, num: int, window: int, device: torch.device | str) -> list[_Block]:
    """Return the blocks of a sequence's new tokens for HF attention.

    `window`: tokens that each of them sees, itself among them; 0: all.
    """
    blocks: list[_Block] = []
    for begin in range(0, num, _QUERIES):
        size = min(_QUERIES, num - begin)
        first, end = start + begin, start + begin + size
        seen_from = max(0, first + 1 - window) if window else 0
        mask = None
        # SDPA needs none for a sequence's first block, which is plainly causal.
        if first or (window and size > window):
            seen = torch.ones(size, end - seen_from, dtype=torch.bool, device=device)
            mask = seen.tril_(first - seen_from)
            if window:
                mask = mask.triu_(first - seen_from + 1 - window)
        blocks.append(_Block(slice(begin, begin + size), slice(seen_from, end), mask))
    return blocks


def _attend_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: _Part,
    scale: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of one sequence's new tokens, several, [1, new, query heads, dim].

    q is [1, query heads, new, dim]; k, v are [1, heads, tokens or more, dim]: whole pages were
    gathered, and the slots behind the last token hold old KV.
    """
    outs = []
    for block in part.blocks:
        queries, keys, values = q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys]
        if sinks is not None:
            # A group of query heads beside each other: [1, heads, group * new, dim].
            num = queries.shape[2]
            mask = block.mask
            if mask is None:
                mask = torch.ones(num, num, dtype=torch.bool, device=q.device).tril_()
            rows = queries.reshape(1, k.shape[1], -1, q.shape[3])
            mask = mask.repeat(rows.shape[2] // num, 1)
            out = _attend_with_sinks(rows, keys, values, mask, scale, sinks, num)
            outs.append(out.view(queries.shape))
            continue
        outs.append(
            F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=block.mask, is_causal=block.mask is None,
                scale=scale, enable_gqa=True,
            )
        )  # fmt: skip
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)).transpose(1, 2)


def _attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    sinks: torch.Tensor,
    num: int = 1,
) -> torch.Tensor:
    """Return attention with a sink: one more logit of each query head, [query heads], which takes
    part in the softmax of HF's attention, and whose value is zero.

    q: [B, heads, group * num, dim], the queries of each head of a group beside each other; k, v:
    [B, heads, keys, dim]; mask: bool, True where a query sees a key. Returns the shape of q.
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
    """Write the new KV to the pool and attend, as transformers calls its attention functions.

    query is [1, query heads, N, dim], key and value [1, heads, N, dim]; returns
    [1, N, query heads, dim]. Raises ConfigError, which names the feature, for one that a layer asks
    for and that is not supported.
    """
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
