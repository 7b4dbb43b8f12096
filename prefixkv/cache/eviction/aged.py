"""The aged policy: visits, each worth half as much after a half-life; the least worth goes first.

All worths shrink alike, so what is kept is the worth as it would have been at time 0, and the order
is fixed at the last use. It outgrows a float, so it is kept as mantissa times 2 to the exponent.
Evicted pages leave ghosts with their worth (`ghosts.py`): without them a page that is evicted
between two visits is never worth anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, frexp, ldexp
from typing import NamedTuple, TypeAlias

from prefixkv.cache.eviction.ghosts import Ghosts
from prefixkv.cache.eviction.policy import Policy, Rank, Use, register
from prefixkv.cache.node import Node
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.errors import ConfigError

Worth: TypeAlias = tuple[int, float]
"""(exponent, mantissa in [1, 2), or in (-2, -1] where something is taken off again)."""

NOTHING: Worth = (-(2**62), 0.0)


class Visits(NamedTuple):
    """A mark. Worths add up; the rest is the last use's."""

    exponent: int
    mantissa: float
    tick: int
    path_pages: int


@register
class AgedFrequency(Policy):
    """See the module's text.

    Args:
        half_life_s: in seconds, not in requests: what is waited for is people.
        ghosts: how many pages the ghosts may stand for, as a multiple of the pool (or the tree, at
            its largest).
        block_tokens, stride_blocks: how far ghosts lie apart.
    Raises:
        ConfigError: a setting below its bound.
    """

    name = "aged"
    supersedes = False
    keeps_partial_blocks = False

    def __init__(
        self,
        half_life_s: float = 430.0,
        ghosts: float = 5.0,
        block_tokens: int = 512,
        stride_blocks: int = 8,
    ) -> None:
        if not half_life_s > 0:
            raise ConfigError(f"half_life_s {half_life_s} is not above 0")
        for setting, value, bound in (
            ("ghosts", ghosts, 0), ("block_tokens", block_tokens, 1),
            ("stride_blocks", stride_blocks, 1),
        ):  # fmt: skip
            if not value >= bound:
                raise ConfigError(f"{setting} {value} is below {bound}")
        self.half_life_s = half_life_s
        self._ghost_share = ghosts
        self._block_tokens = block_tokens
        self._stride_blocks = stride_blocks

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        self._capacity_pages = pool_pages or 0
        self.ghost_pages = max(1, self._block_tokens // (page_size * self.token_scale))
        self.ghosts = Ghosts(page_size * TOKEN_BYTES, self.ghost_pages, self._stride_blocks)

    def mark(self, use: Use) -> Visits:
        return Visits(*(self._one_visit(use) if use.visit else NOTHING), use.tick, use.num_pages)

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Visits]]:
        self._capacity_pages = max(self._capacity_pages, use.tree_pages)
        found = self.ghosts.find(use.data, use.old_pages)
        self.ghosts.come_back(use.data, found)
        one = self._one_visit(use)
        # Pages up to a ghost have its worth besides this visit; the old pages have at most this
        # visit.
        totals = [(ghost.depth, _sum(ghost.history[:2], one)) for ghost in found]
        if not found or found[-1].depth < use.num_pages:
            totals.append((use.num_pages, one))
        marks = []
        below = NOTHING  # what marks further down add to a page already
        for depth, total in [*reversed(totals), (use.old_pages, one if use.visit else NOTHING)]:
            if depth == use.old_pages or total > below:
                marks.append(
                    (depth, Visits(*_sum(total, (below[0], -below[1])), use.tick, use.num_pages))
                )
                below = total
        return marks[::-1]

    def _one_visit(self, use: Use) -> Worth:
        age = use.now_s / self.half_life_s
        exponent = floor(age)
        return exponent, 2.0 ** (age - exponent)

    def fold(self, upper: Visits, lower: Visits) -> Visits:
        return Visits(
            *_sum(upper[:2], lower[:2]), *(upper[2:] if upper[2] > lower[2] else lower[2:])
        )

    def rank(self, history: Visits) -> Rank:
        return history[:3]

    def last_tick(self, history: Visits) -> int:
        return history[2]

    def evicted(self, node: Node, num_pages: int) -> None:
        self.ghosts.remember(
            node, num_pages, node.mark.path_pages, int(self._ghost_share * self._capacity_pages)
        )

    def reset(self) -> None:
        self.ghosts.clear()


def _sum(one: Worth, other: Worth) -> Worth:
    big, small = (one, other) if one[0] > other[0] else (other, one)
    exponent, mantissa = big
    if not small[1] or exponent - small[0] >= 64:
        return big
    mantissa, shift = frexp(mantissa + ldexp(small[1], small[0] - exponent))
    return (exponent + shift - 1, 2 * mantissa) if mantissa else NOTHING
