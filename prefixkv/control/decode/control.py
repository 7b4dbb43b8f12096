"""Decode's control object: what a decode rank can hear, and what it can do about it. Pure.

`DecodeControl.on` takes one input and the time, and returns effects: frames to send, what the
transport and the copy threads have to do, and what became of rooms. It holds the rank's links to
prefill workers (`decode/links.py`) and the rooms that are open on them (`decode/rooms.py`), each a state
machine (`ReceiverMachine`, or a `RefusalMachine` for a room that will not be opened).

What comes in are the cases of `on`. What goes out: SendFrame, Connect and Disconnect for the
sockets, Expect and Settle for the transport, Scatter for the copy threads, RoomEnded, RoomDrained
and RoomOverdue for the scheduler, and PrefillReady, PrefillAway and PrefillLost, of workers that it
asked about (MeetPrefill). `effects.py` has both as types.

It owns what machines cannot know: which incarnation a room was promised to. Only that one's word
counts, since a restarted worker knows nothing of its predecessor's writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import assert_never

from prefixkv.config import ControlConfig
from prefixkv.control import handshake
from prefixkv.control.death_watch import FENCED, FENCED_DEAD
from prefixkv.control.decode.links import Link, Links
from prefixkv.control.decode.rooms import ReceiverRooms
from prefixkv.control.effects import (
    AgentDestroyed,
    ConnectFailed,
    CopyDone,
    Expect,
    FrameFailed,
    FrameReceived,
    Left,
    PeerTried,
    RankDrained,
    Reached,
    Tick,
    Unreached,
)
from prefixkv.control.former_lives import LEFT, Lives
from prefixkv.control.peer_changes import News
from prefixkv.control.rooms import LostPeers, Room, lost_peers
from prefixkv.control.sides import DecodeEffect as DecodeEffect
from prefixkv.control.sides import DecodeInput as DecodeInput
from prefixkv.errors import (
    AbortedError,
    ConfigError,
    FormerLifeError,
    HandshakeError,
    InternalError,
    PeerLostError,
    ProtocolError,
    RequestError,
    TransferError,
    VersionError,
    WeightsVersionError,
)
from prefixkv.protocol import messages
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol.commands import (
    AbortRoom,
    Fence,
    MeetPrefill,
    MoveWeights,
    OpenRoom,
    RefuseRoom,
)
from prefixkv.protocol.events import (
    PrefillAway,
    PrefillLost,
    PrefillReady,
    RoomDrained,
    RoomEnded,
)
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import (
    Drained,
    Frame,
    Heartbeat,
    Hello,
    HelloReply,
    HelloWanted,
    LeaseAsk,
    Outcome,
    OutcomeAck,
    PromiseAck,
)
from prefixkv.protocol.receiver_machine import ReceiverMachine
from prefixkv.protocol.refusal_machine import RefusalMachine
from prefixkv.protocol.tags import ChunkTag
from prefixkv.protocol.timers import Timers
from prefixkv.staging.receiver import StagingReceiver
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    Settled,
    WriteDone,
    WriteDrained,
    WriteFailed,
)


class DecodeControl:
    """See the module's text. Owned by one thread, but for `peers`, `lost_peers` and `num_rooms`.

    Args:
        me: this rank's identity.
        hello: what it says of itself.
        option_names: as of `ModelConfig`.
        born_s: when this life of the worker began, on the clock of `on`; None on other ranks than
            0, and where it is not to be said.
    """

    def __init__(
        self,
        me: PeerId,
        hello: Hello,
        timing: ControlConfig,
        option_names: Mapping[str, str] | None = None,
        born_s: float | None = None,
    ) -> None:
        self.me = me
        self._option_names = option_names or {}
        self.counters: Counter[str] = Counter()
        self.news = News()
        self.staging = None if hello.staging is None else StagingReceiver(hello.staging)
        self._page_size = hello.topology.page_size
        self._timing = timing
        self._timers: Timers[str | RoomKey] = Timers()  # links by address, rooms by key
        known = timing, self._timers, self.news, self.lost_peers
        self._links = Links(me, hello, *known, born_s)
        parts = self._timers, self._links, self.staging, self.news
        self._rooms = ReceiverRooms(timing, *parts, self._option_names)
        self._lives = Lives(self.news)
        self._met: dict[str, bool] = {}  # by address: what was said last to whoever asked
        self._said_expected = 0
        # Of the last `on`, those before an exception too.
        self.last_effects: list[DecodeEffect] = []

    def on(self, what: DecodeInput, now_s: float) -> list[DecodeEffect]:
        """Take one input; returns what to do about it, in order."""
        out = self.last_effects = []
        match what:
            case OpenRoom():
                self._open(what, now_s, out)
            case MeetPrefill():
                self._meet_worker(what.address, now_s, out)
            case RefuseRoom():
                self._refuse(what, now_s, out)
            case AbortRoom():
                self._abort(what, now_s, out)
            case MoveWeights():
                self._move_weights(what, now_s, out)
            case Fence(peer, proved):
                if self._links.deaths.fenced(peer) and proved:
                    self.counters["peers_proved_dead"] += 1
                self._fence(peer, FENCED_DEAD if proved else FENCED, now_s, out)
            case FrameReceived():
                self._frame(what, now_s, out)
            case FrameFailed():
                self._frame_failed(what, now_s, out)
            case Arrived():
                self._arrived(what.tag, now_s, out)
            case Settled():
                self._rooms.settled(what.token, now_s, out)
            case WriteDone() | WriteFailed() | WriteDrained() | PeerTried():
                raise InternalError(f"decode writes nothing, and hears {what}")
            case PeerUnreachable():
                self.counters["peers_unreachable"] += 1
            case CopyDone():
                self._scattered(what, now_s, out)
            case ConnectFailed():
                link = self._links.get(what.address)
                if link is not None:
                    self._refuse_link(link, what.error, now_s, out)
            case Reached() | Unreached():
                self._links.heard_of(what, now_s)
            case Tick():
                self._tick(now_s, out)
            case AgentDestroyed():
                out += self._links.farewell()
            case _:
                assert_never(what)
        while changed := self._links.take_changed():
            self._say_workers(changed, now_s, out)
        if self._rooms.num_expected != self._said_expected:
            self._said_expected = self._rooms.num_expected
            out.append(Expect(self._rooms.num_expected))
        return out

    @property
    def wake_s(self) -> float:
        """When the next Tick is wanted, infinity if never."""
        return min(self._timers.next_s, self._links.deaths.due_s)

    @property
    def num_expected(self) -> int:
        """Rooms whose pages a peer may be writing now."""
        return self._rooms.num_expected

    @property
    def num_rooms(self) -> int:
        """Rooms that are open, or not drained yet. Any thread may ask."""
        return len(self._rooms)

    def rooms(self) -> Iterable[ReceiverMachine]:
        """The machines of all open or undrained rooms, for audits."""
        machines = [room.machine for room in self._rooms.all()]
        return [machine for machine in machines if isinstance(machine, ReceiverMachine)]

    def poll(self, key: RoomKey) -> KVPoll | None:
        """How far a room is; None once it has ended and is drained."""
        room = self._rooms.get(key)
        return None if room is None else room.machine.poll

    def peers(self, now_s: float) -> dict[str, tuple[PeerId | None, str]]:
        """By address: what answers there, and "ready", "suspect" or "connecting". Any thread may
        ask."""
        return self._links.peers(now_s)

    def lost_peers(self, now_s: float) -> LostPeers:
        """Prefill processes that are suspect or over, what is wrong with each, and how many pages
        it may still write. Any thread may ask."""

        def wrong(peer: PeerId, link: Link) -> str:
            return self._lives.how(peer) or self._links.wrong(link, peer, now_s)

        return lost_peers(self._rooms.all(), wrong)

    # --- commands ---------------------------------------------------------------------------------

    def _open(self, command: OpenRoom, now_s: float, out: list[DecodeEffect]) -> None:
        machine = ReceiverMachine(command.promise, self._timing, now_s, command.address)
        try:
            self._enter(machine, command.address, now_s, out, command.digest)
        except RequestError as error:  # no peer has been told of the pages
            out += [RoomEnded(machine.key, KVPoll.FAILED, error), RoomDrained(machine.key)]

    def _meet_worker(self, address: str, now_s: float, out: list[DecodeEffect]) -> None:
        out += self._links.open(address, now_s)
        self._met[address] = False  # so that what is so now is said, though it was said before
        link = self._links.get(address)
        assert link is not None
        self._links.note_change(link)

    def _refuse(self, command: RefuseRoom, now_s: float, out: list[DecodeEffect]) -> None:
        machine = RefusalMachine(command.key, command.ticket, command.reason, self._timing, now_s)
        self._enter(machine, command.address, now_s, out, command.digest)

    def _enter(
        self,
        machine: ReceiverMachine | RefusalMachine,
        address: str,
        now_s: float,
        out: list[DecodeEffect],
        digest: bytes = b"",
    ) -> None:
        """Raises RequestError if the room is open."""
        key = machine.key
        known = self._rooms.get(key)
        if known is not None:
            if not isinstance(known.machine, RefusalMachine) or known.machine.is_news:
                raise RequestError(f"room {key.room} generation {key.generation} is open already")
            self._rooms.drop(known)  # the number is in use again
        out += self._links.open(address, now_s)
        link = self._links.get(address)
        assert link is not None
        self._rooms.add(Room(machine, link, digest))
        self._promote(link, now_s, out)

    def _abort(self, command: AbortRoom, now_s: float, out: list[DecodeEffect]) -> None:
        room = self._rooms.get(command.key)
        if room is not None and isinstance(room.machine, ReceiverMachine):
            self._give_up(room, room.machine, AbortedError(command.reason), now_s, out)

    def _move_weights(self, command: MoveWeights, now_s: float, out: list[DecodeEffect]) -> None:
        """KV that was computed under another version is not taken any more."""
        now = command.weights_version
        for room in self._rooms.all():
            machine = room.machine
            if isinstance(machine, ReceiverMachine) and not machine.poll.ended:
                was = machine.promise.weights_version
                if was != now:
                    self._give_up(room, machine, WeightsVersionError(was, now), now_s, out)

    def _give_up(
        self,
        room: Room,
        machine: ReceiverMachine,
        error: TransferError,
        now_s: float,
        out: list[DecodeEffect],
    ) -> None:
        """End a room from our side, and let prefill know."""
        self._rooms.on(room, receiver.Fail(error), now_s, out)
        if not room.peers:
            # Prefill has not heard of the room, but may have the request, and wait. Its answer is
            # no news here.
            versions = error.versions if isinstance(error, WeightsVersionError) else None
            what = machine.key, machine.ticket, str(error)
            refusal = RefusalMachine(*what, self._timing, now_s, is_news=False, versions=versions)
            self._enter(refusal, room.link.address, now_s, out, room.digest)

    def _fence(self, peer: PeerId, how: str, now_s: float, out: list[DecodeEffect]) -> None:
        """This incarnation can write no more: its rooms end now, and are drained soon after.

        Not at once: over TCP the kernels may still hold what it sent before, and that lands as our
        own transport reads it. So rooms stay undrained until it has been at that for
        `fence_settle_s`.
        """
        self._lives.end(peer, how)
        self._rooms.fail_of(peer, PeerLostError(f"{peer} {how}", peer), now_s, out)
        for link in self._links.all():
            if link.peer == peer:
                self._links.lost(link, None, now_s)
                out += self._links.greet(link, now_s)
        self._rooms.settle(peer, now_s, out)

    # --- what the transport and the copies say ----------------------------------------------------

    def _arrived(self, raw_tag: bytes, now_s: float, out: list[DecodeEffect]) -> None:
        """A notification. A late, double or foreign one does no harm; a room that lacks one does
        not succeed."""
        try:
            tag = ChunkTag.unpack(raw_tag)
        except ProtocolError:
            self.counters["tags_dropped"] += 1
            return
        room = self._rooms.get(RoomKey(tag.room, tag.generation))
        peer = None if room is None else room.peers.get(tag.rank)
        if room is None or peer is None or peer.incarnation != tag.incarnation:
            self.counters["tags_dropped"] += 1
            return
        if tag.lease_id < 0:
            landed = receiver.ChunkLanded(*tag[3:7], num_units=tag.num_pages)
            self._rooms.on(room, landed, now_s, out)
        elif self.staging is not None:
            self._rooms.staged(self.staging.on_arrival(tag), now_s, out)

    def _scattered(self, done: CopyDone, now_s: float, out: list[DecodeEffect]) -> None:
        if self.staging is not None:
            self._rooms.staged(self.staging.on_scattered(done.copy_id, done.error), now_s, out)

    def _tick(self, now_s: float, out: list[DecodeEffect]) -> None:
        def look(key: str | RoomKey) -> None:
            if isinstance(key, str):
                out.extend(self._links.tick(key, now_s))
                if (link := self._links.get(key)) and (why := self._links.gone(link, now_s)):
                    self._refuse_link(link, why, now_s, out)
            elif (room := self._rooms.get(key)) is not None:
                self._rooms.on(room, receiver.Tick(room.heard_s), now_s, out)

        self._timers.visit(now_s, look)
        out += self._links.deaths.tick(now_s)

    # --- frames -----------------------------------------------------------------------------------

    def _frame(self, received: FrameReceived[str], now_s: float, out: list[DecodeEffect]) -> None:
        """What is malformed, stale or foreign is counted and dropped."""
        link = self._links.get(received.source)
        try:
            frame = messages.decode(received.raw)
            if link is None:
                raise ProtocolError("a frame on a closed link")
            link.is_local = received.is_local
            self._take(link, frame, now_s, out)
        except ProtocolError as error:
            self.counters["frames_dropped"] += 1
            self.counters[f"dropped: {type(error).__name__}"] += 1
            if isinstance(error, VersionError) and link is not None and link.peer is None:
                self.counters["handshakes_refused"] += 1
                refused = HandshakeError("protocol version", error.ours, error.theirs)
                self._refuse_link(link, refused, now_s, out)

    def _frame_failed(self, what: FrameFailed[str], now_s: float, out: list[DecodeEffect]) -> None:
        """The room that the frame names ends, if it is promised to its sender."""
        self.counters["frames_failed"] += 1
        frame = messages.decode(what.frame.raw)
        if isinstance(frame.body, messages.RoomBody):
            room = self._rooms.get(frame.body.key)
            if room is not None and room.ranks_of(frame.sender, what.frame.source):
                error = ProtocolError(f"a {type(frame.body).__name__} raised {what.error!r}")
                self._rooms.on(room, receiver.Fail(error), now_s, out)

    def _take(self, link: Link, frame: Frame, now_s: float, out: list[DecodeEffect]) -> None:
        body = frame.body
        if isinstance(body, HelloReply | HelloWanted):
            self._meet(link, frame, body, now_s, out)
            return
        if frame.sender != link.peer:
            raise ProtocolError(f"a frame of {frame.sender}, {link.peer} is known here")
        link.live.take(frame, now_s)
        match body:
            case Outcome():
                self._take_outcome(link, body, now_s, out)
            case PromiseAck():
                self._to_room(link, body, receiver.PromiseAcked(body.rank), now_s, out)
            case Drained():
                self._take_drained(link, body, now_s, out)
            case LeaseAsk():
                self._take_ask(link, body, now_s, out)
            case messages.Fenced():
                self._take_farewell(link, frame.sender, now_s, out)
            case Heartbeat():
                pass
            case (
                messages.Hello() | messages.HelloRefused() | messages.Promise() | messages.Abort()
                | OutcomeAck() | messages.LeaseGrant()
            ):  # fmt: skip
                raise ProtocolError(f"{type(body).__name__} is not for decode")
            case _:
                assert_never(body)
        self._promote(link, now_s, out)  # it speaks, so it is suspect no more

    def _take_outcome(
        self, link: Link, outcome: Outcome, now_s: float, out: list[DecodeEffect]
    ) -> None:
        room = self._rooms.get(outcome.key)
        if room is None or room.machine.ticket != outcome.ticket:
            # That use of the room has ended and is drained here: only the acknowledgement was lost.
            ack = OutcomeAck(outcome.room, outcome.generation, outcome.rank, outcome.ticket)
            out.append(self._links.send(link, ack, now_s))
        else:
            self._to_room(link, outcome, receiver.OutcomeSaid(outcome), now_s, out)
            if isinstance(room.machine, ReceiverMachine) and room.machine.awaits_notifications:
                # They came with the bytes, before the outcome: let the transport look at once.
                self._said_expected = -1

    def _take_drained(
        self, link: Link, drained: Drained, now_s: float, out: list[DecodeEffect]
    ) -> None:
        room = self._room_of(link, drained)
        if room is not None and drained.settle and room.machine.poll.ended:
            self._rooms.settle(
                RankDrained(room.machine.key, drained.rank, drained.ticket), now_s, out
            )
        elif room is not None:
            self._rooms.on(room, receiver.DrainedSaid(drained.rank), now_s, out)

    def _take_ask(self, link: Link, ask: LeaseAsk, now_s: float, out: list[DecodeEffect]) -> None:
        room = self._room_of(link, ask)
        if room is None:
            return
        if self.staging is None:
            raise ProtocolError("a lease is asked for where there is no staging")
        try:
            self._rooms.staged(self.staging.on_ask(ask.rank, ask), now_s, out)
        except ProtocolError as error:
            self._rooms.on(room, receiver.Fail(error), now_s, out)
            raise

    def _to_room(
        self,
        link: Link,
        body: Outcome | PromiseAck,
        event: receiver.Event,
        now_s: float,
        out: list[DecodeEffect],
    ) -> None:
        room = self._room_of(link, body)
        if room is not None:
            self._rooms.on(room, event, now_s, out)

    def _room_of(self, link: Link, body: Outcome | PromiseAck | Drained | LeaseAsk) -> Room | None:
        """The room that this is a word of, None if it is over. Raises ProtocolError for
        another's."""
        room = self._rooms.get(body.key)
        if room is None:
            return None
        if link.peer is None or room.peers.get(body.rank) != link.peer:
            raise ProtocolError(
                f"room {body.room} was promised to {room.peers}, {link.peer} speaks as {body.rank}"
            )
        if room.machine.ticket != body.ticket:
            raise ProtocolError(f"a word of an earlier use of room {body.room}")
        return room

    # --- prefill workers --------------------------------------------------------------------------

    def _meet(
        self,
        link: Link,
        frame: Frame,
        body: HelloReply | HelloWanted,
        now_s: float,
        out: list[DecodeEffect],
    ) -> None:
        """A HelloReply, or a worker that does not know us (it was restarted, or has forgotten)."""
        try:
            self._lives.check(frame.sender)
        except FormerLifeError as error:  # if it lives, it is to know
            out += self._links.refuse(link, frame.sender, body, error, now_s)
            raise
        is_other = frame.sender != link.peer
        if not is_other:
            link.live.take(frame, now_s)
        if isinstance(body, HelloWanted) or (is_other and body.known != link.known):
            # What does not answer our present Hello may be late: it takes nothing's place.
            nonce = body.nonce if isinstance(body, HelloWanted) else 0
            out += self._links.wanted(link, nonce, now_s)
            return
        if is_other:
            self._lose_peer(link, frame.sender, now_s, out)
            link.live.in_seq = 0
            link.live.take(frame, now_s)
        try:
            self._links.accept(link, frame, body, now_s)
        except (HandshakeError, ConfigError) as refused:
            self._refuse_peer(link, frame.sender, body, refused, now_s, out)
            return
        if is_other:
            self.news.say("met", frame.sender, f"at {link.address}")
        self._promote(link, now_s, out)

    def _lose_peer(self, link: Link, newer: PeerId, now_s: float, out: list[DecodeEffect]) -> None:
        """Another process answers at this address: whatever was promised to the one before has
        ended."""
        lost = self._links.lost(link, newer, now_s)
        if lost is None:
            return
        if lost.name == newer.name and not self._is_elsewhere(lost, link):
            self._lives.supersede(lost, newer)
        else:
            self.news.say("over", lost, f"was replaced by {newer}")
        error = PeerLostError(f"{lost} was replaced by {newer}", lost)
        self._rooms.fail_of(lost, error, now_s, out, link.address)

    def _take_farewell(
        self, link: Link, peer: PeerId, now_s: float, out: list[DecodeEffect]
    ) -> None:
        """What answers here can write no more. That ends what was promised here: a process may
        answer under any name, so its word proves nothing of what answers elsewhere."""
        if not self._is_elsewhere(peer, link):
            self._links.deaths.fenced(peer)
            self._lives.end(peer, LEFT)
        error = PeerLostError(f"{peer} {LEFT}", peer)
        self._rooms.fail_of(peer, error, now_s, out, link.address)
        self._links.lost(link, None, now_s)
        out += self._links.greet(link, now_s)
        self._rooms.settle(Left(peer, link.address), now_s, out)

    def _is_elsewhere(self, peer: PeerId, link: Link) -> bool:
        """Whether another address is this process's too, or the name is borrowed here."""
        return any(other.peer == peer for other in self._links.all() if other is not link)

    def _promote(self, link: Link, now_s: float, out: list[DecodeEffect]) -> None:
        """A rank is there and answers: promise the pages of the rooms that waited only for that."""
        for leader in self._links.leaders(link):
            if leader.waiting and leader.ready:
                self._promote_rooms(leader, now_s, out)
            if self._met.get(leader.address) is False:
                self._links.note_change(leader)

    def _ranks_ready(
        self, leader: Link, now_s: float, out: list[DecodeEffect]
    ) -> dict[int, Link] | None:
        """The ranks that rooms of this leader are promised to, if all of them answer."""
        links, opened = self._links.told(leader, now_s)
        out += opened
        try:
            return links if self._links.ready(leader, links, now_s) else None
        except HandshakeError as refused:
            self._refuse_peer(leader, leader.peer, leader.reply, refused, now_s, out)
            return None

    def _say_workers(self, changed: set[str], now_s: float, out: list[DecodeEffect]) -> None:
        """Tell the scheduler which of the workers that it asked about answer now, and which do so
        no more."""
        for address in sorted(changed & self._met.keys()):
            leader = self._links.get(address)
            if leader is None:
                silent = PeerLostError(f"prefill worker {address} was silent for long")
                self._lose_worker(address, silent, out)
                continue
            is_ready = leader.ready and self._ranks_ready(leader, now_s, out) is not None
            if self._met.get(address) is (not is_ready):  # it may have been refused just now
                self._met[address] = is_ready
                most = self._links.max_tokens(leader) if is_ready else 0
                out.append(PrefillReady(address, most) if is_ready else PrefillAway(address))

    def _lose_worker(self, address: str, error: Exception, out: list[DecodeEffect]) -> None:
        if self._met.pop(address, None) is not None:
            out.append(PrefillLost(address, error))

    def _promote_rooms(self, leader: Link, now_s: float, out: list[DecodeEffect]) -> None:
        links = self._ranks_ready(leader, now_s, out)
        if links is None:
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
                promise = room.machine.promise
                staged = self.staging.open(promise, self._page_size, leader.plan)
                self._rooms.staged(staged, now_s, out)
            self._rooms.on(room, receiver.PeerReady(tuple(links)), now_s, out)

    def _refuse_peer(
        self,
        link: Link,
        life: PeerId | None,
        reply: HelloReply | HelloWanted | None,
        refused: HandshakeError | ConfigError,
        now_s: float,
        out: list[DecodeEffect],
    ) -> None:
        """A rank that answered does not fit: it is told, and so are the rooms that wait for it."""
        error = handshake.named(refused, self._option_names)
        self.counters["handshakes_refused"] += 1
        if life is not None:
            out += self._links.refuse(link, life, reply, error, now_s)
        self._refuse_link(link, error, now_s, out)

    def _refuse_link(
        self, link: Link, error: Exception, now_s: float, out: list[DecodeEffect]
    ) -> None:
        """The rooms that wait for this rank fail, those of its leaders too."""
        kind = "lost" if isinstance(error, PeerLostError) else "refused"
        self.news.say(kind, link.peer or link.address, str(error))
        for leader in dict.fromkeys((link, *self._links.leaders(link))):
            for key in list(leader.waiting):
                self._rooms.on(self._rooms[key], receiver.Fail(error), now_s, out)
            self._lose_worker(leader.address, error, out)
        if any(link.peer in self._rooms[key].peers.values() for key in link.rooms):
            self._links.suspend(link, now_s)  # it has pages of ours
        else:
            out += self._links.close(link, now_s)
