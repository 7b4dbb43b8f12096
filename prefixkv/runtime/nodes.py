"""The two objects an engine holds: DecodeNode and PrefillNode.

Every method is called from the engine's scheduler thread and returns in microseconds; the node's
own threads (control, transport) are started here and joined by `close`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.decode import journal as decode_journal
from prefixkv.decode.request import DecodeRequest, PrefillAsk
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.errors import AbortedError, CallerError, ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.manager import PageBooks
from prefixkv.prefill import journal as prefill_journal
from prefixkv.prefill.bootstrap_queue import UsablePrefix
from prefixkv.prefill.request import PrefillRequest
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol import receiver_machine as receiver
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.ids import PeerId
from prefixkv.ranks.oplog import LoggedBooks
from prefixkv.ranks.replica import RankLog
from prefixkv.ranks.rooms import Fenced, RankRooms, RoomEvent, order_of, unpack_news
from prefixkv.request import DeviceEvent, Request
from prefixkv.runtime.control_thread import DecodeManager, Fence, PrefillManager
from prefixkv.runtime.node import COUNTERS, Node
from prefixkv.runtime.place import Place, staging_buffer
from prefixkv.runtime.staging import ReceiveStaging, SendStaging
from prefixkv.transport.sharded import make_transport

_DECODE_COUNTERS = (
    *COUNTERS, "aborted", "admitted", "finished", "flight_fallbacks", "flights_adopted",
    "quarantined_pages", "refused", "retracted", "retries", "shared_flights", "shared_tokens",
    "tags_dropped", "transferred", "transfers_failed",
)  # fmt: skip
_PREFILL_COUNTERS = (
    *COUNTERS, "bytes_sent", "decode_hit_tokens", "sent", "staging_bytes_staged",
    "staging_pieces_written", "writes_done", "writes_drained_by_renewal", "writes_failed",
)  # fmt: skip


class DecodeNode(Node[DecodeManager]):
    """A decode worker: prefix cache, admission and receiving side. Used from one thread.

    Args:
        pool: the KV memory; it must outlive the node.
        config: see DecodeConfig.
        ranks: a RankLog where this is rank 0 of several (ranks/replica.py); then call `take_log`
            once a pass.
        mesh: how the model is shared out over the ranks; then each other rank is a `DecodeRank`,
            whose news go to `apply_news`. None: the pool holds all of the model's KV.
        state: extra state of requests (a recurrent state, say), which prefill sends with the last
            chunk to the request's `state_slot`. Each admitted request has a slot until it ends, so
            no more than it has slots are admitted at once. It is never cached: whoever hits the
            prefix has it sent all the same, and a retracted request comes back through
            `pop_needs_prefill`. It must outlive the node.
    Raises:
        ConfigError: an unknown policy (of eviction or admission), a pool that is not rank 0's share
        or cannot be
            registered, a mesh of several ranks without `ranks`.
    """

    scheduler: DecodeScheduler
    _counters = _DECODE_COUNTERS

    def __init__(
        self,
        pool: KVPool,
        config: DecodeConfig | None = None,
        ranks: RankLog | None = None,
        mesh: Mesh | None = None,
        state: StatePool | None = None,
    ) -> None:
        super().__init__(pool, state)
        config = config or DecodeConfig()
        layout = pool.layout
        place = Place.of(pool, config.model, mesh, state=state)
        num_ranks = place.mesh.num_ranks
        if num_ranks > 1 and ranks is None:
            raise ConfigError(f"a mesh of {num_ranks} ranks needs a RankLog")
        self._rank_rooms = RankRooms(num_ranks) if num_ranks > 1 else None
        self._num_news = [0] * num_ranks
        sizes = layout.num_pages, layout.page_size, config.max_running
        settings = {**config.for_books(layout.num_pages), "num_slots": place.num_slots}
        books: PageBooks
        if ranks is None:
            books = PageBooks(*sizes, **settings)
        else:
            books = LoggedBooks(ranks.append, *sizes, **settings)
        self._ranks = ranks
        self.config = config
        self.peer_id = PeerId(config.name, time.time_ns())
        self.scheduler = DecodeScheduler(
            books,
            reserve_tokens=config.reserve_tokens,
            failure_policy=config.failure_policy,
            admission=config.admission,
            patience_s=config.patience_s,
            waiting_timeout_s=config.longest_wait_s,
        )
        self._observe(decode_journal.timeline)
        buffer = staging_buffer(pool, config.transport)
        area, staging = None, None
        if buffer is not None:
            area, staging = (
                buffer.area,
                ReceiveStaging(layout, buffer, config.transport, config.name),
            )
        self._manager = DecodeManager(
            self.peer_id,
            lambda metadata: place.hello(metadata, self.peer_id, area),
            config.control,
            lambda sink: make_transport(
                self.peer_id, layout, sink, config.transport, area, place.state_layout
            ),
            staging,
        )

    def add(self, request: Request) -> DecodeRequest:
        """Queue a request. Raises RequestError, with nothing changed, for one that cannot be taken.

        DrainingError is one of them. Prefill is not told of it: see `refuse`.
        """
        if self._ranks is not None:
            self._ranks.check(request)
        req = self.scheduler.add(request, self._pump())
        self._tell()
        return req

    def refuse(self, request: Request, reason: str = "refused") -> None:
        """Tell prefill at once that this request will not be taken here, `add` having refused it,
        say.

        Its room's number is in use here until prefill has answered. Raises RequestError, with
        nothing changed, if it is in use already.
        """
        self._pump()
        self.scheduler.refuse(request, AbortedError(reason))
        self._tell()

    def pop_preallocated(self) -> list[DecodeRequest]:
        """Requests admitted now: prefix locked, pages taken, prefill told what to skip."""
        admitted = self.scheduler.pop_preallocated(self._pump())
        self._tell()
        return admitted

    def pop_transferred(self) -> list[DecodeRequest]:
        """Requests whose KV is complete in `req.pages`; `req.aux` came with it. They run from now
        on."""
        return self.scheduler.pop_transferred(self._pump())

    def pop_failed(self) -> list[DecodeRequest]:
        """Requests that failed or were aborted; `req.error` says why. Their pages are not to be
        touched."""
        self._pump()
        return self.scheduler.pop_failed()

    def pop_needs_prefill(self) -> list[PrefillAsk]:
        """Requests to submit to a prefill worker again."""
        self._pump()
        return self.scheduler.pop_needs_prefill()

    def append_many(self, reqs: Sequence[DecodeRequest], token_ids: Sequence[int]) -> None:
        """Add the newly sampled token of each request; afterwards the page for its KV is there.

        Raises OutOfPagesError, with nothing changed: `retract` names whom to retract, best first.
        """
        self.scheduler.append_many(reqs, token_ids, self._pump())

    def finish(
        self, req: DecodeRequest, after: DeviceEvent | None = None, continues: bool | None = None
    ) -> None:
        """The request is done: what has KV becomes cached prefix. Nothing is released before
        `after.query()`.

        `continues`: whether the conversation will go on, if known.
        """
        self.scheduler.finish(req, self._pump(), after, continues)
        self._tell()

    def retract(self, rid: str, after: DeviceEvent | None = None) -> None:
        """Take a running request's pages back; it queues again and resumes where it was."""
        self.scheduler.retract(rid, self._pump(), after)
        self._tell()

    def abort(self, rid: str, after: DeviceEvent | None = None) -> bool:
        """End a request wherever it is; it comes out of `pop_failed`. Unknown or ended: False."""
        known = self.scheduler.abort(rid, self._pump(), after=after)
        self._tell()
        return known

    def take_log(self) -> bytes:
        """What the other tensor-parallel ranks have to apply, for the engine to broadcast once a
        pass.

        Raises CallerError if the node was built without `ranks`.
        """
        if self._ranks is None:
            raise CallerError("this node was built without ranks=RankLog()")
        return self._ranks.take(self.scheduler.books)

    def fence(self, peer: str, incarnation: int) -> None:
        """The caller knows that this prefill process is dead: its rooms end, and their held pages
        come back."""
        self._manager.submit(Fence(PeerId(peer, incarnation)))
        if self._rank_rooms is not None and self._ranks is not None:
            self._ranks.rooms.append(Fenced(PeerId(peer, incarnation)))

    def peers(self) -> dict[str, tuple[PeerId | None, str]]:
        """By address of the prefill worker: its identity, and "ready", "suspect" or
        "connecting"."""
        self._check_open()
        return self._manager.endpoint.peers(time.monotonic())

    def _take(self, event: Any, now_s: float) -> None:
        if self._rank_rooms is None:
            self._room_said(event, now_s)
        else:
            self._rank_said(0, event, now_s)

    def apply_news(self, raw: bytes) -> None:
        """What a `DecodeRank` has to say; b"" is nothing. Each rank's in order, or not at all:
        CallerError."""
        self._take_news(raw, self._pump())
        self._tell()

    def _take_news(self, raw: bytes, now_s: float) -> None:
        if not raw:
            return
        news, events = unpack_news(raw)
        if self._rank_rooms is None or not 1 <= news.rank < self._rank_rooms.num_ranks:
            raise CallerError(f"news of rank {news.rank}, which this worker has not")
        if news.number != self._num_news[news.rank]:
            raise CallerError(
                f"news {news.number} of rank {news.rank}, {self._num_news[news.rank]} is next"
            )
        self._num_news[news.rank] += 1
        for event in events:
            self._rank_said(news.rank, event, now_s)

    def _rank_said(self, rank: int, event: RoomEvent, now_s: float) -> None:
        assert self._rank_rooms is not None
        joined, commands = self._rank_rooms.on(rank, event)
        for command in commands:
            self._command(command)
        for news in joined:
            self._room_said(news, now_s)

    def _command(self, command: Any) -> None:
        self._manager.submit(command)
        if self._rank_rooms is not None and self._ranks is not None:
            self._ranks.rooms.append(order_of(command))

    def _room_said(self, event: RoomEvent, now_s: float) -> None:
        match event:
            case receiver.RoomEnded():
                self.scheduler.room_ended(event.key, event.poll, event.error, event.aux, now_s)
            case receiver.RoomDrained():
                self.scheduler.room_drained(event.key)
            case receiver.RoomOverdue():
                self.scheduler.room_overdue(event.key)


