"""Frames of the control plane as messages that are small enough to be bounded.

A frame is one ZeroMQ message; one of more than `FRAGMENT_BYTES` travels as several, each with a
header: 0xC1, which no msgpack begins with, its number, how many there are, and the frame's CRC-32,
so that no frame is made of two. All but the last are full. They come in order, or their frame is
lost, as any frame may be; what matters is said again.

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
_BEGUN_BYTES: Final = 4 * MAX_FRAME_BYTES  # of all senders' unfinished frames

From = TypeVar("From", bound=Hashable)


class FragmentError(Exception):
    """A message that is neither a frame nor the next fragment of one."""


def cut(raw: bytes) -> list[bytes]:
    """A frame's messages.

    >>> [len(message) for message in cut(bytes(70_000))]
    [65545, 4473]
    """
    if len(raw) <= FRAGMENT_BYTES:
        return [raw]
    starts, check = range(0, len(raw), FRAGMENT_BYTES), zlib.crc32(raw)
    return [
        _HEADER.pack(_MARK, number, len(starts), check) + raw[start : start + FRAGMENT_BYTES]
        for number, start in enumerate(starts)
    ]


class Joiner(Generic[From]):
    """Puts the frames of many senders together. One owner.

    It holds at most one unfinished frame of a sender, and 32 MiB of all: beyond, the frame that was
    begun first is lost.
    """

    def __init__(self) -> None:
        self._begun: dict[From, list[bytes]] = {}  # the one begun first comes first
        self._num_bytes = 0

    def join(self, sender: From, message: bytes) -> bytes | None:
        """The frame that this message ends, or None. What only begins like a fragment is a frame,
        if none that anybody can read. Raises FragmentError, with what the sender had begun
        forgotten."""
        size = len(message) - _HEADER.size
        mark, number, total, check = _HEADER.unpack_from(message) if size > 0 else (0, 0, 0, 0)
        if mark != _MARK or not (number < total and 2 <= total <= _MOST):
            self.forget(sender)
            return message
        pieces = self._begun.get(sender, [])
        if number == 0:
            self.forget(sender)
            pieces = self._begun.setdefault(sender, [])
        is_next = number == len(pieces) and (not pieces or (total, check) == _frame_of(pieces))
        is_full = size == FRAGMENT_BYTES or (0 < size < FRAGMENT_BYTES and number + 1 == total)
        if not (is_next and is_full):
            self.forget(sender)
            raise FragmentError(f"fragment {number} of {total}, {size} bytes")
        pieces.append(message)
        self._num_bytes += len(message)
        if len(pieces) < total:
            while self._num_bytes > _BEGUN_BYTES:
                self.forget(next(iter(self._begun)))
            return None
        self.forget(sender)
        raw = b"".join(piece[_HEADER.size :] for piece in pieces)
        if zlib.crc32(raw) != check:
            raise FragmentError("the fragments are of several frames")
        return raw

    def forget(self, sender: From) -> None:
        """The sender has gone, or has begun another frame."""
        self._num_bytes -= sum(map(len, self._begun.pop(sender, ())))


def _frame_of(pieces: list[bytes]) -> tuple[int, int]:
    """How many fragments there are of their frame, and its CRC-32."""
    _, _, total, check = _HEADER.unpack_from(pieces[0])
    return total, check
