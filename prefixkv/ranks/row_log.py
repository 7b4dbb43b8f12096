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
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from prefixkv.errors import CallerError, ConfigError, InternalError, RequestError, shown
from prefixkv.pages.groups import GroupPages, GroupSpec, of_window
from prefixkv.pages.manager import PageManager
from prefixkv.pages.table import UNUSED
from prefixkv.paging import Pages, check_in_pool
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
from prefixkv.protocol.events import HostCopy
from prefixkv.protocol.messages import Count, Slot
from prefixkv.request import DeviceEvent

_ID_BYTES: Final = 4


class RankSizes(NamedTuple):
    """What all ranks have alike: sizes of the pool, its window groups, the StatePool, the page
    table and the host memory."""

    side: str  # "decode" or "prefill"
    num_pages: int
    page_size: int
    max_running: int
    num_slots: int = 0
    host_pages: int = 0
    windows: tuple[GroupSpec, ...] = ()


# --- messages -------------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A row that has these page ids from position `start` on, and no more. `groups` are None where
    they have not changed."""

    row: Count
    start: Count
    ids: Pages
    groups: tuple[GroupChunk, ...] | None


class _View(msgspec.Struct, frozen=True, array_like=True):
    """What prefill's engine reads of a request that computes, beside its row."""

    rid: str
    row: Count
    decode_prefix_len: Count
    prefix_len: Count
    checkpoint_slot: Slot
    stops: list[Count]


_OfBoth: TypeAlias = AbortRoom | MoveWeights | Fence
_OfDecode: TypeAlias = OpenRoom | RefuseRoom | _OfBoth
_OfPrefill: TypeAlias = AddRoom | DeclineRoom | SendChunk | _OfBoth
C = TypeVar("C")


class Pass(msgspec.Struct, Generic[C], frozen=True, array_like=True):
    """One message of rank 0: rows and requests that have changed or ended, and what is to be
    carried out. `sizes` come with the first message."""

    number: int
    rows: list[_Row]
    ended: list[Count]
    views: list[_View]
    gone: list[str]
    commands: list[C]
    copies: list[HostCopy]
    sizes: RankSizes | None


def _packed(ids: Pages) -> bytes:
    return ids.astype("<i4").tobytes()


def _unpacked(kind: type[Any], raw: bytes) -> Pages:
    if kind is DeviceEvent:
        raise ValueError("an event of the device does not travel")
    if len(raw) % _ID_BYTES:
        raise ValueError(f"{len(raw)} bytes of page ids, of {_ID_BYTES} each")
    return np.frombuffer(raw, "<i4").astype(np.int32)


_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_packed).encode
_DECODERS: Mapping[str, Callable[[bytes], Pass[Any]]] = {
    "decode": msgspec.msgpack.Decoder(Pass[_OfDecode], dec_hook=_unpacked).decode,
    "prefill": msgspec.msgpack.Decoder(Pass[_OfPrefill], dec_hook=_unpacked).decode,
}


def decoded(raw: bytes, decode: Callable[[bytes], C], sender: str) -> C:
    """Return a message as `decode` reads it. Raises CallerError for what is none of `sender`."""
    if not isinstance(raw, bytes | bytearray | memoryview):
        raise CallerError(f"raw is a {type(raw).__name__}, bytes are needed")
    try:
        return decode(raw)
    # An OverflowError: of a number of an error (`decode_error`) that is endless.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CallerError(f"{len(raw)} bytes that are no message of {sender}: {error}") from error


def check_next(number: int, due: int, rank: int = 0) -> None:
    """Raise CallerError for a message of a rank that is not its next one."""
    if number != due:
        raise CallerError(f"message {number} of rank {rank} came where {due} is the next")


# --- rank 0 ---------------------------------------------------------------------------------------


