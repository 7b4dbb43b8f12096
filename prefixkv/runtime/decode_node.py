"""The object that a decode engine holds.

Every method is called from the engine's scheduler thread and returns in microseconds; the node's
own threads (control, transport) are started here and joined by `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

from prefixkv.config import DecodeConfig
from prefixkv.decode.request import DecodeRequest, timeline
from prefixkv.decode.rooms import Workers
from prefixkv.decode.scheduler import DecodeParts, DecodeScheduler
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.protocol.commands import DecodeCommand
from prefixkv.protocol.events import DecodeEvent
from prefixkv.protocol.ids import PeerId
from prefixkv.request import DeviceEvent, check_event
from prefixkv.runtime.decode_transfers import DecodeTransfers
from prefixkv.runtime.node import COUNTERS, Node, Ranks, check_windows
from prefixkv.runtime.rank_spec import RankSpec, checked_config
from prefixkv.runtime.transfers import secret_number

_COUNTERS = (
    *COUNTERS, "aborted", "admitted", "checksum_mismatches", "checksums", "compute_declined",
    "computed_requests", "computed_tokens",
    "failovers", "finished", "flight_fallbacks", "flights_adopted", "host_copies_failed",
    "host_hit_tokens", "host_loaded_pages", "host_loads", "host_missed_pages", "host_written_pages",
    "quarantined_pages", "record_lost", "recorded", "refused", "retracted",
    "retries", "shared_flights", "shared_tokens", "skipped_tokens", "tags_dropped", "transferred",
    "transfers_failed",
)  # fmt: skip


class DecodeNode(Node[DecodeRequest, DecodeCommand, DecodeEvent], DecodeScheduler):
    """A decode worker: prefix cache, admission and receiving side. Used from one thread.

    Its calls are those of `DecodeScheduler`, for which it is the port.

    Args:
        pool: the KV memory; kept until the node has closed.
        config: see DecodeConfig.
        ranks: a RankLog where this is rank 0 of several (ranks/row_log.py); then call `take_log`
            once per pass.
        mesh: how the model is shared out over the ranks. Each other rank is a `DecodeRank`; its
            events go to `apply_rank_events`. None: the pool holds all of the model's KV.
        state: extra state of requests (a recurrent state, say), which prefill sends with the last
            chunk to the request's `state_slot`. Each admitted request has a slot until it ends, so
            no more requests than slots are admitted at once. What is sent of it is never cached: a
            request that hits the prefix has it sent all the same, and a retracted request comes
            back through `pop_needs_prefill`, or, with `compute`, goes on from a state of the last
            slots, which `config.checkpoints` counts. It must outlive the node.

    Raises:
        ConfigError: an unknown policy (of eviction or admission), a pool that is not rank 0's share
            or cannot be registered, a mesh of several ranks without `ranks`, `compute` together
            with `ranks` or aligned groups, or with `state` or window groups without `checkpoints`,
            `checkpoints` without either or with too few slots, `host_memory` together with `ranks`
            without a mesh, more host memory than there is, a `record` that cannot be written.
    """

    side = "decode"
    config: DecodeConfig
    transfers: DecodeTransfers
    # From pool, config and name: the memory behind the pool that a setting asks for, or None
    # (`assembly.py`).
    make_tier: ClassVar[Callable[..., Any]] = lambda *_: None
    # Each raises ConfigError for settings that do not go with this rank, or with others besides.
    refusals: ClassVar[list[Callable[[DecodeConfig, RankSpec, bool], None]]] = []
    _tier: Any = None
    _counters = _COUNTERS

    def __init__(
        self,
        pool: KVPool,
        config: DecodeConfig | None = None,
        ranks: Ranks | None = None,
        mesh: Mesh | None = None,
        state: StatePool | None = None,
    ) -> None:
        # 1. Everything that can be refused without undoing anything.
        config = checked_config(config, DecodeConfig)
        spec = self._spec(pool, config, mesh, state, ranks)
        layout = pool.layout
        options = config.for_page_manager(layout.num_pages, spec.num_slots)
        spec.check_saved(options.num_saved)
        for check in self.refusals:
            check(config, spec, ranks is not None)
        # 2. The pages, the tree, and the scheduler over them, then the transfer side, which starts
        # the threads, and last what observes all this. If one fails, those before it are undone:
        # the next node may have a policy object, and host memory is given back.
        organs, tier_pages = {}, 0
        with ExitStack() as undo:
            self._tier = tier = DecodeNode.make_tier(pool, config, config.name)
            if tier is not None:
                undo.callback(tier.close)
                organs[tier.setting], tier_pages = tier.pages(config.policy), tier.num_pages
            pages = self._make_pages(spec, options)
            undo.callback(pages.cache.policy.release)
            check_windows(pages)
            share_pages = config.prefill_share * layout.num_pages
            workers = Workers(True, config.control.bootstrap_timeout_s, share_pages)
            parts = DecodeParts(workers, secret_number, organs)
            undo.callback(self._release_tier_policy)
            DecodeScheduler.__init__(self, pages, config, parts)
            self.transfers = DecodeTransfers(spec, config)
            undo.callback(self.transfers.close)
            if tier is not None:
                tier.start(self.transfers.thread.events.put)
            undo.callback(self.close)
            self._lead(spec, tier_pages)
            self._observe(timeline)
            undo.pop_all()

    @property
    def tier(self) -> Any:
        """The pages behind the pool: its HostTier; None where there is none."""
        source = self.sources.get("loaded")
        return None if source is None else source.tier

    def _release_tier_policy(self) -> None:
        """Also of a scheduler that is half made."""
        if hasattr(self, "sources") and self.tier is not None:
            self.tier.cache.policy.release()

    def close(self) -> None:
        """Close the node, the copies to and from host memory first: their ends come in an inbox
        that closes with the transfer side. See `Node.close`."""
        try:
            if self._tier is not None:
                self._tier.close()
        finally:
            super().close()

    def stats(self) -> dict[str, int]:
        """Return the counters of every node, and of decode alone:

        - `skipped_tokens`: Prompt tokens that prefill was not asked for: cached, or on their
          way with the flight of another request (`shared_tokens`).
        - `admitted`: Admissions, those after a retraction too.
        - `transferred`: Requests that were handed to the engine with their KV.
        - `finished`, `aborted`, `refused`: Requests by how they ended.
        - `retracted`: Retractions.
        - `retries`: Requests asked for again after a failed transfer.
        - `computed_requests`, `computed_tokens`: Requests whose missing part this worker
          computed, and tokens of prompts that it computed.
        - `compute_declined`: Requests within `compute.below` that were asked of prefill.
        - `failovers`: Requests that went on without their prefill worker.
        - `host_hit_tokens`: Tokens of admitted prompts that were loaded from host memory.
        - `host_loads`, `host_loaded_pages`, `host_written_pages`: Loads from host memory,
          and pages that were copied each way.
        - `host_missed_pages`: Pages that were needed for others before they were copied
          there.
        - `host_copies_failed`: Copies to or from host memory that failed.
        - `host_pages`, `host_pages_cached`, `host_copies`: Host pages that can be used,
          those that are cached, and copies under way, now.
        - `transfers_failed`: Transfers that failed.
        - `checksums`, `checksum_mismatches`: Checksums of pages that came, and rooms that
          ended for one.
        - `aside_pages`, `aside_share`, `aside_prefill`: Requests that wait aside, now.
        - `stepped_aside_pages`, `stepped_aside_share`, `stepped_aside_prefill`: How often a
          request began to wait aside.
        - `shared_flights`, `shared_tokens`: Requests that joined another's flight, and the
          tokens they found in it.
        - `flights_adopted`: Flights that went on for others when their first request was
          aborted.
        - `flight_fallbacks`: Requests that asked prefill themselves because the flight they
          had joined failed.
        - `quarantined_pages`: Pages that went into quarantine.
        - `recorded`, `record_lost`: Requests that were recorded, and that were not: the
          disk is full, say.
        - `tags_dropped`: NIXL notifications of no open room, or of an earlier use of its
          number. A few after aborts are usual.
        """
        stats = super().stats()
        tier = self.tier
        stats |= {
            "host_pages": 0 if tier is None else tier.num_ready,
            "host_pages_cached": 0 if tier is None else tier.allocator.cached_pages,
            "host_copies": 0 if tier is None else len(tier),
        }
        stats |= {f"aside_{why}": num for why, num in self.waiting.aside().items()}
        stats |= {f"stepped_aside_{why}": num for why, num in self.waiting.stepped_aside.items()}
        return stats

    def fence_rank(self, rank: int, after: DeviceEvent | None = None) -> None:
        """Take the caller's word that the process of another rank of this worker is dead.

        Every request ends with a PeerLostError and comes out of `pop_failed`, `add` takes none, and
        no page waits for that rank. So `drain` becomes True as on a worker of the ranks that are
        left; these go on to get the log until then. What the dead one said that comes later is left
        out. `rank`: from 1. Never one that lives: its pages would be used while prefill writes
        them. `after`: as of `abort`, for the pages of the requests that end. Raises CallerError:
        there is no such rank. Nothing was changed.
        """
        check_event("after", after)
        now_s = self._pump()
        self.leader.fence(rank, now_s, lambda error: self.end_all(error, now_s, after))
        self._tell()

    def peers(self) -> dict[str, tuple[PeerId | None, str]]:
        """Return, by address, the identity of each prefill worker, and "ready", "suspect" or
        "connecting". Any thread may ask."""
        return self.transfers.peers()

    def _tell(self) -> None:
        if self._tier is not None:
            for order in self.take_orders():
                self._tier.submit(order)
                if self._ranks is not None:
                    self._ranks.copy(order)
        super()._tell()
