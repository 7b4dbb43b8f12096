"""The transport over shared memory: for two sides on one host, with pools on the CPU. Its thread
copies parts of jobs into memory of peers, and takes the tags of what peers have copied into ours.

The memory that is written to has to be shared (`KVPool.create(shared=True)`,
`kv_pool.shared_bytes`); that which is read from does not.

A copy is made by this thread, between two looks at its inbox. So no write is ever under way when a
command is obeyed: a job that is cancelled is drained at once, none ends undrained, and once the
thread has ended nothing can land. With nothing to copy it sleeps until a socket or a command wakes
it.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Final

from prefixkv.config import TransportConfig
from prefixkv.errors import ConfigError, PeerLostError, TransferTimeoutError
from prefixkv.memory.kv_pool import blocks_of
from prefixkv.protocol.ids import PeerId
from prefixkv.threads import Inbox
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    RankMemory,
    Settled,
    Sink,
)
from prefixkv.transport.jobs import ActiveJob
from prefixkv.transport.loop import RECONNECT_S, ThreadedTransport, TransportLoop, bare
from prefixkv.transport.runs import routes_to
from prefixkv.transport.shm.peer import ShmLink, ShmPeer
from prefixkv.transport.shm.wire import ShmListener

_log = logging.getLogger("prefixkv.transport")

_BLOCKS_A_PART: Final = 1 << 15  # 5 ms of 512 bytes each
_LONGEST_PACED_S: Final = 5e-3  # of a wait for the rate, which may be for one large block
_PATIENCE_S: Final = 2e-3  # of looks at what is not ready, before sleeps become longer


class ShmLoop(TransportLoop[ShmPeer]):
    """The peers, jobs and sockets of one shm transport. Owned by the transport's thread."""

    peer_type = ShmPeer

    def __init__(self, me: PeerId, memory: RankMemory, sink: Sink, config: TransportConfig) -> None:
        """Open the door, if all memory is shared. Raises ConfigError if the system cannot."""
        super().__init__(memory, sink, config, _BLOCKS_A_PART)
        self._epoll = select.epoll()
        self._settling: list[Hashable] = []  # tokens, answered in the next step
        # A door hands over whole blocks, so it is opened only if each range lies in a shared one.
        blocks = blocks_of(memory.ranges) if memory.layout.device == "cpu" else None
        try:
            self._door = ShmListener(me, blocks, memory.ranges, self._epoll) if blocks else None
        except OSError as error:
            self._epoll.close()
            raise ConfigError(f"the shm transport cannot start: {error}") from error
        self.metadata = b"" if self._door is None else self._door.offer

    # --- the loop ---------------------------------------------------------------------------------

    def serve(self, inbox: Inbox[Callable[[ShmLoop], None] | None]) -> None:
        """Obey commands and make progress until None comes."""
        self._epoll.register(inbox.fd, select.EPOLLIN)
        idle_since: float | None = None
        while True:
            # The inbox's own descriptor only wakes: `drain` clears it, whether it was the cause or
            # not.
            ready = [what for what in self._ready(idle_since) if what[0] != inbox.fd]
            moved = self.turn(ready, inbox.drain())
            if moved is None:
                return
            if moved:
                idle_since = None
            elif idle_since is None:
                idle_since = time.monotonic()

    def turn(
        self, ready: Iterable[tuple[int, int]], commands: Iterable[Callable[[ShmLoop], None] | None]
    ) -> bool | None:
        """Make one round: what came at sockets, then commands, then a part for each peer. Returns
        whether anything was done for peers; None if a command was to end."""
        for fd, events in ready:
            self._guarded(partial(self._on_ready, fd, events))
        for command in commands:
            if command is None:
                return None
            self._guarded(partial(command, self))
        return bool(self._guarded(self._progress))

    def _ready(self, idle_since: float | None) -> list[tuple[int, int]]:
        now = time.monotonic()
        paced_s = self._pace.wait_s(now)
        # Four cases. 1. Something to do at once: only look. Pages of a peer that are brought in are
        # work for this thread, too.
        peers = self._peers.values()
        links = [peer.link for peer in peers if peer.link is not None]
        if (
            self._settling
            or any(peer.link and peer.link.answered and not peer.routes for peer in peers)
            or (idle_since is None and not paced_s and any(p.outbox for p in peers))
        ):
            return self._epoll.poll(0)
        # 2. No copy may be made before then; sockets are heeded meanwhile, and what has a deadline
        # is looked at in between.
        if paced_s:
            return self._epoll.poll(min(paced_s, _LONGEST_PACED_S))
        # 3. Only jobs that wait for their `ready`, which cannot wake the thread: sleep, then look.
        if idle_since is not None and any(
            peer.outbox and peer.routes is not None for peer in self._peers.values()
        ):
            quiet_s = now - idle_since
            if quiet_s >= self._config.spin_s:
                patient = quiet_s < _PATIENCE_S
                time.sleep(self._config.sleep_s if patient else self._config.idle_sleep_s)
            return self._epoll.poll(0)
        # 4. Deadlines: greetings that are not answered, attempts to connect again.
        times = [link.until_s for link in links if not link.answered]
        times += [peer.retry_at for peer in self._peers.values() if peer.outbox and not peer.link]
        return self._epoll.poll(None if not times else max(0.0, min(times) - now))

    def _on_ready(self, fd: int, events: int) -> None:
        if self._door is not None and self._door.on_ready(fd, self._arrived):
            return
        for peer in list(self._peers.values()):
            if peer.link is not None and peer.link.fd == fd:
                try:
                    peer.link.on_ready(events)
                except BlockingIOError:
                    pass
                except Exception as error:
                    self._lose(peer, error)

    def _progress(self) -> bool:
        now, moved = time.monotonic(), False
        for peer in list(self._peers.values()):
            if peer.link is not None and peer.routes is None:
                moved |= self._advance_connect(peer, now)
            elif peer.outbox:
                moved |= self._serve_peer(peer, now)
        if self._settling:
            self._tell_settled()
        return moved

    # --- commands ---------------------------------------------------------------------------------

    def settle(self, token: Hashable, for_s: float) -> None:
        """Answer in the next step, see `_tell_settled`. No kernel holds a copy back, so `for_s` is
        not needed."""
        self._settling.append(token)

    # --- peers ------------------------------------------------------------------------------------

    def _forget_if_unused(self, peer: ShmPeer) -> None:
        """Its memory goes at once: no copy is under way."""
        if peer.removed and self._peers.get(peer.peer) is peer:
            del self._peers[peer.peer]
            peer.disconnect()

    def _connect(self, peer: ShmPeer) -> None:
        """`_advance_connect` continues once the peer has answered."""
        peer.disconnect()
        try:
            # First of all, so that a layout that does not fit is refused by its own reason, and not
            # as an unreachable door.
            routes_to(self._memory, peer.memory)
            if self._memory.layout.device != "cpu" or peer.memory.layout.device != "cpu":
                raise PeerLostError("shm copies between pools on the CPU")
            peer.link = ShmLink(peer.peer, peer.metadata, peer.memory, self._epoll)
        except Exception as error:
            self._lose(peer, error)

    def _advance_connect(self, peer: ShmPeer, now: float) -> bool:
        """Take the peer's answer, then its pages a stretch at a time, then its routes; return
        whether it moved."""
        link = peer.link
        assert link is not None
        try:
            if not link.answered:
                # The answer comes by `on_ready`; here only its deadline is watched.
                if now < link.until_s:
                    return False
                raise TransferTimeoutError(f"{peer.peer.name} does not answer at its door")
            if not link.is_whole:
                link.populate()
                return True
            routes = routes_to(self._memory, peer.memory)
            peer.plans = link.plans(routes)
        except Exception as error:
            self._lose(peer, error)
            return True
        # `routes` last: it says that the peer can be copied to. Then the jobs that waited, in
        # order.
        peer.routes = routes
        peer.was_reached = True
        self._jobs.cut(peer.outbox, routes)
        return True

    def _lose(self, peer: ShmPeer, error: Exception) -> None:
        """What waits for the peer fails, a later write tries again. If it was connected and nothing
        waits, nothing is reported: the next write finds out."""
        connected = peer.routes is not None
        # Its frames may hold the maps of the peer's memory.
        error = bare(error)
        peer.disconnect()
        waited = bool(peer.outbox)
        self._jobs.drop(peer.outbox, error)
        # A peer that was connected may be back at once; one that could not be reached is left
        # alone.
        peer.retry_at = 0.0 if connected else time.monotonic() + RECONNECT_S
        if not peer.removed and (waited or not connected):
            self.emit(PeerUnreachable(peer.peer, error, peer.was_reached))

    # --- copies -----------------------------------------------------------------------------------

    def _transfer(self, peer: ShmPeer, job: ActiveJob) -> None:
        number = job.next_part
        self._jobs.part_posted(job)
        error: Exception | None = None
        # The tag after the bytes: the peer may read them as soon as it has the tag.
        try:
            peer.plans[job.job.route].copy(job.parts[number], job.src_pages, job.dst_pages)
            assert peer.link is not None
            peer.link.tell(job.part_tag(number).pack())
        except Exception as failure:
            error = bare(failure)
        # Whatever went wrong, this thread copies no more of it, so nothing of it lands later.
        self._jobs.part_ended(job, error, may_land=False)
        if isinstance(error, PeerLostError):
            self._lose(peer, error)

    # --- events -----------------------------------------------------------------------------------

    def _arrived(self, tag: bytes) -> None:
        self.emit(Arrived(tag))

    def _tell_settled(self) -> None:
        """Read all that the writers have sent first: a copy lands at once, and its tag after it."""
        if self._door is not None:
            self._door.read_all(self._arrived)
        tokens, self._settling = self._settling, []
        for token in tokens:
            self.emit(Settled(token))

    def destroy(self) -> None:
        """Give all memory of peers back, then end every job: nothing of ours can land."""
        # Unmapped before the jobs end as drained.
        for peer in self._peers.values():
            peer.disconnect()
        self._jobs.close(fenced=True)
        if self._door is not None:
            self._door.close()
        self._epoll.close()


class ShmTransport(ThreadedTransport[ShmLoop]):
    """The contract of `base.Transport`, by copies into mapped memory of peers. A job can be
    cancelled between two parts, of `post_bytes`. `renew` is never needed.

    The memory is offered to peers if all of it is shared. The constructor raises ConfigError where
    the system has no such sockets.
    """

    thread_name = "shm"
    loop_type = ShmLoop
