"""Prefill's side of the control plane: the decode workers it knows and the rooms it sends for.
Sans-IO.

Page ids from a peer are bounds-checked here, before anything turns them into addresses. A room
belongs to the peer that promised pages for it first. A promise that comes before the engine's
request is parked, bounded a peer and with a deadline; so is an abort, so that a request added later
fails at once. The other way round, a room that our engine ends before its promise has come is kept
for a while, so that decode hears of it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from prefixkv.config import ControlConfig
from prefixkv.control.links import Liveness, Stamper, check_pair
from prefixkv.errors import (
    AbortedError,
    ConfigError,
    HandshakeError,
    PeerLostError,
    ProtocolError,
    RequestError,
)
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Mesh, Shard, check_holds, readers_awaited, sent_share
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLink, check_state_pairs, state_blocks
from prefixkv.paging import pages_for, unit_pages
from prefixkv.protocol import messages
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import (
    Frame,
    Hello,
    HelloReply,
    ModelDigest,
    Outcome,
    Promise,
    Topology,
)
from prefixkv.protocol.sender_events import (
    Bootstrapped,
    CancelWrite,
    Pages,
    PostWrite,
    RoomEnded,
    Say,
    SourceFree,
)
from prefixkv.protocol.sender_machine import SenderMachine
from prefixkv.protocol.timers import Timers
from prefixkv.staging.cut import LeaseCut


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send to the decode worker behind this ROUTER route."""

    route: bytes
    raw: bytes


@dataclass(frozen=True, slots=True)
class AddPeer:
    """Make the peer's pool a target of our transport: `parts` are what of ours goes where in it."""

    peer: PeerId
    metadata: bytes
    layout: KVLayout
    parts: tuple[Shard, Shard]
    unit_tokens: int
    staging: StagingArea | None = None
    cut: LeaseCut | None = None  # what goes there is staged, and cut like this
    state: StateLink | None = None


@dataclass(frozen=True, slots=True)
class RemovePeer:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A reader's word on what the staged sender has asked it for."""

    peer: PeerId
    grant: messages.LeaseGrant


Action = (
    LeaseGranted
    | SendFrame
    | AddPeer
    | RemovePeer
    | PostWrite
    | CancelWrite
    | Bootstrapped
    | RoomEnded
    | SourceFree
)


_NO_ROOM = RoomKey(0, -1)
_NO_CLAIMS: dict[PeerId, Any] = {}


@dataclass(slots=True, eq=False)
class _Peer:
    """A rank of a decode worker. `gone` once its rooms have ended because it left or was replaced.

    `readers` are the ranks of its worker that promise us pages, `writes` says whether anything of
    ours goes to it, `takes_state` whether extra state does.
    """

    id: PeerId
    route: bytes
    credential: str
    hello: Hello
    live: Liveness
    readers: tuple[int, ...]
    writes: bool
    staged: bool
    takes_state: bool
    rooms: set[RoomKey] = field(default_factory=set)
    num_parked: int = 0
    gone: bool = False

    @property
    def worker(self) -> PeerId:
        return self.hello.worker or self.id


