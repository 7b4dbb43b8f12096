"""One room on all ranks of a decode worker: the events of the ranks, joined to those that the
scheduler gets. Pure.

Every rank receives its part of the KV in a room of its own, from its own writers. The request has
its KV when all have; it fails when the first one does, and then the others have to end theirs; its
pages, which are the same on every rank, may be used again when no rank can be written any more.

The ranks above 0 get their commands with rank 0's operation log, and answer with `RankEvents`: the
engine carries both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from prefixkv.errors import PeerLostError, TransferError, WeightsVersionError
from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.events import (
    CopyEnded,
    DecodeEvent,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
    decode_error,
    encode_error,
)
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.messages import RankMessages, decoded


@dataclass(slots=True)
class _RankReports:
    """Ranks of one room of a decode worker by what they have reported."""

    succeeded: set[int] = field(default_factory=set)
    drained: set[int] = field(default_factory=set)
    failed: bool = False
    overdue: bool = False
    aux: bytes = b""


class RankRooms:
    """Rooms that are not over on all ranks. Owned by rank 0's scheduler thread."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._rooms: dict[RoomKey, _RankReports] = {}
        self._messages = RankMessages(num_ranks)

    def __len__(self) -> int:
        """Return the number of rooms that some rank has reported on, and that are not over on all
        ranks.
        """
        return len(self._rooms)

    def unpack(self, raw: bytes) -> Iterator[tuple[int, DecodeEvent | CopyEnded]]:
        """Return the room events of another rank's message to rank 0, as (rank, event) for `on`,
        and the ends of its copies.

        Each rank's messages have to come in order, and none may be left out: else it raises
        CallerError, with nothing changed.
        """
        message = decoded(raw, _decode, "a rank")
        self._messages.take(message.rank, message.number)
        return ((message.rank, event) for event in message.events)

    def on(self, rank: int, event: DecodeEvent) -> tuple[list[DecodeEvent], list[AbortRoom]]:
        """Join a rank's event of a room with those of the other ranks; return events for the
        scheduler, and commands for all ranks.
        """
        room = self._rooms.setdefault(event.key, _RankReports())
        events: list[DecodeEvent] = []
        commands: list[AbortRoom] = []
        # 1. Success: the request's only when it is every rank's. Rank 0's `aux` is passed on.
        # 2. A failure after another: the request has failed, and the others have their abort.
        # 3. The first failure ends the room on all ranks.
        # 4. Drained: only when it is all ranks' are the pages free, since all have the same page
        # ids.
        # 5. Overdue: passed on once.
        match event:
            case RoomEnded(key, KVPoll.SUCCESS):
                room.succeeded.add(rank)
                room.aux = event.aux if rank == 0 else room.aux
                if len(room.succeeded) == self.num_ranks:
                    events.append(RoomEnded(key, KVPoll.SUCCESS, aux=room.aux))
            case RoomEnded() if room.failed:
                pass
            case RoomEnded(key, poll, error):
                room.failed = True
                joined = error if rank == 0 else of_rank("decode", rank, error)
                events.append(RoomEnded(key, poll, joined))
                commands.append(AbortRoom(key, f"rank {rank} failed: {joined}"))
            case RoomDrained():
                room.drained.add(rank)
            case RoomOverdue():
                events += [event] if not room.overdue else []
                room.overdue = True
            case _:
                assert_never(event)
        # A rank that succeeded is written no more, so it counts as drained where another one
        # failed.
        if len(room.succeeded | room.drained) == self.num_ranks:
            if len(room.succeeded) < self.num_ranks:
                events.append(RoomDrained(event.key))
            # Every rank has sent its last event of the room, so no later one makes an entry again.
            del self._rooms[event.key]
        return events, commands


def of_rank(side: str, rank: int, error: Exception | None) -> TransferError:
    """Return the error of a room on another rank of decode or prefill, for rank 0's scheduler: of
    the same class where it is a transfer's.
    """
    text = f"{side} rank {rank}: {error}"
    if isinstance(error, PeerLostError):
        return PeerLostError(text, error.peer)
    if isinstance(error, WeightsVersionError):
        return error
    return type(error)(text) if isinstance(error, TransferError) else TransferError(text)


class RankEvents(msgspec.Struct, frozen=True, array_like=True):
    """Events of rooms, and ends of copies, on a rank above 0, in order; `number` counts the rank's
    messages from 0."""

    rank: int
    number: int
    events: list[DecodeEvent | CopyEnded]


_encode = msgspec.msgpack.Encoder(enc_hook=encode_error).encode
_decode = msgspec.msgpack.Decoder(RankEvents, dec_hook=decode_error).decode


def pack_rank_events(rank: int, number: int, events: Sequence[DecodeEvent | CopyEnded]) -> bytes:
    """Return the room events of rank `rank` as the bytes of its message `number` to rank 0, counted
    from 0.
    """
    return _encode(RankEvents(rank, number, list(events)))
