"""Rows on the terminal, and rows with their recipe in a file: what every benchmark does with its
figures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixkv.cli.demo.report import machine
from prefixkv.cli.outputs import check_outputs as check_outputs
from prefixkv.cli.outputs import write_json

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
]


Quick = Annotated[bool, typer.Option(help="Tiny sizes: whether it works, not how fast it is.")]


def tell(row: Mapping[str, Any]) -> None:
    print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def told(rows: Iterable[Row]) -> list[Row]:
    """All rows, each told of as soon as it is there."""
    found = []
    for row in rows:
        found.append(row)
        tell(row)
    return found


def write(
    json_file: Path | None, command: str, rows: Sequence[Mapping[str, Any]], **recipe: Any
) -> None:
    """Write the rows with their recipe, where a file is named. `command` is what follows
    `python -m benchmarks`."""
    told = {
        "command": f"python -m benchmarks {command}", **recipe, **machine(),
        "load_average_after": list(os.getloadavg()), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    write_json(json_file, {"recipe": told, "rows": rows})
