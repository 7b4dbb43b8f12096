"""Replay of one policy at one capacity, through the real `RadixCache`: each request is matched and
locked, room is made for the rest, and the rest is inserted.

Blocks of requests that run cannot be evicted, and count against the capacity: those of each request
until as many have come after it as run at a time. One that could not run in the pool at all is
refused, as a node refuses it: it finds nothing, and leaves nothing behind.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from prefixkv.cli.replay.tiers import HostResult, HostTier, Tier
from prefixkv.cli.replay.trace import Trace, TraceRequest
from prefixkv.spi import InsertResult, Policy, PrefixLock, make_policy

Each: TypeAlias = Callable[[int, int, Sequence[int]], None]
"""Called for each request: its number, the blocks that it finds, and those that each host tier has
behind them."""


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
    running: int = 1  # requests whose blocks count and cannot be evicted; 0: none, not even its own
    running_blocks: float = 0.0  # that running requests hold, on average
    too_long: int = 0  # counted requests that are refused, as they do not fit the capacity
    host: tuple[HostResult, ...] = ()  # by size


class Hits:
    """The first requests, a share of `warm`, warm the cache and do not count."""

    def __init__(
        self, trace: Trace, warm: float, each: Each | None, running: int,
        hosts: Sequence[HostTier] = (),
    ) -> None:  # fmt: skip
        self._trace, self._each, self._running, self._hosts = trace, each, running, hosts
        self._held_blocks = self._too_long = 0
        self._from = int(warm * len(trace.requests))
        self._hit_blocks = self._blocks = self._tokens = 0
        self._begin_s = time.perf_counter()

    def counts(self, at: int) -> bool:
        return at >= self._from

    def add(self, at: int, known: int, held: int = 0, behind: Sequence[int] = ()) -> None:
        """Count request number `at`: the device has `known` of its blocks, running requests hold
        `held`, its own included, and each host tier has `behind` behind those."""
        if self._each is not None:
            self._each(at, known, behind)
        if not self.counts(at):
            return
        request = self._trace.requests[at]
        self._hit_blocks += known
        self._blocks += len(request.key) // self._trace.page_size
        self._tokens += request.num_tokens
        self._held_blocks += held
        for host, blocks in zip(self._hosts, behind, strict=True):
            host.load(blocks)

    def refuse(self, at: int) -> None:
        """The request does not fit the pool."""
        self.add(at, 0, 0, (0,) * len(self._hosts))
        self._too_long += self.counts(at)

    def result(self, policy: str, capacity: int, evicted: int) -> ReplayResult:
        """The time per request counts since this object was made."""
        count = len(self._trace.requests)
        hit_tokens = self._hit_blocks * self._trace.block_tokens
        return ReplayResult(
            trace=self._trace.name,
            policy=policy,
            capacity_blocks=capacity,
            block_hit_ratio=self._hit_blocks / max(1, self._blocks),
            token_hit_ratio=hit_tokens / max(1, self._tokens),
            requests=count - self._from,
            evicted_pages=evicted,
            us_per_request=(time.perf_counter() - self._begin_s) / count * 1e6,
            hit_tokens=hit_tokens,
            prompt_tokens=self._tokens,
            running=self._running,
            running_blocks=self._held_blocks / max(1, count - self._from - self._too_long),
            too_long=self._too_long,
            host=tuple(host.result(self._hit_blocks, self._blocks) for host in self._hosts),
        )


class _Running(NamedTuple):
    at: int
    lock: PrefixLock
    inserted: InsertResult
    in_hosts: list[int]  # blocks of its prompt that each host tier had


def replay_policy(
    trace: Trace, policy: str | Policy, capacity: int, warm: float = 0.0, queue: int = 0,
    hints: Sequence[float | None] | None = None, each: Each | None = None, running: int = 1,
    hosts: Sequence[int] = (),
) -> ReplayResult:  # fmt: skip
    """Replay a trace with one policy at one capacity (blocks). The rest is as in `replay_curves`.

    Args:
        policy: a name, or an object, which serves one replay. Host tiers get others like it.
        each: called for each request with its number, the number of blocks that it finds, and for
            each host tier how many that has behind them.
        running: a request ends when as many have come after it, or sooner if the next would not
            fit.
        hosts: sizes of host tiers, blocks; each is replayed by itself behind the same device.
    """
    chosen = make_policy(policy)
    tiers = [HostTier(trace, deepcopy(chosen), size, running > 0) for size in hosts]
    device = Tier(trace, chosen, capacity, makes_room=running > 0)
    hits = Hits(trace, warm, each, running, tiers)
    replay = _Replay(trace, device, tiers, running, hints, hits)
    cache, requests = device.cache, trace.requests
    wants = deque(cache.want(cache.match_prefix(one.whole_key)) for one in requests[:queue])
    for at, request in enumerate(requests):
        if queue:
            # This request no longer waits, and the one `queue` places behind it begins to.
            cache.unwant(wants.popleft())
            if at + queue < len(requests):
                wants.append(cache.want(cache.match_prefix(requests[at + queue].whole_key)))
        replay.admit(at, request)
    replay.end_all()
    if cache.policy.error is not None:  # all since then was `lru`
        raise cache.policy.error
    return hits.result(cache.policy.name, capacity, cache.evicted_pages)


class _Replay:
    def __init__(
        self, trace: Trace, device: Tier, tiers: Sequence[HostTier], running: int,
        hints: Sequence[float | None] | None, hits: Hits,
    ) -> None:  # fmt: skip
        self._trace, self._device, self._tiers = trace, device, tiers
        self._most_running, self._hints, self._hits = running, hints, hits
        self._running: deque[_Running] = deque()

    def admit(self, at: int, request: TraceRequest) -> None:
        """End the requests that make way for this one, and admit it."""
        device, key, now_s = self._device, request.whole_key, request.time_s
        page_size, counted = self._trace.page_size, self._most_running > 0
        total = len(key) // page_size
        if counted and total > device.capacity:
            self._hits.refuse(at)
            return
        while self._running and len(self._running) >= self._most_running:
            self._end(now_s)
        # As a scheduler does: lock the prefix, take pages for the rest, insert. The lock keeps the
        # prefix from eviction until the whole path is in the tree, and then the path while it runs.
        lock = device.lock(key, now_s)
        known = lock.prefix_len // page_size
        # A pool waits until enough have ended; here they end at once.
        while (
            counted
            and self._running
            and device.cache.protected_pages + total - known > device.capacity
        ):
            self._end(now_s)
        inserted = device.store(key, lock, now_s)
        # A host tier that has more than the device loads what lies behind the device's part.
        in_hosts = [tier.begin(key, now_s) for tier in self._tiers]
        behind = [max(0, blocks - known) for blocks in in_hosts]
        self._hits.add(at, known, device.cache.protected_pages if counted else 0, behind)
        self._running.append(_Running(at, lock, inserted, in_hosts))
        if self._most_running <= 1:
            self._end(now_s)

    def end_all(self) -> None:
        while self._running:
            self._end(self._trace.requests[-1].time_s)

    def _end(self, now_s: float) -> None:
        """End the request that has run longest; hosts get what they lack."""
        one = self._running.popleft()
        cache, key = self._device.cache, self._trace.requests[one.at].whole_key
        cache.unlock(one.lock)
        if self._hints is not None:
            cache.hint(one.inserted, self._hints[one.at])
        # After the lock is released: where room was not made before, the request's own blocks may
        # go at once, as the optimum's may.
        self._device.trim(now_s)
        for tier, known in zip(self._tiers, one.in_hosts, strict=True):
            tier.end(key, known, now_s, self._hits.counts(one.at))
