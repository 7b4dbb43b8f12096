"""Traces: files with one JSON value per line. Errors name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prefixkv.errors import TokenError, TraceError

T = TypeVar("T")


def read_lines(
    path: Path,
    limit: int | None,
    parse: Callable[[Any], T],
    place: str = "{path}, line {number}",
) -> list[T]:
    """Return what `parse` makes of each line, of `limit` lines at most, without blank ones. Raises
    TraceError, with the place of a line that is no JSON, or that `parse` refuses by a ValueError,
    TypeError or TokenError."""
    found: list[T] = []
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if limit is not None and len(found) == limit:
                    break
                if line.strip():
                    found.append(parse(json.loads(line)))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, after line {number}: {error}") from None
    except (ValueError, TypeError, TokenError, RecursionError) as error:
        raise TraceError(f"{place.format(path=path, number=number)}: {error}") from None
    if not found:
        raise TraceError(f"{path}: no request in it")
    return found


def number_in(
    entry: dict[str, Any], name: str, low: int, high: int, kinds: tuple[type, ...] = (int,)
) -> Any:
    """Raises TypeError if there is no number of these kinds in [low, high]."""
    value: Any = entry.get(name)
    if type(value) not in kinds:
        raise TypeError(f"{name} is {value!r}, a number is needed")
    if not low <= value <= high:
        raise TypeError(f"{name} is {value!r}, must be in [{low}, {high}]")
    return value


def blocks_in(entry: dict[str, Any], num_tokens: int, block_tokens: int) -> list[int]:
    """Return the `hash_ids`, one per block of the tokens. Raises TypeError if they do not fit."""
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(type(name) is int for name in ids):
        raise TypeError("hash_ids is not a list of integers")
    if len(ids) != (blocks := -(-num_tokens // block_tokens)):
        raise TypeError(
            f"{len(ids)} hash_ids, an input_length of {num_tokens} has {blocks} blocks of "
            f"{block_tokens} tokens{_fitting(num_tokens, len(ids))}"
        )
    return ids


def _fitting(num_tokens: int, num_blocks: int) -> str:
    """Name the size of blocks, a power of two, of which a prompt has this many."""
    if num_tokens and num_blocks:
        size = 1 << (-(-num_tokens // num_blocks) - 1).bit_length()
        if -(-num_tokens // size) == num_blocks:
            return f"; of {size} it has {num_blocks}"
    return ""
