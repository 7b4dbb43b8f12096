"""Invariant tested: whatever requests are computed here, sent, retracted, aborted and flushed on a
decode worker that keeps checkpoints, each goes on from the deepest that a naive model knows of;
what a slot and a window page hold is of its path and depth; no slot is lost, and which checkpoint
goes for another is what the model says.

    python fuzz/decode_points.py --seconds 600 [--seed 1]

It was shown to find the bugs of `tests/unit/decode/test_points_machine.py`.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.seeds import parser
from tests.laws.decode_points_machine import KINDS, run

if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    started, seed, seen = time.monotonic(), options.seed, Counter[str]()
    while time.monotonic() - started < options.seconds:
        try:
            seen.update(run(seed, num_turns=3000, **KINDS[seed % len(KINDS)]))
        except BaseException:
            print(f"found with --seed {seed}", file=sys.stderr)
            raise
        seed += 1
    print(f"decode's checkpoints: {seed - options.seed} runs, no finding; {dict(seen)}")
