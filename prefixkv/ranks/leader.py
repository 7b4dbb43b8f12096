"""Rank 0's scheduler among the ranks of a worker, of either side: it hears of a room, or of a copy,
what all ranks together say, and its commands go to every rank. Pure.

The first failure ends a room on all ranks. It is over when every rank is done with it: then its
number, and its pages, which have the same ids on all, may be used again. A rank whose process is
dead (`fence`) is done with everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from prefixkv.errors import CallerError, PeerLostError, TransferError, WeightsVersionError
from prefixkv.pages.requests import reason_of
from prefixkv.protocol.commands import AbortRoom, MeetPrefill
from prefixkv.protocol.events import (
    Bootstrapped,
    DecodeEvent,
    HostCopyDone,
    PrefillEvent,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
    SourceFree,
    WorkerEvent,
    decode_error,
    encode_error,
)
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import code_of
from prefixkv.ranks.row_log import RankLog, check_next, decoded
from prefixkv.settings import check_whole

E = TypeVar("E")  # events for the scheduler
C = TypeVar("C")  # its commands


class RankEvents(msgspec.Struct, Generic[E], frozen=True, array_like=True):
    """What became of rooms (and of decode's copies) on a rank above 0, in order; `number` counts
    its messages from 0."""

    rank: int
    number: int
    events: list[E]


_encode: Callable[[Any], bytes] = Encoder(enc_hook=encode_error).encode
_DECODERS: Mapping[str, Callable[[bytes], RankEvents[Any]]] = {
    "decode": Decoder(RankEvents[DecodeEvent | HostCopyDone], dec_hook=decode_error).decode,
    "prefill": Decoder(RankEvents[PrefillEvent], dec_hook=decode_error).decode,
}


def pack_rank_events(rank: int, number: int, events: Sequence[Any]) -> bytes:
    """Return the bytes of message `number`, counted from 0, of rank `rank` to rank 0."""
    return _encode(RankEvents(rank, number, list(events)))


@dataclass(slots=True)
class _Room:
    """Ranks of one room by what they have said."""

    done: set[int]  # nothing of it is written or read there any more
    begun: dict[int, Bootstrapped] = field(default_factory=dict)
    succeeded: dict[int, RoomEnded] = field(default_factory=dict)
    failed: bool = False
    overdue: bool = False


class RankLeader(Generic[C]):
    """Link between rank 0's scheduler and the control objects of all ranks. Owned by the
    scheduler's thread. Its length is the number of rooms that are not over on all ranks.

    `side`: "decode" or "prefill". `log`, for the other ranks' commands, is needed for more than one
    rank; `submit` hands a command to rank 0's own control object, `hear` an event to the scheduler.
    """

    def __init__(
        self,
        side: str,
        num_ranks: int,
        log: RankLog | None,
        submit: Callable[[C], None],
        hear: Callable[[Any, float], None],
    ) -> None:
        self._side, self._num_ranks = side, num_ranks
        self._submit, self._hear = submit, hear
        self._log = log if num_ranks > 1 else None
        self._rooms: dict[RoomKey, _Room] = {}
        self._copies: dict[int, dict[int, HostCopyDone]] = {}  # by copy, then by rank
        self._num_taken = [0] * num_ranks  # messages of each other rank
        self._fenced: dict[int, TransferError] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def command(self, command: C) -> None:
        """Send a command to every rank. But rank 0 alone asks which prefill workers answer; the
        others greet them with their first room."""
        self._submit(command)
        if self._log is not None and not isinstance(command, MeetPrefill):
            self._log.command(command)  # type: ignore[arg-type]

    def on_rank_events(self, raw: bytes, now_s: float) -> None:
        """Take another rank's message; b"" is none. What a rank said that was fenced is left out.

        Raises CallerError, with nothing changed, unless each rank's messages come in order, and
        none is left out.
        """
        if raw == b"":
            return
        message = decoded(raw, _DECODERS[self._side], "a rank")
        rank = message.rank
        if not 1 <= rank < self._num_ranks:
            raise CallerError(f"a message of rank {rank}, which this worker has not")
        check_next(message.number, self._num_taken[rank], rank)
        # Counted when all checks have passed: a message that was refused can be sent again.
        self._num_taken[rank] += 1
        for event in message.events if rank not in self._fenced else ():
            self.on(rank, event, now_s)

    def on(self, rank: int, event: Any, now_s: float) -> None:
        """Take an event of a rank's control object, or the end of its part of a copy."""
        # 1. With one rank nothing is to be joined, nor about a prefill worker: only rank 0 asks.
        # 2. A copy has ended when it has on all ranks.
        # 3. A room is joined with those of the other ranks.
        if self._num_ranks == 1 or isinstance(event, WorkerEvent):
            self._hear(event, now_s)
        elif isinstance(event, HostCopyDone):
            self._copies.setdefault(event.number, {})[rank] = event
            self._end_copy(event.number, now_s)
        else:
            room = self._rooms.setdefault(event.key, _Room(set(self._fenced)))
            self._on_room(rank, event, room, now_s)
            self._end_if_over(event.key, room, now_s)

    def _on_room(self, rank: int, event: Any, room: _Room, now_s: float) -> None:
        # 1. Computing begins when decode has promised to every rank, each of which sends its part.
        # 2. Success is the request's only when it is every rank's. Rank 0's `aux` is passed on. A
        # decode rank that has succeeded is written no more.
        # 3. The first failure ends the room on all ranks. After another one the request has failed,
        # and the others have their abort.
        # 4. That it is overdue is passed on once.
        # 5. Its pages are free when no rank uses them: all have the same page ids.
        match event:
            case Bootstrapped():
                room.begun[rank] = event
                if len(room.begun) == self._num_ranks and not room.failed:
                    self._hear(room.begun[0], now_s)
            case RoomEnded(poll=KVPoll.SUCCESS):
                room.succeeded[rank] = event
                if self._side == "decode":
                    room.done.add(rank)
                if len(room.succeeded) == self._num_ranks:
                    self._hear(room.succeeded[0], now_s)
            case RoomEnded(error=error):
                joined = error if rank == 0 else _of_rank(self._side, rank, error)
                # As a frame and a message carry it: rank 0's own error may be of any class.
                text = f"rank {rank} failed: {reason_of(joined or 'without a reason')}"
                self._fail(event.key, room, joined, reason_of(text), now_s)
            case RoomOverdue():
                if not room.overdue:
                    self._hear(event, now_s)
                room.overdue = True
            case _:
                room.done.add(rank)

    def _fail(
        self, key: RoomKey, room: _Room, error: Exception | None, reason: str, now_s: float
    ) -> None:
        if room.failed:
            return
        room.failed = True
        # Before the scheduler hears: it may open a new room at once, and the log keeps the order in
        # which ranks see both.
        self.command(AbortRoom(key, reason, code_of(error)))  # type: ignore[arg-type]
        self._hear(RoomEnded(key, KVPoll.FAILED, error), now_s)

    def _end_if_over(self, key: RoomKey, room: _Room, now_s: float) -> None:
        if len(room.done) < self._num_ranks:
            return
        # Every rank has sent its last event of the room, so no later one makes an entry again.
        del self._rooms[key]
        if self._side == "prefill":
            self._hear(SourceFree(key), now_s)
        elif len(room.succeeded) < self._num_ranks:
            self._hear(RoomDrained(key), now_s)

    def _end_copy(self, number: int, now_s: float) -> None:
        """The end of a copy on a dead rank is its death."""
        ends = self._copies[number]
        dead = [error for rank, error in self._fenced.items() if rank not in ends]
        if len(ends) + len(dead) < self._num_ranks:
            return
        del self._copies[number]
        errors = [*(done.error for done in ends.values() if done.error is not None), *dead]
        num_bytes = sum(done.num_bytes for done in ends.values())
        seconds = max(done.seconds for done in ends.values())
        self._hear(HostCopyDone(number, next(iter(errors), None), num_bytes, seconds), now_s)

    # --- ranks that are dead ----------------------------------------------------------------------

    def awaited(self) -> dict[int, int]:
        """Return, by rank, how many rooms wait for it alone. O(rooms)."""
        ranks = set(range(self._num_ranks))
        missing = (ranks - room.done for room in self._rooms.values())
        return dict(Counter(rank for one in missing if len(one) == 1 for rank in one))

    def fence(self, rank: int, now_s: float, end_all: Callable[[Exception], None]) -> None:
        """Note that a rank is dead: every request ends (`end_all`), and nothing waits for that
        rank. Raises CallerError, with nothing changed, for what is no rank above 0."""
        check_whole("rank", rank, 0, self._num_ranks - 1)
        if rank == 0:
            raise CallerError("rank is 0: that is this process")
        error = _of_rank(self._side, rank, PeerLostError("its process is dead"))
        # The requests first: none is to try again.
        end_all(error)
        self._fenced[rank] = error
        for key, room in list(self._rooms.items()):
            if rank not in room.succeeded:
                self._fail(key, room, error, str(error), now_s)
            room.done.add(rank)
            self._end_if_over(key, room, now_s)
        for number in list(self._copies):
            self._end_copy(number, now_s)


def _of_rank(side: str, rank: int, error: Exception | None) -> TransferError:
    text = f"{side} rank {rank}: {error}"
    if isinstance(error, PeerLostError):
        return PeerLostError(text, error.peer)
    if isinstance(error, WeightsVersionError):
        return error
    return type(error)(text) if isinstance(error, TransferError) else TransferError(text)
