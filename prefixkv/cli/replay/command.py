"""`prefixkv replay`: its options, the table that grows as results come, and the recommendation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from prefixkv.cli.outputs import check_writable, write_text, writing
from prefixkv.cli.replay.check import (
    check_trace,
    enough_for_lru,
    why_nothing_here,
)
from prefixkv.cli.replay.curves import (
    amount,
    best,
    capacities_for,
    check_plot,
    draw,
    middle,
    sentence,
)
from prefixkv.cli.replay.hints import client_hints
from prefixkv.cli.replay.hosts import host_row, host_sizes
from prefixkv.cli.replay.measure import MakePolicy, Replays, RequestHits, maker_of
from prefixkv.cli.replay.optimum import OPTIMUM
from prefixkv.cli.replay.readers import read_trace
from prefixkv.cli.replay.run import ReplayResult
from prefixkv.cli.replay.trace import Trace, footprint, mix
from prefixkv.errors import ConfigError, check_range
from prefixkv.spi import DEFAULT_POLICY, policy_names

ALL: Final = "all"
LAYOUT = "{:<22.22} {:<10} {:>9} {:>7} {:>7} {:>10} {:>9} {:>7}"


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
            help="Your pool in blocks: half and twice of it are replayed too. By default the "
            "middle capacity."
        ),
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(help="Bytes of KV per token, to show savings in bytes.")
    ] = None,
    warm: Annotated[
        float, typer.Option(help="Share of the requests that only warm the cache.")
    ] = 0.0,
    queue: Annotated[int, typer.Option(help="Number of next requests that count as waiting.")] = 0,
    running: Annotated[
        int,
        typer.Option(
            help="Requests that run at a time: their blocks count, and are not evicted. 0: not "
            "even those of the request that comes count."
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
            help="Let clients say whether their conversation comes back within this many minutes."
        ),
    ] = None,
    hints_wrong: Annotated[
        float, typer.Option(help="Share of these clients that say the opposite.")
    ] = 0.0,
    mixed: Annotated[
        bool, typer.Option("--mix", help="Replay all traces as one, by time; they share nothing.")
    ] = False,
    requests: Annotated[
        int | None, typer.Option(help="Number of requests to read; by default all.")
    ] = None,
    page_size: Annotated[int, typer.Option(help="Tokens per block, for token lists.")] = 16,
    block_tokens: Annotated[int, typer.Option(help="Tokens per hash id.")] = 512,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file.")
    ] = None,
    per_request: Annotated[
        Path | None,
        typer.Option(
            help="Write what each request finds in each replay to this file, a line of JSON each.",
        ),
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
) -> None:
    """Replay recorded traces through the cache: hit rate by policy and capacity, the optimum that
    no policy exceeds, and a recommendation."""
    # Everything that can be refused is refused here, before minutes of replay.
    makers = _makers(policy or [ALL])
    given = _capacities(capacity) if capacity else []
    hosts = host_sizes("--host", [one for text in host or [] for one in text.split(",")])
    for setting, value, low, high in (
        ("--warm", warm, 0, 0.99), ("--queue", queue, 0, 1_000_000),
        ("--page-size", page_size, 1, 65_536), ("--block-tokens", block_tokens, 1, 1_048_576),
        ("--running", running, 0, 1_000_000),
        ("--requests", 1 if requests is None else requests, 1, 10**9),
        ("--pool", 1 if pool is None else pool, 1, 10**8),
        ("--bytes-per-token", 1 if bytes_per_token is None else bytes_per_token, 1, 2**32),
        ("--hints", 0 if hints is None else hints, 0, 10**6),
        ("--hints-wrong", hints_wrong, 0, 1),
    ):  # fmt: skip
        check_range(setting, value, low, high)
    # A file that cannot be written would be found out only after the last replay.
    check_writable("--json", json_file)
    check_writable("--plot", plot)
    check_writable("--per-request", per_request)
    check_plot(plot)
    if check and (plot or per_request):
        raise ConfigError("--check replays nothing: leave out --plot and --per-request")
    console = Console(soft_wrap=True)
    # Read, and merged if asked to; then each trace is replayed by itself.
    loaded = [read_trace(path, page_size, block_tokens, requests) for path in traces]
    if mixed:
        loaded = [mix(loaded)]
    # The option wins over what the trace says of its model.
    if bytes_per_token:
        loaded = [replace(trace, bytes_per_token=bytes_per_token) for trace in loaded]
    if check:
        _check(console, loaded, warm, json_file)
        return
    results: list[ReplayResult] = []
    sentences = []
    heads = ("trace", "policy", "blocks", "block", "token", "KV saved", "evicted", "us/req")
    with (
        _per_request(per_request) as note,
        Progress(
            "{task.description}", BarColumn(), TimeRemainingColumn(), console=console,
            transient=True,
        ) as progress,
    ):  # fmt: skip
        for trace in loaded:
            bytes_each = trace.bytes_per_token
            blocks = footprint(trace)
            progress.console.print(
                f"{trace.name}: {len(trace.requests):,} requests, {blocks:,} different blocks of "
                f"{trace.block_tokens} tokens",
                highlight=False,
            )
            progress.console.print(LAYOUT.format(*heads), style="bold")
            told = None if hints is None else client_hints(trace, hints, hints_wrong)
            replays = Replays(trace, warm, queue, told, note, running, hosts)
            trace_results: list[ReplayResult] = []

            # Results are printed as they come. Loop variables are bound as defaults, since a
            # closure would see their last values.
            def measure(
                name: str,
                size: int,
                trace: Trace = trace,
                replays: Replays = replays,
                trace_results: list[ReplayResult] = trace_results,
            ) -> None:
                task = progress.add_task(f"{trace.name} {name} {size}", total=len(trace.requests))
                # Named as on the command line, with its settings: two settings of one policy are
                # two curves.
                result = replays.run(
                    name, makers[name], size, lambda at: progress.update(task, completed=at)
                )
                progress.remove_task(task)
                trace_results.append(result)
                progress.console.print(_row(result, trace.bytes_per_token), highlight=False)
                for tier in result.host:
                    progress.console.print(host_row(tier, size, trace), highlight=False)

            sizes = given or capacities_for(blocks)
            for size in sizes:
                replays.host_blocks(size)  # raises before anything of this trace is replayed
            # First every policy at every capacity, which decides the best one; then that one at
            # half and twice of the pool, for the sentence.
            asked = pool or middle(sizes)
            for size in sorted({*sizes, *([asked] if pool else [])}):
                for name in makers:
                    measure(name, size)
            chosen = best(trace_results, asked)
            here = [one for one in trace_results if one.capacity_blocks == asked]
            if chosen is None or not chosen.hit_tokens:
                # Nothing to choose by, but the reason is worth more than a row of zeros.
                if not any(one.hit_tokens for one in here) or chosen is not None:
                    reasons = why_nothing_here(trace, check_trace(trace, warm), warm, asked)
                    sentences.append(
                        f"{trace.name}, {asked:,} blocks: no policy found anything, so none is "
                        f"recommended. {' '.join(reasons)}"
                    )
            else:
                # Half or twice of the pool may be among the capacities that were replayed already.
                there = {(one.policy, one.capacity_blocks) for one in trace_results}
                for size in (max(1, asked // 2), 2 * asked):
                    if (chosen.policy, size) not in there:
                        measure(chosen.policy, size)
                sentences.append(sentence(trace_results, asked, bytes_each, trace.block_tokens))
            results += trace_results
    for text in sentences:
        console.print(f"\n{text}", highlight=False)
    # Files last: results are on the screen even if writing fails.
    if json_file is not None:
        how = {} if hints is None else {"hints_minutes": hints, "hints_wrong": hints_wrong}
        rows = [asdict(result) | how for result in results]
        write_text("--json", json_file, json.dumps(rows, indent=1) + "\n")
    if plot is not None:
        with writing("--plot", plot):
            draw(results, plot)


@contextmanager
def _per_request(path: Path | None) -> Iterator[Callable[[RequestHits], None] | None]:
    """Write what each request finds at once: nothing is kept. Raises OutputError."""
    if path is None:
        yield None
        return
    flag = "--per-request"
    with writing(flag, path):
        out = path.open("w", encoding="utf-8")

    def note(hits: RequestHits) -> None:
        with writing(flag, path):
            out.write(json.dumps(hits._asdict(), separators=(",", ":")) + "\n")

    try:
        yield note
    finally:
        # The last lines are written here.
        with writing(flag, path):
            out.close()


def _check(console: Console, traces: list[Trace], warm: float, json_file: Path | None) -> None:
    rows = []
    for trace in traces:
        found = check_trace(trace, warm)
        size = f"; KV of a token: {amount(found.bytes_per_token)}" if found.bytes_per_token else ""
        for line in (
            f"{found.trace}: {found.kind}",
            f"  {found.requests:,} requests in {found.seconds:,.1f} s, namespaces: "
            f"{found.namespaces:,}; the longest prompt has {found.longest_tokens:,} tokens{size}",
            f"  blocks of {found.block_tokens:,} tokens: {found.asked_blocks:,} asked for, "
            f"{found.whole_blocks:,} of them whole, {found.different_blocks:,} different; at most "
            f"{found.largest_blocks:,} in a prompt",
            f"  repeats: {found.block_bound:.1%} of the blocks, {found.token_bound:.1%} of the "
            "tokens; no cache finds more",
        ):
            console.print(line, highlight=False, markup=False)
        if not found.why_nothing:
            enough = enough_for_lru(trace, warm)
            console.print(f"  lru finds some from {enough:,} blocks on", highlight=False)
        for line in found.why_nothing or found.doubts:
            console.print(f"  {line}", highlight=False, markup=False)
        bounds = {"block_bound": found.block_bound, "token_bound": found.token_bound}
        rows.append(asdict(found) | bounds)
    if json_file is not None:
        write_text("--json", json_file, json.dumps(rows, indent=1) + "\n")


def _row(result: ReplayResult, bytes_per_token: int) -> str:
    """Format a line of the table; * marks the default policy."""
    name = result.policy + ("*" if result.policy == DEFAULT_POLICY else "")
    saved = amount(result.hit_tokens * bytes_per_token) if bytes_per_token else "-"
    return LAYOUT.format(
        result.trace, name, result.capacity_blocks, f"{result.block_hit_ratio:.4f}",
        f"{result.token_hit_ratio:.4f}", saved, result.evicted_pages,
        f"{result.us_per_request:.1f}",
    )  # fmt: skip


def _makers(given: list[str]) -> dict[str, MakePolicy | None]:
    """Return what makes each policy of `--policy`. Raises ConfigError."""
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


def _capacities(sizes: str) -> list[int]:
    try:
        capacities = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise ConfigError(f"--capacity {sizes!r} is not a list of integers") from None
    for size in capacities:
        check_range("--capacity", size, 1, 10**8)
    return list(dict.fromkeys(capacities))
