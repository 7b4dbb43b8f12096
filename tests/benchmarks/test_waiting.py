"""The simulation of waiting requests: sessions are in order, all requests are served, and what
waits is protected; how long it took is not looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import waiting as bench
from benchmarks.__main__ import run as run_benchmark
from benchmarks.waiting import play, sessions
from benchmarks.workloads import Entry, generate
from prefixkv.cli.replay import make_trace


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
