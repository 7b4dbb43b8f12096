"""Policies under a workload of conversations: the merged tree evicts what a page-by-page model
evicts."""

import random

import pytest

from benchmarks.policies.gittins import Gittins
from prefixkv.cache.eviction.adaptive import Adaptive
from prefixkv.cache.eviction.policy import Policy, make_policy, policy_names, register_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.errors import ConfigError
from tests.laws.radix_machine import POLICIES, make_pair

POOL_PAGES = 4096
CAPACITY = 30


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_conversations_evict_as_the_model_does(policy, seed):
    """Sessions with a common beginning take turns under pressure; some are hinted, some wait in a
    queue."""
    rng = random.Random(seed)
    cache, model = make_pair(policy, page_size=1)
    sessions: list[list[int]] = []
    free = list(range(POOL_PAGES))
    now_s, order = 0.0, []
    for turn in range(130 if policy == "adaptive" else 260):  # its model is slow
        now_s += rng.choice((0.0, 1.0, 3.0, 12.0))
        if len(sessions) < 3 or rng.random() < 0.3:
            sessions.append([7] * rng.choice((0, 2, 4)) + [100 + turn])
        session = sessions[-1 - min(len(sessions) - 1, int(rng.expovariate(0.3)))]
        session += [1000 + turn] * rng.choice((0, 1, 1, 2, 5))
        if len(session) > 14:
            sessions.remove(session)
        tokens = tuple(session)
        old = model.match(tokens, None)
        ids = free[: len(tokens)]
        with cache.lock(cache.match_prefix(list(tokens)), now_s) as lock:
            twin = model.lock(tokens, None, now_s, True)
            priority = rng.randrange(-2, 2)
            result = cache.insert(list(tokens), ids, priority=priority, now_s=now_s)
            assert model.insert(tokens, ids, None, now_s, priority) == old == lock.prefix_len
            del free[: len(tokens)]
            free += ids[:old]
        model.unlock(twin)
        if rng.random() < 0.2:
            continues = rng.random() < 0.5
            cache.hint(result, continues)
            model.hint(tokens, None, len(tokens), continues)
        while cache.num_pages > CAPACITY:
            step = rng.choice((1, 1, 2, cache.num_pages - CAPACITY))
            taken = cache.evict(step, now_s).tolist()
            assert set(taken) == model.evict(step, now_s, set(taken)), (turn, order)
            order += taken
            free += taken
        cache.check_invariants()
    assert len(order) > 300


def test_in_all_policies_a_prompt_outlives_what_followed_it():
    for policy in policy_names():
        cache = RadixCache(page_size=1, policy=policy)
        cache.insert([1, 2, 3, 4, 5, 6], range(6), now_s=1.0)
        cache.insert([1, 2, 3, 9], [0, 1, 2, 10], now_s=2.0)
        assert len(cache.evict(4, now_s=3.0)) == 4
        assert cache.match_prefix([1, 2, 3, 9]).prefix_len == 3, policy


def test_a_request_is_one_visit_however_often_it_calls():
    cache = RadixCache(page_size=1, policy="lfu")
    cache.insert([1, 1], [0, 1])
    cache.insert([1, 1], [0, 1])  # twice seen
    with cache.lock(cache.match_prefix([2, 2])), cache.lock(cache.insert([2, 2], [2, 3])):
        cache.insert([2, 2, 2], [2, 3, 4])  # once, in four calls
    assert sorted(cache.evict(3).tolist()) == [2, 3, 4]


def test_what_is_held_inherits_the_visits_of_all_that_was_evicted_below_it():
    cache = RadixCache(page_size=1, policy="lfu")
    for run in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 3]):
        cache.insert(run, range(len(run)))
    with cache.lock(cache.match_prefix([1, 2])):  # the fourth visit of these two
        assert sorted(cache.evict(100).tolist()) == [2, 3]
    for _ in range(3):
        cache.insert([9], [9])
    assert cache.evict(1).tolist() == [9]


