"""The decode side under fire, a short run; `fuzz/run.py scheduler` is the long one."""

import random
from collections import Counter
from itertools import count

import pytest

from tests.laws.scheduler_machine import SchedulerSim, run

RUNS = 14


def _run_of(seed: int, steps: int = 400, has_host: bool = False) -> SchedulerSim:
    chance = random.Random(seed)
    spelled = [chance.getrandbits(32) for _ in range(1 + steps)]
    return run(spelled[0], spelled[1:], has_host)


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


@pytest.mark.parametrize("runs", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_what_comes_from_host_memory_is_what_was_written(runs: int) -> None:
    """With windows and states too, which no copy has. As many runs more as it takes until all of it
    has happened: which of them loads is chance."""
    totals: Counter[str] = Counter()
    wanted = ["loads", "writes", "with more", *["failed"] * (runs == 24)]
    for seed in count():
        sim = _run_of(seed, 300, has_host=True)
        totals.update(sim.copies.counts)
        totals["with more"] += bool(sim.num_slots or sim.window)
        if seed + 1 >= runs and min(totals[what] for what in wanted) > 2:
            break
        assert seed < 3 * runs, totals


@pytest.mark.slow
def test_a_run_follows_from_its_integers() -> None:
    first, again = _run_of(3), _run_of(3)
    assert first.trace == again.trace
    assert first.decode.scheduler.counters == again.decode.scheduler.counters
