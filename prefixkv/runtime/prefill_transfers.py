"""The transfer side of a prefill worker: sends the part of a prompt's KV that decode lacks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import cast

from prefixkv.config import PrefillConfig, Way
from prefixkv.control.effects import RelaySlots
from prefixkv.control.handshake import OurSide
from prefixkv.control.prefill.control import PrefillControl
from prefixkv.digest import check_digest
from prefixkv.errors import AbortedError, ConfigError, RequestError, shown
from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages.requests import check_reason
from prefixkv.paging import PageIds, as_pages, check_in_pool, pages_for
from prefixkv.prefill.request import SendPlan, checked_chunk, state_of
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    GroupChunk,
    OfferRoom,
    PrefillCommand,
    SendChunk,
)
from prefixkv.protocol.events import (
    PrefillEvent,
    RoomEnded,
    SourceFree,
)
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import MAX_COUNT, ProcessLife
from prefixkv.request import DeviceEvent, whole_number
from prefixkv.runtime.channel import RouterChannel
from prefixkv.runtime.control_thread import ControlThread
from prefixkv.runtime.rank_spec import RankSpec, checked_config
from prefixkv.runtime.transfers import (
    Transfers,
    room_key,
)
from prefixkv.threads import undoing
from prefixkv.transport.nixl.agent import loaded_libraries

_RELAY_WINDOW = 4  # leases under way at once, per room and pair of ranks


def _key(room: int, generation: int, decode: str) -> RoomKey:
    """Raise RequestError for numbers or names that cannot be."""
    if not isinstance(decode, str) or not decode:
        raise RequestError(f"decode is {shown(decode)}, the decode worker's name is needed")
    return room_key(room, generation, decode)


class PrefillTransfers(Transfers[PrefillCommand, PrefillEvent]):
    """The sending side of a prefill rank. Arguments as of `DecodeTransfers`; every rank gets the
    same rooms and chunks.

    Args:
        config: its name, bind, model, control and transport are used.
        endpoints: on rank 0, the `endpoint` of each other rank, in order.

    Raises ConfigError: an address that cannot be bound, a pool that is not the rank's share or
    cannot be registered, another number of endpoints than there are other ranks.
    """

    # Rooms with pages that a write may still read. The plan covers the whole prompt: the control
    # object cuts off what decode has. None: refused, or ended and its SourceFree still to come.
    _rooms: dict[RoomKey, SendPlan | None]
    _is_written_to = False

    def __init__(
        self,
        pool: KVPool | RankSpec,
        config: PrefillConfig | None = None,
        endpoints: Sequence[str] = (),
    ) -> None:
        config = checked_config(config, PrefillConfig)
        super().__init__(pool, config)
        spec = self._spec
        if not isinstance(endpoints, tuple | list) or not all(
            isinstance(address, str) for address in endpoints
        ):
            raise ConfigError(f"endpoints is {shown(endpoints)}, a list of addresses is needed")
        if spec.rank == 0 and len(endpoints) != spec.mesh.num_ranks - 1:
            raise ConfigError(
                f"{len(endpoints)} endpoints of other ranks, the mesh has {spec.mesh.num_ranks} "
                "ranks"
            )
        self._config, self._endpoints = config, endpoints
        self.thread = ControlThread(self._name, self)

    def _make_control(self, _: Mapping[Way, bytes], life: ProcessLife | None) -> PrefillControl:
        config, spec, sizes = self._config, self._spec, self._transport
        most_tokens = (self._num_pages - config.reserved_pages) * self._page_size
        ours = OurSide(
            spec.digest(config.model),
            spec.topology,
            spec.rank,
            life=life,
            backend=sizes.backend,
            option_names=config.model.option_names,
            max_tokens=min(most_tokens, MAX_COUNT),
            libraries=loaded_libraries(),
            place=spec.place,
            checksums=self._checksums,
        )
        slots: RelaySlots | None = None
        if self._area is not None:
            num_slots = self._area.num_bytes // sizes.lease_bytes
            slots = RelaySlots(num_slots, sizes.lease_bytes, _RELAY_WINDOW)
        where, version = ("", *self._endpoints), config.model.weights_version
        return PrefillControl(self.peer_id, ours, self._control, where, slots, version)

    def _make_channel(self, wake_fd: int) -> RouterChannel:
        config = self._config
        self._router = RouterChannel(config.bind, config.control, wake_fd)
        # Bound first: only then is it known whether others can reach it, and closed again if KV
        # cannot follow the same way.
        with undoing(self._router.close):
            self._check_interface(f"bind is {config.bind!r}", config.bind)
        return self._router

    @property
    def control(self) -> PrefillControl:
        """For audits; it belongs to the control thread."""
        return cast(PrefillControl, self.thread.control)

    @property
    def endpoint(self) -> str:
        """Bound address, which `DecodeTransfers.open` names."""
        return self._router.endpoint

    @property
    def bytes_sent(self) -> int:
        """KV bytes written to decode workers. Any thread may ask."""
        return self.control.counters["bytes_sent"]

    def add(self, room: int, generation: int, num_tokens: int, decode: str, digest: bytes) -> None:
        """Add a room, whose request the engine has. Bootstrapped follows once decode has promised
        its pages; chunks may be handed over before.

        Args:
            room, generation: the transfer, and which attempt at it.
            num_tokens: of the prompt.
            decode: name of the decode worker that it is for, `DecodeConfig.name`. Frames of others
                about the room do not count; for two workers the same number is two rooms.
            digest: of the prompt, as in `DecodeTransfers.open`.

        Raises RequestError: a number, name or digest out of range; or a room that was added or
        refused already, until the engine has its SourceFree from `take_events`.
        """
        key = _key(room, generation, decode)
        num_tokens = whole_number("num_tokens", num_tokens, 1, 2**31)
        digest = check_digest(digest)
        # Its number is taken, then the command queued: both or neither.
        self._begin(key, self._plan(num_tokens))
        self.thread.submit(AddRoom(key, num_tokens, digest))

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
        generation: int = 0,
        windows: Sequence[tuple[int, PageIds]] | None = (),
    ) -> None:
        """Send what decode lacks of the KV in the engine's `pages`, up to token `end`, computed
        once `ready.query()` is True.

        Args:
            room, decode, generation: as added. One that has ended takes no chunk: no-op, until the
                engine has its SourceFree.
            end: tokens from the first one on; grows from call to call.
            pages: the request's page ids from its first token on, at least up to `end`.
            last: nothing follows; `end` is the prompt's. The outcome, `aux` (bytes for decode's
                engine: the first token, say) and the extra state in `state_slot` go with it.
            ready: KV is read once its `query()` is True; None: it is there already.
            windows: for each window group of the pool, in order, the number of a page of the
                request and the ids of that page and the following ones there: at least those of the
                last window that this chunk completes. None: they all follow with a later chunk, the
                last one at the latest.

        Raises RequestError: a room that was not added or is over, an `end` out of order, fewer
        pages than up to it, a chunk after the last one, `aux` or a state slot before it. Nothing
        was changed. AuxTooLargeError: `aux` is longer than `max_aux_bytes`. Nothing was changed.
        PageStateError: ids outside the pool. Nothing was changed.
        """
        self.check_open()  # first: the plan moves before the command is queued
        # 1. Which room.
        key = _key(room, generation, decode)
        if key not in self._rooms:
            raise RequestError(f"room {room} of {decode!r} was not added, or is over")
        # 2. Every argument, before the plan moves.
        bounds = self._num_slots, self._control.max_aux_bytes
        end, state_slot, aux = checked_chunk(end, state_slot, aux, last, ready, *bounds)
        ids = as_pages(pages)
        if len(ids) < pages_for(end, self._page_size):
            need = pages_for(end, self._page_size)
            raise RequestError(
                f"{len(ids)} pages, {end} tokens need {need}: pages begin with the first token's, "
                f"also in later chunks"
            )
        check_in_pool(ids, self._num_pages, "source page")
        # 3. The pages between the last chunk's end and this one's. The copy is the job's: the
        # engine may change its array.
        plan = self._rooms[key]
        if plan is None:  # it has ended, and the engine cannot know that yet
            return
        if windows is None and last and plan.windows:
            raise RequestError("the last chunk has no pages of window groups, and none follows")
        sent = () if windows is None else self._window_chunks(plan, end, last, windows)
        sent += state_of(state_slot)
        span = plan.send(end, last)
        src = ids[span.first_page : span.end_page].copy()
        for one in plan.windows if windows is not None else ():
            one.send(end, last)
        if len(src) or last or any(len(one.src_pages) for one in sent):
            chunk = SendChunk(
                key,
                first_page=span.first_page,
                src_pages=src,
                last=last,
                aux=aux,
                ready=ready,
                clip=True,
                groups=sent,
            )
            self.thread.submit(chunk)

    def _plan(self, num_tokens: int) -> SendPlan:
        firsts = [group.first_page(num_tokens) for group in self._windows]
        return SendPlan(num_tokens, 0, self._page_size, firsts)

    def _window_chunks(
        self, plan: SendPlan, end: int, last: bool, windows: Sequence[tuple[int, PageIds]]
    ) -> tuple[GroupChunk, ...]:
        self._check_windows(windows)
        if not all(isinstance(one, tuple | list) and len(one) == 2 for one in windows):
            raise RequestError(f"windows is {shown(windows)}, pairs of page and ids are needed")
        found: list[GroupChunk] = []
        for group, of_group, (number, pages) in zip(
            self._windows, plan.windows, windows, strict=True
        ):
            first, ids = whole_number("first page", number, 0, 2**31), as_pages(pages)
            span = of_group.next(end, last)
            if span.first_page < span.end_page and not (
                first <= span.first_page and span.end_page <= first + len(ids)
            ):
                raise RequestError(
                    f"group {group.name!r}: pages {first} to {first + len(ids)}, this chunk sends "
                    f"{span.first_page} to {span.end_page}"
                )
            found.append(of_group.chunk(span, first, ids))
            check_in_pool(found[-1].src_pages, group.layout.num_pages, "source page")
        return tuple(found)

    def abort(self, room: int, generation: int, reason: str = "aborted", *, decode: str) -> None:
        """End a room; RoomEnded and SourceFree follow. Not added or ended: no-op."""
        check_reason(reason)
        key = _key(room, generation, decode)
        if key in self._rooms:
            self.thread.submit(AbortRoom(key, reason))

    def refuse(self, room: int, generation: int, reason: str = "refused", *, decode: str) -> None:
        """Refuse a room: decode is told now, or once it promises pages for it. RoomEnded and
        SourceFree follow. Raises RequestError as `add`, and for a reason that is no string."""
        check_reason(reason)
        key = _key(room, generation, decode)
        self._begin(key)
        self.thread.submit(DeclineRoom(key, reason))
        # No room of the control object's begins for the engine, so its end is said here.
        self._undelivered += [RoomEnded(key, KVPoll.FAILED, AbortedError(reason)), SourceFree(key)]
        self.thread.events.notify()

    def offer(
        self, room: int, generation: int, num_tokens: int, digest: bytes, timeout_s: float
    ) -> None:
        """Offer a room, drawn for a prompt that is computed, to any decode worker.

        The first decode worker whose promise proves the digest opens the room. Then it is like a
        room added for that worker: Bootstrapped follows, with the name for `send_chunk` in
        `key.decode`. If none opens it within `timeout_s`, or a worker does not want it, RoomEnded
        and SourceFree follow for the key without a name.

        Args:
            room, generation: numbers that no other room has, drawn at random: a worker that knows
                them may end the offer. They do not open it.
            digest: of the prompt and of a secret that only the chosen decode worker gets, as a part
                of `prompt_digest`'s namespace.

        Raises RequestError: as `add`.
        """
        key = room_key(room, generation)
        num_tokens = whole_number("num_tokens", num_tokens, 1, 2**31)
        digest = check_digest(digest)
        if isinstance(timeout_s, bool) or not (
            isinstance(timeout_s, Real) and 0 < timeout_s < 1e18
        ):
            raise RequestError(f"timeout_s is {shown(timeout_s)}, seconds above 0 are needed")
        self._begin(key, self._plan(num_tokens))
        self.thread.submit(OfferRoom(key, num_tokens, digest, float(timeout_s)))

    def withdraw(self, room: int, generation: int, reason: str = "withdrawn") -> None:
        """Withdraw an offer; RoomEnded and SourceFree follow for the key without a name.

        Not offered, ended, or opened meanwhile: no-op, and Bootstrapped or the other events say so.
        """
        check_reason(reason)
        self.thread.submit(AbortRoom(room_key(room, generation), reason))

    def _follow_event(self, event: PrefillEvent) -> None:
        # An offer has no decode worker in its key; the first event of its room brings the name.
        offered = RoomKey(*event.key.numbers)
        if event.key not in self._rooms and offered in self._rooms:  # a decode worker opens it
            self._rooms[event.key] = self._rooms.pop(offered)
        # Ended: no chunk is taken. SourceFree: the pages are the engine's, and the number is free.
        if isinstance(event, RoomEnded) and event.key in self._rooms:
            self._rooms[event.key] = None
        elif isinstance(event, SourceFree):
            self._rooms.pop(event.key, None)

    def peers(self) -> dict[PeerId, str]:
        """Return "ready" or "suspect" for each decode rank. Any thread may ask."""
        self.check_open()
        return self.control.peers(time.monotonic())
