"""Invariant tested: two whole sides over a bad network, with aborts, failed writes, restarts and
flushes, end with nothing lost, locked, owned or held; every KV byte read is the one computed; no
write lands on another room's page.

    python fuzz/pair.py --seconds 600 [--seed 1]
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tests.models.pair_sim import Chaos, PairSim

_STORM = {
    "drop": 0.08, "duplicate": 0.3, "reorder": 0.5, "abort": 0.05, "fail_at_post": 0.04,
    "fail_at_check": 0.06, "lose_notification": 0.2, "restart": 0.005, "junk": 0.05, "flush": 0.01,
}  # fmt: skip


def simulation(seed: int) -> PairSim:
    """A simulation whose storms, pool sizes and policy follow from the seed."""
    chance = random.Random(seed)
    chaos = Chaos(
        **{name: most * chance.random() for name, most in _STORM.items() if chance.random() < 0.5}
    )
    return PairSim(
        seed,
        chaos,
        decode_pages=chance.choice([13, 18, 40]),
        prefill_pages=chance.choice([14, 32]),
        failure_policy=chance.choice(["fail", "retry"]),
    )


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
            print(f"found with --seed {seed}: {sim.chaos}", file=sys.stderr)
            raise
        totals.update(sim.decode.scheduler.counters)
        totals["finished in all"] += sim.finished
        seed += 1
    print(f"pair: {seed - options.seed} runs from seed {options.seed}, no finding; {dict(totals)}")


if __name__ == "__main__":
    main()
