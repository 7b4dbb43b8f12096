"""What changed in a tree, for routers, host tiers and tests. Recorded from the first time
that it is asked for.

The tree notes *changes*: tokens and page ids as it has them, nothing computed. Who listens makes
*events* of them, with `PagePaths`, in a thread of its choice: page keys for a listener in process
(`EventFeed.take`), or the block hashes of other engines' dialects (`prefixkv.kv_events`).

A page key names a page together with all tokens before it: the digest of the page's tokens and of
the key of the page before. Equal prefixes have equal keys in every process, so a router can look a
prompt up without holding any tokens.

A listener in another process gets `EventBatch`es, numbered, so that it knows when one is missing.
It then asks for a batch that begins with `Cleared` and gives the tree as it is
(`EventFeed.take(afresh=True)`).

Source: keys chained by hashes, as the block hashes of vLLM's prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeAlias, assert_never

import msgspec
import numpy as np

from prefixkv.cache.node import PAGE_ID_BYTES, Packed
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.errors import ProtocolError

PAGE_KEY_BYTES = 16

UNTAKEN_LIMIT_PAGES = 1 << 20
"""How many pages of changes wait for `EventFeed.take` beside a listener before it begins afresh."""

PageHash: TypeAlias = Callable[[bytes, bytes], bytes]
"""(The key of the page before, a page's packed tokens) -> that page's key."""

_new = tuple.__new__  # a named tuple's own takes twice as long

NO_PARENT = b""
"""The parent of the first page of a namespace."""


class _Path(msgspec.Struct, frozen=True):
    namespace: Any  # hashable; in a frame None, bool, int, str, bytes, or a tuple of these
    parent: bytes
    page_keys: tuple[bytes, ...]


class Stored(_Path, frozen=True, tag=True):
    """Pages that can be matched from now on; `page_keys[0]` follows the page with key `parent`."""


class Removed(_Path, frozen=True, tag=True):
    """Neighbours on one path that can not be matched any more; what followed them went before."""


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is stored any more (a reset), or a listener fell behind; `Stored` events for what
    there is follow."""


CacheEvent: TypeAlias = Stored | Removed | Cleared


class EventBatch(msgspec.Struct, frozen=True):
    """What one worker's cache did since the batch before. A batch that begins with `Cleared` needs
    none before it.

    `worker` and `incarnation` name the cache (that of an older incarnation is gone); `seq` counts
    from 0.
    """

    worker: str
    incarnation: int
    seq: int
    events: tuple[CacheEvent, ...]

    def encode(self) -> bytes:
        """As msgpack."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(raw: bytes) -> EventBatch:
        """What `encode` made. Raises ProtocolError for anything else."""
        try:
            batch = _DECODER.decode(raw)
            events = tuple(map(_with_tuples, batch.events))
        except (msgspec.DecodeError, TypeError) as error:
            raise ProtocolError(f"no batch of cache events: {error}") from None
        return msgspec.structs.replace(batch, events=events)


def _with_tuples(event: CacheEvent) -> CacheEvent:
    """With its namespace as it was: a frame knows lists only. TypeError for one that cannot be
    looked up."""
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
    """Pages that an eviction took out, in runs: each of neighbours on one path, and after those
    that followed it."""

    runs: list[Packed]  # packed ids


Change: TypeAlias = Inserted | TakenOut | Cleared


class Place(NamedTuple):
    """Where a page stands."""

    namespace: Hashable
    parent: bytes  # the key of the page before it, NO_PARENT for the first
    key: bytes
    number: int  # of pages before it
    tokens: bytes  # packed; b"" where they are not kept


class PagePaths:
    """Which pages a cache holds, as its changes tell; makes events of them. O(1) a page.

    One owner. The pages stand in the order in which they were stored last, so each comes after the
    one before it.

    Args:
        page_size: tokens a page.
        keep_tokens: whether `places` has them.
        hash_page: (key before it, its packed tokens) -> a page's key; by default `page_key`.
        before_first: namespace -> what stands for the key before a first page in `hash_page`; by
            default NO_PARENT.
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
        self._places: dict[int, Place] = {}  # by page id

    def __len__(self) -> int:
        return len(self._places)

    def runs(self) -> Iterator[list[Place]]:
        """All pages in runs: each run's pages follow each other, and its first follows a page of an
        earlier run, or none."""
        run: list[Place] = []
        for place in self._places.values():
            if run and (place.parent, place.namespace) != (run[-1].key, run[-1].namespace):
                yield run
                run = []
            run.append(place)
        if run:
            yield run

    def inserted(self, change: Inserted) -> list[Place]:
        """Take in new pages; where each of them stands."""
        namespace, above, tokens, pages = change
        key, number = NO_PARENT, 0
        if above:
            upper = self._places[_ids(above)[0]]
            key, number = upper.key, upper.number + 1
        before = key
        if not above and self._before_first is not None:
            before = self._before_first(namespace)
        run, start, page_bytes, hash_page = [], 0, self._page_bytes, self._hash_page
        for page in _ids(pages):
            page_tokens = tokens[start : start + page_bytes]
            start += page_bytes
            own = before = hash_page(before, page_tokens)
            place = Place(namespace, key, own, number, page_tokens if self._keep_tokens else b"")
            self._places[page] = place
            run.append(place)
            key, number = own, number + 1
        return run

    def taken_out(self, change: TakenOut) -> list[list[Place]]:
        """Forget pages; where each of them stood, run by run."""
        pop = self._places.pop
        return [[pop(page) for page in _ids(pages)] for pages in change.runs]

    def clear(self) -> None:
        self._places.clear()


def as_stored(run: list[Place]) -> Stored:
    return Stored(run[0].namespace, run[0].parent, tuple(place.key for place in run))


class EventSource(Protocol):
    """What a feed listens to: a RadixCache."""

    page_size: int

    def drain_changes(self, afresh: bool = False) -> list[Change]: ...


class Listener(Protocol):
    """What takes changes elsewhere: a `KVEventPublisher`."""

    def hand_over(self, changes: list[Change]) -> bool:
        """Take these, and never block. False: they are lost, and so is what comes before a list
        that begins with Cleared."""

    @property
    def idle(self) -> bool:
        """Whether all that was handed over has been dealt with."""


class EventFeed:
    """One cache's changes, recorded from the first time that they are asked for: as numbered
    batches for who calls `take`, and as they are for a `Listener`. Owner: the cache's thread."""

    def __init__(self, cache: EventSource, worker: str, incarnation: int) -> None:
        self._cache = cache
        self._worker = worker
        self._incarnation = incarnation
        self._seq = 0
        self._paths = PagePaths(cache.page_size)
        self._listener: Listener | None = None
        self._lost = False  # the listener has to hear everything afresh
        self._untaken: list[Change] = []  # handed to the listener, not taken yet
        self._num_untaken_pages = 0

    def take(self, afresh: bool = False) -> EventBatch:
        """What happened since the last batch, maybe nothing; the first, and any with `afresh`,
        gives all there is. O(pages) of those."""
        afresh = afresh or not self._seq or self._num_untaken_pages > UNTAKEN_LIMIT_PAGES
        changes = self._cache.drain_changes(afresh=afresh)
        self._hand_over(changes, afresh)
        if not afresh:
            changes = self._untaken + changes
        self._untaken, self._num_untaken_pages = [], 0
        batch = EventBatch(self._worker, self._incarnation, self._seq, tuple(self._events(changes)))
        self._seq += 1
        return batch

    def listen(self, listener: Listener) -> None:
        """Hand it all there is, and from now on with each `pass_on` what has changed."""
        self._listener = listener
        self._lost = not listener.hand_over(self._cache.drain_changes(afresh=True))

    def pass_on(self) -> None:
        """Hand the listener what has changed. O(changes), and no work of theirs; all there is where
        it had lost something, once it has dealt with the rest."""
        listener = self._listener
        if listener is None:
            return
        if not self._lost and not self._seq:  # mostly: it hears each change, and nobody takes them
            if changes := self._cache.drain_changes():
                self._lost = not listener.hand_over(changes)
            return
        afresh = self._lost and listener.idle
        changes = self._cache.drain_changes(afresh=afresh)
        if not changes:
            return
        self._hand_over(changes, afresh)
        if self._seq and self._num_untaken_pages <= UNTAKEN_LIMIT_PAGES:
            self._untaken += changes
            self._num_untaken_pages += stored_pages(changes)
            if self._num_untaken_pages > UNTAKEN_LIMIT_PAGES:
                self._untaken = []

    def _hand_over(self, changes: list[Change], afresh: bool) -> None:
        if self._listener is not None and changes and (afresh or not self._lost):
            self._lost = not self._listener.hand_over(changes)

    def _events(self, changes: list[Change]) -> Iterator[CacheEvent]:
        for change in changes:
            match change:
                case Inserted():
                    yield as_stored(self._paths.inserted(change))
                case TakenOut():
                    for run in self._paths.taken_out(change):
                        keys = tuple(place.key for place in run)
                        yield Removed(run[0].namespace, run[0].parent, keys)
                case Cleared():
                    self._paths.clear()
                    yield change
                case _:
                    assert_never(change)


def page_keys(data: Packed, page_size: int, parent: bytes = NO_PARENT) -> list[bytes]:
    """The keys of all whole pages of a prompt. One hash a page.

    Args:
        data: the packed tokens (`RadixKey.data`).
        page_size: tokens a page, that of the caches.
        parent: the key of the page before them.
    """
    page_bytes = TOKEN_BYTES * page_size
    keys = []
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        parent = page_key(parent, bytes(data[start : start + page_bytes]))
        keys.append(parent)
    return keys


def page_key(parent: bytes, page_tokens: bytes) -> bytes:
    """The key of a page.

    Args:
        parent: the key of the page before it, NO_PARENT for the first.
        page_tokens: the page's tokens, packed (little-endian int32).
    """
    return blake2b(parent + page_tokens, digest_size=PAGE_KEY_BYTES).digest()


class EventLog:
    """Changes since the last drain. O(1) a change."""

    __slots__ = ("changes", "limit", "num_pages")

    def __init__(self, limit: int) -> None:
        self.limit = limit  # pages stored; a listener further behind than this starts afresh
        self.num_pages = 0
        self.changes: list[Change] = []

    def stored(self, namespace: Hashable, above: Packed, key: Packed, pages: Packed) -> None:
        """Pages with these packed tokens were added after the last page of `above` (which is empty
        at the root)."""
        last = bytes(above[-PAGE_ID_BYTES:])
        self.changes.append(_new(Inserted, (namespace, last, bytes(key), bytes(pages))))
        self.num_pages += len(pages) // PAGE_ID_BYTES

    def removed(self, runs: list[Packed]) -> None:
        """These pages were taken out, see `TakenOut`. Neither the list nor what is in it changes
        any more."""
        self.changes.append(TakenOut(runs))

    def cleared(self) -> None:
        self.changes.append(Cleared())

    def drain(self) -> list[Change]:
        changes, self.changes, self.num_pages = self.changes, [], 0
        return changes


def stored_pages(changes: list[Change]) -> int:
    """How many pages they have stored. What was taken out is no more than that, in the long run."""
    num_bytes = 0
    for change in changes:
        if type(change) is Inserted:
            num_bytes += len(change.pages)
    return num_bytes // PAGE_ID_BYTES


def _ids(pages: Packed) -> list[int]:
    return np.frombuffer(pages, np.int32).tolist()  # type: ignore[no-any-return]
