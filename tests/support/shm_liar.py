"""A door of a test's own, behind which the memory is what the test says; and what shm transports
leave open in this process."""

import array
import gc
import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import SharedBlock, block_of
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import PeerMemory
from prefixkv.transport.shm.wire import MAGIC, TOKEN_BYTES, ShmOffer, listen, pack_offer
from tests.support.patience import PATIENCE_S
from tests.support.transport_driver import Node
from tests.support.transport_pools import make_pool, shared_zeros

_doors = itertools.count()


def num_mapped() -> int:
    """How many blocks that are shared this process has mapped, its own and those of peers."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:prefixkv-pool" in line for line in lines)


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@dataclass
class Liar:
    """Its offer is true."""

    me: PeerId
    layout: KVLayout
    block: SharedBlock
    listener: socket.socket
    offer: ShmOffer

    def accept(self) -> socket.socket:
        """The next writer, which has said the token."""
        self.listener.setblocking(True)
        self.listener.settimeout(PATIENCE_S)
        link, _ = self.listener.accept()
        link.settimeout(PATIENCE_S)
        assert link.recv(100) == MAGIC + self.offer.token
        return link

    def answer(self, blocks: Any, ranges: Any, fds: list[int]) -> socket.socket:
        link = self.accept()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())
        link.sendmsg([MAGIC + msgspec.msgpack.encode((blocks, ranges))], [rights] if fds else [])
        return link

    def greeted_by(self, writer: Node) -> Node:
        writer.transport.add_peer(self.me, pack_offer(self.offer), PeerMemory(self.layout))
        return writer

    def answer_truly(self) -> socket.socket:
        return self.answer([self.block[:2]], [*self.layout.regions], [self.block.fd])


@contextmanager
def a_liar() -> Iterator[Liar]:
    pool = make_pool("page_major", 6, zeros=shared_zeros)
    block = block_of(*pool.layout.regions[0])
    assert block is not None
    door = f"liar-{os.getpid()}-{next(_doors)}"
    offer = ShmOffer("liar", 7, door, bytes(TOKEN_BYTES))
    with listen(door) as listener:
        yield Liar(PeerId("liar", 7), pool.layout, block, listener, offer)
