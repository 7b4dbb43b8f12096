"""Proof that a process of this machine is dead, and that nothing it sent is still on its way here.

It rests on what the kernel says, never on time: the process's id now names nothing, or a process
that began at another time; no fork of it holds the abstract socket that it bound; every TCP
connection of ours whose other end no process owns has delivered all that was sent into it. Where
one of these cannot be told, nothing is proved: another boot, other namespaces, another system than
Linux.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import os
import pathlib
import secrets
import socket
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from prefixkv.protocol.messages import ProcessLife

_PROC: Final = pathlib.Path("/proc")
_HOLDER: Final = "\0prefixkv-life-"


class HeldLife:
    """What this process is, for as long as it, or a fork of it, lives. Descriptor: one."""

    def __init__(self) -> None:
        """Raises OSError where the kernel has no such thing."""
        began = _began(os.getpid())
        if began is None:
            raise OSError("/proc has nothing of this process")
        name = secrets.token_hex(16)
        opened_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self.life = ProcessLife(*_place(), os.getpid(), began, name, opened_ns)
        self._holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._holder.bind(_HOLDER + name)
        except OSError:
            self._holder.close()
            raise

    def close(self, *, ended: bool = True) -> None:
        """What this process could write is over; if it has not `ended`, the socket stays until the
        process does."""
        if ended:
            self._holder.close()
        else:
            self._holder.detach()


def is_dead(life: ProcessLife) -> bool:
    """Whether it is proved that this process has ended, and every fork of it that runs no other
    program. False where that cannot be told."""
    try:
        if _place() != (life.boot, life.pid_space, life.net_space):
            return False
        if _began(life.pid) == life.began:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(_HOLDER + life.holder)
        return False
    except ConnectionRefusedError:  # no socket has that name
        return True
    except OSError:
        return False


def has_read_the_dead() -> bool:
    """Whether this process has read all that came over its TCP connections from processes of this
    network namespace that have ended; False where that cannot be told."""
    try:
        return not any(_may_bring_more())
    except OSError:
        return False


def _may_bring_more() -> Iterator[bool]:
    """Of each TCP socket of ours whose other end is nobody's: whether something may still come out
    of it."""
    ours = _own_sockets()
    rows = [row for name in ("tcp", "tcp6") for row in _connections(name)]
    other_ends = {(row.local, row.remote): row for row in rows}
    for row in rows:
        if ours.pop(row.inode, None) is None or row.state == _LISTEN:
            continue
        other = other_ends.get((row.remote, row.local))
        if other is not None and other.inode:
            continue  # a process owns it
        # The end comes last, and the kernel counts it as a byte until it is read.
        waiting = row.waiting - (row.state in _ENDED)
        if waiting > 0 or row.state in _OPEN:
            yield other is not None or _is_here(row.remote)
    for fd in ours.values():
        # One that was reset is in no table, and what had come before may still be read.
        yield _unread_bytes_of_tcp(fd) > 0


# States of a connection, as the kernel numbers them.
_LISTEN: Final = 0x0A
_OPEN: Final = {0x01, 0x04, 0x05}  # the other end may send: ESTABLISHED, FIN_WAIT1, FIN_WAIT2
_ENDED: Final = {0x06, 0x08, 0x09, 0x0B}  # it has said that it will not
_MAPPED: Final = bytes(10) + b"\xff\xff"
_SIOCOUTQNSD: Final = 0x894B  # of TCP alone


class _Connection(NamedTuple):
    """A row of /proc/net/tcp. `waiting` is in bytes, to be read; inode 0: no process owns it."""

    local: str
    remote: str
    state: int
    waiting: int
    inode: int


def _connections(name: str) -> Iterator[_Connection]:
    try:
        lines = (_PROC / "thread-self" / "net" / name).read_text().splitlines()[1:]
    except FileNotFoundError:
        if name != "tcp":  # a kernel without IPv6
            return
        raise
    for line in lines:
        field = line.split()
        waiting = int(field[4].partition(":")[2], 16)
        yield _Connection(field[1], field[2], int(field[3], 16), waiting, int(field[9]))


def _is_here(end: str) -> bool:
    """Whether an address of that table, in hexadecimal, is one of this network namespace."""
    digits = end.partition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    if raw.startswith(_MAPPED):  # IPv4, over a socket of IPv6
        raw = raw.removeprefix(_MAPPED)
    address = ipaddress.ip_address(raw)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((str(address), 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
    return True  # also where that cannot be told


def _own_sockets() -> dict[int, int]:
    """By inode, a descriptor of each of this process's sockets."""
    found = {}
    for link in (_PROC / "self" / "fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = os.readlink(link)
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(link.name)
    return found


def _unread_bytes_of_tcp(fd: int) -> int:
    """0 if it is no TCP socket, or none any more."""
    number = array.array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(fd, _SIOCOUTQNSD, number)
        fcntl.ioctl(fd, termios.FIONREAD, number)
        return number[0]
    return 0


def _place() -> tuple[str, int, int]:
    """The boot, and the namespaces in which this thread looks up pids and sockets. Raises OSError
    where /proc is that of other pids."""
    if os.readlink(_PROC / "self") != str(os.getpid()):
        raise OSError("/proc is of another pid namespace")
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(_PROC / "thread-self" / "ns" / name).st_ino for name in ("pid", "net")]
    return boot, spaces[0], spaces[1]


def _began(pid: int) -> int | None:
    """When it began, in clock ticks since boot; None if there is none. A zombie still counts: it
    may be a leader whose other threads run on."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
