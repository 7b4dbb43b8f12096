"""The id of a request, by which the logs of a front and of its workers can be searched.

A client may name its request by the header `x-request-id`; else an id is made. Every answer carries
it. Two requests may come with one id, so it is only a part of the ids that the workers use.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-request-id"
_KEY: Final = "prefixkv.request_id"
_TAKEN: Final = re.compile(r"[!-~]{1,128}")  # printable ASCII without blanks

_current: ContextVar[str] = ContextVar("request_id", default="")


class RequestIds:
    """An application whose requests have ids."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((v for k, v in scope["headers"] if k == HEADER.encode()), b"")
        text = given.decode("latin-1")
        scope[_KEY] = text if _TAKEN.fullmatch(text) else secrets.token_hex(16)
        _current.set(scope[_KEY])

        async def send_with_id(message: Message) -> None:
            # Read only now: the handler may have taken another id from the body.
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = scope[_KEY]
            await send(message)

        await self._app(scope, receive, send_with_id)


def id_of(scope: Scope) -> str:
    found: str = scope[_KEY]
    return found


def take_id(scope: Scope, given: str | None) -> None:
    """Take the id in a body, if the header gave none and could carry this one."""
    has_header = any(k == HEADER.encode() for k, _ in scope["headers"])
    if given is not None and not has_header and _TAKEN.fullmatch(given):
        scope[_KEY] = given
        _current.set(given)


def current_id() -> str:
    """Return the id of the request that this task answers; "" outside of one."""
    return _current.get()
