"""Streams that a proxy passes on, wherever they are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from prefixkv.proxy.server import retold_events, whole_events

STREAM = b'data: {"id": "a"}\n\ndata: {"id": "b", "usage": null}\n\ndata: [DONE]\n\n'
ENDS = [i + 2 for i in range(len(STREAM)) if STREAM[i : i + 2] == b"\n\n"]


async def pieces(stream: bytes, size: int, *, breaks: bool) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(stream), size):
        yield stream[at : at + size]
    if breaks:
        raise ConnectionError


async def passed_on(size: int, cut: int, *, breaks: bool, cached: int | None) -> bytes:
    out, later = b"", pieces(STREAM[:cut], size, breaks=breaks)
    try:
        async for events in whole_events(await anext(later, b""), later):
            out += retold_events(events, cached)[0]
    except ConnectionError:
        assert breaks
    return out


@pytest.mark.parametrize("cached", [None, 3])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_breaks_off_is_passed_on_in_whole_events(size: int, cached: int | None) -> None:
    """An error can be said behind it. A stream that ends is passed on whole."""
    for cut in range(len(STREAM) + 1):
        out = asyncio.run(passed_on(size, cut, breaks=True, cached=cached))
        assert out == STREAM[: max([0, *(end for end in ENDS if end <= cut)])]
        assert asyncio.run(passed_on(size, cut, breaks=False, cached=cached)) == STREAM[:cut]
