"""The scheduler's benchmark measures what it says; how long it took is not looked at."""

import json

import pytest

from benchmarks import samples, sched
from benchmarks.__main__ import run


@pytest.mark.slow
@pytest.mark.parametrize(("full", "reserve"), [(False, 0.0), (True, 0.0), (True, 1 / 256)])
def test_a_life_is_measured_call_by_call(full, reserve, monkeypatch):
    monkeypatch.setattr(sched.Bench, "_rounds", lambda self, many: 20)
    rows = []
    bench = sched.Bench(0, True, "lru", rows.append)
    bench.life(full=full, evict_reserve=reserve)
    assert [row["name"] for row in rows] == ["encode_promise", "commit", "finish", "add", "admit"]
    for row in rows:
        assert row["samples"] == 20
        assert 0 < row["us_p50"] <= row["us_p99"]
        assert (row["full"], row["evict_reserve"]) == (full, reserve)


def test_an_admission_whose_tree_has_changed_is_measured_beside_the_least_there_can_be(monkeypatch):
    monkeypatch.setattr(sched.Bench, "_rounds", lambda self, many: 20)
    rows = []
    sched.Bench(0, True, "lru", rows.append).life(changed=True)
    assert [(row["name"], row["samples"]) for row in rows] == [("admit_floor", 20), ("admit", 20)]
    assert rows[1]["tree"] == "changed since add"


def test_yardsticks_are_two_loops(monkeypatch):
    monkeypatch.setattr(sched.Bench, "_rounds", lambda self, many: 20)
    rows = []
    sched.Bench(0, True, "lru", rows.append).yardstick()
    assert [(row["name"], row["samples"]) for row in rows] == [("yardstick", 20)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["hit_aware", "fifo", "priority"])
def test_a_blocked_pass_admits_nothing(admission, monkeypatch):
    monkeypatch.setattr(sched.Bench, "_rounds", lambda self, many: 2)
    rows = []
    sched.Bench(0, True, "lru", rows.append).blocked_pass(admission)
    assert [row["name"] for row in rows] == ["blocked_pass", "blocked_pass_nothing_new"]
    assert {row["admission"] for row in rows} == {admission}


@pytest.mark.slow
def test_the_allocator_is_measured_after_it_has_been_through_a_lot(monkeypatch):
    monkeypatch.setattr(sched.Bench, "_rounds", lambda self, many: 2_000)
    rows = []
    sched.Bench(0, True, "lru", rows.append).allocator()
    assert rows[0]["samples"] == 2_000
    assert rows[0]["runs_a_request"] >= 1


def test_chunks_are_measured_beside_the_least_there_can_be(monkeypatch):
    monkeypatch.setattr(sched.Bench, "_rounds", lambda self, many: 3)
    rows = []
    sched.Bench(0, True, "lru", rows.append).send_chunk()
    assert {row["which"]: row["samples"] for row in rows} == {"inner": 9, "last": 3, "floor": 12}


def test_digests_are_measured_by_what_is_new(monkeypatch):
    monkeypatch.setattr(sched.Bench, "_rounds", lambda self, many: 3)
    rows = []
    sched.Bench(0, True, "lru", rows.append).digest()
    new = [0, 6144, 100, 6244, 512, 6656, 2048, 8192]
    assert [(row["new_tokens"], row["samples"]) for row in rows] == [(one, 3) for one in new]


def test_figures_are_percentiles_in_microseconds(monkeypatch):
    ticks = iter(range(0, 10_000_000, 1_000))
    monkeypatch.setattr(sched.time, "perf_counter_ns", lambda: next(ticks))
    samples = sched.Samples()
    assert samples.take(lambda a, b: a + b, 1, b=2) == 3
    for _ in range(99):
        samples.take(lambda: [next(ticks) for _ in range(9)])
    figures = samples.figures()
    assert (figures["us_p50"], figures["us_p99"], figures["samples"]) == (10.0, 10.0, 100)


def test_rows_and_recipe_are_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sched.Bench, "run", lambda self: self._add("nothing", _one_sample(), 1e9))
    assert run(["sched", "--seed", "3", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["recipe"]["seed"] == 3
    assert [(row["name"], row["met"]) for row in written["rows"]] == [("nothing", True)]
    assert "name=nothing" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"), [("--json {tmp}/no/x", "--json"), ("--policy perhaps", "perhaps")]
)
def test_bad_input_is_one_line_and_status_2(arguments, why, tmp_path, capfd):
    assert run(["sched", *arguments.format(tmp=tmp_path).split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert why in err
    assert err.count("\n") == 1


def _one_sample():
    samples = sched.Samples()
    samples.take(lambda: None)
    return samples


@pytest.mark.slow
def test_a_cold_call_comes_after_a_copy_and_has_no_aim(monkeypatch):
    monkeypatch.setattr(sched.Bench, "_rounds", lambda self, many: 20)
    rows = []
    bench = sched.Bench(0, True, "lru", rows.append)
    source, target = samples.Samples._copied
    assert len(source) == samples.COLD_BYTES
    bench.abort()
    bench.allocator()
    target[:] = 0
    with samples.Samples.all_cold():
        bench.abort()
        assert target.all()
        bench.allocator()
    target[:] = 0
    bench.yardstick()
    assert not target.any()
    assert [row["cold"] for row in rows] == [False, False, True, True, False, False]
    assert ["target_us_p50" in row for row in rows[:4]] == [False, True, False, False]
    assert [row["samples"] for row in rows[:2]] == [row["samples"] for row in rows[2:4]]
