"""The protocol of two shm transports: the offer in Hello, and the packets between them.

Decode listens on an abstract unix socket. The offer names it, with a token that only the control
plane carries. Prefill connects, says the token, and gets descriptors of the memory (SCM_RIGHTS)
with the addresses that decode knows it by. From then on prefill sends tags; the end of the
connection says that a side is gone. (A socket and not /proc/PID/fd/N: the kernel names the other
end's user, nothing is looked up by a process id, it works between pid namespaces, and tags need a
way in any case.)

A peer is believed to run as the same user (SO_PEERCRED); the handshake has compared the places.
Everything else is checked: sizes, counts, and that each file is sealed against
shrinking, so that no access to it can end this process.

Abstract sockets have no permissions, so any process of this user can connect to `ShmListener`.
Without the token it gets no descriptor.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hmac
import logging
import mmap
import os
import secrets
import select
import socket
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final

import msgspec

from prefixkv.errors import HandshakeError
from prefixkv.memory.kv_layout import ADDRESS_END
from prefixkv.memory.kv_pool import SharedBlock
from prefixkv.memory.mesh import check_equal
from prefixkv.protocol.ids import PeerId, tag_bytes
from prefixkv.threads import undoing

MAGIC: Final = b"pkvshm1|"
TOKEN_BYTES: Final = 32
MAX_BLOCKS: Final = 64  # of a peer; a pool of ours is one
MAX_OTHER_RANGES: Final = 8193  # a staging area's, and the regions of a state
MAX_RANGES: Final = 8192 + MAX_OTHER_RANGES
MAX_PACKET_BYTES: Final = 16 << 10
_MAX_ANSWER_BYTES: Final = 1 << 20
_DOOR: Final = "\0prefixkv-shm-"
_CREDENTIALS: Final = struct.Struct("3i")


class ShmOffer(msgspec.Struct, frozen=True, array_like=True):
    """The way to a peer's door: the agent's name and incarnation, `door` of the abstract socket,
    and the token to say there."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    incarnation: Annotated[int, msgspec.Meta(ge=0)]
    door: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


_Address = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_END - 1)]
_NumBytes = Annotated[int, msgspec.Meta(ge=1, le=ADDRESS_END - 1)]
_Range = tuple[_Address, _NumBytes]


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    """`blocks` belong to the descriptors that come with the message, in their order; `ranges` of
    them may be written."""

    blocks: Annotated[tuple[_Range, ...], msgspec.Meta(max_length=MAX_BLOCKS)]
    ranges: Annotated[tuple[_Range, ...], msgspec.Meta(max_length=MAX_RANGES)]


def pack_offer(offer: ShmOffer) -> bytes:
    return MAGIC + msgspec.msgpack.encode(offer)


def read_offer(raw: bytes, peer: PeerId) -> ShmOffer:
    """Return the offer in these bytes. Raises HandshakeError if it is none, or of another peer."""
    if not raw.startswith(MAGIC):
        raise HandshakeError("shm offer", MAGIC, raw[: len(MAGIC)])
    try:
        offer = msgspec.msgpack.decode(raw[len(MAGIC) :], type=ShmOffer)
    except msgspec.DecodeError as error:
        raise HandshakeError("shm offer", "an offer", str(error)) from None
    check_equal("shm offer", peer, (offer.name, offer.incarnation), "is of another")
    return offer


# --- sockets --------------------------------------------------------------------------------------


def listen(door: str) -> socket.socket:
    """Return a socket that listens at this door. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with undoing(listener.close):
        listener.bind(_DOOR + door)
        listener.listen(128)
    return listener


def connect(door: str) -> socket.socket:
    """Return a connection to this door. Raises OSError without a listener, HandshakeError if it
    runs as another user."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with undoing(link.close):
        # Any process could listen under this name: the user is checked before the token is said.
        link.connect(_DOOR + door)
        check_user(link)
    return link


