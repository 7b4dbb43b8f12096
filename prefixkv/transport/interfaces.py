"""The network interfaces that UCX listens on: by default the loopback interface alone.

UCX takes every interface it finds, and any process that reaches its port can write into registered
memory. Memory shared between processes of one machine, and CUDA's transports, are no network
devices: they are used in any case. UCX_NET_DEVICES, if the user has set it, is never overridden.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prefixkv.errors import ConfigError

_log = logging.getLogger("prefixkv.transport")

LOOPBACK: Final = "lo"
_VARIABLE: Final = "UCX_NET_DEVICES"
_environment = threading.RLock()  # held while the variable may be ours


def net_devices(interface: str) -> str:
    """Return UCX's NET_DEVICES for `TransportConfig.interface`; "" if the user set them."""
    # Under the lock, since `ucx_options` may have set the variable for a moment.
    with _environment:
        return "" if _VARIABLE in os.environ else interface or LOOPBACK


def check_interface(interface: str, what: str, is_local: bool) -> None:
    """Raise ConfigError unless an address is local or an interface for KV has been named. `what`
    names the address (bind, or a prefill's) in the message."""
    if not is_local and not interface and _VARIABLE not in os.environ:
        raise ConfigError(
            f"{what}, which is not this machine's loopback, and KV travels on that alone: name the "
            "network's interface in TransportConfig(interface=...), as UCX calls it: "
            '"eth0", or "eth0,mlx5_0:1"'
        )


def warn_if_open(interface: str) -> None:
    """Log a warning if UCX will listen beyond the loopback."""
    devices = os.environ.get(_VARIABLE) or interface or LOOPBACK
    if devices != LOOPBACK:
        _log.warning(
            "KV travels over %s without encryption or authentication, and whoever reaches its "
            "ports can write into registered memory: that network has to be isolated",
            devices,
        )


@contextmanager
def ucx_options(interface: str) -> Iterator[dict[str, str]]:
    """Yield the options that keep NIXL's UCX backend, created inside this context, to the named
    interfaces.

    One interface is an option of the backend. Several cannot be, since NIXL splits its options at
    commas: they are put into the environment while the backend is created.
    """
    # The environment belongs to the whole process: one agent at a time, and undone at once.
    with _environment:
        devices = net_devices(interface)
        if "," not in devices:
            yield {"engine_config": f"NET_DEVICES={devices}"} if devices else {}
            return
        os.environ[_VARIABLE] = devices
        try:
            yield {}
        finally:
            del os.environ[_VARIABLE]
