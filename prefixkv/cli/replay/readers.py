"""Readers of traces: files with one JSON value per line, of a kind that the first line decides.

    [..] or {"tokens": [..]}             a prompt's tokens, perhaps with "timestamp" (ms)
    {"hash_ids": [..], ..}               Mooncake's; `DecodeConfig(record=)` writes these

Source: Mooncake's `FAST25-release/traces`: one id per block of 512 tokens, the last may be partial.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prefixkv.cli.replay.trace import MOONCAKE, RECORD, TOKENS, Trace, TraceRequest
from prefixkv.errors import TokenError, TraceError
from prefixkv.spi import TOKEN_LIMIT, RadixKey


def read_trace(
    path: str | Path, block_tokens: int | None = None, limit: int | None = None
) -> Trace:
    """Read a trace, ordered by time. Raises TraceError, which names the file and the line.

    Args:
        block_tokens: tokens per block: of token lists, 16 by default; of hash ids in a file that
            does not say it, 512.
        limit: read only this many requests.
    """
    path = Path(path)
    reader = _TraceReader(block_tokens)
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if limit is not None and reader.num_requests == limit:
                    break
                if line.strip():
                    reader.add(json.loads(line))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, after line {number}: {error}") from None
    except (ValueError, TypeError, TokenError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    if not reader.num_requests:
        raise TraceError(f"{path}: no request in it")
    return reader.trace(path.stem)


def make_trace(name: str, entries: Iterable[dict[str, Any]], block_tokens: int = 512) -> Trace:
    """Raises TypeError or ValueError for a bad entry."""
    reader = _TraceReader(block_tokens)
    for entry in entries:
        reader.add(entry)
    return reader.trace(name)


class _TraceReader:
    """Raises TypeError for an entry that does not fit."""

    def __init__(self, block_tokens: int | None) -> None:
        self._block_tokens = block_tokens
        self._names: dict[Any, int] = {}  # by hash id: a token; dense, whatever the ids are
        self._requests: list[TraceRequest] = []
        self._kind = ""
        self._bytes_per_token = 0
        self._recorded = True  # all entries have what a node's record says besides Mooncake's

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, entry: Any) -> None:
        kind = _kind(entry)
        # A file of two kinds would have two units of block and time.
        if self._kind not in ("", kind):
            raise TypeError(f"{kind} in a trace of {self._kind}")
        self._kind = kind
        if kind == "tokens":
            self._add_tokens(entry if isinstance(entry, dict) else {"tokens": entry})
        else:
            self._add_blocks(entry)

    def trace(self, name: str) -> Trace:
        if self._kind == "tokens":
            size = self._block_tokens or 16
            return Trace(name, self._requests, size, size, kind=TOKENS).in_order()
        kind = RECORD if self._recorded else MOONCAKE
        size = self._block_tokens or 512
        return Trace(name, self._requests, 1, size, self._bytes_per_token, kind).in_order()

    def _add_tokens(self, entry: dict[str, Any]) -> None:
        key = RadixKey(entry["tokens"])
        # Here a prompt has no partial block: `page_size` cuts it when it is matched.
        self._requests.append(TraceRequest(self._time_s(entry), key, key, len(key)))

    def _add_blocks(self, entry: dict[str, Any]) -> None:
        length = _number(entry, "input_length", 0, TOKEN_LIMIT - 1)
        if "block_size" in entry:
            size = _number(entry, "block_size", 1, 1 << 20)
            # The size may come with the file, in its first entry, but must not change within it.
            if self._requests and size != self._block_tokens:
                raise TypeError(f"block_size is {size}, before it was {self._block_tokens}")
            self._block_tokens = size
        size = self._block_tokens = self._block_tokens or 512
        namespace = entry.get("namespace")
        if not isinstance(namespace, int | str | None):
            raise TypeError(f"namespace is {namespace!r}, a number or a string is needed")
        if "bytes_per_token" in entry:
            self._bytes_per_token = _number(entry, "bytes_per_token", 1, 1 << 32)
        self._recorded &= entry.keys() >= {"block_size", "bytes_per_token"}
        names = self._names
        blocks = [names.setdefault(name, len(names)) for name in _hash_ids(entry, length, size)]
        key = RadixKey(blocks, namespace)
        # The same blocks without a partial last one, which no cache holds.
        whole_key = RadixKey(blocks[: length // size], namespace)
        self._requests.append(TraceRequest(self._time_s(entry), key, whole_key, length))

    def _time_s(self, entry: dict[str, Any]) -> float:
        """Without a time, requests are a second apart."""
        stamped = {"timestamp": len(self._requests) * 1000} | entry
        return _number(stamped, "timestamp", 0, 10**15 - 1, (int, float)) / 1000  # type: ignore[no-any-return]


def _kind(entry: Any) -> str:
    if isinstance(entry, list):
        return "tokens"
    if not isinstance(entry, dict):
        raise TypeError("neither an object nor a list of tokens")
    # Read as Mooncake's, these would have other times, or shared blocks, than they say.
    if foreign := entry.keys() & {"requests", "schema", "wait_for", "dependencies"}:
        raise TypeError(f"{min(foreign)!r} is of agents' traces, which are not read")
    return "tokens" if "tokens" in entry else "hash ids"


def _number(
    entry: dict[str, Any], name: str, low: int, high: int, kinds: tuple[type, ...] = (int,)
) -> Any:
    value: Any = entry.get(name)
    if type(value) not in kinds:
        raise TypeError(f"{name} is {value!r}, a number is needed")
    if not low <= value <= high:
        raise TypeError(f"{name} is {value!r}, must be in [{low}, {high}]")
    return value


def _hash_ids(entry: dict[str, Any], num_tokens: int, block_tokens: int) -> list[int]:
    """Return one id per block of the tokens."""
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(type(name) is int for name in ids):
        raise TypeError("hash_ids is not a list of integers")
    if len(ids) != (blocks := -(-num_tokens // block_tokens)):
        fits = ""
        if num_tokens and ids:
            # The size of blocks, a power of two, of which the prompt has this many.
            size = 1 << (-(-num_tokens // len(ids)) - 1).bit_length()
            if -(-num_tokens // size) == len(ids):
                fits = f"; of {size} it has {len(ids)}"
        raise TypeError(
            f"{len(ids)} hash_ids, an input_length of {num_tokens} has {blocks} blocks of "
            f"{block_tokens} tokens{fits}"
        )
    return ids
