"""Requests that were sent to a decode server and may never have come: their rooms.

Prefill was asked at the same time and holds the KV, until decode says that it does not want it. So
decode is told of such rooms when it is reached again, by a request of one token; those whose
request it had after all it passes over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import httpx

from prefixkv.serving.config import ServerAt

logger = logging.getLogger("prefixkv.proxy")

TELL_EACH_S: Final = 1.0
TELL_FOR_S: Final = 600.0
"""After which prefill gives up by itself (`ControlConfig.longest_wait_s`)."""
AT_ONCE: Final = 256
MAX_ROOMS: Final = 4096


class Abandoned:
    """Of one decode server. Used on the event loop."""

    def __init__(self) -> None:
        self._rooms: dict[int, tuple[str, float]] = {}  # prefill's address, and until when
        self._telling: asyncio.Task[None] | None = None

    def add(self, client: httpx.AsyncClient, decode: ServerAt, room: int, prefill: str) -> None:
        self._rooms[room] = prefill, time.monotonic() + TELL_FOR_S
        if len(self._rooms) > MAX_ROOMS:
            del self._rooms[next(iter(self._rooms))]
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell(client, decode))

    async def stop(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait((self._telling,))

    async def _tell(self, client: httpx.AsyncClient, decode: ServerAt) -> None:
        while self._rooms:
            await asyncio.sleep(TELL_EACH_S)
            now_s = time.monotonic()
            self._rooms = {room: held for room, held in self._rooms.items() if held[1] > now_s}
            told = [*self._rooms][:AT_ONCE]
            params = {"abandoned": [[room, self._rooms[room][0]] for room in told]}
            # Of the server's own model: a client's name for one may be of none.
            body = {"prompt": "-", "max_tokens": 1, "kv_transfer_params": params}
            try:
                answer = await client.post(f"{decode.url}/v1/completions", json=body)
            except httpx.HTTPError:
                continue
            if answer.status_code >= 400:
                logger.warning("%s was not told of %d rooms: %s", decode.name, len(told),
                               answer.text[:500])  # fmt: skip
            for room in told:
                self._rooms.pop(room, None)
