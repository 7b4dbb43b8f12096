"""The transport over NIXL. One thread makes every NIXL call.

Rules, each the answer to something measured:

- No progress thread inside NIXL (it burns a core): our thread polls on both sides while there is a reason to.
- It waits at its inbox, so a call from outside wakes it at once whatever it waits for. (An eventfd would do
  for the idle wait, but a poll on it cannot time out in microseconds; a lock can.)
- On shared memory the copy runs inside the post, so posts are bounded, and between two posts to one peer
  every other peer gets one.
- A lost peer does not heal: it is removed and added again, with new descriptor lists, at its next write.
- A write that failed after its post may still land, until its agent is destroyed. So `renew` puts another
  agent in its place, which posts from then on; the former one ends what it has posted, and is destroyed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final

from prefixkv.config import TransportConfig
from prefixkv.errors import (
    AbortedError,
    CallerError,
    ClosedError,
    HandshakeError,
    InternalError,
    PeerLostError,
    TransferTimeoutError,
)
from prefixkv.pool.kv_layout import KVLayout
from prefixkv.protocol.state import PeerId
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    Settled,
    Sink,
    TransportEvent,
    WriteDrained,
    WriteFailed,
    WriteJob,
)
from prefixkv.transport.descriptors import Part, Runs, paired_runs, part_indices
from prefixkv.transport.jobs import ActiveJob, JobTable, Outbox
from prefixkv.transport.nixl_agent import (
    CONNECTION_BROKEN,
    FORGOTTEN,
    NEVER_POSTED,
    NixlAgent,
    bare,
    error_of,
    nixl_name,
)

_log = logging.getLogger("prefixkv.transport")

_DEFAULTS: Final = TransportConfig()
_START_TIMEOUT_S: Final = 120.0
_CLOSE_TIMEOUT_S: Final = 120.0
_PATIENCE_S: Final = 2e-3  # of empty polls, before sleeps become long
_LINGER_S: Final = 5e-3  # a notification may still sit in UCX's buffers when its write is DONE
_COMMANDS_A_TURN: Final = 64  # then the posts get theirs
_POLL_GAP_S: Final = 2e-3  # more than this between two polls does not count as polling
_RECONNECT_S: Final = 0.1  # between two attempts, each of which may hold the thread for 20 ms
_REST_S: Final = 0.1  # between the last error of an agent and its end
_RENEW_S: Final = 0.25  # between two renewals, each of which holds it for 70 ms

_Command = Callable[["_Agent"], None]  # run by the thread


class NixlTransport:
    """Keeps the contract of `base.Transport` over a NIXL agent of its own.

    The owner creates and closes it; the other methods may be called from any thread, queue and return. The
    memory of `layout` is registered here and has to stay until `close()` has returned.
    """

    def __init__(self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig = _DEFAULTS) -> None:
        """Start the thread, create the agent in it and register the pool's memory; takes 0.05 to 0.5 s.

        Raises: ConfigError for a layout that breaks its laws; what NIXL raises when it cannot start.
        """
        layout.validate()
        self._me = me
        self._inbox = _Inbox()
        self._lock = threading.Lock()  # no command is queued behind the one that closes
        self._closed = False
        self._close_error: Exception | None = None
        started: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run,
            args=(layout, sink, config, started),
            name=f"prefixkv-transport-{me.name}",
            daemon=True,
        )
        self._thread.start()
        try:
            outcome = started.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            raise TransferTimeoutError(f"NIXL did not start within {_START_TIMEOUT_S} s") from None
        if isinstance(outcome, Exception):
            self._closed = True
            self._thread.join(_CLOSE_TIMEOUT_S)
            raise outcome
        self._metadata = outcome

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, peer: PeerId, metadata: bytes, layout: KVLayout) -> None:
        self._call(lambda agent: agent.add_peer(peer, metadata, layout))

    def remove_peer(self, peer: PeerId) -> None:
        self._call(lambda agent: agent.remove_peer(peer), or_raise=False)

    def write(self, job: WriteJob) -> None:
        self._call(lambda agent: agent.write(job))

    def cancel(self, job_id: int) -> None:
        self._call(lambda agent: agent.cancel(job_id), or_raise=False)

    def expect(self, num_rooms: int) -> None:
        self._call(lambda agent: agent.expect(num_rooms))

    def settle(self, token: Hashable, for_s: float) -> None:
        self._call(lambda agent: agent.settle(token, for_s))

    def renew(self) -> None:
        self._call(lambda agent: agent.renew(), or_raise=False)

    def close(self) -> None:
        """See `base.Transport.close`. May be called again.

        Raises: InternalError if the agent was not destroyed: then our writes are not fenced.
        """
        if threading.current_thread() is self._thread:
            raise CallerError("close() was called from the transport's own sink")
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(f"the transport thread is still in a NIXL call after {_CLOSE_TIMEOUT_S} s")
        if self._close_error is not None:
            raise self._close_error

    def _call(self, command: _Command, or_raise: bool = True) -> None:
        with self._lock:
            if not self._closed:
                self._inbox.put(command)
            elif or_raise:
                raise ClosedError(f"the transport of {self._me.name} is closed")

    def _run(
        self, layout: KVLayout, sink: Sink, config: TransportConfig,
        started: queue.SimpleQueue[bytes | Exception],
    ) -> None:  # fmt: skip
        """The thread. Everything of NIXL hangs on `agent`, which dies with this frame's work."""
        try:
            agent = _Agent(self._me, layout, sink, config)
            started.put(agent.metadata)
        except BaseException as error:
            started.put(bare(error))
            return
        agent.serve(self._inbox)
        self._close_error = agent.destroy()


