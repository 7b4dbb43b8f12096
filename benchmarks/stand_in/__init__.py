"""A stand-in for an inference engine: real bytes and real scheduling in two processes, no model.

Every KV byte is verified in a first pass. Then the request rate that either side can sustain is
measured, and the latencies at 0.7 of what it is without decode's prefix cache.

    python -m benchmarks stand_in --json benchmarks/results/stand_in.json
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from benchmarks.stand_in.options import StandInOptions


class Cache(StrEnum):
    on = "on"
    off = "off"
    both = "both"


def stand_in(
    cache: Cache = Cache.both, json: Path | None = None, plot: Path | None = None, **chosen: Any
) -> int:
    """Run chats or a trace against a stand-in engine, with decode's prefix cache on and off."""
    options = StandInOptions(**chosen)
    from rich.console import Console

    from benchmarks.stand_in.command import run

    caches = {Cache.on: (True,), Cache.off: (False,), Cache.both: (True, False)}[cache]
    return run(options, caches, Console(), json_path=json, plot_path=plot)


def _parameters() -> Iterator[Parameter]:
    """The command line of `stand_in`: every field of StandInOptions, and three of its own."""
    kinds = get_type_hints(StandInOptions)
    for option in fields(StandInOptions):
        more = {name: value for name, value in option.metadata.items() if name != "bounds"}
        yield _parameter(option.name, kinds[option.name], option.default, **more)
    about = "Decode's prefix cache; prefill's own is always on."
    yield _parameter("cache", Cache, Cache.both, help=about)
    file = {"kind": Path | None, "default": None, "metavar": "FILE"}
    yield _parameter("json", **file, help="Write all figures to FILE.")
    yield _parameter("plot", **file, help="Plot the TTFT distributions.")


def _parameter(name: str, kind: Any, default: Any, **more: Any) -> Parameter:
    shown = Annotated[kind, typer.Option(**more)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=shown)


stand_in.__signature__ = Signature([*_parameters()])  # type: ignore[attr-defined]
