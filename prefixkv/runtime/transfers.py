"""The transfer side of a worker on its own: control thread and transport, for an engine that owns
its pages and its prefix cache. `DecodeNode` and `PrefillNode` stand on it.

Both objects are used from one thread. The engine says which pages a room is about, and is told by
`take_events` what became of it:

    DecodeTransfers.open   -> RoomEnded(SUCCESS): the pages hold the KV; they are the engine's
                           -> RoomEnded(FAILED), later RoomDrained: only then may the pages be
                              used again; RoomOverdue in between is for the operator
    PrefillTransfers.add   -> Bootstrapped: decode has promised its pages
                           -> RoomEnded, and SourceFree, with it or later: no write reads the pages
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Generic, TypeVar, cast

from prefixkv.config import DecodeConfig, PrefillConfig, TransportConfig
from prefixkv.control.decode import DecodeControl
from prefixkv.control.effects import To
from prefixkv.control.prefill import PrefillControl
from prefixkv.control.writes import StagingSlots
from prefixkv.errors import AuxTooLargeError, ClosedError, ConfigError, InternalError, RequestError
from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.staging_buffer import StagingBuffer
from prefixkv.memory.state_layout import StateLayout
from prefixkv.memory.state_pool import StatePool
from prefixkv.paging import PageIds, as_pages, checked_pages, pages_for
from prefixkv.prefill.send_plan import SendPlan
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DecodeCommand,
    Fence,
    OpenRoom,
    PrefillCommand,
    RefuseRoom,
    SendChunk,
)
from prefixkv.protocol.events import (
    DecodeEvent,
    PrefillEvent,
    RoomDrained,
    RoomEnded,
    RoomEvent,
    SourceFree,
)
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Promise
from prefixkv.request import DeviceEvent, whole_number
from prefixkv.runtime.channel import DealerChannel, RouterChannel
from prefixkv.runtime.closing import Closing
from prefixkv.runtime.control_thread import ControlFailed, ControlThread
from prefixkv.runtime.copies import CopyPool, CopySink, StagingCopies
from prefixkv.runtime.place import Place
from prefixkv.transport.base import Sink, Transport
from prefixkv.transport.sharded import make_transport

C = TypeVar("C")
E = TypeVar("E", bound=RoomEvent)


MakeTransport = Callable[
    [PeerId, KVLayout, Sink, TransportConfig, StagingArea | None, StateLayout | None], Transport
]
"""How a rank's transport is made: NIXL's (`transport.sharded.make_transport`), or a fabric's of
`prefixkv.testing`."""


def _key(room: int, generation: int) -> RoomKey:
    """Raises RequestError for numbers that no frame carries."""
    whole = whole_number("room", room, 0, 2**64), whole_number("generation", generation, 0, 2**31)
    return RoomKey(*whole)


class _Memory:
    """A rank's pool, its staging memory and its state pool, as transport and copies take them."""

    def __init__(
        self,
        pool: KVPool,
        place: Place,
        me: PeerId,
        config: TransportConfig,
        make: MakeTransport | None,
    ) -> None:
        """Raises ConfigError, CapacityError for the staging memory."""
        self._layout, self._me, self._config = pool.layout, me, config
        self._make = make or make_transport
        self._state = place.state_layout
        self._buffer: StagingBuffer | None = None
        if config.staging_bytes:
            self._buffer = StagingBuffer(config.staging_bytes, config.lease_bytes, pool.device)

    @property
    def area(self) -> StagingArea | None:
        return None if self._buffer is None else self._buffer.area

    def transport(self, sink: Sink) -> Transport:
        return self._make(self._me, self._layout, sink, self._config, self.area, self._state)

    def copies(self, sink: CopySink) -> StagingCopies | None:
        if self._buffer is None:
            return None
        config = self._config
        workers = CopyPool(config.copy_threads, sink, self._buffer.device, self._me.name)
        return StagingCopies(self._layout, self._buffer, config.lease_bytes, workers)


