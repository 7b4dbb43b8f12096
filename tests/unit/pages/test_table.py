"""The page table: rows, their lengths, and that what is unused stays -1."""

import numpy as np
import pytest

from prefixkv.errors import CallerError, CapacityError, InternalError
from prefixkv.pages.table import PageTable


def filled(table: PageTable, ids: list[int]) -> int:
    row = table.alloc_row()
    assert table.fill(row, [np.array(ids, np.int32)]) == len(ids)
    return row


def test_what_a_kernel_reads() -> None:
    table = PageTable(2, 4)
    array = table.array
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    row = filled(table, [7, 6, 9])
    table.write(row, 1, np.array([5], np.int32))
    assert array[row].tolist() == [7, 5, 9, -1]
    assert array[1 - row].tolist() == [-1] * 4
    assert table.array is array
    assert table.length(row) == 3
    assert table.pages(row).tolist() == [7, 5, 9]
    assert np.shares_memory(table.pages(row), array)
    table.check_invariants()


def test_pages_cannot_be_written_through_the_view() -> None:
    table = PageTable(1, 4)
    row = filled(table, [1])
    with pytest.raises(ValueError, match="read-only"):
        table.pages(row)[0] = 3
    table.array[row, 0] = 4  # the engine's array is not affected by that


def test_rows_come_back_empty() -> None:
    table = PageTable(3, 4)
    rows = [filled(table, [7, 8]) for _ in range(3)]
    assert sorted(rows) == [0, 1, 2]
    with pytest.raises(CapacityError, match="all 3 rows"):
        table.alloc_row()
    table.free_row(rows[1])
    table.check_invariants()
    assert table.free_rows == 1
    assert table.alloc_row() == rows[1]
    assert table.length(rows[1]) == 0
    assert table.array[rows[1]].tolist() == [-1] * 4


def test_a_page_is_appended_to_each_row() -> None:
    table = PageTable(4, 3)
    rows = [table.alloc_row(), filled(table, [5, 6]), table.alloc_row()]
    table.append([rows[2], rows[1]], np.array([10, 11], np.int32))
    table.append([], np.empty(0, np.int32))
    table.check_invariants()
    assert [table.pages(row).tolist() for row in rows] == [[], [5, 6, 11], [10]]


def test_pages_as_a_promise_names_them() -> None:
    table = PageTable(2, 4)
    row = filled(table, [1, 258, 3])
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
    row = filled(table, [1, 2])
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
