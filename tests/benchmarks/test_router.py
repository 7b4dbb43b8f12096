"""The simulation of several workers: what each way to route finds, on a trace small enough to
know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import run as run_benchmark
from benchmarks.router import ROUTERS, RouterSimulation, ServiceTimes, output_lengths
from prefixkv.cli.replay import read_trace
from prefixkv.errors import TraceError

CHATS, TURNS, BLOCKS = 13, 5, 4  # 13: no multiple of the workers, else round robin is perfect


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats that share a first block; each turn brings `BLOCKS` more, and all before it again."""
    path = tmp_path_factory.mktemp("trace") / "chats.jsonl"
    lines = []
    for turn in range(TURNS):
        for chat in range(CHATS):
            ids = [0, *(1 + chat * 1000 + i for i in range(BLOCKS * (turn + 1)))]
            entry = {
                "timestamp": 60_000 * turn + 500 * chat,
                "input_length": 512 * len(ids),
                "output_length": 100,
            }
            lines.append(json.dumps(entry | {"hash_ids": ids}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def run(path: Path, name: str, capacity: int = 1000):
    return RouterSimulation(
        read_trace(path), output_lengths(path), 4, capacity, ServiceTimes()
    ).run(name)


def test_bounded_affinity_finds_every_turn_and_is_balanced(path: Path) -> None:
    total = sum(CHATS * (1 + BLOCKS * (turn + 1)) for turn in range(TURNS))
    chats = sum(CHATS * (1 + BLOCKS * turn) for turn in range(1, TURNS))
    bounded = run(
        path, "bounded"
    )  # a chat or two may move once; the first turns may share the first block
    assert 0.9 * chats / total <= bounded.block_hit_ratio <= (chats + CHATS) / total
    assert (
        bounded.load_routed < 1.2 + 4 * 2 / (CHATS * TURNS) + 0.1
    )  # the bound, and the slack of two in so few
    assert bounded.stats["out_of_sync"] == 0
    assert bounded.stats["routed"] == CHATS * TURNS
    assert bounded == run(path, "bounded")
    worse = run(path, "round_robin", capacity=40)
    assert worse.block_hit_ratio < run(path, "bounded", capacity=40).block_hit_ratio
    assert worse.evicted_blocks > 0


def test_the_command_writes_recipe_and_results(path: Path, tmp_path: Path) -> None:
    to = tmp_path / "router.json"
    options = ["--workers", "2", "--capacity", "40", "--json", str(to)]
    assert run_benchmark(["router", str(path), *options]) == 0
    written = json.loads(to.read_text(encoding="utf-8"))
    assert [result["router"] for result in written["results"] if not result["settings"]] == list(
        ROUTERS
    )
    assert written["decision"]["route_us"]["p50"] > 0
    assert f"{CHATS * TURNS} requests" in written["recipe"]["trace"]


@pytest.mark.parametrize(
    "options", [["--workers", "0"], ["--capacity", "0"], ["--router", "best"], ["--step-ms", "-1"]]
)
def test_bad_options_are_refused(path: Path, options: list[str]) -> None:
    assert run_benchmark(["router", str(path), *options]) == 2


def test_a_trace_without_output_lengths_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 1, "hash_ids": [1]}\n', encoding="utf-8")
    with pytest.raises(TraceError, match=r"bad.jsonl:1: output_length is None"):
        output_lengths(bad)