class Transfers(Closing, Generic[C, To, E]):
    """What both sides share."""

    peer_id: PeerId
    thread: ControlThread[C, To]

    def __init__(self) -> None:
        self._kept: list[E] = []
        self._closed = False

    def submit(self, command: C) -> None:
        """Hand a command to the control thread. Raises ClosedError after `close`."""
        self.thread.submit(command)

    def take_events(self) -> list[E]:
        """What became of rooms since the last call, in order.

        Raises InternalError for what went wrong in the control thread; the events come next time.
        """
        events, error = self.take_raw()
        self._kept += events
        if error is not None:
            if self._kept:
                self.rouse()
            raise InternalError(f"in the control thread: {error!r}") from error
        events, self._kept = self._kept, []
        for event in events:
            self._told(event)
        return events

    def _told(self, event: E) -> None:
        """The engine is being told this: a room that it opened may be over."""

    def take_raw(self) -> tuple[list[E], Exception | None]:
        """For a node, which knows its rooms itself: what came since the last call, and the first
        thing that went wrong."""
        self.check_open()
        queue = self.thread.events
        if not queue.pending:
            return [], None
        events: list[E] = []
        failed: Exception | None = None
        for event in queue.drain():
            if isinstance(event, ControlFailed):
                failed = failed or event.error
            else:
                events.append(cast(E, event))  # a side's control object says only its own events
        return events, failed

    @property
    def pending(self) -> bool:
        """Whether `take_events` has something, or its descriptor has to be cleared."""
        return bool(self._kept) or self.thread.events.pending

    def rouse(self) -> None:
        """Make the descriptor readable until the next `take_events`."""
        self.thread.events.rouse()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there are events, at most `timeout_s`. True if there may be some."""
        self.check_open()
        return bool(self._kept) or self.thread.events.wait(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable while there are events, for the engine's own poller."""
        self.check_open()
        return self.thread.events.fd

    @property
    def num_rooms(self) -> int:
        """Rooms that are open, or that a peer may still write or speak for. Any thread may ask."""
        return self.thread.control.num_rooms

    def stats(self) -> dict[str, int]:
        """Counters of control object, staging, sockets and thread. Any thread may ask."""
        control = self.thread.control
        staging = dict(self._staging_counters)
        return {
            **control.counters,
            **{f"staging_{name}": number for name, number in staging.items()},
            **self.thread.channel.counters,
            "control_errors": self.thread.num_errors,
            "rooms": control.num_rooms,
        }

    def dropped_frames(self) -> dict[str, int]:
        """Control frames that were dropped, by why: those received ("dropped: ..."), those not sent
        ("frames_not_sent: ..."), and those that no peer's socket sends ("frames_malformed"). Any
        thread may ask."""
        counters = {**self.thread.control.counters, **self.thread.channel.counters}
        return {
            reason: count
            for reason, count in counters.items()
            if reason.startswith(("dropped: ", "frames_not_sent: ", "frames_malformed"))
        }

    @property
    def _staging_counters(self) -> Mapping[str, int]:
        raise NotImplementedError

    def check_open(self) -> None:
        """Raises ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the node is closed")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Destroy the transport's agent, tell the peers, join every thread. Again: no-op.

        A peer that is writing into this pool over shared memory is not stopped by it: keep the
        pool's memory until its requests have ended there. Raises InternalError, with the threads
        joined, if the agent could not be destroyed.
        """
        self._closed = True
        self.thread.close()


