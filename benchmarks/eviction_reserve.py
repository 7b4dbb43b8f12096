"""Claim: evicting 1/256 of the pool more than is missing cuts the runs of new pages to a third, and
costs few hits.

    python -m benchmarks eviction_reserve --json benchmarks/results/eviction_reserve.json

Chats with one system prompt come back turn after turn to a full pool that holds a part of them.
Eviction takes exactly what an admission lacks, or that and a part of the pool at once
(`DecodeConfig.evict_reserve`). Compared: the runs that an admission's new pages form (each is one
descriptor a layer), and the tokens found cached.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.ids import KVPoll
from prefixkv.request import Request

PAGE_SIZE = 16
RUNNING = 32
SYSTEM_TOKENS = 512
MOST_TOKENS = 8_000  # a chat that has grown so long ends, and another takes its place


def replay(
    num_pages: int, num_chats: int, turns: int, reserve: float, policy: str, seed: int
) -> dict[str, float]:
    """Runs and hits of the second half of `turns` turns, the chats drawn by a Zipf-like law."""
    random = np.random.default_rng(seed)
    pages = PageManager(
        num_pages, PAGE_SIZE, RUNNING, policy=policy, evict_reserve_pages=int(reserve * num_pages)
    )
    scheduler = DecodeScheduler(pages)
    system = random.integers(0, 150_000, SYSTEM_TOKENS)
    chats = [system] * num_chats
    weight = 1 / np.arange(1, num_chats + 1) ** 0.6
    running: deque[tuple[DecodeRequest, int, int]] = (
        deque()
    )  # with its chat and the tokens it will generate
    busy: set[int] = set()
    prompt = hit = new_pages = runs = 0
    admit_ns = []
    for turn in range(turns):
        now_s = turn * 0.1
        if len(running) == RUNNING:
            req, chat, _ = running.popleft()
            chats[chat] = np.asarray(req.tokens) if len(req.tokens) < MOST_TOKENS else system
            scheduler.finish(req, now_s)
            busy.discard(chat)
        while (chat := int(random.choice(num_chats, p=weight / weight.sum()))) in busy:
            pass
        busy.add(chat)
        tokens = np.concatenate(
            [chats[chat], random.integers(0, 150_000, int(random.lognormal(5, 1)) + 1)]
        )
        goal = int(random.integers(20, 400))
        request = Request(str(turn), tokens, goal, room=turn, prefill="tcp://127.0.0.1:1")
        req = scheduler.add(request, now_s)
        start = time.thread_time_ns()
        admitted = scheduler.pop_preallocated(now_s)
        admit_ns.append(time.thread_time_ns() - start)
        if admitted != [req]:
            raise SystemExit("the pool is too small for this workload")
        scheduler.take_commands()
        if turn >= turns // 2:
            new = req.pages[req.prefix_len // PAGE_SIZE :]
            prompt, hit, new_pages = (
                prompt + req.fill_len,
                hit + req.prefix_len,
                new_pages + len(new),
            )
            runs += 1 + int(np.count_nonzero(np.diff(new) != 1)) if len(new) else 0
        scheduler.room_ended(req.room_key, KVPoll.SUCCESS, None, b"", now_s)
        scheduler.pop_transferred(now_s)
        running.append((req, chat, goal))
        for _ in range(400 // RUNNING):
            grow = [req for req, _, goal in running if len(req.output) < goal]
            scheduler.append_many(grow, [turn] * len(grow), now_s)
    scheduler.check_invariants()
    return {
        "reserve": round(reserve, 5),
        "token_hit_rate": round(hit / prompt, 4),
        "new_pages_an_admission": round(new_pages / (turns - turns // 2), 1),
        "runs_per_100_new_pages": round(100 * runs / new_pages, 1),
        "admit_cpu_us_p50": round(float(np.median(admit_ns[turns // 2 :])) / 1e3, 1),
        "evicted_pages": pages.evicted_pages,
    }


def eviction_reserve(
    pages: Annotated[int, typer.Option(help="Of the pool.")] = 16_384,
    chats: Annotated[int, typer.Option(help="That come back.")] = 250,
    turns: Annotated[int, typer.Option(help="Of all chats.")] = 6_000,
    policy: Annotated[str, typer.Option(help="Of eviction.")] = "lru",
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and cases there.")
    ] = None,
) -> None:
    """What evicting more than is missing does to the runs of new pages and to hits."""
    cases = []
    for reserve in (0.0, 1 / 1024, 1 / 512, 1 / 256, 1 / 100, 1 / 20):
        cases.append(replay(pages, chats, turns, reserve, policy, seed))
        print(cases[-1], flush=True)
    if json_file is not None:
        recipe = {
            "pages": pages,
            "chats": chats,
            "turns": turns,
            "policy": policy,
            "seed": seed,
            "page_size": PAGE_SIZE,
            "running": RUNNING,
            "counted": "the second half of the turns",
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": round(os.getloadavg()[0], 1),
        }
        json_file.write_text(
            json.dumps({"recipe": recipe, "cases": cases}, indent=1) + "\n", encoding="utf-8"
        )
