"""How often each eviction policy hits on traces: at several capacities, with hints, with requests
that wait, and with host tiers.

    python -m benchmarks replay CONVERSATION AGENTS --mix --generated
    python -m benchmarks replay CONVERSATION AGENTS --tiers --json benchmarks/results/host_tier.json

The first writes benchmarks/results/replay.json (recipe and rows) and replay.png. Deterministic:
only the times differ. They are taken at the end, one run at a time, turn about, the least of three.
With `--tiers` it is `prefixkv replay --host 1x,2x,4x,16x` with `--running 0` and 1, and without
hosts for more that run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

import benchmarks.policies.gated
import benchmarks.policies.gittins  # noqa: F401
from benchmarks.report import JsonFile, Row, check_json, write
from benchmarks.workloads import SEED, WORKLOADS, generate
from benchmarks.workloads import mix as mix_traces
from prefixkv.cli.replay import (
    OPTIMUM,
    ReplayResult,
    Trace,
    client_hints,
    draw,
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
QUEUES = (8, 128)
WARM = 0.5
"""The share of the requests that come first and are not counted."""
TIMED = 3000
"""Blocks, at which times are taken."""
RUNNING = 0
"""As `prefixkv replay --running 0`: blocks of the request that comes do not count while it is
admitted. So these figures are of policies alone, whatever runs."""
TIERS = (1, 2, 4, 16)
TIERS_RUNNING = (0, 1, 16, 64)  # those above 1 without host tiers

J = TypeVar("J")


class Run(NamedTuple):
    trace: str
    policy: str
    capacity: int
    queue: int = 0
    hints_minutes: float | None = None
    hints_wrong: float = 0.0


class TierRun(NamedTuple):
    trace: str
    capacity: int
    policy: str
    running: int


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
    is_whole = requests is None and mix and with_generated
    if json_file is None and is_whole and not tiers:
        json_file = RESULTS / "replay.json"
    check_json(json_file)
    recorded = [read_trace(path, limit=requests) for path in paths]
    traces = [*recorded, mix_traces(recorded)] if mix else recorded
    if with_generated:
        traces += [generated(name, requests) for name in WORKLOADS]
    _TRACES.clear()
    _TRACES.update((trace.name, trace) for trace in traces)
    words = ["replay", *(path.name for path in paths), *["--mix"] * mix]
    command = " ".join([*words, *["--generated"] * with_generated, *["--tiers"] * tiers])
    told: Row = {
        "traces": {
            name: f"{len(trace.requests)} requests, blocks of {trace.block_tokens} tokens"
            for name, trace in _TRACES.items()
        },
        "block_hit_ratio": "blocks found / all blocks of the counted requests, the partial last "
        "blocks included; of a host tier: found by the device or there",
        "counted": f"the last {1 - WARM:.0%} of the requests",
        "default_policy": DEFAULT_POLICY,
    }
    if tiers:
        todo = [TierRun(*one) for one in product(_TRACES, CAPACITIES[:3], ("adaptive", "lru"),
                                                 TIERS_RUNNING)]  # fmt: skip
        rows = _measured(_tier, todo, jobs)
        write(
            json_file, command, rows, **told, host=f"{TIERS} times the pool, the same policy",
            running="requests whose blocks count and cannot be evicted; 0: not even those of the "
            "request that comes",
        )  # fmt: skip
        return
    names = [trace.name for trace in recorded]
    rows = []
    for name in _TRACES:
        runs = [*_runs(name, first=name == names[0], is_recorded=name in names)]
        mine = _measured(_policy, runs, jobs)
        print(table(_TRACES[name], mine))
        rows += mine
    times = _times(recorded[-1])
    print(f"us a request, {recorded[-1].name}, {TIMED} blocks (times lru's):")
    print("  " + ", ".join(f"{n} {us:.0f} ({us / times['lru']:.2f})" for n, us in times.items()))
    write(
        json_file, command, rows, us_per_request=times,
        seed=f"{SEED} for each of the generated traces; of hints, 0", running=RUNNING,
        hints="hints_minutes: the client says whether the conversation comes back within these; "
        "hints_wrong: the share that says the opposite", **told,
    )  # fmt: skip
    if json_file is not None:
        fields = [name for name in ReplayResult.__dataclass_fields__ if name != "us_per_request"]
        curves = [
            ReplayResult(us_per_request=0.0, **{key: row[key] for key in fields})
            for row in rows
            if row["trace"] in names and not row["queue"] and row["hints_minutes"] is None
        ]
        draw(curves, json_file.with_suffix(".png"))


def generated(name: str, requests: int | None = None) -> Trace:
    """Return a generated workload as a trace. Raises ConfigError for a name of none."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}")
    return make_trace(name, generate(name)[:requests])


def _measured(measure: Callable[[J], Row], todo: Sequence[J], jobs: int) -> list[Row]:
    """Return the row of each of `todo`, in order. They are measured in so many processes."""
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return list(pool.imap(measure, todo))


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


def _policy(run: Run) -> Row:
    trace, hints = _TRACES[run.trace], None
    if run.hints_minutes is not None:
        hints = client_hints(trace, run.hints_minutes, run.hints_wrong)
    result = (
        replay_optimum(trace, run.capacity, WARM, running=RUNNING)
        if run.policy == OPTIMUM
        else replay_policy(trace, run.policy, run.capacity, WARM, run.queue, hints, running=RUNNING)
    )
    return _row(run._asdict(), result)


def _tier(run: TierRun) -> Row:
    hosts = [times * run.capacity for times in TIERS] if run.running <= 1 else []
    result = replay_policy(
        _TRACES[run.trace], run.policy, run.capacity, WARM, running=run.running, hosts=hosts
    )
    return _row({}, result)


def _row(run: dict[str, Any], result: ReplayResult) -> Row:
    row = {**run, "warm": WARM, **asdict(result)}
    del row["us_per_request"]
    row.pop("capacity", None)  # it is there as capacity_blocks
    return row


def table(trace: Trace, rows: list[Row]) -> str:
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
        by_line.setdefault(name, {})[row["capacity_blocks"]] = row["block_hit_ratio"]
    for name, found in by_line.items():
        lines.append(f"  {name:<34}" + "".join(f"{found[size]:>8.4f}" for size in CAPACITIES))
    return "\n".join(lines) + "\n"


def _times(trace: Trace) -> dict[str, float]:
    """us a request by policy."""
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name in policy_names():
            result = replay_policy(trace, name, TIMED, WARM, running=RUNNING)
            found.setdefault(name, []).append(result.us_per_request)
    return {name: round(min(times), 1) for name, times in found.items()}
