"""Decode's host memory under fire, short runs; `fuzz/host_tier.py` has the long ones."""

import random
from collections import Counter

import pytest

from tests.models.host_machine import HostMachine, run

_HAPPENS = (
    "loads", "writes", "from host", "copies failed", "finished", "retracted", "aborted",
    "aborted while loading", "flushed with copies", "chunks", "shared_flights", "flight_fallbacks",
)  # fmt: skip


def _run_of(seed: int, steps: int) -> HostMachine:
    chance = random.Random(seed)
    return run(chance.getrandbits(64), [chance.getrandbits(32) for _ in range(steps)])


def test_what_is_read_is_what_was_written_in_a_short_storm() -> None:
    totals: Counter[str] = Counter()
    for seed in range(1000, 1005):
        totals.update(_run_of(seed, steps=200).counts)
    assert totals["loads"], totals
    assert totals["writes"], totals


@pytest.mark.slow
def test_what_is_read_is_what_was_written() -> None:
    totals: Counter[str] = Counter()
    for seed in range(25):
        totals.update(_run_of(seed, steps=400).counts)
    missing = [what for what in _HAPPENS if not totals[what]]
    assert not missing, totals
