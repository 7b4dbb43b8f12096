"""Messages between the ranks of a worker, which the engine carries: rank 0's log to the others, and
their events back. Each is checked, before anything is changed: that it is one, and the next.
Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
import numpy as np

from prefixkv.errors import CallerError
from prefixkv.paging import Pages, check_in_pool

T = TypeVar("T")

_ID_BYTES: Final = 4


def check_bytes(raw: object) -> None:
    if not isinstance(raw, bytes | bytearray | memoryview):
        raise CallerError(f"raw is a {type(raw).__name__}, bytes are needed")


def decoded(raw: bytes, decode: Callable[[bytes], T], sender: str) -> T:
    """Return a message as `decode` reads it. Raises CallerError for what is none of `sender`."""
    check_bytes(raw)
    try:
        return decode(raw)
    # An OverflowError: of a number of an error (`decode_error`) that is endless.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CallerError(f"{len(raw)} bytes that are no message of {sender}: {error}") from error


def check_next(number: int, due: int, rank: int = 0) -> None:
    """Raise CallerError for a message of a rank that is not its next one."""
    if number != due:
        raise CallerError(f"message {number} of rank {rank} came where {due} is the next")


def packed_ids(pages: Pages) -> bytes:
    return pages.astype("<i4").tobytes()


def unpacked_ids(raw: bytes, num_pages: int) -> Pages:
    """Return page ids, int32. Raises CallerError for what are none, of a pool of `num_pages`: each
    becomes an address."""
    if len(raw) % _ID_BYTES:
        raise CallerError(f"rank 0 sent {len(raw)} bytes of page ids, of {_ID_BYTES} each")
    ids = np.frombuffer(raw, "<i4").astype(np.int32)
    check_in_pool(ids, num_pages)
    return ids