class PrefillNode(Node[PrefillManager]):
    """A prefill worker: its prefix cache and the sending side. Used from one thread.

    Args:
        pool: the KV memory; it must outlive the node.
        config: see PrefillConfig.
        mesh, rank: how the model is shared out over the ranks of this worker, and which of them
            this is. Every rank is a PrefillNode with its own share, and gets the same requests and
            chunks. None: the only rank.
        endpoints: on rank 0, the `endpoint` of each other rank, in order: `Request.prefill` names
            rank 0's.
        state: this rank's share of the extra state of requests. Its slots are the engine's: one
            that it names in `send_chunk(last=True, state_slot=)` is to be left alone until the
            request is popped as sent or failed.
        usable_prefix: asked about a hit in this worker's own cache, with the request and the tokens
            that hit: how many of them can the engine go on from, having the extra state behind
            them? Rounded down to whole pages. By default none where there is extra state, all where
            there is none.
    Raises:
        ConfigError: an address that cannot be bound, an unknown policy, a pool that is not this
        rank's share or
            cannot be registered.
    """

    scheduler: PrefillScheduler
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
    ) -> None:
        super().__init__(pool, state)
        config = config or PrefillConfig()
        layout = pool.layout
        place = Place.of(pool, config.model, mesh, rank, state)
        if rank == 0 and len(endpoints) != place.mesh.num_ranks - 1:
            raise ConfigError(
                f"{len(endpoints)} endpoints of other ranks, the mesh has {place.mesh.num_ranks} "
                "ranks"
            )
        books = PageBooks(
            layout.num_pages,
            layout.page_size,
            config.max_running,
            caching=config.cache,
            policy=config.policy,
        )
        self.config = config
        self.peer_id = PeerId(f"{config.name}/{rank}" if rank else config.name, time.time_ns())
        self.scheduler = PrefillScheduler(
            books,
            max_aux_bytes=config.control.max_aux_bytes,
            num_slots=place.num_slots,
            usable_prefix=usable_prefix,
        )
        self._observe(prefill_journal.timeline)
        buffer = staging_buffer(pool, config.transport)
        area, staging = None, None
        if buffer is not None:
            area, staging = (
                buffer.area,
                SendStaging(layout, buffer, config.transport, self.peer_id.name),
            )
        self._manager = PrefillManager(
            self.peer_id,
            config.bind,
            place.digest,
            place.topology,
            config.control,
            lambda sink: make_transport(
                self.peer_id, layout, sink, config.transport, area, place.state_layout
            ),
            rank,
            tuple(endpoints),
            staging,
        )

    @property
    def endpoint(self) -> str:
        """The bound address: what `Request.prefill` names."""
        return self._manager.address

    def add(self, request: Request) -> PrefillRequest:
        """Take a request; it waits for decode's promise. Raises RequestError, with nothing
        changed."""
        req = self.scheduler.add(request, self._pump())
        self._tell()
        return req

    def pop_bootstrapped(self) -> list[PrefillRequest]:
        """Requests to compute now: `decode_prefix_len` and `prefix_len` are known, `pages` are
        there."""
        return self.scheduler.pop_bootstrapped(self._pump())

    def send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: DeviceEvent | None = None, state_slot: int = -1,
    ) -> int:  # fmt: skip
        """KV is computed up to token `end`, once `ready.query()`: send what decode lacks. Returns
        pages queued.

        With `last`, the extra state in `state_slot`, the outcome and `aux` follow.
        """
        now_s = self._pump()
        queued = self.scheduler.send_chunk(
            req, end, now_s, last=last, aux=aux, ready=ready, state_slot=state_slot
        )
        self._tell()
        return queued

    def pop_sent(self) -> list[PrefillRequest]:
        """Requests whose KV is with decode, whole."""
        return self.scheduler.pop_sent(self._pump())

    def pop_failed(self, after: DeviceEvent | None = None) -> list[PrefillRequest]:
        """Requests that failed or were aborted; `req.error` says why. The engine stops computing
        them.

        One whose extra state was handed over comes when no write reads that any more.
        `after`: device work launched for them before this call has ended once its `query()` is
        True.
        """
        return self.scheduler.pop_failed(self._pump(), after)

    def abort(self, rid: str) -> bool:
        """End a request; it comes out of `pop_failed`. Unknown or ended: False."""
        known = self.scheduler.abort(rid, self._pump())
        self._tell()
        return known

    def peers(self) -> dict[PeerId, str]:
        """The decode workers known, each "ready" or "suspect"."""
        self._check_open()
        return self._manager.endpoint.peers(time.monotonic())

    @property
    def bytes_sent(self) -> int:
        """KV written to decode workers. Any thread may ask."""
        return self._manager.counters["bytes_sent"]

    def stats(self) -> dict[str, int]:
        """Counters, pages by state, and the bytes that were not sent because decode had them."""
        stats = super().stats()
        layout = self.pool.layout
        skipped_pages = stats.get("decode_hit_tokens", 0) // layout.page_size
        stats["bytes_skipped"] = skipped_pages * layout.page_bytes
        return stats

    def _take(self, event: Any, now_s: float) -> None:
        match event:
            case sender.Bootstrapped():
                self.scheduler.room_bootstrapped(
                    event.key, event.prefix_len, event.peer.name, now_s
                )
            case sender.RoomEnded():
                self.scheduler.room_ended(event.key, event.poll, event.error, now_s)
            case sender.SourceFree():
                self.scheduler.source_free(event.key, now_s)
