"""Invariant tested: leases never overlap a live one, end once, are held until proof, and are
granted in turn.

Drives the state machine of the table of leases (`tests/laws/lease_machine.py`) with fresh seeds
until the time is up. A finding is shrunk, printed with the calls that lead to it, and ends the run
with status 1.

    python fuzz/staging_leases.py --seconds 60 [--seed 1]
"""

from __future__ import annotations

import pathlib
import sys
from itertools import repeat

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.runner import fuzz
from tests.laws.lease_machine import LeaseMachine

if __name__ == "__main__":
    fuzz("staging leases", __doc__, repeat(LeaseMachine), examples=50, steps=100)
