"""Requests that arrive at two small workers in any order, with and without prefixes that they
share: each ends without a timer, as does each that can never fit, and nothing is left. A short
run; the long profile: `fuzz/run.py liveness`."""

import math

import pytest

from tests.laws.liveness.cases import at_random
from tests.laws.liveness.explore import explore, find, short_profile
from tests.laws.liveness.mutants import MUTANTS
from tests.laws.liveness.world import run
from tests.laws.mutants import Mutant


@pytest.mark.slow
def test_every_request_ends_and_leaves_nothing_behind() -> None:
    counts = explore(short_profile(), math.inf)
    assert counts["cases"] > 300
    assert counts["finished"] > 700
    assert counts["refused by name"] > 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_what_breaks_the_order_law_stands_still(mutant: Mutant) -> None:
    assert "a deadlock" in find(mutant)


def test_the_same_case_is_the_same_run() -> None:
    assert run(at_random(7)).steps == run(at_random(7)).steps
