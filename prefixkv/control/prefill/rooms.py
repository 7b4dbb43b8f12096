"""Prefill's rooms: events go to a room, which is its machine, and what it wants is said. Its
readers are the decode ranks that have named it. Who holds a room, and what frees it:

     no room            one half is here   both halves        ended             no room
    +------------------+------------------+------------------+-----------------+----------------+
    | Tombs: a half is | the request, or  | in_flight: the   | undrained: they | Tombs: the use |
    | awaited. What    | a promise that   | writes that may  | failed, and may | is over. A     |
    | comes ends with  | is parked        | land. SourceFree | still land. An  | late word is   |
    | its error        |                  | follows the last | outcome waits   | answered       |
    +------------------+------------------+------------------+-----------------+----------------+
      until it comes,    until the other    until each has     until the agent   until the
      or a deadline      half comes, or a   ended; a Cancel    is destroyed;     oldest goes
                         deadline           only hurries it    the outcome's
                                                               answer, or a
                                                               deadline
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

from prefixkv.control.effects import Freed
from prefixkv.control.handshake import OurSide
from prefixkv.control.inbox import ControlInbox
from prefixkv.control.lives import LostPeers
from prefixkv.control.prefill.peers import Peers
from prefixkv.errors import AbortedError
from prefixkv.protocol import sender_machine as sender
from prefixkv.protocol.events import RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.machine import RoomTick
from prefixkv.protocol.sender_machine import PostWrite, SenderMachine, SendToReader

Numbers = tuple[int, int]
"""Room and generation."""
Use = tuple[RoomKey, PeerId, int]
"""A number, the decode rank that has spoken of it, and the ticket of that use."""
K = TypeVar("K")
V = TypeVar("V")


class Half(enum.Flag):
    """A half of a request, by the side that it comes from."""

    REQUEST = enum.auto()
    PROMISE = enum.auto()


class Tomb(NamedTuple):
    """The end of a half. `digest`: of its prompt; b"": of any. `ticket`: of decode's half, once a
    word of it has come."""

    error: Exception
    awaits: Half
    digest: bytes
    ticket: int | None
    until_s: float

    def is_of(self, digest: bytes) -> bool:
        """Return whether this prompt may be the tomb's; b"" names none."""
        return not (self.digest and digest) or self.digest == digest


_MOST_OFFERS: Final = 4096
"""Closed offers that are kept: they name no worker, so those of all count together."""


