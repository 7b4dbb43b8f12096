"""A decode rank's host memory, and the copies between it and the pool: orders of whole pages. Each
ends with one HostCopyDone, when nothing touches its pages any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from prefixkv.cache.eviction.policy import Policy
from prefixkv.config import DecodeConfig, HostConfig
from prefixkv.decode.host_tier import HostPages
from prefixkv.errors import ConfigError, PageStateError
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.page_copy import page_copy
from prefixkv.protocol.events import HostCopy, HostCopyDone
from prefixkv.request import DeviceEvent
from prefixkv.runtime.copies import CopyOrder, CopyThreads
from prefixkv.runtime.rank_spec import RankSpec

_log = logging.getLogger("prefixkv.host")

_LEAST_TIMES: Final = 2  # sizes of the pool
_PIECE_BYTES, _GPU_PIECE_BYTES = 4 << 20, 16 << 20


class HostCopies(CopyThreads):
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
        # Loads go before writes, but writes keep device pages.
        super().__init__(config.copy_threads, device, f"host-copy-{name}", num_queues=2)

    def submit(self, order: HostCopy, after: DeviceEvent | None = None) -> None:
        """Queue an order, to begin once `after.query()` is True; None: at once. Never waits;
        O(threads).

        Errors in its pages, and what `after` raises, come back in its HostCopyDone. Raises, with
        nothing queued, PageStateError: not as many host pages as pages of the device, or none;
        ClosedError: after `close`.
        """
        number, is_load, host, device = order
        if len(host) != len(device) or not len(host):
            raise PageStateError(
                f"order {number} has {len(host)} host pages and {len(device)} of the device; as "
                "many of both are needed, and one at least"
            )

        def copy(start: int, stop: int) -> None:
            act = self._copy.load if is_load else self._copy.write
            act(host[start:stop], device[start:stop])

        def ended(made: CopyOrder) -> None:
            seconds = time.perf_counter() - made.began_s if made.began_s else 0.0
            num_bytes = made.copied * self._page_bytes
            self._sink(HostCopyDone(number, made.error, num_bytes, seconds))

        self.put(CopyOrder(copy, ended, len(host), self._piece_pages, after), 0 if is_load else 1)


class HostMemory:
    """The host memory of a decode rank. Used from one thread.

    `pool` is the rank's, kept until this has closed; `name` the worker's, for the names of threads
    and the log. Logs a warning where it is less than twice the pool. Raises ConfigError for more
    memory than the host has, or less than a page.
    """

    setting = "host_memory"

    def __init__(self, pool: KVPool, config: HostConfig, name: str) -> None:
        self.num_pages = config.pages_of(pool.layout.num_pages, pool.layout.copied_page_bytes)
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

    def pages(self, policy: str | Policy) -> HostPages:
        """Return what a scheduler needs to know of it. `policy`: where its setting names none."""
        policy = self._config.policy or policy
        return HostPages(self.num_pages, policy, lambda: self.ready_pages)

    def submit(self, order: HostCopy, after: DeviceEvent | None = None) -> None:
        """Begin a copy, once a thread is free and the device has done what `after` stands for."""
        assert self._copies is not None
        self._copies.submit(order, after)

    def close(self) -> None:
        """Let the copies that run end, and give the memory back. Idempotent."""
        if self._copies is not None:
            self._copies.close()
        self._pool.close()


def make_tier(pool: KVPool, config: DecodeConfig, name: str) -> HostMemory | None:
    """Make the host memory of a rank, if it is to have some. Raises ConfigError."""
    return None if config.host_memory is None else HostMemory(pool, config.host_memory, name)


def check_node(config: DecodeConfig, spec: RankSpec, has_log: bool) -> None:
    # A log alone, without a mesh, makes no copies on other ranks.
    if config.host_memory is not None and has_log and spec.mesh.num_ranks == 1:
        raise ConfigError(
            "host_memory: of a decode worker with ranks without a mesh nothing is kept"
        )
