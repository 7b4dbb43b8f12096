"""A user's policy that raises anywhere, at random: the tree's laws hold, no page is lost, and from
then on the cache is `lru`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from benchmarks.policies.gated import Gated
from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.cache.eviction.policy import LeafHeap, LeafRank, Policy, Use
from prefixkv.cache.node import Mark, TreeNode
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import PageOptions
from prefixkv.errors import OutOfPagesError, UserErrors
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.paging import pages_for

PAGE_SIZE = 2
NUM_PAGES = 24


class OopsError(Exception):
    """What a user's policy raises."""


class Moody(LeastRecentlyUsed):
    """Raises with a probability, in any of its methods."""

    evicted_every_pages = 1

    def __init__(self, rng: random.Random, often: float) -> None:
        self.rng, self.often = rng, often
        self.num_raised = 0

    def may_raise(self) -> None:
        if self.rng.random() < self.often:
            self.num_raised += 1
            raise OopsError

    def mark(self, use: Use) -> Mark:
        self.may_raise()
        return super().mark(use)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        self.may_raise()
        return super().insertion_marks(use)

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        self.may_raise()
        return super().fold(upper, lower)

    def rank(self, history: Mark) -> LeafRank:
        self.may_raise()
        return super().rank(history)

    def last_tick(self, history: Mark) -> int:
        self.may_raise()
        return super().last_tick(history)

    def evicted(self, node: Any, num_pages: int) -> None:
        self.may_raise()

    def reset(self) -> None:
        self.may_raise()

    def work_ahead(self) -> None:
        self.may_raise()

    def make_queue(self) -> LeafHeap:
        if self._serves_a_cache and hasattr(self, "num_queues"):
            self.may_raise()
        self.num_queues = 1
        return LeafHeap(self.rank)


class MoodyGated(Gated):
    """Of several orders, and raises when asked for a history."""

    rng: Any = None
    often = 0.0

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        if self.rng is not None and self.rng.random() < self.often:
            raise OopsError
        return super().fold(upper, lower)


def moody(rng: random.Random, kind: str) -> Policy:
    often = rng.choice([0.02, 0.2, 1.0])
    if kind == "lru":
        return Moody(rng, often)
    policy = MoodyGated()
    policy.rng, policy.often = rng, often
    return policy


@pytest.mark.parametrize("kind", ["lru", "gated"])
@pytest.mark.parametrize("seed", range(12))
def test_books_stay_right_under_a_policy_that_raises(seed: int, kind: str) -> None:
    rng = random.Random(f"{kind} {seed}")
    manager = PageManager(
        NUM_PAGES, PAGE_SIZE, 8, options=PageOptions(policy=moody(rng, kind), evict_reserve_pages=1)
    )
    live: list[tuple[RequestPages, RadixKey]] = []
    for step in range(150):
        match rng.choice(["open", "open", "commit", "finish", "drop", "grow", "wait", "flush"]):
            case "open" if manager.can_open:
                tokens = [rng.choice([1, 1, 2, 3]) for _ in range(rng.randrange(1, 14))]
                key = RadixKey(tokens)
                match = manager.match(key)
                new = pages_for(len(key), PAGE_SIZE) - (match.depth if match is not None else 0)
                with suppress(OutOfPagesError):
                    live.append((manager.open(match, new, float(step)), key))
            case "commit" if live:
                manager.cache_unfinished(*rng.choice(live), float(step))
            case "finish" if live:
                ended = live.pop(rng.randrange(len(live)))
                manager.cache_finished(
                    *ended, float(step), continues=rng.choice([None, True, False])
                )
            case "drop" if live:
                manager.drop(live.pop(rng.randrange(len(live)))[0])
            case "grow" if live:
                with suppress(OutOfPagesError):
                    manager.grow_many([rng.choice(live)[0]], float(step))
            case "wait":
                match = manager.cache.match_prefix([1] * rng.randrange(2, 9))
                manager.cache.unwant(manager.cache.want(match))
            case "flush" if rng.random() < 0.1:
                manager.flush()
        manager.check_invariants()
        assert manager.cache.locks == {pages.lock for pages, _ in live if pages.lock is not None}
        assert manager.table.free_rows == 8 - len(live)
    for pages, _ in live:
        manager.drop(pages)
    manager.check_invariants()
    policy = manager.cache.policy
    assert manager.errors.num == (policy.error is not None)
    assert (type(policy.asked).__name__ == "_Fallen") is (policy.error is not None)
    assert manager.allocator.owned_pages == 0
    assert manager.cache.protected_pages == manager.cache.orphan_pages == 0
    assert len(manager.cache.evict(NUM_PAGES)) == manager.allocator.cached_pages, (
        "every page comes back"
    )


