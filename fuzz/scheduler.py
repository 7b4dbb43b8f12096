"""Invariant tested: the whole decode side, one to four ranks of it, with host memory, windows and
states, over transfers and copies that fail, land late or never end, with arrivals, aborts,
retractions, evictions, flushes, lost peers, fences and restarts in any order, keeps every law after
each step; at the end nothing is locked, owned, held or quarantined, every request has ended once,
and all ranks have the same rows.

    python fuzz/scheduler.py --steps 1000000 [--seed 1] [--seconds 1200]

It was shown to find these bugs, each put into a copy of the code; in brackets the thousands of
steps from seed 1 on:

- a dropped unlock on each way out: finish (1.2), retraction (4.5), abort of one that runs (1.9),
abort or failure in
  transfer (2.8), abort of one that has arrived (3.6), the end of a flight without an owner (2.0);
  the lock held before at a commit (1.3) and where a waiter settles (2.7)
- a page freed on a timer: overdue pages freed (2.0), the drain deadline taken for proof (5.8),
pages of a failed
  transfer freed at once (2.2)
- an unwritten slot cached: that of the token sampled last (1.2), the first chunk taken for success
(1.1)
- a promise changed within a generation: a retry under the old one (1.2), a resent promise of more
prefix (4.6), what
  was joined left out (1.0)
- flights: a waiter settled before what it joined has landed (1.0), committed before it (1.8); the
pages of a flight
  without an owner freed early (1.1), never freed (2.1); a flush that lets flights of old weights go
  on (4.0)
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tests.laws.scheduler_machine import run

RUNS, STEPS = 20, 500  # of a round, of a run
_COUNTED = (
    "runs", "steps", "admitted", "shared_flights", "flight_fallbacks", "transfers_failed",
    "retracted", "finished", "copies loads", "copies writes", "copies failed",
)  # fmt: skip


def fuzz() -> None:
    """Make rounds of runs, each of so many steps, until all steps are taken or the time is up. A
    finding is shrunk and raised, with the seed that leads to it; its notes tell the steps."""
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
            _round(round_seed, totals)
        except BaseException:
            print(
                f"found with --seed {round_seed}, after {totals['steps']} steps in rounds before",
                file=sys.stderr,
            )
            raise
        round_seed += 1
    cpu_s = time.process_time() - started_cpu
    print(
        f"scheduler: {totals['steps']} steps from seed {options.seed}, no finding; {cpu_s:.0f} CPU "
        f"seconds, {totals['steps'] / cpu_s:.0f} steps/s; "
        f"{ {what: totals[what] for what in _COUNTED} }"
    )


def _round(round_seed: int, totals: Counter[str]) -> None:
    """Make some runs that follow from the seed."""

    @seed(round_seed)
    @settings(
        max_examples=RUNS, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        setup=st.binary(min_size=8, max_size=8),
        spelling=st.lists(st.binary(min_size=4, max_size=4), min_size=STEPS, max_size=STEPS),
    )
    def one_run(setup: bytes, spelling: list[bytes]) -> None:
        values = [int.from_bytes(step, "little") for step in spelling]
        sim = run(int.from_bytes(setup, "little"), values)
        totals.update({"runs": 1, "steps": sim.counts["steps"]})
        totals.update(sim.decode.scheduler.counters)
        totals.update({f"copies {what}": num for what, num in sim.copies.counts.items()})

    one_run()


if __name__ == "__main__":
    fuzz()
