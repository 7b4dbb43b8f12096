"""A prefill rank above 0: its own pool, agent and rooms; rank 0 decides what to do with them."""

from __future__ import annotations

from prefixkv.config import PrefillConfig
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.ranks.row_log import RankRequest, RowFollower
from prefixkv.request import DeviceEvent, check_event
from prefixkv.runtime.following_rank import FollowingRank
from prefixkv.runtime.prefill_transfers import PrefillTransfers
from prefixkv.runtime.rank_spec import RankSpec, check_own_memory, rank_sizes
from prefixkv.settings import check_kind


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

    leader = "PrefillNode"
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
        super().__init__(pool, state, rank)
        spec = RankSpec.of(pool, config.model, mesh, rank, state)
        check_own_memory(pool.layout)
        self.follower = RowFollower(rank_sizes("prefill", pool, config.max_running, spec.num_slots))
        self.transfers = PrefillTransfers(pool, config, mesh, rank, state=state)

    @property
    def endpoint(self) -> str:
        """Bound address of this rank, one of rank 0's `endpoints`."""
        return self.transfers.endpoint

    def apply(self, raw: bytes, ready: DeviceEvent | None = None) -> None:
        """Apply to this rank's rooms what rank 0 did in one pass (`PrefillNode.take_log`); its
        chunks are sent once `ready.query()` is True.

        Raises, with nothing changed, CallerError: a message that is none, names pages, rows or
        slots that there are not, was left out, or comes twice; ConfigError: this rank was built
        with other sizes than rank 0's.
        """
        self.transfers.check_open()
        check_event("ready", ready)
        for command in self.follower.apply(raw, ready).commands:
            self.transfers.submit(command)

    def request(self, rid: str) -> RankRequest:
        """Return what this rank computes a request by: its pages, where it goes on from, where it
        saves. Holds until the next `apply`. Raises RequestError for one that does not compute
        here."""
        return self.follower.request(rid)
