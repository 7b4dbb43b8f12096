"""How each HTTP request of a server ended: refusals by reason, and `--request-log FILE`, a JSON
line per request from a front, a proxy and workers.

Several processes append to one file. Lines reach it by single writes to a descriptor that was
opened with O_APPEND, which Linux does not mix on a local file system. The file is opened for each
line: where logrotate has renamed it, the next line makes a new one, without a signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from queue import Full, Queue
from typing import Any, Final

import msgspec
from prometheus_client import Counter

from prefixkv.errors import ConfigError
from prefixkv.serving.failures import Rate
from prefixkv.serving.record import RequestRecord

logger = logging.getLogger("prefixkv.request_file")

MAX_REASONS: Final = 64
"""Most pairs of status and reason that are counted by themselves; further reasons are "other"."""

MAX_WAITING: Final = 4096
"""Most lines that wait to be written; more are lost."""

MAX_CHARS: Final = 1024
"""Most characters of a text in a line; the rest is cut."""

_SERVER: Final = "server"  # the reason of an error that is another server's
_REASON: Final = re.compile(r"[A-Za-z][\w.-]{0,63}")
_REFUSED_LINES: Final = 200
_REFUSED_PER_S: Final = 20.0
_CLOSE_S: Final = 5.0


class RequestFile:
    """Any thread may call it. A file that is there is appended to, and keeps its mode; a new one is
    readable by its owner alone. Raises ConfigError if it cannot be opened.

    What its thread cannot keep up with, or cannot write (a full disk), is counted as lost, and the
    first loss is logged; serving goes on.
    """

    def __init__(self, path: str) -> None:
        self.path = path
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
        """Write what waits, for some seconds at most. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(Full):
                self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    # --- the writing thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            # A value that JSON has no form for costs its own line alone.
            try:
                self._append(line)
                self._written.inc()
            except Exception as error:  # of the disk, mostly
                self._lose(getattr(error, "strerror", None) or repr(error))

    def _append(self, line: dict[str, Any]) -> None:
        """Append one line by one write, its texts cut to `MAX_CHARS`."""
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
        return os.open(self.path, flags, 0o600)

    def _lose(self, why: str) -> None:
        self._lost.inc()
        if not self._has_lost:
            self._has_lost = True
            logger.warning("%s: a line of the request log is lost: %s; further ones are counted "
                           "only", self.path, why)  # fmt: skip


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
        self._reasons: set[tuple[str, str]] = set()
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
        # Codes of other servers come through here: they bound neither their form nor their number.
        reason = record.reason or _SERVER
        key = str(record.status), reason if _REASON.fullmatch(reason) else "other"
        if key not in self._reasons and len(self._reasons) >= MAX_REASONS:
            key = str(record.status), "other"
        self._reasons.add(key)
        self._refused.labels(*key).inc()

    def ended(self, record: RequestRecord) -> None:
        """Write the line of a request whose answer has been sent, or whose client has left."""
        if self._file is None:
            return
        # 1. A handler has said how it ended; but what its client left in the middle is aborted.
        # 2. An error that no handler has spoken of: refused, before anything was begun.
        outcome = record.fields.pop("outcome", "refused" if record.is_error else "finished")
        if outcome == "finished" and record.has_left:
            outcome = "aborted"
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
