"""Prefill's peers: the decode ranks that have introduced themselves, and when each was heard.

Whatever a peer says is checked here before anything is derived from it: its name against its key,
its page ids against its pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv.config import short_key
from prefixkv.control.effects import FrameReceived, RemovePeer
from prefixkv.control.handshake import Accepted, OurSide, checksum_for
from prefixkv.control.inbox import ControlInbox
from prefixkv.control.lives import IncarnationHistory, LifeWatch, PeerClock, nonce
from prefixkv.errors import (
    FormerLifeError,
    HandshakeError,
    NameTakenError,
    OverpromisedError,
    ProtocolError,
)
from prefixkv.memory.mesh import check_equal
from prefixkv.paging import pages_for
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import (
    AnyBody,
    Fenced,
    Frame,
    Heartbeat,
    Hello,
    HelloReply,
    HelloWanted,
    Promise,
    RoomBody,
)
from prefixkv.protocol.sender_machine import Promised


@dataclass(slots=True, eq=False, kw_only=True)
class Peer:
    """One decode rank that passed the handshake.

    `pool_pages` are all pages
    of its pool, `num_promised` those that it has promised and we may still write; `num_parked`
    counts its promises that wait for their request. `met_s` is when it was met; `succeeded` is its
    number among the peers met (`Peers.num_met`) if it replaced a former life, else 0.
    """

    id: PeerId
    worker: PeerId
    route: bytes
    credential: str
    hello: Hello
    live: PeerClock
    accepted: Accepted
    pool_pages: int
    met_s: float = 0.0
    num_promised: int = 0
    num_parked: int = 0
    succeeded: int = 0

    def key(self, word: RoomBody) -> RoomKey:
        """Return the key of the room that a frame is about. The decode worker in it is the peer's
        own, whatever the frame says: so no peer can name a room of another worker."""
        return RoomKey(word.room, word.generation, self.worker.name)

    def promised(self, promise: Promise, our_page_size: int, before: int) -> Promised:
        """Check a promise, and return it with page ids that are safe to turn into addresses.
        `before` pages are counted for the same room: it is repeated.

        Raises OverpromisedError, before an array is made of them, for more pages than fit;
        ProtocolError for a prefix, number of pages or page ids that cannot be.
        """
        # 1. Does it fit its pool? The number of bytes tells, before they are read. A page of
        # decode's is in one undrained room at a time, so a right rank needs no slack.
        page_size, others = self.hello.topology.page_size, self.num_promised - before
        if others + promise.num_pages > self.pool_pages:
            raise OverpromisedError(
                f"{others} pages are promised in rooms that are not drained and "
                f"{promise.num_pages} more are, the pool has {self.pool_pages}"
            )
        # 2. What is cheap before what costs, and nothing that sorts: a promise may have a million
        # pages.
        if promise.prefix_len % page_size or promise.prefix_len > promise.fill_len:
            raise ProtocolError(
                f"prefix of {promise.prefix_len} tokens of {promise.fill_len}, pages of {page_size}"
            )
        wanted = pages_for(promise.fill_len, page_size) - promise.prefix_len // page_size
        pages = promise.page_ids()
        _check_ids(pages, wanted, self.hello.layout.num_pages, "the pool")
        groups = self._group_pages(promise, pages)
        # Where page sizes differ, both sides count in the smaller page: one page of the peer is
        # `fold` unit pages.
        unit_tokens = min(page_size, our_page_size)
        fold = page_size // unit_tokens
        num_units = pages_for(promise.fill_len - promise.prefix_len, unit_tokens)
        added = self.accepted.added
        return Promised(
            peer=self.id,
            word=promise,
            pages=pages,
            num_units=num_units,
            reader=self.hello.rank,
            readers=self.accepted.readers,
            writes=added is not None,
            unit_tokens=unit_tokens,
            fold=fold,
            takes_state=added is not None and added.memory.state is not None,
            groups=groups,
            num_windows=len(self.hello.layout.windows),
        )

    def _group_pages(
        self, promise: Promise, first_pages: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], ...]:
        """What a promise names in each group. Raises ProtocolError."""
        layout, state = self.hello.layout, self.hello.state
        windows, num_groups = layout.windows, len(layout.windows) + (state is not None)
        if len(promise.groups) != num_groups:
            raise ProtocolError(f"pages of {len(promise.groups)} groups of {num_groups}")
        groups = promise.group_ids()
        for group, pages in zip(windows, groups, strict=False):
            first = group.first_page(promise.fill_len)
            wanted = pages_for(promise.fill_len, layout.page_size) - first
            _check_ids(pages, wanted, group.layout.num_pages, f"group {group.name!r}")
        if state is not None:
            _check_ids(groups[-1], 1, state.num_slots, "the extra state")
        # Groups in one memory have no page in common either.
        pairs = zip(windows, groups, strict=False)
        alike = [ids for group, ids in pairs if layout.is_shared(group)]
        if alike and _has_repeats(np.concatenate([first_pages, *alike]), layout.num_pages):
            raise ProtocolError("a page id twice in one promise, in two groups of one memory")
        return groups


def _check_ids(pages: npt.NDArray[np.int32], wanted: int, num_pages: int, whose: str) -> None:
    """Raise ProtocolError for ids of another number than is `wanted`, or not of `num_pages`."""
    if len(pages) != wanted:
        raise ProtocolError(f"{len(pages)} pages where {wanted} are needed in {whose}")
    # An id outside would become an address beyond the pool, in memory of the peer that is not KV.
    if len(pages) and (pages.min() < 0 or pages.max() >= num_pages):
        raise ProtocolError(f"page ids {pages.min()} to {pages.max()}, {whose} has {num_pages}")
    # A repeated id would let two parts of one write land on the same page in any order, and the
    # pages counted as undrained would exceed those in use.
    if _has_repeats(pages, num_pages):
        raise ProtocolError(f"a page id twice in one promise, in {whose}")


def _has_repeats(pages: npt.NDArray[np.int32], num_pages: int) -> bool:
    """O(pages + pool): a mark per page. Few pages of a large pool are sorted instead."""
    if len(pages) < 2:  # of a full hit
        return False
    if num_pages > 64 * len(pages):
        return len(np.unique(pages)) < len(pages)
    is_named = np.zeros(num_pages, np.bool_)
    is_named[pages] = True
    return int(np.count_nonzero(is_named)) < len(pages)


class Peers(dict[str, Peer]):
    """The decode ranks that a prefill rank knows, by name. Owned by a `PrefillControl`. What is to
    be done is said, in order."""

    def __init__(
        self,
        ours: OurSide,
        endpoints: tuple[str, ...],
        inbox: ControlInbox[Any, Any],
    ) -> None:
        self._me = inbox.me
        self.news = inbox.news
        self.lives = IncarnationHistory(self.news)
        self._say = inbox.say
        self._send = inbox.send
        self.watch = LifeWatch(inbox.timing, inbox.lost_peers, self._current, inbox.say)
        self._ours = ours
        self._endpoints = endpoints
        self._timing = inbox.timing
        self._timers = inbox.timers
        self.num_met = 0  # peers ever added: orders them against rooms (`SenderMachine.met_before`)

    def find(self, peer_id: PeerId) -> Peer | None:
        """Return the peer if exactly this incarnation is the one known, else None."""
        peer = self.get(peer_id.name)
        return peer if peer is not None and peer.id == peer_id else None

    def all(self) -> list[Peer]:
        """Return a copy of the list."""
        return list(self.values())  # in one step: the scheduler's thread calls `states`

    def heard_s(self, worker: str, ranks: Iterable[int], since: int) -> float:
        """Return the time by which all `ranks` of a worker had been heard. -infinity if one is not
        known, or replaced a former life after `since` (a value of `num_met`): it knows nothing of
        what that was to promise."""
        names = [f"{worker}/{rank}" if rank else worker for rank in ranks]
        peers = [self.get(name) for name in names]
        return min(
            -math.inf if peer is None or peer.succeeded > since else peer.live.heard_s
            for peer in peers
        )

    def _current(self) -> list[PeerId]:
        return [peer.id for peer in self.values()]

    def states(self, now_s: float) -> dict[PeerId, str]:
        """Return "ready" or "suspect" for each. Any thread may ask."""
        return {
            peer.id: "suspect" if peer.live.suspect(self._timing, now_s) else "ready"
            for peer in self.all()
        }

    def trouble(self, peer_id: PeerId, now_s: float) -> str:
        """Return what is wrong with a peer, "" if nothing is. Any thread may ask."""
        peer = self.find(peer_id)
        is_suspect = peer is not None and peer.live.suspect(self._timing, now_s)
        return self.lives.how(peer_id) or ("suspect" if is_suspect else "")

    def taken(self, name: str, now_s: float) -> str:
        peer = self.get(name)
        if peer is None:
            return ""
        process, ours = "another process", self._ours.life
        if (life := peer.hello.life) is not None:
            is_near = ours is not None and life.boot == ours.boot
            machine = "prefill's machine" if is_near else "another machine"
            process = f"process {life.pid} on {machine}"
        return (
            f"the name {name!r} is taken by {process} (life {peer.id.incarnation:x}), which "
            f"prefill met {now_s - peer.met_s:.0f} s ago; each worker needs a name of its own"
        )

    def why_over(self, error: FormerLifeError, now_s: float) -> str:
        """Return the words for a former life that still speaks: where another process has its name
        by now, these say which."""
        if error.life is None or not (taken := self.taken(error.life[0], now_s)):
            return str(error)
        # Two processes live under one name: worth a line of the log here too.
        self.news.say("refused", PeerId(*error.life), f"still speaks, but {taken}")
        return f"{error}: {taken}"

    def speaker(self, frame: Frame, credential: str) -> Peer | None:
        """Return the peer that a frame claims to be from, None if no peer has that name yet. Raises
        HandshakeError if the name does not belong to the key that the connection proved,
        FormerLifeError if this life is over."""
        # 1. With a list of clients, the key decides which names may be used.
        curve = self._timing.curve
        if curve is not None and not _may_speak(curve.allowed_clients, credential, frame.name):
            key = short_key(credential)
            why = f"is not the one that prefill's allowed_clients has for its key {key!r}"
            listed = curve.allowed_clients.get(credential, "")
            raise HandshakeError("name", listed, frame.name, f"{why} (change one of the two)")
        # 2. A name belongs to the first key that used it: another client cannot take it over.
        peer = self.get(frame.name)
        if peer is not None and credential != peer.credential:
            why = f"of {frame.name!r} is not the one that it was met with (it is forgotten in time)"
            keys = short_key(peer.credential), short_key(credential)
            raise HandshakeError("key", *keys, why)
        # 3. Last, so that a process without the key does not learn which lives have ended.
        self.lives.check(frame.sender)
        return peer

    def check_worker(self, frame: Frame, credential: str, hello: Hello, now_s: float) -> None:
        """Check that a decode rank belongs to the worker that it says it belongs to. Refusals
        mention no other worker.

        Raises HandshakeError: its name and key do not fit the worker, a later process has its name,
        or `max_peers` workers are known. FormerLifeError: that life of the worker is over.
        """
        # 1. Its name follows from the worker and the rank.
        rank, worker = hello.rank, hello.worker or frame.sender
        name = f"{worker.name}/{rank}" if rank else worker.name
        if frame.name != name or (rank == 0 and worker != frame.sender):
            raise HandshakeError("name", name, frame.name, "is not that of the rank it says it is")
        # 2. Its key is that of rank 0, or is listed for this very name. Otherwise a client with any
        # accepted key could join the worker of another, and promise pages in its rooms.
        curve = self._timing.curve
        is_listed = curve is not None and frame.name in curve.allowed_clients.values()
        if curve is not None and rank == 0 and not is_listed:
            raise HandshakeError("rank", 0, frame.name, "has another name than the key")
        leader = self.get(worker.name)
        if leader is not None and leader.credential != credential and not is_listed:
            raise HandshakeError("key", "rank 0's", "another", "differs")
        # 3. It is of a life that goes on, and not older than the process that is known by its name.
        self.lives.check(worker)
        # That one may not know yet that it was replaced, and we may have been started after both.
        peer = self.get(frame.name)
        now = None if peer is None or peer.id == frame.sender else peer.hello.life
        if peer is not None and now and hello.life and hello.life.is_before(now):
            taken = self.taken(frame.name, now_s)
            raise NameTakenError(f"{frame.sender} was made before {peer.id}: {taken}")
        # 4. It agrees with the other ranks of its worker on how the model is shared out.
        others = [peer for peer in self.all() if peer.worker == worker]
        for peer in others:
            check_equal("topology", peer.hello.topology, hello.topology)
        # 5. There is room for it.
        workers = {peer.worker.name for peer in self.all()}
        if worker.name not in workers and len(workers) >= self._timing.max_peers:
            most = self._timing.max_peers
            raise HandshakeError("decode workers", most, most + 1, "are more than max_peers allows")

    def add(
        self,
        accepted: Accepted,
        frame: Frame,
        received: FrameReceived[bytes],
        hello: Hello,
        now_s: float,
    ) -> None:
        """Make a rank that passed a peer. A former life under its name must have been removed
        before (`PrefillControl._on_handshake`)."""
        self.lives.begin(frame.sender)
        self.num_met += 1
        self[frame.name] = Peer(
            id=frame.sender,
            worker=hello.worker or frame.sender,
            route=received.source,
            credential=received.credential,
            hello=hello,
            # The Hello's own number: only frames after it are taken from now on.
            live=PeerClock(now_s, now_s, frame.seq),
            succeeded=self.num_met if self.lives.has_former(frame.name) else 0,
            accepted=accepted,
            pool_pages=hello.layout.num_pages
            + (0 if hello.state is None else hello.state.num_slots)
            + sum(
                group.layout.num_pages
                for group in hello.layout.windows
                if not hello.layout.is_shared(group)
            ),
            met_s=now_s,
        )
        self._timers.wake(frame.name, now_s + self._timing.heartbeat_s)
        self.news.say("met", frame.sender)
        if bool(hello.checksums) is not bool(self._ours.checksums):
            side = "decode" if self._ours.checksums else "prefill"
            self.news.say("unchecked", frame.sender, f"no page is: {side} has `checksums` off")

    # --- what is said -----------------------------------------------------------------------------

    def reply(
        self, route: bytes, hello: Hello | None, refused: str = "", relayed: bool = False
    ) -> None:
        """Answer a Hello, or refuse it or another frame."""
        ours = self._ours
        known, checksum = (0, "") if hello is None else (hello.known, checksum_for(ours, hello))
        body = HelloReply(
            ours.digest, ours.topology, self._endpoints, refused[:1000], ours.rank,
            relayed=relayed, known=known, life=ours.life, max_tokens=ours.max_tokens,
            checksum=checksum,
        )  # fmt: skip
        self._send(route, body)

    def hello_wanted(self, route: bytes, sender: PeerId | None = None) -> None:
        """Ask for a Hello; `sender` is None if the frame could not be read."""
        self._send(route, HelloWanted(0 if sender is None else self.nonce(sender)))

    def nonce(self, sender: PeerId) -> int:
        """Return the number that a Hello of `sender` has to repeat; see `nonce`."""
        peer = self.get(sender.name)
        known = self.lives.last_silent(sender.name) if peer is None else peer.id
        return nonce(self._me, sender, known)

    def send(self, peer: Peer, body: AnyBody, now_s: float) -> None:
        peer.live.sent_s = now_s
        self._send(peer.route, body)

    def farewell(self) -> None:
        """Send a Fenced to each: our agent is gone, so no write of ours can land."""
        for peer in self.values():
            self._send(peer.route, Fenced())

    def tick(self, name: str, has_rooms: Callable[[PeerId], bool], now_s: float) -> None:
        """Say a Heartbeat if one is due, or forget a peer that is silent and has no rooms."""
        peer = self.get(name)
        if peer is None:
            return
        # A peer with rooms is never forgotten for silence: its pages are drained by proof alone.
        if peer.live.forgettable(self._timing, now_s) and not has_rooms(peer.id):
            self.lives.silent(peer.id)
            self.news.say("forgotten", peer.id, "was silent for long")
            self.forget(peer)
            return
        is_silent = peer.live.suspect(self._timing, now_s)
        # Every look repeats the question; only the change from heard to silent starts an
        # examination.
        if self.news.silent(peer.id, is_silent) and is_silent:
            self.watch.doubt(peer.id, now_s)
        if now_s >= peer.live.heartbeat_due_s(self._timing):
            self.send(peer, Heartbeat(), now_s)
        self._timers.wake(name, peer.live.heartbeat_due_s(self._timing))

    def leave(self, peer: Peer) -> None:
        """Know a peer no more: nothing is sent to it from now on."""
        self.news.forget(peer.id)
        self.watch.forget(peer.id)
        del self[peer.id.name]
        self._timers.forget(peer.id.name)

    def forget(self, peer: Peer) -> None:
        """Remove a peer, from the transport too."""
        self.leave(peer)
        self._say(RemovePeer(peer.id))


def _may_speak(allowed: Mapping[str, str], credential: str, name: str) -> bool:
    if name in allowed.values():
        return allowed.get(credential) == name
    worker, _, rank = name.rpartition("/")
    return allowed.get(credential) == worker != "" and rank.isdecimal()
