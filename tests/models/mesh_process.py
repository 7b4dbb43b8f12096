"""Ranks above decode's rank 0 in processes of their own: a prefill rank with its engine's hands, or
a `DecodeRank`, obeying calls over a pipe. What a worker's ranks tell each other the test carries.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.memory.mesh import Mesh
from prefixkv.protocol.ids import PeerId
from tests.models.devices import DEVICE
from tests.models.node_pair import Tokens
from tests.models.node_process import EVENTS
from tests.models.patience import PATIENCE_S, SkippableClock
from tests.models.processes import Child, children, obey


class _Calls:
    """In the child: a rank, and what the test may call on it."""

    node: Any

    def __init__(self) -> None:
        self._clock = SkippableClock()
        self._clock.install()

    def skip(self, seconds: float) -> None:
        self._clock.skip(seconds, [self.node])


class _PrefillRank(_Calls):
    """A prefill rank, and its engine's hands."""

    def __init__(self, mesh: Mesh, rank: int, device: str) -> None:
        from prefixkv.testing.hashing import PrefixHasher
        from prefixkv.testing.pattern import make_pools, pattern_in
        from tests.models.mesh_workers import SALT

        super().__init__()
        self.pool = make_pools(mesh, 64, 4, 16, order="layer_major", device=device)[rank]
        self._hashes = PrefixHasher().prefixes
        self._fill = pattern_in(self.pool, SALT, (mesh, rank)).fill

    def compute(self, req: Any, tokens: Tokens, end: int) -> None:
        self._fill(req.pages, min(req.prefix_len, end), self._hashes(tokens)[:end])

    def rooms(self) -> int:
        return self.node.num_rooms


class PrefillCalls(_PrefillRank):
    """Prefill's rank 0."""

    def __init__(
        self, mesh: Mesh, config: PrefillConfig, endpoints: tuple[str, ...], device: str = DEVICE
    ) -> None:
        from prefixkv.ranks.row_log import RankLog
        from prefixkv.runtime.prefill_node import PrefillNode

        super().__init__(mesh, 0, device)
        self.node = PrefillNode(self.pool, config, mesh, endpoints, ranks=RankLog())
        self.hello = (self.node.peer_id, self.node.endpoint)
        self._requests: dict[str, Any] = {}

    def add(self, rid: str, tokens: Tokens, room: int) -> None:
        from prefixkv.request import Request

        self.node.add(Request(rid, tokens, room=room, decode="decode-0"))

    def hear(self, said: bytes) -> None:
        self.node.apply_rank_events(said)

    def poll(self) -> tuple[list[tuple[str, str]], bytes]:
        """(what, request) of all that has happened since the last call, and the log."""
        ready = self.node.pop_bootstrapped()
        self._requests |= {req.rid: req for req in ready}
        news = [("ready", req.rid) for req in ready]
        news += [("failed", req.rid) for req in self.node.pop_failed()]
        news += [("sent", req.rid) for req in self.node.pop_sent()]
        return news, self.node.take_log()

    def chunk(self, rid: str, end: int) -> bytes:
        """Returns the log."""
        req = self._requests[rid]
        last = end == req.num_tokens
        self.compute(req, req.tokens, end)
        self.node.send_chunk(req, end, last, b"aux" if last else b"")
        return self.node.take_log()


class FollowingPrefillCalls(_PrefillRank):
    """A prefill rank above 0."""

    def __init__(self, mesh: Mesh, rank: int, config: PrefillConfig, device: str = DEVICE) -> None:
        from prefixkv.runtime.prefill_rank import PrefillRank

        super().__init__(mesh, rank, device)
        self.node = PrefillRank(self.pool, config, mesh, rank)
        self.hello = (self.node.peer_id, self.node.endpoint)

    def apply(self, raw: bytes, event: str = "") -> bytes:
        self.node.apply(raw, EVENTS.get(event))
        return self.node.take_rank_events()

    def fill(self, rid: str, tokens: Tokens, end: int) -> None:
        self.compute(self.node.request(rid), tokens, end)


class DecodeCalls(_Calls):
    """A decode rank above 0."""

    def __init__(
        self, mesh: Mesh, rank: int, config: DecodeConfig, worker: PeerId, device: str = DEVICE
    ) -> None:
        from prefixkv.runtime.decode_rank import DecodeRank
        from prefixkv.testing.hashing import PrefixHasher
        from prefixkv.testing.pattern import make_pools, pattern_in
        from tests.models.mesh_workers import SALT

        super().__init__()
        pool = make_pools(mesh, 64, 4, 16, order="page_major", device=device)[rank]
        self.node = DecodeRank(pool, config, mesh, rank, worker)
        self.hello = (self.node.peer_id, "")
        self._hashes = PrefixHasher().prefixes
        self._check = pattern_in(pool, SALT, (mesh, rank))

    def apply(self, raw: bytes) -> None:
        self.node.apply(raw)

    def news(self) -> bytes:
        return self.node.take_rank_events()

    def mismatches(self, row: int, tokens: Tokens) -> int:
        return self._check.mismatches(self.node.pages(row), self._hashes(tokens))

    def rooms(self) -> int:
        return self.node.num_rooms


def _serve(pipe: Any, kind: str, *args: Any) -> None:
    kinds = {"prefill": PrefillCalls, "follows": FollowingPrefillCalls, "decode": DecodeCalls}
    calls: Any = kinds[kind](*args)
    pipe.send(calls.hello)
    obey(pipe, calls)


class RankProcess(Child):
    """The test's end."""

    def __init__(self, kind: str, *args: Any) -> None:
        super().__init__(_serve, kind, *args)
        self.peer_id, self.endpoint = self.hello

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """What the child answers; None where it has died."""
        try:
            return super().call(name, *args, **options)
        except (EOFError, OSError):
            self.process.join(PATIENCE_S)
            assert not self.process.is_alive()
            return None


def rank_processes() -> AbstractContextManager[Any]:
    """Yields a starter of processes, `start(kind, *args)`."""
    return children(RankProcess)
