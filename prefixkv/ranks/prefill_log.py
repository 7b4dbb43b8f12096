"""The ranks of a prefill worker: rank 0 decides, and the others follow its log.

    rank 0       node = PrefillNode(pool, config, mesh, endpoints, ranks=PrefillLog())
                 broadcast(node.take_log())
    rank 1 ...   rank = PrefillRank(pool, config, mesh, 1)
                 rank.apply(receive(), ready); send(rank.take_rank_events())
    rank 0       for raw in received: node.apply_rank_events(raw)

All ranks have pages of the same ids, so a page, a window's page or a slot that rank 0 gives, keeps
or takes back is that on every rank; the others need no tree, no allocator and no checkpoints. The
log has the commands for their rooms, and what their engines read of a request: its pages, where it
goes on from and where it saves. Their events come back, and rank 0's scheduler hears of a room what
all ranks together say. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, assert_never

import msgspec

from prefixkv.errors import CallerError, ConfigError, InternalError, RequestError, shown
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.pages.windows import WindowPages, WindowSpec
from prefixkv.paging import Pages
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    Fence,
    MoveWeights,
    PrefillCommand,
    SendChunk,
    WindowChunk,
)
from prefixkv.protocol.events import (
    Bootstrapped,
    PrefillEvent,
    RoomEnded,
    SourceFree,
    decode_error,
    encode_error,
)
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import Count, Slot
from prefixkv.ranks.joined import JoinedRooms, Reports
from prefixkv.ranks.messages import check_next, decoded, packed_ids, unpacked_ids
from prefixkv.request import DeviceEvent

_Setting: TypeAlias = int | list[list[int | str]]


class LoggedRequest(Protocol):
    """What the log has of a request on rank 0, a `PrefillRequest`."""

    rid: str
    decode_prefix_len: int
    prefix_len: int
    checkpoint_slot: int
    stops: list[int]
    pages_held: RequestPages | None
    page_manager: PageManager

    @property
    def pages(self) -> Pages:
        """Page ids, int32."""


class _LoggedChunk(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="chunk"):
    """A SendChunk of rank 0: page ids packed, without `ready`, which each rank has its own of."""

    key: RoomKey
    first_page: Count
    src_pages: bytes
    last: bool
    aux: bytes
    state_slot: Slot
    windows: list[tuple[Count, bytes]]


_Logged: TypeAlias = AddRoom | DeclineRoom | AbortRoom | MoveWeights | Fence | _LoggedChunk


class _RankRequest(msgspec.Struct, frozen=True, array_like=True):
    """What the engine of another rank reads of a request that computes. `pages` are None where they
    are as the rank knows them already."""

    rid: str
    decode_prefix_len: Count
    prefix_len: Count
    checkpoint_slot: Slot
    stops: list[Count]
    pages: bytes | None
    windows: list[tuple[Count, bytes]]

    @classmethod
    def of(cls, req: LoggedRequest, has_new_pages: bool = True) -> _RankRequest:
        held = req.pages_held
        assert held is not None
        rows = [group.row(held.row) for group in req.page_manager.windows]
        return cls(
            req.rid, req.decode_prefix_len, req.prefix_len, req.checkpoint_slot, list(req.stops),
            packed_ids(req.pages) if has_new_pages else None,
            [(first, packed_ids(ids)) for first, ids in rows],
        )  # fmt: skip


class _Told(NamedTuple):
    """What tells two views of a request of rank 0 apart, in place of all its page ids."""

    pages: tuple[int, int, int]  # its row, how often that was written, and its length
    window_changes: int  # of its rows in the window groups
    begins: tuple[int, int, int]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, req: LoggedRequest, held: RequestPages) -> _Told:
        row, manager = held.row, req.page_manager
        return cls(
            (row, manager.table.num_writes(row), held.num_pages),
            # Each only grows, so the sum is another one if any of them is.
            sum([group.num_changes(row) for group in manager.windows]),
            (req.decode_prefix_len, req.prefix_len, req.checkpoint_slot),
            tuple(req.stops),
        )


class _PrefillBatch(msgspec.Struct, frozen=True, array_like=True):
    """One message of rank 0's log to the other prefill ranks. `requests` are new, or have changed;
    `ended` have no pages any more. `settings` come with the first."""

    number: int
    commands: list[_Logged]
    requests: list[_RankRequest]
    ended: list[str]
    settings: dict[str, _Setting]


def settings_of(
    num_pages: int, page_size: int, num_slots: int, windows: Sequence[WindowSpec]
) -> dict[str, _Setting]:
    """Return what all ranks of a prefill worker have alike: sizes of the pool, its
    window groups and the StatePool."""
    groups: list[list[int | str]] = [list(spec) for spec in windows]
    return {"num_pages": num_pages, "page_size": page_size, "slots": num_slots, "windows": groups}


class PrefillLog:
    """Rank 0's log, for the other ranks of a prefill worker. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.settings: dict[str, _Setting] = {}  # set by rank 0's node
        self._commands: list[_Logged] = []
        self._told: dict[str, _Told] = {}  # by rid, what the other ranks know

    def __bool__(self) -> bool:
        """Return True if a command for the other prefill ranks waits to be taken."""
        return bool(self._commands)

    def command(self, command: PrefillCommand) -> None:
        """Add a command of rank 0's scheduler for the rooms of every other prefill rank."""
        match command:
            case SendChunk():
                chunk = _LoggedChunk(
                    command.key,
                    command.first_page,
                    packed_ids(command.src_pages),
                    command.last,
                    command.aux,
                    command.state_slot,
                    [(first, packed_ids(pages)) for first, pages in command.windows],
                )
                self._commands.append(chunk)
            case AddRoom() | DeclineRoom() | AbortRoom() | MoveWeights() | Fence():
                self._commands.append(command)
            case _:
                raise InternalError(f"{type(command).__name__} is no command of a scheduler")

    def take(self, requests: Iterable[LoggedRequest]) -> bytes:
        """Return what the other prefill ranks have to apply, as one message, and forget it.
        `requests`: all of rank 0's. O(requests, and the pages of those that are new)."""
        told, now, changed = self._told, dict[str, _Told](), list[_RankRequest]()
        for req in requests:
            if (held := req.pages_held) is None:
                continue
            now[req.rid] = found = _Told.of(req, held)
            former = told.get(req.rid)
            if former != found:
                changed.append(_RankRequest.of(req, former is None or former.pages != found.pages))
        batch = _PrefillBatch(
            self.num_batches,
            self._commands,
            changed,
            [rid for rid in told if rid not in now],
            {} if self.num_batches else self.settings,
        )
        raw: bytes = _encode_batch(batch)
        # Only after encoding: if that raises, nothing is lost.
        self.num_batches += 1
        self._commands, self._told = [], now
        return raw


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """A request that computes, as the engine of a prefill rank above 0 reads it: see
    `PrefillRequest`. It is not changed: `PrefillRank.request` returns another one after `apply`."""

    rid: str
    decode_prefix_len: int
    prefix_len: int
    checkpoint_slot: int
    stops: list[int]
    pages: Pages
    windows: Mapping[str, WindowPages]

    def window_pages(self, name: str) -> WindowPages:
        """Return what the request has, on this prefill rank, in a window group; see
        `PrefillRequest.window_pages`. Raises CallerError if there is none of this name."""
        if not isinstance(name, str) or name not in self.windows:
            raise CallerError(f"there is no window group {shown(name)}")
        return self.windows[name]


