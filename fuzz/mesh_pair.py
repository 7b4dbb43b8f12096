"""Invariant tested: two whole workers of any meshes over a bad network, staged, sliced or direct,
with aborts, failed writes and copies, and restarts, end with nothing left on any rank; every byte
of what succeeds is right on every rank; no write and no copy touches pages or leases that are not
its room's; each use of a room ends once and drains once.

With `--schedulers` the ranks have schedulers and stand-in engines: prefix caches, the log that
ranks follow, retractions, flushes, extra state.

    python fuzz/mesh_pair.py --seconds 600 [--seed 1] [--schedulers]
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.seeds import fuzz_seeds, parser
from tests.support import sim_engines, sim_rooms
from tests.support.sim import Sim


def _counted(sim: Sim) -> dict[str, int]:
    counts = dict(sim.counters)
    if isinstance(sim, sim_engines.EngineSim):
        counts |= sim.decode.scheduler.counters | {"finished in all": sim.finished}
    return {name: count for name, count in counts.items() if not name.startswith("failed:")}


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--schedulers", action="store_true")
    chosen = options.parse_args()
    make = sim_engines.simulation if chosen.schedulers else sim_rooms.simulation
    fuzz_seeds("mesh_pair", chosen, make, _counted)
