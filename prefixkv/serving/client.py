"""HTTP clients of the other processes of a deployment, for very many requests at once; and waits on
the event loop, for an event and for several streams at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

from aiohttp import (
    ClientResponse,
    ClientResponseError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    SocketTimeoutError,
    TCPConnector,
    TraceConfig,
    TraceRequestRedirectParams,
)

T = TypeVar("T")

_CONNECT_S = 5.0
_KEPT_S = 2.0  # an idle connection; servers close theirs after 5 s or later


def make_client(
    api_key: str, silence_s: float, total_s: float | None = None, *traces: TraceConfig
) -> ClientSession:
    """Return a client without a bound on connections: no request waits for the end of another.

    Used on the running loop. `silence_s` bounds the time to an answer's head, and between two of
    its `pieces_of`. Each failure of a request is an aiohttp.ClientError, or TimeoutError after
    `total_s`; a redirect is one: prompts go to the servers that the settings name.
    """
    strict = TraceConfig()
    strict.on_request_redirect.append(_refuse)
    headers = {"accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return ClientSession(
        connector=TCPConnector(limit=0, keepalive_timeout=_KEPT_S), cookie_jar=DummyCookieJar(),
        headers=headers, trace_configs=[strict, *traces],
        timeout=ClientTimeout(total=total_s, sock_connect=_CONNECT_S, sock_read=silence_s),
    )  # fmt: skip


async def pieces_of(client: ClientSession, answer: ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield an answer's bytes as they come. Raises aiohttp.ClientError, also after silence.

    aiohttp's own bound ends with a chunk that is none: what waits for the next one waits for ever.
    """
    silence_s = client.timeout.sock_read
    while True:
        try:
            async with asyncio.timeout(silence_s):
                piece = await answer.content.readany()
        except TimeoutError as error:
            raise SocketTimeoutError(f"nothing came for {silence_s} s") from error
        if not piece:
            return
        yield piece


async def _refuse(_: object, __: object, redirect: TraceRequestRedirectParams) -> None:
    answer: Any = redirect.response
    answer.close()
    why = f"a redirect to {answer.headers.get('location')!r}, which is not followed"
    raise ClientResponseError(answer.request_info, (), status=answer.status, message=why)


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
