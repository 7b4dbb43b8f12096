"""The staging copies of a node, in threads of their own: the control thread never waits for a copy.

Jobs start in the order they came in. A worker ends each with one CopyDone to the sink; closing the
pool ends those that had not started. On CUDA each worker has a current stream, and CopyDone comes
when the device is done. Copies on the CPU are numpy's, with the GIL let go. Torch's number of
threads is left alone: threads that start later would take it over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from prefixkv.control.effects import AddPeer, CopyDone
from prefixkv.errors import ClosedError, ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import StagingBuffer
from prefixkv.memory.mesh import Shard
from prefixkv.memory.stage_copy import StagingCopy, scatter_together, staging_copy
from prefixkv.protocol.ids import PeerId
from prefixkv.staging.receiver import Scatter
from prefixkv.staging.sender import Gather

CopySink = Callable[[CopyDone], None]
Settle = Callable[[], None]
"""Waits until the device has done all that was queued on the thread's stream."""


class Workers(Protocol):
    """The interface of what runs copies: a CopyPool, or a simulation."""

    def submit(self, copy_id: int, copy: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


def start_workers(
    num_threads: int, run: Callable[[Settle | None], None], device: str, name: str
) -> list[threading.Thread]:
    """Start threads that make copies, each in `run`, which gets the wait for the device.

    On CUDA each has a stream of its own, which is current in it. On the CPU there is nothing to
    wait for. The threads are daemons, "prefixkv-NAME-0" and so on. Raises ConfigError unless
    `num_threads` is positive.
    """
    if num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}, must be at least 1")
    on_cuda = device.startswith("cuda")
    target = partial(_run_on_stream, run, device) if on_cuda else partial(run, None)
    threads = [
        threading.Thread(target=target, name=f"prefixkv-{name}-{i}", daemon=True)
        for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    return threads


def _run_on_stream(run: Callable[[Settle | None], None], device: str) -> None:
    import torch

    cuda: Any = torch.cuda  # in parts untyped
    with cuda.device(device):
        stream = cuda.Stream()
        done = cuda.Event(blocking=True)  # blocking: the thread sleeps, and does not spin

        def settle() -> None:
            done.record(stream)
            done.synchronize()

        with cuda.stream(stream):
            run(settle)


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


class _CopyJob(NamedTuple):
    copy_id: int
    copy: Callable[[], None]


class CopyPool:
    """The threads that run copies. Created, given jobs and closed by one thread."""

    def __init__(
        self, num_threads: int, sink: CopySink, device: str = "cpu", name: str = "node"
    ) -> None:
        """Start the threads. Raises ConfigError unless `num_threads` is positive."""
        self._sink = sink
        self._jobs: SimpleQueue[_CopyJob | None] = SimpleQueue()
        self._closed = False  # read by the workers without a lock: one more copy may start, no more
        self._threads = start_workers(num_threads, self._run, device, f"copy-{name}")

    def submit(self, copy_id: int, copy: Callable[[], None]) -> None:
        """Queue a copy. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the copy pool is closed")
        self._jobs.put(_CopyJob(copy_id, copy))

    def close(self) -> None:
        """Let the copies that run end, start no others, join the threads. Idempotent."""
        # Set first: jobs in the queue before the None entries then end without being run.
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self, settle: Settle | None) -> None:
        while (job := self._jobs.get()) is not None:
            if self._closed:
                error: Exception | None = ClosedError(
                    "the copy pool was closed before the copy began"
                )
            else:
                error = run_settled(job.copy, settle)
            self._sink(CopyDone(job.copy_id, error))


class StagingCopies:
    """The copies for a control object's Gather and Scatter. Used by the control thread; the copies
    run in `workers`.

    `buffer` is the rank's staging memory, in slots of `slot_bytes` on prefill.
    """

    def __init__(
        self, layout: KVLayout, buffer: StagingBuffer, slot_bytes: int, workers: Workers
    ) -> None:
        self.buffer = buffer
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._workers = workers
        # By part and unit, built at most a few times.
        self._copies: dict[tuple[Shard, int], StagingCopy] = {}
        # Read by workers, changed by the control thread.
        self.to_peers: dict[PeerId, StagingCopy] = {}

    def add_peer(self, added: AddPeer) -> None:
        """Prepare the gathers for a peer, if it is staged to."""
        if added.staged and added.memory.parts is not None:
            self.to_peers[added.peer] = self._copy_of(added.memory.parts[0], added.unit_tokens)

    def remove_peer(self, peer: PeerId) -> None:
        """Forget a peer. A gather for it that has not started fails, by its CopyDone."""
        self.to_peers.pop(peer, None)

    def gather(self, effect: Gather) -> None:
        """Queue a gather into its slot. All errors come back in its CopyDone, as with `scatter`."""

        def run() -> None:
            # In the worker, so that a peer that is removed meanwhile fails this copy alone.
            stage = self.buffer.slice(effect.slot * self._slot_bytes, effect.num_bytes)
            self.to_peers[effect.peer].gather(effect.src_units, stage)

        self._workers.submit(effect.gather_id, run)

    def scatter(self, effect: Scatter) -> None:
        """Queue a scatter of a lease's sections into pages."""

        def run() -> None:
            parts = [
                (
                    self._copy_of(effect.parts[section.rank], effect.unit_tokens),
                    self.buffer.slice(section.offset, section.num_bytes),
                )
                for section in effect.sections
            ]
            scatter_together(parts, effect.units)

        self._workers.submit(effect.lease_id, run)

    def close(self) -> None:
        self._workers.close()

    def _copy_of(self, part: Shard, unit_tokens: int) -> StagingCopy:
        """Built on first use, since it holds tables of the whole pool. Two threads may both build
        one; one of them is kept."""
        copy = self._copies.get((part, unit_tokens))
        if copy is None:
            copy = self._copies[part, unit_tokens] = staging_copy(
                self._layout, part, unit_tokens, self.buffer.device
            )
        return copy
