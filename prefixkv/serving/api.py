"""What a front and a proxy have in common with their clients: errors as answers, in OpenAI's form,
what clients say of their sessions, and counts of requests.

Details of a failure inside the service go to its log. The client gets what it can act on, and the
request's id, under which the log has the rest.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from prefixkv import Hints, NotFiniteError
from prefixkv.serving.log import Rate, RequestRecord, current_record
from prefixkv.serving.tracing import current
from prefixkv.spi import MAX_SESSION_CHARS

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


# --- sessions ------------------------------------------------------------------------------------

HEADER: Final = "X-Session-Id"
"""A session's name where the body has none; vLLM reads it too."""

_Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]


class SessionFields(msgspec.Struct, kw_only=True):
    """The fields of a body that are about its session. `kv_hints` has the fields of `Hints`; those
    that it does not know, of later versions, are ignored. `session_id` is vLLM's and SGLang's, the
    last two are OpenAI's."""

    kv_hints: Hints | None = None
    session_id: _Session | None = None
    prompt_cache_key: _Session | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def hints(self, request: Request) -> Hints:
        """Return all that is said, the most precise word first. Raises ApiError 400.

        "24h" stands for the longest class, and counts only where `kv_hints` says no more: nothing
        is kept for 24 hours. "in_memory" asks for what is done anyway.
        """
        found, header = self.kv_hints or Hints(), request.headers.get(HEADER, "")
        if found.ends and found.returns_after is not None:
            raise refused("kv_hints.returns_after", "has to be null where kv_hints.ends is true")
        if len(header) > MAX_SESSION_CHARS:
            raise refused(HEADER, f"has {len(header)} characters, at most {MAX_SESSION_CHARS}")
        session = found.session or self.session_id or header or self.prompt_cache_key or ""
        returns_after = found.returns_after
        if self.prompt_cache_retention == "24h" and found.continues is None:
            returns_after = 600
        return msgspec.structs.replace(found, session=session, returns_after=returns_after)


class AnnouncedTurn(msgspec.Struct, forbid_unknown_fields=True):
    """A body of /v1/sessions/NAME: the next turn of the session comes soon."""

    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


# --- counts --------------------------------------------------------------------------------------


class RequestMetrics:
    """`kind` is of the process, `routing` returns what its routers count, by name."""

    def __init__(self, kind: str, routing: Callable[[], Mapping[str, int]]) -> None:
        self._kind, self._routing = kind, routing
        self.requests = Counter(
            f"prefixkv_{kind}_requests", "Requests by how they ended. A proxy counts a stream with "
            "its first piece, and in prefixkv_proxy_cut.", ["outcome"], registry=None,
        )  # fmt: skip
        self.ttft = Histogram(
            f"prefixkv_{kind}_ttft_seconds", "From a request to the first piece of its answer.",
            registry=None,
        )  # fmt: skip
        self.collectors: list[Any] = [self.requests, self.ttft, self]
        # All rows are there from the start, so that a rate sees the first request that fails.
        for outcome in ("finished", "refused", "failed", "aborted"):
            self.requests.labels(outcome)

    @contextmanager
    def counted(self) -> Iterator[RequestRecord]:
        """Count how a request ends, and write it to its line, which is yielded, and its span."""
        line, outcome = current_record(), "aborted"
        try:
            yield line
            outcome = "finished"
        except Exception as error:
            is_refused = isinstance(error, ApiError) and error.status < 500
            outcome = "refused" if is_refused else "failed"
            if not is_refused:
                current().fail(error)
            raise
        finally:
            self.requests.labels(outcome).inc()
            line.fields["outcome"] = outcome

    def begun(self, line: RequestRecord) -> None:
        """Count the time to the first piece of an answer."""
        line.mark("first_token")
        self.ttft.observe(line.fields["first_token_s"])

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily(
            f"prefixkv_{self._kind}_routing", "What the routers count, by servers' kind.",
            labels=["what"],
        )  # fmt: skip
        for name, number in self._routing().items():
            family.add_metric([name], number)
        return [family]