class Marks(LeastRecentlyUsed):
    """Says `said` for the use with this tick, and for no other."""

    def __init__(self, tick: int, said: Any) -> None:
        self.tick, self.said = tick, said

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        return self.said if use.tick == self.tick else super().insertion_marks(use)

    def mark(self, use: Use) -> Mark:
        return None if use.tick == self.tick else super().mark(use)


@pytest.mark.parametrize(
    "said",
    [
        (), ((1, 3),), ((0, 3), (3, 3)), None, ((2, None),), ((3, 3), (2, 3)), ((1.5, 3), (2, 3)),
        ((2.0, 3),), ((1.0, 3), (2, 3)), ((2, 3), (1, 3), (2, 3)),
        ((1, None), (2, 3)),
    ],
)  # fmt: skip
def test_after_what_no_policy_may_say_the_cache_is_lru(said: Any) -> None:
    lines: list[str] = []
    errors = UserErrors(lines.append)
    cache = RadixCache(1, Marks(3, said), 10, errors)
    cache.insert([1], [1])
    cache.insert([2], [2])
    cache.insert([1, 3], [1, 3])
    for number in range(4, 8):
        cache.insert([number], [number])
    cache.lock(cache.match_prefix([4]))
    cache.check_invariants()
    assert errors.num == 1
    assert cache.policy.error is not None
    (line,) = lines
    assert "policy 'lru' raised: the cache goes on with 'lru', for good" in line
    assert "Error" in line
    order = [cache.evict(1).tolist() for _ in range(6)]
    assert order[-3:] == [[5], [6], [7]]


class Says(LeastRecentlyUsed):
    """Says what no policy may where it is asked for `what`, and keeps its marks apart."""

    supersedes = False

    def __init__(self, what: str, said: Any) -> None:
        self.what, self.said = what, said

    def rank(self, history: Mark) -> LeafRank:
        return self.said(history) if self.what == "rank" else super().rank(history)

    def floor(self, steps: Sequence[tuple[int, Mark]], mark: Mark, low: int) -> int | None:
        return self.said if self.what == "floor" else super().floor(steps, mark, low)

    def last_tick(self, history: Mark) -> int:
        return self.said if self.what == "tick" else super().last_tick(history)

    def make_queue(self) -> LeafHeap:
        return self.said(self.rank) if self.what == "queue" else LeafHeap(self.rank)


class Later:
    """A rank with `<` alone."""

    def __init__(self, tick: int) -> None:
        self.tick = tick

    def __lt__(self, other: Later) -> bool:
        return self.tick < other.tick


class Stale(LeafHeap):
    def first(self, now_s: float = 0.0) -> TreeNode | None:
        return self._heap[0][1] if self._heap else None


class Silent(LeafHeap):
    def first(self, now_s: float = 0.0) -> TreeNode | None:
        return None


class Stuck(LeafHeap):
    def first(self, now_s: float = 0.0) -> TreeNode | None:
        leaf = super().first(now_s)
        return leaf if leaf and leaf.key[0] // 10 != 2 else None  # of the second prompt


def full_cache(policy: Policy) -> RadixCache:
    """Of three prompts, each with its beginnings used later."""
    cache = RadixCache(1, policy, 40, UserErrors(lambda line: None))
    for number in (1, 2, 3):
        path = [*range(10 * number, 10 * number + 5)]
        cache.insert(path, path)
        for end in (4, 2):
            cache.unlock(cache.lock(cache.match_prefix(path[:end])))
    return cache


@pytest.mark.parametrize(
    ("what", "said"),
    [*product(["floor"], [10**9, -5, 0, 0.5, 2.0]), *product(["queue"], [Stale, Silent, Stuck]),
     ("rank", Later), ("rank", lambda history: float("nan"))],
)  # fmt: skip
def test_an_eviction_ends_and_takes_each_page_once_whatever_a_policy_says(
    what: str, said: Any
) -> None:
    cache = full_cache(Says(what, said))
    taken: list[int] = []
    for num in (1, 3, 2, 9):
        taken += cache.evict(num).tolist()
        cache.check_invariants()
    assert sorted(taken) == [*range(10, 15), *range(20, 25), *range(30, 35)]
    assert (cache.policy.error is None) is (what == "rank")


@pytest.mark.parametrize("said", [None, -1, "7", [7], object()])
def test_what_a_request_waits_for_goes_last_whatever_a_policy_says_of_its_last_use(
    said: Any,
) -> None:
    cache = full_cache(Says("tick", said))
    wants = [cache.want(cache.match_prefix(range(10 * one, 10 * one + 5))) for one in (1, 2)]
    assert sorted(cache.evict(5).tolist()) == [*range(30, 35)]
    assert len(cache.evict(3)) == 3
    cache.check_invariants()
    for want in wants:
        cache.unwant(want)
    assert len(cache.evict(20)) == 7
    cache.check_invariants()
    assert cache.policy.error is not None
