"""The inbox of the NIXL transport's thread, which waits there, to the microsecond, until something
is put."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue that any thread puts into; the one thread that owns it takes and waits.

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
        """Queue a command and wake the thread."""
        # The command before the bell: a thread that wakes has to find it.
        self._commands.append(command)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def take(self) -> T | None:
        """Return the next command. Raises IndexError if there is none."""
        return self._commands.popleft()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until something was put, at most `timeout_s` (None: no limit).

        May return early, with nothing there.
        """
        # A bell left over from commands that were taken already makes one wait return early; a
        # command that is put after this check rings the bell, so it is never slept through.
        if not self._commands:
            self._bell.acquire(timeout=-1 if timeout_s is None else timeout_s)
