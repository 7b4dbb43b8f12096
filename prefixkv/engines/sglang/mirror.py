"""A copy on the host of the page ids in requests' rows, made before a checkpoint needs them.

SGLang's rows of slots lie on the device. Reading one waits for all that is queued before, at times
a forward pass. So when SGLang has written to a row, a copy of the first slot of each new page is
queued into pinned memory, and a checkpoint takes what has arrived. Pages that are not known here
are read from the row: a write that goes unnoticed costs a wait, and never gives a wrong page. A row
that SGLang gives to another request counts as a new row.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from prefixkv.engines.sglang.slots import to_device
from prefixkv.spi import InternalError, Pages, pages_for


class _MirroredRow:
    """A row of which pages [first, end) are known or being copied; `pages` are those here."""

    __slots__ = ("end", "first", "generation", "pages")

    def __init__(self, generation: int, first: int) -> None:
        self.generation = generation  # SGLang's count of requests that have had this row
        self.first = self.end = first
        self.pages = array("i")


class _Copy(NamedTuple):
    """A queued copy of slots to the host."""

    slots: torch.Tensor  # pinned; not to be read before the event is over
    event: Any
    parts: list[tuple[_MirroredRow, int]]  # per row its number of slots, in order


class RowMirror:
    """The mirror of all rows. See the module's text.

    Owner: SGLang's scheduler, which calls it on the stream on which rows are written. Takes 4 bytes
    per page of a request that no lock of the tree covers.

    Args:
        pool: SGLang's `ReqToTokenPool`, not on a CPU.
        page_size: tokens per page.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._event = torch.get_device_module(pool.req_to_token.device).Event
        self._rows: dict[int, _MirroredRow] = {}
        self._copies: deque[_Copy] = deque()  # in the order of their events
        self._steps = 0

    # --- following --------------------------------------------------------------------------------

    def written(self, kv: Any, prefix_len: int) -> None:
        """Queue a copy to the mirror of the new pages of a request's row, without a wait.

        O(new pages).

        SGLang has written tokens `prefix_len` to `kv.kv_allocated_len`, and perhaps rewritten the
        same slots before them.
        """
        row = self._find(kv.req_pool_idx)
        # Start again where known pages were replaced: the request gave some back, and got others.
        if row is None or row.end > pages_for(prefix_len, self._page_size):
            first = prefix_len // self._page_size
            row = self._rows[kv.req_pool_idx] = _MirroredRow(
                self._generation(kv.req_pool_idx), first
            )
        start, row.end = row.end, pages_for(kv.kv_allocated_len, self._page_size)
        if start < row.end:
            first_slots = slice(start * self._page_size, kv.kv_allocated_len, self._page_size)
            slots = self._pool.req_to_token[kv.req_pool_idx, first_slots]
            self._queue(slots, [(row, row.end - start)])

    def step(self, reqs: Iterable[Any]) -> None:
        """Note for the mirror that each of these requests was given the slot of one more token.

        Rows are looked at once in `page_size` steps. That is enough: a page has its first slot that
        many steps before it is whole, and a checkpoint needs whole pages only.
        """
        self._steps += 1
        if self._steps % self._page_size == 0:
            self.grown(reqs)

    def grown(self, reqs: Iterable[Any]) -> None:
        """Queue one copy to the mirror of all new pages of these requests' rows. O(requests)."""
        # One gather over the flat table for all rows: a copy per row would cost a launch each.
        table, size = self._pool.req_to_token, self._page_size
        places: list[int] = []
        parts: list[tuple[_MirroredRow, int]] = []
        for req in reqs:
            kv = req.kv
            row = self._find(kv.req_pool_idx)
            end = pages_for(kv.kv_allocated_len, size)
            if row is not None and row.end < end:
                begin = kv.req_pool_idx * table.shape[1]
                places += range(begin + row.end * size, begin + end * size, size)
                parts.append((row, end - row.end))
                row.end = end
        if parts:
            index = to_device(np.array(places, np.int64), table.device)
            self._queue(torch.take(table, index), parts)

    def forget(self, row_id: int, before: int) -> None:
        """Forget a mirrored row's pages before `before`: the tree has them now, or they changed."""
        row = self._find(row_id)
        if row is None or before <= row.first:
            return
        if before > row.end:
            self._rows[row_id] = _MirroredRow(row.generation, before)
            return
        # The copies of these pages must be taken first: `_take` appends in order, so `pages` would
        # otherwise start at the wrong page.
        self._await(row, before)
        del row.pages[: before - row.first]
        row.first = before

    def released(self, row_id: int) -> None:
        """Forget the mirror of a row that SGLang takes from its request."""
        # Copies that are queued for it still arrive; they go into the `_MirroredRow` that was
        # dropped here.
        self._rows.pop(row_id, None)

    # --- reading ----------------------------------------------------------------------------------

    def pages(self, row_id: int, start: int, end: int) -> Pages | None:
        """Return pages `start` to `end` of a mirrored row, or None where not all are known.

        Waits for their copies, which is short: they were queued before the step that is over now.
        """
        row = self._find(row_id)
        if row is None or not row.first <= start <= end <= row.end:
            return None
        self._await(row, end)
        return np.array(row.pages[start - row.first : end - row.first], np.int32)

    def check_invariants(self) -> None:
        """Raise InternalError for a law of the mirror of SGLang's rows that does not hold:

        - pages that are here and pages that are being copied make up all known pages of a row;
        - each copy has one slot per page of its parts.
        """
        coming: dict[int, int] = {}
        for copy in self._copies:
            for row, num_pages in copy.parts:
                coming[id(row)] = coming.get(id(row), 0) + num_pages
            if len(copy.slots) != sum(num_pages for _, num_pages in copy.parts):
                raise InternalError(f"{len(copy.slots)} slots are copied for {copy.parts}")
        for row_id, row in self._rows.items():
            known = len(row.pages) + coming.get(id(row), 0)
            if known != row.end - row.first:
                raise InternalError(f"row {row_id}: {known} pages for {row.first} to {row.end}")

    # --- inside -----------------------------------------------------------------------------------

    def _generation(self, row_id: int) -> int:
        """Return SGLang's count of the requests that have had this row, kept on the host."""
        return int(self._pool.req_generation.numpy()[row_id])

    def _find(self, row_id: int) -> _MirroredRow | None:
        """Return a row of the mirror, or None where another request has the row by now."""
        row = self._rows.get(row_id)
        return row if row is not None and row.generation == self._generation(row_id) else None

    def _queue(self, slots: torch.Tensor, parts: list[tuple[_MirroredRow, int]]) -> None:
        """Queue a copy of `slots` from the device to the mirror, for the rows in `parts`."""
        # Take in finished copies now, or their pinned memory would pile up.
        while self._copies and self._copies[0].event.query():
            self._take()
        host = torch.empty(len(slots), dtype=slots.dtype, pin_memory=True)
        host.copy_(slots, non_blocking=True)
        event = self._event()
        event.record()
        self._copies.append(_Copy(host, event, parts))

    def _await(self, row: _MirroredRow, end: int) -> None:
        """Wait until all pages of a row before `end` have reached the mirror."""
        # Copies end in the order in which they were queued: one stream runs them.
        while row.first + len(row.pages) < end:
            self._copies[0].event.synchronize()
            self._take()

    def _take(self) -> None:
        """Take the first copy, which is over, into the mirror's rows."""
        slots, _, parts = self._copies.popleft()
        pages, start = (slots.numpy() // self._page_size).astype(np.intc), 0
        for row, num_pages in parts:
            row.pages.frombytes(pages[start : start + num_pages].tobytes())
            start += num_pages
