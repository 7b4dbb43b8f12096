"""Names of transfers and their peers, and the states that a transfer goes through."""

from __future__ import annotations

import enum
from typing import NamedTuple


class PeerId(NamedTuple):
    """One life of one process: a restart under the same name is another peer.

    `incarnation` is drawn at random as the process starts, so it does not order two lives by age:
    handshakes do.

    >>> str(PeerId("decode-0", 0x3F2A))
    'decode-0 life 3f2a'
    """

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name} life {self.incarnation:x}"


class RoomKey(NamedTuple):
    """One attempt (`generation`) at one request's transfer (`room`, uint64).

    On prefill `decode` is the name of the decode worker that it is for: the same number from two
    workers is two rooms. On decode it is empty.
    """

    room: int
    generation: int
    decode: str = ""

    @property
    def numbers(self) -> tuple[int, int]:
        """What frames and tags carry; `decode` is known from the peer that sends them."""
        return self.room, self.generation


class KVPoll(enum.IntEnum):
    """Progress of a room's transfer, as an engine polls it. The last two are terminal."""

    BOOTSTRAPPING = 0
    WAITING_FOR_INPUT = 1
    TRANSFERRING = 2
    SUCCESS = 3
    FAILED = 4

    @property
    def ended(self) -> bool:
        return self >= KVPoll.SUCCESS
