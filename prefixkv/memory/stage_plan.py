"""Staging memory: the place of each row of a part of a pool in it. Pure.

A stage has the first layout's layers, and behind them those of its aligned groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import KVLayout, Slab
from prefixkv.memory.mesh import Shard, group_part
from prefixkv.paging import Pages, checked_pages


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """The places of a part's rows: `row_bytes` that are contiguous in the pool and in the stage.

    Row r of unit j of page p of slab s is at `slabs[s].base + p * strides[s, 0] + j * strides[s, 1]
    + row_offsets[s, r]`. Strides of a single page or unit have no meaning, and are 0.
    """

    layout: KVLayout
    slabs: tuple[Slab, ...]
    fold: int
    row_bytes: int
    row_offsets: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layout: KVLayout, part: Shard, unit_tokens: int) -> StagePlan:
        """Plan the copies of `part` in units of `unit_tokens`. O(slabs). Raises ConfigError for a
        part or a unit that does not fit the pool, or an invalid layout."""
        # From here on addresses are computed without further checks.
        layout.validate()
        slabs = part.slabs_of(layout)
        if unit_tokens < 1 or layout.page_size % unit_tokens:
            raise ConfigError(
                f"unit_tokens is {unit_tokens}, must divide the page size, {layout.page_size}"
            )
        row_bytes = layout.head_bytes
        # Rows as long as possible: heads that lie side by side in every slab become one row, then
        # tokens too. `tokens` and `heads` are the numbers that remain rows of their own.
        tokens, heads = unit_tokens, part.num_heads
        if heads == 1 or all(slab.head_stride == row_bytes for slab in slabs):
            row_bytes *= heads
            heads = 1
        if heads == 1 and (tokens == 1 or all(slab.token_stride == row_bytes for slab in slabs)):
            row_bytes *= tokens
            tokens = 1
        # The order in the stage: token by token, head by head, in every pool alike.
        token, head = np.arange(tokens)[:, None], np.arange(heads)
        offsets = [
            (
                part.first_head * slab.head_stride
                + token * slab.token_stride
                + head * slab.head_stride
            ).ravel()
            for slab in slabs
        ]
        fold = layout.page_size // unit_tokens
        pages, tokens_apart = layout.num_pages > 1, unit_tokens * (fold > 1)
        strides = [(slab.page_stride * pages, slab.token_stride * tokens_apart) for slab in slabs]
        return cls(
            layout=layout,
            slabs=slabs,
            fold=fold,
            row_bytes=row_bytes,
            row_offsets=np.array(offsets, dtype=np.int64),
            strides=np.array(strides, dtype=np.int64),
        )

    @property
    def unit_bytes(self) -> int:
        return int(self.row_offsets.shape[1]) * self.row_bytes

    def num_bytes(self, num_units: int) -> int:
        return len(self.slabs) * num_units * self.unit_bytes

    def checked(self, units: Pages, stage: Any, device: str) -> Pages:
        """Return `units` as int32. Raises PageStateError or ConfigError for others than fit
        `stage`."""
        units = checked_pages(units, self.layout.num_pages * self.fold, "staged")
        # The copies write through raw addresses: a stage that is too small would mean writing past
        # it.
        expected = (self.num_bytes(len(units)),)
        if (
            str(stage.dtype) != "torch.uint8"
            or tuple(stage.shape) != expected
            or not stage.is_contiguous()
        ):
            raise ConfigError(
                f"stage is {stage.dtype} {tuple(stage.shape)}, must be contiguous torch.uint8 "
                f"{expected}"
            )
        if stage.device.type != device:
            raise ConfigError(f"stage is on {stage.device}, the pool on {device}")
        return units


_WORD_BYTES: Final = 16  # a GPU reads the widest words from such places


def stage_parts(layout: KVLayout, part: Shard) -> list[tuple[KVLayout, Shard]]:
    """Return a part's first layers, then those of each aligned group. Raises HandshakeError as
    `group_part`."""
    aligned = [group.layout for group in layout.aligned]
    return [(layout, part), *((one, group_part(part, layout, one)) for one in aligned)]


def stage_unit_bytes(layout: KVLayout, part: Shard, unit_tokens: int) -> list[int]:
    """Return the bytes of one unit page in a stage, for each of `stage_parts`; in whole words where
    there are several, so that each begins at one."""
    parts = stage_parts(layout, part)
    sizes = [
        of.num_layers * one.slabs_per_layer * unit_tokens * of.num_heads * one.head_bytes
        for one, of in parts
    ]
    return sizes if len(sizes) == 1 else [-(-size // _WORD_BYTES) * _WORD_BYTES for size in sizes]
