"""Plan the passes, have the workers run them, show how far they are, and gather the report."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.stand_in.options import LOAD_FRACTION, PassPlan, StandInOptions
from benchmarks.stand_in.report import Measured, Report
from benchmarks.stand_in.workers import SWITCH_INTERVAL_S, WorkerError, Workers
from prefixkv.cli.chats.workload import Workload
from prefixkv.cli.figures import CACHE_NAMES, machine
from prefixkv.cli.outputs import check_writable, writing
from prefixkv.errors import ConfigError

_DEFINITIONS = {
    "cache_off": "decode's prefix cache is off; prefill's own stays on",
    "ttft_s": "from a turn's arrival to its KV committed on decode, waiting for --concurrency "
    "included",
    "token_hit_rate": "sum of decode_prefix_len / sum of prompt tokens",
    "requests_per_s": "requests answered / seconds from the pass's start to its last answer",
    "bytes_sent": "KV bytes of writes that ended, on prefill",
    "bytes_skipped": "KV bytes of the tokens decode had cached",
    "itl_s": "between two tokens of one request; a step is never shorter than --step-ms",
    "prefill": "computing a token is writing its KV, plus --prefill-us-per-token",
    "failed": "of the pass and of its verified pass",
    "saturated": "every turn arrives as soon as the one before it is answered",
    "runs": "Poisson arrivals (a trace: its own pattern, stretched) at the offered load",
}


Heard = Callable[[int], None]  # hears how many requests of a pass have ended
RunPass = Callable[[PassPlan, Heard], Measured]  # `Workers.run`, or a test's stand-in
Show = Callable[[str], Heard]  # told that a pass begins


def run(
    options: StandInOptions,
    caches: Sequence[bool],
    console: Console,
    json_path: Path | None = None,
    plot_path: Path | None = None,
) -> int:
    """The whole command. Returns its exit status: 0, or 1 if a pass did anything it must not.

    Raises: ConfigError or TraceError before anything is started; WorkerError.
    """
    _check_outputs(json_path, plot_path)
    workload = options.workload()
    options.check_pools(workload, psutil.virtual_memory().available)
    recipe = _recipe(options, caches, workload)
    console.print(
        f"a stand-in engine: {workload.num_requests} requests, the longest of "
        f"{workload.max_request_tokens} tokens; "
        f"{options.page_bytes // options.page_size / 1024:g} KiB of KV per token. "
        f"The workers' switch interval is set to {SWITCH_INTERVAL_S * 1e3:g} ms.",
        highlight=False,
    )
    with Progress(
        "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal,
    ) as bars:  # fmt: skip

        def show(title: str, total: int = workload.num_requests) -> Heard:
            if bars.disable:
                # A log cannot show a bar, but it can show where we are.
                console.print(title, highlight=False)
            task = bars.add_task(title, total=total)
            return lambda ended: bars.update(task, completed=ended)

        started = show("starting the workers", total=1)
        with Workers(options, workload) as workers:
            workers.wait_ready()
            started(1)
            report = run_passes(recipe, caches, workers.run, show)
    # foreign load shows: ours is about 1.5
    recipe["machine"]["load_average_after"] = list(os.getloadavg())
    console.print(report.table())
    if report.verdict():
        console.print(report.verdict(), highlight=False)
    if json_path is not None:
        report.write_json(json_path)
    if plot_path is not None:
        with writing("--plot", plot_path):
            report.plot(plot_path)
    complaints = report.complaints()
    for complaint in complaints:
        console.print(f"WRONG: {complaint}", highlight=False)
    return 1 if complaints else 0


def run_passes(
    recipe: dict[str, Any], caches: Sequence[bool], run_pass: RunPass, show: Show
) -> Report:
    """Verified, saturated, then timed passes. The offered load comes from a saturated pass with the
    cache off, which is run (and then left out of the report) even if only the other side is wanted.
    """
    report = Report(recipe)
    salt = 0

    def one(kind: str, cache: bool, verify: bool, rate: float | None) -> Measured:
        nonlocal salt
        salt += 1
        progress = show(f"{kind}, {CACHE_NAMES[cache].replace('_', ' ')}")
        measured = run_pass(PassPlan(cache, verify, rate, salt), progress)
        progress(measured.requests)
        return measured

    for cache in caches:
        report.verified[cache] = one("verified", cache, verify=True, rate=None)
    base = one("saturated", cache=False, verify=False, rate=None)
    for cache in caches:
        report.saturated[cache] = one("saturated", True, False, None) if cache else base
    if base.requests == base.failed:
        raise WorkerError("no request was answered with the cache off: there is no rate to offer")
    sustained = (base.requests - base.failed) / base.duration_s
    rate = LOAD_FRACTION * sustained
    recipe["offered_load"] = {
        "requests_per_s": rate,
        "fraction": LOAD_FRACTION,
        "of": "cache_off saturated",
        "cache_off_requests_per_s": sustained,
    }
    for cache in caches:
        report.timed[cache] = one(f"at {rate:.1f} requests/s", cache, verify=False, rate=rate)
    return report


def _check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """That the files can be written at the end, before minutes have gone into them."""
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which prefixkv[plot] installs")
    for flag, path in (("--json", json_path), ("--plot", plot_path)):
        check_writable(flag, path)
    if plot_path is not None:
        from matplotlib.figure import Figure

        formats = Figure().canvas.get_supported_filetypes()
        if plot_path.suffix.lstrip(".").lower() not in formats:
            raise ConfigError(
                f"--plot is {plot_path}, its suffix must be one of {', '.join(sorted(formats))}"
            )


def _recipe(options: StandInOptions, caches: Sequence[bool], workload: Workload) -> dict[str, Any]:
    chosen = asdict(options) | {"kv_heads": options.heads, "head_dim": options.dim}
    chosen["trace"] = None if options.trace is None else str(options.trace)
    chosen["cache"] = [CACHE_NAMES[cache] for cache in caches]
    return {
        "command": "python -m benchmarks stand_in",
        "seed": options.seed,
        **machine(),
        "options": chosen,
        "kv_bytes_per_token": options.page_bytes // options.page_size,
        "workload": {
            "requests": workload.num_requests,
            "sessions": len(workload.sessions),
            "max_request_tokens": workload.max_request_tokens,
        },
        "switch_interval_s": SWITCH_INTERVAL_S,
        "definitions": _DEFINITIONS,
    }
