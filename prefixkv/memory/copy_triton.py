"""Gather and scatter on CUDA, or on the CPU under Triton's interpreter (TRITON_INTERPRET=1).

One kernel serves both directions. A program copies some rows of one slab, a tile of words wide. It
computes the address of each row in the pool from the plan's tables, in bytes, so a pool of many
tensors takes one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import triton
import triton.language as tl
from triton import knobs

from prefixkv.errors import ConfigError
from prefixkv.memory.stage_plan import StagePlan

if TYPE_CHECKING:
    import torch

    from prefixkv.paging import Pages

_WORDS: Final = (
    (8, "int64", tl.int64),
    (4, "int32", tl.int32),
    (2, "int16", tl.int16),
    (1, "uint8", tl.uint8),
)
_TILE_WORDS: Final = 1024
_MOST_WORDS_WIDE: Final = 256


@cache
def _kernel(interpreted: bool) -> Any:
    """Triton reads its settings, compiled or interpreted, once per kernel."""
    return triton.jit(_copy_rows)


def _copy_rows(
    slabs: tl.tensor, offsets: tl.tensor, units: tl.tensor, stage: tl.tensor, num_rows: tl.tensor,
    row_words: tl.tensor, fold: tl.constexpr, rows_a_unit: tl.constexpr, alignment: tl.constexpr,
    word: tl.constexpr, tile_rows: tl.constexpr, tile_width: tl.constexpr, to_stage: tl.constexpr,
) -> None:  # fmt: skip
    """`slabs` int64 [slab, 3]: base, page stride, unit stride. `offsets` int64 [slab, row of a
    unit]. Both in bytes. `num_rows` per slab, `row_words` per row."""
    # int64: row numbers times row sizes may pass 2**31.
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    slab = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * tile_width + tl.arange(0, tile_width)
    there = row < num_rows
    # Rows beyond the last read unit 0, which exists; the mask below keeps them from being copied.
    unit = tl.load(units + row // rows_a_unit, mask=there, other=0).to(tl.int64)
    offset = tl.load(offsets + slab * rows_a_unit + row % rows_a_unit, mask=there, other=0)
    base = tl.load(slabs + slab * 3)
    page_stride = tl.load(slabs + slab * 3 + 1)
    unit_stride = tl.load(slabs + slab * 3 + 2)
    # `StagePlan`'s formula: the page of the unit, its place in the page, the row in the unit.
    address = base + unit // fold * page_stride + unit % fold * unit_stride + offset
    pointer = tl.pointer_type(word)  # pyright: ignore[reportArgumentType]
    start = tl.multiple_of(address.to(pointer), alignment)  # lets words be loaded in pairs
    pool = start[:, None] + column[None, :]
    # The stage is dense: slab by slab, row by row.
    staged = stage + (slab * num_rows + row)[:, None] * row_words + column[None, :]
    mask = there[:, None] & (column < row_words)[None, :]
    if to_stage:
        tl.store(staged, tl.load(pool, mask=mask), mask=mask)
    else:
        tl.store(pool, tl.load(staged, mask=mask), mask=mask)


class TritonCopy:
    """A `stage_copy.StagingCopy` by a Triton kernel, on CUDA, or on "cpu" under the interpreter."""

    def __init__(self, plan: StagePlan, device: str) -> None:
        import torch

        self._plan = plan
        self._device = torch.device(device)
        strides = plan.strides.tolist()
        slabs = [(slab.base, *steps) for slab, steps in zip(plan.slabs, strides, strict=True)]
        # The widest word, up to 8 bytes, in which every row begins and ends.
        places = [place for slab in slabs for place in slab] + plan.row_offsets.ravel().tolist()
        self._alignment = gcd(16, plan.row_bytes, *places)
        self._word_bytes, dtype, self._word = next(
            word for word in _WORDS if self._alignment % word[0] == 0
        )
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._slabs = torch.tensor(slabs, dtype=torch.int64, device=self._device)
        self._offsets = torch.from_numpy(np.array(plan.row_offsets)).to(self._device)

    def num_bytes(self, num_units: int) -> int:
        return self._plan.num_bytes(num_units)

    def gather(self, units: Pages, stage: torch.Tensor) -> None:
        self._copy(units, stage, to_stage=True)

    def scatter_steps(self, units: Pages, stage: torch.Tensor) -> Iterator[None]:
        self._copy(units, stage, to_stage=False)
        return iter(())

    def _copy(self, units: Pages, stage: torch.Tensor, to_stage: bool) -> None:
        import torch

        plan = self._plan
        units = plan.checked(units, stage, self._device.type)
        # The stage may be any slice of staging memory, and a misaligned load is an error on a GPU.
        if stage.data_ptr() % self._word_bytes:
            raise ConfigError(
                f"stage begins at {stage.data_ptr():#x}, must be a multiple of {self._word_bytes}"
            )
        rows_a_unit = plan.row_offsets.shape[1]
        num_rows = len(units) * rows_a_unit
        row_words = plan.row_bytes // self._word_bytes
        # A tile of about 1,024 words: narrow rows are taken several at a time.
        width = min(triton.next_power_of_2(row_words), _MOST_WORDS_WIDE)
        tile_rows = max(1, _TILE_WORDS // width)
        grid = (triton.cdiv(num_rows, tile_rows), len(plan.slabs), triton.cdiv(row_words, width))
        _kernel(knobs.runtime.interpret)[grid](
            self._slabs, self._offsets,
            torch.from_numpy(np.array(units)).to(self._device), stage.view(self._dtype),
            num_rows, row_words, fold=plan.fold, rows_a_unit=rows_a_unit, alignment=self._alignment,
            word=self._word, tile_rows=tile_rows, tile_width=width, to_stage=to_stage,
        )  # fmt: skip
