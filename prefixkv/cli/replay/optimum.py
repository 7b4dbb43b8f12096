"""The hit rate that no policy exceeds: evict the furthest next use, and drop a new block at once if
that is the furthest.

A block's next use is never later than that of the blocks after it. So the blocks kept are prefixes,
and dropping the block with the furthest next use is optimal, as for single pages.

Source: Belady (1966), with bypass.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from prefixkv.cli.replay.run import Hits, ReplayResult
from prefixkv.cli.replay.trace import Trace, block_names

OPTIMUM = "optimum"


def replay_optimum(
    trace: Trace,
    capacity: int,
    warm: float = 0.0,
    each: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Replay a trace with the optimum, which evicts the furthest next use: no cache of this
    capacity hits more often. O(blocks log blocks). Arguments are those of `replay_policy`."""
    hits = Hits(trace, warm, each)
    paths = [block_names(request.whole_key, trace.page_size) for request in trace.requests]
    never = len(paths)
    # Backwards: for each block of each request, the next request that has it.
    next_uses: list[list[int]] = [[] for _ in paths]
    seen: dict[Any, int] = {}
    for at in range(len(paths) - 1, -1, -1):
        next_uses[at] = [seen.get(name, never) for name in paths[at]]
        for name in paths[at]:
            seen[name] = at
    kept: dict[Any, int] = {}  # by block: its next use
    # The heap is lazy: an entry counts only if it still has its block's next use. Of equal next
    # uses the deepest block goes first, so that prefixes are kept.
    furthest: list[tuple[int, int, Any]] = []  # (-next use, -depth, block), lazily
    evicted = 0
    for at, path in enumerate(paths):
        # A hit is a prefix: it ends at the first block that is not kept.
        known = 0
        while known < len(path) and path[known] in kept:
            known += 1
        for depth, (name, then) in enumerate(zip(path, next_uses[at], strict=True)):
            kept[name] = then
            heapq.heappush(furthest, (-then, -depth, name))
        # The request's own blocks may go at once: that is the bypass.
        while len(kept) > capacity:
            then, _, name = heapq.heappop(furthest)
            if kept.get(name) == -then:
                del kept[name]
                evicted += 1
        hits.add(at, known)
    return hits.result(OPTIMUM, capacity, evicted)
