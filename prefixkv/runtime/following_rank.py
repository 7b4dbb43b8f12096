"""A rank above 0: its own pool, agent and rooms. Rank 0 decides what to do with them: the engine
carries its log here, and what became of the rooms back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, cast

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.leader import RankLeader, pack_rank_events
from prefixkv.ranks.row_log import RankLog, RankSizes, RowFollower
from prefixkv.request import DeviceEvent, check_event
from prefixkv.runtime.decode_node import host_memory
from prefixkv.runtime.decode_transfers import DecodeTransfers
from prefixkv.runtime.node import Node, OneRank
from prefixkv.runtime.prefill_transfers import PrefillTransfers
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.runtime.transfers import OfTransfers, Transfers
from prefixkv.settings import check_kind


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
    submit, num_ranks = node.transfers.submit, spec.mesh.num_ranks
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
        host = config.host_memory if isinstance(config, DecodeConfig) else None
        # If a part fails, those before it are undone.
        with ExitStack() as undo:
            if host is not None:
                self._host = host_memory(spec.pool, host, f"{config.name}/{spec.rank}")
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
            self.transfers.submit(command)
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
