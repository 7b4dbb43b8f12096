"""The plain policies: their order is one rank, fixed when a page is last used; and `lru` in the
place of a user's policy that raised.

What is counted of a page is the requests that used it (visits), not the calls: a request that locks
what it found, inserts what it computed and locks that is one visit.

Source: the names and orders of SGLang's eviction policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import index
from typing import Any, cast

from prefixkv.cache.eviction.policy import (
    EvictionQueue,
    LeafHeap,
    LeafRank,
    Policy,
    Use,
    register_policy,
)
from prefixkv.cache.node import Mark
from prefixkv.errors import UserErrors
from prefixkv.paging import MAX_INDEX


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


# --- a user's policy ------------------------------------------------------------------------------

# It is asked until it raises: from then on the cache is `lru`, for good. The policies of this
# package are not guarded: one that raises is a defect. A policy that raised leaves marks behind; to
# `lru` they are of pages that were never used.


class _Tick(int):
    """The mark of a use after the fall."""


def _tick(mark: Mark) -> _Tick:
    return mark if type(mark) is _Tick else _Tick(0)


class _Fallen(LeastRecentlyUsed):
    def mark(self, use: Use) -> Mark:
        return _Tick(use.tick)

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        return max(_tick(upper), _tick(lower))

    def rank(self, history: Mark) -> LeafRank:
        return _tick(history)

    def last_tick(self, history: Mark) -> int:
        return _tick(history)


class Guard:
    """In the place of a user's policy: asks it, and `lru` after the first exception.

    Args:
        policy: the user's.
        errors: counts the exception, and says it.
        requeue: moves all evictable leaves to a new queue, and returns it.
    """

    def __init__(
        self, policy: Policy, errors: UserErrors, requeue: Callable[[], EvictionQueue]
    ) -> None:
        self.asked = policy
        self.error: Exception | None = None
        self.queue: EvictionQueue | None = None  # after the fall
        self._errors, self._requeue = errors, requeue

    def fall(self, error: Exception) -> EvictionQueue:
        """Go over to `lru`, unless that was done, and return the queue that all leaves are in."""
        if self.queue is None:
            self.error = error
            what = f"policy {self.asked.name!r} raised: the cache goes on with 'lru', for good"
            self._errors.said(what, error)
            self.asked = _Fallen()
            self.queue = LeafHeap(self.asked.rank)  # for what is asked while the leaves are moved
            self.queue = self._requeue()
        return self.queue

    def __getattr__(self, name: str) -> Any:
        said = getattr(self.asked, name)
        return partial(self._ask, name) if callable(said) else said

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            said = getattr(self.asked, method)(*args)
            no_mark = method in ("mark", "fold") and said is None  # it stands for no use at all
            no_tick = method == "last_tick" and said < 0  # what is no number raises here
            # Above the first step it may be outside the leaf, below the last it may take nothing.
            is_step = method != "floor" or said is None or index(said) in dict(args[0])
            if no_mark or no_tick or not is_step:
                raise ValueError(f"{method} has returned {said!r}")
            return said
        except Exception as error:
            self.fall(error)
        return getattr(self.asked, method)(*args)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        try:
            marks = list(self.asked.insertion_marks(use))
            # One outside the new pages would break the staircase: steps rise, inside their node.
            ends = [use.old_pages, *(index(depth) for depth, _ in marks)]
            is_marked = all(mark is not None for _, mark in marks)
            if is_marked and ends[-1] == use.num_pages and ends == sorted(ends):
                return marks
            raise ValueError(f"insertion_marks of {use.num_pages} pages are {marks}")
        except Exception as error:
            self.fall(error)
        return self.asked.insertion_marks(use)

    def make_queue(self) -> EvictionQueue:
        queue: EvictionQueue = self._ask("make_queue")
        return queue if self.queue is not None else self.guarded(queue)

    def guarded(self, queue: EvictionQueue) -> EvictionQueue:
        return cast("EvictionQueue", _GuardedQueue(self, queue))


class _GuardedQueue:
    """A queue of the user's policy. Leaves' entries name that queue, not this one."""

    most_pages = MAX_INDEX

    def __init__(self, guard: Guard, queue: EvictionQueue) -> None:
        self._guard, self._queue = guard, queue

    def __getattr__(self, method: str) -> Any:
        return partial(self._ask, method)

    def _ask(self, method: str, *args: Any) -> Any:
        fallen = self._guard.queue
        if fallen is None:
            try:
                said = getattr(self._queue, method)(*args)
                if said and method == "first" and (said.lock_ref or said.children or said.end < 0):
                    raise ValueError(f"first has returned {said}, which is no evictable leaf")
                return said
            except Exception as error:
                fallen = self._guard.fall(error)
        return getattr(fallen, method)(*args)


def guarded(
    policy: Policy, queue: EvictionQueue, errors: UserErrors, requeue: Callable[[], EvictionQueue]
) -> tuple[Policy, EvictionQueue]:
    if type(policy).__module__.startswith("prefixkv."):
        return policy, queue
    guard = Guard(policy, errors, requeue)
    return cast("Policy", guard), guard.guarded(queue)
