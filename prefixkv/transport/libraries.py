"""Versions of NIXL and UCX as they are loaded in this process, for the handshake.

NIXL's metadata has no version in it, and is read by native code that takes its form for granted.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from prefixkv.protocol.messages import Libraries


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
