"""Answers of other servers, of which no more is taken than there is room for."""

from __future__ import annotations

from collections.abc import AsyncIterable


class TooMuchError(Exception):
    """A server says more than there is room for."""


async def read_some(pieces: AsyncIterable[bytes], most: int) -> bytes:
    """The first `most` bytes; the rest is not read."""
    found: list[bytes] = []
    left = most
    async for piece in pieces:
        found.append(piece[:left])
        left -= len(piece)
        if left <= 0:
            break
    return b"".join(found)


async def read_all(pieces: AsyncIterable[bytes], most: int) -> bytes:
    """All of it. Raises TooMuchError for more than `most` bytes."""
    found = await read_some(pieces, most + 1)
    if len(found) > most:
        raise TooMuchError(f"an answer of more than {most} bytes")
    return found
