"""Invariant tested: two whole workers of any meshes over a bad network, staged, sliced or direct,
with aborts, failed writes and copies, and restarts, end with nothing left on any rank; every byte
of what succeeds is right on every rank; no write and no copy touches pages or leases that are not
its room's; each use of a room ends once and drains once.

    python fuzz/mesh_pair.py --seconds 600 [--seed 1]
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tests.models.mesh_sim import simulation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first run; each later one adds 1"
    )
    options = parser.parse_args()
    started = time.monotonic()
    totals: Counter[str] = Counter()
    seed = options.seed
    while time.monotonic() - started < options.seconds:
        sim = simulation(seed)
        try:
            sim.run()
        except BaseException:
            print(f"found with --seed {seed}: {sim.shape}, {sim.storm}", file=sys.stderr)
            raise
        totals.update(
            {name: count for name, count in sim.counters.items() if not name.startswith("failed:")}
        )
        seed += 1
    print(
        f"mesh_pair: {seed - options.seed} runs from seed {options.seed}, no finding; "
        f"{dict(totals)}"
    )


if __name__ == "__main__":
    main()
