"""The pair test: both sides whole, over a bad network, with aborts, failures and restarts, each run
from one seed."""

import pytest

from tests.models.pair_sim import Chaos, PairSim

STORMS = {
    "calm": Chaos(),
    "network": Chaos(drop=0.08, duplicate=0.1, reorder=0.3),
    "late frames": Chaos(duplicate=0.4, reorder=0.6, abort=0.06),
    "junk": Chaos(junk=0.1, drop=0.02),
    "aborts": Chaos(abort=0.05, reorder=0.2, duplicate=0.1),
    "writes fail": Chaos(fail_at_post=0.05, fail_at_check=0.08, lose_notification=0.2),
    "restarts": Chaos(restart=0.006, drop=0.03),
    "flushes": Chaos(flush=0.02, abort=0.01),
    "everything": Chaos(
        drop=0.05, duplicate=0.05, reorder=0.2, abort=0.02, fail_at_post=0.02, fail_at_check=0.03,
        lose_notification=0.1, restart=0.003, junk=0.02, flush=0.003,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "seed", [0, 1, 11]
)  # 11: "late frames" writes to freed pages if stale frames were taken
@pytest.mark.parametrize("storm", STORMS)
def test_pair_ends_with_nothing_lost(storm: str, seed: int) -> None:
    policy = "retry" if seed % 2 else "fail"
    sim = PairSim(seed, STORMS[storm], decode_pages=(13, 18, 40)[seed % 3], failure_policy=policy)
    sim.run()
    if storm == "calm":
        assert sim.finished == sim.decode.scheduler.counters["finished"] >= 8
        assert sim.decode.scheduler.counters["hit_tokens"] > 0


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
    assert all(
        side.state.canaries_live() for side in (sim.decode, sim.prefill) if side.state is not None
    )
    if storm == "calm":
        assert sim.finished == sim.decode.scheduler.counters["finished"] >= 8


def test_same_seed_same_run() -> None:
    runs = []
    for _ in range(2):
        sim = PairSim(11, STORMS["everything"])
        sim.run()
        runs.append(
            (sim.now_s, sim.fabric.steps, sim.finished, dict(sim.decode.scheduler.counters))
        )
    assert runs[0] == runs[1]
