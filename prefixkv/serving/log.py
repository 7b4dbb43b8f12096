"""What a server knows of a request, and says of it once it has ended: refusals by reason, and
`--request-log FILE`, a JSON line per request from a front, a proxy and workers.

A client may name its request by the header `x-request-id`; else an id is made. Every answer carries
it. Two requests may come with one id, so it is only a part of the ids that the workers use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from contextvars import ContextVar
from queue import Full, Queue
from typing import Any, Final

import msgspec
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import Scope

from prefixkv.errors import ConfigError

logger = logging.getLogger("prefixkv.request_file")

HEADER: Final = "x-request-id"
MAX_WAITING: Final = 4096
"""Most lines that wait to be written; more are lost."""
MAX_CHARS: Final = 1024
"""Most characters of a text in a line; the rest is cut."""

_NAME: Final = re.compile(r"[!-~]{1,128}")  # printable ASCII without blanks
_CLIENT_LEFT: Final = 499  # `run_until_disconnect`: this answer is never seen
_SERVER: Final = "server"  # the reason of an error that says none
_REFUSED_LINES: Final = 200
_REFUSED_PER_S: Final = 20.0
_CLOSE_S: Final = 5.0


class RequestRecord:
    """Owned by the event loop. `fields` are those of its line in the request log, `reason` that of
    the error that answered it, `span` its `OpenSpan`."""

    def __init__(self, scope: Scope | None = None) -> None:
        scope = scope or {"headers": []}
        self.method, self.path = scope.get("method", ""), scope.get("path", "")
        given = Headers(scope=scope).get(HEADER, "")
        self._is_named = bool(_NAME.fullmatch(given))
        self.id = given if self._is_named else secrets.token_hex(16)
        self.fields: dict[str, Any] = {}
        self.headers: dict[str, str] = {}  # of the answer, beside its own
        self.reason: str | None = None
        self.span: Any = None
        self.status = self.answer_bytes = 0  # 0: no answer has been sent
        self._is_sent = False
        self.arrived_s, self.arrived_at = time.monotonic(), time.time()

    def take_id(self, given: str | None) -> None:
        """Take the id in a body, if the header gave none and could carry this one."""
        if given is not None and not self._is_named and _NAME.fullmatch(given):
            self.id = given

    def mark(self, name: str) -> None:
        """Write field `NAME_s`, seconds since the request arrived, the first time."""
        self.fields.setdefault(f"{name}_s", round(time.monotonic() - self.arrived_s, 6))

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

    @property
    def outcome(self) -> str:
        # 1. A handler has said how it ended; but what its client left in the middle is aborted.
        # 2. An error that no handler has spoken of: refused, before anything was begun.
        outcome: str = self.fields.get("outcome", "refused" if self.is_error else "finished")
        return "aborted" if outcome == "finished" and self.has_left else outcome


_current: ContextVar[RequestRecord | None] = ContextVar("prefixkv_request", default=None)


def begin_record(scope: Scope) -> RequestRecord:
    """Make the record of the request that this task, and those that it starts, answer."""
    record = RequestRecord(scope)
    _current.set(record)
    return record


def current_record() -> RequestRecord:
    """Return that of the request that this task answers; outside of one it is dropped."""
    return _current.get() or RequestRecord()


class Rate:
    """A limit on log lines: a burst of `most`, then `per_s`."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left, self._when_s = most, 0.0

    def take(self, now_s: float) -> bool:
        # A token bucket: it fills with time up to `_most`, and each line takes one.
        more = (now_s - self._when_s) * self._per_s
        self._left, self._when_s = min(self._most, self._left + more), now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RequestFile:
    """Any thread may call it. A file that is there is appended to, and keeps its mode; a new one is
    readable by its owner alone. Raises ConfigError if it cannot be opened.

    Processes share a file: each line is a single write to a descriptor with O_APPEND, which Linux
    does not mix on a local file system. It is opened for each line, so logrotate may rename it.
    What its thread cannot keep up with, or cannot write (a full disk), is counted as lost.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.lines = Counter(
            "prefixkv_request_log_lines", "Lines of the request log's file.", ["outcome"],
            registry=None,
        )  # fmt: skip
        self._written, self._lost = map(self.lines.labels, ("written", "lost"))
        self._has_lost = self._torn = False
        try:
            os.close(self._open())
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"request_log: {path!r} cannot be written: {why}") from None
        self._queue: Queue[dict[str, Any] | None] = Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="prefixkv-requests", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue one line. Neither blocks nor raises: a line that finds the queue full is lost."""
        try:
            self._queue.put_nowait(line)
        except Full:
            self._lose("it cannot keep up")

    def close(self) -> None:
        """Write what waits, for some seconds at most."""
        with contextlib.suppress(Full):
            self._queue.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            # A value that JSON has no form for costs its own line alone.
            try:
                self._append(line)
                self._written.inc()
            except Exception as error:  # of the disk, mostly
                self._lose(getattr(error, "strerror", None) or repr(error))

    def _append(self, line: dict[str, Any]) -> None:
        cut = {
            name: value[:MAX_CHARS] if isinstance(value, str) else value
            for name, value in line.items()
        }
        # A line that an earlier write left in part is ended first, so that it spoils no other.
        data = b"\n" * self._torn + msgspec.json.encode(cut) + b"\n"
        file = self._open()
        try:
            self._torn = os.write(file, data) < len(data)
        finally:
            os.close(file)
        if self._torn:
            raise OSError("the disk took a part of it")

    def _open(self) -> int:
        # Not blocking: a pipe without a reader must not hold up the thread, nor `prefixkv` itself.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(self._path, flags, 0o600)

    def _lose(self, why: str) -> None:
        self._lost.inc()
        if not self._has_lost:
            self._has_lost = True
            logger.warning("%s: a line of the request log is lost: %s; further ones are counted "
                           "only", self._path, why)  # fmt: skip


