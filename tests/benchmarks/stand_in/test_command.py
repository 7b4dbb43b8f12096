"""Which passes a demo runs, in which order and at which load."""

import pytest

from benchmarks.stand_in.command import run_passes
from benchmarks.stand_in.options import PassPlan
from benchmarks.stand_in.report import Measured
from benchmarks.stand_in.workers import WorkerError


def stand_in(plans, failed=0):
    def run_pass(plan: PassPlan, progress):
        plans.append(plan)
        progress(3)
        return Measured(requests=40, failed=failed, duration_s=2.0 if plan.cache else 4.0)

    return run_pass


def show(titles):
    def begin(title):
        titles.append(title)
        return lambda ended: titles.append(ended)

    return begin


def test_both_sides_share_one_load_and_no_salt():
    plans, titles = [], []
    report = run_passes({}, (True, False), stand_in(plans), show(titles))
    assert [(p.cache, p.verify, p.rate) for p in plans] == [
        (True, True, None),
        (False, True, None),
        (False, False, None),
        (True, False, None),
        (True, False, pytest.approx(7.0)),
        (False, False, pytest.approx(7.0)),
    ]
    assert len({plan.salt for plan in plans}) == 6
    assert report.recipe["offered_load"]["requests_per_s"] == pytest.approx(7.0)
    assert set(report.verified) == set(report.timed) == set(report.saturated) == {True, False}
    assert titles[:3] == ["verified, cache on", 3, 40]


def test_the_load_is_cache_offs_even_if_only_cache_on_is_wanted():
    plans = []
    report = run_passes({}, (True,), stand_in(plans), show([]))
    assert [(p.cache, p.verify) for p in plans] == [
        (True, True),
        (False, False),
        (True, False),
        (True, False),
    ]
    assert plans[-1].rate == pytest.approx(7.0)
    assert set(report.as_json()["saturated"]) == set(report.as_json()["runs"]) == {"cache_on"}


def test_no_answer_at_all_is_an_error():
    with pytest.raises(WorkerError, match="no request was answered"):
        run_passes({}, (True, False), stand_in([], failed=40), show([]))
