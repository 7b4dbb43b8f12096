"""A decode rank's host memory, and the copies between it and the pool: orders of whole pages, made
in pieces by threads of their own.

Loads go before writes, but writes keep device pages: after `_LOADS_A_WRITE` pieces of loads a piece
of a write begins. Orders of a kind begin in turn; one may wait for earlier work of the device while
others begin. Each ends with one HostCopyDone, when nothing touches its pages any more: after a
piece that failed it waits for those that run, and begins no other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from prefixkv.config import HostConfig
from prefixkv.errors import ClosedError, PageStateError
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.page_copy import page_copy
from prefixkv.protocol.host_copy import HostCopy, HostCopyDone
from prefixkv.request import DeviceEvent
from prefixkv.runtime.copies import Settle, run_settled, start_workers

_log = logging.getLogger("prefixkv.host")

_LOOK_S: Final = 1e-4  # between two looks at the device, for an order that waits for it
_LOADS_A_WRITE: Final = 8  # pieces of loads that go before a piece of a write that could begin
_LEAST_TIMES: Final = 2  # sizes of the pool
_PIECE_BYTES, _GPU_PIECE_BYTES = 4 << 20, 16 << 20


@dataclass(slots=True, eq=False)
class _Order:
    """Owned by the lock of its `HostCopies`."""

    copy: HostCopy
    after: DeviceEvent | None  # what it waits for; None: it may begin
    begun_pages: int = 0  # those of pieces that have begun, or never will
    running: int = 0  # pieces
    copied_pages: int = 0
    began_s: float = 0.0
    error: Exception | None = None

    @property
    def has_begun_all(self) -> bool:
        return self.begun_pages == len(self.copy.host_pages)

    def done(self, page_bytes: int) -> HostCopyDone:
        seconds = time.perf_counter() - self.began_s if self.began_s else 0.0
        return HostCopyDone(self.copy.number, self.error, self.copied_pages * page_bytes, seconds)


class HostCopies:
    """The threads that copy pages between a pool and its host pool. Created, given orders and
    closed by one thread.

    The sink is called by these threads, and by `close` for orders that it cuts off.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: HostPool,
        config: HostConfig,
        sink: Callable[[HostCopyDone], None],
        device: str = "cpu",
        name: str = "node",
    ) -> None:
        """Start the threads. The memory of `layout` and `pool` has to stay until `close` has
        returned.

        A piece is as many whole pages as fit into `config.piece_bytes`, at least one. `sink` takes
        each order's end; it must not raise, nor wait. Raises ConfigError: a host pool for other
        pages, or a device without a copy.
        """
        piece_bytes = config.piece_bytes or (_PIECE_BYTES if device == "cpu" else _GPU_PIECE_BYTES)
        self._copy = page_copy(layout, pool, device)
        self._page_bytes = pool.page_bytes
        self._piece_pages = max(1, piece_bytes // pool.page_bytes)
        self._sink = sink
        self._closed = False
        # Orders of which pieces are still to be begun: filled by `submit`, emptied under the lock.
        self._loads: deque[_Order] = deque()
        self._writes: deque[_Order] = deque()
        self._num_waiting = 0  # orders that waited for the device when a worker looked last
        self._loads_before_write = 0  # pieces of loads that began while writes waited
        # Only the workers take it, so that `submit` never waits for one of them.
        self._lock = threading.Lock()
        # An entry wakes a worker, which then works until it finds nothing.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._threads = start_workers(config.copy_threads, self._run, device, f"host-copy-{name}")
        self._num_threads = config.copy_threads

    def submit(self, order: HostCopy, after: DeviceEvent | None = None) -> None:
        """Queue an order, to begin once `after.query()` is True; None: at once. Never waits;
        O(threads).

        Errors in its pages, and what `after` raises, come back in its HostCopyDone. Raises, with
        nothing queued, PageStateError: not as many host pages as pages of the device, or none;
        ClosedError: after `close`.
        """
        num_pages = len(order.host_pages)
        if num_pages != len(order.device_pages) or not num_pages:
            raise PageStateError(
                f"order {order.number} has {num_pages} host pages and {len(order.device_pages)} of "
                "the device; as many of both are needed, and one at least"
            )
        if self._closed:
            raise ClosedError("the host copies are closed")
        (self._loads if order.is_load else self._writes).append(_Order(order, after))
        pieces = -(-num_pages // self._piece_pages)
        # After the order is there: a worker that finds nothing waits for the next entry.
        for _ in range(min(pieces, self._num_threads)):
            self._wakes.put(None)

    def close(self) -> None:
        """Let the pieces that run end, begin no others, join the threads. Orders that were cut off
        end with a ClosedError. Idempotent."""
        # Set first: a worker that is woken then begins no piece.
        self._closed = True
        for _ in self._threads:
            self._wakes.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        # An order that had begun all its pieces has ended by now, though it may stand here still.
        for order in (*self._loads, *self._writes):
            if not order.has_begun_all:
                order.error = ClosedError("the host copies were closed before the copy ended")
                self._sink(order.done(self._page_bytes))
        self._loads.clear()
        self._writes.clear()

    def _run(self, settle: Settle | None) -> None:
        while not self._closed:
            # While an order waits for the device, nothing wakes this thread when that is done.
            with suppress(Empty):
                self._wakes.get(timeout=_LOOK_S if self._num_waiting else None)
            while (piece := self._next_piece()) is not None:
                order, start, stop = piece
                act = self._copy.load if order.copy.is_load else self._copy.write
                host, device = order.copy.host_pages, order.copy.device_pages
                copy = partial(act, host[start:stop], device[start:stop])
                self._piece_ended(order, stop - start, run_settled(copy, settle))

    def _next_piece(self) -> tuple[_Order, int, int] | None:
        failed: list[_Order] = []
        piece = None
        with self._lock:
            self._num_waiting = 0
            kinds = [self._loads, self._writes]
            if self._loads_before_write >= _LOADS_A_WRITE:
                kinds.reverse()
            for orders in kinds:
                if piece is None and not self._closed:
                    piece = self._begin_piece(orders, failed)
                    if piece is not None:
                        waits = orders is self._loads and bool(self._writes)
                        self._loads_before_write = self._loads_before_write + 1 if waits else 0
        for order in failed:
            self._sink(order.done(self._page_bytes))
        return piece

    def _begin_piece(
        self, orders: deque[_Order], failed: list[_Order]
    ) -> tuple[_Order, int, int] | None:
        """Of the first that need not wait. Where its event raises, it goes to `failed`."""
        for order in list(orders):
            if order.has_begun_all:
                orders.remove(order)
                continue
            try:
                is_due = order.after is None or order.after.query()
            except Exception as error:
                order.error, order.begun_pages = error, len(order.copy.host_pages)
                orders.remove(order)
                failed.append(order)
                continue
            if not is_due:
                self._num_waiting += 1
                continue
            order.after = None
            start = order.begun_pages
            order.begun_pages = min(start + self._piece_pages, len(order.copy.host_pages))
            order.running += 1
            order.began_s = order.began_s or time.perf_counter()
            return order, start, order.begun_pages
        return None

    def _piece_ended(self, order: _Order, num_pages: int, error: Exception | None) -> None:
        with self._lock:
            order.running -= 1
            if error is None:
                order.copied_pages += num_pages
            else:
                order.error = order.error or error
                order.begun_pages = len(order.copy.host_pages)  # the rest is of no use any more
            if order.running or not order.has_begun_all:
                return
        # Without the lock: the sink may take its time.
        self._sink(order.done(self._page_bytes))


class HostMemory:
    """The host memory of a decode rank. Used from one thread.

    `pool` is the rank's, kept until this has closed; `name` the worker's, for the names of threads
    and the log. Logs a warning where it is less than twice the pool. Raises ConfigError for more
    memory than the host has, or less than a page.
    """

    def __init__(self, pool: KVPool, config: HostConfig, name: str) -> None:
        self.num_pages = config.pages_of(pool.layout.num_pages, pool.layout.host_page_bytes)
        self._device_pool, self._config, self._name = pool, config, name
        self._pool = HostPool(pool.layout, self.num_pages, pool.device)
        self._copies: HostCopies | None = None
        if self.num_pages < _LEAST_TIMES * pool.layout.num_pages:
            _log.warning(
                "%s: host memory has %d pages and the pool %d: less than twice the pool is of "
                "little use, since what is in the pool is there as well",
                name, self.num_pages, pool.layout.num_pages,
            )  # fmt: skip

    def start(self, sink: Callable[[HostCopyDone], None]) -> None:
        """Start the threads; `sink` gets the end of each copy, from any thread."""
        pool = self._device_pool
        self._copies = HostCopies(
            pool.layout, self._pool, self._config, sink, pool.device, self._name
        )

    def wait_until_ready(self) -> None:
        """Wait until all pages can be used. Raises CapacityError if that cannot be had."""
        self._pool.wait_until_ready()

    @property
    def ready_pages(self) -> int:
        """Pages that can be used by now, from the first on."""
        return self._pool.ready_pages

    def submit(self, order: HostCopy, after: DeviceEvent | None = None) -> None:
        """Begin a copy, once a thread is free and the device has done what `after` stands for."""
        assert self._copies is not None
        self._copies.submit(order, after)

    def close(self) -> None:
        """Let the copies that run end, and give the memory back. Idempotent."""
        if self._copies is not None:
            self._copies.close()
        self._pool.close()
