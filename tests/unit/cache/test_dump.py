"""What a dump shows."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkv.cache.radix_cache import RadixCache


def small():
    cache = RadixCache(page_size=2, policy="lru")
    cache.insert([1, 1, 2, 2, 3, 3], range(3))
    cache.insert([1, 1, 2, 2, 4, 4], [0, 1, 9], namespace=None)
    cache.lock(cache.match_prefix([1, 1, 2, 2]))
    cache.insert([5, 5], [20], namespace="[red]lora")
    cache.want(cache.match_prefix([5, 5, 6, 6], namespace="[red]lora"))
    return cache


def test_dump_names_depth_pages_locks_and_the_last_use():
    text = small().dump()
    assert text.splitlines()[1:3] == [
        "  <TreeNode pages 0..2 lock_ref=1 children=2>, used 3",
        "    <TreeNode pages 2..3 lock_ref=0 children=0>, used 1",
    ]
    assert "namespace '[red]lora'" in text
    assert "wanted by 1" in text


def test_dump_is_cut_and_says_so():
    assert small().dump(max_nodes=2).splitlines()[-1] == "and 2 more nodes"


@pytest.mark.slow
def test_a_deep_chain_can_be_shown():
    cache = RadixCache(page_size=1, policy="lru")
    run = np.arange(2000)
    locks = [cache.lock(cache.insert(run[:end], run[:end])) for end in range(1, 2001)]
    assert len(cache.dump(max_nodes=5000).splitlines()) == 2001
    assert cache.dump().splitlines()[-1] == "and 1000 more nodes"
    assert len(locks) == 2000
