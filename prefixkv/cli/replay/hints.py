"""A client that knows: at the end of each request it says whether the conversation comes back
within some minutes, as `finish(continues=)` takes it.

A conversation comes back with a prompt that begins with all whole blocks of this one.
"""

from __future__ import annotations

from random import Random
from typing import Any

from prefixkv.cli.replay.trace import Trace, block_names


def client_hints(
    trace: Trace, minutes: float, wrong: float = 0.0, seed: int = 0
) -> list[bool | None]:
    """Of each request, in order, whether it comes back in time; None for one without a whole block.

    Args:
        wrong: this share of them, drawn with the seed, says the opposite.
    """
    random = Random(seed)
    next_s: dict[Any, float] = {}  # when a block is used next
    hints: list[bool | None] = []
    for request in reversed(trace.requests):
        names = block_names(request.whole_key, trace.page_size)
        hint = None
        if names:
            back_s = next_s.get(names[-1])
            hint = back_s is not None and back_s - request.time_s <= minutes * 60
            hint ^= random.random() < wrong
        hints.append(hint)
        next_s.update(dict.fromkeys(names, request.time_s))
    return hints[::-1]
