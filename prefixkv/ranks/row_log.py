"""What the ranks above 0 of a worker follow: the rows of rank 0's page table, and room commands.

    rank 0       node = DecodeNode(pool, config, ranks=RankLog(), mesh=mesh)
                 broadcast(node.take_log())
    rank 1 ...   rank = DecodeRank(pool, config, mesh, 1, worker)
                 rank.apply(receive()); send(rank.take_rank_events())
    rank 0       for raw in received: node.apply_rank_events(raw)

Pages and slots have the same ids on all ranks. Rank 0 alone decides; its messages name the rows
that have changed or ended. Prefill works alike. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from prefixkv.errors import CallerError, ConfigError, InternalError, RequestError, shown
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.pages.table import UNUSED
from prefixkv.pages.windows import WindowPages, WindowSpec, of_window
from prefixkv.paging import Pages
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    DecodeCommand,
    Fence,
    GroupChunk,
    MoveWeights,
    OpenRoom,
    PrefillCommand,
    RefuseRoom,
    SendChunk,
)
from prefixkv.protocol.host_copy import HostCopy
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Count, Slot
from prefixkv.ranks.messages import check_next, decoded, packed_ids, unpacked_ids
from prefixkv.request import DeviceEvent

_Groups: TypeAlias = list[tuple[Count, bytes]]  # by group: a first page, and ids from it on


class RankSizes(NamedTuple):
    """What all ranks have alike: sizes of the pool, its window groups, the StatePool, the page
    table and the host memory."""

    side: str  # "decode" or "prefill"
    num_pages: int
    page_size: int
    max_running: int
    num_slots: int = 0
    host_pages: int = 0
    windows: tuple[WindowSpec, ...] = ()


class LoggedRequest(Protocol):
    """What the log has of a request that prefill computes, a `PrefillRequest`."""

    rid: str
    decode_prefix_len: int
    prefix_len: int
    checkpoint_slot: int
    stops: list[int]
    pages_held: RequestPages | None


# --- messages -------------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A row that has these page ids from position `start` on, and no more. `groups` are None where
    they have not changed."""

    row: Count
    start: Count
    ids: bytes
    groups: _Groups | None


class _View(msgspec.Struct, frozen=True, array_like=True):
    """What prefill's engine reads of a request that computes, beside its row."""

    rid: str
    row: Count
    decode_prefix_len: Count
    prefix_len: Count
    checkpoint_slot: Slot
    stops: list[Count]


class _Chunk(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="chunk"):
    """A SendChunk with its ids packed, and without `ready`: each rank has its own."""

    key: RoomKey
    first_page: Count
    src_pages: bytes
    last: bool
    aux: bytes
    groups: _Groups


class _Copy(msgspec.Struct, frozen=True, array_like=True):
    """A HostCopy that every rank makes of its own part, with its ids packed."""

    number: int
    is_load: bool
    host_pages: bytes
    device_pages: bytes


_OfBoth: TypeAlias = AbortRoom | MoveWeights | Fence
_OfDecode: TypeAlias = OpenRoom | RefuseRoom | _OfBoth
_OfPrefill: TypeAlias = AddRoom | DeclineRoom | _Chunk | _OfBoth
_LOGGED = (OpenRoom, RefuseRoom, AddRoom, DeclineRoom, AbortRoom, MoveWeights, Fence)
C = TypeVar("C")


class _Pass(msgspec.Struct, Generic[C], frozen=True, array_like=True):
    """One message of rank 0: rows and requests that have changed or ended, and what is to be
    carried out. `sizes` come with the first message."""

    number: int
    rows: list[_Row]
    ended: list[Count]
    views: list[_View]
    gone: list[str]
    commands: list[C]
    copies: list[_Copy]
    sizes: RankSizes | None


_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
_DECODERS: Mapping[str, Callable[[bytes], _Pass[Any]]] = {
    "decode": msgspec.msgpack.Decoder(_Pass[_OfDecode]).decode,
    "prefill": msgspec.msgpack.Decoder(_Pass[_OfPrefill]).decode,
}


# --- rank 0 ---------------------------------------------------------------------------------------


