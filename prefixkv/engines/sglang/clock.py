"""One time for all ranks of an engine.

Each rank has its own tree and evicts by itself. The trees stay equal only while all ranks use equal
times, since a policy that compares times would otherwise evict different pages. SGLang's rank that
receives requests hands them to the others; the time travels with them, and stands still in between.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeMark:
    """The time for all ranks, in seconds; an element among the requests of a broadcast."""

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
        """Return the list to broadcast with the ranks' time, on the rank that gets requests.
        Without it where there are no requests and a mark was sent less than `MARK_EVERY_S` ago."""
        # An idle scheduler broadcasts an empty list all the time, which should stay cheap.
        if not requests and now_s - self._sent_s < self.MARK_EVERY_S:
            return requests
        self._sent_s = now_s
        return [*requests, TimeMark(now_s)]

    def take(self, requests: list[object]) -> list[object]:
        """Return the requests without time marks, and set the rank's clock to the newest. Called on
        every rank."""
        marks = [one for one in requests if isinstance(one, TimeMark)]
        if not marks:
            return requests
        self.now_s = max(self.now_s, *(mark.now_s for mark in marks))
        return [one for one in requests if not isinstance(one, TimeMark)]


CLOCK = RankClock()
"""The clock of this process."""
