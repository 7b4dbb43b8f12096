"""Reading traces: which kind a file is, Mooncake's traces, and lists of tokens.

A file is of one kind, which its first entry says:

    [..] or {"tokens": [..]}             a prompt's tokens, maybe with "timestamp" (ms)
    {"hash_ids": [..], ..}               Mooncake's; `DecodeConfig(record=)` writes these
    {"request_id": .., "hash_ids": ..}   Dynamo's agentic Mooncake, maybe behind a header (`agents.py`)
    {"requests": [..], "block_size": ..} an agent's session (`agents.py`); one a line, or the file is
                                         one, or all *.json of a folder are

Source: Mooncake's `FAST25-release/traces` (one id a block of 512 tokens, the last may be partial).
"""  # noqa: E501

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

from prefixkv.cli.replay.agents import Agentic, Sessions
from prefixkv.cli.replay.trace import Trace, TraceRequest
from prefixkv.cli.traces import blocks_in, number_in, read_lines
from prefixkv.spi import TOKEN_LIMIT, RadixKey, TraceError

SPREAD_S = 4 * 3600.0


def read_trace(
    path: Path,
    page_size: int = 16,
    block_tokens: int = 512,
    limit: int | None = None,
    spread_s: float = SPREAD_S,
) -> Trace:
    """The trace in a file, or in a folder of sessions; its requests are ordered by time.

    Args:
        page_size: tokens a page, for token lists.
        block_tokens: tokens a hash id stands for, where the file does not say.
        limit: read so many entries only.
        spread_s: over how long the starts of sessions are spread, which their files do not say.
    Raises:
        TraceError: names the file and the line.
    """
    reader = _Reader(page_size, block_tokens, spread_s)
    if path.is_dir():
        files = sorted(path.glob("*.json"))[:limit]
        if not files:
            raise TraceError(f"{path}: no *.json in it")
        for file in files:
            _read_whole(file, reader.add)
    elif path.suffix == ".json":
        _read_whole(path, reader.add)
    else:
        read_lines(path, limit, reader.add, place="{path}:{number}")
    try:
        return reader.trace(path.stem)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from None


def make_trace(name: str, entries: Iterable[dict[str, Any]], block_tokens: int = 512) -> Trace:
    """A trace of entries that are in memory. Raises TypeError or ValueError for a bad one."""
    reader = _Reader(1, block_tokens, SPREAD_S)
    for entry in entries:
        reader.add(entry)
    return reader.trace(name)


def _read_whole(path: Path, add: Callable[[Any], None]) -> None:
    """A file that is one JSON value, or as many as it has lines."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        read_lines(path, None, add, place="{path}:{number}")
        return
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    try:
        add(entry)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from None


class _Reader:
    """Takes a file's entries, one after the other. Raises TypeError for one that does not fit."""

    def __init__(self, page_size: int, block_tokens: int, spread_s: float) -> None:
        self._page_size, self._block_tokens = page_size, block_tokens
        self._names: dict[Any, int] = {}  # hash id: token; dense, whatever the trace's ids are
        self._requests: list[TraceRequest] = []
        self._kind = ""
        self._bytes_per_token = 0
        self._sessions = Sessions(spread_s)
        self._agentic = Agentic(block_tokens)

    def add(self, entry: Any) -> None:
        kind = _kind(entry)
        if self._kind == "":
            self._kind = kind
        elif kind != self._kind:
            raise TypeError(f"{kind} in a trace of {self._kind}")
        if kind == "tokens":
            self._add_tokens(entry if isinstance(entry, dict) else {"tokens": entry})
        elif kind == "hash ids":
            self._add_blocks(entry)
        elif kind == "sessions":
            self._sessions.add(entry)
        else:
            self._agentic.add(entry)

    def trace(self, name: str) -> Trace:
        if self._kind == "tokens":
            return Trace(name, self._requests, self._page_size, self._page_size).in_order()
        block_tokens = self._block_tokens
        if self._kind in ("sessions", "agentic requests"):
            source = self._sessions if self._kind == "sessions" else self._agentic
            block_tokens = source.block_tokens
            for time_s, blocks, num_tokens in source.requests():
                self._add(time_s, blocks, num_tokens, block_tokens)
        found = Trace(name, self._requests, 1, block_tokens, self._bytes_per_token)
        return found.in_order()

    def _add_tokens(self, entry: dict[str, Any]) -> None:
        key = RadixKey(entry["tokens"])
        key.check()
        self._requests.append(TraceRequest(self._time_s(entry), key, key, len(key)))

    def _add_blocks(self, entry: dict[str, Any]) -> None:
        length = number_in(entry, "input_length", 0, TOKEN_LIMIT - 1)
        if "block_size" in entry:
            size = number_in(entry, "block_size", 1, 1 << 20)
            if self._requests and size != self._block_tokens:
                raise TypeError(f"block_size is {size}, before it was {self._block_tokens}")
            self._block_tokens = size
        ids = blocks_in(entry, length, self._block_tokens)
        namespace = entry.get("namespace")
        if not isinstance(namespace, int | str | None):
            raise TypeError(f"namespace is {namespace!r}, a number or a string is needed")
        if "bytes_per_token" in entry:
            self._bytes_per_token = number_in(entry, "bytes_per_token", 1, 1 << 32)
        self._add(self._time_s(entry), ids, length, self._block_tokens, namespace)

    def _time_s(self, entry: dict[str, Any]) -> float:
        stamped = {"timestamp": len(self._requests) * 1000} | entry
        return number_in(stamped, "timestamp", 0, 10**15 - 1, (int, float)) / 1000  # type: ignore[no-any-return]

    def _add(
        self,
        time_s: float,
        ids: Iterable[Any],
        num_tokens: int,
        block_tokens: int,
        namespace: Hashable = None,
    ) -> None:
        names = self._names
        blocks = [names.setdefault(name, len(names)) for name in ids]
        key = RadixKey(blocks, namespace)
        whole_key = RadixKey(blocks[: num_tokens // block_tokens], namespace)
        self._requests.append(TraceRequest(time_s, key, whole_key, num_tokens))


def _kind(entry: Any) -> str:
    if isinstance(entry, list):
        return "tokens"
    if not isinstance(entry, dict):
        raise TypeError("neither an object nor a list of tokens")
    if "tokens" in entry:
        return "tokens"
    if "requests" in entry:
        return "sessions"
    if "request_id" in entry or "schema" in entry:
        return "agentic requests"
    return "hash ids"
