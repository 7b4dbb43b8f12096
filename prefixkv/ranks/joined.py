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
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec

from prefixkv.errors import CallerError, PeerLostError, TransferError, WeightsVersionError
from prefixkv.pages.requests import reason_of
from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.events import RoomDrained, RoomEnded, SourceFree, encode_error
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.messages import decoded
from prefixkv.settings import check_whole


@dataclass(slots=True)
class Reports:
    """Ranks of one room by what they have reported."""

    succeeded: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)  # nothing of it is written or read there any more
    failed: bool = False
    aux: bytes = b""  # with rank 0's success


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
    last: ClassVar[type[RoomDrained | SourceFree]]  # a rank's event that says it is done
    done_at_success: ClassVar[bool] = False  # or its success says so
    make_reports: type[R]
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]  # of RankEvents

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._rooms: dict[RoomKey, R] = {}
        self._num_taken = [0] * num_ranks  # messages of each other rank
        self._fenced: set[int] = set()

    def __len__(self) -> int:
        return len(self._rooms)

    def unpack(self, raw: bytes) -> Iterator[tuple[int, Any]]:
        """Return the events of another rank's message, as (rank, event) for `on`; none of a rank
        that was fenced.

        Raises CallerError, with nothing changed, unless each rank's messages come in order, and
        none is left out.
        """
        message: RankEvents[Any] = decoded(raw, self.decoder.decode, "a rank")
        rank, number = message.rank, message.number
        if not 1 <= rank < self.num_ranks:
            raise CallerError(f"a message of rank {rank}, which this worker has not")
        if number != (due := self._num_taken[rank]):
            raise CallerError(f"message {number} of rank {rank}, {due} is next")
        # Counted when all checks have passed: a message that was refused can be sent again.
        self._num_taken[rank] += 1
        events = () if rank in self._fenced else message.events
        return ((rank, event) for event in events)

    def on(self, rank: int, event: Any) -> tuple[list[E | RoomEnded], list[AbortRoom]]:
        """Take a rank's event; return events for the scheduler, and commands for all ranks."""
        if (room := self._rooms.get(event.key)) is None:
            room = self._rooms[event.key] = self.make_reports(done=self._fenced.copy())
        events: list[E | RoomEnded] = []
        commands: list[AbortRoom] = []
        # 1. Success is the request's only when it is every rank's. Rank 0's `aux` is passed on.
        # 2. A failure after another: the request has failed, and the others have their abort.
        # 3. The first failure ends the room on all ranks.
        # 4. Its pages are free when no rank uses them: all have the same page ids.
        match event:
            case RoomEnded(key, KVPoll.SUCCESS):
                room.succeeded.add(rank)
                room.done |= {rank} if self.done_at_success else set()
                room.aux = event.aux if rank == 0 else room.aux
                if len(room.succeeded) == self.num_ranks:
                    events.append(RoomEnded(key, KVPoll.SUCCESS, aux=room.aux))
            case RoomEnded() if room.failed:
                pass
            case RoomEnded(key, poll, error):
                room.failed = True
                joined = error if rank == 0 else of_rank(self.side, rank, error)
                # As a frame and a message carry it: rank 0's own error may be of any class.
                reason = reason_of(f"rank {rank} failed: {reason_of(joined or 'without a reason')}")
                events.append(RoomEnded(key, poll, joined))
                commands.append(AbortRoom(key, reason))
            case _ if isinstance(event, self.last):
                room.done.add(rank)
            case _:
                events += self._other(rank, event, room)
        events += self._if_over(event.key, room)
        return events, commands

    @abstractmethod
    def _other(self, rank: int, event: Any, room: R) -> list[E]:
        """Take the one event that this side alone has."""

    def _if_over(self, key: RoomKey, room: R) -> list[E]:
        """Forget a room with which every rank is done, and return the event for that."""
        if len(room.done) < self.num_ranks:
            return []
        # Every rank has sent its last event of the room, so no later one makes an entry again.
        del self._rooms[key]
        told = self.done_at_success and len(room.succeeded) == self.num_ranks
        return [] if told else [cast(E, self.last(key))]

    # --- ranks that are dead ----------------------------------------------------------------------

    def death(self, rank: int) -> TransferError:
        """Return the error of what ends since this rank is dead. Raises CallerError for what is no
        rank above 0."""
        check_whole("rank", rank, 0, self.num_ranks - 1)
        if rank == 0:
            raise CallerError("rank is 0: that is this process")
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
        self._fenced.add(rank)
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
