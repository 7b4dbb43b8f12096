"""The receiving side of the shm transport: it hands its memory to writers that know the token, and
takes their tags. Owned by the transport's thread.

Abstract sockets have no permissions, so any process of this user can connect. Without the token it
gets no descriptor; it can take one of a few places for a moment, and cannot push a writer out.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from prefixkv.errors import HandshakeError
from prefixkv.memory.shared import SharedBlock
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.shm.wire import (
    MAGIC,
    MAX_PACKET_BYTES,
    TOKEN_BYTES,
    ShmOffer,
    check_user,
    hand_over,
    listen,
    pack_offer,
    tags_of,
)

_log = logging.getLogger("prefixkv.transport")

_MAX_LINKS: Final = 1024
_MAX_STRANGERS: Final = 64  # that have not said the token yet
_PATIENCE_S: Final = 10.0  # seconds for it
_PACKETS_A_TURN: Final = 64  # of a link
_DEAF_S: Final = 0.1  # before it is tried again to let one in, where there are no descriptors


class ShmListener:
    """The listener and the connections to writers; it listens as long as it is open.

    `_links` are by descriptor, with the time by which the token has to be said; None: it has been.
    """

    def __init__(
        self,
        me: PeerId,
        blocks: Sequence[SharedBlock],
        ranges: Sequence[tuple[int, int]],
        epoll: select.epoll,
    ) -> None:
        """Start to listen; `ranges` of the blocks may be written. Raises OSError if the system has
        no such sockets."""
        self._blocks, self._ranges = blocks, tuple(dict.fromkeys(ranges))
        self._epoll = epoll
        self._token = secrets.token_bytes(TOKEN_BYTES)
        door = secrets.token_hex(16)
        self._listener = listen(door)
        self._links: dict[int, tuple[socket.socket, float | None]] = {}
        self._unwatched_until_s: float | None = (
            None  # monotonic: until then the listener is not watched
        )
        try:
            self.offer = pack_offer(ShmOffer(*me, door, self._token))
            epoll.register(self._listener.fileno(), select.EPOLLIN)
        except BaseException:
            self._listener.close()
            raise

    @property
    def num_writers(self) -> int:
        """Number of connections that have said the token."""
        return sum(until_s is None for _, until_s in self._links.values())

    def wake_s(self) -> float | None:
        """Return when a stranger's time is over or the listener is watched again; None: neither."""
        times = [self._unwatched_until_s, *(until_s for _, until_s in self._links.values())]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def on_ready(self, fd: int, arrived: Callable[[bytes], None]) -> bool:
        if fd == self._listener.fileno():
            self._accept(arrived)
        elif fd in self._links:
            self._read(fd, arrived, _PACKETS_A_TURN)
        else:
            return False
        return True

    def read_all(self, arrived: Callable[[bytes], None]) -> None:
        """Read everything that writers have sent so far."""
        # Only writers: a stranger has sent no tags. Over a copy, since a link may be dropped on the
        # way.
        for fd in list(self._links):
            if self._links[fd][1] is None:
                self._read(fd, arrived, 1 << 20)

    def turn_out(self, now_s: float) -> None:
        """Close the links that have not said the token in time; watch the listener again if due."""
        if self._unwatched_until_s is not None and self._unwatched_until_s <= now_s:
            self._unwatched_until_s = None
            self._epoll.modify(self._listener.fileno(), select.EPOLLIN)
        for fd, (_, until_s) in list(self._links.items()):
            if until_s is not None and until_s <= now_s:
                self._drop(fd)

    def close(self) -> None:
        """Close the listener and all links: writers see that this side is gone."""
        for fd in list(self._links):
            self._drop(fd)
        self._listener.close()

    def _accept(self, arrived: Callable[[bytes], None]) -> None:
        # 1. Accept.
        try:
            link, _ = self._listener.accept()
        except OSError as error:  # it has left again, or there are no descriptors
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The connection still waits, so the listener would wake the thread without end: do
                # not watch it for a moment.
                self._epoll.modify(self._listener.fileno(), 0)
                self._unwatched_until_s = time.monotonic() + _DEAF_S
            return
        # 2. The user first: nothing is kept for a process of another user.
        try:
            check_user(link)
            self._make_room()
            link.setblocking(False)
        except (HandshakeError, OSError) as error:
            _log.warning("a process that wants this pool's memory is turned away: %s", error)
            link.close()
            return
        # 3. A stranger until it has said the token.
        self._links[link.fileno()] = link, time.monotonic() + _PATIENCE_S
        self._epoll.register(link.fileno(), select.EPOLLIN)
        # A writer says the token before it is accepted, so it can be read at once: however many
        # strangers come, none can push it out.
        self._read(link.fileno(), arrived, 1)

    def _make_room(self) -> None:
        """Close the oldest stranger if there are too many. HandshakeError if all are writers."""
        strangers = [fd for fd, (_, until_s) in self._links.items() if until_s is not None]
        if len(strangers) < _MAX_STRANGERS and len(self._links) < _MAX_LINKS:
            return
        if not strangers:
            raise HandshakeError("shm links", _MAX_LINKS, len(self._links), "are open")
        self._drop(strangers[0])

    def _read(self, fd: int, arrived: Callable[[bytes], None], limit: int) -> None:
        """Up to `limit` packets of a link: its token first, then tags."""
        link, until_s = self._links[fd]
        try:
            for _ in range(limit):
                # An empty packet is the end of the connection.
                packet = link.recv(MAX_PACKET_BYTES)
                if not packet:
                    self._drop(fd)
                    return
                # The first packet is the token, and nothing but it is read in this turn.
                if until_s is not None:
                    self._greet(link, packet)
                    self._links[fd] = link, None
                    return
                for tag in tags_of(packet):
                    arrived(tag)
        except BlockingIOError:
            pass
        except OSError:  # it is gone
            self._drop(fd)
        except HandshakeError as error:
            _log.warning("a writer of this pool is turned away: %s", error)
            self._drop(fd)

    def _greet(self, link: socket.socket, packet: bytes) -> None:
        # In constant time, so that the token cannot be guessed byte by byte.
        if not hmac.compare_digest(packet, MAGIC + self._token):
            raise HandshakeError("shm token", "that of the Hello", "another")
        hand_over(link, self._blocks, self._ranges)

    def _drop(self, fd: int) -> None:
        link, _ = self._links.pop(fd)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        link.close()
