"""All ranks of a worker in one process, behind the calls of one node: for engines whose ranks are
threads, and to try meshes on one machine. Where ranks are processes the engine carries the same
bytes (ranks/replica.py) itself.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.paging import Pages
from prefixkv.prefill.bootstrap_queue import UsablePrefix
from prefixkv.prefill.request import PrefillRequest
from prefixkv.ranks.replica import RankLog
from prefixkv.request import DeviceEvent, Request
from prefixkv.runtime.decode_rank import DecodeRank
from prefixkv.runtime.nodes import DecodeNode, PrefillNode


class _Readiness:
    """One descriptor that is readable while any of several is."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._epoll = select.epoll()
        for fd in fds:
            self._epoll.register(fd, select.EPOLLIN)

    @property
    def fd(self) -> int:
        return self._epoll.fileno()

    def wait(self, timeout_s: float | None) -> bool:
        return bool(self._epoll.poll(None if timeout_s is None else max(0.0, timeout_s)))

    def close(self) -> None:
        self._epoll.close()


class DecodeGroup(DecodeNode):
    """Rank 0 of a mesh with the others at hand: every call takes their news in, and hands them the
    log.

    Args:
        pools: by rank; each holds its rank's share, all have as many pages.
        digest_every: see RankLog.
        states: by rank, where requests have extra state.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        config: DecodeConfig,
        mesh: Mesh,
        digest_every: int = 0,
        states: Sequence[StatePool | None] = (),
    ) -> None:
        states = states or [None] * len(pools)
        self.others: list[DecodeRank] = []
        self._log = RankLog(digest_every)
        super().__init__(
            pools[0], config, self._log if mesh.num_ranks > 1 else None, mesh, states[0]
        )
        try:
            for rank, pool in enumerate(pools[1:], start=1):
                self.others.append(DecodeRank(pool, config, mesh, rank, self.peer_id, states[rank]))
        except BaseException:
            self.close()
            raise
        self._readiness = _Readiness(
            [self._manager.events.fd, *(other.fileno() for other in self.others)]
        )

    def _pump(self) -> float:
        now_s = super()._pump()
        if self.others:
            for other in self.others:
                self._take_news(other.take_news(), now_s)
            self._tell()
        return now_s

    def _tell(self) -> None:
        super()._tell()
        self._hand_log()

    def _hand_log(self) -> None:
        if self.others and self._log:
            raw = self.take_log()
            for other in self.others:
                other.apply(raw)

    def pages_of(self, req: DecodeRequest) -> list[Pages]:
        """The request's pages as each rank knows them."""
        self._hand_log()
        return [req.pages, *(other.pages(req.row) for other in self.others)]

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `DecodeNode.wait`; any rank's news end it."""
        self._check_open()
        return self.scheduler.has_news or self._wait(self._readiness.wait, timeout_s)

    def fileno(self) -> int:
        return self._readiness.fd if self.others else super().fileno()

    def audit(self) -> None:
        super().audit()
        for other in self.others:
            other.audit()

    def close(self) -> None:
        if not self.closed and hasattr(self, "_readiness"):
            self._readiness.close()
        with ExitStack() as closing:
            for other in self.others:
                closing.callback(other.close)
            closing.callback(super().close)


