"""HTTP clients of the other processes of a deployment, for very many requests at once.

httpx's own pool looks at each of its connections for every request that begins or ends, and asks
the kernel about each idle one, which may wait for the interpreter while other threads compute. Here
a request takes the connection that was given back last, whatever the number of the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

import httpx

_MAX_IDLE: Final = 64
_KEPT_S: Final = 5.0

_Origin = tuple[bytes, bytes, int | None]


def make_client(
    headers: Mapping[str, str], timeout: httpx.Timeout | float, kept_s: float = _KEPT_S
) -> httpx.AsyncClient:
    """Return a client without a bound of connections, so no request waits for the end of another.
    An idle connection is kept for `kept_s`."""
    return httpx.AsyncClient(
        headers=headers, timeout=timeout, transport=_Connections(kept_s), trust_env=False
    )


class _Connections(httpx.AsyncBaseTransport):
    """Each connection is an httpx transport that has one request at a time. At most `_MAX_IDLE` are
    kept. `aclose` ends all, those with a request too."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._tls = httpx.create_ssl_context(trust_env=False)
        # The idle ones, and when each became idle; first those that have been longest.
        self._idle: dict[httpx.AsyncHTTPTransport, tuple[_Origin, float]] = {}
        # The same by origin, in the same order.
        self._by_origin: dict[_Origin, deque[httpx.AsyncHTTPTransport]] = {}
        self._busy: set[httpx.AsyncHTTPTransport] = set()
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        origin = url.raw_scheme, url.raw_host, url.port
        await self._close_old()
        one = self._take(origin)
        self._busy.add(one)
        try:
            answer = await one.handle_async_request(request)
        except BaseException:
            await self._give_back(origin, one, False)
            raise
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        answer.stream = _GivenBack(answer.stream, lambda ok: self._give_back(origin, one, ok))
        return answer

    def _take(self, origin: _Origin) -> httpx.AsyncHTTPTransport:
        """Return the connection that was idle for the shortest time, or a new one."""
        if (idle := self._by_origin.get(origin)) is None:
            return httpx.AsyncHTTPTransport(
                verify=self._tls, trust_env=False,
                limits=httpx.Limits(max_connections=None, keepalive_expiry=self._kept_s),
            )  # fmt: skip
        one = idle.pop()
        del self._idle[one]
        if not idle:
            del self._by_origin[origin]
        return one

    async def _give_back(self, origin: _Origin, one: httpx.AsyncHTTPTransport, ok: bool) -> None:
        self._busy.discard(one)
        if not ok or self._closed:
            await one.aclose()
            return
        self._idle[one] = origin, time.monotonic()
        self._by_origin.setdefault(origin, deque()).append(one)
        await self._close_old()

    async def _close_old(self) -> None:
        while self._idle:
            one, (origin, since_s) = next(iter(self._idle.items()))
            if len(self._idle) <= _MAX_IDLE and time.monotonic() - since_s < self._kept_s:
                return
            # Out of both tables before the first `await`, where others may take one.
            del self._idle[one]
            idle = self._by_origin[origin]
            idle.popleft()
            if not idle:
                del self._by_origin[origin]
            await one.aclose()

    async def aclose(self) -> None:
        # First: what is given back from here on is closed there.
        self._closed = True
        every = [*self._idle, *self._busy]
        self._idle.clear()
        self._by_origin.clear()
        for one in every:
            await one.aclose()


class _GivenBack(httpx.AsyncByteStream):
    """The body of an answer, whose connection is given back when it is closed."""

    def __init__(
        self, stream: httpx.AsyncByteStream, give_back: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._give_back: Callable[[bool], Awaitable[None]] | None = give_back

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        give_back, self._give_back = self._give_back, None
        ok = False
        try:
            await self._stream.aclose()
            ok = True
        finally:
            if give_back is not None:
                await give_back(ok)
