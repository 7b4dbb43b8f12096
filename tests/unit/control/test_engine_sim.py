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


def pair_of(number: int, **more: Any) -> dict[str, Any]:
    policy = ("fail", "retry")[number % 2]
    return {"decode_pages": (13, 18, 40)[number % 3], "failure_policy": policy, **more}


PAIRS = [
    *((storm, seed, pair_of(seed)) for storm in STORMS for seed in (0, 1, 11)),
    # With extra state: also with fewer slots than rows, and retractions.
    *(
        (storm, number, pair_of(number, num_slots=(8, 3, 2)[number % 3]))
        for number, storm in enumerate(STORMS)
    ),
]  # 11: "late frames" writes to freed pages if stale frames were taken


def with_window(number: int) -> dict[str, Any]:
    """With a small window group, with and without checkpoints on prefill, or with extra state."""
    checkpoints = (3, 0, 6, 2)[number % 4]
    return pair_of(
        number, window=(9, 2, 5, 14)[number % 4], checkpoints=checkpoints,
        window_pages=((16, 10), (24, 16), (32, 40))[number % 3], num_slots=0 if checkpoints else 4,
    )  # fmt: skip


def check_pair(storm: str, seed: int, sizes: dict[str, Any]) -> None:
    sim = PairSim(seed, STORMS[storm], **sizes)
    sim.run()
    if storm == "calm":
        assert sim.finished == sim.decode.scheduler.counters["finished"] >= 5
        assert sim.decode.scheduler.counters["skipped_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("storm", "seed", "sizes"), PAIRS, ids=str)
def test_pair_ends_with_nothing_lost(storm: str, seed: int, sizes: dict[str, Any]) -> None:
    check_pair(storm, seed, sizes)


@pytest.mark.parametrize(
    ("number", "storm"),
    [
        pytest.param(number, storm, marks=[] if storm in ("calm", "junk") else pytest.mark.slow)
        for number, storm in enumerate(STORMS)
    ],
)
def test_pair_with_window_layers_ends_with_nothing_lost(number: int, storm: str) -> None:
    check_pair(storm, number, with_window(number))


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
