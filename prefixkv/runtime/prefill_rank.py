"""A prefill rank above 0 of a worker with one cache: its own pool, agent and rooms; rank 0 decides
what to do with them."""

from __future__ import annotations

from prefixkv.config import PrefillConfig
from prefixkv.control.death_watch import LostPeers
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import MAX_RANKS, Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.ranks.prefill_log import (
    PrefillFollower,
    RankRequest,
    pack_prefill_events,
    settings_of,
)
from prefixkv.request import DeviceEvent, check_event
from prefixkv.runtime.one_thread import OneThread
from prefixkv.runtime.prefill_transfers import PrefillTransfers
from prefixkv.runtime.rank_spec import RankSpec, check_own_memory, window_specs
from prefixkv.settings import check_kind, check_whole


class PrefillRank(OneThread):
    """A prefill rank above 0 that follows rank 0's log (`PrefillNode(ranks=PrefillLog())`). Used
    from one thread.

    Args:
        pool: this rank's share of the KV; as many pages, and of the same size, as rank 0's, in each
            group. It must outlive this.
        config: rank 0's, but for `bind`.
        mesh: how the model is shared out over the prefill worker's ranks.
        rank: from 1.
        state: this rank's share of the extra state, with as many slots as rank 0's; it must outlive
            this as well.

    Raises:
        ConfigError: a pool that is not this rank's share or cannot be registered, an address that
            cannot be bound.
    """

    any_thread = frozenset({"fileno", "lost_peers", "stats"})

    def __init__(
        self,
        pool: KVPool,
        config: PrefillConfig,
        mesh: Mesh,
        rank: int,
        state: StatePool | None = None,
    ) -> None:
        check_kind("config", config, PrefillConfig)
        check_whole("rank", rank, 0, MAX_RANKS - 1)
        if rank == 0:
            raise ConfigError(f"rank is {rank}: rank 0 is a PrefillNode")
        spec = RankSpec.of(pool, config.model, mesh, rank, state)
        check_own_memory(pool.layout)
        self.pool, self.state, self.rank = pool, state, rank
        windows = window_specs(pool)
        sizes = pool.layout.num_pages, pool.layout.page_size, spec.num_slots
        self.follower = PrefillFollower(settings_of(*sizes, windows), [one.name for one in windows])
        self.transfers = PrefillTransfers(pool, config, mesh, rank, state=state)
        self.peer_id = self.transfers.peer_id
        self._num_messages = 0  # counts batches of events, so that rank 0 notices a missing one

    @property
    def endpoint(self) -> str:
        """Bound address of this prefill rank, one of rank 0's `endpoints`."""
        return self.transfers.endpoint

    def apply(self, raw: bytes, ready: DeviceEvent | None = None) -> None:
        """Apply to this prefill rank's rooms what rank 0 did in one pass (`PrefillNode.take_log`).

        Its chunks are sent once `ready.query()` is True: when this rank has computed them.

        Raises:
            CallerError: a message that is none, was left out, or comes twice.
            ConfigError: this rank was built with other sizes than rank 0's. Nothing was changed.
        """
        self.transfers.check_open()
        check_event("ready", ready)
        for command in self.follower.apply(raw, ready):
            self.transfers.submit(command)

    def take_rank_events(self) -> bytes:
        """Return what became of this prefill rank's rooms since the last call, packed for
        `PrefillNode.apply_rank_events`.

        Each result has to be applied, in order; empty if nothing happened. Raises InternalError for
        an exception in the control thread; the events come next time.
        """
        events = self.transfers.take_events()
        if not events:
            return b""
        self._num_messages += 1
        return pack_prefill_events(self.rank, self._num_messages - 1, events)

    def request(self, rid: str) -> RankRequest:
        """Return what this prefill rank's engine computes a request by: its pages, where it goes on
        from, where it saves. It holds until the next `apply`. Raises RequestError for one that does
        not compute here."""
        return self.follower.request(rid)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until this prefill rank may have events for rank 0, at most `timeout_s`; return
        True if it may have some."""
        return self.transfers.wait(timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable while this prefill rank has events for rank 0. Any
        thread may ask."""
        return self.transfers.fileno()

    def lost_peers(self) -> LostPeers:
        """Return the lost decode ranks that this prefill rank writes to; see
        `PrefillNode.lost_peers`. Any thread may ask."""
        return self.transfers.lost_peers()

    @property
    def num_rooms(self) -> int:
        """Number of rooms that are open on this prefill rank, or not drained yet. Any thread may
        ask."""
        return self.transfers.num_rooms

    def stats(self) -> dict[str, int]:
        """Return the counters of this prefill rank's control thread. Any thread may ask."""
        return self.transfers.stats()

    def close(self) -> None:
        """Close this prefill rank's transfer side, with its threads. See `PrefillNode.close`."""
        self.transfers.close()
