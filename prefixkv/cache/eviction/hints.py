"""Hints about sessions, under every policy: leaves of finished sessions go first, those of
continuing sessions last. Within a group the policy decides.

A hint is kept by the tick of its use, so a later use makes it void. A promise to continue counts
for `promise_s`. Returns are counted, and while hints do not tell sessions apart, all leaves go in
the policy's order. That needs a policy that sees returns of evicted pages.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from typing import Final

from prefixkv.cache.eviction.policy import Policy
from prefixkv.cache.eviction.queues import EvictionQueue, LeafRank
from prefixkv.cache.node import TreeNode

MOST_HINTS: Final = 1 << 16
"""Limit for remembered hints; beyond it the oldest are forgotten."""

TRUST: Final = 8
"""Imagined hints of each kind from the start, of which all but one came true."""

WINDOW: Final = 256
"""Known outcomes of one kind of hint after which each counts half."""

_OVER, _UNKNOWN, _GOES_ON = range(3)


class Hints:
    """All hints in force: (continues, time of the hint) by the tick of the use that it is about.
    `believed`: True while sessions said to be finished come back at most half as often as those
    said to continue; always True if the policy tells no returns."""

    def __init__(self, promise_s: float, reports_returns: bool = False) -> None:
        self._promise_s = promise_s
        self._reports_returns = reports_returns
        self.clear()

    @classmethod
    def of(cls, policy: Policy) -> Hints:
        """Hints under this policy, which tells of returns if it can."""
        hints = cls(policy.promise_s, policy.reports_returns)
        if policy.reports_returns:
            policy.hears_returns(hints.came_back)
        return hints

    def queue(self, policy: Policy, queue: EvictionQueue) -> EvictionQueue:
        return HintedQueue(policy, self, queue)

    def note(self, tick: int, continues: bool, now_s: float) -> None:
        """Note a hint about the session whose last use has this tick. O(1)."""
        for hints in (self._in_force, self._open) if self._reports_returns else (self._in_force,):
            # Dictionaries keep the order of insertion: a repeated hint becomes the newest.
            hints.pop(tick, None)
            hints[tick] = (continues, now_s)
            if len(hints) > MOST_HINTS:
                del hints[next(iter(hints))]
        # Two of the oldest per call: more than come in, so those that are decided never pile up.
        for old, (continued, since_s) in list(islice(self._open.items(), 2)):
            if self.broken(since_s, now_s):
                del self._open[old]
                self._count(continued, False)

    def came_back(self, tick: int) -> None:
        if (hint := self._open.pop(tick, None)) is not None:
            self._count(hint[0], True)

    def _count(self, continues: bool, came_back: bool) -> None:
        counts = self._counts[continues]
        counts[came_back] += 1
        if sum(counts) > WINDOW:
            counts[:] = [count / 2 for count in counts]
        over, goes_on = (came / (gone + came) for gone, came in self._counts)
        self.believed = 2 * over <= goes_on

    def group(self, tick: int, now_s: float) -> tuple[int, float]:
        """Return the group (finished, unknown, continues) of a leaf, and the time of the hint."""
        if (hint := self._in_force.get(tick)) is None:
            return _UNKNOWN, 0.0
        continues, since_s = hint
        return (_GOES_ON if continues and not self.broken(since_s, now_s) else _OVER), since_s

    def broken(self, since_s: float, now_s: float) -> bool:
        """Return whether a promise of `since_s` is broken unless the session has come back."""
        return now_s - since_s > self._promise_s

    def clear(self) -> None:
        self._in_force: dict[int, tuple[bool, float]] = {}
        # Hints without an outcome so far. One leaves `_in_force` by the limit alone: it is still in
        # force for its leaf when its outcome is known.
        self._open: dict[int, tuple[bool, float]] = {}
        # By kind of hint (finished, continues): sessions that did not come back, and that did.
        self._counts = [TRUST - 1.0, 1.0], [1.0, TRUST - 1.0]
        self.believed = True


class HintedQueue:
    """Three queues of the policy's, one per group of hints. `queue` has the leaves so far."""

    def __init__(self, policy: Policy, hints: Hints, queue: EvictionQueue) -> None:
        self._last_tick = policy.last_tick
        self._hints = hints
        self._queues = (policy.make_queue(), queue, policy.make_queue())  # by group
        self._promised: list[tuple[float, int, TreeNode]] = []  # (when, tick, leaf): a heap, lazily
        self._now_s = 0.0

    def add(self, leaf: TreeNode) -> None:
        tick = self._last_tick(leaf.mark)
        group, since_s = self._hints.group(tick, self._now_s)
        if group == _GOES_ON:
            heappush(self._promised, (since_s, tick, leaf))
        # The inner queue takes the leaf out of another one that it was in.
        self._queues[group].add(leaf)

    def first(self, now_s: float) -> TreeNode | None:
        """Return the first group's first leaf; by rank if hints are not believed."""
        self._break_promises(now_s)
        found: tuple[LeafRank, TreeNode] | None = None
        for queue in self._queues:
            if (leaf := queue.first(now_s)) is not None:
                if self._hints.believed:
                    return leaf
                rank = queue.rank_at(leaf, now_s)
                if found is None or rank < found[0]:
                    found = rank, leaf
        return found[1] if found is not None else None

    def rank_at(self, leaf: TreeNode, now_s: float) -> LeafRank:
        return leaf.entry[2].rank_at(leaf, now_s)

    def count_dead(self) -> None:
        """Refuse: `TreeNode.entry` always names one of the three inner queues."""
        raise NotImplementedError("entries stand in one of the three queues")

    def expect(self, num_leaves: int, now_s: float) -> None:
        self._break_promises(now_s)
        for queue in self._queues:
            queue.expect(num_leaves, now_s)

    def broken_laws(self) -> list[str]:
        return [law for queue in self._queues for law in queue.broken_laws()]

    def _break_promises(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        promised = self._promised
        while promised and self._hints.broken(promised[0][0], self._now_s):
            _, tick, leaf = heappop(promised)
            # The heap is lazy: the leaf may be gone, held, or used again since.
            stands = leaf.entry is not None and not leaf.lock_ref and not leaf.children
            if stands and self._last_tick(leaf.mark) == tick:
                group, _ = self._hints.group(tick, self._now_s)
                # Else it was promised again later, and has another item in the heap.
                if group != _GOES_ON:
                    self._queues[group].add(leaf)
