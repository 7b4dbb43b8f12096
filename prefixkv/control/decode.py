"""A decode rank's side of the control plane: its links to prefill workers and the rooms open on
them. Sans-IO.

A request names the address of a prefill worker's rank 0, its *leader*, which tells how many ranks
there are and where. A room waits at the leader's link until all ranks that are to be told of its
pages have been greeted.

Frames, notifications, commands and time go in; frames to send and what became of rooms come out.
The endpoint owns what machines cannot know: which incarnation a room was promised to, and that only
this one's word counts. A restarted worker knows nothing of its predecessor's writes, so its Drained
would prove nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from prefixkv.config import ControlConfig
from prefixkv.control.links import Liveness, Stamper, check_pair
from prefixkv.errors import ConfigError, HandshakeError, PeerLostError, ProtocolError, RequestError
from prefixkv.memory.mesh import ranks_told, writers_to
from prefixkv.protocol import messages
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol.backoff import Backoff
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Frame, Hello, HelloReply, Outcome, OutcomeAck, Promise
from prefixkv.protocol.receiver_machine import (
    ReceiverMachine,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
    Say,
)
from prefixkv.protocol.refusal_machine import RefusalMachine
from prefixkv.protocol.tags import ChunkTag
from prefixkv.protocol.timers import Timers
from prefixkv.staging import receiver as staging_receiver
from prefixkv.staging.receiver import BreakRoom, Grant, Scatter, StagingPlan, StagingReceiver


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send to the prefill worker at `address`."""

    address: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class Connect:
    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    address: str


@dataclass(frozen=True, slots=True)
class RankDrained:
    """This rank's Drained for one use of a room."""

    key: RoomKey
    rank: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Settle:
    """A writer's agent is gone: read what kernels may still hold of it, then tell `settled` this
    token."""

    token: PeerId | RankDrained


Action = SendFrame | Connect | Disconnect | Settle | RoomEnded | RoomDrained | RoomOverdue | Scatter


@dataclass(slots=True, eq=False)
class _Link:
    """One prefill rank's address. `peer` is who answered there last; ready once the handshake is
    through.

    `told` are the addresses of the ranks that a room of this leader is promised to, by rank;
    `leaders` are the links that have this one among theirs.
    """

    address: str
    live: Liveness
    hello: Backoff
    peer: PeerId | None = None
    ready: bool = False
    reply: HelloReply | None = None
    told: dict[int, str] = field(default_factory=dict)
    plan: StagingPlan | None = (
        None  # of a leader whose ranks stage what they write to us, once `planned`
    )
    planned: bool = False
    leaders: set[str] = field(default_factory=set)
    rooms: set[RoomKey] = field(default_factory=set)
    waiting: dict[RoomKey, None] = field(
        default_factory=dict
    )  # to be promised, in the order of admission


@dataclass(slots=True, eq=False)
class _Room:
    machine: ReceiverMachine | RefusalMachine
    link: _Link  # the leader's
    links: dict[int, _Link] = field(
        default_factory=dict
    )  # of the ranks that were promised the pages
    peers: dict[int, PeerId] = field(default_factory=dict)  # and in which incarnation

    def rank_of(self, peer: PeerId) -> int:
        return next(rank for rank, known in self.peers.items() if known == peer)


