"""Ranks above decode's rank 0 in processes of their own: a prefill rank with its engine's hands, or
a `DecodeRank`, obeying calls over a pipe. What a worker's ranks tell each other the test carries.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.memory.mesh import Mesh
from prefixkv.protocol.ids import PeerId
from tests.models.node_pair import Tokens
from tests.models.node_process import EVENTS, _context
from tests.models.patience import PATIENCE_S, SkippableClock

_PR_SET_PDEATHSIG = 1


class _PrefillServed:
    """One prefill rank."""

    def __init__(
        self, mesh: Mesh, rank: int, config: PrefillConfig, endpoints: tuple[str, ...]
    ) -> None:
        from prefixkv.cli.rank_kv import make_pools
        from prefixkv.runtime.nodes import PrefillNode
        from prefixkv.testing.hashing import PrefixHasher
        from prefixkv.testing.pattern import KVPattern
        from tests.models.mesh_workers import SALT

        pool = make_pools(mesh, 64, 4, 16, order="layer_major")[rank]
        self.node = PrefillNode(pool, config, mesh, rank, endpoints)
        self.hello = (self.node.peer_id, self.node.endpoint)
        self._reqs: dict[str, Any] = {}
        self._hashes = PrefixHasher().prefixes
        self._fill = KVPattern(pool.layout, SALT, pool, (mesh, rank)).fill

    def add(self, rid: str, tokens: Tokens, room: int) -> None:
        from prefixkv.request import Request

        self.node.add(Request(rid, tokens, room=room))

    def poll(self) -> list[tuple[str, str]]:
        """(what, request) of all that has happened since the last call."""
        ready = self.node.pop_bootstrapped()
        self._reqs |= {req.rid: req for req in ready}
        said = [("ready", req.rid) for req in ready]
        said += [("failed", req.rid) for req in self.node.pop_failed()]
        return said + [("sent", req.rid) for req in self.node.pop_sent()]

    def chunk(self, rid: str, end: int, event: str = "") -> None:
        req = self._reqs[rid]
        last = end == req.num_tokens
        start = min(req.prefix_len, end)
        self._fill(req.pages, start, self._hashes(req.tokens)[:end])
        self.node.send_chunk(req, end, last, b"aux" if last else b"", EVENTS.get(event))

    def abort(self, rid: str) -> bool:
        return self.node.abort(rid)

    def rooms(self) -> int:
        return self.node.num_rooms


class _DecodeServed:
    """A decode rank above 0."""

    def __init__(self, mesh: Mesh, rank: int, config: DecodeConfig, worker: PeerId) -> None:
        from prefixkv.cli.rank_kv import make_pools
        from prefixkv.runtime.decode_rank import DecodeRank
        from prefixkv.testing.hashing import PrefixHasher
        from prefixkv.testing.pattern import KVPattern
        from tests.models.mesh_workers import SALT

        pool = make_pools(mesh, 64, 4, 16, order="page_major")[rank]
        self.node = DecodeRank(pool, config, mesh, rank, worker)
        self.hello = (self.node.peer_id, "")
        self._hashes = PrefixHasher().prefixes
        self._check = KVPattern(pool.layout, SALT, pool, (mesh, rank))

    def apply(self, raw: bytes) -> None:
        self.node.apply(raw)

    def news(self) -> bytes:
        return self.node.take_news()

    def mismatches(self, row: int, tokens: Tokens) -> int:
        return self._check.mismatches(self.node.pages(row), self._hashes(tokens))

    def rooms(self) -> int:
        self.node.audit()
        return self.node.num_rooms


def _serve(pipe: Any, parent: int, kind: str, args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    clock = SkippableClock()
    clock.install()
    served: Any = {"prefill": _PrefillServed, "decode": _DecodeServed}[kind](*args)
    pipe.send(served.hello)
    while True:
        name, args = pipe.recv()
        try:
            if name == "skip":
                answer = ("ok", clock.skip(*args, [served.node]))  # type: ignore[func-returns-value]
            else:
                answer = ("ok", getattr(served, name)(*args))
        except Exception as error:
            answer = ("error", repr(error))
        pipe.send(answer)


class RankProcess:
    """The test's end."""

    def __init__(self, kind: str, *args: Any) -> None:
        from multiprocessing.forkserver import _forkserver

        self._pipe, theirs = _context.Pipe()
        _forkserver.ensure_running()
        self.process = _context.Process(
            target=_serve, args=(theirs, _forkserver._forkserver_pid, kind, args), daemon=True
        )
        self.process.start()
        theirs.close()
        self.peer_id, self.endpoint = self._receive()

    def call(self, name: str, *args: Any) -> Any:
        """What the child answers; None where it has died."""
        try:
            self._pipe.send((name, args))
            kind, value = self._receive()
        except (EOFError, OSError):
            self.process.join(PATIENCE_S)
            assert not self.process.is_alive()
            return None
        assert kind == "ok", value
        return value

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive()
        self._pipe.close()

    def _receive(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the child does not answer"
        return self._pipe.recv()


@contextmanager
def rank_processes() -> Iterator[Any]:
    """Yields a starter of processes; all have ended when the block is left."""
    started: list[RankProcess] = []

    def start(kind: str, *args: Any) -> RankProcess:
        started.append(RankProcess(kind, *args))
        return started[-1]

    try:
        yield start
    finally:
        for child in started:
            child.end()
