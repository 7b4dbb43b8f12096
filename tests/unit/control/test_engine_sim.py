"""Both sides whole, over a bad network, with aborts, failures and restarts, each run from one seed:
single ranks, and workers of several ranks with staging. The long profiles: `fuzz/run.py pair`, and
`mesh_pair`."""

from typing import Any

import pytest

from tests.support.sim import Storm
from tests.support.sim_engines import STORMS, PairSim, simulation, with_windows


def seeds(quick: int, *more: int, begin: int = 0) -> Any:
    """The first ones, from `begin` on, at once, the others in CI's second part."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in more]
    return pytest.mark.parametrize("seed", [*range(begin, begin + quick), *slow])


@pytest.mark.slow
@seeds(1, 1, 11)  # 11: "late frames" writes to freed pages if stale frames were taken
@pytest.mark.parametrize("storm", STORMS)
def test_pair_ends_with_nothing_lost(storm: str, seed: int) -> None:
    policy = "retry" if seed % 2 else "fail"
    sim = PairSim(seed, STORMS[storm], decode_pages=(13, 18, 40)[seed % 3], failure_policy=policy)
    sim.run()
    if storm == "calm":
        assert sim.finished == sim.decode.scheduler.counters["finished"] >= 6
        assert sim.decode.scheduler.counters["skipped_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "storm"), list(enumerate(STORMS)))
def test_pair_with_extra_state_ends_with_nothing_lost(number: int, storm: str) -> None:
    """Also with fewer slots than rows, and retractions."""
    sim = PairSim(
        number,
        STORMS[storm],
        decode_pages=(13, 18, 40)[number % 3],
        failure_policy=("fail", "retry")[number % 2],
        num_slots=(8, 3, 2)[number % 3],
    )
    sim.run()
    if storm == "calm":
        assert sim.finished == sim.decode.scheduler.counters["finished"] >= 5


@pytest.mark.parametrize(
    ("number", "storm"),
    [
        pytest.param(number, storm, marks=[] if storm in ("calm", "junk") else pytest.mark.slow)
        for number, storm in enumerate(STORMS)
    ],
)
def test_pair_with_window_layers_ends_with_nothing_lost(number: int, storm: str) -> None:
    """With small window groups, with and without checkpoints on prefill, or with extra state."""
    checkpoints = (3, 0, 6, 2)[number % 4]
    sim = PairSim(
        number,
        STORMS[storm],
        decode_pages=(13, 18, 40)[number % 3],
        failure_policy=("fail", "retry")[number % 2],
        window=(9, 2, 5, 14)[number % 4],
        window_pages=((16, 10), (24, 16), (32, 40))[number % 3],
        checkpoints=checkpoints,
        num_slots=0 if checkpoints else 4,
    )
    sim.run()
    if storm == "calm":
        assert sim.finished == sim.decode.scheduler.counters["finished"] >= 5


@seeds(1, 1, 2, 3)
def test_what_engines_fail_is_cached_nowhere_and_reaches_none_that_joined(seed: int) -> None:
    """Law 10: wrong KV that an engine has found, before it handed it over or at once after, is
    found in no hit. With windows and checkpoints, and with extra state."""
    more: dict[str, Any] = {}
    if seed % 2:
        more = {"window": 9, "window_pages": (24, 16), "checkpoints": 3}
    elif seed:
        more = {"num_slots": 4}
    sim = PairSim(
        seed, STORMS["calm"], decode_pages=40, num_requests=40,
        failure_policy=("fail", "retry")[seed // 2], spoilt_rate=0.15, **more,
    )  # fmt: skip
    sim.run()
    assert sim.counters["spoilt on decode"] >= 1
    assert sim.counters["spoilt on prefill"] >= 2
    assert sim.decode.scheduler.counters["skipped_tokens"] > 0


@pytest.mark.slow
def test_same_seed_same_run() -> None:
    runs = []
    for _ in range(2):
        sim = PairSim(11, STORMS["everything"])
        sim.run()
        runs.append(
            (sim.now_s, sim.fabric.steps, sim.finished, dict(sim.decode.scheduler.counters))
        )
    assert runs[0] == runs[1]


@pytest.mark.slow
@seeds(2, 3, 40, 53)  # 1: a fence that other ranks must hear of
def test_ranks_and_staging_end_with_nothing_lost(seed: int) -> None:
    simulation(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_without_faults_ranks_have_every_byte(seed: int) -> None:
    sim = simulation(seed, Storm())
    sim.run()
    assert sim.finished == sim.decode.scheduler.counters["finished"] >= 10
    assert not sim.decode.scheduler.counters["transfers_failed"]


@seeds(1, 1, 5, 7, 9, 10, begin=16)  # unequal sizes, staged or not, with replicas; 1: equal
def test_ranks_with_window_layers_end_with_nothing_lost(seed: int) -> None:
    with_windows(seed).run()
