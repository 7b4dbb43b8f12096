"""Replays against plain models: one policy, the optimum, host tiers; curves from Python."""

import random
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, groupby, product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.policies.gated import Gated
from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cli.replay import (
    OPTIMUM,
    RequestHits,
    Trace,
    client_hints,
    make_trace,
    replay_curves,
    replay_optimum,
    replay_policy,
)
from prefixkv.cli.replay.run import host_blocks
from prefixkv.errors import ConfigError
from prefixkv.policies import DEFAULT_POLICY
from tests.support.traces import entry, sessions, trace_of


def partial_blocks(seed: int, number: int) -> Trace:
    """Sessions of which each prompt ends with a partial block."""
    paths = sessions(seed, number)
    return make_trace(
        "t", [entry([*path, 10**6 + at], 512 * len(path) + 100, 4000 * at)
              for at, path in enumerate(paths)],
    )  # fmt: skip


# --- a policy -------------------------------------------------------------------------------------


def plain_lru(trace: Trace, capacity: int, running: int) -> Iterator[tuple[int, int] | None]:
    """By request: blocks found, and asked for; None for one that is refused."""
    kept: OrderedDict[int, bool] = OrderedDict()
    runs: deque[list[int]] = deque()  # the blocks of each request that runs
    for request in trace.requests:
        ids = request.key.tokens().tolist()
        if running and len(ids) > capacity:
            yield None
            continue
        while runs and len(runs) >= running:
            runs.popleft()
        while running and len({*ids}.union(*runs)) > capacity:
            runs.popleft()
        known = 0
        while known < len(ids) and ids[known] in kept:
            known += 1
        yield known, request.blocks
        for block in reversed(ids):
            kept[block] = True
            kept.move_to_end(block)
        if running:
            runs.append(ids)
        held = set().union(*runs)
        for block in [block for block in kept if block not in held]:
            if len(kept) <= capacity:
                break
            del kept[block]


@pytest.mark.parametrize("capacity", [20, 100, 300])
@pytest.mark.parametrize("warm", [0.0, 0.5])
@pytest.mark.parametrize("running", [0, 1, 2, 9, 40])
def test_lru_agrees_with_a_plain_model(capacity: int, warm: float, running: int) -> None:
    trace = partial_blocks(0, 400)
    rows = [*plain_lru(trace, capacity, running)][int(warm * 400) :]
    result = replay_policy(trace, "lru", capacity, warm, running=running)
    assert result.hit_tokens == 512 * sum(row[0] for row in rows if row)
    blocks = sum(one.blocks for one in trace.requests[int(warm * 400) :])
    assert result.block_hit_ratio == pytest.approx(result.hit_tokens / 512 / blocks, abs=1e-12)
    assert result.too_long == rows.count(None)
    assert bool(result.too_long) == (capacity == 20 and running > 0)
    assert result.running == running
    assert bool(result.running_blocks) == bool(running)
    assert result.running_blocks <= capacity


def test_no_policy_passes_the_optimum_and_all_agree_when_everything_fits() -> None:
    trace = partial_blocks(0, 200)
    for capacity, running in product((20, 100), (0, 1, 5)):
        best = replay_optimum(trace, capacity, running=running).block_hit_ratio
        ratios = {
            name: replay_policy(trace, name, capacity, running=running).block_hit_ratio
            for name in policy_names()
        }
        assert max(ratios.values()) <= best
        assert min(ratios.values()) < best
    best_of_all = replay_optimum(trace, 10**6)
    for name in policy_names():
        result = replay_policy(trace, name, 10**6)
        assert result.evicted_pages == 0
        assert result.block_hit_ratio == best_of_all.block_hit_ratio
        assert result.token_hit_ratio == best_of_all.token_hit_ratio


def test_no_partial_block_is_found_by_any() -> None:
    """The same prompt twice: its partial block has the same id, and is found by none."""
    trace = make_trace("t", [entry([1, 2], 600)] * 2)
    assert replay_optimum(trace, 9).block_hit_ratio == 1 / 4
    for policy in ("lru", "slru", DEFAULT_POLICY):
        result = replay_policy(trace, policy, 9)
        assert (result.block_hit_ratio, result.hit_tokens) == (1 / 4, 512)


