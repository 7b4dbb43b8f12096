"""Two commits are compared turn about, and a difference counts only beyond that of one commit with
itself. How long anything took is not looked at."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from benchmarks import against
from benchmarks.__main__ import run
from benchmarks.against import ROOT, Plan, Side, parts_of, row_of, rows_of, tree_of
from prefixkv.errors import ConfigError, InternalError

in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


# --- statistics -----------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_each_round() -> None:
    """The machine becomes ten times slower half way, which is none of the code's doing."""
    theirs = [1.0, 1.0, 10.0, 10.0]
    row = row_of("add, P50", [2 * one for one in theirs], theirs, [2 * one for one in theirs])
    assert (row.ratio, row.quartiles) == (2.0, (2.0, 2.0))
    assert (row.same_ratio, row.spread) == (1.0, 0.0)
    assert (row.ours_s, row.theirs_s, row.rounds) == (11.0, 5.5, 4)


@pytest.mark.parametrize(
    ("ratio", "again", "verdict"),
    [
        (0.5, (1.0, 1.0), "within"),
        (1.03, (1.0, 1.0), "within"),
        (1.04, (1.0, 1.0), "SLOWER"),
        (1.04, (0.9, 1.1), "spread"),
        (
            1.04,
            (1.1, 1.1),
            "spread",
        ),  # that the third is slower is no better than that it is faster
        (1.4, (0.9, 1.1), "SLOWER"),
    ],
)
def test_the_bound_is_broken_beyond_what_equal_sides_differ_by(
    ratio: float, again: tuple[float, float], verdict: str
) -> None:
    ours = [ratio] * 8
    row = row_of("add, P50", ours, [1.0] * 8, [ratio * one for one in again * 4])
    assert row.verdict == verdict
    assert row.as_json()["verdict"] == verdict


def test_an_admission_has_two_figures_and_each_is_of_a_round_s_calls() -> None:
    calls = [1e-6] * 98 + [9e-6] * 2
    sides = {side: [{"admission": calls, "add": calls}] * 3 for side in against.SIDES}
    rows = {row.name: row for row in rows_of(sides)}
    assert list(rows) == ["admission, P50", "admission, P99", "add, P50"]
    assert rows["admission, P50"].ours_s == pytest.approx(1e-6)
    assert rows["admission, P99"].ours_s == pytest.approx(9e-6)


def test_rounds_are_shared_by_the_starts_and_pairs_get_fewer() -> None:
    plan = Plan(["match", "goodput"], rounds=10, starts=3)
    assert [plan.rounds_of("match", start) for start in range(3)] == [4, 3, 3]
    assert [plan.rounds_of("goodput", start) for start in range(3)] == [1, 1, 0]


def test_the_demo_is_measured_only_if_asked_for() -> None:
    assert "demo" not in parts_of([], demo=False)
    assert parts_of([], demo=True) == list(against.PARTS)
    assert parts_of(["evict"], demo=True) == ["evict", "demo"]
    with pytest.raises(ConfigError, match="nonsense"):
        parts_of(["nonsense"], demo=False)


# --- both trees -----------------------------------------------------------------------------------


@pytest.mark.slow
@in_git
def test_a_part_is_compared_with_a_commit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = against.git("worktree", "list")
    options = ["--part", "match", "--rounds", "2", "--starts", "1", "--quick", "--cpu"]
    file = tmp_path / "out.json"
    assert run(["sched", "--against", "HEAD", *options, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["rows"]] == ["match, P50", "match, cold, P50"]
    assert {row["rounds"] for row in written["rows"]} == {2}
    assert written["recipe"]["theirs"] == written["recipe"]["ours"]
    assert "processor time" in written["recipe"]["clock"]
    assert "spread" in capfd.readouterr().out
    assert against.git("worktree", "list") == before


@in_git
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_the_worktree_is_removed_when_the_run_is_interrupted(how: str) -> None:
    before = against.git("worktree", "list")
    handler = signal.getsignal(signal.SIGTERM)
    seen: list[Path] = []

    def interrupted() -> None:
        with tree_of("HEAD") as tree:
            assert (tree / "benchmarks" / "sched.py").exists()
            seen.append(tree)
            if how == "Ctrl-C":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt if how == "Ctrl-C" else SystemExit):
        interrupted()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not seen[0].exists()
    assert against.git("worktree", "list") == before


def test_every_call_is_measured_on_either_clock() -> None:
    """Quickly, and of this tree: that each part finds what it needs in the tree's benchmarks."""
    side = Side(ROOT, seed=0)
    try:
        for part in against.against_child.CALLS:
            for cpu in (False, True):
                order = against.Order(part, calls=20, quick=True, cpu=cpu)
                took = side.measure(order)
                assert took
                assert all(seconds for seconds in took.values())
                assert all(min(seconds) > 0 for seconds in took.values())
    finally:
        side.close()


@in_git
def test_a_tree_without_its_own_samples_is_measured_by_this_one_s() -> None:
    with tree_of("HEAD") as tree:
        (tree / "benchmarks" / "samples.py").rename(tree / "benchmarks" / "former.py")
        for module in (tree / "benchmarks").glob("sched*.py"):
            text = module.read_text().replace("benchmarks.samples", "benchmarks.former")
            module.write_text(text)
        side = Side(tree, seed=0)
        try:
            took = side.measure(against.Order("life", calls=20, cpu=True))
        finally:
            side.close()
    assert {"add", "admission, cold"} <= set(took)


def test_what_a_side_cannot_measure_is_said() -> None:
    side = Side(ROOT, seed=0)
    try:
        with pytest.raises(InternalError, match="nonsense failed"):
            side.measure(against.Order("nonsense", calls=1))
    finally:
        side.close()


@in_git
def test_a_commit_that_is_unknown_is_one_line_and_status_2(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(["sched", "--against", "no-such-commit"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--against is 'no-such-commit'" in err
