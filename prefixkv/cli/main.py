"""The `prefixkv` command. Bad input is one line on stderr and exit status 2; heavy imports wait for
their command."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from benchmarks.stand_in.options import DemoOptions
from prefixkv.cli.replay import replay
from prefixkv.cli.serve import add_commands
from prefixkv.errors import CallerError, CapacityError, PrefixKVError

app = typer.Typer(
    name="prefixkv",
    help="Decode-side radix prefix cache for prefill/decode disaggregation over NIXL.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Cache(StrEnum):
    on = "on"
    off = "off"
    both = "both"


app.command()(replay)


def demo(
    cache: Cache = Cache.both,
    model: bool = True,
    json: Path | None = None,
    plot: Path | None = None,
    **chosen: Any,
) -> int:
    """Multi-turn workloads over real NIXL between two processes, with decode's prefix cache on and
    off.

    First chats with a small model of random weights: every answer is compared with transformers',
    and one conversation is shown turn by turn. Then a stand-in engine with real bytes: every KV
    byte is verified in a first pass; then the request rate that either side can sustain is
    measured, and the latencies at 0.7 of what it is without the cache.
    """
    options = DemoOptions(**chosen)
    from rich.console import Console

    from benchmarks.stand_in.command import run

    caches = {Cache.on: (True,), Cache.off: (False,), Cache.both: (True, False)}[cache]
    return run(options, caches, Console(), json_path=json, plot_path=plot, model=model)


def _parameters() -> Iterator[Parameter]:
    """What `demo` takes on the command line: every field of DemoOptions, and four of its own."""
    kinds = get_type_hints(DemoOptions)
    for option in fields(DemoOptions):
        more = {name: value for name, value in option.metadata.items() if name != "bounds"}
        yield _parameter(option.name, kinds[option.name], option.default, **more)
    about = "Decode's prefix cache; prefill's own is always on."
    yield _parameter("cache", Cache, Cache.both, help=about)
    about = "Begin with the chats; --seed and --cache are for them as well."
    yield _parameter("model", bool, True, help=about)
    file = {"kind": Path | None, "default": None, "metavar": "FILE"}
    yield _parameter("json", **file, help="Write all figures to FILE.")
    yield _parameter("plot", **file, help="Plot the TTFT distributions.")


def _parameter(name: str, kind: Any, default: Any, **more: Any) -> Parameter:
    shown = Annotated[kind, typer.Option(**more)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=shown)


demo.__signature__ = Signature([*_parameters()])  # type: ignore[attr-defined]
app.command()(demo)
add_commands(app)


def run_command(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status and lets no exception of ours through."""
    return run_app(app, "prefixkv", arguments)


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """The same for any Typer application; `program` begins each message."""
    try:
        status = app(args=list(arguments), prog_name=program, standalone_mode=False)
    except (CallerError, CapacityError) as error:
        return _say(program, error, 2)
    except PrefixKVError as error:
        return _say(program, error, 1)
    except KeyboardInterrupt:
        return _say(program, "interrupted", 130)
    except Exception as error:
        # Typer's usage errors: their class has moved between its versions, their method has not.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _say(program, message(), 2)
    if status == 130:  # how Typer passes on a KeyboardInterrupt
        return _say(program, "interrupted", status)
    return status if isinstance(status, int) else 0


def _say(program: str, message: object, status: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
