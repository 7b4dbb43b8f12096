"""A target of writes in a process of its own, obeying one call at a time over a pipe."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from prefixkv.protocol.ids import PeerId
from prefixkv.transport.base import Arrived, PeerMemory, RankMemory
from tests.support import processes
from tests.support.patience import PATIENCE_S, until
from tests.support.transport_driver import Node
from tests.support.transport_pools import Shape, make_pool, shared_zeros

# 1 MiB a page: large enough to be caught in the middle of a write
BIG = Shape(num_layers=4, page_size=16, num_kv_heads=8, head_dim=1024)


class TransportCalls:
    """In the child: what the test may call."""

    def __init__(self, pipe: Any, pool: Any, arrived: list[bytes]) -> None:
        self._pipe, self._pool, self._arrived = pipe, pool, arrived
        self.closed = False

    def pages(self) -> list[bytes]:
        pages: list[bytes] = self._pool.pages()
        return pages

    def tags(self) -> list[bytes]:
        return self._arrived

    def cut_connections(self) -> int:
        return cut_connections(self._pipe.fileno())

    def narrow(self) -> list[tuple[str, int]]:
        """Let a connection wait alone until it is accepted. Return where this process listens."""
        addresses = []
        for listening in own_sockets(self._pipe.fileno()):
            if listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.listen(0)
                addresses.append(listening.getsockname())
        return addresses

    def close(self) -> None:
        self.closed = True


def _transport(pool: Any, me: PeerId, arrived: list[bytes], shm: bool) -> Any:
    def sink(event: Any) -> None:
        if isinstance(event, Arrived):
            arrived.append(event.tag)

    if shm:
        from prefixkv.transport.shm.loop import ShmTransport

        return ShmTransport(me, RankMemory(pool.layout), sink)
    from prefixkv.transport.nixl.loop import NixlTransport

    return NixlTransport(me, RankMemory(pool.layout), sink)


def serve(pipe: Any, me: PeerId, num_pages: int, shape: Shape, shm: bool) -> None:
    zeros = shared_zeros if shm else np.zeros
    pool = make_pool("page_major", num_pages, shape, zeros=zeros)
    arrived: list[bytes] = []
    transport = _transport(pool, me, arrived, shm)
    transport.expect(1)
    pipe.send((transport.metadata, pool.layout))
    processes.obey(pipe, TransportCalls(pipe, pool, arrived))
    transport.close()


def own_sockets(spared: int) -> Iterator[socket.socket]:
    """The IPv4 sockets of this process, each until the next is asked for."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            if fd == spared or not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as own:
                if own.family == socket.AF_INET:
                    yield own


def cut_connections(spared: int) -> int:
    """Shut down every TCP connection of this process, as a broken network does. Returns how
    many."""
    cut = 0
    for connection in own_sockets(spared):
        with contextlib.suppress(OSError):
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
            cut += 1
    return cut


class Child(processes.Child):
    """The test's end."""

    def __init__(
        self, me: PeerId, num_pages: int = 4, shape: Shape = BIG, shm: bool = False
    ) -> None:
        super().__init__(serve, me, num_pages, shape, shm)
        self.me = me
        self.metadata, self.layout = self.hello

    def pages(self) -> list[bytes]:
        pages: list[bytes] = self.call("pages")
        return pages

    def tags(self) -> list[bytes]:
        tags: list[bytes] = self.call("tags")
        return tags

    def cut_connections(self) -> int:
        return int(self.call("cut_connections"))

    def narrow(self) -> list[tuple[str, int]]:
        addresses: list[tuple[str, int]] = self.call("narrow")
        return addresses

    def stop(self) -> None:
        super().stop()
        for thread in os.listdir(f"/proc/{self.pid}/task"):  # each stops by itself, a moment later
            until(lambda thread=thread: processes.state(self.pid, thread) == "T")

    def end(self) -> None:
        """Ask it to close, and see that it does; a process that cannot is killed."""
        if self.process.is_alive():
            self.resume()
            self._pipe.send(("close", (), {}))
            self.process.join(PATIENCE_S)
        super().end()


@contextmanager
def children(
    *names: PeerId, num_pages: int = 4, shape: Shape = BIG, shm: bool = False
) -> Iterator[list[Child]]:
    with processes.children(Child) as start:
        yield [start(name, num_pages, shape, shm) for name in names]


def add_child(writer: Node, child: Child) -> Node:
    writer.transport.add_peer(child.me, child.metadata, PeerMemory(child.layout))
    return Node(child.me, writer.pool, None)