class DecodeTransfers(Transfers[DecodeCommand, str, DecodeEvent]):
    """The receiving side of a decode rank.

    Args:
        pool: this rank's KV memory; it must outlive this.
        config: name, model, control and transport of it are used.
        mesh, rank: how the model is shared out over the ranks of the worker, and which of them this
            is. None: the pool holds all of the model's KV.
        worker: the `peer_id` of rank 0; None on rank 0.
        state: this rank's share of the extra state of requests; it must outlive this.
        transport: makes another transport than NIXL's, for tests.
    Raises:
        ConfigError: a pool that is not the rank's share, or cannot be registered.
    """

    def __init__(
        self,
        pool: KVPool,
        config: DecodeConfig | None = None,
        mesh: Mesh | None = None,
        rank: int = 0,
        worker: PeerId | None = None,
        state: StatePool | None = None,
        transport: MakeTransport | None = None,
    ) -> None:
        super().__init__()
        config = config or DecodeConfig()
        place = Place.of(pool, config.model, mesh, rank, state)
        name = f"{config.name}/{rank}" if rank else config.name
        self.peer_id = me = PeerId(name, time.time_ns())
        self._page_size = pool.layout.page_size
        self._num_pages = pool.layout.num_pages
        self._tickets = count(1)
        self._keys: set[RoomKey] = set()  # that are open or refused, and not over
        memory = _Memory(pool, place, me, config.transport, transport)

        def control(metadata: bytes) -> DecodeControl:
            hello = place.hello(metadata, worker or me, memory.area)
            return DecodeControl(me, hello, config.control)

        self.thread = ControlThread(
            name,
            memory.transport,
            control,
            lambda fd: DealerChannel(config.control, fd),
            memory.copies,
        )

    @property
    def control(self) -> DecodeControl:
        """For audits; it is the control thread's."""
        return cast(DecodeControl, self.thread.control)

    @property
    def _staging_counters(self) -> Mapping[str, int]:
        return {} if self.control.staging is None else self.control.staging.counters

    def open(
        self,
        room: int,
        generation: int,
        num_tokens: int,
        prefix_len: int,
        pages: PageIds,
        prefill: str,
        state_slot: int = -1,
    ) -> None:
        """Promise pages to a prefill worker, for the KV of tokens `prefix_len` to `num_tokens`.

        Args:
            room, generation: the transfer, and which attempt at it.
            num_tokens: of the prompt.
            prefix_len: tokens of it whose KV is here already, whole pages.
            pages: a page id for each page behind the prefix, a partial last one included. They are
                the room's until it has succeeded or is drained.
            prefill: the address of the prefill worker.
            state_slot: of extra state, -1 where there is none.
        Raises:
            RequestError: a number out of range, a room that is open or not drained yet, a prefix
                that is not whole pages of the prompt, or another number of pages than the rest
                takes. PageStateError for ids outside the pool. Nothing was changed.
        """
        key = _key(room, generation)
        num_tokens = whole_number("num_tokens", num_tokens, 0, 2**31)
        prefix_len = whole_number("prefix_len", prefix_len, 0, num_tokens + 1)
        state_slot = whole_number("state_slot", state_slot, -1, 2**31)
        ids = as_pages(pages)
        if prefix_len % self._page_size:
            raise RequestError(f"prefix_len is {prefix_len}, not whole pages of {self._page_size}")
        wanted = pages_for(num_tokens, self._page_size) - prefix_len // self._page_size
        if len(ids) != wanted:
            raise RequestError(f"{len(ids)} pages where {wanted} are needed")
        if len(ids):
            checked_pages(ids, self._num_pages, "promised")
        self._begin(key)
        raw, ticket = ids.astype("<i4").tobytes(), next(self._tickets)
        promise = Promise(*key, num_tokens, prefix_len, raw, ticket, state_slot)
        self.submit(OpenRoom(promise, prefill))

    def abort(self, room: int, generation: int, reason: str = "aborted") -> None:
        """End a room; its pages come back with RoomDrained. Unknown or ended: no-op."""
        self.submit(AbortRoom(_key(room, generation), reason))

    def refuse(self, room: int, generation: int, prefill: str, reason: str = "refused") -> None:
        """Tell prefill at once that this room will not be opened here. RoomDrained follows.

        Raises RequestError for a room that is open or not drained yet.
        """
        key = _key(room, generation)
        self._begin(key)
        self.submit(RefuseRoom(key, next(self._tickets), prefill, reason))

    def _begin(self, key: RoomKey) -> None:
        if key in self._keys:
            raise RequestError(f"room {key.room} generation {key.generation} is not over yet")
        self.check_open()
        self._keys.add(key)

    def _told(self, event: DecodeEvent) -> None:
        if isinstance(event, RoomDrained) or (
            isinstance(event, RoomEnded) and event.poll is KVPoll.SUCCESS
        ):
            self._keys.discard(event.key)

    def fence(self, peer: str, incarnation: int) -> None:
        """The caller knows that this prefill process is dead: its rooms end, and are drained."""
        self.submit(Fence(PeerId(peer, incarnation)))

    def peers(self) -> dict[str, tuple[PeerId | None, str]]:
        """By address of the prefill worker: its identity, and "ready", "suspect" or
        "connecting"."""
        self.check_open()
        return self.control.peers(time.monotonic())

    def peer_states(self) -> list[str]:
        """Of each prefill rank known, as `peers` says it."""
        return [state for _, state in self.peers().values()]


