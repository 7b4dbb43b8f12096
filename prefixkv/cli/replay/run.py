"""Replay of one policy at one capacity, through the real `RadixCache`: each request is matched and
locked, room is made for the rest, and the rest is inserted.

Blocks of requests that run cannot be evicted, and count against the capacity: those of each request
until as many have come after it as run at a time. One that could not run in the pool at all is
refused, as a node refuses it: it finds nothing, and leaves nothing behind.

A host tier lies behind the device's and is inclusive: a request finds what the device has of its
prompt, loads what the host has behind that, and when it ends what the host lacks is written there.
So what the device keeps is the same with any host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from prefixkv.cli.replay.trace import Trace
from prefixkv.errors import ConfigError, check_range
from prefixkv.settings import parse_size
from prefixkv.spi import InsertResult, Policy, PrefixLock, RadixCache, RadixKey, make_policy

_MOST_BLOCKS: Final = 10**9


def host_blocks(size: str | int, capacity: int, block_bytes: int) -> int:
    """Return the size of a host tier in whole blocks, rounded down: "4x" (of the capacity),
    "64GiB", or blocks. `block_bytes` of 0: not known. Raises ConfigError.

    >>> host_blocks("4x", 1000, 0), host_blocks("1.5GiB", 1000, 1 << 20)
    (4000, 1536)
    """
    name = f"a host tier of {size}"
    parsed = None if isinstance(size, bool) else parse_size(str(size))
    if parsed is None or not (parsed[1] or parsed[0].is_integer()):
        raise ConfigError(f"{name}: a size is 4x (times the capacity), 64GiB, or whole blocks")
    number, unit = parsed
    if unit == "bytes" and not block_bytes:
        raise ConfigError(
            f"{name}: the trace does not say what the KV of a token takes, --bytes-per-token does"
        )
    scaled = {"x": number * capacity, "bytes": number / max(1, block_bytes)}
    found = int(scaled.get(unit, number))
    if unit == "bytes" and number and not found:
        raise ConfigError(f"{name} has no room for a block of {block_bytes:,} bytes")
    check_range(name, found, 0, _MOST_BLOCKS)
    return found


@dataclass(frozen=True, slots=True)
class HostResult:
    host_blocks: int  # its size
    block_hit_ratio: float  # of all blocks asked for: found by the device or here
    host_hit_ratio: float  # of all blocks asked for: found here alone
    hit_tokens: int  # found here alone
    loads: int  # requests that loaded something
    loaded_blocks: int
    written_blocks: int
    loaded_bytes: int  # 0 where the KV of a token is not known
    written_bytes: int


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


class Tier:
    """A tree of at most `capacity` blocks, with a policy of its own; of a host tier with counts of
    what is copied. With `makes_room` room is made before blocks are inserted, so they never take
    more than the capacity; else what is over goes afterwards, the blocks just inserted included
    (`trim`)."""

    def __init__(self, trace: Trace, policy: Policy, capacity: int, makes_room: bool) -> None:
        policy.token_scale = trace.token_scale
        self.cache = RadixCache(page_size=trace.page_size, policy=policy)
        self.capacity, self._makes_room = capacity, makes_room
        self.loads = self.loaded_blocks = self.written_blocks = 0
        self._next_page = 0  # its id; no id is used twice

    def lock(self, key: RadixKey, now_s: float, visit: bool | None = None) -> PrefixLock:
        return self.cache.lock(self.cache.match_prefix(key), now_s, visit=visit)

    def store(
        self, key: RadixKey, lock: PrefixLock, now_s: float, visit: bool | None = None
    ) -> InsertResult:
        """Insert all of a prompt, of which `lock` holds what is there, and then all of it."""
        missing = (len(key) - lock.prefix_len) // self.cache.page_size
        if self._makes_room:
            self.trim(now_s, missing)
        pages = np.arange(self._next_page, self._next_page + missing, dtype=np.int32)
        self._next_page += missing
        return self.cache.insert(key, pages, now_s=now_s, visit=visit, lock=lock, extend_lock=True)

    def trim(self, now_s: float, more: int = 0) -> None:
        """Evict what is over the capacity, or would be with `more` blocks."""
        over = self.cache.num_pages + more - self.capacity
        if over > 0:
            self.cache.evict(over, now_s)

    def begin(self, key: RadixKey, now_s: float) -> int:
        """Return the number of blocks here of a prompt. Counts as its use."""
        with self.lock(key, now_s) as lock:
            return lock.prefix_len // self.cache.page_size

    def end(self, key: RadixKey, known: int, now_s: float, counted: bool) -> None:
        """Write what is lacking of a prompt that ends, of which `begin` had `known` blocks; of one
        that is too large, the beginning, where room is made before."""
        if not self.capacity:
            return
        # The request was seen when it began, unless nothing of it was there to be used.
        with self.lock(key, now_s, visit=False) as lock:
            size = self.cache.page_size
            path = key.prefix(self.capacity * size) if self._makes_room else key
            new = (len(path) - lock.prefix_len) // size
            self.store(path, lock, now_s, visit=not known)
        self.trim(now_s)
        self.written_blocks += new * counted


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
    hosts: Sequence[Tier] = ()
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
                host.loads += found > 0
                host.loaded_blocks += found

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
            host=tuple(map(self._host_result, self.hosts)),
        )

    def _host_result(self, tier: Tier) -> HostResult:
        block_bytes = self.trace.block_tokens * self.trace.bytes_per_token
        return HostResult(
            host_blocks=tier.capacity,
            block_hit_ratio=(self.hit_blocks + tier.loaded_blocks) / max(1, self.blocks),
            host_hit_ratio=tier.loaded_blocks / max(1, self.blocks),
            hit_tokens=tier.loaded_blocks * self.trace.block_tokens,
            loads=tier.loads,
            loaded_blocks=tier.loaded_blocks,
            written_blocks=tier.written_blocks,
            loaded_bytes=tier.loaded_blocks * block_bytes,
            written_bytes=tier.written_blocks * block_bytes,
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
    tiers = [Tier(trace, deepcopy(chosen), size, counted) for size in hosts]
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
