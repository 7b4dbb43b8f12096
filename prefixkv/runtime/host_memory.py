"""A decode rank's host memory, and the threads that copy between it and the pool, as one object."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from prefixkv.config import HostConfig
from prefixkv.memory.host_pool import HostPool
from prefixkv.memory.kv_pool import KVPool
from prefixkv.protocol.host_copy import HostCopy, HostCopyDone
from prefixkv.request import DeviceEvent
from prefixkv.runtime.host_copies import HostCopies

_log = logging.getLogger("prefixkv.host")

_LEAST_TIMES: Final = 2  # sizes of the pool


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
        self._copies = HostCopies(
            self._device_pool.layout,
            self._pool,
            self._config.copy_threads,
            sink,
            self._device_pool.device,
            self._config.piece_bytes,
            self._name,
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
