"""Page ids as runs of neighbours, against naive ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixkv.engines.sglang.slots import MAX_RUNS, packed_range, page_runs

POOL = 300
RUN = st.tuples(st.integers(-3, POOL + 3), st.integers(1, 40))
IDS = st.lists(RUN, max_size=MAX_RUNS + 2).map(
    lambda runs: [id for first, length in runs for id in range(first, first + length)]
)


def pack(ids: list[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def naive_runs(ids: list[int]) -> list[tuple[int, int]]:
    """Ids that are not in the pool are runs of their own; a negative one reads as a large one."""
    runs: list[tuple[int, int]] = []
    for id in (one % 2**32 for one in ids):
        if runs and id == runs[-1][1] < POOL:
            runs[-1] = runs[-1][0], id + 1
        else:
            runs.append((id, id + 1))
    return runs


@example([POOL - 2, POOL - 1, 5, 6])
@given(IDS)
def test_runs_are_those_of_a_naive_look(ids: list[int]) -> None:
    expected = naive_runs(ids)
    found = page_runs(pack(ids), packed_range(POOL))
    # It may give up where the first runs of many pages are short.
    many = len(expected) > MAX_RUNS
    assert (found is None) if many else (found in (expected, None))
    if len(ids) <= 64:
        assert (found is None) == many


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, POOL])
def test_neighbours_are_one_run(length: int) -> None:
    assert page_runs(pack([*range(length)]), packed_range(POOL)) == [(0, length)]


def test_very_many_runs_are_left_after_the_first() -> None:
    pool = 2000
    ids = packed_range(pool)
    assert page_runs(pack([5, *range(7, pool)]), ids) == [(5, 6), (7, pool)]
    assert page_runs(pack([5, 7, *range(9, pool)]), ids) is None
    assert page_runs(pack([*range(0, pool, 2)]), ids) is None
