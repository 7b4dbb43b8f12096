"""The staging copies of a node: slices are gathered into slots, leases scattered into pages, in
threads of their own, so that the control thread never waits for a copy.

Jobs start in the order they came in; each ends with one CopyDone to the sink, called from a worker
(or from `close`, for what had not started). On CUDA each worker has a stream of its own, which is
current while its jobs run, and says CopyDone when the device has done what they queued there.

The copies on the CPU are numpy's, on the worker's thread alone and with the GIL let go. Torch's
number of threads is left as it is: what one thread sets, threads started later take over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from prefixkv.control.effects import AddPeer, CopyDone
from prefixkv.errors import ClosedError, ConfigError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.stage_copy import StagingCopy, scatter_together, staging_copy
from prefixkv.memory.staging_buffer import StagingBuffer
from prefixkv.protocol.ids import PeerId
from prefixkv.staging.receiver import Scatter
from prefixkv.staging.sender import Gather

CopySink = Callable[[CopyDone], None]


class Workers(Protocol):
    """What runs copies: a CopyPool, or a simulation."""

    def submit(self, copy_id: int, copy: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class _Job(NamedTuple):
    copy_id: int
    copy: Callable[[], None]


class CopyPool:
    """See the module's text. Made, given jobs and closed by one thread."""

    def __init__(
        self, num_threads: int, sink: CopySink, device: str = "cpu", name: str = "node"
    ) -> None:
        """Raises: ConfigError for a number of threads that is not positive."""
        if num_threads < 1:
            raise ConfigError(f"num_threads is {num_threads}, must be at least 1")
        self._sink = sink
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        run = self._run_cuda if device.startswith("cuda") else self._run
        args = (device,) if device.startswith("cuda") else ()
        self._threads = [
            threading.Thread(target=run, args=args, name=f"prefixkv-copy-{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, copy_id: int, copy: Callable[[], None]) -> None:
        """Queue a job. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the copy pool is closed")
        self._jobs.put(_Job(copy_id, copy))

    def close(self) -> None:
        """Let the jobs that run end, and the others not start; join the threads. Again: no-op."""
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self, settle: Callable[[], None] | None = None) -> None:
        while (job := self._jobs.get()) is not None:
            self._sink(CopyDone(job.copy_id, self._copy(job, settle)))

    def _copy(self, job: _Job, settle: Callable[[], None] | None) -> Exception | None:
        if self._closed:
            return ClosedError("the copy pool was closed before the copy began")
        error: Exception | None = None
        for step in (job.copy, settle):  # a copy that failed halfway may have queued something
            try:
                if step is not None:
                    step()
            except Exception as raised:
                error = error or raised
        return error

    def _run_cuda(self, device: str) -> None:
        import torch

        cuda: Any = torch.cuda  # in parts untyped
        with cuda.device(device):
            stream = cuda.Stream()
            done = cuda.Event(blocking=True)

            def settle() -> None:
                done.record(stream)
                done.synchronize()

            with cuda.stream(stream):
                self._run(settle)


class StagingCopies:
    """What a control object's Gather and Scatter do. Used by the control thread; the copies
    themselves run in `workers`.

    Args:
        layout: of the rank's pool.
        buffer: the rank's staging memory, in slots of `slot_bytes` on prefill.
    """

    def __init__(
        self, layout: KVLayout, buffer: StagingBuffer, slot_bytes: int, workers: Workers
    ) -> None:
        self.buffer = buffer
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._workers = workers
        self._copies: dict[tuple[Shard, int], StagingCopy] = {}
        self._to_peers: dict[PeerId, StagingCopy] = {}

    @property
    def num_peers(self) -> int:
        """Readers that slices are gathered for."""
        return len(self._to_peers)

    def add_peer(self, added: AddPeer) -> None:
        if added.staged:
            self._to_peers[added.peer] = self._copy_of(added.parts[0], added.unit_tokens)

    def remove_peer(self, peer: PeerId) -> None:
        self._to_peers.pop(peer, None)

    def gather(self, effect: Gather) -> None:
        """Whatever goes wrong comes back as its CopyDone, as with `scatter`."""

        def run() -> None:
            stage = self.buffer.slice(effect.slot * self._slot_bytes, effect.num_bytes)
            self._to_peers[effect.peer].gather(effect.src_units, stage)

        self._workers.submit(effect.gather_id, run)

    def scatter(self, effect: Scatter) -> None:
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
        """Made once, as it holds tables of the whole pool; two threads may both make one, and one
        is kept."""
        copy = self._copies.get((part, unit_tokens))
        if copy is None:
            copy = self._copies[part, unit_tokens] = staging_copy(
                self._layout, part, unit_tokens, self.buffer.device
            )
        return copy
