"""The simulation of waiting requests: sessions are in order, all requests are served, and what
waits is protected; how long it took is not looked at."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host_tier as host_bench
from benchmarks import waiting as bench
from benchmarks import waiting_seeds as seeds_bench
from benchmarks.__main__ import run as run_benchmark
from benchmarks.waiting import Play, play, sessions
from benchmarks.workloads import Entry, generate
from prefixkv.cli.replay import Trace, make_trace


def entry(at_s: int, *ids: int) -> Entry:
    return {
        "timestamp": 1000 * at_s,
        "input_length": 512 * len(ids),
        "output_length": 9,
        "hash_ids": list(ids),
    }


def test_a_session_goes_on_where_a_prompt_ended_beyond_the_common_block() -> None:
    trace = make_trace(
        "t", [entry(0, 1, 2), entry(1, 1, 3), entry(2, 1), entry(3, 1, 2, 4), entry(4, 1, 2, 4, 5)]
    )
    begins, after = sessions(trace)
    assert begins == [0, 1, 2]
    assert after == {0: [3], 3: [4]}


@pytest.mark.slow
@pytest.mark.parametrize("protect", [False, True])
def test_every_request_is_served_and_as_many_wait_as_asked_for(protect: bool) -> None:
    trace = make_trace("retrieval", generate("retrieval")[:400])
    row = play(trace, 400, "hit_aware", 8, protect, "lru")
    assert row.requests == 200
    assert 4 < row.waited < 12
    assert 0 < row.block_hit_ratio < 1


@pytest.mark.slow
def test_protection_brings_hits_where_questions_to_the_same_documents_wait() -> None:
    trace = make_trace("retrieval", generate("retrieval")[:1200])
    without, with_it = (play(trace, 2500, "fifo", 64, protect, "lru") for protect in (False, True))
    assert with_it.block_hit_ratio > 1.1 * without.block_hit_ratio


@pytest.mark.slow
def test_it_writes_rows_and_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WAITING", (4,))
    path = tmp_path / "chats.jsonl"
    entries: list[Any] = generate("retrieval")[:200]
    path.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    out = tmp_path / "waiting.json"
    told = ["waiting", str(path), "--blocks", "400", "--requests", "150", "--json", str(out)]
    assert run_benchmark(told) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["protect"] for row in result["rows"]] == [False, True] * 2
    (cost,) = result["costs"]
    assert cost["evicted_pages"][0] == cost["evicted_pages"][1] > 0, "both do the same work"


def arrivals(trace: Trace, seed: int, more_s: float = 0.0, protect: bool = False) -> list[float]:
    """When each request of the trace came."""
    run = Play(trace, 400, "fifo", 8, protect, "lru", seed, more_s)
    run.run()
    return [run.arrived[str(at)][0] for at in range(len(trace.requests)) if str(at) in run.arrived]


def test_a_seed_gives_sessions_another_order_and_other_pauses_and_one_gives_the_same() -> None:
    trace = make_trace("chats", generate("chat")[:300])
    begins, after = sessions(trace)
    plain, once, again, other = (arrivals(trace, seed) for seed in (0, 1, 1, 2))
    assert once == again
    assert len({tuple(plain), tuple(once), tuple(other)}) == 3
    assert len(plain) == len(once) == len(other) > 200
    # Pauses follow the seed and the request, whatever happens in between.
    (before, then), *_ = ((one, two[0]) for one, two in after.items())
    for seed in (1, 2):
        runs = [Play(trace, 400, "fifo", 8, protect, "lru", seed) for protect in (False, True)]
        assert runs[0]._pauses == runs[1]._pauses
        assert 0.9 <= runs[0]._pauses[then] <= 1.1
        assert [*runs[0]._begins] == [*runs[1]._begins] != begins
        assert sorted(runs[0]._begins) == begins
    assert before < then


def test_pauses_that_are_longer_delay_what_goes_on_from_another_request() -> None:
    trace = make_trace("t", [entry(0, 1, 2), entry(30, 1, 2, 3), entry(99, 1, 2, 3, 4)])
    for more_s in (0.0, 0.1):
        came = arrivals(trace, 0, more_s)
        first_s = 2 * bench.BLOCK_S + bench.ANSWER_S
        assert came[1] == pytest.approx(first_s + 30 - bench.ANSWER_S + more_s)
        assert came[2] == pytest.approx(
            came[1] + bench.BLOCK_S + bench.ANSWER_S + 69 - bench.ANSWER_S + more_s
        )


@pytest.mark.slow
def test_with_seeds_it_writes_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds_bench, "WAITING", (4,))
    path, out = tmp_path / "chats.jsonl", tmp_path / "seeds.json"
    entries: list[Any] = generate("retrieval")[:200]
    path.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    told = ["waiting_seeds", str(path), "--blocks", "400", "--seeds", "2", "--json", str(out)]
    assert run_benchmark([*told, "--requests", "150", "--jobs", "1"]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["seed"] for row in rows] == [1] * 5 + [2] * 5
    cases = [(row["admission"], row["protect"], row["pause_more_s"]) for row in rows[:5]]
    assert cases == [tuple(case) for case in seeds_bench.CASES]
    for row in rows:
        assert row["ttft_s_p40"] <= row["ttft_s_p50"] <= row["ttft_s_p60"] <= row["ttft_s_p90"]
        assert 0 <= row["soon"] <= 1


@pytest.mark.slow
def test_host_tiers_of_a_trace_are_written_by_pool_policy_and_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_bench, "CAPACITIES", (40, 200))
    path, out = tmp_path / "chats.jsonl", tmp_path / "hosts.json"
    entries: list[Any] = generate("chat")[:300]
    path.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    told = ["host_tier", str(path), "--jobs", "1", "--json", str(out)]
    assert run_benchmark(told) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["capacity_blocks"], row["policy"], row["running"]) for row in rows] == list(
        product((40, 200), host_bench.POLICIES, host_bench.RUNNING)
    )
    for row in rows:
        sizes = [tier["host_blocks"] for tier in row["host"]]
        times = host_bench.TIMES if row["running"] in host_bench.WITH_HOSTS else ()
        assert sizes == [one * row["capacity_blocks"] for one in times]
