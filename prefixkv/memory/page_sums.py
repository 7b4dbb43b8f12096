"""Checksums of pages, as each side of a write reads them from its own memory.

What is summed is what one rank writes to another: a part of the model (layers, heads) of a unit
page, in the order of staging memory: [slab, token, head, byte], aligned groups behind the first
layers. So two pools of any layouts and page sizes agree, and a slice of a page has a sum of its
own. A page of a window group is summed likewise, and a slot of extra state block by block. No
memory is copied.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.errors import ChecksumError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard, group_part
from prefixkv.memory.stage_plan import StagePlan, stage_parts
from prefixkv.memory.state_layout import StateLayout
from prefixkv.paging import Pages, checked_pages

try:
    import xxhash
except ImportError:  # the extra "checksums"
    xxhash = None  # type: ignore[assignment]

Int64s = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint32]


def _xxh3(rows: Iterable[Any]) -> int:
    digest: Any = xxhash.xxh3_64()
    for row in rows:
        digest.update(row)
    return int(digest.intdigest()) & 0xFFFFFFFF


def _crc32(rows: Iterable[Any]) -> int:
    value = 0
    for row in rows:
        value = zlib.crc32(row, value)
    return value


ALGORITHMS: dict[str, Callable[[Iterable[Any]], int]] = {"crc32": _crc32}
"""The algorithms that this process can compute, the best first."""
if xxhash is not None:
    ALGORITHMS = {"xxh3": _xxh3, **ALGORITHMS}


class SumPlan(NamedTuple):
    """What of a rank's memory is summed, in its own numbers: a part of the model in unit pages of
    `unit_tokens`, and of a slot of extra state these blocks: (entry, offset, bytes)."""

    algorithm: str
    part: Shard
    unit_tokens: int
    state: tuple[tuple[int, int, int], ...] = ()


class _Rows(NamedTuple):
    """Rows of `num_bytes`: their addresses in the first unit of page 0, and their strides."""

    num_bytes: int
    num_units: int
    fold: int
    address: Int64s
    page_stride: Int64s
    unit_stride: Int64s

    @classmethod
    def of(cls, layout: KVLayout, part: Shard, unit_tokens: int) -> _Rows:
        plan = StagePlan.of(layout, part, unit_tokens)
        bases = np.array([slab.base for slab in plan.slabs], dtype=np.int64)[:, None]
        rows = plan.row_offsets.shape[1]
        strides = [np.repeat(column, rows) for column in plan.strides.T]
        addresses = (bases + plan.row_offsets).ravel()
        return cls(plan.row_bytes, layout.num_pages * plan.fold, plan.fold, addresses, *strides)

    def bytes_of(self, unit: int) -> Iterator[Any]:
        page, nth = divmod(unit, self.fold)
        row = ctypes.c_char * self.num_bytes
        for address in (self.address + page * self.page_stride + nth * self.unit_stride).tolist():
            yield row.from_address(address)


class PageSums:
    """The sums of one rank's memory for one plan. The memory has to outlive it. Any thread may use
    it."""

    def __init__(self, layout: KVLayout, state: StateLayout | None, plan: SumPlan) -> None:
        """Raises as `StagePlan.of` and `mesh.group_part`."""
        self._sum = ALGORITHMS[plan.algorithm]
        # By group of a promise; -1 is the first one, whose pages aligned groups have too.
        self._groups = {
            -1: [_Rows.of(*one, plan.unit_tokens) for one in stage_parts(layout, plan.part)]
        }
        for number, group in enumerate(layout.windows):
            part = group_part(plan.part, layout, group.layout)
            self._groups[number] = [_Rows.of(group.layout, part, layout.page_size)]
        if state is not None:
            entries = state.entries
            self._groups[len(layout.windows)] = [
                _Rows(
                    num_bytes, state.num_slots, 1,
                    np.array([entries[entry].base + offset]),
                    np.array([entries[entry].slot_stride]), np.zeros(1, np.int64),
                )
                for entry, offset, num_bytes in plan.state
            ]  # fmt: skip

    def checked(self, group: int, units: Pages) -> Pages:
        """Return these pages of a group. Raises PageStateError for one that it does not have."""
        return checked_pages(units, self._groups[group][0].num_units, "summed")

    def of(self, group: int, units: Pages) -> Sums:
        """Return the sums of these pages, which are `checked`. O(their bytes)."""
        parts, total = self._groups[group], self._sum
        return np.array(
            [
                total(row for part in parts for row in part.bytes_of(unit))
                for unit in units.tolist()
            ],
            dtype="<u4",
        )

    def check(self, group: int, units: Pages, raw: bytes, where: str) -> None:
        """Raise ChecksumError, which names the first page with another sum than in `raw`."""
        sums = np.frombuffer(raw, dtype="<u4")
        if len(sums) != len(units):
            raise ChecksumError(f"{where}: {len(sums)} checksums for {len(units)} pages")
        wrong = np.flatnonzero(self.of(group, units) != sums)
        if len(wrong):
            page = int(units[wrong[0]]) // self._groups[group][0].fold
            whose = "" if group < 0 else f" of group {group}"
            raise ChecksumError(
                f"{where}: page {page}{whose} does not hold what was written ({len(wrong)} of "
                f"{len(units)} pages differ)"
            )