class _Told(NamedTuple):
    """What tells two states of the page table apart: by row, the length (below 0: not in use), how
    often ids were overwritten, and changes in the groups."""

    lengths: npt.NDArray[np.int32]
    writes: npt.NDArray[np.int64]
    moves: npt.NDArray[np.int64]

    @classmethod
    def of(cls, pages: PageManager) -> _Told:
        rows = slice(pages.table.max_requests)  # spare rows are of no request
        # Each count only grows, so the sum is another one if any of them is.
        moves = np.zeros(pages.table.max_requests, np.int64)
        for group in pages.groups:
            moves += group.changes[rows]
        return cls(pages.table.lengths[rows].copy(), pages.table.writes[rows].copy(), moves)


class RankLog:
    """Rank 0's log, for the other ranks of a decode worker, or of a prefill worker with one cache.
    Owned by the scheduler's thread.

    The engine broadcasts the bytes once a pass, before the step whose attention reads the rows.
    Ranks may apply late and at different times. Rank 0's `after=` events stand for all ranks: a
    step that has ended there has passed its last all-reduce, so every rank has read all of its
    pages. `endpoints`: of prefill's other ranks, in order.
    """

    def __init__(self, endpoints: Sequence[str] = ()) -> None:
        self.endpoints = endpoints
        self.num_batches = 0
        self.sizes: RankSizes | None = None  # set by rank 0's node
        self._commands: list[Any] = []
        self._copies: list[_Copy] = []
        self._told: _Told | None = None  # by the last message
        self._views: dict[str, _View] = {}  # by rid, as the other ranks know them

    def has_news(self, pages: PageManager) -> bool:
        """Return True if a command, a copy or a changed row waits to be taken. O(rows)."""
        if self._commands or self._copies:
            return True
        now, told = _Told.of(pages), self._told
        if told is None:
            return bool((now.lengths >= 0).any())
        return not all(np.array_equal(now[i], told[i]) for i in range(len(now)))

    def command(self, command: DecodeCommand | PrefillCommand) -> None:
        """Add a command for the rooms of every other rank."""
        if isinstance(command, SendChunk):
            chunk = _Chunk(
                command.key,
                command.first_page,
                packed_ids(command.src_pages),
                command.last,
                command.aux,
                [(first, packed_ids(pages)) for first, pages in command.groups],
            )
            self._commands.append(chunk)
        elif isinstance(command, _LOGGED):
            self._commands.append(command)
        else:
            raise InternalError(f"{type(command).__name__} is no command for other ranks")

    def copy(self, order: HostCopy) -> None:
        """Add a copy, for every rank to make of its own part."""
        host, device = packed_ids(order.host_pages), packed_ids(order.device_pages)
        self._copies.append(_Copy(order.number, order.is_load, host, device))

    def take(self, pages: PageManager, requests: Iterable[LoggedRequest] = ()) -> bytes:
        """Return what the other ranks have to apply, as one message, and forget it; `requests` are
        all of prefill's rank 0. O(rows + what has changed).

        Every rank has to apply every message, in order.
        """
        now, told = _Told.of(pages), self._told
        if told is None:
            told = _Told(np.full_like(now.lengths, -1), now.writes, now.moves)
        in_use, was_in_use = now.lengths >= 0, told.lengths >= 0
        # A row that was freed and filled again has been written to.
        goes_on = was_in_use & (now.writes == told.writes)
        has_moved = ~goes_on | (now.moves != told.moves)
        changed = in_use & (has_moved | (now.lengths != told.lengths))
        rows = [
            _Row(
                row,
                start := int(told.lengths[row]) if goes_on[row] else 0,
                pages.table.packed(row, start, int(now.lengths[row])),
                [(first, packed_ids(ids)) for first, ids in (g.row(row) for g in pages.groups)]
                if has_moved[row]
                else None,
            )
            for row in np.flatnonzero(changed).tolist()
        ]
        views = _views(requests)
        message = _Pass(
            self.num_batches,
            rows,
            np.flatnonzero(was_in_use & ~in_use).tolist(),
            [view for rid, view in views.items() if self._views.get(rid) != view],
            [rid for rid in self._views if rid not in views],
            self._commands,
            self._copies,
            None if self.num_batches else self.sizes,
        )
        raw = _encode(message)
        # Only after encoding: if that raises, nothing is lost.
        self.num_batches += 1
        self._commands, self._copies, self._told, self._views = [], [], now, views
        return raw


# --- the other ranks ------------------------------------------------------------------------------


class _Held(NamedTuple):
    """What a row of a rank above 0 has beside its page ids."""

    num_pages: int
    groups: tuple[WindowPages, ...]  # those of windows, then the state's


