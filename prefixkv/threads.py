"""Inboxes, the only way in which threads reach each other; and objects of one thread.

The calls that notify and clear keep the GIL: `os.eventfd_write` releases it, and the scheduler's
thread would then wait for the thread that took it.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from prefixkv.errors import CallerError

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
        # Times of 0: nothing is written, or what has begun is not written yet.
        for _ in range(clear(self.fd)):
            self._begun.popleft()

    def close(self) -> None:
        """Close the descriptor. No writer may be left: its number may be another file's by then."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)


# --- objects of one thread ------------------------------------------------------------------------

# The thread that makes the first call owns the object from then on. Making the object is no call: a
# thread may make one for another. Once the owner has ended, the next thread that calls owns it.
#
# Without the variable nothing is checked, and nothing is paid for: only with it an object is made
# of a derived class, which wraps each public method.


VARIABLE: Final = "PREFIXKV_DEBUG"
"""Variable of the environment that turns the check on with "1". Read when an object is made."""


class Closing(ABC):
    """Base of classes with a `close`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises: nothing else closes what an object had made by then."""
    try:
        yield
    except BaseException:
        undo()
        raise


class OneThread(Closing):
    """Base of classes with objects that are used from one thread. `any_thread` names the methods
    that any thread may call."""

    any_thread: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        made: type[Self] = _checked_class(cls) if os.environ.get(VARIABLE) == "1" else cls
        return super().__new__(made)


@functools.cache
def _checked_class(kind: type[Any]) -> type[Any]:
    @functools.wraps(kind.__init__)
    def init(self: Any, *args: Any, **named: Any) -> None:
        # The calls that a constructor makes of its own object make no owner.
        self._owner = None
        kind.__init__(self, *args, **named)
        self._owner = None

    methods = {
        name: _checked_method(kind, name)
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in kind.any_thread
    }
    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    # By the metaclass that the class has.
    make: Any = type(kind)
    made: type[Any] = make(kind.__name__, (kind,), {"__init__": init, **named, **methods})
    return made


def _checked_method(kind: type[Any], name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(kind, name))
    def checked(self: Any, *args: Any, **named: Any) -> Any:
        thread = threading.current_thread()
        owner, first = self._owner or (None, "")
        # An owner that has ended calls nothing any more.
        if owner is None or not owner.is_alive():
            self._owner = thread, name
        elif owner is not thread:
            raise CallerError(
                f"{kind.__name__}.{name} is called in thread {thread.name!r}, but the object is "
                f"used from thread {owner.name!r}, which called {first} first"
            )
        return getattr(kind, name)(self, *args, **named)

    return checked
