"""Claim: in a small pool the default policy hits .97 of the best of the others at least.

    python -m benchmarks small_pools --json benchmarks/results/small_pools.json

Generated traces with seeds that no choice was made by, at 1,000 blocks. Where so few conversations
fit, chance has a say in which of them are kept: so each trace is also replayed with settings of the
default policy that are a tenth higher or lower, which is no other policy. How far these are apart
is how far two policies may be apart for no reason. Deterministic: no time is looked at.
"""

from __future__ import annotations

from itertools import product
from statistics import mean
from typing import Annotated, Any

import typer

import benchmarks.policies.gated
import benchmarks.policies.gittins  # noqa: F401
from benchmarks.trace_rows import HITS, WARM, Jobs, JsonFile, measured, write_rows
from benchmarks.workloads import generate
from prefixkv.cache.eviction.adaptive import Adaptive
from prefixkv.cli.replay import make_trace, replay_policy
from prefixkv.spi import Policy

BLOCKS = 1000
OTHERS = ("lru", "gated", "gittins")
NEARBY: tuple[dict[str, Any], ...] = (
    {"trust": 9.0}, {"trust": 11.0}, {"period": 90}, {"period": 110},
    {"half_life_s": 810.0}, {"half_life_s": 990.0},
)  # fmt: skip
"""Settings that are a tenth off."""


def _measure(job: tuple[str, int]) -> dict[str, Any]:
    name, seed = job
    trace = make_trace(name, generate(name, seed))

    def hits(policy: str | Policy) -> float:
        found = replay_policy(trace, policy, BLOCKS, warm=WARM, running=0)
        return round(found.block_hit_ratio, 4)

    others = {policy: hits(policy) for policy in OTHERS}
    best = max(others.values())
    default, nearby = hits(Adaptive()), [hits(Adaptive(**settings)) for settings in NEARBY]
    of_all = [one / best for one in (default, *nearby)]
    return {
        "workload": name, "seed": seed, "blocks": BLOCKS, **others,
        "adaptive": default, "nearby": nearby, "of_best": round(default / best, 3),
        "least_of_best": round(min(of_all), 3), "most_of_best": round(max(of_all), 3),
        "mean_of_best": round(mean(of_all), 3),
    }  # fmt: skip


def small_pools(
    workloads: Annotated[str, typer.Option(help="By commas.")] = "chat,agents,flood,drift",
    seeds: Annotated[str, typer.Option(help="By commas.")] = "31,32,33,34",
    jobs: Jobs = 2,
    json_file: JsonFile = None,
) -> None:
    """Hits of the default policy at 1,000 blocks, beside the best of the others, and with settings
    a tenth off."""
    names, numbers = workloads.split(","), [int(seed) for seed in seeds.split(",")]
    rows = measured(_measure, product(names, numbers), jobs)
    command = f"small_pools --workloads {workloads} --seeds {seeds}"
    write_rows(json_file, command, [], None, HITS, rows)
