"""The connector in a vLLM worker: it has the KV memory, opens rooms and sends chunks.

Each worker does the same with its share of every block. The thread that runs the model calls it;
transfers run on threads of their own (`prefixkv.transfer`). No error of a transfer leaves this side
as an exception: a room that cannot be opened is reported as a load that failed. `WorkerHost` has
the host memory, and makes the copies that are ordered.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs

from prefixkv import (
    DecodeConfig,
    HostConfig,
    KVPool,
    Mesh,
    ModelConfig,
    PrefillConfig,
    PrefixKVError,
)
from prefixkv.engines.rank_group import Gather, decode_transfers, prefill_transfers, taken
from prefixkv.engines.vllm.options import ANY_HOST, ConnectorOptions, ServerSetup
from prefixkv.engines.vllm.orders import Chunk, CopyOrder, Open, StepOrders, WorkerReport
from prefixkv.engines.vllm.stats import Counters
from prefixkv.engines.vllm.wakeup import wake_by
from prefixkv.errors import HandshakeError, RequestError, TransferError
from prefixkv.spi import DeviceEvent, HostCopy, HostCopyDone, HostMemory, Inbox
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


class WorkerHost:
    """The host memory of one worker. Its model thread makes every call. Raises ConfigError for more
    memory than the host has, or less than a block.

    Copies run on threads of their own. A load may begin once the device has done all that was
    queued before its order: a step that used its blocks before may still run. A write has to wait
    for the kernels of the step that brings its order as well, since vLLM gives a block its hash
    before they run.
    """

    def __init__(self, pool: KVPool, config: HostConfig, rank: int, name: str) -> None:
        self._rank = rank
        # The memory, which is large, and the descriptor are given back if the threads do not start.
        with ExitStack() as undo:
            self._memory = HostMemory(pool, config, name)
            undo.callback(self._memory.close)
            self._ends: Inbox[HostCopyDone] = Inbox()
            undo.callback(self._ends.close)
            self._memory.start(self._ends.put)
            undo.pop_all()
        self.writes: list[HostCopy] = []  # that wait for the kernels of a step to be queued
        self._loads: dict[int, str] = {}  # under way: the request of each
        self._num_reported = -1

    def fileno(self) -> int:
        return self._ends.fd

    def begin(self, orders: list[CopyOrder], ready: DeviceEvent | None) -> list[str]:
        """Begin the loads of a step's orders, and keep its writes back. `ready` stands behind the
        kernels of the steps before; None: they are done. Returns the requests that load."""
        self.begin_writes(ready)
        for copy, rid in orders:
            if copy.is_load:
                self._loads[copy.number] = rid
                self._memory.submit(copy, ready)
            else:
                self.writes.append(copy)
        return [rid for copy, rid in orders if copy.is_load]

    def begin_writes(self, ready: DeviceEvent | None) -> None:
        """Begin the writes that were kept back: the kernels of their step stand before `ready`."""
        writes, self.writes = self.writes, []
        for copy in writes:
            self._memory.submit(copy, ready)

    def take_ends(self) -> list[tuple[HostCopyDone, str]]:
        """Return the copies that have ended, with errors that any process knows, and the request of
        each load; "": a write."""
        ends = []
        for done in self._ends.drain():
            if done.error is not None:
                error = TransferError(f"host memory: {done.error}")
                done = structs.replace(done, error=error)
            ends.append((done, self._loads.pop(done.number, "")))
        return ends

    def take_size(self) -> dict[int, tuple[int, int]]:
        """Return by rank the host pages that are ready, and all; nothing without news."""
        num_ready = self._memory.ready_pages
        if num_ready == self._num_reported:
            return {}
        self._num_reported = num_ready
        return {self._rank: (num_ready, self._memory.num_pages)}

    def close(self) -> None:
        """Let the copies that run end, and give the memory back. Idempotent."""
        self._memory.close()
        self._ends.close()


_log = logging.getLogger("vllm.prefixkv")


@dataclass(slots=True)
class _Send:
    """A send from which a write may still read. `pages` are those that were handed over. `offered`
    is the chunk of an offer that no decode server has opened yet, and `ready` stands behind the
    kernels that compute it; None: they are done."""

    rid: str
    pages: list[int] = field(default_factory=list)
    offered: Chunk | None = None
    ready: DeviceEvent | None = None


class WorkerSide:
    """One worker process. Its model thread makes every call.

    Args:
        model: what both servers have to agree on besides the layout.
        rank: this worker's number.
        num_kv_heads: of the model; None: as many as all ranks have.
        gather: see `Gather`; not needed by a single worker.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        setup: ServerSetup,
        model: ModelConfig,
        rank: int = 0,
        num_kv_heads: int | None = None,
        gather: Gather | None = None,
    ) -> None:
        self._options, self._setup, self._model = options, setup, model
        self._rank, self._num_kv_heads = rank, num_kv_heads
        self._gather = gather or (lambda given: [given])
        self._opened = ExitStack()
        self._decode: DecodeTransfers | None = None
        self._prefill: PrefillTransfers | None = None
        self._host: WorkerHost | None = None
        self._wakes = False  # the scheduler has our descriptors, or cannot have them
        # Loads into which a peer may still write, and sends from which a write may still read. An
        # entry goes with the proof that no write touches its pages (`_settle`, SourceFree), not
        # with the outcome.
        self._loads: dict[RoomKey, Open] = {}
        self._sends: dict[RoomKey, _Send] = {}
        # Of loads that vLLM waits for: their parts, a room, a copy from host memory, or both, that
        # have not ended; and those of which a part has failed.
        self._pending: Counter[str] = Counter()
        self._failed: set[str] = set()
        # Collected between two calls; `take_results` and `take_report` empty them.
        self._results: dict[str, bool] = {}
        self._report = WorkerReport()
        self._bytes_sent = 0
        self.counters = Counters()

    # --- memory -----------------------------------------------------------------------------------

    def register(self, pool: KVPool) -> None:
        """Register the KV memory, and start the transfers of its roles; all workers at the same
        time. Raises ConfigError, with nothing left open, for a pool that cannot be registered or an
        address that cannot be bound."""
        with ExitStack() as undo:
            undo.callback(self.close)
            self._register(pool)
            undo.pop_all()

    def _register(self, pool: KVPool) -> None:
        self._pool = pool
        options, setup, rank, name = self._options, self._setup, self._rank, self._options.name
        # First: a peer must not hear of a server that then fails to start.
        if options.host is not None:
            self._host = WorkerHost(pool, options.host, rank, name)
            self._opened.callback(self._host.close)
        shared: Any = {
            "model": self._model, "control": options.control, "transport": options.transport
        }  # fmt: skip
        mesh = None
        if setup.num_ranks > 1:
            num_heads = self._num_kv_heads or pool.layout.num_kv_heads * setup.num_ranks
            mesh = Mesh(pool.layout.num_layers, num_heads, tp_size=setup.num_ranks)
        # Decode before prefill on every rank: both gather among the ranks, in one order everywhere.
        if setup.is_consumer:
            decode = DecodeConfig(name, **shared)
            self._decode = decode_transfers(pool, decode, mesh, rank, self._gather)
            self._opened.callback(self._decode.close)
            _log.info("prefixkv decode worker %s, rank %d", name, rank)
        if setup.is_producer:
            # A server of both roles has two peers, which need two names.
            name = f"{name}-prefill" if setup.is_consumer else name
            # Only rank 0 is reached by a configured address; it passes on those of the others,
            # which share its host.
            bind = options.bind if rank == 0 else options.bind.rpartition(":")[0] + ":*"
            prefill = PrefillConfig(name, bind, **shared)
            self._prefill = prefill_transfers(pool, prefill, mesh, rank, self._gather)
            self._opened.callback(self._prefill.close)
            _log.info("prefixkv prefill worker %s, rank %d, listens at %s", name, rank, bind)
            # The scheduler needs an address for the answers of offers, and the port may have been
            # chosen only now. An endpoint without a host would be of no use to a decode server.
            if rank == 0 and self._prefill.endpoint.rpartition(":")[0] not in ANY_HOST:
                self._report.address = self._prefill.endpoint

    @property
    def decode(self) -> DecodeTransfers:
        assert self._decode is not None, "a kv_consumer that is registered"
        return self._decode

    @property
    def prefill(self) -> PrefillTransfers:
        assert self._prefill is not None, "a kv_producer that is registered"
        return self._prefill

    @property
    def _sides(self) -> list[DecodeTransfers | PrefillTransfers]:
        return [side for side in (self._decode, self._prefill) if side is not None]

    def close(self) -> None:
        """Idempotent; each part is closed even if another raises."""
        self._opened.close()

    # --- orders -----------------------------------------------------------------------------------

    def before_forward(self, orders: StepOrders, ready: DeviceEvent | None = None) -> None:
        """Open and end rooms, and begin the loads from host memory: before the forward, so that
        peers learn of new rooms while the model computes. `ready` stands behind the kernels of the
        steps before; None: they are done."""
        # 1. What is of the former weights, and of steps before.
        self._hand_over(orders.late, ready)
        if orders.weights_version is not None:
            self.move_weights(orders.weights_version)
        # First of all that may write them: vLLM may have given the blocks to other requests.
        if orders.cleared:
            self._clear(orders.cleared)
        # 2. Rooms begin. Before the aborts: a request may begin and end between two steps, and an
        # abort that finds no room would leave it open without end.
        if orders.bell and not self._wakes:
            self._start_wakeups(orders.bell)
        # All parts of a load are known before one of them can end.
        loading = [opening.rid for opening in orders.opens]
        if self._host is not None:
            loading += self._host.begin(orders.copies, ready)
        self._pending.update(loading)
        # No request of this server depends on a refusal.
        for one in orders.refusals:
            with _logged("room %d was not refused", one.room):
                self.decode.refuse(one.room, 0, one.peer, one.reason, one.ticket)
        for opening in orders.opens:
            self._open(opening)
        for add in orders.adds:
            with self._begun(add.rid, add.key):
                self.prefill.add(*add.key.numbers, add.num_tokens, add.key.decode, add.digest)
        for one in orders.declines:
            with _logged("room %d of %s was not declined", one.room, one.peer):
                self.prefill.refuse(one.room, 0, one.reason, decode=one.peer)
        # 3. Rooms end. An unknown one is over already, which an abort may cross.
        for rid, reason in orders.abort_loads.items():
            key = next((key for key, load in self._loads.items() if load.rid == rid), None)
            if key is not None:
                self.decode.abort(*key.numbers, reason)
            elif rid in self._pending and rid not in self._failed:
                # A copy from host memory goes on, but what it brings is of no use.
                self._failed.add(rid)
                self._report.failed[rid] = reason
        for key, reason in orders.abort_sends.items():
            self.prefill.abort(*key.numbers, reason, decode=key.decode)
        # 4. Offers are withdrawn. One that a decode server has opened meanwhile is sent in full.
        for key, reason in orders.withdrawals.items():
            self.prefill.withdraw(*key.numbers, reason)

    def _clear(self, pages: Sequence[int]) -> None:
        for pool in (self._pool, *(group.pool for group in self._pool.groups)):
            zeros = torch.zeros_like(pool.read_pages(pages[:1]))
            for page in pages:
                pool.write_pages([page], zeros)

    def _start_wakeups(self, address: str) -> None:
        fds = [side.fileno() for side in self._sides]
        fds += [self._host.fileno()] if self._host is not None else []
        self._wakes = True
        try:
            wake_by(address, fds)
        except OSError as error:
            _log.warning("this worker cannot wake the scheduler, which polls it: %s", error)

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
        self._loads[RoomKey(opening.room, 0)] = opening

    @contextmanager
    def _begun(self, rid: str, key: RoomKey, *offered: Any) -> Iterator[None]:
        """Enter a send, unless its room cannot begin: then it is freed as well, since no SourceFree
        will come."""
        try:
            yield
        except PrefixKVError as error:
            self._report.unsent[rid] = str(error)
            self._report.freed.append(rid)
        else:
            self._sends[key] = _Send(rid, [], *offered)

    def has_work_after(self, orders: StepOrders) -> bool:
        return bool(orders.computed or (self._host is not None and self._host.writes))

    def after_forward(self, orders: StepOrders, ready: DeviceEvent | None = None) -> None:
        """Hand over what a step has computed, and begin the writes to host memory. The KV is there
        once `ready.query()` is True."""
        if self._host is not None:
            self._host.begin_writes(ready)
        self._hand_over(orders.computed, ready)

    def _hand_over(self, computed: Iterable[Chunk], ready: DeviceEvent | None) -> None:
        for chunk in computed:
            if not chunk.digest:
                self._send(chunk, ready)
                continue
            with self._begun(chunk.rid, chunk.key, chunk, ready):
                numbers, timeout_s = chunk.key.numbers, self._options.offer_timeout_s
                self.prefill.offer(*numbers, chunk.end, chunk.digest, timeout_s)

    def _send(self, chunk: Chunk, ready: DeviceEvent | None) -> None:
        key = chunk.key
        if key not in self._sends:
            return  # the room is over
        pages = self._sends[key].pages
        pages[chunk.first_page :] = chunk.pages
        try:
            self.prefill.send_chunk(
                key.room, chunk.end, pages, decode=key.decode, last=chunk.last, ready=ready,
                windows=chunk.windows,
            )  # fmt: skip
        except PrefixKVError as error:
            # Decode would wait for tokens that never come: the room must end.
            _log.error("a chunk of request %s was not sent: %s", chunk.rid, error)
            self.prefill.abort(*key.numbers, str(error), decode=key.decode)

    # --- outcomes ---------------------------------------------------------------------------------

    def take_results(self) -> dict[str, bool]:
        """Return the loads that are over since the last call, True where the KV has not come. Takes
        in all events until now."""
        if self._decode is not None:
            for event in taken(self._decode.take_events, _log):
                self._take_decode_event(event)
        if self._prefill is not None:
            for sent_event in taken(self._prefill.take_events, _log):
                self._take_prefill_event(sent_event)
        if self._host is not None:
            self._report.host_pages |= self._host.take_size()
            for done, rid in self._host.take_ends():
                self._report.copied.append(done)
                if rid and done.error is not None:
                    self._report.failed.setdefault(rid, str(done.error))
                if rid:
                    self._end_load(rid, failed=done.error is not None)
        results, self._results = self._results, {}
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
                num_window_pages = len(load.window_pages)
                self.counters.add("blocks_loaded", len(load.pages) + num_window_pages)
                self.counters.add("window_blocks_loaded", num_window_pages)
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

    def _end_load(self, rid: str, failed: bool) -> None:
        # vLLM hears of it when no part touches the blocks any more, but a room that has failed,
        # whose blocks are held until it is settled.
        self._pending[rid] -= 1
        if failed:
            self._failed.add(rid)
        if self._pending[rid] == 0:
            del self._pending[rid]
            self._results[rid] = rid in self._failed
            self._failed.discard(rid)

    def _settle(self, key: RoomKey) -> None:
        self._report.settled.append(self._loads.pop(key).rid)

    def _take_prefill_event(self, event: PrefillEvent) -> None:
        # An offer's key has no decode server's name. Its first event when it is opened brings the
        # name, and from then on it is like any send.
        offer = RoomKey(*event.key.numbers)
        if event.key not in self._sends and offer in self._sends:
            self._sends[event.key] = self._sends.pop(offer)
        if (send := self._sends.get(event.key)) is None:
            return
        match event:
            case Bootstrapped():
                if (chunk := send.offered) is None:
                    self._report.promised.append(send.rid)
                else:
                    self._send(structs.replace(chunk, key=event.key), send.ready)
            case RoomEnded(error=Exception()):
                self._report.unsent[send.rid] = f"{type(event.error).__name__}: {event.error}"
            case SourceFree():
                del self._sends[event.key]
                self._report.freed.append(send.rid)

    def take_report(self) -> WorkerReport | None:
        report, self._report = self._report or None, WorkerReport()
        return report

    # --- an operator's ----------------------------------------------------------------------------

    def lost_peers(self) -> list[dict[str, Any]]:
        """See `extension.WorkerExtension.prefixkv_lost_peers`."""
        return [
            {"peer": peer.name, "life": f"{peer.incarnation:x}", "why": why, "held": held}
            for side in self._sides
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
        for side in self._sides:
            side.fence(peer, incarnation)

    def move_weights(self, weights_version: str) -> None:
        for side in self._sides:
            side.move_weights(weights_version)

    # --- counts -----------------------------------------------------------------------------------

    def take_counts(self) -> dict[str, int]:
        if self._prefill is not None:
            # The transfer's number only grows; vLLM adds up intervals, so report the difference.
            sent = self._prefill.bytes_sent
            self.counters.add("bytes_sent", sent - self._bytes_sent)
            self._bytes_sent = sent
        return self.counters.take()


@contextmanager
def _logged(text: str, *args: object) -> Iterator[None]:
    try:
        yield
    except PrefixKVError as error:
        _log.warning(f"{text}: %s", *args, error)
