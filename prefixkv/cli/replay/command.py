"""`prefixkv replay`: its options, and what it prints and writes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from prefixkv.cli.outputs import check_plot, check_writable, write_text, writing
from prefixkv.cli.replay.check import TraceCheck, check_trace, why_nothing_here
from prefixkv.cli.replay.curves import Makers, capacities_for, maker_of, replays
from prefixkv.cli.replay.optimum import OPTIMUM
from prefixkv.cli.replay.readers import read_trace
from prefixkv.cli.replay.report import (
    TraceResults,
    amount,
    draw,
    sentence,
    table,
)
from prefixkv.cli.replay.run import ReplayResult
from prefixkv.cli.replay.tiers import host_size
from prefixkv.cli.replay.trace import Trace, client_hints, footprint
from prefixkv.errors import ConfigError, check_range
from prefixkv.spi import policy_names

ALL: Final = "all"


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
    makers = _makers(policy or [ALL])
    given = _capacities(capacity)
    hosts = [host_size("--host", size) for text in host or [] for size in text.split(",")]
    check_writable("--json", json_file)
    check_writable("--plot", plot)
    check_plot(plot)
    if check and plot:
        raise ConfigError("--check replays nothing: leave out --plot")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    loaded = [read_trace(path, block_tokens) for path in traces]
    # The option wins over what the trace says of its model.
    if bytes_per_token:
        loaded = [replace(trace, bytes_per_token=bytes_per_token) for trace in loaded]
    if check:
        checks = [check_trace(trace, warm) for trace in loaded]
        for found in checks:
            console.print(_said(found))
        if json_file is not None:
            rows = [asdict(found) for found in checks]
            write_text("--json", json_file, json.dumps(rows, indent=1) + "\n")
        return
    results: list[ReplayResult] = []
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
        mine = _replayed(console, trace, makers, sorted({*sizes}), warm=warm, hints=told,
                         running=running, hosts=hosts)  # fmt: skip
        here = TraceResults(trace, mine)
        console.print("\n".join(f"  {line}" for line in table(here)))
        at_pool = [one for one in mine if one.capacity_blocks == asked]
        if any(one.hit_tokens or any(host.loads for host in one.host) for one in at_pool):
            console.print(sentence(here, asked) + "\n")
        else:
            # Nothing to choose by, but the reason is worth more than a row of zeros.
            reasons = why_nothing_here(check_trace(trace, warm), asked)
            console.print(
                f"{trace.name}, {asked:,} blocks: no policy found anything, so none is "
                f"recommended. {' '.join(reasons)}\n"
            )
        results += mine
    # Files last: results are on the screen even if writing fails.
    if json_file is not None:
        how = {} if hints is None else {"hints_minutes": hints}
        rows = [asdict(result) | how for result in results]
        write_text("--json", json_file, json.dumps(rows, indent=1) + "\n")
    if plot is not None:
        with writing("--plot", plot):
            draw(results, plot)


def _replayed(
    console: Console, trace: Trace, makers: Makers, sizes: list[int], **options: Any
) -> list[ReplayResult]:
    """Replay with a bar that has the time left."""
    mine = []
    with Progress(
        "{task.description}", BarColumn(), TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task(trace.name, total=len(sizes) * len(makers))
        for result in replays(trace, makers, sizes, **options):
            mine.append(result)
            progress.update(task, advance=1)
    return mine


def _said(check: TraceCheck) -> str:
    size = f"; KV of a token: {amount(check.bytes_per_token)}" if check.bytes_per_token else ""
    lines = [
        f"{check.trace}: {check.kind}",
        f"{check.requests:,} requests in {check.seconds:,.1f} s, namespaces: "
        f"{check.namespaces:,}; the longest prompt has {check.longest_tokens:,} tokens{size}",
        f"blocks of {check.block_tokens:,} tokens: {check.asked_blocks:,} asked for, "
        f"{check.whole_blocks:,} of them whole, {check.different_blocks:,} different; at most "
        f"{check.largest_blocks:,} in a prompt",
        f"repeats: {check.block_bound:.1%} of the blocks, {check.token_bound:.1%} of the tokens; "
        "no cache finds more",
    ]
    if not check.why_nothing:
        lines.append(f"lru finds some from {check.lru_blocks:,} blocks on")
    return "\n  ".join([*lines, *(check.why_nothing or check.doubts)])


def _makers(given: list[str]) -> Makers:
    """Raises ConfigError."""
    every = [*policy_names(), OPTIMUM]
    names = (name.strip() for text in given for name in text.split(","))
    chosen: dict[str, None] = {}
    for name in filter(None, names):
        chosen |= dict.fromkeys(every if name == ALL else [name])
    for name in chosen:
        if name not in every and ":" not in name:
            raise ConfigError(
                f"--policy {name!r} is not one of {', '.join(every)}, nor MODULE:CLASS"
            )
    if not chosen:
        raise ConfigError("--policy names no policy")
    return {name: maker_of(name) for name in chosen}


def _capacities(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--capacity {text!r} is not a list of integers") from None
    for size in sizes:
        check_range("--capacity", size, 1, 10**8)
    return sizes
