"""Invariant tested: whatever requests begin, go on from checkpoints, keep checkpoints, branch, end
and are flushed in pools of window groups that evict all the time, every token that a step sees in a
window is there, of its path and position; a page is free where no row and no checkpoint has it; and
what is found, evicted and refused is what a naive model says.

    python fuzz/windows.py --seconds 600 [--seed 1]

It was shown to find the twelve bugs of `tests/unit/pages/test_groups.py`, each within 20 seeds.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections import Counter

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fuzz.seeds import parser
from tests.laws.window_machine import run

if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    started, seed, seen = time.monotonic(), options.seed, Counter[str]()
    while time.monotonic() - started < options.seconds:
        try:
            seen.update(run(seed, num_turns=600))
        except BaseException:
            print(f"found with --seed {seed}", file=sys.stderr)
            raise
        seed += 1
    print(f"windows: {seed - options.seed} runs, no finding; {dict(seen)}")
