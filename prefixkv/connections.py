"""Bounds on what TCP peers of a ZeroMQ socket can make this process hold, counted by the kernel.

libzmq collects a message of many parts to its end before its owner sees it, and bounds only a part
(`MAXMSGSIZE`). So the bytes are counted outside it: the kernel says how many a connection has
brought (`TCP_INFO`), and the socket's owner how many it has taken. A connection with a difference
above its bound is shut down, and libzmq frees what it has of the unfinished message. What honest
peers have waiting stays below the bound: `RCVHWM` messages of the largest size and a kernel's
buffer, both limited by `set_bounds`. The other way round, bytes given to a connection and not
acknowledged are what this process holds because the peer does not read.

If the owner sleeps and its socket has nothing for it (`Watched.may_sleep`), all whole messages are
taken: the rest is of one unfinished message, bounded by two of the largest size.

The thread sleeps in `poll` until a connection or bytes come, and looks `LOOK_S` after that, as long
as they come; every `ROUND_S` it looks at all connections. Linux alone has these counters;
elsewhere, and for `ipc://`, with peers of this user only, nothing is watched.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import resource
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from prefixkv.wakeups import Inbox, wait_readable

_log = logging.getLogger("prefixkv.connections")

LOOK_S: Final = 0.01
"""Seconds between two looks at connections that bring bytes."""

QUICK_LOOK_S: Final = 0.002
"""The same, while one of them may be hostile: a stranger on loopback brings 1 GB/s."""

ROUND_S: Final = 1.0
"""Seconds between two looks at all connections: libzmq may have taken what one has brought by the
time that the kernel is asked for arrivals, and then it names none."""

HANDSHAKE_S: Final = 10.0
"""Seconds after which libzmq ends a connection that has not shaken hands."""

MOST_PARTS: Final = 8
"""Most parts of a message; those of prefixkv have one or two."""

_PARTS_A_TURN: Final = 8192  # of messages that have too many: some 15 ms of the owner's thread
_PARTS_A_COUNT: Final = 1024  # of them between two looks at their connection
_LEAST_PART_BYTES: Final = 2  # on the network

_TCP_INFO_BYTES: Final = 152
_COUNTED: Final = struct.Struct("=QQ")  # bytes acknowledged, bytes received
_COUNTED_AT: Final = 120
_NOT_SENT: Final = struct.Struct("=I")
_NOT_SENT_AT: Final = 144
_BORN_BYTES: Final = 2048  # ZeroMQ's greeting and handshake, with keys: the owner never takes these
_CURVE_BYTES: Final = 33  # of each frame
_PUBLISHED_BYTES: Final = 1 << 20  # between two looks at who reads
# Seconds for which bytes that were taken wait for their connection to be known.
_LATE_S: Final = 5.0
_LOG_EVERY_S: Final = 1.0
_DESCRIPTORS: Final = 4  # a quarter of the process's, for connections of one socket; each takes two
_EVENTS: Final = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
# As integers: pyzmq's enumerations take longer to combine than the call.
_EVENTS_OPTION: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_GONE_SHARE: Final = 4  # of `socket_bytes`, for what ended connections have left
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_DROP_ALL: Final = struct.pack("=HBBI", 6, 0, 0, 0)  # a BPF program: return 0

_Socket = zmq.Socket[bytes]


class Bounds(NamedTuple):
    """The bounds of one socket.

    Args:
        message_bytes: of a part, so of a message that has one.
        queued_messages: that wait for the owner, per connection.
        kernel_bytes: that wait with the kernel, per connection, as `SO_RCVBUF` counts.
        connection_bytes: brought by a connection and not taken by the owner.
        socket_bytes: the same, of all connections.
        connections: at once.
        unread_bytes: given to a connection and not acknowledged.
    """

    message_bytes: int
    queued_messages: int
    kernel_bytes: int
    connection_bytes: int
    socket_bytes: int
    connections: int
    unread_bytes: int


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted connection, with its counts of bytes.

    `taken`, `given` and `heard_s` are written by the socket's owner, the rest by the watcher.
    """

    link: socket.socket  # a duplicate of libzmq's descriptor, which outlives that one
    link_fd: int
    began_s: float
    taken: int = 0
    given: int = 0
    heard_s: float = 0.0  # when a message of it was taken last; 0: never
    received: int = 0
    unread: int = 0  # of them those that wait with the kernel
    is_cut: bool = False

    def look(self) -> None:
        """Count what has come by this TCP connection."""
        with suppress(OSError):
            self.received = self.count()[1]
            waiting = fcntl.ioctl(self.link_fd, termios.FIONREAD, bytes(4))
            self.unread = int.from_bytes(waiting, sys.byteorder)

    @property
    def held(self) -> int:
        """Bytes that this TCP connection has brought and the socket's owner has not taken.

        ZeroMQ's pings count, so a peer that sends many of them is cut one day, and comes back.
        """
        return max(0, self.received - self.taken - _BORN_BYTES)

    def count(self) -> tuple[int, int]:
        """Return the kernel's counts of this TCP connection: bytes that the peer has acknowledged,
        and those that it has sent. Raises OSError."""
        info = self.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) < _NOT_SENT_AT + _NOT_SENT.size:
            raise OSError("this kernel does not count the bytes of connections")
        acknowledged, received = _COUNTED.unpack_from(info, _COUNTED_AT)
        return acknowledged, received

    def can_have_brought(self, num_bytes: int) -> bool:
        """Return whether this TCP connection may have brought this many bytes beyond what was taken
        of it."""
        try:
            return num_bytes <= self.count()[1] - self.taken
        except OSError:
            return False

    def is_stuck(self) -> bool:
        """Return whether bytes of this TCP connection wait with this kernel that the peer has no
        room for."""
        with suppress(OSError):
            info = self.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return bool(_NOT_SENT.unpack_from(info, _NOT_SENT_AT)[0])
        return False

    @property
    def is_over(self) -> bool:
        """True once the duplicate of this TCP connection's descriptor is closed: the connection has
        gone."""
        return self.link.fileno() < 0

    def cut(self) -> None:
        """End this TCP connection: libzmq sees its end, and frees what it holds of it."""
        self.is_cut = True
        with suppress(OSError):
            # Reset when both descriptors are closed, whatever the peer has still to send.
            self.link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.link.shutdown(socket.SHUT_RDWR)


