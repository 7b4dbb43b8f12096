"""A client that knows: at the end of each request it says whether the conversation comes back
within some minutes, as `finish(continues=)` takes it: with a prompt that begins with all whole
blocks of this one."""

from __future__ import annotations

from random import Random
from typing import Any

from prefixkv.cli.replay.trace import Trace, block_names


def client_hints(
    trace: Trace, minutes: float, wrong: float = 0.0, seed: int = 0
) -> list[bool | None]:
    """Return, for each request in order, whether the conversation comes back in time; None for one
    without a whole block. A share of `wrong`, drawn with the seed, says the opposite."""
    random = Random(seed)
    next_s: dict[Any, float] = {}  # by block: time of its next use
    hints: list[bool | None] = []
    # Backwards, so that the next use of every block is known when its request is reached.
    for request in reversed(trace.requests):
        names = block_names(request.whole_key, trace.page_size)
        hint = None
        if names:
            # The last block's name covers all blocks before it: one look-up tells of the whole
            # prompt.
            back_s = next_s.get(names[-1])
            hint = back_s is not None and back_s - request.time_s <= minutes * 60
            hint ^= random.random() < wrong
        hints.append(hint)
        next_s.update(dict.fromkeys(names, request.time_s))
    return hints[::-1]
