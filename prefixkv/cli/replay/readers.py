"""Readers of traces: the kinds of files, Mooncake's traces, and lists of tokens.

A file is of one kind, which its first entry decides:

    [..] or {"tokens": [..]}             a prompt's tokens, perhaps with "timestamp" (ms)
    {"hash_ids": [..], ..}               Mooncake's; `DecodeConfig(record=)` writes these

Source: Mooncake's `FAST25-release/traces`: one id per block of 512 tokens, the last may be partial.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from prefixkv.cli.replay.trace import MOONCAKE, RECORD, TOKENS, Trace, TraceRequest
from prefixkv.cli.traces import blocks_in, number_in, read_lines
from prefixkv.errors import TraceError
from prefixkv.spi import TOKEN_LIMIT, RadixKey


def read_trace(
    path: str | Path,
    page_size: int = 16,
    block_tokens: int = 512,
    limit: int | None = None,
) -> Trace:
    """Read a trace, ordered by time. Raises TraceError, which names the file and the line.

    Args:
        page_size: tokens per page, for token lists.
        block_tokens: tokens that a hash id stands for, if the file does not say.
        limit: read only this many entries.
    """
    path = Path(path)
    reader = _TraceReader(page_size, block_tokens)
    read_lines(path, limit, reader.add, place="{path}:{number}")
    # Errors of single entries carry their line; those found now concern the file as a whole.
    try:
        return reader.trace(path.stem)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: {error}") from None


def make_trace(name: str, entries: Iterable[dict[str, Any]], block_tokens: int = 512) -> Trace:
    """Raises TypeError or ValueError for a bad entry."""
    reader = _TraceReader(1, block_tokens)
    for entry in entries:
        reader.add(entry)
    return reader.trace(name)


class _TraceReader:
    """Raises TypeError for an entry that does not fit."""

    def __init__(self, page_size: int, block_tokens: int) -> None:
        self._page_size, self._block_tokens = page_size, block_tokens
        self._names: dict[Any, int] = {}  # by hash id: a token; dense, whatever the ids are
        self._requests: list[TraceRequest] = []
        self._kind = ""
        self._bytes_per_token = 0
        self._recorded = True  # all entries have what a node's record says besides Mooncake's

    def add(self, entry: Any) -> None:
        """The first entry decides the kind of all."""
        kind = _kind(entry)
        # A file of two kinds would have two units of block and time.
        if self._kind == "":
            self._kind = kind
        elif kind != self._kind:
            raise TypeError(f"{kind} in a trace of {self._kind}")
        if kind == "tokens":
            self._add_tokens(entry if isinstance(entry, dict) else {"tokens": entry})
        else:
            self._add_blocks(entry)

    def trace(self, name: str) -> Trace:
        if self._kind == "tokens":
            size = self._page_size
            return Trace(name, self._requests, size, size, kind=TOKENS).in_order()
        kind = RECORD if self._recorded else MOONCAKE
        found = Trace(name, self._requests, 1, self._block_tokens, self._bytes_per_token, kind)
        return found.in_order()

    def _add_tokens(self, entry: dict[str, Any]) -> None:
        key = RadixKey(entry["tokens"])
        # Here a prompt has no partial block: `page_size` cuts it when it is matched.
        key.check()
        self._requests.append(TraceRequest(self._time_s(entry), key, key, len(key)))

    def _add_blocks(self, entry: dict[str, Any]) -> None:
        length = number_in(entry, "input_length", 0, TOKEN_LIMIT - 1)
        if "block_size" in entry:
            size = number_in(entry, "block_size", 1, 1 << 20)
            # The size may come with the file, in its first entry, but must not change within it.
            if self._requests and size != self._block_tokens:
                raise TypeError(f"block_size is {size}, before it was {self._block_tokens}")
            self._block_tokens = size
        ids = blocks_in(entry, length, self._block_tokens)
        namespace = entry.get("namespace")
        if not isinstance(namespace, int | str | None):
            raise TypeError(f"namespace is {namespace!r}, a number or a string is needed")
        self._recorded &= entry.keys() >= {"block_size", "bytes_per_token"}
        if "bytes_per_token" in entry:
            self._bytes_per_token = number_in(entry, "bytes_per_token", 1, 1 << 32)
        self._add(self._time_s(entry), ids, length, self._block_tokens, namespace)

    def _time_s(self, entry: dict[str, Any]) -> float:
        """Without a time, requests are a second apart."""
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
        # The same blocks without a partial last one, which no cache holds.
        whole_key = RadixKey(blocks[: num_tokens // block_tokens], namespace)
        self._requests.append(TraceRequest(time_s, key, whole_key, num_tokens))


def _kind(entry: Any) -> str:
    """Raises TypeError for an entry of no kind."""
    if isinstance(entry, list):
        return "tokens"
    if not isinstance(entry, dict):
        raise TypeError("neither an object nor a list of tokens")
    # Read as Mooncake's, these would have other times, or shared blocks, than they say.
    if foreign := entry.keys() & {"requests", "schema", "wait_for", "dependencies"}:
        raise TypeError(f"{min(foreign)!r} is of agents' traces, which are not read")
    return "tokens" if "tokens" in entry else "hash ids"
