"""Messages between the ranks of a worker, which the engine carries: rank 0's log to the others, and
their events back. What both sides check of each, before anything is changed: that it is one, and
the next. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from prefixkv.errors import CallerError

T = TypeVar("T")


def check_bytes(raw: object) -> None:
    """Raise CallerError for a message between ranks that is not of bytes."""
    if not isinstance(raw, bytes | bytearray | memoryview):
        raise CallerError(f"raw is a {type(raw).__name__}, bytes are needed")


def decoded(raw: bytes, decode: Callable[[bytes], T], sender: str) -> T:
    """Return a message between ranks, as `decode` reads it. Raises CallerError for what is none of
    `sender`."""
    check_bytes(raw)
    try:
        return decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError(f"{len(raw)} bytes that are no message of {sender}: {error}") from error


def check_next(number: int, due: int) -> None:
    """Raise CallerError for a message of rank 0's log that is not the next one."""
    if number != due:
        raise CallerError(f"message {number} of rank 0 came where {due} is the next")


class RankMessages:
    """The numbers of the messages that rank 0 gets of the other ranks of its worker."""

    def __init__(self, num_ranks: int) -> None:
        self._num_taken = [0] * num_ranks

    def take(self, rank: int, number: int) -> None:
        """Count a rank's message to rank 0. Raises CallerError for a rank that there is not, and
        for a message that is not the next one of its rank; nothing was changed."""
        if not 1 <= rank < len(self._num_taken):
            raise CallerError(f"a message of rank {rank}, which this worker has not")
        due = self._num_taken[rank]
        if number != due:
            raise CallerError(f"message {number} of rank {rank}, {due} is next")
        # Counted when all checks have passed: a message that was refused can be sent again.
        self._num_taken[rank] += 1
