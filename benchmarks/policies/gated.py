"""The gated policy: a page has to be seen twice before it is protected from those that are seen
once. It does not ship: it is the worked example of a policy of one's own.

    prefixkv replay TRACE --policy lru --policy benchmarks.policies.gated:Gated:fresh_s=60

Most prompts never come back, and those that do come back within minutes or as the next turn of a
conversation. So the cache keeps two levels of leaves. Fresh ones stand at level 0, those known to
come back at level 1:

    seen once            0, but 1 if it is the short end that a next turn added to its conversation
    seen twice           1, but 0 if much that is new came with the second time
    seen more often      1

The leaf that goes is the first of these that there is:

1. A leaf unused for longer than `fresh_s` at level 0, `known_s` at level 1; of several the one that
   is overdue the most.
2. The newest of level 0. It is as likely to be a one-shot as the older ones, which so get the time
   to be seen again.
3. The oldest of level 1.

A cache large enough to keep pages for longer than those times thus behaves like LRU. Without a
clock (`now_s` is never given) nothing would ever be overdue, so the oldest of level 0 goes instead
of the newest. Evicted pages leave ghosts (`ghosts.py`), so that "seen" outlives the pages.

Source: measured on conversation traces; two levels, as in segmented LRU (Karedla, Love and Wherry,
1994).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from benchmarks.policies.orders import LeafOrders
from prefixkv.settings import CountOrZero, SecondsOrZero
from prefixkv.spi import (
    EvictionQueue,
    Ghost,
    GhostPolicy,
    TreeNode,
    Use,
    register_policy,
    staircase,
)

# What kind of use was the last one?
ORDINARY, LONG, NEXT_TURN = range(3)


class Seen(NamedTuple):
    """A mark. All but the visits are the last use's; visits add up, and are negative where others
    are taken off."""

    tick: int
    visits: int
    now_s: float
    kind: int
    path_pages: int


@register_policy
@dataclass(eq=False, repr=False)
class Gated(GhostPolicy):
    """See the module's text.

    Args:
        fresh_s, known_s: when a leaf of level 0, of level 1, has been unused for too long. The
            defaults are near the 75% and 93% quantiles of the pauses between two turns of a
            conversation.
        short_tokens: up to how many new tokens an addition is short.
        ghosts, block_tokens, stride_blocks: see `GhostPolicy`.
    Raises:
        ConfigError: a setting below its bound.
    """

    name = "gated"

    fresh_s: SecondsOrZero = 180.0
    known_s: SecondsOrZero = 500.0
    short_tokens: CountOrZero = 2048

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        super().bind(page_size, pool_pages)
        self._short_pages = self.short_tokens // self._page_tokens

    # --- uses -------------------------------------------------------------------------------------

    def mark(self, use: Use) -> Seen:
        """A lock, or an insertion that brought nothing new."""
        kind = self._kind(use, None)
        return Seen(use.tick, 1 if use.visit else 0, use.now_s, kind, use.num_pages)

    def marks_of_new(self, use: Use, found: list[Ghost]) -> Sequence[tuple[int, Seen]]:
        kind = self._kind(use, found)
        totals = [(depth, history[1] + 1) for history, depth, *_ in found]
        return [
            (depth, Seen(use.tick, visits, use.now_s, kind, use.num_pages))
            for depth, visits in staircase(use, totals, 1, 0, sub)
        ]

    def _kind(self, use: Use, found: list[Ghost] | None) -> int:
        """The kind of a use: that of the first use of its request, if it is a later one. `found`
        are the ghosts beyond its old pages, None: not looked up."""
        before: Seen | None = use.before
        if not use.visit and before is not None:
            return before.kind
        if found is None:
            found = self.remembered.find(use.data, use.old_pages)
        goes_on_from, new_pages = self.goes_on(use, found)
        if new_pages > self._short_pages:
            return LONG
        return ORDINARY if goes_on_from is None else NEXT_TURN

    def fold(self, upper: Seen, lower: Seen) -> Seen:
        last = upper if upper[0] > lower[0] else lower
        return Seen(last[0], upper[1] + lower[1], last[2], last[3], last[4])

    # --- evictions --------------------------------------------------------------------------------

    def make_queue(self) -> EvictionQueue:
        return _TwoLevels(self.fresh_s, self.known_s)


def level(history: Seen) -> int:
    """0: to be used a first time yet; 1: known to come back. The table in the module's text."""
    _, visits, _, kind, _ = history
    if visits == 1:
        return 1 if kind == NEXT_TURN else 0
    return 1 if kind != LONG or visits > 2 else 0


_OLDEST_FRESH, _NEWEST_FRESH, _OLDEST_KNOWN = range(3)


class _TwoLevels(LeafOrders):
    def __init__(self, fresh_s: float, known_s: float) -> None:
        super().__init__(3)
        self._fresh_s = fresh_s
        self._known_s = known_s

    def place(self, history: Seen) -> tuple[int, int, tuple[int, int] | None]:
        tick = history.tick
        if level(history):
            return _OLDEST_KNOWN, tick, None
        return _OLDEST_FRESH, tick, (_NEWEST_FRESH, -tick)

    def first(self, now_s: float) -> TreeNode | None:
        fresh, known = self.head(_OLDEST_FRESH), self.head(_OLDEST_KNOWN)
        fresh_overdue_s = now_s - fresh.mark.now_s - self._fresh_s if fresh is not None else 0.0
        known_overdue_s = now_s - known.mark.now_s - self._known_s if known is not None else 0.0
        if fresh_overdue_s > 0 and fresh_overdue_s >= known_overdue_s:
            return fresh
        if known_overdue_s > 0:
            return known
        return (self.head(_NEWEST_FRESH) if now_s > 0 else fresh) or known
