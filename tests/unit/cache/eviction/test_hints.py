"""Hints of sessions that go on and sessions that are over, under every policy; the machines and
`test_policies.py` hold them against a model besides."""

from __future__ import annotations

import pytest

import benchmarks.policies.gated
import benchmarks.policies.gittins  # noqa: F401
from prefixkv.cache.eviction import hints
from prefixkv.cache.eviction.hints import Hints
from prefixkv.cache.eviction.policy import make_policy, policy_names
from prefixkv.cache.radix_cache import RadixCache

each_policy = pytest.mark.parametrize("policy", policy_names())


def make(policy, num_sessions=4):
    """Sessions of four pages, pages 10 to 13 being those of session 1, begun a second apart."""
    cache = RadixCache(page_size=1, policy=policy)
    results = [
        cache.insert([at] * 4, range(10 * at, 10 * at + 4), now_s=float(at))
        for at in range(num_sessions)
    ]
    return cache, results


@each_policy
def test_what_is_over_goes_first_and_what_goes_on_goes_last(policy):
    for going_on in range(4):
        over = (going_on + 1) % 4
        cache, results = make(policy)
        cache.hint(results[over], continues=False)
        cache.hint(results[going_on], continues=True)
        cache.hint(results[going_on], continues=None)  # says nothing
        order = [page // 10 for _ in range(16) for page in cache.evict(1, 5.0).tolist()]
        assert order[:4] == [over] * 4
        assert order[-4:] == [going_on] * 4
        cache.hint(results[over], continues=True)  # gone: ignored
        cache.check_invariants()


@each_policy
def test_a_promise_that_was_broken_is_the_end_of_a_session(policy):
    chosen = make_policy(policy)
    chosen.promise_s = 100.0
    cache, results = make(chosen)
    cache.hint(results[0], continues=True)
    cache.hint(results[3], continues=True)
    cache.evict(1, 50.0)
    cache.hint(results[3], continues=True)  # again, later
    assert cache.evict(1, 103.0)[0] // 10 in (1, 2)
    order = [page // 10 for _ in range(14) for page in cache.evict(1, 103.5).tolist()]
    assert order[:4] == [0] * 4
    assert order[-4:] == [3] * 4
    cache.evict(1, 10.0)  # the clock never goes back


@each_policy
def test_the_next_use_makes_a_hint_void(policy):
    cache, results = make(policy, 2)
    cache.hint(results[0], continues=False)
    with cache.lock(cache.match_prefix([0] * 4), now_s=2.0):
        pass
    cache.hint(results[1], continues=False)
    assert cache.evict(1, 3.0).tolist() == [13]


def test_a_promise_of_an_earlier_use_says_nothing_when_its_time_is_over():
    chosen = make_policy("lru")
    chosen.promise_s = 100.0
    cache, results = make(chosen, 2)
    cache.hint(results[0], continues=True)
    cache.insert([0] * 4, range(4), now_s=2.0)
    assert sorted(cache.evict(4, 103.0).tolist()) == [10, 11, 12, 13]


@each_policy
def test_a_hint_reaches_a_leaf_that_is_held_or_in_a_large_batch(policy):
    cache, results = make(policy, 200)
    with cache.lock(results[7], now_s=200.0) as lock:
        cache.hint(lock, continues=True)
    for at in range(0, 200, 2):
        cache.hint(results[at], continues=False)
    taken = {page // 10 for page in cache.evict(400, 201.0).tolist()}
    assert taken == set(range(0, 200, 2))
    left = {page // 10 for page in cache.evict(396, 201.0).tolist()}
    assert left == set(range(1, 200, 2)) - {7}


def come_back_whatever_was_said(policy):
    """Two caches, one of which is told that a session is over and that another goes on, at each of
    twelve turns. Then a use of both: (session, when, what is said)."""
    caches = [RadixCache(page_size=1, policy=policy) for _ in range(2)]

    def use(session, num_pages, now_s, continues):
        for cache in caches:
            first = 100 * session
            inserted = cache.insert(
                [session] * num_pages, range(first, first + num_pages), now_s=now_s
            )
            cache.hint(inserted, continues if cache is caches[0] else None)

    for turn in range(1, 13):
        use(1, turn, 10.0 * turn, False)
        use(2, turn, 10.0 * turn + 1.0, True)
    return use, *caches


def sessions_as_they_go(cache, now_s):
    return [page // 100 for _ in range(cache.num_pages) for page in cache.evict(1, now_s).tolist()]


@pytest.mark.parametrize("policy", ["gated", "gittins", "adaptive"])
@pytest.mark.parametrize("going_on", [3, 4])
def test_hints_count_only_while_what_is_over_comes_back_less(policy, going_on):
    use, hinted, plain = come_back_whatever_was_said(policy)
    for session in (3, 4):
        use(session, 4, 130.0 + session, session == going_on)
    assert sessions_as_they_go(hinted, 140.0) == sessions_as_they_go(plain, 140.0)
    for at in range(40):  # those do not come back
        use(10 + at, 1, 200.0 + 100.0 * at, False)
    for session in (3, 4):
        use(session + 90, 4, 4300.0 + session, session == going_on)
    assert sessions_as_they_go(hinted, 4310.0)[-4:] == [going_on + 90] * 4


def test_where_a_policy_tells_no_returns_hints_count_always():
    use, hinted, _ = come_back_whatever_was_said("lru")
    use(3, 4, 133.0, True)
    use(4, 4, 134.0, False)
    assert sessions_as_they_go(hinted, 140.0)[-4:] == [3] * 4


def test_a_return_from_what_was_evicted_is_counted():
    """What is said to be over goes first, so most of its returns are of that kind."""
    cache = RadixCache(page_size=512, policy="adaptive", pool_pages=20)
    for turn in range(1, 13):
        tokens = [1] * 512 * turn
        cache.hint(cache.insert(tokens, range(turn), now_s=10.0 * turn), False)
        cache.evict(turn, 10.0 * turn + 1.0)
    assert not cache._hints.believed


def test_a_reset_forgets_what_was_said():
    cache, results = make("lru", 2)
    cache.hint(results[1], continues=False)
    cache.reset()
    cache.tick = 0  # uses are counted anew, so that ticks are the same
    for at in range(2):
        cache.insert([at] * 4, range(10 * at, 10 * at + 4), now_s=5.0)
    assert cache.evict(1, 6.0).tolist() == [3]


def test_the_oldest_hints_are_forgotten(monkeypatch):
    monkeypatch.setattr(hints, "MOST_HINTS", 2)
    noted = Hints(promise_s=10.0, reports_returns=True)
    for tick in (1, 2, 1, 3):
        noted.note(tick, True, float(tick))
    assert [noted.group(tick, 5.0)[0] for tick in (1, 2, 3)] == [2, 1, 2]
    assert [noted.group(tick, 12.0)[0] for tick in (1, 3)] == [0, 2]
    assert list(noted._open) == [1, 3]
