"""Programs that speak ZMTP with a socket of ours, by bytes on TCP: libzmq would keep a message of
many parts to itself until its last one."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.models.patience import PATIENCE_S

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
EMPTY_PART = b"\x01\x00"
HANDSHAKE_S = 10.0  # a side that is busy takes its time


def ready(kind: bytes) -> bytes:
    """The command that ends the handshake, of a socket of this type."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", kind), (b"Identity", b"")):
        body += bytes([len(name)]) + name + len(value).to_bytes(4) + value
    return bytes([4, len(body)]) + body


def part(size: int, more: bool = True) -> bytes:
    """A part of a message, of zeros."""
    if size < 256:
        return bytes([more, size]) + bytes(size)
    return bytes([2 | more]) + size.to_bytes(8) + bytes(size)


def connected(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S)


def stranger(endpoint: str, kind: bytes = b"DEALER") -> socket.socket:
    """One that has shaken hands."""
    return shaken(connected(endpoint), kind)


def shaken(sock: socket.socket, kind: bytes) -> socket.socket:
    """A connection after the handshake, which both sides have ended.

    libzmq ends a connection that says more before that, and nothing of what it says is tried.
    Raises OSError, with the connection closed.
    """
    try:
        sock.settimeout(HANDSHAKE_S)
        sock.sendall(GREETING + ready(kind))
        _read(sock, len(GREETING))
        _, size = _read(sock, 2)
        _read(sock, size)
        sock.settimeout(PATIENCE_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _read(sock: socket.socket, size: int) -> bytes:
    raw = b""
    while len(raw) < size:
        more = sock.recv(size - len(raw))
        if not more:
            raise ConnectionResetError("it was ended in the handshake")
        raw += more
    return raw


class Flood:
    """Threads that send without end, and come again when they are cut off."""

    def __init__(self, begin: Callable[[], socket.socket], chunk: bytes, num: int) -> None:
        self._begin, self._chunk = begin, chunk
        self._stopping = False
        self.num_cut = self.num_bytes = 0
        self._threads = [threading.Thread(target=self._send) for _ in range(num)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while not self._stopping:
            try:
                with self._begin() as sock:
                    sock.settimeout(0.2)
                    at = 0  # what was sent in part goes on, so that parts stay parts
                    while not self._stopping:
                        with suppress(TimeoutError):
                            sent = sock.send(memoryview(self._chunk)[at:])
                            self.num_bytes += sent
                            at = (at + sent) % len(self._chunk)
            except OSError:
                self.num_cut += 1
                time.sleep(0.01)

    def stop(self) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()


@contextmanager
def flood(begin: Callable[[], socket.socket], chunk: bytes, num: int = 2) -> Iterator[Flood]:
    made = Flood(begin, chunk, num)
    try:
        yield made
    finally:
        made.stop()


class Memory:
    """What a process takes more than when this was made, at its peak."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        self._before = self._field("VmRSS")

    def grown(self) -> int:
        """Bytes."""
        return self._field("VmHWM") - self._before

    def _field(self, name: str) -> int:
        with open(f"/proc/{self._pid}/status") as file:
            (line,) = [line for line in file if line.startswith(name)]
        return int(line.split()[1]) << 10


def many_descriptors(num: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(num, hard), hard))
