"""How a worker's process wakes the scheduler's: vLLM has no way for it but to step again.

An engine with nothing to compute steps every millisecond, and each step makes the worker spin for a
second. So a server that only waits uses all of its cores. With bells it steps when there is
something to hear.

The scheduler has a `Tower`: an abstract unix datagram socket, whose random name travels to the
workers in `Orders`. Each worker has a `Bell`: a thread that sleeps until one of its transfers has
events, rings once, and sleeps until the worker's own thread has taken them and armed it again. A
datagram carries nothing: whoever sends one makes the engine step once, for nothing. Workers on
another host cannot ring; vLLM then goes on polling.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from prefixkv.spi import Closing

_STOP: Final = b"stop"


class Tower(Closing):
    """Hears the bells. `on_ring` is called in a thread of the tower's own.

    Raises OSError where there are no abstract unix sockets.
    """

    def __init__(self, on_ring: Callable[[], None]) -> None:
        self._on_ring = on_ring
        self.address = f"prefixkv-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind("\0" + self.address)
        except BaseException:
            self._socket.close()
            raise
        self._secret = secrets.token_bytes(16)
        self._thread = threading.Thread(target=self._listen, name="prefixkv tower", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while self._socket.recv(64) != _STOP + self._secret:
            self._on_ring()

    def close(self) -> None:
        """Stop listening. Again: no-op."""
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
                mine.sendto(_STOP + self._secret, "\0" + self.address)
            self._thread.join()
        self._socket.close()


class Bell(Closing):
    """Rings at a tower's address when one of `fds` is readable, once each time it is armed.

    The descriptors stay their owner's, and must be open until `close` has returned. Raises OSError
    where the tower is not reached.
    """

    def __init__(self, address: str, fds: Sequence[int]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)  # a full tower rings already
            self._socket.connect("\0" + address)
        except BaseException:
            self._socket.close()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        for fd in (self._wake, *fds):
            self._poll.register(fd, select.POLLIN)
        self._armed, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="prefixkv bell", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """Ring at the next event. Called behind taking those that are there, so that none is
        missed: a descriptor that is readable then is readable still."""
        self._armed.set()

    def _watch(self) -> None:
        while True:
            self._armed.wait()
            self._armed.clear()
            self._poll.poll()
            if self._closing:
                return
            try:
                self._socket.send(b"ring")
            except BlockingIOError:
                pass  # the tower has not read the last ring yet, and wakes by it
            except OSError:
                return  # the scheduler's process is gone

    def close(self) -> None:
        """Stop watching. Again: no-op."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._armed.set()
        self._thread.join()
        os.close(self._wake)
        self._socket.close()
