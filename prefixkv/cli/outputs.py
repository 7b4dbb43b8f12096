"""What commands print and write. Files are checked at the start, so that minutes of work are not
lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefixkv import PrefixKVError
from prefixkv.errors import ConfigError


class OutputError(PrefixKVError):
    """A file could not be written, for instance since the disk is full."""


def check_json(path: Path | None) -> None:
    """Check, without a change, that `--json` can be written. Raises ConfigError if it cannot,
    OutputError for a device that accepts nothing."""
    if path is None:
        return
    there = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"--json is {path}, which cannot be written")
    if path.is_char_device():
        with writing("--json", path), path.open("ab", buffering=0) as device:
            device.write(b"")


def write_json(path: Path | None, value: Any) -> None:
    """Write the value where a file is named."""
    if path is not None:
        with writing("--json", path):
            path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the body into an OutputError that names `flag` and `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{flag} is {path}: {error.strerror or error}") from error


def aligned(rows: Sequence[Sequence[str]], aligns: str) -> list[str]:
    """Return a line for each row, in columns: "<" to the left, ">" to the right; the last sign is
    that of all further columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = aligns.ljust(len(widths), aligns[-1])
    return [
        "  ".join(
            f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
