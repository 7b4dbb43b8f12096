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
import numpy as np

from prefixkv.cache.node import PAGE_ID_BYTES, Packed
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.errors import ProtocolError

PAGE_KEY_BYTES = 16

NO_PARENT = b""
"""The parent of the first page of a namespace."""


class _Path(msgspec.Struct, frozen=True):
    namespace: Any  # hashable; in a frame None, bool, int, str or bytes
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
    """One cache's events, numbered; recorded from the first batch on. Owner: the cache's thread."""

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
    """Events since the last drain, and the keys of stored pages by page id. O(1) a page."""

    def __init__(self, page_size: int, limit: int) -> None:
        self._page_size = page_size
        self._limit = limit  # pages; a listener further behind than this starts afresh
        self._events: list[CacheEvent] = []
        self._num_pages = 0
        # page id: namespace, parent's key, own key
        self._keys: dict[int, tuple[Hashable, bytes, bytes]] = {}

    @property
    def overrun(self) -> bool:
        return self._num_pages > self._limit

    def stored(self, namespace: Hashable, above: Packed, key: Packed, pages: Packed) -> None:
        """Pages with these packed tokens were added after the last page of `above` (which is empty
        at the root)."""
        parent = self._keys[_ids(above[-PAGE_ID_BYTES:])[0]][2] if above else NO_PARENT
        keys = page_keys(key, self._page_size, parent)
        for page, before, own in zip(_ids(pages), [parent, *keys], keys, strict=False):
            self._keys[page] = (namespace, before, own)
        self._append(Stored(namespace, parent, tuple(keys)))

    def removed(self, pages: Packed) -> None:
        """These pages, neighbours on one path, were taken out."""
        gone = [self._keys.pop(page) for page in _ids(pages)]
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


def _ids(pages: Packed) -> list[int]:
    return np.frombuffer(pages, np.int32).tolist()  # type: ignore[no-any-return]
