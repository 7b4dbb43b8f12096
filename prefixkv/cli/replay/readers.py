"""Readers of traces: files with one JSON value per line, of a kind that the first line decides.

    [..] or {"tokens": [..]}             a prompt's tokens, perhaps with "timestamp" (ms)
    {"hash_ids": [..], ..}               Mooncake's; `DecodeConfig(record=)` writes these

Source: Mooncake's `FAST25-release/traces`: one id per block of 512 tokens, the last may be partial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from prefixkv.cli.replay.trace import MOONCAKE, RECORD, TOKENS, Trace, TraceRequest
from prefixkv.errors import TokenError, TraceError
from prefixkv.spi import TOKEN_LIMIT, RadixKey


class _Prompt(msgspec.Struct, kw_only=True):
    timestamp: Annotated[float, Meta(ge=0, lt=10**15)] = -1  # ms


class _Tokens(_Prompt):
    tokens: Any


class _Blocks(_Prompt):
    input_length: Annotated[int, Meta(ge=0, lt=TOKEN_LIMIT)]
    hash_ids: list[int]
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 0
    bytes_per_token: Annotated[int, Meta(ge=1, le=1 << 32)] = 0
    namespace: int | str | None = None

    def blocks(self, size: int) -> list[int]:
        """Return one id per block of so many tokens. Raises TypeError for another number of ids."""
        ids, length = self.hash_ids, self.input_length
        if len(ids) == (blocks := -(-length // size)):
            return ids
        fits = ""
        if length and ids:
            # The size of blocks, a power of two, of which the prompt has this many.
            other = 1 << (-(-length // len(ids)) - 1).bit_length()
            fits = f"; of {other} it has {len(ids)}" if -(-length // other) == len(ids) else ""
        raise TypeError(
            f"{len(ids)} hash_ids, an input_length of {length} has {blocks} blocks of {size} "
            f"tokens{fits}"
        )


def read_trace(
    path: str | Path, block_tokens: int | None = None, limit: int | None = None
) -> Trace:
    """Read a trace, ordered by time. Raises TraceError, which names the file and the line.

    Args:
        block_tokens: tokens per block: of token lists, 16 by default; of hash ids in a file that
            does not say it, 512.
        limit: read only this many requests.
    """
    path, number = Path(path), 0

    def entries() -> Iterator[Any]:
        nonlocal number
        with path.open("rb") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield msgspec.json.decode(line)

    try:
        trace = make_trace(path.stem, islice(entries(), limit), block_tokens)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, TokenError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    if not trace.requests:
        raise TraceError(f"{path}: no request in it")
    return trace


def make_trace(name: str, entries: Iterable[Any], block_tokens: int | None = None) -> Trace:
    """Make a trace of what lines say. Raises TypeError, ValueError or TokenError for a bad entry.

    Args:
        block_tokens: as of `read_trace`.
    """
    requests: list[TraceRequest] = []
    names: dict[int, int] = {}  # by hash id: a token; dense, whatever the ids are
    kind, size, bytes_per_token = "", block_tokens, 0
    for at, entry in enumerate(entries):
        prompt = _prompt(entry)
        if isinstance(prompt, _Tokens):
            found, size = TOKENS, size or 16
            # Here a prompt has no partial block: `page_size` cuts it when it is matched.
            key = RadixKey(prompt.tokens)
            length, num_blocks = len(key), len(key) // size
        else:
            is_record = prompt.block_size and prompt.bytes_per_token and kind != MOONCAKE
            found = RECORD if is_record else MOONCAKE
            # The size may come with the file, in its first entry, but must not change within it.
            if requests and prompt.block_size not in (0, size):
                raise TypeError(f"block_size is {prompt.block_size}, before it was {size}")
            size = prompt.block_size or size or 512
            bytes_per_token = prompt.bytes_per_token or bytes_per_token
            length = prompt.input_length
            blocks = [names.setdefault(one, len(names)) for one in prompt.blocks(size)]
            num_blocks = len(blocks)
            # Without a partial last one, which no cache holds.
            key = RadixKey(blocks[: length // size], prompt.namespace)
        # A file of two kinds would have two units of block and time.
        if kind and (kind == TOKENS) != (found == TOKENS):
            raise TypeError(f"{found} in a trace of {kind}")
        kind = found
        # Without a time, requests are a second apart.
        time_s = at if prompt.timestamp < 0 else prompt.timestamp / 1000
        requests.append(TraceRequest(time_s, key, num_blocks, length))
    size = size or 512
    page_size = size if kind == TOKENS else 1
    return Trace(name, requests, page_size, size, bytes_per_token, kind or MOONCAKE).in_order()


def _prompt(entry: Any) -> _Tokens | _Blocks:
    if isinstance(entry, list):
        return _Tokens(tokens=entry)
    if not isinstance(entry, dict):
        raise TypeError("neither an object nor a list of tokens")
    # Read as Mooncake's, these would have other times, or shared blocks, than they say.
    if foreign := entry.keys() & {"requests", "schema", "wait_for", "dependencies"}:
        raise TypeError(f"{min(foreign)!r} is of agents' traces, which are not read")
    return msgspec.convert(entry, _Tokens) if "tokens" in entry else msgspec.convert(entry, _Blocks)
