"""Inboxes: the only way in which threads reach each other.

The calls that notify and clear keep the GIL: `os.eventfd_write` releases it, and the scheduler's
thread would then wait for the thread that took it.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

_libc = ctypes.PyDLL(None)  # PyDLL: without giving up the GIL
_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_libc.eventfd_read.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))


def notify(fd: int) -> None:
    """Make an eventfd readable, which wakes its reader."""
    _libc.eventfd_write(fd, 1)


def clear(fd: int) -> int:
    """Make an eventfd unreadable; return how often it was notified."""
    # Non-blocking: the read fails if nothing was notified.
    times = ctypes.c_uint64()
    return 0 if _libc.eventfd_read(fd, times) else times.value


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_LONGEST_S = 1e9  # what a C long of seconds holds on any machine
_ppoll = ctypes.CDLL(None).ppoll  # CDLL: the GIL is given up while it waits
_ppoll.argtypes = (
    ctypes.POINTER(_PollFd), ctypes.c_ulong, ctypes.POINTER(_TimeSpec), ctypes.c_void_p,
)  # fmt: skip


def wait_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor is readable, or a signal comes, at most `timeout_s` (None: no limit).
    Return True if it is readable.

    select.poll and select.epoll round up to whole milliseconds, select.select takes descriptors
    below 1024 only.
    """
    limit = None
    if timeout_s is not None:
        whole_s, part_s = divmod(min(max(0.0, timeout_s), _LONGEST_S), 1.0)
        limit = ctypes.byref(_TimeSpec(int(whole_s), int(part_s * 1e9)))
    return bool(_ppoll(ctypes.byref(_PollFd(fd, select.POLLIN)), 1, limit, None) > 0)


class Inbox(Generic[T]):
    """A queue with one reader, many writers, and a descriptor readable while it holds something.

    `put` never blocks and may be called from any thread; the rest is the reader's.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        # One entry for each write to the descriptor that has begun and has not been read: exact, so
        # that no item waits unannounced and the descriptor never stays readable without `pending`
        # saying so.
        self._begun: deque[None] = deque()
        self._closed = False
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, item: T) -> None:
        """Queue an item and wake the reader. Dropped after `close`."""
        # The item first: a reader woken before it is there would find nothing, and sleep on it.
        self._items.append(item)
        self.notify()

    def notify(self) -> None:
        """Make the descriptor readable until the next `drain` or `wait`."""
        # A writer that finds a write begun relies on the reader, which forgets it before it looks
        # at the items.
        if not self._begun and not self._closed:
            self._begun.append(None)
            notify(self.fd)

    def drain(self) -> list[T]:
        """Return everything queued so far."""
        # Clear first, then look: an item that comes in between finds no write begun and wakes the
        # reader again. The other way round its wakeup would be cleared unseen.
        self._clear()
        items = []
        # Item by item: writers may append meanwhile.
        while self._items:
            items.append(self._items.popleft())
        return items

    def __len__(self) -> int:
        return len(self._items)

    @property
    def pending(self) -> bool:
        """True if `drain` is due: something is queued, or the descriptor is not cleared."""
        return bool(self._items or self._begun)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something is queued, at most `timeout_s` (None: no limit). True if so."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        looked = False
        while not self._items:
            # As in `drain`: clear, then look again, then sleep. A stale wakeup costs one more
            # round.
            self._clear()
            if self._items:
                break
            left_s = until_s - time.monotonic()
            # With no time left it still polls once, so that 0 means "look".
            if not left_s > 0 and looked:
                return False
            wait_readable(self.fd, left_s)
            looked = True
        return True

    def _clear(self) -> None:
        for _ in range(
            clear(self.fd)
        ):  # none: nothing is written, or what has begun is not written yet
            self._begun.popleft()

    def close(self) -> None:
        """Close the descriptor. No writer may be left: its number may be another file's by then."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)
