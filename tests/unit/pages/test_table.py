"""The page table: rows, their lengths, and that what is unused stays -1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixkv.errors import (
    CallerError,
    CapacityError,
    InternalError,
    PageStateError,
    RequestError,
)
from prefixkv.pages.table import PageTable


def snapshot(table: PageTable) -> tuple[object, ...]:
    table.check_invariants()
    return table.array.tolist(), table.lengths.tolist(), table.free_rows


def test_what_a_kernel_reads() -> None:
    table = PageTable(2, 4)
    array = table.array
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    row = table.alloc_row()
    table.write(row, 0, np.array([7, 5], np.int32))
    table.write(row, 2, [9])
    assert array[row].tolist() == [7, 5, 9, -1]
    assert array[1 - row].tolist() == [-1] * 4
    assert table.array is array
    assert table.length(row) == 3
    assert table.pages(row).tolist() == [7, 5, 9]
    assert np.shares_memory(table.pages(row), array)
    table.check_invariants()


def test_pages_cannot_be_written_through_the_view() -> None:
    table = PageTable(1, 4)
    row = table.alloc_row()
    table.write(row, 0, [1])
    with pytest.raises(ValueError, match="read-only"):
        table.pages(row)[0] = 3
    table.array[row, 0] = 4  # the engine's array is not affected by that


def test_rows_come_back_empty() -> None:
    table = PageTable(3, 4)
    rows = [table.alloc_row() for _ in range(3)]
    assert sorted(rows) == [0, 1, 2]
    for row in rows:
        table.write(row, 0, [row, row + 1])
    with pytest.raises(CapacityError, match="all 3 rows"):
        table.alloc_row()
    table.free_row(rows[1])
    table.check_invariants()
    assert table.free_rows == 1
    assert table.alloc_row() == rows[1]
    assert table.length(rows[1]) == 0
    assert table.array[rows[1]].tolist() == [-1] * 4


def append_to_each(table: PageTable, rows: Any, pages: Any) -> None:
    """A page for each of the rows."""
    table.append_checked(table.check_growth(rows), np.array(pages, np.int32))


def test_append_to_each() -> None:
    table = PageTable(4, 3)
    rows = [table.alloc_row() for _ in range(3)]
    table.write(rows[1], 0, [5, 6])
    append_to_each(table, np.array([rows[2], rows[1]]), np.array([10, 11], np.int32))
    append_to_each(table, [], [])
    table.check_invariants()
    assert [table.pages(row).tolist() for row in rows] == [[], [5, 6, 11], [10]]


@pytest.mark.parametrize(
    ("rows", "pages", "error", "message"),
    [
        ([0, 3], [3, 4], CallerError, "row 3 of the page table is not in use"),
        ([0, 2], [3, 4], CallerError, "row 2 of the page table is not in use"),
        ([0, -1], [3, 4], CallerError, "row -1 of the page table is not in use"),
        ([0, 0], [3, 4], CallerError, "a row is named twice"),
        ([0, 1], [3, 4], RequestError, "row 1 would have 3 pages, the limit is 2"),
    ],
)
def test_append_to_each_all_or_nothing(
    rows: list[int], pages: list[int], error: type[Exception], message: str
) -> None:
    table = PageTable(3, 2)
    table.alloc_row()
    table.write(table.alloc_row(), 0, [1, 2])
    before = snapshot(table)
    with pytest.raises(error, match=message):
        append_to_each(table, rows, pages)
    assert snapshot(table) == before


@pytest.mark.parametrize("rows", [[0, 1, 0], [2, 1, 2]])
def test_a_row_is_named_twice_though_not_side_by_side(rows: list[int]) -> None:
    table = PageTable(3, 2)
    for _ in range(3):
        table.alloc_row()
    with pytest.raises(CallerError, match="a row is named twice"):
        table.check_growth(rows)


@pytest.mark.parametrize(
    ("row", "start_page", "pages", "error", "message"),
    [
        (1, 0, [3], CallerError, "row 1 of the page table is not in use"),
        (-1, 0, [3], CallerError, "row -1"),
        (2, 0, [3], CallerError, "row 2"),
        (0, 3, [3], CallerError, r"start_page is 3, must be in \[0, 2\], row 0 has 2 pages"),
        (0, -1, [3], CallerError, "start_page is -1"),
        (0, 2, [3, 4], RequestError, "row 0 would have 4 pages, the limit is 3"),
        (0, 1, [3, -2], PageStateError, "page -2 is negative"),
        (0, 1, [2**32 + 1], PageStateError, "does not fit"),
        (0, 1, [1.5], PageStateError, "must be integers"),
    ],
)
def test_a_wrong_write_changes_nothing(
    row: int, start_page: int, pages: list[int], error: type[Exception], message: str
) -> None:
    table = PageTable(2, 3)
    table.write(table.alloc_row(), 0, [1, 2])
    before = snapshot(table)
    with pytest.raises(error, match=message):
        table.write(row, start_page, pages)
    assert snapshot(table) == before


def test_pages_as_a_promise_names_them() -> None:
    table = PageTable(2, 4)
    row = table.alloc_row()
    table.write(row, 0, [1, 258, 3])
    assert table.packed(row, 1, 3) == bytes([2, 1, 0, 0, 3, 0, 0, 0])
    assert table.packed(row, 2, 2) == b""
    for start, end in ((-1, 1), (2, 1), (2, 4)):
        with pytest.raises(CallerError, match=f"pages {start} to {end} of row {row}, which has 3"):
            table.packed(row, start, end)
    with pytest.raises(CallerError, match="not in use"):
        table.packed(1 - row, 0, 0)


@pytest.mark.parametrize("break_it", ["hole", "leftover", "length", "rows"])
def test_check_invariants_sees(break_it: str) -> None:
    table = PageTable(2, 3)
    row = table.alloc_row()
    table.write(row, 0, [1, 2])
    table.check_invariants()
    if break_it == "hole":
        table.array[row, 0] = -1
    elif break_it == "leftover":
        table.array[row, 2] = 9
    elif break_it == "length":
        table.lengths[row] = 4
    else:
        table._free_rows.append(row)
    with pytest.raises(InternalError, match="broken"):
        table.check_invariants()


def test_a_row_is_filled_from_packed_runs_and_arrays() -> None:
    table = PageTable(2, 5)
    row = table.alloc_row()
    runs = [np.array(ids, np.int32) for ids in ([7, 5], [9], [], [2, 4])]
    packed = [runs[0].tobytes(), bytearray(runs[1])]
    assert table.fill(row, [*packed, *runs[2:]]) == 5
    assert table.pages(row).tolist() == [7, 5, 9, 2, 4]
    table.check_invariants()
