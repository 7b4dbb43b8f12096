"""What the fuzz targets share: rounds of one hypothesis state machine, each with a fresh seed,
until the time is up."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test


def fuzz(
    name: str,
    doc: str | None,
    machines: Iterator[type[RuleBasedStateMachine]],
    examples: int,
    steps: int,
) -> None:
    """Run the machines in turn. A finding is shrunk, printed with the calls that lead to it, and
    raised."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first round; each later one adds 1"
    )
    options = parser.parse_args()
    if options.seconds <= 0:
        parser.error(f"--seconds is {options.seconds}, must be above 0")
    profile = settings(
        deadline=None, max_examples=examples, stateful_step_count=steps, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    started = time.monotonic()
    rounds = 0
    taken = [0]
    while time.monotonic() - started < options.seconds:
        round_seed = options.seed + rounds
        try:
            run_state_machine_as_test(
                seed(round_seed)(_counting(next(machines), taken)), settings=profile
            )
        except (Exception, pytest.fail.Exception):
            print(f"found with --seed {round_seed}", file=sys.stderr)
            raise
        rounds += 1
    print(f"{name}: {taken[0]} steps in {rounds} rounds from seed {options.seed}, no finding")


def _counting(
    machine: type[RuleBasedStateMachine], taken: list[int]
) -> type[RuleBasedStateMachine]:
    @invariant()
    def count(self: RuleBasedStateMachine) -> None:
        taken[0] += 1

    return type(machine.__name__, (machine,), {"count_steps": count})