class PrefillTransfers(Transfers[PrefillCommand, bytes, PrefillEvent]):
    """The sending side of a prefill rank.

    Args:
        pool: this rank's KV memory; it must outlive this.
        config: name, bind, model, control and transport of it are used.
        mesh, rank: as for `DecodeTransfers`; every rank gets the same rooms and chunks.
        endpoints: on rank 0, the `endpoint` of each other rank, in order.
        state: this rank's share of the extra state of requests; it must outlive this.
        transport: makes another transport than NIXL's, for tests.
    Raises:
        ConfigError: an address that cannot be bound, a pool that is not the rank's share or cannot
            be registered, another number of endpoints than there are other ranks.
    """

    def __init__(
        self,
        pool: KVPool,
        config: PrefillConfig | None = None,
        mesh: Mesh | None = None,
        rank: int = 0,
        endpoints: Sequence[str] = (),
        state: StatePool | None = None,
        transport: MakeTransport | None = None,
    ) -> None:
        super().__init__()
        config = config or PrefillConfig()
        place = Place.of(pool, config.model, mesh, rank, state)
        if rank == 0 and len(endpoints) != place.mesh.num_ranks - 1:
            raise ConfigError(
                f"{len(endpoints)} endpoints of other ranks, the mesh has {place.mesh.num_ranks} "
                "ranks"
            )
        name = f"{config.name}/{rank}" if rank else config.name
        self.peer_id = me = PeerId(name, time.time_ns())
        self._page_size = pool.layout.page_size
        self._max_aux_bytes = config.control.max_aux_bytes
        self._num_pages, self._num_slots = pool.layout.num_pages, place.num_slots
        # Rooms whose source is not free yet; the plan is of the whole prompt, since what decode has
        # is cut off by the control object. None: of one that is refused, or has ended.
        self._rooms: dict[RoomKey, SendPlan | None] = {}
        self._last: dict[int, RoomKey] = {}  # the generation added last, by room
        memory = _Memory(pool, place, me, config.transport, transport)
        sizes = config.transport
        slots: StagingSlots | None = None
        if memory.area is not None:
            num_slots = sizes.staging_bytes // sizes.lease_bytes
            slots = StagingSlots(num_slots, sizes.lease_bytes, sizes.staging_window)

        def control(metadata: bytes) -> PrefillControl:
            what = place.digest, place.topology, config.control, ("", *endpoints), rank, slots
            return PrefillControl(me, *what)

        def channel(fd: int) -> RouterChannel:
            self._router = RouterChannel(config.bind, config.control, fd)
            return self._router

        self.thread = ControlThread(name, memory.transport, control, channel, memory.copies)

    @property
    def control(self) -> PrefillControl:
        """For audits; it is the control thread's."""
        return cast(PrefillControl, self.thread.control)

    @property
    def _staging_counters(self) -> Mapping[str, int]:
        return {} if self.control.staging is None else self.control.staging.counters

    @property
    def endpoint(self) -> str:
        """The bound address: what `DecodeTransfers.open` names."""
        return self._router.endpoint

    @property
    def bytes_sent(self) -> int:
        """KV written to decode workers. Any thread may ask."""
        return self.control.counters["bytes_sent"]

    def add(self, room: int, generation: int, num_tokens: int) -> None:
        """The engine has the request of this room, of `num_tokens` tokens. Bootstrapped follows
        once decode has promised its pages; chunks may be handed over before.

        Raises RequestError for a number out of range, and for a room that was added or refused
        already and whose SourceFree the engine has not been told.
        """
        key = _key(room, generation)
        num_tokens = whole_number("num_tokens", num_tokens, 1, 2**31)
        self._begin(key, SendPlan(num_tokens, 0, self._page_size))
        self._last[key.room] = key
        self.submit(AddRoom(key, num_tokens))

    def send_chunk(
        self,
        room: int,
        end: int,
        pages: PageIds,
        last: bool = False,
        aux: bytes = b"",
        ready: DeviceEvent | None = None,
        state_slot: int = -1,
        generation: int | None = None,
    ) -> None:
        """KV is computed up to token `end`, once `ready.query()`: send what decode lacks of it.

        Args:
            room, generation: None: the generation that was added last. One that has ended takes no
                chunk: no-op, until the engine has been told its SourceFree.
            end: tokens from the first one on; grows from call to call.
            pages: the request's page ids from its first token on, at least up to `end`.
            last: nothing follows; `end` is the prompt's. The outcome, `aux` (bytes for decode's
                engine: the first token, say) and the extra state in `state_slot` go with it.
            ready: KV is read once its `query()` is True; None: it is there already.
        Raises:
            RequestError: a room that was not added or is over, an `end` out of order, fewer pages
                than up to it, a chunk after the last one, `aux` or a state slot before it.
                AuxTooLargeError, PageStateError for ids outside the pool. Nothing was changed.
        """
        key = self._last.get(room) if generation is None else RoomKey(room, generation)
        if key is None or key not in self._rooms:
            raise RequestError(f"room {room} was not added, or is over")
        if len(aux) > self._max_aux_bytes:
            raise AuxTooLargeError(len(aux), self._max_aux_bytes)
        num_slots = self._num_slots if last else 0
        if not (0 <= state_slot < num_slots if num_slots else state_slot == -1):
            raise RequestError(f"state slot {state_slot} of {num_slots}, with the last chunk only")
        if aux and not last:
            raise RequestError("aux travels with the last chunk")
        ids = as_pages(pages)
        if len(ids) < pages_for(end, self._page_size):
            raise RequestError(f"{len(ids)} pages, {end} tokens need more")
        if len(ids):
            checked_pages(ids, self._num_pages, "source")
        plan = self._rooms[key]
        if plan is None:
            return
        span = plan.send(end, last)
        src = ids[span.first_page : span.end_page].copy()
        if len(src) or last:
            what = span.first_page, src, last, bytes(aux), ready, state_slot
            self.submit(SendChunk(key, *what, clip=True))

    def abort(self, room: int, generation: int, reason: str = "aborted") -> None:
        """End a room; RoomEnded and SourceFree follow. Not added or ended: no-op."""
        key = _key(room, generation)
        if key in self._rooms:
            self.submit(AbortRoom(key, reason))

    def refuse(self, room: int, generation: int, reason: str = "refused") -> None:
        """Tell decode, which may have promised pages for it or may still do so, that this room will
        not be served here. RoomEnded and SourceFree follow.

        Raises RequestError as `add` does.
        """
        key = _key(room, generation)
        self._begin(key, None)
        self.submit(AbortRoom(key, reason))  # ends a promise that is here already
        self.submit(AddRoom(key, 0))
        self.submit(AbortRoom(key, reason))

    def _begin(self, key: RoomKey, plan: SendPlan | None) -> None:
        if key in self._rooms:
            raise RequestError(f"room {key.room} generation {key.generation} is here already")
        self.check_open()
        self._rooms[key] = plan

    def _told(self, event: PrefillEvent) -> None:
        if isinstance(event, RoomEnded) and event.key in self._rooms:
            self._rooms[event.key] = None
        elif isinstance(event, SourceFree):
            self._rooms.pop(event.key, None)
            if self._last.get(event.key.room) == event.key:
                del self._last[event.key.room]

    def fence(self, peer: str, incarnation: int) -> None:
        """The caller knows that this decode process is dead: its rooms end."""
        self.submit(Fence(PeerId(peer, incarnation)))

    def peers(self) -> dict[PeerId, str]:
        """The decode ranks known, each "ready" or "suspect"."""
        self.check_open()
        return self.control.peers(time.monotonic())

    def peer_states(self) -> list[str]:
        """Of each decode rank known, as `peers` says it."""
        return list(self.peers().values())
