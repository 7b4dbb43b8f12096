"""Calls per admission: the slowest ones by count do no more than an update of the policy takes."""

from __future__ import annotations

from benchmarks.admission_calls import calls_of, counted


def test_calls_are_counted_by_name() -> None:
    found = calls_of(lambda: sorted(range(3), key=lambda one: -one))
    assert found["sorted"] == 1
    assert sum(num for name, num in found.items() if name.endswith(":<lambda>")) == 1 + 3


def test_no_admission_does_much_more_than_the_others() -> None:
    """Nothing of the policy's tables is worked out in it."""
    row = counted(full=False, requests=60)
    assert row["most_calls"] < 1.1 * row["calls_p50"]
