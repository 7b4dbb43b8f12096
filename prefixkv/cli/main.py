"""The `prefixkv` command. Bad input is one line on stderr and exit status 2; imports are late."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from inspect import cleandoc, getdoc
from pathlib import Path
from typing import Annotated, Final

import typer

from prefixkv import PrefixKVError, __version__
from prefixkv.cli.demo import LINKS, link_of
from prefixkv.cli.outputs import check_outputs, writing
from prefixkv.cli.replay.command import replay
from prefixkv.cli.serve import add_commands
from prefixkv.errors import CallerError, CapacityError, ConfigError, check_range
from prefixkv.serving import check_packages
from prefixkv.spi import PROTOCOL_VERSION, check_environ

app = typer.Typer(
    name="prefixkv",
    help="Decode-side radix prefix cache for prefill/decode disaggregation over NIXL.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help breaks lines where the table of Rich cuts names.
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)


_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_ASKS: Final = frozenset({"--help", "--help-all", "--version"})
"""Options that ask for a text alone, and get it whatever the environment has."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prefixkv {__version__} (wire protocol {PROTOCOL_VERSION})")
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    """Take the options that come before a command: `--version` shows the package's and the wire
    protocol's."""


app.command()(replay)


@app.command()
def keys(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names of the decode workers.", show_default="decode-0"),
    ] = None,
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the files go; it is made.")
    ] = Path("keys"),
) -> None:
    """Make CURVE keys: a file for prefill workers, and one for each decode worker.

    Each is a file of settings that only its owner can read. Files that are there are never
    replaced.
    """
    import zmq

    decode = names or ["decode-0"]
    for name in decode:
        if not _NAME.fullmatch(name) or name == "prefill" or decode.count(name) > 1:
            raise ConfigError(f"{name!r} cannot be the name of one decode worker")
    # Public, secret.
    pairs = {name: [key.decode() for key in zmq.curve_keypair()] for name in ("prefill", *decode)}
    # A key in z85 has neither a quote nor a backslash.
    texts = {
        name: f"[control.curve]\npublic_key = '{public}'\nsecret_key = '{secret}'\n"
        for name, (public, secret) in pairs.items()
    }
    texts["prefill"] += "[control.curve.allowed_clients]\n"
    for name in decode:
        texts["prefill"] += f"'{pairs[name][0]}' = '{name}'\n"
        texts[name] = f"name = '{name}'\n{texts[name]}server_key = '{pairs['prefill'][0]}'\n"
    paths = {name: folder / f"{name}.toml" for name in texts}
    for path in paths.values():
        if path.exists():
            raise ConfigError(f"{path} is there: its keys may be in use")
    with writing("--folder", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, path in paths.items():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(texts[name])
    typer.echo(f"prefixkv worker prefill --config {paths['prefill']}    # on each prefill worker")
    for name in decode:
        typer.echo(f"prefixkv worker decode --config {paths[name]}")
    typer.echo(
        "In each file: control.curve.public_key and control.curve.secret_key; of decode "
        "control.curve.server_key, of prefill control.curve.allowed_clients."
    )


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the chats.")] = 1,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE",
            help="Chat over a link of this rate as well: 1Gbit and 10Gbit (the default), 500Mbit; "
            "repeat it. none: only as fast as this machine is.",
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures to FILE.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw hit and sent tokens by turn; needs matplotlib."),
    ] = None,
) -> int:
    """Chat with a small model over two processes and NIXL, decode's prefix cache on and off.

    The model has random weights. Every answer is compared with that of transformers, and the turns
    are shown as they come. A link is modelled by limiting prefill's transport to its rate.
    """
    check_range("--seed", seed, 0, 2**63 - 1)
    check_outputs(json, plot)
    rates = link or LINKS
    links = [] if "none" in rates else [link_of(rate) for rate in rates]
    check_packages()
    from prefixkv.cli.demo.command import run

    return run(seed, links, json, plot)


add_commands(app)


def run_command(arguments: Sequence[str]) -> int:
    """Return the exit status; no exception of ours comes through."""
    return run_app(app, "prefixkv", arguments)


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run any Typer application like `prefixkv` itself; `program` begins each error message."""
    _list_whole(app)
    try:
        if not _ASKS.intersection(arguments):
            check_environ(os.environ)
        status = app(args=list(arguments), prog_name=program, standalone_mode=False)
    except PrefixKVError as error:
        status = 2 if isinstance(error, CallerError | CapacityError) else 1
        return _print_error(program, error, status)
    except KeyboardInterrupt:
        return _print_error(program, "interrupted", 130)
    except OSError as error:
        try:
            print(flush=True)  # stdout that takes nothing fails again, and in the same way
        except OSError as again:
            if again.errno == error.errno:
                sys.stdout = None  # Python flushes it again at its end
                return _print_error(program, f"stdout: {error.strerror}", 1)
        raise
    except Exception as error:
        # Typer's usage errors: their class has moved between its versions, their method has not.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _print_error(program, message(), 2)
    if status == 130:  # how Typer passes on a KeyboardInterrupt
        return _print_error(program, "interrupted", status)
    return status if isinstance(status, int) else 0


def _list_whole(app: typer.Typer) -> None:
    """Show the whole first paragraph of every command in the list of commands, which Click cuts."""
    for command in app.registered_commands:
        about = cleandoc(command.help or getdoc(command.callback) or "")
        command.short_help = " ".join(about.partition("\n\n")[0].split())
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _list_whole(group.typer_instance)


def _print_error(program: str, message: object, status: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status


def main() -> None:
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
