"""Whole workers of any meshes over a bad network, and bare uses of rooms: short runs. The long
profile: `fuzz/mesh_pair.py`."""

from __future__ import annotations

import pytest

from prefixkv.protocol.ids import KVPoll
from tests.support.sim_rooms import calm_simulation, simulation


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_storms_leave_nothing_behind_on_any_rank(seed: int) -> None:
    simulation(1000 + seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_without_faults_everything_succeeds(seed: int) -> None:
    sim = calm_simulation(seed)
    sim.run()
    assert sim.counters[KVPoll.SUCCESS.name] == sim.counters["uses"] > 0
