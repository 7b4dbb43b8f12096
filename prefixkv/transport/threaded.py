"""A transport that has one thread for all its work: each call is a command for its loop."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from prefixkv.errors import CallerError, ClosedError, InternalError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout, StateLink
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import WriteJob
from prefixkv.transport.loop import TransportLoop
from prefixkv.transport.routes import PeerMemory
from prefixkv.wakeups import Inbox

CLOSE_TIMEOUT_S: Final = 120.0

L = TypeVar("L", bound=TransportLoop[Any])


class QueuedCalls(ABC, Generic[L]):
    """The calls of `base.Transport` that every loop takes alike. Holds no state."""

    @abstractmethod
    def _call(self, command: Callable[[L], None], or_raise: bool = True) -> None:
        """Closed: ClosedError, or nothing with `or_raise` False."""

    def add_peer(
        self, peer: PeerId, metadata: bytes, layout: KVLayout,
        parts: tuple[Shard, Shard] | None = None, staging: StagingArea | None = None,
        state: StateLink | None = None,
    ) -> None:  # fmt: skip
        memory = PeerMemory(layout, parts, staging, state)
        self._call(lambda loop: loop.add_peer(peer, metadata, memory))

    def remove_peer(self, peer: PeerId) -> None:
        # Closing has ended all jobs and forgotten all peers: nothing to raise about, here and in
        # `cancel`.
        self._call(lambda loop: loop.remove_peer(peer), or_raise=False)

    def write(self, job: WriteJob) -> None:
        self._call(lambda loop: loop.write(job))

    def cancel(self, job_id: int) -> None:
        self._call(lambda loop: loop.cancel(job_id), or_raise=False)


class ThreadedTransport(QueuedCalls[L]):
    """A transport with a thread of its own. The owner creates and closes it; the other methods may
    be called from any thread, queue and return."""

    def __init__(
        self, me: PeerId, layout: KVLayout, staging: StagingArea | None, state: StateLayout | None
    ) -> None:
        """Check the memory; the subclass makes the thread. Raises ConfigError where a layout or an
        area breaks its laws."""
        layout.validate()
        for more in (staging, state):
            if more is not None:
                more.validate()
        self._me = me
        self._inbox: Inbox[Callable[[L], None] | None] = Inbox()
        # Over `_closed` and the inbox: nothing is queued behind the closing command.
        self._lock = threading.Lock()
        self._closed = False
        # Set by the thread before it ends, read after the join.
        self._close_error: Exception | None = None
        self._thread: threading.Thread

    def _start_thread(self) -> None:
        """Where that fails, the inbox is closed: no thread ever will."""
        try:
            self._thread.start()
        except BaseException:
            self._inbox.close()
            raise

    def _call(self, command: Callable[[L], None], or_raise: bool = True) -> None:
        with self._lock:
            if not self._closed:
                self._inbox.put(command)
            elif or_raise:
                raise ClosedError(f"the transport of {self._me.name} is closed")

    def close(self) -> None:
        """End the thread by a last command, and join it. May be called again. Raises CallerError
        from the sink, InternalError if the thread is still in a transfer, or our writes are not
        fenced."""
        if threading.current_thread() is self._thread:
            raise CallerError("close() was called from the transport's own sink")
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        # Outside the lock: the thread's sink may call methods of ours, which take it.
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(
                f"the transport's thread has not ended after {CLOSE_TIMEOUT_S} s: it is still in a "
                "transfer"
            )
        # After the thread, which waits on the inbox's descriptor.
        self._inbox.close()
        if self._close_error is not None:
            raise self._close_error
