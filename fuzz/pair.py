"""Invariant tested: two whole sides over a bad network, with aborts, failed writes, restarts and
flushes, end with nothing lost, locked, owned or held; every KV byte read is the one computed; no
write lands on another room's page.

    python fuzz/pair.py --seconds 600 [--seed 1] [--backend shm]

On a fabric in memory, which stands for NIXL; or on real shm transports, whose threads' work is done
in the simulation's order.
"""

from __future__ import annotations

import pathlib
import random
import sys
from functools import partial
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.seeds import fuzz_seeds, parser
from tests.support.shm_fabric import OverShm
from tests.support.sim import storm_of
from tests.support.sim_engines import PairSim

_STORM = {
    "drop": 0.08, "duplicate": 0.3, "reorder": 0.5, "abort": 0.05, "fail_at_post": 0.04,
    "fail_at_check": 0.06, "lose_notification": 0.01, "restart": 0.005, "junk": 0.05, "flush": 0.01,
}  # fmt: skip


class ShmPairSim(OverShm, PairSim):
    pass


def simulation(seed: int, kind: type[PairSim] = PairSim) -> PairSim:
    """A simulation whose storms, pool sizes and policy follow from the seed."""
    chance = random.Random(seed)
    storm = storm_of(chance, _STORM)
    sizes: Any = {
        "decode_pages": chance.choice([13, 18, 40]), "prefill_pages": chance.choice([14, 32]),
        "failure_policy": chance.choice(["fail", "retry"]),
    }  # fmt: skip
    # By a chance of its own, so that a seed without window layers runs as it ever did.
    of_windows = random.Random(f"windows {seed}")
    if of_windows.random() < 0.4:
        sizes |= {
            "window": of_windows.choice([2, 5, 9, 14]),
            "window_pages": (of_windows.choice([16, 24, 40]), of_windows.choice([10, 16, 40])),
            "checkpoints": of_windows.choice([0, 2, 6]),
        }
    return kind(seed, storm, **sizes)


def _counted(sim: Any) -> dict[str, int]:
    return {**sim.decode.scheduler.counters, "finished in all": sim.finished}


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--backend", choices=["nixl", "shm"], default="nixl")
    options = made.parse_args()
    kind = ShmPairSim if options.backend == "shm" else PairSim
    fuzz_seeds("pair", options, partial(simulation, kind=kind), _counted)
