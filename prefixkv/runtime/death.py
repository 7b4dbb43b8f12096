"""Proof that a process of this machine is dead, and that nothing it sent is still on its way here.

It rests on what the kernel says, never on time: the process's id now names nothing, or a process
that began at another time; no fork of it holds the abstract socket that it bound; every TCP
connection of ours whose other end no process owns has delivered all that was sent into it. Where
one of these cannot be told, nothing is proved: another boot, other namespaces, another system than
Linux.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import socket

import msgspec

_PROC = pathlib.Path("/proc")
_HOLDER = "\0prefixkv-life-"


class ProcessLife(msgspec.Struct, frozen=True, array_like=True):
    """Which process this is. `began` is in clock ticks since boot; `holder` names the abstract
    socket that it and its forks hold. The two spaces are inodes of namespaces."""

    boot: str
    pid_space: int
    net_space: int
    pid: int
    began: int
    holder: str


class HeldLife:
    """This process's own, for as long as it or a fork of it lives."""

    def __init__(self) -> None:
        """Raises OSError where the kernel has no such thing."""
        name = secrets.token_hex(16)
        self._holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._holder.bind(_HOLDER + name)
        began = _began(os.getpid())
        if began is None:
            raise OSError("/proc/self/stat cannot be read")
        self.life = ProcessLife(*_place(), os.getpid(), began, name)

    def close(self) -> None:
        self._holder.close()


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
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def has_read_the_dead() -> bool:
    """Whether every TCP connection of this process whose other end no process owns is at its end:
    all bytes have come, and are read. Other ends have to be in this network namespace."""
    ours = _own_sockets()
    rows = [row for name in ("tcp", "tcp6") for row in _connections(name)]
    other_ends = {(local, remote): (inode, sending) for local, remote, _, sending, _, inode in rows}
    for local, remote, state, _, waiting, inode in rows:
        if inode not in ours or state == _LISTEN:
            continue
        owner, sending = other_ends.get((remote, local), (0, 0))
        if not owner and (state == _ESTABLISHED or waiting or sending):
            return False
    return True


_ESTABLISHED, _LISTEN = 0x01, 0x0A


def _connections(name: str) -> list[tuple[str, str, int, int, int, int]]:
    """Local and remote address, state, bytes to send and to read, inode (0: no process's)."""
    rows = []
    for line in (_PROC / "net" / name).read_text().splitlines()[1:]:
        field = line.split()
        sending, _, waiting = field[4].partition(":")
        queues = int(sending, 16), int(waiting, 16)
        rows.append((field[1], field[2], int(field[3], 16), *queues, int(field[9])))
    return rows


def _own_sockets() -> set[int]:
    """Inodes of this process's sockets."""
    found = set()
    for link in (_PROC / "self" / "fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # it was closed meanwhile
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def _place() -> tuple[str, int, int]:
    """The boot, and the namespaces in which pids and sockets are looked up."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(_PROC / "self" / "ns" / name).st_ino for name in ("pid", "net")]
    return boot, spaces[0], spaces[1]


def _began(pid: int) -> int | None:
    """When it began, in clock ticks since boot; None if there is none. A zombie still counts: it
    may be a leader whose other threads run on."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
