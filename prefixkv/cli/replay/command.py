"""`prefixkv replay`: its options, and what it prints and writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from prefixkv.cli.outputs import check_outputs, write_json
from prefixkv.cli.replay.check import check_trace
from prefixkv.cli.replay.curves import OPTIMUM, capacities_for, makers_of, replay_curves
from prefixkv.cli.replay.report import TraceResults, draw, sentence, table
from prefixkv.cli.replay.run import ReplayResult
from prefixkv.cli.replay.trace import client_hints, footprint, read_trace
from prefixkv.errors import ConfigError
from prefixkv.spi import policy_names


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Recordings of a node, Mooncake JSONL, or a JSONL of token lists."),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies, separated by commas, with settings if any (adaptive:trust=30), or one "
            "of your own (MODULE:CLASS); repeatable. all: every policy and the optimum.",
            show_default="all",
        ),
    ] = None,
    capacity: Annotated[
        str, typer.Option(help="Sizes in blocks, by commas; default: 1/64 of the trace to all.")
    ] = "",
    pool: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**8,
            help="Your pool in blocks: half and twice of it are replayed too. By default the "
            "middle capacity.",
        ),
    ] = None,
    bytes_per_token: Annotated[
        int | None,
        typer.Option(min=1, max=2**32, help="Bytes of KV per token, to show sizes in bytes."),
    ] = None,
    warm: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Share of the requests that only warm the cache."),
    ] = 0.0,
    running: Annotated[
        int,
        typer.Option(
            min=0, max=1_000_000,
            help="Requests that run at a time: their blocks count, and are not evicted. 0: not "
            "even those of the request that comes count.",
        ),
    ] = 1,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host tiers behind the pool, by commas: 4x (times the capacity), 64GiB, or "
            "blocks; repeatable."
        ),
    ] = None,
    hints: Annotated[
        float | None,
        typer.Option(
            min=0, max=10**6,
            help="Let clients say whether their conversation comes back within this many minutes.",
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 20,
            help="Tokens per block, where the file does not say it.",
            show_default="512; of token lists 16",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Replay nothing: say what each trace is, how much repeats in it at all, and why "
            "if nothing does.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw miss-ratio curves to this file; needs matplotlib.")
    ] = None,
) -> None:  # fmt: skip
    """Replay recorded traces through the cache: hit rate by policy and capacity, the optimum that
    no policy exceeds, and a recommendation."""
    # Everything that can be refused is refused here, before minutes of replay.
    every = [*policy_names(), OPTIMUM]
    named = filter(None, map(str.strip, ",".join(policy or ["all"]).split(",")))
    policies = [*dict.fromkeys(chain(*(every if name == "all" else [name] for name in named)))]
    if not policies:
        raise ConfigError("--policy names no policy")
    makers_of(policies)
    try:
        given = [int(size) for size in capacity.split(",")] if capacity else []
    except ValueError:
        raise ConfigError(f"--capacity {capacity!r} is not a list of integers") from None
    check_outputs(json_file, plot)
    if check and plot:
        raise ConfigError("--check replays nothing: leave out --plot")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    loaded = [read_trace(path, block_tokens) for path in traces]
    # Nodes name their recordings alike: those have their paths as names, each a panel of its own.
    times = Counter(trace.name for trace in loaded)
    loaded = [
        replace(trace, name=str(path)) if times[trace.name] > 1 else trace
        for trace, path in zip(loaded, traces, strict=True)
    ]
    # The option wins over what the trace says of its model.
    if bytes_per_token:
        loaded = [replace(trace, bytes_per_token=bytes_per_token) for trace in loaded]
    if check:
        checks = [check_trace(trace, warm) for trace in loaded]
        console.print("\n".join(map(str, checks)))
        write_json(json_file, [vars(found) for found in checks])
        return
    results: list[ReplayResult] = []
    rows: list[dict[str, Any]] = []
    for trace in loaded:
        blocks = footprint(trace)
        sizes = given or capacities_for(blocks)
        asked = pool or sorted(sizes)[len(sizes) // 2]
        if pool:
            sizes = [*sizes, max(1, pool // 2), pool, 2 * pool]
        console.print(
            f"{trace.name}: {len(trace.requests):,} requests, {blocks:,} different blocks of "
            f"{trace.block_tokens} tokens. Of the blocks asked for are found:"
        )
        told = None if hints is None else client_hints(trace, hints)
        with _progress(console, trace.name, len({*sizes}) * len(policies)) as advance:
            mine = replay_curves(
                trace, policies, sizes, warm=warm, hints=told, running=running,
                hosts=",".join(host).split(",") if host else [],
                on_result=advance,
            )  # fmt: skip
        here = TraceResults(trace, mine)
        console.print("\n".join(f"  {line}" for line in table(here)))
        at_pool = [one for one in mine if one.capacity_blocks == asked]
        if any(one.hit_tokens or any(host.loads for host in one.host) for one in at_pool):
            console.print(sentence(here, asked) + "\n")
        else:
            # Nothing to choose by, but the reason is worth more than a row of zeros.
            reasons = check_trace(trace, warm).why_nothing_at(asked)
            console.print(
                f"{trace.name}, {asked:,} blocks: no policy found anything, so none is "
                f"recommended. {' '.join(reasons)}\n"
            )
        results += mine
        how = {"warm": warm, "hints_minutes": hints, "block_tokens": trace.block_tokens}
        rows += [asdict(result) | how for result in mine]
    # Files last: results are on the screen even if writing fails.
    write_json(json_file, rows)
    if plot is not None:
        draw(results, plot)


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[object], None]]:
    """Show a bar that has the time left, and yield what advances it."""
    with Progress(
        "{task.description}", BarColumn(), TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task(name, total=total)
        yield lambda _: progress.advance(task)
