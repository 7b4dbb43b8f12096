"""The object that a prefill engine holds.

Every method is called from the engine's scheduler thread and returns in microseconds; the node's
own threads (control, transport) are started here and joined by `close`.
"""

from __future__ import annotations

from contextlib import ExitStack

from prefixkv.config import PrefillConfig
from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.prefill.request import PrefillRequest, timeline
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import PrefillCommand
from prefixkv.protocol.events import PrefillEvent
from prefixkv.protocol.ids import PeerId
from prefixkv.runtime.node import COUNTERS, Node, Ranks, check_windows
from prefixkv.runtime.prefill_transfers import PrefillTransfers
from prefixkv.runtime.rank_spec import checked_config

_COUNTERS = (
    *COUNTERS, "bytes_sent", "decode_hit_tokens", "followed", "hit_tokens",
    "never_promised", "overtaken", "refused_by_peers", "sent", "staging_bytes_staged",
    "staging_pieces_written", "writes_done", "writes_drained_by_renewal", "writes_failed",
)  # fmt: skip


class PrefillNode(Node[PrefillRequest, PrefillCommand, PrefillEvent], PrefillScheduler):
    """A prefill worker: its prefix cache and the sending side. Used from one thread.

    Its calls are those of `PrefillScheduler`, for which it is the port.

    Args:
        pool: the KV memory; kept until the node has closed.
        config: see PrefillConfig.
        mesh: how the model is shared out over the ranks of this worker, of which this is rank 0.
            None: the only rank.
        state: this rank's share of the extra state of requests. Its slots are the engine's: one
            that it names in `send_chunk(last=True, state_slot=)` must be left alone until the
            request is popped as sent or failed.
        ranks: with several, a RankLog with the endpoints of the others, which are `PrefillRank`s
            and follow this node's cache (`take_log`). `Request.prefill` names this one's.

    Raises ConfigError: an address that cannot be bound, an unknown policy, a pool that is not this
    rank's share or cannot be registered, `checkpoints` without as many slots of extra state and one
    more, or with `usable_prefix`, a mesh of several ranks without `ranks`.
    """

    side = "prefill"
    config: PrefillConfig
    transfers: PrefillTransfers
    _counters = _COUNTERS

    def __init__(
        self,
        pool: KVPool,
        config: PrefillConfig | None = None,
        mesh: Mesh | None = None,
        state: StatePool | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        # The same order as in `DecodeNode`: refuse, build, start threads, observe.
        config = checked_config(config, PrefillConfig)
        spec = self._spec(pool, config, mesh, state, ranks)
        options = config.for_page_manager(pool.layout.num_pages)
        spec.check_saved(options.num_saved)
        if config.usable_prefix is not None and (options.num_saved or spec.windows):
            why = "usable_prefix: it says where the engine goes on, and so do checkpoints"
            raise ConfigError(f"{why}, at which alone a pool with window groups does")
        pages = self._make_pages(spec, options)
        num_slots = max(0, spec.num_slots - options.num_saved)
        with ExitStack() as undo:
            undo.callback(pages.cache.policy.release)  # the next node may have it
            check_windows(pages)
            PrefillScheduler.__init__(self, pages, config, num_slots, config.usable_prefix)
            self._logged = self.requests.values()
            endpoints = () if ranks is None else ranks.endpoints
            self.transfers = PrefillTransfers(spec, config, endpoints)
            undo.callback(self.close)
            self._lead(spec)
            self._observe(timeline)
            undo.pop_all()

    @property
    def endpoint(self) -> str:
        """Bound address, which `Request.prefill` names."""
        return self.transfers.endpoint

    def fence_rank(self, rank: int) -> None:
        """Take the caller's word that the process of a `PrefillRank` of this worker is dead.

        Every request ends with a PeerLostError and comes out of `pop_failed` (but one that has been
        sent, out of `pop_sent`), decode hears of it at once, `add` takes none, and no page waits
        for that rank. So `drain` becomes True as on a worker of the ranks that are left; these go
        on to get the log until then. What the dead one said that comes later is left out. `rank`:
        from 1. Never one that lives: it would send what is in its pages then. Raises CallerError:
        there is no such rank. Nothing was changed.
        """
        now_s = self._pump()
        self.leader.fence(rank, now_s, lambda error: self.end_all(error, now_s))
        self._tell()

    def peers(self) -> dict[PeerId, str]:
        """Return "ready" or "suspect" for each decode rank. Any thread may ask."""
        return self.transfers.peers()

    @property
    def bytes_sent(self) -> int:
        """KV bytes written to decode workers. Any thread may ask."""
        return self.transfers.bytes_sent

    def stats(self) -> dict[str, int]:
        """Return the counters of every node, and of prefill alone:

        - `hit_tokens`: Prompt tokens that were cached on this side.
        - `sent`: Requests whose KV is with decode.
        - `followed`, `overtaken`: Requests that waited for a prefix which another computed;
          waits that were given up because the other request made no progress.
        - `decode_hit_tokens`, `bytes_skipped`: What decode had already.
        - `bytes_sent`: KV written to decode workers.
        - `never_promised`: Requests and offers that ended since no decode worker promised
          pages for them: it had died, was restarted and did not know them, or did not
          ask in time.
        - `refused_by_peers`: Decode ranks that do not work with this process: they do not
          fit, or hold it for dead. The log `prefixkv.peers` says why.
        - `writes_done`, `writes_failed`: Writes of the transport.
        - `writes_drained_by_renewal`: Failed writes that another NIXL agent proved over.
        - `staging_pieces_written`, `staging_bytes_staged`: What went through staging
          memory.
        """
        stats = super().stats()
        layout = self.pool.layout
        skipped_pages = stats.get("decode_hit_tokens", 0) // layout.page_size
        stats["bytes_skipped"] = skipped_pages * layout.page_bytes
        return stats
