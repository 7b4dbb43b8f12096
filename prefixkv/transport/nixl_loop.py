"""What the transport thread does: it owns a NIXL agent, posts jobs, checks posts, polls
notifications.

Rules, each the answer to something measured:

- No progress thread inside NIXL (it burns a core): our thread polls on both sides while there is a
reason to.
- On shared memory the copy runs inside the post, so posts are bounded, and between two posts to one
peer
  every other peer gets one.
- A lost peer does not heal: it is removed and added again, with new descriptor lists, at its next
write.
- A write that failed after its post may still land, until its agent is destroyed. So `renew` puts
another
  agent in its place, which posts from then on; the former one ends what it has posted, and is
  destroyed.
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
from prefixkv.transport.jobs import ActiveJob, JobTable
from prefixkv.transport.nixl_agent import (
    CONNECTION_BROKEN,
    NEVER_POSTED,
    NixlAgent,
    bare,
    error_of,
    nixl_name,
)
from prefixkv.transport.nixl_peer import Peer, Post
from prefixkv.transport.parts import part_indices
from prefixkv.transport.routes import PeerMemory, routes_to
from prefixkv.transport.wait import Inbox

_log = logging.getLogger("prefixkv.transport")

_PATIENCE_S: Final = 2e-3  # of empty polls, before sleeps become long
_LINGER_S: Final = 5e-3  # a notification may still sit in UCX's buffers when its write is DONE
_COMMANDS_A_TURN: Final = 64  # then the posts get theirs
_POLL_GAP_S: Final = 2e-3  # more than this between two polls does not count as polling
_RECONNECT_S: Final = 0.1  # between two attempts, each of which may hold the thread for 20 ms
_REST_S: Final = 0.1  # between the last error of an agent and its end
_RENEW_S: Final = 0.25  # between two renewals, each of which holds it for 70 ms

Command = Callable[["NixlLoop"], None]  # run by the thread


class NixlLoop:
    """The NIXL agent and all that hangs on it. Owned by the transport thread, nothing of it leaves.

    The memory of `layout`, of `staging` and of `state` is registered here.
    """

    def __init__(
        self, me: PeerId, layout: KVLayout, sink: Sink, config: TransportConfig,
        staging: StagingArea | None = None, shard: int = 0, state: StateLayout | None = None,
    ) -> None:  # fmt: skip
        """Raises what NIXL raises."""
        self.layout = layout
        self.staging = staging
        self.state = state
        self.sink = sink
        self.config = config
        self.shard = shard
        self.name = nixl_name(me) + (f"+{shard}" if shard else "")
        self.now = self._new_agent(self.name)
        self.former: NixlAgent | None = None  # posts nothing more
        self.former_until = 0.0
        self.outlived: list[
            NixlAgent
        ] = []  # that could not be destroyed: what failed there is never proven
        self.num_renewed = 0
        self.renew_wanted = False
        self.renew_from = 0.0
        self.metadata = self.now.metadata
        self.peers: dict[PeerId, Peer] = {}
        self.jobs = JobTable(self._emit, config.post_bytes, config.post_descriptors)
        self.posts: list[Post] = []
        self.expected = 0
        self.linger_until = 0.0
        self.polled_s = 0.0  # time spent polling, without the gaps in which nobody did
        self.last_poll = 0.0
        self.settling: list[tuple[float, Hashable]] = []  # (`polled_s` to reach, token)

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
        """What the step returns. An exception that got this far is a bug of ours; the thread serves
        others too, so it lives on.
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

    def add_peer(self, peer_id: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        peer = self.peers.get(peer_id)
        if peer is None:
            peer = self.peers[peer_id] = Peer(peer_id, metadata, memory)
            if self.shard == 0:
                self._connect(peer)
        elif peer.removed or (peer.metadata, peer.memory) != (metadata, memory):
            if peer.memory != memory:
                self.jobs.drop(
                    peer.outbox, PeerLostError(f"the memory of {peer_id.name} is another now")
                )
            # its lists may be in use: they are built again before its next post
            peer.metadata, peer.memory, peer.removed = metadata, memory, False
            peer.routes, peer.retry_at = None, 0.0

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
        elif peer.routes is None:
            self.jobs.park(peer.outbox, job)
        else:
            self.jobs.start(peer.outbox, peer.routes, job)

    def cancel(self, job_id: int) -> None:
        self.jobs.cancel(job_id)

    def expect(self, num_rooms: int) -> None:
        self.expected = num_rooms

    def settle(self, token: Hashable, for_s: float) -> None:
        self.settling.append((self.polled_s + for_s, token))

    def renew(self) -> None:
        self.renew_wanted = True

    # --- peers ------------------------------------------------------------------------------------

    def _connect(self, peer: Peer) -> bool:
        """Make the peer known to NIXL, anew if need be, and prepare its lists. Never with a post in
        flight: NIXL forgets the state of a handle whose peer is removed.
        """
        try:
            peer.unload(self.now)
            routes = routes_to(peer.memory, self.layout, self.staging, self.state)
            peer.load(self.now, routes)
        except Exception as error:
            self._lose(peer, bare(error))
            return False
        self.jobs.start_parked(peer.outbox, routes)
        return True

    def _lose(self, peer: Peer, error: Exception) -> None:
        """The peer is gone as far as we know: what waits for it fails, a later write tries
        again."""
        peer.routes = None
        peer.retry_at = time.monotonic() + _RECONNECT_S
        self.jobs.drop(peer.outbox, error)
        if not peer.removed:
            self._emit(PeerUnreachable(peer.peer, error))

    def _forget_if_unused(self, peer: Peer) -> None:
        if peer.removed and peer.in_flight == 0 and self.peers.get(peer.peer) is peer:
            del self.peers[peer.peer]
            try:
                peer.unload(self.now)
            except Exception as error:
                _log.warning("peer %s could not be unloaded: %s", peer.peer.name, repr(error))

    # --- writes -----------------------------------------------------------------------------------

    def _serve_peer(self, peer: Peer) -> bool:
        """Post the next part of the first room in turn that can go; connect first if that is
        due."""
        if peer.routes is None:
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

    def _post(self, peer: Peer, job: ActiveJob) -> None:
        number = job.next_part
        part = job.parts[number]
        self.jobs.part_posted(job)
        peer.in_flight += 1
        handle: Any = None
        error: Exception | None
        may_land = False
        try:
            src, dst = part_indices(job.runs, part, job.src_pages, job.dst_pages)
            local, remote = peer.lists[job.job.route]
            handle = self.now.api.make_prepped_xfer("WRITE", local, src, remote, dst)
            may_land = True
            state = self.now.api.transfer(handle, job.tag(number))
        except Exception as refusal:
            state, error = "", bare(refusal)
            may_land = may_land and not isinstance(refusal, NEVER_POSTED)
        else:
            error = error_of(state)
        post = Post(self.now, handle, peer, job, part)
        if state == "PROC":
            self.posts.append(post)
        else:
            self._part_ended(post, error, may_land)

    def _check_posts(self) -> bool:
        ended: list[tuple[Post, Exception | None]] = []
        going: list[Post] = []
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

    def _part_ended(self, post: Post, error: Exception | None, may_land: bool) -> None:
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

    def _new_agent(self, name: str) -> NixlAgent:
        return NixlAgent(name, self.layout, self.config.memory_type, self.staging, self.state)

    def _renew(self) -> None:
        """Another agent posts from now on. If it cannot be made, the one there is goes on, and it
        is tried again."""
        self.renew_wanted = False
        if not self.now.unproven:
            return
        try:
            successor = self._new_agent(f"{self.name}/{self.num_renewed + 1}")
        except Exception as error:
            _log.error("no new agent could be made: %s", repr(error))
            self.renew_wanted, self.renew_from = True, time.monotonic() + _RENEW_S
            return
        self.num_renewed += 1
        self.former, self.now = self.now, successor
        self.former_until = time.monotonic() + self.config.renew_grace_s
        for peer in self.peers.values():
            self.former.lists += peer.part_from_agent()
        for peer in list(self.peers.values()):
            self._forget_if_unused(peer)

    def _end_former(self, former: NixlAgent) -> None:
        """Destroy it once its posts have ended, or have had their time; then none of them can land
        any more."""
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
            _log.error(
                "an agent that was replaced could not be destroyed: what it wrote last is never "
                "proven to end"
            )
            self.outlived.append(former)
        for job_id in sorted(former.unproven):
            if job_id not in self.jobs:  # else it is told when the job ends
                self._tell_if_proven(job_id)
        for post in posts:
            error = TransferTimeoutError(
                f"not done {self.config.renew_grace_s} s after its agent was replaced"
            )
            self._part_ended(post, error, may_land=not destroyed)

    def _tell_if_proven(self, job_id: int) -> None:
        """Say that the job is drained, once no agent is left that could still write for it."""
        agents = [self.now, *self.outlived] + ([self.former] if self.former is not None else [])
        if not any(job_id in agent.unproven for agent in agents):
            self._emit(WriteDrained(job_id))

    # --- the end ----------------------------------------------------------------------------------

    def destroy(self) -> Exception | None:
        """Drop every handle, destroy the agent, then end every job: from then on nothing of ours
        can land.

        Returns the InternalError to raise where the agent outlived this.
        """
        while self.posts:
            self._release(self.posts.pop())
        for peer in self.peers.values():
            peer.part_from_agent()
        fenced = not self.outlived
        for agent in [self.now] + ([self.former] if self.former is not None else []):
            while agent.unproven and not agent.rest(time.monotonic(), _REST_S):
                time.sleep(self.config.idle_sleep_s)
            fenced &= agent.destroy()
        self.jobs.close(fenced)
        return (
            None
            if fenced
            else InternalError("the NIXL agent outlived its transport: writes are not fenced")
        )
