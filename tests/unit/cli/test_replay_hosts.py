"""Host tiers behind a replay's device, against plain models and by hand; their sizes in words; what
is recommended."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest

from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cli.main import run_command
from prefixkv.cli.replay import Trace, make_trace, replay_curves
from prefixkv.cli.replay.tiers import host_blocks
from prefixkv.errors import ConfigError


def trace_of(*paths: list[int], bytes_per_token: int = 0) -> Trace:
    """A request a second; equal ids behind equal beginnings are equal blocks."""
    entries = [
        {"timestamp": 1000 * at, "input_length": 512 * len(path), "hash_ids": path}
        for at, path in enumerate(paths)
    ]
    return replace(make_trace("t", entries), bytes_per_token=bytes_per_token)


def sessions(seed: int, number: int = 300) -> Trace:
    """Sessions that grow, a few at a time."""
    rng = random.Random(seed)
    fresh = iter(range(10, 10**6))
    going: list[list[int]] = []
    paths = []
    for _ in range(number):
        if len(going) < 8 or rng.random() < 0.3:
            going.append([0])
        path = going[-1 - min(len(going) - 1, int(rng.expovariate(0.2)))]
        path += [next(fresh) for _ in range(rng.randrange(1, 6))]
        paths.append([*path])
    return trace_of(*paths)


def bare(result: Any) -> Any:
    """A result without its time and its host tiers."""
    return replace(result, us_per_request=0.0, host=())


# --- what is found and copied ---------------------------------------------------------------------


def plain(trace: Trace, capacity: int, host: int) -> list[tuple[int, int, int]]:
    """By request: what two LRUs find, the device's and behind it the host's, and what is written;
    one request at a time."""
    kept: tuple[OrderedDict[int, bool], ...] = (OrderedDict(), OrderedDict())
    found = []
    for request in trace.requests:
        path = request.whole_key.tokens().tolist()
        if len(path) > capacity:
            found.append((0, 0, 0))
            continue
        row = []
        for blocks, size in zip(kept, (capacity, host), strict=True):
            known = 0
            while known < len(path) and path[known] in blocks:
                known += 1
            row.append(known)
            part = path[:size]
            for block in [*reversed(path[:known]), *reversed(part)]:
                blocks[block] = True
                blocks.move_to_end(block)
            while len(blocks) > size:
                blocks.popitem(last=False)
        found.append((row[0], max(0, row[1] - row[0]), max(0, min(len(path), host) - row[1])))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host", [0, 7, 30, 60, 120, 10_000])
def test_host_tiers_agree_with_a_plain_model(seed: int, host: int) -> None:
    trace, seen = sessions(seed), []
    found = replay_curves(trace, ["lru"], [30], hosts=[host], warm=0.25, each=seen.append)
    rows = plain(trace, 30, host)
    assert [(one.hit_tokens, one.host_hit_tokens) for one in seen] == [
        (known * 512, {host: behind * 512}) for known, behind, _ in rows
    ]
    counted = rows[75:]
    (result,) = found[0].host
    assert result.loaded_blocks == sum(behind for _, behind, _ in counted)
    assert result.written_blocks == sum(written for *_, written in counted)
    assert result.loads == sum(behind > 0 for _, behind, _ in counted)
    assert bool(result.loads) == (host > 30)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*policy_names(), "benchmarks.policies.gated:Gated"])
@pytest.mark.parametrize("running", [0, 1, 5])
def test_a_host_tier_changes_nothing_on_the_device_and_one_of_no_pages_nothing_at_all(
    policy: str, running: int
) -> None:
    trace = sessions(5, 150)
    hints = [at % 3 == 0 or None for at in range(150)]
    options: dict[str, Any] = {"running": running, "queue": 4, "hints": hints, "warm": 0.2}
    (without,) = replay_curves(trace, [policy], [40], **options)
    (found,) = replay_curves(trace, [policy], [40], hosts=[0, "3x", 90], **options)
    assert bare(found) == bare(without)
    none, behind, nearly = found.host
    assert (none.block_hit_ratio, none.loads, none.written_blocks) == (found.block_hit_ratio, 0, 0)
    assert (nearly.host_blocks, behind.host_blocks) == (120, 90)
    assert behind.loaded_blocks > 0
    # Each size is replayed by itself.
    assert replay_curves(trace, [policy], [40], hosts=[120], **options)[0].host == (nearly,)


def test_the_optimum_has_no_host_tier() -> None:
    found = replay_curves(sessions(1, 50), ["optimum", "lru"], [20], hosts=["2x", "4x"])
    assert [len(one.host) for one in found] == [0, 2]


# --- sizes and words ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("4x", 400), ("1.5x", 150), ("0x", 0), ("250", 250), ("0", 0), ("1MiB", 1024),
        ("1.5 KiB", 1), ("3MB", 2929), ("4096B", 4), ("2gib", 2 << 20), (77, 77),
    ],
)  # fmt: skip
def test_sizes_of_host_tiers(text: str | int, blocks: int) -> None:
    assert host_blocks(text, 100, 1024) == blocks


@pytest.mark.parametrize(
    "given", ["", "4y", "x", "-1x", "1.5", "GiB", "4x4", True, 1.5, "1e3", "٤x"]
)
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="a host tier of"):
        replay_curves(trace_of([1]), ["lru"], [2], hosts=[given])


def test_a_size_in_bytes_needs_the_size_of_a_token() -> None:
    trace, seen = trace_of([1], [1]), []
    with pytest.raises(ConfigError, match="--bytes-per-token"):
        replay_curves(trace, ["lru"], [1, 2], hosts=["1MiB"], each=seen.append)
    with pytest.raises(ConfigError, match="no room for a block of 51,200 bytes"):
        replay_curves(trace, ["lru"], [1], hosts=["1KiB"], bytes_per_token=100, each=seen.append)
    assert not seen
    (found,) = replay_curves(trace, ["lru"], [1], hosts=["1MiB"], bytes_per_token=100)
    assert found.host[0].host_blocks == (1 << 20) // 51_200


def test_what_is_said_of_host_tiers(tmp_path: Any, capsys: Any) -> None:
    entries = [
        {"timestamp": 1000 * at, "input_length": 512, "hash_ids": [at % 3]} for at in range(9)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    words = f"replay {path} --policy lru --capacity 2 --json {tmp_path}/r.json --host 1x,2x"
    assert run_command([*words.split(), "--bytes-per-token", "2"]) == 0
    said = capsys.readouterr().out
    assert "  2  2.0 KiB   0.0%\n" in said
    assert "+ 2x  4.0 KiB  66.7%\n" in said
    assert "no policy found anything" not in said
    rows = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [one["written_bytes"] for one in rows[0]["host"]] == [9 * 1024, 3 * 1024]
