"""`--request-log FILE`: a JSON line per request that has ended, from a front, a proxy and workers.

Several processes append to one file. Lines reach it by single writes to a descriptor that was
opened with O_APPEND, which Linux does not mix on a local file system. The file is opened for each
line: where logrotate has renamed it, the next line makes a new one, without a signal.

What the writing thread cannot keep up with, or cannot write (a full disk), is counted as lost, and
the first loss is logged; serving goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from queue import Full, Queue
from typing import Any, Final

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixkv.errors import ConfigError

logger = logging.getLogger("prefixkv.request_file")

MAX_WAITING: Final = 4096
"""Most lines that wait to be written; more are lost."""

MAX_CHARS: Final = 1024
"""Most characters of a text in a line; the rest is cut."""

_CLOSE_S: Final = 5.0


class RequestFile(Collector):
    """Any thread may call it. A file that is there is appended to, and keeps its mode; a new one is
    readable by its owner alone. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.written = self.lost = 0
        self._queue: Queue[dict[str, Any] | None] = Queue(MAX_WAITING)
        self._torn = False
        # Guards `lost` and the start of the thread: several threads call `write`.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        try:
            os.close(self._open())
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"request_log: {path!r} cannot be written: {why}") from None

    def write(self, line: dict[str, Any]) -> None:
        """Queue one line. Neither blocks nor raises: a line that finds the queue full is lost."""
        try:
            if self._thread is None:
                self._start()
            self._queue.put_nowait(line)
        except (Full, RuntimeError):  # RuntimeError: no thread can be started
            self._lose("it cannot keep up")

    def close(self) -> None:
        """Write what waits, for some seconds at most. Idempotent."""
        if self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(Full):
                self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "prefixkv_request_log_lines", "Lines of the request log's file.", labels=["outcome"]
        )
        family.add_metric(["written"], self.written)
        family.add_metric(["lost"], self.lost)
        yield family

    # --- the writing thread -----------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="prefixkv-requests", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            # A value that JSON has no form for costs its own line alone.
            try:
                self._append(line)
                self.written += 1
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
        """Count a line as lost; warn of the first one."""
        with self._lock:
            is_first = not self.lost
            self.lost += 1
        if is_first:
            logger.warning("%s: a line of the request log is lost: %s; further ones are counted "
                           "only", self.path, why)  # fmt: skip
