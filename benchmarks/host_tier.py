"""Claim: what a host tier behind decode's pool finds depends on the traffic, and a size of it pays
or does not; and what a policy finds depends on how much of the pool running requests hold.

    python -m benchmarks host_tier CONVERSATION AGENTS --json benchmarks/results/host_tier.json

`prefixkv replay --host 1x,2x,4x,16x` with `--running 0` and 1, and without hosts for more that run.
Deterministic: no time is looked at.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixkv.cli.replay import Trace, read_trace, replay_policy

CAPACITIES = (1000, 3000, 6000)
POLICIES = ("adaptive", "lru")
TIMES = (1, 2, 4, 16)
RUNNING = (0, 1, 16, 64)
WITH_HOSTS = (0, 1)
WARM = 0.5

_TRACES: dict[str, Trace] = {}
"""By name; the children of a fork have them."""


def _measure(job: tuple[str, int, str, int]) -> dict[str, Any]:
    name, capacity, policy, running = job
    hosts = [times * capacity for times in TIMES] if running in WITH_HOSTS else []
    result = replay_policy(
        _TRACES[name], policy, capacity, WARM, running=running, hosts=hosts
    )  # fmt: skip
    row = asdict(result)
    del row["us_per_request"]
    return row


def host_tier(
    paths: Annotated[list[Path], typer.Argument(metavar="TRACES", help="As `prefixkv replay`.")],
    requests: Annotated[int | None, typer.Option(help="Read so many only.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """What host tiers find and copy behind a pool, and what running requests take from hits."""
    _TRACES.update((trace.name, trace) for trace in (read_trace(p, limit=requests) for p in paths))
    todo = list(product(_TRACES, CAPACITIES, POLICIES, RUNNING))
    rows = []
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for row in pool.imap(_measure, todo):
            rows.append(row)
            print(row, flush=True)
    if json_file is not None:
        recipe = {
            "command": "python -m benchmarks host_tier "
            + " ".join(path.name for path in paths) + f" --json {json_file.name}",
            "block_hit_ratio": "blocks found / all blocks of the counted requests, partial last "
            "ones included; of a host tier: found by the device or there",
            "counted": f"the last {1 - WARM:.0%} of the requests",
            "running": "requests whose blocks count and cannot be evicted; 0: not even those of "
            "the request that comes",
            "host": f"{', '.join(map(str, TIMES))} times the pool, each by itself, the same policy",
            "python": platform.python_version(),
        }  # fmt: skip
        text = json.dumps({"recipe": recipe, "rows": rows}, indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
