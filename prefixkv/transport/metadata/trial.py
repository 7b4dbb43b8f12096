"""A peer's metadata on trial: checked here byte by byte, then loaded in a child process that may
die, before the process that serves loads it.

    control thread --submit--> trial thread: checks, one trial at a time --tell--> control thread
                                     | socket, a line each
                               child process (`trial_child.py`), one for all peers

The child is started at once and kept ready; after its death another is. It is ended by `close`,
and by the kernel when this process ends in any other way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple

from prefixkv.errors import MetadataError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.interfaces import net_devices
from prefixkv.transport.metadata.nixl_form import Range, check_metadata
from prefixkv.transport.nixl.agent import BINDINGS_FILE

_log = logging.getLogger("prefixkv.transport")

_START_LIMIT_S: Final = 60.0  # 0.6 s where cores are free
_TRIAL_LIMIT_S: Final = 10.0  # a few ms, likewise
_JOIN_LIMIT_S: Final = 30.0
_PROGRAM: Final = Path(__file__).with_name("trial_child.py")

Tell = Callable[[PeerId, MetadataError | None], None]


class _Request(NamedTuple):
    peer: PeerId
    metadata: bytes
    ranges: Collection[Range]


class Trial:
    """The thread that tries peers' metadata, and its child process.

    `submit` and `close` may be called from any thread. `tell` is called from the trial's own
    thread, once per `submit` and in their order: with None if the metadata may be loaded.
    """

    def __init__(self, name: str, tell: Tell, interface: str, in_child: bool) -> None:
        """Start the trial's thread, and the child process with it.

        Args:
            interface: as `TransportConfig.interface`.
            in_child: False: only the checks, no child process.
        """
        self._tell = tell
        self._interface = interface
        self._in_child = in_child
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over `_child` and `_closed`: none is started after the end
        self._child: _Child | None = None
        # Read by the thread without the lock: seen late, it costs one more trial.
        self._closed = False
        # This thread starts the children, since the kernel ends them when the thread that started
        # them ends (PR_SET_PDEATHSIG).
        self._thread = threading.Thread(
            target=self._run, name=f"prefixkv-trial-{name}", daemon=True
        )
        self._thread.start()

    @property
    def child_pid(self) -> int | None:
        child = self._child
        return None if child is None else child.process.pid

    def submit(self, peer: PeerId, metadata: bytes, ranges: Collection[Range]) -> None:
        """Queue a trial of this peer's metadata; `ranges` is the memory that its Hello names.
        Closed: no-op."""
        self._requests.put(_Request(peer, metadata, ranges))

    def close(self) -> None:
        """End the trial's child process and thread. Idempotent."""
        # Under the lock, so that no child is started after this one was killed.
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.process.kill()  # the thread may be waiting for it
        # After the kill, which ends the trial that the thread may be waiting for.
        self._requests.put(None)
        self._thread.join(_JOIN_LIMIT_S)

    def _run(self) -> None:
        """Run the trial's thread: one trial at a time, with the next child started between two."""
        try:
            self._keep_ready()
            while (request := self._requests.get()) is not None and not self._closed:
                error = self._verdict(request)
                if error is not None and not self._closed:
                    _log.warning("peer %s is refused: %s", request.peer, error)
                self._tell(request.peer, error)
                self._keep_ready()
        finally:
            self._drop_child()

    def _verdict(self, request: _Request) -> MetadataError | None:
        # Our own check first: what it refuses never costs a child.
        try:
            check_metadata(request.metadata, request.peer, request.ranges)
            if self._in_child:
                self._load(request.metadata)
        except MetadataError as error:
            return error.with_traceback(None)
        except Exception as error:  # no child to be had, say: refused rather than loaded untried
            return MetadataError(f"it could not be tried: {error!r}")
        return None

    def _load(self, metadata: bytes) -> None:
        """Load the metadata on trial in the child process.

        Raises:
            MetadataError: the child refuses it, dies of it or takes too long.
            OSError: there is no child to be had.
        """
        child = self._ready_child()
        # Three bad ends: it is too slow, the process dies, or NIXL says no.
        try:
            child.words.settimeout(_TRIAL_LIMIT_S)
            child.words.sendall(len(metadata).to_bytes(4, "little") + metadata)
            answer = child.line()
        except TimeoutError:
            self._drop_child()
            raise MetadataError(f"its trial took more than {_TRIAL_LIMIT_S} s") from None
        # It died while the metadata was sent.
        except OSError:
            answer = ""
        # It must not be used for another trial, whatever it is doing.
        if not answer:
            raise MetadataError(f"its trial ended the child process: {self._drop_child()}")
        if answer != "ok":
            raise MetadataError(f"its trial failed: {answer.removeprefix('no ')}")

    def _ready_child(self) -> _Child:
        """Return a child process that waits for a trial; one that has died since the last is
        replaced, once."""
        for attempt in range(2):
            child = self._child or self._start()
            try:
                if child.is_ready():
                    return child
            except OSError:
                pass
            ended = self._drop_child()
            _log.warning("the trial process was not ready (attempt %d): %s", attempt + 1, ended)
        raise OSError(f"the trial process does not start: {ended}")

    def _keep_ready(self) -> None:
        """Start a child process for the next trial if there is none. It becomes ready while this
        thread waits."""
        if self._in_child and self._child is None:
            try:
                self._start()
            except OSError as error:
                _log.warning("the trial process could not be started: %r", error)

    def _start(self) -> _Child:
        with self._lock:
            if self._closed:
                raise OSError("the node is closed")
            self._child = _Child(self._interface)
            return self._child

    def _drop_child(self) -> str:
        # Only the handover is locked: `end` waits, and `close` must not wait for that.
        with self._lock:
            child, self._child = self._child, None
        return "it is gone" if child is None else child.end()


class _Child:
    """The child process and the socket to it. Owned by the trial's thread."""

    def __init__(self, interface: str) -> None:
        self.words, theirs = socket.socketpair()
        self._is_ready = False
        self._received = b""
        settings = {"UCX_HANDLE_ERRORS": "none"}  # no backtraces of a process that is meant to die
        if devices := net_devices(interface):
            settings["UCX_NET_DEVICES"] = devices
        # The bindings' file alone: the package would bring torch, 200 MB of it and a second.
        arguments = [BINDINGS_FILE, str(os.getpid()), str(_TRIAL_LIMIT_S)]
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self.words.close)  # where the process cannot be started
            self.process = subprocess.Popen(
                # Isolated (-I -S): nothing of the user's environment is imported.
                [sys.executable, "-I", "-S", str(_PROGRAM), *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **settings},
                cwd="/",
            )
            undo.pop_all()

    def is_ready(self) -> bool:
        """Wait until the child process is ready for a trial; return whether it is. Raises OSError
        or TimeoutError if it never will be."""
        self.words.settimeout(_START_LIMIT_S)
        if not self._is_ready:
            self._is_ready = self.line() == "ready"
        else:  # it said so before, and may have died since: then there is an end to read
            self.words.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._is_ready = bool(self.words.recv(1, socket.MSG_PEEK))
        return self._is_ready

    def line(self) -> str:
        while b"\n" not in self._received:
            some = self.words.recv(4096)
            if not some:
                return ""
            self._received += some
        line, _, self._received = self._received.partition(b"\n")
        self._is_ready = line == b"ready"
        return line.decode(errors="replace")

    def end(self) -> str:
        self.words.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)  # it may be dying by itself: then its end says of what
        self.process.kill()
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
