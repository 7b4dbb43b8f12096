"""Invariant tested: after any sequence of calls the radix cache and a naive dictionary of prefixes
agree, eviction for eviction, under every policy, and every law of the tree holds.

    python fuzz/radix.py --seconds 60 [--seed N] [--policy lru]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.laws.radix_machine import POLICIES, RadixMachine

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--policy", default=None, help="one policy; by default all in turn")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    policies = [args.policy] if args.policy else POLICIES
    begin = time.monotonic()
    rounds = 0
    while time.monotonic() - begin < args.seconds:
        policy = policies[rounds % len(policies)]
        number = rng.randrange(2**32)
        machine = seed(number)(type(f"Machine_{policy}", (RadixMachine,), {"policy": policy}))
        print(f"{time.monotonic() - begin:7.0f} s  policy {policy}  seed {number}", flush=True)
        profile = settings(
            max_examples=100,
            stateful_step_count=120,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=CHECKS,
            phases=[Phase.generate, Phase.shrink],
        )
        run_state_machine_as_test(machine, settings=profile)
        rounds += 1
    print(f"{rounds} rounds of 100 runs, no finding")


if __name__ == "__main__":
    main()
