"""A peer as the writing side of the shm transport knows it: the connection, and its memory, mapped
here. Owned by the transport's thread.

The memory is a peer's file: it is checked before it is mapped (`wire.take`), and a hole in it is
refused, since touching one would allocate memory on our side's account.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import time
from bisect import bisect_right
from collections import deque
from contextlib import suppress
from itertools import accumulate, islice, takewhile
from typing import Final, NamedTuple

from prefixkv.errors import HandshakeError, PeerLostError, TransferError
from prefixkv.memory.kv_pool import SharedBlock
from prefixkv.protocol.ids import PeerId
from prefixkv.threads import undoing
from prefixkv.transport.base import PeerMemory
from prefixkv.transport.loop import LoopPeer
from prefixkv.transport.runs import Routes
from prefixkv.transport.shm.copy import CopyPlan, Mapped, moved
from prefixkv.transport.shm.wire import (
    MAGIC,
    MAX_OTHER_RANGES,
    MAX_PACKET_BYTES,
    close_all,
    connect,
    read_offer,
    take,
)

GREETING_S: Final = 10.0  # seconds in which a peer's thread has to answer
_POPULATED_BYTES: Final = 32 << 20  # per turn: 10 ms where memory is there
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MAX_UNSENT_TAGS: Final = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ShmLink:
    """One connection to a peer's door, from the greeting on."""

    def __init__(self, peer: PeerId, offer: bytes, memory: PeerMemory, epoll: select.epoll) -> None:
        """Connect and say the token. Raises HandshakeError or OSError."""
        found = read_offer(offer, peer)
        self._peer = peer
        self._epoll = epoll
        # The most ranges that an honest peer hands over: the Hello names all of them but staging
        # and state that this rank does not write to.
        self._max_ranges = len(memory.layout.regions) + MAX_OTHER_RANGES
        self._maps: list[mmap.mmap] = []  # each keeps its memory mapped
        self.mapped: list[Mapped] = []
        self._files: list[int] = []  # of the maps, until all is populated
        self._unpopulated: deque[_Stretch] = deque()
        self._named = memory.ranges
        # Tags that the socket did not take yet.
        self._unsent: deque[bytes] = deque()
        self.answered = False
        self.until_s = time.monotonic() + GREETING_S
        self.socket = connect(found.door)
        with undoing(self.socket.close):
            self.socket.send(MAGIC + found.token)
            self.fd = self.socket.fileno()
            epoll.register(self.fd, select.EPOLLIN | select.EPOLLRDHUP)

    @property
    def is_whole(self) -> bool:
        """True once the memory is mapped and every page of it is there."""
        return self.answered and not self._unpopulated

    def on_ready(self, events: int) -> None:
        """Take what came: the answer to the greeting, room for more tags, or the end. Raises
        BlockingIOError if nothing came, HandshakeError, or PeerLostError."""
        # 1. Answered already, and the connection is up: room for tags.
        if self.answered and not events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            if events & select.EPOLLOUT:
                self._flush()
            return
        # 2. Answered already: nothing but its end can come.
        if self.answered:
            raise PeerLostError(f"{self._peer.name} has closed, or is dead")
        # 3. The answer: descriptors of the memory, checked. Their owner is this link from here on.
        blocks, ranges = take(self.socket, self._max_ranges)
        # Before anything that may raise: `close` has to find the descriptors.
        self._files = [block.fd for block in blocks]
        blocks.sort()
        shifts = [self._map(block) for block in blocks]
        firsts = [block.address for block in blocks]
        # Writable ranges become addresses of ours; `_check_places` saw that each lies in a block.
        for address, num_bytes in ranges:
            shift = shifts[bisect_right(firsts, address) - 1]
            self.mapped.append(Mapped(address, num_bytes, address + shift))
        # What our jobs will touch is populated, and only that: the rest may be holes.
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
        try:
            memory = mmap.mmap(block.fd, block.num_bytes, mmap.MAP_SHARED)
        except (OSError, ValueError, OverflowError) as error:
            raise HandshakeError("shm block", block.num_bytes, str(error)) from None
        # Not inherited by children, not in core dumps, large pages if possible.
        for advice in ("MADV_DONTFORK", "MADV_DONTDUMP", "MADV_HUGEPAGE"):
            with suppress(OSError, AttributeError):  # what the kernel has of them
                memory.madvise(getattr(mmap, advice))
        here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps.append(memory)
        return here - block.address

    def populate(self) -> None:
        """Bring one stretch of pages into this process's page table, so that no copy waits for it.

        Only pages that the Hello names, and that the peer has itself. Raises HandshakeError if
        memory cannot be had, or has a hole, which would become memory of ours.
        """
        # 1. The next stretch, in whole pages, bounded per turn.
        stretch = self._unpopulated.popleft()
        first = stretch.offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(stretch.offset + stretch.num_bytes, first + _POPULATED_BYTES)
        # 2. A hole would be filled by us: memory that the peer never had would count as ours.
        hole = os.lseek(stretch.fd, first, os.SEEK_HOLE)
        if hole < end:
            raise HandshakeError("shm pages", end - first, hole - first, "are there, then a hole")
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc.madvise(stretch.here + first, end - first, _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            # A kernel older than the flag: pages come in as they are touched.
            if number == errno.EINVAL:
                self._unpopulated.clear()
                self._close_files()
                return
            # 3. Interrupted, or no memory at the moment: the same stretch again.
            if number != errno.EINTR and number != errno.EAGAIN:
                what = errno.errorcode.get(number, number)
                raise HandshakeError("shm pages", stretch.num_bytes, what)
            end = first
        # 4. The rest of the stretch goes to the front. The files are needed until nothing is left.
        left = stretch.offset + stretch.num_bytes - end
        if left > 0:
            self._unpopulated.appendleft(stretch._replace(offset=end, num_bytes=left))
        if not self._unpopulated:
            self._close_files()

    def plans(self, routes: Routes) -> dict[str, CopyPlan]:
        """Return the plans of all copies, by route. Raises HandshakeError if less was handed over
        than named."""
        return {
            route: CopyPlan(runs, moved(runs.dst, self.mapped))
            for route, runs in routes.items()
            if runs.num_runs
        }

    # --- tags -------------------------------------------------------------------------------------

    def tell(self, tag: bytes) -> None:
        """Send a tag, now or once the peer reads again. Raises PeerLostError if the connection is
        gone, TransferError if it has not read for so long that no more tags are kept."""
        if len(self._unsent) >= _MAX_UNSENT_TAGS:
            raise TransferError(f"{self._peer.name} does not read its notifications")
        self._unsent.append(tag)
        # Others wait before it: tags go in order, and the socket is full.
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                # Removed only after the send, so that none is lost where the socket is full.
                ends = accumulate(map(len, self._unsent))
                some = sum(1 for _ in takewhile(MAX_PACKET_BYTES.__ge__, ends))
                self.socket.send(b"".join(islice(self._unsent, some)))
                for _ in range(some):
                    self._unsent.popleft()
        except BlockingIOError:
            self._watch(select.EPOLLOUT)
            return
        except OSError as error:
            raise PeerLostError(f"{self._peer.name} is gone: {error}") from None
        self._watch(0)

    def _watch(self, more: int) -> None:
        # Not for input: the peer has nothing to say any more.
        self._epoll.modify(self.fd, select.EPOLLRDHUP | more)

    def close(self) -> None:
        """Close the connection and unmap the memory. Plans hold addresses, not the maps: do not use
        them any more."""
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
    """Bytes of a peer's file from `offset` on; the file is mapped at `here`."""

    fd: int
    offset: int
    num_bytes: int
    here: int


class ShmPeer(LoopPeer):
    """A peer with the connection to its door and the plans of copies."""

    def __init__(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        super().__init__(peer, metadata, memory)
        self.link: ShmLink | None = None
        self.plans: dict[str, CopyPlan] = {}
        self.was_reached = False

    def disconnect(self) -> None:
        """Close the connection and give the memory back."""
        # The plans go first: they hold addresses of what is unmapped below.
        self.routes = None
        self.plans.clear()
        link, self.link = self.link, None
        if link is not None:
            link.close()
