"""Errors as answers, in OpenAI's form.

Details of a failure inside the service go to its log. The client gets what it can act on, and the
request's id, under which the log has the rest.
"""

from __future__ import annotations

import logging
import re
import time
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from prefixkv import NotFiniteError
from prefixkv.serving.log import Rate, current_record

logger = logging.getLogger("prefixkv.http")

_LOGGED_CHARS: Final = 2000
_LINES: Final = 200.0
_LINES_PER_S: Final = 10.0
_INNER: Final = re.compile(
    r"Traceback|File \W?\"|\w+://[\w.:\[\]*-]+|(?<![\w.])/\w[\w.-]*/[\w./-]*"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b|\[[0-9a-fA-F:]*::|0x[0-9a-fA-F]{6,}"
)
"""Marks of text that is not for clients: traces, addresses, paths."""


class ApiError(Exception):
    """An error as the answer to a request, in OpenAI's form: `kind` is OpenAI's `type`."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error",
        code: str | None = None, param: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip

    def response(self) -> Response:
        """Make the answer, and leave its reason in the record of its request."""
        current_record().reason = self.reason
        headers = {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (429, 503):
            headers["retry-after"] = "1"
        if self.status in (408, 413):  # the rest of the body is not read
            headers["connection"] = "close"
        body = msgspec.json.encode(self.body())
        return Response(body, self.status, headers, "application/json")

    @property
    def reason(self) -> str:
        """For metrics and logs: the code, else the name of the status."""
        return self.code or HTTPStatus(self.status).name.lower()


def refused(name: str, why: str) -> ApiError:
    """Make the error for a parameter that is not taken."""
    return ApiError(400, f"{name} {why}", code="invalid_value", param=name)


_lines = Rate(_LINES, _LINES_PER_S)


def failed(status: int, why: str, detail: str, code: str) -> ApiError:
    """Make the error for a failure of the service itself. `why` goes to the client, with the id of
    its request; `detail` goes to the log under that id."""
    number = current_record().id
    # Bounded in rate and length: clients must not be able to fill the log by failing.
    if _lines.take(time.monotonic()):
        logger.warning("request %s: %s", number, detail[:_LOGGED_CHARS])
    return ApiError(status, f"{why} (request {number})", "server_error", code)


def is_not_finite(error: str) -> bool:
    """Return whether an answer has failed since a worker computed NaN or infinity for it."""
    # A request's id may stand in the text, and is the client's.
    return re.search(rf"\b{NotFiniteError.__name__}: ", error) is not None


def answer_ended(error: str) -> ApiError:
    """Make the error for an answer that a worker has ended with `error`, its class first."""
    if is_not_finite(error):
        why = "the model computed numbers that are not finite"
        return failed(500, why, error, "not_finite")
    return failed(503, "the answer was ended", error or "no reason given", "worker_lost")


def is_inner(text: str, asked: str = "") -> bool:
    """Return whether the text of a failure holds a trace, an address or a path that was not in the
    request, so that it is not for the client.

    >>> is_inner("max_tokens is 0"), is_inner("tcp://10.0.0.1:5 is lost"), is_inner("in /srv/m/a")
    (False, True, True)
    """
    # What the client sent itself may be repeated to it: it reveals nothing.
    return any(found[0] not in asked for found in _INNER.finditer(text))
