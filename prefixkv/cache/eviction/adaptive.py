"""The adaptive policy, the default: keep what is likely to be used soon for the room it takes, as
learnt from this cache's own traffic.

Nothing is taken as given about who comes back. Each page has a class: how many requests used it
(1, 2, 3, 4 to 5, 6 and more; the new end of a next turn counts as used twice) and how much was new
with the last of them (up to 4, up to 16, more blocks of 512 tokens). For each class it is counted
after what time uses are followed by a return (`hazards.py`). From that each leaf has a worth by
class and age, and the least worth goes first. Worth rises with age, then falls: of the leaves of
one class the least is the oldest or the newest.

What is counted are uses, not blocks, at the end of their path only, in the class of the new pages
and, from the third turn on, in that of the pages before them, which share its fate: O(1) a use.

Among chats, where few return, this keeps what was seen twice and lets the newest go first, like
`gated`; among agents, where nearly all return, and in a large pool it behaves like `lru`; and in
a pool for fewer sessions than are active it keeps some whole, which `lru` does not.

Evicted pages leave ghosts (`ghosts.py`), so that a return is seen although the pages are gone.

Source: the index of Gittins (1979), see `hazards.py`; classes by use count, and a bounded memory of
what was evicted, as in 2Q (Johnson and Shasha, 1994).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import sub
from typing import NamedTuple

from prefixkv.cache.eviction.ghosts import Ghost, GhostPolicy, staircase
from prefixkv.cache.eviction.hazards import Hazards
from prefixkv.cache.eviction.least_worth import LeastWorth
from prefixkv.cache.eviction.policy import Use, register
from prefixkv.cache.eviction.queues import EvictionQueue
from prefixkv.cache.node import Mark, Node
from prefixkv.settings import at_least

COUNTS = (0, 0, 1, 2, 3, 3, 4)
"""The class of a use count: 1, 2, 3, 4 to 5, 6 and more."""

SIZES = 3
"""How many classes of a use count there are, by how much was new."""

NUM_KINDS = (COUNTS[-1] + 1) * SIZES

MOST_TURNS = len(COUNTS) - 1

NO_END = 0
"""As `path_pages`: a use that brought nothing of its own, and so says nothing about returns."""


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """What a use was like; equal ones are one object (`traits`)."""

    size: int  # which class of how much was new
    turn: int  # of its conversation, at most `MOST_TURNS`
    kinds: tuple[int, ...]  # it is counted in: that of its new pages, that of those before them
    classes: tuple[int, ...]  # of pages of which it is the last use, by visits, at most 6


@cache
def traits(size: int, turn: int) -> Traits:
    new = kind_of(min(turn, 2), size)
    classes = [kind_of(visits, size) for visits in range(len(COUNTS))]
    if turn > 1:
        classes[1] = classes[2]  # the new end of a next turn
    kinds = (new, kind_of(turn, size)) if turn > 2 else (new,)
    return Traits(size, turn, kinds, tuple(classes))


def kind_of(visits: int, size: int) -> int:
    """The class of pages with so many uses, the last of this size."""
    return COUNTS[min(visits, MOST_TURNS)] * SIZES + size


class Seen(NamedTuple):
    """A mark. All but the visits are the last use's; visits add up, and are negative where others
    are taken off."""

    tick: int
    visits: int
    now_s: float
    path_pages: int
    traits: Traits


_new = tuple.__new__
"""Makes a `Seen` of a tuple in a third of the time that `Seen` takes."""


def class_of(history: Seen) -> int:
    """The class of a page."""
    visits = history[1]
    return history[4].classes[visits if visits < MOST_TURNS else MOST_TURNS]


@register
@dataclass(eq=False, repr=False)
class Adaptive(GhostPolicy):
    """See the module's text.

    Args:
        short_tokens, long_tokens: the two bounds between the three classes of how much was new.
        ghosts, block_tokens, stride_blocks, promise_s: see `GhostPolicy`.
        trust, period: see `Hazards`.
    Raises:
        ConfigError: a setting below its bound.
    """

    name = "adaptive"

    ghosts: float = 6.0
    short_tokens: int = 4 * 512
    long_tokens: int = 16 * 512
    trust: float = 60.0
    period: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, short_tokens=self.short_tokens)
        at_least(self.short_tokens, long_tokens=self.long_tokens)
        at_least(1, trust=self.trust, period=self.period)
        groups = [list(range(first, first + SIZES)) for first in range(0, NUM_KINDS, SIZES)]
        self.hazards = Hazards(groups, self.trust, self.period)

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        super().bind(page_size, pool_pages)
        self._short_pages = self.short_tokens // self._page_tokens
        self._long_pages = self.long_tokens // self._page_tokens

    # --- uses -------------------------------------------------------------------------------------

    def mark(self, use: Use) -> Seen:
        end, kinds = self._begin(use, None)
        return _new(Seen, (use.tick, 1 if use.visit else 0, use.now_s, end, kinds))

    def marks_of_new(self, use: Use, found: list[Ghost]) -> Sequence[tuple[int, Seen]]:
        end, kinds = self._begin(use, found)
        tick, now_s = use.tick, use.now_s
        if not found:
            above = _new(Seen, (tick, 0 if use.visit else -1, now_s, end, kinds))
            return (use.old_pages, above), (use.num_pages, _new(Seen, (tick, 1, now_s, end, kinds)))
        totals = [(ghost.depth, ghost.history.visits + 1) for ghost in found]
        return [
            (depth, _new(Seen, (tick, visits, now_s, end, kinds)))
            for depth, visits in staircase(use, totals, 1, 0, sub)
        ]

    def _begin(self, use: Use, found: list[Ghost] | None) -> tuple[int, Traits]:
        """Where the use's path ends, and its traits; counts it if it is the first of its request.
        `found` are the ghosts beyond its old pages, None: not looked up."""
        before: Seen | None = use.before
        if not use.visit and before is not None:
            has_end = before.path_pages != NO_END or use.num_pages > use.old_pages
            return use.num_pages if has_end else NO_END, before.traits
        if found is None:
            found = self.remembered.find(use.data, use.old_pages)
        last, new_pages = self.goes_on(use, found)
        size = (new_pages > self._short_pages) + (new_pages > self._long_pages)
        turn = 1
        if last is not None:
            turn = min(last.traits.turn + 1, MOST_TURNS)
            for kind in last.traits.kinds:
                self.hazards.returned(kind, use.now_s - last.now_s)
        of_use = traits(size, turn)
        if last is None and not new_pages:
            return NO_END, of_use
        for kind in of_use.kinds:
            self.hazards.start(kind, use.now_s)
        return use.num_pages, of_use

    def fold(self, upper: Seen, lower: Seen) -> Seen:
        last = upper if upper[0] > lower[0] else lower
        return _new(Seen, (last[0], upper[1] + lower[1], last[2], last[3], last[4]))

    def describe(self, history: Mark) -> str:
        return f", class {class_of(history)}, {history.visits} visits"

    # --- evictions --------------------------------------------------------------------------------

    def make_queue(self) -> EvictionQueue:
        return LeastWorth(self.hazards, class_of)

    def floor(self, steps: Sequence[tuple[int, Seen]], mark: Seen, low: int) -> int | None:
        tick, visits, classes = mark[0], mark[1], mark[4].classes
        kind = class_of(mark)
        for depth, above in reversed(steps):
            visits += above[1]
            if (
                above[0] > tick
                or classes[visits if visits < MOST_TURNS else MOST_TURNS] != kind
                or depth <= low
            ):
                return depth
        return None

    def evicted(self, node: Node, num_pages: int) -> None:
        hazards = self.hazards
        for ghost in self.remember(node, num_pages):
            last: Seen = ghost.history
            for kind in last.traits.kinds:
                hazards.lost(kind, hazards.now_s - last.now_s)

    def reset(self) -> None:
        super().reset()
        self.hazards.reset()

    def broken_laws(self) -> list[str]:
        return [*super().broken_laws(), *self.hazards.broken_laws()]
