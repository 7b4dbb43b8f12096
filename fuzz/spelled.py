"""What the fuzz targets share whose runs are spelled by integers: hypothesis draws them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

RUNS = 20  # of a round

Run = Callable[[int, Sequence[int]], Mapping[str, int]]
"""Takes how a run is set up, and its steps. Returns what to count of it, its "steps" too."""


def fuzz_spelled(name: str, doc: str | None, run: Run, steps: int, counted: Sequence[str]) -> None:
    """Make rounds of runs, each of so many steps, until all steps are taken or the time is up. A
    finding is shrunk and raised, with the seed that leads to it; its notes tell the steps."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
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
            _round(round_seed, run, steps, totals)
        except BaseException:
            print(
                f"found with --seed {round_seed}, after {totals['steps']} steps in rounds before",
                file=sys.stderr,
            )
            raise
        round_seed += 1
    cpu_s = time.process_time() - started_cpu
    print(
        f"{name}: {totals['steps']} steps from seed {options.seed}, no finding; {cpu_s:.0f} CPU "
        f"seconds, {totals['steps'] / cpu_s:.0f} steps/s; "
        f"{ {what: totals[what] for what in counted} }"
    )


def _round(round_seed: int, run: Run, steps: int, totals: Counter[str]) -> None:
    """Make some runs that follow from the seed."""

    @seed(round_seed)
    @settings(
        max_examples=RUNS, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        setup=st.binary(min_size=8, max_size=8),
        spelling=st.lists(st.binary(min_size=4, max_size=4), min_size=steps, max_size=steps),
    )
    def one_run(setup: bytes, spelling: list[bytes]) -> None:
        values = [int.from_bytes(step, "little") for step in spelling]
        totals.update({"runs": 1, **run(int.from_bytes(setup, "little"), values)})

    one_run()
