"""The connector in a vLLM worker: has the KV memory, opens rooms and sends chunks.

Each worker does the same with its share of every block. It is called from the thread that runs the
model; transfers run on threads of their own (`prefixkv.transfer`). No error of a transfer leaves
it as an exception: a room that cannot be opened is a load that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prefixkv import DecodeConfig, KVPool, Mesh, ModelConfig, PrefillConfig, PrefixKVError
from prefixkv.engines.rank_group import Gather, decode_transfers, prefill_transfers
from prefixkv.engines.vllm.bell import Bell
from prefixkv.engines.vllm.options import ANY_HOST, Options
from prefixkv.engines.vllm.orders import Add, Chunk, Decline, News, Offer, Open, Orders, Refuse
from prefixkv.engines.vllm.stats import Counters
from prefixkv.spi import DeviceEvent, HandshakeError, InternalError, MakeTransport, RequestError
from prefixkv.transfer import (
    Bootstrapped,
    DecodeEvent,
    DecodeTransfers,
    KVPoll,
    PrefillEvent,
    PrefillTransfers,
    RoomDrained,
    RoomEnded,
    RoomKey,
    RoomOverdue,
    SourceFree,
)

_log = logging.getLogger("vllm.prefixkv")
T = TypeVar("T")


@dataclass(slots=True)
class Results:
    """Loads whose outcome vLLM may be told: all that are over, and which of these failed."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Load:
    rid: str
    num_pages: int


@dataclass(slots=True)
class _Send:
    rid: str
    room: int
    decode: str
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Offer:
    """A prompt that waits for the decode server that opens its room."""

    order: Offer
    ready: DeviceEvent | None


