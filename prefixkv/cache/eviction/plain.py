"""The plain policies: their order is one rank, fixed when a page is last used.

What is counted of a page is the requests that used it (visits), not the calls: a request that locks
what it found, inserts what it computed and locks that is one visit.

Source: the names and orders of SGLang's eviction policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from prefixkv.cache.eviction.policy import Policy, Use, register_policy
from prefixkv.cache.eviction.queues import LeafRank
from prefixkv.cache.node import Mark


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
    """The lowest priority goes first, among equals the least recently used. A mark is (priority,
    last tick)."""

    name = "priority"

    def mark(self, use: Use) -> Mark:
        # A lock has no priority of its own: it must not raise or lower that of the pages.
        return (-inf if use.priority is None else use.priority, use.tick)

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        return (max(upper[0], lower[0]), max(upper[1], lower[1]))

    def last_tick(self, history: Mark) -> int:
        return history[1]  # type: ignore[no-any-return]
