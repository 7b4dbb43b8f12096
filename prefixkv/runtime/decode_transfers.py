"""The transfer side of a decode worker: promises pages, and reports when they hold the KV."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

from prefixkv.config import DecodeConfig, Way, check_prefill
from prefixkv.control.decode.control import DecodeControl
from prefixkv.digest import check_digest
from prefixkv.errors import ConfigError, RequestError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages.requests import check_reason
from prefixkv.paging import PageIds, as_pages, check_in_pool, pages_for
from prefixkv.protocol.commands import (
    AbortRoom,
    DecodeCommand,
    OpenRoom,
    RefuseRoom,
)
from prefixkv.protocol.events import (
    DecodeEvent,
    RoomDrained,
    RoomEnded,
)
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.protocol.messages import MAX_PAGES, Hello, Libraries, ProcessLife, Promise
from prefixkv.request import whole_number
from prefixkv.runtime.channel import DealerChannel
from prefixkv.runtime.control_thread import ControlThread
from prefixkv.runtime.rank_spec import RankSpec, checked_config
from prefixkv.runtime.transfers import (
    Transfers,
    room_key,
    secret_number,
)
from prefixkv.settings import check_kind
from prefixkv.transport.nixl.agent import loaded_libraries


class DecodeTransfers(Transfers[DecodeCommand, DecodeEvent]):
    """The receiving side of a decode rank.

    Args:
        pool: this rank's share, as a RankSpec; a KVPool holds all of the model's KV. Kept until
            this has closed. Over shared memory a peer may write there longer: see `close`.
        config: its name, model, control and transport are used.
        worker: the `peer_id` of rank 0; None on rank 0.

    Raises ConfigError: a pool that is not the rank's share, or cannot be registered.
    """

    _is_written_to = True

    def __init__(
        self,
        pool: KVPool | RankSpec,
        config: DecodeConfig | None = None,
        worker: PeerId | None = None,
    ) -> None:
        self._begun_s = time.monotonic()  # first: no request came before
        config = checked_config(config, DecodeConfig)
        super().__init__(pool, config)
        if worker is not None or self._spec.rank:
            check_kind("worker", worker, PeerId)
        self._config, self._worker = config, worker or self.peer_id
        self.thread = ControlThread(self._name, self)

    def _make_control(self, offers: Mapping[Way, bytes], life: ProcessLife | None) -> DecodeControl:
        if self._transport.backend == "shm" and not offers["shm"]:
            raise ConfigError(
                'backend is "shm", and the pool, or the state, is not memory that a peer may map: '
                "make it with shared=True"
            )
        model, spec = self._config.model, self._spec
        hello = Hello(
            spec.digest(model), spec.topology, spec.layout, offers.get("nixl", b""), spec.rank,
            self._worker, self._area, spec.state_layout, life=life, mapping=offers.get("shm", b""),
            libraries=loaded_libraries() if "nixl" in offers else Libraries(),
            place=spec.place if offers.get("shm") else "", checksums=self._checksums,
        )  # fmt: skip
        born_s = None if spec.rank else self._begun_s
        return DecodeControl(self.peer_id, hello, self._control, model.option_names, born_s)

    def _make_channel(self, wake_fd: int) -> DealerChannel:
        # Refused now, and not by a timeout.
        return DealerChannel(
            self._control, wake_fd,
            lambda address: self._check_interface(f"prefill is {address!r}", address),
        )  # fmt: skip

    @property
    def control(self) -> DecodeControl:
        """For audits; it belongs to the control thread."""
        return cast(DecodeControl, self.thread.control)

    def open(
        self,
        room: int,
        generation: int,
        num_tokens: int,
        prefix_len: int,
        pages: PageIds,
        prefill: str,
        digest: bytes,
        state_slot: int = -1,
        ticket: int | None = None,
        windows: Sequence[PageIds] = (),
    ) -> None:
        """Promise pages to a prefill worker, for the KV of tokens `prefix_len` to `num_tokens`.

        Args:
            room, generation: the transfer, and which attempt at it.
            prefix_len: tokens that have KV here already, whole pages.
            pages: a page id for each page behind the prefix, a partial last one included. They are
                the room's until it has succeeded or is drained.
            digest: 16 to 64 bytes that name the prompt, as in `PrefillTransfers.add`:
                `prompt_digest(tokens, namespace)`, say. If they differ nothing is sent, and both
                get a PromptMismatchError.
            state_slot: of extra state, -1 if the worker has none.
            ticket: which promise this is, below 2**63. All ranks of a worker give the same one,
                drawn at random for this call; None: drawn here.
            windows: for each window group, in order, a page id for each page from number
                `(num_tokens + 1 - window) // page_size` on, at least 0, whatever the prefix is.

        Raises, with nothing changed, RequestError: a number, the slot or the digest out of range, a
        room that is open or not drained yet, or pages that do not fit the prefix and the rest;
        PageStateError: ids outside the pool.
        """
        # 1. Every argument, before anything is changed.
        key = room_key(room, generation)
        num_tokens = whole_number("num_tokens", num_tokens, 0, 2**31)
        prefix_len = whole_number("prefix_len", prefix_len, 0, num_tokens + 1)
        state_slot = whole_number("state_slot", state_slot, -1, 2**31)
        if not (0 <= state_slot < self._num_slots if self._num_slots else state_slot == -1):
            raise RequestError(f"state slot {state_slot} of {self._num_slots}")
        ticket = None if ticket is None else whole_number("ticket", ticket, 1, 2**63)
        digest = check_digest(digest)
        check_prefill(f"room {key.room}", prefill)
        ids = as_pages(pages)
        if prefix_len % self._page_size:
            raise RequestError(f"prefix_len is {prefix_len}, not whole pages of {self._page_size}")
        wanted = pages_for(num_tokens, self._page_size) - prefix_len // self._page_size
        if wanted > MAX_PAGES:
            raise RequestError(f"{wanted} pages, a promise names at most {MAX_PAGES}")
        if len(ids) != wanted:
            raise RequestError(f"{len(ids)} pages where {wanted} are needed")
        check_in_pool(ids, self._num_pages, "promised page")
        groups = self._window_ids(num_tokens, windows)
        if state_slot >= 0:
            groups += (state_slot.to_bytes(4, "little"),)
        # 2. The number is taken, then the command queued: both or neither.
        if state_slot >= 0 and state_slot in self._rooms.values():
            raise RequestError(f"state slot {state_slot} is another room's")
        self._begin(key, state_slot)
        raw, ticket = ids.astype("<i4").tobytes(), ticket or secret_number()
        # Little-endian int32, whatever the machine: the promise travels.
        promise = Promise(
            *key.numbers, num_tokens, prefix_len, raw, ticket, digest,
            weights_version=self._weights_version, groups=groups,
        )  # fmt: skip
        self.thread.submit(OpenRoom(promise, prefill))

    def _window_ids(self, num_tokens: int, windows: Sequence[PageIds]) -> tuple[bytes, ...]:
        self._check_windows(windows)
        found: list[bytes] = []
        for group, pages in zip(self._windows, windows, strict=True):
            ids = as_pages(pages)
            wanted = pages_for(num_tokens, self._page_size) - group.first_page(num_tokens)
            if len(ids) != wanted:
                raise RequestError(f"{len(ids)} pages where group {group.name!r} needs {wanted}")
            check_in_pool(ids, group.layout.num_pages, "promised page")
            found.append(ids.astype("<i4").tobytes())
        return tuple(found)

    def abort(self, room: int, generation: int, reason: str = "aborted") -> None:
        """End a room; its pages come back with RoomDrained. Unknown or ended: no-op."""
        check_reason(reason)
        self.thread.submit(AbortRoom(room_key(room, generation), reason))

    def refuse(
        self,
        room: int,
        generation: int,
        prefill: str,
        reason: str = "refused",
        ticket: int | None = None,
        digest: bytes = b"",
    ) -> None:
        """Tell prefill at once that this rank will not open the room. RoomDrained follows.

        `ticket` and `digest` are as for `open`. Without the digest any request with this number
        that prefill has, or gets next, is refused. Raises RequestError: the room is open or not
        drained yet, or a digest, address or reason is malformed.
        """
        check_reason(reason)
        key = room_key(room, generation)
        check_prefill(f"room {key.room}", prefill)
        # Only b"" is none: the truth of an array is an error of numpy's.
        digest = b"" if isinstance(digest, bytes) and not digest else check_digest(digest)
        ticket = secret_number() if ticket is None else whole_number("ticket", ticket, 1, 2**63)
        self._begin(key)
        self.thread.submit(RefuseRoom(key, ticket, prefill, reason, digest))

    def _follow_event(self, event: DecodeEvent) -> None:
        # A failed room keeps its number until it is drained: a peer may still write its pages.
        if isinstance(event, RoomDrained) or (
            isinstance(event, RoomEnded) and event.poll is KVPoll.SUCCESS
        ):
            self._rooms.pop(event.key, None)

    def peers(self) -> dict[str, tuple[PeerId | None, str]]:
        """Return, by address, the identity of each prefill worker, and "ready", "suspect" or
        "connecting". Any thread may ask."""
        self.check_open()
        return self.control.peers(time.monotonic())
