"""A trace in memory. A block of a Mooncake trace becomes a page of one token, its id.

The partial last block of a prompt is never inserted and never found, by no policy and not by the
optimum: no engine caches one. It still counts as a block that was requested, as in published
figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from prefixkv.errors import ConfigError
from prefixkv.spi import TOKEN_BYTES, RadixKey

MOONCAKE: Final = "Mooncake's trace"
RECORD: Final = "a decode node's record"
TOKENS: Final = "token lists"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request: its blocks as one token each, or its tokens."""

    time_s: float
    key: RadixKey
    whole_key: RadixKey  # without the partial block
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

    def in_order(self) -> Trace:
        """Requests of equal time keep their order."""
        ordered = self.requests
        # Traces are mostly in order already: looking is cheaper than sorting.
        back = sum(later.time_s < earlier.time_s for earlier, later in pairwise(ordered))
        if back:
            ordered = sorted(ordered, key=lambda request: request.time_s)
        return replace(self, requests=ordered, out_of_order=back)


def block_names(key: RadixKey, page_size: int) -> list[Any]:
    """Return a name for each whole block together with all blocks before it."""
    names = []
    above = hash(key.namespace)
    size = TOKEN_BYTES * page_size
    for at in range(len(key) // page_size):
        # Chained, so that equal blocks behind different prefixes have different names.
        above = hash((above, key.data[at * size : (at + 1) * size]))
        names.append(above)
    return names


def footprint(trace: Trace) -> int:
    """A cache of this many blocks never evicts."""
    # By name, not by id: a block counts once per prefix that it follows.
    seen: set[Any] = set()
    for request in trace.requests:
        seen.update(block_names(request.whole_key, trace.page_size))
    return len(seen)


def mix(traces: Sequence[Trace]) -> Trace:
    """Merge traces by time, each in a namespace of its own, so that they share nothing. Raises
    ConfigError for blocks of different sizes."""
    sizes = {(trace.page_size, trace.block_tokens) for trace in traces}
    if len(sizes) > 1:
        each = ", ".join(f"{trace.name} of {trace.block_tokens}" for trace in traces)
        raise ConfigError(f"--mix: the traces have blocks of different sizes: {each} tokens")

    # The number of the trace goes into the namespace, beside the one that the trace has itself.
    def apart(key: RadixKey, number: int) -> RadixKey:
        return RadixKey(np.frombuffer(key.data, "<i4"), (number, key.namespace))

    requests = [
        replace(request, key=apart(request.key, number), whole_key=apart(request.whole_key, number))
        for number, trace in enumerate(traces)
        for request in trace.requests
    ]
    names = "+".join(trace.name for trace in traces)
    kind = " and ".join(dict.fromkeys(trace.kind for trace in traces))
    out_of_order = sum(trace.out_of_order for trace in traces)
    found = replace(traces[0], name=names, requests=requests, kind=kind).in_order()
    # One after the other in memory, they are out of order in no file.
    return replace(found, out_of_order=out_of_order)
