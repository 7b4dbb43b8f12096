"""The admission budget's counters against the same sums made from scratch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.decode.ledger import PreallocBudget
from prefixkv.errors import InternalError

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("grow"), st.integers(0, 4), st.integers(1, 3), st.none()),
        st.tuples(st.just("stop"), st.integers(0, 4), st.none(), st.none()),
    ),
    max_size=40,
)


@given(_STEPS, st.integers(0, 3))
def test_counters_are_the_sums(steps: list[tuple[Any, ...]], reserve: int) -> None:
    budget = PreallocBudget(reserve)
    running: dict[str, tuple[int, int]] = {}  # (may still need, private)
    for what, number, a, b in steps:
        rid = str(number)
        if what == "start":  # maybe anew: its KV has arrived
            budget.start(rid, a, b)
            running[rid] = (a, b)
        elif what == "grow" and rid in running and running[rid][0] >= a:
            budget.grow_many([rid] * a)
            running[rid] = (running[rid][0] - a, running[rid][1] + a)
        elif what == "stop":
            budget.stop(rid)
            running.pop(rid, None)
        private = sum(own for _, own in running.values())
        single = max([0, *(needs - (private - own) for needs, own in running.values())])
        assert budget.private_pages == private
        assert len(budget) == len(running)
        reserved = sum(min(reserve, needs) for needs, _ in running.values())
        assert budget.kept_back == max(reserved, single)
        budget.check_invariants()


@pytest.mark.parametrize("field", ["private_pages", "_pages", "_reaches"])
def test_a_counter_that_is_off_is_found(field: str) -> None:
    budget = PreallocBudget(0)
    budget.start("a", 3, 2)
    budget.check_invariants()
    off = {"private_pages": 1, "_pages": {"a": [5, 3]}, "_reaches": []}
    setattr(budget, field, off[field])
    with pytest.raises(InternalError):
        budget.check_invariants()
