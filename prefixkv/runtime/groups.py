"""All ranks of a worker in one process, behind the calls of one node: for engines with ranks in
threads, and to try meshes on one machine.

Where ranks are processes, the engine itself carries the same bytes (ranks/row_log.py).
"""

from __future__ import annotations

import math
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, TypeAlias, TypeVar

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.control.lives import LostPeers, merged_lost_peers
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import CallerError, ConfigError, check_laws, shown
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.requests import Command, Req
from prefixkv.paging import Pages
from prefixkv.prefill.request import PrefillRequest
from prefixkv.protocol.commands import DecodeCommand, PrefillCommand
from prefixkv.protocol.events import DecodeEvent, PrefillEvent
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import DeviceEvent
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.following_rank import DecodeRank, FollowingRank, PrefillRank
from prefixkv.runtime.node import E, Node
from prefixkv.runtime.prefill_node import PrefillNode
from prefixkv.settings import check_kind
from prefixkv.wakeups import wait_readable

T = TypeVar("T")
_Shares: TypeAlias = list[tuple[KVPool, StatePool | None]]  # by rank
_Others: TypeAlias = Sequence[FollowingRank]


def _of_ranks(kind: str, given: Sequence[T], mesh: Mesh) -> Sequence[T]:
    if not isinstance(given, tuple | list):
        raise ConfigError(f"{kind} is a {type(given).__name__}, a list is needed")
    if len(given) != mesh.num_ranks:
        raise ConfigError(f"{len(given)} {kind} are given for {mesh.num_ranks} ranks")
    return given


class _Group(Node[Req, Command, E]):
    """Rank 0, and the calls that are alike on both sides."""

    kind: ClassVar[type[DecodeConfig | PrefillConfig]]  # of its config
    # Makes this object rank 0, and returns the others; the stack closes what has begun.
    _begin: Callable[[ExitStack, _Shares, Any, Mesh], _Others]
    others: _Others = ()  # none before all ranks are there
    _readiness: select.epoll  # readable while any rank's descriptor is
    _chunk_ready: DeviceEvent | None = None  # of the chunk that is handed over now

    def __init__(
        self,
        pools: Sequence[KVPool],
        config: DecodeConfig | PrefillConfig,
        mesh: Mesh,
        states: Sequence[StatePool | None] = (),
    ) -> None:
        check_kind("config", config, self.kind)
        check_kind("mesh", mesh, Mesh)
        pools = _of_ranks("pools", pools, mesh)
        if isinstance(states, list | tuple) and not states:
            states = [None] * mesh.num_ranks
        states = _of_ranks("states", states, mesh)
        # If one rank fails, all are closed.
        with ExitStack() as undo:
            self._readiness = undo.enter_context(select.epoll())
            self.others = self._begin(undo, list(zip(pools, states, strict=True)), config, mesh)
            self._hand_log()  # refused if ranks differ in sizes
            for transfers in (self.transfers, *(other.transfers for other in self.others)):
                self._readiness.register(transfers.fileno(), select.EPOLLIN)
            undo.pop_all()

    def _pump(self) -> float:
        now_s = super()._pump()
        for other in self.others:
            self.leader.on_rank_events(other.take_rank_events(), now_s)
        self._tell()
        return now_s

    def _tell(self) -> None:
        super()._tell()
        if self.others and self._log.has_news(self.pages):
            self._hand_log()

    def _hand_log(self) -> None:
        if self.others:
            raw = self.take_log()
            for other in self.others:
                other.apply(raw, self._chunk_ready)

    def _sleep(self, timeout_s: float | None) -> bool:
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # `wait_readable` may return early, for a signal.
        while not wait_readable(self._readiness.fileno(), left_s := until_s - time.monotonic()):
            if not left_s > 0:
                return False
        return True

    def fileno(self) -> int:
        """As `Node.fileno`, for any rank."""
        return self._readiness.fileno() if self.others else super().fileno()

    def audit(self) -> None:
        """Check the laws, and that every rank has rank 0's rows. Raises InternalError."""
        super().audit()
        self._hand_log()
        for other in self.others:
            is_like = other.is_like(self.pages, self._logged)
            check_laws({"each rank has the rows and requests of rank 0": is_like}, other.peer_id)

    def close(self) -> None:
        """Close every rank, rank 0 first: its scheduler tells the others nothing after that. An
        InternalError comes once all are closed; others are its context."""
        # Callbacks run in reverse: readiness, rank 0, then the others. All run even if one raises.
        with ExitStack() as closing:
            for other in self.others:
                closing.callback(other.close)
            closing.callback(super().close)
            closing.callback(self._readiness.close)


