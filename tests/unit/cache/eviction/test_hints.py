"""Hints of sessions that go on and sessions that have ended, under every policy; the machines and
`test_policies.py` hold them against a model besides."""

from collections import Counter
from random import Random

import pytest

import benchmarks.policies.gated
import benchmarks.policies.gittins  # noqa: F401
from prefixkv.cache.eviction import hints
from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.errors import CallerError

each_policy = pytest.mark.parametrize("policy", policy_names())


def make(policy, num_sessions=4):
    """Sessions of four pages, pages 10 to 13 being those of session 1, begun a second apart."""
    cache = RadixCache(page_size=1, policy=policy)
    results = [
        cache.insert([at] * 4, range(10 * at, 10 * at + 4), now_s=float(at))
        for at in range(num_sessions)
    ]
    return cache, results


def sessions_as_they_go(cache, num_pages, now_s):
    """The session of each page, evicted one by one."""
    return [page // 10 for _ in range(num_pages) for page in cache.evict(1, now_s).tolist()]


@each_policy
def test_what_has_ended_goes_first_and_what_goes_on_goes_last(policy):
    for going_on in range(4):
        ended = (going_on + 1) % 4
        cache, results = make(policy)
        cache.hint(results[ended], continues=False)
        cache.hint(results[going_on], continues=True)
        cache.hint(results[going_on], continues=None)  # says nothing
        order = sessions_as_they_go(cache, 16, 5.0)
        assert order[:4] == [ended] * 4
        assert order[-4:] == [going_on] * 4
        cache.hint(results[ended], continues=True)  # gone: ignored
        cache.check_invariants()


@each_policy
def test_of_those_that_go_on_the_one_that_is_due_last_goes_first(policy):
    cache, results = make(policy)
    for at, seconds in enumerate([120.0, 30.0, 600.0, 60.0]):
        cache.hint(results[at], continues=seconds)
    cache.hint(results[1], continues=90.0)  # said again
    assert sessions_as_they_go(cache, 16, 5.0) == [2] * 4 + [0] * 4 + [1] * 4 + [3] * 4


@each_policy
def test_of_a_session_that_is_overdue_nothing_is_said_any_more(policy):
    cache, results = make(policy)
    cache.hint(results[0], continues=100.0)  # at 3.0
    cache.hint(results[3], continues=100.0)
    cache.evict(1, 50.0)
    cache.hint(results[3], continues=100.0)  # again, later
    assert cache.evict(1, 103.0)[0] // 10 in (1, 2)
    assert cache.evict(1, 10.0)[0] // 10 in (1, 2)  # the clock never goes back
    plain, _ = make(policy)
    plain.evict(3, 103.5)
    order = sessions_as_they_go(cache, 13, 103.5)
    assert order[-4:] == [3] * 4
    assert set(order[:9]) == {0, 1, 2}


@each_policy
def test_the_next_use_makes_a_hint_void(policy):
    cache, results = make(policy, 2)
    cache.hint(results[0], continues=False)
    with cache.lock(cache.match_prefix([0] * 4), now_s=2.0):
        pass
    cache.hint(results[1], continues=False)
    assert cache.evict(1, 3.0).tolist() == [13]


def test_a_promise_of_an_earlier_use_says_nothing_when_its_time_is_over():
    cache, results = make("lru", 2)
    cache.hint(results[0], continues=100.0)
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


def test_a_wrong_hint_is_refused_and_changes_nothing():
    cache, results = make("lru", 2)
    for wrong in (-1.0, float("nan"), float("inf"), "soon"):
        with pytest.raises(CallerError, match="continues is"):
            cache.hint(results[0], continues=wrong)
    assert sessions_as_they_go(cache, 8, 5.0) == [0] * 4 + [1] * 4


# --- what a namespace keeps -----------------------------------------------------------------------


def namespaces_as_they_go(policy, say, seed, num_pages=1):
    """Two tenants' sessions of `num_pages` pages each, in turn and used again by chance. `say` says
    what tenant 1 says of each of its sessions, drawn with the generator. Which tenant each session
    was of, as they go; a third of them went before the last hints."""
    rng, drawn = Random(seed), Random(f"hints {seed}")
    cache = RadixCache(page_size=1, policy=policy)
    sessions, order, free = [], [], list(range(4096))
    of_page = {}

    def evict(num_sessions):
        for _ in range(num_sessions * num_pages):
            (page,) = cache.evict(1, now_s).tolist()
            order.append(of_page.pop(page))
            free.append(page)

    for turn in range(300):
        now_s = float(turn)
        tenant = rng.randrange(2)
        tokens = [turn] * num_pages
        ids = [free.pop() for _ in tokens]
        of_page |= dict.fromkeys(ids, tenant)
        sessions.append((tenant, cache.insert(tokens, ids, tenant, now_s=now_s)))
        if tenant:
            cache.hint(sessions[-1][1], say(drawn))
        if turn % 3 == 2:
            evict(1)
    evict(200)
    cache.check_invariants()
    return order


WAYS = {
    "all": lambda _: True,
    "ended": lambda _: False,
    "chance": lambda drawn: drawn.choice([True, False, None, 5.0, 30.0, 120.0]),
}


@pytest.mark.parametrize("num_pages", [1, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["lru", "fifo", "mru"])
def test_hints_change_nothing_of_whose_turn_it_is(policy, way, num_pages):
    """A client that lies in all its hints takes no page of another namespace."""
    for seed in range(5):
        plain = namespaces_as_they_go(policy, lambda _: None, seed, num_pages)
        assert Counter(plain).keys() == {0, 1}
        assert namespaces_as_they_go(policy, WAYS[way], seed, num_pages) == plain


def hits_of_two_tenants(say, num_pages):
    """Hits of each tenant, of sessions that come back by chance, those of tenant 1 with hints.
    `say` is told in how many turns a session comes back, or None."""
    rng = Random(1)
    turns = []
    for _ in range(1000):
        tenant = rng.randrange(2)
        turns.append((tenant, int(rng.paretovariate(0.4 + tenant)) % 200))
    cache, hits, free = RadixCache(page_size=1), [0, 0], list(range(40 * num_pages))
    for at, (tenant, session) in enumerate(turns):
        tokens, now_s = [session] * num_pages, float(at)
        with cache.lock(cache.match_prefix(tokens, tenant), now_s=now_s) as lock:
            hits[tenant] += lock.prefix_len
            missing = num_pages - lock.prefix_len
            free += cache.evict(max(0, missing - len(free)), now_s).tolist()
            ids = [free.pop() for _ in range(missing)]
            result = cache.insert(tokens, ids, tenant, now_s=now_s, lock=lock, extend_lock=True)
        if tenant:
            later = turns[at + 1 :]
            cache.hint(result, say(later.index(turns[at]) + 1 if turns[at] in later else None))
    cache.check_invariants()
    return hits


@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_tenant_that_lies_takes_no_hit_of_another(num_pages):
    plain = hits_of_two_tenants(lambda back: None, num_pages)
    lied = hits_of_two_tenants(lambda back: 1e4 if back is None else False, num_pages)
    true = hits_of_two_tenants(lambda back: back or False, num_pages)
    assert min(lied[0], true[0]) >= 0.98 * plain[0]
    assert lied[1] < plain[1] < true[1]


def test_a_session_that_was_spared_takes_the_place_of_what_went_for_it():
    cache = RadixCache(page_size=1)
    for at in range(6):  # sessions 0, 2, 4 of tenant "a", 1, 3, 5 of tenant "b"
        result = cache.insert([at], [at], "ab"[at % 2], now_s=float(at))
        if at == 0:
            cache.hint(result, continues=True)
    # 2 goes for 0, at the first place; then 1 is the least recently used, then 0 at 2's place,
    # for which 4 goes.
    assert [cache.evict(1, 6.0)[0] for _ in range(6)] == [2, 1, 4, 3, 0, 5]


def test_the_hints_of_more_namespaces_than_are_counted_are_not_taken(monkeypatch):
    monkeypatch.setattr(hints, "MOST_NAMESPACES", 1)
    cache = RadixCache(page_size=1)
    results = [cache.insert([at], [at], at, now_s=float(at)) for at in range(3)]
    cache.hint(results[1], continues=True)
    cache.hint(results[0], continues=True)
    assert [cache.evict(1, 4.0)[0] for _ in range(3)] == [0, 1, 2]


def test_what_hints_keep_of_leaves_is_swept():
    cache = RadixCache(page_size=1)
    for at in range(2000):
        result = cache.insert([at], [at % 8], now_s=float(at))
        cache.hint(result, continues=at % 3 == 0)
        if at >= 7:
            cache.evict(1, float(at))
    (space,) = cache._queue.spaces.values()
    assert max(len(space.places), len(space.going), len(space.returning)) <= 130


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
    cache, results = make("lru", 3)
    for at in (0, 1, 0, 2):
        cache.hint(results[at], continues=True)
    (kept,) = cache._hints
    assert len(kept.said) == 2


@each_policy
def test_a_leaf_that_was_pinned_when_it_came_up_has_its_turn_again(policy):
    cache, results = make(policy)
    cache.hint(results[1], continues=False)
    with cache.pin(results[1]):
        assert cache.evict(1, 5.0)[0] // 10 != 1
    assert sessions_as_they_go(cache, 4, 5.0) == [1] * 4


@each_policy
def test_what_is_kept_of_a_conversation_does_not_grow_with_its_turns(policy):
    cache = RadixCache(page_size=1, policy=policy)
    for at in range(500):
        lock = cache.lock(cache.insert([7], [7], now_s=float(at)), now_s=float(at))
        cache.hint(lock, continues=1e9)
        cache.unlock(lock)
    (space,) = cache._queue.spaces.values()
    assert max(len(space.places), len(space.returning), len(cache._queue._due)) <= 130


@pytest.mark.parametrize(("spared", "goes"), [(1, 50), (50, 2)])
@each_policy
def test_a_batch_takes_no_more_for_a_leaf_than_single_steps(policy, spared, goes):
    """And a namespace loses at a leaf's place as many pages as that has."""
    of_both = []
    for sizes in [[20], [1] * 20]:
        cache = RadixCache(page_size=1, policy=policy)
        cache.insert([1] * spared, range(spared), "a", now_s=1.0)
        cache.insert([2] * 60, range(200, 260), "b", now_s=2.0)
        ended = cache.insert([3] * goes, range(100, 100 + goes), "a", now_s=3.0)
        cache.hint(ended, continues=False)
        of_both.append([page for size in sizes for page in cache.evict(size, 4.0).tolist()])
    assert set(of_both[0]) == set(of_both[1])


@pytest.mark.parametrize(("spared", "goes"), [(1, 50), (50, 2), (3, 3)])
def test_a_namespace_loses_as_many_pages_at_a_place_as_the_leaf_of_it_has(spared, goes):
    cache = RadixCache(page_size=1)
    cache.insert([1] * spared, range(spared), "a", now_s=1.0)
    cache.insert([2] * 60, range(200, 260), "b", now_s=2.0)
    ended = cache.insert([3] * goes, range(100, 100 + goes), "a", now_s=3.0)
    cache.hint(ended, continues=False)
    of_b = [page // 200 for _ in range(60 + spared + goes) for page in cache.evict(1, 4.0).tolist()]
    assert of_b == [0] * spared + [1] * 60 + [0] * goes


def test_namespaces_that_are_gone_make_room_for_the_hints_of_others(monkeypatch):
    monkeypatch.setattr(hints, "MOST_NAMESPACES", 1)
    cache = RadixCache(page_size=1)
    for tenant in range(3):
        results = [cache.insert([at], [at], tenant, now_s=float(at)) for at in range(2)]
        cache.hint(results[0], continues=True)
        assert [cache.evict(1, 4.0)[0] for _ in range(2)] == [1, 0]
        cache.check_invariants()
    # What is known of the runs that went keeps no tokens of theirs.
    places = [place for place, _ in cache._queue._gone.values() if place is not None]
    assert places
    assert not any(place.space.places for place in places)


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_what_comes_back_in_pieces_is_paid_as_what_comes_back_at_once(size):
    cache = RadixCache(page_size=1)
    spared = cache.insert([1] * 10, range(10), "a", now_s=1.0)
    cache.insert([2] * 20, range(100, 120), "b", now_s=2.0)
    ended = cache.insert([3] * 10, range(10, 20), "a", now_s=3.0)
    cache.hint(spared, True)
    cache.hint(ended, False)
    assert sorted(cache.evict(10, 4.0)) == [*range(10, 20)]
    lock = cache.lock(cache.match_prefix([3] * 10, "a"), now_s=5.0)
    for end in range(size, 11, size):
        pages = range(10 + end - size, 10 + end)
        cache.insert([3] * end, pages, "a", now_s=5.0, lock=lock, extend_lock=True)
        assert max(cache.evict(size, 5.0)) < 10
        cache.check_invariants()
