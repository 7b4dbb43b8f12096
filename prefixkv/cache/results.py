"""Results of the calls of a `RadixCache`. Page ids are put together only when asked for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prefixkv.cache.node import PAGE_ID_BYTES, Mark, Packed, TreeNode
from prefixkv.errors import PageStateError
from prefixkv.paging import PageIds, Pages, as_pages

NO_PAGES: Pages = np.empty(0, np.int32)


class ResultOwner(Protocol):
    """The part of a `RadixCache` that its results use."""

    page_size: int
    version: int

    def locate(self, result: MatchResult) -> tuple[TreeNode | None, int]: ...

    def unlock(self, lock: PrefixLock) -> Pages: ...


@dataclass(slots=True, eq=False, repr=False)
class MatchResult:
    """The longest cached prefix of some tokens, as of the time of the call. It holds nothing.

    `node` is where the match ends, at its end or inside; None if the namespace is empty. It is for
    tests and tools. The page ids are right until the tree changes: a caller that keeps them has to
    lock the result and take the ids of the lock.
    """

    cache: ResultOwner
    data: bytes
    namespace: Hashable
    node: TreeNode | None
    depth: int
    version: int

    @property
    def prefix_len(self) -> int:
        """Tokens of cached prefix, whole pages."""
        return self.depth * self.cache.page_size

    @property
    def is_current(self) -> bool:
        """True while no page came or went since: matching again would give the same."""
        return self.version == self.cache.version

    @property
    def pages(self) -> Pages:
        """int32 [prefix_len / page_size], the caller's own array; of a stale match what is still
        there. O(pages)."""
        return np.frombuffer(self.packed, np.int32)

    @property
    def packed(self) -> Packed:
        """`pages` as packed in the tree, four bytes each. O(pages)."""
        node, depth = self.cache.locate(self)
        return packed_to(node, min(depth, self.depth))

    @property
    def unprotected_pages(self) -> int:
        """Pages that a lock would take out of the evictable ones. O(nodes not yet held)."""
        node, depth = self.cache.locate(self)
        # The same walk as `RadixTree._hold`: up to the first node that is held anyway. If that is
        # the node itself, the match may end above its end, and then nothing would change.
        while node is not None and not node.lock_ref and node.parent is not None:
            node = node.parent
        return depth - min(depth, node.end) if node is not None else 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(prefix_len={self.prefix_len})"


@dataclass(slots=True, eq=False, repr=False)
class InsertResult(MatchResult):
    """The tree's view of a key after an insertion. The first `prefix_len` tokens were there before.

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
    """A prefix that cannot be evicted. `RadixCache.unlock` ends it, once, or its `with` block.

    While it is held, `node` ends where the lock ends. `freed`: see `RadixCache.unlock`. `mark` is
    the history of the last page when the lock was taken or extended, None if the lock is empty: the
    traits of this request's own use, whatever uses the page later.
    """

    cache: ResultOwner
    node: TreeNode
    prefix_len: int
    epoch: int
    taken_s: float  # by the caller's clock
    freed: Pages
    held: bool = True
    mark: Mark = None
    _pages: Pages | None = None

    @property
    def pages(self) -> Pages:
        """int32 [prefix_len / page_size], a new array. After `unlock` only if read before."""
        if self._pages is None:
            # The pages may be another prompt's by now: a lock that has ended no longer knows them.
            if not self.held:
                raise PageStateError("the pages of a lock have to be asked for while it is held")
            self._pages = np.frombuffer(packed_to(self.node, self.node.end), np.int32)
        return self._pages.copy()

    def __enter__(self) -> PrefixLock:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.held:
            self.cache.unlock(self)

    def __repr__(self) -> str:
        return f"PrefixLock(prefix_len={self.prefix_len}, held={self.held})"