def set_bounds(sock: _Socket, bounds: Bounds) -> None:
    """Set a ZeroMQ socket's options by which libzmq and the kernel keep connections of honest peers
    below the bounds.

    Before the socket is bound or connected.
    """
    sock.setsockopt(zmq.MAXMSGSIZE, bounds.message_bytes)
    sock.setsockopt(zmq.RCVHWM, bounds.queued_messages)
    sock.setsockopt(zmq.RCVBUF, bounds.kernel_bytes)
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))


def message_bytes(num_bytes: int, is_curve: bool) -> int:
    """Return how many bytes a part of a message takes on a TCP connection, ZeroMQ's framing
    included.

    >>> message_bytes(10, is_curve=False), message_bytes(256, is_curve=False)
    (12, 265)
    """
    size = num_bytes + (_CURVE_BYTES if is_curve else 0)
    return size + (2 if size < 256 else 9)


def is_empty(sock: _Socket) -> bool:
    """Return whether a ZeroMQ socket has no message for its owner."""
    return not int(sock.getsockopt(_EVENTS_OPTION)) & _POLLIN


def descriptor(frame: zmq.Frame) -> int:
    """Return libzmq's descriptor of the TCP connection that a part came by; -1: none that is
    watched."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:  # ipc
        return -1


def receive(sock: _Socket, watched: Watched) -> tuple[list[zmq.Frame], Connection | None] | None:
    """Return the next message of a watched ZeroMQ socket, and the connection that it came by.

    One of more than `MOST_PARTS` is dropped, and its connection, once the watcher knows it, is cut
    before the rest of it is read: no frames are returned. Part by part that takes a microsecond or
    two each, so a turn, from one `may_sleep` to the next, takes a bounded number of them.

    Returns None if the turn has taken that many: the rest is for the next one. Raises zmq.Again if
    there is no message.
    """
    # A message of many parts that the last turn has not finished.
    if watched.skipped_bytes:
        return _skip(sock, watched)
    frame = sock.recv(zmq.DONTWAIT, copy=False)
    frames = [frame]
    while frame.more:  # all of them are here, since a message comes whole
        if len(frames) == MOST_PARTS:
            watched.skipped_bytes = _bytes_of(frames, watched)
            return _skip(sock, watched)
        frame = sock.recv(zmq.DONTWAIT, copy=False)
        frames.append(frame)
    return frames, watched.took(descriptor(frame), _bytes_of(frames, watched))


def _bytes_of(frames: list[zmq.Frame], watched: Watched) -> int:
    """Return the bytes that a message of a watched socket took on its TCP connection; a route has
    not travelled."""
    travelled = frames[1:] if watched.has_route else frames
    return sum(message_bytes(len(frame), watched.is_curve) for frame in travelled)


def _skip(sock: _Socket, watched: Watched) -> tuple[list[zmq.Frame], Connection | None] | None:
    """Read on in a watched socket's message of many parts, and end its connection.

    Its bytes are counted as the least that they can be: a connection that is cut had better count
    too many held bytes than too few.
    """
    receive_part, dont_wait = sock.recv, int(zmq.DONTWAIT)
    while watched.parts_left > 0:
        num_parts = 1
        frame = receive_part(dont_wait, False)
        while frame.more and num_parts < _PARTS_A_COUNT:
            frame = receive_part(dont_wait, False)
            num_parts += 1
        watched.parts_left -= num_parts
        watched.skipped_bytes += num_parts * _LEAST_PART_BYTES
        fd = descriptor(frame)
        connection = watched.connections.get(fd)
        # The descriptor may belong to another connection by now. That one has not brought as much,
        # and must not be cut for it.
        if connection is not None and connection.can_have_brought(watched.skipped_bytes):
            watched.cut(connection, "a message of many parts")
        if not frame.more:
            num_bytes, watched.skipped_bytes = watched.skipped_bytes, 0
            return [], watched.took(fd, num_bytes)
    return None


@dataclass(slots=True, eq=False)
class Watched:
    """A socket as its owner and the watcher both see it. Methods for the owner's thread never
    wait."""

    name: str
    bounds: Bounds
    is_curve: bool
    counters: Counter[str]
    monitor: _Socket | None  # None: the owner reports what comes and goes
    fd: int  # readable, where the socket may have something that its owner has not seen
    is_read: bool = True  # False: libzmq takes what comes, so all that a connection brings counts
    has_route: bool = False  # a message begins with a frame that did not travel
    connections: dict[int, Connection] = field(default_factory=dict)  # by libzmq's descriptor
    is_waiting: bool = False  # the owner sleeps on `fd`, having found the socket empty
    is_settling: bool = False  # connections have ended, and what they left may not be taken yet
    skipped_bytes: int = 0  # of a message of many parts that the owner has read in part
    parts_left: int = 0  # that this turn may skip
    listener_fd: int = -1  # libzmq's
    is_shut: bool = False  # no connection comes
    # Takes libzmq's code of a handshake that failed, on the watcher's thread.
    failed: Callable[[int], None] = lambda code: None
    # Bytes taken and when, by descriptor, of connections that the watcher does not know yet.
    _early: dict[int, tuple[int, float]] = field(default_factory=dict)
    # Turns of the owner: how often it found the socket empty.
    _turns: int = 0
    # Bytes that ended connections have left, until the turn by which the owner has taken them.
    _gone_bytes: int = 0
    _gone_turns: int = 0
    _published: int = 0
    _looked_at: int = 0

    # --- the owner's thread -----------------------------------------------------------------------

    def took(self, fd: int, num_bytes: int) -> Connection | None:
        """Count a message of `num_bytes` that the watched socket's owner has taken; return the
        connection it came by."""
        connection = self.connections.get(fd)
        if connection is None:
            if fd >= 0:  # its connection is not known yet, or not any more
                self._early[fd] = self._early.get(fd, (0, 0.0))[0] + num_bytes, time.monotonic()
            return None
        taken = connection.taken + num_bytes
        if taken > connection.received:
            # No more than it can have been, as in `begin`.
            with suppress(OSError):
                taken = min(taken, connection.count()[1])
        connection.taken = taken
        connection.heard_s = time.monotonic()
        return connection

    def may_sleep(self, sock: _Socket) -> bool:
        """Return whether the owner of the watched socket may sleep: the socket has nothing for it.

        Then `fd` becomes readable before it has. The owner sleeps on `fd`, and not in zmq's poll of
        the socket: that one takes note of what has come a moment before the owner does, and it
        would look as if all was taken.
        """
        self.parts_left = _PARTS_A_TURN
        self.is_waiting = is_empty(sock)
        return self.is_waiting

    def found_empty(self) -> None:
        """Note that the owner of the watched socket has taken all there is."""
        self._turns += 1

    def unread(self, connection: Connection | None) -> int:
        """Return the bytes that were given to a connection of the watched socket and that its peer
        has not acknowledged."""
        if connection is None or not connection.given:
            return 0
        try:
            return max(0, connection.given - connection.count()[0])
        except OSError:
            return 0

    def gave(self, connection: Connection | None, num_bytes: int) -> None:
        """Count a message that the watched socket's owner has queued for a connection; end one that
        does not read."""
        if connection is None or connection.is_cut:
            return
        connection.given += num_bytes
        # The kernel is asked only when the count may be above the bound.
        if connection.given > self.bounds.unread_bytes:
            unread = self.unread(connection)
            if unread > self.bounds.unread_bytes:
                self.cut(connection, "does not read", unread)
            # All acknowledged. The kernel's count includes what libzmq itself has sent, so go on
            # from it.
            elif not unread:
                connection.given = connection.count()[0]

    def published(self, num_bytes: int) -> None:
        """Count bytes that the watched socket's owner has published to all connections that want
        them.

        A subscriber that is more than `unread_bytes` behind, and has no room for more, is ended.
        """
        self._turns += 1  # libzmq's part in the owner's thread has seen what has come and gone
        self._published += num_bytes
        if self._published - self._looked_at < _PUBLISHED_BYTES:
            return
        self._looked_at = self._published
        for connection in list(self.connections.values()):
            with suppress(OSError):
                behind = self._published + connection.given - connection.count()[0]
                if not connection.is_stuck():
                    connection.given -= behind  # it has all, but for what was not for it
                elif behind > self.bounds.unread_bytes:
                    self.cut(connection, "does not read", behind)

    # --- either -----------------------------------------------------------------------------------

    def cut(self, connection: Connection, why: str, num_bytes: int = 0) -> None:
        """End a connection of the watched socket and count why."""
        if not connection.is_cut:
            connection.cut()
            self.counters[f"connections_cut: {why}"] += 1

    # --- the watcher's thread ---------------------------------------------------------------------

    def begin(self, fd: int, now_s: float) -> Connection | None:
        """Begin to count the bytes of a connection that has come to the watched socket. None if it
        has gone already, or is not TCP."""
        try:
            link = socket.socket(fileno=os.dup(fd))
        except OSError:
            return None
        connection = Connection(link, link.fileno(), now_s)
        try:
            if link.family not in (socket.AF_INET, socket.AF_INET6):
                raise OSError("no TCP")
            connection.look()
            connection.count()
        except OSError:
            link.close()
            return None
        # Ended connections have left more than the bound already: no other may bring more now.
        if self._gone_bytes > self.bounds.socket_bytes:
            self.cut(connection, "messages beyond their bound in sum")
        self._make_room()
        # No more than it can have been: the rest was of another that had this descriptor before.
        connection.taken = min(self._early.pop(fd, (0, 0.0))[0], connection.received)
        connection.heard_s = now_s if connection.taken else 0.0
        if not self.is_read:
            connection.given = -self._published
        self.connections[fd] = connection
        return connection

    def _make_room(self) -> None:
        """End one connection of the watched socket if there are too many.

        Of those that never sent a message the oldest; else the one that has been silent for
        longest.
        """
        live = [one for one in self.connections.values() if not one.is_cut]
        if len(live) >= self.most:
            oldest = min(live, key=lambda one: (one.heard_s, one.began_s))
            self.cut(oldest, "too many")

    @property
    def most(self) -> int:
        """Most connections of the watched socket at once."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return max(16, min(self.bounds.connections, descriptors // _DESCRIPTORS))

    def end(self, fd: int) -> Connection | None:
        """Take out a connection of the watched socket that has gone, as libzmq says. The caller
        closes its duplicate."""
        connection = self.connections.pop(fd, None)
        if connection is not None:
            connection.look()
            # Whole messages of it may wait in libzmq still: they count until the owner has taken
            # them.
            if connection.held:
                self._gone_bytes += connection.held
                self._gone_turns = self._turns + 2  # the next may have begun before
                self.is_settling = True
        return connection

    def enforce(self, now_s: float) -> None:
        """Cut the watched socket's connections that are above their bound: each for itself, then
        the largest until the sum is below."""
        # 1. Forget early bytes of connections that never became known.
        for fd, (_, when_s) in list(self._early.items()):
            if when_s < now_s - _LATE_S:
                self._early.pop(fd, None)
        live = [one for one in self.connections.values() if not one.is_cut]
        # 2. The owner sleeps on an empty socket. This is asked after the bytes were counted: what
        # was counted and is whole is taken by now, so the rest is of unfinished messages.
        if self.is_waiting and not wait_readable(self.fd, 0.0):
            self._gone_turns = self._turns
            most = 2 * self.bounds.message_bytes
            for connection in live:
                if connection.held - connection.unread > most:
                    self.cut(connection, "an unfinished message beyond its bound")
        # 3. What ended connections left is taken once the owner has found the socket empty again.
        if self._turns >= self._gone_turns:
            self._gone_bytes, self.is_settling = 0, False
        self._shut(self._gone_bytes > self.bounds.socket_bytes // _GONE_SHARE)
        # 4. The largest first, so that the fewest are cut to bring the sum below its bound. One
        # with no more than a handshake is no part of the flood.
        total = self._gone_bytes + sum(connection.held for connection in live)
        for connection in sorted(live, key=lambda one: one.held, reverse=True):
            if connection.held > self.bounds.connection_bytes:
                self.cut(connection, "messages beyond their bound")
            elif total > self.bounds.socket_bytes and connection.held > _BORN_BYTES:
                self.cut(connection, "messages beyond their bound in sum")
            else:
                break
            total -= connection.held

    def _shut(self, is_shut: bool) -> None:
        """Let no connection come to the watched socket while its owner has to read what ended ones
        have left.

        Each may bring what the kernel holds of it before it can be cut, faster than that is read.
        Their SYNs are dropped, so they come when TCP tries again, a second later.
        """
        if is_shut == self.is_shut or self.listener_fd < 0:
            return
        self.is_shut = is_shut
        with suppress(OSError):
            # A second socket object on libzmq's descriptor, only to set an option: detached, not
            # closed.
            listener = socket.socket(fileno=self.listener_fd)
            try:
                if listener.family in (socket.AF_INET, socket.AF_INET6):
                    if is_shut:
                        program = ctypes.create_string_buffer(_DROP_ALL)
                        told = struct.pack("@HP", 1, ctypes.addressof(program))
                        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)
                        self.counters["listening_paused"] += 1
                    else:
                        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            finally:
                listener.detach()  # it is libzmq's

    @property
    def looks_hostile(self) -> bool:
        """True if a connection of the watched socket that brings bytes is unknown, or has brought
        more than a message."""
        most = self.bounds.message_bytes
        return any(not one.heard_s or one.held > most for one in self.connections.values())


