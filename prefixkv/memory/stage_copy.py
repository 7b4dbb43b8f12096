"""Gather and scatter between the pages of a pool and a piece of staging memory.

Staged is a part of the model (some layers, some heads) of some unit pages, always in the order
[slab, unit page, token, head, byte]. So a gather and a scatter move KV between pools of any two
layouts. `staging_copy` picks `CpuCopy`, or `TritonCopy` (`copy_triton.py`) for CUDA. `CpuCopy` sees
rows of bytes that are contiguous on both sides, and copies them by numpy with the GIL let go.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, zip_longest
from math import gcd
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.stage_plan import StagePlan, stage_parts, stage_unit_bytes
from prefixkv.paging import Pages

if TYPE_CHECKING:
    import torch

Int64s = npt.NDArray[np.int64]
# Four parts of this size, with the pages that they go to, fill half an L2 cache.
_STEP_BYTES: Final = 128 << 10


class StagingCopy(Protocol):
    """A copy bound to one pool and one part of it. May be used from several threads at once.

    The pool's memory has to outlive it. On CUDA a copy is queued on the current stream, and is done
    when an event recorded there is.
    """

    def num_bytes(self, num_units: int) -> int:
        """Return the bytes of staging memory for `num_units` unit pages."""
        ...

    def gather(self, units: Pages, stage: torch.Tensor) -> None:
        """Copy the part of these unit pages into `stage`, uint8 [num_bytes(n)], contiguous, on the
        pool's device.

        `units`: int32 [n], n >= 1: unit j of page p is p * fold + j. Raises PageStateError for a
        unit that is not in the pool, ConfigError for another stage. Nothing was copied.
        """
        ...

    def scatter_steps(self, units: Pages, stage: torch.Tensor) -> Iterator[None]:
        """Copy `stage` into these unit pages, each named once: the inverse of `gather`, in small
        steps, as the result is iterated over, in the order of the stage. The arguments are checked
        at once. A copy that only queues its work may do so at once, and return no steps."""
        ...


def scatter_together(parts: Sequence[tuple[StagingCopy, torch.Tensor]], units: Pages) -> None:
    """Scatter the stages of several parts into the same unit pages, a few of each in turn.

    Parts of one token lie side by side in a pool, so what one part has brought into the cache is
    there for the next. Raises as `scatter`; nothing was copied (on CUDA: not of the part, nor of
    those behind it).
    """
    # A list: all parts are checked before any is copied.
    steps = [copy.scatter_steps(units, stage) for copy, stage in parts]
    deque(zip_longest(*steps), maxlen=0)


def staging_copy(
    layout: KVLayout, part: Shard, unit_tokens: int, device: str = "cpu"
) -> StagingCopy:
    """Return the copy of a part of a pool of ours, by numpy or Triton, and of the same part of its
    aligned groups; `part` in the pool's own numbers.

    Raises ConfigError for a part or a unit that does not fit the pool, or a device without a copy;
    HandshakeError as `mesh.group_part`.
    """
    if layout.aligned:
        copies = [_copy_of(*one, unit_tokens, device) for one in stage_parts(layout, part)]
        return JoinedCopy(copies, stage_unit_bytes(layout, part, unit_tokens))
    return _copy_of(layout, part, unit_tokens, device)


def _copy_of(layout: KVLayout, part: Shard, unit_tokens: int, device: str) -> StagingCopy:
    plan = StagePlan.of(layout, part, unit_tokens)
    if device == "cpu":
        return CpuCopy(plan)
    if not device.startswith("cuda"):
        raise ConfigError(f"device is {device!r}, staging copies on cpu and cuda")
    # Only here, since Triton need not be installed where no GPU is.
    from prefixkv.memory.copy_triton import TritonCopy

    return TritonCopy(plan, device)


class JoinedCopy:
    """A `StagingCopy` of layers with several layouts and the same page ids: in the stage, all units
    of one lie behind all units of the one before."""

    def __init__(self, copies: Sequence[StagingCopy], unit_bytes: Sequence[int]) -> None:
        self._copies, self._unit_bytes = copies, unit_bytes

    def num_bytes(self, num_units: int) -> int:
        return num_units * sum(self._unit_bytes)

    def gather(self, units: Pages, stage: torch.Tensor) -> None:
        for copy, part in self._split(units, stage):
            copy.gather(units, part)

    def scatter_steps(self, units: Pages, stage: torch.Tensor) -> Iterator[None]:
        # A list: all parts are checked before any is copied.
        return chain(*[
            copy.scatter_steps(units, part) for copy, part in self._split(units, stage)
        ])  # fmt: skip

    def _split(self, units: Pages, stage: torch.Tensor) -> list[tuple[StagingCopy, torch.Tensor]]:
        """Raises ConfigError for a stage of another size."""
        count = len(units)
        if tuple(stage.shape) != (self.num_bytes(count),):
            raise ConfigError(f"stage is {tuple(stage.shape)}, must be ({self.num_bytes(count)},)")
        parts, at = [], 0
        for copy, unit_bytes in zip(self._copies, self._unit_bytes, strict=True):
            parts.append((copy, stage[at : at + copy.num_bytes(count)]))
            at += count * unit_bytes
        return parts


class _Pattern(NamedTuple):
    """The places of some slabs' rows, counted in steps of their group's view."""

    offsets: Int64s  # [slab, 1, row of a unit]
    page_strides: Int64s  # [slab, 1]
    unit_strides: Int64s  # [slab, 1]

    def rows_of(self, page: Int64s, unit: Int64s) -> Int64s:
        places = page * self.page_strides + unit * self.unit_strides
        rows: Int64s = places[:, :, None] + self.offsets
        return rows.reshape(-1)


class _SlabGroup(NamedTuple):
    """Neighbouring slabs of one region, and its memory as rows."""

    first_slab: int
    num_slabs: int
    rows: npt.NDArray[Any]  # opaque rows, a step apart, of the region's memory from `first_slab` on
    whole_rows: bool  # the rows are a row apart, so none overlaps another
    pattern: int  # one for all layers whose tensors are alike: their rows have the same numbers


class CpuCopy:
    """A `StagingCopy` for memory that the CPU reads."""

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan
        self._row = np.dtype((np.void, plan.row_bytes))
        # Slabs of one region form a group, one array for numpy. Regions lie anywhere in memory, so
        # no array spans two of them.
        starts = sorted(plan.layout.regions)
        regions = [max(r for r in starts if r[0] <= slab.base) for slab in plan.slabs]
        self._groups: list[_SlabGroup] = []
        self._patterns: list[_Pattern] = []
        first = 0
        for _, same in groupby(regions):
            count = len(list(same))
            self._groups.append(self._group(first, count))
            first += count

    def _group(self, first: int, count: int) -> _SlabGroup:
        plan = self._plan
        num_pages = plan.layout.num_pages
        slabs = plan.slabs[first : first + count]
        # Everything relative to the first slab.
        origin = min(slab.base for slab in slabs)
        base = np.array([slab.base - origin for slab in slabs], dtype=np.int64)[:, None]
        page, unit = np.hsplit(plan.strides[first : first + count], 2)
        offsets = base + plan.row_offsets[first : first + count]
        # Every row begins at a multiple of `step`, so a row's place is its number in a view with
        # that stride. Rows of the view overlap if the step is less than a row.
        step = gcd(
            plan.row_bytes,
            *(stride for column in (offsets, page, unit) for stride in column.ravel().tolist()),
        )
        # The view ends with the last row of the last page, within the region: `validate` has
        # checked it. It owns nothing; the pool's memory has to outlive it.
        last = int((offsets + (num_pages - 1) * page + (plan.fold - 1) * unit).max())
        memory = memoryview((ctypes.c_char * (last + plan.row_bytes)).from_address(origin))
        rows: npt.NDArray[Any] = np.ndarray(last // step + 1, self._row, memory, strides=(step,))
        pattern = self._pattern(_Pattern((offsets // step)[:, None], page // step, unit // step))
        return _SlabGroup(first, count, rows, step == plan.row_bytes, pattern)

    def _pattern(self, new: _Pattern) -> int:
        for number, known in enumerate(self._patterns):
            if all(np.array_equal(a, b) for a, b in zip(known, new, strict=True)):
                return number
        self._patterns.append(new)
        return len(self._patterns) - 1

    def num_bytes(self, num_units: int) -> int:
        return self._plan.num_bytes(num_units)

    def gather(self, units: Pages, stage: torch.Tensor) -> None:
        units = self._plan.checked(units, stage, "cpu")
        staged = stage.numpy().view(self._row)
        for group, index, part in self._parts(units):
            if group.whole_rows:
                # Numbers were checked; mode "raise" would copy into a buffer first.
                np.take(group.rows, index, out=staged[part], mode="clip")
            else:
                # Of overlapping rows `take` would first copy all, to have them apart.
                staged[part] = group.rows[index]

    def scatter_steps(self, units: Pages, stage: torch.Tensor) -> Iterator[None]:
        units = self._plan.checked(units, stage, "cpu")
        return self._scatter_steps(units, stage.numpy().view(self._row))

    def _scatter_steps(self, units: Pages, staged: npt.NDArray[Any]) -> Iterator[None]:
        step = max(1, _STEP_BYTES // self._plan.unit_bytes) * self._plan.row_offsets.shape[1]
        for group, index, part in self._parts(units):
            rows = staged[part]
            for first in range(0, len(index), step):
                group.rows[index[first : first + step]] = rows[first : first + step]
                yield

    def _parts(self, units: Pages) -> Iterator[tuple[_SlabGroup, Int64s, slice]]:
        page, unit = (
            column.astype(np.int64) for column in np.divmod(units, np.int32(self._plan.fold))
        )
        rows_a_slab = len(units) * self._plan.row_offsets.shape[1]
        rows = [pattern.rows_of(page, unit) for pattern in self._patterns]
        for group in self._groups:
            start = group.first_slab * rows_a_slab
            yield group, rows[group.pattern], slice(start, start + group.num_slabs * rows_a_slab)
