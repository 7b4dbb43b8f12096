"""Ports for servers that are told one."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """None of those that the kernel gives away by itself, so it stays free until a server takes
    it."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
