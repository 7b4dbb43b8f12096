"""Changes of a tree, for routers, host tiers and tests.

The tree notes *changes*: tokens and page ids, nothing computed. Listeners turn them into *events*
in a thread of their choice: page keys (`EventFeed.take`) or block hashes (`prefixkv.kv_events`).

A page key is the digest of a page's tokens and of the key of the page before. It stands for all
tokens up to its end, and is equal in every process. `EventBatch`es are numbered, so a listener
notices a gap and asks for a full batch (`EventFeed.take(snapshot=True)`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np

from prefixkv.cache.node import Packed
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.errors import ProtocolError

PAGE_KEY_BYTES = 16

PageHash: TypeAlias = Callable[[bytes, bytes], bytes]
"""(The key of the page before, a page's packed tokens) -> that page's key."""

NO_PARENT = b""
"""The parent of the first page of a namespace."""


class _Path(msgspec.Struct, frozen=True, omit_defaults=True):
    namespace: Any  # hashable; in a frame None, bool, int, str, bytes, or a tuple of these
    parent: bytes
    page_keys: tuple[bytes, ...]
    is_behind: bool = False  # in the worker's host memory, where it may be beside its pool


class Stored(_Path, frozen=True, tag=True):
    """Pages that can be matched from now on; `page_keys[0]` follows the page with key `parent`."""


class Removed(_Path, frozen=True, tag=True):
    """Neighbours on one path that can no longer be matched; removed before: those behind."""


class Cleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Nothing is stored any more (a reset), or the listener fell behind. `Stored` events follow for
    all that there is. It is about the pool, or about host memory, alone."""

    is_behind: bool = False


class _SavePoint(msgspec.Struct, frozen=True):
    namespace: Any  # as of `_Path`
    page_key: bytes


class CheckpointStored(_SavePoint, frozen=True, tag=True):
    """Computing can go on behind the page with this key, which is stored: there is a checkpoint."""


class CheckpointRemoved(_SavePoint, frozen=True, tag=True):
    """Computing can no longer go on behind the page with this key. Before the page's own end."""


CacheEvent: TypeAlias = Stored | Removed | Cleared | CheckpointStored | CheckpointRemoved


class EventBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of one worker's cache since the batch before, and behind them those in its host
    memory. One that has a `Cleared` for each is complete by itself.

    `worker` and `incarnation` name the cache; that of an older incarnation is gone. `seq` counts
    from 0. With `at_saves` the worker uses a prefix as far as its deepest checkpoint alone:
    one that computes prompts, of a model with recurrent layers or windows.
    """

    worker: str
    incarnation: int
    seq: int
    events: tuple[CacheEvent, ...]
    at_saves: bool = False

    def encode(self) -> bytes:
        """Return the batch as msgpack."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(raw: bytes) -> EventBatch:
        """Decode what `encode` made. Raises ProtocolError for anything else."""
        try:
            batch = _DECODER.decode(raw)
            events = tuple(map(_with_tuples, batch.events))
        except (msgspec.DecodeError, TypeError) as error:
            raise ProtocolError(f"no batch of cache events: {error}") from None
        return msgspec.structs.replace(batch, events=events)


def _with_tuples(event: CacheEvent) -> CacheEvent:
    """msgpack makes lists of a namespace's tuples. Raises TypeError for one without a hash."""
    if isinstance(event, Cleared):
        return event
    namespace = _as_tuple(event.namespace)
    hash(namespace)
    return msgspec.structs.replace(event, namespace=namespace)


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


_DECODER = msgspec.msgpack.Decoder(EventBatch)


class Inserted(NamedTuple):
    """New pages, as the tree has them."""

    namespace: Hashable
    above: bytes  # the id of the page before the first, packed; b"" at the root
    tokens: bytes  # packed, whole pages
    pages: bytes  # packed ids


class TakenOut(NamedTuple):
    """Pages that eviction took, in runs of neighbours; a run comes after those that followed it."""

    runs: list[Packed]  # packed ids


class SaveMade(NamedTuple):
    """A checkpoint was saved that ends on this page, which was inserted before."""

    page: int


class SaveEvicted(NamedTuple):
    """The checkpoint that ends on this page is gone, but not with its page: that says it itself."""

    page: int


Change: TypeAlias = Inserted | TakenOut | Cleared | SaveMade | SaveEvicted


class PageRef(NamedTuple):
    """One page: its namespace, its key and its parent's, and its number on the path."""

    namespace: Hashable
    parent: bytes  # the key of the page before it, NO_PARENT for the first
    key: bytes
    number: int  # of pages before it
    tokens: bytes  # packed; b"" where they are not kept


class PagePaths:
    """The pages that a cache holds, with the key of each, kept up by its changes. One owner.

    Pages are kept in the order in which they were last stored, so each comes after the page that it
    follows. O(1) per page.

    Args:
        page_size: tokens per page.
        keep_tokens: keep the tokens of each page in its `PageRef`.
        hash_page: (key of the page before, packed tokens) -> key; by default `page_key`.
        before_first: namespace -> the bytes that `hash_page` gets before a first page; by default
            NO_PARENT.
    """

    def __init__(
        self,
        page_size: int,
        keep_tokens: bool = False,
        hash_page: PageHash | None = None,
        before_first: Callable[[Hashable], bytes] | None = None,
    ) -> None:
        self._hash_page = hash_page or page_key
        self._before_first = before_first
        self._page_bytes = TOKEN_BYTES * page_size
        self._keep_tokens = keep_tokens
        self._page_refs: dict[int, PageRef] = {}  # by page id
        self._saves: dict[int, PageRef] = {}  # by the id of the page that each ends on

    def __len__(self) -> int:
        return len(self._page_refs)

    def runs(self) -> Iterator[list[PageRef]]:
        """Yield all pages in runs of neighbours. A run's first page follows a page of an earlier
        run, or is the first of its namespace."""
        run: list[PageRef] = []
        for ref in self._page_refs.values():
            if run and (ref.parent, ref.namespace) != (run[-1].key, run[-1].namespace):
                yield run
                run = []
            run.append(ref)
        if run:
            yield run

    def inserted(self, change: Inserted) -> list[PageRef]:
        """Add the new pages, and return the place and key of each."""
        namespace, above, tokens, pages = change
        # The page above must be known: changes come in order, so it was stored before.
        key, number = NO_PARENT, 0
        if above:
            upper = self._page_refs[_ids(above)[0]]
            key, number = upper.key, upper.number + 1
        # `before` goes into the hash, `key` into the event. They differ for a first page only,
        # where a format may mix the namespace into the hash.
        before = key
        if not above and self._before_first is not None:
            before = self._before_first(namespace)
        run, start, page_bytes, hash_page = [], 0, self._page_bytes, self._hash_page
        for page in _ids(pages):
            page_tokens = tokens[start : start + page_bytes]
            start += page_bytes
            own = before = hash_page(before, page_tokens)
            ref = PageRef(namespace, key, own, number, page_tokens if self._keep_tokens else b"")
            self._page_refs[page] = ref
            run.append(ref)
            key, number = own, number + 1
        return run

    def told(self, change: Change) -> Iterator[tuple[type[CacheEvent], list[PageRef]]]:
        """Follow a change, and yield the kind of each event that it is, with the pages that the
        event is about: neighbours, or that which a checkpoint ends on."""
        found, pop = self._saves, self._page_refs.pop
        match change:
            case Inserted():
                yield Stored, self.inserted(change)
            case SaveMade(page):
                found[page] = self._page_refs[page]
                yield CheckpointStored, [found[page]]
            case SaveEvicted(page):
                yield CheckpointRemoved, [found.pop(page)]
            case TakenOut(runs):
                # A checkpoint goes before the page that it ends on.
                for page in [page for run in runs for page in _ids(run)] if found else ():
                    if page in found:
                        yield CheckpointRemoved, [found.pop(page)]
                for run in runs:
                    yield Removed, [pop(page) for page in _ids(run)]
            case Cleared():
                self.clear()
                yield Cleared, []

    @property
    def saves(self) -> list[PageRef]:
        """The pages that checkpoints end on."""
        return list(self._saves.values())

    def clear(self) -> None:
        self._page_refs.clear()
        self._saves.clear()


LOG_PAGES: Final = 1 << 20
"""Pages of changes that wait for a reader at most; one further behind gets the whole tree again."""


class ChangeLog:
    """The changes of one cache for one reader. Owner: the cache's thread.

    Nothing is recorded before the first `take`. `recording` are the logs that record; `whole` makes
    the changes that add up to all that there is, the first of them Cleared.
    """

    def __init__(
        self, recording: list[ChangeLog], whole: Callable[[], list[Change]], limit_pages: int
    ) -> None:
        self._recording, self._whole, self._limit_pages = recording, whole, limit_pages
        self._changes: list[Change] = []
        self._num_pages = 0
        self.overruns = 0  # how often the reader was too far behind

    def add(self, change: Change, num_pages: int = 0) -> None:
        self._changes.append(change)
        self._num_pages += num_pages
        if self._num_pages > self._limit_pages:
            self.overruns += 1
            self.restart()

    def restart(self) -> None:
        """Forget what was not taken: the next `take` returns the whole tree."""
        if self in self._recording:
            self._recording.remove(self)
        self._changes, self._num_pages = [], 0

    def take(self) -> list[Change]:
        """Return what changed since the last call; the first one returns the whole tree."""
        if self not in self._recording:
            self._recording.append(self)
            return self._whole()
        changes, self._changes, self._num_pages = self._changes, [], 0
        return changes


class EventSource(Protocol):
    """The part of a RadixCache that readers of its changes need."""

    page_size: int

    def record(self, limit_pages: int = LOG_PAGES) -> ChangeLog: ...


class Listener(Protocol):
    """A reader of a cache's changes besides `EventFeed.take`: a `KVEventPublisher`."""

    def listen(self, cache: EventSource) -> None:
        """Read this cache's changes from now on."""

    def pass_on(self) -> None:
        """Take what has changed, without blocking."""


class EventFeed:
    """One cache's changes as numbered batches, recorded from the first request for them. Owner: the
    cache's thread.

    `is_behind`: the cache is that of the worker's host memory. `at_saves`: see `EventBatch`.
    """

    def __init__(
        self,
        cache: EventSource,
        worker: str,
        incarnation: int,
        is_behind: bool = False,
        at_saves: bool = False,
    ) -> None:
        self.cache = cache
        self._log = cache.record()
        self._is_behind = is_behind
        self._at_saves = at_saves
        self._worker = worker
        self._incarnation = incarnation
        self._seq = 0
        self._paths = PagePaths(cache.page_size)

    def take(self, snapshot: bool = False) -> EventBatch:
        """Return the events since the last batch, possibly none. O(pages) of those. The first
        batch, any with `snapshot` and one after too many changes have the whole tree."""
        if snapshot:
            self._log.restart()
        events = tuple(self._events(self._log.take()))
        batch = EventBatch(self._worker, self._incarnation, self._seq, events, self._at_saves)
        self._seq += 1
        return batch

    def _events(self, changes: list[Change]) -> Iterator[CacheEvent]:
        for change in changes:
            for kind, run in self._paths.told(change):
                if issubclass(kind, Cleared):
                    yield kind(self._is_behind)
                elif issubclass(kind, _Path):
                    keys = tuple(ref.key for ref in run)
                    yield kind(run[0].namespace, run[0].parent, keys, self._is_behind)
                else:
                    yield kind(run[0].namespace, run[0].key)


def page_keys(data: Packed, page_size: int, parent: bytes = NO_PARENT) -> list[bytes]:
    """Return the keys of all whole pages of a prompt. One hash per page. `data`: the packed tokens
    (`RadixKey.data`). `parent`: the key of the page before them."""
    page_bytes = TOKEN_BYTES * page_size
    keys = []
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        parent = page_key(parent, bytes(data[start : start + page_bytes]))
        keys.append(parent)
    return keys


def page_key(parent: bytes, page_tokens: bytes) -> bytes:
    """Return the key of a page, which depends on all tokens up to the page's end. `parent`: the key
    of the page before it, NO_PARENT for the first. `page_tokens`: packed (little-endian int32)."""
    return blake2b(parent + page_tokens, digest_size=PAGE_KEY_BYTES).digest()


def _ids(pages: Packed) -> list[int]:
    return np.frombuffer(pages, np.int32).tolist()  # type: ignore[no-any-return]
