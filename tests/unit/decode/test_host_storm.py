"""Decode's host memory under fire, short runs; `fuzz/host_tier.py` has the long ones."""

import random
from collections import Counter

import pytest

from tests.laws.host_machine import KINDS, HostMachine, run

_HAPPENS = (
    "loads", "writes", "from host", "copies failed", "finished", "retracted", "aborted",
    "aborted while loading", "flushed with copies", "chunks", "shared_flights", "flight_fallbacks",
)  # fmt: skip


def _run_of(seed: int, steps: int, kind: str = "pages") -> HostMachine:
    chance = random.Random(seed)
    return run(chance.getrandbits(64), [chance.getrandbits(32) for _ in range(steps)], kind)


@pytest.mark.parametrize("kind", ["pages", "both"])
def test_what_is_read_is_what_was_written_in_a_short_storm(kind: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(1000, 1005):
        totals.update(_run_of(seed, 200, kind).counts)
    assert totals["loads"], totals
    assert totals["writes"], totals


@pytest.mark.slow
def test_what_is_read_is_what_was_written() -> None:
    totals: Counter[str] = Counter()
    for seed in range(25):
        totals.update(_run_of(seed, steps=400).counts)
    missing = [what for what in _HAPPENS if not totals[what]]
    assert not missing, totals


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_windows_and_states_come_with_what_is_loaded(kind: str) -> None:
    totals: Counter[str] = Counter()
    for seed in range(100, 105):
        totals.update(_run_of(seed, 300, kind).counts)
    missing = [what for what in ("loads", "from host", "copies failed") if not totals[what]]
    assert not missing, totals
