"""One time for all ranks of an engine.

Each rank has a tree of its own and evicts by itself, so their trees stay equal only while all are
told equal times: a policy that compares times would otherwise take different pages. SGLang's rank
that receives requests hands them to the others; the time goes with them, and stands still until the
next.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeMark:
    """What time it is for all ranks, in seconds; travels among the requests."""

    now_s: float


class RankClock:
    """The latest time that came with requests. It never goes back.

    >>> clock = RankClock()
    >>> clock.take(["a request", TimeMark(2.5)]), clock.now_s
    (['a request'], 2.5)
    """

    MARK_EVERY_S = 0.05

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sent_s = float("-inf")

    def mark(self, requests: list[object], now_s: float) -> list[object]:
        """On the rank that receives: the list to hand on, with the time if it is worth it: there
        are requests, or there was none for a while."""
        if not requests and now_s - self._sent_s < self.MARK_EVERY_S:
            return requests
        self._sent_s = now_s
        return [*requests, TimeMark(now_s)]

    def take(self, requests: list[object]) -> list[object]:
        """On every rank: the requests without the time, which is kept."""
        marks = [one for one in requests if isinstance(one, TimeMark)]
        if not marks:
            return requests
        self.now_s = max(self.now_s, *(mark.now_s for mark in marks))
        return [one for one in requests if not isinstance(one, TimeMark)]


CLOCK = RankClock()
"""That of this process."""
