"""Invariant tested: whole workers of any meshes whose weights change in place while they serve,
each side and each rank at its own time, under all faults of `mesh_pair.py`, never mix two versions:
every byte of KV and every token is of the version that the request was promised under; and with
both sides at one version what is asked is answered.

    python fuzz/weights.py --seconds 600 [--seed 1]
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.seeds import fuzz_seeds, parser
from tests.support.sim_weights import WeightsSim, weights_simulation


def _counted(sim: WeightsSim) -> dict[str, int]:
    counts = {name: count for name, count in sim.counters.items() if not name.startswith("failed:")}
    ends = {f"{side}: {name}": 1 for side, names in sim.ends.items() for name in names}
    return counts | ends | {"finished in all": sim.finished}


if __name__ == "__main__":
    fuzz_seeds("weights", parser(__doc__).parse_args(), weights_simulation, _counted)
