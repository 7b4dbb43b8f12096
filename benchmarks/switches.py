"""Claim: when the workload changes, the default policy is soon as good as the best fixed one.

    python -m benchmarks switches CONVERSATION AGENTS

The block hit ratio of each policy in the minutes 20 to 60 of each phase of `workloads.switch`.
Deterministic.
"""

from __future__ import annotations

import json
import multiprocessing
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

import benchmarks.policies.gated
import benchmarks.policies.gittins  # noqa: F401
from benchmarks.workloads import switch
from prefixkv.cli.replay import Trace, make_trace, replay_policy

CAPACITIES = (1000, 3000, 6000, 10_000, 20_000, 50_000)
POLICIES = ("adaptive", "lru", "gated", "gittins")
PHASES = ("conversation", "agents", "conversation again", "both at once")
PHASE_S = 3600.0
FROM_S = 1200.0

_trace: Trace


def _entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _ratios(job: tuple[str, int]) -> list[float]:
    """By phase."""
    policy, capacity = job
    found: list[int] = []
    replay_policy(
        _trace, policy, capacity, running=0, each=lambda _, known, __: found.append(known)
    )
    hit, asked = [0] * len(PHASES), [0] * len(PHASES)
    for known, request in zip(found, _trace.requests, strict=True):
        phase = min(int(request.time_s // PHASE_S), len(PHASES) - 1)
        if request.time_s - phase * PHASE_S >= FROM_S:
            hit[phase] += known
            asked[phase] += len(request.key)
    return [one / max(1, of_all) for one, of_all in zip(hit, asked, strict=True)]


def _take(trace: Trace) -> None:
    """In a process of its own."""
    global _trace
    _trace = trace


def switches(
    conversation: Annotated[Path, typer.Argument(help="A trace of chat, as `prefixkv replay`.")],
    agents: Annotated[Path, typer.Argument(help="A trace of agents.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """How each policy does when the workload changes, in the later part of each phase."""
    trace = make_trace("switch", switch(_entries(conversation), _entries(agents)))
    jobs = list(product(POLICIES, CAPACITIES))
    with multiprocessing.get_context("fork").Pool(2, _take, (trace,)) as pool:
        by_job = dict(zip(jobs, pool.map(_ratios, jobs, chunksize=1), strict=True))
    rows = []
    for capacity, (at, phase) in product(CAPACITIES, enumerate(PHASES)):
        own = {policy: round(by_job[policy, capacity][at], 4) for policy in POLICIES}
        best = max(own[policy] for policy in POLICIES[1:])
        of_best = own["adaptive"] / best if best else 1.0
        rows.append({"blocks": capacity, "phase": phase, **own, "of_best": round(of_best, 3)})
        print(f"{capacity:>7,} {phase:<20} {own} {of_best:.3f}")
    recipe = {
        "command": f"python -m benchmarks switches {conversation.name} {agents.name}",
        "running": "0: blocks of the request that comes do not count while it is admitted",
        "hits": "blocks found / blocks asked for, minutes 20 to 60 of each phase of an hour",
        "of_best": "adaptive / the best of the others, which each run through all phases",
    }
    if json_file is not None:
        json_file.write_text(json.dumps({"recipe": recipe, "rows": rows}, indent=1) + "\n")
