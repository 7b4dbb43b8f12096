"""Page ids of requests' rows, on the host before a checkpoint needs them.

SGLang's rows of slots lie on the device. To read one there waits for all that is queued before, a
forward pass at times. So when SGLang has written to a row, a copy of the first slot of each new
page is queued into pinned memory, and a checkpoint takes what has arrived.

What is not known here is read from the row: a row whose writer says nothing costs a wait, and gives
no wrong page. A row counts as another one when SGLang gives it to another request.
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


class _Row:
    """Pages [first, end) of a row are known or on their way; `pages` are those that are here."""

    __slots__ = ("end", "first", "generation", "pages")

    def __init__(self, generation: int, first: int) -> None:
        self.generation = generation  # SGLang's count of requests that had this row
        self.first = self.end = first
        self.pages = array("i")


class _Copy(NamedTuple):
    slots: torch.Tensor  # pinned; not to be read before the event is over
    event: Any
    parts: list[tuple[_Row, int]]  # how many of the slots are whose, in order


class RowMirror:
    """See the module's text. Owner: SGLang's scheduler, which calls it on the stream on which rows
    are written. Takes 4 bytes for each page of a request that is in no lock of the tree.

    Args:
        pool: SGLang's `ReqToTokenPool`, not on a CPU.
        page_size: tokens a page.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._event = torch.get_device_module(pool.req_to_token.device).Event
        self._rows: dict[int, _Row] = {}
        self._copies: deque[_Copy] = deque()  # in the order of their events
        self._steps = 0

    # --- following --------------------------------------------------------------------------------

    def written(self, kv: Any, prefix_len: int) -> None:
        """SGLang wrote tokens `prefix_len` to `kv.kv_allocated_len` of a request's row, and perhaps
        once more what was before them. O(new pages), and nothing is waited for."""
        row = self._find(kv.req_pool_idx)
        # Other pages than those that were known: a request that gave some back, and got new ones.
        if row is None or row.end > pages_for(prefix_len, self._page_size):
            first = prefix_len // self._page_size
            row = self._rows[kv.req_pool_idx] = _Row(self._generation(kv.req_pool_idx), first)
        start, row.end = row.end, pages_for(kv.kv_allocated_len, self._page_size)
        if start < row.end:
            first_slots = slice(start * self._page_size, kv.kv_allocated_len, self._page_size)
            slots = self._pool.req_to_token[kv.req_pool_idx, first_slots]
            self._queue(slots, [(row, row.end - start)])

    def step(self, reqs: Iterable[Any]) -> None:
        """These requests were given the slot of one more token each.

        Once in `page_size` steps they are looked at: a page has its first slot that many steps
        before it is whole, and only then a checkpoint needs it.
        """
        self._steps += 1
        if self._steps % self._page_size == 0:
            self.grown(reqs)

    def grown(self, reqs: Iterable[Any]) -> None:
        """These requests' rows may have new pages, up to `kv_allocated_len`. O(requests), and one
        copy for all new pages."""
        table, size = self._pool.req_to_token, self._page_size
        places: list[int] = []
        parts: list[tuple[_Row, int]] = []
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
        """Pages before `before` of a row are in the tree and locked there, or are others now."""
        row = self._find(row_id)
        if row is None or before <= row.first:
            return
        if before > row.end:
            self._rows[row_id] = _Row(row.generation, before)
            return
        self._await(row, before)
        del row.pages[: before - row.first]
        row.first = before

    def released(self, row_id: int) -> None:
        """The row is nobody's."""
        self._rows.pop(row_id, None)

    # --- reading ----------------------------------------------------------------------------------

    def pages(self, row_id: int, start: int, end: int) -> Pages | None:
        """The ids of pages `start` to `end` of a row, or None where not all of them are known.

        Waits for their copies; those were queued before the step whose results SGLang has.
        """
        row = self._find(row_id)
        if row is None or not row.first <= start <= end <= row.end:
            return None
        self._await(row, end)
        return np.array(row.pages[start - row.first : end - row.first], np.int32)

    def check_invariants(self) -> None:
        """Raises InternalError for a law that does not hold:

        - of each row the pages that are here and those that are on their way are all it knows;
        - each copy has a slot for each page of its parts.
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
        return int(self._pool.req_generation.numpy()[row_id])

    def _find(self, row_id: int) -> _Row | None:
        row = self._rows.get(row_id)
        return row if row is not None and row.generation == self._generation(row_id) else None

    def _queue(self, slots: torch.Tensor, parts: list[tuple[_Row, int]]) -> None:
        while self._copies and self._copies[0].event.query():
            self._take()
        host = torch.empty(len(slots), dtype=slots.dtype, pin_memory=True)
        host.copy_(slots, non_blocking=True)
        event = self._event()
        event.record()
        self._copies.append(_Copy(host, event, parts))

    def _await(self, row: _Row, end: int) -> None:
        while row.first + len(row.pages) < end:
            self._copies[0].event.synchronize()
            self._take()

    def _take(self) -> None:
        """The first copy is over: its pages are here."""
        slots, _, parts = self._copies.popleft()
        pages, start = (slots.numpy() // self._page_size).astype(np.intc), 0
        for row, num_pages in parts:
            row.pages.frombytes(pages[start : start + num_pages].tobytes())
            start += num_pages
