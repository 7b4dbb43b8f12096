"""The adaptive policy by hand; eviction for eviction it is held against its model in
`test_policies.py`."""

import random
from bisect import bisect_right

import numpy as np
import pytest

from prefixkv.cache.eviction.adaptive import (
    NO_TRUNK,
    NUM_OWN,
    TRAITS,
    Adaptive,
    class_of,
    kind_of,
    trunk_of,
)
from prefixkv.cache.eviction.hazards import (
    BEGINS_S,
    EDGES_S,
    LENGTHS_S,
    NUM_BINS,
    Hazards,
    expected_sums,
    steepest_slopes,
)
from prefixkv.cache.eviction.least_worth import LeastWorth
from prefixkv.cache.eviction.policy import forget
from prefixkv.cache.node import TreeNode
from prefixkv.cache.radix_cache import RadixCache

SMALL = {"short_tokens": 1, "long_tokens": 3, "block_tokens": 1, "stride_blocks": 4}


def adaptive(**settings):
    chosen = Adaptive(**SMALL | {"trust": 1.0, "period": 1} | settings)
    return RadixCache(page_size=1, policy=chosen, pool_pages=10_000)


def test_of_shared_pages_it_is_counted_how_soon_paths_part_from_them_again():
    """A document of five pages, asked about every 40 s. No path ends with it, so no end tells of
    it; and a question that goes on is no parting."""
    cache = adaptive()
    document = [7, 8, 9, 7, 8]
    for at in range(1, 8):
        cache.insert([*document, 100 + at], [*range(5), 100 + at], now_s=40.0 * at)
    cache.insert([*document, 107, 1], [*range(5), 107, 108], now_s=285.0)
    _, returns, _ = cache.policy.hazards.counts()
    longest = NUM_OWN + 2 * 3  # more than three pages
    counted = {kind: sum(row) for kind, row in enumerate(returns) if sum(row)}
    # Of six partings each but the last was followed by one.
    assert counted == {longest: 2, longest + 1: 3, kind_of(1, 0): 1}
    assert sum(row[bisect_right(EDGES_S, 40.0)] for row in returns) == 5
    cache.evict(8, 290.0)  # the questions
    (node,) = cache.nodes()
    assert (node.end, class_of(node)) == (5, longest + 2)
    cache.evict(5, 291.0)
    cache.insert([*document, 200], [*range(5), 200], now_s=300.0)  # from its ghosts
    assert sum(cache.policy.hazards.counts()[1][longest + 2]) == 1


def test_what_stays_inherits_the_uses_of_pages_that_went_together():
    cache = adaptive()
    for num_pages in (4, 5, *[6] * 7):
        cache.insert([1] * num_pages, range(num_pages))
    with cache.lock(cache.match_prefix([1] * 3), visit=False):
        assert sorted(cache.evict(3).tolist()) == [3, 4, 5]
        (held,) = cache.nodes()
        assert held.mark[1] == 9


def test_what_comes_back_goes_on_from_its_ghosts_and_what_is_behind_it_begins():
    cache = adaptive()
    for at in range(3):
        cache.insert([1] * 4, range(4), now_s=float(at))
    cache.evict(4, 5.0)
    cache.insert([1] * 4 + [2, 3], range(6), now_s=7.0)
    assert [node.mark[1] for node in cache.nodes()] == [1]
    cache.evict(2, 8.0)
    assert [node.mark[1] for node in cache.nodes()] == [4]


@pytest.mark.parametrize(("page_size", "every"), [(1, 512), (256, 2), (2048, 1)])
def test_ghosts_stand_for_a_block_and_for_a_page_where_that_is_larger(page_size: int, every: int):
    assert RadixCache(page_size, Adaptive(), 64).policy.evicted_every_pages == every


def test_a_line_knows_its_oldest_and_its_newest_in_whatever_order_leaves_come():
    rng = random.Random(3)
    queue = LeastWorth(Hazards([[0]], trust=1.0, period=1, half_life_s=1e9), lambda mark: 0)
    (line,) = queue._lines
    ticks = list(range(600))
    for start in range(0, 600, 20):  # by and large in order
        part = ticks[start : start + 20]
        rng.shuffle(part)
        ticks[start : start + 20] = part
    living = {}
    for tick in ticks:
        leaf = living[tick] = TreeNode(b"", b"", 0, None)
        leaf.mark = (tick, 1, 0.0)
        queue.add(leaf)
        if rng.random() < 0.6:
            gone = living.pop(rng.choice(list(living)))
            forget(gone)
        if not tick % 97:
            queue._lines[0].sweep()
        if living:
            assert (line.first()[0], line.last()[0]) == (min(living), max(living))
        assert queue.broken_laws() == []


# --- the tables -----------------------------------------------------------------------------------


