"""The gated policy: a page has to be seen twice before it is protected from those that are seen
once.

Most prompts never come back, and those that do come back within minutes or as the next turn of a
conversation. So the cache keeps two levels of leaves. Fresh ones stand at level 0, those known to
come back at level 1:

    seen once            0, but 1 if it is the short end that a next turn added to its conversation
    seen twice           1, but 0 if much that is new came with the second time
    seen more often      1

and the first of these leaves goes: one whose session is over (a hint); one that nobody used for
longer than `fresh_s` at level 0, `known_s` at level 1, and of these the one that is overdue the
most; the newest of level 0, which is as likely to be a one-shot as the others, so that those who
wait get their chance; the oldest of level 1. A cache large enough to keep pages for longer than
those times thus behaves like LRU. Without a clock (`now_s` is never given) nothing would ever be
overdue, so the oldest of level 0 goes instead of the newest. What was evicted is remembered for a
while (`ghosts.py`), so that "seen" outlives the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefixkv.cache.eviction.ghosts import Ghost, Ghosts
from prefixkv.cache.eviction.policy import (
    EvictionQueue,
    LeafOrders,
    Place,
    Policy,
    Rank,
    Use,
    register,
)
from prefixkv.cache.node import Node
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.errors import ConfigError

# What kind of use was the last one?
ORDINARY, LONG, NEXT_TURN, CLOSED, CONTINUES = range(5)


class Seen(NamedTuple):
    """A mark. All but the visits are the last use's; visits add up, and are negative where others
    are taken off."""

    tick: int
    visits: int
    now_s: float
    kind: int
    path_pages: int


@register
class Gated(Policy):
    """See the module's text. Source: measured on conversation traces; two levels, as in segmented
    LRU.

    Args:
        fresh_s, known_s: when a leaf of level 0, of level 1, has been unused for too long. The
            defaults are near the 75% and 93% quantiles of the pauses between two turns of a
            conversation.
        short_tokens: how much new is little.
        ghosts: how many pages the ghosts may stand for, as a multiple of the pool (or the tree, at
            its largest).
        block_tokens, stride_blocks: how far ghosts lie apart.
    Raises:
        ConfigError: a setting below its bound.
    """

    name = "gated"
    supersedes = False
    keeps_partial_blocks = False

    def __init__(
        self,
        fresh_s: float = 180.0,
        known_s: float = 500.0,
        short_tokens: int = 2048,
        ghosts: float = 5.0,
        block_tokens: int = 512,
        stride_blocks: int = 8,
    ) -> None:
        for setting, value, bound in (
            ("fresh_s", fresh_s, 0), ("known_s", known_s, 0), ("short_tokens", short_tokens, 0),
            ("ghosts", ghosts, 0), ("block_tokens", block_tokens, 1),
            ("stride_blocks", stride_blocks, 1),
        ):  # fmt: skip
            if not value >= bound:
                raise ConfigError(f"{setting} {value} is below {bound}")
        self.fresh_s = fresh_s
        self.known_s = known_s
        self._short_tokens = short_tokens
        self._ghost_share = ghosts
        self._block_tokens = block_tokens
        self._stride_blocks = stride_blocks

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        page_tokens = page_size * self.token_scale
        self._page_bytes = page_size * TOKEN_BYTES
        self._short_pages = self._short_tokens // page_tokens
        self._capacity_pages = pool_pages or 0
        self.ghost_pages = max(1, self._block_tokens // page_tokens)
        self.ghosts = Ghosts(self._page_bytes, self.ghost_pages, self._stride_blocks)

    # --- uses -------------------------------------------------------------------------------------

    def mark(self, use: Use) -> Seen:
        """A lock, or an insertion that brought nothing new."""
        kind = self._inherited(use)
        if kind is None:
            kind = self._kind(use, self.ghosts.find(use.data, use.old_pages))
        return Seen(use.tick, 1 if use.visit else 0, use.now_s, kind, use.num_pages)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Seen]]:
        found = self.ghosts.find(use.data, use.old_pages)
        kind = self._inherited(use)
        if kind is None:
            kind = self._kind(use, found)
        self.ghosts.come_back(use.data, found)
        # Pages up to a ghost have its visits besides this one; the old pages have at most this one.
        totals = [(ghost.depth, ghost.history.visits + 1) for ghost in found]
        if not found or found[-1].depth < use.num_pages:
            totals.append((use.num_pages, 1))
        marks = []
        below = 0  # visits that marks further down add to a page already
        for depth, total in [*reversed(totals), (use.old_pages, 1 if use.visit else 0)]:
            if depth == use.old_pages or total > below:
                marks.append((depth, Seen(use.tick, total - below, use.now_s, kind, use.num_pages)))
                below = total
        return marks[::-1]

    def _inherited(self, use: Use) -> int | None:
        """The kind of what is not its request's first use: that of the first. None: look for
        oneself."""
        if use.visit or use.before is None or use.before.kind >= CLOSED:
            return None
        return use.before.kind  # type: ignore[no-any-return]

    def _kind(self, use: Use, found: list[Ghost]) -> int:
        self._capacity_pages = max(self._capacity_pages, use.tree_pages)
        known, path_pages = use.old_pages, use.before.path_pages if use.before is not None else -1
        if found:
            known, path_pages = found[-1].depth, found[-1].history.path_pages
        if len(use.data) // self._page_bytes - known > self._short_pages:
            return LONG
        # Does it go on where the last path that the known pages were part of ended? Ghosts know to
        # the block.
        is_end = self.ghosts.whole_blocks(path_pages) == known if found else path_pages == known
        return NEXT_TURN if is_end else ORDINARY

    def fold(self, upper: Seen, lower: Seen) -> Seen:
        last = upper if upper[0] > lower[0] else lower
        return Seen(last[0], upper[1] + lower[1], last[2], last[3], last[4])

    def hinted(self, mark: Seen, depth: int, continues: bool) -> Seen:
        if mark.path_pages != depth:  # not the last use of this page
            return mark
        return mark._replace(kind=CONTINUES if continues else CLOSED)

    def last_tick(self, history: Seen) -> int:
        return history[0]

    def describe(self, history: Seen) -> str:
        return f", level {level(history)}, {history.visits} visits"

    # --- evictions --------------------------------------------------------------------------------

    def make_queue(self) -> EvictionQueue:
        return _TwoLevels(self.fresh_s, self.known_s)

    def evicted(self, node: Node, num_pages: int) -> None:
        limit = int(self._ghost_share * self._capacity_pages)
        self.ghosts.remember(node, num_pages, node.mark.path_pages, limit)

    def reset(self) -> None:
        self.ghosts.clear()


def level(history: Seen) -> int:
    """0: to be used a first time yet; 1: known to come back. The table in the module's text."""
    _, visits, _, kind, _ = history
    if visits == 1:
        return 1 if kind in (NEXT_TURN, CONTINUES) else 0
    return 1 if kind != LONG or visits > 2 else 0


