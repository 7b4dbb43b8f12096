"""What the bodies of all requests may take together, and those of one client's.

A body counts from its first byte until its request has been answered, since what is made of it
lives as long. Where there is no room for more, the body that has been coming for longest makes
some: a client that sends slowly keeps nobody out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from prefixkv.serving.failures import ApiError

_KEY: Final = "prefixkv.body"


class Body:
    """That of one request. One owner."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0
        self._patience: asyncio.Timeout | None = None  # while it comes
        self.made_room = False

    def comes(self, patience: asyncio.Timeout) -> None:
        """Its first byte is awaited, under a time-out that ends it where others need room."""
        self._patience = patience
        self._bodies.coming[self] = None

    def grow(self, num_bytes: int) -> None:
        """More of it has come. Raises ApiError 503 where no other can make room for it."""
        while self._bodies.num_bytes + num_bytes > self._bodies.limit:
            oldest = next((one for one in self._bodies.coming if one._num_bytes), None)
            if oldest is None or oldest is self:
                raise ApiError(
                    503, "the bodies of other requests take all there is room for", "server_error",
                    "overloaded",
                )  # fmt: skip
            oldest._make_room()
        self._bodies.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def is_here(self) -> None:
        """It has come to its end, or is not awaited any more."""
        self._bodies.coming.pop(self, None)
        self._patience = None

    def end(self) -> None:
        """Nothing of it is held any more."""
        self.is_here()
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0

    def _make_room(self) -> None:
        patience = self._patience
        self.made_room = True
        self.end()
        if patience is not None and not patience.expired():
            patience.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """Those of all requests of one server. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self.coming: dict[Body, None] = {}  # the oldest first


class Counted:
    """An application that answers so many requests of one client at once (0: any number), of which
    all bodies are bounded in sum; more are refused."""

    def __init__(self, app: ASGIApp, most: int, max_bodies_bytes: int) -> None:
        self._app, self._most = app, most
        self._num: Counter[str] = Counter()  # under way, by the client's address
        self._bodies = Bodies(max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = (scope.get("client") or ("",))[0]
        if self._most and self._num[client] >= self._most:
            why = f"{self._most} requests of this client are being answered: no more at once"
            error = ApiError(429, why, "rate_limit_error", "rate_limit_exceeded")
            await error.response()(scope, receive, send)
            return
        self._num[client] += 1
        body = scope[_KEY] = Body(self._bodies)
        try:
            await self._app(scope, receive, send)
        finally:
            body.end()
            self._num[client] -= 1
            if not self._num[client]:
                del self._num[client]


def body_of(scope: Scope) -> Body:
    """That of a request which has come through `Counted`."""
    found: Body = scope[_KEY]
    return found
