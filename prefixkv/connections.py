"""Bounds on what the other ends of a ZeroMQ socket can make this process hold.

`set_bounds` bounds messages, by libzmq and the kernel. `Newcomers` bounds the connections that have
only begun. What a peer sends, or does not read, is not counted beyond that: see docs/security.md.
"""

from __future__ import annotations

import os
import resource
import socket
from collections import Counter
from contextlib import suppress
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_S: Final = 10.0
"""Seconds after which libzmq ends a connection that has not shaken hands."""

_DESCRIPTORS: Final = 4  # a quarter of the process's, for the newcomers of one socket
_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# As integers: pyzmq's enumerations take longer to combine than the call.
_EVENTS_OPTION: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

_Socket = zmq.Socket[bytes]


def set_bounds(sock: _Socket, message_bytes: int, queued_messages: int, kernel_bytes: int) -> None:
    """Set the bounds of each connection of a ZeroMQ socket, before it is bound or connected.

    `message_bytes`: of a part of a message. `queued_messages`: that wait for the owner.
    `kernel_bytes`: that wait with the kernel, as `SO_RCVBUF` counts.
    """
    sock.setsockopt(zmq.MAXMSGSIZE, message_bytes)
    sock.setsockopt(zmq.RCVHWM, queued_messages)
    sock.setsockopt(zmq.RCVBUF, kernel_bytes)
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))


def is_empty(sock: _Socket) -> bool:
    """Return whether a ZeroMQ socket has no message for its owner."""
    return not int(sock.getsockopt(_EVENTS_OPTION)) & _POLLIN


class Newcomers:
    """The accepted TCP connections without a message yet: of more than `most`, the oldest is ended.

    So connections that do not shake hands cannot take all descriptors. Those of a PUB socket, which
    hears no messages, are newcomers for as long as they last.

    Created before the socket is bound. `counters` has "connections_cut" once one was ended.
    """

    def __init__(self, sock: _Socket, most: int, counters: Counter[str]) -> None:
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(16, min(most, descriptors // _DESCRIPTORS))
        self._counters = counters
        self._sock = sock
        self._accepted: dict[int, None] = {}  # libzmq's descriptors, the oldest first
        address = f"inproc://monitor-{sock.FD}"
        sock.monitor(address, _EVENTS)
        self.monitor = sock.context.socket(zmq.PAIR)
        """Readable when `read` has something to do."""
        # Without a limit: libzmq's thread would wait for the owner with a lock that `close` needs.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(address)

    def read(self) -> list[int]:
        """Take what libzmq reports of the connections; return the codes of failed handshakes."""
        failed: list[int] = []
        with suppress(zmq.Again):
            while True:
                change = recv_monitor_message(self.monitor, zmq.DONTWAIT)
                event, value = change["event"], change["value"]
                if event == zmq.EVENT_ACCEPTED:
                    self._accepted.pop(value, None)  # what had this descriptor before has gone
                    self._accepted[value] = None
                    if len(self._accepted) > self._most:
                        oldest = next(iter(self._accepted))
                        del self._accepted[oldest]
                        self._end(oldest)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._accepted.pop(value, None)
                else:
                    failed.append(value)
        return failed

    def heard(self, frame: zmq.Frame) -> None:
        """Note that a message has come, of which this is a part."""
        if self._accepted:  # else the descriptor need not be looked up
            with suppress(zmq.ZMQError):  # ipc
                self._accepted.pop(int(frame.get(zmq.SRCFD)), None)

    def close(self) -> None:
        """Stop the monitor, before the socket is closed."""
        if not self._sock.closed:
            self._sock.disable_monitor()
        self.monitor.close(linger=0)

    def _end(self, fd: int) -> None:
        """No-op if the descriptor is another's by now."""
        port = self._sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
            is_tcp = link.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and str(link.getsockname()[1]) == port:
                link.shutdown(socket.SHUT_RDWR)
                self._counters["connections_cut"] += 1
