"""The common part of both workers' transfer sides: control thread, transport and events, for an
engine that owns its pages and its prefix cache. `DecodeNode` and `PrefillNode` stand on it.

Both objects are used from one thread. The engine says which pages a room is about, and learns from
`take_events` what became of it:

    DecodeTransfers.open   -> RoomEnded(SUCCESS): the pages hold the KV; they are the engine's
                           -> RoomEnded(FAILED), later RoomDrained: only then may the pages be
                              used again; RoomOverdue in between is for the operator
    PrefillTransfers.add   -> Bootstrapped: decode has promised its pages
                           -> RoomEnded, and SourceFree, with it or later: no write reads the pages
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

from prefixkv.config import (
    DecodeConfig,
    PrefillConfig,
    Way,
    check_version,
    is_loopback,
    organs_of,
)
from prefixkv.control.effects import RELAYS, Relay
from prefixkv.control.lives import LostPeers
from prefixkv.errors import ClosedError, ConfigError, InternalError, RequestError, shown, travels
from prefixkv.memory.kv_layout import RelayArea
from prefixkv.memory.kv_pool import KVPool
from prefixkv.protocol.commands import Fence, MoveWeights
from prefixkv.protocol.events import RoomEvent
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import ProcessLife
from prefixkv.request import whole_number
from prefixkv.runtime.control_thread import (
    Channel,
    Control,
    ControlFailed,
    ControlThread,
    Proofs,
)
from prefixkv.runtime.rank_spec import RankSpec
from prefixkv.settings import check_timeout
from prefixkv.threads import OneThread
from prefixkv.transport.base import CHECKS, Checks, RankMemory, Sink
from prefixkv.transport.nixl.agent import check_interface
from prefixkv.transport.transports import Transports, make_transports

C = TypeVar("C")
E = TypeVar("E", bound=RoomEvent)


def room_key(room: int, generation: int, decode: str = "") -> RoomKey:
    """Return the key of a room. Raise RequestError for numbers that no frame carries."""
    room = whole_number("room", room, 0, 2**64)
    generation = whole_number("generation", generation, 0, 2**31)
    return RoomKey(room, generation, decode)


def peer_id(peer: str, incarnation: int) -> PeerId:
    """Return the identity that a caller names. Raise RequestError, which the control thread could
    not, for what names none."""
    if not isinstance(peer, str) or not travels(peer):
        raise RequestError(f"peer is {shown(peer)}, a string that UTF-8 has bytes for is needed")
    return PeerId(peer, whole_number("incarnation", incarnation, 0, 2**64))


def secret_number() -> int:
    """Return 63 random bits, never 0: the incarnation of a process, or a ticket."""
    return secrets.randbits(63) or 1


class Transfers(OneThread, Generic[C, E]):
    """The base of DecodeTransfers and PrefillTransfers. Used from the engine's thread; the control
    thread is reached by its inbox alone."""

    any_thread = frozenset({"check_open", "fileno", "lost_peers", "peers", "stats"})

    proofs: ClassVar[type[Proofs]] = Proofs

    _is_written_to: ClassVar[bool]  # by peers
    peer_id: PeerId
    thread: ControlThread[C]

    def __init__(
        self,
        pool: KVPool | RankSpec,
        config: DecodeConfig | PrefillConfig,
    ) -> None:
        """Make the memory that a route needs. Raises ConfigError or CapacityError."""
        spec = pool if isinstance(pool, RankSpec) else RankSpec(pool)
        self._weights_version = config.model.weights_version  # of the rooms that are begun now
        self._name = f"{config.name}/{spec.rank}" if spec.rank else config.name
        self.peer_id = PeerId(self._name, secret_number())
        # Layouts are addresses only: the spec keeps the memory.
        self._spec, self._control, self._transport = spec, config.control, config.transport
        self._layout = layout = spec.layout
        self._page_size, self._num_pages = layout.page_size, layout.num_pages
        self._num_slots, self._windows = spec.num_slots, layout.windows
        if self._transport.checksums and layout.device != "cpu":
            raise ConfigError(
                f"checksums: are of memory of the CPU, the pool is on {layout.device}"
            )
        parts: list[Relay | Checks] = [*RELAYS, *CHECKS]
        for setting, _ in organs_of(self._transport):
            if not any(part.setting == setting for part in parts):
                raise ConfigError(f"{setting}: this installation has no part for it")
        self._buffer = RELAYS[0].memory(layout, self._transport) if RELAYS else None
        # Rooms whose numbers are in use, with what the side keeps of each.
        self._rooms: dict[RoomKey, Any] = {}
        # Events that are taken from the inbox and not given to the engine yet.
        self._undelivered: list[E] = []
        self._closed = False

    # --- the parts of the control thread, which has them made -------------------------------------

    def _make_proofs(self) -> Proofs:
        return self.proofs(self._name, self._control, self._is_written_to, self._proved)

    def _make_control(self, offers: Mapping[Way, bytes], life: ProcessLife | None) -> Control:
        """`offers`: the transports'; `life`: what is said of this process."""
        raise NotImplementedError

    def _make_channel(self, wake_fd: int) -> Channel:
        raise NotImplementedError

    @property
    def _area(self) -> RelayArea | None:
        return None if self._buffer is None else self._buffer.area

    def _make_transports(self, sink: Sink) -> Transports:
        memory = RankMemory(self._layout, self._area, self._spec.state_layout)
        what = self.peer_id, memory, sink, self._transport
        return Transports(make_transports(*what))

    def _make_parts(self, sink: Callable[[Any], None]) -> Iterator[Any]:
        """Make the threads that copy and look at pages; `sink` takes the end of each order."""
        what = self._transport, self._name, sink
        if self._buffer is not None:
            yield RELAYS[0].copies(self._layout, self._buffer, *what)
        if self._transport.checksums and self._is_written_to:
            memory = RankMemory(self._layout, state=self._spec.state_layout)
            yield CHECKS[0].threads(memory, *what)

    @property
    def _checksums(self) -> tuple[str, ...]:
        """The algorithms to offer."""
        return CHECKS[0].algorithms if self._transport.checksums else ()

    def _check_interface(self, what: str, address: str) -> None:
        """Raise ConfigError where KV could not come from, or go to, another machine: no interface
        is named."""
        if self._transport.backend != "shm":
            check_interface(self._transport.interface, what, is_loopback(address))

    def _proved(self, peer: PeerId) -> None:
        self.thread.inbox.put(cast(C, Fence(peer, proved=True)))

    def move_weights(self, weights_version: str) -> None:
        """Move to another version of the weights; the present one: no-op.

        Every room of the former version ends, with a RoomEnded and a WeightsVersionError, here and
        at the other side; so does one that is begun later under a version that the other side does
        not have. The engine empties its own prefix cache. Each rank is moved by itself. Raises
        ConfigError for no string, or more than 256 characters; ClosedError after `close`.
        """
        check_version(weights_version)
        # Queued before any room of the new version, so that it ends only those of the former one.
        self.thread.submit(cast(C, MoveWeights(weights_version)))
        self._weights_version = weights_version

    def take_events(self) -> list[E]:
        """Return the events since the last call, in order: what became of rooms. Raises
        InternalError for an exception in the control thread; the events come next time."""
        self.check_open()
        queue, failed = self.thread.events, None
        # Without a system call in the usual case. Drained to the end even after an error, which is
        # raised once all events are safe: one that is lost would leave a room open here.
        for event in queue.drain() if queue.pending else ():
            if isinstance(event, ControlFailed):
                failed = failed or event.error
            else:  # a side's control object says only its own events
                self._undelivered.append(cast(E, event))
        if failed is not None:
            # The inbox is empty by now, and a poller has to come back for what is kept.
            if self._undelivered:
                queue.notify()
            raise InternalError(f"in the control thread: {failed!r}") from failed
        events, self._undelivered = self._undelivered, []
        for event in events:
            self._follow_event(event)
        return events

    def _begin(self, key: RoomKey, kept: object = None) -> None:
        if key in self._rooms:
            of = f" of {key.decode!r}" if key.decode else ""
            raise RequestError(f"room {key.room} generation {key.generation}{of} is not over yet")
        # Before the number is taken: a closed side would never give it back.
        self.check_open()
        self._rooms[key] = kept

    def _check_windows(self, windows: object) -> None:
        """Raise RequestError unless it has an entry for each window group."""
        if not isinstance(windows, tuple | list):
            raise RequestError(f"windows is {shown(windows)}, a list is needed")
        if len(windows) != len(self._windows):
            raise RequestError(f"pages of {len(windows)} window groups of {len(self._windows)}")

    def _follow_event(self, event: E) -> None:
        """Follow an event that the engine is about to get: a room that it opened may be over."""

    @property
    def pending(self) -> bool:
        """True if `take_events` has something, or the descriptor has to be cleared."""
        return bool(self._undelivered) or self.thread.events.pending

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there may be events, at most `timeout_s`; return whether."""
        check_timeout(timeout_s)
        self.check_open()
        return bool(self._undelivered) or self.thread.events.wait(timeout_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events."""
        self.check_open()
        return self.thread.events.fd

    @property
    def num_rooms(self) -> int:
        """Rooms that are open, or that a peer may write or speak for. Any thread may ask."""
        return self.thread.control.num_rooms

    def stats(self) -> dict[str, int]:
        """Return the counters: control object, staging, sockets and thread. Any thread may ask."""
        control = self.thread.control
        # Copies made in one step: the control thread counts on.
        relayed = {} if control.relay is None else dict(control.relay.counters)
        return {
            **control.counters,
            **{f"staging_{name}": number for name, number in relayed.items()},
            **self.thread.channel.counters,
            "control_errors": self.thread.num_errors,
            "log_errors": self.thread.num_log_errors,
            "rooms": control.num_rooms,
        }

    def fence(self, peer: str, incarnation: int) -> None:
        """Take the caller's word that this process is dead: its rooms end, drained on decode."""
        self.thread.submit(cast(C, Fence(peer_id(peer, incarnation))))

    def lost_peers(self) -> LostPeers:
        """As the node's `lost_peers`. Any thread may ask."""
        self.check_open()
        return self.thread.control.lost_peers(time.monotonic())

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the node is closed")

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    def close(self) -> None:
        """As `Node.close`."""
        self._closed = True
        self.thread.close()


class OfTransfers(OneThread):
    """The base of nodes and of ranks above 0: what they say of their transfer side."""

    transfers: Transfers[Any, Any]

    def fileno(self) -> int:
        """A descriptor that is readable while there may be news: on a node, while a `pop_*` may
        have something. Any thread may ask.

        Now and then it is readable once more when all has been popped already. It does not become
        readable when a request has waited too long: call `pop_preallocated` from time to time.
        """
        return self.transfers.fileno()

    @property
    def num_rooms(self) -> int:
        """Number of rooms that are open, or not drained yet. Any thread may ask."""
        return self.transfers.num_rooms

    def lost_peers(self) -> LostPeers:
        """Return the processes of the other side to think of fencing: what is wrong with each, and
        how many pages here it may still write, or on prefill how many rooms it is in. Any thread
        may ask.

        They are suspect or over: replaced, fenced, or left. Fence those that are dead.
        """
        return self.transfers.lost_peers()