class PrefillFollower:
    """What a prefill rank above 0 knows by rank 0's log. Owned by one thread.

    Args:
        num_pages, page_size: of this rank's pool, as of rank 0's.
        num_slots: of its StatePool, 0 without.
        windows: its window groups.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_slots: int, windows: Sequence[WindowSpec]
    ) -> None:
        self.num_batches = 0
        # The first message has rank 0's, which are the same.
        self._settings = settings_of(num_pages, page_size, num_slots, windows)
        self._num_pages, self._num_slots, self._windows = num_pages, num_slots, windows
        self._requests: dict[str, RankRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def request(self, rid: str) -> RankRequest:
        """Return a request that computes on this prefill rank. Raises RequestError if it is not
        here."""
        if not isinstance(rid, str) or rid not in self._requests:
            raise RequestError(f"request {shown(rid)} is not here")
        return self._requests[rid]

    def is_like(self, req: LoggedRequest) -> bool:
        """Return True if this prefill rank knows of a request what rank 0's has, for audits."""
        known = self._requests.get(req.rid)
        if known is None or req.pages_held is None:
            return False
        rows = [(first, packed_ids(ids)) for first, ids in known.windows.values()]
        return _RankRequest.of(req) == _RankRequest(
            req.rid, known.decode_prefix_len, known.prefix_len, known.checkpoint_slot, known.stops,
            packed_ids(known.pages), rows,
        )  # fmt: skip

    def apply(self, raw: bytes, ready: DeviceEvent | None) -> list[PrefillCommand]:
        """Take rank 0's message of one pass to this prefill rank. Return the commands for its
        control object; chunks in it are sent once `ready` is.

        Raises:
            CallerError: a message that is none, names pages or slots that there are not, was left
                out, or comes twice. Nothing was changed.
            ConfigError: this rank was built with other sizes than rank 0's. Nothing was changed.
        """
        batch = decoded(raw, _decode_batch, "rank 0")
        check_next(batch.number, self.num_batches)
        for name, value in self._settings.items() if batch.number == 0 else ():
            if batch.settings.get(name) != value:
                theirs = batch.settings.get(name)
                raise ConfigError(f"{name} is {value} on this rank, {theirs} on rank 0")
        # Page ids become addresses here, so each is looked at; and all before the first change.
        requests = [self._request(view) for view in batch.requests]
        commands = [self._command(one, ready) for one in batch.commands]
        self.num_batches += 1
        for rid in batch.ended:
            self._requests.pop(rid, None)
        self._requests.update({req.rid: req for req in requests})
        return commands

    def _request(self, view: _RankRequest) -> RankRequest:
        if view.pages is not None:
            pages = unpacked_ids(view.pages, self._num_pages)
        elif (known := self._requests.get(view.rid)) is not None:
            pages = known.pages
        else:
            raise CallerError(f"rank 0 sent no pages of request {shown(view.rid)}, which is new")
        self._check_slot(view.checkpoint_slot)
        rows = self._rows(view.windows)
        windows = {
            group.name: WindowPages(*row) for group, row in zip(self._windows, rows, strict=True)
        }
        return RankRequest(
            view.rid, view.decode_prefix_len, view.prefix_len, view.checkpoint_slot, view.stops,
            pages, windows,
        )  # fmt: skip

    def _command(self, logged: _Logged, ready: DeviceEvent | None) -> PrefillCommand:
        """Return a command of rank 0's log as this prefill rank carries it out. Raises CallerError
        for a chunk that cannot be."""
        if not isinstance(logged, _LoggedChunk):
            return logged
        self._check_slot(logged.state_slot)
        return SendChunk(
            logged.key,
            logged.first_page,
            unpacked_ids(logged.src_pages, self._num_pages),
            logged.last,
            logged.aux,
            ready,
            logged.state_slot,
            windows=tuple(WindowChunk(*row) for row in self._rows(logged.windows)),
        )

    def _rows(self, windows: list[tuple[int, bytes]]) -> list[tuple[int, Pages]]:
        """Return what rank 0 sent of a request or a chunk in each of this prefill rank's window
        groups. Raises CallerError for another number of them, or ids that are none there."""
        groups = self._windows
        if len(windows) != len(groups):
            raise CallerError(f"rank 0 sent pages in {len(windows)} window groups of {len(groups)}")
        return [
            (first, unpacked_ids(raw, group.num_pages))
            for (first, raw), group in zip(windows, groups, strict=True)
        ]

    def _check_slot(self, slot: int) -> None:
        if slot >= self._num_slots:
            raise CallerError(f"rank 0 sent slot {slot}, there are {self._num_slots}")


