"""The two objects an engine holds: DecodeNode and PrefillNode.

Every method is called from the engine's scheduler thread and returns in microseconds; the node's
own threads (control, transport) are started here and joined by `close`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import assert_never

from prefixkv.config import DecodeConfig, PrefillConfig, check_reserved
from prefixkv.control.death_watch import LostPeers
from prefixkv.decode import journal as decode_journal
from prefixkv.decode.lanes import Lanes
from prefixkv.decode.request import DecodeRequest, PrefillAsk
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.decode.shares import PrefillShares
from prefixkv.decode.sources import Sources
from prefixkv.errors import AbortedError, CallerError, ConfigError, RequestError, TransferError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import check_reason
from prefixkv.prefill import journal as prefill_journal
from prefixkv.prefill.bootstrap_queue import UsablePrefix
from prefixkv.prefill.request import PrefillRequest
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import DecodeCommand, Fence, PrefillCommand
from prefixkv.protocol.events import (
    Bootstrapped,
    DecodeEvent,
    PrefillEvent,
    RoomEnded,
    SourceFree,
    WorkerEvent,
)
from prefixkv.protocol.host_copy import HostCopyDone
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.leader import RankLeader
from prefixkv.ranks.oplog import ReplicatedPageManager
from prefixkv.ranks.prefill_log import PrefillLog, PrefillRankRooms, settings_of
from prefixkv.ranks.replica import RankLog
from prefixkv.request import DeviceEvent, Request, check_event, check_request
from prefixkv.runtime.decode_transfers import DecodeTransfers
from prefixkv.runtime.host_memory import HostMemory
from prefixkv.runtime.node import COUNTERS, Node
from prefixkv.runtime.prefill_transfers import PrefillTransfers
from prefixkv.runtime.rank_spec import (
    RankSpec,
    check_own_memory,
    checked_config,
    window_specs,
)
from prefixkv.runtime.record import MAX_FILES, Recorder
from prefixkv.runtime.transfers import MakeTransport, peer_id, secret_number
from prefixkv.settings import check_callable, check_kind

_DECODE_COUNTERS = (
    *COUNTERS, "aborted", "admitted", "compute_declined", "computed_requests", "computed_tokens",
    "failovers", "finished", "flight_fallbacks", "flights_adopted", "host_copies_failed",
    "host_hit_tokens", "host_loaded_pages", "host_loads", "host_missed_pages", "host_written_pages",
    "quarantined_pages", "record_lost", "recorded", "refused", "retracted",
    "retries", "shared_flights", "shared_tokens", "skipped_tokens", "tags_dropped", "transferred",
    "transfers_failed",
)  # fmt: skip
_PREFILL_COUNTERS = (
    *COUNTERS, "bytes_sent", "cut_tokens", "decode_hit_tokens", "followed", "hit_tokens",
    "overtaken", "refused_by_peers", "sent", "staging_bytes_staged", "staging_pieces_written",
    "writes_done", "writes_drained_by_renewal", "writes_failed",
)  # fmt: skip


class DecodeNode(Node[DecodeCommand, str, DecodeEvent]):
    """A decode worker: prefix cache, admission and receiving side. Used from one thread.

    Args:
        pool: the KV memory; kept until the node has closed.
        config: see DecodeConfig.
        ranks: a RankLog where this is rank 0 of several (ranks/replica.py); then call `take_log`
            once per pass.
        mesh: how the model is shared out over the ranks. Each other rank is a `DecodeRank`; its
            events go to `apply_rank_events`. None: the pool holds all of the model's KV.
        state: extra state of requests (a recurrent state, say), which prefill sends with the last
            chunk to the request's `state_slot`. Each admitted request has a slot until it ends, so
            no more requests than slots are admitted at once. What is sent of it is never cached: a
            request that hits the prefix has it sent all the same, and a retracted request comes
            back through `pop_needs_prefill`, or, with `compute`, goes on from a state of the last
            slots, which `config.checkpoints` counts. It must outlive the node.
        transport: makes another transport than NIXL's, for tests.

    Raises:
        ConfigError: an unknown policy (of eviction or admission), a pool that is not rank 0's share
            or cannot be registered, a mesh of several ranks without `ranks`, `compute` together
            with `ranks` or aligned groups, or with `state` or window groups without `checkpoints`,
            `checkpoints` without either or with too few slots, `host_memory` together with `ranks`
            without a mesh, more host memory than there is, a `record` that cannot be written.
    """

    scheduler: DecodeScheduler
    transfers: DecodeTransfers
    _recorder: Recorder | None = None
    _host: HostMemory | None = None
    _counters = _DECODE_COUNTERS

    def __init__(
        self,
        pool: KVPool,
        config: DecodeConfig | None = None,
        ranks: RankLog | None = None,
        mesh: Mesh | None = None,
        state: StatePool | None = None,
        transport: MakeTransport | None = None,
    ) -> None:
        super().__init__(pool, state)
        config = checked_config(config, DecodeConfig)
        spec = RankSpec.of(pool, config.model, mesh, state=state)
        layout = pool.layout
        # 1. Everything that can be refused without undoing anything.
        if ranks is not None:
            check_kind("ranks", ranks, RankLog)
        check_callable("transport", transport)
        num_ranks = spec.mesh.num_ranks
        if num_ranks > 1 and ranks is None:
            raise ConfigError(f"a mesh of {num_ranks} ranks needs a RankLog")
        # The other ranks would have to compute the same chunks, and no log tells them.
        if config.compute is not None and ranks is not None:
            what = "several ranks"
            raise ConfigError(f"compute: a decode worker with {what} does not compute prompts")
        _check_decode_checkpoints(config, spec)
        # A log alone, without a mesh, makes no copies on other ranks.
        if config.host_memory is not None and ranks is not None and num_ranks == 1:
            what = "ranks without a mesh"
            raise ConfigError(f"host_memory: a decode worker with {what} keeps nothing there")
        check_own_memory(layout)
        if config.compute is not None and not all(group.window for group in pool.groups):
            raise ConfigError("compute: not with a pool of aligned groups of layers")
        # 2. The pages, the tree, and the scheduler over them, then the transfer side, which starts
        # the threads. If one fails, those before it are undone: the next node may have a policy
        # object, and host memory is given back.
        with ExitStack() as undo:
            self._build(config, spec, ranks, mesh, state, transport, undo)
            undo.pop_all()
        # 3. What observes all this, and may still fail: then the node is closed.
        self._leader = RankLeader(self.scheduler, num_ranks, ranks, self.transfers.submit)
        self.peer_id = self.transfers.peer_id
        self._observe(decode_journal.timeline)
        self._recorder = self._record(config, layout.kv_bytes_per_token * num_ranks)
        self._publish_events(config)

    def _build(
        self,
        config: DecodeConfig,
        spec: RankSpec,
        ranks: RankLog | None,
        mesh: Mesh | None,
        state: StatePool | None,
        transport: MakeTransport | None,
        undo: ExitStack,
    ) -> None:
        """Make the parts of a decode node. `undo` gets what ends each of them."""
        pool, layout = self.pool, self.pool.layout
        host = None
        if config.host_memory is not None:
            self._host = HostMemory(pool, config.host_memory, config.name)
            undo.callback(self._host.close)
            host = self._host.num_pages, config.host_memory.policy or config.policy, False
        # As rank 0 of several, each operation on the pages is logged for the others.
        settings = config.for_page_manager(layout.num_pages, spec.num_slots)
        pages: PageManager
        if ranks is None:
            pages = PageManager(
                layout.num_pages,
                layout.page_size,
                config.max_running,
                **settings,
                windows=window_specs(pool),
            )
        else:
            ranks.host_pages = 0 if self._host is None else self._host.num_pages
            pages = ReplicatedPageManager(
                ranks.append,
                layout.num_pages,
                layout.page_size,
                config.max_running,
                windows=window_specs(pool),
                **settings,
            )
        undo.callback(pages.cache.policy.release)
        _check_windows(pages, layout.page_size)
        self._ranks = ranks
        self.config = config
        self.scheduler = DecodeScheduler(
            pages,
            reserve_tokens=config.reserve_tokens,
            max_retries=config.num_retries,
            retarget=config.retarget,
            admission=config.admission,
            patience_s=config.admission_patience_s,
            waiting_timeout_s=config.admission_wait_s,
            shares=PrefillShares(config.prefill_share * layout.num_pages, self._ready),
            lanes=Lanes(gated=True, patience_s=config.control.bootstrap_timeout_s),
            name=config.name,
            ticket=secret_number,
            weights_version=config.model.weights_version,
            sources=Sources(
                config.compute, config.failure_policy == "local", loads=self._host is not None
            ),
            host=host,
            checkpoint_tokens=config.checkpoint_tokens,
        )
        if self.scheduler.host is not None:
            undo.callback(self.scheduler.host.cache.policy.release)
        self.transfers = DecodeTransfers(pool, config, mesh, state=state, transport=transport)
        undo.callback(self.transfers.close)
        if self._host is not None:
            self._host.start(self.transfers.thread.events.put)

    def _record(self, config: DecodeConfig, bytes_per_token: int) -> Recorder | None:
        """Let the journal of the decode node's scheduler write to the recorder too, if one is asked
        for."""
        if config.record is None:
            return None
        # Threads run already, and the caller gets no node to close.
        try:
            recorder = Recorder(
                config.record,
                max_bytes=config.record_bytes,
                max_files=MAX_FILES,
                block_tokens=config.record_block_tokens,
                page_size=self.pool.layout.page_size,
                bytes_per_token=bytes_per_token,
                now_s=time.monotonic(),
            )
        except BaseException:
            self.close()
            raise
        journal = self.scheduler.journal
        log = journal.on_ended
        assert log is not None

        def ended(req: DecodeRequest, now_s: float) -> None:
            recorder.ended(req, now_s)
            log(req, now_s)

        journal.on_ended = ended
        return recorder

    def close(self) -> None:
        """Close the decode node, its recorder last: that writes what waits. See `Node.close`."""
        try:
            super().close()
        finally:
            # Copies that run end first: the caller may give the pool back when this returns.
            if self._host is not None:
                self._host.close()
            if self._recorder is not None:
                self._recorder.close()

    def add(self, request: Request) -> DecodeRequest:
        """Queue a request of the engine on the decode node.

        Raises:
            RequestError: it cannot be taken; DrainingError is one of them. Nothing was changed, and
                prefill does not hear of it: see `refuse`.
        """
        check_request(request)
        self._check_namespace(request)
        if self._ranks is not None:
            self._ranks.check(request)
        req = self.scheduler.add(request, self._pump())
        self._tell()
        return req

    def refuse(self, request: Request, reason: str = "refused") -> None:
        """Tell prefill at once that the decode node will not take this request, as when `add` has
        refused it.

        Its room's number is in use here until prefill has answered.

        Raises:
            RequestError: the number is in use already. Nothing was changed.
        """
        check_request(request)
        check_reason(reason)
        self._pump()
        self.scheduler.refuse(request, AbortedError(reason))
        self._tell()

    def pop_preallocated(self) -> list[DecodeRequest]:
        """Return the requests that the decode node admits now: prefix locked, pages taken, the rest
        asked of prefill.

        Call it once per pass. The first request to a prefill worker is admitted when that has
        answered, by a later call, and `wait` returns for it.
        """
        now_s = self._pump()
        if self._host is not None:
            self.scheduler.host_ready(self._host.ready_pages)
        admitted = self.scheduler.pop_preallocated(now_s)
        self._tell()
        return admitted

    def pop_transferred(self) -> list[DecodeRequest]:
        """Return the decode node's requests with KV complete in `req.pages`; `req.aux` came with
        it.

        They run from now on.
        """
        return self.scheduler.pop_transferred(self._pump())

    def pop_local(self) -> list[DecodeRequest]:
        """Return the decode node's requests that the engine computes itself from now on, from
        `prefix_len` to `fill_len` tokens (see `DecodeConfig.compute`).

        Compute chunks of at most `chunk_tokens` beside the running batch, and call `computed` after
        each. Call this once a pass: what is computed until the next call is measured as one. A
        request that came out of `pop_failed` is to be left.
        """
        return self.scheduler.pop_local(self._pump())

    def computed(self, req: DecodeRequest, end: int, aux: bytes = b"") -> None:
        """Tell the decode node that a request of `pop_local` has KV in `req.pages` up to token
        `end`.

        With `end` at `req.fill_len` it is whole, and comes out of `pop_transferred` with `aux`, as
        if prefill had sent it. One with extra state may lack nothing but that: then `prefix_len` is
        `fill_len`, and so is `end`. With window groups a chunk has `step_tokens` of them at most,
        and a checkpoint is kept where one ends at one of `req.stops`. What the device has still to
        write has to be written before any later work of it on these pages; at `fill_len` it has to
        be done, where something was computed that is cached already (from a checkpoint on): these
        pages are free then. A request that has ended meanwhile is left out.

        Raises:
            RequestError: it is not computed here, or `end` is not behind the last one, or beyond
                `fill_len`. CallerError: `aux` is no bytes, or comes before the end. Nothing was
                changed.
        """
        self.scheduler.computed(req, end, self._pump(), aux)
        self._tell()

    def save_state(self, req: DecodeRequest, end: int) -> int:
        """Return the slot into which the engine copies the extra state behind `end` tokens of a
        request of `pop_local`, one of `req.stops`, for the decode node to go on from; -1 if it need
        not.

        Before `computed(req, end)` or a later one: with that its stops up to there are over.

        Raises:
            RequestError: another place, or a request that is not computed here. Nothing was
                changed.
        """
        return self.scheduler.save_state(req, end, self._pump())

    def save_states(self, reqs: Sequence[DecodeRequest]) -> list[tuple[int, int]]:
        """Return the copies of extra state that the engine makes before a step of these running
        requests of the decode node: (from, to) slots of the StatePool, for those of them that are
        at a page boundary.

        A request keeps one state so: the next one takes its place, and `finish` and `retract` enter
        the last in the cache. Call it where `req.state_slot` has the state behind `req.kv_len`
        tokens. Without `DecodeConfig.checkpoints` there are none. O(requests).

        Raises:
            RequestError: for what is no request of this node. Nothing was changed.
        """
        return self.scheduler.save_states(reqs, self._pump())

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of prompts that the decode node's engine should compute in its next step, so
        that those that run wait no longer for it than `ComputeConfig.itl_share` says; 0 where that
        step has to go without, and without a `DecodeConfig.compute`."""
        return self.scheduler.chunk_tokens

    @property
    def further_prompt_tokens(self) -> int:
        """Tokens of the decode node's `chunk_tokens` that each prompt after the first in the same
        step counts for, besides its own; 0 where nothing runs, or none was measured."""
        return self.scheduler.further_prompt_tokens

    def give_up_prefill(self, rid: str, reason: str = "prefill was not reached") -> bool:
        """Tell the decode node that the engine could not bring a request to its prefill worker:
        then it need not wait for a deadline. It is tried again, computed here, or fails, as
        `DecodeConfig.failure_policy` says.

        Returns False if nothing is asked of prefill for it, or no more.
        """
        check_reason(reason)
        given_up = self.scheduler.give_up_prefill(rid, TransferError(reason), self._pump())
        self._tell()
        return given_up

    def pop_failed(self, after: DeviceEvent | None = None) -> list[DecodeRequest]:
        """Return the decode node's requests that failed or were aborted; `req.error` says why.

        Their pages must not be touched.

        Args:
            after: an event behind the engine's work on requests of `pop_local`: nothing of those
                that failed is released before it is done. None: the device is done with them.
        """
        self._pump()
        return self.scheduler.pop_failed(after)

    def pop_needs_prefill(self) -> list[PrefillAsk]:
        """Return the decode node's requests for the engine to submit to a prefill worker again."""
        self._pump()
        return self.scheduler.pop_needs_prefill()

    def append_many(self, reqs: Sequence[DecodeRequest], token_ids: Sequence[int]) -> None:
        """Add the token that the engine has newly sampled to each request of the decode node;
        afterwards the page for its KV is there.

        The exception is the token that completes `max_new_tokens`: finish that request, no step
        writes its KV. Requests that were aborted meanwhile are left out.

        Raises:
            OutOfPagesError: its `retract` names the requests to retract, best first. It is empty if
                what is missing comes back by itself: wait a step. Nothing was changed: keep the
                tokens, and call again.
        """
        self.scheduler.append_many(reqs, token_ids, self._pump())

    def reserve_many(self, reqs: Sequence[DecodeRequest], num_tokens: int) -> None:
        """Take pages of the decode node for the KV of `num_tokens` tokens from the `kv_len` of each
        request on, as far as its `max_new_tokens` goes.

        For a step that writes more KV than that of the newest token: drafts, or a step that is
        launched before the last one's tokens are known. `append_many` gives pages for one token.
        What is not used stays with the request until its next tokens need it, or it ends or is
        retracted; there is nothing to give back. Requests that were aborted meanwhile are left out.

        Args:
            num_tokens: tokens, at least 0; the newest one counts, which has no KV yet.

        Raises:
            OutOfPagesError: its `retract` names requests as by `append_many`. Nothing was changed:
                a step without drafts needs no more pages than there are.
            RequestError: a request does not run, or is named twice. Nothing was changed.
        """
        self.scheduler.reserve_many(reqs, num_tokens, self._pump())

    def finish(
        self,
        req: DecodeRequest,
        after: DeviceEvent | None = None,
        continues: bool | None = None,
        keep_tokens: int | None = None,
    ) -> None:
        """End a request that is done on the decode node: what has KV becomes cached prefix.

        Nothing is released before `after.query()` is True. `continues` says whether the
        conversation will go on, if known. With `keep_tokens` only the whole pages of the first that
        many tokens of prompt and output are cached: for a model's thinking, which clients leave out
        of the next turn. The prompt stays cached in any case, as it was since it arrived.
        """
        self.scheduler.finish(req, self._pump(), after, continues, keep_tokens)
        self._tell()

    def retract(self, rid: str, after: DeviceEvent | None = None) -> None:
        """Take a running request's pages back on the decode node; it queues again and resumes where
        it was."""
        self.scheduler.retract(rid, self._pump(), after)
        self._tell()

    def abort(self, rid: str, after: DeviceEvent | None = None) -> bool:
        """End a request wherever it is in the decode node; it comes out of `pop_failed`.

        Returns False if it is unknown or has ended.
        """
        known = self.scheduler.abort(rid, self._pump(), after=after)
        self._tell()
        return known

    def flush(self, weights_version: str | None = None, after: DeviceEvent | None = None) -> int:
        """Empty the decode node's prefix cache, after a weight update. Returns the pages freed at
        once.

        Without `weights_version`, or with the version that the node has already, requests that run
        now finish but cache nothing. With another version everything that has KV or output of the
        former one ends, and comes out of `pop_failed` with a WeightsVersionError: what runs, what
        is on its way, what was retracted. What only waits to be admitted goes on, and is promised
        under the new version. A prefill worker of another version refuses it by name, so both
        workers have to be moved, in any order. No step of the model may come between the change of
        the weights and this call.

        Args:
            weights_version: at most 256 characters.
            after: as of `abort`, for the pages of the requests that end.

        Raises:
            ConfigError: no string, or one that is too long. Nothing was changed.
        """
        check_event("after", after)
        return self._flush(
            weights_version,
            lambda version, now_s: self.scheduler.move_weights(version, now_s, after),
        )

    def retarget(self, rid: str, prefill: str) -> None:
        """Send a request of the decode node to the prefill worker at another address from its next
        attempt on.

        One that waits to be admitted is refused where it was submitted, and comes out of
        `pop_needs_prefill` once admitted.

        Raises:
            RequestError: it is not here, or its KV is on its way. Nothing was changed.
        """
        self._pump()
        self.scheduler.retarget(rid, prefill)
        self._tell()

    def stats(self) -> dict[str, int]:
        """Return the decode node's counters, and pages by state. `skipped_tokens` counts tokens on
        their way with another's flight too, `DecodeRequest.hit_tokens` does not."""
        stats = super().stats()
        if (recorder := self._recorder) is not None:
            stats |= {"recorded": recorder.recorded, "record_lost": recorder.lost}
        waiting = self.scheduler.waiting
        host, points = self.scheduler.host, self.scheduler.points
        stats |= _checkpoint_counts(self.scheduler.pages)
        stats["cut_tokens"] = 0 if points is None else points.cut_tokens
        stats |= {
            "host_pages": 0 if host is None else host.num_ready,
            "host_pages_cached": 0 if host is None else host.allocator.cached_pages,
            "host_copies": 0 if host is None else len(host),
        }
        stats |= {f"aside_{why}": num for why, num in waiting.aside().items()}
        stats |= {f"stepped_aside_{why}": num for why, num in waiting.stepped_aside.items()}
        return stats

    def take_log(self) -> bytes:
        """Return what the other tensor-parallel ranks have to apply of this decode node's pass, for
        the engine to broadcast once per pass.

        Raises:
            CallerError: the node was built without `ranks`.
        """
        if self._ranks is None:
            raise CallerError("this node was built without ranks=RankLog()")
        return self._ranks.take(self.scheduler.pages)

    def fence(self, peer: str, incarnation: int) -> None:
        """Take the caller's word that this prefill process is dead: its rooms on the decode node
        end, and their held pages come back."""
        self._check_open()
        self._command(Fence(peer_id(peer, incarnation)))

    def fence_rank(self, rank: int, after: DeviceEvent | None = None) -> None:
        """Take the caller's word that the process of another rank of this decode worker is dead.

        The worker computes no more: every request ends with a PeerLostError and comes out of
        `pop_failed`, `add` takes none, and no page waits for that rank. So `drain` becomes True as
        on a worker of the ranks that are left; these go on to get the log until then. What the
        dead one said that comes later is left out.

        Args:
            rank: from 1. Never one that lives: its pages would be used while prefill writes them.
            after: as of `abort`, for the pages of the requests that end.

        Raises:
            CallerError: there is no such rank. Nothing was changed.
        """
        check_event("after", after)
        self._leader.fence(rank, self._pump(), after)
        self._tell()

    def awaited_ranks(self) -> dict[int, int]:
        """Return, by decode rank, how many rooms wait for what it alone has not said. A rank that
        stays there is dead (`fence_rank`), or a peer that writes to it (its `lost_peers`)."""
        return {} if self._leader.rooms is None else self._leader.rooms.awaited()

    def peers(self) -> dict[str, tuple[PeerId | None, str]]:
        """Return the prefill workers of the decode node: by address, the identity, and "ready",
        "suspect" or "connecting". Any thread may ask."""
        return self.transfers.peers()

    def lost_peers(self) -> LostPeers:
        """Return the prefill processes to think of fencing on the decode node: suspect or over, and
        may still write pages. Any thread may ask.

        Over means replaced, fenced, or left. For each: what is wrong, and how many pages. Fence
        those that are dead.
        """
        return self.transfers.lost_peers()

    def _ready(self) -> list[str]:
        """Return the addresses of the prefill workers that answer the decode node now."""
        return [address for address, (_, state) in self.peers().items() if state == "ready"]

    def _take_commands(self) -> list[DecodeCommand]:
        """Return and remove the commands of the decode node's scheduler."""
        return self.scheduler.take_commands()

    def _take(self, event: DecodeEvent | WorkerEvent | HostCopyDone, now_s: float) -> None:
        """Hand an event of a room to the decode node's leader, which waits for the other ranks
        before the scheduler hears it; the end of a copy to the scheduler."""
        if isinstance(event, HostCopyDone):
            self._leader.on_copy(0, event, now_s)
        else:
            self._leader.on(event, now_s)

    def _tell(self) -> None:
        """Hand the commands and copies of the decode node's scheduler to their threads. See
        `Node._tell`."""
        if self._host is not None:
            for order in self.scheduler.take_copies():
                self._host.submit(order)
                if self._ranks is not None:
                    self._ranks.copy(order)
        super()._tell()

    def apply_rank_events(self, raw: bytes) -> None:
        """Take the events of a `DecodeRank` (its `take_rank_events`) into the decode node, rank 0;
        b"" is nothing.

        Raises:
            CallerError: a batch of this rank is missing or doubled: each has to come, in order.
        """
        self._leader.on_rank_events(raw, self._pump())
        self._tell()

    def _command(self, command: DecodeCommand) -> None:
        """Hand a command to the decode node's leader, which logs it for the other ranks too."""
        self._leader.command(command)