class DecodeGroup(_Group[DecodeRequest, DecodeCommand, DecodeEvent], DecodeNode):
    """Rank 0 with the other ranks at hand: each call takes their events, and hands them the log.

    `pools`: by rank; each holds its rank's share, all have as many pages. `states`: by rank, where
    requests have extra state; all have as many slots. Raises ConfigError: the ranks differ in
    pages, page size or slots, or are not as many as the mesh has.
    """

    kind = DecodeConfig

    def _begin(self, undo: ExitStack, shares: _Shares, config: Any, mesh: Mesh) -> _Others:
        # Rank 0 first: others name it as their worker.
        (pool, state), *rest = shares
        DecodeNode.__init__(self, pool, config, RankLog() if rest else None, mesh, state)
        undo.callback(super().close)
        return [
            undo.enter_context(DecodeRank(its, config, mesh, rank, self.peer_id, of_it))
            for rank, (its, of_it) in enumerate(rest, 1)
        ]

    def pages_of(self, req: DecodeRequest) -> list[Pages]:
        """Return the request's page ids as each rank knows them; none if it holds none. Raises
        RequestError for another's request."""
        self.check_own(req)
        self._hand_log()
        if req.pages_held is None:
            return [req.pages] * (1 + len(self.others))
        return [req.pages, *(other.pages(req.row) for other in self.others)]

    def fence_rank(self, rank: int, after: DeviceEvent | None = None) -> None:
        """Raise CallerError: the ranks are of this process, and live as it does."""
        raise CallerError(f"rank {shown(rank)} of a group is of this process, which lives")

    def lost_peers(self) -> LostPeers:
        """As `DecodeNode.lost_peers`, of all ranks."""
        return merged_lost_peers(
            [super().lost_peers(), *(rank.lost_peers() for rank in self.others)]
        )


class PrefillGroup(_Group[PrefillRequest, PrefillCommand, PrefillEvent], PrefillNode):
    """Rank 0 with the other ranks at hand: each call takes their events in and hands them the log.

    Args:
        pools: by rank; each holds its rank's share, all have as many pages.
        states: by rank, where requests have extra state; all have as many slots.

    Raises ConfigError: the ranks differ in pages, page size or slots, or number.
    """

    kind = PrefillConfig

    def _begin(self, undo: ExitStack, shares: _Shares, config: Any, mesh: Mesh) -> _Others:
        # Rank 0 last: it says where the others are.
        (pool, state), *rest = shares
        others = [
            undo.enter_context(PrefillRank(its, config, mesh, rank, of_it))
            for rank, (its, of_it) in enumerate(rest, 1)
        ]
        log = RankLog([other.endpoint for other in others]) if others else None
        PrefillNode.__init__(self, pool, config, mesh, state, ranks=log)
        undo.callback(super().close)
        return others

    def send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: DeviceEvent | None = None, state_slot: int = -1,
    ) -> int:  # fmt: skip
        """Send a chunk on every rank; return the sum of the pages. See `PrefillNode.send_chunk`."""
        self._chunk_ready = ready
        try:
            return super().send_chunk(req, end, last, aux, ready, state_slot) * self.num_ranks
        finally:
            self._chunk_ready = None

    def stats(self) -> dict[str, int]:
        """Return the counters, summed over the ranks; those of requests and pages are rank 0's."""
        stats = Counter(super().stats())
        for other in self.others:
            stats.update(other.stats())
        return dict(stats)