class PrefillEndpoint:
    """See the module's text. Owned by one thread; every method returns the actions to carry out, in
    order."""

    def __init__(
        self,
        me: PeerId,
        digest: ModelDigest,
        topology: Topology,
        timing: ControlConfig,
        endpoints: tuple[str, ...] = (),
        rank: int = 0,
        slot_bytes: int = 0,
    ) -> None:
        """`slot_bytes`: of a slot that slices of heads are gathered into where the reader has
        staging too; 0: none."""
        self.me = me
        self.counters: Counter[str] = Counter()
        self.endpoints = endpoints
        self._digest = digest
        self._topology = topology
        self._mesh = topology.mesh(digest)
        self._timing = timing
        self._rank = rank
        self._slot_bytes = slot_bytes
        self._stamp = Stamper(me)
        self._peers: dict[str, _Peer] = {}
        self._rooms: dict[RoomKey, SenderMachine] = {}
        self._claims: dict[
            RoomKey, dict[PeerId, _Peer]
        ] = {}  # the ranks of one worker that have named the room
        self._aborted_early: dict[RoomKey, tuple[float, str]] = {}
        self._unclaimed: set[RoomKey] = (
            set()
        )  # over for our engine; kept to answer a promise that is on its way
        self._jobs: dict[int, RoomKey] = {}
        self._job_ids = count(1)
        self._renewed = False  # some Drained that was lost may have asked decode to let it settle
        self._timers: Timers[str | RoomKey] = Timers()

    # --- commands ---------------------------------------------------------------------------------

    def add(self, key: RoomKey, num_tokens: int, now_s: float) -> list[Action]:
        """The engine has the request of this room. Raises RequestError if one with its number still
        lives here."""
        out: list[Action] = []
        machine = self._rooms.get(key)
        if machine is not None and machine.added and machine.drained:
            self._drop_room(machine)  # only its acknowledgement is still to come
            machine = None
        if machine is None:
            machine = self._new_machine(key, now_s)
        elif machine.added:
            raise RequestError(f"room {key.room} generation {key.generation} was added already")
        early = self._aborted_early.pop(key, None)
        if not machine.poll.ended:
            self._unpark(key)
        ended_before = machine.poll.ended
        self._on(machine, sender.Added(num_tokens), now_s, out)
        if ended_before:  # it ended while it was parked
            error = machine.error or AbortedError("the room ended before the request came")
            out += [RoomEnded(key, KVPoll.FAILED, error), SourceFree(key)]
        elif early is not None:
            self._on(
                machine, sender.Fail(AbortedError(f"decode: {early[1]}"), tell=False), now_s, out
            )
        return out

    def chunk(
        self, key: RoomKey, first_page: int, src_pages: Pages, last: bool, aux: bytes, ready: Any,
        now_s: float, state_slot: int = -1,
    ) -> list[Action]:  # fmt: skip
        """The engine hands over pages `first_page`.. of the request. Ended or unknown: no-op."""
        out: list[Action] = []
        machine = self._rooms.get(key)
        if machine is not None:
            self._on(
                machine,
                sender.ChunkQueued(first_page, src_pages, last, aux, ready, state_slot),
                now_s,
                out,
            )
        return out

    def abort(self, key: RoomKey, error: Exception, now_s: float) -> list[Action]:
        """End a room from this side. Ended or unknown: no-op."""
        out: list[Action] = []
        machine = self._rooms.get(key)
        if machine is not None:
            self._on(machine, sender.Fail(error), now_s, out)
        return out

    def farewell(self) -> list[Action]:
        """Tell every decode worker that our agent is gone: no write of this incarnation can land
        any more."""
        return [
            SendFrame(peer.route, self._stamp.frame(messages.Fenced()))
            for peer in self._peers.values()
        ]

    # --- what comes in ----------------------------------------------------------------------------

    def on_frame(self, route: bytes, credential: str, raw: bytes, now_s: float) -> list[Action]:
        """A frame. What is malformed, stale or foreign is counted and dropped.

        `credential` is what the socket proved of the sender (its CURVE key), "" without keys: a
        name stays with the credential that used it first.
        """
        out: list[Action] = []
        try:
            frame = messages.decode(raw)
            self._take(route, credential, frame, now_s, out)
        except ProtocolError as error:
            self.counters["frames_dropped"] += 1
            self.counters[f"dropped: {type(error).__name__}"] += 1
        return out

    def on_write_ended(
        self, job_id: int, error: Exception | None, drained: bool, now_s: float
    ) -> list[Action]:
        """The transport's word on a job. Unknown: no-op."""
        out: list[Action] = []
        machine = self._rooms.get(self._jobs.get(job_id, _NO_ROOM))
        if error is None or drained:
            self._jobs.pop(job_id, None)
        if machine is not None:
            self._on(machine, sender.WriteEnded(job_id, error, drained), now_s, out)
        return out

    def on_write_drained(self, job_id: int, now_s: float) -> list[Action]:
        """Of a job that had ended undrained, nothing can land any more. Unknown: no-op."""
        out: list[Action] = []
        self._renewed = True
        machine = self._rooms.get(self._jobs.pop(job_id, _NO_ROOM))
        if machine is not None:
            self._on(machine, sender.WriteDrained(job_id), now_s, out)
        return out

    def say(self, peer_id: PeerId, body: messages.AnyBody, now_s: float) -> list[Action]:
        """A word of the staged sender. Nobody of that identity is known: no-op."""
        out: list[Action] = []
        peer = self._peers.get(peer_id.name)
        if peer is not None and peer.id == peer_id:
            self._send(peer, body, now_s, out)
        return out

    def next_job_id(self) -> int:
        """A number for a job of the transport, never given before."""
        return next(self._job_ids)

    def tick(self, now_s: float) -> list[Action]:
        """Let time pass: deadlines, repeats, heartbeats, what was parked for too long."""
        out: list[Action] = []
        for key in self._timers.due(now_s):
            if isinstance(key, str):
                self._tick_peer(self._peers.get(key), now_s, out)
            elif (machine := self._rooms.get(key)) is not None:
                self._on(machine, sender.Tick(), now_s, out)
        while self._aborted_early and next(iter(self._aborted_early.values()))[0] <= now_s:
            del self._aborted_early[next(iter(self._aborted_early))]
        return out

    @property
    def wake_s(self) -> float:
        """When `tick` is wanted next, infinity if never."""
        return self._timers.next_s

    @property
    def num_rooms(self) -> int:
        """Rooms that an engine or a peer still has something to do with."""
        return len(self._rooms) - len(self._unclaimed)

    def rooms(self) -> Iterable[SenderMachine]:
        """The machines of all rooms, for audits."""
        return self._rooms.values()

    def peers(self, now_s: float) -> dict[PeerId, str]:
        """The decode workers known, each "ready" or "suspect"."""
        timing = self._timing
        peers = list(self._peers.values())  # at once: the scheduler's thread asks
        return {
            peer.id: "suspect" if peer.live.suspect(timing, now_s) else "ready" for peer in peers
        }

    # --- frames -----------------------------------------------------------------------------------

    def _take(
        self, route: bytes, credential: str, frame: Frame, now_s: float, out: list[Action]
    ) -> None:
        curve = self._timing.curve
        if curve is not None and not _may_speak(curve.allowed_clients, credential, frame.name):
            raise ProtocolError(f"{frame.name!r} speaks under a key that is not its own")
        peer = self._peers.get(frame.name)
        if peer is not None and credential != peer.credential:
            raise ProtocolError(f"{frame.name!r} speaks under another key than before")
        if peer is not None and frame.incarnation < peer.id.incarnation:
            raise ProtocolError(f"a frame of {frame.sender}, which {peer.id} has replaced")
        body = frame.body
        if isinstance(body, Hello):
            self._meet(route, credential, frame, body, now_s, out)
            return
        if peer is None or peer.id != frame.sender:
            out.append(SendFrame(route, self._stamp.frame(messages.HelloWanted())))
            raise ProtocolError(f"{frame.sender} has not introduced itself")
        peer.live.take(frame, now_s)
        peer.route = route
        if isinstance(body, Promise):
            self._take_promise(peer, body, now_s, out)
        elif isinstance(body, messages.Abort):
            self._take_abort(peer, body, now_s, out)
        elif isinstance(body, messages.OutcomeAck):
            key = RoomKey(body.room, body.generation)
            machine = self._rooms.get(key)
            if (
                machine is not None
                and peer.id in self._claimants(key)
                and machine.ticket == body.ticket
            ):
                self._on(machine, sender.OutcomeAcked(peer.hello.rank), now_s, out)
        elif isinstance(body, messages.LeaseGrant):
            out.append(LeaseGranted(peer.id, body))
        elif isinstance(body, messages.Fenced):
            self._lose_peer(peer, PeerLostError(f"{peer.id} has left"), now_s, out)
        elif not isinstance(body, messages.Heartbeat):
            raise ProtocolError(f"{type(body).__name__} is not for prefill")

    def _meet(
        self,
        route: bytes,
        credential: str,
        frame: Frame,
        hello: Hello,
        now_s: float,
        out: list[Action],
    ) -> None:
        peer = self._peers.get(frame.name)
        if peer is not None and peer.id == frame.sender:
            peer.live.take(frame, now_s)
            peer.route = route
            self._answer_hello(route, "", out, peer.staged)
            return
        try:
            added = self._check(frame.sender, hello)
        except (HandshakeError, ConfigError) as error:
            self.counters["handshakes_refused"] += 1
            self._answer_hello(route, str(error)[:1000], out)
            return
        if peer is not None:
            self._lose_peer(
                peer, PeerLostError(f"{peer.id} was replaced by {frame.sender}"), now_s, out
            )
        elif len(self._peers) >= self._timing.max_peers:
            self._answer_hello(
                route, f"{len(self._peers)} decode workers are known, the limit is reached", out
            )
            return
        live = Liveness(now_s, now_s, frame.seq)
        readers = readers_awaited(self._mesh, self._rank, hello.topology.mesh(hello.digest))
        staged = added is not None and added.cut is not None
        takes_state = added is not None and added.state is not None
        self._peers[frame.name] = _Peer(
            frame.sender,
            route,
            credential,
            hello,
            live,
            readers,
            added is not None,
            staged,
            takes_state,
        )
        self._timers.wake(frame.name, now_s + self._timing.heartbeat_s)
        if added is not None:
            out.append(added)
        self._answer_hello(route, "", out, staged)

    def _check(self, peer: PeerId, hello: Hello) -> AddPeer | None:
        """What the transport has to know of it, None if nothing of ours goes there.

        Raises HandshakeError or ConfigError for a peer that nothing can be written to.
        """
        check_pair(self._digest, self._topology, hello.digest, hello.topology)
        layout, digest = hello.layout, self._digest
        layout.validate()
        check_holds(layout, hello.topology.mesh(digest).shard(hello.rank))
        described = layout.dtype, layout.attention, layout.head_dim, layout.page_size
        ours = digest.dtype, digest.attention, digest.head_dim, hello.topology.page_size
        if described != ours:
            raise HandshakeError("layout", ours, described)
        mesh = hello.topology.mesh(digest)
        mine, theirs = self._mesh.shard(self._rank), mesh.shard(hello.rank)
        share = sent_share(self._mesh, self._rank, mesh, hello.rank)
        state = self._state_link(hello, mesh)
        if share is None:
            return None
        unit_tokens = min(self._topology.page_size, hello.topology.page_size)
        parts = share.inside(mine), share.inside(theirs)
        added = AddPeer(peer, hello.agent_metadata, layout, parts, unit_tokens, state=state)
        is_slice = share.num_heads < max(mine.num_heads, theirs.num_heads)
        if not (is_slice and self._slot_bytes and hello.staging is not None):
            return added
        hello.staging.validate()
        unit_head_bytes = unit_tokens * layout.head_bytes * layout.slabs_per_layer
        cut = LeaseCut.of(self._mesh, mesh, hello.rank, unit_head_bytes, hello.staging)
        cut.check_slots(self._rank, self._slot_bytes)
        return replace(added, staging=hello.staging, cut=cut)

    def _state_link(self, hello: Hello, mesh: Mesh) -> StateLink | None:
        """What of our extra state goes there, None if nothing does. Raises as `_check`."""
        tensors = self._digest.state
        if (hello.state is None) != (not tensors):
            raise HandshakeError("state", tensors, hello.state, "is there on one side only")
        if hello.state is None:
            return None
        check_state_pairs(tensors, self._mesh, mesh)
        hello.state.check_holds(
            tensors, mesh, hello.rank
        )  # first, since it bounds what the other costs
        hello.state.validate()
        blocks = state_blocks(tensors, self._mesh, self._rank, mesh, hello.rank)
        return StateLink(hello.state, blocks) if blocks else None

    def _answer_hello(
        self, route: bytes, refused: str, out: list[Action], staged: bool = False
    ) -> None:
        reply = HelloReply(
            self._digest, self._topology, self.endpoints, refused, self._rank, staged
        )
        out.append(SendFrame(route, self._stamp.frame(reply)))

    def _take_promise(self, peer: _Peer, promise: Promise, now_s: float, out: list[Action]) -> None:
        key = RoomKey(promise.room, promise.generation)
        try:
            event = self._checked(peer, promise)
            machine = self._rooms.get(key)
            self._check_owner(machine, peer, key)
            if machine is not None and machine.drained and 0 < machine.ticket < promise.ticket:
                self._drop_room(
                    machine
                )  # decode has done with that use of the room, if it uses its number again
                machine = None
            if machine is not None and not machine.same_promise(event):
                raise ProtocolError(
                    f"another promise for room {key.room} generation {key.generation}"
                )
            parks = peer.id not in self._claimants(key) and not (
                machine is not None and machine.added
            )
            if parks and peer.num_parked >= self._timing.max_parked_per_peer:
                raise ProtocolError(
                    f"{peer.num_parked} promises wait for their requests, the limit is reached"
                )
            if machine is None:
                machine = self._new_machine(key, now_s)
        except ProtocolError as error:
            # Nothing was written for this promise, so its pages are drained as far as it is
            # concerned. If another promise of this room stands, decode has already ended or will
            # end that one by its own rules.
            known = self._rooms.get(key)
            if (
                known is None
                or peer.id not in self._claimants(key)
                or known.ticket != promise.ticket
            ):
                refusal = Outcome(
                    *key, self._rank, False, 0, 0, b"", str(error)[:1000], True, promise.ticket
                )
                self._send(peer, refusal, now_s, out)
            raise
        if not machine.poll.ended:
            peer.num_parked += parks
        self._aborted_early.pop(key, None)  # its number is in use again
        self._claim(key, peer)
        self._on(machine, event, now_s, out)

    def _check_owner(self, machine: SenderMachine | None, peer: _Peer, key: RoomKey) -> None:
        """Raises ProtocolError unless the room is nobody's, or of the peer's worker, and it speaks
        for itself there."""
        for claimant in self._claimants(key).values():
            if claimant.worker != peer.worker or (
                machine is not None and machine.is_strange(peer.id, peer.hello.rank)
            ):
                raise ProtocolError(f"room {key.room} belongs to {claimant.worker}")

    def _claimants(self, key: RoomKey) -> dict[PeerId, _Peer]:
        return self._claims.get(key, _NO_CLAIMS)

    def _claim(self, key: RoomKey, peer: _Peer) -> None:
        self._claims.setdefault(key, {})[peer.id] = peer
        peer.rooms.add(key)

    def _unpark(self, key: RoomKey) -> None:
        """The room has ended, or its request has come: its promises are parked no more."""
        for peer in self._claimants(key).values():
            peer.num_parked -= 1

    def _checked(self, peer: _Peer, promise: Promise) -> sender.Promised:
        """The promise with page ids that are safe to turn into addresses."""
        page_size = peer.hello.topology.page_size
        pages = promise.page_ids()
        if promise.prefix_len % page_size or promise.prefix_len > promise.fill_len:
            raise ProtocolError(
                f"prefix of {promise.prefix_len} tokens of {promise.fill_len}, pages of {page_size}"
            )
        wanted = pages_for(promise.fill_len, page_size) - promise.prefix_len // page_size
        if len(pages) != wanted:
            raise ProtocolError(f"{len(pages)} pages where {wanted} are needed")
        num_pages = peer.hello.layout.num_pages
        if len(pages) and (pages.min() < 0 or pages.max() >= num_pages):
            raise ProtocolError(
                f"page ids {pages.min()} to {pages.max()}, the pool has {num_pages}"
            )
        if len(np.unique(pages)) != len(pages):
            raise ProtocolError("a page id twice in one promise")
        state = peer.hello.state
        if not (
            promise.state_slot == -1 if state is None else 0 <= promise.state_slot < state.num_slots
        ):
            num_slots = 0 if state is None else state.num_slots
            raise ProtocolError(f"state slot {promise.state_slot} of {num_slots}")
        unit_tokens = min(page_size, self._topology.page_size)
        fold = page_size // unit_tokens
        num_units = pages_for(promise.fill_len - promise.prefix_len, unit_tokens)
        return sender.Promised(
            peer.id, promise.fill_len, promise.prefix_len, unit_pages(pages, fold, 0, num_units),
            promise.ticket, peer.hello.rank, peer.readers, peer.writes, unit_tokens, fold,
            promise.state_slot, peer.takes_state,
        )  # fmt: skip

    def _take_abort(
        self, peer: _Peer, abort: messages.Abort, now_s: float, out: list[Action]
    ) -> None:
        key = RoomKey(abort.room, abort.generation)
        machine = self._rooms.get(key)
        claims = self._claimants(key)
        theirs = not claims or peer.worker in {claimant.worker for claimant in claims.values()}
        to_come = machine is None or (not machine.added and theirs)
        if to_come and len(self._aborted_early) < self._timing.max_parked_per_peer:
            # The engine's request is still to come; the room itself will be over by then.
            self._aborted_early[key] = (now_s + self._timing.parked_timeout_s, abort.reason)
        strange = not theirs or (
            machine is not None and machine.is_strange(peer.id, peer.hello.rank)
        )
        if machine is None or strange or machine.is_other_use(abort.ticket):
            # Nothing of ours can land in that peer's pages for this room: its later frames
            # outnumber this one.
            self._send(
                peer, messages.Drained(*key, self._rank, abort.ticket, self._renewed), now_s, out
            )
            return
        said = sender.AbortSaid(peer.id, abort.reason, abort.ticket, peer.hello.rank, peer.readers)
        if peer.id not in claims and not machine.added and not machine.poll.ended:
            peer.num_parked += 1  # until it has ended, which it does at once
        self._claim(key, peer)
        self._on(machine, said, now_s, out)

    # --- peers ------------------------------------------------------------------------------------

    def _lose_peer(self, peer: _Peer, error: Exception, now_s: float, out: list[Action]) -> None:
        peer.gone = True
        for key in list(peer.rooms):
            self._on(self._rooms[key], sender.Fail(error, gone=peer.hello.rank), now_s, out)
        self._forget_peer(peer, out)

    def _forget_peer(self, peer: _Peer, out: list[Action]) -> None:
        if self._peers.get(peer.id.name) is peer:
            del self._peers[peer.id.name]
            self._timers.forget(peer.id.name)
        out.append(RemovePeer(peer.id))

    def _tick_peer(self, peer: _Peer | None, now_s: float, out: list[Action]) -> None:
        if peer is None:
            return
        if not peer.rooms and peer.live.forgettable(self._timing, now_s):
            self._forget_peer(peer, out)
            return
        if peer.live.heartbeat_due(self._timing, now_s):
            self._send(peer, messages.Heartbeat(), now_s, out)
        self._timers.wake(peer.id.name, peer.live.heartbeat_due_s(self._timing))

    def _send(self, peer: _Peer, body: messages.AnyBody, now_s: float, out: list[Action]) -> None:
        if not peer.gone:
            peer.live.sent_s = now_s
            out.append(SendFrame(peer.route, self._stamp.frame(body)))

    # --- rooms ------------------------------------------------------------------------------------

    def _new_machine(self, key: RoomKey, now_s: float) -> SenderMachine:
        machine = SenderMachine(
            key, self._rank, self._topology.page_size, self.next_job_id, self._timing, now_s
        )
        self._rooms[key] = machine
        return machine

    def _on(
        self, machine: SenderMachine, event: sender.Event, now_s: float, out: list[Action]
    ) -> None:
        key = machine.key
        open_before = not machine.poll.ended
        for action in machine.on(event, now_s):
            if isinstance(action, Say):
                self._send(self._claims[key][action.peer], action.body, now_s, out)
            elif isinstance(action, RoomEnded | SourceFree) and not machine.added:
                continue  # the engine has never heard of it
            else:
                if isinstance(action, PostWrite):
                    self._jobs[action.job_id] = key
                out.append(action)
        if open_before and machine.poll.ended and not machine.added:
            self._unpark(key)
        # Peers that are gone drain their own pages, or never: only our writes' ends are waited for.
        claims = self._claimants(key)
        all_gone = bool(claims) and all(peer.gone for peer in claims.values())
        if machine.over or (all_gone and machine.poll.ended and not machine.in_flight):
            self._drop_room(machine)
        else:
            self._timers.wake(key, machine.wake_s)
            if machine.poll.ended and not machine.readers:
                self._unclaimed.add(key)
            else:
                self._unclaimed.discard(key)

    def _drop_room(self, machine: SenderMachine) -> None:
        self._rooms.pop(machine.key, None)
        self._unclaimed.discard(machine.key)
        self._timers.forget(machine.key)
        for peer in self._claims.pop(machine.key, _NO_CLAIMS).values():
            peer.rooms.discard(machine.key)


def _may_speak(allowed: Mapping[str, str], credential: str, name: str) -> bool:
    """Whether the name is the key's, or, unless another key has it, of a further rank of the worker
    that is."""
    if name in allowed.values():
        return allowed.get(credential) == name
    worker, _, rank = name.rpartition("/")
    return allowed.get(credential) == worker != "" and rank.isdecimal()
