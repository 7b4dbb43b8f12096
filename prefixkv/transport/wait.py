"""What other threads ask of the transport thread, and where that thread waits, to the microsecond,
until something is put."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Any thread puts; the one thread that owns it takes and waits. None asks that thread to end.

    Not a `queue.SimpleQueue`: in CPython 3.11 its `get` with a timeout of microseconds may turn
    into one without end, when it wakes for an item already taken and the time is up by then.
    """

    def __init__(self) -> None:
        self._commands: deque[T | None] = deque()
        self._bell = threading.Lock()  # locked: nothing was put since the thread last woke
        self._bell.acquire()

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: T | None) -> None:
        self._commands.append(command)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def take(self) -> T | None:
        return self._commands.popleft()

    def wait(self, timeout_s: float | None) -> None:
        """Until something was put, at most `timeout_s`. May return early, with nothing there."""
        if not self._commands:
            self._bell.acquire(timeout=-1 if timeout_s is None else timeout_s)
