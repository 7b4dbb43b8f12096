"""Checks of socket addresses."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

from prefixkv.errors import RequestError, shown, travels

_MAX_PORT = 65_535


@lru_cache(1024)
def is_loopback(address: str) -> bool:
    """Return whether a socket bound to this address can be reached from this machine only.

    >>> is_loopback("tcp://127.0.0.1:5000"), is_loopback("tcp://*:5000"), is_loopback("ipc:///run/kv")
    (True, False, True)
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    if parts.scheme in ("ipc", "inproc"):
        return True
    # Without the port, and without the brackets of IPv6. A name other than localhost may resolve to
    # anything, so it counts as reachable, as does "*".
    host = (parts.netloc.rpartition(":")[0] or parts.netloc).strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str) -> None:
    """Raise ValueError for a socket address that zmq would misread, or reject unclearly."""
    scheme, _, rest = address.partition("://")
    if not rest or scheme not in ("tcp", "ipc", "inproc"):
        raise ValueError(
            "an address begins with tcp://, as in tcp://127.0.0.1:5000, or with ipc://"
        )
    host, _, port = rest.rpartition(":")
    # Only TCP has ports; "*" lets the system choose one.
    if scheme != "tcp" or (host and port == "*"):
        return
    # zmq reduces a larger number modulo 65536, and would use some other port.
    if not (host and port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT):
        raise ValueError(f"the port is {port!r}, a number up to {_MAX_PORT} is needed, or *")


def check_prefill(rid: str, prefill: object) -> None:
    """Raise RequestError for what cannot be the address of a request's prefill worker.

    Only that there is one: a test, or an engine with a transport of its own, uses any string.
    """
    if not isinstance(prefill, str):
        raise RequestError(f"prefill is {shown(prefill)}, a string is needed")
    if not prefill:
        raise RequestError(f"request {rid!r} names no prefill worker")
    if not travels(prefill):
        raise RequestError(f"prefill is {prefill!r}, which UTF-8 has no bytes for")
