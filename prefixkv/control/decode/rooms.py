"""Decode's rooms: events go to a room, which is its machine, and what it wants is said. Who holds a
room, and what frees it:

     waits               promised            FAILED              FAILED, drained     no room
    +-------------------+-------------------+-------------------+-------------------+-----------+
    | Link.waiting: its | peers: the pro-   | undrained: ranks  | owed: no rank has | a frame   |
    | leader or a rank  | cesses told. They | that may still    | learned of pages, | is told   |
    | is not ready. No  | stay so if others | write its pages,  | but prefill may   | by its    |
    | peer knows its    | answer; leases in | and its leases    | wait for them. A  | ticket    |
    | pages             | staging           |                   | refusal is born   |           |
    |                   |                   |                   | here              |           |
    +-------------------+-------------------+-------------------+-------------------+-----------+
      until all answer,   until each rank     until each rank     until each rank
      or a deadline       reports SUCCESS     proves that it      has answered, or
                          and all is noti-    ended, or is        prefill has given
                          fied, or a deadline fenced. No time     up by itself
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.control.decode.links import Link, Links
from prefixkv.control.effects import Left, Settle
from prefixkv.control.inbox import ControlInbox
from prefixkv.control.lives import LostPeers, PeerChanges
from prefixkv.errors import TransferError
from prefixkv.protocol import messages
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol.events import RoomOverdue
from prefixkv.protocol.ids import ChunkTag, PeerId, RoomKey
from prefixkv.protocol.machine import Fail
from prefixkv.protocol.messages import Drained, Promise
from prefixkv.protocol.receiver_machine import ReceiverMachine, SendToRank

Token = PeerId | Left | Drained
"""What a `Settle` is about."""


class Room(ReceiverMachine):
    """One room of a decode rank: what is said and written of it, and who has been told.

    `link` leads to the leader of the prefill worker. `links` and `peers` are by rank, of those that
    have been told: `peers` are the processes at the time of the promise, and stay so when another
    process answers on the link.
    """

    def __init__(
        self,
        promise: Promise,
        link: Link,
        timing: ControlConfig,
        now_s: float,
        refused: TransferError | None = None,
    ) -> None:
        super().__init__(promise, timing, now_s, link.address, refused)
        self.link = link
        self.links: dict[int, Link] = {}
        self.peers: dict[int, PeerId] = {}
        self.settling: set[Token] = set()  # what drains ranks of it once the transport has read
        self.landing: Any = None  # what the `Landings` keep of it

    def ranks_of(self, peer: PeerId, address: str | None = None) -> list[int]:
        return [
            rank
            for rank, known in self.peers.items()
            if known == peer and address in (None, self.links[rank].address)
        ]

    @property
    def heard_s(self) -> float:
        """The time by which every rank had been heard. -infinity if the room was promised to none
        yet, or another process answers on a link."""
        times = [
            link.live.heard_s if link.peer == self.peers[rank] else -math.inf
            for rank, link in self.links.items()
        ]
        return min(times, default=-math.inf)

    def writers(self) -> Iterator[tuple[PeerId, Link]]:
        """Yield the processes that may still write, each with its link. Any thread may ask."""
        for rank in self.undrained:
            # A rank may be undrained before `peers` has it: then nothing was promised to it yet.
            if rank in self.peers:
                yield self.peers[rank], self.links[rank]

    def tell_overdue(self, news: PeerChanges) -> None:
        """Report each process that has not proved in time that it no longer writes."""
        for peer, _ in self.writers():
            room = f"of room {self.key.room} generation {self.key.generation}"
            why = f"has not proved that {self.num_pages} pages {room} are free"
            news.say("quarantined", peer, why)


def lost_peers(rooms: Iterable[Room], wrong: Callable[[PeerId, Link], str]) -> LostPeers:
    """For each writer with something `wrong`, the reason and the pages it holds."""
    found: LostPeers = {}
    for room in rooms:
        for peer, link in room.writers():
            if what := wrong(peer, link):
                pages = found[peer][1] if peer in found else 0
                found[peer] = what, pages + room.num_pages
    return found


class ReceiverRooms(dict[RoomKey, Room]):
    """The rooms of one decode rank that are open or not drained. Owned by a `DecodeControl`.
    What is to be done is said, in order.

    `timers` wake rooms by key; links share them. `relay`: None where all goes straight into pages.
    """

    def __init__(self, inbox: ControlInbox[Any, Any], links: Links, relay: Any) -> None:
        self.num_expected = 0  # rooms with pages that a peer may be writing now
        self._timing = inbox.timing
        self._timers = inbox.timers
        self._links = links
        self._relay = relay
        self._news = inbox.news
        self._say = inbox.say

    def all(self) -> list[Room]:
        """Return a copy of the list."""
        return list(self.values())  # in one step: any thread may call this

    def at(self, link: Link) -> list[Room]:
        """Return the rooms that hold on to a link. O(rooms)."""
        return [room for room in self.all() if room.link is link or link in room.links.values()]

    def on(self, room: Room, event: receiver.ReceiverEvent, now_s: float) -> None:
        """Give an event to a room's machine and carry out its actions; drop it once it is over."""
        expected = room.is_written
        # The count is corrected even if an action raises: the transport must go on listening for
        # the room, since its pages may be written all the same.
        try:
            for action in room.on(event, now_s):
                if isinstance(action, SendToRank):
                    self.tell(room, action.rank, action.body, now_s)
                    continue
                # The relay sees the end of a room first: it may still hold leases that peers write,
                # and passes RoomDrained on only when these are free.
                pass_on = self._say if self._relay is None else self._relay.pass_on
                pass_on(action)
                if isinstance(action, RoomOverdue):
                    room.tell_overdue(self._news)
        finally:
            self.num_expected += room.is_written - expected
        if room.over:
            self.drop(room)
        else:
            self._timers.wake(room.key, room.wake_s)

    def fail_of(
        self,
        peer: PeerId,
        error: Exception,
        now_s: float,
        address: str | None = None,
    ) -> None:
        for room in self.all():
            for rank in room.ranks_of(peer, address):
                self.on(room, Fail(error, gone=rank), now_s)

    def settle(self, token: Token, now_s: float) -> None:
        """Drain what a writer holds, whose agent is gone as the token says, once the transport has
        read what kernels may still hold of it. A token that is settling already is not repeated."""
        rooms = [room for room, _ in self._drains(token)]
        is_new = bool(rooms) and not any(token in room.settling for room in rooms)
        for room in rooms:
            room.settling.add(token)
        if not self._timing.fence_settle_s:
            self.settled(token, now_s)
        elif is_new:
            self._say(Settle(token, self._timing.fence_settle_s))

    def settled(self, token: Any, now_s: float) -> None:
        """Drain what the token names: the transport has read for long enough. Unknown: no-op."""
        for room, event in self._drains(token):
            # A process that has spoken as two ranks may have drained its room by the first of them.
            if token in room.settling and self.get(room.key) is room:
                self.on(room, event, now_s)
        for room, _ in self._drains(token):
            room.settling.discard(token)

    def _drains(self, token: Any) -> list[tuple[Room, receiver.ReceiverEvent]]:
        """Return the rooms that a token is of, each with what drains a rank of it."""
        if isinstance(token, Drained):
            room = self.get(token.key)
            # One rank, one use of a room. The number may be in use again: then the ticket differs.
            return [(room, token)] if room is not None and room.ticket == token.ticket else []
        # A whole process: all its rooms if it was fenced. If it said itself that it leaves, only
        # those that were promised to it at that address, since any process may speak under its name
        # elsewhere.
        what = (token.peer, token.address) if isinstance(token, Left) else (token, None)
        of = [(room, rank) for room in self.all() for rank in room.ranks_of(*what)]
        return [(room, receiver.FencedOff(rank)) for room, rank in of]

    def tell(self, room: Room, rank: int, body: messages.AnyBody, now_s: float) -> None:
        link = room.links[rank]
        is_meant = link.peer == room.peers[rank]
        if isinstance(body, messages.Promise | messages.Abort) and link.peer is not None:
            life, digest = link.peer.incarnation, room.promise.digest
            body = msgspec.structs.replace(body, digest=digest, life=life)
        # Where another life answers by now, its engine may still get the request. So an abort goes
        # to it too, without the ticket, which only the former life knows. No other word does.
        if not is_meant and isinstance(body, messages.Abort) and link.ready and room.promise.digest:
            self._links.send(link, msgspec.structs.replace(body, ticket=0), now_s)
        elif is_meant:
            self._links.send(link, body, now_s)

    def drop(self, room: Room) -> None:
        del self[room.key]
        if room in room.link.waiting:
            room.link.waiting.remove(room)
        self._timers.forget(room.key)


class Landings:
    """How a chunk lands whose notification has come: it counts at once. Owned by a
    `DecodeControl`. A part that compares its pages before overrides this."""

    def __init__(self, rooms: ReceiverRooms, inbox: ControlInbox[Any, Any], page_size: int) -> None:
        self._rooms, self._say, self._page_size = rooms, inbox.say, page_size

    def promised(self, room: Room) -> None:
        """The pages of a room are promised next, over its links."""

    def on_landed(self, room: Room, tag: ChunkTag, now_s: float) -> None:
        """Take the notification of a part that went straight into our pages."""
        part = tag.rank, tag.chunk, tag.part, tag.num_parts, tag.num_pages
        self._rooms.on(room, receiver.ChunkLanded(*part), now_s)