class Watcher:
    """The thread that watches connections. Created by the owner of the sockets, which calls all of
    it.

    `counters` has "connections_cut: WHY" once one was cut.
    """

    def __init__(self, name: str) -> None:
        self.counters: Counter[str] = Counter()
        self._name = name
        self._watched: list[Watched] = []
        self._bell: Inbox[Callable[[], None] | None] = Inbox()
        self._epoll: select.epoll | None = select.epoll() if sys.platform == "linux" else None
        self._poller = zmq.Poller()
        # By the duplicates' descriptors: all connections, and those that brought bytes lately.
        self._by_link: dict[int, tuple[Watched, Connection]] = {}
        self._hot: dict[int, tuple[Watched, Connection]] = {}
        self._logged_s = -_LOG_EVERY_S
        self._round_s = 0.0  # monotonic: then all connections are looked at
        self._thread: threading.Thread | None = None
        self._closed = False

    # --- the owner's thread -----------------------------------------------------------------------

    def watch_bound(
        self, sock: _Socket, name: str, bounds: Bounds, is_curve: bool = False,
        is_read: bool = True,
    ) -> Watched:  # fmt: skip
        """Watch the connections of a socket that is not bound yet, and bound them: one that came
        before is not watched."""
        monitor = None if self._epoll is None else sock.get_monitor_socket(_EVENTS)
        watched = Watched(name, bounds, is_curve, self.counters, monitor, sock.FD, is_read)
        watched.has_route = sock.type == zmq.ROUTER
        return self._begin(sock, watched)

    def watch_connected(
        self, sock: _Socket, name: str, bounds: Bounds, is_curve: bool = False
    ) -> Watched:
        """Watch the connections of a socket that connects, and bound them; `came` and `went` pass
        on what its owner's monitor says."""
        return self._begin(sock, Watched(name, bounds, is_curve, self.counters, None, sock.FD))

    def came(self, watched: Watched, fd: int) -> None:
        """Take for the watcher zmq.EVENT_CONNECTED of a connection, with libzmq's descriptor."""
        self._tell(lambda: self._came(watched, fd))

    def went(self, watched: Watched, fd: int) -> None:
        """Take for the watcher zmq.EVENT_DISCONNECTED of a connection, with libzmq's descriptor."""
        self._tell(lambda: self._went(watched, fd))

    def forget(self, watched: Watched) -> None:
        """Stop watching the connections of a socket that connects; it is about to be closed."""
        self._tell(lambda: self._forget(watched))

    def _tell(self, what: Callable[[], None]) -> None:
        """Queue a call for the thread that watches connections, if there is one."""
        if self._thread is not None:
            self._bell.put(what)

    def close(self) -> None:
        """Join the thread that watches connections. Idempotent.

        Before it, `disable_monitor` of the sockets that are bound, since libzmq's thread may wait
        for this one to read; after it, close them.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._bell.put(None)
            self._thread.join()
        self._bell.close()
        if self._epoll is not None:
            self._epoll.close()

    def _begin(self, sock: _Socket, watched: Watched) -> Watched:
        """Set the bounds of a socket's connections, and start to watch them; without the counters
        only the bounds are set."""
        # In any case: these need no counters.
        set_bounds(sock, watched.bounds)
        if self._epoll is not None:
            self._bell.put(lambda: self._watch(watched))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        return watched

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run the thread that watches connections; at its end all duplicates are closed."""
        assert self._epoll is not None
        self._poller.register(self._bell.fd, zmq.POLLIN)
        self._poller.register(self._epoll.fileno(), zmq.POLLIN)
        try:
            while self._guarded_step():
                pass
        finally:
            for watched in self._watched:
                for fd in list(watched.connections):
                    self._went(watched, fd)

    def _guarded_step(self) -> bool:
        """Make one look at the watched connections; an exception is logged, and the thread goes
        on."""
        try:
            return self._step()
        except Exception:  # a defect of ours: what it was about is not watched, all else is
            _log.exception("a look at the connections failed")
            time.sleep(LOOK_S)
            return True

    def _step(self) -> bool:
        """Make one look at the watched connections; return False when the thread is to end."""
        # 1. Wait until something happens; where bytes come, then a pause. So one look sees all of a
        # burst, and is not in the way of the threads that take it.
        ready: dict[Any, int] = {}
        if not self._is_busy:
            ready = dict(self._poller.poll(int(1000 * ROUND_S) if self._by_link else None))
            self._note_arrivals()
        if self._is_busy:
            hot = {id(watched): watched for watched, _ in self._hot.values()}
            hostile = any(watched.looks_hostile for watched in hot.values())
            time.sleep(QUICK_LOOK_S if hostile else LOOK_S)
            ready = dict(self._poller.poll(0))
        # 2. Calls of the owner.
        if self._bell.fd in ready:
            for told in self._bell.drain():
                if told is None:
                    return False
                told()
        # 3. Connections that have come and gone, before their bytes are counted.
        for watched in self._watched:
            if watched.monitor is not None and watched.monitor in ready:
                self._read_events(watched, watched.monitor)
        self._look()
        return True

    def _watch(self, watched: Watched) -> None:
        """Add a socket to those with connections that the thread watches."""
        self._watched.append(watched)
        if watched.monitor is not None:
            self._poller.register(watched.monitor, zmq.POLLIN)

    def _forget(self, watched: Watched) -> None:
        """Remove a socket and its connections from those that the thread watches."""
        for fd in list(watched.connections):
            self._went(watched, fd)
        self._watched.remove(watched)

    def _read_events(self, watched: Watched, monitor: _Socket) -> None:
        """Read what libzmq reports about the connections of a bound socket."""
        with suppress(zmq.Again):
            while True:
                told = parse_monitor_message(monitor.recv_multipart(zmq.DONTWAIT))
                if told["event"] == zmq.EVENT_LISTENING:
                    watched.listener_fd = told["value"]
                elif told["event"] == zmq.EVENT_ACCEPTED:
                    self._came(watched, told["value"])
                elif told["event"] == zmq.EVENT_DISCONNECTED:
                    self._went(watched, told["value"])
                elif told["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    watched.failed(told["value"])

    def _came(self, watched: Watched, fd: int) -> None:
        """Begin to watch a TCP connection."""
        assert self._epoll is not None
        self._went(watched, fd)  # what had this descriptor before has gone, told or not
        connection = watched.begin(fd, time.monotonic())
        if connection is not None:
            link = connection.link_fd
            self._by_link[link] = self._hot[link] = watched, connection
            self._epoll.register(link, select.EPOLLIN | select.EPOLLET)

    def _went(self, watched: Watched, fd: int) -> None:
        """Close the duplicate of a watched connection that has gone."""
        connection = watched.end(fd)
        if connection is not None:
            assert self._epoll is not None
            del self._by_link[connection.link_fd]
            self._hot.pop(connection.link_fd, None)
            # Before it is closed: libzmq's own descriptor may still be open, and keeps a
            # registration alive.
            self._epoll.unregister(connection.link_fd)
            connection.link.close()

    @property
    def _is_busy(self) -> bool:
        """True if a watched connection has brought bytes that are not counted, or holds too much,
        or a socket is settling."""
        return bool(self._hot) or any(watched.is_settling for watched in self._watched)

    def _note_arrivals(self) -> None:
        """Note the watched connections that have brought bytes since the last call, but for bytes
        that libzmq has taken already."""
        assert self._epoll is not None
        for link, _ in self._epoll.poll(0):  # once for each arrival: EPOLLET
            if link in self._by_link:
                self._hot[link] = self._by_link[link]

    def _look(self) -> None:
        """Count what has come by the watched connections, and cut those that bring too much."""
        self._note_arrivals()
        now_s = time.monotonic()
        if now_s >= self._round_s:
            self._hot.update(self._by_link)
            self._round_s = now_s + ROUND_S
        looked = {id(watched) for watched, _ in self._hot.values()}
        # One that is counted needs no look until its next arrival, unless it holds too much. It was
        # noted before it was counted, so what comes in between is noted again.
        for link, (watched, connection) in list(self._hot.items()):
            most = 2 * watched.bounds.message_bytes
            connection.look()
            if not (watched.is_read and connection.held > most):
                del self._hot[link]
        num_cut = sum(self.counters.values())
        for watched in self._watched:  # only those with something new are judged
            if id(watched) in looked or watched.is_settling:
                watched.enforce(now_s)
        if sum(self.counters.values()) > num_cut and now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            _log.warning("%s: %s", self._name, dict(self.counters))
