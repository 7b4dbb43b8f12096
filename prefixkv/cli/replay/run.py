"""One policy at one capacity, through the real `RadixCache`: each request is matched and locked,
room is made for the rest, and the rest is inserted. The policies are told how many tokens a block
stands for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixkv.cli.replay.trace import Trace
from prefixkv.spi import Policy, RadixCache, make_policy


@dataclass(frozen=True, slots=True)
class ReplayResult:
    trace: str
    policy: str
    capacity_blocks: int
    block_hit_ratio: float  # of all blocks asked for, partial ones included
    token_hit_ratio: float
    requests: int  # counted ones, after the warm-up
    evicted_pages: int
    us_per_request: float
    hit_tokens: int
    prompt_tokens: int


class Hits:
    """What a replay counts: from a share of the requests on, which warm the cache."""

    def __init__(self, trace: Trace, warm: float) -> None:
        self._trace = trace
        self._from = int(warm * len(trace.requests))
        self._hit_blocks = self._hit_tokens = self._blocks = self._tokens = 0
        self._begin_s = time.perf_counter()

    def add(self, at: int, known: int) -> None:
        """Request number `at` found so many blocks."""
        if at < self._from:
            return
        request, block_tokens = self._trace.requests[at], self._trace.block_tokens
        self._hit_blocks += known
        self._hit_tokens += known * block_tokens
        self._blocks += len(request.key) // self._trace.page_size
        self._tokens += request.num_tokens

    def result(self, policy: str, capacity: int, evicted: int) -> ReplayResult:
        count = len(self._trace.requests)
        return ReplayResult(
            trace=self._trace.name,
            policy=policy,
            capacity_blocks=capacity,
            block_hit_ratio=self._hit_blocks / max(1, self._blocks),
            token_hit_ratio=self._hit_tokens / max(1, self._tokens),
            requests=count - self._from,
            evicted_pages=evicted,
            us_per_request=(time.perf_counter() - self._begin_s) / count * 1e6,
            hit_tokens=self._hit_tokens,
            prompt_tokens=self._tokens,
        )


def replay_policy(
    trace: Trace,
    policy: str | Policy,
    capacity: int,
    warm: float = 0.0,
    queue: int = 0,
    progress: Callable[[int], None] | None = None,
    hints: Sequence[bool | None] | None = None,
    found: list[int] | None = None,
) -> ReplayResult:
    """One policy at one capacity (blocks). Cost: some ten microseconds a request.

    Args:
        policy: a name, or an object, which serves one replay.
        warm: count from this share of the requests on.
        queue: so many next requests count as waiting.
        hints: of each request, what its client says at its end (`finish(continues=)`).
        found: takes how many blocks each request finds.
    """
    chosen = make_policy(policy)
    chosen.token_scale = trace.token_scale
    cache = RadixCache(page_size=trace.page_size, policy=chosen)
    requests = trace.requests
    next_page = 0
    free: list[int] = []
    wants = deque(cache.want(cache.match_prefix(one.whole_key)) for one in requests[:queue])
    hits = Hits(trace, warm)
    for at, request in enumerate(requests):
        key = request.whole_key
        if queue:
            cache.unwant(wants.popleft())
            if at + queue < len(requests):
                wants.append(cache.want(cache.match_prefix(requests[at + queue].whole_key)))
        total = len(key) // trace.page_size
        with cache.lock(cache.match_prefix(key), request.time_s) as lock:
            known = lock.prefix_len // trace.page_size
            while len(free) < total - known:
                free.append(next_page)
                next_page += 1
            cut = len(free) - total + known
            pages = np.array([*lock.pages.tolist(), *free[cut:]], np.int32)
            inserted = cache.insert(key, pages, now_s=request.time_s)
            del free[cut:]
        if hints is not None:
            cache.hint(inserted, hints[at])
        # What a request computed may go at once, as the optimum's may.
        if cache.num_pages > capacity:
            free += cache.evict(cache.num_pages - capacity, request.time_s).tolist()
        hits.add(at, known)
        if found is not None:
            found.append(known)
        if progress is not None and at % 256 == 0:
            progress(at)
    return hits.result(chosen.name, capacity, cache.stats().evicted_pages)
