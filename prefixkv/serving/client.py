"""HTTP clients of the other processes of a deployment, for very many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

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
