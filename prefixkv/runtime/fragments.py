"""Frames of the control plane as messages that are small enough to be bounded.

A frame is one ZeroMQ message; one of more than `FRAGMENT_BYTES` travels as several, each with a
header: 0xC1, which no msgpack begins with, its number, how many there are, and the frame's CRC-32,
so that no frame is made of two. All but the last are full. They come in order, or their frame is
lost, as any frame may be; what matters is repeated.

Why: what waits in a socket is bounded by the number of messages, so a message has to be small.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from prefixkv.protocol.messages import MAX_FRAME_BYTES

FRAGMENT_BYTES: Final = 64 << 10
_HEADER: Final = struct.Struct("<BHHI")  # 0xC1, number, how many, CRC-32
_MARK: Final = 0xC1
MAX_MESSAGE_BYTES: Final = FRAGMENT_BYTES + _HEADER.size
_MOST: Final = -(-MAX_FRAME_BYTES // FRAGMENT_BYTES)
_BEGUN_BYTES: Final = 4 * MAX_FRAME_BYTES  # of the unfinished frames of all senders

From = TypeVar("From", bound=Hashable)


class FragmentError(Exception):
    """A message that is neither a frame nor the next fragment of one."""


def cut(raw: bytes) -> list[bytes]:
    """Return a frame cut into messages: itself if it is small, or else its fragments.

    >>> [len(message) for message in cut(bytes(70_000))]
    [65545, 4473]
    """
    if len(raw) <= FRAGMENT_BYTES:
        return [raw]
    # The checksum is of the whole frame, and in each fragment: it also tells frames apart.
    starts, check = range(0, len(raw), FRAGMENT_BYTES), zlib.crc32(raw)
    return [
        _HEADER.pack(_MARK, number, len(starts), check) + raw[start : start + FRAGMENT_BYTES]
        for number, start in enumerate(starts)
    ]


class Joiner(Generic[From]):
    """Joins the fragments of many senders to frames. One owner.

    It holds at most one unfinished frame per sender, and 32 MiB in all: beyond that, the frame that
    was begun first is lost. So a sender cannot make it hold more by beginning frames and never
    ending them.
    """

    def __init__(self) -> None:
        self._begun: dict[From, list[bytes]] = {}  # oldest first
        self._num_bytes = 0

    def join(self, sender: From, message: bytes) -> bytes | None:
        """Return the frame that this message completes, joined of its fragments, or None if it is
        not the last fragment.

        A message that only resembles a fragment counts as a whole frame, which decoding then
        refuses.

        Raises:
            FragmentError: it does not continue the sender's frame, which is forgotten.
        """
        # 1. A frame in one message. It ends what the sender had begun: fragments are never mixed.
        size = len(message) - _HEADER.size
        mark, number, total, check = _HEADER.unpack_from(message) if size > 0 else (0, 0, 0, 0)
        if mark != _MARK or not (number < total and 2 <= total <= _MOST):
            self.forget(sender)
            return message
        # 2. A first fragment begins a frame.
        pieces = self._begun.get(sender, [])
        if number == 0:
            self.forget(sender)
            pieces = self._begun.setdefault(sender, [])
        # 3. The next fragment, of the same frame, and full: then the bytes held are as many as
        # counted.
        is_next = number == len(pieces) and (not pieces or (total, check) == _frame_of(pieces))
        is_full = size == FRAGMENT_BYTES or (0 < size < FRAGMENT_BYTES and number + 1 == total)
        if not (is_next and is_full):
            self.forget(sender)
            raise FragmentError(f"fragment {number} of {total}, {size} bytes")
        pieces.append(message)
        self._num_bytes += len(message)
        if len(pieces) < total:
            # Over the bound, the oldest frame of any sender goes, this one at the latest.
            while self._num_bytes > _BEGUN_BYTES:
                self.forget(next(iter(self._begun)))
            return None
        # 4. The last fragment. The checksum catches fragments of two frames of the same size.
        self.forget(sender)
        raw = b"".join(piece[_HEADER.size :] for piece in pieces)
        if zlib.crc32(raw) != check:
            raise FragmentError("the fragments are of several frames")
        return raw

    def forget(self, sender: From) -> None:
        """Drop the fragments of the frame that the sender had begun: it has gone, or begins another
        frame."""
        self._num_bytes -= sum(map(len, self._begun.pop(sender, ())))


def _frame_of(pieces: list[bytes]) -> tuple[int, int]:
    _, _, total, check = _HEADER.unpack_from(pieces[0])
    return total, check
