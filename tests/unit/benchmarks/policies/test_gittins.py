"""The gittins policy by hand; eviction for eviction it is held against its model in
`test_policies.py`."""

from __future__ import annotations

import pytest

from benchmarks.policies.return_tables import (
    BEGINS_S,
    LENGTHS_S,
    NUM_BINS,
    ReturnTables,
    bin_of,
    chances,
    gittins_index,
)

# --- the tables -----------------------------------------------------------------------------------


def test_the_index_looks_past_a_lull():
    """Nobody comes back in the first bins, half of all in a later one: all before are worth keeping
    for that."""
    index = gittins_index([0.0] * 10 + [0.5] + [0.0] * (NUM_BINS - 11))
    assert index[:11] == sorted(index[:11])
    assert index[0] > 0
    assert index[11:] == [0.0] * (NUM_BINS - 11)


def test_the_index_of_a_steady_rate_is_that_rate_at_every_age():
    assert gittins_index([1e-4 * length_s for length_s in LENGTHS_S]) == pytest.approx(
        [1e-4] * NUM_BINS, rel=0.06
    )


def test_chances_lean_on_what_was_known_before():
    assert chances([0, 90], [0, 45], [0.2, 0.2], trust=10.0) == pytest.approx([0.2, 0.47])


def test_those_still_out_count_as_not_having_come_back():
    tables = ReturnTables([[0]], power=0.7, trust=1.0, period=1000)
    for at in range(100):
        tables.start(0, at * 10.0)
    for _ in range(5):
        tables.returned(0, 3.0)
    tables.lost(0, 100.0)
    (entered,) = tables._entered()
    assert entered[0] == 100
    assert entered[bin_of(3.0) + 1] == 99 - 5  # the last one started just now
    old_enough = sum(990.0 - at * 10.0 >= BEGINS_S[bin_of(500.0)] for at in range(100))
    assert entered[bin_of(500.0)] == old_enough - 6
    assert entered[-1] == 0


@pytest.mark.slow
def test_snapshots_are_bounded():
    tables = ReturnTables([[0]], power=0.7, trust=1.0, period=50)
    for at in range(20_000):
        tables.start(0, at * 0.5)
    assert len(tables._snapshots) <= 1000 + 25 + 2
