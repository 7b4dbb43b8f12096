"""What is said of sessions, under every policy alike: leaves of sessions that are over go first,
those of sessions that go on go last, and within each of the three groups the policy decides.

A hint is about one use, so it is kept by the use's tick: a leaf stands in the group of what was
said of its last use, and a later use makes the hint void by itself. A promise counts for
`promise_s`; a session that has not come back by then counts as over. So a wrong hint costs little:
a false promise ends, and leaves that are wrongly said to be over go in the policy's order.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from prefixkv.cache.eviction.policy import Policy
from prefixkv.cache.eviction.queues import EvictionQueue
from prefixkv.cache.node import Node

MOST_HINTS: Final = 1 << 16
"""How many are remembered; of more, the oldest are forgotten."""

_OVER, _UNKNOWN, _GOES_ON = range(3)


class Hints:
    """(continues, when it was said) by the tick of the use that it was said of."""

    def __init__(self, promise_s: float) -> None:
        self._promise_s = promise_s
        self._said: dict[int, tuple[bool, float]] = {}

    def say(self, tick: int, continues: bool, now_s: float) -> None:
        self._said.pop(tick, None)  # what is said again is the newest
        self._said[tick] = (continues, now_s)
        if len(self._said) > MOST_HINTS:
            del self._said[next(iter(self._said))]

    def group(self, tick: int, now_s: float) -> tuple[int, float]:
        """Which group a leaf is in whose last use this is, and since when."""
        if (said := self._said.get(tick)) is None:
            return _UNKNOWN, 0.0
        continues, since_s = said
        return (_GOES_ON if continues and not self.broken(since_s, now_s) else _OVER), since_s

    def broken(self, since_s: float, now_s: float) -> bool:
        """Whether a promise of then is broken by now, if the session has not come back."""
        return now_s - since_s > self._promise_s

    def clear(self) -> None:
        self._said.clear()


class HintedQueue:
    """An `EvictionQueue` of three queues of the policy's. O(1) more than these.

    Args:
        queue: the policy's queue of all leaves so far, of which nothing was said.
    """

    def __init__(self, policy: Policy, hints: Hints, queue: EvictionQueue) -> None:
        self._last_tick = policy.last_tick
        self._hints = hints
        self._queues = (policy.make_queue(), queue, policy.make_queue())  # by group
        self._promised: list[tuple[float, int, Node]] = []  # (when, tick, leaf): a heap, lazily
        self._now_s = 0.0

    def add(self, leaf: Node) -> None:
        tick = self._last_tick(leaf.mark)
        group, since_s = self._hints.group(tick, self._now_s)
        if group == _GOES_ON:
            heappush(self._promised, (since_s, tick, leaf))
        self._queues[group].add(leaf)

    def first(self, now_s: float) -> Node | None:
        self._break_promises(now_s)
        for queue in self._queues:
            if (leaf := queue.first(now_s)) is not None:
                return leaf
        return None

    def take(self, leaf: Node) -> None:
        leaf.entry[2].take(leaf)

    def bury(self) -> None:
        raise NotImplementedError("entries stand in one of the three queues")

    def expect(self, num_leaves: int, now_s: float) -> None:
        self._break_promises(now_s)
        for queue in self._queues:
            queue.expect(num_leaves, now_s)

    def broken_laws(self) -> list[str]:
        return [law for queue in self._queues for law in queue.broken_laws()]

    def _break_promises(self, now_s: float) -> None:
        """Leaves of sessions that have not come back in time go over to those that are over."""
        self._now_s = max(self._now_s, now_s)
        promised = self._promised
        while promised and self._hints.broken(promised[0][0], self._now_s):
            _, tick, leaf = heappop(promised)
            stands = leaf.entry is not None and not leaf.lock_ref and not leaf.children
            if stands and self._last_tick(leaf.mark) == tick:
                group, _ = self._hints.group(tick, self._now_s)
                if group != _GOES_ON:  # else it was promised again
                    self._queues[group].add(leaf)
