"""Ports for servers that are told one."""

import secrets
import socket
from contextlib import suppress
from typing import Final

LOWEST, COUNT = 20_000, 12_000
"""Of the ports that are chosen from: none of those that the kernel gives away by itself."""

_held: Final[list[int]] = []
"""Descriptors of the sockets, one for each port that this process has been given. As sockets they
would warn at the end that none has closed them."""


def free_port() -> int:
    """Return a port of the loopback interface that stays the caller's until this process ends.

    A socket is bound to it that does not listen: no other call, of any process, returns this port,
    and a connection to it is refused. A server may listen beside that socket, with SO_REUSEADDR,
    which servers set.
    """
    while True:
        port = LOWEST + secrets.randbelow(COUNT)
        held = socket.socket()
        with suppress(OSError):
            # Bound without SO_REUSEADDR, so not beside any other socket; then it permits others.
            held.bind(("127.0.0.1", port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _held.append(held.detach())
            return port
        held.close()