class Tombs:
    """What one prefill rank remembers of numbers without a room. Owned by a `PrefillControl`.

    A request has two halves under one number: the engine's here, and decode's promise. They come in
    any order, and one may be over before the other has come. Two kinds of tombs stand for that:

    - *A half is awaited*, at a number. The half that comes within the time ends with the tomb's
      error. Only where both sides name a prompt, and the two differ, does it belong to the number's
      next use; so does a promise under another ticket than the tomb has met.
    - *A use is over*, at a number, a decode rank and a ticket. A late word of that rank about it is
      answered and changes nothing; above all a repeat of the promise opens no room. It has no
      deadline: until decode has answered, nothing tells whether a repeat is on its way.

    An offer that is closed is a half that is awaited of any decode worker: its key names none.

    Of each decode worker `most` numbers, and of each of its ranks `most` uses that it has answered
    and `most` that it has not. Beyond that the oldest is forgotten: never another worker's, and
    never an unanswered use for an answered one.
    """

    def __init__(self, most: int, keep_s: float) -> None:
        self._most = most
        self._keep_s = keep_s
        # In order of arrival, by the name of the worker ("": any).
        self._awaited: dict[str, dict[RoomKey, Tomb]] = {}
        # The same by rank: the uses that it has not answered, and those that it has.
        self._over: dict[PeerId, tuple[dict[Use, Exception], dict[Use, Exception]]] = {}

    # --- a half is awaited ------------------------------------------------------------------------

    def await_half(
        self,
        key: RoomKey,
        half: Half,
        error: Exception,
        now_s: float,
        *,
        digest: bytes = b"",
        ticket: int | None = None,
    ) -> None:
        """End the half that comes next under this number with `error`."""
        tombs = self._awaited.setdefault(key.decode, {})
        tombs.pop(key, None)  # to the end, which is the order of the deadlines
        tombs[key] = Tomb(error, half, digest, ticket, now_s + self._keep_s)
        self._bound(tombs, self._most if key.decode else _MOST_OFFERS)

    def meet_request(self, key: RoomKey, digest: bytes) -> Exception | None:
        """Return the error with which a request that has come ends, None if it goes on.

        The number is in use again: what was awaited under it is forgotten in any case.
        """
        tomb = self._awaited.get(key.decode, {}).pop(key, None)
        is_met = tomb is not None and Half.REQUEST in tomb.awaits and tomb.is_of(digest)
        return tomb.error if tomb is not None and is_met else None

    def meet_offer(self, numbers: tuple[int, int]) -> Exception | None:
        """As `meet_request`, for one that belongs to no decode worker yet."""
        met = [self.meet_request(RoomKey(*numbers, name), b"") for name in self._awaited]
        return next((error for error in met if error is not None), None)

    def meet_promise(
        self, key: RoomKey, ticket: int, digest: bytes, *, next_too: bool = True
    ) -> Exception | None:
        """Return the error with which a promise ends, None if it goes on.

        Other ranks promise the same, so the tomb stays. Where the prompt is known, the request that
        was ended may have been the one before: with `next_too` the next one has lost its promise.
        """
        tombs = self._awaited.get(key.decode, {})
        tomb = tombs.get(key)
        if tomb is None or Half.PROMISE not in tomb.awaits:
            return None
        if not key.decode:  # a closed offer: any worker, any ticket
            return tomb.error if tomb.is_of(digest) else None
        if not tomb.is_of(digest) or tomb.ticket not in (None, ticket):
            del tombs[key]  # the number's next use
            return None
        more = Half.REQUEST if next_too and tomb.digest else Half.PROMISE
        tombs[key] = tomb._replace(ticket=ticket, awaits=tomb.awaits | more)
        return tomb.error

    def expire(self, now_s: float) -> None:
        """Forget the halves that have not come in time. O(expired + decode workers)."""
        for name, tombs in list(self._awaited.items()):
            while tombs and tombs[key := next(iter(tombs))].until_s <= now_s:
                del tombs[key]
            if not tombs:
                del self._awaited[name]

    @property
    def due_s(self) -> float:
        """When the next half is awaited no more, infinity if none is. O(decode workers)."""
        firsts = (next(iter(tombs.values())).until_s for tombs in self._awaited.values() if tombs)
        return min(firsts, default=math.inf)

    def awaited(self) -> list[RoomKey]:
        """Return the numbers of which a half is awaited, for audits."""
        return [key for tombs in self._awaited.values() for key in tombs]

    # --- a use is over ----------------------------------------------------------------------------

    def bury(self, use: Use, error: Exception, *, answered: bool = False) -> None:
        """Remember that a use is over; `answered`: its rank has acknowledged or aborted it."""
        uses = self._over.setdefault(use[1], ({}, {}))[answered]
        uses[use] = error
        self._bound(uses, self._most)

    def answer(self, use: Use) -> None:
        """Note that the rank has acknowledged or aborted a use. Not buried: no-op."""
        if use[1] in self._over and (error := self._over[use[1]][0].pop(use, None)):
            self.bury(use, error, answered=True)

    def over(self, use: Use) -> Exception | None:
        """Return how a use ended, None if it is not known to be over."""
        return next((uses[use] for uses in self._over.get(use[1], ()) if use in uses), None)

    def forget(self, peer: PeerId) -> None:
        """Forget the uses of a rank that is no peer any more: it has to say Hello first."""
        self._over.pop(peer, None)

    def _bound(self, tombs: dict[K, V], most: int) -> None:
        if len(tombs) > most:
            del tombs[next(iter(tombs))]


class Offer(NamedTuple):
    """A prompt with computed KV, until a decode worker opens its room."""

    num_tokens: int
    digest: bytes
    until_s: float

    def is_proved_by(self, promise: sender.Promised) -> bool:
        """Return whether the sender of this promise knows the prompt. The number of a room proves
        nothing: it travels through routers, and can be guessed or repeated."""
        word = promise.word
        return word.fill_len == self.num_tokens and word.digest == self.digest


