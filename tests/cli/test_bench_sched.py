"""The scheduler's benchmark measures what it says; how long it took is not looked at."""

import json

import pytest

from prefixkv.cli import bench_sched
from prefixkv.cli.main import run_command


@pytest.mark.parametrize("full", [False, True])
def test_a_life_is_measured_call_by_call(full, monkeypatch):
    monkeypatch.setattr(bench_sched.Bench, "_rounds", lambda self, many: 20)
    rows = []
    bench = bench_sched.Bench(0, True, "lru", rows.append)
    bench.life(full=full)
    assert [row["name"] for row in rows] == ["encode_promise", "commit", "finish", "add", "admit"]
    for row in rows:
        assert row["samples"] == 20
        assert 0 < row["us_p50"] <= row["us_p99"]
        assert (row["free_pages"] < 10) == full


def test_figures_are_percentiles_in_microseconds(monkeypatch):
    ticks = iter(range(0, 10_000_000, 1_000))
    monkeypatch.setattr(bench_sched.time, "perf_counter_ns", lambda: next(ticks))
    samples = bench_sched.Samples()
    assert samples.take(lambda a, b: a + b, 1, b=2) == 3
    for _ in range(99):
        samples.take(lambda: [next(ticks) for _ in range(9)])
    figures = samples.figures()
    assert (figures["us_p50"], figures["us_p99"], figures["samples"]) == (10.0, 10.0, 100)


def test_rows_and_recipe_are_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(bench_sched.Bench, "run", lambda self: self._add("nothing", _one_sample(), 1e9))
    assert run_command(["bench", "sched", "--seed", "3", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["recipe"]["seed"] == 3
    assert [(row["name"], row["met"]) for row in written["rows"]] == [("nothing", True)]
    assert "name=nothing" in capfd.readouterr().out


@pytest.mark.parametrize(("arguments", "why"), [("--json {tmp}/no/x", "--json"), ("--policy perhaps", "perhaps")])
def test_bad_input_is_one_line_and_status_2(arguments, why, tmp_path, capfd):
    assert run_command(["bench", "sched", *arguments.format(tmp=tmp_path).split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert why in err
    assert err.count("\n") == 1


def _one_sample():
    samples = bench_sched.Samples()
    samples.take(lambda: None)
    return samples
