"""The adaptive policy by hand; eviction for eviction it is held against its model in
`test_policies.py`."""

from __future__ import annotations

import random
from bisect import bisect_right

import numpy as np
import pytest

from prefixkv.cache.eviction.adaptive import Adaptive, class_of, kind_of, traits
from prefixkv.cache.eviction.hazards import (
    BEGINS_S,
    EDGES_S,
    LENGTHS_S,
    NUM_BINS,
    Hazards,
    gittins_indices,
)
from prefixkv.cache.eviction.least_worth import LeastWorth
from prefixkv.cache.node import Node
from prefixkv.cache.radix_cache import RadixCache

SMALL = {"short_tokens": 1, "long_tokens": 3, "block_tokens": 1, "stride_blocks": 4}


def adaptive(**settings):
    chosen = Adaptive(**SMALL | {"trust": 1.0, "period": 1} | settings)
    return RadixCache(page_size=1, policy=chosen, pool_pages=10_000)


def test_what_returns_is_kept_whatever_was_new():
    """Long prompts return, short ones do not: the opposite of what `gated` takes as given."""
    cache = adaptive()
    now_s = 0.0
    for at in range(40):
        now_s += 60.0
        cache.insert([1, at], [0, 1], now_s=now_s)
        cache.insert([2, at, 5, 6, 7, 8], range(10, 16), now_s=now_s)
        cache.insert([2, at, 5, 6, 7, 8, 9, 9, 9, 9], range(10, 20), now_s=now_s + 30)
        cache.evict(100, now_s + 31)
    now_s += 2000.0
    cache.insert([2, 999, 5, 6, 7, 8], range(30, 36), now_s=now_s)
    cache.insert([1, 999], [20, 21], now_s=now_s)
    cache.insert([1, 998], [20, 23], now_s=now_s)
    assert set(cache.evict(3, now_s + 10.0).tolist()) == {20, 21, 23}


def test_a_return_is_counted_for_the_new_end_and_for_what_was_before_it():
    assert traits(1, 1).kinds == (kind_of(1, 1),)
    assert traits(1, 2).kinds == (kind_of(2, 1),)
    assert traits(0, 5).kinds == (kind_of(2, 0), kind_of(5, 0))
    cache = adaptive()
    for turn in range(1, 5):
        cache.insert([1] * turn, range(turn), now_s=10.0 * turn)
    returns = cache.policy.hazards._returns
    counted = {kind: sum(row) for kind, row in enumerate(returns) if sum(row)}
    assert counted == {kind_of(1, 0): 1, kind_of(2, 0): 2, kind_of(3, 0): 1}
    (node,) = cache.nodes()
    assert class_of(node.mark) == kind_of(2, 0)  # the new end of a next turn


def test_returns_are_seen_though_the_pages_are_gone_until_ghosts_are_forgotten():
    for share, came_back in ((1.0, 1), (0.0, 0)):
        cache = adaptive(ghosts=share)
        cache.insert([1] * 6, range(6), now_s=0.0)
        cache.evict(6, 1.0)
        cache.insert([1] * 6 + [2], range(7), now_s=20.0)
        hazards = cache.policy.hazards
        assert sum(map(sum, hazards._returns)) == came_back
        assert sum(map(sum, hazards._losses)) == 1 - came_back
        cache.reset()
        assert sum(map(sum, hazards._returns)) == sum(map(sum, hazards._losses)) == 0


def test_without_a_clock_the_oldest_goes():
    cache = adaptive()
    for at in range(3):
        cache.insert([at] * 4, range(10 * at, 10 * at + 4))
    assert sorted(cache.evict(5).tolist()) == [0, 1, 2, 3, 13]


def test_pages_go_together_only_up_to_a_later_use():
    cache = adaptive()
    cache.insert([1] * 6, range(6))
    cache.insert([2] * 6, range(10, 16))
    with cache.lock(cache.match_prefix([1] * 3), visit=False):
        pass
    assert set(cache.evict(6).tolist()) == {3, 4, 5, 13, 14, 15}


def test_what_stays_inherits_the_uses_of_pages_that_went_together():
    cache = adaptive()
    for num_pages in (4, 5, *[6] * 7):
        cache.insert([1] * num_pages, range(num_pages))
    with cache.lock(cache.match_prefix([1] * 3), visit=False):
        assert sorted(cache.evict(3).tolist()) == [3, 4, 5]
        (held,) = cache.nodes()
        assert held.mark.visits == 9


def test_a_line_knows_its_oldest_and_its_newest_in_whatever_order_leaves_come():
    rng = random.Random(3)
    queue = LeastWorth(Hazards([[0]], trust=1.0, period=1), lambda mark: 0)
    (line,) = queue._lines
    ticks = list(range(600))
    for start in range(0, 600, 20):  # by and large in order
        part = ticks[start : start + 20]
        rng.shuffle(part)
        ticks[start : start + 20] = part
    living = {}
    for tick in ticks:
        leaf = living[tick] = Node(b"", b"", 0, None)
        leaf.mark = (tick, 1, 0.0)
        queue.add(leaf)
        if rng.random() < 0.6:
            gone = living.pop(rng.choice(list(living)))
            queue.take(gone)
        if not tick % 97:
            queue._sweep()
        if living:
            assert (line.first()[0], line.last()[0]) == (min(living), max(living))
        assert queue.broken_laws() == []


