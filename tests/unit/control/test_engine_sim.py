"""Both sides whole, over a bad network, with aborts, failures and restarts, each run from one seed:
workers of one and of several ranks, with staging, extra state and windows. Single ranks with every
fault as a step of its own: ../decode/test_scheduler_fuzz.py. The long profile: `fuzz/run.py
mesh_pair`."""

from typing import Any

import pytest

from tests.support.sim import SINGLE, Storm
from tests.support.sim_engines import EngineSim, simulation, with_windows


def seeds(quick: int, *more: int, begin: int = 0) -> Any:
    """The first ones, from `begin` on, at once, the others in CI's second part."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in more]
    return pytest.mark.parametrize("seed", [*range(begin, begin + quick), *slow])


@seeds(1, 1, 2, 3)
def test_what_engines_fail_is_cached_nowhere_and_reaches_none_that_joined(seed: int) -> None:
    """Law 10: wrong KV that an engine has found, before it handed it over or at once after, is
    found in no hit. With windows and checkpoints, and with extra state."""
    more: dict[str, Any] = {}
    if seed % 2:
        more = {"window": 9, "window_pages": (24, 16), "checkpoints": 3}
    elif seed:
        more = {"num_slots": 4}
    sim = EngineSim(
        seed, Storm(), SINGLE, decode_pages=40, num_requests=40,
        failure_policy=("fail", "retry")[seed // 2], spoilt_rate=0.25, **more,
    )  # fmt: skip
    sim.run()
    assert sim.counters["spoilt on decode"] >= 1
    assert sim.counters["spoilt on prefill"] >= 2
    assert sim.decode.scheduler.counters["skipped_tokens"] > 0


@pytest.mark.slow
@seeds(2, 3, 40, 53)  # 1: a fence that other ranks must hear of
def test_ranks_and_staging_end_with_nothing_lost(seed: int) -> None:
    simulation(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_without_faults_ranks_have_every_byte_and_a_run_follows_from_its_seed(seed: int) -> None:
    runs = []
    for _ in range(2 if seed == 0 else 1):
        sim = simulation(seed, Storm())
        sim.run()
        counters = sim.decode.scheduler.counters
        runs.append((sim.now_s, sim.fabric.steps, sim.finished, dict(counters)))
        assert sim.finished == counters["finished"] >= 10
        assert not counters["transfers_failed"]
    assert runs[0] == runs[-1]


@seeds(1, 1, 5, 7, 9, 10, begin=16)  # unequal sizes, staged or not, with replicas; 1: equal
def test_ranks_with_window_layers_end_with_nothing_lost(seed: int) -> None:
    with_windows(seed).run()
