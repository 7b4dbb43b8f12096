"""Two hosts in one machine: network namespaces that only a wire joins, and nodes that live in them.

A namespace is held by a process of its own, so that a node in it may die and another take its
place. The wire is a veth pair. Nothing of this machine's own network is touched: all of it is gone
with the processes. Where the kernel does not allow it, `RefusedError` says why. It takes root; that
of a user namespace will do (`unshare -r`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tests.support import node_process
from tests.support.node_process import NodeProcess
from tests.support.patience import until
from tests.support.processes import Child, children, obey

WIRE = "wire"  # the device, on both hosts
ADDRESSES = ("10.77.0.1", "10.77.0.2")

_CLONE_NEWNS, _CLONE_NEWNET = 0x2_0000, 0x4000_0000
_MS_PRIVATE = 0x4_4000  # and all below
_libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    """What this machine does not allow."""


class Host(Child):
    """A network namespace."""

    def __init__(self) -> None:
        super().__init__(_hold)
        if self.hello:
            self.end()
            raise RefusedError(self.hello)

    def run(self, command: str) -> str:
        """A command line's output, in the namespace. RefusedError where it fails."""
        ok, output = self.call("run", command.split())
        if not ok:
            raise RefusedError(f"{command}: {output}")
        return str(output)

    def join(self, address: str) -> None:
        """Bring its end of the wire up."""
        self.run(f"ip address add {address}/24 dev {WIRE}")
        self.run("ip link set lo up")
        self.run(f"ip link set {WIRE} up")

    def limit(self, mbit: float) -> None:
        """It sends no faster than that from now on."""
        self.run(f"tc qdisc replace dev {WIRE} root tbf rate {mbit}mbit burst 128kb latency 100ms")

    def held_up(self) -> int:
        """How often a packet had to wait for the limit."""
        return int(self.run(f"tc -s qdisc show dev {WIRE}").split("overlimits ")[1].split()[0])

    def sent_bytes(self) -> int:
        """All that it has sent over the wire, headers included."""
        line = next(line for line in self.run("cat /proc/net/dev").splitlines() if WIRE in line)
        return int(line.split(":")[1].split()[8])


def join_veth(a: Host, b: Host) -> None:
    a.run(f"ip link add {WIRE} type veth peer name {WIRE} netns {b.pid}")
    for host, address in zip((a, b), ADDRESSES, strict=True):
        host.join(address)
    for host in (a, b):  # the kernel looks at links once a second; UCX takes one that is up only
        until(lambda host=host: "state UP" in host.run(f"ip link show dev {WIRE}"))


class HostedNode(NodeProcess):
    """A node on a host. KV goes over the wire, by TCP: shared memory would cross namespaces."""

    def __init__(self, host: Host, side: str, config: Any, pool: dict[str, Any]) -> None:
        super().__init__(host.pid, side, config, pool)

    @staticmethod
    def serve(pipe: Any, host: int, *args: Any) -> None:
        _enter(host)
        _see_own_devices()
        os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": WIRE}
        node_process.serve(pipe, *args)


def hosts() -> AbstractContextManager[Any]:
    """Yields `start(make, *args)`: what `make` (Host, HostedNode) made. All have ended when
    the block is left."""
    return children(lambda make, *args: make(*args))


def missing_tools() -> str:
    """The commands that are needed and not there."""
    return ", ".join(tool for tool in ("ip", "tc") if not shutil.which(tool))


# --- in the children ------------------------------------------------------------------------------


def _checked(result: int, what: str) -> None:
    if result:
        raise RefusedError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _unshare(kind: int, what: str) -> None:
    _checked(_libc.unshare(kind), f"unshare a {what} namespace")


def _enter(host: int) -> None:
    with open(f"/proc/{host}/ns/net") as namespace:
        _checked(_libc.setns(namespace.fileno(), _CLONE_NEWNET), "setns")


class _Holder:
    def run(self, argv: list[str]) -> tuple[bool, str]:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        return not done.returncode, (done.stderr if done.returncode else done.stdout).strip()


def _hold(pipe: Any) -> None:
    if not _said(pipe, partial(_unshare, _CLONE_NEWNET, "network")):
        return
    obey(pipe, _Holder())


def _said(pipe: Any, first: Any) -> bool:
    """Whether it worked; the other end learns why not."""
    try:
        first()
    except (RefusedError, OSError) as error:
        pipe.send(str(error))
        return False
    pipe.send("")
    return True


def _see_own_devices() -> None:
    """UCX looks for them in /sys, which shows those of the namespace that mounted it."""
    _unshare(_CLONE_NEWNS, "mount")
    _checked(_libc.mount(b"none", b"/", None, _MS_PRIVATE, None), "make mounts private")
    _checked(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")
