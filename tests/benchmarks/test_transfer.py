"""The transport's benchmarks work, at tiny sizes; how fast anything was is not looked at."""

import json
import os
from collections.abc import Callable

import pytest

from benchmarks import pair, transfer
from benchmarks.__main__ import run
from benchmarks.pair import Claim, Watch, run_pair, turn_about
from benchmarks.stand_in.workers import WorkerError
from prefixkv.cache.radix_key import RadixKey
from prefixkv.errors import OutOfPagesError
from prefixkv.pages.manager import PageManager


@pytest.mark.slow
def test_goodput_is_measured_against_raw_writes_of_the_same_bytes(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(transfer, "LAYOUTS", ("layer_major",))
    monkeypatch.setattr(transfer, "PAGES", ("aged", "random"))
    assert run(["transfer", "--quick", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    aged, random = written["rows"]
    assert (aged["pages"], random["pages"]) == ("aged", "random")
    assert random["runs_a_request"] == 8  # no two pages are neighbours
    for row in (aged, random):
        assert set(row["gib_per_s"]) == {"stack", "one", "many", "same"}
        assert all(speed > 0 for speed in row["gib_per_s"].values())
        assert row["repetitions"] == 2
        assert row["foreign_cores_most"] >= 0
    assert "pages=aged" in capfd.readouterr().out
    assert written["recipe"]["versions"]["nixl"]


def test_what_is_met():
    assert Claim("a", "b", 0.9, "ratio", 0.85).met is True
    assert Claim("a", "b", 0.9, "ms", 0.85, at_least=False).met is False
    assert Claim("a", "b", 0.9, "ms").met is None


# --- ageing ---------------------------------------------------------------------------------------


def test_an_aged_pool_is_full_and_scattered():
    case = transfer.small("layer_major", "aged")
    pages = PageManager(case.num_pages, case.page_size, 16)
    transfer._age(pages, case, 1)
    pages.check_invariants()
    assert pages.allocator.cached_pages > case.num_pages // 2
    with pytest.raises(OutOfPagesError):
        pages.open(RadixKey(range(16)), None, case.num_pages + 1, 0.0)


# --- processes ------------------------------------------------------------------------------------


def _ask(pipe, watch, number):
    pipe.send(number)
    return pipe.recv(), os.environ.get("PREFIXKV_TEST_OF_ENV")


def _answer(pipe, watch, number):
    pipe.send(pipe.recv() + 1)


def _fail(pipe, watch, number):
    raise ValueError(f"number {number}")


def _die(pipe, watch, number):
    os._exit(3)


@pytest.mark.slow
def test_a_pair_runs_in_two_processes_with_the_environment_given():
    assert run_pair(_ask, _answer, 4, env={"PREFIXKV_TEST_OF_ENV": "x"}) == (5, "x")
    assert "PREFIXKV_TEST_OF_ENV" not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize(
    ("serving", "why"), [(_fail, "number 4"), (_die, "_die died|EOFError|ConnectionResetError")]
)
def test_a_side_that_fails_ends_the_pair(serving, why):
    """Of a side that died the other one may hear first: its pipe has an end."""
    with pytest.raises(WorkerError, match=why):
        run_pair(_ask, serving, 4)


# --- repetitions ----------------------------------------------------------------------------------


class _Disturbed(Watch):
    """Others use as many cores during repetition n as `foreign[n]` says, the last ever after."""

    def __init__(self, foreign):
        super().__init__(os.getpid())
        self._foreign = foreign
        self._s = self._used = 0.0
        self._looks = 0

    def _now(self):
        self._looks += 1
        if self._looks % 2 == 0:
            self._s += 1.0
            self._used += self._foreign[min(self._looks // 2, len(self._foreign)) - 1]
        return self._s, self._used


def _numbers() -> Callable[[int], dict[str, float]]:
    return lambda number: {"number": number}


def test_it_goes_on_until_enough_repetitions_were_left_alone():
    watch = _Disturbed([1.0, 0.0, 0.5, 0.05, 1.0])
    rows = watch.least_disturbed(_numbers(), 2, patience_s=1e9)
    assert [(row["number"], row["foreign_cores"], row["taken"]) for row in rows] == [
        (1, 0.0, 4),
        (3, 0.05, 4),
    ]


def test_the_least_disturbed_are_kept_when_none_is_left_alone():
    rows = _Disturbed([1.0, 0.5, 2.0]).least_disturbed(_numbers(), 2, patience_s=0.0)
    assert [row["number"] for row in rows] == [1, 0]
    load = pair.load_of(rows)
    assert load == {
        "repetitions": 2, "of_so_many_taken": 2, "foreign_cores_median": 0.75,
        "foreign_cores_most": 1.0
    }  # fmt: skip


def test_each_side_begins_in_its_turn():
    assert [turn_about("ab", number)[0] for number in range(3)] == ["a", "b", "a"]


def test_bad_input_is_one_line_and_status_2(tmp_path, capfd):
    assert run(["transfer", "--json", str(tmp_path / "no" / "x")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "--json" in err
    assert err.count("\n") == 1
