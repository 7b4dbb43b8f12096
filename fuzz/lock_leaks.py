"""Invariant tested: any sequence of arrive, admit, transfer, fail, abort, retract, finish, evict
and flush ends with no lock, no owned page and no held page, with tree, allocator, page table and
requests in agreement after every step.

    python fuzz/lock_leaks.py --seconds 600 [--seed 1]
"""

from __future__ import annotations

import itertools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.runner import fuzz
from tests.laws.lock_machine import LockMachine

if __name__ == "__main__":
    fuzz("lock_leaks", __doc__, itertools.repeat(LockMachine), examples=50, steps=100)
