"""How threads reach each other: by inboxes, and by nothing else."""

from __future__ import annotations

import os
import select
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue with one reader and any number of writers, and a descriptor that is readable while it holds something.

    `put` never blocks and may be called from any thread; the rest is the reader's.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        # One entry for each write to the descriptor that has begun and has not been read: exact, so that no item
        # waits unannounced and the descriptor never stays readable without `pending` saying so.
        self._begun: deque[None] = deque()
        self._closed = False
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, item: T) -> None:
        """Queue an item and wake the reader. After `close`: dropped."""
        self._items.append(item)
        self.rouse()

    def rouse(self) -> None:
        """Make the descriptor readable until the next `drain` or `wait`."""
        # A writer that finds a write begun relies on the reader, which forgets it before it looks at the items.
        if not self._begun and not self._closed:
            self._begun.append(None)
            os.eventfd_write(self.fd, 1)

    def drain(self) -> list[T]:
        """Everything queued so far."""
        self._clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    @property
    def pending(self) -> bool:
        """Something is queued, or the descriptor has still to be cleared: `drain` is due."""
        return bool(self._items or self._begun)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something is queued, at most `timeout_s` (None: for ever). True if something is."""
        if not self._items:
            self._clear()
            if not self._items:
                poller = select.poll()
                poller.register(self.fd, select.POLLIN)
                poller.poll(None if timeout_s is None else max(0.0, timeout_s * 1000))
        return bool(self._items)

    def _clear(self) -> None:
        try:
            num_writes = os.eventfd_read(self.fd)
        except BlockingIOError:  # nothing is written, or what has begun is not written yet
            return
        for _ in range(num_writes):
            self._begun.popleft()

    def close(self) -> None:
        """Give the descriptor back. No writer may be left."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)