class _Inbox:
    """Commands for the thread; None closes. Anyone puts, the thread takes and waits.

    Not a `queue.SimpleQueue`: in CPython 3.11 its `get` with a timeout of microseconds may turn into one
    without end, when it wakes for an item already taken and the time is up by then.
    """

    def __init__(self) -> None:
        self._commands: deque[_Command | None] = deque()
        self._bell = threading.Lock()  # locked: nobody rang since the thread last woke
        self._bell.acquire()

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: _Command | None) -> None:
        self._commands.append(command)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def take(self) -> _Command | None:
        return self._commands.popleft()

    def wait(self, timeout_s: float | None) -> None:
        """Until something was put, at most `timeout_s`. May return early, with nothing there."""
        if not self._commands:
            self._bell.acquire(timeout=-1 if timeout_s is None else timeout_s)


class _Peer:
    """A peer, the descriptor lists for it, and the jobs that go there."""

    def __init__(self, peer: PeerId, metadata: bytes, layout: KVLayout) -> None:
        self.peer = peer
        self.metadata = metadata
        self.layout = layout
        self.loaded = False  # NIXL has its metadata
        self.runs: Runs | None = None  # None: to be connected before its next post
        self.local_list: Any = None
        self.remote_list: Any = None
        self.outbox = Outbox()
        self.in_flight = 0  # of the agent that posts now
        self.retry_at = 0.0
        self.removed = False

    @property
    def nixl_name(self) -> str:
        return nixl_name(self.peer)


class _Post:
    """A part under way, and the agent that posted it."""

    __slots__ = ("agent", "handle", "job", "part", "peer")

    def __init__(self, agent: NixlAgent, handle: Any, peer: _Peer, job: ActiveJob, part: Part) -> None:
        self.agent = agent
        self.handle = handle
        self.peer = peer
        self.job = job
        self.part = part


