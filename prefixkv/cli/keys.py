"""`prefixkv keys`: CURVE keys of the control plane, a file of settings for each worker."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from prefixkv.cli.outputs import writing
from prefixkv.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


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
    pairs = {
        name: [key.decode() for key in zmq.curve_keypair()] for name in ("prefill", *decode)
    }  # public, secret
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
