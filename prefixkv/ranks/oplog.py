"""The operation log: every change of tree, allocator and page table, in order, so that a replica
comes out equal.

Tensor-parallel decode ranks hold replicas. Rank 0 decides, with a `ReplicatedPageManager`, which
publishes every operation with the page ids that it resulted in. The others apply it to a
`PageManager` of their own through a `Replica`, which raises at the first difference. Times travel
in the log: only rank 0's clock counts. The engine carries the bytes: `publish` is its own
broadcast. With one rank nothing is logged, at no cost.

A request is named by its row of the page table, which is the same on every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Unpack, assert_never

import msgspec
import numpy as np

from prefixkv.cache.radix_key import TOKEN_BYTES, RadixKey
from prefixkv.cache.results import MatchResult, PrefixLock
from prefixkv.config import PageSettings
from prefixkv.errors import CallerError, InternalError, OutOfPagesError, shown
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.pages.windows import WindowPages, WindowSpec, WindowStart
from prefixkv.paging import Pages
from prefixkv.protocol.ids import RoomKey


class _Op(msgspec.Struct, frozen=True, array_like=True, tag_field="op"):
    """Base of the operations in the log."""


class Opened(_Op, frozen=True, tag="open"):
    """A request of these tokens holds `prefix_len` cached tokens, and these pages in all.

    A `prefix_len` of -1: not looked for. Of the pages `num_joined`, next to the cached ones, are
    those of the request in `joined_row` (-1: of none). `slot` is that of its extra state. With
    `is_load` it is no request, but pages that are loaded from host memory for the one opened next,
    which has `is_used`: its use was counted. A load was matched by all tokens of its request, which
    policies hear of: `rest` are those behind `tokens`. Where there are window groups, it begins
    there behind `window_tokens` tokens of `window_end` pages at most, with the page ids `windows`.
    """

    row: int
    tokens: bytes
    namespace: Any
    prefix_len: int
    pages: bytes
    now_s: float
    joined_row: int = -1
    num_joined: int = 0
    slot: int = -1
    is_load: bool = False
    is_used: bool = False
    rest: bytes = b""
    window_tokens: int = -1
    window_end: int = 0
    windows: tuple[bytes, ...] = ()


class Refused(_Op, frozen=True, tag="refuse"):
    """A request could not be opened: `num_new_pages` were not available. It changed nothing.

    The replica checks that it has not the pages either.
    """

    tokens: bytes
    namespace: Any
    num_new_pages: int
    now_s: float
    joined_row: int
    joined_end: int
    is_load: bool = False
    is_used: bool = False
    window_tokens: int = -1
    window_end: int = 0


class JoinedLocked(_Op, frozen=True, tag="lock_joined"):
    """The pages that the request in this row had joined are the tree's, and under its lock. `pages`
    are all of its pages."""

    row: int
    pages: bytes
    now_s: float
    is_used: bool = False


class Grown(_Op, frozen=True, tag="grow"):
    """Each of these rows took one page, at its end."""

    rows: tuple[int, ...]
    pages: bytes
    now_s: float


class Slid(_Op, frozen=True, tag="slide"):
    """A row's pages in the window groups moved on to those behind `num_tokens` tokens."""

    row: int
    num_tokens: int


class Cached(_Op, frozen=True, tag="cache"):
    """A row's whole pages went to the tree; `new_tokens` have KV since the row's last operation."""

    row: int
    new_tokens: bytes
    pages: bytes
    priority: int
    being_read: bool
    now_s: float


class Hinted(_Op, frozen=True, tag="hint"):
    """The conversation of this row's request will go on, or will not."""

    row: int
    continues: bool


class Wanted(_Op, frozen=True, tag="want"):
    """A request with these tokens waits for pages; this is the want of this number."""

    number: int
    tokens: bytes
    namespace: Any


class Unwanted(_Op, frozen=True, tag="unwant"):
    """The want of this number was withdrawn."""

    number: int


class Pinned(_Op, frozen=True, tag="pin"):
    """The cached prefix of these tokens is locked while it is copied; this is the pin of this
    number."""

    number: int
    tokens: bytes
    namespace: Any
    now_s: float


class Unpinned(_Op, frozen=True, tag="unpin"):
    """The pin of this number has ended."""

    number: int


class Dropped(_Op, frozen=True, tag="drop"):
    """The request in this row ended, and its own pages are free."""

    row: int


class Held(_Op, frozen=True, tag="hold"):
    """The request in this row ended; room `key` holds its own pages."""

    row: int
    key: RoomKey


