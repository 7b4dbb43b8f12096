"""Invariant tested: in whatever order requests arrive at a prefill and a decode worker with small
pools, whether they share prefixes or not, and whatever moves in between, each ends: it has its
tokens, or was refused by name since it can never fit. No timer but a retransmission ends one.

    python fuzz/liveness.py --seconds 3600             all orders, then random cases
    python fuzz/liveness.py --seed 7000 --seconds 600  random cases only
    python fuzz/liveness.py --mutants                  each has to be found
    python fuzz/liveness.py --case '{...}' [-v]        as a failure printed it, or a name of ONCE
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tests.laws.liveness.cases import ONCE
from tests.laws.liveness.explore import explore, find, long_profile
from tests.laws.liveness.mutants import MUTANTS
from tests.laws.liveness.world import Case, run


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first random case")
    parser.add_argument("--case")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("-v", action="store_true", help="say each step of the case")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.mutants:
        for mutant in MUTANTS:
            failure = find(mutant)
            print(f"{mutant}: {failure or 'not found'}", flush=True)
            if not failure:
                raise SystemExit(1)
        return
    if args.case:
        case = ONCE[args.case] if args.case in ONCE else Case.of(args.case)
        print(dict(run(case, print if args.v else None).counters))
        return
    counts = explore(long_profile(args.seed), time.monotonic() + args.seconds)
    print(f"liveness: {dict(counts)}, no finding")


if __name__ == "__main__":
    main()