class PrefillNode(Node[PrefillCommand, bytes, PrefillEvent]):
    """A prefill worker: its prefix cache and the sending side. Used from one thread.

    Args:
        pool: the KV memory; kept until the node has closed.
        config: see PrefillConfig.
        mesh, rank: how the model is shared out over the ranks of this worker, and which of them
            this is. Every rank is a PrefillNode with its own share, and gets the same requests and
            chunks. None: the only rank.
        endpoints: on rank 0, the `endpoint` of each other rank, in order: `Request.prefill` names
            rank 0's.
        state: this rank's share of the extra state of requests. Its slots are the engine's: one
            that it names in `send_chunk(last=True, state_slot=)` must be left alone until the
            request is popped as sent or failed.
        usable_prefix: called for a hit in this worker's own cache, with the request and the tokens
            that hit. Returns from how many of them the engine can go on, having the extra state
            behind them; rounded down to whole pages. By default none where there is extra state
            without `PrefillConfig.checkpoints`, all where there is none.
        transport: makes another transport than NIXL's, for tests.
        ranks: on rank 0 of several: the others are `PrefillRank`s, which follow this node's cache
            and its checkpoints (`take_log`). Without, each is a PrefillNode with a cache of its
            own.

    Raises:
        ConfigError: an address that cannot be bound, an unknown policy, a pool that is not this
            rank's share or cannot be registered, `checkpoints` without as many slots of extra state
            and one more, with several ranks and no `ranks`, or with `usable_prefix`.
    """

    scheduler: PrefillScheduler
    transfers: PrefillTransfers
    _counters = _PREFILL_COUNTERS

    def __init__(
        self,
        pool: KVPool,
        config: PrefillConfig | None = None,
        mesh: Mesh | None = None,
        rank: int = 0,
        endpoints: Sequence[str] = (),
        state: StatePool | None = None,
        usable_prefix: UsablePrefix | None = None,
        transport: MakeTransport | None = None,
        ranks: PrefillLog | None = None,
    ) -> None:
        super().__init__(pool, state)
        config = checked_config(config, PrefillConfig)
        # The same order as in `DecodeNode`: refuse, build, start threads, observe.
        spec = RankSpec.of(pool, config.model, mesh, rank, state)
        check_callable("usable_prefix", usable_prefix)
        if ranks is not None:
            check_kind("ranks", ranks, PrefillLog)
            if rank:
                raise ConfigError(f"ranks: rank {rank} that follows a PrefillLog is a PrefillRank")
        num_ranks = spec.mesh.num_ranks
        _check_checkpoints(config.checkpoints, spec, usable_prefix, ranks is not None)
        layout = pool.layout
        check_own_memory(layout)
        pages = PageManager(
            layout.num_pages,
            layout.page_size,
            config.max_running,
            caching=config.cache,
            policy=config.policy,
            reserved_pages=check_reserved(config.reserved_pages, layout.num_pages),
            num_checkpoints=config.checkpoints,
            windows=window_specs(pool),
        )
        try:
            _check_windows(pages, layout.page_size)
        except BaseException:
            pages.cache.policy.release()
            raise
        self.config = config
        self.scheduler = PrefillScheduler(
            pages,
            max_aux_bytes=config.control.max_aux_bytes,
            num_slots=max(0, spec.num_slots - config.checkpoints),
            usable_prefix=usable_prefix,
            follow_s=config.follow_s,
            in_step=num_ranks > 1 and ranks is None,
            weights_version=config.model.weights_version,
            checkpoint_tokens=config.checkpoint_tokens,
        )
        try:
            self.transfers = PrefillTransfers(
                pool, config, mesh, rank, endpoints, state=state, transport=transport
            )
        except BaseException:
            pages.cache.policy.release()  # the next node may have it
            raise
        self.peer_id = self.transfers.peer_id
        self._ranks = ranks
        self._rank_rooms: PrefillRankRooms | None = None
        if ranks is not None:
            sizes = layout.num_pages, layout.page_size, spec.num_slots
            ranks.settings = settings_of(*sizes, window_specs(pool))
            self._rank_rooms = PrefillRankRooms(num_ranks)
        self._observe(prefill_journal.timeline)
        # The ranks cache the same, so one of them publishes.
        if rank == 0:
            self._publish_events(config)

    @property
    def endpoint(self) -> str:
        """Bound address of the prefill node, which `Request.prefill` names."""
        return self.transfers.endpoint

    def add(self, request: Request) -> PrefillRequest:
        """Take a request of the engine into the prefill node; it waits for decode's promise.

        Raises:
            RequestError: nothing was changed here. Decode hears of it as by `refuse`, unless the
                room is in use.
        """
        check_request(request)
        try:
            self._check_namespace(request)
        except RequestError as error:
            self.refuse(request, str(error))
            raise
        try:
            return self.scheduler.add(request, self._pump())
        # Also after an error: the scheduler's refusal is a command.
        finally:
            self._tell()

    def refuse(self, request: Request, reason: str = "refused") -> None:
        """Tell decode at once that the prefill node will not take this request.

        If decode promises its pages later, it hears it then, for `parked_timeout_s`.

        Raises:
            RequestError: the request is here, or names no decode worker.
        """
        check_request(request)
        check_reason(reason)
        self._pump()
        self.scheduler.refuse(request, reason)
        self._tell()

    def pop_bootstrapped(self, limit: int | None = None) -> list[PrefillRequest]:
        """Return the requests for the prefill node's engine to compute now: `decode_prefix_len` and
        `prefix_len` are known, `pages` are there.

        At most `limit`, first come first served. But one that needs a prefix which another request
        computes comes when that is there, or will not come.
        """
        ready = self.scheduler.pop_bootstrapped(self._pump(), limit)
        self._tell()
        return ready

    def send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: DeviceEvent | None = None, state_slot: int = -1,
    ) -> int:  # fmt: skip
        """Send from the prefill node what decode lacks of a request's KV up to token `end`,
        computed once `ready.query()` is True.

        With `last`, the extra state in `state_slot`, the outcome and `aux` follow. Returns the
        number of pages queued.
        """
        now_s = self._pump()
        queued = self.scheduler.send_chunk(
            req, end, now_s, last=last, aux=aux, ready=ready, state_slot=state_slot
        )
        self._tell()
        return queued

    def save_state(self, req: PrefillRequest, end: int) -> int:
        """Return the slot of the StatePool into which the prefill node's engine copies the extra
        state of a request behind `end` tokens, one of its `stops`, which it has just computed; -1
        if it need not.

        Before the chunk up to there is handed over by `send_chunk`. The copy has to be queued
        before any later work on that slot. The slot is the library's from then on.

        Raises:
            RequestError: `end` is none of its stops, or it is not computed. Nothing was changed.
        """
        return self.scheduler.save_state(req, end, self._pump())

    def pop_sent(self) -> list[PrefillRequest]:
        """Return the requests that are done on the prefill node: decode has all of their KV."""
        return self.scheduler.pop_sent(self._pump())

    def pop_failed(self, after: DeviceEvent | None = None) -> list[PrefillRequest]:
        """Return the prefill node's requests that failed or were aborted; `req.error` says why.

        The engine has to stop computing them. One with extra state handed over comes when no write
        reads that any more. `after`: device work launched for them before this call has ended once
        its `query()` is True.
        """
        return self.scheduler.pop_failed(self._pump(), after)

    def abort(self, rid: str) -> bool:
        """End a request of the prefill node; it comes out of `pop_failed`. Returns False if it is
        unknown or has ended."""
        known = self.scheduler.abort(rid, self._pump())
        self._tell()
        return known

    def flush(self, weights_version: str | None = None) -> int:
        """Empty the prefill node's prefix cache, after a weight update. Returns the pages freed at
        once.

        Without `weights_version`, or with the version that the node has already, requests that run
        now finish but cache nothing. With another version everything that was promised pages under
        the former one, or is computed with it, fails: it comes out of `pop_failed` with a
        WeightsVersionError, and decode hears of it at once. What waits for decode's promise goes
        on. No step of the model may come between the change of the weights and this call. Each rank
        of a mesh is moved by itself; until all are, requests fail.

        Args:
            weights_version: at most 256 characters.

        Raises:
            ConfigError: no string, or one that is too long. Nothing was changed.
        """
        return self._flush(weights_version, self.scheduler.move_weights)

    def fence(self, peer: str, incarnation: int) -> None:
        """Take the caller's word that this decode process is dead: its requests on the prefill node
        fail."""
        self._check_open()
        self._command(Fence(peer_id(peer, incarnation)))

    def fence_rank(self, rank: int) -> None:
        """Take the caller's word that the process of a `PrefillRank` of this prefill worker is
        dead.

        The worker computes no more: every request ends with a PeerLostError and comes out of
        `pop_failed` (but one that has been sent, out of `pop_sent`), decode hears of it at once,
        `add` takes none, and no page waits for that rank. So `drain` becomes True as on a worker of
        the ranks that are left; these go on to get the log until then. What the dead one said that
        comes later is left out.

        Args:
            rank: from 1. Never one that lives: it would send what is in its pages then.

        Raises:
            CallerError: there is no such rank, or the node was built without `ranks`. Nothing was
                changed.
        """
        rooms = self._led_rooms
        now_s, error = self._pump(), rooms.death(rank)
        self.scheduler.end_all(error, now_s)
        self._pass_on(*rooms.fence(rank), now_s)
        self._tell()

    def awaited_ranks(self) -> dict[int, int]:
        """Return, by prefill rank, how many rooms wait for what it alone has not said. A rank that
        stays there is dead (`fence_rank`), or a peer that it writes to (its `lost_peers`)."""
        return {} if self._rank_rooms is None else self._rank_rooms.awaited()

    @property
    def _led_rooms(self) -> PrefillRankRooms:
        """Rooms of the ranks that follow the prefill node. Raises CallerError where there are
        none."""
        if self._rank_rooms is None:
            raise CallerError("this node was built without ranks=PrefillLog()")
        return self._rank_rooms

    def peers(self) -> dict[PeerId, str]:
        """Return "ready" or "suspect" for each decode rank that the prefill node knows. Any thread
        may ask."""
        return self.transfers.peers()

    def lost_peers(self) -> LostPeers:
        """Return the decode processes to think of fencing on the prefill node: suspect or over, and
        still in rooms here. Any thread may ask.

        Over means replaced, fenced, or left. For each: what is wrong, and how many rooms.
        """
        return self.transfers.lost_peers()

    @property
    def bytes_sent(self) -> int:
        """KV bytes that the prefill node has written to decode workers. Any thread may ask."""
        return self.transfers.bytes_sent

    def stats(self) -> dict[str, int]:
        """Return the prefill node's counters, pages by state, checkpoints, and the bytes that were
        not sent because decode had them."""
        stats = super().stats()
        stats |= _checkpoint_counts(self.scheduler.pages)
        layout = self.pool.layout
        skipped_pages = stats.get("decode_hit_tokens", 0) // layout.page_size
        stats["bytes_skipped"] = skipped_pages * layout.page_bytes
        return stats

    def _take_commands(self) -> list[PrefillCommand]:
        """Return and remove the commands of the prefill node's scheduler."""
        return self.scheduler.take_commands()

    def _command(self, command: PrefillCommand) -> None:
        """Hand a command of the prefill node's scheduler to its control thread, and log it for the
        ranks that follow."""
        super()._command(command)
        if self._ranks is not None:
            self._ranks.command(command)

    def take_log(self) -> bytes:
        """Return what the ranks that follow have to apply of this prefill node's pass, for the
        engine to broadcast: once a pass, before they compute, and once the chunks of a pass were
        handed over.

        Raises:
            CallerError: the node was built without `ranks`.
        """
        if self._ranks is None:
            raise CallerError("this node was built without ranks=PrefillLog()")
        return self._ranks.take(self.scheduler.requests.values())

    def apply_rank_events(self, raw: bytes) -> None:
        """Take the events of a `PrefillRank` (its `take_rank_events`) into the prefill node, rank
        0; b"" is nothing.

        Raises:
            CallerError: a batch of this rank is missing or doubled: each has to come, in order; or
                the node was built without `ranks`.
        """
        rooms, now_s = self._led_rooms, self._pump()
        if raw != b"":
            for rank, event in rooms.unpack(raw):
                self._join(rank, event, now_s)
        self._tell()

    def _take(self, event: PrefillEvent, now_s: float) -> None:
        """Take an event of a room of the prefill node's own rank, which is joined with those of the
        ranks that follow."""
        if self._rank_rooms is not None:
            self._join(0, event, now_s)
        else:
            self._hear(event, now_s)

    def _join(self, rank: int, event: PrefillEvent, now_s: float) -> None:
        """Join an event of a room on one rank with the others', for the prefill node's
        scheduler."""
        assert self._rank_rooms is not None
        self._pass_on(*self._rank_rooms.on(rank, event), now_s)

    def _pass_on(
        self, events: Sequence[PrefillEvent], commands: Sequence[PrefillCommand], now_s: float
    ) -> None:
        """Pass on what the prefill node has joined of its ranks."""
        # Before the scheduler hears: it may use the room's number again.
        for command in commands:
            self._command(command)
        for joined in events:
            self._hear(joined, now_s)

    def _hear(self, event: PrefillEvent, now_s: float) -> None:
        """Tell the prefill node's scheduler what became of a room: bootstrapped, ended, or its
        source free."""
        match event:
            case Bootstrapped():
                peer = event.peer.name
                self.scheduler.room_bootstrapped(event.key, event.prefix_len, peer, now_s)
            case RoomEnded():
                self.scheduler.room_ended(event.key, event.poll, event.error, now_s)
            case SourceFree():
                self.scheduler.source_free(event.key, now_s)
            case _:
                assert_never(event)


