"""Copies in threads of their own: no other thread waits for a copy.

On CUDA each worker has a current stream, and a piece has ended when the device is done. Copies on
the CPU are numpy's, with the GIL let go. Torch's number of threads is left alone: threads that
start later would take it over.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch

from prefixkv.errors import ClosedError
from prefixkv.request import DeviceEvent

_LOOK_S: Final = 1e-4  # between two looks at the device, for an order that waits for it
_FIRST_A_SECOND: Final = 8

Settle = Callable[[], None]
"""Waits until the device has done all that was queued on the thread's stream."""


def run_settled(copy: Callable[[], None], settle: Settle | None) -> Exception | None:
    """Make a copy, wait until it is done, return the first error of both, or None."""
    error: Exception | None = None
    # `settle` also after a copy that failed: it may have queued work that still reads or writes the
    # memory which the end of the copy gives back.
    for step in (copy, settle):
        try:
            if step is not None:
                step()
        except Exception as raised:
            error = error or raised
    return error


@dataclass(slots=True, eq=False)
class CopyOrder:
    """A copy, made in pieces. Owned by the lock of its threads once it is there.

    `copy` makes units `start` to `stop`. `ended` is called once, when nothing of it runs any more,
    by any thread; it must not raise, nor wait.
    """

    copy: Callable[[int, int], None]
    ended: Callable[[CopyOrder], None]
    num_units: int = 1
    piece: int = 1  # units
    after: DeviceEvent | None = None  # what it waits for; None: it may begin
    begun: int = 0  # units of pieces that have begun, or never will
    copied: int = 0  # units
    running: int = 0  # pieces
    began_s: float = 0.0
    error: Exception | None = None

    @property
    def has_begun_all(self) -> bool:
        return self.begun == self.num_units

    def is_due(self) -> bool:
        try:
            if self.after is not None and not self.after.query():
                return False
            self.began_s = self.began_s or time.perf_counter()
        except Exception as error:
            self.error = error
        self.after = None
        return True


class CopyThreads:
    """Threads that make copies. Created, given orders and closed by one thread.

    Orders of a queue begin in turn; one may wait for earlier work of the device while others begin.
    The first queue goes before the second, but not for ever: after `_FIRST_A_SECOND` of its pieces
    one of the second begins. After a piece that failed an order waits for those that run, and
    begins no other.
    """

    def __init__(self, num_threads: int, device: str, name: str, num_queues: int = 1) -> None:
        """Start the threads, daemons "prefixkv-NAME-0" and so on. Raises what torch raises where
        the device has no stream for one."""
        self._pid = os.getpid()  # a fork of this process has its own copy, and no threads
        self._closed = False  # read by the workers without a lock: one more piece may start
        # Orders of which pieces are still to be begun: filled by `put`, emptied under the lock.
        self._queues: list[deque[CopyOrder]] = [deque() for _ in range(num_queues)]
        self._num_waiting = 0  # orders that waited for the device when a worker looked last
        self._firsts = 0  # pieces of the first queue that began while another one waited
        # Only the workers take it, so that `put` never waits for one of them.
        self._lock = threading.Lock()
        # An entry wakes a worker, which then works until it finds nothing.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        runs: list[Callable[[], None]] = [self._run] * num_threads
        if device.startswith("cuda"):
            # Here, since a thread that ended for want of one would leave orders without an end.
            stream: Any = torch.cuda.Stream  # untyped
            runs = [partial(self._run_on, stream(device)) for _ in runs]
        self._threads = [
            threading.Thread(target=run, name=f"prefixkv-{name}-{i}", daemon=True)
            for i, run in enumerate(runs)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.close()
            raise

    def put(self, order: CopyOrder, queue: int = 0) -> None:
        """Queue an order. Never waits; O(threads). Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the copies are closed")
        self._queues[queue].append(order)
        pieces = -(-order.num_units // order.piece)
        # After the order is there: a worker that finds nothing waits for the next entry.
        for _ in range(min(pieces, len(self._threads))):
            self._wakes.put(None)

    def close(self) -> None:
        """Let the pieces that run end, begin no others, join the threads. Orders that were cut off
        end with a ClosedError. Idempotent."""
        # Set first: a worker that is woken then begins no piece.
        self._closed = True
        if os.getpid() != self._pid:  # its orders are its parent's
            return
        for _ in self._threads:
            self._wakes.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for orders in self._queues:
            # An order that had begun all its pieces has ended by now, though it may stand here.
            for order in [order for order in orders if not order.has_begun_all]:
                order.error = order.error or ClosedError("it was closed before the copy ended")
                order.ended(order)
            orders.clear()

    def _run_on(self, stream: Any) -> None:
        cuda: Any = torch.cuda  # in parts untyped
        done = cuda.Event(blocking=True)  # blocking: the thread sleeps, and does not spin

        def settle() -> None:
            done.record(stream)
            done.synchronize()

        with cuda.device(stream.device), cuda.stream(stream):
            self._run(settle)

    def _run(self, settle: Settle | None = None) -> None:
        while not self._closed:
            # While an order waits for the device, nothing wakes this thread when that is done.
            with suppress(Empty):
                self._wakes.get(timeout=_LOOK_S if self._num_waiting else None)
            while (piece := self._next_piece()) is not None:
                order, start, stop = piece
                # After a piece that failed, those behind it are left out.
                copy = partial(order.copy, start, stop)
                self._piece_ended(order, stop - start, order.error or run_settled(copy, settle))

    def _next_piece(self) -> tuple[CopyOrder, int, int] | None:
        with self._lock:
            self._num_waiting = 0
            first, *others = self._queues
            for orders in (*others, first) if self._firsts >= _FIRST_A_SECOND else self._queues:
                for order in list(orders):
                    if order.has_begun_all:
                        orders.remove(order)
                    elif self._closed or not order.is_due():
                        self._num_waiting += 1
                    else:
                        waits = orders is first and any(others)
                        self._firsts = self._firsts + 1 if waits else 0
                        start = order.begun
                        order.begun = min(start + order.piece, order.num_units)
                        order.running += 1
                        return order, start, order.begun
        return None

    def _piece_ended(self, order: CopyOrder, num_units: int, error: Exception | None) -> None:
        with self._lock:
            order.running -= 1
            order.copied += num_units if error is None else 0
            order.error = order.error or error  # the rest is of no use any more: see `_run`
            if order.running or not order.has_begun_all:
                return
        # Without the lock: `ended` may take its time.
        order.ended(order)
