"""`Timers` wakes what waits, `Backoff` paces repeated frames, `Wait` limits a wait for a peer.

`Timers` is a heap with lazy deletion, so that a wait costs O(log waits) and no scan. Once most of
its entries are stale it is rebuilt, so that it does not hold forgotten keys for long.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_FEW = 64  # stale entries that are not worth a rebuild of the heap


class Timers(Generic[K]):
    """Wake-ups, at most one per key. One may come early (the owner asks again), never late.

    >>> timers = Timers()
    >>> timers.wake("a", 5.0); timers.wake("a", 3.0); timers.wake("b", 4.0)
    >>> timers.next_s, timers.due(3.5), timers.next_s
    (3.0, ['a'], 4.0)
    """

    def __init__(self) -> None:
        # `_wake_s` is the truth; an entry of the heap that differs from it is stale.
        self._heap: list[tuple[float, int, K]] = []
        self._wake_s: dict[K, float] = {}
        self._pushes = 0

    @property
    def next_s(self) -> float:
        """Time of the earliest wake-up, or earlier (a stale entry); infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def wake(self, key: K, when_s: float) -> None:
        """Wake `key` at `when_s`, unless an earlier wake-up was asked for."""
        if when_s < self._wake_s.get(key, float("inf")):
            self._wake_s[key] = when_s
            self._pushes += 1  # a tie-breaker: keys need no order
            heapq.heappush(self._heap, (when_s, self._pushes, key))
            self._tidy()

    def forget(self, key: K) -> None:
        """Cancel a wake-up. Unknown: no-op. The key stays referenced until as many others were
        forgotten as wait, and 64 more."""
        if self._wake_s.pop(key, None) is not None:
            self._tidy()

    def due(self, now_s: float) -> list[K]:
        """Return the keys that are due, each once. A key has to ask again for another wake-up."""
        keys = []
        while self._heap:
            when_s, _, key = self._heap[0]
            # Else stale: forgotten, or moved to an earlier time that has its own entry.
            if self._wake_s.get(key) == when_s:
                if when_s > now_s:
                    break
                del self._wake_s[key]
                keys.append(key)
            heapq.heappop(self._heap)
        return keys

    def visit(self, now_s: float, look: Callable[[K], None]) -> None:
        """Call `look` for each key that is due. If it raises, that key is woken again a second
        later, those behind it with the next call, and the exception passes on."""
        keys = self.due(now_s)
        for number, key in enumerate(keys):
            try:
                look(key)
            except Exception:
                # `due` has taken all of them out: without this, one failure would end the waits of
                # the others.
                self.wake(key, now_s + 1.0)
                for later in keys[number + 1 :]:
                    self.wake(later, now_s)
                raise

    def _tidy(self) -> None:
        """O(log waits) per call, amortized."""
        if len(self._heap) <= 2 * len(self._wake_s) + _FEW:
            return
        waits = enumerate(self._wake_s.items())
        self._heap = sorted((when_s, number, key) for number, (key, when_s) in waits)

    def __len__(self) -> int:
        return len(self._wake_s)


class Backoff:
    """Pause before an unanswered frame is repeated: `first_s`, then twice the pause each time, up
    to 8 times `first_s`.

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
        """Begin with the shortest pause: the frame was sent just now."""
        self._pause_s = self._first_s
        self.due_s = now_s + self._pause_s

    def take(self, now_s: float) -> bool:
        """Return True if it is time to repeat a frame; the next pause is then twice as long."""
        if now_s < self.due_s:
            return False
        self._pause_s = min(2 * self._pause_s, 8 * self._first_s)
        self.due_s = now_s + self._pause_s
        return True


class Wait:
    """A wait for a peer, limited by silence and by a longest time.

    It is due `patience_s` after its beginning, or after the peer was last heard if that is later;
    but never later than `longest_s` (or `patience_s`, if that is more) after its beginning.

    >>> wait = Wait(longest_s=60.0)
    >>> wait.start(now_s=10.0, patience_s=5.0)
    >>> wait.due_s, wait.goes_on(heard_s=14.0, now_s=15.0), wait.due_s
    (15.0, True, 19.0)
    >>> wait.goes_on(heard_s=14.0, now_s=19.0)
    False
    """

    __slots__ = ("_longest_s", "_patience_s", "due_s", "last_s")

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._patience_s = 0.0
        self.due_s = float("inf")
        self.last_s = float("inf")  # latest end of the wait

    @property
    def limit(self) -> str:
        """Name of the limit that is due, the longest time or the deadline; for errors."""
        is_last = self.last_s <= self.due_s and self._longest_s > self._patience_s
        return "longest_wait_s" if is_last else "the deadline"

    def start(self, now_s: float, patience_s: float) -> None:
        self._patience_s = patience_s
        self.due_s = now_s + patience_s
        self.last_s = now_s + max(patience_s, self._longest_s)

    def goes_on(self, heard_s: float, now_s: float) -> bool:
        """Return True if the wait lasts beyond now, and move `due_s` to the next time to ask."""
        if now_s < self.due_s:
            return True
        # A peer that is heard may have queued the request, so it is waited for; `last_s` bounds the
        # wait for one that is alive and never gets to it.
        self.due_s = min(max(self.due_s, heard_s + self._patience_s), self.last_s)
        return now_s < self.due_s
