"""The benchmark of decode's rule: what the rule is told, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rule as bench
from benchmarks.__main__ import run as run_benchmark
from benchmarks.queues import Queues, RequestTokens, Speeds
from benchmarks.workloads import generate
from prefixkv.cli.replay import Trace
from prefixkv.config import ComputeConfig
from prefixkv.decode.sources import Sources

SPEEDS = Speeds(prefill_tokens_per_s=2000, link_bytes_per_s=1e9)
TRACE = Trace("t", [], 1, 512, bytes_per_token=10)


class Told(Sources):
    """The rule, and what it was told and when."""

    def __init__(self) -> None:
        super().__init__(ComputeConfig())
        self.calls: list[tuple[Any, ...]] = []

    def chunk(self, num_tokens: int, seconds: float, running: int, now_s: float, *_: Any) -> None:
        self.calls.append(("chunk", num_tokens, round(seconds, 6), round(now_s, 6)))
        super().chunk(num_tokens, seconds, running, now_s)

    def arrived(self, address: str, key: Any, num_tokens: int, now_s: float) -> None:
        self.calls.append(("arrived", num_tokens, round(now_s, 6)))
        super().arrived(address, key, num_tokens, now_s)


def request(at_s: float, missing: int) -> RequestTokens:
    return RequestTokens(at_s, missing, 0, [0], counted=True)


def test_the_rule_is_told_what_has_happened_and_nothing_else() -> None:
    """Decode computes 1,000 tokens a second. The first request is its own: there is nothing to
    choose by. The second goes to prefill, once something is known of the first."""
    queues, told = Queues(TRACE, SPEEDS, 1), Told()
    node = bench.Node(queues, told)
    assert node.serve(request(0.0, 600), 0, 0).worker == -1
    assert told.calls == []
    # Half of it is done by now: of the chunks of 256 only one.
    assert node.serve(request(0.3, 700), 0, 0).worker == 0
    assert told.calls == [("chunk", 256, 0.256, 0.256)]
    assert told.chunk_s(256) == pytest.approx(0.256, rel=0.02)
    # Of prefill nothing, before .65 s: 350 ms, and the last block's 5 us on the link.
    node.serve(request(0.6499, 64), 0, 0)
    assert told.calls[1:] == [("chunk", 256, 0.256, 0.512), ("chunk", 88, 0.088, 0.6)]
    node.serve(request(0.6501, 64), 0, 0)
    assert told.calls[3:] == [("arrived", 700, 0.650005)]


def test_it_knows_of_its_own_queue_what_is_left() -> None:
    queues, sources = Queues(TRACE, SPEEDS, 1), Told()
    dues: list[int] = []
    whole = sources.choose_way
    sources.choose_way = lambda lacks, due, *rest: (dues.append(due), whole(lacks, due, *rest))[1]  # type: ignore[method-assign]
    node = bench.Node(queues, sources)
    for at_s in (0.0, 0.1, 0.3, 0.61):
        node.serve(request(at_s, 600), 0, 0)
    assert dues[:2] == [0, 600]
    assert dues[2] == 1200 - 256  # each chunk when it ends


def test_each_row_has_the_best_fixed_number_and_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = bench.TUNED[0]._replace(capacity=40)
    monkeypatch.setattr(bench, "TUNED", (case, case._replace(prefill="keeps all")))
    monkeypatch.setattr(bench, "HELD_OUT", (case._replace(trace="mix"),))
    paths = []
    for kind in ("chat", "retrieval"):
        paths.append(tmp_path / f"{kind}.jsonl")
        entries: list[Any] = generate(kind)[:200]
        paths[-1].write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    out = tmp_path / "rule.json"
    assert run_benchmark(["rule", *map(str, paths), "--json", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    rows = found["rows"]
    assert [(row["trace"], row["prefill"], row["host_times"]) for row in rows] == [
        ("agents", "as pool", 0), ("agents", "as pool", 4), ("agents", "keeps all", 0),
        ("agents", "keeps all", 4), ("mix", "as pool", 0), ("mix", "as pool", 4),
    ]  # fmt: skip
    for row in rows:
        best = min(one["ttft_s_p50"] for one in row["fixed"].values())
        ratio = row["rule"]["ttft_s_p50"] / best
        assert row["rule"]["ttft_s_p50_by_best_fixed"] == pytest.approx(ratio, abs=6e-4)
        assert ("rule, loads always" in row) is bool(row["host_times"])
    assert found["ratios"]["agents"]["rows"] == 4


def test_a_trace_of_small_blocks_is_read_in_larger_ones(tmp_path: Path) -> None:
    """Blocks of 64 tokens, eight of which make one: equal only with all before them equal."""
    first, other = list(range(17)), [*range(8), *range(100, 109)]
    path = tmp_path / "one.jsonl"
    rows = [
        {"timestamp": at, "block_size": 64, "input_length": 64 * len(ids), "hash_ids": ids}
        for at, ids in ((0, first), (5, other), (9, [7, *other]))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trace = bench._in_blocks(bench.read_trace(path))
    assert trace.block_tokens == 512
    assert [one.key.tokens().tolist() for one in trace.requests] == [[0, 1], [0, 2], [3, 4]]
    assert [one.num_tokens for one in trace.requests] == [1024] * 3