class Released(_Op, frozen=True, tag="release"):
    """The pages that this room holds are free."""

    key: RoomKey


class Quarantined(_Op, frozen=True, tag="quarantine"):
    """The pages that this room holds are counted as quarantined."""

    key: RoomKey


class Flushed(_Op, frozen=True, tag="flush"):
    """The tree was emptied."""


RowOp = Opened | JoinedLocked | Grown | Slid | Cached | Hinted | Dropped | Held
AnyOp = RowOp | Refused | Wanted | Unwanted | Pinned | Unpinned | Released | Quarantined | Flushed

encode_op: Callable[[AnyOp], bytes] = msgspec.msgpack.Encoder().encode
decode_op: Callable[[bytes], AnyOp] = msgspec.msgpack.Decoder(AnyOp).decode


class ReplicatedPageManager(PageManager):
    """Rank 0's pages: every change is published once it is made.

    Owners of held pages are RoomKeys here, and namespaces are what msgpack carries (str, int,
    bytes, None, tuples of them).
    """

    def __init__(
        self,
        publish: Callable[[AnyOp], None],
        num_pages: int,
        page_size: int,
        max_requests: int,
        windows: Sequence[WindowSpec] = (),
        **settings: Unpack[PageSettings],
    ) -> None:
        super().__init__(num_pages, page_size, max_requests, **settings, windows=windows)
        self._publish = publish
        self._logged_tokens: dict[int, int] = {}  # number of tokens that the log has, by row
        self._pins: dict[PrefixLock, int] = {}  # numbers in the log
        self._num_pins = 0

    def open(
        self,
        key: RadixKey,
        match: MatchResult | None,
        num_new_pages: int,
        now_s: float,
        joined: RequestPages | None = None,
        joined_end: int = 0,
        is_load: bool = False,
        is_used: bool = False,
        window_start: WindowStart | None = None,
    ) -> RequestPages:
        # Each method changes first and publishes then, so an operation that raised is not in the
        # log. A refusal is, though it changes nothing: a replica that has the pages has come apart.
        joined_row = joined.row if joined is not None else -1
        try:
            pages = super().open(
                key,
                match,
                num_new_pages,
                now_s,
                joined,
                joined_end,
                is_load,
                is_used,
                window_start,
            )
        except OutOfPagesError:
            if match is not None:
                refused = Refused(
                    key.data,
                    key.namespace,
                    num_new_pages,
                    now_s,
                    joined_row,
                    joined_end,
                    is_load,
                    is_used,
                    *_begins(window_start),
                )
                self._publish(refused)
            raise
        prefix_len = -1 if match is None else pages.num_locked * self.page_size
        self._logged_tokens[pages.row] = len(key)
        opened = Opened(
            pages.row,
            key.data,
            key.namespace,
            prefix_len=prefix_len,
            pages=_packed(self, pages),
            now_s=now_s,
            joined_row=joined_row,
            num_joined=pages.num_joined,
            slot=pages.slot,
            is_load=is_load,
            is_used=is_used,
            rest=b"" if match is None else bytes(match.data[len(key.data) :]),
        )
        if window_start is not None:
            tokens, end = _begins(window_start)
            ids = _packed_windows(self, pages)
            opened = msgspec.structs.replace(
                opened, window_tokens=tokens, window_end=end, windows=ids
            )
        self._publish(opened)
        return pages

    def lock_joined(
        self, pages: RequestPages, key: RadixKey, now_s: float, *, is_used: bool = False
    ) -> None:
        super().lock_joined(pages, key, now_s, is_used=is_used)
        self._publish(JoinedLocked(pages.row, _packed(self, pages), now_s, is_used))

    def grow_many(self, many: Sequence[RequestPages], now_s: float) -> None:
        many = list(many)
        super().grow_many(many, now_s)
        new = [int(self.pages(pages)[-1]) for pages in many]
        rows = tuple(pages.row for pages in many)
        self._publish(Grown(rows, np.array(new, "<i4").tobytes(), now_s))

    def slide(self, pages: RequestPages, num_tokens: int) -> None:
        super().slide(pages, num_tokens)
        self._publish(Slid(pages.row, num_tokens))

    def cache_unfinished(
        self,
        pages: RequestPages,
        key: RadixKey,
        now_s: float,
        *,
        priority: int = 0,
        being_read: bool = False,
    ) -> None:
        if len(key) < self._logged_tokens[pages.row]:
            raise InternalError(f"the key of row {pages.row} has shrunk to {len(key)} tokens")
        super().cache_unfinished(pages, key, now_s, priority=priority, being_read=being_read)
        # Only the tokens since the last operation of the row travel: the replica has the rest.
        new_tokens = key.data[self._logged_tokens[pages.row] * 4 :]
        self._logged_tokens[pages.row] = len(key)
        packed = _packed(self, pages)
        self._publish(Cached(pages.row, new_tokens, packed, priority, being_read, now_s))

    def hint(self, pages: RequestPages, continues: bool) -> None:
        super().hint(pages, continues)
        self._publish(Hinted(pages.row, continues))

    def want(self, match: MatchResult) -> int:
        number = super().want(match)
        self._publish(Wanted(number, match.data, match.namespace))
        return number

    def unwant(self, number: int) -> None:
        super().unwant(number)
        self._publish(Unwanted(number))

    def pin(self, match: MatchResult, now_s: float) -> PrefixLock:
        lock = super().pin(match, now_s)
        self._num_pins += 1
        self._pins[lock] = self._num_pins
        # What is locked, and not what was matched: pages may have gone since.
        tokens = match.data[: lock.prefix_len * TOKEN_BYTES]
        self._publish(Pinned(self._num_pins, tokens, match.namespace, now_s))
        return lock

    def unpin(self, lock: PrefixLock) -> None:
        super().unpin(lock)
        self._publish(Unpinned(self._pins.pop(lock)))

    def drop(self, pages: RequestPages) -> None:
        # Read before: ending the request clears it. The same in `hold`.
        row = pages.row
        super().drop(pages)
        self._publish(Dropped(row))

    def hold(self, pages: RequestPages, owner: Hashable) -> None:
        # Both may be lost or wrong afterwards: an owner that cannot travel is refused before
        # anything is held.
        row, room = pages.row, self._room(owner)
        super().hold(pages, owner)
        self._publish(Held(row, room))

    def release(self, owner: Hashable) -> int:
        # Read before: afterwards an unknown owner and a released one look alike.
        known = self.holds(owner)
        freed = super().release(owner)
        if known:
            self._publish(Released(self._room(owner)))
        return freed

    def quarantine(self, owner: Hashable) -> int:
        count = super().quarantine(owner)
        # By what is held, not by the count: a room that holds only a slot counts no pages.
        if self.holds(owner):
            self._publish(Quarantined(self._room(owner)))
        return count

    def flush(self) -> int:
        freed = super().flush()
        self._publish(Flushed())
        return freed

    @staticmethod
    def _room(owner: Hashable) -> RoomKey:
        """Return the owner of held pages as a room. Raises InternalError for any other: it could
        not travel in the operation log."""
        if not isinstance(owner, RoomKey):
            raise InternalError(f"{owner!r} holds pages and is no room")
        return owner


