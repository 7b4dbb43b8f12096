"""One room on all ranks of a decode worker: the ranks' events, joined for the scheduler. Pure.

Every rank has a room of its own, with its own writers. The request has its KV when all ranks have
theirs. It fails with the first rank, and the others have to end their rooms. Its pages may be used
again when no rank can be written any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from prefixkv.protocol.events import (
    CopyEnded,
    DecodeEvent,
    RoomDrained,
    RoomOverdue,
    decode_error,
)
from prefixkv.ranks.joined import JoinedRooms, RankEvents, Reports


@dataclass(slots=True)
class _RankReports(Reports):
    """A rank that has succeeded is written no more, so it is done with the room."""

    overdue: bool = False


class RankRooms(JoinedRooms[_RankReports, DecodeEvent]):
    """Rooms that are not over on all ranks. Owned by rank 0's scheduler thread."""

    side = "decode"
    last = RoomDrained
    done_at_success = True
    make_reports = _RankReports
    decoder = msgspec.msgpack.Decoder(RankEvents[DecodeEvent | CopyEnded], dec_hook=decode_error)

    def _other(self, rank: int, event: RoomOverdue, room: _RankReports) -> list[DecodeEvent]:
        # Passed on once.
        was_overdue, room.overdue = room.overdue, True
        return [] if was_overdue else [event]
