"""The rooms of one number on all ranks of a prefill worker, joined at rank 0. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.events import (
    Bootstrapped,
    PrefillEvent,
    RoomEnded,
    SourceFree,
    decode_error,
)
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.joined import JoinedRooms, RankEvents, Reports


@dataclass(slots=True)
class _PrefillReports(Reports):
    """A rank whose writes read its pages no more is done with the room."""

    begun: set[int] = field(default_factory=set)
    first: Bootstrapped | None = None  # rank 0's


class PrefillRankRooms(JoinedRooms[_PrefillReports, PrefillEvent]):
    """Rooms that are not over on all ranks. Owned by rank 0's scheduler thread."""

    side = "prefill"
    make_reports = _PrefillReports
    decoder = msgspec.msgpack.Decoder(RankEvents[PrefillEvent], dec_hook=decode_error)

    def on(self, rank: int, event: PrefillEvent) -> tuple[list[PrefillEvent], list[AbortRoom]]:
        """Take a rank's event; return events for the scheduler, and commands for all ranks."""
        room = self._room(event.key)
        events: list[PrefillEvent] = []
        commands: list[AbortRoom] = []
        # 1. It begins when decode has promised to all: each sends its own part.
        # 2. Success is all ranks'; the first failure ends the room on all.
        # 3. Its pages are free when no rank's writes read them: they have the same ids.
        match event:
            case Bootstrapped():
                room.begun.add(rank)
                room.first = event if rank == 0 else room.first
                if len(room.begun) == self.num_ranks and not room.failed:
                    assert room.first is not None
                    events.append(room.first)
            case RoomEnded(key, KVPoll.SUCCESS):
                room.succeeded.add(rank)
                if len(room.succeeded) == self.num_ranks:
                    events.append(event)
            case RoomEnded() if room.failed:
                pass
            case RoomEnded(key, poll, error):
                ended, command = self._first_failure(key, room, rank, error, poll)
                events.append(ended)
                commands.append(command)
            case SourceFree():
                room.done.add(rank)
                events += self._if_over(event.key, room)
            case _:
                assert_never(event)
        return events, commands

    def _if_over(self, key: RoomKey, room: _PrefillReports) -> list[PrefillEvent]:
        if len(room.done) < self.num_ranks:
            return []
        # The last word of every rank, so its number may be used again.
        del self._rooms[key]
        return [SourceFree(key)]
