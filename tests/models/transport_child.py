"""A target in a process of its own, obeying one command at a time over a pipe.

The processes are forked from a server that has nixl imported but no agent, which saves two seconds
each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.protocol.ids import PeerId
from tests.models.patience import PATIENCE_S
from tests.models.transport_pools import Shape, make_pool

# 1 MiB a page: large enough to be caught in the middle of a write
BIG = Shape(num_layers=4, page_size=16, num_kv_heads=8, head_dim=1024)


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["prefixkv.transport.nixl", "tests.models.transport_pools"])


def serve(pipe: Any, me: PeerId, num_pages: int, shape: Shape, env: dict[str, str]) -> None:
    from prefixkv.transport.nixl import NixlTransport

    os.environ.update(env)
    pool = make_pool("page_major", num_pages, shape)
    transport = NixlTransport(me, pool.layout, lambda event: None)
    transport.expect(1)
    pipe.send((transport.metadata, pool.layout))
    while (command := pipe.recv()) is not None:
        if command == "pages":
            pipe.send(pool.pages())
        elif command == "cut":
            pipe.send(cut_connections(pipe.fileno()))
    transport.close()


def cut_connections(spared: int) -> int:
    """Shut down every TCP connection of this process, as a broken network does. Returns how
    many."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            if fd == spared or not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family == socket.AF_INET:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


class Child:
    """What the test has of the process. `stop`, `resume` and `kill` send it signals."""

    def __init__(self, me: PeerId, num_pages: int = 4, shape: Shape = BIG) -> None:
        self.me = me
        self._pipe, theirs = _context.Pipe()
        env = {"UCX_TLS": os.environ["UCX_TLS"]} if "UCX_TLS" in os.environ else {}
        self.process = _context.Process(
            target=serve, args=(theirs, me, num_pages, shape, env), daemon=True
        )
        self.process.start()
        theirs.close()
        self.metadata: bytes
        self.layout: KVLayout
        self.metadata, self.layout = self._receive()

    def pages(self) -> list[bytes]:
        self._pipe.send("pages")
        pages: list[bytes] = self._receive()
        return pages

    def cut_connections(self) -> int:
        self._pipe.send("cut")
        return int(self._receive())

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        for thread in os.listdir(f"/proc/{self._pid}/task"):  # each stops by itself, a moment later
            while _state(self._pid, thread) != "T":
                time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)

    def end(self) -> None:
        """Ask it to close, and see that it does; a process that cannot is killed."""
        if self.process.is_alive():
            self.resume()
            self._pipe.send(None)
            self.process.join(PATIENCE_S)
            self.process.kill()
            self.process.join(PATIENCE_S)
        self._pipe.close()

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the child does not answer"
        return self._pipe.recv()


@contextmanager
def children(*names: PeerId, num_pages: int = 4, shape: Shape = BIG) -> Iterator[list[Child]]:
    started: list[Child] = []
    try:
        for name in names:
            started.append(Child(name, num_pages, shape))
        yield started
    finally:
        for child in started:
            child.end()


def _state(pid: int, thread: str) -> str:
    with open(f"/proc/{pid}/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
