"""SGLang's token slots and prefixkv's page ids: slot = page * page_size + offset."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from prefixkv.spi import Pages

Runs: TypeAlias = list[tuple[int, int]]
"""(first, end) of runs of neighbouring page ids, in the order of the ids.

An allocator gives out neighbouring pages as far as it can, so the pages of an insertion mostly form
a few runs. A run is one copy of bytes, at a fraction of what the set-up of array operations costs.
"""

PAGE_ID_BYTES = 4

MAX_RUNS = 4
"""Limit of runs that are looked at one by one."""

SHORT_PAGES = 8
"""Where the first runs are shorter than this on average, very many are taken to follow."""

_FIRST_RUNS = 2


def packed_range(num_pages: int) -> bytes:
    """Return the page ids from 0 to `num_pages`, packed, for `page_runs`."""
    return np.arange(num_pages, dtype=np.int32).tobytes()


def page_runs(packed: bytes | bytearray, ids: bytes) -> Runs | None:
    """Return packed page ids as runs of neighbours; None where there are more than `MAX_RUNS`, or
    seem to be.

    One memcmp for a single run, else O(runs * pages). An id that is not in the pool is a run of its
    own. `ids`: the result of `packed_range` for the pool.

    >>> page_runs(np.array([7, 8, 9, 3], np.int32).tobytes(), packed_range(10))
    [(7, 10), (3, 4)]
    """
    runs: Runs = []
    at, end = 0, len(packed)
    while at < end:
        seem_short = at < _FIRST_RUNS * SHORT_PAGES * PAGE_ID_BYTES < end // MAX_RUNS
        if len(runs) == MAX_RUNS or (len(runs) == _FIRST_RUNS and seem_short):
            return None
        # As a number without a sign: a negative id is then far beyond `ids`, like any other that is
        # not in the pool.
        first = int.from_bytes(packed[at : at + PAGE_ID_BYTES], sys.byteorder)
        rest = packed[at:] if at else packed
        start = first * PAGE_ID_BYTES
        if ids.startswith(rest, start):
            count = len(rest) // PAGE_ID_BYTES
        else:
            # The ids by which both runs begin alike; 1 at least.
            known = np.frombuffer(ids[start : start + len(rest)], np.int32)
            differs = known != np.frombuffer(rest, np.int32, len(known))
            count = max(1, int(differs.argmax()) or len(known)) if len(known) else 1
        runs.append((first, first + count))
        at += count * PAGE_ID_BYTES
    return runs


FEW_PAGES = 4
"""Limit of pages that are read from a row one by one: for few the set-up of an array costs more."""


def to_device(values: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy without waiting for the device."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    # From pageable memory the copy might wait for what is queued before it.
    return tensor.pin_memory().to(device, non_blocking=True)


class SlotTable:
    """A table on the device with one row of slots per page: pages become slots in one gather.

    Takes 8 bytes per token of the pool.

    Args:
        num_pages: one above the largest page id.
        page_size: tokens per page.
        device: the device of the pool.

    >>> SlotTable(8, 4, "cpu").slots(np.array([7, 3], np.int32)).tolist()
    [28, 29, 30, 31, 12, 13, 14, 15]
    """

    def __init__(self, num_pages: int, page_size: int, device: Any) -> None:
        self._page_size = page_size
        self._device = torch.device(device)
        self._empty = torch.empty(0, dtype=torch.int64, device=self._device)
        # A numpy view of SGLang's table of rows, made once: `.numpy()` at each read costs more.
        self._rows_of: torch.Tensor | None = None
        self._rows: npt.NDArray[Any] = np.empty((0, 0), np.int32)
        slots = np.arange(num_pages * page_size).reshape(num_pages, page_size)
        self._host: npt.NDArray[np.int64] | None = None
        self._ids = b""
        if self._device.type == "cpu":
            self._host, self._ids = slots, packed_range(num_pages)
        else:
            self._table = torch.from_numpy(slots).to(self._device)

    def slots(self, pages: Pages) -> torch.Tensor:
        """Return a new tensor int64 [len(pages) * page_size] on the device."""
        return self.slots_of_packed(pages.tobytes())

    def slots_of_packed(self, packed: bytes | bytearray) -> torch.Tensor:
        """Return slots as `slots` does, of pages as a result of the tree has them."""
        if not packed:
            return self._empty
        if self._host is None:
            pages = self.on_device(np.frombuffer(packed, np.int32))
            return self._table.index_select(0, pages).view(-1)
        # Neighbouring pages have neighbouring slots: a copy of a run reads memory in order.
        runs = page_runs(packed, self._ids)
        if runs is None:
            slots = self._host.take(np.frombuffer(packed, np.int32), axis=0)
        elif len(runs) == 1:
            first, end = runs[0]
            slots = self._host[first:end].copy()
        else:
            slots = np.concatenate([self._host[first:end] for first, end in runs])
        return torch.from_numpy(slots.ravel())

    def on_device(self, pages: Pages) -> torch.Tensor:
        """Return a new tensor int64 [len(pages)], without a wait."""
        return to_device(pages.astype(np.int64), self._device)

    def pages_of_row(self, table: torch.Tensor, row: int, start: int, end: int) -> Pages:
        """Return the page ids of tokens `start` to `end` of a row. Waits for a GPU."""
        if self._host is None:
            return self.pages(table[row, start:end])
        if table is not self._rows_of:
            self._rows_of, self._rows = table, table.numpy()
        size = self._page_size
        if end - start <= FEW_PAGES * size:
            item = self._rows.item
            return np.array([item(row, at) // size for at in range(start, end, size)], np.int32)
        # Slices of an array: half the time of a tensor's.
        first = self._rows[row, start:end:size]
        return (first // size).astype(np.int32, copy=False)

    def page_ids_of_row(self, table: torch.Tensor, row: int, start: int, end: int) -> torch.Tensor:
        """Return the same on the device; `start` is a page's first token. Waits for nothing."""
        if self._host is not None:
            return self.on_device(self.pages_of_row(table, row, start, end))
        return table[row, start : end : self._page_size] // self._page_size

    def pages(self, slots: torch.Tensor) -> Pages:
        """Return the page ids of whole pages of slots, int32 on the host. Waits for a GPU."""
        # The first slot of a page names it: slots of a page are consecutive.
        first = slots[:: self._page_size]
        if first.device.type != "cpu":
            first = (first // self._page_size).to("cpu")
            return first.numpy().astype(np.int32)
        return (first.numpy() // self._page_size).astype(np.int32, copy=False)