# --- the optimum ----------------------------------------------------------------------------------


def most_hits(paths: list[list[int]], capacity: int, running: int) -> int:
    """By trying everything: after each request, every set of prefixes, closed upwards, that fits of
    those that were kept and those it brought; with all of what runs, if that counts."""
    best_of = {frozenset[Any](): 0}
    runs: list[list[Any]] = []
    for path in paths:
        asked = [tuple(path[: depth + 1]) for depth in range(len(path))]
        if running and len(path) > capacity:
            continue
        runs = [*runs, asked][-running:] if running else []
        while len({prefix for one in runs for prefix in one}) > capacity:
            del runs[0]
        held = {prefix for one in runs for prefix in one}
        after: dict[frozenset[Any], int] = {}
        for kept, hits in best_of.items():
            known = 0
            while known < len(asked) and asked[known] in kept:
                known += 1
            there = kept | set(asked)
            for size in range(min(capacity, len(there)) + 1):
                for chosen in map(frozenset, combinations(sorted(there), size)):
                    if held <= chosen and all(
                        len(prefix) == 1 or prefix[:-1] in chosen for prefix in chosen
                    ):
                        after[chosen] = max(after.get(chosen, -1), hits + known)
        best_of = after
    return max(best_of.values())


@pytest.mark.parametrize("running", [0, 1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_is_what_trying_everything_finds(seed: int, running: int) -> None:
    rng = random.Random(seed)
    paths = [
        [rng.randrange(2) for _ in range(rng.choice((1, 2, 2, 3)))]
        for _ in range(rng.choice((4, 6, 8)))
    ]
    trace, blocks = trace_of(*paths), sum(map(len, paths))
    for capacity in (1, 2, 3):
        found = replay_optimum(trace, capacity, running=running).block_hit_ratio * blocks
        assert round(found) == most_hits(paths, capacity, running), (paths, capacity)


# --- hints ----------------------------------------------------------------------------------------


def test_a_client_knows_what_comes_back_in_time() -> None:
    trace = trace_of([1, 2], [1, 3], [1, 2, 4], [1, 3], [1, 3], [], step_s=60.0)
    # The fourth comes back within a minute, the first and second, but for their last block, too.
    assert client_hints(trace, 2.0) == [120.0, 120.0, 0.0, 120.0, 0.0, None]
    assert client_hints(trace, 0.5) == [0.0, 0.0, 0.0, 0.0, 0.0, None]
    wrong = client_hints(trace, 2.0, wrong=1.0)
    assert all(
        said not in (None, true)
        for said, true in zip(wrong[:5], client_hints(trace, 2.0)[:5], strict=True)
    )


def test_a_share_of_the_hints_is_wrong_and_which_is_seeded() -> None:
    trace = trace_of(*[[at] for at in range(1000)])
    wrong = client_hints(trace, 5.0, 0.2)
    assert 150 < sum(hint != 0 for hint in wrong) < 250
    assert wrong == client_hints(trace, 5.0, 0.2) != client_hints(trace, 5.0, 0.2, seed=1)


# --- host tiers -----------------------------------------------------------------------------------


def plain_tiers(trace: Trace, capacity: int, host: int) -> list[tuple[int, int, int]]:
    """By request: what two LRUs find, the device's and behind it the host's, and what is written;
    one request at a time."""
    kept: tuple[OrderedDict[int, bool], ...] = (OrderedDict(), OrderedDict())
    found = []
    for request in trace.requests:
        path = request.key.tokens().tolist()
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
    trace = trace_of(*sessions(seed))
    seen: list[RequestHits] = []
    found = replay_curves(trace, ["lru"], [30], hosts=[host], warm=0.25, each=seen.append)
    rows = plain_tiers(trace, 30, host)
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
    def bare(result: Any) -> Any:
        return replace(result, us_per_request=0.0, host=())

    trace = trace_of(*sessions(5, 150))
    hints = [at % 3 == 0 or None for at in range(150)]
    options: dict[str, Any] = {"running": running, "hints": hints, "warm": 0.2}
    (without,) = replay_curves(trace, [policy], [40], **options)
    (found,) = replay_curves(trace, [policy], [40], hosts=[0, "3x", 90], **options)
    assert bare(found) == bare(without)
    none, behind, nearly = found.host
    assert (none.block_hit_ratio, none.loads, none.written_blocks) == (found.block_hit_ratio, 0, 0)
    assert (nearly.host_blocks, behind.host_blocks) == (120, 90)
    assert behind.loaded_blocks > 0
    # Each size is replayed by itself.
    assert replay_curves(trace, [policy], [40], hosts=[120], **options)[0].host == (nearly,)


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
    ("size", "options", "why"),
    [
        *((size, {}, f"a host tier of {size}: a size is") for size in
          ("", "4y", "x", "-1x", "1.5", "GiB", "4x4", True, 1.5, "1e3", "٤x")),
        ("1MiB", {}, "--bytes-per-token"),
        ("1KiB", {"bytes_per_token": 100}, "no room for a block of 51,200 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_size_of_a_host_tier_is_refused(size: Any, options: Any, why: str) -> None:
    seen: list[Any] = []
    with pytest.raises(ConfigError, match=why):
        replay_curves(trace_of([1]), ["lru"], [2], hosts=[size], each=seen.append, **options)
    assert not seen


# --- curves from Python ---------------------------------------------------------------------------

SMALL = trace_of(*[[at % 3] for at in range(12)])


def test_the_curves_are_those_of_single_replays() -> None:
    trace = partial_blocks(0, 120)
    found = replay_curves(trace, ["lru", OPTIMUM, Gated], [60, 20, 60], warm=0.25)
    assert [(one.policy, one.capacity_blocks) for one in found] == [
        ("lru", 20), (OPTIMUM, 20), ("gated", 20), ("lru", 60), (OPTIMUM, 60), ("gated", 60),
    ]  # fmt: skip
    for one in found:
        make: dict[str, Any] = {
            "lru": partial(replay_policy, policy="lru"), OPTIMUM: replay_optimum,
            "gated": partial(replay_policy, policy=Gated()),
        }  # fmt: skip
        alone = make[one.policy](trace, capacity=one.capacity_blocks, warm=0.25)
        assert replace(one, us_per_request=0.0) == replace(alone, us_per_request=0.0)


def test_policies_and_capacities_may_be_none_one_or_have_names_of_ones_own() -> None:
    found = replay_curves(SMALL)
    assert {one.policy for one in found} == {*policy_names(), OPTIMUM}
    assert {one.capacity_blocks for one in found} == {1, 2, 4}
    short = partial(Gated, fresh_s=0)
    policies: dict[str, Any] = {"a": Gated, "b": short, "c": "lru", "d": "optimum"}
    found = replay_curves(SMALL, policies, [2], hosts=["2x", "4x"])
    assert [one.policy for one in found] == ["a", "b", "c", "d"]
    assert [len(one.host) for one in found] == [2, 2, 2, 0]
    assert replay_curves(SMALL, ["adaptive:trust=5"], [2])[0].policy == "adaptive:trust=5"


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
        ({"hints": [True]}, "1 hints for 12 requests"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_is(
    options: dict[str, Any], why: str
) -> None:
    seen: list[Any] = []
    with pytest.raises(ConfigError, match=why):
        replay_curves(SMALL, **{"policies": ["lru"]} | options, each=seen.append)
    assert not seen


def test_a_function_that_makes_one_object_again_and_again_is_refused() -> None:
    one = Gated()
    with pytest.raises(ConfigError, match="serves a cache already"):
        replay_curves(SMALL, {"a": lambda: one}, [2, 3])


def test_what_each_request_finds_sums_up_to_the_results() -> None:
    trace = partial_blocks(0, 80)
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


def test_a_trace_without_a_request_has_results_of_zero() -> None:
    found = replay_curves(make_trace("t", []), ["lru", OPTIMUM])
    assert [(one.requests, one.block_hit_ratio) for one in found] == 2 * [(0, 0.0)]


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
