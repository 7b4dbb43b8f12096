"""Claim: with states saved at prompts' ends and where paths part, prefill of a model with recurrent
layers goes on behind nearly all of what is cached.

    python -m benchmarks checkpoints CONVERSATION AGENTS --json benchmarks/results/checkpoints.json

The real scheduler of prefill, one request after the other; a block of the trace is a page.
*dense*: blocks whose KV is cached, as if there were no state. *resume*: those behind which a state
was saved, deepest first. *computed*: tokens of later turns that are computed, by those that are new
to the cache. Deterministic: no time is looked at, but for the cost of a look.
"""

from __future__ import annotations

import statistics
import time
from itertools import product
from typing import Any

import numpy as np

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
from prefixkv.cache.checkpoints import Checkpoints
from prefixkv.cache.eviction.policy import make_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.pages.manager import PageManager
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.request import Request

CAPACITIES = (3000, 6000)
POLICIES = ("lru", "adaptive")
SLOTS = (30, 100, 300)


def _measure(job: tuple[str, int, str, int]) -> dict[str, Any]:
    name, capacity, policy_name, slots = job
    trace = TRACES[name]
    policy = make_policy(policy_name)
    policy.token_scale = trace.token_scale
    pages = PageManager(capacity, 1, 4, policy=policy, num_checkpoints=slots)
    scheduler = PrefillScheduler(pages, num_slots=1)
    dense = resume = asked = saved = 0
    start = int(len(trace.requests) * WARM)
    for at, one in enumerate(trace.requests):
        now_s, blocks = one.time_s, len(one.whole_key)
        if at >= start:
            asked += len(one.key)
        if not blocks or blocks > capacity:  # those too long count as missed
            continue
        req = scheduler.add(Request(str(at), one.whole_key, room=at + 1, decode="d"), now_s)
        scheduler.room_bootstrapped(req.room_key, 0, "d", now_s)
        assert scheduler.pop_bootstrapped(now_s) == [req]
        if at >= start:
            dense += req.dense_pages
            resume += req.prefix_len
            saved += len(req.stops)
        for end in [*req.stops]:
            scheduler.save_state(req, end, now_s)
            if end < blocks:
                scheduler.send_chunk(req, end, now_s)
        scheduler.send_chunk(req, blocks, now_s, last=True, state_slot=0)
        key: RoomKey = req.room_key
        scheduler.room_ended(key, KVPoll.SUCCESS, None, now_s)
        scheduler.source_free(key, now_s)
        scheduler.pop_sent(now_s)
        scheduler.take_commands()
    scheduler.check_invariants()
    return {
        "trace": name, "policy": policy_name, "capacity": capacity, "slots": slots,
        "dense": dense / asked, "resume": resume / asked, "resume_by_dense": resume / dense,
        "saved_per_request": saved / (len(trace.requests) - start),
    }  # fmt: skip


def _look_us(rounds: int) -> dict[str, float]:
    """What finding a checkpoint adds to a match of 8,192 tokens, microseconds; the tree has 40
    chats that share half."""
    draw = np.random.default_rng(0)
    cache = RadixCache(page_size=16, policy="lru", pool_pages=40 * 512)
    points = Checkpoints(cache, 40 * 512, 40)
    half = draw.integers(0, 99_000, 4096, dtype=np.int32)
    prompts = []
    for chat in range(40):
        rest = draw.integers(0, 99_000, 4096, dtype=np.int32)
        prompts.append(np.concatenate([half, rest]))
        ids = np.arange(512 * chat, 512 * (chat + 1), dtype=np.int32)
        found = cache.match_prefix(prompts[-1]).depth
        cache.insert(
            prompts[-1], np.concatenate([cache.match_prefix(half).pages[:found], ids[found:]])
        )
        points.save(int(ids[-1]), 512, points.take())
    times: dict[str, list[float]] = {"match": [], "found": [], "none": []}
    empty = Checkpoints(cache, 40 * 512, 1)
    for at in range(rounds):
        tokens = prompts[at % 40]
        began_s = time.perf_counter()
        match = cache.match_prefix(tokens)
        matched_s = time.perf_counter()
        there = points.find(match)
        found_s = time.perf_counter()
        none = empty.find(match)
        none_s = time.perf_counter()
        assert there is not None
        assert none is None
        times["match"].append(matched_s - began_s)
        times["found"].append(found_s - matched_s)
        times["none"].append(none_s - found_s)
    return {what: round(statistics.median(took) * 1e6, 2) for what, took in times.items()}


def checkpoints(
    paths: Paths,
    requests: Requests = None,
    jobs: Jobs = 2,
    json_file: JsonFile = None,
) -> None:
    """How much of what prefill has cached a model with recurrent layers can go on behind."""
    look = _look_us(2000)
    print(look)
    read_traces(paths, requests)
    rows = measured(_measure, product(TRACES, CAPACITIES, POLICIES, SLOTS), jobs)
    recipe = {
        **HITS,
        "look_us": look,
    }
    write_rows(json_file, "checkpoints", paths, requests, recipe, rows)
