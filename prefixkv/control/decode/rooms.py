"""Decode's open rooms: events go to a room's machine and through staging, effects come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.control.death_watch import LostPeers
from prefixkv.control.decode.links import Link, Links
from prefixkv.control.effects import Left, RankDrained, Settle
from prefixkv.control.handshake import named_end
from prefixkv.control.inbox import Say
from prefixkv.control.peer_changes import PeerChanges
from prefixkv.protocol import messages
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol.events import RoomEnded, RoomOverdue
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.machine import Fail
from prefixkv.protocol.receiver_machine import ReceiverMachine, SendToRank
from prefixkv.protocol.refusal_machine import RefusalMachine
from prefixkv.protocol.timers import Timers
from prefixkv.staging.receiver import StagingReceiver


@dataclass(slots=True, eq=False)
class Room:
    """One room of a decode rank.

    `link` leads to the leader of the prefill worker. `links` and `peers` are by rank, of those that
    the pages were promised to: `peers` are the processes at the time of the promise, and stay so
    when another process answers on the link.
    """

    machine: ReceiverMachine | RefusalMachine
    link: Link
    digest: bytes = b""  # of the prompt, where it is promised
    links: dict[int, Link] = field(default_factory=dict)
    peers: dict[int, PeerId] = field(default_factory=dict)

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
        if isinstance(self.machine, ReceiverMachine):
            for rank in self.machine.undrained:
                # A rank may be undrained before `peers` has it: then nothing was promised to it
                # yet.
                if rank in self.peers:
                    yield self.peers[rank], self.links[rank]

    def tell_overdue(self, news: PeerChanges) -> None:
        """Report each process that has not proved in time that it no longer writes."""
        for peer, _ in self.writers():
            key, pages = self.machine.key, getattr(self.machine, "num_pages", 0)
            room = f"of room {key.room} generation {key.generation}"
            news.say("quarantined", peer, f"has not proved that {pages} pages {room} are free")


def lost_peers(rooms: Iterable[Room], wrong: Callable[[PeerId, Link], str]) -> LostPeers:
    """For each writer with something `wrong`, the reason and the pages it holds."""
    found: LostPeers = {}
    for room in rooms:
        for peer, link in room.writers():
            if what := wrong(peer, link):
                assert isinstance(room.machine, ReceiverMachine)
                pages = found[peer][1] if peer in found else 0
                found[peer] = what, pages + room.machine.num_pages
    return found


class ReceiverRooms:
    """The rooms of one decode rank that are open or not drained. Owned by a `DecodeControl`.
    What is to be done is said, in order.

    `timers` wake rooms by key; links share them. `staging`: None where no slices are staged.
    """

    def __init__(
        self,
        timing: ControlConfig,
        timers: Timers[str | RoomKey],
        links: Links,
        staging: StagingReceiver | None,
        news: PeerChanges,
        say: Say,
        option_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.num_expected = 0  # rooms with pages that a peer may be writing now
        self.settling: set[Hashable] = set()  # tokens of the `Settle`s that are not answered yet
        self._rooms: dict[RoomKey, Room] = {}
        self._timing = timing
        self._timers = timers
        self._links = links
        self._staging = staging
        self._news = news
        self._say = say
        self._option_names = option_names

    def __len__(self) -> int:
        return len(self._rooms)

    def __getitem__(self, key: RoomKey) -> Room:
        return self._rooms[key]

    def get(self, key: RoomKey) -> Room | None:
        return self._rooms.get(key)

    def all(self) -> list[Room]:
        """Return a copy of the list."""
        return list(self._rooms.values())  # in one step: any thread may call this

    def add(self, room: Room) -> None:
        """Let a room wait at its leader's link until it can be promised."""
        key, link = room.machine.key, room.link
        self._rooms[key] = room
        link.rooms.add(key)
        link.waiting[key] = None
        self._timers.wake(key, room.machine.wake_s)

    def on(self, room: Room, event: receiver.ReceiverEvent, now_s: float) -> None:
        """Give an event to a room's machine and carry out its actions; drop it once it is over."""
        machine = room.machine
        expected = machine.is_written
        # The count is corrected even if an action raises: the transport must go on listening for
        # the room, since its pages may be written all the same.
        try:
            for action in machine.on(event, now_s):
                if isinstance(action, SendToRank):
                    self.tell(room, action.rank, action.body, now_s)
                    continue
                if isinstance(action, RoomEnded):
                    action = named_end(action, self._option_names)
                # Staging sees the end of a room first: it may still hold leases that peers write,
                # and passes RoomDrained on only when these are free.
                passed = [action] if self._staging is None else self._staging.pass_on(action)
                for said in passed:
                    self._say(said)
                if isinstance(action, RoomOverdue):
                    room.tell_overdue(self._news)
        finally:
            self.num_expected += machine.is_written - expected
        if machine.over:
            self.drop(room)
        else:
            self._timers.wake(machine.key, machine.wake_s)

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

    def settle(self, token: PeerId | Left | RankDrained, now_s: float) -> None:
        """Drain what a writer holds, whose agent is gone as the token says, once the transport has
        read what kernels may still hold of it. A token that is settling already is not repeated."""
        if not self._timing.fence_settle_s:
            self._drain(token, now_s)
        elif token not in self.settling:
            self.settling.add(token)
            self._say(Settle(token, self._timing.fence_settle_s))

    def settled(self, token: Hashable, now_s: float) -> None:
        """Drain what the token names: the transport has read for long enough. Unknown: no-op."""
        if token in self.settling:
            self.settling.discard(token)
            self._drain(token, now_s)

    def _drain(self, token: Hashable, now_s: float) -> None:
        if isinstance(token, RankDrained):
            drained = self._rooms.get(token.key)
            # One rank, one use of a room. The number may be in use again: then the ticket differs.
            if drained is not None and drained.machine.ticket == token.ticket:
                self.on(drained, receiver.DrainedSaid(token.rank), now_s)
        elif isinstance(token, PeerId | Left):
            # A whole process: all its rooms if it was fenced. If it said itself that it leaves,
            # only those that were promised to it at that address, since any process may speak under
            # its name elsewhere.
            left = token if isinstance(token, Left) else None
            what = (token, None) if left is None else (left.peer, left.address)
            for room in self.all():
                for rank in room.ranks_of(*what):
                    self.on(room, receiver.FencedOff(rank), now_s)

    def tell(self, room: Room, rank: int, body: messages.AnyBody, now_s: float) -> None:
        link = room.links[rank]
        is_meant = link.peer == room.peers[rank]
        if isinstance(body, messages.Promise | messages.Abort) and link.peer is not None:
            body = msgspec.structs.replace(body, digest=room.digest, life=link.peer.incarnation)
        # Where another life answers by now, its engine may still get the request. So an abort goes
        # to it too, without the ticket, which only the former life knows. No other word does.
        if not is_meant and isinstance(body, messages.Abort) and link.ready and room.digest:
            self._links.send(link, msgspec.structs.replace(body, ticket=0), now_s)
        elif is_meant:
            self._links.send(link, body, now_s)

    def drop(self, room: Room) -> None:
        key = room.machine.key
        del self._rooms[key]
        for link in (room.link, *room.links.values()):
            link.rooms.discard(key)
        room.link.waiting.pop(key, None)
        self._timers.forget(key)
