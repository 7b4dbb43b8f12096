"""What the benchmarks share that measure rows over traces: the traces, the processes, the file."""

from __future__ import annotations

import json
import multiprocessing
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from prefixkv.cli.replay import Trace, read_trace

TRACES: dict[str, Trace] = {}
"""By name, once they are read; the children of a fork have them."""

WARM = 0.5
"""The share of the requests that come first and are not counted."""

HITS = {
    "hits": "blocks found / all blocks of the counted requests, partial last ones included",
    "counted": f"the last {1 - WARM:.0%} of the requests",
}

Paths = Annotated[list[Path], typer.Argument(metavar="TRACES", help="As `prefixkv replay`.")]
Requests = Annotated[int | None, typer.Option(help="Read so many only.")]
Jobs = Annotated[int, typer.Option(help="Processes.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
]

J = TypeVar("J")
R = TypeVar("R")


def read_traces(paths: Sequence[Path], requests: int | None) -> None:
    """Read the traces, each up to so many requests, into `TRACES`."""
    TRACES.update((trace.name, trace) for trace in (read_trace(p, limit=requests) for p in paths))


def measured(measure: Callable[[J], R], todo: Iterable[J], jobs: int) -> list[R]:
    """Return the row of each of `todo`, in order, and print each as it comes. They are measured in
    so many processes."""
    rows = []
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for row in pool.imap(measure, list(todo)):
            rows.append(row)
            print(row, flush=True)
    return rows


def write_rows(
    json_file: Path | None,
    command: str,
    paths: Sequence[Path],
    requests: int | None,
    recipe: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write the rows and their recipe, where a file is named. `command` is what follows
    `python -m benchmarks`, with its options but for those that all such
    benchmarks share."""
    if json_file is None:
        return
    name, _, options = command.partition(" ")
    if requests is not None:
        options += f" --requests {requests}"
    words = [name, *(path.name for path in paths), *options.split(), "--json", json_file.name]
    told = {"command": f"python -m benchmarks {' '.join(words)}", **recipe}
    text = {"recipe": {**told, "python": platform.python_version()}, "rows": rows}
    json_file.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
