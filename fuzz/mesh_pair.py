"""Invariant tested: two whole workers of any meshes over a bad network, staged, sliced or direct,
with aborts, failed writes and copies, and restarts, end with nothing left on any rank; every byte
of what succeeds is right on every rank; no write and no copy touches pages or leases that are not
its room's; each use of a room ends once and drains once.

The ranks have schedulers and stand-in engines: prefix caches, the log that ranks follow,
retractions, flushes, extra state.

    python fuzz/mesh_pair.py --seconds 600 [--seed 1]
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.seeds import fuzz_seeds, parser
from tests.support.sim_engines import EngineSim, simulation


def _counted(sim: EngineSim) -> dict[str, int]:
    counts = dict(sim.counters) | sim.decode.scheduler.counters | {"finished in all": sim.finished}
    return {name: count for name, count in counts.items() if not name.startswith("failed:")}


if __name__ == "__main__":
    fuzz_seeds("mesh_pair", parser(__doc__).parse_args(), simulation, _counted)
