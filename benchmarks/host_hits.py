"""Claim: what decode's scheduler finds in its pool and in host memory is what `prefixkv replay
--host` says of the same trace.

    python -m benchmarks host_hits CONVERSATION AGENTS --json benchmarks/results/host_hits.json

The real scheduler, one request after the other, each arrived at once and finished after its first
token; copies between pool and host memory are made at once. A block of the trace is a page. Beside
it the replay with `--running 1`. Deterministic: no time is looked at.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from benchmarks.trace_rows import (
    HITS,
    TRACES,
    WARM,
    Jobs,
    JsonFile,
    Paths,
    Requests,
    measured,
    read_traces,
    write_rows,
)
from prefixkv.cache.eviction.policy import Policy, make_policy
from prefixkv.cli.replay import Trace, replay_policy
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.host_copy import HostCopyDone
from prefixkv.protocol.ids import KVPoll
from prefixkv.request import Request

CAPACITIES = (1000, 3000)
POLICIES = ("adaptive", "lru")
TIMES = 4


def _scheduled(trace: Trace, name: str, capacity: int) -> dict[str, float]:
    """Hit ratios of the real scheduler: in the pool, in host memory, in both."""

    def policy() -> Policy:
        made = make_policy(name)
        made.token_scale = trace.token_scale
        return made

    pages = PageManager(capacity, 1, 4, policy=policy(), spare_rows=4)
    scheduler = DecodeScheduler(
        pages, reserve_tokens=0, admission="fifo", host=(TIMES * capacity, policy(), True)
    )

    def copy(now_s: float) -> None:
        while orders := scheduler.take_copies():
            for order in orders:
                scheduler.copy_ended(HostCopyDone(order.number, None, 1, 1e-6), now_s)

    half, pool, host, asked = int(len(trace.requests) * WARM), 0, 0, 0
    for at, one in enumerate(trace.requests):
        now_s, blocks = one.time_s, len(one.whole_key)
        if at >= half:
            asked += len(one.key)
        if not blocks or blocks > capacity:  # the replay counts those too long as missed
            continue
        req = scheduler.add(Request(str(at), one.whole_key, 1, room=at + 1, prefill="p"), now_s)
        assert scheduler.pop_preallocated(now_s) == [req]
        copy(now_s)
        scheduler.room_ended(req.room_key, KVPoll.SUCCESS, None, b"", now_s)
        assert scheduler.pop_transferred(now_s) == [req]
        if at >= half:
            pool += req.hit_tokens - req.host_tokens
            host += req.host_tokens
        scheduler.append_many([req], [0], now_s)
        scheduler.finish(req, now_s)
        copy(now_s)
        scheduler.take_commands()
    scheduler.check_invariants()
    return {"pool": pool / asked, "host": host / asked, "both": (pool + host) / asked}


def _measure(job: tuple[str, int, str]) -> dict[str, Any]:
    name, capacity, policy = job
    trace = TRACES[name]
    replayed = replay_policy(trace, policy, capacity, WARM, running=1, hosts=[TIMES * capacity])
    return {
        "trace": name,
        "policy": policy,
        "capacity": capacity,
        "host_blocks": TIMES * capacity,
        "scheduler": _scheduled(trace, policy, capacity),
        "replay": {
            "pool": replayed.block_hit_ratio,
            "host": replayed.host[0].host_hit_ratio,
            "both": replayed.host[0].block_hit_ratio,
        },
    }


def host_hits(
    paths: Paths,
    requests: Requests = None,
    jobs: Jobs = 2,
    json_file: JsonFile = None,
) -> None:
    """Hits in pool and host memory by the real scheduler, beside the replay's."""
    read_traces(paths, requests)
    rows = measured(_measure, product(TRACES, CAPACITIES, POLICIES), jobs)
    recipe = {
        **HITS,
        "scheduler": "DecodeScheduler with host memory, one request after the other",
        "replay": "prefixkv replay --running 1 --host 4x",
    }
    write_rows(json_file, "host_hits", paths, requests, recipe, rows)
