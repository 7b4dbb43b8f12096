"""What a server knows of a request while it answers it: one record, for the logs, the metrics, the
traces and the errors.

A client may name its request by the header `x-request-id`; else an id is made. Every answer carries
it. Two requests may come with one id, so it is only a part of the ids that the workers use.
"""

from __future__ import annotations

import re
import secrets
import time
from contextvars import ContextVar
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Scope

HEADER: Final = "x-request-id"
_TAKEN: Final = re.compile(r"[!-~]{1,128}")  # printable ASCII without blanks
_CLIENT_LEFT: Final = 499  # `run_until_disconnect`: this answer is never seen


class RequestRecord:
    """Owned by the event loop. `fields` are those of its line in the request log, `reason` that of
    the error that answered it, `span` its `OpenSpan`."""

    def __init__(self, scope: Scope | None = None) -> None:
        scope = scope or {"headers": []}
        self.method, self.path = scope.get("method", ""), scope.get("path", "")
        given = Headers(scope=scope).get(HEADER, "")
        self._is_named = bool(_TAKEN.fullmatch(given))
        self.id = given if self._is_named else secrets.token_hex(16)
        self.fields: dict[str, Any] = {}
        self.reason: str | None = None
        self.span: Any = None
        self.status = self.answer_bytes = 0  # 0: no answer has been sent
        self._is_sent = False
        self.arrived_s, self.arrived_at = time.monotonic(), time.time()

    def take_id(self, given: str | None) -> None:
        """Take the id in a body, if the header gave none and could carry this one."""
        if given is not None and not self._is_named and _TAKEN.fullmatch(given):
            self.id = given

    def mark(self, name: str) -> None:
        """Write field `NAME_s`, seconds since the request arrived, the first time."""
        self.fields.setdefault(f"{name}_s", round(time.monotonic() - self.arrived_s, 6))

    def add(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.fields[name] = self.fields.get(name, 0) + number

    def sent(self, num_bytes: int, is_last: bool) -> None:
        self.answer_bytes += num_bytes
        self._is_sent = is_last

    @property
    def is_error(self) -> bool:
        return self.status >= 400 and self.status != _CLIENT_LEFT

    @property
    def has_left(self) -> bool:
        """Whether the client left before it had its answer to the end."""
        return not self._is_sent or self.status == _CLIENT_LEFT


_current: ContextVar[RequestRecord | None] = ContextVar("prefixkv_request", default=None)


def begin_record(scope: Scope) -> RequestRecord:
    """Make the record of the request that this task, and those that it starts, answer."""
    record = RequestRecord(scope)
    _current.set(record)
    return record


def current_record() -> RequestRecord:
    """Return that of the request that this task answers; outside of one it is dropped."""
    return _current.get() or RequestRecord()
