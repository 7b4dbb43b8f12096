"""Cache events from a worker to the routers of fronts."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from unittest.mock import patch

import numpy as np
import pytest

from prefixkv.cache.events import Cleared, EventFeed, page_keys
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import Namespace, RadixKey
from prefixkv.errors import ProtocolError
from prefixkv.serving import wire
from prefixkv.serving.router import WorkerIndex
from prefixkv.serving.wire import EventTap, batches_of
from tests.support.scenes import in_loop

SALTED = Namespace(salt="a")


class Source:
    """A cache whose engine's thread is the test."""

    def __init__(self) -> None:
        self.cache = RadixCache(page_size=2, policy="lru")
        events = EventFeed(self.cache, "some name", 7)
        self.tap = EventTap(events.take, lambda call: call())
        self._next_page = 0

    def insert(self, tokens: list[int], namespace: Namespace | None = None) -> None:
        pages = np.arange(self._next_page, self._next_page + len(tokens) // 2, dtype=np.int32)
        self._next_page += len(pages)
        self.cache.insert(tokens, pages, namespace)
        self.tap.after_step()

    async def frames(self, num: int) -> tuple[AsyncGenerator[bytes, None], list[bytes]]:
        """A new stream, and its first pieces."""
        stream = self.tap.frames()
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        self.tap.after_step()
        return stream, [await first, *[await anext(stream) for _ in range(num - 1)]]


async def batches(pieces: list[bytes]) -> list:
    async def one_by_one() -> AsyncIterator[bytes]:
        for piece in pieces:
            for i in range(0, len(piece), 7):  # frames come in pieces of any size
                yield piece[i : i + 7]

    return [batch async for batch in batches_of(one_by_one(), "decode-0")]


def depth(index: WorkerIndex, tokens: list[int], namespace: Namespace | None = None) -> int:
    return index.depth(namespace, page_keys(RadixKey(tokens).data, 2))


@in_loop
async def test_each_follower_hears_all_there_is_and_then_what_changes() -> None:
    source = Source()
    source.insert([1, 2, 3, 4])  # before anybody follows
    first, pieces = await source.frames(1)
    source.insert([5, 6], SALTED)
    pieces.append(await anext(first))
    second, late = await source.frames(1)
    source.cache.evict(2)
    source.tap.after_step()
    source.tap.after_step()  # nothing has changed: nothing is sent
    late.append(await anext(second))
    pieces += [await anext(first), await anext(first)]  # the snapshot for the second, too
    for told in (pieces, late):
        index = WorkerIndex(100)
        for batch in await batches(told):
            assert batch.worker == "decode-0"
            assert index.apply(batch)
        assert (depth(index, [1, 2, 3, 4]), depth(index, [5, 6], SALTED)) in ((0, 1), (1, 0))
        assert depth(index, [5, 6]) == 0
    for stream in (first, second):
        await stream.aclose()


@patch.multiple(wire, LIFE_SIGN_S=0.001)
@in_loop
async def test_a_stream_that_has_nothing_to_say_says_that_it_lives() -> None:
    source = Source()
    stream, pieces = await source.frames(3)
    await stream.aclose()
    assert len(await batches(pieces)) <= 1


@patch.multiple(wire, _MAX_WAITING_FRAMES=3)
@in_loop
async def test_a_follower_that_does_not_read_is_cut_off() -> None:
    source = Source()
    stream, _ = await source.frames(1)
    for i in range(5):
        source.insert([2 * i, 2 * i + 1])
    assert [piece async for piece in stream] == []  # it has ended


@patch.multiple(wire, _MAX_FOLLOWERS=1)
@in_loop
async def test_the_number_of_followers_is_bounded() -> None:
    source = Source()
    stream, _ = await source.frames(1)
    assert [piece async for piece in source.tap.frames()] == []
    await stream.aclose()
    again, pieces = await source.frames(1)
    assert pieces
    await again.aclose()


def test_what_is_no_frame_is_an_error() -> None:
    for wrong in (b"\xff\xff\xff\xff", b"\x01\x00\x00\x00x"):
        with pytest.raises(ProtocolError):
            asyncio.run(batches([wrong]))


@in_loop
async def test_a_stream_does_not_begin_with_what_was_under_way_when_it_came() -> None:
    source = Source()
    first, _ = await source.frames(1)
    calls = []
    source.tap._post = calls.append
    source.insert([1, 2])  # told before the second comes, and delivered after
    second = source.tap.frames()
    piece = asyncio.create_task(anext(second))
    await asyncio.sleep(0)
    source.tap.after_step()
    for call in calls:
        call()
    told = await batches([await piece])
    assert isinstance(told[0].events[0], Cleared)
    for stream in (first, second):
        await stream.aclose()