class _Agent:
    """The NIXL agent and all that hangs on it. Owned by the transport thread, nothing of it leaves."""

    def __init__(self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig) -> None:
        self.layout = layout
        self.sink = sink
        self.config = config
        self.me = me
        self.now = NixlAgent(nixl_name(me), layout, config.memory_type)
        self.former: NixlAgent | None = None  # posts nothing more
        self.former_until = 0.0
        self.outlived: list[NixlAgent] = []  # that could not be destroyed: what failed there is never proven
        self.num_renewed = 0
        self.renew_wanted = False
        self.renew_from = 0.0
        self.metadata = self.now.metadata
        self.peers: dict[PeerId, _Peer] = {}
        self.jobs = JobTable(self._emit, config.post_bytes, config.post_descriptors)
        self.posts: list[_Post] = []
        self.expected = 0
        self.linger_until = 0.0
        self.polled_s = 0.0  # time spent polling, without the gaps in which nobody did
        self.last_poll = 0.0
        self.settling: list[tuple[float, Hashable]] = []  # (`polled_s` to reach, token)

    # --- the loop ---------------------------------------------------------------------------------

    def serve(self, inbox: _Inbox) -> None:
        """Obey commands and make progress until the closing one."""
        quiet_since: float | None = None
        while True:
            wait_s = self._wait_s(quiet_since)
            if wait_s != 0.0:
                inbox.wait(wait_s)
            for _ in range(min(len(inbox), _COMMANDS_A_TURN)):
                command = inbox.take()
                if command is None:
                    return
                self._guarded(command)
                quiet_since = None
            if self._guarded(_Agent._progress):
                quiet_since = None
            elif quiet_since is None:
                quiet_since = time.monotonic()

    def _guarded(self, step: Callable[[_Agent], bool | None]) -> bool | None:
        """What the step returns. An exception that got this far is a bug of ours; the thread serves others
        too, so it lives on."""
        try:
            return step(self)
        except Exception:
            _log.error("the transport thread stumbled\n%s", traceback.format_exc())
            return None

    def _wait_s(self, quiet_since: float | None) -> float | None:
        """How long to wait for a command: 0 to poll again at once, None when only a command brings work."""
        now = time.monotonic()
        renewing = self.renew_wanted or self.former is not None
        if not (self.jobs or self.expected or self.settling or renewing or now < self.linger_until):
            return None
        quiet_s = 0.0 if quiet_since is None else now - quiet_since
        if quiet_s < self.config.spin_s:
            return 0.0
        return self.config.sleep_s if quiet_s < _PATIENCE_S else self.config.idle_sleep_s

    def _progress(self) -> bool:
        """One post for each peer, one check of each post, one poll. Whether anything moved."""
        moved = False
        if self.jobs:
            for peer in list(self.peers.values()):
                if peer.outbox:
                    moved |= self._serve_peer(peer)
            if self.posts:
                moved |= self._check_posts()
        if self.former is not None:
            self._end_former(self.former)
        elif self.renew_wanted and time.monotonic() >= self.renew_from:
            self._renew()
        if self.expected or self.settling or (self.linger_until and not self.posts):
            moved |= self._poll_notifications()
        return moved

    # --- commands ---------------------------------------------------------------------------------

    def add_peer(self, peer_id: PeerId, metadata: bytes, layout: KVLayout) -> None:
        peer = self.peers.get(peer_id)
        if peer is None:
            peer = self.peers[peer_id] = _Peer(peer_id, metadata, layout)
            self._connect(peer)
        elif peer.removed or (peer.metadata, peer.layout) != (metadata, layout):
            if peer.layout != layout:
                self.jobs.drop(peer.outbox, PeerLostError(f"the pool of {peer_id.name} is another now"))
            # its lists may be in use: they are built again before its next post
            peer.metadata, peer.layout, peer.removed = metadata, layout, False
            peer.runs, peer.retry_at = None, 0.0

    def remove_peer(self, peer_id: PeerId) -> None:
        peer = self.peers.get(peer_id)
        if peer is None:
            return
        peer.removed = True
        self.jobs.drop(peer.outbox, AbortedError(f"peer {peer_id.name} was removed"))
        self._forget_if_unused(peer)

    def write(self, job: WriteJob) -> None:
        peer = self.peers.get(job.peer)
        if peer is None or peer.removed:
            self.jobs.refuse(job, PeerLostError(f"{job.peer} is no peer of this transport"))
        elif peer.runs is None:
            self.jobs.park(peer.outbox, job)
        else:
            self.jobs.start(peer.outbox, peer.runs, job)

    def cancel(self, job_id: int) -> None:
        self.jobs.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        self.expected = num_rooms

    def settle(self, token: Hashable, for_s: float) -> None:
        self.settling.append((self.polled_s + for_s, token))

    def renew(self) -> None:
        self.renew_wanted = True

    # --- peers ------------------------------------------------------------------------------------

    def _connect(self, peer: _Peer) -> bool:
        """Make the peer known to NIXL, anew if need be, and prepare its lists. Never with a post in flight:
        NIXL forgets the state of a handle whose peer is removed."""
        try:
            self._unload(peer)
            name = peer.nixl_name
            if not self.now.is_metadata_of(name, peer.metadata):
                raise HandshakeError("agent name in NIXL's metadata", name, bytes(peer.metadata[:64]))
            self.now.api.add_remote_agent(peer.metadata)
            peer.loaded = True
            runs = paired_runs(self.layout, peer.layout)
            memory_type = self.config.memory_type
            peer.local_list = self.now.api.prep_xfer_dlist("", runs.src, memory_type)
            peer.remote_list = self.now.api.prep_xfer_dlist(name, runs.dst, memory_type)
            peer.runs = runs
        except Exception as error:
            self._lose(peer, bare(error))
            return False
        self.jobs.start_parked(peer.outbox, runs)
        return True

    def _unload(self, peer: _Peer) -> None:
        peer.runs = None
        for prepared in (peer.local_list, peer.remote_list):
            if prepared is not None:
                prepared.release()
        peer.local_list = peer.remote_list = None
        if peer.loaded:
            peer.loaded = False
            with contextlib.suppress(FORGOTTEN):  # NIXL forgot it by itself
                self.now.api.remove_remote_agent(peer.nixl_name)

    def _lose(self, peer: _Peer, error: Exception) -> None:
        """The peer is gone as far as we know: what waits for it fails, a later write tries again."""
        peer.runs = None
        peer.retry_at = time.monotonic() + _RECONNECT_S
        self.jobs.drop(peer.outbox, error)
        if not peer.removed:
            self._emit(PeerUnreachable(peer.peer, error))

    def _forget_if_unused(self, peer: _Peer) -> None:
        if peer.removed and peer.in_flight == 0 and self.peers.get(peer.peer) is peer:
            del self.peers[peer.peer]
            try:
                self._unload(peer)
            except Exception as error:
                _log.warning("peer %s could not be unloaded: %s", peer.peer.name, repr(error))

    # --- writes -----------------------------------------------------------------------------------

    def _serve_peer(self, peer: _Peer) -> bool:
        """Post the next part of the first room in turn that can go; connect first if that is due."""
        if peer.runs is None:
            if peer.in_flight or time.monotonic() < peer.retry_at:
                return False
            return self._connect(peer)
        if peer.in_flight >= self.config.window:
            return False
        for job in peer.outbox.round():
            try:
                ready = job.poll_ready()
            except BaseException as error:
                self.jobs.stop(job, bare(error))
                return True
            if ready:
                self._post(peer, job)
                return True
        return False

    def _post(self, peer: _Peer, job: ActiveJob) -> None:
        number = job.next_part
        part = job.parts[number]
        self.jobs.part_posted(job)
        peer.in_flight += 1
        handle: Any = None
        error: Exception | None
        may_land = False
        try:
            src, dst = part_indices(job.runs, part, job.src_pages, job.dst_pages)
            handle = self.now.api.make_prepped_xfer("WRITE", peer.local_list, src, peer.remote_list, dst)
            may_land = True
            state = self.now.api.transfer(handle, job.tag(number))
        except Exception as refusal:
            state, error = "", bare(refusal)
            may_land = may_land and not isinstance(refusal, NEVER_POSTED)
        else:
            error = error_of(state)
        post = _Post(self.now, handle, peer, job, part)
        if state == "PROC":
            self.posts.append(post)
        else:
            self._part_ended(post, error, may_land)

    def _check_posts(self) -> bool:
        ended: list[tuple[_Post, Exception | None]] = []
        going: list[_Post] = []
        for post in self.posts:
            try:
                state = post.agent.api.check_xfer_state(post.handle)
            except Exception as failure:
                ended.append((post, bare(failure)))
            else:
                if state == "PROC":
                    going.append(post)
                else:
                    ended.append((post, error_of(state)))
        self.posts = going
        for post, error in ended:
            self._part_ended(post, error, may_land=True)
        return bool(ended)

    def _part_ended(self, post: _Post, error: Exception | None, may_land: bool) -> None:
        peer = post.peer
        current = post.agent is self.now
        if current:
            peer.in_flight -= 1
        self._release(post)
        if error is None:
            self.linger_until = time.monotonic() + _LINGER_S
        elif may_land:
            post.agent.unproven.add(post.job.job.job_id)
        self.jobs.part_ended(post.job, post.part, error, may_land)
        if current and isinstance(error, CONNECTION_BROKEN) and peer.runs is not None:
            self._lose(peer, error)
        self._forget_if_unused(peer)

    def _release(self, post: _Post) -> None:
        if post.handle is not None:
            try:
                post.handle.release()
            except Exception as error:
                _log.warning("a handle of job %d could not be released: %s", post.job.job.job_id, repr(error))

    # --- notifications and events -----------------------------------------------------------------

    def _poll_notifications(self) -> bool:
        """Also what makes NIXL progress on a side that only receives."""
        if self.linger_until and time.monotonic() >= self.linger_until:
            self.linger_until = 0.0
        try:
            arrived = self.now.api.get_new_notifs()
        except Exception as error:
            _log.warning("notifications could not be polled: %s", repr(error))
            return False
        for tags in arrived.values():
            for tag in tags:
                self._emit(Arrived(bytes(tag)))
        now = time.monotonic()
        self.polled_s += min(now - self.last_poll, _POLL_GAP_S)
        self.last_poll = now
        if self.settling:
            self._tell_settled()
        return bool(arrived)

    def _tell_settled(self) -> None:
        due = [token for until_s, token in self.settling if until_s <= self.polled_s]
        self.settling = [waiting for waiting in self.settling if waiting[0] > self.polled_s]
        for token in due:
            self._emit(Settled(token))

    def _emit(self, event: TransportEvent) -> None:
        try:
            self.sink(event)
        except BaseException:
            _log.error("the sink of the transport failed on %r\n%s", event, traceback.format_exc())
        if isinstance(event, WriteFailed) and not event.drained:
            self._tell_if_proven(event.job_id)

    # --- another agent ----------------------------------------------------------------------------

    def _renew(self) -> None:
        """Another agent posts from now on. If it cannot be made, the one there is goes on, and it is tried again."""
        self.renew_wanted = False
        if not self.now.unproven:
            return
        try:
            successor = NixlAgent(f"{nixl_name(self.me)}/{self.num_renewed + 1}", self.layout, self.config.memory_type)
        except Exception as error:
            _log.error("no new agent could be made: %s", repr(error))
            self.renew_wanted, self.renew_from = True, time.monotonic() + _RENEW_S
            return
        self.num_renewed += 1
        self.former, self.now = self.now, successor
        self.former_until = time.monotonic() + self.config.renew_grace_s
        for peer in self.peers.values():
            self.former.lists += [peer.local_list, peer.remote_list]
            peer.local_list = peer.remote_list = peer.runs = None
            peer.loaded, peer.in_flight, peer.retry_at = False, 0, 0.0
        for peer in list(self.peers.values()):
            self._forget_if_unused(peer)

    def _end_former(self, former: NixlAgent) -> None:
        """Destroy it once its posts have ended, or have had their time; then none of them can land any more."""
        posts = [post for post in self.posts if post.agent is former]
        now = time.monotonic()
        if posts and now < self.former_until:
            return
        if not former.rest(now, _REST_S):
            return
        self.former = None
        self.renew_from = time.monotonic() + _RENEW_S
        self.posts = [post for post in self.posts if post.agent is not former]
        for post in posts:
            self._release(post)
            post.handle = None
        destroyed = former.destroy()
        if not destroyed:
            _log.error("an agent that was replaced could not be destroyed: what it wrote last is never proven to end")
            self.outlived.append(former)
        for job_id in sorted(former.unproven):
            if job_id not in self.jobs:  # else it is told when the job ends
                self._tell_if_proven(job_id)
        for post in posts:
            error = TransferTimeoutError(f"not done {self.config.renew_grace_s} s after its agent was replaced")
            self._part_ended(post, error, may_land=not destroyed)

    def _tell_if_proven(self, job_id: int) -> None:
        """Say that the job is drained, once no agent is left that could still write for it."""
        agents = [self.now, *self.outlived] + ([self.former] if self.former is not None else [])
        if not any(job_id in agent.unproven for agent in agents):
            self._emit(WriteDrained(job_id))

    # --- the end ----------------------------------------------------------------------------------

    def destroy(self) -> Exception | None:
        """Drop every handle, destroy the agent, then end every job: from then on nothing of ours can land.

        Returns the InternalError to raise where the agent outlived this.
        """
        while self.posts:
            self._release(self.posts.pop())
        for peer in self.peers.values():
            peer.local_list = peer.remote_list = None
        fenced = not self.outlived
        for agent in [self.now] + ([self.former] if self.former is not None else []):
            while agent.unproven and not agent.rest(time.monotonic(), _REST_S):
                time.sleep(self.config.idle_sleep_s)
            fenced &= agent.destroy()
        self.jobs.close(fenced)
        return None if fenced else InternalError("the NIXL agent outlived its transport: writes are not fenced")
