"""A decode worker's own traffic, written for `prefixkv replay`: `DecodeConfig(record=PATH)`.

One line per request that asked the cache, in the order of ends, in the form of Mooncake's traces:

    {"timestamp": 81250, "input_length": 6755, "output_length": 500, "hash_ids": [271, ..., 828],
     "block_size": 512, "bytes_per_token": 131072}

`timestamp` is the arrival, ms since the node was built. An id is a hash of all tokens up to a
block's end and of the namespace, under a salt drawn for each file and written nowhere. So ids tell
equal prefixes within a file and nothing else. What cannot be written counts as lost.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
import threading
import time
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.config import DecodeConfig
from prefixkv.digest import prompt_digest
from prefixkv.errors import ConfigError
from prefixkv.paging import page_floor
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.threads import undoing

MAX_FILES: Final = 4
"""Files of one record, the one that is written included."""

MAX_WAITING: Final = 1024
"""Most requests that wait to be written; each holds its packed prompt. More are lost."""

_CLOSE_S: Final = 5.0

_log = logging.getLogger("prefixkv.record")


def install(node: DecodeNode, _path: object) -> None:
    """Record the node's requests. Raises ConfigError as `Recorder`."""
    layout = node.pool.layout
    num_bytes = layout.kv_bytes_per_token * node.num_ranks
    recorder = Recorder(node.config, layout.page_size, num_bytes, time.monotonic())
    node.on_close(recorder.close)
    node.journal.on_ended.append(recorder.ended)
    node.more_stats.append(lambda: {"recorded": recorder.recorded, "record_lost": recorder.lost})


class _EndedRequest(NamedTuple):
    arrived_ms: int
    data: bytes  # the packed prompt
    namespace: Any
    output_len: int


class Recorder:
    """Writes ended requests to a file, by a thread of its own.

    `ended` is called by the scheduler's thread and neither blocks nor raises; any thread may read
    `recorded` and `lost`. The first loss is warned of.

    Args:
        config: its `record` is the file; one that is there already is kept as `record`.1.
        now_s: the present time on the clock of the requests' times.

    Raises ConfigError: the file cannot be opened, or is no regular file.
    """

    def __init__(
        self, config: DecodeConfig, page_size: int, bytes_per_token: int, now_s: float
    ) -> None:
        self._path = Path(str(config.record))
        self._max_bytes = config.record_bytes  # of a file
        self.block_tokens = max(page_size, page_floor(config.record_block_tokens, page_size))
        self._line_constants = {"block_size": self.block_tokens, "bytes_per_token": bytes_per_token}
        self._begin_s = now_s
        self.recorded = self.lost = 0
        self._closed = False
        self._queue: SimpleQueue[_EndedRequest | None] = SimpleQueue()
        self._file = -1
        try:
            self._begin_file()
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(
                f"record is {str(self._path)!r}, which cannot be written: {why}"
            ) from error
        self._thread = threading.Thread(target=self._run, name="prefixkv-record", daemon=True)
        with undoing(self._close_file):
            self._thread.start()

    def ended(self, req: Any, now_s: float) -> None:
        """Queue a request that has ended. Left out if never admitted, or not to be cached."""
        if req.admitted_s is None or not req.request.cacheable:
            return
        if self._closed or self._queue.qsize() >= MAX_WAITING:
            self._lose("it cannot keep up")
            return
        key = req.request.key
        arrived_ms = max(0, round((req.arrived_s - self._begin_s) * 1000))
        self._queue.put(_EndedRequest(arrived_ms, bytes(key.data), key.namespace, len(req.output)))

    def close(self) -> None:
        """Write what waits, for some seconds at most. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._close_file()

    # --- the recorder's thread --------------------------------------------------------------------

    def _run(self) -> None:
        """A line that cannot be written is counted as lost."""
        while (ended := self._queue.get()) is not None:
            try:
                self._write(ended)
            except Exception as error:
                self._lose(getattr(error, "strerror", None) or repr(error))

    def _write(self, ended: _EndedRequest) -> None:
        # 1. Where the file has no room for the line, it is made once more with the next one's salt.
        line = self._line(ended)
        if self._file < 0 or (self._size and self._size + len(line) > self._max_bytes):
            self._begin_file()
            line = self._line(ended)
        if len(line) > self._max_bytes:
            raise ValueError(f"a line has {len(line)} bytes, a file {self._max_bytes}")
        # 2. Written whole or not at all: a part is cut off again, or the file is given up.
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])  # says why the rest does not fit
                raise OSError("the line was written in part")
        except OSError:
            try:
                os.ftruncate(self._file, self._size)  # no line in part
            except OSError:
                self._close_file()
            raise
        self._size += len(line)
        self.recorded += 1

    def _line(self, ended: _EndedRequest) -> bytes:
        entry = {
            "timestamp": ended.arrived_ms,
            "input_length": len(ended.data) // TOKEN_BYTES,
            "output_length": ended.output_len,
            "hash_ids": self._ids(ended),
            **self._line_constants,
        }
        return (json.dumps(entry, separators=(",", ":")) + "\n").encode()

    def _ids(self, ended: _EndedRequest) -> list[int]:
        """Return 52 bits for each of the prompt's blocks: every reader of JSON takes these."""
        size = TOKEN_BYTES * self.block_tokens
        # Each id depends on all blocks before it and the namespace, like the tree's own paths.
        above = prompt_digest([], ended.namespace)
        ids = []
        for at in range(0, len(ended.data), size):
            digest = blake2b(above, key=self._salt, digest_size=32)
            digest.update(ended.data[at : at + size])
            above = digest.digest()
            ids.append(int.from_bytes(above[:8], "little") >> 12)
        return ids

    def _begin_file(self) -> None:
        """The files before move on by one number, and the last is deleted."""
        self._close_file()
        path = self._path
        if path.exists():
            if not stat.S_ISREG(path.stat().st_mode):
                raise OSError("it is no regular file")
            # From the oldest on, so that none is overwritten before it has moved.
            for number in range(MAX_FILES - 1, 0, -1):
                source = path if number == 1 else Path(f"{path}.{number - 1}")
                if source.exists():
                    source.replace(f"{path}.{number}")
        # O_EXCL: what another process puts there meanwhile is not written into.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._size = 0
        self._salt = secrets.token_bytes(32)

    def _close_file(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _lose(self, why: str) -> None:
        """Warns of the first lost request."""
        self.lost += 1
        if self.lost == 1:
            _log.warning("%s: a request is not recorded: %s; further ones are counted only",
                         self._path, why)  # fmt: skip
