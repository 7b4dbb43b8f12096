"""Errors as answers, in OpenAI's form.

Details of a failure inside the service go to its log. The client gets what it can act on, and the
request's id, under which the log has the rest.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any, Final

import msgspec
from starlette.responses import Response

from prefixkv.serving.ids import current_id

logger = logging.getLogger("prefixkv.http")

_LOGGED_CHARS: Final = 2000
_LINES: Final = 200
_LINES_PER_S: Final = 10.0
_INNER: Final = re.compile(
    r"Traceback|File \W?\"|\w+://[\w.:\[\]*-]+|(?<![\w.])/\w[\w.-]*/[\w./-]*"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b|\[[0-9a-fA-F:]*::|0x[0-9a-fA-F]{6,}"
)
"""Marks of text that is not for clients: traces, addresses, paths."""


class ApiError(Exception):
    """An error as the answer to a request, in OpenAI's form.

    Args:
        status: of HTTP.
        message: what is wrong, for a person.
        kind: OpenAI's `type`.
        code, param: OpenAI's, if there is one.
    """

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error",
        code: str | None = None, param: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error in OpenAI's form: {"error": {...}}."""
        return {
            "error": {
                "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip

    def response(self) -> Response:
        """Return the error as an HTTP answer, with the headers that its status calls for."""
        headers = {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (429, 503):
            headers["retry-after"] = "1"
        if self.status in (408, 413):  # the rest of the body is not read
            headers["connection"] = "close"
        body = msgspec.json.encode(self.body())
        return Response(body, self.status, headers, "application/json")


class _Lines:
    """A limit on log lines: a burst of `_LINES`, then `_LINES_PER_S`."""

    def __init__(self) -> None:
        self._left, self._when_s = float(_LINES), 0.0

    def take(self, now_s: float) -> bool:
        """Return whether one more line about a failure may be logged now."""
        # A token bucket: it fills with time up to `_LINES`, and each line takes one.
        more = (now_s - self._when_s) * _LINES_PER_S
        self._left, self._when_s = min(_LINES, self._left + more), now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


_lines = _Lines()


def failed(status: int, why: str, detail: str, code: str) -> ApiError:
    """Make the ApiError for a failure of the service itself. `why` goes to the client, with the id
    of its request, or with a random number outside of one; `detail` goes to the log under that id,
    at a bounded rate."""
    number = current_id() or secrets.token_hex(8)
    # Bounded in rate and length: clients must not be able to fill the log by failing.
    if _lines.take(time.monotonic()):
        logger.warning("request %s: %s", number, detail[:_LOGGED_CHARS])
    return ApiError(status, f"{why} (request {number})", "server_error", code)


def is_inner(text: str, asked: str = "") -> bool:
    """Return whether the text of a failure holds a trace, an address or a path that was not in the
    request, so that it is not for the client.

    >>> is_inner("max_tokens is 0"), is_inner("tcp://10.0.0.1:5 is lost"), is_inner("in /srv/m/a")
    (False, True, True)
    """
    # What the client sent itself may be repeated to it: it reveals nothing.
    return any(found[0] not in asked for found in _INNER.finditer(text))
