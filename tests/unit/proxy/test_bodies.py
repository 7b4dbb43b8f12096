"""Streams that a proxy passes on, wherever they are cut."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator

import msgspec
import pytest

from prefixkv.proxy.server import prompts_of, retold_events, whole_events

STREAM = b'data: {"id": "a"}\n\ndata: {"id": "b", "usage": null}\n\ndata: [DONE]\n\n'


async def pieces(stream: bytes, size: int, *, breaks: bool) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(stream), size):
        yield stream[at : at + size]
    if breaks:
        raise ConnectionError


async def passed_on(stream: bytes, size: int, *, breaks: bool, cached: int | None) -> bytes:
    out, later = b"", pieces(stream, size, breaks=breaks)
    try:
        async for events in whole_events(await anext(later, b""), later):
            out += retold_events(events, cached)[0]
    except ConnectionError:
        assert breaks
    return out


@pytest.mark.parametrize("cached", [None, 3])
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_what_breaks_off_is_passed_on_in_whole_events(
    end: bytes, size: int, cached: int | None
) -> None:
    """An error can be said behind it. A stream that ends is passed on whole."""
    stream = STREAM.replace(b"\n", end)
    ends = [found.end() for found in re.finditer(end * 2, stream)]
    for cut in range(len(stream) + 1):
        begun = stream[:cut]
        out = asyncio.run(passed_on(begun, size, breaks=True, cached=cached))
        assert out == stream[: max([0, *(end for end in ends if end <= cut)])]
        assert asyncio.run(passed_on(begun, size, breaks=False, cached=cached)) == begun


def test_prompts_are_told_apart_whatever_blanks_stand_before_them() -> None:
    """Several with one room would be computed by the two servers as one."""
    for first, second in ((b'"a"', b'"b"'), (b"[1]", b"[2]")):
        blanks = b"\n" + b" " * 100
        several = msgspec.Raw(b"[" + blanks + first + b"," + second + b"]")
        assert [*map(bytes, prompts_of(several))] == [first, second]
    for one in (b'"[\\"a"', b"[]", b"[1, 2]"):
        assert prompts_of(msgspec.Raw(one)) == [msgspec.Raw(one)]
