"""The rooms of one number on all ranks of a worker, joined at rank 0, of either side. Pure.

The first failure ends the room on all ranks. It is over when every rank is done with it: then its
number, and its pages, which have the same ids on all, may be used again. A rank whose process is
dead (`fence`) is done with everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from prefixkv.errors import PeerLostError, TransferError, WeightsVersionError
from prefixkv.pages.requests import reason_of
from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.events import RoomEnded, encode_error
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.messages import RankMessages, decoded


@dataclass(slots=True)
class Reports:
    """Ranks of one room by what they have reported."""

    succeeded: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)  # nothing of it is written or read there any more
    failed: bool = False


R = TypeVar("R", bound=Reports)
E = TypeVar("E")  # events for the scheduler


class RankEvents(msgspec.Struct, Generic[E], frozen=True, array_like=True):
    """What became of rooms (and of decode's copies) on a rank above 0, in order; `number` counts
    its messages from 0."""

    rank: int
    number: int
    events: list[E]


_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=encode_error).encode


def pack_rank_events(rank: int, number: int, events: Sequence[Any]) -> bytes:
    """Return the bytes of message `number`, counted from 0, of rank `rank` to rank 0."""
    return _encode(RankEvents(rank, number, list(events)))


class JoinedRooms(ABC, Generic[R, E]):
    """Rooms that are not over on all ranks of a worker. Owned by rank 0's scheduler thread."""

    side: ClassVar[str]
    make_reports: type[R]
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]  # of RankEvents

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._rooms: dict[RoomKey, R] = {}
        self._messages = RankMessages(num_ranks)

    def __len__(self) -> int:
        return len(self._rooms)

    def unpack(self, raw: bytes) -> Iterator[tuple[int, Any]]:
        """Return the events of another rank's message, as (rank, event) for `on`; none of a rank
        that was fenced.

        Raises CallerError, with nothing changed, unless each rank's messages come in order, and
        none is left out.
        """
        message: RankEvents[Any] = decoded(raw, self.decoder.decode, "a rank")
        self._messages.take(message.rank, message.number)
        if message.rank in self._messages.fenced:
            return iter(())
        return ((message.rank, event) for event in message.events)

    def _room(self, key: RoomKey) -> R:
        if (room := self._rooms.get(key)) is None:
            room = self._rooms[key] = self.make_reports(done=self._messages.fenced.copy())
        return room

    def _first_failure(
        self, key: RoomKey, room: R, rank: int, error: Exception | None, poll: KVPoll
    ) -> tuple[RoomEnded, AbortRoom]:
        room.failed = True
        joined = error if rank == 0 else of_rank(self.side, rank, error)
        # As a frame and a message carry it: rank 0's own error may be of any class.
        reason = reason_of(f"rank {rank} failed: {reason_of(joined or 'without a reason')}")
        return RoomEnded(key, poll, joined), AbortRoom(key, reason)

    @abstractmethod
    def _if_over(self, key: RoomKey, room: R) -> list[E]:
        """Forget a room with which every rank is done, and return the event for that."""

    # --- ranks that are dead ----------------------------------------------------------------------

    def death(self, rank: int) -> TransferError:
        """Return the error of what ends since this rank is dead. Raises CallerError for what is no
        rank above 0."""
        self._messages.check_rank(rank)
        return of_rank(self.side, rank, PeerLostError("its process is dead"))

    def awaited(self) -> dict[int, int]:
        """Return, by rank, how many rooms wait for it alone. O(rooms)."""
        ranks = set(range(self.num_ranks))
        missing = (ranks - room.done for room in self._rooms.values())
        return dict(Counter(rank for one in missing if len(one) == 1 for rank in one))

    def fence(self, rank: int) -> tuple[list[E | RoomEnded], list[AbortRoom]]:
        """Count a dead rank as done with every room; those on which it has not succeeded fail.
        Return events for the scheduler, and commands for all ranks."""
        error = self.death(rank)
        self._messages.fenced.add(rank)
        events: list[E | RoomEnded] = []
        commands: list[AbortRoom] = []
        for key, room in list(self._rooms.items()):
            if not room.failed and rank not in room.succeeded:
                room.failed = True
                events.append(RoomEnded(key, KVPoll.FAILED, error))
                commands.append(AbortRoom(key, str(error)))
            room.done.add(rank)
            events += self._if_over(key, room)
        return events, commands


def of_rank(side: str, rank: int, error: Exception | None) -> TransferError:
    text = f"{side} rank {rank}: {error}"
    if isinstance(error, PeerLostError):
        return PeerLostError(text, error.peer)
    if isinstance(error, WeightsVersionError):
        return error
    return type(error)(text) if isinstance(error, TransferError) else TransferError(text)
