"""Threads that gather and scatter, so that the control thread never waits for a copy.

Jobs start in the order they came in; each ends with one CopyDone to the sink, called from a worker
(or from `close`, for what had not started). On CUDA each worker has a stream of its own, which is
current while its jobs run, and says CopyDone when the device has done what they queued there.

The copies on the CPU are numpy's, on the worker's thread alone and with the GIL let go. Torch's
number of threads is left as it is: what one thread sets, threads started later take over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from prefixkv.errors import ClosedError, ConfigError


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A job has ended, and nothing of it runs any more; `error` is what it raised, or ClosedError
    if it never ran."""

    token: Hashable
    error: Exception | None = None


class _Job(NamedTuple):
    token: Hashable
    copy: Callable[[], None]


class CopyPool:
    """See the module's text. Made, given jobs and closed by one thread."""

    def __init__(
        self,
        num_threads: int,
        sink: Callable[[CopyDone], None],
        device: str = "cpu",
        name: str = "node",
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

    def submit(self, token: Hashable, copy: Callable[[], None]) -> None:
        """Queue a job. Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the copy pool is closed")
        self._jobs.put(_Job(token, copy))

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
            self._sink(CopyDone(job.token, self._copy(job, settle)))

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
