"""Claim: the default policy hits about as often as the best of the others on every trace, and hints
and the queue help further.

    python -m benchmarks replay CONVERSATION AGENTS --mix --generated

writes benchmarks/results/replay.json (recipe and rows) and replay.png. Deterministic: only the
times differ. They are taken at the end, one run at a time, turn about, the least of three.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import benchmarks.policies.gated
import benchmarks.policies.gittins  # noqa: F401
from benchmarks.workloads import SEED, WORKLOADS, generate
from prefixkv.cache.eviction.policy import DEFAULT_POLICY, policy_names
from prefixkv.cli.replay import (
    OPTIMUM,
    ReplayResult,
    Trace,
    draw,
    make_trace,
    read_trace,
    replay_optimum,
    replay_policy,
)
from prefixkv.cli.replay.hints import client_hints
from prefixkv.cli.replay.trace import mix as mix_traces
from prefixkv.errors import ConfigError

RESULTS = Path(__file__).parent / "results"
CAPACITIES = (1000, 3000, 6000, 10_000, 20_000, 50_000)
HINTS_MINUTES = 10.0
HINTS_WRONG = (0.0, 0.2)
QUEUES = (8, 128)
TIMED = 3000
"""Blocks, at which times are taken."""
RUNNING = 0
"""As `prefixkv replay --running 0`: blocks of the request that comes do not count while it is
admitted. So these figures are of policies alone, whatever runs."""


class Run(NamedTuple):
    trace: str
    policy: str
    capacity: int
    queue: int = 0
    hints_minutes: float | None = None
    hints_wrong: float = 0.0


_TRACES: dict[str, Trace] = {}
"""By name; the children of a fork have them."""


def replay(
    paths: Annotated[list[Path], typer.Argument(metavar="TRACES", help="As `prefixkv replay`.")],
    mix: Annotated[
        bool, typer.Option("--mix", help="All of them at once besides; they share nothing.")
    ] = False,
    generated: Annotated[
        bool, typer.Option("--generated", help=f"Besides {', '.join(WORKLOADS)}.")
    ] = False,
    warm: Annotated[float, typer.Option(help="This share of the requests warms the cache.")] = 0.5,
    requests: Annotated[int | None, typer.Option(help="Read so many only.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for replay.json and replay.png.")] = RESULTS,
) -> None:
    """How often each eviction policy hits: all policies, at six capacities, on each trace."""
    if requests is not None and out == RESULTS:
        raise ConfigError("--requests: a part of the traces is no result, name another --out")
    recorded = [read_trace(path, limit=requests) for path in paths]
    traces = [*recorded, mix_traces(recorded)] if mix else recorded
    if generated:
        traces += [make_trace(name, generate(name)[:requests]) for name in WORKLOADS]
    _TRACES.update((trace.name, trace) for trace in traces)
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for name in _TRACES:
            tables = list(_runs(name, first=name == recorded[0].name, is_recorded=name in
                                {one.name for one in recorded}))  # fmt: skip
            mine = []
            for run, result in pool.imap(_measure, [(run, warm) for run in tables]):
                mine.append({**run._asdict(), "warm": warm, **asdict(result)})
                _say(f"{name}: {len(mine)} of {len(tables)} runs")
            _say("")
            print(table(_TRACES[name], mine))
            rows += mine
    for row in rows:  # `capacity` is there as capacity_blocks
        del row["capacity"], row["us_per_request"]
    timed = recorded[-1]
    recipe = {
        "command": f"python -m benchmarks replay {' '.join(path.name for path in paths)}"
        + " --mix" * mix + " --generated" * generated,
        "traces": {
            name: f"{len(trace.requests)} requests, blocks of {trace.block_tokens} tokens"
            for name, trace in _TRACES.items()
        },
        "seed": f"{SEED} for each of the generated traces; of hints, 0",
        "block_hit_ratio": "blocks found / all blocks of the counted requests, the partial last "
        "blocks included",
        "partial_blocks": "never inserted, under no policy and not by the optimum",
        "running": "0: blocks of the request that comes do not count while it is admitted",
        "warm": "share of the requests that are replayed before hits are counted",
        "hints": "hints_minutes: the client says whether the conversation comes back within these; "
        "hints_wrong: the share that says the opposite",
        "us_per_request": f"{timed.name}, {TIMED} blocks, turn about, the least of three",
        "default_policy": DEFAULT_POLICY,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, shared "
        "with other work",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    times = _times(timed, warm)
    print(f"us a request, {timed.name}, {TIMED} blocks (times lru's):")
    print("  " + ", ".join(f"{n} {us:.0f} ({us / times['lru']:.2f})" for n, us in times.items()))
    text = json.dumps({"recipe": recipe, "us_per_request": times, "rows": rows}, indent=1)
    (out / "replay.json").write_text(text + "\n", encoding="utf-8")
    names = {trace.name for trace in recorded}
    curves = [
        ReplayResult(us_per_request=0.0, **{key: row[key] for key in _FIELDS})
        for row in rows
        if row["trace"] in names and not row["queue"] and row["hints_minutes"] is None
    ]
    draw(curves, out / "replay.png")


_FIELDS = [name for name in ReplayResult.__dataclass_fields__ if name != "us_per_request"]


def _runs(trace: str, first: bool, is_recorded: bool) -> Iterator[Run]:
    """All policies at all capacities; recorded traces with hints too, the first one with queues."""
    for capacity, policy in product(CAPACITIES, (*policy_names(), OPTIMUM)):
        yield Run(trace, policy, capacity)
    plain = tuple(dict.fromkeys(("lru", DEFAULT_POLICY)))
    if is_recorded:
        for capacity, policy, wrong in product(CAPACITIES, plain, HINTS_WRONG):
            yield Run(trace, policy, capacity, 0, HINTS_MINUTES, wrong)
    if first:
        for capacity, policy, queue in product(CAPACITIES, plain, QUEUES):
            yield Run(trace, policy, capacity, queue)


def _measure(job: tuple[Run, float]) -> tuple[Run, ReplayResult]:
    run, warm = job
    trace = _TRACES[run.trace]
    if run.policy == OPTIMUM:
        return run, replay_optimum(trace, run.capacity, warm, running=RUNNING)
    hints = None
    if run.hints_minutes is not None:
        hints = client_hints(trace, run.hints_minutes, run.hints_wrong)
    return run, replay_policy(
        trace, run.policy, run.capacity, warm, run.queue, None, hints, running=RUNNING
    )


def table(trace: Trace, rows: list[dict[str, Any]]) -> str:
    """A line a policy (and what it was told), a column a capacity."""
    lines = [f"{trace.name}: block hit ratio"]
    lines.append(f"  {'blocks':<34}" + "".join(f"{size:>8,}" for size in CAPACITIES))
    by_line: dict[str, dict[int, float]] = {}
    for row in rows:
        name = row["policy"] + (" (default)" if row["policy"] == DEFAULT_POLICY else "")
        if row["queue"]:
            name += f", {row['queue']} waiting"
        if row["hints_minutes"] is not None:
            name += f", hints, {row['hints_wrong']:.0%} wrong"
        by_line.setdefault(name, {})[row["capacity"]] = row["block_hit_ratio"]
    for name, found in by_line.items():
        lines.append(f"  {name:<34}" + "".join(f"{found[size]:>8.4f}" for size in CAPACITIES))
    return "\n".join(lines) + "\n"


def _times(trace: Trace, warm: float) -> dict[str, float]:
    """us a request by policy."""
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name in policy_names():
            result = replay_policy(trace, name, TIMED, warm, running=RUNNING)
            found.setdefault(name, []).append(result.us_per_request)
    return {name: round(min(times), 1) for name, times in found.items()}


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
