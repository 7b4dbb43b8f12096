"""UCX, which NIXL writes by: the network interfaces that it listens on, by default the loopback
alone, and the versions that are loaded in this process, for the handshake.

UCX takes every interface it finds, and any process that reaches its port can write into registered
memory. Memory shared between processes of one machine, and CUDA's transports, are no network
devices: they are used in any case. UCX_NET_DEVICES, if the user has set it, is never overridden.
NIXL's metadata has no version in it, and is read by native code that takes its form for granted.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prefixkv.errors import ConfigError
from prefixkv.protocol.messages import Libraries

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


def loaded_libraries() -> Libraries:
    """Return the versions of the loaded libraries; "" where not loaded or not told. UCX is loaded
    with the first agent's backend, so ask after that."""
    module = sys.modules.get("nixl._api")
    if module is None:
        return Libraries()
    nixl = ""
    with suppress(PackageNotFoundError):  # `nixl._api` is a module of nixl_cu13, say
        nixl = version(module.__name__.partition(".")[0].replace("_", "-"))
    return Libraries(nixl, _ucx())


def _ucx() -> str:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if "/libucp" in line}
        # Of two, it is not known which one NIXL has taken.
        if len(paths) != 1:
            return ""
        told = ctypes.CDLL(paths.pop()).ucp_get_version_string
    except (OSError, AttributeError):
        return ""
    told.restype = ctypes.c_char_p
    return str(told().decode())
