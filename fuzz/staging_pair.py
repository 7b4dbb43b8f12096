"""Invariant tested: staged rooms get all writers' bytes or fail, nothing lands outside a live
lease, all comes to rest.

Drives senders joined with receivers of staging (`tests/laws/staged_machine.py`) with fresh seeds
until the time is up. A finding is shrunk, printed with the calls that lead to it, and ends the run
with status 1.

    python fuzz/staging_pair.py --seconds 60 [--seed 1]
"""

from __future__ import annotations

import pathlib
import sys
from itertools import repeat

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.runner import fuzz
from tests.laws.staged_machine import StagedMachine

if __name__ == "__main__":
    fuzz("staging pair", __doc__, repeat(StagedMachine), examples=20, steps=12)
