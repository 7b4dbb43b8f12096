"""Claim: publishing its operations costs rank 0 50 to 80 us of a busy pass, a tenth of it, and one
message of 40 KB.

    python -m benchmarks ranks --json benchmarks/results/ranks.json

A pass of a busy decode worker: one request of 8,192 tokens is admitted with 6,144 of them cached,
one is committed, one finishes, and each of those that run gets a token (one in sixteen needs a page
for it). The same passes run turn about without a log, and with one that is taken once a pass;
another rank applies it in the same process.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from prefixkv.config import DecodeConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.ids import KVPoll
from prefixkv.ranks.oplog import ReplicatedPageManager
from prefixkv.ranks.replica import DecodeReplica, RankLog, digests
from prefixkv.request import Request

PAGE_SIZE = 16
CACHED, PROMPT = 6_144, 8_192
CONVERSATIONS = 64


def passes(scheduler: DecodeScheduler, running: int, seed: int) -> Iterator[None]:
    """Yields before and after each pass, for ever: what the engine does in between is not
    counted."""
    random = np.random.default_rng(seed)
    heads = [random.integers(0, 150_000, CACHED, np.int32) for _ in range(CONVERSATIONS)]
    batch: deque[DecodeRequest] = deque()
    for turn in range(1 << 60):
        now_s = 0.05 * turn
        tokens = np.concatenate(
            [heads[turn % CONVERSATIONS], random.integers(0, 150_000, PROMPT - CACHED, np.int32)]
        )
        request = Request(str(turn), tokens, 4 * running, room=turn, prefill="tcp://127.0.0.1:1")
        yield
        req = scheduler.add(request, now_s)
        if scheduler.pop_preallocated(now_s) != [req]:
            raise SystemExit("the pool is too small for this workload")
        scheduler.take_commands()
        scheduler.room_ended(req.room_key, KVPoll.SUCCESS, None, b"", now_s)
        batch += scheduler.pop_transferred(now_s)
        scheduler.append_many(batch, [turn] * len(batch), now_s)
        if len(batch) > running:
            scheduler.finish(batch.popleft(), now_s)
        yield


def measure(num_pages: int, running: int, num_passes: int, seed: int) -> dict[str, float]:
    sizes = (num_pages, PAGE_SIZE, running + 8)
    log = RankLog()
    config = DecodeConfig(max_running=running + 8)
    logged = ReplicatedPageManager(log.append, *sizes, **config.for_page_manager(num_pages))
    replica = DecodeReplica(num_pages, PAGE_SIZE, config)
    plain = passes(
        DecodeScheduler(PageManager(*sizes, **config.for_page_manager(num_pages))), running, seed
    )
    publishing = passes(DecodeScheduler(logged), running, seed)
    us: dict[str, list[float]] = {"without": [], "with": [], "apply": []}
    sizes_bytes = []
    for turn in range(running + CONVERSATIONS + num_passes):
        times = []
        for work in (plain, publishing):
            next(work)
            start = time.thread_time_ns()
            next(work)
            raw = log.take(logged) if work is publishing else b""
            times.append(time.thread_time_ns() - start)
        start = time.thread_time_ns()
        replica.apply(raw)
        times.append(time.thread_time_ns() - start)
        if turn >= running + CONVERSATIONS:
            for name, taken_ns in zip(us, times, strict=True):
                us[name].append(taken_ns / 1e3)
            sizes_bytes.append(len(raw))
    if digests(replica.page_manager) != digests(logged):
        raise SystemExit("the ranks differ")
    extra = np.array(us["with"]) - np.array(us["without"])
    p = {name: np.percentile(values, (50, 99)).round(1).tolist() for name, values in us.items()}
    return {
        "running": running,
        "pass_without_log_us_p50_p99": p["without"],
        "pass_with_log_us_p50_p99": p["with"],
        "log_costs_rank_0_us_p50": round(float(np.median(extra)), 1),
        "message_bytes_p50_max": [int(np.median(sizes_bytes)), max(sizes_bytes)],
        "another_rank_applies_us_p50_p99": p["apply"],
        "idle_message_bytes": len(log.take(logged)),
    }


def ranks(
    pages: Annotated[int, typer.Option(help="Of the pool.")] = 200_000,
    num_passes: Annotated[int, typer.Option("--passes", help="Of the worker, each way.")] = 1_000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and cases there.")
    ] = None,
) -> None:
    """What publishing its operations costs decode's rank 0."""
    cases = []
    for running in (16, 256):
        cases.append(measure(pages, running, num_passes, seed))
        print(cases[-1], flush=True)
    if json_file is not None:
        recipe = {
            "pages": pages, "passes": num_passes, "seed": seed,
            "page_size": PAGE_SIZE, "prompt_tokens": PROMPT, "cached_tokens": CACHED,
            "conversations": CONVERSATIONS,
            "counted": "CPU time of the thread, passes turn about in one process",
            "python": platform.python_version(), "numpy": np.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        json_file.write_text(
            json.dumps({"recipe": recipe, "cases": cases}, indent=1) + "\n", encoding="utf-8"
        )
