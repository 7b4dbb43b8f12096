"""Invariant tested: whatever is copied between decode's pool and its host memory, whole, half, late
or wrong, on one rank to three, with arrivals, aborts, retractions, evictions, flushes and failures
in any order, every page that is read has the KV of its tokens, and every law holds after each step;
at the end nothing is locked, owned or held on either side.

    python fuzz/host_tier.py --steps 1000000 [--seed 1] [--seconds 1200]
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tests.models.host_machine import fuzz_round

_COUNTED = (
    "runs", "steps", "admitted", "from host", "loads", "writes", "copies failed",
    "aborted while loading", "flushed with copies", "retracted", "finished",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop earlier")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first round; each later one adds 1"
    )
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    started, started_cpu = time.monotonic(), time.process_time()
    round_seed = options.seed
    while totals["steps"] < options.steps and time.monotonic() - started < options.seconds:
        try:
            fuzz_round(round_seed, examples=20, storm_steps=400, totals=totals)
        except BaseException:
            print(
                f"found with --seed {round_seed}, after {totals['steps']} steps in rounds before",
                file=sys.stderr,
            )
            raise
        round_seed += 1
    cpu_s = time.process_time() - started_cpu
    print(
        f"host tier: {totals['steps']} steps from seed {options.seed}, no finding; {cpu_s:.0f} "
        "CPU seconds, "
        f"{totals['steps'] / cpu_s:.0f} steps/s; "
        f"{ {name: totals[name] for name in _COUNTED} }"
    )


if __name__ == "__main__":
    main()
