"""Waits on the event loop that lose no cancellation.

`asyncio.wait_for` of Python 3.11 returns the result, and drops the cancellation, if both arrive in
the same turn of the loop. A client that leaves just as a token arrives would go unnoticed.
"""

from __future__ import annotations

import asyncio
import contextlib


async def wait_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until an event is set. A cancellation is always raised."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