def _state(pages: PageManager) -> npt.NDArray[np.int64]:
    """What tells two states of the page table apart: by row, the length (below 0: not in use), how
    often ids were overwritten, and changes in the groups."""
    rows = slice(pages.table.max_requests)  # spare rows are of no request
    # Each count only grows, so the sum is another one if any of them is.
    moves = sum((group.changes[rows] for group in pages.groups), np.zeros(rows.stop, np.int64))
    return np.array([pages.table.lengths[rows], pages.table.writes[rows], moves])


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
        self._copies: list[HostCopy] = []
        self._told = np.array([[-2], [0], [0]])  # by the last message: at first, of no row
        self._views: dict[str, _View] = {}  # by rid, as the other ranks know them

    def has_news(self, pages: PageManager) -> bool:
        """Return True if a command, a copy or a changed row waits to be taken, and before the first
        `take`. O(rows)."""
        waiting = self._commands or self._copies
        return bool(waiting) or not np.array_equal(_state(pages), self._told)

    def command(self, command: DecodeCommand | PrefillCommand) -> None:
        """Add a command for the rooms of every other rank."""
        if not isinstance(command, _OfDecode | _OfPrefill):
            raise InternalError(f"{type(command).__name__} is no command for other ranks")
        # Each rank has an event of its own; this one may be of a class that msgspec would encode.
        if isinstance(command, SendChunk):
            command = msgspec.structs.replace(command, ready=None)
        self._commands.append(command)

    def copy(self, order: HostCopy) -> None:
        """Add a copy, for every rank to make of its own part."""
        self._copies.append(order)

    def take(self, pages: PageManager, requests: Iterable[Any] = ()) -> bytes:
        """Return what the other ranks have to apply, as one message, and forget it; `requests` are
        all of prefill's rank 0. O(rows + what has changed).

        Every rank has to apply every message, in order.
        """
        now, told = _state(pages), self._told
        in_use, was_in_use = now[0] >= 0, told[0] >= 0
        # A row that was freed and filled again has been written to.
        goes_on = was_in_use & (now[1] == told[1])
        has_moved = ~goes_on | (now[2] != told[2])
        changed = in_use & (has_moved | (now[0] != told[0]))
        rows = [
            _Row(
                row,
                start := int(told[0, row]) if goes_on[row] else 0,
                pages.table.pages(row)[start:],
                tuple(GroupChunk(*group.row(row)) for group in pages.groups)
                if has_moved[row]
                else None,
            )
            for row in np.flatnonzero(changed).tolist()
        ]
        views = _views(requests)
        message = Pass(
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
    groups: tuple[GroupPages, ...]  # those of windows, then the state's


class RankRequest(_View, frozen=True, eq=False):
    """A request that computes, as a prefill rank above 0 reads it: see `PrefillRequest`. Its pages
    are valid until the next `apply`."""

    pages: Pages
    windows: Mapping[str, GroupPages]

    def window_pages(self, name: str) -> GroupPages:
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

    def window_pages(self, row: int, name: str) -> GroupPages:
        """See `PagedRequest.window_pages`."""
        return of_window(self._windows(row), name)

    def state_slot(self, row: int) -> int:
        """Return the slot of extra state of a row's request, -1 if there is none."""
        states = self._held(row).groups[len(self._sizes.windows) :]
        return int(states[0].ids[0]) if states else -1

    def _windows(self, row: int) -> dict[str, GroupPages]:
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
        pages, windows = self.pages(view.row), self._windows(view.row)
        fields = *msgspec.structs.astuple(view), pages, windows
        return RankRequest(*fields)

    def is_like(self, pages: PageManager, requests: Iterable[Any] = ()) -> bool:
        """Return True if the rows are rank 0's, and the requests those of `requests` that have
        pages; for audits. O(rows)."""
        table, held = pages.table, self._rows
        lengths, array = table.lengths[: table.max_requests], table.array[: table.max_requests]
        rows = {
            row: (int(lengths[row]), _shown(group.row(row) for group in pages.groups))
            for row in np.flatnonzero(lengths >= 0).tolist()
        }
        ids = np.full_like(self.page_table, UNUSED)
        ids[:, : array.shape[1]] = array
        is_same = np.array_equal(self.page_table, ids) and self._views == _views(requests)
        return is_same and rows == {row: (n, _shown(of_it)) for row, (n, of_it) in held.items()}

    def apply(self, raw: bytes, ready: DeviceEvent | None = None) -> Pass[Any]:
        """Take rank 0's message of one pass. Return it: its commands, for this rank's control
        object, and its copies are to be carried out; chunks are sent once `ready` is.

        Raises, with nothing changed, CallerError: a message that is none, names pages, rows or
        slots that there are not, was left out, or comes twice; ConfigError: this rank was built
        with other sizes than rank 0's.
        """
        message = decoded(raw, self._decode, "rank 0")
        check_next(message.number, self.num_batches)
        if message.number == 0:
            self._check_sizes(message.sizes)
        # Page ids become addresses here, so each is looked at; and all before the first change.
        for told in message.rows:
            self._check_row(told)
        for view in message.views:
            if (slot := view.checkpoint_slot) >= self._sizes.num_slots:
                raise CallerError(f"rank 0 sent slot {slot}, there are {self._sizes.num_slots}")
        commands = [self._command(one, ready) for one in message.commands]
        for _, _, host, device in message.copies:
            check_in_pool(host, self._sizes.host_pages)
            check_in_pool(device, self._sizes.num_pages)
            if not 0 < len(host) == len(device):
                raise CallerError(f"rank 0 sent a copy of {len(host)} to {len(device)} pages")
        self.num_batches += 1
        for row in message.ended:
            if self._rows.pop(row, None) is not None:
                self.page_table[row] = UNUSED
        for told in message.rows:
            row, end = self.page_table[told.row], told.start + len(told.ids)
            row[told.start : end], row[end:] = told.ids, UNUSED
            if told.groups is None:
                groups = self._rows[told.row].groups
            else:
                groups = tuple(GroupPages(*one) for one in told.groups)
            self._rows[told.row] = _Held(end, groups)
        for rid in message.gone:
            self._views.pop(rid, None)
        self._views |= {view.rid: view for view in message.views}
        return msgspec.structs.replace(message, commands=commands)

    def _check_sizes(self, theirs: RankSizes | None) -> None:
        for name, value in self._sizes._asdict().items():
            if value != (their_value := getattr(theirs, name, None)):
                raise ConfigError(f"{name} is {value} on this rank, {their_value} on rank 0")

    def _check_row(self, told: _Row) -> None:
        sizes, num_pages = self._sizes, told.start + len(told.ids)
        if told.row >= sizes.max_running or num_pages > sizes.num_pages:
            what = f"{num_pages} pages in row {told.row}"
            most = f"{sizes.max_running} rows, and {sizes.num_pages} pages"
            raise CallerError(f"rank 0 sent {what}: there are {most}")
        check_in_pool(told.ids, sizes.num_pages)
        held = self._rows.get(told.row)
        if told.start > (held.num_pages if held else 0) or not (held or told.groups is not None):
            raise CallerError(f"rank 0 sent only what is new of row {told.row}, which is not here")
        if told.groups is not None:
            self._check_groups(told.groups)

    def _check_groups(self, groups: tuple[GroupChunk, ...]) -> None:
        sizes = [*(group.num_pages for group in self._sizes.windows), self._sizes.num_slots]
        # State's are last: in rows of decode, and with a prompt's last chunk.
        if not 0 <= len(groups) - len(self._sizes.windows) <= (self._sizes.num_slots > 0):
            raise CallerError(f"rank 0 sent pages in {len(groups)} groups of {len(sizes)}")
        for (_, pages), num_pages in zip(groups, sizes, strict=False):
            check_in_pool(pages, num_pages)

    def _command(self, logged: Any, ready: DeviceEvent | None) -> Any:
        if not isinstance(logged, SendChunk):
            return logged
        check_in_pool(logged.src_pages, self._sizes.num_pages)
        self._check_groups(logged.groups)
        return msgspec.structs.replace(logged, ready=ready)


def _views(requests: Iterable[Any]) -> dict[str, _View]:
    return {
        req.rid: msgspec.convert(req, _View, from_attributes=True)
        for req in requests
        if req.pages_held is not None
    }


def _shown(groups: Iterable[tuple[int, Pages]]) -> list[tuple[int, list[int]]]:
    return [(first, ids.tolist()) for first, ids in groups]
