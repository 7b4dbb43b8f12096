"""A rank above 0: its own pool, agent and rooms. Rank 0 decides what to do with them: the engine
carries its log here, and what became of the rooms back.

Where ranks are processes, the engine itself carries these bytes (ranks/row_log.py). Groups have all
ranks of a worker in one process, behind the calls of one node: for engines with ranks in threads,
and to try meshes on one machine.
"""

from __future__ import annotations

import math
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

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
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.leader import RankLeader, pack_rank_events
from prefixkv.ranks.row_log import RankLog, RankSizes, RowFollower
from prefixkv.request import DeviceEvent, check_event
from prefixkv.runtime.decode_node import DecodeNode
from prefixkv.runtime.decode_transfers import DecodeTransfers
from prefixkv.runtime.node import E, Node, OneRank
from prefixkv.runtime.prefill_node import PrefillNode
from prefixkv.runtime.prefill_transfers import PrefillTransfers
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.runtime.transfers import OfTransfers, Transfers
from prefixkv.settings import check_kind, check_list
from prefixkv.threads import wait_readable


def _sizes(spec: RankSpec, side: str, max_running: int, host_pages: int) -> RankSizes:
    """Return what all ranks of a worker have alike."""
    num_pages, page_size = spec.layout.num_pages, spec.layout.page_size
    pages = num_pages, page_size, max_running, spec.num_slots, host_pages
    return RankSizes(side, *pages, tuple(spec.windows))


def check_log(log: object) -> None:
    """Raise ConfigError for what is no log of rank 0's, `ranks=` of a node."""
    check_kind("ranks", log, RankLog)


def lead(node: Node[Any, Any, Any], spec: RankSpec, log: RankLog, host_pages: int) -> None:
    """Have a node lead the ranks that follow its log."""
    log.sizes = _sizes(spec, node.side, node.config.max_running, host_pages)
    submit, num_ranks = node.transfers.thread.submit, spec.mesh.num_ranks
    leader = RankLeader[Any](node.side, num_ranks, log, submit, node.hear)
    node.leader = cast(OneRank, leader)


