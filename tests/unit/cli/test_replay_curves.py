"""What a replay makes of its results: the optimum, hints, the table, the recommendation."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from prefixkv.cli.main import run_command
from prefixkv.cli.replay import (
    OPTIMUM,
    ReplayResult,
    Trace,
    client_hints,
    make_trace,
    replay_optimum,
    replay_policy,
)
from prefixkv.cli.replay.report import NOISE, TraceResults, sentence, table
from prefixkv.cli.replay.trace import footprint
from prefixkv.policies import DEFAULT_POLICY


def trace_of(*paths, step_s=1.0, partial=0, name="t"):
    """Requests a step apart; each path is whole blocks, ids being the tokens of a tree's edges."""
    entries = []
    ids: dict[tuple[int, ...], int] = {}
    for at, path in enumerate(paths):
        prefixes = [tuple(path[: depth + 1]) for depth in range(len(path))]
        names = [ids.setdefault(prefix, len(ids)) for prefix in prefixes]
        entries.append(
            {
                "timestamp": at * step_s * 1000,
                "input_length": 512 * len(path) + partial,
                "hash_ids": [*names, *[10**6 + at] * bool(partial)],
            }
        )
    return make_trace(name, entries)


# --- the optimum ----------------------------------------------------------------------------------


def most_hits(paths, capacity, running):
    """By trying everything: after each request, every set of prefixes, closed upwards, that fits of
    those that were kept and those it brought; with all of what runs, if that counts."""
    best_of = {frozenset(): 0}
    runs = []
    for path in paths:
        asked = [tuple(path[: depth + 1]) for depth in range(len(path))]
        if running and len(path) > capacity:
            continue
        runs = [*runs, asked][-running:] if running else []
        while len({prefix for one in runs for prefix in one}) > capacity:
            del runs[0]
        held = {prefix for one in runs for prefix in one}
        after = {}
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
def test_the_optimum_is_what_trying_everything_finds(seed, running):
    rng = random.Random(seed)
    paths = [
        [rng.randrange(2) for _ in range(rng.choice((1, 2, 2, 3)))]
        for _ in range(rng.choice((4, 6, 8)))
    ]
    trace = trace_of(*paths)
    blocks = sum(map(len, paths))
    for capacity in (1, 2, 3):
        found = replay_optimum(trace, capacity, running=running).block_hit_ratio * blocks
        assert round(found) == most_hits(paths, capacity, running), (paths, capacity)


