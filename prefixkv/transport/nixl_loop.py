"""What the transport thread does: it owns a NIXL agent, posts jobs, checks posts and polls
notifications.

Rules, each the answer to something measured:

- NIXL gets no progress thread (it burns a core): our thread polls, on both sides, while something
  is under way.
- On shared memory the copy runs inside the post. So a post is bounded, and between two posts to one
  peer every other peer gets one.
- A lost peer does not heal: it is removed and added again, with new descriptor lists, at its next
  write.
- A write that failed after its post may still land until its agent is destroyed. So `renew` puts
  another agent in its place, which posts from then on. The former agent ends what it has posted and
  is destroyed.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Hashable
from typing import Any, Final

from prefixkv.config import TransportConfig
from prefixkv.errors import AbortedError, InternalError, PeerLostError, TransferTimeoutError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLayout
from prefixkv.protocol.ids import PeerId
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
from prefixkv.transport.interfaces import warn_if_open
from prefixkv.transport.jobs import ActiveJob, JobTable
from prefixkv.transport.metadata import nixl_name
from prefixkv.transport.nixl_agent import (
    CONNECTION_BROKEN,
    NEVER_POSTED,
    NixlAgent,
    bare,
    error_of,
)
from prefixkv.transport.nixl_peer import Peer, Post
from prefixkv.transport.parts import part_indices
from prefixkv.transport.routes import PeerMemory, routes_to
from prefixkv.transport.wait import Inbox

_log = logging.getLogger("prefixkv.transport")

_PATIENCE_S: Final = 2e-3  # of empty polls, before sleeps become long
# Of the quiet so far is the longest sleep: what comes is seen 3% late, and what a post gives the
# network between two polls is a thousandth of it.
_QUIET_PART: Final = 1 / 32
_QUIET_PART_SENDING: Final = 1 / 1024
# Times `idle_sleep_s`. A poll with the sleep before it costs 60 us where other threads want the
# interpreter: at 1 ms a server that only waits took 6% of a core for it, at 5 ms 1%.
_LONGEST_IDLE: Final = 25
_LINGER_S: Final = 5e-3  # a notification may still sit in UCX's buffers when its write is DONE
_COMMANDS_A_TURN: Final = 64  # then the posts get theirs
_POLL_GAP_S: Final = 2e-3  # more than this between two polls does not count as polling
_RECONNECT_S: Final = 0.1  # between two attempts, each of which may hold the thread for 20 ms
_REST_S: Final = 0.1  # between the last error of an agent and its end
_RENEW_S: Final = 0.25  # between two renewals, each of which holds it for 70 ms

Command = Callable[["NixlLoop"], None]  # run by the thread


def pause_s(config: TransportConfig, quiet_s: float, sending: bool) -> float:
    """How long to sleep between two polls, the last `quiet_s` of which were empty.

    A side that only receives may wait for a prefill that takes seconds, so its sleeps grow with the
    quiet. One that writes has to make progress for what it has posted: its sleeps grow too, since
    the peer may stand still, but slowly.

    >>> config = TransportConfig()
    >>> [pause_s(config, quiet_s, sending=False) for quiet_s in (0.0, 1e-3, 5e-3, 16e-3, 2.0)]
    [0.0, 3e-05, 0.0002, 0.0005, 0.005]
    >>> [pause_s(config, quiet_s, sending=True) for quiet_s in (16e-3, 0.2, 2.048, 20.0)]
    [0.0002, 0.0002, 0.002, 0.005]
    """
    if quiet_s < config.spin_s:
        return 0.0
    if quiet_s < _PATIENCE_S:
        return config.sleep_s
    longest_s = _LONGEST_IDLE * config.idle_sleep_s
    part = _QUIET_PART_SENDING if sending else _QUIET_PART
    return min(longest_s, max(config.idle_sleep_s, quiet_s * part))


class NixlLoop:
    """The NIXL agent and all that hangs on it. Owned by the transport thread, nothing of it leaves.

    The memory of `layout`, of `staging` and of `state` is registered here.
    """

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig,
        staging: StagingArea | None = None, state: StateLayout | None = None,
    ) -> None:  # fmt: skip
        """Raises what NIXL raises."""
        self._layout = layout
        self._staging = staging
        self._state = state
        self._sink = sink
        self._config = config
        self._name = nixl_name(me)
        warn_if_open(config.interface)
        self._agent = self._new_agent(self._name)
        self._former_agent: NixlAgent | None = None  # posts nothing more
        self._former_until = 0.0
        # Agents that could not be destroyed: what failed there is never proven.
        self._outlived: list[NixlAgent] = []
        self._num_renewed = 0
        self._renew_wanted = False
        self._renew_from = 0.0
        self.metadata = self._agent.metadata
        self._peers: dict[PeerId, Peer] = {}
        self._jobs = JobTable(self._emit, config.post_bytes, config.post_descriptors)
        self._posts: list[Post] = []
        self._expected = 0
        self._linger_until = 0.0
        self._polled_s = 0.0  # time spent polling, without the gaps between polls
        self._last_poll = 0.0
        self._settling: list[tuple[float, Hashable]] = []  # (`polled_s` to reach, token)

    # --- the loop ---------------------------------------------------------------------------------

    def serve(self, inbox: Inbox[Command]) -> None:
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
            if self._guarded(NixlLoop._progress):
                quiet_since = None
            elif quiet_since is None:
                quiet_since = time.monotonic()

    def _guarded(self, step: Callable[[NixlLoop], bool | None]) -> bool | None:
        """What the step returns. An exception that comes this far is a bug of ours. It is logged,
        and the thread goes on: it serves other rooms too.
        """
        try:
            return step(self)
        except Exception:
            _log.error("the transport thread stumbled\n%s", traceback.format_exc())
            return None

    def _wait_s(self, quiet_since: float | None) -> float | None:
        """How long to wait for a command: 0 to poll again at once, None when only a command brings
        work."""
        now = time.monotonic()
        renewing = self._renew_wanted or self._former_agent is not None
        if not (
            self._jobs or self._expected or self._settling or renewing or now < self._linger_until
        ):
            return None
        quiet_s = 0.0 if quiet_since is None else now - quiet_since
        if self._settling:
            # It counts the time between polls only as far as it is short (`_POLL_GAP_S`).
            quiet_s = min(quiet_s, _PATIENCE_S)
        return pause_s(self._config, quiet_s, bool(self._jobs) or renewing)

    def _progress(self) -> bool:
        """One post for each peer, one check of each post, one poll. Whether anything moved."""
        moved = False
        if self._jobs:
            for peer in list(self._peers.values()):
                if peer.outbox:
                    moved |= self._serve_peer(peer)
            if self._posts:
                moved |= self._check_posts()
        if self._former_agent is not None:
            self._end_former(self._former_agent)
        elif self._renew_wanted and time.monotonic() >= self._renew_from:
            self._renew()
        if self._expected or self._settling or (self._linger_until and not self._posts):
            moved |= self._poll_notifications()
        return moved

    # --- commands ---------------------------------------------------------------------------------

    def add_peer(self, peer_id: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = Peer(peer_id, metadata, memory)
            self._connect(peer)
        elif peer.removed or (peer.metadata, peer.memory) != (metadata, memory):
            if peer.memory != memory:
                self._jobs.drop(
                    peer.outbox, PeerLostError(f"the memory of {peer_id.name} is another now")
                )
            # Its lists may be in use, so they are built again only before its next post.
            peer.metadata, peer.memory, peer.removed = metadata, memory, False
            peer.routes, peer.retry_at = None, 0.0

    def remove_peer(self, peer_id: PeerId) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        peer.removed = True
        self._jobs.drop(peer.outbox, AbortedError(f"peer {peer_id.name} was removed"))
        self._forget_if_unused(peer)

    def write(self, job: WriteJob) -> None:
        peer = self._peers.get(job.peer)
        if peer is None or peer.removed:
            self._jobs.refuse(job, PeerLostError(f"{job.peer} is no peer of this transport"))
        elif peer.routes is None:
            self._jobs.park(peer.outbox, job)
        else:
            self._jobs.start(peer.outbox, peer.routes, job)

    def cancel(self, job_id: int) -> None:
        self._jobs.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        self._expected = num_rooms

    def settle(self, token: Hashable, for_s: float) -> None:
        self._settling.append((self._polled_s + for_s, token))

    def renew(self) -> None:
        self._renew_wanted = True

    # --- peers ------------------------------------------------------------------------------------

    def _connect(self, peer: Peer) -> bool:
        """Make the peer known to NIXL, anew if need be, and prepare its lists. Never with a post in
        flight: NIXL forgets the state of a handle whose peer is removed.
        """
        try:
            peer.unload(self._agent)
            routes = routes_to(peer.memory, self._layout, self._staging, self._state)
            peer.load(self._agent, routes)
        except Exception as error:
            self._lose(peer, bare(error))
            return False
        self._jobs.start_parked(peer.outbox, routes)
        return True

    def _lose(self, peer: Peer, error: Exception) -> None:
        """The peer is gone as far as we know: what waits for it fails, a later write tries
        again."""
        peer.routes = None
        peer.retry_at = time.monotonic() + _RECONNECT_S
        self._jobs.drop(peer.outbox, error)
        if not peer.removed:
            self._emit(PeerUnreachable(peer.peer, error))

    def _forget_if_unused(self, peer: Peer) -> None:
        if peer.removed and peer.in_flight == 0 and self._peers.get(peer.peer) is peer:
            del self._peers[peer.peer]
            try:
                peer.unload(self._agent)
            except Exception as error:
                _log.warning("peer %s could not be unloaded: %s", peer.peer.name, repr(error))

    # --- writes -----------------------------------------------------------------------------------

    def _serve_peer(self, peer: Peer) -> bool:
        """Post one part, of the first room in turn that is ready. Connect first if that is
        due."""
        if peer.routes is None:
            if peer.in_flight or time.monotonic() < peer.retry_at:
                return False
            return self._connect(peer)
        if peer.in_flight >= self._config.window:
            return False
        for job in peer.outbox.round():
            try:
                ready = job.poll_ready()
            except BaseException as error:
                self._jobs.stop(job, bare(error))
                return True
            if ready:
                self._post(peer, job)
                return True
        return False

    def _post(self, peer: Peer, job: ActiveJob) -> None:
        number = job.next_part
        part = job.parts[number]
        self._jobs.part_posted(job)
        peer.in_flight += 1
        handle: Any = None
        error: Exception | None
        may_land = False
        try:
            src, dst = part_indices(job.runs, part, job.src_pages, job.dst_pages)
            local, remote = peer.lists[job.job.route]
            handle = self._agent.api.make_prepped_xfer("WRITE", local, src, remote, dst)
            may_land = True  # before the post: one that raises may have handed on descriptors
            state = self._agent.api.transfer(handle, job.tag(number))
        except Exception as refusal:
            state, error = "", bare(refusal)
            may_land = may_land and not isinstance(refusal, NEVER_POSTED)
        else:
            error = error_of(state)
        post = Post(self._agent, handle, peer, job, part)
        if state == "PROC":
            self._posts.append(post)
        else:
            self._part_ended(post, error, may_land)

    def _check_posts(self) -> bool:
        ended: list[tuple[Post, Exception | None]] = []
        going: list[Post] = []
        for post in self._posts:
            try:
                state = post.agent.api.check_xfer_state(post.handle)
            except Exception as failure:
                ended.append((post, bare(failure)))
            else:
                if state == "PROC":
                    going.append(post)
                else:
                    ended.append((post, error_of(state)))
        self._posts = going
        for post, error in ended:
            self._part_ended(post, error, may_land=True)
        return bool(ended)

    def _part_ended(self, post: Post, error: Exception | None, may_land: bool) -> None:
        peer = post.peer
        current = post.agent is self._agent  # a former agent's posts were taken off `in_flight`
        if current:
            peer.in_flight -= 1
        self._release(post)
        if error is None:
            self._linger_until = time.monotonic() + _LINGER_S
        elif may_land:
            # Before the job may end: its WriteFailed asks `_tell_if_proven`, which reads this.
            post.agent.unproven.add(post.job.job.job_id)
        self._jobs.part_ended(post.job, post.part, error, may_land)
        if current and isinstance(error, CONNECTION_BROKEN) and peer.routes is not None:
            self._lose(peer, error)
        self._forget_if_unused(peer)

    def _release(self, post: Post) -> None:
        if post.handle is not None:
            try:
                post.handle.release()
            except Exception as error:
                _log.warning(
                    "a handle of job %d could not be released: %s", post.job.job.job_id, repr(error)
                )

    # --- notifications and events -----------------------------------------------------------------

    def _poll_notifications(self) -> bool:
        """Also what makes NIXL progress on a side that only receives."""
        if self._linger_until and time.monotonic() >= self._linger_until:
            self._linger_until = 0.0
        try:
            arrived = self._agent.api.get_new_notifs()
        except Exception as error:
            _log.warning("notifications could not be polled: %s", repr(error))
            return False
        for tags in arrived.values():
            for tag in tags:
                self._emit(Arrived(bytes(tag)))
        now = time.monotonic()
        self._polled_s += min(now - self._last_poll, _POLL_GAP_S)
        self._last_poll = now
        if self._settling:
            self._tell_settled()
        return bool(arrived)

    def _tell_settled(self) -> None:
        due = [token for until_s, token in self._settling if until_s <= self._polled_s]
        self._settling = [waiting for waiting in self._settling if waiting[0] > self._polled_s]
        for token in due:
            self._emit(Settled(token))

    def _emit(self, event: TransportEvent) -> None:
        try:
            self._sink(event)
        except BaseException:
            _log.error("the sink of the transport failed on %r\n%s", event, traceback.format_exc())
        if isinstance(event, WriteFailed) and not event.drained:
            self._tell_if_proven(event.job_id)

    # --- another agent ----------------------------------------------------------------------------

    @property
    def _agents(self) -> list[NixlAgent]:
        """The one that posts, and the one it replaced until that is destroyed."""
        return [self._agent] if self._former_agent is None else [self._agent, self._former_agent]

    def _new_agent(self, name: str) -> NixlAgent:
        interface = self._config.interface
        return NixlAgent(name, self._layout, self._staging, self._state, interface)

    def _renew(self) -> None:
        """Another agent posts from now on. If none can be made, the present one goes on, and
        another attempt follows."""
        self._renew_wanted = False  # first: a call from here on asks for one more renewal
        if not self._agent.unproven:
            return
        try:
            successor = self._new_agent(f"{self._name}/{self._num_renewed + 1}")
        except Exception as error:
            _log.error("no new agent could be made: %s", repr(error))
            self._renew_wanted, self._renew_from = True, time.monotonic() + _RENEW_S
            return
        self._num_renewed += 1
        self._former_agent, self._agent = self._agent, successor
        self._former_until = time.monotonic() + self._config.renew_grace_s
        # The lists stay with the former agent, whose posts use them; each peer connects anew.
        for peer in self._peers.values():
            self._former_agent.lists += peer.part_from_agent()
        for peer in list(self._peers.values()):
            self._forget_if_unused(peer)

    def _end_former(self, former: NixlAgent) -> None:
        """Destroy it once its posts have ended, or have had their time: then none of them can land
        any more. The order matters; see at each step."""
        posts = [post for post in self._posts if post.agent is former]
        now = time.monotonic()
        if posts and now < self._former_until:
            return
        # UCX tidies up broken connections as it makes progress; an agent destroyed meanwhile
        # may abort the process.
        if not former.rest(now, _REST_S):
            return
        # From here on `_tell_if_proven` no longer counts it, unless it outlives `destroy`.
        self._former_agent = None
        self._renew_from = time.monotonic() + _RENEW_S
        self._posts = [post for post in self._posts if post.agent is not former]
        # Before `destroy`: a handle that is kept keeps the agent, which then goes on writing.
        for post in posts:
            self._release(post)
            post.handle = None
        destroyed = former.destroy()
        if not destroyed:
            _log.error(
                "an agent that was replaced could not be destroyed: what it wrote last is never "
                "proven to end"
            )
            self._outlived.append(former)
        # A job that has not ended is told of when it ends, in `_emit`: a WriteDrained never comes
        # before its WriteFailed.
        for job_id in sorted(former.unproven):
            if job_id not in self._jobs:
                self._tell_if_proven(job_id)
        # Last: these posts ended with the agent, so their jobs may say drained at once.
        for post in posts:
            error = TransferTimeoutError(
                f"not done {self._config.renew_grace_s} s after its agent was replaced"
            )
            self._part_ended(post, error, may_land=not destroyed)

    def _tell_if_proven(self, job_id: int) -> None:
        """Say that the job is drained, if no agent is left that could still write for it.

        Called when the job has ended, and when an agent was destroyed: the later of the two finds
        no agent and tells, the earlier one finds one and says nothing.
        """
        if not any(job_id in agent.unproven for agent in [*self._agents, *self._outlived]):
            self._emit(WriteDrained(job_id))

    # --- the end ----------------------------------------------------------------------------------

    def destroy(self) -> Exception | None:
        """Drop every handle, destroy the agents, then end every job: from then on nothing of ours
        can land.

        Returns the InternalError to raise where the agent outlived this.
        """
        while self._posts:
            self._release(self._posts.pop())  # popped: a post that is kept keeps its handle
        for peer in self._peers.values():
            peer.part_from_agent()
        fenced = not self._outlived
        for agent in self._agents:
            # Only an agent with a broken connection has to rest first, see `NixlAgent.rest`.
            while agent.unproven and not agent.rest(time.monotonic(), _REST_S):
                time.sleep(self._config.idle_sleep_s)
            fenced &= agent.destroy()
        # After the agents: `drained` in these events is a proof that nothing more lands.
        self._jobs.close(fenced)
        if fenced:
            return None
        return InternalError("the NIXL agent outlived its transport: writes are not fenced")
