"""The gittins policy: keep what is likely to be used soon for the room it takes, as learnt from
earlier returns.

Each use of a path has a class: which turn of its conversation it is (1, 2, 3, 4 to 5, 6 and more),
and how much was new (up to 3, up to 16, more blocks of 512 tokens). For each class it is counted
after what time paths came back (`return_tables.py`). That gives each leaf a worth by class and age,
and the least worth goes first. Worth rises with age, then falls: of the leaves of one class the
least is the oldest or the newest, so that 30 look-ups find the victim.

Counted are uses, not blocks, and the class is the use's. All pages that a use was the last to cover
share the fate of its conversation, and only the end of the path has to be looked at: O(1) per use.
Evicted pages leave ghosts (`ghosts.py`), so that a return is seen although they are gone.

Source: the index of Gittins (1979), see `return_tables.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

from benchmarks.policies.orders import LeafOrders, LeafPlace
from benchmarks.policies.return_tables import ReturnTables, bin_of
from prefixkv.cache.eviction.ghosts import Ghost, GhostPolicy
from prefixkv.cache.eviction.policy import EvictionQueue, LeafRank, Use, register_policy
from prefixkv.cache.node import TreeNode
from prefixkv.settings import Count, CountOrZero, Number, check_order

TURNS = (1, 2, 3, 5)
"""Last turn of each class of turns; the last class has no end."""

SIZES = 3
"""Classes per turn, by how much was new."""

NUM_KINDS = (len(TURNS) + 1) * SIZES

NO_END = 0
"""`path_pages` of a use that brought nothing of its own: it says nothing about returns."""


class LastUse(NamedTuple):
    """A mark: the traits of the last use."""

    tick: int
    now_s: float
    kind: int  # its class
    turn: int
    path_pages: int


@register_policy
@dataclass(eq=False, repr=False)
class Gittins(GhostPolicy):
    """A policy that evicts the least worth first, by returns counted per turn and size.

    Args:
        short_tokens, long_tokens: the two bounds between the three classes of how much was new.
        ghosts, block_tokens, stride_blocks: see `GhostPolicy`.
        power, trust, period: see `ReturnTables`.
    Raises:
        ConfigError: a setting below its bound.
    """

    name = "gittins"

    short_tokens: CountOrZero = 3 * 512
    long_tokens: CountOrZero = 16 * 512
    power: Number = 0.7
    trust: Annotated[float, Meta(ge=1)] = 60.0
    period: Count = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "short_tokens", "long_tokens")
        groups = [list(range(first, first + SIZES)) for first in range(0, NUM_KINDS, SIZES)]
        self.tables = ReturnTables(groups, self.power, self.trust, self.period)

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        super().bind(page_size, pool_pages)
        bounds = (self.short_tokens, self.long_tokens)
        self._new_pages = [tokens // self._page_tokens for tokens in bounds]

    # --- uses -------------------------------------------------------------------------------------

    def mark(self, use: Use) -> LastUse:
        return self._last_use(use, None)

    def marks_of_new(self, use: Use, found: list[Ghost]) -> Sequence[tuple[int, LastUse]]:
        """The same where the new pages begin and end; `found` are the ghosts of its new pages."""
        mark = self._last_use(use, found)
        # A mark where the new pages begin as well: this use passed there, so a later use that ends
        # there does not continue an older one.
        return ((use.old_pages, mark), (use.num_pages, mark))

    def _last_use(self, use: Use, found: list[Ghost] | None) -> LastUse:
        """`found` are the ghosts beyond its old pages, None: not looked up."""
        before: LastUse | None = use.before
        # A later use of a request has the class of the first, which was counted.
        if not use.visit and before is not None:
            kind, turn = before.kind, before.turn
            has_end = before.path_pages != NO_END or use.num_pages > use.old_pages
        else:
            if found is None:
                found = self.remembered.find(use.data, use.old_pages)
            kind, turn, has_end = self._begin(use, found)
        end = use.num_pages if has_end else NO_END
        return LastUse(use.tick, use.now_s, kind, turn, end)

    def _begin(self, use: Use, found: list[Ghost]) -> tuple[int, int, bool]:
        """Count the first use of a request, which may continue another. Return its class, its turn,
        and whether it has an end."""
        last, new_pages = self.goes_on(use, found)
        turn = 1
        if last is not None:
            turn = last.turn + 1
            self.tables.returned(last.kind, use.now_s - last.now_s)
        kind = self._kind(turn, new_pages)
        has_end = turn > 1 or new_pages > 0
        if has_end:
            self.tables.start(kind, use.now_s)
        return kind, turn, has_end

    def _kind(self, turn: int, new_pages: int) -> int:
        turns = sum(turn > last for last in TURNS)
        return turns * SIZES + sum(new_pages > most for most in self._new_pages)

    def fold(self, upper: LastUse, lower: LastUse) -> LastUse:
        return upper if upper[0] > lower[0] else lower

    # --- evictions --------------------------------------------------------------------------------

    def make_queue(self) -> EvictionQueue:
        return _GittinsQueue(self)

    def evicted(self, node: TreeNode, num_pages: int) -> None:
        """Leave ghosts of the pages. Path ends that are forgotten for them count as losses."""
        for ghost in self.add_ghosts(node, num_pages):
            last: LastUse = ghost[0]
            self.tables.lost(last.kind, self.tables.now_s - last.now_s)

    def reset(self) -> None:
        super().reset()
        self.tables.reset()


class _GittinsQueue(LeafOrders):
    """A queue of two orders per class: 2k from the oldest, 2k + 1 from the newest."""

    def __init__(self, policy: Gittins) -> None:
        super().__init__(2 * NUM_KINDS)
        self._tables = policy.tables

    def place(self, history: LastUse) -> LeafPlace:
        tick, _, kind, _, _ = history
        return 2 * kind, tick, (2 * kind + 1, -tick)

    def first(self, now_s: float) -> TreeNode | None:
        # Of each class the oldest or the newest leaf is worth least, so the heads are enough.
        least, chosen = None, None
        for order, heap in enumerate(self._heaps):
            leaf = self.head(order) if heap else None
            if leaf is not None:
                rank = self.rank_at(leaf, now_s)
                if least is None or rank < least:
                    least, chosen = rank, leaf
        return chosen

    def rank_at(self, leaf: TreeNode, now_s: float) -> LeafRank:
        """Return (worth, True if newer ones go first, +-tick): lowest first, at this time only."""
        tick, used_s, kind, _, _ = leaf.mark
        tables = self._tables
        place = bin_of(now_s - used_s)
        # Where worth rises with age the newest is worth least. Without a clock nothing has an age,
        # so the oldest goes.
        rises = now_s > 0 and place < tables.peak[kind]
        return (tables.worth[kind][place], rises, -tick if rises else tick)
