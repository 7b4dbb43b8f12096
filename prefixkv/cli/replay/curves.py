"""Several policies at several capacities, and the optimum, whose hit rate none exceeds."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import Any, TypeAlias

from prefixkv.cli.policies import broken_law, policy_of
from prefixkv.cli.replay.run import (
    Hits,
    ReplayResult,
    RequestHits,
    Tier,
    host_blocks,
    replay_policy,
)
from prefixkv.cli.replay.trace import Trace, footprint
from prefixkv.errors import ConfigError, check_range
from prefixkv.spi import Policy, RadixKey, policy_names

OPTIMUM = "optimum"


def replay_optimum(
    trace: Trace, capacity: int, warm: float = 0.0,
    each: Callable[[RequestHits], object] | None = None, running: int = 1,
    name: str = OPTIMUM,
) -> ReplayResult:  # fmt: skip
    """Evict the furthest next use: no cache of this capacity hits more often. O(blocks log blocks).
    See `replay_policy`.

    A block's next use is never later than that of the blocks after it, so the blocks kept are
    prefixes. What running requests hold is equal under every policy and only makes the room
    smaller. With `running` of 0, a new block is dropped at once if its next use is the furthest.

    Source: Belady (1966), with bypass.
    """
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


MakePolicy: TypeAlias = Callable[[], Policy]
"""Makes a new eviction policy: an object of it serves one replay. A class is one."""

Makers: TypeAlias = dict[str, MakePolicy | None]
"""By the name of the results; None stands for the optimum."""


def capacities_for(blocks: int) -> list[int]:
    """Return capacities that show the hit curve of a trace with this many distinct blocks: from a
    64th of them on, each twice the one before, up to one that holds all.

    >>> capacities_for(6400), capacities_for(3)
    ([100, 200, 400, 800, 1600, 3200, 6400], [1, 2, 4])
    """
    sizes = [-(-max(1, blocks) // 64)]
    while sizes[-1] < blocks:
        sizes.append(2 * sizes[-1])
    return sizes


def replay_curves(
    trace: Trace,
    policies: Iterable[str | MakePolicy] | Mapping[str, str | MakePolicy] | None = None,
    capacities: Iterable[int] | None = None,
    *,
    warm: float = 0.0,
    hints: Sequence[float | None] | None = None,
    each: Callable[[RequestHits], object] | None = None,
    running: int = 1,
    hosts: Iterable[str | int] = (),
    bytes_per_token: int = 0,
    on_result: Callable[[ReplayResult], object] = lambda result: None,
) -> list[ReplayResult]:
    """Replay a trace with each policy at each capacity, through a real `RadixCache`. Costs some ten
    microseconds per request of each replay, and as much for each host tier.

    Args:
        policies: names as on the command line ("adaptive:trust=30", "MODULE:CLASS", "optimum"),
            functions that make a new policy, or a map from names of results to these. None: all,
            and the optimum.
        capacities: in blocks, at least 1. None: from 1/64 of the trace's different blocks to all.
        warm: share of the requests that only warm the cache, in [0, 0.99].
        hints: per request, what its client says at its end (`finish(continues=)`).
        each: called with what each request of each replay finds.
        running: requests that run at a time: their blocks count against the capacity, and are not
            evicted. 0: not even those of the request that comes count.
        hosts: sizes of host tiers, each for itself: "4x" (of the capacity), "64GiB", or blocks.
        bytes_per_token: of KV, for sizes and results in bytes. 0: what the trace says, if it does.
        on_result: called with each result when it is there.
    Returns:
        A result for each capacity and policy: capacities rising, policies as given.

    Raises ConfigError, before any replay: an unknown policy, two of one name, or a value out of
    range.
    """
    check_range("warm", warm, 0, 0.99)
    check_range("running", running, 0, 1_000_000)
    check_range("bytes_per_token", bytes_per_token, 0, 2**32)
    if bytes_per_token:
        trace = replace(trace, bytes_per_token=bytes_per_token)
    if hints is not None and len(hints) != len(trace.requests):
        raise ConfigError(f"{len(hints)} hints for {len(trace.requests)} requests")
    makers = makers_of([*policy_names(), OPTIMUM] if policies is None else policies)
    sizes = capacities_for(footprint(trace)) if capacities is None else sorted({*capacities})
    for size in sizes:
        check_range("capacity", size, 1, 10**8)
    block_bytes, hosts = trace.block_tokens * trace.bytes_per_token, [*hosts]
    tiers = [sorted({host_blocks(one, size, block_bytes) for one in hosts}) for size in sizes]
    results = []
    for (size, behind), (name, make) in product(zip(sizes, tiers, strict=True), makers.items()):
        # The optimum knows the future, so hints could not add to it. It is that of
        # the device alone.
        results.append(
            replay_optimum(trace, size, warm, each, running, name)
            if make is None
            else replay_policy(trace, make(), size, warm, hints, each, running, behind, name)
        )
        on_result(results[-1])
    return results


def makers_of(policies: Any) -> Makers:
    """Return what makes each policy. Raises ConfigError for what `replay_curves` does not take."""
    if not isinstance(policies, Mapping):
        named = [(one if isinstance(one, str) else _made(one).name, one) for one in policies]
        policies = dict(named)
        if len(policies) < len(named):
            names = ", ".join(name for name, _ in named)
            raise ConfigError(f"two policies of one name: {names}; give them names of your own")
    makers = {
        name: None if policy == OPTIMUM else partial(_made, policy)
        for name, policy in policies.items()
    }
    for make in filter(None, makers.values()):
        make()  # what is wrong with it is found out before anything is replayed
    return {**makers}


def check_policy(policy: str | MakePolicy) -> None:
    """Check an eviction policy of your own, a class or what `replay_curves` takes: its laws in
    sixteen uses, then those of a small cache, after each of 300 prompts with common beginnings.

    Raises ConfigError for what is no policy or breaks a law, InternalError with the laws that the
    cache breaks under it, and whatever it raises itself.
    """
    if broken := broken_law(_made(policy)):
        raise ConfigError(f"policy {policy!r} {broken}")
    draw, paths = Random(1), [[0]]
    tier = Tier(Trace("", [], 1, 1), _made(policy), 60, makes_room=True)
    for at in range(300):
        past = draw.choice(paths)
        new = draw.sample(range(10**6), draw.randint(1, 9))
        paths.append([*past[: draw.randint(1, len(past))], *new][:40])
        key = RadixKey(paths[-1])
        with tier.lock(key, float(at)) as lock:
            tier.store(key, lock, float(at))
        if tier.cache.policy.error is not None:
            raise tier.cache.policy.error
        tier.cache.check_invariants()


def _made(policy: str | MakePolicy) -> Policy:
    if isinstance(policy, str):
        return policy_of(policy)
    made = policy() if callable(policy) else None
    if not isinstance(made, Policy) or type(getattr(made, "name", 0)) is not str or not made.name:
        raise ConfigError(f"{policy!r} is no class or function that makes a policy with a name")
    return made
