"""Host memory behind vLLM's blocks, in a worker: the memory, and the copies that are ordered."""

from __future__ import annotations

from contextlib import ExitStack

from msgspec import structs

from prefixkv import HostConfig, KVPool
from prefixkv.engines.vllm.orders import CopyOrder
from prefixkv.errors import TransferError
from prefixkv.spi import DeviceEvent, HostCopy, HostCopyDone, HostMemory, Inbox


class WorkerHost:
    """The host memory of one worker. Its model thread makes every call. Raises ConfigError for more
    memory than the host has, or less than a block.

    Copies run on threads of their own. A load may begin once the device has done all that was
    queued before its order: a step that used its blocks before may still run. A write has to wait
    for the kernels of the step that brings its order as well, since vLLM gives a block its hash
    before they run.
    """

    def __init__(self, pool: KVPool, config: HostConfig, rank: int, name: str) -> None:
        self._rank = rank
        # The memory, which is large, and the descriptor are given back if the threads do not start.
        with ExitStack() as undo:
            self._memory = HostMemory(pool, config, name)
            undo.callback(self._memory.close)
            self._ends: Inbox[HostCopyDone] = Inbox()
            undo.callback(self._ends.close)
            self._memory.start(self._ends.put)
            undo.pop_all()
        self._writes: list[HostCopy] = []  # that wait for the kernels of a step to be queued
        self._loads: dict[int, str] = {}  # under way: the request of each
        self._num_reported = -1

    def fileno(self) -> int:
        return self._ends.fd

    def begin(self, orders: list[CopyOrder], ready: DeviceEvent | None) -> list[str]:
        """Begin the loads of a step's orders, and keep its writes back. `ready` stands behind the
        kernels of the steps before; None: they are done. Returns the requests that load."""
        self.begin_writes(ready)
        for copy, rid in orders:
            if copy.is_load:
                self._loads[copy.number] = rid
                self._memory.submit(copy, ready)
            else:
                self._writes.append(copy)
        return [rid for copy, rid in orders if copy.is_load]

    def begin_writes(self, ready: DeviceEvent | None) -> None:
        """Begin the writes that were kept back: the kernels of their step stand before `ready`."""
        writes, self._writes = self._writes, []
        for copy in writes:
            self._memory.submit(copy, ready)

    @property
    def has_writes(self) -> bool:
        return bool(self._writes)

    def take_ends(self) -> list[tuple[HostCopyDone, str]]:
        """Return the copies that have ended, with errors that any process knows, and the request of
        each load; "": a write."""
        ends = []
        for done in self._ends.drain():
            if done.error is not None:
                error = TransferError(f"host memory: {done.error}")
                done = structs.replace(done, error=error)
            ends.append((done, self._loads.pop(done.number, "")))
        return ends

    def take_size(self) -> dict[int, tuple[int, int]]:
        """Return by rank the host pages that are ready, and all; nothing without news."""
        num_ready = self._memory.ready_pages
        if num_ready == self._num_reported:
            return {}
        self._num_reported = num_ready
        return {self._rank: (num_ready, self._memory.num_pages)}

    def close(self) -> None:
        """Let the copies that run end, and give the memory back. Idempotent."""
        self._memory.close()
        self._ends.close()
