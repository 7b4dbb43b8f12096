"""Replay of one policy at one capacity, through the real `RadixCache`: each request is matched and
locked, room is made for the rest, and the rest is inserted. Policies know how many tokens a block
stands for (`token_scale`)."""

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
    """Hit rates and costs of one replay."""

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
    """Counts of a replay. The first requests, a share of `warm`, warm the cache and do not
    count."""

    def __init__(
        self, trace: Trace, warm: float, each: Callable[[int, int], None] | None = None
    ) -> None:
        self._trace, self._each = trace, each
        self._from = int(warm * len(trace.requests))
        self._hit_blocks = self._hit_tokens = self._blocks = self._tokens = 0
        self._begin_s = time.perf_counter()

    def add(self, at: int, known: int) -> None:
        """Count the hits of a replay's request number `at`: of its blocks, `known` were cached."""
        if self._each is not None:
            self._each(at, known)
        if at < self._from:
            return
        request, block_tokens = self._trace.requests[at], self._trace.block_tokens
        self._hit_blocks += known
        self._hit_tokens += known * block_tokens
        self._blocks += len(request.key) // self._trace.page_size
        self._tokens += request.num_tokens

    def result(self, policy: str, capacity: int, evicted: int) -> ReplayResult:
        """Return the replay's hit rates and costs, with the time per request since this object was
        made."""
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
    each: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Replay a trace with one eviction policy at one capacity (blocks), through a real
    `RadixCache`. Costs some ten microseconds per request.

    Args:
        policy: a name, or an object, which serves one replay.
        warm: share of the requests that only warm the cache.
        queue: how many following requests count as waiting.
        hints: per request, what its client says at its end (`finish(continues=)`).
        each: called for each request with its number and the number of blocks that it finds.
    """
    chosen = make_policy(policy)
    chosen.token_scale = trace.token_scale
    cache = RadixCache(page_size=trace.page_size, policy=chosen)
    requests = trace.requests
    # Page ids: `free` first, then new ones. More than `capacity` are in use for a moment, between
    # an insertion and its eviction.
    next_page = 0
    free: list[int] = []
    wants = deque(cache.want(cache.match_prefix(one.whole_key)) for one in requests[:queue])
    hits = Hits(trace, warm, each)
    for at, request in enumerate(requests):
        key = request.whole_key
        if queue:
            # The request itself no longer waits, and the one `queue` places behind it begins to.
            cache.unwant(wants.popleft())
            if at + queue < len(requests):
                wants.append(cache.want(cache.match_prefix(requests[at + queue].whole_key)))
        total = len(key) // trace.page_size
        # As a scheduler does: lock the prefix, take pages for the rest, insert. The lock keeps the
        # prefix from eviction until the whole path is in the tree.
        with cache.lock(cache.match_prefix(key), request.time_s) as lock:
            known = lock.prefix_len // trace.page_size
            while len(free) < total - known:
                free.append(next_page)
                next_page += 1
            # The pages used come off the end of `free` only once they are inserted.
            cut = len(free) - total + known
            pages = np.array([*lock.pages.tolist(), *free[cut:]], np.int32)
            inserted = cache.insert(key, pages, now_s=request.time_s)
            del free[cut:]
        if hints is not None:
            cache.hint(inserted, hints[at])
        # After the lock is released: the request's own blocks may go at once, as the optimum's may.
        if cache.num_pages > capacity:
            free += cache.evict(cache.num_pages - capacity, request.time_s).tolist()
        hits.add(at, known)
        if progress is not None and at % 256 == 0:
            progress(at)
    return hits.result(chosen.name, capacity, cache.stats().evicted_pages)
