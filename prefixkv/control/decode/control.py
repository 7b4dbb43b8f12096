"""All inputs that a decode rank takes, and the effects that follow. Pure.

`DecodeControl.on` takes one input and the time, and returns effects (`effects.py`). It holds the
links to prefill workers (`links.py`) and the rooms (`rooms.py`), each a `ReceiverMachine`; a room
that will not be opened is one without pages. It knows what machines cannot: the incarnation that a
room was promised to. Frames of another incarnation do not count, since a restarted worker knows
nothing of earlier writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, assert_never

from prefixkv.config import ControlConfig
from prefixkv.control import handshake
from prefixkv.control.decode.links import Link, Links
from prefixkv.control.decode.rooms import Landings, ReceiverRooms, Room, lost_peers
from prefixkv.control.effects import (
    RELAYS,
    AgentDestroyed,
    ConnectFailed,
    CopyDone,
    Expect,
    FrameFailed,
    FrameReceived,
    LeadersChanged,
    Left,
    Reached,
    Tick,
    Unreached,
)
from prefixkv.control.effects import DecodeEffect as DecodeEffect
from prefixkv.control.effects import DecodeInput as DecodeInput
from prefixkv.control.inbox import ControlInbox
from prefixkv.control.lives import FENCED, FENCED_DEAD, LEFT, IncarnationHistory, LostPeers
from prefixkv.errors import (
    AbortedError,
    ConfigError,
    FormerLifeError,
    HandshakeError,
    InternalError,
    PeerLostError,
    ProtocolError,
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
    RoomEnded,
)
from prefixkv.protocol.ids import SUM_BYTES, ChunkTag, PeerId, RoomKey
from prefixkv.protocol.machine import Fail, RoomTick
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
    Promise,
    PromiseAck,
)
from prefixkv.protocol.receiver_machine import ReceiverMachine
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    Settled,
)


class DecodeControl(ControlInbox[DecodeInput, DecodeEffect]):
    """The control object of one decode rank. Owned by the control thread; other threads may call
    `peers`, `lost_peers` and `num_rooms` only.

    `hello` is what it says of itself in the handshake. `born_s` is when this life of the worker
    began, on the clock of `on`; None on ranks other than 0, and where it is not to be said.
    """

    landings: ClassVar[type[Landings]] = Landings  # `assembly.py` may put another here

    def __init__(
        self,
        me: PeerId,
        hello: Hello,
        timing: ControlConfig,
        option_names: Mapping[str, str] | None = None,
        born_s: float | None = None,
    ) -> None:
        super().__init__(me, timing, option_names)
        area = hello.relay
        self.relay = None if area is None else RELAYS[0].receiver(area, self.say)
        self._page_size = hello.topology.page_size
        self._links = Links(hello, self, born_s)
        self._rooms = ReceiverRooms(self, self._links, self.relay)
        self._landings = self.landings(self._rooms, self, self._page_size)
        self._lives = IncarnationHistory(self.news)
        # By address that the scheduler asked about: was PrefillReady the last answer?
        self._asked_workers: dict[str, bool] = {}
        # The number in the last Expect; -1 forces the next one.
        self._said_expected = 0

    def _next(self) -> Any:
        if self._todo:
            return self._todo.popleft()
        # Two answers depend on the state after an input, not on it. Asking whether a worker is
        # ready may change links itself, so until nothing changes.
        if changed := self._links.changed:
            self._links.changed = set()
            return LeadersChanged(changed)
        # Last, so that an input which closes one room and opens another says it once.
        if self._rooms.num_expected != self._said_expected:
            self._said_expected = self._rooms.num_expected
            return Expect(self._rooms.num_expected)
        return None

    @property
    def wake_s(self) -> float:
        """Time at which the next Tick is wanted, infinity if never."""
        return min(self.timers.next_s, self._links.watch.due_s)

    @property
    def num_rooms(self) -> int:
        """Number of rooms that are open or not drained yet. Any thread may ask."""
        return len(self._rooms)

    def rooms(self) -> Iterable[ReceiverMachine]:
        """Return the machines of all open or undrained rooms, for audits."""
        return [room for room in self._rooms.all() if not (room.poll.ended and room.drained)]

    def peers(self, now_s: float) -> dict[str, tuple[PeerId | None, str]]:
        """Return, by address, which process answers there, and "ready", "suspect" or "connecting".
        Any thread may ask."""
        return self._links.peers(now_s)

    def lost_peers(self, now_s: float) -> LostPeers:
        """Return the prefill processes that are suspect or over, what is wrong with each, and how
        many pages it may still write. Any thread may ask."""

        def wrong(peer: PeerId, link: Link) -> str:
            return self._lives.how(peer) or self._links.trouble(link, peer, now_s)

        return lost_peers(self._rooms.all(), wrong)

    # --- commands ---------------------------------------------------------------------------------

    def _watch_worker(self, command: MeetPrefill, now_s: float) -> None:
        """Report once whether a worker that the scheduler asks about answers."""
        address = command.address
        link = self._links.open(address, now_s)
        # So that the present state is reported, though it was before.
        self._asked_workers[address] = False
        self._links.note_change(link)

    def _enter(self, command: OpenRoom | RefuseRoom, now_s: float) -> None:
        """Let a room wait at its leader's link, until the prefill worker answers. Raise
        InternalError if its number is in use: an event with this key would be taken for one of the
        room that has it, whose pages may still be written."""
        refused: TransferError | None = None
        if isinstance(command, OpenRoom):
            promise = command.promise
        else:
            what = *command.key.numbers, 0, 0, b"", command.ticket, command.digest
            promise, refused = Promise(*what), AbortedError(command.reason)
        known = self._rooms.get(promise.key)
        if known is not None:
            if not known.is_only_owed:
                room, generation = promise.key.numbers
                raise InternalError(f"room {room} generation {generation} is open already")
            self._rooms.drop(known)  # the number is in use again
        link = self._links.open(command.address, now_s)
        # The room must be at its link before the link is looked at, or it would wait for the next
        # frame.
        opened = self._rooms[promise.key] = Room(promise, link, self.timing, now_s, refused)
        link.waiting.append(opened)
        self.timers.wake(opened.key, opened.wake_s)
        self._promote(link, now_s)

    def _abort(self, command: AbortRoom, now_s: float) -> None:
        """Unknown or ended: no-op."""
        room = self._rooms.get(command.key)
        if room is not None and not room.poll.ended:
            self._rooms.on(room, Fail(command.error), now_s)

    def _move_weights(self, command: MoveWeights, now_s: float) -> None:
        """End the rooms of another version, whose KV is not taken any more."""
        now = command.weights_version
        for room in self._rooms.all():
            if not room.poll.ended and (was := room.promise.weights_version) != now:
                self._rooms.on(room, Fail(WeightsVersionError(was, now)), now_s)

    def _fence(self, command: Fence, now_s: float) -> None:
        """End the rooms of a process that can write no more, and drain them soon after. Not at
        once: over TCP kernels may hold what it sent before, which lands as our own transport reads
        it for `fence_settle_s`."""
        peer, how = command.peer, FENCED_DEAD if command.proved else FENCED
        # Before links lose it, which has it examined.
        if self._links.watch.fenced(peer) and command.proved:
            self.counters["peers_proved_dead"] += 1
        # 1. Over first: what ends below may send frames, and answers of this life must not count.
        self._lives.end(peer, how)
        self._rooms.fail_of(peer, PeerLostError(f"{peer} {how}", peer), now_s)
        # 2. Its links are free for another life.
        for link in self._links.all():
            if link.peer == peer:
                self._links.replace_peer(link, None, now_s)
                self._links.greet(link, now_s)
        # 3. The pages last: with `fence_settle_s` 0 they are drained at once, and a room has to end
        # before it is drained.
        self._rooms.settle(peer, now_s)

    # --- what the transport and the copies say ----------------------------------------------------

    def _arrived(self, arrived: Arrived, now_s: float) -> None:
        """A part of a write has landed. Late, repeated and foreign notifications are counted and
        dropped: nothing is freed by a notification, and a room that lacks one does not succeed."""
        try:
            tag = ChunkTag.unpack(arrived.tag)
        except ProtocolError:
            self.counters["tags_dropped"] += 1
            return
        # The tag is a peer's word: it counts only from the incarnation that the room was promised
        # to, and for the use of its number that it was written for: it may have been overtaken by
        # the Drained of that use.
        room = self._rooms.get(RoomKey(tag.room, tag.generation))
        peer = None if room is None else room.peers.get(tag.rank)
        if (
            room is None
            or peer is None
            or peer.incarnation != tag.incarnation
            or room.ticket != tag.ticket
        ):
            self.counters["tags_dropped"] += 1
            return
        if tag.sums:
            self.counters["checksums"] += len(tag.sums) // SUM_BYTES
        # Straight into our pages; or into a lease, from where it is to be scattered.
        if tag.lease_id < 0:
            self._landings.on_landed(room, tag, now_s)
        elif self.relay is not None:
            self.relay.on_arrival(tag)

    def _scattered(self, done: CopyDone, now_s: float) -> None:
        if self.relay is not None:
            self.relay.on_scattered(done.copy_id, done.error)

    def _tick(self, tick: Tick, now_s: float) -> None:
        def look(key: str | RoomKey) -> None:
            if isinstance(key, str):
                self._links.tick(key, lambda link: bool(self._rooms.at(link)), now_s)
                # No connection for too long: the rooms that wait there fail.
                link = self._links.get(key)
                if link and (why := self._links.gone(link, self._lives.how, now_s)):
                    self._refuse_link(link, why, now_s)
            elif (room := self._rooms.get(key)) is not None:
                self._rooms.on(room, RoomTick(room.heard_s), now_s)

        self.timers.visit(now_s, look)
        self._links.watch.tick(now_s)

    # --- frames -----------------------------------------------------------------------------------

    def _frame(self, received: FrameReceived[str], now_s: float) -> None:
        """Malformed, stale and foreign frames are counted and dropped."""
        link = self._links.get(received.source)
        try:
            frame = messages.decode(received.raw)
            if link is None:
                raise ProtocolError("a frame on a closed link")
            link.is_local = received.is_local
            self._take(link, frame, now_s)
        except ProtocolError as error:
            self.counters["frames_dropped"] += 1
            self.counters[f"dropped: {type(error).__name__}"] += 1
            # A worker of another version that has never answered never will: the rooms that wait
            # for it fail now.
            if isinstance(error, VersionError) and link is not None and link.peer is None:
                self.counters["handshakes_refused"] += 1
                refused = HandshakeError("protocol version", error.ours, error.theirs)
                self._refuse_link(link, refused, now_s)

    def _frame_failed(self, what: FrameFailed[str], now_s: float) -> None:
        """End the room that a frame names, after an exception. Only if it was promised to the
        sender, so that no peer can end rooms of another."""
        self.counters["frames_failed"] += 1
        frame = messages.decode(what.frame.raw)
        if isinstance(frame.body, messages.RoomBody):
            room = self._rooms.get(frame.body.key)
            is_of = room is not None and room.ticket == frame.body.ticket
            if room is not None and is_of and room.ranks_of(frame.sender, what.frame.source):
                error = ProtocolError(f"a {type(frame.body).__name__} raised {what.error!r}")
                self._rooms.on(room, Fail(error), now_s)

    def _take(self, link: Link, frame: Frame, now_s: float) -> None:
        body = frame.body
        # 1. A handshake may come from a process that is to replace the peer.
        if isinstance(body, HelloReply | HelloWanted):
            self._on_handshake(link, frame, body, now_s)
            return
        # 2. Anything else counts only from the process that answers here, and only in order.
        if frame.sender != link.peer:
            raise ProtocolError(f"a frame of {frame.sender}, {link.peer} is known here")
        link.live.take(frame, now_s)
        # 3. By type. What is for prefill is refused by name, so that a new type is not forgotten
        # here.
        match body:
            case Outcome():
                room = self._rooms.get(body.key)
                if room is None or room.ticket != body.ticket:
                    # That use of the room has ended and is drained here; only the acknowledgement
                    # was lost. Without one, prefill would repeat itself until its `ack_timeout_s`.
                    ack = OutcomeAck(body.room, body.generation, body.rank, body.ticket)
                    self._links.send(link, ack, now_s)
                elif self._room_of(link, body) is not None:
                    self._rooms.on(room, body, now_s)
                    if room.awaits_notifications:
                        # The notifications came with the bytes, before the outcome, so they are
                        # there: make the transport look at once, by another Expect.
                        self._said_expected = -1
            case PromiseAck():
                if (room := self._room_of(link, body)) is not None:
                    self._rooms.on(room, body, now_s)
            case Drained():
                self._take_drained(link, body, now_s)
            case LeaseAsk():
                self._take_ask(link, body, now_s)
            case messages.Fenced():
                self._take_farewell(link, frame.sender, now_s)
            case Heartbeat():
                pass
            case (
                messages.Hello() | messages.HelloRefused() | messages.Promise() | messages.Abort()
                | OutcomeAck() | messages.LeaseGrant()
            ):  # fmt: skip
                raise ProtocolError(f"{type(body).__name__} is not for decode")
            case _:
                assert_never(body)
        # It speaks, so it is suspect no more, and rooms may have waited for that.
        self._promote(link, now_s)

    def _take_drained(self, link: Link, drained: Drained, now_s: float) -> None:
        """A rank no longer writes the room; let settle first if it asks for that."""
        room = self._room_of(link, drained)
        # Only once the room has ended: until then its pages are in use, and nothing is freed.
        if room is not None and drained.settle and room.poll.ended:
            self._rooms.settle(drained, now_s)
        elif room is not None:
            self._rooms.on(room, drained, now_s)

    def _take_ask(self, link: Link, ask: LeaseAsk, now_s: float) -> None:
        """A request for a lease that cannot be honest ends the room."""
        room = self._room_of(link, ask)
        if room is None:
            return
        if self.relay is None:
            raise ProtocolError("a lease is asked for where there is no staging")
        try:
            self.relay.on_ask(ask.rank, ask)
        except ProtocolError as error:  # and the frame is counted as dropped
            self._rooms.on(room, Fail(error), now_s)
            raise

    def _room_of(self, link: Link, body: Outcome | PromiseAck | Drained | LeaseAsk) -> Room | None:
        """None if the room is over. Raises ProtocolError if it was not promised to the sender as
        this rank, or the frame is about an earlier use of the number."""
        room = self._rooms.get(body.key)
        if room is None:
            return None
        # A process may say any rank: it must be the very one that was promised the pages as this
        # rank.
        if link.peer is None or room.peers.get(body.rank) != link.peer:
            raise ProtocolError(
                f"room {body.room} was promised to {room.peers}, {link.peer} speaks as {body.rank}"
            )
        if room.ticket != body.ticket:
            raise ProtocolError(f"a word of an earlier use of room {body.room}")
        return room

    # --- prefill workers --------------------------------------------------------------------------

    def _on_handshake(
        self,
        link: Link,
        frame: Frame,
        body: HelloReply | HelloWanted,
        now_s: float,
    ) -> None:
        """A HelloReply, or the HelloWanted of a rank that was restarted, or has forgotten us."""
        # 1. A life that is over gets no second chance. If it lives, it has to know that.
        try:
            self._lives.check(frame.sender)
        except FormerLifeError as error:
            self._links.refuse(link, frame.sender, body, error, now_s)
            raise
        is_other = frame.sender != link.peer
        # 2. Of the peer that is known: its frames are counted in order.
        if not is_other:
            link.live.take(frame, now_s)
        # 3. A reply that does not answer our present Hello may be late, sent by a process that is
        # gone: it replaces nothing. The rank gets another Hello.
        if isinstance(body, HelloWanted) or (is_other and body.known != link.known):
            nonce = body.nonce if isinstance(body, HelloWanted) else 0
            self._links.on_hello_wanted(link, nonce, now_s)
            return
        # 4. Another process has proved that it answers now: it replaces the one before, and its
        # numbers begin again.
        if is_other:
            self._lose_peer(link, frame.sender, now_s)
            link.live.in_seq = 0
            link.live.take(frame, now_s)
        # 5. Its word on itself must fit. A refused rank stays the link's peer and is not ready.
        try:
            self._links.accept(link, frame, body, now_s)
        except (HandshakeError, ConfigError) as refused:
            self._refuse_peer(link, frame.sender, body, refused, now_s)
            return
        # 6. Reported once per process. Then the rooms that waited for it are promised.
        if is_other:
            self.news.say("met", frame.sender, f"at {link.address}")
            if self._links.offers_checksums and not body.checksum:
                self.news.say("unchecked", frame.sender, "no page is: it has `checksums` off")
        self._promote(link, now_s)

    def _lose_peer(self, link: Link, newer: PeerId, now_s: float) -> None:
        lost = self._links.replace_peer(link, newer, now_s)
        if lost is None:
            return
        # The same name, and it answers nowhere else: a restart, so the life before is over. Another
        # name says nothing about that life, which may go on elsewhere.
        if lost.name == newer.name and not self._is_elsewhere(lost, link):
            self._lives.supersede(lost, newer)
        else:
            self.news.say("over", lost, f"was replaced by {newer}")
        error = PeerLostError(f"{lost} was replaced by {newer}", lost)
        self._rooms.fail_of(lost, error, now_s, link.address)

    def _take_farewell(self, link: Link, peer: PeerId, now_s: float) -> None:
        """End and drain what was promised to this rank here. Only here: any process may answer
        under any name, so its word proves nothing about the process that answers elsewhere."""
        if not self._is_elsewhere(peer, link):
            self._links.watch.fenced(peer)
            self._lives.end(peer, LEFT)
        error = PeerLostError(f"{peer} {LEFT}", peer)
        self._rooms.fail_of(peer, error, now_s, link.address)
        self._links.replace_peer(link, None, now_s)
        self._links.greet(link, now_s)
        self._rooms.settle(Left(peer, link.address), now_s)

    def _is_elsewhere(self, peer: PeerId, link: Link) -> bool:
        return any(other.peer == peer for other in self._links.all() if other is not link)

    def _promote(self, link: Link, now_s: float) -> None:
        for leader in self._links.leaders(link):
            may_promise = leader.waiting and leader.ready
            links = self._ranks_ready(leader, now_s) if may_promise else None
            while links is not None and leader.waiting:
                # Out of the queue first: if what follows raises, it must not be done a second time.
                room = leader.waiting.popleft()
                # From here on the room belongs to these processes, whatever answers on the links
                # later. `peers` is set before the promise is sent, so that an answer finds its
                # room.
                room.links = links
                for rank, to in links.items():
                    assert to.peer is not None
                    room.peers[rank] = to.peer
                self._landings.promised(room)
                # The relay knows the room before the promise is out: a lease may be asked for at
                # once.
                if leader.plan is not None and not room.poll.ended:
                    assert self.relay is not None
                    self.relay.open(room.promise, self._page_size, leader.plan)
                self._rooms.on(room, receiver.PeerReady(tuple(links)), now_s)
            # The scheduler waits to hear that this worker is ready.
            if self._asked_workers.get(leader.address) is False:
                self._links.note_change(leader)

    def _ranks_ready(self, leader: Link, now_s: float) -> dict[int, Link] | None:
        """Return the links of the ranks that rooms of this leader are promised to, None if one does
        not answer. Opens those that are missing; a rank that does not fit is refused."""
        try:
            return self._links.ready(leader, now_s)
        except HandshakeError as refused:
            self._refuse_peer(leader, leader.peer, leader.reply, refused, now_s)
            return None

    def _report_workers(self, changed: LeadersChanged, now_s: float) -> None:
        # Sorted, so that a run from a seed replays exactly.
        for address in sorted(changed.addresses & self._asked_workers.keys()):
            leader = self._links.get(address)
            if leader is None:
                silent = PeerLostError(f"prefill worker {address} was silent for long")
                self._lose_worker(address, silent)
                continue
            # `_ranks_ready` may refuse the worker, which removes it here: hence `get` below,
            # and a missing entry is neither True nor False.
            is_ready = leader.ready and self._ranks_ready(leader, now_s) is not None
            if self._asked_workers.get(address) is (not is_ready):
                self._asked_workers[address] = is_ready
                most = self._links.max_tokens(leader) if is_ready else 0
                self.say(PrefillReady(address, most) if is_ready else PrefillAway(address))

    def _lose_worker(self, address: str, error: Exception) -> None:
        if self._asked_workers.pop(address, None) is not None:
            self.say(PrefillLost(address, error))

    def _refuse_peer(
        self,
        link: Link,
        life: PeerId | None,
        reply: HelloReply | HelloWanted | None,
        refused: HandshakeError | ConfigError,
        now_s: float,
    ) -> None:
        error = handshake.named(refused, self.option_names)
        self.counters["handshakes_refused"] += 1
        if life is not None:
            self._links.refuse(link, life, reply, error, now_s)
            if isinstance(reply, HelloReply) and reply.refused and reply.known != link.known:
                # It answers no Hello: it takes no frame of ours, since our life is over there. Our
                # rooms have ended there, and no outcome follows. Their pages wait for proof.
                self._rooms.fail_of(life, error, now_s, link.address)
        self._refuse_link(link, error, now_s)

    def _refuse_link(self, link: Link, error: Exception, now_s: float) -> None:
        peer = getattr(error, "peer", None)
        lost = "left" if peer and self._lives.how(peer) == LEFT else "lost"
        kind = lost if isinstance(error, PeerLostError) else "refused"
        self.news.say(kind, link.peer or link.address, str(error))
        # `close` below removes the link, so its leaders are collected first, each once.
        for leader in dict.fromkeys((link, *self._links.leaders(link))):
            for room in list(leader.waiting):  # a room that fails leaves the queue
                self._rooms.on(room, Fail(error, tell=False), now_s)
            self._lose_worker(leader.address, error)
        # A rank that has pages of ours is kept: only its word can drain them.
        has_pages = any(link.peer in room.peers.values() for room in self._rooms.at(link))
        (self._links.suspend if has_pages else self._links.close)(link, now_s)

    # --- other inputs -----------------------------------------------------------------------------

    def _settled(self, settled: Settled, now_s: float) -> None:
        self._rooms.settled(settled.token, now_s)

    def _unreachable(self, what: PeerUnreachable, now_s: float) -> None:
        self.counters["peers_unreachable"] += 1

    def _connect_failed(self, what: ConnectFailed, now_s: float) -> None:
        if (link := self._links.get(what.address)) is not None:
            self._refuse_link(link, what.error, now_s)

    def _heard_of(self, what: Reached | Unreached, now_s: float) -> None:
        self._links.heard_of(what, now_s)

    def _farewell(self, destroyed: AgentDestroyed, now_s: float) -> None:
        self._links.farewell()

    # --- the method for each input, and for what is said inside -----------------------------------

    INPUTS: ClassVar[dict[type, Any]] = {
        OpenRoom: _enter,
        MeetPrefill: _watch_worker,
        RefuseRoom: _enter,
        AbortRoom: _abort,
        MoveWeights: _move_weights,
        Fence: _fence,
        FrameReceived: _frame,
        FrameFailed: _frame_failed,
        Arrived: _arrived,
        Settled: _settled,
        PeerUnreachable: _unreachable,
        CopyDone: _scattered,
        ConnectFailed: _connect_failed,
        Reached: _heard_of,
        Unreached: _heard_of,
        Tick: _tick,
        AgentDestroyed: _farewell,
    }
    INSIDE: ClassVar[dict[type, Any]] = {
        RoomEnded: ControlInbox._end,
        LeadersChanged: _report_workers,
    }
