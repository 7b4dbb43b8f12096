"""Every state that control objects, their network and their engines can be in, in small
configurations: see tests/laws/explore/laws.py for the laws, `fuzz/run.py explore` for the whole,
with the mutants that take longer to find."""

from typing import Any

import pytest

from tests.laws.explore.configs import QUICK
from tests.laws.explore.mutants import MUTANTS, find
from tests.laws.explore.search import explore
from tests.laws.explore.state import Config
from tests.laws.mutants import Mutant

_QUICKLY = [mutant for mutant in MUTANTS if mutant.shown_by in {config.name for config in QUICK}]


def _by_name(case: Any) -> str | None:
    return getattr(case, "name", None)


_SECONDS = {
    "again: slow, stall", "again: abort 2, slow", "restart, slow",
    "one number of two workers: lose", "two workers", "again: repeat, abort",
    "two writers: abort", "heard: abort, stall",
}  # fmt: skip
"""Configurations that take seconds each."""


def _is_slow(config: Config) -> Any:
    return pytest.mark.slow if config.name in _SECONDS else ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [pytest.param(one, marks=_is_slow(one), id=one.name) for one in QUICK]
)
def test_the_laws_hold_in_every_state(config: Config) -> None:
    assert explore(config).complete


@pytest.mark.slow
@pytest.mark.parametrize("mutant", _QUICKLY, ids=_by_name)
def test_a_protocol_that_is_a_little_wrong_breaks_a_law(mutant: Mutant) -> None:
    assert find(mutant)


def test_a_mutant_whose_source_has_changed_is_an_error() -> None:
    gone = Mutant("gone", (explore, "what is not there", ""))
    with pytest.raises(LookupError, match="0 times"), gone.alive():
        pass
