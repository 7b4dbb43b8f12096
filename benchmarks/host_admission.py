"""Claim: host memory costs an admission that finds nothing there next to nothing, and one that does
little.

    python -m benchmarks host_admission --json benchmarks/results/host_admission.json

A prompt of 8,192 tokens in pages of 16, of which 6,144 were here before. `pop_preallocated` of the
scheduler, one request waiting, turn about: without host memory, with it and all 6,144 in the pool,
with it and half of them only there, and with it and all of them only there. Medians of the
thread's processor time; beside each the same measured against itself.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.host_copy import HostCopyDone
from prefixkv.protocol.ids import KVPoll
from prefixkv.request import Request

PAGE_SIZE, PROMPT, CACHED = 16, 8192, 6144
POOL, HOST = 8192, 32768
OTHERS = 60  # other conversations, in both tiers
WAYS = {"no host": 0, "no host again": 0, "in the pool": 0, "half in host": 192, "in host": 384}

Tokens = npt.NDArray[np.int32]


class _Desk:
    """A scheduler whose other side, and whose copies, answer at once."""

    def __init__(self, has_host: bool) -> None:
        self.pages = PageManager(POOL, PAGE_SIZE, 64, spare_rows=8 if has_host else 0)
        host = (HOST, "adaptive", True) if has_host else None
        self.scheduler = DecodeScheduler(self.pages, reserve_tokens=0, host=host)
        self.now_s, self._rooms = 0.0, 0

    def serve(self, tokens: Tokens, num_lost: int = 0) -> float:
        """Serve a prompt, then let the pool lose its last `num_lost` pages. Returns the seconds
        that its admission took."""
        self._rooms += 1
        self.now_s += 1.0
        now_s, scheduler = self.now_s, self.scheduler
        request = Request(str(self._rooms), tokens, 1, room=self._rooms, prefill="p")
        req = scheduler.add(request, now_s)
        began_s = time.thread_time()
        admitted = scheduler.pop_preallocated(now_s)
        took_s = time.thread_time() - began_s
        assert admitted == [req]
        self._copy()
        scheduler.room_ended(req.room_key, KVPoll.SUCCESS, None, b"", now_s)
        assert scheduler.pop_transferred(now_s) == [req]
        scheduler.append_many([req], [0], now_s)
        scheduler.finish(req, now_s)
        self._copy()
        scheduler.take_commands()
        if num_lost:
            self._lose(tokens, num_lost)
        return took_s

    def _copy(self) -> None:
        while orders := self.scheduler.take_copies():
            for order in orders:
                done = HostCopyDone(order.number, None, 1, 1e-6)
                self.scheduler.copy_ended(done, self.now_s)

    def _lose(self, tokens: Tokens, num_pages: int) -> None:
        """Evict the last pages of a path: all else is held meanwhile."""
        cache = self.pages.cache
        kept = tokens[: len(tokens) - num_pages * PAGE_SIZE]
        locks = [cache.pin(cache.match_prefix(other)) for other in self.others]
        locks.append(cache.pin(cache.match_prefix(kept)))
        freed = cache.evict(num_pages, self.now_s)
        for lock in locks:
            cache.unlock(lock)
        self.pages.allocator.uncache(freed)
        self.pages.allocator.free(freed)

    others: list[Tokens]


def host_admission(
    rounds: Annotated[int, typer.Option(help="Admissions of each kind.")] = 300,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """What an admission costs with host memory, beside one without."""
    chance = np.random.default_rng(0)

    def tokens(count: int) -> Tokens:
        return chance.integers(0, 99_000, count, dtype=np.int32)

    others = [tokens(2048) for _ in range(OTHERS)]
    desks = {name: _Desk(not name.startswith("no host")) for name in WAYS}
    for desk in desks.values():
        desk.others = []
        for other in others:
            desk.serve(other)
        desk.others = others
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for at in range(rounds):
        prompt = tokens(PROMPT)
        # Each takes its turn first.
        names = list(WAYS)
        for name in names[at % len(names) :] + names[: at % len(names)]:
            desk = desks[name]
            desk.serve(prompt[:CACHED], WAYS[name])
            times[name].append(desk.serve(prompt))
            # Of what was measured nothing stays: all kinds go on with as many pages.
            freed = desk.pages.cache.evict(POOL, desk.now_s)
            desk.pages.allocator.uncache(freed)
            desk.pages.allocator.free(freed)
            for other in others if at % 20 == 0 else ():
                desk.serve(other)
    base = statistics.median(times["no host"])
    rows: list[dict[str, object]] = []
    for name, took in times.items():
        median = statistics.median(took)
        over = statistics.median([a - b for a, b in zip(took, times["no host"], strict=True)])
        found = {"us": median * 1e6, "more_us": over * 1e6, "ratio": median / base}
        rows.append({"kind": name} | {key: round(value, 3) for key, value in found.items()})
        print(rows[-1])
    if json_file is not None:
        recipe = {
            "command": f"python -m benchmarks host_admission --json {json_file.name}",
            "us": "median of pop_preallocated with one request, microseconds of processor time",
            "more_us": "median of the differences to the run without host memory of the same round",
            "rounds": rounds,
            "python": platform.python_version(),
        }
        text = json.dumps({"recipe": recipe, "rows": rows}, indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
