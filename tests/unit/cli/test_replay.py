"""Replays against plain models, and bad traces and options."""

from __future__ import annotations

import json
import random
from collections import OrderedDict, deque
from itertools import product

import pytest

from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cli.main import run_command
from prefixkv.cli.replay import read_trace, replay_optimum, replay_policy
from prefixkv.errors import TraceError

OWN = "benchmarks.policies.gated:Gated:fresh_s=60"  # a policy that does not ship


def write_trace(path, num_requests=400, seed=0):
    """Sessions that grow, a few at a time, in blocks of 512 tokens of which the last is partial."""
    rng = random.Random(seed)
    sessions, fresh = [], iter(range(10, 10**6))
    with path.open("w") as out:
        for at in range(num_requests):
            if len(sessions) < 8 or rng.random() < 0.4:
                sessions.append([0])
            blocks = sessions[-1 - min(len(sessions) - 1, int(rng.expovariate(0.2)))]
            blocks += [next(fresh) for _ in range(rng.randrange(1, 6))]
            entry = {
                "timestamp": at * 4000,
                "input_length": 512 * len(blocks) + 100,
                "output_length": 5,
                "hash_ids": [*blocks, next(fresh)],
            }
            out.write(json.dumps(entry) + "\n")
    return path


def plain_lru(path, capacity, counted_from=0, running=0):
    """Hit ratio, and the number of requests that are refused."""
    kept, hits, blocks, refused = OrderedDict(), 0, 0, 0
    runs = deque()  # the blocks of each request that runs
    for at, line in enumerate(path.read_text().splitlines()):
        *ids, _ = json.loads(line)["hash_ids"]  # the last block is partial
        blocks += (len(ids) + 1) * (at >= counted_from)
        if running and len(ids) > capacity:
            refused += at >= counted_from
            continue
        while runs and len(runs) >= running:
            runs.popleft()
        while running and len({*ids}.union(*runs)) > capacity:
            runs.popleft()
        known = 0
        while known < len(ids) and ids[known] in kept:
            known += 1
        hits += known * (at >= counted_from)
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
    return hits / blocks, refused


@pytest.mark.parametrize("capacity", [20, 100, 300])
@pytest.mark.parametrize("warm", [0.0, 0.5])
@pytest.mark.parametrize("running", [0, 1, 2, 9, 40])
def test_lru_agrees_with_a_plain_model(tmp_path, capacity, warm, running):
    path = write_trace(tmp_path / "t.jsonl")
    result = replay_policy(read_trace(path), "lru", capacity, warm, running=running)
    ratio, refused = plain_lru(path, capacity, int(warm * 400), running)
    assert result.block_hit_ratio == pytest.approx(ratio, abs=1e-12)
    assert result.too_long == refused
    assert bool(refused) == (capacity == 20 and running > 0)
    assert result.running == running
    assert bool(result.running_blocks) == bool(running)
    assert result.running_blocks <= capacity


def test_no_policy_passes_the_optimum_and_all_agree_when_everything_fits(tmp_path):
    trace = read_trace(write_trace(tmp_path / "t.jsonl"))
    for capacity, running in product((20, 100), (0, 1, 5)):
        best = replay_optimum(trace, capacity, running=running).block_hit_ratio
        ratios = {
            name: replay_policy(trace, name, capacity, running=running).block_hit_ratio
            for name in policy_names()
        }
        assert max(ratios.values()) <= best
        assert min(ratios.values()) < best
    best = replay_optimum(trace, 10**6)
    for name in policy_names():
        result = replay_policy(trace, name, 10**6)
        assert result.evicted_pages == 0
        assert result.block_hit_ratio == best.block_hit_ratio
        assert result.token_hit_ratio == best.token_hit_ratio


def test_knowing_the_queue_helps(tmp_path):
    trace = read_trace(write_trace(tmp_path / "t.jsonl"))
    blind = replay_policy(trace, "lru", 60).block_hit_ratio
    assert replay_policy(trace, "lru", 60, queue=40).block_hit_ratio > 1.1 * blind


def test_a_trace_of_token_lists(tmp_path):
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
        '{"timestamp": 0, "input_length": null, "hash_ids": [1]}',
        '{"tokens": [1, -1]}',
        '{"tokens": [1.5]}',
        "[true]",
        "[1]",
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:2"):
        read_trace(path)


def test_traces_that_cannot_be_read(tmp_path):
    with pytest.raises(TraceError):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="no request"):
        read_trace(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError):
        read_trace(tmp_path / "binary.jsonl")


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
        "--host 4y",
        "--host 4x,",
        "--host 1.5",
        "--host 1GiB",  # the trace does not say what a token takes
        "--host 1KiB --bytes-per-token 100",  # less than a block
        "--host 1000000000x",
        "--block-tokens 0",
        "--check --plot {tmp}/p.png",
    ],
)
def test_bad_options_are_one_line_and_status_2(tmp_path, options, capsys):
    path = write_trace(tmp_path / "t.jsonl", 3)
    assert run_command(["replay", str(path), *options.format(tmp=tmp_path).split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_writes_its_results(tmp_path, capsys):
    path = write_trace(tmp_path / "t.jsonl", 60)
    pytest.importorskip("matplotlib")
    words = (
        f"replay {path} --policy lru,{OWN} --policy optimum --capacity 10,50 --warm 0.5 --pool 8"
    )
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg")]
    assert run_command([*words.split(), *files]) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert [(row["policy"], row["capacity_blocks"]) for row in results] == [
        *product(("lru", OWN, "optimum"), [4]), *product(("lru", OWN, "optimum"), [8]),
        *product(("lru", OWN, "optimum"), [10]), *product(("lru", OWN, "optimum"), [16]),
        *product(("lru", OWN, "optimum"), [50]),
    ]  # fmt: skip
    assert set(results[0]) == {
        "trace", "policy", "capacity_blocks", "block_hit_ratio", "token_hit_ratio", "requests",
        "evicted_pages", "us_per_request", "hit_tokens", "prompt_tokens", "running",
        "running_blocks", "too_long", "host",
    }  # fmt: skip
    assert {(row["requests"], row["running"]) for row in results} == {(30, 1)}
    assert (tmp_path / "r.svg").read_text().rstrip().endswith("</svg>")
    assert OWN in capsys.readouterr().out