def test_no_partial_block_is_found_by_any(tmp_path):
    """The same prompt twice: its partial block has the same id, and is found by none."""
    entry = {"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}
    trace = make_trace("t", [entry, entry])
    assert replay_optimum(trace, 9).block_hit_ratio == 1 / 4
    for policy in ("lru", "slru", DEFAULT_POLICY):
        result = replay_policy(trace, policy, 9)
        assert (result.block_hit_ratio, result.hit_tokens) == (1 / 4, 512)


# --- hints ----------------------------------------------------------------------------------------


def test_a_client_knows_what_comes_back_in_time():
    trace = trace_of([1, 2], [1, 3], [1, 2, 4], [1, 3], [1, 3], [], step_s=60.0)
    # The fourth comes back within a minute, the first and second, but for their last block, too.
    assert client_hints(trace, 2.0) == [120.0, 120.0, 0.0, 120.0, 0.0, None]
    assert client_hints(trace, 0.5) == [0.0, 0.0, 0.0, 0.0, 0.0, None]
    wrong = client_hints(trace, 2.0, wrong=1.0)
    assert all(
        said not in (None, true)
        for said, true in zip(wrong[:5], client_hints(trace, 2.0)[:5], strict=True)
    )


def test_a_share_of_the_hints_is_wrong_and_which_is_seeded():
    trace = trace_of(*[[at] for at in range(1000)])
    wrong = client_hints(trace, 5.0, 0.2)
    assert 150 < sum(hint != 0 for hint in wrong) < 250
    assert wrong == client_hints(trace, 5.0, 0.2) != client_hints(trace, 5.0, 0.2, seed=1)


# --- the table and the recommendation -------------------------------------------------------------


def result(policy, capacity, ratio, tokens=100_000):
    hit = round(ratio * tokens)
    return ReplayResult("t", policy, capacity, ratio, ratio, 10, 0, 1.0, hit, tokens)


def results(*rows, bytes_per_token=0):
    return TraceResults(Trace("t", [], 1, 512, bytes_per_token), [result(*row) for row in rows])


def test_the_default_is_taken_unless_another_is_better_by_more_than_noise():
    def chosen(default, other):
        return results((DEFAULT_POLICY, 9, default), ("lru", 9, other), (OPTIMUM, 9, 1)).best(9)

    assert chosen(0.30, 0.30 * (1 + NOISE / 2)) == DEFAULT_POLICY
    assert chosen(0.30, 0.30 * (1 + 2 * NOISE)) == "lru"
    assert chosen(0.89, 0.90) == "lru"  # a tenth more is sent
    assert chosen(0.31, 0.30) == DEFAULT_POLICY
    assert results(("fifo", 9, 0.5), ("lru", 9, 0.495), (DEFAULT_POLICY, 9, 0.4)).best(9) == "lru"
    assert results((OPTIMUM, 9, 1.0)).best(9) is None


def test_the_table_has_a_line_for_each_size_and_a_column_for_what_differs():
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
    assert table(results(*rows))[0].split() == [
        "blocks",
        f"{DEFAULT_POLICY}*",
        "fifo",
        "optimum",
        "gap",
    ]


def test_the_recommendation_has_the_policy_the_bound_the_bytes_and_both_sizes():
    sizes = (5, 0.2, 0.1, 0.3), (10, 0.4, 0.3, 0.5), (20, 0.45, 0.35, 0.6)
    rows = [
        (name, size, ratio)
        for size, *ratios in sizes
        for name, ratio in zip(("lru", DEFAULT_POLICY, OPTIMUM), ratios, strict=True)
    ]
    said = sentence(results(*rows, bytes_per_token=1 << 20), 10)
    for shown in ("t, 10 blocks (5.0 GiB): take lru: it finds 40.0% of the blocks",
                  "40,000 tokens, 39.1 GiB.", f"The default, {DEFAULT_POLICY}, finds 30.0%.",
                  "could find more than 50.0%.", "Half the memory: 20.0%, 19.5 GiB less.",
                  "Twice the memory: 45.0%, 4.9 GiB more."):  # fmt: skip
        assert shown in said
    assert "saves the KV of 40,000 tokens." in sentence(results(*rows), 10)
    alone = sentence(results(("lru", 10, 0.4)), 10)
    assert (
        alone
        == "t, 10 blocks: lru: it finds 40.0% of the blocks and saves the KV of 40,000 tokens."
    )


def test_the_recommendation_says_who_finds_as_much_or_more():
    rows = [(DEFAULT_POLICY, 9, 0.3), ("fifo", 9, 0.3), ("lru", 9, 0.30001), ("slru", 9, 0.301)]
    said = sentence(results(*rows), 9)
    assert f"take {DEFAULT_POLICY}, the default: it finds 30.0%" in said
    assert "lru and fifo find as much. slru finds 30.1%, too little more to choose by." in said


# --- the command ----------------------------------------------------------------------------------


def write(tmp_path, name="own"):
    path = tmp_path / f"{name}.jsonl"
    rng = random.Random(3)
    with path.open("w") as out:
        for at in range(120):
            ids = [rng.randrange(4), 100 + rng.randrange(40), 1000 + at]
            entry = {"timestamp": at * 900, "input_length": 1536, "output_length": 3,
                     "hash_ids": ids, "block_size": 512, "bytes_per_token": 1 << 17}  # fmt: skip
            out.write(json.dumps(entry) + "\n")
    return path


def test_without_capacities_they_come_from_the_trace_and_a_sentence_ends_it(tmp_path, capsys):
    path = write(tmp_path)
    out = tmp_path / "r.json"
    words = f"replay {path} --policy {DEFAULT_POLICY},lru,optimum --hints 1 --json {out}"
    assert run_command(words.split()) == 0
    rows = json.loads(out.read_text())
    blocks = footprint(make_trace("t", map(json.loads, path.read_text().splitlines())))
    assert blocks <= max(row["capacity_blocks"] for row in rows) < 2 * blocks
    assert {row["hints_minutes"] for row in rows} == {1.0}
    text = capsys.readouterr().out
    assert f"own: 120 requests, {blocks} different blocks of 512 tokens" in text
    (said,) = [line for line in text.splitlines() if "Half the memory" in line]
    assert "GiB" in said  # the trace says how many bytes a token has
    assert "No policy could find more" in said
    assert "Twice the memory" in said


def test_a_pool_is_asked_about_with_its_half_and_its_double(tmp_path, capsys):
    out = tmp_path / "r.json"
    words = f"replay {write(tmp_path)} --policy lru --capacity 5 --pool 40 --json {out}"
    assert run_command([*words.split(), "--bytes-per-token", "1"]) == 0
    assert [row["capacity_blocks"] for row in json.loads(out.read_text())] == [5, 20, 40, 80]
    assert "own, 40 blocks (20.0 KiB): lru: it finds" in capsys.readouterr().out


def test_a_plot_without_matplotlib_is_one_line_before_anything_is_read(tmp_path):
    """In a process of its own, where matplotlib cannot be imported."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from prefixkv.cli.main import run_command\n"
        f"sys.exit(run_command(['replay', '{tmp_path}/none.jsonl', '--plot', '{tmp_path}/p.png']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "prefixkv: --plot needs matplotlib: pip install 'prefixkv[plot]'\n"
