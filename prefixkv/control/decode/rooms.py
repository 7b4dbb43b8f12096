"""Decode's rooms: what happens to one goes through its machine, and through staging, and what these
want comes out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import assert_never

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.control.decode.links import Links
from prefixkv.control.effects import Left, RankDrained, Settle
from prefixkv.control.handshake import named_end
from prefixkv.control.peer_changes import News
from prefixkv.control.rooms import Room
from prefixkv.control.sides import DecodeEffect
from prefixkv.protocol import messages
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol.events import RoomDrained, RoomEnded, RoomOverdue
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.receiver_machine import Say
from prefixkv.protocol.timers import Timers
from prefixkv.staging.receiver import Action as StagingAction
from prefixkv.staging.receiver import Arrived, BreakRoom, Grant, Scatter, StagingReceiver


class ReceiverRooms:
    """Owned by a `DecodeControl`. Where `out` is given, what is to be done is added to it, in
    order.

    Args:
        timers: they wake rooms by key; links share them.
        staging: None where no slices are staged.
        option_names: as of `ModelConfig`.
    """

    def __init__(
        self,
        timing: ControlConfig,
        timers: Timers[str | RoomKey],
        links: Links,
        staging: StagingReceiver | None,
        news: News,
        option_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.num_expected = 0  # rooms whose pages a peer may be writing now
        self.settling: set[Hashable] = set()  # tokens
        self._rooms: dict[RoomKey, Room] = {}
        self._timing = timing
        self._timers = timers
        self._links = links
        self._staging = staging
        self._news = news
        self._option_names = option_names

    def __len__(self) -> int:
        return len(self._rooms)

    def __getitem__(self, key: RoomKey) -> Room:
        return self._rooms[key]

    def get(self, key: RoomKey) -> Room | None:
        return self._rooms.get(key)

    def all(self) -> list[Room]:
        return list(self._rooms.values())  # at once: any thread may ask

    def add(self, room: Room) -> None:
        """It waits at its leader's link until it can be promised."""
        key, link = room.machine.key, room.link
        self._rooms[key] = room
        link.rooms.add(key)
        link.waiting[key] = None
        self._timers.wake(key, room.machine.wake_s)

    def on(self, room: Room, event: receiver.Event, now_s: float, out: list[DecodeEffect]) -> None:
        """Something happens to the room; it is dropped here once nothing more can."""
        machine = room.machine
        expected = machine.is_written
        try:
            for action in machine.on(event, now_s):
                if isinstance(action, Say):
                    self._say(room, action.rank, action.body, now_s, out)
                    continue
                if isinstance(action, RoomEnded):
                    action = named_end(action, self._option_names)
                if self._staging is not None:
                    self.staged(self._staging.pass_on(action), now_s, out)
                else:
                    out.append(action)
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
        out: list[DecodeEffect],
        address: str | None = None,
    ) -> None:
        """Those that were promised to this process end; with `address`, those promised to it
        there."""
        for room in self.all():
            for rank in room.ranks_of(peer, address):
                self.on(room, receiver.Fail(error, lost=rank), now_s, out)

    def settle(
        self, token: PeerId | Left | RankDrained, now_s: float, out: list[DecodeEffect]
    ) -> None:
        """A writer's agent is gone: its writes are over once the transport has read what kernels
        may still hold of it."""
        if not self._timing.fence_settle_s:
            self._drain(token, now_s, out)
        elif token not in self.settling:
            self.settling.add(token)
            out.append(Settle(token, self._timing.fence_settle_s))

    def settled(self, token: Hashable, now_s: float, out: list[DecodeEffect]) -> None:
        """The transport has been reading for long enough since that `Settle`."""
        if token in self.settling:
            self.settling.discard(token)
            self._drain(token, now_s, out)

    def _drain(self, token: Hashable, now_s: float, out: list[DecodeEffect]) -> None:
        if isinstance(token, RankDrained):
            drained = self._rooms.get(token.key)
            if drained is not None and drained.machine.ticket == token.ticket:
                self.on(drained, receiver.DrainedSaid(token.rank), now_s, out)
        elif isinstance(token, PeerId | Left):
            left = token if isinstance(token, Left) else None
            what = (token, None) if left is None else (left.peer, left.address)
            for room in self.all():
                for rank in room.ranks_of(*what):
                    self.on(room, receiver.FencedOff(rank), now_s, out)

    def staged(self, actions: list[StagingAction], now_s: float, out: list[DecodeEffect]) -> None:
        """What staging wants."""
        for action in actions:
            match action:
                case Grant():
                    room = self._rooms.get(action.key)
                    if room is not None:
                        self._say(room, action.rank, action.grant, now_s, out)
                case Arrived():
                    if (room := self._rooms.get(action.key)) is not None:
                        landed = receiver.UnitsStaged(action.rank, action.num_units)
                        self.on(room, landed, now_s, out)
                case BreakRoom():
                    self.on(self._rooms[action.key], receiver.Fail(action.error), now_s, out)
                case Scatter() | RoomEnded() | RoomDrained() | RoomOverdue():
                    out.append(action)
                case _:
                    assert_never(action)

    def _say(
        self, room: Room, rank: int, body: messages.AnyBody, now_s: float, out: list[DecodeEffect]
    ) -> None:
        link = room.links[rank]
        if link.peer != room.peers[rank]:  # the one it is meant for listens there no more
            if isinstance(body, messages.Abort) and link.ready and room.digest:
                # Another life answers there, and its engine may still get the request. Without the
                # ticket, which is only the former one's to know.
                word = msgspec.structs.replace(body, ticket=0)
                word = self._links.with_proof(link, word, room.digest)
                out.append(self._links.send(link, word, now_s))
            return
        if isinstance(body, messages.Promise) or (isinstance(body, messages.Abort) and room.digest):
            body = self._links.with_proof(link, body, room.digest)
        out.append(self._links.send(link, body, now_s))

    def drop(self, room: Room) -> None:
        key = room.machine.key
        del self._rooms[key]
        for link in (room.link, *room.links.values()):
            link.rooms.discard(key)
        room.link.waiting.pop(key, None)
        self._timers.forget(key)
