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
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixkv.cli.replay.tiers import HostResult, HostTier, Tier
from prefixkv.cli.replay.trace import Trace
from prefixkv.spi import InsertResult, Policy, PrefixLock, make_policy


class RequestHits(NamedTuple):
    """What one request of a trace found in one replay."""

    trace: str
    policy: str
    capacity_blocks: int
    request: int  # from 0, in the order of replay, which is that of time
    time_s: float
    blocks: int  # asked for, a partial one included
    tokens: int  # of the prompt
    hit_tokens: int
    counted: bool  # False: it only warms the cache, and counts in no ratio
    host_hit_tokens: dict[int, int]  # by size of host tier (blocks): what it has behind those


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


@dataclass(slots=True)
class Hits:
    """Adds up what the requests of a replay find. The first ones, a share of `warm`, warm the cache
    and do not count. The time per request counts since this object was made."""

    trace: Trace
    policy: str
    capacity: int
    warm: float
    running: int
    each: Callable[[RequestHits], object] | None
    hosts: Sequence[HostTier] = ()
    blocks: int = 0
    tokens: int = 0
    hit_blocks: int = 0
    held_blocks: int = 0
    too_long: int = 0
    begin_s: float = field(default_factory=time.perf_counter)

    def counts(self, at: int) -> bool:
        return at >= int(self.warm * len(self.trace.requests))

    def add(self, at: int, known: int, held: int, behind: Sequence[int] = ()) -> None:
        """Count request number `at`: the device has `known` of its blocks, running requests hold
        `held`, its own included, and each host tier has `behind` behind those."""
        trace, request = self.trace, self.trace.requests[at]
        counted = self.counts(at)
        if self.each is not None:
            size = trace.block_tokens
            in_hosts = zip(self.hosts, behind, strict=True)
            self.each(
                RequestHits(
                    trace.name, self.policy, self.capacity, at, request.time_s, request.blocks,
                    request.num_tokens, known * size, counted,
                    {host.capacity: found * size for host, found in in_hosts},
                )
            )  # fmt: skip
        if counted:
            self.hit_blocks += known
            self.blocks += request.blocks
            self.tokens += request.num_tokens
            self.held_blocks += held
            for host, found in zip(self.hosts, behind, strict=True):
                host.load(found)

    def refuse(self, at: int) -> None:
        """The request does not fit the pool."""
        self.add(at, 0, 0, (0,) * len(self.hosts))
        self.too_long += self.counts(at)

    def result(self, evicted: int) -> ReplayResult:
        count = len(self.trace.requests)
        counted = count - int(self.warm * count)
        hit_tokens = self.hit_blocks * self.trace.block_tokens
        return ReplayResult(
            trace=self.trace.name,
            policy=self.policy,
            capacity_blocks=self.capacity,
            block_hit_ratio=self.hit_blocks / max(1, self.blocks),
            token_hit_ratio=hit_tokens / max(1, self.tokens),
            requests=counted,
            evicted_pages=evicted,
            us_per_request=(time.perf_counter() - self.begin_s) * 1e6 / max(1, count),
            hit_tokens=hit_tokens,
            prompt_tokens=self.tokens,
            running=self.running,
            running_blocks=self.held_blocks / max(1, counted - self.too_long),
            too_long=self.too_long,
            host=tuple(host.result(self.hit_blocks, self.blocks) for host in self.hosts),
        )


class _Running(NamedTuple):
    at: int
    lock: PrefixLock
    inserted: InsertResult
    in_hosts: list[int]  # blocks of its prompt that each host tier had


def replay_policy(
    trace: Trace, policy: str | Policy, capacity: int, warm: float = 0.0,
    hints: Sequence[float | None] | None = None,
    each: Callable[[RequestHits], object] | None = None, running: int = 1,
    hosts: Sequence[int] = (), name: str = "",
) -> ReplayResult:  # fmt: skip
    """Replay a trace with one policy at one capacity (blocks). The rest is as in `replay_curves`.

    Args:
        policy: a name, or an object, which serves one replay. Host tiers get others like it.
        running: a request ends when as many have come after it, or sooner if the next would not
            fit.
        hosts: sizes of host tiers, blocks; each is replayed by itself behind the same device.
        name: of the policy in results; "": its own.
    """
    chosen = make_policy(policy)
    counted = running > 0
    tiers = [HostTier(trace, deepcopy(chosen), size, counted) for size in hosts]
    device = Tier(trace, chosen, capacity, makes_room=counted)
    hits = Hits(trace, name or chosen.name, capacity, warm, running, each, tiers)
    cache, requests, page_size = device.cache, trace.requests, trace.page_size
    runs: deque[_Running] = deque()

    def end(now_s: float) -> None:
        """End the request that has run longest; hosts get what they lack."""
        one = runs.popleft()
        cache.unlock(one.lock)
        if hints is not None:
            cache.hint(one.inserted, hints[one.at])
        # After the lock is released: where room was not made before, the request's own blocks may
        # go at once, as the optimum's may.
        device.trim(now_s)
        for tier, known in zip(tiers, one.in_hosts, strict=True):
            tier.end(requests[one.at].key, known, now_s, hits.counts(one.at))

    for at, request in enumerate(requests):
        key, now_s = request.key, request.time_s
        total = len(key) // page_size
        if counted and total > capacity:
            hits.refuse(at)
            continue
        while runs and len(runs) >= running:
            end(now_s)
        # As a scheduler does: lock the prefix, take pages for the rest, insert. The lock keeps the
        # prefix from eviction until the whole path is in the tree, and then the path while it runs.
        lock = device.lock(key, now_s)
        known = lock.prefix_len // page_size
        # A pool waits until enough have ended; here they end at once.
        while counted and runs and cache.protected_pages + total - known > capacity:
            end(now_s)
        inserted = device.store(key, lock, now_s)
        # A host tier that has more than the device loads what lies behind the device's part.
        in_hosts = [tier.begin(key, now_s) for tier in tiers]
        behind = [max(0, blocks - known) for blocks in in_hosts]
        hits.add(at, known, cache.protected_pages if counted else 0, behind)
        runs.append(_Running(at, lock, inserted, in_hosts))
        if running <= 1:
            end(now_s)
    while runs:
        end(requests[-1].time_s)
    if cache.policy.error is not None:  # all since then was `lru`
        raise cache.policy.error
    return hits.result(cache.evicted_pages)
