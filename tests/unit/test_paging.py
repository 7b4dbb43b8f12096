"""The batch as kernels take it, against one token at a time."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkv.errors import PageStateError
from prefixkv.spi import page_table, slot_mapping


def rows_of(rng: np.random.Generator, num: int) -> list[np.ndarray]:
    return [rng.permutation(100)[: rng.integers(1, 9)].astype(np.int32) for _ in range(num)]


def test_a_page_table_has_each_row_and_then_the_pad() -> None:
    rows = rows_of(np.random.default_rng(0), 6)
    table = page_table(rows, pad=-1)
    assert table.dtype == np.int32
    assert table.shape == (6, max(map(len, rows)))
    for line, row in zip(table.tolist(), rows, strict=True):
        assert line == row.tolist() + [-1] * (len(line) - len(row))
    assert page_table(rows, width=2).tolist() == [([*row, 0])[:2] for row in rows]
    assert page_table([]).shape == (0, 0)


def test_a_slot_is_where_the_token_is_in_the_pool() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 3, 16):
        rows = rows_of(rng, 5)
        spans = [np.sort(rng.integers(0, len(row) * size + 1, 2)) for row in rows]
        starts, ends = zip(*(span.tolist() for span in spans), strict=True)
        slots = slot_mapping(rows, starts, ends, size)
        assert slots.dtype == np.int64
        assert slots.tolist() == [
            int(row[i // size]) * size + i % size
            for row, start, end in zip(rows, starts, ends, strict=True)
            for i in range(start, end)
        ]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 9)])
def test_tokens_that_the_pages_do_not_hold_are_refused(start: int, end: int) -> None:
    with pytest.raises(PageStateError, match="2 pages of 4 tokens"):
        slot_mapping([np.array([5, 6], np.int32)], [start], [end], 4)