# --- events ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _PrefillReports(Reports):
    """What the ranks of a prefill worker have reported of one room. A rank whose writes read its
    pages no more is done with it."""

    begun: set[int] = field(default_factory=set)
    first: Bootstrapped | None = None  # rank 0's


class PrefillRankRooms(JoinedRooms[_PrefillReports, PrefillEvent]):
    """Rooms that are not over on all ranks of a prefill worker. Owned by rank 0's scheduler
    thread."""

    side = "prefill"
    make_reports = _PrefillReports

    @staticmethod
    def decode(raw: bytes) -> _RankEvents:
        return _decode_events(raw)

    def on(self, rank: int, event: PrefillEvent) -> tuple[list[PrefillEvent], list[AbortRoom]]:
        room = self._room(event.key)
        events: list[PrefillEvent] = []
        commands: list[AbortRoom] = []
        # 1. It begins when decode has promised to all: each sends its own part.
        # 2. Success is all ranks'; the first failure ends the room on all.
        # 3. Its pages are free when no rank's writes read them: they have the same ids.
        match event:
            case Bootstrapped():
                room.begun.add(rank)
                room.first = event if rank == 0 else room.first
                if len(room.begun) == self.num_ranks and not room.failed:
                    assert room.first is not None
                    events.append(room.first)
            case RoomEnded(key, KVPoll.SUCCESS):
                room.succeeded.add(rank)
                if len(room.succeeded) == self.num_ranks:
                    events.append(event)
            case RoomEnded() if room.failed:
                pass
            case RoomEnded(key, poll, error):
                ended, command = self._first_failure(key, room, rank, error, poll)
                events.append(ended)
                commands.append(command)
            case SourceFree():
                room.done.add(rank)
                events += self._if_over(event.key, room)
            case _:
                assert_never(event)
        return events, commands

    def _if_over(self, key: RoomKey, room: _PrefillReports) -> list[PrefillEvent]:
        if len(room.done) < self.num_ranks:
            return []
        # The last word of every rank, so its number may be used again.
        del self._rooms[key]
        return [SourceFree(key)]


class _RankEvents(msgspec.Struct, frozen=True, array_like=True):
    """Events of rooms on a prefill rank above 0, in order; `number` counts its messages from 0."""

    rank: int
    number: int
    events: list[PrefillEvent]


_encode_batch: Any = msgspec.msgpack.Encoder().encode
_decode_batch = msgspec.msgpack.Decoder(_PrefillBatch).decode
_encode_events: Any = msgspec.msgpack.Encoder(enc_hook=encode_error).encode
_decode_events = msgspec.msgpack.Decoder(_RankEvents, dec_hook=decode_error).decode


def pack_prefill_events(rank: int, number: int, events: Sequence[PrefillEvent]) -> bytes:
    raw: bytes = _encode_events(_RankEvents(rank, number, list(events)))
    return raw