class Orders(NamedTuple):
    """What a rank above 0 has to carry out: commands for its control object, and copies."""

    commands: list[Any]
    copies: list[HostCopy]


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """A request that computes, as a prefill rank above 0 reads it: see `PrefillRequest`. Its pages
    are valid until the next `apply`."""

    rid: str
    decode_prefix_len: int
    prefix_len: int
    checkpoint_slot: int
    stops: list[int]
    pages: Pages
    windows: Mapping[str, WindowPages]

    def window_pages(self, name: str) -> WindowPages:
        """See `PrefillRequest.window_pages`. Raises CallerError for a group that there is not."""
        return of_window(self.windows, name)


class RowFollower:
    """What a rank above 0 knows by rank 0's log. Owned by one thread.

    `page_table` (int32 [max_running, num_pages], C order; its memory never moves) has the page ids
    of each row of rank 0's, and -1 where unused. `sizes`: this rank's.
    """

    def __init__(self, sizes: RankSizes) -> None:
        self.num_batches = 0
        self.page_table = np.full((sizes.max_running, sizes.num_pages), UNUSED, np.int32)
        self._sizes = sizes
        self._decode = _DECODERS[sizes.side]
        self._rows: dict[int, _Held] = {}
        self._views: dict[str, _View] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def pages(self, row: int) -> Pages:
        """Return a row's page ids: a read-only view, valid until the next `apply`. Raises
        CallerError for a row without a request."""
        view = self.page_table[row, : self._held(row).num_pages]
        view.flags.writeable = False
        return view

    def window_pages(self, row: int, name: str) -> WindowPages:
        """See `PagedRequest.window_pages`."""
        return of_window(self._windows(row), name)

    def state_slot(self, row: int) -> int:
        """Return the slot of extra state of a row's request, -1 if there is none."""
        states = self._held(row).groups[len(self._sizes.windows) :]
        return int(states[0].ids[0]) if states else -1

    def _windows(self, row: int) -> dict[str, WindowPages]:
        names = (group.name for group in self._sizes.windows)
        return dict(zip(names, self._held(row).groups, strict=False))

    def _held(self, row: int) -> _Held:
        try:
            return self._rows[row]
        except (KeyError, TypeError):
            raise CallerError(f"row {shown(row)} has no request on this rank") from None

    def request(self, rid: str) -> RankRequest:
        """Return a request that computes on this rank. Raises RequestError if it is not here."""
        if not isinstance(rid, str) or (view := self._views.get(rid)) is None:
            raise RequestError(f"request {shown(rid)} is not here")
        return RankRequest(
            rid, view.decode_prefix_len, view.prefix_len, view.checkpoint_slot, view.stops,
            self.pages(view.row), self._windows(view.row),
        )  # fmt: skip

    def is_like(self, pages: PageManager, requests: Iterable[LoggedRequest] = ()) -> bool:
        """Return True if the rows are rank 0's, and the requests those of `requests` that have
        pages; for audits. O(rows)."""
        ours = [(row, _shown(self.pages(row), held.groups)) for row, held in self._rows.items()]
        theirs = [
            (row, _shown(pages.table.pages(row), [group.row(row) for group in pages.groups]))
            for row in range(pages.table.max_requests)
            if pages.table.lengths[row] >= 0
        ]
        columns = pages.table.array.shape[1]
        unused = self.page_table[:, columns:]
        array = pages.table.array[: pages.table.max_requests]
        return (
            sorted(ours) == theirs
            and np.array_equal(self.page_table[:, :columns], array)
            and bool((unused == UNUSED).all())
            and self._views == _views(requests)
        )

    def apply(self, raw: bytes, ready: DeviceEvent | None = None) -> Orders:
        """Take rank 0's message of one pass. Return what to carry out; chunks in it are sent once
        `ready` is.

        Raises, with nothing changed, CallerError: a message that is none, names pages, rows or
        slots that there are not, was left out, or comes twice; ConfigError: this rank was built
        with other sizes than rank 0's.
        """
        message = decoded(raw, self._decode, "rank 0")
        check_next(message.number, self.num_batches)
        if message.number == 0:
            self._check_sizes(message.sizes)
        # Page ids become addresses here, so each is looked at; and all before the first change.
        new: dict[int, _Held] = {}
        written = [(row.row, row.start, self._ids(row, new)) for row in message.rows]
        for view in message.views:
            if view.row not in new and (view.row not in self._rows or view.row in message.ended):
                raise CallerError(f"rank 0 sent no pages of request {shown(view.rid)}")
            self._check_slot(view.checkpoint_slot)
        commands = [self._command(one, ready) for one in message.commands]
        copies = [self._copy(one) for one in message.copies]
        self.num_batches += 1
        for row in message.ended:
            if self._rows.pop(row, None) is not None:
                self.page_table[row] = UNUSED
        for row, start, ids in written:
            self.page_table[row, start : start + len(ids)] = ids
            self.page_table[row, start + len(ids) :] = UNUSED
        self._rows |= new
        for rid in message.gone:
            self._views.pop(rid, None)
        self._views |= {view.rid: view for view in message.views}
        return Orders(commands, copies)

    def _check_sizes(self, theirs: RankSizes | None) -> None:
        for name, value in self._sizes._asdict().items():
            if value != (their_value := getattr(theirs, name, None)):
                raise ConfigError(f"{name} is {value} on this rank, {their_value} on rank 0")

    def _ids(self, told: _Row, new: dict[int, _Held]) -> Pages:
        """Enters in `new` what else the row has. Raises CallerError for one that cannot be."""
        sizes, row = self._sizes, told.row
        if row >= sizes.max_running:
            raise CallerError(f"rank 0 sent row {row}, there are {sizes.max_running}")
        before = new.get(row, self._rows.get(row))
        if told.start > (0 if before is None else before.num_pages):
            raise CallerError(f"rank 0 sent pages {told.start} on of row {row}, which has fewer")
        ids = unpacked_ids(told.ids, sizes.num_pages)
        num_pages = told.start + len(ids)
        if num_pages > sizes.num_pages:
            raise CallerError(f"rank 0 sent {num_pages} pages of a row, there are no more than "
                              f"{sizes.num_pages}")  # fmt: skip
        if told.groups is not None:
            groups = tuple(WindowPages(*one) for one in self._of_groups(told.groups))
        elif before is not None:
            groups = before.groups
        else:
            raise CallerError(f"rank 0 sent no groups of row {row}, which is new")
        new[row] = _Held(num_pages, groups)
        return ids

    def _of_groups(self, groups: list[tuple[int, bytes]]) -> list[tuple[int, Pages]]:
        sizes = [*(group.num_pages for group in self._sizes.windows), self._sizes.num_slots]
        # State's are last: in rows of decode, and with a prompt's last chunk.
        if not 0 <= len(groups) - len(self._sizes.windows) <= (self._sizes.num_slots > 0):
            raise CallerError(f"rank 0 sent pages in {len(groups)} groups of {len(sizes)}")
        return [
            (first, unpacked_ids(raw, num_pages))
            for (first, raw), num_pages in zip(groups, sizes, strict=False)
        ]

    def _check_slot(self, slot: int) -> None:
        if slot >= self._sizes.num_slots:
            raise CallerError(f"rank 0 sent slot {slot}, there are {self._sizes.num_slots}")

    def _command(self, logged: Any, ready: DeviceEvent | None) -> Any:
        if not isinstance(logged, _Chunk):
            return logged
        return SendChunk(
            logged.key,
            logged.first_page,
            unpacked_ids(logged.src_pages, self._sizes.num_pages),
            logged.last,
            logged.aux,
            ready,
            groups=tuple(GroupChunk(*row) for row in self._of_groups(logged.groups)),
        )

    def _copy(self, logged: _Copy) -> HostCopy:
        host = unpacked_ids(logged.host_pages, self._sizes.host_pages)
        device = unpacked_ids(logged.device_pages, self._sizes.num_pages)
        if not 0 < len(host) == len(device):
            raise CallerError(f"rank 0 sent a copy of {len(host)} to {len(device)} pages")
        return HostCopy(logged.number, logged.is_load, host, device)


def _views(requests: Iterable[LoggedRequest]) -> dict[str, _View]:
    return {
        req.rid: _View(
            req.rid,
            pages.row,
            req.decode_prefix_len,
            req.prefix_len,
            req.checkpoint_slot,
            list(req.stops),
        )
        for req in requests
        if (pages := req.pages_held) is not None
    }


def _shown(pages: Pages, groups: Iterable[WindowPages]) -> Any:
    return pages.tolist(), [(one.first_page, one.ids.tolist()) for one in groups]
