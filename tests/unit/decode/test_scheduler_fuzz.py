"""The decode side under fire, a short run; `fuzz/scheduler.py` is the long one."""

import random
from collections import Counter

import pytest

from tests.laws.scheduler_machine import SchedulerSim, run

RUNS = 14


def _run_of(seed: int) -> SchedulerSim:
    chance = random.Random(seed)
    return run(chance.getrandbits(64), [chance.getrandbits(32) for _ in range(400)])


@pytest.mark.slow
def test_nothing_is_left_after_a_storm() -> None:
    totals: Counter[str] = Counter()
    for seed in range(RUNS):
        sim = _run_of(seed)
        totals.update(sim.decode.scheduler.counters)
        totals["steps"] += sim.counts["steps"]
    assert totals["steps"] > 400 * RUNS
    for what in (
        "finished",
        "shared_flights",
        "flight_fallbacks",
        "transfers_failed",
        "aborted",
        "skipped_tokens",
    ):
        assert totals[what], (what, totals)


@pytest.mark.slow
def test_a_run_follows_from_its_integers() -> None:
    first, again = _run_of(3), _run_of(3)
    assert first.trace == again.trace
    assert first.decode.scheduler.counters == again.decode.scheduler.counters