class WorkerSide:
    """One worker's.

    Args:
        model: what both servers have to agree on besides the layout.
        rank, num_ranks: of the workers that share out each block's heads.
        gather: see `Gather`; not needed by a single worker.
        transport: makes another transport than NIXL's, for tests.
    """

    def __init__(
        self,
        options: Options,
        model: ModelConfig,
        *,
        is_producer: bool,
        is_consumer: bool,
        rank: int = 0,
        num_ranks: int = 1,
        num_kv_heads: int | None = None,
        gather: Gather | None = None,
        transport: MakeTransport | None = None,
    ) -> None:
        self._options, self._model = options, model
        self._roles = is_producer, is_consumer
        self._rank, self._num_ranks = rank, num_ranks
        self._num_kv_heads = num_kv_heads
        self._gather = gather or (lambda given: [given])
        self._transport = transport
        self._decode: DecodeTransfers | None = None
        self._prefill: PrefillTransfers | None = None
        self._loads: dict[RoomKey, _Load] = {}  # that a peer may still write
        self._load_keys: dict[str, RoomKey] = {}
        self._sends: dict[RoomKey, _Send] = {}  # that a write may still read
        self._send_keys: dict[str, RoomKey] = {}
        self._offers: dict[int, _Offer] = {}  # by room
        self._bell: Bell | None = None
        self._results, self._news = Results(), News()
        self._bytes_sent = 0
        self.counters = Counters()

    # --- memory -----------------------------------------------------------------------------------

    def register(self, pool: KVPool) -> None:
        """The KV memory is there. All workers of the server call this at once.

        Raises ConfigError for a pool that cannot be registered or an address that cannot be bound;
        nothing is left open then.
        """
        try:
            self._register(pool)
        except BaseException:
            self.close()
            raise

    def _register(self, pool: KVPool) -> None:
        is_producer, is_consumer = self._roles
        options, rank, name = self._options, self._rank, self._options.name
        control, transport = options.control, options.transport
        mesh = self._mesh(pool)
        if is_consumer:
            decode = DecodeConfig(name, model=self._model, control=control, transport=transport)
            self._decode = decode_transfers(pool, decode, mesh, rank, self._gather, self._transport)
            _log.info("prefixkv decode worker %s, rank %d", name, rank)
        if is_producer:
            name = f"{name}-prefill" if is_consumer else name
            # Only rank 0 is asked for by address; the others' it tells itself.
            bind = options.bind if rank == 0 else _any_port(options.bind)
            prefill = PrefillConfig(
                name, bind, model=self._model, control=control, transport=transport
            )
            self._prefill = prefill_transfers(
                pool, prefill, mesh, rank, self._gather, self._transport
            )
            _log.info("prefixkv prefill worker %s, rank %d, listens at %s", name, rank, bind)
            if rank == 0 and self._prefill.endpoint.rpartition(":")[0] not in ANY_HOST:
                self._news.address = self._prefill.endpoint

    def _mesh(self, pool: KVPool) -> Mesh | None:
        if self._num_ranks == 1:
            return None
        layout = pool.layout
        num_heads = self._num_kv_heads or layout.num_kv_heads * self._num_ranks
        return Mesh(layout.num_layers, num_heads, tp_size=self._num_ranks)

    @property
    def decode(self) -> DecodeTransfers:
        assert self._decode is not None, "a kv_consumer that is registered"
        return self._decode

    @property
    def prefill(self) -> PrefillTransfers:
        assert self._prefill is not None, "a kv_producer that is registered"
        return self._prefill

    def close(self) -> None:
        with ExitStack() as stack:
            for side in (self._decode, self._prefill):
                if side is not None:
                    stack.callback(side.close)
            if self._bell is not None:  # first: it waits on descriptors of the sides
                stack.callback(self._bell.close)

    # --- orders -----------------------------------------------------------------------------------

    def before_forward(self, orders: Orders) -> None:
        """Rooms are opened and ended."""
        if orders.before is not None:
            self.before_forward(orders.before)
        if orders.weights_version is not None:
            self.move_weights(orders.weights_version)
        if orders.bell and self._bell is None:
            self._hang_bell(orders.bell)
        for refusal in orders.refusals:
            self._refuse(refusal)
        for opening in orders.opens:
            self._open(opening)
        for add in orders.adds:
            self._add(add)
        for decline in orders.declines:
            self._decline(decline)
        for rid, reason in orders.abort_loads.items():
            if (key := self._load_keys.get(rid)) is not None:
                self.decode.abort(*key.numbers, reason)
        for rid, reason in orders.abort_sends.items():
            if (key := self._send_keys.get(rid)) is not None:
                self.prefill.abort(*key.numbers, reason, decode=key.decode)
        for room, offer in self._offers.items():
            if offer.order.rid in orders.withdrawals:
                self.prefill.withdraw(room, 0, orders.withdrawals[offer.order.rid])

    def _hang_bell(self, address: str) -> None:
        """From now on the scheduler hears of news at once, without a step."""
        fds = [side.fileno() for side in (self._decode, self._prefill) if side is not None]
        try:
            self._bell = Bell(address, fds)
        except OSError as error:
            _log.warning("this worker cannot wake the scheduler, which polls it: %s", error)
            return
        self._news.bells = 1

    def _refuse(self, refusal: Refuse) -> None:
        try:
            self.decode.refuse(refusal.room, 0, refusal.prefill, refusal.reason, refusal.ticket)
        except PrefixKVError as error:
            _log.warning("room %d was not refused: %s", refusal.room, error)

    def _open(self, what: Open) -> None:
        try:
            self.decode.open(
                what.room, 0, what.num_tokens, what.prefix_len, what.pages, what.prefill,
                what.digest, ticket=what.ticket,
            )  # fmt: skip
        except PrefixKVError as error:
            self._news.failed[what.rid] = str(error)
            self._news.settled.append(what.rid)  # nothing was promised
            self._end_load(what.rid, failed=True)
            return
        key = RoomKey(what.room, 0)
        self._loads[key] = _Load(what.rid, len(what.pages))
        self._load_keys[what.rid] = key

    def _add(self, what: Add) -> None:
        try:
            self.prefill.add(what.room, 0, what.num_tokens, what.decode, what.digest)
        except PrefixKVError as error:
            self._news.unsent[what.rid] = str(error)
            self._news.freed.append(what.rid)
            return
        key = RoomKey(what.room, 0, what.decode)
        self._sends[key] = _Send(what.rid, what.room, what.decode)
        self._send_keys[what.rid] = key

    def _decline(self, what: Decline) -> None:
        try:
            self.prefill.refuse(what.room, 0, what.reason, decode=what.decode)
        except PrefixKVError as error:
            _log.warning("room %d of %s was not declined: %s", what.room, what.decode, error)

    def after_forward(self, orders: Orders, ready: DeviceEvent | None = None) -> None:
        """The step's chunks are computed, or will be when `ready.query()` is True."""
        for chunk in orders.chunks:
            self._send(chunk, ready)
        for offer in orders.offers:
            self._offer(offer, ready)

    def _offer(self, what: Offer, ready: DeviceEvent | None) -> None:
        try:
            self.prefill.offer(what.room, 0, what.num_tokens, what.digest, what.timeout_s)
        except PrefixKVError as error:
            self._news.unsent[what.rid] = str(error)
            self._news.freed.append(what.rid)
            return
        self._offers[what.room] = _Offer(what, ready)

    def _send(self, chunk: Chunk, ready: DeviceEvent | None) -> None:
        key = self._send_keys.get(chunk.rid)
        if key is None:
            return  # the room is over
        send = self._sends[key]
        send.pages[chunk.first_page :] = chunk.pages
        try:
            self.prefill.send_chunk(
                send.room,
                chunk.end,
                send.pages,
                decode=send.decode,
                last=chunk.last,
                ready=ready,
                generation=0,
            )
        except PrefixKVError as error:
            # Nothing was handed over, so the room must not go on.
            _log.error("a chunk of request %s was not sent: %s", chunk.rid, error)
            self.prefill.abort(*key.numbers, str(error), decode=key.decode)

    # --- outcomes ---------------------------------------------------------------------------------

    def take_results(self) -> Results:
        """Loads that are over since the last call."""
        if self._decode is not None:
            for event in _events(self._decode.take_events):
                self._loaded(event)
        if self._prefill is not None:
            for said in _events(self._prefill.take_events):
                self._sent(said)
        if self._bell is not None:
            self._bell.arm()  # behind what was taken: what comes from now on rings
        results, self._results = self._results, Results()
        return results

    def _loaded(self, event: DecodeEvent) -> None:
        load = self._loads.get(event.key)
        if load is None:
            return  # of a room that was refused
        match event:
            case RoomEnded(poll=KVPoll.SUCCESS):
                self.counters.add("blocks_loaded", load.num_pages)
                self._settle(event.key)
                self._end_load(load.rid, failed=False)
            case RoomEnded():
                self._news.failed[load.rid] = f"{type(event.error).__name__}: {event.error}"
                if isinstance(event.error, HandshakeError):
                    self._news.refused.add(load.rid)
                self._end_load(load.rid, failed=True)
            case RoomDrained():
                self._settle(event.key)
            case RoomOverdue():
                self._news.overdue.append(load.rid)

    def _end_load(self, rid: str, failed: bool) -> None:
        self._results.received.add(rid)
        if failed:
            self._results.failed.add(rid)

    def _settle(self, key: RoomKey) -> None:
        load = self._loads.pop(key)
        del self._load_keys[load.rid]
        self._news.settled.append(load.rid)

    def _sent(self, event: PrefillEvent) -> None:
        offer = self._offers.get(event.key.room)
        if offer is not None and event.key not in self._sends:
            self._of_offer(offer, event)
            return
        send = self._sends.get(event.key)
        if send is None:
            return
        match event:
            case Bootstrapped():
                self._news.promised.append(send.rid)
            case RoomEnded(error=Exception()):
                self._news.unsent[send.rid] = f"{type(event.error).__name__}: {event.error}"
            case SourceFree():
                del self._sends[event.key], self._send_keys[send.rid]
                offer = self._offers.get(send.room)
                if offer is not None and offer.order.rid == send.rid:
                    del self._offers[send.room]
                self._news.freed.append(send.rid)

    def _of_offer(self, offer: _Offer, event: PrefillEvent) -> None:
        """A decode server has opened the room, or none will."""
        what = offer.order
        match event:
            case Bootstrapped():
                key = event.key
                self._sends[key] = _Send(what.rid, what.room, key.decode)
                self._send_keys[what.rid] = key
                last = Chunk(what.rid, 0, what.pages, what.num_tokens, last=True)
                self._send(last, offer.ready)
            case RoomEnded(error=Exception()):
                self._news.unsent[what.rid] = f"{type(event.error).__name__}: {event.error}"
            case SourceFree():
                del self._offers[what.room]
                self._news.freed.append(what.rid)

    def take_news(self) -> News | None:
        """What else the scheduler has to know."""
        if not self._news:
            return None
        news, self._news = self._news, News()
        return news

    # --- an operator's ----------------------------------------------------------------------------

    def lost_peers(self) -> list[dict[str, Any]]:
        """See `extension.WorkerExtension`."""
        return [
            {"peer": peer.name, "life": f"{peer.incarnation:x}", "why": why, "held": held}
            for side in (self._decode, self._prefill)
            if side is not None
            for peer, (why, held) in side.lost_peers().items()
        ]

    def fence(self, peer: str, life: str) -> None:
        """That process is dead: its rooms end, and are settled. Raises RequestError for a life that
        is no hexadecimal number."""
        try:
            incarnation = int(life, 16)
        except ValueError:
            raise RequestError(f"life is {life!r}, a hexadecimal number is needed") from None
        for side in (self._decode, self._prefill):
            if side is not None:
                side.fence(peer, incarnation)

    def move_weights(self, weights_version: str) -> None:
        """The weights are of this version from now on. Raises ConfigError for what is no
        version."""
        for side in (self._decode, self._prefill):
            if side is not None:
                side.move_weights(weights_version)

    # --- counts -----------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        if self._prefill is not None:
            sent = self._prefill.bytes_sent
            self.counters.add("bytes_sent", sent - self._bytes_sent)
            self._bytes_sent = sent
        return self.counters.take()


def _any_port(bind: str) -> str:
    return bind.rpartition(":")[0] + ":*"


def _events(take: Callable[[], list[T]]) -> list[T]:
    """What the control thread met is logged: it lives on, and so do the other requests."""
    try:
        return take()
    except InternalError as error:
        _log.error("prefixkv: %s", error)
        return []
