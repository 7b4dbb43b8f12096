"""How long the engine may rest where its scheduler only waits, and what wakes it: by itself vLLM
polls, a step each millisecond.

The scheduler has a `WakeupListener`: an abstract unix datagram socket with a random name, which
travels to the workers in `StepOrders`. Each worker has a `WakeupSender`: a thread that rings once
when a transfer has events, and waits until the worker's thread has armed it again. A forged
datagram costs one empty step. Workers on another host cannot ring; vLLM then continues to poll.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Queue
from socket import AF_UNIX, SHUT_RD, SOCK_DGRAM, socket
from typing import Any, Final

from prefixkv.spi import Closing

QUIET_STEPS: Final = 3
"""Steps without any event before the engine may rest. An order and the report on it may be two
steps apart where the engine works ahead."""
LONGEST_REST_S: Final = 60.0  # no wait is without a limit


@dataclass(slots=True)
class Rest:
    """The quiet steps of one engine, and which workers wake it."""

    num_ranks: int
    address: str = ""
    num_senders: int = 0  # workers that say that they wake the engine
    quiet_steps: int = 0  # consecutive ones, in which nothing was ordered, computed, reported

    @property
    def has_wakeups(self) -> bool:
        """True where every worker wakes the engine when it has something to report."""
        return bool(self.address) and self.num_senders >= self.num_ranks

    @property
    def bell(self) -> str:
        """Address for the next orders, until every worker has answered; each takes the first."""
        return self.address if self.num_senders < self.num_ranks else ""

    def stepped(self, is_quiet: bool) -> None:
        self.quiet_steps = self.quiet_steps + 1 if is_quiet else 0

    def seconds(self, left_s: float | None) -> float:
        """Return how long the engine may rest; 0: something may come that would not wake it.
        `left_s`: until something that no worker rings for, where that is above 0."""
        if not self.has_wakeups or self.quiet_steps < QUIET_STEPS:
            return 0.0
        return min(max(left_s or 0.0, 0.0) or LONGEST_REST_S, LONGEST_REST_S)


class WakeupListener(Closing):
    """A thread that puts `wakeup` into `inputs`, the engine's queue, at each ring; nothing before
    that is set. Raises OSError without abstract unix sockets."""

    def __init__(self, wakeup: Any) -> None:
        self._wakeup = wakeup
        self.inputs: Queue[Any] | None = None
        self.address = f"prefixkv-{secrets.token_hex(16)}"
        self._closing = False
        with ExitStack() as undo:
            self._socket = undo.enter_context(socket(AF_UNIX, SOCK_DGRAM))
            self._socket.bind("\0" + self.address)
            self._thread = _started("listener", self._listen)
            undo.pop_all()

    def _listen(self) -> None:
        while self._socket.recv(64) or not self._closing:
            if self.inputs is not None:
                self.inputs.put_nowait(self._wakeup)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._socket.shutdown(SHUT_RD)  # ends `recv`, as closing the socket would not
            self._thread.join()
            self._socket.close()


class WakeupSender(Closing):
    """A thread that wakes a listener when one of `fds` is readable, once each time it is armed. The
    descriptors belong to the caller, and must stay open until `close` has returned. Raises OSError
    where the listener cannot be reached."""

    def __init__(self, address: str, fds: Sequence[int]) -> None:
        with ExitStack() as undo:
            self._socket = undo.enter_context(socket(AF_UNIX, SOCK_DGRAM))
            # A listener with a full socket has wakeups to read already, so one more is not worth
            # waiting for.
            self._socket.setblocking(False)
            self._socket.connect("\0" + address)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._wake)
            self._poll = select.poll()
            for fd in (self._wake, *fds):
                self._poll.register(fd, select.POLLIN)
            self._armed, self._closing = threading.Event(), False
            self._thread = _started("sender", self._watch)
            undo.pop_all()

    def arm(self) -> None:
        """Called after the present events were taken. An event that came since is not missed: its
        descriptor is still readable."""
        self._armed.set()

    def _watch(self) -> None:
        while True:
            # Cleared before polling: an `arm` during the ring below then counts for the next turn.
            self._armed.wait()
            self._armed.clear()
            self._poll.poll()
            if self._closing:
                return
            try:
                self._socket.send(b"ring")
            except BlockingIOError:
                pass  # the listener has not read the last one yet, and wakes by it
            except OSError:
                return  # the scheduler's process is gone

    def close(self) -> None:
        if self._closing:
            return
        # The thread is in one of two waits, so both are ended, after the flag that it checks.
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._armed.set()
        self._thread.join()
        os.close(self._wake)
        self._socket.close()


def rest(inputs: Queue[Any], timeout_s: float) -> None:
    """Wait until `inputs` has an item, and take nothing out of it."""
    with inputs.not_empty:
        inputs.not_empty.wait_for(lambda: inputs.queue, timeout_s)


def _started(what: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=f"prefixkv wakeup {what}", daemon=True)
    thread.start()
    return thread
