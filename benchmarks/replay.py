"""Claim: on a chat trace the default policy hits more often than LRU at every capacity, and the
queue helps further.

    python -m benchmarks replay TRACE

writes benchmarks/results/replay.json (recipe and rows) and replay.png. Deterministic: only the
times differ.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from prefixkv.cache.eviction.policy import DEFAULT_POLICY, make_policy, policy_names
from prefixkv.cli.replay import OPTIMUM, draw, read_trace, replay_optimum, replay_policy

RESULTS = Path(__file__).parent / "results"
CAPACITIES = (1000, 2000, 3000, 6000, 10_000, 20_000, 30_000, 40_000, 50_000)
QUEUED = (1000, 3000, 6000, 10_000, 20_000)


def replay(path: Annotated[Path, typer.Argument(metavar="TRACE", help="Mooncake JSONL.")]) -> None:
    """How often each eviction policy hits on a trace, at many capacities."""
    trace = read_trace(path)
    rows = []
    curves = []
    for warm in (0.5, 0.0):
        for capacity in CAPACITIES:
            for policy in (*policy_names(), OPTIMUM):
                if policy == OPTIMUM:
                    result = replay_optimum(trace, capacity, warm)
                else:
                    result = replay_policy(trace, policy, capacity, warm)
                rows.append({"warm": warm, "queue": 0, **asdict(result)})
                if warm:
                    curves.append(result)
    for queue in (8, 128):
        for policy in dict.fromkeys(("lru", DEFAULT_POLICY, "gittins")):
            for capacity in QUEUED:
                rows.append(
                    {
                        "warm": 0.5,
                        "queue": queue,
                        **asdict(replay_policy(trace, policy, capacity, 0.5, queue)),
                    }
                )
    whole = [name for name in policy_names() if not make_policy(name).keeps_partial_blocks]
    recipe = {
        "command": f"python -m benchmarks replay {path.name}",
        "trace": f"{path.name}: {len(trace.requests)} requests, blocks of {trace.block_tokens} "
        "tokens",
        "seed": "none: nothing is drawn",
        "block_hit_ratio": "blocks found / all hash ids of the counted requests, the partial last "
        "block included",
        "partial_blocks": f"inserted under every policy but {', '.join(whole)}, which refuse them",
        "warm": "share of the requests that are replayed before hits are counted",
        "default_policy": DEFAULT_POLICY,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, shared "
        "with other work",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    text = json.dumps({"recipe": recipe, "rows": rows}, indent=1)
    (RESULTS / "replay.json").write_text(text + "\n", encoding="utf-8")
    draw(curves, RESULTS / "replay.png")
