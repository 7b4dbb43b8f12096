"""The plain policies: their order is one rank, fixed when a page is last used.

What is counted of a page is the requests that used it (visits), not the calls: a request that locks
what it found, inserts what it computed and locks that is one visit.

Source: the names and orders of SGLang's eviction policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from prefixkv.cache.eviction.policy import Policy, Use, register_policy
from prefixkv.cache.eviction.queues import EvictionQueue, LeafHeap, LeafOrders, LeafPlace, LeafRank
from prefixkv.cache.node import Mark, TreeNode
from prefixkv.settings import at_least


@register_policy
class LeastRecentlyUsed(Policy):
    """The leaf used longest ago goes first. A mark is the tick of the use."""

    name = "lru"
    supersedes = True

    def mark(self, use: Use) -> Mark:
        return use.tick

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        return upper if upper > lower else lower

    def last_tick(self, history: Mark) -> int:
        return history  # type: ignore[no-any-return]


@register_policy
class MostRecentlyUsed(LeastRecentlyUsed):
    """The leaf used last goes first: for scans longer than the cache."""

    name = "mru"

    def rank(self, history: Mark) -> LeafRank:
        return -history


class Summing(Policy):
    """The base of policies that add up. A mark is (a sum, last tick)."""

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        # Adding up is associative, and so is the later of two ticks.
        return (upper[0] + lower[0], upper[1] if upper[1] > lower[1] else lower[1])

    def last_tick(self, history: Mark) -> int:
        return history[1]  # type: ignore[no-any-return]


@register_policy
class LeastFrequentlyUsed(Summing):
    """The fewest visits go first, then the least recently used. A mark is (visits, last tick).

    For comparison: visits never grow old, so sessions that are over keep the pool.
    """

    name = "lfu"

    def mark(self, use: Use) -> Mark:
        return (1 if use.visit else 0, use.tick)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        # New pages begin with one visit, also when their request has been seen. Then the old ones
        # had it already.
        first = (use.num_pages, (1, use.tick))
        return (first,) if use.visit else ((use.old_pages, (-1, use.tick)), first)

    def describe(self, history: Mark) -> str:
        return f", {history[0]} visits"


@register_policy
class SegmentedLru(LeastFrequentlyUsed):
    """Pages seen once go before pages seen again; within both, the least recently used.

    For comparison: the new end of a turn has been seen once, so a session under way goes first.

    Source: segmented LRU (Karedla, Love and Wherry, 1994), without bounds of the segments.
    """

    name = "slru"

    def rank(self, history: Mark) -> LeafRank:
        return (history[0] > 1, history[1])


@register_policy
class FirstInFirstOut(Summing):
    """The page inserted first goes first. A mark is (tick of insertion, last tick)."""

    name = "fifo"

    def mark(self, use: Use) -> Mark:
        return (0, use.tick)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        # The new pages get the tick as their sum. At the end of the old ones it is taken off again,
        # so that their sums stay what they were.
        return ((use.old_pages, (-use.tick, use.tick)), (use.num_pages, (use.tick, use.tick)))


@register_policy
class FirstInLastOut(FirstInFirstOut):
    """The page inserted last goes first."""

    name = "filo"

    def rank(self, history: Mark) -> LeafRank:
        return -history[0]


@register_policy
class ByPriority(Policy):
    """The lowest priority goes first, among equals the least recently used.

    A mark is (priority, last tick, last time). `ttl_s`: pages that were not used for this long lose
    their priority, and go before all others. None: never. Raises ConfigError below 0.
    """

    name = "priority"

    def __init__(self, ttl_s: float | None = None) -> None:
        at_least(0, ttl_s=ttl_s or 0)
        self.ttl_s = ttl_s

    def mark(self, use: Use) -> Mark:
        # A lock has no priority of its own: it must not raise or lower that of the pages.
        return (-inf if use.priority is None else use.priority, use.tick, use.now_s)

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        last = upper if upper[1] > lower[1] else lower
        return (max(upper[0], lower[0]), last[1], last[2])

    def rank(self, history: Mark) -> LeafRank:
        return history[:2]

    def last_tick(self, history: Mark) -> int:
        return history[1]  # type: ignore[no-any-return]

    def make_queue(self) -> EvictionQueue:
        """Return a heap by priority, or two orders if priorities expire."""
        return LeafHeap(self.rank) if self.ttl_s is None else _ExpiringQueue(self.ttl_s)


class _ExpiringQueue(LeafOrders):
    """Two orders over the same leaves: 0 by last use, to see what has expired, and 1 by rank."""

    def __init__(self, ttl_s: float) -> None:
        super().__init__(2)
        self._ttl_s = ttl_s

    def place(self, history: Mark) -> LeafPlace:
        return 1, history[:2], (0, history[1])

    def choose(self, now_s: float) -> TreeNode | None:
        # If the least recently used leaf has not expired, none has.
        oldest = self.head(0)
        if oldest is not None and now_s - oldest.mark[2] > self._ttl_s:
            return oldest
        return self.head(1)

    def rank_at(self, leaf: TreeNode, now_s: float) -> LeafRank:
        history = leaf.mark
        expired = now_s - history[2] > self._ttl_s
        return (0, 0, history[1]) if expired else (1, *history[:2])
