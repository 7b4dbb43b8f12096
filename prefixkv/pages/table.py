"""The page table: the pages that each request reads, as the array that an attention kernel indexes.
One row per request, -1 where unused.

A table only names pages; the allocator knows what holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from prefixkv.errors import CallerError, CapacityError, RequestError, check_laws
from prefixkv.paging import MAX_INDEX, Pages
from prefixkv.settings import check_whole

UNUSED: Final = -1
_BYTES: Final = 4  # an id
_UNUSED_BYTE: Final = b"\xff"  # each of `UNUSED`
_NO_ROW: Final = -1  # in `lengths`: the row is not in use


class PageTable:
    """Rows of page ids. Owner: the scheduler's thread.

    The memory never moves, so a kernel may keep `array` (int32 [max_requests + spare_rows,
    max_pages_per_request], C order). A row in use holds `length(row)` page ids and then -1; a row
    not in use only -1. The spare rows come last: they are for pages of no running request.
    """

    def __init__(self, max_requests: int, max_pages_per_request: int, spare_rows: int = 0) -> None:
        check_whole("max_requests", max_requests, 1, MAX_INDEX)
        check_whole("max_pages_per_request", max_pages_per_request, 1, MAX_INDEX)
        check_whole("spare_rows", spare_rows, 0, MAX_INDEX - max_requests)
        num_rows = max_requests + spare_rows
        self.array = np.full((num_rows, max_pages_per_request), UNUSED, np.int32)
        # Pages by row, below 0 where it is not in use.
        self.lengths = np.full(num_rows, _NO_ROW, np.int32)
        self._length = self.lengths.data  # the same memory, faster for single rows
        # By row: how often ids in it were put in place of others, or of none at once. While this
        # number and the row's length are the same, so are its ids.
        self.writes = np.zeros(num_rows, np.int64)
        self._num_writes = self.writes.data
        # The same memory as `array`, as bytes, for packed ids: little-endian, like every machine
        # that NIXL runs on. It spans all rows, so each write has to stay within its row.
        self._packed = self.array.data.cast("B")
        # Stacks: the row freed last is used next, at first the lowest.
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self.max_requests = max_requests  # rows, without the spare ones
        self._spare_rows = list(range(num_rows - 1, max_requests - 1, -1))

    @property
    def free_rows(self) -> int:
        """Number of rows that are not in use, without the spare ones."""
        return len(self._free_rows)

    @property
    def free_spare_rows(self) -> int:
        return len(self._spare_rows)

    def alloc_row(self, num_pages: int = 0, spare: bool = False) -> int:
        """Return a row for so many pages, without any, with `spare` a spare one. RequestError: they
        are more than a row holds. CapacityError: there is no row."""
        if num_pages > (most := self.array.shape[1]):
            raise RequestError(f"a row would have {num_pages} pages, the limit is {most}")
        rows = self._spare_rows if spare else self._free_rows
        if not rows:
            num_rows = len(self.array) - self.max_requests if spare else self.max_requests
            which = "spare rows" if spare else "rows"
            raise CapacityError(f"all {num_rows} {which} of the page table are in use")
        row = rows.pop()
        self._length[row] = 0
        return row

    def free_row(self, row: int) -> None:
        """Empty the row and take it back. Raises CallerError if it is not in use."""
        # `length` raises for a free row: freed twice, it would be given to two requests. Only what
        # the row holds is overwritten; the rest is -1 already.
        start, size = _BYTES * row * self.array.shape[1], _BYTES * self.length(row)
        self._packed[start : start + size] = _UNUSED_BYTE * size
        self._length[row] = _NO_ROW
        (self._free_rows if row < self.max_requests else self._spare_rows).append(row)

    def length(self, row: int) -> int:
        """Return the number of pages in a row. Raises CallerError if it is not in use."""
        # A row of -1 marks a request that has ended; numpy would take it for the last row.
        if not 0 <= row < len(self._length) or self._length[row] == _NO_ROW:
            raise CallerError(f"row {row} of the page table is not in use")
        return self._length[row]

    def pages(self, row: int) -> Pages:
        """Return a row's page ids: a read-only view, valid until the row changes."""
        view = self.array[row, : self.length(row)]
        view.flags.writeable = False
        return view

    def packed(self, row: int, start_page: int, end_page: int) -> bytes:
        """Return the page ids at [start_page, end_page) as packed little-endian int32. Raises
        CallerError if the row is not in use, or shorter."""
        length = self.length(row)
        if not 0 <= start_page <= end_page <= length:
            raise CallerError(f"pages {start_page} to {end_page} of row {row}, which has {length}")
        at = row * self.array.shape[1]
        return self._packed[_BYTES * (at + start_page) : _BYTES * (at + end_page)].tobytes()

    def fill(self, row: int, runs: Iterable[bytes | bytearray | Pages]) -> int:
        """Fill a new row with runs of ids, which fit (`alloc_row`); return their number. Nothing
        is checked: the ids come from the allocator and the tree."""
        ids = b"".join(runs)  # type: ignore[arg-type]  # arrays are buffers, whatever the stubs say
        start = _BYTES * row * self.array.shape[1]
        self._packed[start : start + len(ids)] = ids
        self._length[row] = num_pages = len(ids) // _BYTES
        self._num_writes[row] += 1
        return num_pages

    def write(self, row: int, start_page: int, ids: Pages) -> None:
        """Put ids in place of those of a row from `start_page` on, as many as it has there."""
        self.array[row, start_page : start_page + len(ids)] = ids
        self._num_writes[row] += 1

    def append(self, rows: Sequence[int], ids: Pages) -> None:
        """Append one page to each of some rows, each named once."""
        where = np.array(rows, np.intp)
        lengths = self.lengths[where]
        # Ids before lengths: a row names no page within its length that is not there yet.
        self.array[where, lengths] = ids
        self.lengths[where] = lengths + 1

    def check_invariants(self) -> None:
        """Check every law. O(its size). Raises InternalError with the state."""
        rows, columns = self.array.shape
        in_use = np.arange(columns) < self.lengths[:, None]
        free = np.flatnonzero(self.lengths == _NO_ROW).tolist()
        laws = {
            "the array is int32 in C order": self.array.dtype == np.int32
            and self.array.flags.c_contiguous,
            "lengths are in range": bool(
                ((self.lengths >= _NO_ROW) & (self.lengths <= columns)).all()
            ),
            "a row holds page ids up to its length": bool((self.array[in_use] >= 0).all()),
            "and -1 from there on": bool((self.array[~in_use] == UNUSED).all()),
            "each row is free once or in use": sorted(self._free_rows + self._spare_rows) == free,
            "spare rows come last": all(row >= self.max_requests for row in self._spare_rows)
            and all(row < self.max_requests for row in self._free_rows),
        }
        check_laws(laws, f"{rows} rows", f"lengths {self.lengths.tolist()[:50]}")
