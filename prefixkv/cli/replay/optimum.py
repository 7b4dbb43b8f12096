"""The hit rate that no policy exceeds: evict the furthest next use.

A block's next use is never later than that of the blocks after it, so the blocks kept are prefixes.
What running requests hold is equal under every policy and only makes the room smaller. With
`running` of 0, a new block is dropped at once if its next use is the furthest.

Source: Belady (1966), with bypass.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from prefixkv.cli.replay.run import Hits, ReplayResult, RequestHits
from prefixkv.cli.replay.trace import Trace

OPTIMUM = "optimum"


def replay_optimum(
    trace: Trace, capacity: int, warm: float = 0.0,
    each: Callable[[RequestHits], object] | None = None, running: int = 1,
    name: str = OPTIMUM,
) -> ReplayResult:  # fmt: skip
    """No cache of this capacity hits more often. O(blocks log blocks). See `replay_policy`."""
    hits = Hits(trace, name, capacity, warm, running, each)
    paths = [*trace.paths()]
    counted = running > 0
    never = len(paths)
    # Backwards: for each block of each request, the next request that has it, and is not refused.
    next_uses: list[list[int]] = [[] for _ in paths]
    seen: dict[Any, int] = {}
    for at in range(len(paths) - 1, -1, -1):
        next_uses[at] = [seen.get(name, never) for name in paths[at]]
        if not counted or len(paths[at]) <= capacity:
            for name in paths[at]:
                seen[name] = at
    kept: dict[Any, int] = {}  # by block: its next use
    # The heap is lazy: an entry counts only if it still has its block's next use, and no request
    # that runs holds the block. Of equal next uses the deepest block goes first, so that prefixes
    # are kept.
    furthest: list[tuple[int, int, Any]] = []  # (-next use, -depth, block), lazily
    runs: deque[int] = deque()
    holds: Counter[Any] = Counter()  # by block: requests that run and have it
    evicted = 0

    def end() -> None:
        for depth, name in enumerate(paths[runs.popleft()]):
            holds[name] -= 1
            if not holds[name]:
                del holds[name]
                # Its entry may be gone: `evict` drops those of blocks that are held.
                heapq.heappush(furthest, (-kept[name], -depth, name))

    def evict(most: int) -> None:
        nonlocal evicted
        while len(kept) > most:
            then, _, name = heapq.heappop(furthest)
            if kept.get(name) == -then and name not in holds:
                del kept[name]
                evicted += 1

    for at, path in enumerate(paths):
        if counted and len(path) > capacity:
            hits.refuse(at)
            continue
        # 1. As many run as may, and as fit together with this one.
        while runs and len(runs) >= running:
            end()
        while counted and runs and len(holds) + sum(name not in holds for name in path) > capacity:
            end()
        # 2. A hit is a prefix: it ends at the first block that is not kept.
        known = 0
        while known < len(path) and path[known] in kept:
            known += 1
        for depth, (name, then) in enumerate(zip(path, next_uses[at], strict=True)):
            kept[name] = then
            heapq.heappush(furthest, (-then, -depth, name))
        # 3. Room: what runs stays. If nothing counts, the request's own blocks may go at once: that
        #    is the bypass.
        if counted:
            runs.append(at)
            holds.update(path)
        evict(capacity)
        hits.add(at, known, len(holds))
        # One that runs alone has ended before the next comes.
        if running == 1:
            end()
    return hits.result(evicted)
