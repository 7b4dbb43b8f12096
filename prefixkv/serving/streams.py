"""Waits on the event loop: for an event, and for several streams at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def wait_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until an event is set. A cancellation is always raised: `asyncio.wait_for` of Python
    3.11 drops it if it arrives in the turn of the loop in which the event is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def numbered(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of several streams as they come, each with its stream's number. The first
    exception of one is raised; the others are closed then, and also when this is closed."""
    # One stream needs no tasks: it is read only as fast as its reader asks.
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for first in only:
                yield 0, first
        return
    # Bounded, so that a slow reader holds back all streams. None ends the stream of its number.
    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue(len(streams))

    async def read(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await queue.put((number, item, None))
            await queue.put((number, None, None))
        except Exception as error:
            await queue.put((number, None, error))

    tasks = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        # Until each has closed its stream: its request is then given up on its worker.
        await asyncio.gather(*tasks, return_exceptions=True)