def packed_to(node: TreeNode | None, depth: int) -> bytearray:
    """Packed ids of the path down to `depth` in `node`; a new array. O(nodes + pages)."""
    if node is None or not depth:
        return bytearray()
    runs = packed_path(node)
    runs[0] = runs[0][: (depth - node.start) * PAGE_ID_BYTES]
    return bytearray().join(runs[::-1])


def packed_path(node: TreeNode) -> list[Packed]:
    """Return the packed ids of a node and of all above it, the lowest run first. O(nodes)."""
    runs = []
    while (parent := node.parent) is not None:
        runs.append(node.pages)
        node = parent
    return runs


def packed_ids(runs: Iterable[Packed]) -> Pages:
    """Return the page ids of several packed runs, one after the other, as a new array."""
    # One copy into a new bytearray, which also makes the array writable.
    return np.frombuffer(bytearray().join(runs), np.int32)


def as_page_ids(pages: Any, num_pages: int) -> Pages:
    """Return the first `num_pages` of a caller's page ids as int32. It may be the caller's own
    array: do not keep it.

    Raises PageStateError: not one-dimensional integers, fewer than `num_pages`, more than one more,
    or beyond int32.
    """
    ids: Pages = as_pages(pages)
    # One id more is that of a partial last page, which the tree does not take.
    if not num_pages <= len(ids) <= num_pages + 1:
        raise PageStateError(f"{len(ids)} page ids for {num_pages} whole pages")
    return ids[:num_pages]


def check_page_ids(ids: Pages) -> None:
    """Raise PageStateError if a page id is negative or given twice."""
    if len(ids):
        # Ids mostly come in rising order, which is quick to see and rules duplicates out. Searching
        # the bytes takes a fraction of the time of `all`. Else sort: equal ids become neighbours.
        in_order = np.sort(ids) if b"\1" in (ids[1:] <= ids[:-1]).tobytes() else ids
        if in_order[0] < 0:
            raise PageStateError(f"page id {in_order[0]} is below 0")
        if in_order is not ids:
            twice = np.flatnonzero(in_order[1:] == in_order[:-1])
            if len(twice):
                raise PageStateError(f"page id {in_order[twice[0]]} is given twice")


class Releases:
    """Ends locks in a copy of the counts, one after the other; the tree is not touched. Valid until
    the tree changes.

    Two locks that share a prefix free it only together, so the sum of what each frees alone would
    be too low.
    """

    def __init__(self) -> None:
        self._refs: dict[TreeNode, int] = {}  # what `lock_ref` of a node would be, where it differs

    def end(self, lock: PrefixLock | None) -> int:
        """Release `lock` in the copy, and return the pages that it frees after those before it.
        O(nodes of them). None frees nothing. Mirrors `RadixTree._release`."""
        if lock is None:
            return 0
        # The first node that something else holds ends the walk, as in the tree; its count is lower
        # from here on, so the next lock may go further.
        refs, node = self._refs, lock.node
        end = node.end
        refs[node] = left = refs.get(node, node.lock_ref) - 1
        while left == 0 and node.parent is not None:
            node = node.parent
            refs[node] = left = refs.get(node, node.lock_ref) - 1
        return end - node.end


class Saves:
    """Without a slot nothing is kept. A part that keeps something overrides this."""

    num_slots = 0
    evicted = 0  # given up for others
    cut_tokens = 0  # cached, and computed again: nothing that was kept lay behind them

    def __len__(self) -> int:
        return 0

    def make_room(self, needs: Sequence[int]) -> None:
        """Evict until each window group has as many free pages as it needs, or nothing is left."""

    def dropped(self, pages: PageIds) -> None:
        """These pages have left the tree."""

    def reset(self) -> None:
        """The tree was emptied."""

    def kept(self, number: int) -> list[tuple[Pages, bool]]:
        """Return what is kept of the pages of this window group, each with whether they are pinned;
        for audits."""
        return []

    def check_invariants(self) -> None:
        """Raise InternalError if a law is broken. O(tree)."""