def check_user(link: socket.socket) -> None:
    """Raise HandshakeError unless the other end runs as this process's user, as the kernel
    remembers from when it connected, or began to listen."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    check_equal("user", os.geteuid(), user, "is another: shm is within one user")


def hand_over(
    link: socket.socket, blocks: Sequence[SharedBlock], ranges: Sequence[tuple[int, int]]
) -> None:
    """Send the descriptors of our shared memory, and which parts may be written. Raises OSError."""
    words = _Memory(tuple(block[:2] for block in blocks), tuple(ranges))
    fds = array.array("i", [block.fd for block in blocks])
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())
    link.sendmsg([MAGIC + msgspec.msgpack.encode(words)], [rights])


def take(
    link: socket.socket, max_ranges: int
) -> tuple[list[SharedBlock], tuple[tuple[int, int], ...]]:
    """Receive and check what `hand_over` sent; return the blocks, whose descriptors are the
    caller's to close, and the ranges: at most `max_ranges`, and as many blocks.

    Raises BlockingIOError if nothing has come yet, HandshakeError, with all descriptors closed, if
    it is not as it has to be.
    """
    size = array.array("i").itemsize
    # The buffers bound what a peer can make this process receive, descriptors included.
    most = min(MAX_BLOCKS, max_ranges)
    raw, ancillary, flags, _ = link.recvmsg(
        _MAX_ANSWER_BYTES, socket.CMSG_SPACE(most * size), socket.MSG_CMSG_CLOEXEC
    )
    # Collected before anything is checked: every descriptor that came is closed or handed on.
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % size])
    # 1. Complete, and of this protocol.
    with undoing(lambda: close_all(fds)):
        if not raw:
            raise HandshakeError("shm", "memory", "the end", "is what the peer answered")
        # CTRUNC: the kernel has dropped descriptors beyond the buffer.
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not raw.startswith(MAGIC):
            raise HandshakeError("shm", MAGIC, raw[: len(MAGIC)], "is what the peer answered")
        try:
            memory = msgspec.msgpack.decode(raw[len(MAGIC) :], type=_Memory)
        except msgspec.DecodeError as error:
            raise HandshakeError("shm memory", "blocks and ranges", str(error)) from None
        # 2. As many descriptors as blocks, no more ranges than named.
        if len(memory.blocks) != len(fds) or not fds:
            raise HandshakeError("shm descriptors", len(memory.blocks), len(fds))
        if len(memory.ranges) > max_ranges:
            raise HandshakeError("shm ranges", max_ranges, len(memory.ranges), "are too many")
        # 3. Each file, then the places of blocks and ranges.
        blocks = [SharedBlock(*block, fd) for block, fd in zip(memory.blocks, fds, strict=True)]
        for block in blocks:
            check_file(block)
        _check_places(blocks, memory.ranges)
    return blocks, memory.ranges


def check_file(block: SharedBlock) -> None:
    """Raise HandshakeError unless a file is as long as was said and can never become shorter: else
    a copy into it could end this process by SIGBUS."""
    try:
        seals = fcntl.fcntl(block.fd, fcntl.F_GET_SEALS)
        size, page = os.fstat(block.fd).st_size, os.fstatvfs(block.fd).f_bsize
    except OSError as error:  # no memfd, say
        raise HandshakeError("shm file", "a sealed memfd", str(error)) from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise HandshakeError("shm seals", fcntl.F_SEAL_SHRINK, seals, "lack that against shrinking")
    if size < block.num_bytes:
        raise HandshakeError("shm file bytes", block.num_bytes, size, "are fewer than was said")
    # Of hugetlbfs: see `kv_pool.py`.
    check_equal("shm file's pages", mmap.PAGESIZE, page, "may fail where there is a hole")


def _check_places(blocks: Iterable[SharedBlock], ranges: Iterable[tuple[int, int]]) -> None:
    # In the order of addresses, so that each block is compared with its predecessor alone.
    ends: dict[int, int] = {}
    end = 0
    for block in sorted(blocks):
        if block.address < end or block.address + block.num_bytes >= ADDRESS_END:
            raise HandshakeError("shm block", end, block.address, "overlaps another")
        ends[block.address] = end = block.address + block.num_bytes
    firsts = list(ends)
    for address, num_bytes in ranges:
        at = bisect_right(firsts, address) - 1
        if at < 0 or address + num_bytes > ends[firsts[at]]:
            raise HandshakeError("shm range", address, num_bytes, "is in no block")


def close_all(fds: Iterable[int]) -> None:
    """Close all descriptors; one that cannot be closed is passed over."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def tags_of(packet: bytes) -> list[bytes]:
    """Return the tags in a packet. Raise HandshakeError if it is no packet of tags."""
    tags, at = [], 0
    while at < len(packet):
        end = at + tag_bytes(packet, at)
        tags.append(packet[at:end])
        at = end
    if not packet or at != len(packet):
        raise HandshakeError("bytes of tags", at, len(packet), "is no whole number of them")
    return tags


_log = logging.getLogger("prefixkv.transport")

_PACKETS_A_TURN: Final = 64  # of a link
_PAUSE_S: Final = 0.01  # before a connection is tried again, where there are no descriptors


class ShmListener:
    """The listener and the connections to writers; it listens as long as it is open."""

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
        self._links: dict[int, socket.socket] = {}  # by descriptor
        self._writers: set[int] = set()  # those that have said the token
        with undoing(self._listener.close):
            self.offer = pack_offer(ShmOffer(*me, door, self._token))
            epoll.register(self._listener.fileno(), select.EPOLLIN)

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
        for fd in list(self._writers):  # a link may be dropped on the way
            self._read(fd, arrived, 1 << 20)

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
                # The connection still waits: without a pause it would wake the thread without end.
                time.sleep(_PAUSE_S)
            return
        # 2. The user first: nothing is kept for a process of another user.
        try:
            check_user(link)
            link.setblocking(False)
        except (HandshakeError, OSError) as error:
            _log.warning("a process that wants this pool's memory is turned away: %s", error)
            link.close()
            return
        # 3. A writer says the token before it is accepted, so it can be read at once.
        self._links[link.fileno()] = link
        self._epoll.register(link.fileno(), select.EPOLLIN)
        self._read(link.fileno(), arrived, 1)

    def _read(self, fd: int, arrived: Callable[[bytes], None], limit: int) -> None:
        """Up to `limit` packets of a link: its token first, then tags."""
        link = self._links[fd]
        try:
            for _ in range(limit):
                # An empty packet is the end of the connection.
                packet = link.recv(MAX_PACKET_BYTES)
                if not packet:
                    self._drop(fd)
                    return
                # The first packet is the token, and nothing but it is read in this turn.
                if fd not in self._writers:
                    self._greet(link, packet)
                    self._writers.add(fd)
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
        link = self._links.pop(fd)
        self._writers.discard(fd)
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        link.close()