class DecodeEndpoint:
    """See the module's text. Owned by one thread; every method returns the actions to carry out, in
    order."""

    def __init__(self, me: PeerId, hello: Hello, timing: ControlConfig) -> None:
        self.me = me
        self.counters: Counter[str] = Counter()
        self._hello = hello
        self._mesh = hello.topology.mesh(hello.digest)
        self._timing = timing
        self._stamp = Stamper(me)
        self._links: dict[str, _Link] = {}
        self._rooms: dict[RoomKey, _Room] = {}
        self._timers: Timers[str | RoomKey] = Timers()
        self._settling: set[Hashable] = set()
        self.staging = None if hello.staging is None else StagingReceiver(hello.staging)
        self._fenced: dict[str, int] = {}  # by name: incarnations up to this one are gone for good
        self._expected = 0

    # --- commands ---------------------------------------------------------------------------------

    def open(self, promise: Promise, address: str, now_s: float) -> list[Action]:
        """Open a room with the worker at `address`. Raises RequestError if the room is open
        already."""
        return self._enter(ReceiverMachine(promise, self._timing, now_s), address, now_s)

    def refuse(
        self, key: RoomKey, ticket: int, address: str, error: Exception, now_s: float
    ) -> list[Action]:
        """Tell the worker at `address` that the room will not be opened; RoomDrained follows, also
        if it is not there.

        Raises RequestError if the room is open.
        """
        return self._enter(
            RefusalMachine(key, ticket, str(error), self._timing, now_s), address, now_s
        )

    def _enter(
        self, machine: ReceiverMachine | RefusalMachine, address: str, now_s: float
    ) -> list[Action]:
        key = machine.key
        known = self._rooms.get(key)
        if known is not None:
            if not isinstance(known.machine, RefusalMachine) or known.machine.is_news:
                raise RequestError(f"room {key.room} generation {key.generation} is open already")
            self._drop(known)  # the number is in use again
        out: list[Action] = []
        link = self._links.get(address) or self._new_link(address, now_s, out)
        self._rooms[key] = room = _Room(machine, link)
        link.rooms.add(key)
        link.waiting[key] = None
        self._timers.wake(key, room.machine.wake_s)
        self._promote(link, now_s, out)
        return out

    def abort(self, key: RoomKey, error: Exception, now_s: float) -> list[Action]:
        """End a room from this side. Unknown or ended: no-op."""
        out: list[Action] = []
        room = self._rooms.get(key)
        if room is not None and isinstance(room.machine, ReceiverMachine):
            self._on(room, receiver.Fail(error), now_s, out)
            if not room.peers:
                # Prefill has not heard of the room, but may have the request, and wait. Its answer
                # is no news here.
                refusal = RefusalMachine(
                    key, room.machine.ticket, str(error), self._timing, now_s, is_news=False
                )
                out += self._enter(refusal, room.link.address, now_s)
        return out

    def fence(self, peer: PeerId, now_s: float) -> list[Action]:
        """The caller knows that this incarnation can write no more: its rooms end now, and are
        drained soon after.

        Not at once: over TCP the kernels may still hold what it sent before, and that lands as our
        own transport reads it. So rooms stay undrained until it has been at that for
        `fence_settle_s`.
        """
        out: list[Action] = []
        self._fenced[peer.name] = max(peer.incarnation, self._fenced.get(peer.name, 0))
        error = PeerLostError(f"{peer} was fenced")
        for room in [room for room in self._rooms.values() if peer in room.peers.values()]:
            self._on(room, receiver.Fail(error, lost=room.rank_of(peer)), now_s, out)
        for link in self._links.values():
            if link.peer == peer:
                link.peer, link.ready = None, False
                self._greet(link, now_s, out)
        self._settle(peer, now_s, out)
        return out

    def settled(self, token: Hashable, now_s: float) -> list[Action]:
        """The transport has been reading for long enough since that `Settle`."""
        out: list[Action] = []
        self._settling.discard(token)
        if isinstance(token, PeerId):
            for room in [room for room in self._rooms.values() if token in room.peers.values()]:
                self._on(room, receiver.FencedOff(room.rank_of(token)), now_s, out)
        elif isinstance(token, RankDrained):
            drained = self._rooms.get(token.key)
            if drained is not None and drained.machine.ticket == token.ticket:
                self._on(drained, receiver.DrainedSaid(token.rank), now_s, out)
        return out

    def _settle(self, token: PeerId | RankDrained, now_s: float, out: list[Action]) -> None:
        if not self._timing.fence_settle_s:
            out.extend(self.settled(token, now_s))
        elif token not in self._settling:
            self._settling.add(token)
            out.append(Settle(token))

    def unreachable(self, address: str, error: Exception, now_s: float) -> list[Action]:
        """There is no such address: its rooms fail."""
        out: list[Action] = []
        link = self._links.get(address)
        if link is not None:
            self._refuse_link(link, error, now_s, out)
        return out

    def farewell(self) -> list[Action]:
        """Tell every worker that this process leaves; its transport agent has to be destroyed
        already."""
        return [
            SendFrame(link.address, self._stamp.frame(messages.Fenced()))
            for link in self._links.values()
            if link.peer is not None
        ]

    # --- what comes in ----------------------------------------------------------------------------

    def on_frame(self, address: str, raw: bytes, now_s: float) -> list[Action]:
        """A frame from `address`. What is malformed, stale or foreign is counted and dropped."""
        out: list[Action] = []
        try:
            frame = messages.decode(raw)
            link = self._links.get(address)
            if link is None:
                raise ProtocolError("a frame on a closed link")
            self._take(link, frame, now_s, out)
        except ProtocolError as error:
            self.counters["frames_dropped"] += 1
            self.counters[f"dropped: {type(error).__name__}"] += 1
        return out

    def on_arrival(self, raw_tag: bytes, now_s: float) -> list[Action]:
        """A NIXL notification. Progress only, so a lost, late or foreign one does no harm."""
        out: list[Action] = []
        try:
            tag = ChunkTag.unpack(raw_tag)
        except ProtocolError:
            self.counters["tags_dropped"] += 1
            return out
        room = self._rooms.get(RoomKey(tag.room, tag.generation))
        peer = None if room is None else room.peers.get(tag.rank)
        if room is None or peer is None or peer.incarnation != tag.incarnation:
            self.counters["tags_dropped"] += 1
        else:
            self._on(room, receiver.ChunkLanded(tag.rank, tag.chunk, tag.part), now_s, out)
            if tag.slot >= 0 and self.staging is not None:
                self._act_staged(self.staging.on_arrival(tag), now_s, out)
        return out

    def on_scattered(self, lease_id: int, error: Exception | None, now_s: float) -> list[Action]:
        """A `Scatter` has ended."""
        out: list[Action] = []
        if self.staging is not None:
            self._act_staged(self.staging.on_scattered(lease_id, error), now_s, out)
        return out

    def tick(self, now_s: float) -> list[Action]:
        """Let time pass: deadlines, repeats, heartbeats."""
        out: list[Action] = []
        for key in self._timers.due(now_s):
            if isinstance(key, str):
                self._tick_link(self._links.get(key), now_s, out)
            elif (room := self._rooms.get(key)) is not None:
                self._on(room, receiver.Tick(), now_s, out)
        return out

    @property
    def wake_s(self) -> float:
        """When `tick` is wanted next, infinity if never."""
        return self._timers.next_s

    @property
    def num_expected(self) -> int:
        """Rooms whose pages a peer may be writing now."""
        return self._expected

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    def poll(self, key: RoomKey) -> KVPoll | None:
        """How far a room is; None once it has ended and is drained."""
        room = self._rooms.get(key)
        return None if room is None else room.machine.poll

    def rooms(self) -> Iterable[ReceiverMachine]:
        """The machines of all open or undrained rooms, for audits."""
        return [
            room.machine
            for room in self._rooms.values()
            if isinstance(room.machine, ReceiverMachine)
        ]

    def peers(self, now_s: float) -> dict[str, tuple[PeerId | None, str]]:
        """By address: who answers there, and "ready", "suspect" or "connecting"."""
        links = list(self._links.values())  # at once: the scheduler's thread asks
        return {link.address: (link.peer, self._link_state(link, now_s)) for link in links}

    # --- frames -----------------------------------------------------------------------------------

    def _take(self, link: _Link, frame: Frame, now_s: float, out: list[Action]) -> None:
        body = frame.body
        if isinstance(body, HelloReply | messages.HelloWanted):
            self._meet(link, frame, now_s, out)
            return
        if frame.sender != link.peer:
            raise ProtocolError(f"a frame of {frame.sender}, {link.peer} is known here")
        link.live.take(frame, now_s)
        if isinstance(body, messages.Fenced):
            out.extend(self.fence(frame.sender, now_s))
        elif isinstance(body, Outcome):
            self._take_outcome(link, body, now_s, out)
        elif isinstance(body, messages.PromiseAck):
            self._to_room(link, body, receiver.PromiseAcked(body.rank), now_s, out)
        elif isinstance(body, messages.Drained):
            self._take_drained(link, body, now_s, out)
        elif isinstance(body, messages.LeaseAsk):
            self._take_ask(link, body, now_s, out)
        elif not isinstance(body, messages.Heartbeat):
            raise ProtocolError(f"{type(body).__name__} is not for decode")
        self._promote(link, now_s, out)  # it speaks, so it is suspect no more

    def _take_outcome(self, link: _Link, outcome: Outcome, now_s: float, out: list[Action]) -> None:
        key = RoomKey(outcome.room, outcome.generation)
        room = self._rooms.get(key)
        if room is None or room.machine.ticket != outcome.ticket:
            # That use of the room has ended and is drained here: only the acknowledgement was lost.
            self._send(link, OutcomeAck(*key, outcome.rank, outcome.ticket), now_s, out)
        else:
            self._to_room(link, outcome, receiver.OutcomeSaid(outcome), now_s, out)
            if outcome.ok and self.staging is not None:
                self._act_staged(self.staging.on_written(key, outcome.rank), now_s, out)

    def _take_ask(
        self, link: _Link, ask: messages.LeaseAsk, now_s: float, out: list[Action]
    ) -> None:
        room = self._room_of(link, ask)
        if room is None:
            return
        if self.staging is None:
            raise ProtocolError("a lease is asked for where there is no staging")
        try:
            self._act_staged(self.staging.on_ask(ask.rank, ask), now_s, out)
        except ProtocolError as error:
            self._on(room, receiver.Fail(error), now_s, out)
            raise

    def _act_staged(
        self, actions: list[staging_receiver.Action], now_s: float, out: list[Action]
    ) -> None:
        for action in actions:
            if isinstance(action, Grant):
                room = self._rooms.get(action.key)
                if room is not None:
                    self._say(room, action.rank, action.grant, now_s, out)
            elif isinstance(action, BreakRoom):
                self._on(self._rooms[action.key], receiver.Fail(action.error), now_s, out)
            else:
                out.append(action)

    def _take_drained(
        self, link: _Link, drained: messages.Drained, now_s: float, out: list[Action]
    ) -> None:
        room = self._room_of(link, drained)
        if room is not None and drained.settle and room.machine.poll.ended:
            self._settle(RankDrained(room.machine.key, drained.rank, drained.ticket), now_s, out)
        elif room is not None:
            self._on(room, receiver.DrainedSaid(drained.rank), now_s, out)

    def _to_room(
        self,
        link: _Link,
        body: Outcome | messages.PromiseAck,
        event: receiver.Event,
        now_s: float,
        out: list[Action],
    ) -> None:
        room = self._room_of(link, body)
        if room is not None:
            self._on(room, event, now_s, out)

    def _room_of(
        self,
        link: _Link,
        body: Outcome | messages.PromiseAck | messages.Drained | messages.LeaseAsk,
    ) -> _Room | None:
        """The room that this is a word of, None if it is over. Raises ProtocolError for
        another's."""
        room = self._rooms.get(RoomKey(body.room, body.generation))
        if room is None:
            return None
        if link.peer is None or room.peers.get(body.rank) != link.peer:
            raise ProtocolError(
                f"room {body.room} was promised to {room.peers}, {link.peer} speaks as {body.rank}"
            )
        if room.machine.ticket != body.ticket:
            raise ProtocolError(f"a word of an earlier use of room {body.room}")
        return room

    def _meet(self, link: _Link, frame: Frame, now_s: float, out: list[Action]) -> None:
        """A HelloReply, or a worker that does not know us (it was restarted, or has forgotten)."""
        if (
            link.peer is not None
            and frame.name == link.peer.name
            and frame.incarnation < link.peer.incarnation
        ):
            raise ProtocolError(f"a frame of {frame.sender}, which {link.peer} has replaced")
        if frame.incarnation <= self._fenced.get(frame.name, -1):
            raise ProtocolError(f"a frame of {frame.sender}, which was fenced")
        if frame.sender != link.peer:
            self._lose_peer(link, frame.sender, now_s, out)
            link.live.in_seq = 0
        link.live.take(frame, now_s)
        if isinstance(frame.body, messages.HelloWanted):
            if link.ready or link.hello.due_s == float("inf"):  # else a Hello is on its way already
                link.ready = False
                self._greet(link, now_s, out)
            return
        assert isinstance(frame.body, HelloReply)
        try:
            self._check(frame.body)
            link.told = self._ranks_told(link.address, frame.body) if frame.body.rank == 0 else {}
        except (HandshakeError, ConfigError) as error:
            self.counters["handshakes_refused"] += 1
            self._refuse_link(link, error, now_s, out)
            return
        link.peer = frame.sender
        link.ready = True
        link.reply = frame.body
        for address in (link.address, *link.leaders):
            if address in self._links:
                self._links[address].planned = False
        link.hello.due_s = float("inf")
        self._timers.wake(link.address, link.live.heartbeat_due_s(self._timing))
        self._promote(link, now_s, out)

    def _check(self, reply: HelloReply) -> None:
        check_pair(self._hello.digest, self._hello.topology, reply.digest, reply.topology)
        if reply.refused:
            raise HandshakeError("refused by prefill", "", reply.refused)

    def _ranks_told(self, address: str, reply: HelloReply) -> dict[int, str]:
        """The address of each rank of this leader that our pages are promised to."""
        theirs = reply.topology.mesh(reply.digest)
        if len(reply.endpoints) < theirs.num_ranks:
            raise HandshakeError(
                "endpoints", theirs.num_ranks, len(reply.endpoints), "are fewer than its ranks"
            )
        ranks = ranks_told(theirs, self._mesh, self._hello.rank)
        return {rank: reply.endpoints[rank] if rank else address for rank in ranks}

    def _lose_peer(self, link: _Link, newer: PeerId, now_s: float, out: list[Action]) -> None:
        """Another process answers at this address: whatever was promised to the one before has
        ended.

        The link is the newer one's from now on, so that a late word of the older one is known for
        what it is.
        """
        lost, link.peer, link.ready = link.peer, newer, False
        if lost is None:
            return
        error = PeerLostError(f"{lost} was replaced by {newer}")
        for key in list(link.rooms):
            room = self._rooms[key]
            if lost in room.peers.values():
                self._on(room, receiver.Fail(error, lost=room.rank_of(lost)), now_s, out)

    # --- links ------------------------------------------------------------------------------------

    def _new_link(self, address: str, now_s: float, out: list[Action]) -> _Link:
        link = self._links[address] = _Link(
            address, Liveness(now_s, now_s), Backoff(self._timing.resend_s)
        )
        out.append(Connect(address))
        self._greet(link, now_s, out)
        return link

    def _greet(self, link: _Link, now_s: float, out: list[Action]) -> None:
        link.hello.start(now_s)
        self._send(link, self._hello, now_s, out)
        self._timers.wake(link.address, link.hello.due_s)

    def _promote(self, link: _Link, now_s: float, out: list[Action]) -> None:
        """A rank is there and answers: promise the pages of the rooms that waited only for that."""
        for address in (link.address, *sorted(link.leaders)):
            leader = self._links.get(address)
            if leader is not None and leader.waiting and leader.ready:
                self._promote_rooms(leader, now_s, out)

    def _promote_rooms(self, leader: _Link, now_s: float, out: list[Action]) -> None:
        links: dict[int, _Link] = {}
        for rank, address in leader.told.items():
            links[rank] = self._links.get(address) or self._new_link(address, now_s, out)
            links[rank].leaders.add(leader.address)
        try:
            self._check_rank(leader, 0, leader)
            for rank, link in links.items():
                self._check_rank(leader, rank, link)
            ready = all(
                link.ready and not link.live.suspect(self._timing, now_s) for link in links.values()
            )
            if ready and not leader.planned:
                leader.plan, leader.planned = self._staging_plan(leader, links), True
        except HandshakeError as error:
            self.counters["handshakes_refused"] += 1
            self._refuse_link(leader, error, now_s, out)
            return
        if not ready:
            return
        for key in list(leader.waiting):
            room = self._rooms[key]
            leader.waiting.pop(key, None)
            room.links = links
            for rank, link in links.items():
                assert link.peer is not None
                room.peers[rank] = link.peer
                link.rooms.add(key)
            if leader.plan is not None and isinstance(room.machine, ReceiverMachine):
                assert self.staging is not None
                opened = self.staging.open(
                    room.machine.promise, self._hello.topology.page_size, leader.plan
                )
                self._act_staged(opened, now_s, out)
            self._on(room, receiver.PeerReady(tuple(links)), now_s, out)

    def _check_rank(self, leader: _Link, rank: int, link: _Link) -> None:
        """Raises HandshakeError where another rank answers than the leader said, or one that goes
        another way."""
        if link.ready and link.reply is not None and leader.reply is not None:
            for name, expected in (("rank", rank), ("topology", leader.reply.topology)):
                if getattr(link.reply, name) != expected:
                    raise HandshakeError(
                        name, expected, getattr(link.reply, name), f"of {link.address} differs"
                    )

    def _staging_plan(self, leader: _Link, links: dict[int, _Link]) -> StagingPlan | None:
        """None where nothing is staged. Raises HandshakeError where some of the writers stage, and
        others do not."""
        assert leader.reply is not None
        writers = writers_to(
            leader.reply.topology.mesh(leader.reply.digest), self._mesh, self._hello.rank
        )
        staged = [
            rank for rank in writers if (reply := links[rank].reply) is not None and reply.staged
        ]
        if not staged:
            return None
        if len(staged) < len(writers) or self.staging is None:
            raise HandshakeError("staging", writers, tuple(staged), "is not on for all that write")
        return StagingPlan.of(self._hello, leader.reply)

    def _tick_link(self, link: _Link | None, now_s: float, out: list[Action]) -> None:
        if link is None:
            return
        if not link.rooms and link.live.forgettable(self._timing, now_s):
            self._close_link(link, out)
            return
        if not link.ready and link.hello.take(now_s):
            self._send(link, self._hello, now_s, out)
        elif link.ready and link.live.heartbeat_due(self._timing, now_s):
            self._send(link, messages.Heartbeat(), now_s, out)
        # One who has not answered our Hello gets it again, and no heartbeats.
        next_s = link.live.heartbeat_due_s(self._timing) if link.ready else link.hello.due_s
        self._timers.wake(link.address, next_s)

    def _refuse_link(self, link: _Link, error: Exception, now_s: float, out: list[Action]) -> None:
        leaders = [
            self._links[address] for address in sorted(link.leaders) if address in self._links
        ]
        for leader in dict.fromkeys((link, *leaders)):
            for key in list(leader.waiting):
                self._on(self._rooms[key], receiver.Fail(error), now_s, out)
        if any(link.peer in self._rooms[key].peers.values() for key in link.rooms):
            # It has pages of ours, and its word on them is still wanted: no new rooms, but the link
            # stays.
            if link.ready:
                link.ready = False
                link.hello.start(now_s)
                self._timers.wake(link.address, link.hello.due_s)
        else:
            self._close_link(link, out)

    def _close_link(self, link: _Link, out: list[Action]) -> None:
        # Rooms of an earlier peer that are still undrained keep their (unlinked) link: only a fence
        # can drain them.
        if self._links.get(link.address) is link:
            del self._links[link.address]
            link.peer = None
            self._timers.forget(link.address)
            out.append(Disconnect(link.address))

    def _link_state(self, link: _Link, now_s: float) -> str:
        if not link.ready:
            return "connecting"
        return "suspect" if link.live.suspect(self._timing, now_s) else "ready"

    def _send(self, link: _Link, body: messages.AnyBody, now_s: float, out: list[Action]) -> None:
        link.live.sent_s = now_s
        out.append(SendFrame(link.address, self._stamp.frame(body)))

    # --- rooms ------------------------------------------------------------------------------------

    def _on(self, room: _Room, event: receiver.Event, now_s: float, out: list[Action]) -> None:
        machine = room.machine
        expected = not machine.drained
        for action in machine.on(event, now_s):
            if isinstance(action, Say):
                self._say(room, action.rank, action.body, now_s, out)
            elif self.staging is not None:
                self._act_staged(self.staging.pass_on(action), now_s, out)
            else:
                out.append(action)
        self._expected += (not machine.drained) - expected
        if machine.over:
            self._drop(room)
        else:
            self._timers.wake(machine.key, machine.wake_s)

    def _say(
        self, room: _Room, rank: int, body: messages.AnyBody, now_s: float, out: list[Action]
    ) -> None:
        if room.links[rank].peer == room.peers[rank]:  # whom it is meant for still listens there
            self._send(room.links[rank], body, now_s, out)

    def _drop(self, room: _Room) -> None:
        key = room.machine.key
        del self._rooms[key]
        for link in (room.link, *room.links.values()):
            link.rooms.discard(key)
        room.link.waiting.pop(key, None)
        self._timers.forget(key)
