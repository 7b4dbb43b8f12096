"""The object that a decode engine holds.

Every method is called from the engine's scheduler thread and returns in microseconds; the node's
own threads (control, transport) are started here and joined by `close`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from prefixkv.config import DecodeConfig
from prefixkv.control.death_watch import LostPeers
from prefixkv.decode import journal as decode_journal
from prefixkv.decode.request import DecodeRequest, PrefillAsk
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.decode.sources import Sources
from prefixkv.decode.workers import Workers
from prefixkv.errors import AbortedError, CallerError, ConfigError, TransferError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import check_reason
from prefixkv.protocol.commands import DecodeCommand, Fence
from prefixkv.protocol.events import (
    DecodeEvent,
    WorkerEvent,
)
from prefixkv.protocol.host_copy import HostCopyDone
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.leader import RankLeader
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import DeviceEvent, Request, check_event, check_request
from prefixkv.runtime.decode_transfers import DecodeTransfers
from prefixkv.runtime.host_memory import HostMemory
from prefixkv.runtime.node import COUNTERS, Node, check_windows, checkpoint_counts
from prefixkv.runtime.rank_spec import (
    RankSpec,
    check_own_memory,
    checked_config,
    rank_sizes,
    window_specs,
)
from prefixkv.runtime.record import MAX_FILES, Recorder
from prefixkv.runtime.transfers import MakeTransport, peer_id, secret_number
from prefixkv.settings import check_callable, check_kind

_COUNTERS = (
    *COUNTERS, "aborted", "admitted", "compute_declined", "computed_requests", "computed_tokens",
    "failovers", "finished", "flight_fallbacks", "flights_adopted", "host_copies_failed",
    "host_hit_tokens", "host_loaded_pages", "host_loads", "host_missed_pages", "host_written_pages",
    "quarantined_pages", "record_lost", "recorded", "refused", "retracted",
    "retries", "shared_flights", "shared_tokens", "skipped_tokens", "tags_dropped", "transferred",
    "transfers_failed",
)  # fmt: skip


class DecodeNode(Node[DecodeCommand, str, DecodeEvent]):
    """A decode worker: prefix cache, admission and receiving side. Used from one thread.

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
    _counters = _COUNTERS

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
        pool, layout = self.pool, self.pool.layout
        host = None
        if config.host_memory is not None:
            self._host = HostMemory(pool, config.host_memory, config.name)
            undo.callback(self._host.close)
            host = self._host.num_pages, config.host_memory.policy or config.policy, False
        pages = PageManager(
            layout.num_pages,
            layout.page_size,
            config.max_running,
            **config.for_page_manager(layout.num_pages, spec.num_slots),
            windows=window_specs(pool),
        )
        if ranks is not None:
            host_pages = 0 if self._host is None else self._host.num_pages
            ranks.sizes = rank_sizes("decode", pool, config.max_running, spec.num_slots, host_pages)
        undo.callback(pages.cache.policy.release)
        check_windows(pages, layout.page_size)
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
            workers=Workers(
                True, config.control.bootstrap_timeout_s, config.prefill_share * layout.num_pages
            ),
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
        """Close the node, its recorder last: that writes what waits. See `Node.close`."""
        try:
            super().close()
        finally:
            # Copies that run end first: the caller may give the pool back when this returns.
            if self._host is not None:
                self._host.close()
            if self._recorder is not None:
                self._recorder.close()

    def add(self, request: Request) -> DecodeRequest:
        """Queue a request.

        Raises RequestError, with nothing changed, if it cannot be taken; DrainingError is one of
        them. Prefill does not hear of it: see `refuse`.
        """
        check_request(request)
        self._check_namespace(request)
        req = self.scheduler.add(request, self._pump())
        self._tell()
        return req

    def refuse(self, request: Request, reason: str = "refused") -> None:
        """Tell prefill at once that this request will not be taken, as when `add` has refused it.

        Its room's number is in use here until prefill has answered. Raises RequestError, with
        nothing changed, if the number is in use already.
        """
        check_request(request)
        check_reason(reason)
        self._pump()
        self.scheduler.refuse(request, AbortedError(reason))
        self._tell()

    def pop_preallocated(self) -> list[DecodeRequest]:
        """Return the requests admitted now: prefix locked, pages taken, the rest asked of prefill.

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
        """Return requests with complete KV in `req.pages` and `req.aux`: they run from now on."""
        return self.scheduler.pop_transferred(self._pump())

    def pop_local(self) -> list[DecodeRequest]:
        """Return the requests that the engine computes itself from now on, from `prefix_len` to
        `fill_len` tokens (see `DecodeConfig.compute`).

        Compute chunks of at most `chunk_tokens` beside the running batch, and call `computed` after
        each. Call this once a pass: what is computed until the next call is measured as one. A
        request that came out of `pop_failed` is to be left.
        """
        return self.scheduler.pop_local(self._pump())

    def computed(
        self, req: DecodeRequest, end: int, aux: bytes = b"", after: DeviceEvent | None = None
    ) -> None:
        """Tell the node that a request of `pop_local` has KV in `req.pages` up to token `end`.

        At `req.fill_len` it is whole, and comes out of `pop_transferred` with `aux`, as if prefill
        had sent it. A request that lacks its extra state only has `end` at `prefix_len`. With
        window groups a chunk has at most `step_tokens`, and a checkpoint is kept where it ends at
        one of `req.stops`. A request that has ended meanwhile is left out.

        Args:
            after: an event behind the device's writes up to `end`; None: the device is done. Until
                then the pages are not copied to host memory, and a request that would free some of
                them stays out of `pop_transferred`. Later work on these pages has to come behind
                it.

        Raises, with nothing changed, RequestError: it is not computed here, or `end` is not behind
        the last one, or beyond `fill_len`; CallerError: an `aux` or `after` of the wrong kind, or
        an early `aux`.
        """
        self.scheduler.computed(req, end, self._pump(), aux, after)
        self._tell()

    def save_state(self, req: DecodeRequest, end: int) -> int:
        """Return the slot into which the engine copies the extra state behind `end` tokens of a
        request of `pop_local`, one of `req.stops`; -1 if it need not.

        Before `computed(req, end)` or a later one: with that its stops up to there are over. Raises
        RequestError, with nothing changed, for another place, or a request that is not computed
        here.
        """
        return self.scheduler.save_state(req, end, self._pump())

    def save_states(self, reqs: Sequence[DecodeRequest]) -> list[tuple[int, int]]:
        """Return the copies of extra state to make before a step of these running requests: (from,
        to) slots of the StatePool, for those at a page boundary. O(requests).

        A request keeps one state so: the next one takes its place, and `finish` and `retract` enter
        the last in the cache. Call it where `req.state_slot` has the state behind `req.kv_len`
        tokens. Without `DecodeConfig.checkpoints` there are none. Raises RequestError, with nothing
        changed, for what is no request of this node.
        """
        return self.scheduler.save_states(reqs, self._pump())

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of prompts to compute in the next step, so that running requests wait no
        longer for it than `ComputeConfig.itl_share` says; 0 where that step has to go without, and
        without a `DecodeConfig.compute`."""
        return self.scheduler.chunk_tokens

    @property
    def further_prompt_tokens(self) -> int:
        """Tokens of `chunk_tokens` that each prompt after the first in a step counts for, besides
        its own; 0 where nothing runs, or none was measured."""
        return self.scheduler.further_prompt_tokens

    def give_up_prefill(self, rid: str, reason: str = "prefill was not reached") -> bool:
        """Tell the node that a request could not be brought to its prefill worker, so it need not
        wait for a deadline.

        It is tried again, computed here, or fails, as `DecodeConfig.failure_policy` says. Returns
        False if nothing is asked of prefill for it, or no more.
        """
        check_reason(reason)
        given_up = self.scheduler.give_up_prefill(rid, TransferError(reason), self._pump())
        self._tell()
        return given_up

    def pop_failed(self, after: DeviceEvent | None = None) -> list[DecodeRequest]:
        """Return the requests that failed or were aborted; `req.error` says why. Leave their pages.

        `after`: an event behind the engine's work on requests of `pop_local`: nothing of those that
        failed is released before it is done. None: the device is done with them.
        """
        self._pump()
        return self.scheduler.pop_failed(after)

    def pop_needs_prefill(self) -> list[PrefillAsk]:
        """Return the requests for the engine to submit to a prefill worker again."""
        self._pump()
        return self.scheduler.pop_needs_prefill()

    def append_many(self, reqs: Sequence[DecodeRequest], token_ids: Sequence[int]) -> None:
        """Add the newly sampled token to each request; afterwards the page for its KV is there.

        The exception is the token that completes `max_new_tokens`: finish that request, no step
        writes its KV. Requests that were aborted meanwhile are left out. Raises OutOfPagesError,
        with nothing changed: its `retract` names the requests to retract, best first. It is empty
        if what is missing comes back by itself: wait a step. Keep the tokens, and call again.
        """
        self.scheduler.append_many(reqs, token_ids, self._pump())

    def reserve_many(self, reqs: Sequence[DecodeRequest], num_tokens: int) -> None:
        """Take pages for the KV of `num_tokens` tokens from each request's `kv_len` on, as far as
        its `max_new_tokens` goes.

        For a step that writes more than the newest token's KV, which counts: drafts, or a step
        launched before the last one's tokens are known. Unused pages stay with the request. Aborted
        requests are left out.

        Raises, with nothing changed, OutOfPagesError as `append_many` (a step without drafts always
        has pages enough), and RequestError for a request that does not run, or is named twice.
        """
        self.scheduler.reserve_many(reqs, num_tokens, self._pump())

    def finish(
        self,
        req: DecodeRequest,
        after: DeviceEvent | None = None,
        continues: bool | None = None,
        keep_tokens: int | None = None,
    ) -> None:
        """End a request that is done: what has KV becomes cached prefix.

        Nothing is released before `after.query()` is True. `continues` says whether the
        conversation will go on, if known. With `keep_tokens` only the whole pages of the first that
        many tokens of prompt and output are cached: for a model's thinking, which clients leave out
        of the next turn. The prompt stays cached in any case, as it was since it arrived.
        """
        self.scheduler.finish(req, self._pump(), after, continues, keep_tokens)
        self._tell()

    def retract(self, rid: str, after: DeviceEvent | None = None) -> None:
        """Take a running request's pages back; it queues again and resumes where it was."""
        self.scheduler.retract(rid, self._pump(), after)
        self._tell()

    def abort(self, rid: str, after: DeviceEvent | None = None) -> bool:
        """End a request wherever it is; it comes out of `pop_failed`. Returns False if it is
        unknown or has ended. Nothing of it is cached but its prompt, and what a retraction has
        cached."""
        known = self.scheduler.abort(rid, self._pump(), after=after)
        self._tell()
        return known

    def fail(self, rid: str, error: Exception, after: DeviceEvent | None = None) -> bool:
        """End a request of which the engine has computed what must not be used: NaN, say
        (`NotFiniteError`). It comes out of `pop_failed` with `error`; prefill is told its name and
        its text.

        Nothing is cached that the engine has computed of it since it came out of `pop_transferred`
        or was retracted; before, nothing of what `computed` was told. Otherwise as `abort`.
        """
        known = self.scheduler.fail(rid, error, self._pump(), after)
        self._tell()
        return known

    def flush(self, weights_version: str | None = None, after: DeviceEvent | None = None) -> int:
        """Empty the prefix cache, after a weight update. Returns the pages freed at once.

        Without `weights_version`, or with the node's own, running requests finish but cache
        nothing. With another version all that has KV or output of the former one (running, on its
        way, retracted) ends, and comes out of `pop_failed` with a WeightsVersionError; what only
        waits goes on. A prefill worker of another version refuses it by name, so both have to be
        moved, in any order. No step of the model may come between the change of the weights and
        this call. `after`: as of `abort`, for requests that end. Raises ConfigError, with nothing
        changed: no string, or over 256 characters.
        """
        check_event("after", after)
        return self._flush(
            weights_version,
            lambda version, now_s: self.scheduler.move_weights(version, now_s, after),
        )

    def retarget(self, rid: str, prefill: str) -> None:
        """Send a request to another prefill worker from its next attempt on.

        One that waits to be admitted is refused where it was submitted, and comes out of
        `pop_needs_prefill` once admitted. Raises RequestError, with nothing changed, if it is not
        here, or its KV is on its way.
        """
        self._pump()
        self.scheduler.retarget(rid, prefill)
        self._tell()

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
        - `host_hit_tokens`: Tokens that were loaded from host memory.
        - `host_loads`, `host_loaded_pages`, `host_written_pages`: Loads from host memory,
          and pages that were copied each way.
        - `host_missed_pages`: Pages that were needed for others before they were copied
          there.
        - `host_copies_failed`: Copies to or from host memory that failed.
        - `host_pages`, `host_pages_cached`, `host_copies`: Host pages that can be used,
          those that are cached, and copies under way, now.
        - `transfers_failed`: Transfers that failed.
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
        if (recorder := self._recorder) is not None:
            stats |= {"recorded": recorder.recorded, "record_lost": recorder.lost}
        waiting = self.scheduler.waiting
        host, points = self.scheduler.host, self.scheduler.points
        stats |= checkpoint_counts(self.scheduler.pages)
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
        """Return what the other tensor-parallel ranks have to apply of this pass, to be broadcast
        once per pass. Raises CallerError without `ranks`."""
        if self._ranks is None:
            raise CallerError("this node was built without ranks=RankLog()")
        return self._ranks.take(self.scheduler.pages)

    def fence(self, peer: str, incarnation: int) -> None:
        """Take the caller's word that this prefill process is dead: its rooms end, and their held
        pages come back."""
        self._check_open()
        self._command(Fence(peer_id(peer, incarnation)))

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
        self._leader.fence(rank, self._pump(), after)
        self._tell()

    def awaited_ranks(self) -> dict[int, int]:
        """Return, by rank, how many rooms wait for what it alone has not said. A rank that stays
        there is dead (`fence_rank`), or a peer that writes to it (its `lost_peers`)."""
        return {} if self._leader.rooms is None else self._leader.rooms.awaited()

    def peers(self) -> dict[str, tuple[PeerId | None, str]]:
        """Return, by address, the identity of each prefill worker, and "ready", "suspect" or
        "connecting". Any thread may ask."""
        return self.transfers.peers()

    def lost_peers(self) -> LostPeers:
        """Return the prefill processes to think of fencing, that may still write pages: what is
        wrong, and how many pages. Any thread may ask.

        They are suspect or over: replaced, fenced, or left. Fence those that are dead.
        """
        return self.transfers.lost_peers()

    def _take_commands(self) -> list[DecodeCommand]:
        return self.scheduler.take_commands()

    def _take(self, event: DecodeEvent | WorkerEvent | HostCopyDone, now_s: float) -> None:
        """The leader waits for the other ranks before the scheduler hears of a room."""
        if isinstance(event, HostCopyDone):
            self._leader.on_copy(0, event, now_s)
        else:
            self._leader.on(event, now_s)

    def _tell(self) -> None:
        if self._host is not None:
            for order in self.scheduler.take_copies():
                self._host.submit(order)
                if self._ranks is not None:
                    self._ranks.copy(order)
        super()._tell()

    def apply_rank_events(self, raw: bytes) -> None:
        """Take the events of a `DecodeRank` (its `take_rank_events`); b"" is nothing. Raises
        CallerError if a batch of this rank is missing or doubled: each has to come, in order."""
        self._leader.on_rank_events(raw, self._pump())
        self._tell()

    def _command(self, command: DecodeCommand) -> None:
        self._leader.command(command)


def _check_decode_checkpoints(config: DecodeConfig, spec: RankSpec) -> None:
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
