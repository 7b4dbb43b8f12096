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

import pathlib
import sys
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.spelled import fuzz_spelled
from tests.laws.scheduler_machine import run

_COUNTED = (
    "runs", "steps", "admitted", "shared_flights", "flight_fallbacks", "transfers_failed",
    "retracted", "finished",
)  # fmt: skip


def counted(setup: int, steps: Sequence[int]) -> Mapping[str, int]:
    sim = run(setup, steps)
    return {"steps": sim.counts["steps"], **sim.decode.scheduler.counters}


if __name__ == "__main__":
    fuzz_spelled("scheduler", __doc__, counted, 500, _COUNTED)
