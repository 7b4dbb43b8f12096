"""Rank 0's scheduler among the ranks of a decode worker: it gets the events of rooms that all ranks
together report, and its commands go to every rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from prefixkv.errors import CallerError
from prefixkv.protocol.commands import DecodeCommand, MeetPrefill
from prefixkv.protocol.events import (
    CopyEnded,
    DecodeEvent,
    PrefillAway,
    PrefillLost,
    PrefillReady,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
    WorkerEvent,
)
from prefixkv.protocol.host_copy import HostCopyDone
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.copies import RankCopies
from prefixkv.ranks.messages import check_bytes
from prefixkv.ranks.rooms import RankRooms
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import DeviceEvent


class RoomScheduler(Protocol):
    """Methods of a DecodeScheduler that are needed here."""

    def room_ended(
        self, key: RoomKey, poll: KVPoll, error: Exception | None, aux: bytes, now_s: float
    ) -> None: ...

    def room_drained(self, key: RoomKey) -> None: ...

    def room_overdue(self, key: RoomKey) -> None: ...

    def copy_ended(self, done: HostCopyDone, now_s: float) -> None: ...

    def end_all(self, error: Exception, now_s: float, after: DeviceEvent | None) -> None: ...

    def prefill_ready(self, address: str, max_tokens: int, now_s: float) -> None: ...

    def prefill_away(self, address: str, now_s: float) -> None: ...

    def prefill_lost(self, address: str, error: Exception, now_s: float) -> None: ...


class RankLeader:
    """Link between rank 0's scheduler and the control objects of all ranks. Owned by the
    scheduler's thread.

    `log`, for the other ranks' commands, is needed for more than one rank; `submit` hands a command
    to rank 0's own control object.
    """

    def __init__(
        self,
        scheduler: RoomScheduler,
        num_ranks: int,
        log: RankLog | None,
        submit: Callable[[DecodeCommand], None],
    ) -> None:
        self._scheduler = scheduler
        self._submit = submit
        self._log = log if num_ranks > 1 else None
        self.rooms = RankRooms(num_ranks) if num_ranks > 1 else None
        self.copies = RankCopies(num_ranks)

    def command(self, command: DecodeCommand) -> None:
        """Send a command to every rank. But rank 0 alone asks which prefill workers answer; the
        others greet them with their first room."""
        self._submit(command)
        if self._log is not None and not isinstance(command, MeetPrefill):
            self._log.command(command)

    def on(self, event: DecodeEvent | WorkerEvent, now_s: float) -> None:
        """Take an event of rank 0's control object, joined with the other ranks' if need be."""
        match event:
            # 1. About a prefill worker: only rank 0 asks, so nothing is to be joined.
            # 2. About a room, with one rank: it is the scheduler's as it is.
            # 3. About a room, with several: joined with those of the other ranks.
            case PrefillReady(address, max_tokens):
                self._scheduler.prefill_ready(address, max_tokens, now_s)
            case PrefillAway(address):
                self._scheduler.prefill_away(address, now_s)
            case PrefillLost(address, error):
                self._scheduler.prefill_lost(address, error, now_s)
            case _ if self.rooms is None:
                self._on_joined_event(event, now_s)
            case _:
                self._pass_on(*self.rooms.on(0, event), now_s)

    def on_rank_events(self, raw: bytes, now_s: float) -> None:
        """Take another rank's message; b"" is none. Raises CallerError if not all come, in
        order."""
        check_bytes(raw)
        if not raw:
            return
        if self.rooms is None:
            raise CallerError("events of another rank, and this worker has only one")
        for rank, event in self.rooms.unpack(raw):
            if isinstance(event, CopyEnded):
                done = HostCopyDone(event.number, event.error, event.num_bytes, event.seconds)
                self.on_copy(rank, done, now_s)
            else:
                self._pass_on(*self.rooms.on(rank, event), now_s)

    def on_copy(self, rank: int, done: HostCopyDone, now_s: float) -> None:
        """Take the end of a copy on one rank; the scheduler gets it once it has ended on all."""
        if (joined := self.copies.on(rank, done)) is not None:
            self._scheduler.copy_ended(joined, now_s)

    def fence(self, rank: int, now_s: float, after: DeviceEvent | None) -> None:
        """Note that a rank is dead: every request ends, and nothing waits for it. `after` is as for
        `DecodeScheduler.abort`. Raises CallerError for what is no other rank."""
        if self.rooms is None:
            raise CallerError("this worker has only one rank")
        error = self.rooms.death(rank)
        # The requests first: none is to try again.
        self._scheduler.end_all(error, now_s, after)
        self._pass_on(*self.rooms.fence(rank), now_s)
        for done in self.copies.fence(rank, error):
            self._scheduler.copy_ended(done, now_s)

    def _pass_on(
        self, joined: Sequence[DecodeEvent], commands: Sequence[DecodeCommand], now_s: float
    ) -> None:
        # Before the scheduler hears: it may open a new room at once, and the log keeps the order in
        # which ranks see both.
        for command in commands:
            self.command(command)
        for joined_event in joined:
            self._on_joined_event(joined_event, now_s)

    def _on_joined_event(self, event: DecodeEvent, now_s: float) -> None:
        match event:
            case RoomEnded():
                self._scheduler.room_ended(event.key, event.poll, event.error, event.aux, now_s)
            case RoomDrained():
                self._scheduler.room_drained(event.key)
            case RoomOverdue():
                self._scheduler.room_overdue(event.key)
            case _:
                assert_never(event)
