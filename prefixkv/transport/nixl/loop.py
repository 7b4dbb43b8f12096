"""The transport over NIXL. Its thread makes every NIXL call: it owns an agent, posts jobs, checks
posts, polls notifications, and waits at its inbox, so a call from outside wakes it at once.

- NIXL gets no progress thread (it burns a core): ours polls while something is under way.
- On shared memory the copy runs inside the post. So a post is bounded, and peers take turns.
- A lost peer does not heal: it is removed and added again at its next write.
- A write that failed after its post may land until its agent is destroyed. So `renew` puts another
  agent in its place; the former one ends what it has posted and is destroyed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final

from prefixkv.config import TransportConfig
from prefixkv.errors import InternalError, TransferError, TransferTimeoutError
from prefixkv.protocol.ids import PeerId
from prefixkv.threads import Inbox
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    RankMemory,
    Settled,
    Sink,
    TransportEvent,
    WriteDrained,
    WriteFailed,
)
from prefixkv.transport.jobs import ActiveJob
from prefixkv.transport.loop import (
    RECONNECT_S,
    ThreadedTransport,
    TransportLoop,
    bare,
)
from prefixkv.transport.nixl.agent import (
    CONNECTION_BROKEN,
    NEVER_POSTED,
    NixlAgent,
    NixlPeer,
    Post,
    error_by_name,
    nixl_name,
    warn_if_open,
)
from prefixkv.transport.runs import routes_to

_log = logging.getLogger("prefixkv.transport")

_PATIENCE_S: Final = 2e-3  # of empty polls, before sleeps become long
# The longest sleep as a part of the quiet so far: what comes is seen 3% late, and what a post gives
# the network between two polls is a thousandth of it.
_QUIET_PART: Final = 1 / 32
_QUIET_PART_SENDING: Final = 1 / 1024
# A multiple of `idle_sleep_s`. A poll with the sleep before it costs 60 us where other threads want
# the interpreter: at 1 ms a server that only waits took 6% of a core for it, at 5 ms 1%.
_LONGEST_IDLE: Final = 25
_LINGER_S: Final = 5e-3  # a notification may still sit in UCX's buffers when its write is DONE
_COMMANDS_A_TURN: Final = 64  # then the posts get theirs
_POLL_GAP_S: Final = 2e-3  # more than this between two polls does not count as polling
_REST_S: Final = 0.1  # between the last error of an agent and its end
_RENEW_S: Final = 0.25  # between two renewals, each of which holds it for 70 ms


def pause_s(config: TransportConfig, quiet_s: float, sending: bool) -> float:
    """Return the sleep between two polls; the last `quiet_s` seconds of polls were empty.

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


