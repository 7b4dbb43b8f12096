"""Replays against plain models: one policy, the optimum, host tiers; curves from Python. `prefixkv
replay`: what it reads and refuses, its table and recommendation, and what it says of traces in
which nothing is found."""

import json
import random
import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, groupby, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies.gated import Gated
from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cli.main import run_command
from prefixkv.cli.replay import (
    OPTIMUM,
    ReplayResult,
    RequestHits,
    Trace,
    check_trace,
    client_hints,
    make_trace,
    read_trace,
    replay_curves,
    replay_optimum,
    replay_policy,
)
from prefixkv.cli.replay.report import NOISE, TraceResults, sentence, table
from prefixkv.cli.replay.run import host_blocks
from prefixkv.cli.replay.trace import footprint
from prefixkv.errors import ConfigError, TraceError
from prefixkv.policies import DEFAULT_POLICY
from tests.support.processes import run_python
from tests.support.traces import entry, sessions, trace_of, write


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
        ({"policies": [Gated()]}, "no class or function that makes"),
        ({"policies": [dict]}, "no class or function that makes"),
        ({"policies": {"a": lambda: None}}, "no class or function that makes"),
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
    ran = run_python(code)
    assert (ran.stdout, ran.returncode) == ("512\n", 0), ran.stderr


OWN = "benchmarks.policies.gated:Gated:fresh_s=60"  # a policy that does not ship
RECORDED = {"block_size": 512, "bytes_per_token": 64}


# --- files ----------------------------------------------------------------------------------------


