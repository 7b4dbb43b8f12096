"""A transport with a thread of its own, but for how bytes travel: its calls become commands for its
thread, which has its peers, its jobs, and what it tells the sink. `nixl/loop.py` and `shm/loop.py`
add the transfers."""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, ClassVar, Final, Generic, TypeVar

from prefixkv.config import TransportConfig
from prefixkv.errors import (
    AbortedError,
    CallerError,
    ClosedError,
    InternalError,
    PeerLostError,
    TransferTimeoutError,
    ours,
)
from prefixkv.protocol.ids import PeerId
from prefixkv.threads import Inbox
from prefixkv.transport.base import (
    CHECKS,
    PeerMemory,
    RankMemory,
    Sink,
    Stamp,
    TransportEvent,
    WriteJob,
)
from prefixkv.transport.jobs import ActiveJob, JobTable, Outbox
from prefixkv.transport.runs import Routes

_log = logging.getLogger("prefixkv.transport")

RECONNECT_S: Final = 0.1  # between two attempts to connect to one peer
CLOSE_TIMEOUT_S: Final = 120.0
_START_TIMEOUT_S: Final = 120.0
_DEFAULTS: Final = TransportConfig()
_SLICE_S: Final = 2e-3  # of the rate: as much is sent at once, and saved up while nothing is sent
_LEAST_BYTES: Final = 64 << 10  # of a slice; smaller parts cost more time than their bytes


class Pace:
    """Bytes that may be sent now. Owned by the transport's thread. `bytes_per_s` 0: no limit.

    A part may go while the bucket is not in debt, and is then taken off it whole. So no part is too
    large to go, the mean is the rate, and at most a slice and one part go beyond it at once.

    >>> pace = Pace(1e9)
    >>> pace.wait_s(0.0), pace.spend(10_000_000, 0.0), round(pace.wait_s(0.0), 6)
    (0.0, None, 0.008)
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._rate = bytes_per_s
        self._slice = max(_LEAST_BYTES, int(bytes_per_s * _SLICE_S))
        self._left: float = self._slice  # bytes that may go; below 0: debt
        self._at_s = -math.inf  # monotonic: when `_left` was counted

    def part_bytes(self, post_bytes: int) -> int:
        """Return the bound on a part: `post_bytes`, or a slice where the rate is limited."""
        # A part of many slices would make all others wait for as many, and then come at once.
        return min(post_bytes, self._slice) if self._rate else post_bytes

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next part may be sent: 0, or more while in debt."""
        if not self._rate:
            return 0.0
        self._fill(now_s)
        return max(0.0, -self._left / self._rate)

    def spend(self, num_bytes: int, now_s: float) -> None:
        """Take a part that is sent off the bucket."""
        if self._rate:
            self._fill(now_s)
            self._left -= num_bytes

    def _fill(self, now_s: float) -> None:
        self._left = min(self._slice, self._left + (now_s - self._at_s) * self._rate)
        self._at_s = now_s


