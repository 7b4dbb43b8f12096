"""Who reads a cache's changes leaves no trace in it: the next eviction is the same."""

from __future__ import annotations

import random

import pytest

import benchmarks.policies.gated  # noqa: F401  makes it known by name
from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.results import PrefixLock


@pytest.mark.parametrize("policy", policy_names())
def test_who_listens_to_a_cache_changes_nothing_in_it(policy: str) -> None:
    """What is remembered of pages that went may be a sum of floats: it has to be summed in one
    order."""
    chance = random.Random(1)
    caches = [RadixCache(page_size=1, policy=policy, pool_pages=200) for _ in range(2)]
    caches[0].record().take()  # a router reads its events
    locks: list[list[PrefixLock]] = []
    free = list(range(200))
    for step in range(400):
        now_s = 1000.0 + 37.3 * step
        tokens = [chance.randint(0, 1) for _ in range(chance.randint(1, 6))]
        action = chance.choice(
            ["insert", "insert", "insert", "lock", "unlock", "evict all", "evict"]
        )
        if action == "insert":
            there = caches[0].match_prefix(tokens)
            new = [free.pop() for _ in range(len(tokens) - there.prefix_len)]
            for cache in caches:
                cache.insert(tokens, [*there.pages.tolist(), *new], priority=step % 3, now_s=now_s)
        elif action == "lock":
            locks.append([cache.lock(cache.match_prefix(tokens), now_s=now_s) for cache in caches])
        elif action == "unlock" and locks:
            for cache, lock in zip(caches, locks.pop(), strict=True):
                cache.unlock(lock)
        elif action.startswith("evict"):
            num_pages = caches[0].evictable_pages if action == "evict all" else 2
            taken = [set(cache.evict(num_pages, now_s=now_s).tolist()) for cache in caches]
            assert taken[0] == taken[1]
            free += taken[0]
        assert _marks(caches[0]) == _marks(caches[1])


def _marks(cache: RadixCache) -> list[tuple[bytes, str, str]]:
    return sorted((bytes(node.pages), repr(node.mark), repr(node.steps)) for node in cache.nodes())