def test_the_index_is_the_best_ratio_over_all_times_to_keep():
    chance = [(7 * at % 11) / 40 for at in range(NUM_BINS)]
    (index,) = steepest_slopes(*expected_sums(np.array([chance])))
    for first, found in enumerate(index):
        out, uses, seconds, ratios = 1.0, 0.0, 0.0, []
        for at in range(first, NUM_BINS):
            uses += out * chance[at]
            seconds += out * LENGTHS_S[at] * (1 - 0.5 * chance[at])
            out *= 1 - chance[at]
            ratios.append(uses / seconds)
        assert found == pytest.approx(max(ratios))


def test_worths_are_worked_out_where_nothing_waits_or_a_little_later():
    policy = Adaptive(period=80, half_life_s=1e9)
    hazards = policy.hazards
    for starts_late in (0, 10, 0):
        before = hazards.worth
        for at in range(80 + starts_late):
            assert hazards.worth is before
            if at < 80:
                policy.work_ahead()
            hazards.start(at % 2, hazards.now_s + 10.0)
        if not starts_late:
            policy.work_ahead()
        assert hazards.worth is not before
    assert hazards.broken_laws() == []


@pytest.mark.parametrize("how", ["returned", "lost"])
@pytest.mark.parametrize("counted_at_once", [False, True])
@pytest.mark.parametrize("next_s", [950.0, 1900.0])
def test_an_end_of_what_was_used_after_every_start_takes_off_the_last_of_them(
    how: str, counted_at_once: bool, next_s: float
) -> None:
    """Whenever it is counted, and though counts are halved in between."""
    hazards = Hazards([[0]], trust=1.0, period=10_000, half_life_s=1000.0)
    hazards.start(0, 0.0)
    if how == "returned":
        hazards.returned(0, next_s, next_s)
    else:
        hazards.lost(0, next_s)
    if counted_at_once:
        hazards.counts()
    hazards.start(0, next_s)
    hazards.start(0, next_s + 40.0)
    entered, *_ = hazards.counts()
    halved = 0.5 ** (next_s // 1000.0)
    at = bisect_right(BEGINS_S, 40.0) - 1
    assert entered[0, 0] == halved + 2.0  # the first as what it ended in
    assert entered[0, 1 : at + 1] == pytest.approx(1.0)
    assert not entered[0, at + 1 :].any()


def test_what_is_remembered_is_bounded():
    hazards = Hazards([[0]], trust=1.0, period=50, half_life_s=900.0)
    for at in range(100_000):
        hazards.start(0, at * 1.0)
    assert len(hazards._out) < 400
    cache = adaptive(ghosts=0.01, period=50)
    for at in range(3000):
        cache.insert([at, *range(10)], range(11), now_s=at * 1.0)
        cache.evict(11, at * 1.0)
    assert cache.policy.remembered.num_pages <= 100


@pytest.mark.slow
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
    assert len(policy.hazards._out) < 400


def test_pages_that_are_evicted_together_end_where_the_trunk_does():
    """What lies before is of another class, though the same use was the last there."""
    policy = adaptive().policy

    def seen(trunk):
        return 5, 1, 0.0, TRAITS[1][0], 8, trunk

    def above(trunk):
        return 5, 0, 0.0, TRAITS[1][0], 8, trunk

    for trunk, ends in ((NO_TRUNK, None), (trunk_of(4, 0, 1), 4), (trunk_of(5, 0, 1), 4)):
        steps = [(depth, above(trunk)) for depth in (2, 4, 6)]
        assert policy.floor(steps, seen(trunk), 0) == ends


def test_a_trunk_that_comes_back_ends_in_a_step_again():
    cache = adaptive()
    cache.insert([1, 1, 2, 2, 2], range(5))
    cache.insert([1, 1, 3, 3, 3], range(10, 15))
    cache.evict(8)
    assert not cache.num_pages
    cache.insert([1, 1, 3, 3, 3, 4], range(20, 26))  # known from its ghosts, trunk and all
    (leaf,) = cache.nodes()
    assert leaf.mark[5][0] == 2
    assert 2 in [depth for depth, _ in leaf.steps]
    # While pages of other classes are to go first, it is cut there at most.
    assert cache.policy.floor(leaf.steps, leaf.mark, 0) >= 2


def test_a_shorter_insertion_has_no_step_beyond_it():
    """A request was locked with a trunk known from its ghosts, and brings only a part of it."""
    cache = adaptive()
    trunk = [1] * 6
    cache.insert([*trunk, 2, 2], range(8))
    cache.insert([*trunk, 3, 3], range(10, 18))
    cache.evict(9)
    assert cache.num_pages == 1
    tokens = [*trunk, 3, 3, 4]
    with cache.lock(cache.match_prefix(tokens)):
        cache.insert(tokens[:5], range(20, 25), visit=False)
        (leaf,) = [node for node in cache.nodes() if node.end == 5]
        assert leaf.mark[5][0] == 6, "the trunk"