def test_a_user_writes_and_registers_a_policy():
    @register_policy
    class ShortestFirst(Policy):
        """Of all leaves the one at the end of the shortest path goes first."""

        name = "shortest"
        supersedes = False

        def mark(self, use):
            return use.num_pages, use.tick

        def fold(self, upper, lower):
            return max(upper[0], lower[0]), max(upper[1], lower[1])

        def last_tick(self, history):
            return history[1]

    cache = RadixCache(page_size=1, policy="shortest")
    cache.insert([1, 2, 3], range(3))
    cache.insert([4, 5], range(3, 5))
    assert sorted(cache.evict(2).tolist()) == [3, 4]
    assert isinstance(make_policy("shortest"), ShortestFirst)


def test_a_policy_object_brings_its_own_settings_to_one_cache():
    policy = Gittins(period=60)
    cache = RadixCache(policy=policy)
    assert cache.policy.asked is policy is make_policy(policy)
    with pytest.raises(ConfigError, match="'gittins' serves a cache already"):
        RadixCache(policy=policy)
    with pytest.raises(ConfigError, match="policy 7 is not one of"):
        RadixCache(policy=7)


def test_settings_out_of_range_name_the_value():
    for build in (
        lambda: Adaptive(trust=0.5),
        lambda: Adaptive(ghosts=-1),
        lambda: Adaptive(short_tokens=9, long_tokens=8),
        lambda: Gittins(period=0),
        lambda: Gittins(short_tokens=9, long_tokens=8),
        lambda: Gittins(stride_blocks=0),
        lambda: make_policy("newest"),
    ):
        with pytest.raises(ConfigError):
            build()


@pytest.mark.slow
@pytest.mark.parametrize("clock", [0.0, 41.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_batch_takes_what_single_steps_take(policy, clock):
    """Large batches sort first, and what becomes a leaf meanwhile has to be put in its place."""

    def build():
        cache, _ = make_pair(policy, page_size=1)
        rng = random.Random(1)
        page = 0
        for at in range(400):
            stem = [rng.randrange(12)] * rng.choice((0, 1, 2))
            run = [*stem, *[1000 + rng.randrange(150)] * rng.choice((1, 2, 3))]
            ids, now_s = range(page, page + len(run)), min(clock, at / 10)
            result = cache.insert(run, ids, priority=rng.randrange(3), now_s=now_s)
            page += len(run)
            if rng.random() < 0.1:
                cache.hint(result, rng.random() < 0.5)
        cache.lock(cache.match_prefix([3, 3]))
        return cache

    one, many = build(), build()
    for share in (
        0.5,
        0.6,
        0.7,
    ):  # of what is left, so that the last half falls among the fresh ones
        num_pages = int(one.evictable_pages * share)
        batch = set(one.evict(num_pages, clock).tolist())
        assert batch == {page for _ in range(num_pages) for page in many.evict(1, clock).tolist()}
    one.check_invariants()
    assert set(one.evict(10_000, 46.0).tolist()) == set(many.evict(10_000, 46.0).tolist())
    one.check_invariants()
    assert one.evictable_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 40, 500], ids=["one by one", "a few", "large batches"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_eviction_takes_a_leaf_that_is_locked(policy, batch):
    """It stood among the evictable ones before it was locked, and does so again afterwards."""
    cache, _ = make_pair(policy, page_size=1)
    for at in range(300):
        cache.insert([at, at], [2 * at, 2 * at + 1], now_s=float(at % 7))
    locks = [cache.lock(cache.match_prefix([at, at]), now_s=8.0) for at in range(0, 300, 3)]
    for at in range(300):  # used later than those that are held
        if at % 3:
            cache.unlock(cache.lock(cache.match_prefix([at, at]), now_s=8.5))
    locked = {page for at in range(0, 300, 3) for page in (2 * at, 2 * at + 1)}
    taken = set()
    while some := cache.evict(batch, 9.0).tolist():
        taken |= set(some)
    assert taken == set(range(600)) - locked
    for lock in locks:
        cache.unlock(lock)
    cache.check_invariants()
    assert set(cache.evict(600, 11.0).tolist()) == locked
