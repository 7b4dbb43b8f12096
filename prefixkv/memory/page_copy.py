"""Copies of whole pages between a pool and its host pool, for decode's host tier.

A page is all that has its id: in a host page the pool's first layers, then those of each aligned
group; window groups have no part in it. `page_copy` picks the copy. `CpuPageCopy` copies the runs
of a page in one pass. `StagedPageCopy` is for a GPU: a `StagingCopy` to memory of the device, and
one copy between that and each stretch of pinned host pages. The order of bytes in a host page is
the copy's own affair.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import structs

from prefixkv.errors import ConfigError, PageStateError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.stage_copy import StagingCopy, scatter_together, staging_copy
from prefixkv.memory.stage_plan import StagePlan
from prefixkv.paging import Pages, checked_pages

if TYPE_CHECKING:
    import torch

    from prefixkv.memory.host_pool import HostPool

Int64s = npt.NDArray[np.int64]

_move = ctypes.memmove


class PageCopy(ABC):
    """A copy between one pool and one host pool. May be used from several threads at once, on pages
    that no two of them touch.

    Both pools' memory has to outlive it. On CUDA a copy is queued on the current stream, and is
    done when an event recorded there is. Raises ConfigError for a host pool for other pages.
    """

    def __init__(self, layout: KVLayout, pool: HostPool) -> None:
        if layout.copied_page_bytes != pool.page_bytes:
            raise ConfigError(
                f"host pages have {pool.page_bytes} bytes, pages of the pool "
                f"{layout.copied_page_bytes}"
            )
        self._host, self._num_pages = pool, layout.num_pages

    def load(self, host_pages: Pages, device_pages: Pages) -> None:
        """Copy host_pages[i] to device_pages[i], int32 [n], n >= 1, named once each.

        Raises PageStateError, with nothing copied, for a page that is in neither pool, or not yet.
        """
        self._copy(*self._checked(host_pages, device_pages), is_load=True)

    def write(self, host_pages: Pages, device_pages: Pages) -> None:
        """Copy device_pages[i] to host_pages[i], named once each; the inverse of `load`."""
        self._copy(*self._checked(host_pages, device_pages), is_load=False)

    def _checked(self, host_pages: Pages, device_pages: Pages) -> tuple[Pages, Pages]:
        host = self._host.checked(host_pages)
        device = checked_pages(device_pages, self._num_pages, "device")
        if len(host) != len(device):
            raise PageStateError(f"{len(host)} host pages for {len(device)} of the device")
        return host, device

    @abstractmethod
    def _copy(self, host: Pages, device: Pages, is_load: bool) -> None: ...


def page_copy(layout: KVLayout, pool: HostPool, device: str = "cpu") -> PageCopy:
    """Return the copy between a pool and a host pool. Raises ConfigError for a host pool for other
    pages, or a device without a copy."""
    if device == "cpu":
        return CpuPageCopy(layout, pool)
    # Each by itself, so that a host page has its parts one behind the other.
    alone = [structs.replace(one, groups=()) for one in layout.with_same_ids]
    staged = [staging_copy(one, Shard.whole(one), one.page_size, device) for one in alone]
    return StagedPageCopy(staged, layout, pool, device)


class CpuPageCopy(PageCopy):
    """A `PageCopy` for memory that the CPU reads: a memmove for each run, with the GIL let go."""

    def __init__(self, layout: KVLayout, pool: HostPool) -> None:
        """O(rows of a page)."""
        super().__init__(layout, pool)
        self._starts, self._strides, self._lengths = page_runs(layout)
        # Where each run begins in a host page.
        self._offsets = np.cumsum(self._lengths) - self._lengths

    def _copy(self, host: Pages, device: Pages, is_load: bool) -> None:
        rows = self._host.addresses(host)
        places = self._starts + device.astype(np.int64)[:, None] * self._strides  # [page, run]
        targets, sources = (rows[:, None] + self._offsets).ravel().tolist(), places.ravel().tolist()
        if is_load:
            targets, sources = sources, targets
        lengths = self._lengths.tolist() * len(rows)
        for target, source, num_bytes in zip(targets, sources, lengths, strict=True):
            _move(target, source, num_bytes)


class StagedPageCopy(PageCopy):
    """A `PageCopy` through memory of the device, for CUDA; with a `StagingCopy` of whole pages of
    the first layers, and of each aligned group."""

    def __init__(
        self, staged: Sequence[StagingCopy], layout: KVLayout, pool: HostPool, device: str
    ) -> None:
        super().__init__(layout, pool)
        self._device = device
        self._row_bytes = pool.page_bytes
        self._parts: list[_StagedPart] = []
        at = 0
        for copy, one in zip(staged, layout.with_same_ids, strict=True):
            self._parts.append(_StagedPart(copy, at, at + one.page_bytes, len(one.slabs)))
            at += one.page_bytes

    def _copy(self, host: Pages, device: Pages, is_load: bool) -> None:
        rows = self._memory(len(host) * self._row_bytes).view(len(host), -1)
        if is_load:
            for some, memory in self._host.stretches(host):
                rows[some].view(-1).copy_(memory, non_blocking=True)
            for part in self._parts:
                scatter_together([(part.copy, part.staged(rows))], device)
            return
        for part in self._parts:
            stage = self._memory(part.copy.num_bytes(len(host)))
            part.copy.gather(device, stage)
            part.fill(rows, stage)
        for some, memory in self._host.stretches(host):
            memory.copy_(rows[some].view(-1), non_blocking=True)

    def _memory(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class _StagedPart(NamedTuple):
    """Layers of one layout in staged host pages: bytes [start, end) of each row. A stage has all
    pages of one slab side by side, a host page all slabs."""

    copy: StagingCopy
    start: int
    end: int
    num_slabs: int

    def staged(self, rows: torch.Tensor) -> torch.Tensor:
        import torch

        by_slab = self._of(rows).transpose(0, 1)
        # Copied also where it need not be turned: a stage begins where a GPU reads wide words.
        whole = by_slab.clone(memory_format=torch.contiguous_format)
        return whole.view(-1).view(torch.uint8)

    def fill(self, rows: torch.Tensor, stage: torch.Tensor) -> None:
        part = self._of(rows)
        by_slab = stage.view(part.dtype).view(self.num_slabs, len(rows), -1)
        part.copy_(by_slab.transpose(0, 1))

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        """A view [page, slab, word], in the widest words: torch moves element by element."""
        import torch

        sizes = rows.shape[1], self.start, (self.end - self.start) // self.num_slabs
        word = torch.int64 if all(size % 8 == 0 for size in sizes) else torch.uint8
        words = rows[:, self.start : self.end].view(word)
        # Splitting the last axis copies nothing, though the rows may be apart.
        return words.view(len(rows), self.num_slabs, -1)


def page_runs(layout: KVLayout) -> tuple[Int64s, Int64s, Int64s]:
    """Return the runs of bytes that a page consists of: address in page 0, stride from page to
    page, length. Those of aligned groups come last."""
    runs = zip(*map(_layout_runs, layout.with_same_ids), strict=True)
    starts, steps, lengths = (np.concatenate(of_all) for of_all in runs)
    return starts, steps, lengths


def _layout_runs(layout: KVLayout) -> tuple[Int64s, Int64s, Int64s]:
    plan = StagePlan.of(layout, Shard.whole(layout), layout.page_size)
    bases = np.array([slab.base for slab in plan.slabs], np.int64)
    starts = (bases[:, None] + plan.row_offsets).ravel()
    steps = np.repeat(plan.strides[:, 0], plan.row_offsets.shape[1])
    # In the order of addresses, rows that touch become one run. They touch in every page: slabs
    # that interleave have equal strides, which `StagePlan` has checked.
    order = np.argsort(starts)
    starts, steps = starts[order], steps[order]
    first = np.concatenate(([0], np.flatnonzero(np.diff(starts) != plan.row_bytes) + 1))
    lengths = np.diff(first, append=len(starts)) * plan.row_bytes
    return starts[first], steps[first], lengths
