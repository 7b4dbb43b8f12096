"""The passes that the stand-in runs, in which order and at which load; and its command line."""

from pathlib import Path

import pytest

from benchmarks.__main__ import run
from benchmarks.stand_in.command import run_passes
from benchmarks.stand_in.options import PassPlan
from benchmarks.stand_in.report import Measured
from benchmarks.stand_in.workers import WorkerError


def fake_pass(plans, failed=0):
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
    report = run_passes({}, (True, False), fake_pass(plans), show(titles))
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
    report = run_passes({}, (True,), fake_pass(plans), show([]))
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
        run_passes({}, (True, False), fake_pass([], failed=40), show([]))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--nonsense", "--nonsense"),
        ("--seed one", "--seed"),
        ("--dtype", "--dtype"),
        ("--cache perhaps", "perhaps"),
        ("--layers 0", "--layers is 0, must be in [1, 1048576]"),
        ("--decode-pages 3", "--decode-pages is 3, at least"),
        ("--trace {tmp}/none.jsonl", "none.jsonl: No such file"),
        ("--trace {tmp}/bad.jsonl", "bad.jsonl, line 1: "),
        ("--trace {tmp}", "Is a directory"),
        ("--json {tmp}/no/out.json", "--json is"),
        ("--json {tmp}", "--json is"),
        ("--plot {tmp}/out.nonsense", "--plot is"),
        ("--layers 100000", "bytes with their workers"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, why, tmp_path, capfd):
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0}\n')
    assert run(["stand_in", *arguments.format(tmp=tmp_path).split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("python -m benchmarks stand_in: ")
    assert why in err
    assert err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_that_takes_nothing_is_said_before_the_run(capfd, monkeypatch):
    monkeypatch.setattr("benchmarks.stand_in.command.Workers", None)  # not reached
    assert run(["stand_in", "--turns", "1", "--json", "/dev/full"]) == 1
    told = "python -m benchmarks stand_in: --json is /dev/full: No space left on device\n"
    assert capfd.readouterr() == ("", told)