_CLOSED, _OLDEST_FRESH, _NEWEST_FRESH, _OLDEST_KNOWN = range(4)


class _TwoLevels(LeafOrders):
    def __init__(self, fresh_s: float, known_s: float) -> None:
        super().__init__(4)
        self._fresh_s = fresh_s
        self._known_s = known_s

    def place(self, history: Seen) -> Place:
        tick = history.tick
        if history.kind == CLOSED:
            return _CLOSED, tick, None
        if level(history):
            return _OLDEST_KNOWN, tick, None
        return _OLDEST_FRESH, tick, (_NEWEST_FRESH, -tick)

    def choose(self, now_s: float) -> Node | None:
        leaf = self.head(_CLOSED)
        if leaf is not None:
            return leaf
        fresh, known = self.head(_OLDEST_FRESH), self.head(_OLDEST_KNOWN)
        fresh_overdue_s = now_s - fresh.mark.now_s - self._fresh_s if fresh is not None else 0.0
        known_overdue_s = now_s - known.mark.now_s - self._known_s if known is not None else 0.0
        if fresh_overdue_s > 0 and fresh_overdue_s >= known_overdue_s:
            return fresh
        if known_overdue_s > 0:
            return known
        return (self.head(_NEWEST_FRESH) if now_s > 0 else fresh) or known

    def rank_at(self, history: Seen, now_s: float) -> Rank:
        tick, _, used_s, kind, _ = history
        if kind == CLOSED:
            return (0, tick)
        known = level(history)
        overdue_s = now_s - used_s - (self._known_s if known else self._fresh_s)
        if overdue_s > 0:
            return (1, -overdue_s, known, tick)
        return (3, tick) if known else (2, -tick if now_s > 0 else tick)