class Outcomes:
    """Refusals of one server, and its lines. Used on one event loop.

    Args:
        kind: "front", "proxy" or "worker": the metric is `prefixkv_KIND_refused_total`. A worker
            writes only lines of what it refuses, since its node writes the others.
        who: fields that each line begins with.
        file: None: no lines.
    """

    def __init__(self, kind: str, who: dict[str, str], file: RequestFile | None = None) -> None:
        self._who, self._file, self._refused_only = who, file, kind == "worker"
        self._refused = Counter(
            f"prefixkv_{kind}_refused",
            "Requests that were not served, by the answer's status and its error's code.",
            ["status", "reason"], registry=None,
        )  # fmt: skip
        self.collectors = [self._refused]
        # Lines of refused requests are bounded in rate: who has no key must not fill the disk.
        self._rate = Rate(_REFUSED_LINES, _REFUSED_PER_S)
        self._left_out = Counter(
            "prefixkv_request_log_left_out",
            "Lines of refused requests that were too many to be written.", registry=None,
        )  # fmt: skip
        if file is not None:
            self.collectors += [self._left_out, file.lines]

    def refused(self, record: RequestRecord) -> None:
        """Count a request that is not served, by the answer's status and the reason in it."""
        self._refused.labels(str(record.status), record.reason or _SERVER).inc()

    def ended(self, record: RequestRecord) -> None:
        """Write the line of a request whose answer has been sent, or whose client has left."""
        if self._file is None:
            return
        outcome = record.fields["outcome"] = record.outcome
        # No line: pages, lists of models and probes, which were answered.
        if outcome != "refused" and (self._refused_only or record.method != "POST"):
            return
        if outcome == "refused" and not self._rate.take(time.monotonic()):
            self._left_out.inc()
            return
        record.mark("ended")
        self._file.write(
            {
                **self._who, "id": "", "outcome": outcome,
                "path": f"{record.method} {record.path}", "status": record.status,
                "reason": record.reason or (_SERVER if record.is_error else None),
                "request_id": record.id, **record.fields,
                "answer_bytes": record.answer_bytes, "arrived_at": round(record.arrived_at, 6),
            }
        )  # fmt: skip
