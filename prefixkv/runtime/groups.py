"""All ranks of a worker in one process, behind the calls of one node: for engines with ranks in
threads, and to try meshes on one machine.

Where ranks are processes, the engine itself carries the same bytes (ranks/row_log.py).
"""

from __future__ import annotations

import math
import select
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.control.death_watch import LostPeers, merged_lost_peers
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import CallerError, ConfigError, RequestError, check_laws, shown
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.paging import Pages
from prefixkv.prefill.bootstrap_queue import UsablePrefix
from prefixkv.prefill.request import PrefillRequest
from prefixkv.ranks.row_log import RankLog, RankRequest
from prefixkv.request import DeviceEvent, check_rid
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.decode_rank import DecodeRank
from prefixkv.runtime.following_rank import FollowingRank
from prefixkv.runtime.node import Node
from prefixkv.runtime.prefill_node import PrefillNode
from prefixkv.runtime.prefill_rank import PrefillRank
from prefixkv.settings import check_kind, check_timeout
from prefixkv.wakeups import wait_readable


def _check_ranks(
    pools: Sequence[KVPool], states: Sequence[StatePool | None], num_ranks: int
) -> list[StatePool | None]:
    """Check that the pools and states of a group's ranks are alike; return the states, one per
    rank.

    Raises:
        ConfigError: the ranks differ in pages, page size or slots: one would refuse what another
            has done.
    """
    for kind, given in (("pools", pools), ("states", states)):
        if not isinstance(given, tuple | list):
            raise ConfigError(f"{kind} is a {type(given).__name__}, a list is needed")
        if len(given) != num_ranks and not (kind == "states" and not given):
            raise ConfigError(f"{len(given)} {kind} are given for {num_ranks} ranks")
    states = list(states) or [None] * num_ranks
    for pool in pools:
        check_kind("a pool", pool, KVPool)
    for state in states:
        if state is not None:
            check_kind("a state", state, StatePool)
    sizes = {(pool.layout.num_pages, pool.layout.page_size) for pool in pools}
    if len(sizes) > 1:
        raise ConfigError(f"the ranks' pools differ in (pages, page_size): {sorted(sizes)}")
    slots = {0 if state is None else state.num_slots for state in states}
    if len(slots) > 1:
        raise ConfigError(f"the ranks' states differ in slots: {sorted(slots)}")
    return states


class _Readiness:
    """One descriptor for a group, readable while that of any of its ranks is."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def watch(self, fds: Sequence[int]) -> None:
        """Watch the descriptors of a group's ranks too."""
        for fd in fds:
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def fd(self) -> int:
        """Descriptor to poll for all ranks of a group."""
        return self._epoll.fileno()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until a rank of the group has its descriptor readable, at most `timeout_s`; return
        whether one has."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # `wait_readable` may return early, for a signal.
        while not wait_readable(self.fd, left_s := until_s - time.monotonic()):
            if not left_s > 0:
                return False
        return True

    def close(self) -> None:
        """Close the group's descriptor; those of its ranks, which are watched, stay open."""
        self._epoll.close()


class _Group(Node[Any, Any, Any]):
    """Rank 0 of a mesh with the other ranks at hand: each call takes their events in and hands them
    the log."""

    others: Sequence[FollowingRank] = ()  # none before all are there
    _readiness: _Readiness
    _log: RankLog

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the group."""
        return 1 + len(self.others)

    def _watch(self) -> None:
        self._readiness.watch([self.transfers.fileno(), *(one.fileno() for one in self.others)])

    @abstractmethod
    def _join_events(self, raw: bytes, now_s: float) -> None:
        """Join the events of another rank with rank 0's."""

    def _pump(self) -> float:
        now_s = super()._pump()
        for other in self.others:
            self._join_events(other.take_rank_events(), now_s)
        if self.others:
            self._tell()
        return now_s

    def _tell(self) -> None:
        super()._tell()
        if self.others and self._log.has_news(self.scheduler.pages):
            self._hand_log()

    def _hand_log(self) -> None:
        """Apply rank 0's log on all other ranks."""
        if self.others:
            raw = self._log.take(self.scheduler.pages, self._known())
            for other in self.others:
                self._apply(other, raw)

    def _apply(self, other: Any, raw: bytes) -> None:
        other.apply(raw)

    def fence_rank(self, rank: int, after: DeviceEvent | None = None) -> None:
        """Raise CallerError: the ranks of a group are of this process, and live as it does."""
        raise CallerError(f"rank {shown(rank)} of a group is of this process, which lives")

    def lost_peers(self) -> LostPeers:
        """Return the lost peers of all ranks of the group, merged; see `Node.lost_peers`."""
        of_others = (rank.lost_peers() for rank in self.others)
        return merged_lost_peers([self.transfers.lost_peers(), *of_others])

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for events of any rank of the group; see `Node.wait`."""
        check_timeout(timeout_s)
        self._check_open()
        return self.scheduler.has_results or self._wait(self._readiness.wait, timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable for any rank of the group. See `Node.fileno`."""
        return self._readiness.fd if self.others else super().fileno()

    def _known(self) -> Iterable[Any]:
        """Return the requests that the other ranks know."""
        return ()

    def audit(self) -> None:
        """Check the laws of the group, and that every rank has rank 0's rows. Raises
        InternalError."""
        super().audit()
        self._hand_log()
        for other in self.others:
            is_like = other.follower.is_like(self.scheduler.pages, self._known())
            check_laws({"each rank has the rows of rank 0": is_like}, other.peer_id)

    def close(self) -> None:
        """Close every rank of the group, rank 0 first: its scheduler tells the others nothing after
        that. An InternalError comes once all are closed; others are its context."""
        # Callbacks run in reverse: readiness, rank 0, then the others. All run even if one raises.
        with ExitStack() as closing:
            for other in self.others:
                closing.callback(other.close)
            closing.callback(super().close)
            closing.callback(self._readiness.close)


