"""`prefixkv replay --check`, and replays that find nothing: each says why, and what it advises
helps."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from prefixkv.cli.main import run_command
from prefixkv.cli.replay.check import check_trace
from prefixkv.cli.replay.optimum import replay_optimum
from prefixkv.cli.replay.readers import make_trace
from prefixkv.cli.replay.run import replay_policy


def entry(ids: list[int], length: int | None = None, at: float = 0, **fields: Any) -> Any:
    length = 512 * len(ids) if length is None else length
    return {"timestamp": at, "input_length": length, "hash_ids": ids, **fields}


RECORDED = {"block_size": 512, "bytes_per_token": 64}
NOTHING: dict[str, tuple[list[Any], str, str]] = {
    # 1. What is in the file, the options, and what the reason says.
    "short": ([entry([1], 300), entry([1], 300)], "", "the longest has 300 tokens, a block 512"),
    "short, recorded": (
        [entry([1], 300, **RECORDED), entry([1], 301, **RECORDED)], "", "record_block_tokens=16",
    ),
    "short, tokens": ([[1, 2, 3], [1, 2, 3]], "", "--block-tokens takes smaller ones"),
    "short and long": ([entry([1]), entry([2], 9), entry([2], 9)], "",
                       "2 of 3 prompts are shorter than a block"),
    "unlike": ([entry([1, 2]), entry([3, 4])], "", "No block comes a second time"),
    "unlike, recorded": ([entry([1], **RECORDED), entry([2], **RECORDED)], "", "salted"),
    "warm": ([entry([1]), entry([1]), entry([2]), entry([3])], "--warm 0.5",
             "the first 2 requests, which only warm the cache (--warm 0.5); the 2 others"),
    "namespaces": ([entry([1], namespace="a"), entry([1], namespace="b")], "",
                   "2 for 2 requests: those share nothing"),
    "other beginnings": ([entry([1, 5, 6]), entry([2, 5, 6])], "",
                         "2 blocks come again, but behind other blocks"),
    "one time": ([entry([1]), entry([2])], "", "All requests have the same time"),
}  # fmt: skip


def write(path: Any, entries: list[Any]) -> Any:
    path.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    return path


@pytest.mark.parametrize("case", NOTHING)
def test_a_replay_of_zeros_says_why_and_recommends_nothing(case, tmp_path, capsys) -> None:
    entries, options, why = NOTHING[case]
    words = ["replay", str(write(tmp_path / "own.jsonl", entries)), *options.split()]
    assert run_command([*words, "--policy", "adaptive,lru,optimum"]) == 0
    said = capsys.readouterr().out
    assert "it finds" not in said
    assert "no policy found anything, so none is recommended" in said
    assert why in said
    assert run_command([*words, "--check", "--json", str(tmp_path / "c.json")]) == 0
    assert why in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert why in " ".join(row["why_nothing"])
    assert row["block_bound"] == row["token_bound"] == 0


def test_a_capacity_below_a_prompt_is_the_reason(tmp_path, capsys) -> None:
    paths = [[1, 2], [3, 4], [5, 6], [1, 2], [3, 4], [5, 6]]
    path = write(tmp_path / "t.jsonl", [entry(ids, at=1000 * at) for at, ids in enumerate(paths)])
    assert run_command(["replay", str(path), "--policy", "lru", "--capacity", "1"]) == 0
    said = capsys.readouterr().out
    assert "With all blocks kept (6) 50.0% would be found." in said
    assert "and 1 fit: lru finds some from 6 blocks on" in said
    assert "lru: it finds" not in said
    # Others are zero, one is not: that one is recommended.
    assert run_command(["replay", str(path), "--policy", "lru", "--capacity", "6"]) == 0
    assert "lru: it finds" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_and_the_capacity_are_those_of_replays(seed) -> None:
    rng = random.Random(seed)
    paths: list[list[int]] = []
    for _ in range(rng.choice((4, 12))):
        base = rng.choice(paths)[: rng.randrange(4)] if paths and rng.random() < 0.6 else []
        paths.append([*base, *(rng.randrange(10**6) for _ in range(rng.randrange(3)))])
    trace = make_trace(
        "t", [entry(ids, 512 * len(ids) + 9 * (not ids), at) if ids else entry([1], 9, at)
              for at, ids in enumerate(paths)],
    )  # fmt: skip
    for warm in (0.0, 0.5):
        found = check_trace(trace, warm)
        all_kept = replay_policy(trace, "lru", max(1, found.different_blocks), warm)
        assert all_kept.block_hit_ratio == found.block_bound
        assert all_kept.token_hit_ratio == pytest.approx(found.token_bound)
        assert replay_optimum(trace, 10**6, warm).block_hit_ratio == found.block_bound
        assert bool(found.why_nothing) == (not all_kept.hit_tokens)
        enough = found.lru_blocks
        assert bool(enough) == bool(all_kept.hit_tokens)
        if enough:
            assert replay_policy(trace, "lru", enough, warm).hit_tokens


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([entry([1], at=at / 1000) for at in range(9)], "1,000,000 a second"),
        ([entry([1], at=at) for at in range(9)], "1,000 a second"),  # seconds in place of ms
        ([entry([1], at=at * 1e9) for at in range(9)], "one in 278 hours"),
        ([entry([1], at=1000 * at) for at in (5, 4, 6, 1)], "2 requests are earlier"),
        ([entry([1], at=10 * at) for at in range(9)], None),  # 100 a second
        ([{"tokens": [5] * 64, "timestamp": 9000 * at} for at in range(2)], None),
    ],
)
def test_times_ids_and_empty_prompts_are_doubted(entries: list[Any], why: str | None) -> None:
    found = check_trace(make_trace("t", entries)).doubts
    assert found == () if why is None else why in found[0]


def test_a_check_says_what_each_file_is(tmp_path, capsys) -> None:
    files = {
        "Mooncake's trace": [entry([1]), entry([1], block_size=512)],
        "a decode node's record": [entry([1], **RECORDED), entry([1], **RECORDED)],
        "token lists": [[1] * 40, {"tokens": [1] * 50}],
    }
    for number, (kind, entries) in enumerate(files.items()):
        path = write(tmp_path / f"f{number}.jsonl", entries)
        assert run_command(["replay", str(path), "--check"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"f{number}: {kind}\n")
        assert "  2 requests in " in said
        # The second list of tokens has three blocks, which have to fit.
        enough = 3 if kind == "token lists" else 1
        assert f"lru finds some from {enough} blocks on" in said


def test_an_unlike_block_size_is_named_with_one_that_fits(tmp_path, capsys) -> None:
    path = write(tmp_path / "t.jsonl", [entry([*range(5)], 300)])
    assert run_command(["replay", str(path), "--check"]) == 2
    assert "has 1 blocks of 512 tokens; of 64 it has 5" in capsys.readouterr().err
    assert run_command(["replay", str(path), "--check", "--block-tokens", "64"]) == 0
