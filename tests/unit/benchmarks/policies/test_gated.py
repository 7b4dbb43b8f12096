"""The gated policy: what it protects, and what it lets go. Its model is in
`tests/unit/cache/eviction/test_policies.py` beside those of the policies that ship."""

from __future__ import annotations

import pytest

from benchmarks.policies.gated import Gated
from prefixkv.cache.eviction.policy import make_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.errors import ConfigError


def test_it_is_known_by_its_name_once_it_is_imported():
    assert isinstance(make_policy("gated"), Gated)


@pytest.mark.parametrize("settings", [{"fresh_s": -1}, {"fresh_s": "long"}, {"stride_blocks": 0}])
def test_a_setting_out_of_range_is_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Gated(**settings)


def gated(**settings):
    small = {
        "fresh_s": 100.0,
        "known_s": 300.0,
        "short_tokens": 2,
        "block_tokens": 1,
        "stride_blocks": 4,
    }
    return RadixCache(page_size=1, policy=Gated(**small | settings), pool_pages=1000)


def test_one_shots_go_newest_first_and_what_is_known_stays():
    cache = gated()
    cache.insert([1] * 4, range(4), now_s=0.0)
    cache.insert([1] * 4, range(4), now_s=1.0)  # seen again
    cache.insert([2] * 4, range(10, 14), now_s=2.0)
    cache.insert([3] * 4, range(20, 24), now_s=3.0)
    assert sorted(cache.evict(4, 4.0).tolist()) == [20, 21, 22, 23]
    assert sorted(cache.evict(4, 4.0).tolist()) == [10, 11, 12, 13]
    assert sorted(cache.evict(4, 4.0).tolist()) == [0, 1, 2, 3]


def test_without_a_clock_the_oldest_of_a_level_goes():
    cache = gated()
    for at in range(3):
        cache.insert([at + 1] * 4, range(10 * at, 10 * at + 4))
    cache.insert([1] * 4, range(4))  # seen again
    assert sorted(cache.evict(4).tolist()) == [10, 11, 12, 13]
    assert sorted(cache.evict(4).tolist()) == [20, 21, 22, 23]


def test_pages_unused_for_too_long_go_first_the_most_overdue_before_others():
    cache = gated()
    for at, when in enumerate((0.0, 50.0, 200.0)):
        cache.insert([at + 1] * 4, range(10 * at, 10 * at + 4), now_s=when)
    assert sorted(cache.evict(4, 201.0).tolist()) == [
        0,
        1,
        2,
        3,
    ]  # overdue for 101 s, the next for 51 s
    assert sorted(cache.evict(4, 201.0).tolist()) == [10, 11, 12, 13]


def test_the_short_end_of_a_next_turn_is_known_a_long_one_is_not():
    for added, first_to_go in ((2, [20, 21, 22, 23]), (3, [10, 11, 12])):
        cache = gated()
        cache.insert([1] * 4, range(4), now_s=0.0)
        cache.insert([3] * 4, range(20, 24), now_s=1.0)
        cache.insert([1] * 4 + [2] * added, [*range(4), *range(10, 10 + added)], now_s=2.0)
        assert sorted(cache.evict(len(first_to_go), 3.0).tolist()) == first_to_go


def test_what_was_evicted_is_known_when_it_comes_back_unless_forgotten():
    for share, visits in (
        (1.0, 2),
        (0.003, 1),
    ):  # ghosts may stand for 3 of 1,000 pages, or for all
        cache = gated(ghosts=share)
        cache.insert([1] * 6, range(6), now_s=0.0)
        cache.evict(6, 0.0)
        cache.insert([1] * 6, range(6), now_s=1.0)  # the second time
        cache.insert([2] * 6, range(10, 16), now_s=2.0)
        assert set(cache.evict(6, 3.0).tolist()) == set(range(10, 16))
        assert [node.mark.visits for node in cache.nodes()] == [visits]
        assert cache.policy.asked.remembered.num_pages == (6 if visits == 2 else 0)
        assert len(cache.evict(6, 4.0)) == 6
        assert cache.policy.asked.remembered.num_pages == (12 if visits == 2 else 0)
        cache.reset()
        assert cache.policy.asked.remembered.num_pages == 0