class Replica:
    """Another rank's pages, which follow the log.

    `page_manager` must be built with the settings of rank 0's.
    """

    def __init__(self, page_manager: PageManager) -> None:
        self.page_manager = page_manager
        self._requests: dict[int, tuple[RadixKey, RequestPages]] = {}
        self._pins: dict[int, PrefixLock] = {}

    def pages(self, row: int) -> Pages:
        """Return the page ids, on this replica, of the request in this row. Raises CallerError for
        a row without one."""
        return self.page_manager.pages(self._pages_held(row))

    def window_pages(self, row: int, name: str) -> WindowPages:
        """Return what the request in this row has, on this replica, in a window group; see
        `PagedRequest.window_pages`."""
        return self.page_manager.windows.named(name).row(self._pages_held(row).row)

    def slot(self, row: int) -> int:
        return self._pages_held(row).slot

    def _pages_held(self, row: int) -> RequestPages:
        try:
            return self._requests[row][1]
        except (KeyError, TypeError):
            raise CallerError(f"row {shown(row)} has no request on this rank") from None

    def apply(self, op: AnyOp) -> None:
        """Apply one operation of rank 0's log to this replica. Raises InternalError if this rank
        comes to other pages."""
        page_manager, requests = self.page_manager, self._requests
        # Each case decides again from this rank's own state, and compares: a difference shows at
        # the operation that caused it, not when a kernel reads a wrong page.
        match op:
            case Opened():
                key = _key(op)
                matched = _key(op, op.rest) if op.rest else key
                match = None if op.prefix_len < 0 else page_manager.cache.match_prefix(matched)
                if match is not None and match.prefix_len != op.prefix_len:
                    raise InternalError(
                        f"rank 0 matched {op.prefix_len} tokens, this rank {match.prefix_len}: {op}"
                    )
                # The message has all pages of the row; how many of them are new follows from what
                # is shared.
                num_shared = max(0, op.prefix_len) // page_manager.page_size + op.num_joined
                num_new = len(op.pages) // 4 - num_shared
                joined = self._joined(op.joined_row)
                pages = page_manager.open(
                    key,
                    match,
                    num_new,
                    op.now_s,
                    joined,
                    num_shared,
                    op.is_load,
                    op.is_used,
                    _window_start(op),
                )
                requests[pages.row] = (key, pages)
                self._compare(op.row, pages.row, op)
                self._compare(op.slot, pages.slot, op)
                if op.windows:
                    self._compare(op.windows, _packed_windows(page_manager, pages), op)
                self._compare(op.pages, _packed(page_manager, pages), op)
            case Refused():
                key, joined = _key(op), self._joined(op.joined_row)
                match = page_manager.cache.match_prefix(key)
                with suppress(OutOfPagesError):
                    page_manager.open(
                        key,
                        match,
                        op.num_new_pages,
                        op.now_s,
                        joined,
                        op.joined_end,
                        op.is_load,
                        op.is_used,
                        _window_start(op),
                    )
                    # Not suppressed: only OutOfPagesError is, which is the right answer here.
                    raise InternalError(f"this rank had the pages that rank 0 had not: {op}")
            case JoinedLocked():
                key, pages = requests[op.row]
                page_manager.lock_joined(pages, key, op.now_s, is_used=op.is_used)
                self._compare(op.pages, _packed(page_manager, pages), op)
            case Grown():
                page_manager.grow_many([requests[row][1] for row in op.rows], op.now_s)
                new = [int(self.pages(row)[-1]) for row in op.rows]
                self._compare(op.pages, np.array(new, "<i4").tobytes(), op)
            case Slid():
                page_manager.slide(requests[op.row][1], op.num_tokens)
            case Cached():
                key, pages = requests[op.row]
                # This rank's own copy of the key: it grows by what the log brings.
                key.extend(np.frombuffer(op.new_tokens, "<i4"))
                page_manager.cache_unfinished(
                    pages, key, op.now_s, priority=op.priority, being_read=op.being_read
                )
                self._compare(op.pages, _packed(page_manager, pages), op)
            case Hinted():
                page_manager.hint(requests[op.row][1], op.continues)
            case Wanted():
                number = page_manager.want(page_manager.cache.match_prefix(_key(op)))
                self._compare(op.number, number, op)
            case Unwanted():
                page_manager.unwant(op.number)
            case Pinned():
                lock = page_manager.pin(page_manager.cache.match_prefix(_key(op)), op.now_s)
                self._compare(len(op.tokens), lock.prefix_len * TOKEN_BYTES, op)
                self._pins[op.number] = lock
            case Unpinned():
                page_manager.unpin(self._pins.pop(op.number))
            case Dropped():
                page_manager.drop(requests.pop(op.row)[1])
            case Held():
                page_manager.hold(requests.pop(op.row)[1], op.key)
            case Released():
                page_manager.release(op.key)
            case Quarantined():
                page_manager.quarantine(op.key)
            case Flushed():
                page_manager.flush()
            case _:
                assert_never(op)

    def _joined(self, row: int) -> RequestPages | None:
        return self._requests[row][1] if row >= 0 else None

    def _compare(self, theirs: object, ours: object, op: AnyOp) -> None:
        if theirs != ours:
            raise InternalError(f"this rank came to {ours!r} where rank 0 has {theirs!r}: {op}")


def _begins(start: WindowStart | None) -> tuple[int, int]:
    return (-1, 0) if start is None else (start.num_tokens, start.end_pages)


def _window_start(op: Opened | Refused) -> WindowStart | None:
    return None if op.window_tokens < 0 else WindowStart(op.window_tokens, op.window_end)


def _packed_windows(page_manager: PageManager, pages: RequestPages) -> tuple[bytes, ...]:
    groups = page_manager.windows
    return tuple(group.row(pages.row).ids.astype("<i4").tobytes() for group in groups)


def _packed(page_manager: PageManager, pages: RequestPages) -> bytes:
    """Return a request's page ids as they travel in the operation log: int32, little-endian."""
    return page_manager.pages(pages).astype("<i4").tobytes()


def _key(op: Opened | Refused | Wanted | Pinned, rest: bytes = b"") -> RadixKey:
    return RadixKey(np.frombuffer(op.tokens + rest, "<i4"), _as_sent(op.namespace))


def _as_sent(namespace: Any) -> Any:
    return tuple(map(_as_sent, namespace)) if isinstance(namespace, list) else namespace
