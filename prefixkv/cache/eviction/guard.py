"""A user's policy, until it raises: from then on the cache is `lru`, for good.

The policies of this package are not guarded: one that raises is a defect. A policy that raised
leaves marks behind; to `lru` they are of pages that were never used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.cache.eviction.policy import Policy, Use
from prefixkv.cache.eviction.queues import EvictionQueue, LeafHeap, LeafRank
from prefixkv.cache.node import Mark, TreeNode
from prefixkv.errors import UserErrors


class _Tick(int):
    """The mark of a use after the fall."""


def _tick(mark: Mark) -> _Tick:
    return mark if type(mark) is _Tick else _Tick(0)


class _Fallen(LeastRecentlyUsed):
    """`lru` over what another policy has left."""

    def mark(self, use: Use) -> Mark:
        return _Tick(use.tick)

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        return max(_tick(upper), _tick(lower))

    def rank(self, history: Mark) -> LeafRank:
        return _tick(history)

    def last_tick(self, history: Mark) -> int:
        return _tick(history)


class Guard(Policy):
    """Asks a user's policy, and `lru` after the first exception.

    Args:
        policy: the user's.
        errors: counts the exception, and says it.
        requeue: moves all evictable leaves to new queues, and returns the first of these.
    """

    def __init__(
        self, policy: Policy, errors: UserErrors, requeue: Callable[[], EvictionQueue]
    ) -> None:
        self.asked = policy
        self.queue: EvictionQueue | None = None  # after the fall
        self._errors, self._requeue = errors, requeue
        self.name, self.supersedes = policy.name, policy.supersedes
        self.ghost_pages, self.token_scale = policy.ghost_pages, policy.token_scale
        self.promise_s, self.reports_returns = policy.promise_s, policy.reports_returns

    def hears_returns(self, came_back: Callable[[int], None]) -> None:
        self.asked.hears_returns(came_back)

    def fall(self, error: Exception) -> EvictionQueue:
        """Go over to `lru`, unless that was done, and return the queue that all leaves are in."""
        if self.queue is None:
            self.error = error
            what = f"policy {self.name!r} raised: the cache goes on with 'lru', for good"
            self._errors.said(what, error)
            self.asked, self.ghost_pages = _Fallen(), 0
            self.queue = LeafHeap(self.rank)  # for what is asked while the leaves are moved
            self.queue = self._requeue()
        return self.queue

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.asked, method)(*args)
        except Exception as error:
            self.fall(error)
        return getattr(self.asked, method)(*args)

    def serve(self, page_size: int, pool_pages: int | None) -> None:
        self.asked.serve(page_size, pool_pages)

    def release(self) -> None:
        self.asked.release()

    def _ask_mark(self, method: str, *args: Any) -> Mark:
        mark = self._ask(method, *args)
        if mark is None:  # which stands for no use at all
            self.fall(ValueError(f"{method} has returned no mark"))
            return getattr(self.asked, method)(*args)
        return mark

    def mark(self, use: Use) -> Mark:
        return self._ask_mark("mark", use)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        try:
            marks = list(self.asked.insertion_marks(use))
            # One outside the new pages would break the staircase: steps rise, inside their node.
            is_inside = marks[-1][0] == use.num_pages and marks[0][0] >= use.old_pages
            if is_inside and all(mark is not None for _, mark in marks):
                return marks
            raise ValueError(f"insertion_marks of {use.num_pages} pages are {marks}")
        except Exception as error:
            self.fall(error)
        return [(use.num_pages, self.asked.mark(use))]

    def fold(self, upper: Mark, lower: Mark) -> Mark:
        return self._ask_mark("fold", upper, lower)

    def rank(self, history: Mark) -> LeafRank:
        return self._ask("rank", history)

    def last_tick(self, history: Mark) -> int:
        return self._ask("last_tick", history)  # type: ignore[no-any-return]

    def describe(self, history: Mark) -> str:
        return self._ask("describe", history)  # type: ignore[no-any-return]

    def make_queue(self) -> EvictionQueue:
        queue: EvictionQueue = self._ask("make_queue")
        return queue if self.queue is not None else _GuardedQueue(self, queue)

    def floor(self, steps: Sequence[tuple[int, Mark]], mark: Mark, low: int) -> int | None:
        return self._ask("floor", steps, mark, low)  # type: ignore[no-any-return]

    def evicted(self, node: TreeNode, num_pages: int) -> None:
        self._ask("evicted", node, num_pages)

    def work_ahead(self) -> None:
        self._ask("work_ahead")

    def reset(self) -> None:
        self._ask("reset")

    def broken_laws(self) -> list[str]:
        return self.asked.broken_laws()


def guarded(
    policy: Policy, queue: EvictionQueue, errors: UserErrors, requeue: Callable[[], EvictionQueue]
) -> tuple[Policy, EvictionQueue]:
    if type(policy).__module__.startswith("prefixkv."):
        return policy, queue
    guard = Guard(policy, errors, requeue)
    return guard, _GuardedQueue(guard, queue)


class _GuardedQueue:
    """A queue of the user's policy. Leaves' entries name that queue, not this one."""

    def __init__(self, guard: Guard, queue: EvictionQueue) -> None:
        self._guard, self._queue = guard, queue

    def _ask(self, method: str, *args: Any) -> Any:
        fallen = self._guard.queue
        if fallen is None:
            try:
                return getattr(self._queue, method)(*args)
            except Exception as error:
                fallen = self._guard.fall(error)
        return getattr(fallen, method)(*args)

    def add(self, leaf: TreeNode) -> None:
        self._ask("add", leaf)

    def first(self, now_s: float) -> TreeNode | None:
        return self._ask("first", now_s)  # type: ignore[no-any-return]

    def rank_at(self, leaf: TreeNode, now_s: float) -> LeafRank:
        return self._ask("rank_at", leaf, now_s)

    def count_dead(self) -> None:
        raise NotImplementedError("entries stand in the queue behind this one")

    def expect(self, num_leaves: int, now_s: float) -> None:
        self._ask("expect", num_leaves, now_s)

    def broken_laws(self) -> list[str]:
        return self._ask("broken_laws")  # type: ignore[no-any-return]
