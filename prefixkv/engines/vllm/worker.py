"""The connector in a vLLM worker: it has the KV memory, opens rooms and sends chunks.

Each worker does the same with its share of every block. The thread that runs the model calls it;
transfers run on threads of their own (`prefixkv.transfer`). No error of a transfer leaves this side
as an exception: a room that cannot be opened is reported as a load that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from prefixkv import DecodeConfig, KVPool, Mesh, ModelConfig, PrefillConfig, PrefixKVError
from prefixkv.engines.rank_group import Gather, decode_transfers, prefill_transfers, taken
from prefixkv.engines.vllm.host_worker import WorkerHost
from prefixkv.engines.vllm.options import ANY_HOST, ConnectorOptions
from prefixkv.engines.vllm.orders import (
    Add,
    Chunk,
    Decline,
    OfferOrder,
    Open,
    Refuse,
    StepOrders,
    WorkerReport,
)
from prefixkv.engines.vllm.stats import Counters
from prefixkv.engines.vllm.wakeup import WakeupSender
from prefixkv.errors import HandshakeError, RequestError
from prefixkv.spi import DeviceEvent
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


@dataclass(slots=True)
class Results:
    """Loads that are over: `received` are all of them, `failed` those without KV."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _LoadParts:
    """What a load still waits for: its room, its copy from host memory, or both."""

    pending: int = 0
    failed: bool = False


@dataclass(slots=True)
class _ReceivingRoom:
    """A load into which a peer may still write."""

    rid: str
    num_pages: int
    num_window_pages: int


@dataclass(slots=True)
class _SendingRoom:
    """A send from which a write may still read. `pages` are those that were handed over."""

    rid: str
    room: int
    decode: str
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _ComputedOffer:
    """A computed prompt that waits for a decode server to open its room. `ready` stands behind the
    kernels that compute it; None: they are done."""

    order: OfferOrder
    ready: DeviceEvent | None


