"""The aged policy: visits, each worth half as much after a half-life; the least worth goes first.

All worths shrink alike, so what is kept is the worth as it would have been at time 0, and the order
is fixed at the last use. It outgrows a float, so it is kept as mantissa times 2 to the exponent.
Evicted pages leave ghosts with their worth (`ghosts.py`): without them a page that is evicted
between two visits is never worth anything.

Source: LRFU (Lee et al., 2001), with a half-life in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, frexp, ldexp
from typing import NamedTuple, TypeAlias

from prefixkv.cache.eviction.ghosts import Ghost, GhostPolicy, staircase
from prefixkv.cache.eviction.policy import Use, register
from prefixkv.cache.eviction.queues import Rank
from prefixkv.settings import above

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
@dataclass(eq=False, repr=False)
class AgedFrequency(GhostPolicy):
    """See the module's text.

    Args:
        half_life_s: in seconds, not in requests: it follows how long people pause.
        ghosts, block_tokens, stride_blocks: see `GhostPolicy`.
    Raises:
        ConfigError: a setting below its bound.
    """

    name = "aged"

    half_life_s: float = 430.0

    def __post_init__(self) -> None:
        super().__post_init__()
        above(0, half_life_s=self.half_life_s)

    def mark(self, use: Use) -> Visits:
        return Visits(*(self._one_visit(use) if use.visit else NOTHING), use.tick, use.num_pages)

    def marks_of_new(self, use: Use, found: list[Ghost]) -> Sequence[tuple[int, Visits]]:
        self._capacity_pages = max(self._capacity_pages, use.tree_pages)
        one = self._one_visit(use)
        totals = [(ghost.depth, _sum(ghost.history[:2], one)) for ghost in found]
        return [
            (depth, Visits(exponent, mantissa, use.tick, use.num_pages))
            for depth, (exponent, mantissa) in staircase(use, totals, one, NOTHING, _less)
        ]

    def _one_visit(self, use: Use) -> Worth:
        age = use.now_s / self.half_life_s
        exponent = floor(age)
        return exponent, 2.0 ** (age - exponent)

    def fold(self, upper: Visits, lower: Visits) -> Visits:
        last = upper if upper[2] > lower[2] else lower
        return Visits(*_sum(upper[:2], lower[:2]), *last[2:])

    def rank(self, history: Visits) -> Rank:
        return history[:3]


def _sum(one: Worth, other: Worth) -> Worth:
    big, small = (one, other) if one[0] > other[0] else (other, one)
    exponent, mantissa = big
    if not small[1] or exponent - small[0] >= 64:
        return big
    mantissa, shift = frexp(mantissa + ldexp(small[1], small[0] - exponent))
    return (exponent + shift - 1, 2 * mantissa) if mantissa else NOTHING


def _less(total: Worth, below: Worth) -> Worth:
    return _sum(total, (below[0], -below[1]))
