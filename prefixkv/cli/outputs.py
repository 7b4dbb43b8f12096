"""Output files of a command: checked at its start, so that minutes of work are not lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixkv import PrefixKVError
from prefixkv.errors import ConfigError


class OutputError(PrefixKVError):
    """A file could not be written, for instance since the disk is full."""


def check_writable(flag: str, path: Path | None) -> None:
    """Check that a file can be written, without a change. Raises ConfigError if it cannot,
    OutputError for a device that accepts nothing."""
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{flag} is {path}, which cannot be written")
    if path.is_char_device():
        with writing(flag, path), path.open("ab", buffering=0) as device:
            device.write(b"")


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the body into an OutputError that names `flag` and `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{flag} is {path}: {error.strerror or error}") from error


def write_text(flag: str, path: Path, text: str) -> None:
    with writing(flag, path):
        path.write_text(text, encoding="utf-8")


def check_plot(path: Path | None) -> None:
    """Raise ConfigError if a plot is requested and matplotlib is missing."""
    if path is not None:
        try:
            import matplotlib  # noqa: F401, ICN001
        except ImportError as error:
            raise ConfigError("--plot needs matplotlib: pip install 'prefixkv[plot]'") from error