def _checkpoint_counts(pages: PageManager) -> dict[str, int]:
    """Return how many checkpoints a node has, may have, and has given up for others."""
    points = pages.checkpoints
    return {
        "checkpoints": 0 if points is None else len(points),
        "checkpoint_slots": 0 if points is None else points.num_slots,
        "checkpoints_evicted": 0 if points is None else points.evicted,
    }


def _check_decode_checkpoints(config: DecodeConfig, spec: RankSpec) -> None:
    """Raise ConfigError for checkpoints that a decode node cannot have, or lacks."""
    num_checkpoints, why = config.checkpoints, ""
    has_windows = bool(spec.layout.windows)
    if spec.state is None and not has_windows:
        if num_checkpoints:
            why = "they are of extra state (state=) or of window groups, and there is neither"
    elif config.compute is not None and not num_checkpoints:
        what = "extra state (state=)" if spec.state is not None else "window groups"
        raise ConfigError(f"compute: with {what} it needs checkpoints, which are 0")
    elif num_checkpoints and spec.state is not None and spec.num_slots <= num_checkpoints:
        why = f"the extra state has {spec.num_slots} slots, and requests need some"
    if why:
        raise ConfigError(f"checkpoints: {num_checkpoints}: {why}")


def _check_checkpoints(
    num_checkpoints: int, spec: RankSpec, usable_prefix: UsablePrefix | None, has_log: bool
) -> None:
    """Raise ConfigError for checkpoints that a prefill node of this rank cannot have. `has_log`:
    the other ranks follow it."""
    if usable_prefix is not None and spec.layout.windows:
        raise ConfigError("usable_prefix: a pool with window groups goes on at checkpoints alone")
    if not num_checkpoints:
        return
    why = ""
    # Without extra state a checkpoint has window pages alone.
    only_windows = spec.state is None and bool(spec.layout.windows)
    if not only_windows and spec.num_slots <= num_checkpoints:
        why = f"the extra state has {spec.num_slots} slots, and the engine needs some"
    elif spec.mesh.num_ranks > 1 and not has_log:
        why = (
            "a prefill worker of several ranks keeps them on rank 0 alone, built with "
            "ranks=PrefillLog(); the others are PrefillRanks"
        )
    elif usable_prefix is not None:
        why = "usable_prefix says where the engine goes on"
    if why:
        raise ConfigError(f"checkpoints: {num_checkpoints}: {why}")


def _check_windows(pages: PageManager, page_size: int) -> None:
    """Raise ConfigError for a window group of a node in which not even one request has room."""
    for group in pages.windows:
        if (has := group.allocator.num_pages) < group.most_pages:
            raise ConfigError(
                f"group {group.name!r} has {has} pages; one request may need {group.most_pages} of "
                f"{page_size} tokens: window {group.window}, step_tokens {group.step_tokens}"
            )
