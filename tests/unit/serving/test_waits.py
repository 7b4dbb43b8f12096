"""A client that leaves in the very turns of the event loop in which something comes for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from prefixkv.cache.events import EventBatch
from prefixkv.serving.client import wait_set
from prefixkv.serving.http import Stream
from prefixkv.serving.wire import Ask, EventTap, TokenEvent
from prefixkv.serving.worker import DecodeWorker, _OpenRequest
from tests.support.scenes import in_loop

Source = tuple[AsyncGenerator[bytes, None], Callable[[], None]]
"""What is streamed, and what has more of it come."""


def answer() -> Source:
    one = _OpenRequest(Ask("r", [1], "", max_new_tokens=2000))
    return DecodeWorker._lines(None, one), lambda: one.queue_output(TokenEvent(token=1))  # type: ignore[arg-type]


def feed() -> Source:
    tap = EventTap(lambda snapshot: EventBatch("w", 0, 0.0, ()), lambda call: call())
    return tap.frames(), lambda: tap._deliver(b"frame", True)


async def is_noticed(make: Callable[[], Source], turns: int) -> bool:
    """Whether the stream ends where the client leaves `turns` turns after something has come; so
    many before, if it is negative."""
    lines, come = make()
    gone, ended = asyncio.Event(), asyncio.Event()
    begun = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        begun.set()

    async def end() -> None:
        ended.set()

    stream = Stream(lines, "x", end=end)
    task = asyncio.ensure_future(stream({}, receive, send))
    await begun.wait()
    for _ in range(10):  # it waits for what comes first
        await asyncio.sleep(0)
    first, second = (gone.set, come) if turns < 0 else (come, gone.set)
    first()
    for _ in range(abs(turns)):
        await asyncio.sleep(0)
    second()
    for _ in range(50):  # it goes on coming
        await asyncio.sleep(0)
        come()
        if ended.is_set():
            break
    noticed = ended.is_set()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    return noticed


@pytest.mark.parametrize("make", [answer, feed])
def test_a_client_that_leaves_as_something_comes_is_noticed(make: Callable[[], Source]) -> None:
    found = {turns: asyncio.run(is_noticed(make, turns)) for turns in range(-4, 7)}
    assert all(found.values()), found


@in_loop
async def test_a_wait_ends_in_time_and_when_it_is_set() -> None:
    event = asyncio.Event()
    await wait_set(event, 0.01)
    assert not event.is_set()
    event.set()
    await asyncio.wait_for(wait_set(event, 1e6), 60)
