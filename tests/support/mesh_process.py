"""Ranks above decode's rank 0 in processes of their own: the transfers of a prefill rank, or a
`DecodeRank`, obeying calls over a pipe. What a worker's ranks tell each other the test carries.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.memory.mesh import Mesh
from prefixkv.protocol.ids import PeerId
from tests.support.devices import DEVICE
from tests.support.node_pair import Tokens
from tests.support.node_process import EVENTS
from tests.support.patience import PATIENCE_S, SkippableClock
from tests.support.processes import Child, children, obey


class _Calls:
    """In the child: a rank, and what the test may call on it."""

    node: Any

    def __init__(self) -> None:
        self._clock = SkippableClock()
        self._clock.install()

    def skip(self, seconds: float) -> None:
        self._clock.skip(seconds, [self.node])


class PrefillCalls(_Calls):
    """The transfers of one prefill rank, whose engine has pages enough."""

    def __init__(
        self, mesh: Mesh, rank: int, config: PrefillConfig, endpoints: tuple[str, ...],
        device: str = DEVICE,
    ) -> None:  # fmt: skip
        from prefixkv.conformance.hashing import PrefixHasher
        from prefixkv.runtime.rank_spec import RankSpec
        from prefixkv.transfer import PrefillTransfers
        from tests.support.mesh_workers import SALT
        from tests.support.patterns import make_pools, pattern_in

        super().__init__()
        pool = make_pools(mesh, 64, 4, 16, order="layer_major", device=device)[rank]
        self.node = PrefillTransfers(RankSpec(pool, mesh, rank), config, endpoints)
        self.hello = (self.node.peer_id, self.node.endpoint)
        self._free = list(range(64))
        self._reqs: dict[str, tuple[int, Tokens, list[int]]] = {}  # room, tokens, pages
        self._rids: dict[int, str] = {}
        self._sent: set[str] = set()
        self._hashes = PrefixHasher().prefixes
        self._fill = pattern_in(pool, SALT, (mesh, rank)).fill

    def add(self, rid: str, tokens: Tokens, room: int) -> None:
        from prefixkv.digest import prompt_digest

        pages = [self._free.pop(0) for _ in range(0, len(tokens), 4)]
        self.node.add(room, 0, len(tokens), "decode-0", prompt_digest(tokens))
        self._reqs[rid], self._rids[room] = (room, tokens, pages), rid

    def poll(self) -> list[tuple[str, str]]:
        """(what, request) of all that has happened since the last call."""
        from prefixkv.protocol.events import Bootstrapped, RoomEnded
        from prefixkv.protocol.ids import KVPoll

        said: list[tuple[str, str]] = []
        for event in self.node.take_events():
            rid = self._rids[event.key.room]
            if isinstance(event, Bootstrapped):
                said.append(("ready", rid))
            elif not isinstance(event, RoomEnded):
                self._free += self._reqs.pop(rid)[2]
                if rid in self._sent:
                    said.append(("sent", rid))
            elif event.poll is KVPoll.FAILED:
                said.append(("failed", rid))
            else:
                self._sent.add(rid)
        return said

    def chunk(self, rid: str, end: int, event: str = "") -> None:
        if rid not in self._reqs:
            return
        room, tokens, pages = self._reqs[rid]
        last = end == len(tokens)
        self._fill(pages, 0, self._hashes(tokens)[:end])
        self.node.send_chunk(
            room, end, pages, decode="decode-0", last=last, aux=b"aux" if last else b"",
            ready=EVENTS.get(event),
        )  # fmt: skip

    def rooms(self) -> int:
        return self.node.num_rooms


class DecodeCalls(_Calls):
    """A decode rank above 0."""

    def __init__(
        self, mesh: Mesh, rank: int, config: DecodeConfig, worker: PeerId, device: str = DEVICE
    ) -> None:
        from prefixkv.conformance.hashing import PrefixHasher
        from prefixkv.spi import DecodeRank
        from tests.support.mesh_workers import SALT
        from tests.support.patterns import make_pools, pattern_in

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
    calls: Any = {"prefill": PrefillCalls, "decode": DecodeCalls}[kind](*args)
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
