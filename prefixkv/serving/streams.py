"""Reading answers of other servers, with a bound on the bytes that are taken."""

from __future__ import annotations

from collections.abc import AsyncIterable


class TooMuchError(Exception):
    """A server sent more bytes than the reader has room for."""


async def read_some(pieces: AsyncIterable[bytes], most: int) -> bytes:
    """Return the first `most` bytes of another server's streamed answer; the rest is not read."""
    found: list[bytes] = []
    left = most
    async for piece in pieces:
        found.append(piece[:left])
        left -= len(piece)
        if left <= 0:
            break
    return b"".join(found)


async def read_all(pieces: AsyncIterable[bytes], most: int) -> bytes:
    """Return all bytes of another server's streamed answer. Raises TooMuchError for more than
    `most`."""
    # One byte beyond the bound tells "exactly full" from "too much", and is all that is read.
    found = await read_some(pieces, most + 1)
    if len(found) > most:
        raise TooMuchError(f"an answer of more than {most} bytes")
    return found
