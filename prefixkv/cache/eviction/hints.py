"""What is said of sessions, under every policy alike: leaves of sessions that are over go first,
those of sessions that go on go last, and within each of the three groups the policy decides.

A hint is about one use, so it is kept by the use's tick: a leaf stands in the group of what was
said of its last use, and a later use makes the hint void by itself. A promise counts for
`promise_s`; a session that has not come back by then counts as over. So a wrong hint costs little:
a false promise ends, and leaves that are wrongly said to be over go in the policy's order.

Where nearly all sessions come back, most that are said to be over do, too, even if few hints are
wrong. So it is counted how many come back, and while hints do not tell sessions apart, all leaves
go in the policy's order. That needs a policy that sees returns of what was evicted, or what goes
first because it is said to be over would never be seen to come back.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from typing import Final

from prefixkv.cache.eviction.policy import Policy
from prefixkv.cache.eviction.queues import EvictionQueue, Rank
from prefixkv.cache.node import Node

MOST_HINTS: Final = 1 << 16
"""How many are remembered; of more, the oldest are forgotten."""

TRUST: Final = 8
"""How many hints of each kind are taken to have come true, all but one, before any has."""

WINDOW: Final = 256
"""When it is known of so many hints of a kind whether they came true, each counts half."""

_OVER, _UNKNOWN, _GOES_ON = range(3)


class Hints:
    """(continues, when it was said) by the tick of the use that it was said of.

    Attributes:
        believed: while of what was said to be over at most half as much comes back as of what was
            said to go on; always if the policy tells no returns.
    """

    def __init__(self, promise_s: float, tells_returns: bool = False) -> None:
        self._promise_s = promise_s
        self._tells_returns = tells_returns
        self.clear()

    def say(self, tick: int, continues: bool, now_s: float) -> None:
        for said in (self._said, self._open) if self._tells_returns else (self._said,):
            said.pop(tick, None)  # what is said again is the newest
            said[tick] = (continues, now_s)
            if len(said) > MOST_HINTS:
                del said[next(iter(said))]
        for old, (continued, since_s) in list(islice(self._open.items(), 2)):  # O(1)
            if self.broken(since_s, now_s):
                del self._open[old]
                self._count(continued, False)

    def came_back(self, tick: int) -> None:
        """Another use goes on from this one."""
        if (said := self._open.pop(tick, None)) is not None:
            self._count(said[0], True)

    def _count(self, continues: bool, came_back: bool) -> None:
        counts = self._counts[continues]
        counts[came_back] += 1
        if sum(counts) > WINDOW:
            counts[:] = [count / 2 for count in counts]
        over, goes_on = (came / (gone + came) for gone, came in self._counts)
        self.believed = 2 * over <= goes_on

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
        self._said: dict[int, tuple[bool, float]] = {}
        self._open: dict[int, tuple[bool, float]] = {}  # whether they come true is not known
        # Of what was said to be over, and to go on: how many did not come back, and how many did.
        self._counts = [TRUST - 1.0, 1.0], [1.0, TRUST - 1.0]
        self.believed = True


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
        found: tuple[Rank, Node] | None = None
        for queue in self._queues:
            if (leaf := queue.first(now_s)) is not None:
                if self._hints.believed:
                    return leaf
                rank = queue.rank_at(leaf, now_s)
                if found is None or rank < found[0]:
                    found = rank, leaf
        return found[1] if found is not None else None

    def rank_at(self, leaf: Node, now_s: float) -> Rank:
        return leaf.entry[2].rank_at(leaf, now_s)

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
