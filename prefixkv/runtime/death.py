"""Proof that a process of this machine is dead, and that nothing it sent is on its way here.

It rests on what the kernel says, never on time: the process's id names nothing now, or a process
that began at another time; no fork of it holds the abstract socket that it bound; every TCP
connection of ours with an other end that no process owns has delivered all that was sent into it.
If one of these cannot be found out, nothing is proved: another boot, other namespaces, another
system than Linux. Pages are freed on this proof, so every doubt counts as "alive".

    control thread --submit--> prover's thread: a few files of /proc --tell--> control thread
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import logging
import os
import pathlib
import queue
import secrets
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from prefixkv.config import ControlConfig
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import ProcessLife
from prefixkv.runtime.control_thread import Proofs
from prefixkv.threads import undoing

_log = logging.getLogger("prefixkv.control")

_PROC: Final = pathlib.Path("/proc")
_HOLDER: Final = "\0prefixkv-life-"
_JOIN_LIMIT_S: Final = 30.0

Prove = Callable[[PeerId], None]


class HeldLife:
    """The identity of this process, held as long as it, or a fork of it, lives. One descriptor."""

    def __init__(self) -> None:
        """Bind the socket that shows this process alive. OSError where the kernel lacks it."""
        began = _began(os.getpid())
        if began is None:
            raise OSError("/proc has nothing of this process")
        # Random, so that no other process can have taken the name beforehand.
        name = secrets.token_hex(16)
        opened_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self.life = ProcessLife(*_place(), os.getpid(), began, name, opened_ns)
        self._holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with undoing(self._holder.close):
            # A fork inherits the socket: while it lives, it may write what this process could
            # write.
            self._holder.bind(_HOLDER + name)

    def close(self, *, ended: bool = True) -> None:
        """Let go of the socket, since writes are over. If not (`ended` False), it stays open until
        the process ends."""
        if ended:
            self._holder.close()
        else:
            self._holder.detach()


def is_dead(life: ProcessLife) -> bool:
    """Return True if the kernel proves this process dead, and every fork of it that runs no other
    program. False if that cannot be found out."""
    try:
        # 1. The same boot and namespaces, or its process id and socket name mean something else
        # here.
        if _place() != (life.boot, life.pid_space, life.net_space):
            return False
        # 2. The id names a process that began at that time: it lives.
        if _began(life.pid) == life.began:
            return False
        # 3. No socket has its name. A fork that lives on would hold it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(_HOLDER + life.holder)
        return False
    except ConnectionRefusedError:  # no socket has that name: the proof
        return True
    except OSError:
        return False


def has_read_the_dead() -> bool:
    """Return True if this process has read all that dead processes of this network namespace sent
    over its TCP connections. False if that cannot be found out."""
    try:
        return not any(_may_bring_more())
    except OSError:
        return False


def _may_bring_more() -> Iterator[bool]:
    ours = _own_sockets()
    rows = [row for name in ("tcp", "tcp6") for row in _connections(name)]
    other_ends = {(row.local, row.remote): row for row in rows}
    for row in rows:
        if ours.pop(row.inode, None) is None or row.state == _LISTEN:
            continue
        # The other end of a connection inside this network namespace has a row of its own.
        other = other_ends.get((row.remote, row.local))
        if other is not None and other.inode:
            continue  # a process owns it, so it is not the dead one's
        # 1. In the table. The end of a connection comes last, and the kernel counts it as a byte
        # until it is read.
        waiting = row.waiting - (row.state in _ENDED)
        if waiting > 0 or row.state in _OPEN:
            # Without a row of its own, the other end may be on another machine: then it is not the
            # dead process's.
            yield other is not None or _is_here(row.remote)
    # 2. In no table: a connection that was reset. What had come before may still be read.
    for fd in ours.values():
        yield _unread_bytes_of_tcp(fd) > 0


# States of a connection, as the kernel numbers them.

_LISTEN: Final = 0x0A
_OPEN: Final = {0x01, 0x04, 0x05}  # the other end may send: ESTABLISHED, FIN_WAIT1, FIN_WAIT2
_ENDED: Final = {0x06, 0x08, 0x09, 0x0B}  # it has said that it will not
_MAPPED: Final = bytes(10) + b"\xff\xff"
_SIOCOUTQNSD: Final = 0x894B  # of TCP alone


class _Connection(NamedTuple):
    """A row of /proc/net/tcp. `waiting` are bytes to be read; inode 0: no process owns it."""

    local: str
    remote: str
    state: int
    waiting: int
    inode: int


def _connections(name: str) -> Iterator[_Connection]:
    """Raises OSError if /proc's table of TCP connections cannot be read."""
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
    digits = end.partition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    if raw.startswith(_MAPPED):  # IPv4, over a socket of IPv6
        raw = raw.removeprefix(_MAPPED)
    address = ipaddress.ip_address(raw)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    # The kernel lets a socket be bound only to an address of its own.
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((str(address), 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return False
    return True  # also if that cannot be found out: the cautious answer


def _own_sockets() -> dict[int, int]:
    found = {}
    for link in (_PROC / "self" / "fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = os.readlink(link)
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(link.name)
    return found


def _unread_bytes_of_tcp(fd: int) -> int:
    number = array.array("i", [0])
    with suppress(OSError):
        # Answered by TCP sockets alone, so it tells them from others.
        fcntl.ioctl(fd, _SIOCOUTQNSD, number)
        fcntl.ioctl(fd, termios.FIONREAD, number)
        return number[0]
    return 0


def _place() -> tuple[str, int, int]:
    """Return the boot id, and the namespaces in which this thread looks up process ids and sockets.
    Raises OSError if /proc is that of another pid namespace."""
    if os.readlink(_PROC / "self") != str(os.getpid()):
        raise OSError("/proc is of another pid namespace")
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(_PROC / "thread-self" / "ns" / name).st_ino for name in ("pid", "net")]
    return boot, spaces[0], spaces[1]


def _began(pid: int) -> int | None:
    """In clock ticks since boot; None if there is none. A zombie still counts: it may be a leader
    with other threads that run on."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, so fields count from the last one. Field 22.
    return int(stat.rpartition(")")[2].split()[19])


class ProverThread(Proofs):
    """The thread that proves deaths. `submit` and `close` are the control thread's.

    `tell` is called from the prover's own thread.
    """

    def __init__(self, name: str, timing: ControlConfig, is_written_to: bool, tell: Prove) -> None:
        self._name = name
        self._is_written_to = is_written_to
        self._tell = tell
        self._own_life: HeldLife | None = None
        self._is_on = timing.prove_death
        if self._is_on:
            try:
                self._own_life = HeldLife()
            except OSError as error:
                _log.info("%s: no peer will be told which process this is: %r", name, error)
        # Queued or being looked at; added by the control thread, discarded by the other.
        self._asked: set[PeerId] = set()
        self._queue: queue.SimpleQueue[tuple[PeerId, ProcessLife] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # from the first `submit` on

    @property
    def life(self) -> ProcessLife | None:
        """Identity of this process for Hello, None if it is not said."""
        return None if self._own_life is None else self._own_life.life

    def submit(self, peer: PeerId, life: ProcessLife) -> None:
        """Have a peer's process looked at soon. No-op while it is queued or being looked at, and
        where `prove_death` is off."""
        if peer in self._asked or not self._is_on:
            return
        # Started on the first use: most nodes never doubt a peer.
        if self._thread is None:
            name = f"prefixkv-prover-{self._name}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._thread = thread
        # Before it is queued: the thread discards it at its end, and must find it here.
        self._asked.add(peer)
        self._queue.put((peer, life))

    def close(self, *, ended: bool = True) -> None:
        """Join the thread, and let the identity go. Idempotent. `ended`: as for
        `HeldLife.close`."""
        # Behind all that is queued: looks that have begun are finished.
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_LIMIT_S)
        if self._own_life is not None:
            self._own_life.close(ended=ended)
            self._own_life = None

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            peer, life = asked
            try:
                # Dead, and nothing on its way: only both together prove that nothing of it lands
                # any more.
                if is_dead(life) and (not self._is_written_to or has_read_the_dead()):
                    self._tell(peer)
            except Exception as error:  # what /proc holds is not as it is known to be
                _log.error("whether %s is dead cannot be told: %r", peer, error)
            self._asked.discard(peer)