class DecodeGroup(_Group, DecodeNode):
    """All ranks of a decode worker.

    Args:
        pools: by rank; each holds its rank's share, all have as many pages.
        states: by rank, where requests have extra state; all have as many slots.

    Raises:
        ConfigError: the ranks differ in pages, page size or slots, or are not as many as the mesh
            has.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        config: DecodeConfig,
        mesh: Mesh,
        states: Sequence[StatePool | None] = (),
    ) -> None:
        check_kind("config", config, DecodeConfig)
        check_kind("mesh", mesh, Mesh)
        states = _check_ranks(pools, states, mesh.num_ranks)
        self._readiness, self._log = _Readiness(), RankLog()
        ranks = self._log if mesh.num_ranks > 1 else None
        DecodeNode.__init__(self, pools[0], config, ranks, mesh, states[0])
        others: list[DecodeRank] = []
        # Rank 0 exists: others name it as their worker. If one fails, all are closed.
        try:
            for rank, pool in enumerate(pools[1:], start=1):
                others.append(DecodeRank(pool, config, mesh, rank, self.peer_id, states[rank]))
        except BaseException:
            self.others = others
            self.close()
            raise
        self.others = others
        self._watch()

    def _join_events(self, raw: bytes, now_s: float) -> None:
        self._leader.on_rank_events(raw, now_s)

    def pages_of(self, req: DecodeRequest) -> list[Pages]:
        """Return the request's page ids as each rank of the decode group knows them; none on any
        rank, if it holds none. Raises RequestError for a request that is not the group's."""
        self.scheduler.check_own(req)
        self._hand_log()
        if req.pages_held is None:
            return [req.pages] * self.num_ranks
        return [req.pages, *(other.follower.pages(req.row) for other in self.others)]


class PrefillGroup(_Group, PrefillNode):
    """All ranks of a prefill worker. `pools` and `states` are as for DecodeGroup, `usable_prefix`
    as for PrefillNode."""

    _chunk_ready: DeviceEvent | None = None  # of the chunk that is handed over now

    def __init__(
        self,
        pools: Sequence[KVPool],
        config: PrefillConfig,
        mesh: Mesh,
        states: Sequence[StatePool | None] = (),
        usable_prefix: UsablePrefix | None = None,
    ) -> None:
        check_kind("config", config, PrefillConfig)
        check_kind("mesh", mesh, Mesh)
        states = _check_ranks(pools, states, mesh.num_ranks)
        self._readiness, self._log = _Readiness(), RankLog()
        with ExitStack() as undo:
            undo.callback(self._readiness.close)
            others: list[PrefillRank] = []
            # Rank 0 last: it says where the others are.
            for rank, pool in enumerate(pools[1:], start=1):
                others.append(PrefillRank(pool, config, mesh, rank, states[rank]))
                undo.callback(others[-1].close)
            endpoints = [other.endpoint for other in others]
            ranks = self._log if mesh.num_ranks > 1 else None
            PrefillNode.__init__(
                self, pools[0], config, mesh, endpoints, states[0], usable_prefix, ranks=ranks
            )
            undo.pop_all()
        self.others = others
        self._watch()

    def _join_events(self, raw: bytes, now_s: float) -> None:
        for rank, event in self._led_rooms.unpack(raw) if raw else ():
            self._join(rank, event, now_s)

    def _apply(self, other: Any, raw: bytes) -> None:
        other.apply(raw, self._chunk_ready)

    def _known(self) -> Iterable[PrefillRequest]:
        return self.scheduler.requests.values()

    def ranks_of(self, rid: str) -> list[PrefillRequest | RankRequest]:
        """Return the request as each rank of the prefill group knows it. Raises RequestError for
        one that is not here."""
        check_rid(rid)
        if (req := self.scheduler.requests.get(rid)) is None:
            raise RequestError(f"request {rid!r} is not here")
        self._hand_log()
        if req.pages_held is None:
            return [req] * self.num_ranks
        return [req, *(other.follower.request(rid) for other in self.others)]

    def send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: DeviceEvent | None = None, state_slot: int = -1,
    ) -> int:  # fmt: skip
        """Send a chunk on every prefill rank of the group; return the sum of the pages. See
        `PrefillNode.send_chunk`."""
        self._chunk_ready = ready
        try:
            return super().send_chunk(req, end, last, aux, ready, state_slot) * self.num_ranks
        finally:
            self._chunk_ready = None

    def stats(self) -> dict[str, int]:
        """Return the counters of the prefill group, those of its ranks' transfers summed; those of
        its requests and pages are rank 0's."""
        stats = super().stats()
        others = [rank.stats() for rank in self.others]
        return {name: num + sum(one.get(name, 0) for one in others) for name, num in stats.items()}
