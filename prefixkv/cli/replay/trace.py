"""A trace in memory. A block of a Mooncake trace becomes a page of one token, its id.

The partial last block of a prompt is never inserted and never found, by no policy and not by the
optimum: no engine caches one. It still counts as a block that was requested, as in published
figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from random import Random
from typing import Any, Final

from prefixkv.spi import TOKEN_BYTES, RadixKey

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
