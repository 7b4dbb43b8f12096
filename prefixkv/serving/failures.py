"""Answers that are errors, in OpenAI's form.

What goes wrong within a service is for its log: a client hears what it can do about it, and the
number under which the log has the rest.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any, Final

import msgspec
from starlette.responses import Response

logger = logging.getLogger("prefixkv.http")

_LOGGED_CHARS: Final = 2000
_LINES: Final = 200
_LINES_PER_S: Final = 10.0
_INNER: Final = re.compile(
    r"Traceback|File \W?\"|\w+://[\w.:\[\]*-]+|(?<![\w.])/\w[\w.-]*/[\w./-]*"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b|\[[0-9a-fA-F:]*::|0x[0-9a-fA-F]{6,}"
)
"""What words of the inside have in them: traces, addresses, paths."""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form.

    Args:
        status: of HTTP.
        message: what is wrong, for a person.
        kind: OpenAI's `type`.
        code, param: as OpenAI's, where there is one.
    """

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error",
        code: str | None = None, param: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        """What is sent: {"error": {...}}."""
        return {
            "error": {
                "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip

    def response(self) -> Response:
        headers = {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (429, 503):
            headers["retry-after"] = "1"
        if self.status in (408, 413):  # what is still to come is not read
            headers["connection"] = "close"
        body = msgspec.json.encode(self.body())
        return Response(body, self.status, headers, "application/json")


class _Lines:
    """Lines of the log: `_LINES` at once, then `_LINES_PER_S`."""

    def __init__(self) -> None:
        self._left, self._when_s = float(_LINES), 0.0

    def take(self, now_s: float) -> bool:
        more = (now_s - self._when_s) * _LINES_PER_S
        self._left, self._when_s = min(_LINES, self._left + more), now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


_lines = _Lines()


def failed(status: int, why: str, detail: str, code: str) -> ApiError:
    """An error of this service's. `why` is for its client; `detail` goes to the log, under the
    request's number, which the client is told."""
    number = secrets.token_hex(8)
    if _lines.take(time.monotonic()):
        logger.warning("request %s: %s", number, detail[:_LOGGED_CHARS])
    return ApiError(status, f"{why} (request {number})", "server_error", code)


def is_inner(text: str, asked: str = "") -> bool:
    """Whether words have a trace, an address or a path in them that was not in what was asked, so
    that they are not for a client.

    >>> is_inner("max_tokens is 0"), is_inner("tcp://10.0.0.1:5 is lost"), is_inner("in /srv/m/a")
    (False, True, True)
    """
    return any(found[0] not in asked for found in _INNER.finditer(text))
