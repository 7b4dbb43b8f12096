"""Files that a command writes at its end: looked at before minutes go into what they will hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixkv import PrefixKVError
from prefixkv.spi import ConfigError


class OutputError(PrefixKVError):
    """A file could not be written: the disk is full, say."""


def check_writable(flag: str, path: Path | None) -> None:
    """Raises ConfigError for a path that names no file that can be written, OutputError for a
    device that takes nothing. Changes no file."""
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{flag} is {path}, which cannot be written")
    if path.is_char_device():
        with writing(flag, path), path.open("ab", buffering=0) as device:
            device.write(b"")


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Raises OutputError where the body could not write `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{flag} is {path}: {error.strerror or error}") from error


def write_text(flag: str, path: Path, text: str) -> None:
    """Raises OutputError."""
    with writing(flag, path):
        path.write_text(text, encoding="utf-8")