class PrefillGroup:
    """The ranks of a prefill worker in step: a request is bootstrapped or sent when it is on all of
    them, and failed as soon as it is on one, since that rank's pages are not to be computed into
    any more.

    Each rank has a cache of its own, so pages and `prefix_len` may differ from rank to rank:
    `ranks_of` gives all. What the methods return is rank 0's request.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        config: PrefillConfig,
        mesh: Mesh,
        states: Sequence[StatePool | None] = (),
        usable_prefix: UsablePrefix | None = None,
    ) -> None:
        """`states`: by rank, where requests have extra state. `usable_prefix`: see PrefillNode;
        each rank asks."""
        states = states or [None] * len(pools)
        self.nodes: list[PrefillNode] = []
        try:
            for rank in range(mesh.num_ranks - 1, -1, -1):  # rank 0 tells where the others are
                endpoints = [node.endpoint for node in self.nodes] if rank == 0 else []
                node = PrefillNode(
                    pools[rank], config, mesh, rank, endpoints, states[rank], usable_prefix
                )
                self.nodes.insert(0, node)
        except BaseException:
            self.close()
            raise
        self._readiness = _Readiness([node.fileno() for node in self.nodes])
        self._reqs: dict[str, list[PrefillRequest]] = {}
        self._begun: dict[str, int] = {}
        self._left: dict[str, int] = {}  # on how many ranks it has ended
        self._failed: set[str] = set()  # popped as failed, and alive on some ranks still

    @property
    def endpoint(self) -> str:
        """What `Request.prefill` names."""
        return self.nodes[0].endpoint

    def add(self, request: Request) -> PrefillRequest:
        """As `PrefillNode.add`, on every rank or on none."""
        reqs: list[PrefillRequest] = []
        try:
            for node in self.nodes:
                reqs.append(node.add(request))
        except BaseException:
            for node in self.nodes[: len(reqs)]:
                node.abort(request.rid)
            raise
        self._reqs[request.rid] = reqs
        self._begun[request.rid] = self._left[request.rid] = 0
        return reqs[0]

    def ranks_of(self, rid: str) -> list[PrefillRequest]:
        """The request on each rank, until it is popped as sent or failed."""
        return self._reqs[rid]

    def pop_bootstrapped(self) -> list[PrefillRequest]:
        ready = []
        for node in self.nodes:
            for req in node.pop_bootstrapped():
                if req.rid in self._begun:
                    self._begun[req.rid] += 1
                    if self._begun[req.rid] == len(self.nodes) and req.rid not in self._failed:
                        ready.append(self._reqs[req.rid][0])
        return ready

    def send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: DeviceEvent | None = None, state_slot: int = -1,
    ) -> int:  # fmt: skip
        """As `PrefillNode.send_chunk`, on every rank."""
        if req.rid in self._failed:
            return 0
        pairs = zip(self.nodes, self._reqs[req.rid], strict=True)
        return sum(node.send_chunk(mine, end, last, aux, ready, state_slot) for node, mine in pairs)

    def pop_sent(self) -> list[PrefillRequest]:
        sent = []
        for node in self.nodes:
            for req in node.pop_sent():
                failed = req.rid in self._failed
                if (ended := self._end(req.rid)) is not None and not failed:
                    sent.append(ended)
        return sent

    def pop_failed(self, after: DeviceEvent | None = None) -> list[PrefillRequest]:
        """As `PrefillNode.pop_failed`; a request that failed on one rank is aborted on the
        others."""
        failed = []
        for node in self.nodes:
            for req in node.pop_failed(after):
                if req.rid not in self._reqs:
                    continue  # its `add` failed on another rank
                if req.rid not in self._failed:
                    self._failed.add(req.rid)
                    self.abort(req.rid)
                    failed.append(self._reqs[req.rid][0])
                    failed[-1].error = req.error
                self._end(req.rid)
        return failed

    def abort(self, rid: str) -> bool:
        """As `PrefillNode.abort`, on every rank."""
        known = [node.abort(rid) for node in self.nodes]
        return any(known)

    def _end(self, rid: str) -> PrefillRequest | None:
        """It has ended on one rank more; the request, if that was the last."""
        self._left[rid] += 1
        if self._left[rid] < len(self.nodes):
            return None
        del self._begun[rid], self._left[rid]
        self._failed.discard(rid)
        return self._reqs.pop(rid)[0]

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._readiness.wait(timeout_s)

    def fileno(self) -> int:
        return self._readiness.fd

    def stats(self) -> dict[str, int]:
        """Sums over the ranks."""
        all_stats = [node.stats() for node in self.nodes]
        return {name: sum(stats.get(name, 0) for stats in all_stats) for name in all_stats[0]}

    def audit(self) -> None:
        for node in self.nodes:
            node.audit()

    def close(self) -> None:
        """Close every rank. Raises the first InternalError, with all closed."""
        if hasattr(self, "_readiness"):
            self._readiness.close()
        with ExitStack() as closing:
            for node in self.nodes:
                closing.callback(node.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
