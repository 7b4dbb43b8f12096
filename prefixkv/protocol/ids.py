"""Names of transfers, their peers and their parts, and the states that a transfer goes through."""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from prefixkv.errors import ProtocolError


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


_MAGIC = b"pkv4"
_FORMAT = struct.Struct("<4sQQIHIHHiIQhIH")
TAG_BYTES = _FORMAT.size
"""Bytes of a tag without checksums."""
SUM_BYTES: Final = 4
MAX_SUMS: Final = 1024
"""Checksums that a tag has at most."""


def tag_bytes(raw: bytes, at: int = 0) -> int:
    """Return the length of the tag that begins there; TAG_BYTES at least, where it is cut off."""
    # The last field but the checksums says how many they are.
    num_sums = int.from_bytes(raw[at + TAG_BYTES - 2 : at + TAG_BYTES], "little")
    return TAG_BYTES + SUM_BYTES * num_sums


class ChunkTag(NamedTuple):
    """One part of one chunk, as a NIXL notification names it.

    Notifications of different writes arrive in any order, so nothing may be inferred from a count
    or from the last one: a machine that waits for a chunk waits for each of its parts by name. Nor
    do they come in order with frames: a room's last one may come after its Drained, when the room's
    number is in use again, so a tag carries the ticket of its promise. The width is fixed, so an
    agent's name (which may hold any separator) never has to be parsed.

    `lease_id`: -1 where it lands in pages. `num_pages`: how many pages (staged: blocks; of extra
    state: slots) are posted for the whole chunk. `ticket`: of the promise that it is written for.
    `sums`: where they are agreed on, the checksums of pages from the promise's `first` on in its
    `group` (-1: the first layers' unit pages), SUM_BYTES each. The parts of a write share its pages
    among them, whichever bytes they move.
    """

    incarnation: int
    room: int
    generation: int
    rank: int
    chunk: int
    part: int = 0
    num_parts: int = 1
    lease_id: int = -1
    num_pages: int = 0
    ticket: int = 0
    group: int = -1
    first: int = 0
    sums: bytes = b""

    @property
    def what(self) -> str:
        """Room, chunk and writer, for errors."""
        room = f"room {self.room} generation {self.generation}"
        return f"{room}, chunk {self.chunk} of prefill rank {self.rank}"

    def pack(self) -> bytes:
        """Return the bytes that a notification carries.

        >>> len(ChunkTag(incarnation=1, room=7, generation=0, rank=0, chunk=2).pack()) == TAG_BYTES
        True
        """
        return _FORMAT.pack(_MAGIC, *self[:-1], len(self.sums) // SUM_BYTES) + self.sums

    @classmethod
    def unpack(cls, raw: bytes) -> ChunkTag:
        """Return the tag in `raw`. Raises ProtocolError for bytes that are no tag of ours."""
        if raw[:4] != _MAGIC or len(raw) != tag_bytes(raw):
            raise ProtocolError(f"{len(raw)} bytes are no chunk tag")
        tag = cls._make((*_FORMAT.unpack_from(raw)[1:-1], raw[TAG_BYTES:]))
        # A part beyond the last would set a bit that no complete chunk has, so the chunk could
        # never complete. A group below -1 would be no key, and no error of the peer's.
        if tag.part >= tag.num_parts or tag.group < -1:
            raise ProtocolError(f"part {tag.part} of {tag.num_parts}, group {tag.group}")
        return tag