# --- the tables -----------------------------------------------------------------------------------


def test_the_index_is_the_best_ratio_over_all_times_to_keep():
    chance = [(7 * at % 11) / 40 for at in range(NUM_BINS)]
    (index,) = gittins_indices(np.array([chance]))
    for first, found in enumerate(index):
        out, uses, seconds, ratios = 1.0, 0.0, 0.0, []
        for at in range(first, NUM_BINS):
            uses += out * chance[at]
            seconds += out * LENGTHS_S[at] * (1 - 0.5 * chance[at])
            out *= 1 - chance[at]
            ratios.append(uses / seconds)
        assert found == pytest.approx(max(ratios))


def test_an_untaught_cache_ranks_as_lru():
    hazards = Hazards([[0]], trust=60.0, period=10)
    assert hazards.peak == [0]
    assert hazards.worth[0] == sorted(hazards.worth[0], reverse=True)


def test_ages_of_hours_are_told_apart():
    """Sessions return after one hour and never after two: what is kept for longer is worth less."""
    hazards = Hazards([[0]], trust=1.0, period=10)
    for at in range(400):
        hazards.start(0, at * 60.0)
        if at >= 60:
            hazards.returned(0, 3600.0)
    worth = hazards.worth[0]
    assert worth[bisect_right(EDGES_S, 1800.0)] > 10 * worth[bisect_right(EDGES_S, 9000.0)]


def test_those_still_out_count_as_not_having_returned():
    hazards = Hazards([[0]], trust=1.0, period=1000)
    for at in range(100):
        hazards.start(0, at * 10.0)
    for _ in range(5):
        hazards.returned(0, 3.0)
    hazards.lost(0, 100.0)
    (entered,) = hazards._entered()
    assert entered[0] == 100
    place = bisect_right(EDGES_S, 500.0)
    old_enough = sum(990.0 - at * 10.0 > BEGINS_S[place] for at in range(100))
    assert entered[place] == pytest.approx(old_enough - 6, abs=1)
    assert entered[-1] == 0


def test_what_is_remembered_is_bounded():
    hazards = Hazards([[0]], trust=1.0, period=50)
    for at in range(100_000):
        hazards.start(0, at * 1.0)
    assert len(hazards._snapshots) < 400
    cache = adaptive(ghosts=0.01, period=50)
    for at in range(3000):
        cache.insert([at, *range(10)], range(11), now_s=at * 1.0)
        cache.evict(11, at * 1.0)
    assert cache.policy.remembered.num_pages <= 100
    assert traits.cache_info().currsize <= 18


def test_the_books_of_a_long_run_stay_bounded():
    """Sessions come, go on, part and end under pressure: ghosts, marks and places stay in bounds
    that the pool sets, and all laws hold."""
    rng = random.Random(0)
    capacity = 200
    cache = RadixCache(
        page_size=1, policy=Adaptive(**SMALL | {"ghosts": 2.0, "period": 50}), pool_pages=600
    )
    policy, queue = cache.policy, cache._queue
    free = list(range(600))
    sessions: list[list[int]] = []
    most = {"places": 0, "marks": 0, "ghosts": 0}
    now_s = 0.0
    for turn in range(12_000):
        now_s += rng.choice((0.0, 0.5, 4.0, 30.0))
        if len(sessions) < 4 or rng.random() < 0.2:
            sessions.append([turn % 3] * 3 + [1000 + turn])
        session = rng.choice(sessions)
        session += [5000 + turn] * rng.choice((0, 1, 3, 9))
        if len(session) > 60:
            sessions.remove(session)
        with cache.lock(cache.match_prefix(session), now_s) as lock:
            ids = [*lock.pages.tolist(), *free[: len(session) - lock.prefix_len]]
            result = cache.insert(session, ids, now_s=now_s)
            del free[: len(session) - result.prefix_len]
        if cache.num_pages > capacity:
            free += cache.evict(cache.num_pages - capacity, now_s).tolist()
        if turn % 50 == 0:
            cache.check_invariants()
            lines = queue._lines
            places = sum(len(line.in_order) + 2 * len(line.oldest) for line in lines)
            marks = sum(1 + len(node.steps or ()) for node in cache.nodes())
            most["places"] = max(most["places"], places)
            most["marks"] = max(most["marks"], marks)
            most["ghosts"] = max(most["ghosts"], len(policy.remembered))
    assert most["places"] <= 2 * (1024 + 2 * capacity)
    assert most["marks"] <= capacity
    assert 0 < policy.remembered.num_pages <= 2 * 600
    # A ghost stands for a page at least, one at a stride for four.
    assert 100 < most["ghosts"] <= 2 * 600
    assert len(policy.hazards._snapshots) < 400
    assert traits.cache_info().currsize <= 18
