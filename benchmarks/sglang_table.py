"""SGLang's servers on a CPU as they are, and with prefixkv: what decode finds of agent-like and
chat-like turns, how long small requests wait behind a large one, and what a burst of one new prompt
costs.

Run by the interpreter of `python -m benchmarks env sglang`. Each side of each part is a pair of
servers by itself, one after the other, on the same requests.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, Final

from benchmarks.sglang_serve import SIDES, VOCABULARY, Pair, make_model
from benchmarks.sglang_transfers import Run
from benchmarks.workloads import generate, part
from prefixkv.errors import ConfigError

PAGE: Final = 16
MIB_A_TOKEN: Final = 2 / 1024
"""Of the small model: K and V, four layers, two heads of 64, two bytes each."""
TOO_SMALL: Final = 1.3
TURNS: Final = {"agents": (3600, 300, 8), "chat": (1200, 600, 16)}
"""Of each workload: from which second of the trace, how many requests, tokens a block."""
WAITING, ROUNDS = 12, 3
QUEUE_POOL: Final = 4096
"""Tokens. One request runs with a third of it, the first that waits needs more than is left."""
RUNNING, RUNNING_OUTPUT, LARGE, SMALL = 1024, 384, 3072, 128

PARTS: Final = {
    "agents": ("rust", "prefixkv"),
    "chat": ("rust", "prefixkv"),
    "queue": ("sglang", "prefixkv"),
}
"""By part, whom it compares. `rust` has SGLang's tree, and prefixkv's transfers: only the tree is
another there. `sglang` has its own of both."""
_TRANSFERS = ["--disaggregation-transfer-backend", "prefixkv", "--enable-metrics"]
OPTIONS: Final = {
    "sglang": [*SIDES["sglang"], "--enable-metrics"],
    "rust": _TRANSFERS,
    "prefixkv": [*_TRANSFERS, "--radix-cache-backend", "prefixkv"],
}


def measure(folder: Path, name: str, sides: list[str]) -> dict[str, Any]:
    """A part of the table, for these sides of it, in this order."""
    if name not in PARTS or not set(sides) <= set(PARTS[name]):
        known = "; ".join(f"{part}: {', '.join(whom)}" for part, whom in PARTS.items())
        raise ConfigError(f"no part {name!r} with {sides}: there are {known}")
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not (model / "config.json").is_file():
        make_model(model)
    found = {}
    for side in sides:
        logs = folder / f"{name}-{side}"
        logs.mkdir(exist_ok=True)
        found[side] = (
            _queue(model, side, logs) if name == "queue" else _turns(model, side, logs, name)
        )
        (folder / f"{name}-{side}.json").write_text(json.dumps(found[side]))
    return found


# --- turns ----------------------------------------------------------------------------------------


def _turns(model: Path, side: str, logs: Path, name: str) -> dict[str, Any]:
    """All turns, one request at a time, in the order of the trace."""
    begin_s, count, block_tokens = TURNS[name]
    turns = [entry["hash_ids"] for entry in part(generate(name), begin_s, 1e9)[:count]]
    blocks = {
        block: [random.Random(block).randrange(3, VOCABULARY) for _ in range(block_tokens)]
        for turn in turns
        for block in turn
    }
    pool = round(most_wanted(turns) * block_tokens / TOO_SMALL) // PAGE * PAGE
    prompts = [[token for block in turn for token in blocks[block]] for turn in turns]
    with Pair(model, OPTIONS[side], logs, decode_tokens=pool, prefill_tokens=65536) as pair:
        run = Run(pair)
        sent = [run.sent_mib()]
        began = time.perf_counter()
        for half in (prompts[: count // 2], prompts[count // 2 :]):
            for prompt in half:
                run.ask(prompt)
            sent.append(run.sent_mib())
        seconds = time.perf_counter() - began
        leaks = run.leaks()
    asked = [sum(-(-len(one) // PAGE) * PAGE for one in prompts[at:]) for at in (0, count // 2)]
    came = [round((sent[2] - sent[at]) / MIB_A_TOKEN) for at in (0, 1)]
    return {
        "requests": count, "decode_pool_tokens": pool, "prompt_tokens": asked[0],
        "hit_tokens": asked[0] - came[0], "hit": round(1 - came[0] / asked[0], 4),
        "hit_in_second_half": round(1 - came[1] / asked[1], 4),
        "seconds": round(seconds), "leaks": leaks,
    }  # fmt: skip


def most_wanted(turns: list[list[int]]) -> int:
    """How many blocks have to be kept at most for all that comes back to be found.

    >>> most_wanted([[1, 2, 3], [9], [1, 2, 4], [1, 5]])
    2
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, turn in enumerate(turns):
        for block in turn:
            first.setdefault(block, at)
            last[block] = at
    change = [0] * (len(turns) + 1)
    for block, at in first.items():
        change[at] += last[block] > at
        change[last[block]] -= last[block] > at
    wanted, most = 0, 0
    for step in change:
        wanted += step
        most = max(most, wanted)
    return most


# --- a queue, and a burst -------------------------------------------------------------------------


def _queue(model: Path, side: str, logs: Path) -> dict[str, Any]:
    with Pair(model, OPTIONS[side], logs, decode_tokens=QUEUE_POOL) as pair:
        run = Run(pair)
        rounds = [_behind_a_large_one(run) for _ in range(ROUNDS)]
        burst = run.bursts()
        leaks = run.leaks()
    small = [wait for waits in rounds for wait in waits[1:]]
    return {
        "small_wait_p50_ms": round(1e3 * statistics.median(small)),
        "small_wait_p50_ms_of_rounds": [round(1e3 * statistics.median(one[1:])) for one in rounds],
        "large_wait_ms": [round(1e3 * one[0]) for one in rounds],
        "burst": burst, "leaks": leaks,
    }  # fmt: skip


def _behind_a_large_one(run: Run) -> list[float]:
    """Seconds to the first token of each that waits, the large one first. Another runs before and
    needs so much that the large one does not fit until it ends."""
    with ThreadPoolExecutor(WAITING + 1) as pool:
        begun = Event()
        runs: Future[float] = pool.submit(run.stream, run.prompt(RUNNING), RUNNING_OUTPUT, begun)
        begun.wait()
        lengths = [LARGE, *(SMALL + PAGE * number for number in range(WAITING - 1))]
        waits = []
        for length in lengths:
            waits.append(pool.submit(run.stream, run.prompt(length), 4))
            time.sleep(0.02)  # so that they come in this order
        found = [wait.result() for wait in waits]
        runs.result()
    return found
