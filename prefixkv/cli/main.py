"""The `prefixkv` command. Bad input is one line on stderr and exit status 2; heavy imports wait for
their command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from inspect import cleandoc, getdoc
from pathlib import Path
from typing import Annotated

import typer

from prefixkv import PrefixKVError
from prefixkv.cli.replay import replay
from prefixkv.cli.serve import add_commands, check_packages
from prefixkv.spi import CallerError, CapacityError, check_range

app = typer.Typer(
    name="prefixkv",
    help="Decode-side radix prefix cache for prefill/decode disaggregation over NIXL.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


class CacheSetting(StrEnum):
    on = "on"
    off = "off"
    both = "both"


app.command()(replay)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the chats.")] = 1,
    cache: Annotated[
        CacheSetting, typer.Option(help="Decode's prefix cache; prefill's own is always on.")
    ] = CacheSetting.both,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE",
            help="Chat over a link of this rate as well: 1Gbit (the default), 500Mbit; repeat it. "
            "none: only as fast as this machine is.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures to FILE.")
    ] = None,
) -> int:
    """Chat with a small model over two processes and NIXL, decode's prefix cache on and off.

    The model has random weights. Every answer is compared with that of transformers, and one
    conversation is shown turn by turn. A link is modelled by limiting prefill's transport to its
    rate.
    """
    check_range("--seed", seed, 0, 2**63 - 1)
    check_packages()
    from rich.console import Console

    from prefixkv.cli.chats.command import LINKS, run
    from prefixkv.cli.chats.rates import link_of

    rates = link or LINKS
    links = [] if "none" in rates else [link_of(rate) for rate in rates]
    caches = {
        CacheSetting.on: (True,),
        CacheSetting.off: (False,),
        CacheSetting.both: (True, False),
    }[cache]
    return run(seed, caches, links, Console(), json)


add_commands(app)


def run_command(arguments: Sequence[str]) -> int:
    """Run the `prefixkv` command line; returns the exit status and lets no exception of ours
    through."""
    return run_app(app, "prefixkv", arguments)


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run any Typer application like `prefixkv` itself; `program` begins each error message."""
    _join_lines(app)
    try:
        status = app(args=list(arguments), prog_name=program, standalone_mode=False)
    except (CallerError, CapacityError) as error:
        return _print_error(program, error, 2)
    except PrefixKVError as error:
        return _print_error(program, error, 1)
    except KeyboardInterrupt:
        return _print_error(program, "interrupted", 130)
    except Exception as error:
        # Typer's usage errors: their class has moved between its versions, their method has not.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _print_error(program, message(), 2)
    if status == 130:  # how Typer passes on a KeyboardInterrupt
        return _print_error(program, "interrupted", status)
    return status if isinstance(status, int) else 0


def _join_lines(app: typer.Typer) -> None:
    """Give every paragraph of the Typer commands' help one line: Typer keeps the docstring's
    breaks."""
    for command in app.registered_commands:
        paragraphs = cleandoc(command.help or getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(one.split()) for one in paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _join_lines(group.typer_instance)


def _print_error(program: str, message: object, status: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
