"""Page ids as runs of neighbours, and the flags of a pool's pages, against naive ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixkv.cache.page_flags import MAX_RUNS, PageFlags, packed_range, page_runs

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


@example([5, 6, 7, 1, 2, 5], (9, 1))
@example([2**31 - 1, -(2**31)], (9, 1))
@example([-1, 0, 1], (9, 1))
@given(IDS, RUN)
def test_pages_that_may_not_come_in_are_never_called_free(
    ids: list[int], there: tuple[int, int]
) -> None:
    flags = PageFlags(POOL)
    flagged = {id for id in range(there[0], sum(there)) if 0 <= id < POOL}
    flags.array[sorted(flagged)] = True
    runs = flags.free_runs(pack(ids))
    in_pool = all(0 <= id < POOL for id in ids)
    if len(set(ids)) < len(ids) or not in_pool or flagged & {*ids}:
        assert runs is None
    elif runs is not None:
        flags.set_runs(runs)
        assert set(np.flatnonzero(flags.array)) == flagged | {*ids}


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, POOL])
def test_neighbours_are_one_run(length: int) -> None:
    assert page_runs(pack([*range(length)]), packed_range(POOL)) == [(0, length)]
    assert PageFlags(length).free_runs(pack([*range(length)])) == [(0, length)]


def test_very_many_runs_are_left_after_the_first() -> None:
    pool = 2000
    ids = packed_range(pool)
    assert page_runs(pack([5, *range(7, pool)]), ids) == [(5, 6), (7, pool)]
    assert page_runs(pack([5, 7, *range(9, pool)]), ids) is None
    assert page_runs(pack([*range(0, pool, 2)]), ids) is None
