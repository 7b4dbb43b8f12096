"""Claim: what a host tier behind decode's pool finds depends on the traffic, and a size of it pays
or does not; and what a policy finds depends on how much of the pool running requests hold.

    python -m benchmarks host_tier CONVERSATION AGENTS --json benchmarks/results/host_tier.json

`prefixkv replay --host 1x,2x,4x,16x` with `--running 0` and 1, and without hosts for more that run.
Deterministic: no time is looked at.
"""

from __future__ import annotations

from dataclasses import asdict
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
from prefixkv.cli.replay import replay_policy

CAPACITIES = (1000, 3000, 6000)
POLICIES = ("adaptive", "lru")
TIMES = (1, 2, 4, 16)
RUNNING = (0, 1, 16, 64)
WITH_HOSTS = (0, 1)


def _measure(job: tuple[str, int, str, int]) -> dict[str, Any]:
    name, capacity, policy, running = job
    hosts = [times * capacity for times in TIMES] if running in WITH_HOSTS else []
    result = replay_policy(
        TRACES[name], policy, capacity, WARM, running=running, hosts=hosts
    )  # fmt: skip
    row = asdict(result)
    del row["us_per_request"]
    return row


def host_tier(
    paths: Paths,
    requests: Requests = None,
    jobs: Jobs = 2,
    json_file: JsonFile = None,
) -> None:
    """What host tiers find and copy behind a pool, and what running requests take from hits."""
    read_traces(paths, requests)
    todo = list(product(TRACES, CAPACITIES, POLICIES, RUNNING))
    rows = measured(_measure, todo, jobs)
    recipe = {
        "block_hit_ratio": "blocks found / all blocks of the counted requests, partial last "
        "ones included; of a host tier: found by the device or there",
        "counted": HITS["counted"],
        "running": "requests whose blocks count and cannot be evicted; 0: not even those of "
        "the request that comes",
        "host": f"{', '.join(map(str, TIMES))} times the pool, each by itself, the same policy",
    }
    write_rows(json_file, "host_tier", paths, requests, recipe, rows)
