"""What changed in a tree, for routers, host tiers and tests. Recorded only once somebody listens.

A page key names a page together with all tokens before it: the digest of the page's tokens and of the key of
the page before. Equal prefixes have equal keys in every process, so a router can look a prompt up without
holding any tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

PAGE_KEY_BYTES = 16

NO_PARENT = b""
"""The parent of the first page of a namespace."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages that can be matched from now on; `page_keys[0]` follows the page with key `parent`."""

    namespace: Hashable
    parent: bytes
    page_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Neighbours on one path that can not be matched any more; what followed them went before."""

    namespace: Hashable
    parent: bytes
    page_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is stored any more (a reset), or a listener fell behind; `Stored` events for what there is follow."""


CacheEvent: TypeAlias = Stored | Removed | Cleared


def page_key(parent: bytes, page_tokens: bytes) -> bytes:
    """The key of a page.

    Args:
        parent: the key of the page before it, NO_PARENT for the first.
        page_tokens: the page's tokens, packed (little-endian int32).
    """
    return blake2b(parent + page_tokens, digest_size=PAGE_KEY_BYTES).digest()


class EventLog:
    """Events since the last drain, and the keys of the pages now stored, by page id. O(1) a page."""

    def __init__(self, page_bytes: int, limit: int) -> None:
        self._page_bytes = page_bytes
        self._limit = limit  # pages; a listener further behind than this starts afresh
        self._events: list[CacheEvent] = []
        self._num_pages = 0
        self._keys: dict[int, tuple[Hashable, bytes, bytes]] = {}  # page id: namespace, parent's key, own key

    @property
    def overrun(self) -> bool:
        return self._num_pages > self._limit

    def stored(self, namespace: Hashable, parent_page: int | None, key: bytes | bytearray, pages: list[int]) -> None:
        """Pages with these packed tokens were added after page `parent_page` (None: at the root)."""
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
