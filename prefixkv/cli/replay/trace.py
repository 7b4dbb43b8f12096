"""A trace in memory, and the files that it is read from. A block of a Mooncake trace becomes a page
of one token, its id.

The partial last block of a prompt is never inserted and never found, by no policy and not by the
optimum: no engine caches one. It still counts as a block that was requested, as in published
figures.

Files have one JSON value per line, of a kind that the first line decides.

    [..] or {"tokens": [..]}             a prompt's tokens, perhaps with "timestamp" (ms)
    {"hash_ids": [..], ..}               Mooncake's; `DecodeConfig(record=)` writes these

Source: Mooncake's `FAST25-release/traces`: one id per block of 512 tokens, the last may be partial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from math import inf
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from prefixkv.errors import TokenError, TraceError
from prefixkv.spi import TOKEN_BYTES, TOKEN_LIMIT, RadixKey

MOONCAKE: Final = "Mooncake's trace"
RECORD: Final = "a decode node's record"
TOKENS: Final = "token lists"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request: its blocks as one token each, or its tokens."""

    time_s: float
    key: RadixKey  # of its whole blocks
    blocks: int  # that it asks for, the partial one included
    num_tokens: int  # of the prompt, the partial block included


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: list[TraceRequest]
    page_size: int  # tokens of a key per page
    block_tokens: int  # prompt tokens per page
    bytes_per_token: int = 0  # of KV; 0: the trace does not say
    kind: str = ""  # of the file, in words
    out_of_order: int = 0  # requests earlier than the one before them in the file

    @property
    def token_scale(self) -> int:
        """Number of prompt tokens that one token of a key stands for."""
        return self.block_tokens // self.page_size

    def paths(self) -> Iterator[list[Any]]:
        """Yield names of each request's whole blocks (`block_names`)."""
        return (block_names(request.key, self.page_size) for request in self.requests)

    def in_order(self) -> Trace:
        """Requests of equal time keep their order."""
        ordered = self.requests
        # Traces are mostly in order already: looking is cheaper than sorting.
        back = sum(later.time_s < earlier.time_s for earlier, later in pairwise(ordered))
        if back:
            ordered = sorted(ordered, key=lambda request: request.time_s)
        return replace(self, requests=ordered, out_of_order=back)


def whole_blocks(key: RadixKey, page_size: int) -> list[bytes]:
    """Return the whole blocks, without what stands before them."""
    size, data = TOKEN_BYTES * page_size, key.data
    return [data[at : at + size] for at in range(0, len(data) - size + 1, size)]


def block_names(key: RadixKey, page_size: int) -> list[Any]:
    """Return a name for each whole block together with all blocks before it."""
    return chained(whole_blocks(key, page_size), key.namespace)


def chained(blocks: list[bytes], namespace: Any = None) -> list[int]:
    """Return names of blocks, such that equal blocks behind different ones have different names."""
    start = hash(namespace)
    return [*accumulate(blocks, lambda above, block: hash((above, block)), initial=start)][1:]


def footprint(trace: Trace) -> int:
    """A cache of this many blocks never evicts."""
    # By name, not by id: a block counts once per prefix that it follows.
    return len(set[Any]().union(*trace.paths()))


PAUSES_S: Final = (30.0, 120.0, 600.0)
"""What a client that knows can tell apart: its next turn comes within these seconds."""


def client_hints(
    trace: Trace, minutes: float, wrong: float = 0.0, seed: int = 0
) -> list[float | None]:
    """Return what a client that knows says at the end of each request (`finish(continues=)`):
    within which of `PAUSES_S`, at most these minutes, a prompt comes that begins with all whole
    blocks of this one, or all but the last; 0 for none; None for a request without a whole block. A
    share of `wrong`, drawn with the seed, says something else."""
    random = Random(seed)
    pauses = sorted({0.0, *(one for one in PAUSES_S if one < minutes * 60), minutes * 60})
    next_s: dict[Any, float] = {}  # by block: time of its next use
    hints: list[float | None] = []
    # Backwards, so that the next use of every block is known when its request is reached.
    for request in reversed(trace.requests):
        names = block_names(request.key, trace.page_size)
        hint = None
        if names:
            # A block's name covers all blocks before it. The last may be cut elsewhere next time.
            back_s = min(next_s.get(name, inf) for name in names[-2:]) - request.time_s
            hint = next((pause for pause in pauses[1:] if back_s <= pause), 0.0)
            if random.random() < wrong and minutes:
                hint = random.choice([pause for pause in pauses if pause != hint])
        hints.append(hint)
        next_s.update(dict.fromkeys(names, request.time_s))
    return hints[::-1]


# --- files ---------------------------------------------------------------------------------------


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
