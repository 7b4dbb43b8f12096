"""What the calls of a `RadixCache` give back. Page ids are put together only when asked for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prefixkv.cache.node import PAGE_ID_BYTES, Mark, Node, Packed
from prefixkv.errors import PageStateError
from prefixkv.paging import Pages, as_pages

NO_PAGES: Pages = np.empty(0, np.int32)


class Cache(Protocol):
    """What a result asks of the `RadixCache` that gave it."""

    page_size: int
    version: int

    def locate(self, result: MatchResult) -> tuple[Node | None, int]: ...

    def unlock(self, lock: PrefixLock) -> Pages: ...


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of sizes, and counts since the cache was built; pages unless named otherwise."""

    num_pages: int
    evictable_pages: int
    protected_pages: int
    orphan_pages: int
    num_nodes: int
    num_locks: int
    num_wants: int
    uses: int
    inserted_pages: int
    evicted_pages: int


@dataclass(slots=True, eq=False, repr=False)
class MatchResult:
    """The longest cached prefix of some tokens, when it was looked for. Nothing is held by it.

    `node` is where the match ends (inside it, maybe), for tests and tools; None when the namespace
    is empty. The page ids are right until the tree changes; take those of the lock.
    """

    cache: Cache
    data: bytes
    namespace: Hashable
    node: Node | None
    depth: int
    version: int

    @property
    def prefix_len(self) -> int:
        """Tokens of cached prefix, whole pages."""
        return self.depth * self.cache.page_size

    @property
    def is_current(self) -> bool:
        """Whether no page came or went since: to match again would give the same."""
        return self.version == self.cache.version

    @property
    def pages(self) -> Pages:
        """int32 [prefix_len / page_size] page ids, the caller's; of a stale match, those still
        there. O(pages)."""
        node, depth = self.cache.locate(self)
        return page_ids(node, min(depth, self.depth))

    @property
    def unprotected_pages(self) -> int:
        """How many pages a lock would take out of the evictable ones. O(nodes not yet held)."""
        node, depth = self.cache.locate(self)
        while node is not None and not node.lock_ref and node.parent is not None:
            node = node.parent
        return depth - min(depth, node.end) if node is not None else 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(prefix_len={self.prefix_len})"


@dataclass(slots=True, eq=False, repr=False)
class InsertResult(MatchResult):
    """What the tree has after an insertion. `prefix_len` tokens of it were there before.

    `pages` are the tree's page ids for all of the key. For the first `prefix_len` tokens the caller
    still owns its own pages: it repoints its page table to the tree's, then frees those of its own
    that differ.
    """

    old_depth: int

    @property
    def prefix_len(self) -> int:
        """Tokens that were in the tree before, whole pages."""
        return self.old_depth * self.cache.page_size


@dataclass(slots=True, eq=False, repr=False)
class PrefixLock:
    """A prefix held in place. Given back by `RadixCache.unlock`, once, or by leaving its `with`
    block.

    `node` ends where the lock ends, as long as it is held. `freed`: see `RadixCache.unlock`.
    `mark` is the history of its last page when it was taken, None if it is empty: what this very
    use was like, whoever uses the page later.
    """

    cache: Cache
    node: Node
    prefix_len: int
    epoch: int
    taken_s: float  # by the caller's clock
    freed: Pages
    held: bool = True
    mark: Mark = None
    _pages: Pages | None = None

    @property
    def pages(self) -> Pages:
        """int32 [prefix_len / page_size] page ids, the caller's. After `unlock`, only if asked for
        before."""
        if self._pages is None:
            if not self.held:
                raise PageStateError("the pages of a lock have to be asked for while it is held")
            self._pages = page_ids(self.node, self.node.end)
        return self._pages.copy()

    def __enter__(self) -> PrefixLock:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.held:
            self.cache.unlock(self)

    def __repr__(self) -> str:
        return f"PrefixLock(prefix_len={self.prefix_len}, held={self.held})"


def page_ids(node: Node | None, depth: int) -> Pages:
    """int32 [depth] ids of the path to `depth` in `node`; a new array. O(nodes + pages)."""
    if node is None or not depth:
        return NO_PAGES.copy()
    runs = packed_path(node)
    runs[0] = runs[0][: (depth - node.start) * PAGE_ID_BYTES]
    return packed_ids(runs[::-1])


def packed_path(node: Node) -> list[Packed]:
    """The packed page ids of a node and of all above it, the last run first. O(nodes)."""
    runs = []
    while (parent := node.parent) is not None:
        runs.append(node.pages)
        node = parent
    return runs


def packed_ids(runs: Iterable[Packed]) -> Pages:
    """The page ids in several runs of packed ones, one after the other; a new array."""
    return np.frombuffer(bytearray().join(runs), np.int32)


def as_page_ids(pages: Any, num_pages: int) -> Pages:
    """The first `num_pages` of what a caller gave as page ids, as int32 (maybe its own array: not
    to be kept).

    Raises:
        PageStateError: not one-dimensional integers, fewer than `num_pages`, more than one more,
            negative, beyond int32, or an id twice.
    """
    ids: Pages = as_pages(pages)
    if not num_pages <= len(ids) <= num_pages + 1:
        raise PageStateError(f"{len(ids)} page ids for {num_pages} whole pages")
    ids = ids[:num_pages]
    if num_pages:
        # Ids mostly come in rising order, which is quick to see; bytes are searched in a fraction
        # of the time of `all`.
        in_order = np.sort(ids) if b"\1" in (ids[1:] <= ids[:-1]).tobytes() else ids
        if in_order[0] < 0:
            raise PageStateError(f"page id {in_order[0]} is below 0")
        if in_order is not ids:
            twice = np.flatnonzero(in_order[1:] == in_order[:-1])
            if len(twice):
                raise PageStateError(f"page id {in_order[twice[0]]} is given twice")
    return ids
