"""Invariant tested: whatever is copied between decode's pool and its host memory, whole, half, late
or wrong, on one rank to three, with arrivals, aborts, retractions, evictions, flushes and failures
in any order, every page that is read has the KV of its tokens, and every law holds after each step;
at the end nothing is locked, owned or held on either side.

    python fuzz/host_tier.py --steps 1000000 [--seed 1] [--seconds 1200]

Runs are of pages alone, or of windows, states or both beside them, which no copy has.

It was shown to find these bugs, each put into a copy of the code; in brackets the steps of the runs
of `tests/unit/decode/test_host_storm.py` of pages alone, from seed 0 on, each of 400:

- locks: a load without a lock on what it reads (126), a write without one (7), the host's prefix
  of a write not locked (66), a lock kept after a load (139) or a failed write (13), a write's pin
  kept (13), a write's own prefix taken for evictable (575)
- pages of a load: freed at its abort (1,459), held by a wrong key (1,459), not released (1,460),
  not marked as given up (1,459), copied from the wrong ones (126) or to the wrong ones (126),
  more than were wanted (886), no row for it (7,039)
- what is there too early: a load taken for ended when it begins (126), a write in the tree when
  it begins (7), a write that does not wait for the device (29), pages that are not ready (401;
  one too many, 450), a request committed before its load (246), a rank's end taken for that of
  all (12), its error not heard (13), a failed write taken for good (13), a failed load (8,315)
- what is there too late: copies of before a flush (2,789), host memory after one (1,188)
- twice: a load that could be joined (1,423), a write of what is being written (400; of its last
  page alone, 1,619), a failed load tried again (8,313), a path that stays due (400)
- keys: that of a write not cut (7), that of a path to be written which grows (2,913)
- counts: writes (13), pages of loads (139), pages that come back with a write (3,550); more
  written than fits (408); nothing left to be computed (4,376); a failed load that ends no flight
  (8,311)

These it does not find, and `tests/unit/decode/test_host_tier.py` does: uses that are counted twice
or not at all; pages of an aborted load that come back by themselves, not counted, or twice, or
taken for pages without prospects; more pinned than is written, more evicted than is needed; a write
that leaves no page to those that run, or forgets the rest of its path; what is due, after a
flush, or of a conversation that is over. Nothing finds these: a path of less than a page that is
due, another tick for a load's request, no second look at what waits after a copy, whose end
changes the version of the pages anyway, an eviction for a load that renews no estimate, and what
a write would have left double, which none can.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.spelled import fuzz_spelled
from tests.laws.host_machine import KINDS, run

_COUNTED = (
    "runs", "steps", "admitted", "from host", "loads", "writes", "copies failed",
    "aborted while loading", "flushed with copies", "retracted", "finished",
)  # fmt: skip


def counted(setup: int, steps: Sequence[int]) -> Mapping[str, int]:
    return run(setup, steps, KINDS[setup % len(KINDS)]).counts


if __name__ == "__main__":
    fuzz_spelled("host tier", __doc__, counted, 400, _COUNTED)
