"""Two commits are compared turn about, and a difference counts only beyond that of one commit with
itself. How long anything took is not looked at."""

import json
import os
import signal
from pathlib import Path

import pytest

from benchmarks import against
from benchmarks.__main__ import run
from benchmarks.against import ROOT, Side, row_of, tree_of
from benchmarks.against.full_hit import measure
from benchmarks.against.today import CALLS, Order
from prefixkv.errors import ConfigError

OLD = "76518cc8"


def is_there(commit: str) -> bool:
    try:
        return bool(against.commit_of(commit))
    except ConfigError:
        return False


def checkouts() -> list[str]:
    """Those of this benchmark."""
    return [line for line in against.git("worktree", "list").splitlines() if "against-" in line]


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
        (1.04, (1.1, 1.1), "spread"),  # that the third is slower is no better
        (1.12, (0.95, 1.1), "SLOWER"),  # beyond the spread, however little
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


# --- both trees -----------------------------------------------------------------------------------


@pytest.mark.slow
@in_git
def test_a_part_is_compared_with_a_commit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = checkouts()
    options = ["--part", "match", "--rounds", "2", "--starts", "1", "--quick", "--cpu"]
    file = tmp_path / "out.json"
    assert run(["sched", "--against", "HEAD", *options, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["rows"]] == ["match, P50", "match, cold, P50"]
    assert {row["rounds"] for row in written["rows"]} == {2}
    assert written["recipe"]["theirs"] == written["recipe"]["ours"]
    assert written["recipe"]["plan"]["cpu"]
    assert "spread" in capfd.readouterr().out
    assert checkouts() == before


@in_git
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_the_worktree_is_removed_when_the_run_is_interrupted(how: str) -> None:
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
    assert str(seen[0]) not in against.git("worktree", "list")


def test_every_call_is_measured_on_either_clock() -> None:
    """Quickly, and of this tree: that each part finds what it needs in the tree's benchmarks. Each
    clock has every other part."""
    side = Side(ROOT, seed=0)
    try:
        for number, part in enumerate(CALLS):
            took = side.measure(Order(part, calls=5, quick=True, cpu=number % 2 == 0))
            assert took
            assert all(seconds and min(seconds) > 0 for seconds in took.values())
    finally:
        side.close()


@pytest.mark.slow
@pytest.mark.skipif(not is_there(OLD), reason="a clone without that commit")
def test_the_old_tree_is_measured_call_by_call() -> None:
    """Whatever is renamed here. Both sides have the same calls."""
    with tree_of(OLD) as tree:
        sides = Side(tree, seed=0), Side(ROOT, seed=0)
        try:
            for part in CALLS:
                theirs, ours = (side.measure(Order(part, 20, quick=True)) for side in sides)
                assert set(theirs) == set(ours)
        finally:
            for side in sides:
                side.close()


def test_a_full_hit_is_not_compared_with_what_another_driver_measures() -> None:
    """Figures are compared by name: this is that of commits with an older driver of their own."""
    assert "full hit over NIXL" not in measure(lambda *_: 1.0, quick=True)
