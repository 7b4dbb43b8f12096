"""Host tiers of a trace."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host_tier as host_bench
from benchmarks.__main__ import run as run_benchmark
from benchmarks.workloads import generate


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
