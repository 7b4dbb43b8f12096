"""Plays cases and looks for mutants, for test_liveness.py and `fuzz/run.py liveness`."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Final

from tests.laws.liveness.arrivals import LivenessError
from tests.laws.liveness.cases import (
    ONCE,
    at_random,
    every_order,
    own_compute_at_random,
    second_turns,
)
from tests.laws.liveness.world import Case, run
from tests.laws.mutants import Mutant

FOUND: Final = (1104,)
"""Seeds of cases that did not end once. 1104: an offer that decode had refused before it was made.
"""


def short_profile() -> Iterator[Case]:
    """Some of each, the same at every call."""
    yield from ONCE.values()
    yield from islice(every_order(2, ("different", "all share", "prefix")), 0, None, 41)
    yield from islice(every_order(3, ("different", "two share")), 0, None, 1999)
    yield from islice(second_turns(), 0, None, 401)
    yield from map(at_random, (*FOUND, *range(100)))
    yield from map(own_compute_at_random, range(200))


def long_profile(seed: int) -> Iterator[Case]:
    """Every order of two requests with every mixture of paces, every order of three, then random
    cases without end; from another seed than 0 only these."""
    if not seed:
        yield from every_order(2, mixed=True)
        yield from second_turns()
        yield from every_order(3)
    for each in count(seed):
        yield at_random(each)
        yield own_compute_at_random(each)


def explore(cases: Iterable[Case], until_s: float) -> Counter[str]:
    """Play cases until there are no more, or time is over. Raises LivenessError with the case for
    the first that fails."""
    counts: Counter[str] = Counter()
    for case in cases:
        if time.monotonic() > until_s:
            break
        counts["cases"] += 1
        try:
            world = run(case)
        except Exception as error:
            raise LivenessError(f"{error}\n  --case '{case}'") from error
        counts["steps"] += len(world.steps)
        counts.update(world.counters)
    return counts


def find(mutant: Mutant) -> str:
    """What goes wrong with a mutant in the first of the cases in which it shows, without audits,
    which would find some before they do harm; "": nothing."""
    with mutant.alive():
        for case in ONCE.values():
            try:
                run(case, audits=False)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return ""
