"""The benchmark runs, and says what it measured."""

from __future__ import annotations

import pytest

from benchmarks.radix import Bench


@pytest.mark.slow
def test_a_quick_run_measures_what_has_a_target():
    rows = []
    bench = Bench(seed=0, quick=True, peer=None, tell=rows.append)
    bench.match(1024, 4, 16)
    bench.lock(4)
    bench.evict_one("lru", 50)
    bench.probes()
    assert bench.rows == rows
    assert [row["name"] for row in rows] == [
        "match_prefix", "walk", "match.pages", "lock_unlock", "lock_unlock_held_inside",
        "evict_one_page", "nodes_after_partial_matches",
    ]  # fmt: skip
    assert all(row["us"] > 0 for row in rows[:-1])
    assert rows[-1]["met"]