class WorkerSide:
    """One worker process. Its model thread makes every call.

    Args:
        model: what both servers have to agree on besides the layout.
        rank, num_ranks: this worker's number, and the number of workers that share each block.
        gather: see `Gather`; not needed by a single worker.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        model: ModelConfig,
        *,
        is_producer: bool,
        is_consumer: bool,
        rank: int = 0,
        num_ranks: int = 1,
        num_kv_heads: int | None = None,
        gather: Gather | None = None,
    ) -> None:
        self._options, self._model = options, model
        self._roles = is_producer, is_consumer
        self._rank, self._num_ranks = rank, num_ranks
        self._num_kv_heads = num_kv_heads
        self._gather = gather or (lambda given: [given])
        self._decode: DecodeTransfers | None = None
        self._prefill: PrefillTransfers | None = None
        # Two maps each, by room and by request id; always changed together. An entry goes with the
        # proof that no write touches its pages (`_settle`, SourceFree), not with the outcome.
        self._loads: dict[RoomKey, _ReceivingRoom] = {}
        self._load_keys: dict[str, RoomKey] = {}
        self._host: WorkerHost | None = None
        self._pool: KVPool | None = None
        self._parts: dict[str, _LoadParts] = {}  # of loads that vLLM waits for
        self._sends: dict[RoomKey, _SendingRoom] = {}
        self._send_keys: dict[str, RoomKey] = {}
        # By room. An offer that was opened is in `_sends` as well, until its source is free.
        self._offers: dict[int, _ComputedOffer] = {}
        self._wakeup: WakeupSender | None = None
        # Collected between two calls; `take_results` and `take_report` empty them.
        self._results, self._report = Results(), WorkerReport()
        self._bytes_sent = 0
        self.counters = Counters()

    # --- memory -----------------------------------------------------------------------------------

    def register(self, pool: KVPool) -> None:
        """Register the KV memory, and start the transfers of its roles; all workers at the same
        time. Raises ConfigError, with nothing left open, for a pool that cannot be registered or an
        address that cannot be bound."""
        try:
            self._register(pool)
        except BaseException:
            self.close()
            raise

    def _register(self, pool: KVPool) -> None:
        self._pool = pool
        is_producer, is_consumer = self._roles
        options, rank, name = self._options, self._rank, self._options.name
        # First: a peer must not hear of a server that then fails to start.
        if options.host is not None:
            self._host = WorkerHost(pool, options.host, rank, name)
        control, transport = options.control, options.transport
        mesh = self._mesh(pool)
        # Decode before prefill on every rank: both gather among the ranks, in one order everywhere.
        if is_consumer:
            decode = DecodeConfig(name, model=self._model, control=control, transport=transport)
            self._decode = decode_transfers(pool, decode, mesh, rank, self._gather)
            _log.info("prefixkv decode worker %s, rank %d", name, rank)
        if is_producer:
            # A server of both roles has two peers, which need two names.
            name = f"{name}-prefill" if is_consumer else name
            # Only rank 0 is reached by a configured address; it passes on those of the others.
            bind = options.bind if rank == 0 else _any_port(options.bind)
            prefill = PrefillConfig(
                name, bind, model=self._model, control=control, transport=transport
            )
            self._prefill = prefill_transfers(pool, prefill, mesh, rank, self._gather)
            _log.info("prefixkv prefill worker %s, rank %d, listens at %s", name, rank, bind)
            # The scheduler needs an address for the answers of offers, and the port may have been
            # chosen only now. An endpoint without a host would be of no use to a decode server.
            if rank == 0 and self._prefill.endpoint.rpartition(":")[0] not in ANY_HOST:
                self._report.address = self._prefill.endpoint

    def _mesh(self, pool: KVPool) -> Mesh | None:
        if self._num_ranks == 1:
            return None
        layout = pool.layout
        num_heads = self._num_kv_heads or layout.num_kv_heads * self._num_ranks
        return Mesh(layout.num_layers, num_heads, tp_size=self._num_ranks)

    @property
    def decode(self) -> DecodeTransfers:
        """Transfers into this worker; only a registered kv_consumer has them."""
        assert self._decode is not None, "a kv_consumer that is registered"
        return self._decode

    @property
    def prefill(self) -> PrefillTransfers:
        """Transfers out; only a registered kv_producer has them."""
        assert self._prefill is not None, "a kv_producer that is registered"
        return self._prefill

    def close(self) -> None:
        """Idempotent; each part is closed even if another raises."""
        with ExitStack() as stack:
            for side in (self._decode, self._prefill, self._host):
                if side is not None:
                    stack.callback(side.close)
            # Pushed last, so closed first: it waits on descriptors that the sides own.
            if self._wakeup is not None:
                stack.callback(self._wakeup.close)

    # --- orders -----------------------------------------------------------------------------------

    def before_forward(self, orders: StepOrders, ready: DeviceEvent | None = None) -> None:
        """Open and end rooms, and begin the loads from host memory: before the forward, so that
        peers learn of new rooms while the model computes. `ready` stands behind the kernels of the
        steps before; None: they are done."""
        # 1. Orders from before a change of weights belong to the former version. And the chunks
        # there are of steps before.
        if orders.before is not None:
            self.before_forward(orders.before, ready)
            self._hand_over(orders.before, ready)
        if orders.weights_version is not None:
            self.move_weights(orders.weights_version)
        # First of all that may write them: vLLM may have given the blocks to other requests.
        if orders.cleared:
            self._clear(orders.cleared)
        # 2. Rooms begin. Before the aborts: a request may begin and end between two steps, and an
        # abort that finds no room would leave it open without end.
        if orders.bell and self._wakeup is None:
            self._start_wakeups(orders.bell)
        # All parts of a load are known before one of them can end.
        if self._host is not None:
            for rid in self._host.begin(orders.copies, ready):
                self._parts.setdefault(rid, _LoadParts()).pending += 1
        for opening in orders.opens:
            self._parts.setdefault(opening.rid, _LoadParts()).pending += 1
        for refusal in orders.refusals:
            self._refuse(refusal)
        for opening in orders.opens:
            self._open(opening)
        for add in orders.adds:
            self._add(add)
        for decline in orders.declines:
            self._decline(decline)
        # 3. Rooms end. An unknown id is a room that is over already, which an abort may cross.
        for rid, reason in orders.abort_loads.items():
            if (key := self._load_keys.get(rid)) is not None:
                self.decode.abort(*key.numbers, reason)
            elif (parts := self._parts.get(rid)) is not None and not parts.failed:
                # A copy from host memory goes on, but what it brings is of no use.
                parts.failed = True
                self._report.failed[rid] = reason
        for rid, reason in orders.abort_sends.items():
            if (key := self._send_keys.get(rid)) is not None:
                self.prefill.abort(*key.numbers, reason, decode=key.decode)
        # 4. Offers are withdrawn. One that a decode server has opened meanwhile is sent in full.
        for room, offer in self._offers.items():
            if offer.order.rid in orders.withdrawals:
                self.prefill.withdraw(room, 0, orders.withdrawals[offer.order.rid])

    def _clear(self, pages: Sequence[int]) -> None:
        assert self._pool is not None, "a worker that is registered"
        for pool in (self._pool, *(group.pool for group in self._pool.groups)):
            zeros = torch.zeros_like(pool.read_pages(pages[:1]))
            for page in pages:
                pool.write_pages([page], zeros)

    def _start_wakeups(self, address: str) -> None:
        sides = self._decode, self._prefill, self._host
        fds = [side.fileno() for side in sides if side is not None]
        try:
            self._wakeup = WakeupSender(address, fds)
        except OSError as error:
            _log.warning("this worker cannot wake the scheduler, which polls it: %s", error)
            return
        # Only now: the scheduler lets its engine rest once every worker has reported that it sends
        # wakeups.
        self._report.bells = 1

    def _refuse(self, refusal: Refuse) -> None:
        # A failure is only logged: no request of this server depends on it.
        try:
            self.decode.refuse(refusal.room, 0, refusal.prefill, refusal.reason, refusal.ticket)
        except PrefixKVError as error:
            _log.warning("room %d was not refused: %s", refusal.room, error)

    def _open(self, opening: Open) -> None:
        try:
            self.decode.open(
                opening.room, 0, opening.num_tokens, opening.prefix_len, opening.pages,
                opening.prefill, opening.digest, ticket=opening.ticket,
                windows=[one.blocks for one in opening.windows],
            )  # fmt: skip
        except PrefixKVError as error:
            self._report.failed[opening.rid] = str(error)
            # Settled as well: nothing was promised, so no drain event will ever come for it.
            self._report.settled.append(opening.rid)
            self._end_load(opening.rid, failed=True)
            return
        key = RoomKey(opening.room, 0)
        num_window_pages = sum(len(one.blocks) for one in opening.windows)
        self._loads[key] = _ReceivingRoom(opening.rid, len(opening.pages), num_window_pages)
        self._load_keys[opening.rid] = key

    def _add(self, add: Add) -> None:
        try:
            self.prefill.add(add.room, 0, add.num_tokens, add.decode, add.digest)
        except PrefixKVError as error:
            # Freed as well: no SourceFree will come for a room that was not added.
            self._report.unsent[add.rid] = str(error)
            self._report.freed.append(add.rid)
            return
        key = RoomKey(add.room, 0, add.decode)
        self._sends[key] = _SendingRoom(add.rid, add.room, add.decode)
        self._send_keys[add.rid] = key

    def _decline(self, decline: Decline) -> None:
        # A failure is only logged: no request of this server depends on it.
        try:
            self.prefill.refuse(decline.room, 0, decline.reason, decode=decline.decode)
        except PrefixKVError as error:
            _log.warning("room %d of %s was not declined: %s", decline.room, decline.decode, error)

    def has_work_after(self, orders: StepOrders) -> bool:
        """Return whether there is something to do behind the kernels of a step."""
        has_writes = self._host is not None and self._host.has_writes
        return has_writes or bool(orders.chunks or orders.offers)

    def after_forward(self, orders: StepOrders, ready: DeviceEvent | None = None) -> None:
        """Hand over the chunks and offers of a step, and begin the writes to host memory. Their KV
        is there once `ready.query()` is True."""
        if self._host is not None:
            self._host.begin_writes(ready)
        self._hand_over(orders, ready)

    def _hand_over(self, orders: StepOrders, ready: DeviceEvent | None) -> None:
        for chunk in orders.chunks:
            self._send(chunk, ready)
        for offer in orders.offers:
            self._offer(offer, ready)

    def _offer(self, offer: OfferOrder, ready: DeviceEvent | None) -> None:
        try:
            self.prefill.offer(offer.room, 0, offer.num_tokens, offer.digest, offer.timeout_s)
        except PrefixKVError as error:
            self._report.unsent[offer.rid] = str(error)
            self._report.freed.append(offer.rid)
            return
        self._offers[offer.room] = _ComputedOffer(offer, ready)

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
                windows=chunk.windows,
            )
        except PrefixKVError as error:
            # Decode would wait for tokens that never come: the room must end.
            _log.error("a chunk of request %s was not sent: %s", chunk.rid, error)
            self.prefill.abort(*key.numbers, str(error), decode=key.decode)

    # --- outcomes ---------------------------------------------------------------------------------

    def take_results(self) -> Results:
        """Return the loads that are over since the last call. Takes in all events until now."""
        if self._decode is not None:
            for event in taken(self._decode.take_events, _log):
                self._take_decode_event(event)
        if self._prefill is not None:
            for sent_event in taken(self._prefill.take_events, _log):
                self._take_prefill_event(sent_event)
        if self._host is not None:
            self._take_copies(self._host)
        if self._wakeup is not None:
            # After the events were taken. Before, it would ring for those that were just taken.
            self._wakeup.arm()
        results, self._results = self._results, Results()
        return results

    def _take_decode_event(self, event: DecodeEvent) -> None:
        """Take in what happened to a room into which something is loaded.

        1. Success is also proof: the peer has written everything, so it writes nothing more.
        2. A failure is an outcome only. The peer may still write, so the room stays until 3.
        3. Drained: nothing can land any more.
        4. Overdue: the proof is late. The room stays; the scheduler just stops waiting for it.
        """
        load = self._loads.get(event.key)
        if load is None:
            return  # the event of a room that was refused
        match event:
            case RoomEnded(poll=KVPoll.SUCCESS):
                self.counters.add("blocks_loaded", load.num_pages + load.num_window_pages)
                self.counters.add("window_blocks_loaded", load.num_window_pages)
                self._settle(event.key)
                self._end_load(load.rid, failed=False)
            case RoomEnded():
                self._report.failed[load.rid] = f"{type(event.error).__name__}: {event.error}"
                if isinstance(event.error, HandshakeError):
                    self._report.refused.add(load.rid)
                self._end_load(load.rid, failed=True)
            case RoomDrained():
                self._settle(event.key)
            case RoomOverdue():
                self._report.overdue.append(load.rid)

    def _take_copies(self, host: WorkerHost) -> None:
        ends, loaded = host.take_ends()
        self._report.copied += ends
        self._report.host_pages |= host.take_size()
        for rid, error in loaded.items():
            if error:
                self._report.failed.setdefault(rid, error)
            self._end_load(rid, failed=bool(error))

    def _end_load(self, rid: str, failed: bool) -> None:
        # vLLM hears of it when no part touches the blocks any more, but a room that has failed,
        # whose blocks are held until it is settled.
        parts = self._parts[rid]
        parts.pending -= 1
        parts.failed |= failed
        if parts.pending == 0:
            del self._parts[rid]
            self._results.received.add(rid)
            if parts.failed:
                self._results.failed.add(rid)

    def _settle(self, key: RoomKey) -> None:
        load = self._loads.pop(key)
        del self._load_keys[load.rid]
        self._report.settled.append(load.rid)

    def _take_prefill_event(self, event: PrefillEvent) -> None:
        # An offer's events carry keys that are no sends yet: its own key has no decode server's
        # name, and the first Bootstrapped brings the name.
        offer = self._offers.get(event.key.room)
        if offer is not None and event.key not in self._sends:
            self._take_offer_event(offer, event)
            return
        send = self._sends.get(event.key)
        if send is None:
            return
        match event:
            case Bootstrapped():
                self._report.promised.append(send.rid)
            case RoomEnded(error=Exception()):
                self._report.unsent[send.rid] = f"{type(event.error).__name__}: {event.error}"
            case SourceFree():
                del self._sends[event.key], self._send_keys[send.rid]
                # A router may have drawn the same number for another request: compare the request.
                offer = self._offers.get(send.room)
                if offer is not None and offer.order.rid == send.rid:
                    del self._offers[send.room]
                self._report.freed.append(send.rid)

    def _take_offer_event(self, offer: _ComputedOffer, event: PrefillEvent) -> None:
        order = offer.order
        match event:
            case Bootstrapped():
                # It is a send from here on. Registered first: `_send` looks its key up. The whole
                # prompt goes as one chunk, since all of it is computed.
                key = event.key
                self._sends[key] = _SendingRoom(order.rid, order.room, key.decode)
                self._send_keys[order.rid] = key
                last = Chunk(
                    order.rid, 0, order.pages, order.num_tokens, last=True, windows=order.windows
                )
                self._send(last, offer.ready)
            case RoomEnded(error=Exception()):
                self._report.unsent[order.rid] = f"{type(event.error).__name__}: {event.error}"
            case SourceFree():
                del self._offers[order.room]
                self._report.freed.append(order.rid)

    def take_report(self) -> WorkerReport | None:
        """Return the report since the last call; None: there is nothing to report."""
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    # --- an operator's ----------------------------------------------------------------------------

    def lost_peers(self) -> list[dict[str, Any]]:
        """See `extension.WorkerExtension.prefixkv_lost_peers`."""
        return [
            {"peer": peer.name, "life": f"{peer.incarnation:x}", "why": why, "held": held}
            for side in (self._decode, self._prefill)
            if side is not None
            for peer, (why, held) in side.lost_peers().items()
        ]

    def fence(self, peer: str, life: str) -> None:
        """End and settle all rooms of a dead process; see
        `extension.WorkerExtension.prefixkv_fence`. Raises RequestError for a life that is no
        hexadecimal number."""
        try:
            incarnation = int(life, 16)
        except ValueError:
            raise RequestError(f"life is {life!r}, a hexadecimal number is needed") from None
        for side in (self._decode, self._prefill):
            if side is not None:
                side.fence(peer, incarnation)

    def move_weights(self, weights_version: str) -> None:
        """Raises ConfigError for a string that is no version."""
        for side in (self._decode, self._prefill):
            if side is not None:
                side.move_weights(weights_version)

    # --- counts -----------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, int]:
        """`bytes_sent` of its rank is included."""
        if self._prefill is not None:
            # The transfer's number only grows; vLLM adds up intervals, so report the difference.
            sent = self._prefill.bytes_sent
            self.counters.add("bytes_sent", sent - self._bytes_sent)
            self._bytes_sent = sent
        return self.counters.take()


def _any_port(bind: str) -> str:
    # Several ranks share one host.
    return bind.rpartition(":")[0] + ":*"
