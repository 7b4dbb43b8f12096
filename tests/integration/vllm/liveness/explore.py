"""Explores orders of arrival at two vLLM servers with small caches, with vLLM's real scheduler
(`world.py`): every request ends without a timer, and nothing is left behind.

    python -m tests.integration.vllm.liveness.explore                   the short profile, mutants
    ... --seconds 3600 [--seed 7000] [--with host]      all orders, random cases; or only these
    ... --case '{...}' [--mutant old_order]             as a failure printed it, or by its name

Run it from the repository with the interpreter of `python -m benchmarks env vllm`. Each line of
JSON is a result. All choices follow from the case: the same case is the same run.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from tests.integration.vllm.liveness.case import Case
from tests.integration.vllm.liveness.cases import ONCE, WITH, every_order
from tests.integration.vllm.liveness.mutants import ALL, mutated
from tests.integration.vllm.liveness.world import run
from tests.laws.liveness.arrivals import PATTERNS

PACES = "none", "rest", "a", "b"
MOST_FAILURES = 20


def explore(cases: Iterable[Case], until_s: float) -> dict[str, Any]:
    """Play cases until there are no more, or time is over."""
    counts: Counter[str] = Counter()
    num_failures = 0
    for case in cases:
        if time.monotonic() > until_s or num_failures == MOST_FAILURES:
            break
        counts["cases"] += 1
        try:
            world = run(case)
            counts["steps"] += len(world.steps)
            counts.update(world.counters)
        except Exception as error:
            num_failures += 1
            print(f"{type(error).__name__}: {error}\n  --case '{case}'\n", flush=True)
    return {**counts, "failures": num_failures}


def failure_of(case: Case, *, promises_first: bool = True) -> str:
    """What goes wrong in a case; "": nothing."""
    try:
        run(case, promises_first=promises_first)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def find(mutant: str, most_cases: int) -> dict[str, Any]:
    """Which case shows a mutant first: one that stood still once, or a random one. The old order is
    looked for in the two cases by which it was found, as the deadlock that it is."""
    is_old, of = mutant == "old_order", ALL[mutant][0]
    cases = [*(() if of else ONCE.values()), *map(WITH[of], range(most_cases))]
    if is_old:
        cases = [ONCE["ordered"], ONCE["join"]]
    failures = []
    with mutated(mutant):
        for case in cases:
            failures.append(failure_of(case, promises_first=not is_old))
            if failures[-1] and not is_old:
                break
    found = all(failures) if is_old else bool(failures[-1])
    return {"mutant": mutant, "found": found, "cases": len(failures), "failure": failures[-1]}


def is_repeatable(case: Case) -> bool:
    """Whether the same case is the same run."""
    return run(case).steps == run(case).steps


def short_profile() -> Iterator[Case]:
    yield from ONCE.values()
    yield from islice(every_order(2, ("different", "all share", "prefix"), PACES), 0, None, 26)
    for of, number in {"": 160, "host": 90, "both": 50, "windows": 50, "states": 40}.items():
        yield from map(WITH[of], range(number))


def long_profile(seed: int | None, of: str) -> Iterator[Case]:
    if of:
        yield from map(WITH[of], count(seed or 0))
    if seed is None:
        yield from every_order(2, PATTERNS, PACES)
        yield from every_order(3, PATTERNS, PACES)
    yield from map(WITH[""], count(seed or 0))


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--case", help="as a failure printed it, or a name of `cases.ONCE`")
    parser.add_argument("--mutant", default="", choices=["", *ALL], help="with this fault")
    parser.add_argument("--seconds", type=float, default=0.0, help="the long profile")
    parser.add_argument("--with", dest="of", default="", choices=[*WITH], help="only such cases")
    parser.add_argument("--seed", type=int, help="of the first random case, without all orders")
    options = parser.parse_args()
    if options.case:
        case = ONCE.get(options.case) or Case.of(options.case)
        with mutated(options.mutant):
            run(case, print, promises_first=options.mutant != "old_order")
        return 0
    is_long = bool(options.seconds)
    cases = long_profile(options.seed, options.of) if is_long else short_profile()
    until_s = time.monotonic() + options.seconds if is_long else float("inf")
    with mutated(options.mutant):
        explored = explore(cases, until_s)
    is_same = all(is_repeatable(make(seed)) for make in WITH.values() for seed in range(3))
    print(json.dumps({**explored, "repeatable": is_same}), flush=True)
    failed = explored["failures"] > 0 or not is_same
    for mutant in () if is_long else ALL:
        found = find(mutant, 400)
        failed |= not found["found"]
        print(json.dumps(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set is a choice too
        os.environ["PYTHONHASHSEED"] = "0"
        module = "tests.integration.vllm.liveness.explore"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
    logging.disable(logging.WARNING)
    sys.exit(main())
