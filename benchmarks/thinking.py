"""Claim: a cache that leaves out the thinking that clients drop finds more of their prompts in the
same memory.

    python -m benchmarks thinking --json benchmarks/results/thinking.json

Chats of a model that thinks before it answers. Each client sends its history without the thinking,
so what decode has written from the begin of a thinking on is never asked for again. The pages of a
real `PageManager` are opened, written and cached as a decode scheduler does it; compared are the
prompt tokens found there when all of each answer is cached, and when `keep_tokens` ends before the
thinking. Simulated time: every machine gives the same figures.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from prefixkv.cache.radix_key import RadixKey
from prefixkv.errors import OutOfPagesError
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.paging import pages_for

PAGE_SIZE = 16
SYSTEM_TOKENS = 400
TOKENS_PER_S = 40.0  # of one answer
HOURS = 2.0
CHATS_PER_S = 0.1
SEEDS = (1, 2, 3)
POOLS = (4_000, 6_000, 8_000, 12_000, 16_000, 24_000)  # pages; about 3,000 are of requests that run


@dataclass(slots=True)
class Turn:
    """One request of a chat."""

    arrival_s: float
    prompt: np.ndarray[Any, np.dtype[np.int32]]
    output: np.ndarray[Any, np.dtype[np.int32]]  # thinking, then the answer that is shown


def chats(seed: int) -> list[Turn]:
    """Return the turns of all chats, in the order of their arrivals.

    Medians: a message of 60 tokens, a thinking of 700, a shown answer of 250, four turns, a minute
    between an answer and the next message; all log-normal but the turns, which are geometric.
    """
    random = np.random.default_rng(seed)

    def length(median: float, spread: float = 0.8) -> int:
        return max(1, round(median * float(np.exp(random.normal(0, spread)))))

    def text(median: float) -> np.ndarray[Any, np.dtype[np.int32]]:
        return random.integers(0, 100_000, length(median)).astype(np.int32)

    system = random.integers(0, 100_000, SYSTEM_TOKENS).astype(np.int32)
    turns = []
    begin_s = 0.0
    while (begin_s := begin_s + random.exponential(1 / CHATS_PER_S)) < HOURS * 3600:
        now_s, history = begin_s, system
        for _ in range(min(20, random.geometric(0.2))):
            prompt = np.concatenate([history, text(60)])
            thinking, shown = text(700), text(250)
            turns.append(Turn(now_s, prompt, np.concatenate([thinking, shown])))
            history = np.concatenate([prompt, shown])
            now_s += len(thinking) / TOKENS_PER_S + len(shown) / TOKENS_PER_S + length(60, 1.0)
    return sorted(turns, key=lambda turn: turn.arrival_s)


def play(turns: list[Turn], num_pages: int, keeps: bool, policy: str) -> dict[str, float]:
    """Play all turns on a pool of this many pages. The hits are of the second half.

    A turn that finds no pages waits until others have ended.
    """
    pages = PageManager(num_pages, PAGE_SIZE, 4096, policy=policy)
    order = count()
    # What is to come, by time: an arrival, or the end of an answer.
    events: list[tuple[float, int, Turn, RequestPages | None]] = [
        (turn.arrival_s, next(order), turn, None) for turn in turns
    ]
    heapq.heapify(events)
    waiting: list[Turn] = []
    asked = hit = late = 0
    half_s = turns[-1].arrival_s / 2
    while events:
        now_s, _, turn, held = heapq.heappop(events)
        if held is None:
            waiting.append(turn)
        else:
            tokens = np.concatenate([turn.prompt, turn.output[:-1]])
            keep = None if keeps else len(turn.prompt)
            pages.cache_finished(held, RadixKey(tokens), now_s, keep_tokens=keep)
        while waiting:
            first = waiting[0]
            key = RadixKey(first.prompt)
            match = pages.match(key)
            assert match is not None
            most = pages_for(len(first.prompt) + len(first.output) - 1, PAGE_SIZE)
            try:
                opened = pages.open(key, match, most - match.prefix_len // PAGE_SIZE, now_s)
            except OutOfPagesError:
                late += 1
                break
            waiting.pop(0)
            if first.arrival_s >= half_s:
                asked += len(first.prompt)
                hit += match.prefix_len
            pages.cache_unfinished(opened, key, now_s)
            end_s = now_s + len(first.output) / TOKENS_PER_S
            heapq.heappush(events, (end_s, next(order), first, opened))
    assert not waiting
    pages.check_invariants()
    return {"hit_ratio": hit / asked, "waits": late}


def thinking(
    names: Annotated[
        list[str] | None, typer.Option("--policy", help="Policies; none: lru and adaptive.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """Hits of chats whose clients drop the thinking, with it in the cache and without."""
    rows = []
    for policy in names or ["lru", "adaptive"]:
        for num_pages in POOLS:
            for seed in SEEDS:
                turns = chats(seed)
                kept, dropped = (play(turns, num_pages, keeps, policy) for keeps in (True, False))
                rows.append(
                    {
                        "policy": policy, "pages": num_pages, "seed": seed, "turns": len(turns),
                        "all_kept": kept, "thinking_dropped": dropped,
                    }
                )  # fmt: skip
                print(
                    f"{policy:9} {num_pages:6,} pages, seed {seed}: "
                    f"{kept['hit_ratio']:.3f} -> {dropped['hit_ratio']:.3f}",
                    flush=True,
                )
    if json_file is not None:
        recipe = {
            "command": "python -m benchmarks thinking", "seeds": SEEDS,
            "hit_ratio": "prompt tokens found / all of the second half, by the time of arrival",
            "waits": "how often a turn found no pages when it was looked at",
            "page_size": PAGE_SIZE, "hours": HOURS, "chats_per_s": CHATS_PER_S,
            "system_tokens": SYSTEM_TOKENS, "tokens_per_s": TOKENS_PER_S,
        }  # fmt: skip
        json_file.write_text(json.dumps({"recipe": recipe, "rows": rows}, indent=1) + "\n")
