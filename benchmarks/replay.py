"""How often each eviction policy hits on traces: at several capacities, with hints, with requests
that wait, and with host tiers.

    python -m benchmarks replay CONVERSATION AGENTS --mix --generated
    python -m benchmarks replay CONVERSATION AGENTS --tiers --json benchmarks/results/host_tier.json

The first writes benchmarks/results/replay.json. Deterministic: only the times differ. They are
taken at the end, one run at a time, turn about, the least of three. With `--tiers` it is `prefixkv
replay --host 1x,2x,4x,16x` with `--running 0` and 1, and without hosts for more that run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import benchmarks.policies.gated
import benchmarks.policies.gittins  # noqa: F401
from benchmarks.report import JsonFile, Row, check_outputs, write
from benchmarks.workloads import SEED, WORKLOADS, generate
from benchmarks.workloads import mix as mix_traces
from prefixkv.cli.replay import (
    OPTIMUM,
    Trace,
    client_hints,
    make_trace,
    read_trace,
    replay_optimum,
    replay_policy,
)
from prefixkv.errors import ConfigError
from prefixkv.spi import DEFAULT_POLICY, policy_names

RESULTS = Path(__file__).parent / "results"
CAPACITIES = (1000, 3000, 6000, 10_000, 20_000, 50_000)
HINTS_MINUTES = 10.0
HINTS_WRONG = (0.0, 0.2)
WARM = 0.5
"""The share of the requests that come first and are not counted."""
TIMED = 3000
"""Blocks, at which times are taken."""
TIERS = (1, 2, 4, 16)
TIERS_RUNNING = (0, 1, 16, 64)  # those above 1 without host tiers


class Run(NamedTuple):
    """`running` of 0: blocks of the request that comes do not count while it is admitted, so these
    figures are of policies alone."""

    trace: str
    policy: str
    capacity: int
    hints_minutes: float | None = None
    hints_wrong: float = 0.0
    running: int = 0
    tiers: bool = False

    def row(self) -> Row:
        trace, hints = _TRACES[self.trace], None
        if self.hints_minutes is not None:
            hints = client_hints(trace, self.hints_minutes, self.hints_wrong)
        hosts = [times * self.capacity for times in TIERS] if self.tiers else []
        result = (
            replay_optimum(trace, self.capacity, WARM, running=self.running)
            if self.policy == OPTIMUM
            else replay_policy(
                trace, self.policy, self.capacity, WARM, hints, None, self.running,
                hosts,
            )
        )  # fmt: skip
        row = {**self._asdict(), "warm": WARM, **asdict(result)}
        for name in ("us_per_request", "capacity", "tiers"):
            del row[name]
        return row


_TRACES: dict[str, Trace] = {}
"""By name; the children of a fork have them."""


def replay(
    paths: Annotated[list[Path], typer.Argument(metavar="TRACES", help="As `prefixkv replay`.")],
    mix: Annotated[
        bool, typer.Option("--mix", help="All of them at once besides; they share nothing.")
    ] = False,
    with_generated: Annotated[
        bool, typer.Option("--generated", help=f"Besides {', '.join(WORKLOADS)}.")
    ] = False,
    tiers: Annotated[bool, typer.Option("--tiers", help="Host tiers behind the pool.")] = False,
    requests: Annotated[int | None, typer.Option(help="Read so many only.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    json_file: JsonFile = None,
) -> None:
    """How often each eviction policy hits: all policies, at six capacities, on each trace."""
    if json_file is None and requests is None and mix and with_generated and not tiers:
        json_file = RESULTS / "replay.json"
    check_outputs(json_file)
    recorded = [read_trace(path, limit=requests) for path in paths]
    traces = [*recorded, mix_traces(recorded)] if mix else recorded
    if with_generated:
        traces += [generated(name, requests) for name in WORKLOADS]
    _TRACES.clear()
    _TRACES.update((trace.name, trace) for trace in traces)
    words = ["replay", *(path.name for path in paths), *["--mix"] * mix]
    words += [*["--generated"] * with_generated, *["--tiers"] * tiers]
    rows: list[Row] = []
    names = [trace.name for trace in recorded]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for name in _TRACES:
            runs = _tiers(name) if tiers else _runs(name, name in names)
            mine = pool.map(Run.row, [*runs])
            print(table(_TRACES[name], mine))
            rows += mine
    write(
        json_file, " ".join(words), rows,
        us_per_request=None if tiers else _times(recorded[-1]),
        traces={
            name: f"{len(trace.requests)} requests, blocks of {trace.block_tokens} tokens"
            for name, trace in _TRACES.items()
        },
        block_hit_ratio="blocks found / all blocks of the counted requests, the partial last "
        "blocks included; of a host tier: found by the device or there",
        counted=f"the last {1 - WARM:.0%} of the requests",
        default_policy=DEFAULT_POLICY,
        seed=f"{SEED} for each of the generated traces; of hints, 0",
        hints="hints_minutes: the client says whether the conversation comes back within these; "
        "hints_wrong: the share that says the opposite",
        host=f"{TIERS} times the pool, the same policy",
        running="requests whose blocks count and cannot be evicted; 0: not even those of the "
        "request that comes",
    )  # fmt: skip


def generated(name: str, requests: int | None = None) -> Trace:
    """Return a generated workload as a trace. Raises ConfigError for a name of none."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}")
    return make_trace(name, generate(name)[:requests])


def _tiers(trace: str) -> Iterator[Run]:
    for capacity, policy, running in product(CAPACITIES[:3], ("adaptive", "lru"), TIERS_RUNNING):
        yield Run(trace, policy, capacity, running=running, tiers=running <= 1)


def _runs(trace: str, is_recorded: bool) -> Iterator[Run]:
    """All policies at all capacities; recorded traces with hints too."""
    for capacity, policy in product(CAPACITIES, (*policy_names(), OPTIMUM)):
        yield Run(trace, policy, capacity)
    for capacity, policy in product(CAPACITIES, ("lru", DEFAULT_POLICY)):
        if is_recorded:
            for wrong in HINTS_WRONG:
                yield Run(trace, policy, capacity, HINTS_MINUTES, wrong)


def table(trace: Trace, rows: list[Row]) -> str:
    """A line a policy (and what it was told), a column a capacity."""
    lines = [f"{trace.name}: block hit ratio"]
    lines.append(f"  {'blocks':<34}" + "".join(f"{size:>8,}" for size in CAPACITIES))
    by_line: dict[str, dict[int, float]] = {}
    for row in rows:
        name = row["policy"] + (" (default)" if row["policy"] == DEFAULT_POLICY else "")
        if row["running"]:
            name += f", {row['running']} running"
        if row["hints_minutes"] is not None:
            name += f", hints, {row['hints_wrong']:.0%} wrong"
        by_line.setdefault(name, {})[row["capacity_blocks"]] = row["block_hit_ratio"]
    for name, found in by_line.items():
        lines.append(f"  {name:<34}" + "".join(f"{hit:>8.4f}" for hit in found.values()))
    return "\n".join(lines) + "\n"


def _times(trace: Trace) -> dict[str, float]:
    """us a request by policy."""
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name in policy_names():
            result = replay_policy(trace, name, TIMED, WARM, running=0)
            found.setdefault(name, []).append(result.us_per_request)
    return {name: round(min(times), 1) for name, times in found.items()}