class NixlLoop(TransportLoop[NixlPeer]):
    """The NIXL agent and all that hangs on it, with the memory registered. Owned by the transport
    thread; nothing of it leaves."""

    peer_type = NixlPeer

    def __init__(self, me: PeerId, memory: RankMemory, sink: Sink, config: TransportConfig) -> None:
        """Create the agent. Raises what NIXL raises."""
        super().__init__(memory, sink, config, config.post_descriptors)
        self._name = nixl_name(me)
        warn_if_open(config.interface)
        self._agent = self._new_agent(self._name)
        # Replaced: posts nothing more, is destroyed in `_end_former`.
        self._former_agent: NixlAgent | None = None
        self._former_until = 0.0  # monotonic: then it is destroyed even with posts under way
        # Agents that could not be destroyed. Jobs that failed there are never proved drained.
        self._outlived: list[NixlAgent] = []
        self._num_renewed = 0  # numbers the names of agents, which must differ
        self._renew_wanted = False
        self._renew_from = 0.0  # monotonic: no renewal before
        self.metadata = self._agent.metadata
        self._posts: list[Post] = []  # under way, of both agents
        self._expected = 0  # rooms that peers may be writing: above 0, notifications are polled
        # Monotonic: polled until then for the notifications of what is DONE.
        self._linger_until = 0.0
        self._polled_s = 0.0  # time spent polling, without the gaps between polls
        self._last_poll = 0.0
        self._settling: list[tuple[float, Hashable]] = []  # (`polled_s` to reach, token)

    # --- the loop ---------------------------------------------------------------------------------

    def serve(self, inbox: Inbox[Callable[[NixlLoop], None] | None]) -> None:
        """Obey commands and make progress until None comes, the command that closes."""
        commands: deque[Callable[[NixlLoop], None] | None] = deque()
        quiet_since: float | None = None
        while True:
            # 1. Wait where nothing is to be done, or only to be looked at again. 0 means: poll at
            # once.
            wait_s = 0.0 if commands else self._wait_s(quiet_since)
            if wait_s != 0.0:
                inbox.wait(wait_s)
            if inbox.pending:
                commands.extend(inbox.drain())
            # 2. Commands, a bounded number: a thread that queues without pause must not stop the
            # posts.
            for _ in range(min(len(commands), _COMMANDS_A_TURN)):
                command = commands.popleft()
                if command is None:
                    return
                self._guarded(partial(command, self))
                quiet_since = None
            # 3. One step for everything under way. `quiet_since` is when the last one moved
            # nothing.
            if self._guarded(self._progress):
                quiet_since = None
            elif quiet_since is None:
                quiet_since = time.monotonic()

    def _wait_s(self, quiet_since: float | None) -> float | None:
        """0 to poll at once, None if only a command brings work."""
        now = time.monotonic()
        renewing = self._renew_wanted or self._former_agent is not None
        # Each of these needs polls: posts, expected notifications, settling, an agent to be
        # replaced, and notifications that linger in UCX's buffers.
        if not (
            self._jobs or self._expected or self._settling or renewing or now < self._linger_until
        ):
            return None
        quiet_s = 0.0 if quiet_since is None else now - quiet_since
        if self._settling:
            # It counts the time between polls only as far as it is short (`_POLL_GAP_S`).
            quiet_s = min(quiet_s, _PATIENCE_S)
        longest_s = pause_s(self._config, quiet_s, bool(self._jobs) or renewing)
        paced_s = self._pace.wait_s(now) if self._jobs else 0.0
        if paced_s:
            # Nothing new may be posted before: no need to spin, only to see posts and notifications
            # end.
            longest_s = min(max(longest_s, self._config.idle_sleep_s), paced_s)
        return longest_s

    def _progress(self) -> bool:
        """One post per peer, each post checked once, one poll; return whether anything moved."""
        moved = False
        # Posts before checks, so that a small one may be found DONE in the same turn.
        if self._jobs:
            now = time.monotonic()
            for peer in list(self._peers.values()):
                if peer.outbox:
                    moved |= self._serve_peer(peer, now)
            if self._posts:
                moved |= self._check_posts()
        # A renewal only when the one before is finished: at most two agents live.
        if self._former_agent is not None:
            self._end_former(self._former_agent)
        elif self._renew_wanted and time.monotonic() >= self._renew_from:
            self._renew()
        # Between posts that end at once there is no poll: each makes NIXL progress, too.
        lately = moved and time.monotonic() < self._last_poll + _LINGER_S
        lingers = self._linger_until and not (self._posts or lately)
        if self._expected or self._settling or lingers:
            moved |= self._poll_notifications()
        return moved

    # --- commands ---------------------------------------------------------------------------------

    def expect(self, num_rooms: int) -> None:
        self._expected = num_rooms

    def settle(self, token: Hashable, for_s: float) -> None:
        """Emit Settled once it has polled for `for_s` seconds."""
        # In time that was spent polling, see `_poll_notifications`.
        self._settling.append((self._polled_s + for_s, token))

    def renew(self) -> None:
        """Replace the agent in one of the next steps."""
        self._renew_wanted = True

    # --- peers ------------------------------------------------------------------------------------

    def _connect_again(self, peer: NixlPeer) -> None:
        """Build the peer's lists again before its next post: posts may be using them now."""
        peer.routes, peer.retry_at = None, 0.0

    def _connect(self, peer: NixlPeer) -> None:
        """Never with a post in flight: NIXL forgets a handle's state with its peer."""
        try:
            # Unloaded first, also what an attempt before has half done.
            peer.unload(self._agent)
            routes = routes_to(self._memory, peer.memory)
            peer.load(self._agent, routes)
        except Exception as error:
            self._lose(peer, bare(error))
            return
        # Only now: jobs are cut by the routes that the lists were made for.
        self._jobs.cut(peer.outbox, routes)

    def _lose(self, peer: NixlPeer, error: Exception) -> None:
        """What waits for the peer fails, a later write tries again."""
        # `routes` None makes the next write connect; not at once, since each attempt may hold the
        # thread for 20 ms.
        peer.routes = None
        peer.retry_at = time.monotonic() + RECONNECT_S
        self._jobs.drop(peer.outbox, error)
        if not peer.removed:
            self.emit(PeerUnreachable(peer.peer, error))

    def _forget_if_unused(self, peer: NixlPeer) -> None:
        """Not before its posts have ended: until then its lists are in use."""
        if peer.removed and peer.in_flight == 0 and self._peers.get(peer.peer) is peer:
            del self._peers[peer.peer]
            try:
                peer.unload(self._agent)
            except Exception as error:
                _log.warning("peer %s could not be unloaded: %s", peer.peer.name, repr(error))

    # --- writes -----------------------------------------------------------------------------------

    def _transfer(self, peer: NixlPeer, job: ActiveJob) -> None:
        src, dst, tag = job.next_post()
        # Counted before the post, so that every way out below ends in exactly one `part_ended`.
        self._jobs.part_posted(job)
        peer.in_flight += 1
        handle: Any = None
        error: Exception | None = None
        may_land = False
        try:
            local, remote = peer.lists[job.job.route]
            handle = self._agent.api.make_prepped_xfer("WRITE", local, src, remote, dst)
            # Before the post: one that raises may have handed on descriptors, and then their pages
            # must not be freed. Only what NIXL refuses before it touches anything is certain.
            may_land = True
            state = self._agent.api.transfer(handle, tag)
            if state not in ("DONE", "PROC"):
                error = TransferError(f"NIXL reports state {state}")
        except Exception as refusal:
            state, error = "", error_by_name(refusal, peer.peer)
            may_land = may_land and not isinstance(refusal, NEVER_POSTED)
        post = Post(self._agent, handle, peer, job)
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
                ended.append((post, error_by_name(failure, post.peer.peer)))
            else:
                if state == "PROC":
                    going.append(post)
                elif state == "DONE":
                    ended.append((post, None))
                else:
                    ended.append((post, TransferError(f"NIXL reports state {state}")))
        # The list is replaced first: `_part_ended` may lose the peer or end the job, and no post
        # that has ended may be found in it then.
        self._posts = going
        for post, error in ended:
            self._part_ended(post, error, may_land=True)
        return bool(ended)

    def _part_ended(self, post: Post, error: Exception | None, may_land: bool) -> None:
        peer = post.peer
        current = post.agent is self._agent  # a former agent's posts were taken off `in_flight`
        if current:
            peer.in_flight -= 1
        # Released in any case: a handle that is kept would keep the agent.
        self._release(post)
        if error is None:
            # The notification may still sit in UCX's buffers: poll on for a while.
            self._linger_until = time.monotonic() + _LINGER_S
        elif may_land:
            # Before the job may end: its WriteFailed asks `_tell_if_proven`, which reads this.
            post.agent.unproven.add(post.job.job.job_id)
        self._jobs.part_ended(post.job, error, may_land)
        is_usable = current and peer.routes is not None
        if is_usable and error and isinstance(error.__cause__, CONNECTION_BROKEN):
            self._lose(peer, error)
        self._forget_if_unused(peer)

    def _release(self, post: Post) -> None:
        if post.handle is not None:
            try:
                post.handle.release()
            except Exception as error:
                job_id = post.job.job.job_id
                _log.warning("a handle of job %d could not be released: %s", job_id, repr(error))

    # --- notifications and events -----------------------------------------------------------------

    def _poll_notifications(self) -> bool:
        """This is also what makes NIXL progress on a side that only receives."""
        if self._linger_until and time.monotonic() >= self._linger_until:
            self._linger_until = 0.0
        try:
            arrived = self._agent.api.get_new_notifs()
        except Exception as error:
            _log.warning("notifications could not be polled: %s", repr(error))
            return False
        for tags in arrived.values():
            for tag in tags:
                self.emit(Arrived(bytes(tag)))
        # Only what was really polled counts for `settle`: a gap longer than `_POLL_GAP_S` is cut,
        # so that a process that was stopped in between does not take its sleep for reading.
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
            self.emit(Settled(token))

    def emit(self, event: TransportEvent) -> None:
        """Hand an event to the sink, and a WriteDrained behind a failure that is proved already."""
        super().emit(event)
        # The agent may be gone already when the job ends. So WriteDrained follows at once then.
        if isinstance(event, WriteFailed) and not event.drained:
            self._tell_if_proven(event.job_id)

    # --- another agent ----------------------------------------------------------------------------

    @property
    def _agents(self) -> list[NixlAgent]:
        return [self._agent] if self._former_agent is None else [self._agent, self._former_agent]

    def _new_agent(self, name: str) -> NixlAgent:
        return NixlAgent(name, self._memory, self._config.interface)

    def _renew(self) -> None:
        """If a job has failed undrained. If no agent can be created, the present one goes on, and
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
        # The lists stay with the former agent, for its posts under way; each peer connects again.
        for peer in self._peers.values():
            self._former_agent.lists += peer.detach_agent()
        # No post of the new agent is under way yet, so removed peers can go.
        for peer in list(self._peers.values()):
            self._forget_if_unused(peer)

    def _end_former(self, former: NixlAgent) -> None:
        """Destroy a replaced agent, once its posts have ended or have had their time: then none can
        land any more. The order of the steps matters; the reasons stand at each."""
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
        # A job that has not ended is reported when it ends, in `emit`: a WriteDrained never comes
        # before its WriteFailed.
        # Jobs with other parts under way end later, and are reported in `emit`.
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
        """Emit WriteDrained if no agent is left that could still write for the job. Called when the
        job has ended, and when an agent was destroyed: the later of the two finds none and
        emits."""
        if not any(job_id in agent.unproven for agent in [*self._agents, *self._outlived]):
            self.emit(WriteDrained(job_id))

    # --- the end ----------------------------------------------------------------------------------

    def destroy(self) -> Exception | None:
        """Drop every handle, destroy the agents, then end every job; from then on nothing can land.
        Returns the InternalError to raise if an agent could not be destroyed, else None."""
        # 1. Handles and lists: each that is kept keeps its agent.
        while self._posts:
            self._release(self._posts.pop())  # popped: the list itself would keep the handle
        for peer in self._peers.values():
            peer.detach_agent()
        # 2. The agents. One that could not be destroyed earlier already spoils the fence.
        fenced = not self._outlived
        for agent in self._agents:
            # Only an agent with a broken connection has to rest first, see `NixlAgent.rest`.
            while agent.unproven and not agent.rest(time.monotonic(), _REST_S):
                time.sleep(self._config.idle_sleep_s)
            fenced &= agent.destroy()
        # 3. The jobs, after the agents: `drained` in these events is a proof that nothing more
        # lands.
        self._jobs.close(fenced)
        if fenced:
            return None
        return InternalError("the NIXL agent outlived its transport: writes are not fenced")


class NixlTransport(ThreadedTransport[NixlLoop]):
    """The contract of `base.Transport`, over an agent of its own.

    The memory, all of it on one device, is registered at the start, which may take .5 s, and has to
    stay until `close()` has returned. The constructor raises what NIXL raises.
    """

    thread_name = "transport"
    loop_type = NixlLoop
