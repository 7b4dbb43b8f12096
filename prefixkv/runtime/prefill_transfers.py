"""The transfer side of a prefill worker: sends what decode lacks of a prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from secrets import token_bytes
from typing import cast

from prefixkv.addresses import is_loopback
from prefixkv.config import PrefillConfig
from prefixkv.control.prefill import PrefillControl
from prefixkv.control.rooms import LostPeers
from prefixkv.control.writes import StagingSlots
from prefixkv.digest import check_digest
from prefixkv.errors import AbortedError, AuxTooLargeError, ConfigError, RequestError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Mesh
from prefixkv.memory.state_pool import StatePool
from prefixkv.pages.requests import check_reason
from prefixkv.paging import PageIds, as_pages, checked_pages, pages_for
from prefixkv.prefill.send_plan import SendPlan, checked_chunk
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    Fence,
    OfferRoom,
    PrefillCommand,
    SendChunk,
    WithdrawRoom,
)
from prefixkv.protocol.events import (
    PrefillEvent,
    RoomEnded,
    SourceFree,
)
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import MAX_COUNT
from prefixkv.request import DeviceEvent, whole_number
from prefixkv.runtime.channel import RouterChannel
from prefixkv.runtime.control_thread import ControlThread
from prefixkv.runtime.place import Place, checked_config
from prefixkv.runtime.prover import Prover
from prefixkv.runtime.transfers import (
    SECRET_BYTES,
    MakeTransport,
    Memory,
    Transfers,
    peer_id,
    room_key,
    secret_number,
)
from prefixkv.transport.interfaces import check_interface
from prefixkv.transport.trial import Tell, Trial

_STAGING_WINDOW = 4  # leases under way at once, per room and pair of ranks


def _key(room: int, generation: int, decode: str) -> RoomKey:
    if not decode or not isinstance(decode, str):
        raise RequestError(f"decode is {decode!r}, the decode worker's name is needed")
    return room_key(room, generation, decode)


class PrefillTransfers(Transfers[PrefillCommand, bytes, PrefillEvent]):
    """The sending side of a prefill rank.

    Args:
        pool: this rank's KV memory; kept until this has closed. Over shared memory a peer may write
            there longer: see `close`.
        config: name, bind, model, control and transport of it are used.
        mesh, rank: as for `DecodeTransfers`; every rank gets the same rooms and chunks.
        endpoints: on rank 0, the `endpoint` of each other rank, in order.
        state: this rank's share of the extra state of requests; kept as long.
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
        config = checked_config(config, PrefillConfig)
        super().__init__(config.model.weights_version)
        place = Place.of(pool, config.model, mesh, rank, state)
        if rank == 0 and len(endpoints) != place.mesh.num_ranks - 1:
            raise ConfigError(
                f"{len(endpoints)} endpoints of other ranks, the mesh has {place.mesh.num_ranks} "
                "ranks"
            )
        name = f"{config.name}/{rank}" if rank else config.name
        self.peer_id = me = PeerId(name, secret_number())
        self._page_size = pool.layout.page_size
        self._max_aux_bytes = config.control.max_aux_bytes
        self._num_pages, self._num_slots = pool.layout.num_pages, place.num_slots
        # Rooms whose source is not free yet; the plan is of the whole prompt, since what decode has
        # is cut off by the control object. None: of one that is refused, or has ended.
        self._rooms: dict[RoomKey, SendPlan | None] = {}
        # The generation added last, by decode worker and room.
        self._last: dict[tuple[str, int], RoomKey] = {}
        memory = Memory(pool, place, me, config.transport, transport)
        sizes = config.transport
        tries = transport is None and sizes.backend != "shm"  # shm loads nothing of a peer's
        slots: StagingSlots | None = None
        if memory.area is not None:
            num_slots = sizes.staging_bytes // sizes.lease_bytes
            slots = StagingSlots(num_slots, sizes.lease_bytes, _STAGING_WINDOW)

        def control(metadata: bytes) -> PrefillControl:
            what = place.digest, place.topology, config.control, ("", *endpoints), rank, slots
            secret = token_bytes(SECRET_BYTES)
            return PrefillControl(
                me,
                *what,
                tries=tries,
                secret=secret,
                life=prover.life,
                backend=sizes.backend,
                option_names=config.model.option_names,
                max_tokens=min(pool.layout.num_pages * pool.layout.page_size, MAX_COUNT),
                weights_version=config.model.weights_version,
            )

        def channel(fd: int) -> RouterChannel:
            self._router = RouterChannel(config.bind, config.control, fd)
            try:
                if transport is None and sizes.backend != "shm":
                    what = f"bind is {config.bind!r}"
                    check_interface(sizes.interface, what, is_loopback(config.bind))
            except ConfigError:
                self._router.close()
                raise
            return self._router

        def trial(tell: Tell) -> Trial:
            return Trial(name, tell, sizes.interface, sizes.trial_peers)

        prover = Prover(name, config.control, is_written_to=False, tell=self._proved)
        self.thread = ControlThread(
            name,
            memory.transport,
            control,
            channel,
            memory.copies,
            trial if tries else None,
            prover,
        )

    def _proved(self, peer: PeerId) -> None:
        self.thread.inbox.put(Fence(peer, proved=True))

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

    def add(self, room: int, generation: int, num_tokens: int, decode: str, digest: bytes) -> None:
        """The engine has the request of this room. Bootstrapped follows once decode has promised
        its pages; chunks may be handed over before.

        Args:
            room, generation: the transfer, and which attempt at it.
            num_tokens: of the prompt.
            decode: name of the decode worker that it is for, `DecodeConfig.name`. No other's word
                on the room counts; of two workers the same number is two rooms.
            digest: of the prompt, as in `DecodeTransfers.open`.
        Raises:
            RequestError: a number, name or digest out of range, and a room that was added or
                refused already and whose SourceFree the engine has not been told.
        """
        key = _key(room, generation, decode)
        num_tokens = whole_number("num_tokens", num_tokens, 1, 2**31)
        digest = check_digest(digest)
        self._begin(key, SendPlan(num_tokens, 0, self._page_size))
        self._last[key.decode, key.room] = key
        self.submit(AddRoom(key, num_tokens, digest))

    def send_chunk(
        self,
        room: int,
        end: int,
        pages: PageIds,
        *,
        decode: str,
        last: bool = False,
        aux: bytes = b"",
        ready: DeviceEvent | None = None,
        state_slot: int = -1,
        generation: int | None = None,
    ) -> None:
        """KV is computed up to token `end`, once `ready.query()`: send what decode lacks of it.

        Args:
            room, decode, generation: as added; None: the generation that was added last. One that
                has ended takes no chunk: no-op, until the engine has been told its SourceFree.
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
        self.check_open()  # first: the plan moves before the command is handed over
        key = self._last.get((decode, room))
        if generation is not None:
            key = _key(room, generation, decode)
        if key is None or key not in self._rooms:
            raise RequestError(f"room {room} of {decode!r} was not added, or is over")
        end, state_slot, aux = checked_chunk(end, state_slot, aux, last, ready)
        if len(aux) > self._max_aux_bytes:
            raise AuxTooLargeError(len(aux), self._max_aux_bytes)
        num_slots = self._num_slots if last else 0
        if not (0 <= state_slot < num_slots if num_slots else state_slot == -1):
            raise RequestError(f"state slot {state_slot} of {num_slots}, with the last chunk only")
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
            what = span.first_page, src, last, aux, ready, state_slot
            self.submit(SendChunk(key, *what, clip=True))

    def abort(self, room: int, generation: int, reason: str = "aborted", *, decode: str) -> None:
        """End a room; RoomEnded and SourceFree follow. Not added or ended: no-op."""
        check_reason(reason)
        key = _key(room, generation, decode)
        if key in self._rooms:
            self.submit(AbortRoom(key, reason))

    def refuse(self, room: int, generation: int, reason: str = "refused", *, decode: str) -> None:
        """Tell decode, which may have promised pages for it or may still do so, that this room will
        not be served here. RoomEnded and SourceFree follow.

        Raises RequestError as `add` does, and for a reason that is no string.
        """
        check_reason(reason)
        key = _key(room, generation, decode)
        self._begin(key, None)
        self.submit(DeclineRoom(key, reason))
        self._kept += [RoomEnded(key, KVPoll.FAILED, AbortedError(reason)), SourceFree(key)]
        self.rouse()

    def offer(
        self, room: int, generation: int, num_tokens: int, digest: bytes, timeout_s: float
    ) -> None:
        """The engine has drawn this room for a prompt that it has computed, and has told whoever
        places the request. The first decode worker whose promise proves the digest opens the room;
        from then on it is as one that was added for that worker: Bootstrapped follows, with its
        name in `key.decode`, and `send_chunk` takes that name.

        If no worker opens it within `timeout_s`, RoomEnded and SourceFree follow for the key
        without a name. So they do where a decode worker says that it does not want the room.

        Args:
            room, generation: numbers that no other room has, drawn at random: who knows them may
                end the offer. They do not open it.
            num_tokens: of the prompt.
            digest: of the prompt and of a secret that only the decode worker is told, as a part
                of `prompt_digest`'s namespace.
            timeout_s: seconds.
        Raises:
            RequestError: as `add`.
        """
        key = room_key(room, generation)
        num_tokens = whole_number("num_tokens", num_tokens, 1, 2**31)
        digest = check_digest(digest)
        if not 0.0 < timeout_s < math.inf:
            raise RequestError(f"timeout_s is {timeout_s!r}, seconds above 0 are needed")
        self._begin(key, SendPlan(num_tokens, 0, self._page_size))
        self.submit(OfferRoom(key, num_tokens, digest, float(timeout_s)))

    def withdraw(self, room: int, generation: int, reason: str = "withdrawn") -> None:
        """Nobody is to open this offer any more; RoomEnded and SourceFree follow for the key
        without a name. Not offered, ended, or opened meanwhile: no-op, and Bootstrapped or the
        other events say so."""
        check_reason(reason)
        self.submit(WithdrawRoom(room_key(room, generation), reason))

    def _begin(self, key: RoomKey, plan: SendPlan | None) -> None:
        if key in self._rooms:
            of = f"{key.generation} of {key.decode!r}"
            raise RequestError(f"room {key.room} generation {of} is here already")
        self.check_open()
        self._rooms[key] = plan

    def _told(self, event: PrefillEvent) -> None:
        offered = RoomKey(*event.key.numbers)
        if event.key not in self._rooms and offered in self._rooms:  # a decode worker opens it
            self._rooms[event.key] = self._rooms.pop(offered)
            self._last[event.key.decode, event.key.room] = event.key
        if isinstance(event, RoomEnded) and event.key in self._rooms:
            self._rooms[event.key] = None
        elif isinstance(event, SourceFree):
            self._rooms.pop(event.key, None)
            place = event.key.decode, event.key.room
            if self._last.get(place) == event.key:
                del self._last[place]

    def fence(self, peer: str, incarnation: int) -> None:
        """The caller knows that this decode process is dead: its rooms end."""
        self.submit(Fence(peer_id(peer, incarnation)))

    def peers(self) -> dict[PeerId, str]:
        """The decode ranks known, each "ready" or "suspect"."""
        self.check_open()
        return self.control.peers(time.monotonic())

    def lost_peers(self) -> LostPeers:
        """Decode processes that are suspect or over (replaced, fenced, or they have left) and still
        in rooms here: what is wrong with each, and how many rooms."""
        self.check_open()
        return self.control.lost_peers(time.monotonic())

    def peer_states(self) -> list[str]:
        """Of each decode rank known, as `peers` says it."""
        return list(self.peers().values())