class _Same(list[SenderMachine]):
    """The rooms of one number, one of each decode worker that has one; nearly always one. And the
    offer that none has opened yet."""

    offer: Offer | None = None


class SenderRooms:
    """The rooms of one prefill rank, with the writes under way for them. Owned by a
    `PrefillControl`. What is to be done is said, in order.

    `timers` wake rooms by key; peers share them.
    """

    def __init__(
        self,
        ours: OurSide,
        inbox: ControlInbox[Any, Any],
        peers: Peers,
        tombs: Tombs,
    ) -> None:
        self._rooms: dict[Numbers, _Same] = {}
        self.num_rooms = 0  # with the open offers
        # The room itself of each write that is not proved over: its number may be in use again. A
        # write that failed undrained stays, so that its proof (JobDrained) finds the room.
        self.jobs: dict[int, SenderMachine] = {}
        # An agent was replaced: a Drained that was lost may have asked decode to let it settle
        self.may_need_settle = False
        self._ours = ours
        self._timing = inbox.timing
        self._timers = inbox.timers
        self._peers = peers
        self._say = inbox.say
        self._tombs = tombs
        self._job_ids = count(1)

    def all(self) -> list[SenderMachine]:
        """Return the machines of all rooms. Any thread may ask."""
        return [room for same in list(self._rooms.values()) for room in same]

    def get(self, key: RoomKey) -> SenderMachine | None:
        for room in self._rooms.get(key.numbers, ()):
            if room.key == key:
                return room
        return None

    def new(self, key: RoomKey, now_s: float) -> SenderMachine:
        """Add a room that begins now, for a request, a promise or an offer. `on` follows, which
        counts it."""
        of = self._ours.rank, self._ours.topology.page_size, self.next_job_id, self._timing
        room = SenderMachine(key, *of, now_s)
        # Peers met later may know nothing of the room: see `Peers.heard_s`.
        room.met_before = self._peers.num_met
        self._rooms.setdefault(key.numbers, _Same()).append(room)
        self.num_rooms += 1
        return room

    def on(self, room: SenderMachine, event: sender.SenderEvent, now_s: float) -> None:
        """Give an event to a room's machine and carry out its actions; drop it once it is over."""
        key, was_open = room.key, not room.poll.ended
        for action in room.on(event, now_s):
            if isinstance(action, SendToReader):
                # Its route may lead to the life that replaced it, which must not get these words.
                if (peer := self._peers.find(action.peer)) is not None:
                    self._peers.send(peer, action.body, now_s)
            elif isinstance(action, RoomEnded | SourceFree) and not room.added:
                continue  # the engine has never heard of it
            elif isinstance(action, SourceFree):
                self._say(Freed(room.streams, action))
            else:
                if isinstance(action, PostWrite):
                    self.jobs[action.job_id] = room
                self._say(action)
        peers = [self._peers.find(reader.peer) for reader in room.readers.values()]
        # Each peer counts the pages that we may still write, and its parked promises.
        for reader, peer in zip(room.readers.values(), peers, strict=True):
            pages, parked = 0 if room.drained else reader.num_pages, int(room.is_parked)
            if peer is not None:
                peer.num_promised += pages - reader.counted[0]
                peer.num_parked += parked - reader.counted[1]
            reader.counted = pages, parked
        is_gone = room.poll.ended and bool(peers) and not any(peers)
        # The half that has not come ends with this one. Of a process that is gone none comes.
        unheard = room.poll.ended and not room.readers
        if was_open and room.poll.ended and not is_gone and (unheard or not room.added):
            half = Half.REQUEST if room.readers else Half.PROMISE
            self._tombs.await_half(key, half, _end(room), now_s, digest=room.prompt)
        # Peers that are gone drain their own pages, or never. So only the ends of our writes are
        # waited for, which read our own pages.
        if room.over or unheard or (is_gone and not room.in_flight):
            self.drop(room)
        else:
            self._timers.wake(key, room.wake_s)

    def of(self, peer: PeerId) -> list[SenderMachine]:
        """Return the rooms that this decode rank has named. O(rooms)."""
        return [room for room in self.all() if room.has_reader(peer)]

    def offer(self, numbers: Numbers) -> Offer | None:
        """Return the open offer of these numbers."""
        return self._rooms[numbers].offer if numbers in self._rooms else None

    def offers(self) -> list[Numbers]:
        """O(rooms)."""
        return [numbers for numbers, same in self._rooms.items() if same.offer is not None]

    def set_offer(self, numbers: Numbers, offer: Offer | None) -> None:
        """Open an offer, or close it with None."""
        same = self._rooms.setdefault(numbers, _Same())
        self.num_rooms += 1 if offer else -1
        same.offer = offer
        if not (same or offer):
            del self._rooms[numbers]

    def of_numbers(self, numbers: Numbers) -> list[SenderMachine]:
        return list(self._rooms.get(numbers, ()))

    def tick(self, room: SenderMachine, now_s: float) -> None:
        key = room.key
        heard_s = self._peers.heard_s(key.decode, room.expected, room.met_before)
        self.on(room, RoomTick(heard_s), now_s)

    def drop(self, room: SenderMachine) -> None:
        """Forget a room; the use is remembered for each of its readers, so that a late repeat is
        not taken for the next use of the number."""
        same = self._rooms.get(room.key.numbers)
        if same is not None and room in same:
            same.remove(room)
            self.num_rooms -= 1
            if not (same or same.offer):
                del self._rooms[room.key.numbers]
        self._timers.forget(room.key)
        for reader in room.readers.values():
            is_known = self._peers.find(reader.peer) is not None
            # Of a success that is acknowledged nothing follows.
            if is_known and not (reader.answered and room.poll is KVPoll.SUCCESS):
                use = room.key, reader.peer, room.ticket
                self._tombs.bury(use, _end(room), answered=reader.answered)

    # --- writes -----------------------------------------------------------------------------------

    def next_job_id(self) -> int:
        """Return a number for a write or copy, never given before."""
        return next(self._job_ids)

    def on_job(self, event: sender.JobEnded | sender.JobDrained, now_s: float) -> None:
        """Tell a write's room that it has ended, or that nothing of it can land any more though it
        had ended undrained."""
        job_id = event.job_id
        # A write that failed and is not drained stays known, for its proof.
        if isinstance(event, sender.JobEnded) and event.error is not None and not event.drained:
            room = self.jobs.get(job_id)
        else:
            room = self.jobs.pop(job_id, None)
        # From now on any Drained may follow the end of an agent, so decode is asked to let settle
        # what kernels may hold of it.
        self.may_need_settle |= isinstance(event, sender.JobDrained)
        # A room whose readers are all gone is dropped before its last proof.
        if room is not None and room in self._rooms.get(room.key.numbers, ()):
            self.on(room, event, now_s)

    # --- audits -----------------------------------------------------------------------------------

    def lost_peers(self, trouble: Callable[[PeerId], str]) -> LostPeers:
        """Return, for each reader with `trouble`, the reason and how many rooms it has. Any thread
        may ask."""
        found: LostPeers = {}
        # Copies: this also runs on the scheduler's thread, while the control thread changes both.
        for room in self.all():
            for reader in list(room.readers.values()):
                if what := trouble(reader.peer):
                    found[reader.peer] = what, found.get(reader.peer, (what, 0))[1] + 1
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError if a room is not where it belongs, or peers count what is not."""
        assert self.num_rooms == len(self.all()) + len(self.offers()), "rooms"
        pages, parked = Counter[PeerId](), Counter[PeerId]()
        for room in self.all():
            assert self.get(room.key) is room, "a room is at its key"
            assert not room.over, "what is over is dropped"
            for reader in room.readers.values():
                pages[reader.peer] += 0 if room.drained else reader.num_pages
                parked[reader.peer] += room.is_parked
        for peer in self._peers.all():
            assert peer.num_promised == pages[peer.id] <= peer.pool_pages, (
                "pages that may be written"
            )
            assert peer.num_parked == parked[peer.id], "promises that wait for their requests"


def _end(room: SenderMachine) -> Exception:
    return room.error or AbortedError(f"room {room.key.room} is over")