class LoopPeer:
    """A peer of a transport, and the jobs that go to it."""

    def __init__(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        self.peer = peer
        self.metadata = metadata
        self.memory = memory
        # Which of our memory goes where in the peer's; None: to be connected before its next part.
        self.routes: Routes | None = None
        self.outbox = Outbox()
        self.retry_at = 0.0  # monotonic: no attempt to connect before
        self.removed = False  # by the owner; it may be kept while something of it is under way
        self.in_flight = 0  # posts under way, of the present agent


P = TypeVar("P", bound=LoopPeer)


class TransportLoop(ABC, Generic[P]):
    """The peers and jobs of one transport. Owned by the transport's thread; nothing of it leaves. A
    part has at most `max_descriptors` pages. `metadata` is what peers need."""

    metadata: bytes
    peer_type: Callable[..., P]

    def __init__(
        self, memory: RankMemory, sink: Sink, config: TransportConfig, max_descriptors: int
    ) -> None:
        self._memory = memory
        self._sink = sink
        self._config = config
        self._peers: dict[PeerId, P] = {}
        self._pace = Pace(config.max_bytes_per_s)
        part_bytes = self._pace.part_bytes(config.post_bytes)
        self._jobs = JobTable(self.emit, part_bytes, max_descriptors)

    @abstractmethod
    def serve(self, inbox: Inbox[Callable[[Any], None] | None]) -> None:
        """Obey commands and make progress until None comes, the command that closes."""

    @abstractmethod
    def destroy(self) -> Exception | None:
        """End every job; from then on nothing of ours can land. Returns what `close` is to raise:
        why that cannot be said."""

    # --- commands ---------------------------------------------------------------------------------

    def add_peer(self, peer_id: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        """Add a peer, and connect it, again where its metadata or memory is another."""
        # Three cases: unknown; known with new metadata or memory (or removed and not gone yet);
        # known as it is.
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = self.peer_type(peer_id, metadata, memory)
            self._set_stamp(peer)
            self._connect(peer)
        elif peer.removed or (peer.metadata, peer.memory) != (metadata, memory):
            # Its jobs were checked against the bounds of the former memory.
            if peer.memory != memory:
                lost = PeerLostError(f"the memory of {peer_id.name} is another now")
                self._jobs.drop(peer.outbox, lost)
            peer.metadata, peer.memory, peer.removed = metadata, memory, False
            self._set_stamp(peer)
            self._connect_again(peer)

    def _set_stamp(self, peer: P) -> None:
        memory = self._memory, peer.memory
        peer.outbox.stamp = CHECKS[0].stamp(*memory) if peer.memory.checksum else Stamp()

    def remove_peer(self, peer_id: PeerId) -> None:
        """Remove a peer: its jobs that are not posted end now."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        # Jobs that are not posted end now; the peer itself goes once nothing of it is under way.
        peer.removed = True
        self._jobs.drop(peer.outbox, AbortedError(f"peer {peer_id.name} was removed"))
        self._forget_if_unused(peer)

    def write(self, job: WriteJob) -> None:
        """Start a job, or park it until its peer is connected."""
        peer = self._peers.get(job.peer)
        if peer is None or peer.removed:
            self._jobs.refuse(job, PeerLostError(f"{job.peer} is no peer of this transport"))
        else:
            self._jobs.start(peer.outbox, peer.routes, job)

    def cancel(self, job_id: int) -> None:
        self._jobs.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        """As `Transport.expect`. By default a tag wakes the thread by itself."""

    @abstractmethod
    def settle(self, token: Hashable, for_s: float) -> None:
        """As `Transport.settle`."""

    def renew(self) -> None:
        """As `Transport.renew`. By default no job ends undrained."""

    # --- peers ------------------------------------------------------------------------------------

    @abstractmethod
    def _connect(self, peer: P) -> None:
        """Begin to connect. `_lose` takes what goes wrong."""

    def _connect_again(self, peer: P) -> None:
        """Let go of a peer's former memory, and connect as soon as that may be."""
        self._connect(peer)

    @abstractmethod
    def _forget_if_unused(self, peer: P) -> None:
        """Drop a removed peer once nothing of it is under way."""

    # --- writes -----------------------------------------------------------------------------------

    def _serve_peer(self, peer: P, now_s: float) -> bool:
        """Transfer one part, of the first room in turn that is ready; connect first if that is due.
        One part only, so that peers take turns. Returns whether anything moved."""
        if peer.routes is None:
            if peer.in_flight or now_s < peer.retry_at:
                return False
            self._connect(peer)
            return True
        # At most `window` posts per peer, so that one slow peer does not fill the thread's checks.
        if peer.in_flight >= self._config.window or self._pace.wait_s(now_s):
            return False
        for job in peer.outbox.round():
            try:
                ready = job.poll_ready()
            # `ready` is the engine's code: an error ends its job alone.
            except BaseException as error:
                self._jobs.stop(job, bare(error))
                return True
            if ready:
                if self._config.max_bytes_per_s:
                    self._pace.spend(job.parts[job.next_part].num_bytes, time.monotonic())
                    # The bucket is the peers' in common, and those are looked at in this order: the
                    # one that has spent of it goes last. Before the transfer, which may lose it.
                    self._peers[peer.peer] = self._peers.pop(peer.peer)
                self._transfer(peer, job)
                return True
        return False

    @abstractmethod
    def _transfer(self, peer: P, job: ActiveJob) -> None:
        """Transfer the next part of a job, and note how that ended if it did so at once."""

    # --- events -----------------------------------------------------------------------------------

    def emit(self, event: TransportEvent) -> None:
        """Hand an event to the sink; its exception is logged, since the thread goes on."""
        try:
            self._sink(event)
        except BaseException:
            _log.error("the sink of the transport failed on %r\n%s", event, traceback.format_exc())

    def _guarded(self, step: Callable[[], bool | None]) -> bool | None:
        """Log an exception of the step and return None: it is a bug of ours, but the thread serves
        other rooms too."""
        try:
            return step()
        except Exception:
            _log.error("the transport's thread raised\n%s", traceback.format_exc())
            return None


def bare(error: BaseException) -> Exception:
    """Return an error as `ours`, without tracebacks: their frames would keep NIXL agents and mapped
    memory."""
    # Causes and contexts have tracebacks of their own.
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return ours(error)


# --- in front of the thread ----------------------------------------------------------------------

L = TypeVar("L", bound=TransportLoop[Any])


class ThreadedTransport(Generic[L]):
    """A transport with a thread of its own. The owner creates and closes it; the other methods may
    be called from any thread, queue and return."""

    thread_name: ClassVar[str]
    loop_type: Callable[..., L]
    # What peers need, as it was at the start. A later `renew` does not change it: only a side that
    # peers do not write to is renewed.
    metadata: bytes

    def __init__(
        self, me: PeerId, memory: RankMemory, sink: Sink, config: TransportConfig = _DEFAULTS
    ) -> None:
        """Start the thread, which makes its loop. Raises ConfigError where a layout or an area
        breaks its laws, and what the loop raises."""
        memory.validate()
        self._me = me
        self._inbox: Inbox[Callable[[L], None] | None] = Inbox()
        # Over `_closed` and the inbox: nothing is queued behind the closing command.
        self._lock = threading.Lock()
        self._closed = False
        # Set by the thread before it ends, read after the join.
        self._close_error: Exception | None = None
        started: Future[bytes] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(memory, sink, config, started),
            name=f"prefixkv-{self.thread_name}-{me.name}",
            daemon=True,
        )
        # The loop's objects are created, used and destroyed by this thread alone. A failure to
        # start comes back through `started`, so that the caller gets it as its own exception.
        try:
            self._thread.start()
            self.metadata = started.result(_START_TIMEOUT_S)
        except BaseException as error:
            self._closed = True
            self._inbox.put(None)
            # One that has not started ends as soon as it has; until then it may wait on the inbox's
            # descriptor.
            if self._thread.ident is None or started.done():
                if self._thread.ident is not None:  # else none ever will
                    self._thread.join(CLOSE_TIMEOUT_S)
                self._inbox.close()
            elif isinstance(error, TimeoutError):
                why = f"the transport did not start within {_START_TIMEOUT_S} s"
                raise TransferTimeoutError(why) from None
            raise

    def _run(
        self, memory: RankMemory, sink: Sink, config: TransportConfig,
        started: Future[bytes],
    ) -> None:  # fmt: skip
        """All NIXL objects hang on `loop`, so they die when this frame ends."""
        try:
            loop = self.loop_type(self._me, memory, sink, config)
            started.set_result(loop.metadata)
        # `bare`: a traceback would keep this frame, and with it the agent.
        except BaseException as error:
            started.set_exception(bare(error))
            return
        try:
            loop.serve(self._inbox)
        finally:  # only then are its writes fenced
            self._close_error = loop.destroy()

    def add_peer(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        self._call(lambda loop: loop.add_peer(peer, metadata, memory))

    def remove_peer(self, peer: PeerId) -> None:
        # Closing has ended all jobs and forgotten all peers: nothing to raise about, here and in
        # `cancel`.
        self._call(lambda loop: loop.remove_peer(peer), or_raise=False)

    def write(self, job: WriteJob) -> None:
        self._call(lambda loop: loop.write(job))

    def cancel(self, job_id: int) -> None:
        self._call(lambda loop: loop.cancel(job_id), or_raise=False)

    def expect(self, num_rooms: int) -> None:
        self._call(lambda loop: loop.expect(num_rooms))

    def settle(self, token: Hashable, for_s: float) -> None:
        self._call(lambda loop: loop.settle(token, for_s))

    def renew(self) -> None:
        self._call(lambda loop: loop.renew(), or_raise=False)

    def _call(self, command: Callable[[L], None], or_raise: bool = True) -> None:
        """Closed: ClosedError, or nothing with `or_raise` False."""
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
