"""The page table: the pages that each request reads, as the array that an attention kernel indexes.
One row per request, -1 where unused.

A table only names pages; the allocator knows what holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.errors import (
    CallerError,
    CapacityError,
    PageStateError,
    RequestError,
    check_laws,
)
from prefixkv.paging import MAX_INDEX, Index, PageIds, Pages, as_pages
from prefixkv.settings import check_whole

UNUSED: Final = -1
_BYTES: Final = 4  # an id
_UNUSED_BYTE: Final = b"\xff"  # each of `UNUSED`
_NO_ROW: Final = -1  # in `lengths`: the row is not in use


class Growth(NamedTuple):
    """Rows that may have one page more, checked, and their present lengths."""

    rows: Index
    lengths: npt.NDArray[np.int32]


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

    def alloc_row(self, spare: bool = False) -> int:
        """Return a row without pages, with `spare` a spare one. CapacityError if there is none."""
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
        """Fill a new row with runs of ids, which fit (`check_fits`); return their number. Nothing
        is checked: the ids come from the allocator and the tree."""
        ids = b"".join(runs)  # type: ignore[arg-type]  # arrays are buffers, whatever the stubs say
        start = _BYTES * row * self.array.shape[1]
        self._packed[start : start + len(ids)] = ids
        self._length[row] = num_pages = len(ids) // _BYTES
        self._num_writes[row] += 1
        return num_pages

    def check_fits(self, num_pages: int) -> None:
        """Raise RequestError for more pages than a row can hold."""
        if num_pages > self.array.shape[1]:
            raise RequestError(
                f"a row would have {num_pages} pages, the limit is {self.array.shape[1]}"
            )

    def write(self, row: int, start_page: int, pages: PageIds) -> None:
        """Put `pages` at positions start_page, start_page + 1, ... of a row, at most its length,
        over what was there.

        Raises, with nothing changed, RequestError: they reach beyond the row's end; CallerError:
        the row is not in use, or there would be a gap; PageStateError: a page id is negative.
        """
        length = self.length(row)
        ids = as_pages(pages)
        end = start_page + len(ids)
        if not 0 <= start_page <= length:
            raise CallerError(
                f"start_page is {start_page}, must be in [0, {length}], row {row} has {length} "
                "pages"
            )
        if end > self.array.shape[1]:
            raise RequestError(
                f"row {row} would have {end} pages, the limit is {self.array.shape[1]}"
            )
        if len(ids) and ids.min() < 0:
            raise PageStateError(f"page {ids.min()} is negative")
        self.array[row, start_page:end] = ids
        self._num_writes[row] += 1
        if end > length:
            self._length[row] = end

    def check_growth(self, rows: npt.NDArray[np.integer] | Sequence[int]) -> Growth:
        """Check that each row is in use, named once, and has room for one page more, so that
        nothing can fail once pages are taken. Raises CallerError, RequestError."""
        row_ids = np.asarray(rows)
        if row_ids.ndim != 1 or (len(row_ids) and row_ids.dtype.kind not in "iu"):
            raise CallerError(f"rows are {row_ids.dtype} {row_ids.shape}, must be integers [n]")
        row_ids = row_ids.astype(np.intp, copy=False)
        if len(row_ids) == 0:
            return Growth(row_ids, self.lengths[:0])
        # Sorted, the ends show the range and neighbours show duplicates. The range comes before the
        # look-up: numpy would take -1 for the last row.
        ordered = np.sort(row_ids)
        for row in (ordered[0], ordered[-1]):
            if not 0 <= row < len(self.lengths):
                raise CallerError(f"row {row} of the page table is not in use")
        lengths = self.lengths[row_ids]
        if lengths.min() == _NO_ROW:
            raise CallerError(f"row {row_ids[lengths.argmin()]} of the page table is not in use")
        # Room in the longest row is room in all.
        if lengths.max() >= self.array.shape[1]:
            row = row_ids[lengths.argmax()]
            raise RequestError(
                f"row {row} would have {lengths.max() + 1} pages, the limit is "
                f"{self.array.shape[1]}"
            )
        if b"\1" in (ordered[1:] == ordered[:-1]).tobytes():
            raise CallerError("a row is named twice")
        return Growth(row_ids, lengths)

    def append_checked(self, growth: Growth, pages: Pages) -> None:
        """Append one page to each row, unchanged since `check_growth`."""
        # Ids before lengths: a row names no page within its length that is not there yet.
        self.array[growth.rows, growth.lengths] = pages
        self.lengths[growth.rows] = growth.lengths + 1

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
