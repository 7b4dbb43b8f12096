"""When to say something again that has not been answered."""

from __future__ import annotations


class Backoff:
    """Due after `first_s`, then twice as long each time, up to 8 times `first_s`.

    >>> backoff = Backoff(first_s=1.0)
    >>> backoff.start(now_s=10.0)
    >>> backoff.take(10.5), backoff.take(11.0), backoff.due_s
    (False, True, 13.0)
    """

    __slots__ = ("_first_s", "_pause_s", "due_s")

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._pause_s = first_s
        self.due_s = float("inf")

    def start(self, now_s: float) -> None:
        """Said just now; the answer may take `first_s`."""
        self._pause_s = self._first_s
        self.due_s = now_s + self._pause_s

    def take(self, now_s: float) -> bool:
        """True if it is time to say it again; the next pause is then twice as long."""
        if now_s < self.due_s:
            return False
        self._pause_s = min(2 * self._pause_s, 8 * self._first_s)
        self.due_s = now_s + self._pause_s
        return True
