"""A peer as the writing side of the shm transport knows it: the connection, and its memory, mapped
here. Owned by the transport's thread."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from prefixkv.errors import HandshakeError, PeerLostError, TransferError
from prefixkv.memory.shared import SharedBlock
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.jobs import Outbox
from prefixkv.transport.routes import PeerMemory, Routes
from prefixkv.transport.shm.copy import CopyPlan, Mapped, moved
from prefixkv.transport.shm.wire import (
    MAGIC,
    MAX_OTHER_RANGES,
    TAGS_A_PACKET,
    close_all,
    connect,
    read_offer,
    take,
)

GREETING_S: Final = 10.0  # in which a peer's thread has to answer
_POPULATED_BYTES: Final = 32 << 20  # a turn: 10 ms where memory is there
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MAX_UNSENT_TAGS: Final = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Link:
    """One connection to a peer's door, from the greeting on."""

    def __init__(self, peer: PeerId, offer: bytes, memory: PeerMemory, epoll: select.epoll) -> None:
        """Say the token. Raises HandshakeError, OSError."""
        found = read_offer(offer, peer)
        self._peer = peer
        self._epoll = epoll
        # The Hello names all of them but staging and state that this rank does not write to.
        self._max_ranges = len(memory.layout.regions) + MAX_OTHER_RANGES
        self._maps: list[mmap.mmap] = []
        self.mapped: list[Mapped] = []
        self._files: list[int] = []  # of the maps, until all is populated
        self._unpopulated: deque[_Stretch] = deque()
        self._named = _ranges_of(memory)
        self._unsent: deque[bytes] = deque()
        self.answered = False
        self.until_s = time.monotonic() + GREETING_S
        self.socket = connect(found.door)
        try:
            self.socket.send(MAGIC + found.token)
            self.fd = self.socket.fileno()
            epoll.register(self.fd, select.EPOLLIN | select.EPOLLRDHUP)
        except BaseException:
            self.socket.close()
            raise

    @property
    def is_whole(self) -> bool:
        """The memory is here, every page of it."""
        return self.answered and not self._unpopulated

    def on_ready(self, events: int) -> None:
        """Something came. Raises BlockingIOError (nothing), HandshakeError, PeerLostError."""
        if self.answered and not events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            if events & select.EPOLLOUT:
                self._flush()
            return
        if self.answered:
            raise PeerLostError(f"{self._peer.name} has closed, or is dead")
        handed = take(self.socket, self._max_ranges)
        self._files = [block.fd for block in handed.blocks]
        blocks = sorted(handed.blocks)
        shifts = [self._map(block) for block in blocks]
        firsts = [block.address for block in blocks]
        for address, num_bytes in handed.ranges:
            shift = shifts[bisect_right(firsts, address) - 1]
            self.mapped.append(Mapped(address, num_bytes, address + shift))
        for address, num_bytes in self._named:
            at = bisect_right(firsts, address) - 1
            if at < 0 or address + num_bytes > firsts[at] + blocks[at].num_bytes:
                continue  # `plans` refuses what lies there
            offset = address - firsts[at]
            stretch = _Stretch(blocks[at].fd, offset, num_bytes, firsts[at] + shifts[at])
            self._unpopulated.append(stretch)
        self.answered = True
        self._watch(0)

    def _map(self, block: SharedBlock) -> int:
        """Returns how far from the peer's addresses ours are."""
        try:
            memory = mmap.mmap(block.fd, block.num_bytes, mmap.MAP_SHARED)
        except (OSError, ValueError, OverflowError) as error:
            raise HandshakeError("shm block", block.num_bytes, str(error)) from None
        for advice in ("MADV_DONTFORK", "MADV_DONTDUMP", "MADV_HUGEPAGE"):
            with suppress(OSError, AttributeError):  # what the kernel has of them
                memory.madvise(getattr(mmap, advice))
        here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps.append(memory)
        return here - block.address

    def populate(self) -> None:
        """Bring some of the peer's pages into this process's page table, so that no copy waits for
        that later: those that its Hello names, where it has them itself. Raises HandshakeError
        where its memory cannot be had, or has a hole, which would become memory of ours."""
        if not self._unpopulated:
            return
        stretch = self._unpopulated.popleft()
        first = stretch.offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(stretch.offset + stretch.num_bytes, first + _POPULATED_BYTES)
        hole = os.lseek(stretch.fd, first, os.SEEK_HOLE)
        if hole < end:
            raise HandshakeError("shm pages", end - first, hole - first, "are there, then a hole")
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc.madvise(stretch.here + first, end - first, _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # a kernel before it
                self._unpopulated.clear()
                return
            if number != errno.EINTR and number != errno.EAGAIN:
                what = errno.errorcode.get(number, number)
                raise HandshakeError("shm pages", stretch.num_bytes, what)
            end = first
        left = stretch.offset + stretch.num_bytes - end
        if left > 0:
            self._unpopulated.appendleft(stretch._replace(offset=end, num_bytes=left))
        if not self._unpopulated:
            self._close_files()

    def plans(self, routes: Routes) -> dict[str, CopyPlan]:
        """How to copy, by route. Raises HandshakeError where the peer has handed over less than it
        has named."""
        return {
            route: CopyPlan(runs, moved(runs.dst, self.mapped))
            for route, runs in routes._asdict().items()
            if runs is not None and runs.num_runs
        }

    # --- tags -------------------------------------------------------------------------------------

    def tell(self, tag: bytes) -> None:
        """Send a tag, now or once the peer reads again. Raises PeerLostError, and TransferError
        where the peer has not read for so long that no more can be kept for it."""
        if len(self._unsent) >= _MAX_UNSENT_TAGS:
            raise TransferError(f"{self._peer.name} does not read its notifications")
        self._unsent.append(tag)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                some = min(len(self._unsent), TAGS_A_PACKET)
                self.socket.send(b"".join(self._first(some)))
                for _ in range(some):
                    self._unsent.popleft()
        except BlockingIOError:
            self._watch(select.EPOLLOUT)
            return
        except OSError as error:
            raise PeerLostError(f"{self._peer.name} is gone: {error}") from None
        self._watch(0)

    def _first(self, count: int) -> Iterable[bytes]:
        return (self._unsent[at] for at in range(count))

    def _watch(self, more: int) -> None:
        # Not for what it says: it has nothing to say any more.
        self._epoll.modify(self.fd, select.EPOLLRDHUP | more)

    def close(self) -> None:
        """The memory is unmapped: plans of it, which do not hold it, are not to be used any
        more."""
        with suppress(OSError):
            self._epoll.unregister(self.fd)
        self.socket.close()
        self._close_files()
        self._maps.clear()
        self.mapped.clear()

    def _close_files(self) -> None:
        close_all(self._files)
        self._files.clear()


class _Stretch(NamedTuple):
    """Bytes of a peer's file from `offset` on; the file begins at `here`."""

    fd: int
    offset: int
    num_bytes: int
    here: int


def _ranges_of(memory: PeerMemory) -> list[tuple[int, int]]:
    """What the peer's Hello names, as far as this rank writes to it: [address, bytes]."""
    ranges = [*memory.layout.regions]
    if memory.staging is not None:
        ranges.append((memory.staging.base, memory.staging.num_bytes))
    if memory.state is not None:
        ranges += memory.state.layout.regions
    return ranges


class Peer:
    """`routes` None: to be connected before its next copy."""

    def __init__(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        self.peer = peer
        self.metadata = metadata
        self.memory = memory
        self.link: Link | None = None
        self.routes: Routes | None = None
        self.plans: dict[str, CopyPlan] = {}
        self.outbox = Outbox()
        self.retry_at = 0.0
        self.removed = False

    def part(self) -> None:
        """Give the connection and the memory back."""
        self.routes = None
        self.plans.clear()
        link, self.link = self.link, None
        if link is not None:
            link.close()
