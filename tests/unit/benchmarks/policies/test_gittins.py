"""The gittins policy by hand; eviction for eviction it is held against its model in
`test_policies.py`."""

from __future__ import annotations

import pytest

from benchmarks.policies.gittins import Gittins
from benchmarks.policies.return_tables import (
    BEGINS_S,
    LENGTHS_S,
    NUM_BINS,
    ReturnTables,
    bin_of,
    chances,
    gittins_index,
)
from prefixkv.cache.radix_cache import RadixCache


def gittins(**settings):
    small = {
        "short_tokens": 1,
        "long_tokens": 3,
        "block_tokens": 1,
        "stride_blocks": 4,
        "trust": 1.0,
        "period": 1,
    }
    return RadixCache(page_size=1, policy=Gittins(**small | settings), pool_pages=10_000)


def taught(rounds=40, pause_s=30.0):
    """A cache that has seen who comes back: second turns do, after `pause_s`; what is long and new
    does not."""
    cache = gittins()
    now_s = 0.0
    for at in range(rounds):
        now_s += 2 * pause_s
        cache.insert([1, at], [0, 1], now_s=now_s)  # one new page besides the first
        cache.insert([2, at, 5, 6, 7, 8], range(10, 16), now_s=now_s)
        cache.insert([1, at, 9], [0, 1, 2], now_s=now_s + pause_s)
        cache.evict(100, now_s + pause_s + 1)
    return cache, now_s + 2000.0


def test_conversations_likely_to_return_outlive_others():
    cache, now_s = taught()
    cache.insert([1, 999], [20, 21], now_s=now_s)
    cache.insert([2, 999, 5, 6, 7, 8], range(30, 36), now_s=now_s)
    assert sorted(cache.evict(6, now_s + 10.0).tolist()) == [30, 31, 32, 33, 34, 35]
    assert sorted(cache.evict(6, now_s + 10.0).tolist()) == [20, 21]


def test_a_return_is_expected_at_its_time_and_not_after():
    cache, _ = taught()
    policy = cache.policy.asked
    short = policy.tables.worth[policy._kind(1, 2)]
    assert short[bin_of(29.0)] > 2 * short[bin_of(60.0)]
    assert policy.tables.peak[policy._kind(1, 2)] <= bin_of(30.0)


def test_returns_are_seen_though_the_pages_are_gone_until_ghosts_are_forgotten():
    for share, came_back in ((1.0, 1), (0.0, 0)):
        cache = gittins(ghosts=share)
        cache.insert([1] * 6, range(6), now_s=0.0)
        cache.evict(6, 1.0)
        cache.insert([1] * 6 + [2], range(7), now_s=20.0)
        tables = cache.policy.asked.tables
        assert sum(map(sum, tables._returns)) == came_back
        assert sum(map(sum, tables._losses)) == 1 - came_back
        assert max(node.mark.turn for node in cache.nodes()) == 1 + came_back
        cache.reset()
        assert sum(map(sum, tables._returns)) == sum(map(sum, tables._losses)) == 0
        assert cache.policy.asked.remembered.num_pages == 0


def test_only_a_continuation_of_another_counts_as_a_return():
    cache = gittins()
    cache.insert([1, 2, 3, 4], range(4), now_s=1.0)
    cache.insert([1, 2, 8, 9], [0, 1, 12, 13], now_s=2.0)  # shares a beginning
    cache.insert([1, 2], [0, 1], now_s=3.0)  # brings nothing
    cache.insert([1, 2], [0, 1], now_s=4.0)
    assert sum(map(sum, cache.policy.asked.tables._returns)) == 0
    with cache.lock(cache.match_prefix([1, 2, 8, 9, 10]), now_s=9.0) as lock:
        prompt = cache.insert([1, 2, 8, 9, 10], [*lock.pages.tolist(), 14], now_s=9.0)
    with cache.lock(prompt, now_s=9.0):
        cache.insert(
            [1, 2, 8, 9, 10, 11], [*prompt.pages.tolist(), 15], now_s=12.0
        )  # the same request
    assert sum(map(sum, cache.policy.asked.tables._returns)) == 1
    assert cache.policy.asked.tables._returns[cache.policy.asked._kind(1, 2)][bin_of(7.0)] == 1


def test_without_a_clock_the_oldest_goes():
    cache = gittins()
    for at in range(3):
        cache.insert([at] * 4, range(10 * at, 10 * at + 4))
    assert sorted(cache.evict(5).tolist()) == [0, 1, 2, 3, 13]


# --- the tables -----------------------------------------------------------------------------------


def test_the_index_looks_past_a_lull():
    """Nobody comes back in the first bins, half of all in a later one: all before are worth keeping
    for that."""
    index = gittins_index([0.0] * 10 + [0.5] + [0.0] * (NUM_BINS - 11))
    assert index[:11] == sorted(index[:11])
    assert index[0] > 0
    assert index[11:] == [0.0] * (NUM_BINS - 11)


def test_the_index_of_a_steady_rate_is_that_rate_at_every_age():
    assert gittins_index([1e-4 * length_s for length_s in LENGTHS_S]) == pytest.approx(
        [1e-4] * NUM_BINS, rel=0.06
    )


def test_chances_lean_on_what_was_known_before():
    assert chances([0, 90], [0, 45], [0.2, 0.2], trust=10.0) == pytest.approx([0.2, 0.47])


def test_those_still_out_count_as_not_having_come_back():
    tables = ReturnTables([[0]], power=0.7, trust=1.0, period=1000)
    for at in range(100):
        tables.start(0, at * 10.0)
    for _ in range(5):
        tables.returned(0, 3.0)
    tables.lost(0, 100.0)
    (entered,) = tables._entered()
    assert entered[0] == 100
    assert entered[bin_of(3.0) + 1] == 99 - 5  # the last one started just now
    old_enough = sum(990.0 - at * 10.0 >= BEGINS_S[bin_of(500.0)] for at in range(100))
    assert entered[bin_of(500.0)] == old_enough - 6
    assert entered[-1] == 0


@pytest.mark.slow
def test_snapshots_are_bounded():
    tables = ReturnTables([[0]], power=0.7, trust=1.0, period=50)
    for at in range(20_000):
        tables.start(0, at * 0.5)
    assert len(tables._snapshots) <= 1000 + 25 + 2
