"""`python -m benchmarks claims`: the published claims about the transport, each measured again on
this machine.

    claim | measured | target | met

Every figure is a median of paired repetitions, sides turn about, between processes pinned apart,
over real NIXL.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import claim_async, claim_hops, claim_idle, claim_prepare, claim_staging, transfer
from benchmarks.pair import Claim
from prefixkv.cli.figures import machine
from prefixkv.errors import ConfigError

Measure = Callable[[bool], tuple[list[Claim], Any]]


class Name(StrEnum):
    goodput = "goodput"
    prepare = "prepare"
    asynchronous = "async"
    staging = "staging"
    full_hit = "full-hit"
    full_hit_parts = "full-hit-parts"
    idle = "idle"


def _goodput(quick: bool) -> tuple[list[Claim], Any]:
    rows = transfer.measure(quick, lambda row: None)
    return transfer.claims(rows), rows


MEASURES: Final[dict[Name, Measure]] = {
    Name.goodput: _goodput,
    Name.prepare: claim_prepare.measure,
    Name.asynchronous: claim_async.measure,
    Name.staging: claim_staging.measure,
    Name.full_hit: claim_idle.measure_hits,
    Name.full_hit_parts: claim_hops.measure,
    Name.idle: claim_idle.measure_idle,
}


def table_of(found: list[Claim]) -> Table:
    table = Table(title="python -m benchmarks claims")
    for name in ("claim", "case"):
        table.add_column(name)
    for name in ("measured", "target", "met"):
        table.add_column(name, justify="right")
    for claim in found:
        sign = "at least" if claim.at_least else "at most"
        target = "stated" if claim.target is None else f"{sign} {claim.target:g}"
        met = {True: "yes", False: "no", None: ""}[claim.met]
        table.add_row(claim.claim, claim.case, f"{claim.measured:g} {claim.unit}", target, met)
    return table


def claims(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")
    ] = None,
    only: Annotated[
        list[Name] | None, typer.Option(help="Measure this one; may be given again.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Tiny sizes: whether it works, not how fast it is.")
    ] = False,
) -> None:
    """What is claimed of the transport, measured between pinned processes."""
    console = Console()
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json is {json_file}, there is no such folder")
    names = list(dict.fromkeys(only or Name))
    recipe: dict[str, Any] = {
        "command": "python -m benchmarks claims"
        + "".join(f" --only {name}" for name in only or ())
        + " --quick" * quick,
        "statistic": "medians of the repetitions that others disturbed least; foreign_cores: what "
        "others used in them",
        "nice": os.nice(0),
        "ucx_tls": os.environ.get("UCX_TLS", "default"),
        **machine(),
    }
    found: list[Claim] = []
    measured: dict[str, Any] = {}
    for name in names:
        console.print(f"{name} ...", highlight=False)
        began_s = time.monotonic()
        of_this, details = MEASURES[name](quick)
        found += of_this
        measured[name] = {
            "took_s": round(time.monotonic() - began_s, 1),
            "load_average_after": [round(load, 2) for load in os.getloadavg()],
            "claims": [claim.as_json() for claim in of_this],
            "details": details,
        }
        if json_file is not None:  # also what there is of a run that is ended early
            json_file.write_text(
                json.dumps({"recipe": recipe, "measured": measured}, indent=1) + "\n",
                encoding="utf-8",
            )
    console.print(table_of(found))
