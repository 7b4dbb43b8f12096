"""One time for all ranks of an engine.

Each rank has its own tree and evicts by itself, and a policy compares times: the trees stay equal
only with equal times. The rank that receives requests hands them to the others; the time travels
with them, and stands still in between.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeMark:
    """An element among the requests of a broadcast."""

    now_s: float


class RankClock:
    """The latest time that came with requests. It never goes back. The scheduler's thread alone.

    >>> clock = RankClock()
    >>> clock.take(["a request", TimeMark(2.5)]), clock.now_s
    (['a request'], 2.5)
    """

    MARK_EVERY_S = 0.05

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sent_s = float("-inf")

    def mark(self, requests: list[object], now_s: float) -> list[object]:
        """Return the list to broadcast, on the rank that gets requests. It has no mark where there
        are no requests and a mark was sent less than `MARK_EVERY_S` ago."""
        # An idle scheduler broadcasts an empty list all the time, which should stay cheap.
        if not requests and now_s - self._sent_s < self.MARK_EVERY_S:
            return requests
        self._sent_s = now_s
        return [*requests, TimeMark(now_s)]

    def take(self, requests: list[object]) -> list[object]:
        """Return the requests without marks, and set the clock to the newest, on every rank."""
        marks = [one for one in requests if isinstance(one, TimeMark)]
        if not marks:
            return requests
        self.now_s = max(self.now_s, *(mark.now_s for mark in marks))
        return [one for one in requests if not isinstance(one, TimeMark)]


CLOCK = RankClock()
"""The clock of this process."""
