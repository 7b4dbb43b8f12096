"""How each HTTP request of a server ended: refusals by reason, and a line of the request log.

`Outcomes.watch` wraps a whole application, its key and its bounds included, so that what is refused
before any handler runs is counted too. A handler adds what it knows to `line_of`; the line is
written when the answer has been sent, or its client has left.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixkv.serving.failures import REASON, Rate
from prefixkv.serving.request_file import RequestFile

MAX_REASONS: Final = 64
"""Most pairs of status and reason that are counted by themselves; further reasons are "other"."""

_LINE: Final = "prefixkv.line"
_SERVER: Final = "server"  # the reason of an error that is another server's
_REASON: Final = re.compile(r"[A-Za-z][\w.-]{0,63}")
_ID: Final = re.compile(rb"[\x21-\x7e]{1,256}")
_CLIENT_LEFT: Final = 499  # `run_until_disconnect`: this answer is never seen
_REFUSED_LINES: Final = 200
_REFUSED_PER_S: Final = 20.0


class RequestLine:
    """A line of the request log, while the request is being answered. Owned by the event loop.
    `mark` adds times, in seconds since the request arrived."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.arrived_s, self.arrived_at = time.monotonic(), time.time()

    def mark(self, name: str) -> None:
        """Write field `NAME_s` the first time that something has happened."""
        self.fields.setdefault(f"{name}_s", round(time.monotonic() - self.arrived_s, 6))

    def add(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.fields[name] = self.fields.get(name, 0) + number


def line_of(scope: Scope) -> RequestLine:
    """Return a request's line; one that is dropped where no `Outcomes` watches."""
    line: RequestLine | None = scope.get(_LINE)
    return line if line is not None else RequestLine()


class Outcomes(Collector):
    """Refusals of one server, and its lines. Used on one event loop; any thread may collect.

    Args:
        kind: "front", "proxy" or "worker": the metric is `prefixkv_KIND_refused_total`.
        who: fields that each line begins with.
        file: None: no lines.
        refused_only: answered requests get no line here, since the node writes theirs.
    """

    def __init__(
        self, kind: str, who: Mapping[str, Any], file: RequestFile | None = None,
        refused_only: bool = False,
    ) -> None:  # fmt: skip
        self._kind, self._who = kind, dict(who)
        self._file, self._refused_only = file, refused_only
        self._refused: dict[tuple[str, str], int] = {}
        # Lines of refused requests are bounded in rate: who has no key must not fill the disk.
        self._rate = Rate(_REFUSED_LINES, _REFUSED_PER_S)
        self._left_out = 0

    def watch(self, app: ASGIApp) -> ASGIApp:
        return _WatchedApp(app, self)

    def refused(self, status: int, reason: str) -> None:
        """Count a request that is not served, by the answer's status and the reason in it."""
        # Codes of other servers come through here: they bound neither their form nor their number.
        key = str(status), reason if _REASON.fullmatch(reason) else "other"
        if key not in self._refused and len(self._refused) >= MAX_REASONS:
            key = str(status), "other"
        self._refused[key] = self._refused.get(key, 0) + 1

    def ended(
        self, scope: Scope, line: RequestLine, status: int, answer_bytes: int, whole: bool
    ) -> None:
        """`status`: 0 if no answer was sent; `whole`: the answer was sent to its end."""
        if self._file is None:
            return
        # 1. A handler has said how it ended; but what its client left in the middle is aborted.
        # 2. An error that no handler has spoken of: refused, before anything was begun.
        refused = status >= 400 and status != _CLIENT_LEFT
        whole = whole and status != _CLIENT_LEFT
        outcome = line.fields.pop("outcome", None) or ("refused" if refused else "finished")
        if outcome == "finished" and not whole:
            outcome = "aborted"
        # No line: pages, lists of models and probes, which were answered; and what a node answers,
        # which writes the line itself.
        if outcome != "refused" and (self._refused_only or scope["method"] != "POST"):
            return
        if outcome == "refused" and not self._rate.take(time.monotonic()):
            self._left_out += 1
            return
        line.mark("ended")
        self._file.write(
            {
                **self._who, "id": "", "outcome": outcome,
                "path": f"{scope['method']} {scope['path']}", "status": status,
                "reason": scope.get(REASON, _SERVER if refused else None), **line.fields,
                "answer_bytes": answer_bytes, "arrived_at": round(line.arrived_at, 6),
            }
        )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"prefixkv_{self._kind}_refused",
            "Requests that were not served, by the answer's status and its error's code.",
            labels=["status", "reason"],
        )
        # Collected in a thread: copied first, since the event loop adds rows.
        for labels, number in self._refused.copy().items():
            family.add_metric(labels, number)
        yield family
        if self._file is not None:
            left_out = CounterMetricFamily(
                "prefixkv_request_log_left_out",
                "Lines of refused requests that were too many to be written.",
            )
            left_out.add_metric([], self._left_out)
            yield left_out
            yield from self._file.collect()


class _WatchedApp:
    def __init__(self, app: ASGIApp, outcomes: Outcomes) -> None:
        self._app, self._outcomes = app, outcomes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = scope[_LINE] = RequestLine()
        status = answer_bytes = 0
        whole = False

        async def watched_send(message: Message) -> None:
            nonlocal status, answer_bytes, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                if request_id := _request_id(message.get("headers", ())):
                    line.fields["request_id"] = request_id
                # Counted before it is sent: its client finds it counted.
                if status >= 400 and status != _CLIENT_LEFT:
                    self._outcomes.refused(status, scope.get(REASON, _SERVER))
            else:
                answer_bytes += len(message.get("body", b""))
                whole = whole or not message.get("more_body", False)
            await send(message)

        if request_id := _request_id(scope["headers"]):
            line.fields["request_id"] = request_id
        try:
            await self._app(scope, receive, watched_send)
        finally:
            self._outcomes.ended(scope, line, status, answer_bytes, whole)


def _request_id(headers: Any) -> str:
    """Return the `x-request-id`; "" without one, or if it is no plain text."""
    found = next((value for name, value in headers if name.lower() == b"x-request-id"), b"")
    return found.decode() if _ID.fullmatch(found) else ""
