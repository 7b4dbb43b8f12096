"""Waits on the event loop that lose no cancellation.

`asyncio.wait_for` of Python 3.11 returns the result where a cancellation meets a wait that has
just ended, so a client that leaves in the turn in which a token comes is not noticed.
"""

from __future__ import annotations

import asyncio
import contextlib


async def wait_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, `timeout_s` seconds at most. A cancellation is always raised."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
