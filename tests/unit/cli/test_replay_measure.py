"""The curves from Python, and what each request finds."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.policies.gated import Gated
from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cli.replay import (
    OPTIMUM,
    RequestHits,
    Trace,
    make_trace,
    read_trace,
    replay_curves,
    replay_optimum,
    replay_policy,
)
from prefixkv.errors import ConfigError
from tests.unit.cli.test_replay import write_trace


def small() -> Trace:
    return make_trace(
        "t",
        [{"timestamp": at, "input_length": 512, "hash_ids": [at % 3]} for at in range(12)],
    )


def test_the_curves_are_those_of_single_replays(tmp_path) -> None:
    trace = read_trace(str(write_trace(tmp_path / "t.jsonl", 120)))
    found = replay_curves(trace, ["lru", OPTIMUM, Gated], [60, 20, 60], warm=0.25)
    assert [(one.policy, one.capacity_blocks) for one in found] == [
        ("lru", 20), (OPTIMUM, 20), ("gated", 20), ("lru", 60), (OPTIMUM, 60), ("gated", 60),
    ]  # fmt: skip
    for one in found:
        alone = (
            replay_optimum(trace, one.capacity_blocks, 0.25)
            if one.policy == OPTIMUM
            else replay_policy(
                trace, Gated() if one.policy == "gated" else "lru", one.capacity_blocks, 0.25
            )
        )
        assert (one.hit_tokens, one.block_hit_ratio) == (alone.hit_tokens, alone.block_hit_ratio)
        assert (one.requests, one.prompt_tokens) == (alone.requests, alone.prompt_tokens)


def test_policies_and_capacities_may_be_none_one_or_have_names_of_ones_own() -> None:
    found = replay_curves(small())
    assert {one.policy for one in found} == {*policy_names(), OPTIMUM}
    assert {one.capacity_blocks for one in found} == {1, 2, 4}
    short = partial(Gated, fresh_s=0)
    found = replay_curves(small(), {"a": Gated, "b": short, "c": "lru", "d": "optimum"}, [2])
    assert [one.policy for one in found] == ["a", "b", "c", "d"]
    assert replay_curves(small(), ["adaptive:trust=5"], [2])[0].policy == "adaptive:trust=5"
    (one,) = replay_curves(small(), [Gated], [2])
    assert (one.policy, one.capacity_blocks, one.hit_tokens) == ("gated", 2, found[0].hit_tokens)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"policies": ["newest"]}, "'newest'"),
        ({"policies": [Gated, partial(Gated, fresh_s=1)]}, "names of your own"),
        ({"policies": [Gated()]}, "no function that makes"),
        ({"policies": [dict]}, "no function that makes"),
        ({"policies": {"a": lambda: None}}, "no function that makes"),
        ({"policies": [type("Nameless", (Gated,), {"name": 3})]}, "with a name"),
        ({"policies": [type("Nameless", (Gated,), {"name": ""})]}, "with a name"),
        ({"capacities": [0]}, "capacity"),
        ({"warm": 1.0}, "warm"),
        ({"queue": -1}, "queue"),
        ({"hints": [True]}, "1 hints for 12 requests"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_is(
    options: dict[str, Any], why: str
) -> None:
    seen: list[Any] = []
    with pytest.raises(ConfigError, match=why):
        replay_curves(small(), **{"policies": ["lru"]} | options, each=seen.append)
    assert not seen


def test_a_function_that_makes_one_object_again_and_again_is_refused() -> None:
    one = Gated()
    with pytest.raises(ConfigError, match="serves a cache already"):
        replay_curves(small(), {"a": lambda: one}, [2, 3])


def test_what_each_request_finds_sums_up_to_the_results(tmp_path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.jsonl", 80))
    rows: list[RequestHits] = []
    results = replay_curves(trace, ["lru", "optimum"], [9, 30], warm=0.4, each=rows.append)
    found = [[*of] for _, of in groupby(rows, lambda row: (row.policy, row.capacity_blocks))]
    for result, mine in zip(results, found, strict=True):
        assert (mine[0].policy, mine[0].capacity_blocks) == (result.policy, result.capacity_blocks)
        assert [(row.request, row.time_s, row.tokens, row.counted) for row in mine] == [
            (at, one.time_s, one.num_tokens, at >= 32) for at, one in enumerate(trace.requests)
        ]
        counted = [row for row in mine if row.counted]
        assert sum(row.hit_tokens for row in counted) == result.hit_tokens > 0
        blocks = sum(row.blocks for row in counted)
        assert result.hit_tokens / 512 / blocks == pytest.approx(result.block_hit_ratio)


def test_the_command_line_is_not_needed() -> None:
    """In a process of its own, where its packages cannot be imported."""
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'psutil', 'matplotlib'): sys.modules[name] = None\n"
        "from prefixkv.cli.replay import make_trace, replay_curves\n"
        "entry = {'input_length': 512, 'hash_ids': [1]}\n"
        "print(replay_curves(make_trace('t', [entry, entry]), ['lru'], [1])[0].hit_tokens)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert (ran.stdout, ran.returncode) == ("512\n", 0), ran.stderr
