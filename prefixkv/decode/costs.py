"""What own compute and prefill cost, by the last measures: `sources.py` decides by it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from prefixkv.protocol.ids import RoomKey

TRY_SHARE: Final = 0.02
"""By this part a rate seems to be less with each request that was decided against it since it was
measured. So what was dear once is tried again, at as much of the seconds that requests take."""

_KNOWN: Final = 3  # measures, before a rate counts: one of them may be a stall
_KEPT: Final = 7


class Rate:
    """Seconds per unit of work: the median of the last measures. Every call is O(1)."""

    def __init__(self) -> None:
        self._measures: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self.unit_s = 0.0
        self.declined = 0  # requests since the last measure that were decided against it

    def add(self, units: float, seconds: float, amends: bool = False) -> None:
        """Add a measure. `amends`: in place of the last one."""
        if amends and self._measures:
            self._measures.pop()
        self._measures.append((units, max(0.0, seconds) / units))
        self.unit_s = statistics.median_low(unit_s for _, unit_s in self._measures)
        self.declined = 0

    def __len__(self) -> int:
        return len(self._measures)

    @property
    def is_known(self) -> bool:
        return len(self._measures) >= _KNOWN

    @property
    def most_units(self) -> float:
        """The most units of one of the last measures."""
        return max((units for units, _ in self._measures), default=0.0)

    @property
    def price_s(self) -> float:
        """The rate, the less the longer it was not measured."""
        return self.unit_s / (1.0 + TRY_SHARE * self.declined)


class AwaitedRoom(NamedTuple):
    """When a room was promised, and the tokens that prefill has to compute."""

    time_s: float
    tokens: int


@dataclass(slots=True)
class PrefillLoad:
    """The promises that a worker has to answer, one after the other."""

    promises: dict[RoomKey, AwaitedRoom] = field(default_factory=dict)  # the oldest first
    tokens: int = 0  # of all of them
    answered_s: float = -math.inf

    def add(self, key: RoomKey, promise: AwaitedRoom) -> None:
        self.promises[key] = promise
        self.tokens += promise.tokens

    def remove(self, key: RoomKey) -> AwaitedRoom | None:
        promise = self.promises.pop(key, None)
        if promise is not None:
            self.tokens -= promise.tokens
        return promise

    def took_s(self, promise: AwaitedRoom, now_s: float) -> float:
        return now_s - max(promise.time_s, self.answered_s)

    def backlog_s(self, token_s: float, now_s: float) -> float:
        """Return the seconds until it has answered what it was promised, at `token_s` a token. An
        answer that is late takes as long again as it has taken."""
        oldest = next(iter(self.promises.values()), None)
        if oldest is None:
            return 0.0
        took_s = self.took_s(oldest, now_s)
        left_s = max(token_s * oldest.tokens - took_s, took_s)
        return left_s + token_s * (self.tokens - oldest.tokens)
