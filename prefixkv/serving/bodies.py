"""Bounds on the memory of request bodies, for all of a server together and per client.

A body counts from its first byte until its request has been answered, since what is made of it
lives as long. When room runs out, the body that has been arriving for longest is dropped: a client
that sends slowly keeps no other out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from prefixkv.serving.failures import ApiError

_KEY: Final = "prefixkv.body"


class BodyMemory:
    """Memory that one request's body takes. One owner."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0
        # Only while the body arrives: then `_make_room` of another request may end it.
        self._patience: asyncio.Timeout | None = None  # while it comes
        self.made_room = False

    def begin_arriving(self, patience: asyncio.Timeout) -> None:
        """Begin to count the request's body as arriving. `patience` is the time-out of its reader,
        which ends early if others need the room."""
        self._patience = patience
        self._bodies.coming[self] = None

    def grow(self, num_bytes: int) -> None:
        """Take room for more of the request's body, from the body that has been arriving for
        longest if too little is left. Raises ApiError 503 if no other body can give up its room."""
        while self._bodies.num_bytes + num_bytes > self._bodies.limit:
            # The oldest arriving body that holds any bytes. One that has fully arrived is being
            # answered, and is never dropped; nor does a body drop itself for its own growth.
            oldest = next((one for one in self._bodies.coming if one._num_bytes), None)
            if oldest is None or oldest is self:
                raise ApiError(
                    503, "the bodies of other requests take all there is room for", "server_error",
                    "overloaded",
                )  # fmt: skip
            oldest._make_room()
        self._bodies.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def stop_arriving(self) -> None:
        """Stop counting the request's body as arriving: it is complete, or its reader has given
        up."""
        self._bodies.coming.pop(self, None)
        self._patience = None

    def end(self) -> None:
        """Give back all room that the request's body takes. Idempotent."""
        self.stop_arriving()
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0

    def _make_room(self) -> None:
        """Drop what has arrived of this body, for another request's, and end its reader's wait
        now."""
        # `end` forgets the patience, so take it before.
        patience = self._patience
        self.made_room = True
        self.end()
        if patience is not None and not patience.expired():
            patience.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """The bodies of all requests of one server. Used on one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self.coming: dict[BodyMemory, None] = {}  # still arriving, oldest first


class PerClientLimit:
    """An application that answers at most `most` requests of one client at once (0: any number),
    and bounds the sum of all bodies; further requests are refused."""

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
        body = scope[_KEY] = BodyMemory(self._bodies)
        try:
            await self._app(scope, receive, send)
        finally:
            # After the answer, however it ended: the only place where the room and the count go
            # back.
            body.end()
            self._num[client] -= 1
            if not self._num[client]:
                del self._num[client]


def body_of(scope: Scope) -> BodyMemory:
    """Return the `BodyMemory` that `PerClientLimit` gave a request."""
    found: BodyMemory = scope[_KEY]
    return found
