"""One room on all ranks of a decode worker: the ranks' events, joined for the scheduler. Pure.

Every rank has a room of its own, with its own writers. The request has its KV when all ranks have
theirs. It fails with the first rank, and the others have to end their rooms. Its pages may be used
again when no rank can be written any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import msgspec

from prefixkv.protocol.commands import AbortRoom
from prefixkv.protocol.events import (
    CopyEnded,
    DecodeEvent,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
    decode_error,
)
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.ranks.joined import JoinedRooms, RankEvents, Reports


@dataclass(slots=True)
class _RankReports(Reports):
    """A rank that has succeeded is written no more, so it is done with the room."""

    overdue: bool = False
    aux: bytes = b""


class RankRooms(JoinedRooms[_RankReports, DecodeEvent]):
    """Rooms that are not over on all ranks. Owned by rank 0's scheduler thread."""

    side = "decode"
    make_reports = _RankReports
    decoder = msgspec.msgpack.Decoder(RankEvents[DecodeEvent | CopyEnded], dec_hook=decode_error)

    def on(self, rank: int, event: DecodeEvent) -> tuple[list[DecodeEvent], list[AbortRoom]]:
        room = self._room(event.key)
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
                room.done.add(rank)
                room.aux = event.aux if rank == 0 else room.aux
                if len(room.succeeded) == self.num_ranks:
                    events.append(RoomEnded(key, KVPoll.SUCCESS, aux=room.aux))
            case RoomEnded() if room.failed:
                pass
            case RoomEnded(key, poll, error):
                ended, command = self._first_failure(key, room, rank, error, poll)
                events.append(ended)
                commands.append(command)
            case RoomDrained():
                room.done.add(rank)
            case RoomOverdue():
                events += [event] if not room.overdue else []
                room.overdue = True
            case _:
                assert_never(event)
        events += self._if_over(event.key, room)
        return events, commands

    def _if_over(self, key: RoomKey, room: _RankReports) -> list[DecodeEvent]:
        if len(room.done) < self.num_ranks:
            return []
        # Every rank has sent its last event of the room, so no later one makes an entry again.
        del self._rooms[key]
        return [RoomDrained(key)] if len(room.succeeded) < self.num_ranks else []
