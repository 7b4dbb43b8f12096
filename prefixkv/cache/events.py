"""What changed in a tree, for routers, host tiers and tests. Recorded from the first time
that it is asked for.

A page key names a page together with all tokens before it: the digest of the page's tokens and of
the key of the page before. Equal prefixes have equal keys in every process, so a router can look a
prompt up without holding any tokens.

A listener in another process gets `EventBatch`es, numbered, so that it knows when one is missing.
It then asks for a batch that begins with `Cleared` and gives the tree as it is
(`EventFeed.take(afresh=True)`).

Source: keys chained by hashes, as the block hashes of vLLM's prefix cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

import msgspec

from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.errors import ProtocolError

PAGE_KEY_BYTES = 16

NO_PARENT = b""
"""The parent of the first page of a namespace."""


class Stored(msgspec.Struct, frozen=True, tag=True):
    """Pages that can be matched from now on; `page_keys[0]` follows the page with key `parent`."""

    namespace: Any  # hashable; in a frame None, bool, int, str or bytes
    parent: bytes
    page_keys: tuple[bytes, ...]


class Removed(msgspec.Struct, frozen=True, tag=True):
    """Neighbours on one path that can not be matched any more; what followed them went before."""

    namespace: Any  # hashable; in a frame None, bool, int, str or bytes
    parent: bytes
    page_keys: tuple[bytes, ...]


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
            for event in batch.events:
                hash(None if isinstance(event, Cleared) else event.namespace)
        except (msgspec.DecodeError, TypeError) as error:
            raise ProtocolError(f"no batch of cache events: {error}") from None
        return batch


_DECODER = msgspec.msgpack.Decoder(EventBatch)


class EventSource(Protocol):
    """What a feed listens to: a RadixCache."""

    def drain_events(self, afresh: bool = False) -> list[CacheEvent]: ...


class EventFeed:
    """One cache's events, numbered. Owned by the cache's thread; recording begins with the first
    batch."""

    def __init__(self, cache: EventSource, worker: str, incarnation: int) -> None:
        self._cache = cache
        self._worker = worker
        self._incarnation = incarnation
        self._seq = 0

    def take(self, afresh: bool = False) -> EventBatch:
        """What happened since the last batch, maybe nothing; the first, and any with `afresh`,
        gives all there is."""
        events = self._cache.drain_events(afresh=afresh or not self._seq)
        batch = EventBatch(self._worker, self._incarnation, self._seq, tuple(events))
        self._seq += 1
        return batch


def page_keys(data: bytes, page_size: int) -> list[bytes]:
    """The keys of all whole pages of a prompt. One hash a page.

    Args:
        data: the packed tokens (`RadixKey.data`).
        page_size: tokens a page, that of the caches.
    """
    page_bytes = TOKEN_BYTES * page_size
    keys, parent = [], NO_PARENT
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        parent = page_key(parent, data[start : start + page_bytes])
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
    """Events since the last drain, and the keys of the pages now stored, by page id. O(1) a
    page."""

    def __init__(self, page_bytes: int, limit: int) -> None:
        self._page_bytes = page_bytes
        self._limit = limit  # pages; a listener further behind than this starts afresh
        self._events: list[CacheEvent] = []
        self._num_pages = 0
        self._keys: dict[
            int, tuple[Hashable, bytes, bytes]
        ] = {}  # page id: namespace, parent's key, own key

    @property
    def overrun(self) -> bool:
        return self._num_pages > self._limit

    def stored(
        self, namespace: Hashable, parent_page: int | None, key: bytes | bytearray, pages: list[int]
    ) -> None:
        """Pages with these packed tokens were added after page `parent_page` (None: at the
        root)."""
        before = first = NO_PARENT if parent_page is None else self._keys[parent_page][2]
        page_keys = []
        for at, page in enumerate(pages):
            own = page_key(before, bytes(key[at * self._page_bytes : (at + 1) * self._page_bytes]))
            self._keys[page] = (namespace, before, own)
            page_keys.append(own)
            before = own
        self._append(Stored(namespace, first, tuple(page_keys)))

    def removed(self, pages: list[int]) -> None:
        """These pages, neighbours on one path, were taken out."""
        gone = [self._keys.pop(page) for page in pages]
        self._append(Removed(gone[0][0], gone[0][1], tuple(own for _, _, own in gone)))

    def cleared(self) -> None:
        self._keys.clear()
        self._events.append(Cleared())

    def drain(self) -> list[CacheEvent]:
        events, self._events, self._num_pages = self._events, [], 0
        return events

    def _append(self, event: Stored | Removed) -> None:
        self._events.append(event)
        self._num_pages += len(event.page_keys)
