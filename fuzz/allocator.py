"""Invariant tested: every page is in one state, free runs are maximal, and each allocation has the
fewest runs.

Drives the allocator's state machine (`tests/laws/allocator_model.py`) with fresh seeds until the
time is up. A finding is shrunk, printed with the calls that lead to it, and ends the run with
status 1.

    python fuzz/allocator.py --seconds 60 [--seed 1]

Bugs put in by hand, each found in the first round: stale entries not skipped; the tag behind a
taken run left standing; a left neighbour not merged; two freed runs not joined through the free run
between them; pages named twice let through; quarantined pages counted as held on release.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tests.laws.allocator_model import AllocatorMachine

_ROUND = settings(
    deadline=None,
    max_examples=50,
    stateful_step_count=100,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class CountingMachine(AllocatorMachine):
    """Says how much was done."""

    steps = 0

    @invariant()
    def count(self) -> None:
        type(self).steps += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first round; each later one adds 1"
    )
    options = parser.parse_args()
    if options.seconds <= 0:
        parser.error(f"--seconds is {options.seconds}, must be above 0")
    started = time.monotonic()
    rounds = 0
    while time.monotonic() - started < options.seconds:
        round_seed = options.seed + rounds
        try:
            run_state_machine_as_test(seed(round_seed)(CountingMachine), settings=_ROUND)
        except (Exception, pytest.fail.Exception):
            print(f"found with --seed {round_seed}", file=sys.stderr)
            raise
        rounds += 1
    print(
        f"allocator: {CountingMachine.steps} steps in {rounds} rounds from seed {options.seed}, "
        "no finding"
    )


if __name__ == "__main__":
    main()
