"""All inputs that a prefill rank takes, and the effects that follow (`effects.py`). Pure.

It holds the known decode ranks (`peers.py`), the rooms (`rooms.py`), each a `SenderMachine`, and a
relay between them and the transport. A room's key names its decode worker, so no other worker can
speak about it. Page ids are checked before they become addresses. What is remembered of numbers
without a room is a tomb (`Tombs`). A room that our engine draws is an *offer*: the first worker
that proves the prompt gets it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, assert_never

from prefixkv.config import ControlConfig, short_key
from prefixkv.control import handshake
from prefixkv.control.effects import (
    RELAYS,
    AgentDestroyed,
    Cancel,
    ConnectFailed,
    CopyDone,
    FrameFailed,
    FrameReceived,
    Freed,
    Reached,
    RelaySlots,
    RelayTick,
    RemovePeer,
    Renew,
    Tick,
    Unreached,
)
from prefixkv.control.effects import PrefillEffect as PrefillEffect
from prefixkv.control.effects import PrefillInput as PrefillInput
from prefixkv.control.handshake import Accepted, OurSide
from prefixkv.control.inbox import ControlInbox, Takes
from prefixkv.control.lives import FENCED, FENCED_DEAD, LEFT, LostPeers
from prefixkv.control.prefill.peers import Peer, Peers
from prefixkv.control.prefill.rooms import Half, Numbers, Offer, SenderRooms, Tombs
from prefixkv.errors import (
    AbortedError,
    ConfigError,
    FormerLifeError,
    HandshakeError,
    PeerLostError,
    PromptMismatchError,
    ProtocolError,
    RequestError,
    TransferTimeoutError,
    VersionError,
    WeightsVersionError,
)
from prefixkv.protocol import messages
from prefixkv.protocol import sender_machine as sender
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    Fence,
    MoveWeights,
    OfferRoom,
    SendChunk,
)
from prefixkv.protocol.events import RoomEnded, SourceFree
from prefixkv.protocol.ids import ChunkTag, KVPoll, PeerId, RoomKey
from prefixkv.protocol.machine import Fail
from prefixkv.protocol.messages import (
    Abort,
    Drained,
    Frame,
    Heartbeat,
    Hello,
    HelloRefused,
    LeaseGrant,
    Outcome,
    OutcomeAck,
    Promise,
)
from prefixkv.protocol.sender_machine import (
    CancelWrite,
    JobDrained,
    JobEnded,
    PostWrite,
    Promised,
    SenderMachine,
    abort_error,
)
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    Route,
    Settled,
    WriteDone,
    WriteDrained,
    WriteFailed,
    WriteJob,
    window_route,
)


class PrefillControl(ControlInbox[PrefillInput, PrefillEffect]):
    """The control object of one prefill rank. Owned by the control thread; other threads may call
    `peers`, `lost_peers` and `num_rooms` only.

    Args:
        ours: the rank as a handshake needs it, but for the size of its slots.
        endpoints: the addresses of all ranks, by rank; "" for its own.
        relay: None where slices are written one by one.
    """

    def __init__(
        self,
        me: PeerId,
        ours: OurSide,
        timing: ControlConfig,
        endpoints: tuple[str, ...] = (),
        relay: RelaySlots | None = None,
        weights_version: str = "",
    ) -> None:
        super().__init__(me, timing, ours.option_names)
        self._ours = ours._replace(slot_bytes=0 if relay is None else relay.slot_bytes)
        self._rank = ours.rank
        self._weights_version = weights_version
        self._peers = Peers(self._ours, endpoints, self)
        self._tombs = Tombs(timing.max_parked_per_peer, timing.parked_timeout_s)
        self._rooms = SenderRooms(ours, self, self._peers, self._tombs)
        self.relay: Any = None
        if relay is not None:
            resend_s, next_id = timing.resend_s, self._rooms.next_job_id
            self.relay = RELAYS[0].sender(me, ours.rank, relay, resend_s, next_id, self.say)

    @property
    def wake_s(self) -> float:
        """Time at which the next Tick is wanted, infinity if never."""
        wake_s = min(self.timers.next_s, self._peers.watch.due_s, self._tombs.due_s)
        return wake_s if self.relay is None else min(wake_s, self.relay.wake_s)

    @property
    def num_rooms(self) -> int:
        """Number of rooms and offers. Any thread may ask."""
        return self._rooms.num_rooms

    def rooms(self) -> Iterable[SenderMachine]:
        """Return the machines of all rooms, for audits."""
        return self._rooms.all()

    def peers(self, now_s: float) -> dict[PeerId, str]:
        """Return "ready" or "suspect" for each decode rank. Any thread may ask."""
        return self._peers.states(now_s)

    def check_invariants(self) -> None:
        """Raise AssertionError if what is counted for decode ranks differs from what is held."""
        self._rooms.check_invariants()

    def lost_peers(self, now_s: float) -> LostPeers:
        """Return the decode ranks that are suspect or over, what is wrong with each, and how many
        rooms it is still in. Any thread may ask."""
        return self._rooms.lost_peers(lambda peer: self._peers.trouble(peer, now_s))

    # --- commands ---------------------------------------------------------------------------------

    def _add(self, command: AddRoom, now_s: float) -> None:
        """It may be promised already. It fails while the number's writes have not ended."""
        key = command.key
        room = self._rooms.get(key)
        # 1. A room that has ended under this number makes way: only an acknowledgement is to come.
        if room is not None and room.drained:
            self._rooms.drop(room)
            room = None
        error = self._tombs.meet_request(key, command.digest)
        if room is not None and room.added:
            what = f"room {key.room} generation {key.generation}"
            self._end_half(key, RequestError(f"{what} was added already"))
            return
        # 2. Decode's half has ended before this one came. What it promises next is of another use,
        # but nothing tells which of the two this request was for.
        if room is None and error is not None:
            self._tombs.await_half(key, Half.PROMISE, error, now_s, digest=command.digest)
            self._end_half(key, error)
            return
        # 3. Begin, or go on with a promise that was waiting for this request.
        room = room or self._rooms.new(key, now_s)
        added = sender.Added(command.num_tokens, command.digest, self._weights_version)
        self._rooms.on(room, added, now_s)

    def _end_half(self, key: RoomKey, error: Exception) -> None:
        """End a request that has no room."""
        self.say(RoomEnded(key, KVPoll.FAILED, error))
        self.say(SourceFree(key))

    def _offer(self, command: OfferRoom, now_s: float) -> None:
        """Promises for it may be here already: the first that proves the prompt opens it, rooms of
        the others end. An early abort ends it where none opens it. It fails if the number is in
        use."""
        numbers, until_s = command.key.numbers, now_s + command.timeout_s
        # 1. The number must be free among rooms of all decode workers: any of them may open it.
        same = self._rooms.of_numbers(numbers)
        in_use = any(one.added and not one.drained for one in same)
        if in_use or self._rooms.offer(numbers):
            what = f"room {numbers[0]} generation {numbers[1]}"
            self._end_half(command.key, RequestError(f"{what} is in use already"))
            return
        # 2. Open before the promises are looked at, so that each is judged as one that comes later.
        self._tombs.meet_request(RoomKey(*numbers), b"")
        offer = Offer(command.num_tokens, command.digest, until_s)
        self._rooms.set_offer(numbers, offer)
        self.timers.wake(command.key, until_s)
        # 3. Promises that came first. Once one has opened the offer, it is gone for the others.
        for room in [one for one in same if one.is_parked]:
            if self._rooms.offer(numbers) and all(map(offer.is_proved_by, room.promises())):
                self._open_offer(room.key, offer, now_s)
            else:
                error = AbortedError(f"room {command.key.room} is another decode worker's")
                self._rooms.on(room, Fail(error), now_s)
        # 4. Aborts last: a worker that aborts cannot take the offer from one that has proved it.
        if (early := self._tombs.meet_offer(numbers)) is not None:
            self._close_offer(command.key, early, now_s)

    def _open_offer(self, key: RoomKey, offer: Offer, now_s: float) -> None:
        # Closed first, so that the next promise is refused and not taken for a second opening.
        why = f"room {key.room} was opened by another decode worker"
        self._forget_offer(key.numbers, offer, why, now_s)
        self._add(AddRoom(key, offer.num_tokens, offer.digest), now_s)

    def _close_offer(self, key: RoomKey, error: Exception, now_s: float) -> bool:
        """End an offer that no decode worker has opened. Return False if it is not open."""
        if (offer := self._rooms.offer(key.numbers)) is None:
            return False
        self._forget_offer(key.numbers, offer, str(error), now_s)
        self._end_half(RoomKey(*key.numbers), error)
        return True

    def _forget_offer(self, numbers: Numbers, offer: Offer, why: str, now_s: float) -> None:
        offered = RoomKey(*numbers)
        self._rooms.set_offer(numbers, None)
        self.timers.forget(offered)
        # A late promise of the prompt is refused with the reason.
        end = ProtocolError(why)
        self._tombs.await_half(offered, Half.PROMISE, end, now_s, digest=offer.digest)

    def _decline(self, command: DeclineRoom, now_s: float) -> None:
        """Decode hears why, now or when it promises. An added room is not touched."""
        key, error = command.key, AbortedError(command.reason)
        if self._tombs.meet_request(key, command.digest) is not None:
            return  # decode wants it no more
        room = self._rooms.get(key)
        if room is not None and room.drained:
            self._rooms.drop(room)
            room = None
        ticket, digest = None, command.digest
        if room is not None:
            if room.added:
                return
            self._rooms.on(room, Fail(error), now_s)
            ticket = room.ticket
        # The promise's request is declined here, so none is awaited: only further promises.
        self._tombs.await_half(key, Half.PROMISE, error, now_s, digest=digest, ticket=ticket)

    def _chunk(self, command: SendChunk, now_s: float) -> None:
        """Ended or unknown: no-op."""
        if (room := self._rooms.get(command.key)) is not None:
            self._rooms.on(room, command, now_s)

    def _abort(self, command: AbortRoom, now_s: float) -> None:
        """Unknown, or an offer that is opened: no-op."""
        error = command.error
        if not command.key.decode:
            self._close_offer(command.key, error, now_s)
        elif (room := self._rooms.get(command.key)) is not None:
            self._rooms.on(room, Fail(error), now_s)

    def _move_weights(self, command: MoveWeights, now_s: float) -> None:
        """KV computed or promised under the old version is not sent. Added rooms that nothing was
        computed or promised for move along, unless the command ends them too."""
        was, self._weights_version = self._weights_version, command.weights_version
        if was == (now := self._weights_version):
            return
        moved = WeightsVersionError(was, now)
        for room in self._rooms.all():
            if room.poll.ended:
                continue
            # 1. Nothing is computed, nothing promised: it will be, under the new version.
            if room.added and not (room.has_begun or command.ends_waiting):
                room.weights_version = now
                continue
            # 2. All others end; where the request is still to come, so does that.
            self._rooms.on(room, Fail(moved), now_s)
        for numbers in self._rooms.offers():  # 3. offers: the KV of each is computed
            self._close_offer(RoomKey(*numbers), moved, now_s)

    def _fence(self, command: Fence, now_s: float) -> None:
        peer_id, how = command.peer, FENCED_DEAD if command.proved else FENCED
        # First: forgetting the peer below drops what is known of its process, and the death would
        # not be counted.
        if self._peers.watch.fenced(peer_id) and command.proved:
            self.counters["peers_proved_dead"] += 1
        # Known before: what was added since then is for the next life.
        was_over = self._peers.lives.how(peer_id)
        # Over before its rooms end: a frame of it that is on its way is refused by name.
        self._peers.lives.end(peer_id, how)
        peer = self._peers.find(peer_id)
        if peer is not None:
            self._lose_peer(peer, PeerLostError(f"{peer_id} {how}", peer_id), now_s)
        if not was_over:
            self._end_unpromised(peer_id if peer is None else peer.worker, how, now_s)

    def _tick(self, tick: Tick, now_s: float) -> None:
        def look(key: str | RoomKey) -> None:
            # Three kinds of keys: a peer's name; a room; the numbers of an offer, as a room without
            # a decode worker.
            if isinstance(key, str):
                self._peers.tick(key, lambda peer: bool(self._rooms.of(peer)), now_s)
            elif (room := self._rooms.get(key)) is not None:
                awaited = room.awaits_promise
                self._rooms.tick(room, now_s)
                if awaited and room.poll.ended:
                    self.counters["never_promised"] += 1
            elif (offer := self._rooms.offer(key.numbers)) is not None and not key.decode:
                if now_s < offer.until_s:
                    self.timers.wake(key, offer.until_s)  # the timer may wake early
                    return
                late = TransferTimeoutError(f"no decode worker has opened room {key.room} in time")
                self.counters["never_promised"] += 1
                self._close_offer(key, late, now_s)

        self.timers.visit(now_s, look)
        self._tombs.expire(now_s)
        self._peers.watch.tick(now_s)
        # Behind what rooms cancel now, so that the relay repeats no ask for that.
        if self.relay is not None:
            self.say(RelayTick())

    # --- frames -----------------------------------------------------------------------------------

    def _frame(self, received: FrameReceived[bytes], now_s: float) -> None:
        """Malformed, stale and foreign frames are counted and dropped."""
        try:
            frame = messages.decode(received.raw)
            self._take(received, frame, now_s)
        except ProtocolError as error:
            self.counters["frames_dropped"] += 1
            self.counters[f"dropped: {type(error).__name__}"] += 1
            # Only two kinds are answered, those where the sender can act on the answer.
            if isinstance(error, VersionError):
                # Any frame of ours tells the other side our version; it knows its own.
                self._peers.hello_wanted(received.source)
            elif isinstance(error, FormerLifeError):  # if it lives, it is to know
                self._peers.reply(received.source, None, self._peers.why_over(error, now_s))

    def _frame_failed(self, what: FrameFailed[bytes], now_s: float) -> None:
        """End the room that a frame names, after an exception. Only if its sender has named the
        room: no peer can end rooms of another."""
        self.counters["frames_failed"] += 1
        frame = messages.decode(what.frame.raw)
        peer = self._peers.find(frame.sender)
        # The name alone proves nothing: it was accepted with this key.
        if peer is None or peer.credential != what.frame.credential:
            return
        if isinstance(frame.body, messages.RoomBody):
            room = self._rooms.get(peer.key(frame.body))
            named = room is not None and room.has_reader(peer.id)
            if room is not None and named and not room.is_other_use(frame.body.ticket):
                error = ProtocolError(f"a {type(frame.body).__name__} raised {what.error!r}")
                self._rooms.on(room, Fail(error), now_s)

    def _take(self, received: FrameReceived[bytes], frame: Frame, now_s: float) -> None:
        route, body = received.source, frame.body
        # 1. Is the name the sender's to use, and its life not over?
        try:
            peer = self._peers.speaker(frame, received.credential)
        except HandshakeError as error:
            # The line is the key's, which is proved, since the name is free to choose.
            if isinstance(body, Hello):
                self.counters["handshakes_refused"] += 1
                client = f"the client with key {short_key(received.credential)!r}"
                self.news.say("shut out", client, str(error))
                self._peers.reply(route, body, str(error))
            raise ProtocolError(str(error)) from error
        # 2. An introduction, or the refusal of one, may come from a process that is not known yet.
        if isinstance(body, Hello):
            self._on_handshake(peer, received, frame, body, now_s)
            return
        if isinstance(body, HelloRefused):
            self._take_refusal(frame, body, now_s)
            return
        # 3. Anything else counts only from the very incarnation that is known, in order. It may
        # come by another connection, so answers go there from now on.
        if peer is None or peer.id != frame.sender:
            self._peers.hello_wanted(route, frame.sender)
            raise ProtocolError(f"{frame.sender} has not introduced itself")
        peer.live.take(frame, now_s)
        former, peer.route = peer.route, route
        # What was said to a process that is gone is late: decode may have drained its pages since.
        if isinstance(body, Promise | Abort) and body.life != self.me.incarnation:
            raise ProtocolError(f"a {type(body).__name__} to life {body.life:x}")
        # 4. By type. What is for decode is refused by name, so that a new type is not forgotten
        # here.
        match body:
            case Promise():
                self._take_promise(peer, body, now_s)
            case Abort():
                self._take_abort(peer, body, now_s)
            case OutcomeAck():
                key = peer.key(body)
                # The rank has answered that use even if the room is gone: no promise of it can come
                # any more.
                self._tombs.answer((key, peer.id, body.ticket))
                room = self._rooms.get(key)
                # Only a rank that has named the room, about the use that it named.
                named = room is not None and room.has_reader(peer.id)
                if room is not None and named and room.ticket == body.ticket:
                    self._rooms.on(room, sender.OutcomeAcked(peer.hello.rank), now_s)
            case LeaseGrant():
                if self.relay is not None:
                    room = self._rooms.get(peer.key(body))
                    stream = None if room is None else room.streams.get(peer.id)
                    self.relay.on_grant(stream, body)
            case messages.Fenced():
                self._peers.lives.end(peer.id, LEFT)
                self._lose_peer(peer, PeerLostError(f"{peer.id} {LEFT}", peer.id), now_s)
                self._end_unpromised(peer.worker, LEFT, now_s)
            case Heartbeat():
                # By another way than the last frame: where decode's requests name two addresses of
                # ours, it has to hear us at both.
                if route != former:
                    self._peers.send(peer, Heartbeat(), now_s)
            case (
                messages.HelloReply()
                | messages.HelloWanted()
                | messages.PromiseAck()
                | Drained()
                | Outcome()
                | messages.LeaseAsk()
            ):
                raise ProtocolError(f"{type(body).__name__} is not for prefill")
            case _:
                assert_never(body)

    def _on_handshake(
        self,
        peer: Peer | None,
        received: FrameReceived[bytes],
        frame: Frame,
        hello: Hello,
        now_s: float,
    ) -> None:
        """A Hello of a peer that repeats it, of a stranger, or of a peer's next life."""
        route = received.source
        # 1. The peer repeats itself: it has not had our reply. Nothing else changes.
        if peer is not None and peer.id == frame.sender:
            peer.live.take(frame, now_s)
            peer.route = route
            self._peers.reply(route, hello, relayed=peer.accepted.cut is not None)
            return
        # 2. It has to repeat a number that was made after its predecessor was known, so that a late
        # Hello of a process that is gone cannot replace a live one.
        if hello.nonce != self._peers.nonce(frame.sender):
            self._peers.hello_wanted(route, frame.sender)
            return
        # 3. Can the two work together, and is the sender what it says it is?
        try:
            accepted = handshake.accept(self._ours, frame.sender, hello)
            self._peers.check_worker(frame, received.credential, hello, now_s)
        except (HandshakeError, ConfigError) as error:
            why = str(handshake.named(error, self.option_names))
            self.counters["handshakes_refused"] += 1
            self.news.say("refused", frame.sender, why)
            self._peers.reply(route, hello, why)
            return
        # 4. Its former life goes first, while the name still leads to it.
        if peer is not None:
            self._peers.lives.supersede(peer.id, frame.sender)
            lost = PeerLostError(f"{peer.id} was replaced by life {frame.incarnation:x}", peer.id)
            self._lose_peer(peer, lost, now_s)
        self._peers.add(accepted, frame, received, hello, now_s)
        self._peers.watch.met(frame.sender, hello.life, received.is_local, now_s)
        # 5. The transport before the reply: decode promises pages as soon as it has the reply, and
        # a write must not be asked for before its target is known.
        if accepted.added is not None:
            self.say(accepted)
        self._peers.reply(route, hello, relayed=accepted.cut is not None)
        # 6. Requests that are older than this life are most likely not its own.
        if hello.rank == 0 and hello.age_ms is not None:
            self._life_began(frame.sender, now_s - hello.age_ms / 1000, now_s)

    def _life_began(self, life: PeerId, born_s: float, now_s: float) -> None:
        """Give this life a while to promise requests that came before it began: most likely a
        former life's, which knows them no more. Only most likely, since a router may name a worker
        that is about to start."""
        until_s = now_s + self.timing.suspect_after_s
        for room in self._rooms.all():
            if room.added_s < born_s and room.key.decode == life.name and not room.poll.ended:
                self._rooms.on(room, sender.LifeBegan(life, until_s), now_s)

    def _take_refusal(self, frame: Frame, word: HelloRefused, now_s: float) -> None:
        """A refusal is never answered, lest two processes refuse each other without end."""
        # A refusal names the life that it is for. One meant for a former life of ours says nothing.
        if word.life != self.me.incarnation:
            raise ProtocolError(f"a refusal of life {word.life:x}")
        peer = self._peers.find(frame.sender)
        if peer is not None:
            peer.live.take(frame, now_s)
        self.counters["refused_by_peers"] += 1
        self.news.say("refused", frame.sender, f"refuses us: {word.reason}")
        # 1. It holds us for dead: what we would write to it is of no use. 2. It does not fit:
        # forget it unless rooms are still to be drained.
        if peer is not None and word.is_over:
            self._peers.lives.end(peer.id, "holds this process for dead")
            self._lose_peer(peer, PeerLostError(f"{peer.id}: {word.reason}", peer.id), now_s)
            self._end_unpromised(peer.worker, f"refuses us: {word.reason}", now_s)
        elif peer is not None and not self._rooms.of(peer.id):
            self._peers.forget(peer)

    def _lose_peer(self, peer: Peer, error: Exception, now_s: float) -> None:
        # Before its rooms end, so that nothing more is sent to it, and each room sees whether all
        # its ranks are gone.
        self._peers.leave(peer)
        for room in self._rooms.of(peer.id):
            self._rooms.on(room, Fail(error, gone=peer.hello.rank), now_s)
        self.say(RemovePeer(peer.id))

    def _end_unpromised(self, worker: PeerId, how: str, now_s: float) -> None:
        """End the requests that wait for this life to promise pages. Where a later life is known,
        it may ask for them: see `_life_began`."""
        known = self._peers.get(worker.name)
        if known is not None and known.id != worker:
            return
        error = PeerLostError(f"{worker} {how}, and had not promised pages", worker)
        for room in self._rooms.all():
            if room.key.decode == worker.name and room.awaits_promise:
                self.counters["never_promised"] += 1
                self._rooms.on(room, Fail(error), now_s)

    def _take_promise(self, peer: Peer, promise: Promise, now_s: float) -> None:
        """For a room of the engine, an offer, or a request that is to come. A promise that has
        crossed the end of what it is about is answered. Raises ProtocolError for any other that is
        refused; decode was answered, unless it contradicts its own promise."""
        key, ticket = peer.key(promise), promise.ticket
        # Everything that may refuse the promise stands in this block, before it is counted
        # anywhere. Rooms that make way in it are over in any case.
        try:
            room = self._rooms.get(key)
            known = None if room is None else room.readers.get(peer.hello.rank)
            # 1. The pages themselves.
            before = known.counted[0] if known is not None and known.peer == peer.id else 0
            event = peer.promised(promise, self._ours.topology.page_size, before)
            # 2. May this rank speak about this use of the room?
            self._check_over(self._tombs.over((key, peer.id, ticket)))
            if room is not None and not room.admits(peer.id, peer.hello.rank, peer.worker):
                raise ProtocolError(f"room {key.room} is another life's or rank's")
            # 3. A room that has ended makes way if decode uses the number again.
            if room is not None and room.drained and room.is_other_use(ticket):
                self._rooms.drop(room)
                room = None
            # 4. The request has come before it, and is over.
            if room is None:
                self._check_over(self._tombs.meet_promise(key, ticket, promise.digest))
            # 5. Of our weights? A room that the engine has added compares them itself.
            if room is None or room.is_parked:
                self._check_weights(event, key, now_s)
            # 6. A promise stands: only a repeat, or another rank's equal one, is let through.
            if room is not None and not room.same_promise(event):
                raise ProtocolError(
                    f"another promise for room {key.room} generation {key.generation}"
                )
            # 7. Does it open an offer, is it waited for, or has it to wait, and may it?
            offer = None if room is not None else self._offer_of(key, event)
            is_new = room is None or not room.has_reader(peer.id)
            is_parked = is_new and offer is None and (room is None or not room.added)
            if is_parked and peer.num_parked >= self.timing.max_parked_per_peer:
                why = "promises wait for their requests, the limit is reached"
                raise ProtocolError(f"{peer.num_parked} {why}")
        except ProtocolError as error:
            is_answered = self._refuse_promise(peer, promise, error, now_s)
            # That end is the cause (`_check_over`), and no fault of decode's.
            if is_answered and error.__cause__ is not None:
                return
            raise
        # Accepted: from here on nothing is refused. The number is in use again.
        self._tombs.meet_request(key, b"")
        room = room or self._rooms.new(key, now_s)
        room.worker = peer.worker
        self._rooms.on(room, event, now_s)
        if isinstance(room.error, PromptMismatchError) and not room.may_be_about(promise.digest):
            self._end_request(key, promise, room.error, now_s)  # its request may still come
        if offer is not None:  # behind the promise: so the room is parked for no time
            self._open_offer(key, offer, now_s)

    def _check_over(self, end: Exception | None) -> None:
        """Raise ProtocolError, from it, for a promise of what has ended with `end`."""
        if end is not None:
            raise ProtocolError(str(end)) from end

    def _end_request(
        self, key: RoomKey, word: Promise | Abort, error: Exception, now_s: float
    ) -> None:
        """End the request to come that this word is about."""
        self._tombs.await_half(
            key, Half.REQUEST, error, now_s, digest=word.digest, ticket=word.ticket
        )

    def _offer_of(self, key: RoomKey, event: Promised) -> Offer | None:
        """Return the offer that this first promise opens, None if its room is none. Raises
        ProtocolError: it is of another prompt, which leaves the offer to others; or the offer is
        closed."""
        offer = self._rooms.offer(key.numbers)
        if offer is None:
            closed = RoomKey(*key.numbers)
            self._check_over(self._tombs.meet_promise(closed, event.word.ticket, event.word.digest))
        elif not offer.is_proved_by(event):
            raise ProtocolError(
                f"room {key.room} is open to who proves its prompt of {offer.num_tokens} tokens; "
                "the promise does not"
            )
        return offer

    def _check_weights(self, event: Promised, key: RoomKey, now_s: float) -> None:
        """Raise ProtocolError for a promise of other weights than ours. A later request ends
        likewise, and so does the offer that the promise would have opened."""
        if event.word.weights_version == self._weights_version:
            return
        error = WeightsVersionError(event.word.weights_version, self._weights_version)
        offer = self._rooms.offer(key.numbers)
        if offer is None:
            self._end_request(key, event.word, error, now_s)
        elif offer.is_proved_by(event):
            self._close_offer(key, error, now_s)
        self._check_over(error)

    def _refuse_promise(
        self, peer: Peer, promise: Promise, refused: ProtocolError, now_s: float
    ) -> bool:
        """Answer a refused promise; its pages are drained, since no write for it is under way. If
        another promise of this room stands, decode has ended that one or will, and gets no
        answer. Return whether it got one."""
        key, ticket = peer.key(promise), promise.ticket
        known = self._rooms.get(key)
        if known is not None and known.has_reader(peer.id) and known.ticket == ticket:
            return False
        end = refused.__cause__ if isinstance(refused.__cause__, Exception) else refused
        self._tombs.bury((key, peer.id, ticket), end)
        if promise.weights_version != self._weights_version:  # decode hears that first of all
            end = WeightsVersionError(promise.weights_version, self._weights_version)
        # If not drained, decode is to ask with an Abort, and to let settle.
        drained = not self._rooms.may_need_settle
        text, code, versions = messages.failure(end)
        what = *key.numbers, self._rank, False, 0, 0, b"", text, drained, ticket, code
        self._peers.send(peer, Outcome(*what, versions=versions), now_s)
        return True

    def _take_abort(self, peer: Peer, abort: Abort, now_s: float) -> None:
        """End the room, or the request to come, and answer Drained."""
        key = peer.key(abort)
        use = key, peer.id, abort.ticket
        # 1. Does this use of the room belong to the sender?
        room = self._rooms.get(key)
        theirs = self._tombs.over(use) is None
        if room is not None:
            theirs = theirs and room.admits(peer.id, peer.hello.rank, peer.worker)
        self._tombs.answer(use)
        if room is not None and room.added and not room.readers:
            # It may be about a former use of the number, and have crossed the next request: the
            # digest tells.
            theirs = theirs and room.may_be_about(abort.digest)
            if not theirs:
                room = None
        # 2. No room. It ends an offer: its number is drawn at random, so a worker that names it has
        # it from its answer. Or it is the half that was awaited; or it ends the request to come. A
        # late or repeated abort, of a use that is over, ends nothing.
        if room is None and theirs:
            error = abort_error(abort)
            closed = self._close_offer(key, error, now_s)
            self._tombs.bury(use, error, answered=True)
            met = self._tombs.meet_promise(key, abort.ticket, abort.digest, next_too=False)
            if not closed and met is None:
                self._end_request(key, abort, error, now_s)
        # 3. No room of ours, or another's: nothing can land in that peer's pages for it, and its
        # later frames have higher numbers than this one. Say so, since decode repeats an Abort
        # until it is answered.
        if room is None or not theirs or room.is_other_use(abort.ticket):
            drained = Drained(*key.numbers, self._rank, abort.ticket, self._rooms.may_need_settle)
            self._peers.send(peer, drained, now_s)
            return
        # 4. The room ends.
        room.worker = peer.worker
        said = sender.AbortSaid(peer.id, abort, peer.hello.rank, peer.accepted.readers)
        self._rooms.on(room, said, now_s)

    # --- writes -----------------------------------------------------------------------------------

    def _post(self, post: PostWrite, now_s: float) -> None:
        """By the relay if the peer takes slices of what we hold, else into pages."""
        relay = self.relay
        # Pages of groups are never staged: they go straight where they belong.
        if relay is not None and post.peer in relay.peers and post.group < 0:
            relay.write(post, self._rooms.jobs[post.job_id].streams, now_s)
            return
        pages = post.src_pages, post.dst_pages
        route: Route = "pages"
        if post.group >= 0:
            num_windows = sum(group.window > 0 for group in self._ours.digest.groups)
            route = window_route(post.group) if post.group < num_windows else "state"
        numbers = self.me.incarnation, *post.key.numbers, self._rank, post.chunk
        tag = ChunkTag(*numbers, ticket=post.ticket, group=post.group, first=post.first_unit)
        self._out.append(WriteJob(post.job_id, post.peer, *pages, tag, post.ready, route))

    def _cancel(self, cancel: CancelWrite, now_s: float) -> None:
        # The job is either the relay's or the transport's; the other one does not know it.
        if self.relay is not None:
            self.relay.cancel(cancel.job_id)
        self._out.append(Cancel(cancel.job_id))

    def _write_done(self, done: WriteDone, now_s: float) -> None:
        self.counters["bytes_sent"] += done.num_bytes
        self.counters["writes_done"] += 1
        self._job_ended(JobEnded(done.job_id), now_s)

    def _write_failed(self, failed: WriteFailed, now_s: float) -> None:
        self.counters["writes_failed"] += 1
        self._job_ended(JobEnded(failed.job_id, failed.error, failed.drained), now_s)
        if not failed.drained:  # it holds decode's pages until its agent is destroyed
            self.say(Renew())

    def _job_ended(self, end: JobEnded, now_s: float) -> None:
        """Of a staged piece, or of a job of a room."""
        if self.relay is not None and self.relay.owns(end.job_id):
            self.relay.on_write_ended(end.job_id, end.error, end.drained, now_s)
        else:
            self._rooms.on_job(end, now_s)

    def _write_drained(self, proof: WriteDrained, now_s: float) -> None:
        self.counters["writes_drained_by_renewal"] += 1
        self._job_drained(JobDrained(proof.job_id), now_s)

    def _job_drained(self, proof: JobDrained, now_s: float) -> None:
        if self.relay is not None and self.relay.owns(proof.job_id):
            self.relay.on_write_drained(proof.job_id)
        else:
            self._rooms.on_job(proof, now_s)

    def _gathered(self, done: CopyDone, now_s: float) -> None:
        if self.relay is not None:
            self.relay.on_gathered(done.copy_id, done.error)

    def _tick_relay(self, tick: RelayTick, now_s: float) -> None:
        assert self.relay is not None
        self.relay.tick(now_s)

    # --- the transport's peers --------------------------------------------------------------------

    def _accept(self, accepted: Accepted, now_s: float) -> None:
        # The transport must know the peer before anything is written to it.
        assert accepted.added is not None
        self._out.append(accepted.added)
        if self.relay is not None and accepted.cut is not None:
            self.relay.add_peer(accepted.added.peer, accepted.cut)

    def _remove(self, removed: RemovePeer, now_s: float) -> None:
        self._out.append(removed)
        self._tombs.forget(removed.peer)
        if self.relay is not None:
            self.relay.remove_peer(removed.peer)

    def _free(self, freed: Freed, now_s: float) -> None:
        # None of the room's writes is under way, so the relay has no job of it either.
        if self.relay is not None:
            self.relay.forget(freed.streams)
        self._out.append(freed.source)

    def _unreachable(self, what: PeerUnreachable, now_s: float) -> None:
        self.counters["peers_unreachable"] += 1
        self._peers.watch.doubt(what.peer, now_s)
        peer = self._peers.find(what.peer)
        # Memory that was mapped once can be mapped: then its process is gone.
        if peer is not None and peer.accepted.instead is not None and not what.was_reached:
            self._out.append(peer.accepted.instead)
            peer.accepted = peer.accepted._replace(instead=None)

    def _shut_out(self, what: ConnectFailed, now_s: float) -> None:
        self.counters["handshakes_refused"] += 1
        self.news.say("shut out", what.address, str(what.error))

    def _farewell(self, destroyed: AgentDestroyed, now_s: float) -> None:
        self._peers.farewell()

    # --- the method for each input, and for what is said inside -----------------------------------

    INPUTS: ClassVar[Takes] = {
        AddRoom: _add,
        OfferRoom: _offer,
        SendChunk: _chunk,
        DeclineRoom: _decline,
        AbortRoom: _abort,
        MoveWeights: _move_weights,
        Fence: _fence,
        FrameReceived: _frame,
        FrameFailed: _frame_failed,
        WriteDone: _write_done,
        WriteFailed: _write_failed,
        WriteDrained: _write_drained,
        CopyDone: _gathered,
        PeerUnreachable: _unreachable,
        ConnectFailed: _shut_out,
        Tick: _tick,
        AgentDestroyed: _farewell,
        # Prefill connects to nothing, and decode writes nothing here.
        **dict.fromkeys((Arrived, Settled, Reached, Unreached), ControlInbox._ignore),
    }
    INSIDE: ClassVar[dict[type, Any]] = {
        PostWrite: _post,
        CancelWrite: _cancel,
        JobEnded: _job_ended,
        JobDrained: _job_drained,
        RelayTick: _tick_relay,
        Freed: _free,
        RoomEnded: ControlInbox._end,
        Accepted: _accept,
        RemovePeer: _remove,
    }
