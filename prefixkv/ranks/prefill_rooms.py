"""The rooms of one number on all ranks of a prefill worker, joined at rank 0. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from prefixkv.protocol.events import Bootstrapped, PrefillEvent, SourceFree, decode_error
from prefixkv.ranks.joined import JoinedRooms, RankEvents, Reports


@dataclass(slots=True)
class _PrefillReports(Reports):
    """A rank whose writes read its pages no more is done with the room."""

    begun: set[int] = field(default_factory=set)
    first: Bootstrapped | None = None  # rank 0's


class PrefillRankRooms(JoinedRooms[_PrefillReports, PrefillEvent]):
    """Rooms that are not over on all ranks. Owned by rank 0's scheduler thread."""

    side = "prefill"
    last = SourceFree
    make_reports = _PrefillReports
    decoder = msgspec.msgpack.Decoder(RankEvents[PrefillEvent], dec_hook=decode_error)

    def _other(self, rank: int, event: Bootstrapped, room: _PrefillReports) -> list[PrefillEvent]:
        # It begins when decode has promised to all: each sends its own part.
        room.begun.add(rank)
        room.first = event if rank == 0 else room.first
        if len(room.begun) < self.num_ranks or room.failed:
            return []
        assert room.first is not None
        return [room.first]
