"""The object that a prefill engine holds.

Every method is called from the engine's scheduler thread and returns in microseconds; the node's
own threads (control, transport) are started here and joined by `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from prefixkv.config import PrefillConfig, check_reserved
from prefixkv.control.death_watch import LostPeers
from prefixkv.errors import CallerError, ConfigError, RequestError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import check_reason
from prefixkv.prefill import journal as prefill_journal
from prefixkv.prefill.bootstrap_queue import UsablePrefix
from prefixkv.prefill.request import PrefillRequest
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import Fence, PrefillCommand
from prefixkv.protocol.events import (
    Bootstrapped,
    PrefillEvent,
    RoomEnded,
    SourceFree,
)
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.prefill_rooms import PrefillRankRooms
from prefixkv.ranks.row_log import RankLog
from prefixkv.request import DeviceEvent, Request, check_request
from prefixkv.runtime.node import COUNTERS, Node, check_windows, checkpoint_counts
from prefixkv.runtime.prefill_transfers import PrefillTransfers
from prefixkv.runtime.rank_spec import (
    RankSpec,
    check_own_memory,
    checked_config,
    rank_sizes,
    window_specs,
)
from prefixkv.runtime.transfers import MakeTransport, peer_id
from prefixkv.settings import check_callable, check_kind

_COUNTERS = (
    *COUNTERS, "bytes_sent", "cut_tokens", "decode_hit_tokens", "followed", "hit_tokens",
    "never_promised", "overtaken", "refused_by_peers", "sent", "staging_bytes_staged",
    "staging_pieces_written", "writes_done", "writes_drained_by_renewal", "writes_failed",
)  # fmt: skip


class PrefillNode(Node[PrefillCommand, bytes, PrefillEvent]):
    """A prefill worker: its prefix cache and the sending side. Used from one thread.

    Args:
        pool: the KV memory; kept until the node has closed.
        config: see PrefillConfig.
        mesh: how the model is shared out over the ranks of this worker, of which this is rank 0.
            None: the only rank.
        endpoints: the `endpoint` of each other rank, in order: `Request.prefill` names rank 0's.
        state: this rank's share of the extra state of requests. Its slots are the engine's: one
            that it names in `send_chunk(last=True, state_slot=)` must be left alone until the
            request is popped as sent or failed.
        usable_prefix: called for a hit in this worker's own cache, with the request and the tokens
            that hit. Returns from how many of them the engine can go on, having the extra state
            behind them; rounded down to whole pages. By default none where there is extra state
            without `PrefillConfig.checkpoints`, all where there is none.
        transport: makes another transport than NIXL's, for tests.
        ranks: with several: the others are `PrefillRank`s, which follow this node's cache
            (`take_log`).

    Raises ConfigError: an address that cannot be bound, an unknown policy, a pool that is not this
    rank's share or cannot be registered, `checkpoints` without as many slots of extra state and one
    more, or with `usable_prefix`, a mesh of several ranks without `ranks`.
    """

    scheduler: PrefillScheduler
    transfers: PrefillTransfers
    _counters = _COUNTERS

    def __init__(
        self,
        pool: KVPool,
        config: PrefillConfig | None = None,
        mesh: Mesh | None = None,
        endpoints: Sequence[str] = (),
        state: StatePool | None = None,
        usable_prefix: UsablePrefix | None = None,
        transport: MakeTransport | None = None,
        ranks: RankLog | None = None,
    ) -> None:
        super().__init__(pool, state)
        config = checked_config(config, PrefillConfig)
        # The same order as in `DecodeNode`: refuse, build, start threads, observe.
        spec = RankSpec.of(pool, config.model, mesh, 0, state)
        check_callable("usable_prefix", usable_prefix)
        if ranks is not None:
            check_kind("ranks", ranks, RankLog)
        num_ranks = spec.mesh.num_ranks
        if num_ranks > 1 and ranks is None:
            raise ConfigError(f"a mesh of {num_ranks} ranks needs a RankLog")
        _check_checkpoints(config.checkpoints, spec, usable_prefix)
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
            check_windows(pages, layout.page_size)
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
            weights_version=config.model.weights_version,
            checkpoint_tokens=config.checkpoint_tokens,
        )
        try:
            self.transfers = PrefillTransfers(
                pool, config, mesh, 0, endpoints, state=state, transport=transport
            )
        except BaseException:
            pages.cache.policy.release()  # the next node may have it
            raise
        self.peer_id = self.transfers.peer_id
        self._ranks = ranks
        self._rank_rooms: PrefillRankRooms | None = None
        if ranks is not None:
            ranks.sizes = rank_sizes("prefill", pool, config.max_running, spec.num_slots)
            self._rank_rooms = PrefillRankRooms(num_ranks)
        self._observe(prefill_journal.timeline)
        self._publish_events(config)

    @property
    def endpoint(self) -> str:
        """Bound address, which `Request.prefill` names."""
        return self.transfers.endpoint

    def add(self, request: Request) -> PrefillRequest:
        """Take a request; it waits for decode's promise. Raises RequestError, with nothing changed
        here; decode hears of it as by `refuse`, unless the room is in use."""
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
        """Tell decode at once that the node will not take this request; if it promises its pages
        later, it hears it then, for `parked_timeout_s`.

        Raises RequestError if the request is here, or names no decode worker.
        """
        check_request(request)
        check_reason(reason)
        self._pump()
        self.scheduler.refuse(request, reason)
        self._tell()

    def pop_bootstrapped(self, limit: int | None = None) -> list[PrefillRequest]:
        """Return the requests to compute now: `decode_prefix_len` and `prefix_len` are known,
        `pages` are there.

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
        """Send what decode lacks of a request's KV up to token `end`, computed once `ready.query()`
        is True. Returns the number of pages queued. With `last`, the extra state in `state_slot`,
        the outcome and `aux` follow."""
        now_s = self._pump()
        queued = self.scheduler.send_chunk(
            req, end, now_s, last=last, aux=aux, ready=ready, state_slot=state_slot
        )
        self._tell()
        return queued

    def save_state(self, req: PrefillRequest, end: int) -> int:
        """Return the slot of the StatePool into which the engine copies the extra state behind
        `end` tokens, one of the request's `stops`, just computed; -1 if it need not.

        Before the chunk up to there is handed over by `send_chunk`. The copy has to be queued
        before any later work on that slot, which is the library's from then on. Raises
        RequestError, with nothing changed, if `end` is none of its stops, or it is not computed.
        """
        return self.scheduler.save_state(req, end, self._pump())

    def pop_sent(self) -> list[PrefillRequest]:
        """Return the requests that are done: decode has all of their KV."""
        return self.scheduler.pop_sent(self._pump())

    def pop_failed(self, after: DeviceEvent | None = None) -> list[PrefillRequest]:
        """Return the requests that failed or were aborted; `req.error` says why. The engine has to
        stop computing them.

        One with extra state handed over comes when no write reads that any more. `after`: device
        work launched for them before this call has ended once its `query()` is True.
        """
        return self.scheduler.pop_failed(self._pump(), after)

    def abort(self, rid: str) -> bool:
        """End a request; it comes out of `pop_failed`. Returns False if it is unknown or has ended.
        What its chunks have brought is cached by the next `pop_bootstrapped`, unless this comes
        before that."""
        known = self.scheduler.abort(rid, self._pump())
        self._tell()
        return known

    def fail(self, rid: str, error: Exception) -> bool:
        """End a request of which the engine has computed what must not be used: NaN, say
        (`NotFiniteError`). It comes out of `pop_failed` with `error`; decode is told its name and
        its text.

        Caches no more than `abort`. Before its last chunk is sent: decode goes on from that.
        """
        known = self.scheduler.fail(rid, error, self._pump())
        self._tell()
        return known

    def flush(self, weights_version: str | None = None) -> int:
        """Empty the prefix cache, after a weight update. Returns the pages freed at once.

        Without `weights_version`, or with the node's own, running requests finish but cache
        nothing. With another version all that was promised or is computed under the former one
        fails: `pop_failed` gives a WeightsVersionError, and decode hears of it. What waits for
        decode's promise goes on. No step of the model may come between the change of the weights
        and this call. Each rank of a mesh is moved by itself. Raises ConfigError, with nothing
        changed: no string, or over 256 characters.
        """
        return self._flush(weights_version, self.scheduler.move_weights)

    def fence(self, peer: str, incarnation: int) -> None:
        """Take the caller's word that this decode process is dead: its requests fail."""
        self._check_open()
        self._command(Fence(peer_id(peer, incarnation)))

    def fence_rank(self, rank: int) -> None:
        """Take the caller's word that the process of a `PrefillRank` of this worker is dead.

        Every request ends with a PeerLostError and comes out of `pop_failed` (but one that has been
        sent, out of `pop_sent`), decode hears of it at once, `add` takes none, and no page waits
        for that rank. So `drain` becomes True as on a worker of the ranks that are left; these go
        on to get the log until then. What the dead one said that comes later is left out. `rank`:
        from 1. Never one that lives: it would send what is in its pages then. Raises CallerError:
        there is no such rank, or the node was built without `ranks`. Nothing was changed.
        """
        rooms = self._led_rooms
        now_s, error = self._pump(), rooms.death(rank)
        self.scheduler.end_all(error, now_s)
        self._pass_on(*rooms.fence(rank), now_s)
        self._tell()

    def awaited_ranks(self) -> dict[int, int]:
        """Return, by rank, how many rooms wait for what it alone has not said. A rank that stays
        there is dead (`fence_rank`), or a peer that it writes to (its `lost_peers`)."""
        return {} if self._rank_rooms is None else self._rank_rooms.awaited()

    @property
    def _led_rooms(self) -> PrefillRankRooms:
        if self._rank_rooms is None:
            raise CallerError("this node was built without ranks=RankLog()")
        return self._rank_rooms

    def peers(self) -> dict[PeerId, str]:
        """Return "ready" or "suspect" for each decode rank. Any thread may ask."""
        return self.transfers.peers()

    def lost_peers(self) -> LostPeers:
        """Return the decode processes to think of fencing, that are still in rooms here: what is
        wrong, and how many rooms. Any thread may ask.

        They are suspect or over: replaced, fenced, or left.
        """
        return self.transfers.lost_peers()

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
        stats |= checkpoint_counts(self.scheduler.pages)
        layout = self.pool.layout
        skipped_pages = stats.get("decode_hit_tokens", 0) // layout.page_size
        stats["bytes_skipped"] = skipped_pages * layout.page_bytes
        return stats

    def _take_commands(self) -> list[PrefillCommand]:
        return self.scheduler.take_commands()

    def _command(self, command: PrefillCommand) -> None:
        super()._command(command)
        if self._ranks is not None:
            self._ranks.command(command)

    def take_log(self) -> bytes:
        """Return what the ranks that follow have to apply, to be broadcast once a pass, before they
        compute, and once its chunks were handed over. Raises CallerError without `ranks`."""
        if self._ranks is None:
            raise CallerError("this node was built without ranks=RankLog()")
        return self._ranks.take(self.scheduler.pages, self.scheduler.requests.values())

    def apply_rank_events(self, raw: bytes) -> None:
        """Take the events of a `PrefillRank` (its `take_rank_events`); b"" is nothing. Raises
        CallerError if a batch of this rank is missing or doubled, or without `ranks`."""
        rooms, now_s = self._led_rooms, self._pump()
        if raw != b"":
            for rank, event in rooms.unpack(raw):
                self._join(rank, event, now_s)
        self._tell()

    def _take(self, event: PrefillEvent, now_s: float) -> None:
        if self._rank_rooms is not None:
            self._join(0, event, now_s)
        else:
            self._hear(event, now_s)

    def _join(self, rank: int, event: PrefillEvent, now_s: float) -> None:
        assert self._rank_rooms is not None
        self._pass_on(*self._rank_rooms.on(rank, event), now_s)

    def _pass_on(
        self, events: Sequence[PrefillEvent], commands: Sequence[PrefillCommand], now_s: float
    ) -> None:
        # Before the scheduler hears: it may use the room's number again.
        for command in commands:
            self._command(command)
        for joined in events:
            self._hear(joined, now_s)

    def _hear(self, event: PrefillEvent, now_s: float) -> None:
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


def _check_checkpoints(
    num_checkpoints: int, spec: RankSpec, usable_prefix: UsablePrefix | None
) -> None:
    if usable_prefix is not None and spec.layout.windows:
        raise ConfigError("usable_prefix: a pool with window groups goes on at checkpoints alone")
    if not num_checkpoints:
        return
    why = ""
    # Without extra state a checkpoint has window pages alone.
    only_windows = spec.state is None and bool(spec.layout.windows)
    if not only_windows and spec.num_slots <= num_checkpoints:
        why = f"the extra state has {spec.num_slots} slots, and the engine needs some"
    elif usable_prefix is not None:
        why = "usable_prefix says where the engine goes on"
    if why:
        raise ConfigError(f"checkpoints: {num_checkpoints}: {why}")