def test_a_trace_of_token_lists(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('[1, 1, 2, 2, 3]\n\n{"tokens": [1, 1, 2, 2, 4, 4], "timestamp": 5000}\n')
    trace = read_trace(path, block_tokens=2)
    assert [request.time_s for request in trace.requests] == [0.0, 5.0]
    result = replay_policy(trace, "slru", 10)
    assert (result.block_hit_ratio, result.token_hit_ratio) == (2 / 5, 4 / 11)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        '{"timestamp": 0}',
        '{"timestamp": -1, "input_length": 1, "hash_ids": [1]}',
        '{"timestamp": "now", "input_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 513, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": ["a"]}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": [true]}',
        '{"timestamp": 0, "input_length": null, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": [1], "block_size": 256}',
        '{"timestamp": 0, "input_length": 5, "hash_ids": [1], "schema": 1}',
        '{"tokens": [1, -1]}',
        '{"tokens": [1.5]}',
        "[true]",
        "[1]",
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:2"):
        read_trace(path)


def test_traces_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    for content, why in ((b"\n", "no request"), (b"\xff\xfe\x00", "binary.jsonl:1")):
        (tmp_path / "binary.jsonl").write_bytes(content)
        with pytest.raises(TraceError, match=why):
            read_trace(tmp_path / "binary.jsonl")


def test_an_unlike_block_size_is_named_with_one_that_fits(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "t.jsonl", [entry([*range(5)], 300)])
    assert run_command(["replay", str(path), "--check"]) == 2
    assert "has 1 blocks of 512 tokens; of 64 it has 5" in capsys.readouterr().err
    assert run_command(["replay", str(path), "--check", "--block-tokens", "64"]) == 0


# --- the table and the recommendation -------------------------------------------------------------


def results(*rows: tuple[str, int, float], bytes_per_token: int = 0) -> TraceResults:
    """Of 100,000 tokens."""
    made = [
        ReplayResult("t", policy, size, ratio, ratio, 10, 0, 1.0, round(ratio * 10**5), 10**5)
        for policy, size, ratio in rows
    ]
    return TraceResults(Trace("t", [], 1, 512, bytes_per_token), made)


def test_the_default_is_taken_unless_another_is_better_by_more_than_noise() -> None:
    def chosen(default: float, other: float) -> str | None:
        return results((DEFAULT_POLICY, 9, default), ("lru", 9, other), (OPTIMUM, 9, 1)).best(9)

    assert chosen(0.30, 0.30 * (1 + NOISE / 2)) == DEFAULT_POLICY
    assert chosen(0.30, 0.30 * (1 + 2 * NOISE)) == "lru"
    assert chosen(0.89, 0.90) == "lru"  # a tenth more is sent
    assert chosen(0.31, 0.30) == DEFAULT_POLICY
    assert results(("fifo", 9, 0.5), ("lru", 9, 0.495), (DEFAULT_POLICY, 9, 0.4)).best(9) == "lru"
    assert results((OPTIMUM, 9, 1.0)).best(9) is None


def test_the_table_has_a_line_for_each_size_and_a_column_for_what_differs() -> None:
    rows = [
        (name, size, ratio)
        for size, ratios in ((100, (0.1, 0.2, 0.1, 0.3)), (2000, (0.5, 0.5, 0.5, 0.5)))
        for name, ratio in zip((DEFAULT_POLICY, "fifo", "lru", OPTIMUM), ratios, strict=True)
    ]
    assert table(results(*rows, bytes_per_token=1 << 20)) == [
        f"blocks        size  {DEFAULT_POLICY}*   fifo  optimum    gap",
        "   100    50.0 GiB      10.0%  20.0%    30.0%  10.0%",
        " 2,000  1000.0 GiB      50.0%  50.0%    50.0%   0.0%",
        "* is the default policy",
        "gap: from the best policy to the optimum, which no policy exceeds",
        f"lru: as {DEFAULT_POLICY}* in every row",
    ]
    heads = ["blocks", f"{DEFAULT_POLICY}*", "fifo", "optimum", "gap"]
    assert table(results(*rows))[0].split() == heads


def test_the_recommendation_has_the_policy_the_bound_the_bytes_and_both_sizes() -> None:
    sizes = (5, 0.2, 0.1, 0.3), (10, 0.4, 0.3, 0.5), (20, 0.45, 0.35, 0.6)
    rows = [
        (name, size, ratio)
        for size, *ratios in sizes
        for name, ratio in zip(("lru", DEFAULT_POLICY, OPTIMUM), ratios, strict=True)
    ]
    assert sentence(results(*rows, bytes_per_token=1 << 20), 10) == (
        "t, 10 blocks (5.0 GiB): take lru: it finds 40.0% of the blocks and saves the KV of 40,000 "
        f"tokens, 39.1 GiB. The default, {DEFAULT_POLICY}, finds 30.0%. No policy could find more "
        "than 50.0%. Half the memory: 20.0%, 19.5 GiB less. Twice the memory: 45.0%, 4.9 GiB more."
    )
    assert sentence(results(("lru", 10, 0.4)), 10) == (
        "t, 10 blocks: lru: it finds 40.0% of the blocks and saves the KV of 40,000 tokens."
    )


NAMES = (DEFAULT_POLICY, "lru", "fifo", "slru")


@given(
    st.lists(
        st.sampled_from([0.3, 0.30001, 0.3004, 0.301, 0.303, 0.31, 0.99, 0.992, 1.0]),
        min_size=len(NAMES), max_size=len(NAMES),
    )
)  # fmt: skip
def test_the_recommendation_agrees_with_the_table(ratios: list[float]) -> None:
    """Each policy of which the table shows as much as of the chosen one is named, and the one of
    which it shows the most."""
    found = results(*((name, 9, ratio) for name, ratio in zip(NAMES, ratios, strict=True)))
    shown = dict(zip(NAMES, (f"{ratio:.1%}" for ratio in ratios), strict=True))
    said, chosen = sentence(found, 9), str(found.best(9))
    assert f"take {chosen}" in said
    assert f"it finds {shown[chosen]} of the blocks" in said
    equal = [name for name in NAMES if name != chosen and shown[name] == shown[chosen]]
    as_much = re.search(r"\. ([^.]*) finds? as much\.", said)
    assert re.split(", | and ", as_much[1] if as_much else "") == (equal or [""])
    most = max(NAMES, key=lambda name: found.hits(9)[name])
    more = f"{most} finds {shown[most]}, too little more to choose by."
    assert (more in said) == (float(shown[most][:-1]) > float(shown[chosen][:-1]))


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    rng = random.Random(3)
    sizes = {"block_size": 512, "bytes_per_token": 1 << 17}
    return write(
        tmp_path / "own.jsonl",
        [entry([rng.randrange(4), 100 + rng.randrange(40), 1000 + at], at=900 * at, **sizes)
         for at in range(120)],
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        "--policy newest",
        "--policy ,",
        "--capacity 1,x",
        "--capacity 0",
        "--warm 1",
        "--running -1",
        "--hints -1",
        "--pool 0",
        "--bytes-per-token 0",
        "--host 4x,",
        "--host 1GiB",  # the trace does not say what a token takes
        "--host 1000000000x",
        "--block-tokens 0",
        "--check --plot {tmp}/p.png",
        "--plot {tmp}/p.curve",
    ],
)
def test_bad_options_are_one_line_and_status_2(tmp_path: Path, options: str, capsys: Any) -> None:
    path = write(tmp_path / "t.jsonl", [entry([1]), entry([2])])
    assert run_command(["replay", str(path), *options.format(tmp=tmp_path).split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_writes_its_results(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    entries = [
        entry(path, 512 * len(path) + 100 - 512, 4000 * at)
        for at, path in enumerate(sessions(0, 60))
    ]
    words = f"replay {write(tmp_path / 't.jsonl', entries)} --policy lru,{OWN} --policy optimum"
    options = f"--capacity 10,50 --warm 0.5 --pool 8 --json {tmp_path}/r.json"
    assert run_command([*words.split(), *options.split(), "--plot", f"{tmp_path}/r.svg"]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [(row["capacity_blocks"], row["policy"]) for row in rows] == [
        *product((4, 8, 10, 16, 50), ("lru", OWN, "optimum"))
    ]
    assert rows[0].keys() == {
        "trace", "policy", "capacity_blocks", "block_hit_ratio", "token_hit_ratio", "requests",
        "evicted_pages", "us_per_request", "hit_tokens", "prompt_tokens", "running",
        "running_blocks", "too_long", "host", "warm", "hints_minutes", "block_tokens",
    }  # fmt: skip
    assert {(row["requests"], row["running"], row["warm"]) for row in rows} == {(30, 1, 0.5)}
    assert {(row["hints_minutes"], row["block_tokens"]) for row in rows} == {(None, 512)}
    assert (tmp_path / "r.svg").read_text().rstrip().endswith("</svg>")
    assert OWN in capsys.readouterr().out


def test_traces_of_one_file_name_are_told_apart(tmp_path: Path) -> None:
    """As several nodes write them; one panel of a plot would join their curves."""
    paths = [tmp_path / node / "record.jsonl" for node in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        write(path, [entry([1]), entry([1])])
    out = tmp_path / "out.json"
    command = ["replay", *map(str, paths), "--policy=lru", "--capacity=4", f"--json={out}"]
    assert run_command(command) == 0
    assert [row["trace"] for row in json.loads(out.read_text())] == [*map(str, paths)]


def test_without_capacities_they_come_from_the_trace_and_a_sentence_ends_it(
    recorded: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "r.json"
    words = f"replay {recorded} --policy {DEFAULT_POLICY},lru,optimum --hints 1 --json {out}"
    assert run_command(words.split()) == 0
    rows = json.loads(out.read_text())
    blocks = footprint(read_trace(recorded))
    assert blocks <= max(row["capacity_blocks"] for row in rows) < 2 * blocks
    assert {row["hints_minutes"] for row in rows} == {1.0}
    text = capsys.readouterr().out
    assert f"own: 120 requests, {blocks} different blocks of 512 tokens" in text
    (said,) = [line for line in text.splitlines() if "Half the memory" in line]
    assert "GiB" in said  # the trace says how many bytes a token has
    assert "Twice the memory" in said


def test_a_pool_is_asked_about_with_its_half_and_its_double(
    recorded: Path, tmp_path: Path, capsys: Any
) -> None:
    words = f"replay {recorded} --policy lru --capacity 5 --pool 40 --json {tmp_path}/r.json"
    assert run_command([*words.split(), "--bytes-per-token", "1"]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [row["capacity_blocks"] for row in rows] == [5, 20, 40, 80]
    assert "own, 40 blocks (20.0 KiB): lru: it finds" in capsys.readouterr().out


def test_what_is_said_of_host_tiers(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "t.jsonl", [entry([at % 3], at=1000 * at) for at in range(9)])
    words = f"replay {path} --policy lru,fifo --capacity 2 --json {tmp_path}/r.json --host 1x,2x"
    assert run_command([*words.split(), "--bytes-per-token", "2"]) == 0
    said = capsys.readouterr().out
    assert "  2  2.0 KiB   0.0%\n" in said
    assert "+ 2x  4.0 KiB  66.7%\n" in said
    assert "With host memory of 2 times the pool: 66.7%." in said
    assert "no policy found anything" not in said
    rows = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [one["written_bytes"] for one in rows[0]["host"]] == [9 * 1024, 3 * 1024]


def test_a_plot_without_matplotlib_is_one_line_before_anything_is_read(tmp_path: Path) -> None:
    """In a process of its own, where matplotlib cannot be imported."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from prefixkv.cli.main import run_command\n"
        f"sys.exit(run_command(['replay', '{tmp_path}/none.jsonl', '--plot', '{tmp_path}/p.png']))"
    )
    ran = run_python(code)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "prefixkv: --plot needs matplotlib: pip install 'prefixkv[plot]'\n"


# --- traces in which nothing is found -------------------------------------------------------------

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


@pytest.mark.parametrize("case", NOTHING)
def test_a_replay_of_zeros_says_why_and_recommends_nothing(
    case: str, tmp_path: Path, capsys: Any
) -> None:
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


def test_a_capacity_below_a_prompt_is_the_reason(tmp_path: Path, capsys: Any) -> None:
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
def test_the_bound_and_the_capacity_are_those_of_replays(seed: int) -> None:
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
    assert found == [] if why is None else why in found[0]


def test_a_check_says_what_each_file_is(tmp_path: Path, capsys: Any) -> None:
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
