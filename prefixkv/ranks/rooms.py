"""One room on all ranks of a decode worker: what the ranks say of it, joined to what the scheduler
hears. Pure.

Every rank receives its part of the KV in a room of its own, from its own writers. The request has
its KV when all have; it fails when the first one does, and then the others are told to end theirs;
its pages, which are the same on every rank, may be used again when no rank can be written any more.

The ranks above 0 get their commands with rank 0's operation log, and answer with `RankNews`: the
engine carries both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from prefixkv.errors import AbortedError, CallerError, TransferError
from prefixkv.protocol.commands import (
    AbortRoom,
    Command,
    OpenRoom,
    RefuseRoom,
)
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Promise
from prefixkv.protocol.receiver_machine import RoomDrained, RoomEnded, RoomOverdue

RoomEvent = RoomEnded | RoomDrained | RoomOverdue


@dataclass(slots=True)
class _Room:
    succeeded: set[int] = field(default_factory=set)
    drained: set[int] = field(default_factory=set)
    failed: bool = False
    overdue: bool = False
    aux: bytes = b""


class RankRooms:
    """Owned by rank 0's scheduler thread."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._rooms: dict[RoomKey, _Room] = {}

    def __len__(self) -> int:
        """Rooms of which some rank has spoken, and not all have said their last word."""
        return len(self._rooms)

    def on(self, rank: int, event: RoomEvent) -> tuple[list[RoomEvent], list[AbortRoom]]:
        """A rank's word: what it means for the scheduler, and what all ranks are to be told for
        it."""
        room = self._rooms.setdefault(event.key, _Room())
        news: list[RoomEvent] = []
        commands: list[AbortRoom] = []
        match event:
            case RoomEnded(key, KVPoll.SUCCESS):
                room.succeeded.add(rank)
                room.aux = event.aux if rank == 0 else room.aux
                if len(room.succeeded) == self.num_ranks:
                    news.append(RoomEnded(key, KVPoll.SUCCESS, aux=room.aux))
            case RoomEnded(key, poll, error) if not room.failed:
                room.failed = True
                news.append(RoomEnded(key, poll, error))
                commands.append(AbortRoom(key, AbortedError(f"rank {rank} failed: {error}")))
            case RoomDrained():
                room.drained.add(rank)
            case RoomOverdue() if not room.overdue:
                room.overdue = True
                news.append(event)
        if (
            len(room.succeeded | room.drained) == self.num_ranks
        ):  # a rank that succeeded is written no more
            if len(room.succeeded) < self.num_ranks:
                news.append(RoomDrained(event.key))
            del self._rooms[event.key]
        return news, commands


# --- what travels between the ranks -------------------------------------------------------------


class _Struct(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    pass


class Opened(_Struct, frozen=True, tag="open"):
    promise: Promise
    address: str


class Aborted(_Struct, frozen=True, tag="abort"):
    key: RoomKey
    reason: str


class Refused(_Struct, frozen=True, tag="refuse"):
    key: RoomKey
    ticket: int
    address: str
    reason: str


class Fenced(_Struct, frozen=True, tag="fence"):
    """The caller knows that this incarnation can write no more."""

    peer: PeerId


RoomOrder = Opened | Aborted | Refused | Fenced


def order_of(command: Command) -> RoomOrder:
    """A scheduler's command as it travels."""
    match command:
        case OpenRoom(promise, address):
            return Opened(promise, address)
        case AbortRoom(key, error):
            return Aborted(key, str(error)[:1000])
        case RefuseRoom(key, ticket, address, error):
            return Refused(key, ticket, address, str(error)[:1000])


def command_of(order: Opened | Aborted | Refused) -> Command:
    """Inverse of `order_of`; errors come back as AbortedError."""
    match order:
        case Opened(promise, address):
            return OpenRoom(promise, address)
        case Aborted(key, reason):
            return AbortRoom(key, AbortedError(reason))
        case Refused(key, ticket, address, reason):
            return RefuseRoom(key, ticket, address, AbortedError(reason))


class _Said(msgspec.Struct, frozen=True, array_like=True):
    what: str  # "success", "failed", "drained" or "overdue"
    key: RoomKey
    text: str = ""
    aux: bytes = b""


class RankNews(msgspec.Struct, frozen=True, array_like=True):
    """What became of rooms on a rank above 0, in order."""

    rank: int
    number: int
    said: list[_Said]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankNews).decode


def pack_news(rank: int, number: int, events: Iterable[RoomEvent]) -> bytes:
    """Rank `rank`'s message `number`, counted from 0."""
    return _encode(RankNews(rank, number, [_said(event) for event in events]))


def unpack_news(raw: bytes) -> tuple[RankNews, list[RoomEvent]]:
    """Inverse of `pack_news`. Raises CallerError for bytes that are none."""
    try:
        news = _decode(raw)
    except msgspec.MsgspecError as error:
        raise CallerError(f"{len(raw)} bytes that are no news of a rank: {error}") from error
    return news, [_event(said, news.rank) for said in news.said]


def _said(event: RoomEvent) -> _Said:
    match event:
        case RoomEnded(key, KVPoll.SUCCESS):
            return _Said("success", key, aux=event.aux)
        case RoomEnded(key, _, error):
            return _Said("failed", key, str(error)[:1000])
        case RoomDrained(key):
            return _Said("drained", key)
        case RoomOverdue(key):
            return _Said("overdue", key)


def _event(said: _Said, rank: int) -> RoomEvent:
    match said.what:
        case "success":
            return RoomEnded(said.key, KVPoll.SUCCESS, aux=said.aux)
        case "failed":
            return RoomEnded(
                said.key, KVPoll.FAILED, TransferError(f"decode rank {rank}: {said.text}")
            )
        case "drained":
            return RoomDrained(said.key)
        case "overdue":
            return RoomOverdue(said.key)
    raise CallerError(f"{said.what!r} is no news of a room")
