"""How long the engine may rest where its scheduler only waits, and what wakes it: by itself vLLM
polls, a step each millisecond.

The scheduler has a `WakeupListener`: an abstract unix datagram socket, whose name travels to the
workers in `StepOrders` with a secret. Each worker sends it the secret, and the descriptors that are
readable while its transfers have events. Workers on another host cannot; vLLM then polls on.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Queue
from socket import AF_UNIX, SHUT_RD, SOCK_DGRAM, recv_fds, send_fds, socket
from typing import Any, Final

from prefixkv.spi import Closing

QUIET_STEPS: Final = 3
"""Steps without any event before the engine may rest. An order and the report on it may be two
steps apart where the engine works ahead."""
LONGEST_REST_S: Final = 60.0  # no wait is without a limit
_MOST_FDS: Final = 8  # of a worker
_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT


@dataclass(slots=True)
class Rest:
    """The quiet steps of one engine, and what wakes it."""

    num_ranks: int
    listener: WakeupListener | None = None
    quiet_steps: int = 0  # consecutive ones, in which nothing was ordered, computed, reported

    @property
    def has_wakeups(self) -> bool:
        """True where every worker wakes the engine when it has something to report."""
        return self.listener is not None and self.listener.num_senders >= self.num_ranks

    @property
    def bell(self) -> str:
        """Address for the next orders, until every worker has answered; each takes the first."""
        return "" if self.listener is None or self.has_wakeups else self.listener.address

    def stepped(self, is_quiet: bool) -> None:
        self.quiet_steps = self.quiet_steps + 1 if is_quiet else 0

    def seconds(self, left_s: float | None) -> float:
        """Return how long the engine may rest; 0: something may come that would not wake it.
        `left_s`: until something that no worker rings for, where that is above 0."""
        if not self.has_wakeups or self.quiet_steps < QUIET_STEPS:
            return 0.0
        return min(max(left_s or 0.0, 0.0) or LONGEST_REST_S, LONGEST_REST_S)


class WakeupListener(Closing):
    """A thread that ends the engine's rest when a worker has events. Raises OSError without
    abstract unix sockets."""

    def __init__(self, wakeup: Any) -> None:
        self._wakeup = wakeup
        name, self._secret = f"prefixkv-{secrets.token_hex(16)}", secrets.token_hex(16)
        self.address = f"{name}/{self._secret}"
        self._inputs: Queue[Any] | None = None
        self.num_senders = 0  # workers, each of which sends its descriptors once
        self._fds: list[int] = []
        self._closing = False
        with ExitStack() as undo:
            self._socket = undo.enter_context(socket(AF_UNIX, SOCK_DGRAM))
            self._socket.bind("\0" + name)
            self._epoll = undo.enter_context(select.epoll())
            self._epoll.register(self._socket, select.EPOLLIN)
            self._thread = threading.Thread(None, self._listen, "prefixkv wakeups", daemon=True)
            self._thread.start()
            self._opened = undo.pop_all()

    def _listen(self) -> None:
        while not self._closing:
            for fd, _ in self._epoll.poll():
                if fd == self._socket.fileno():
                    self._take_fds()
                elif self._inputs is not None:
                    self._inputs.put_nowait(self._wakeup)

    def _take_fds(self) -> None:
        said, fds, *_ = recv_fds(self._socket, 64, _MOST_FDS)
        # Any process of this host finds the socket. And fewer come where none are left here.
        if said != _said(self._secret, fds):
            for fd in fds:
                os.closerange(fd, fd + 1)  # without an error, that its file system may have
            return
        for fd in fds:
            self._opened.callback(os.close, fd)
            os.set_inheritable(fd, False)  # `recv_fds` ignores its flags
            self._epoll.register(fd, _ONCE)
        self._fds += fds
        self.num_senders += 1

    def rest(self, inputs: Queue[Any], timeout_s: float) -> None:
        """Wait until the engine's queue has an item, and take nothing out of it. A worker's events
        put `wakeup` into it, once a rest."""
        self._inputs = inputs
        # An event since the last step is not missed: its descriptor is still readable.
        for fd in self._fds:
            self._epoll.modify(fd, _ONCE)
        with inputs.not_empty:
            inputs.not_empty.wait_for(lambda: inputs.queue, timeout_s)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._socket.shutdown(SHUT_RD)  # ends `poll`, as closing the socket would not
            self._thread.join()
            self._opened.close()


def wake_by(address: str, fds: Sequence[int]) -> None:
    """Let a listener wake its engine when one of `fds` is readable. Raises OSError where it cannot
    be reached."""
    name, _, secret = address.partition("/")
    with socket(AF_UNIX, SOCK_DGRAM) as to:
        to.connect("\0" + name)
        send_fds(to, [_said(secret, fds)], fds)


def _said(secret: str, fds: Sequence[int]) -> bytes:
    return f"{secret} {len(fds)}".encode()