class FollowingRank(OfTransfers, RowFollower):
    """The base of DecodeRank and PrefillRank. Used from one thread."""

    any_thread = frozenset({"fileno", "lost_peers", "stats"})

    side: ClassVar[str]
    _host: Any = None

    def _follow(
        self, spec: RankSpec, config: DecodeConfig | PrefillConfig,
        start: Callable[[RankSpec], Transfers[Any, Any]],
    ) -> None:  # fmt: skip
        if spec.rank == 0:
            raise ConfigError(f"rank is 0, which is a {self.side.capitalize()}Node")
        spec.check_own_memory()
        self.pool, self.state, self.rank = spec.pool, spec.state, spec.rank
        self._num_messages = 0  # counts batches of events, so that rank 0 notices a missing one
        # If a part fails, those before it are undone.
        with ExitStack() as undo:
            if isinstance(config, DecodeConfig):
                name = f"{config.name}/{spec.rank}"
                self._host = DecodeNode.make_tier(spec.pool, config, name)
                if config.host_memory is not None and self._host is None:
                    raise ConfigError("host_memory: this installation has no part for it")
            if self._host is not None:
                undo.callback(self._host.close)
                # Rank 0 knows of its own memory only, and orders copies once that can be used.
                self._host.wait_until_ready()
            host_pages = 0 if self._host is None else self._host.num_pages
            RowFollower.__init__(self, _sizes(spec, self.side, config.max_running, host_pages))
            self.transfers = undo.enter_context(start(spec))
            self.peer_id = self.transfers.peer_id
            if self._host is not None:
                self._host.start(self.transfers.thread.events.put)
                undo.callback(self._host.close)  # before that inbox is closed
            self._closing = undo.pop_all()

    def apply(self, raw: bytes, ready: DeviceEvent | None = None) -> None:  # type: ignore[override]
        """Apply to this rank's rows and rooms what rank 0 did in one pass (its `take_log`);
        prefill's chunks are sent once `ready.query()` is True.

        Raises, with nothing changed, CallerError: a message that is none, names pages, rows or
        slots that there are not, was left out, or comes twice; ConfigError: this rank was built
        with other sizes than rank 0's.
        """
        self.transfers.check_open()
        check_event("ready", ready)
        orders = super().apply(raw, ready)
        for command in orders.commands:
            self.transfers.thread.submit(command)
        for order in orders.copies:
            assert self._host is not None  # else there are no pages of it
            self._host.submit(order)

    def take_rank_events(self) -> bytes:
        """Return what became of this rank's rooms (and of decode's copies) since the last call, for
        rank 0's `apply_rank_events`; empty if nothing.

        Each result has to be applied, in order. Raises InternalError for an exception in the
        control thread; the events come next time.
        """
        events = self.transfers.take_events()
        if not events:
            return b""
        self._num_messages += 1
        return pack_rank_events(self.rank, self._num_messages - 1, events)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there may be events for rank 0, at most `timeout_s`; return whether."""
        return self.transfers.wait(timeout_s)

    def stats(self) -> dict[str, int]:
        """Return the counters of the control thread. Any thread may ask."""
        return self.transfers.stats()

    def close(self) -> None:
        """Close the transfer side, with its threads. See `Node.close`."""
        self._closing.close()


class DecodeRank(FollowingRank):
    """A decode rank above 0. Used from one thread.

    Args:
        pool, state: this rank's shares, with as many pages and slots as rank 0's. They must outlive
            this.
        config: rank 0's.
        rank: from 1.
        worker: `DecodeNode.peer_id` of rank 0; this rank receives in its name.

    Raises ConfigError: a pool that is not this rank's share or cannot be registered.
    """

    side = "decode"
    transfers: DecodeTransfers

    def __init__(
        self,
        pool: KVPool,
        config: DecodeConfig,
        mesh: Mesh,
        rank: int,
        worker: PeerId,
        state: StatePool | None = None,
    ) -> None:
        check_kind("config", config, DecodeConfig)
        spec = RankSpec(pool, mesh, rank, state)
        self._follow(spec, config, lambda spec: DecodeTransfers(spec, config, worker))


class PrefillRank(FollowingRank):
    """A prefill rank above 0 that follows rank 0's log (`PrefillNode(ranks=RankLog())`). Used from
    one thread.

    Args:
        pool, state: this rank's share of the KV, and of the extra state; as many pages, of the same
            size, in each group, and slots as rank 0's. They must outlive this.
        config: rank 0's, but for `bind`.
        mesh: how the model is shared out over the prefill worker's ranks.
        rank: from 1.

    Raises ConfigError: a pool that is not this rank's share or cannot be registered, an address
    that cannot be bound.
    """

    side = "prefill"
    transfers: PrefillTransfers

    def __init__(
        self,
        pool: KVPool,
        config: PrefillConfig,
        mesh: Mesh,
        rank: int,
        state: StatePool | None = None,
    ) -> None:
        check_kind("config", config, PrefillConfig)
        spec = RankSpec(pool, mesh, rank, state)
        self._follow(spec, config, lambda spec: PrefillTransfers(spec, config))

    @property
    def endpoint(self) -> str:
        """Bound address of this rank, one of rank 0's `endpoints`."""
        return self.transfers.endpoint


# --- all ranks in one process ---------------------------------------------------------------------


T = TypeVar("T")
_Shares: TypeAlias = list[tuple[KVPool, StatePool | None]]  # by rank
_Others: TypeAlias = Sequence[FollowingRank]


def _of_ranks(kind: str, given: Sequence[T], mesh: Mesh) -> Sequence[T]:
    check_list(kind, given)
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
        config: rank 0 has its `bind`; the others take any port of that host, or a path beside it.
        states: by rank, where requests have extra state; all have as many slots.

    Raises ConfigError: the ranks differ in pages, page size or slots, or number.
    """

    kind = PrefillConfig

    def _begin(self, undo: ExitStack, shares: _Shares, config: Any, mesh: Mesh) -> _Others:
        # Rank 0 last: it says where the others are.
        (pool, state), *rest = shares
        bind, free = config.bind, f"{config.bind.rpartition(':')[0]}:*"
        is_tcp, others = bind.startswith("tcp:"), []
        for rank, (its, of_it) in enumerate(rest, 1):
            own = replace(config, bind=free if is_tcp else f"{bind}-{rank}")
            others.append(undo.enter_context(PrefillRank(its, own, mesh, rank, of_it)))
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

    def figures(self) -> dict[str, int]:
        """Return the counters, summed over the ranks; those of requests, pages and rooms are rank
        0's."""
        figures = Counter(own := super().figures())
        for other in self.others:
            figures.update(other.stats())
        return {**figures, "rooms": own["rooms"]}
