"""Streams that a proxy passes on, wherever they are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from prefixkv.serving import usage

STREAM = b'data: {"id": "a"}\n\ndata: {"id": "b", "usage": null}\n\ndata: [DONE]\n\n'
ENDS = [i + 2 for i in range(len(STREAM)) if STREAM[i : i + 2] == b"\n\n"]


async def pieces(stream: bytes, size: int, *, breaks: bool) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(stream), size):
        yield stream[at : at + size]
    if breaks:
        raise ConnectionError


async def passed_on(stream: bytes, size: int, *, breaks: bool, cached: int | None) -> bytes:
    out = b""
    events = usage.whole_events(pieces(stream, size, breaks=breaks))
    if cached is not None:
        events = usage.of_stream(events, cached)
    try:
        async for piece in events:
            out += piece
    except ConnectionError:
        assert breaks
    return out


@pytest.mark.parametrize("cached", [None, 3])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_breaks_off_is_passed_on_in_whole_events(size: int, cached: int | None) -> None:
    """An error can be said behind it."""
    for cut in range(len(STREAM) + 1):
        out = asyncio.run(passed_on(STREAM[:cut], size, breaks=True, cached=cached))
        assert out == STREAM[: max([0, *(end for end in ENDS if end <= cut)])]


@pytest.mark.parametrize("cached", [None, 3])
def test_a_stream_that_ends_is_passed_on_whole(cached: int | None) -> None:
    for cut in range(len(STREAM) + 1):
        assert asyncio.run(passed_on(STREAM[:cut], 5, breaks=False, cached=cached)) == STREAM[:cut]
