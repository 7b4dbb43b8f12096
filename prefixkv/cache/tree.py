"""The shape of the radix tree: walking, splitting and merging, holding, and taking pages out.

A node exists only where it must: where branches part, and where a lock ends. Everything else is
merged, so the shape says nothing about how it came about, and a walk is short. `RadixCache` is what
callers see of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv.cache import audit, dump, wants
from prefixkv.cache.events import EventLog
from prefixkv.cache.eviction.policy import (
    DEFAULT_POLICY,
    EvictionQueue,
    LeafHeap,
    Policy,
    Use,
    forget,
    make_policy,
)
from prefixkv.cache.node import Node, Root
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.cache.results import InsertResult, MatchResult, PrefixLock, page_ids
from prefixkv.cache.wants import Want
from prefixkv.errors import ConfigError, LockError

Pages = npt.NDArray[np.int32]

_taken_s = attrgetter("taken_s")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of sizes, and counts since the cache was built. Pages, unless the name says
    otherwise."""

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


class RadixTree:
    """Nodes, and all that is counted of them. One owner, no threads."""

    def __init__(
        self,
        page_size: int = 16,
        policy: str | Policy = DEFAULT_POLICY,
        pool_pages: int | None = None,
    ) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size {page_size} is below 1")
        if pool_pages is not None and pool_pages < 0:
            raise ConfigError(f"pool_pages {pool_pages} is below 0")
        self.page_size = page_size
        self.policy = make_policy(policy)
        self.policy.bind(page_size, pool_pages)
        self.pool_pages = pool_pages
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Hashable, Root] = {}
        self._queue: EvictionQueue = self.policy.make_queue()
        self._wanted_queue = LeafHeap(
            self.policy.last_tick
        )  # leaves that somebody waits for: they go last
        self._use = Use()
        self._now_s = 0.0  # the latest time that was given
        self._tick = 0
        self.version = 0  # of the content: counts what adds or takes pages, not splits and merges
        self._epoch = 0  # counts resets
        self._locks: set[PrefixLock] = set()
        self._wants: dict[tuple[Hashable, bytes], Want] = {}
        self._in_tree = None if pool_pages is None else np.zeros(pool_pages, np.bool_)
        self._log: EventLog | None = None
        self._evictable_pages = self._protected_pages = self._orphan_pages = self._num_nodes = 0
        self._inserted_pages = self._evicted_pages = 0

    # --- sizes ---------------------------------------------------------------------------------

    @property
    def evictable_pages(self) -> int:
        """Pages in the tree that no lock covers."""
        return self._evictable_pages

    @property
    def protected_pages(self) -> int:
        """Pages in the tree that a lock covers."""
        return self._protected_pages

    @property
    def num_pages(self) -> int:
        """Pages in the tree. Those of orphans (see `reset`) are not."""
        return self._evictable_pages + self._protected_pages

    @property
    def orphan_pages(self) -> int:
        """Pages of paths that were locked when the tree was reset, and still are."""
        return self._orphan_pages

    def oldest_lock(self) -> PrefixLock | None:
        """Of the locks that hold pages the one taken first, by `now_s`. O(locks). Any thread may
        ask."""
        return min(
            (lock for lock in self._locks.copy() if lock.prefix_len), key=_taken_s, default=None
        )

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, roots not counted."""
        return self._num_nodes

    def stats(self) -> CacheStats:
        return CacheStats(
            num_pages=self.num_pages,
            evictable_pages=self._evictable_pages,
            protected_pages=self._protected_pages,
            orphan_pages=self._orphan_pages,
            num_nodes=self._num_nodes,
            num_locks=len(self._locks),
            num_wants=len(self._wants),
            uses=self._tick,
            inserted_pages=self._inserted_pages,
            evicted_pages=self._evicted_pages,
        )

    # --- looking on ----------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, each before its children. Do not change the tree meanwhile."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children:
                stack += node.children.values()

    @property
    def tick(self) -> int:
        """How many uses there were."""
        return self._tick

    def dump(self, max_nodes: int = 1000) -> str:
        """The tree as text, a node a line: depth, tokens, lock_ref, age in uses, and what the
        policy says of it."""
        return dump.as_text(self, max_nodes)

    def rich_tree(self, max_nodes: int = 1000) -> Any:
        """As `dump`, a `rich.tree.Tree`."""
        return dump.as_rich(self, max_nodes)

    def check_invariants(self) -> None:
        """Hold the tree against its laws (`audit.py`). O(tree). Raises InternalError with what is
        broken."""
        audit.check(self)

    # --- walking -------------------------------------------------------------------------------

    def _walk(self, node: Node, data: bytes, at: int = 0) -> tuple[Node, int]:
        """Follow `data` down from the end of a node, where `at` bytes of it have matched.

        Returns the node in which the match ends, and the bytes that matched (whole pages).
        """
        page_bytes = self._page_bytes
        end = len(data)
        end -= end % page_bytes
        while at < end:
            child = node.only_child or node.children.get(data[at : at + page_bytes])
            if child is None:
                break
            key = child.key
            if not data.startswith(key, at):
                common = self._common_bytes(data, at, end, key)
                return (child, at + common) if common else (node, at)
            node = child
            at += len(key)
        return node, at

    def _common_bytes(self, data: bytes, at: int, end: int, key: bytes | bytearray) -> int:
        """How many bytes of `key`, in whole pages, `data` has at `at`.

        A binary search whose probes never look at the same bytes twice when they match: memcmp in
        all but name.
        """
        page_bytes = self._page_bytes
        view = memoryview(key)
        high = min(len(key), end - at)
        if not data.startswith(view[:page_bytes], at):
            return 0
        if data.startswith(view[page_bytes:high], at + page_bytes):
            return high
        low_page, high_page = (
            1,
            high // page_bytes,
        )  # equal up to low_page, different somewhere before high_page
        while high_page - low_page > 1:
            middle = (low_page + high_page) // 2
            if data.startswith(
                view[low_page * page_bytes : middle * page_bytes], at + low_page * page_bytes
            ):
                low_page = middle
            else:
                high_page = middle
        return low_page * page_bytes

    def locate(self, result: MatchResult | InsertResult) -> tuple[Node | None, int]:
        """Where a result ends now: a node, and the depth in it (above its start, unless it is a
        root)."""
        if result.cache is not self:
            raise LockError("the result is another cache's")
        node, depth = result.node, result.depth
        if node is None or result.version != self.version or node.end < depth:
            root = self._roots.get(result.namespace)
            if root is None:
                return None, 0
            node, num_bytes = self._walk(root, result.data)
            return node, num_bytes // self._page_bytes
        while node.parent is not None and depth <= node.parent.end:  # split since
            node = node.parent
        return node, depth

    def result_pages(self, result: MatchResult) -> Pages:
        """The page ids behind a result; see there."""
        node, depth = self.locate(result)
        return page_ids(node, min(depth, result.depth))

    # --- shape ---------------------------------------------------------------------------------

    def _root(self, namespace: Hashable) -> Root:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        return root

    def _drop_root_if_idle(self, root: Node) -> None:
        """Namespaces come and go; an empty one leaves nothing behind."""
        assert isinstance(root, Root)
        if not root.children and not root.lock_ref and not root.wants:
            del self._roots[root.namespace]
            root.leave_tree()

    def _split(self, node: Node, depth: int) -> Node:
        """Make `depth` the end of a node, and return that node, which is new; `node` keeps what
        lies below."""
        upper = node.split(depth, self._page_bytes)
        assert upper.parent is not None
        upper.parent.adopt(bytes(upper.key[: self._page_bytes]), upper)
        self._num_nodes += 1
        return upper

    def _merge_if_idle(self, node: Node) -> None:
        """Merge a node with its only child, if no lock ends on it. The child stays the object it
        is."""
        grandparent = node.parent
        child = node.only_child
        if grandparent is None or child is None or node.lock_ref > (child.lock_ref > 0):
            return
        first_page = bytes(node.key[: self._page_bytes])
        forget(node)
        child.absorb_parent(self._page_bytes)
        grandparent.adopt(first_page, child)
        self._num_nodes -= 1

    def _subtree(self, top: Node, held: bool = False) -> list[Node]:
        """`top` and all below it, or only what is held, each before its children."""
        found = [top]
        for node in found:  # grows meanwhile
            found += [child for child in node.children.values() if child.lock_ref or not held]
        return found

    # --- holding -------------------------------------------------------------------------------

    def _hold(self, node: Node) -> None:
        """One more holder of `node`. The walk up ends at the first node that is held already: the
        law of lock_ref."""
        end = node.end
        node.lock_ref += 1
        while node.lock_ref == 1 and node.parent is not None:
            node = node.parent
            node.lock_ref += 1
        num_pages = end - node.end
        self._evictable_pages -= num_pages
        self._protected_pages += num_pages

    def _release(self, node: Node) -> None:
        end = node.end
        node.lock_ref -= 1
        while node.lock_ref == 0 and node.parent is not None:
            node = node.parent
            node.lock_ref -= 1
        num_pages = end - node.end
        self._evictable_pages += num_pages
        self._protected_pages -= num_pages

    # --- taking out ----------------------------------------------------------------------------

    def _victim(self) -> Node | None:
        """The leaf whose last page goes first; one that somebody waits for only when there is no
        other."""
        while (node := self._queue.first(self._now_s)) is not None:
            if not (node.wants and wants.deepest(node) == node.end):
                return node
            forget(node)
            self._wanted_queue.add(node)
        return self._wanted_queue.first()

    def _evict_in_order(self, num_pages: int, thinned: dict[Node, None]) -> list[bytes | bytearray]:
        taken: list[bytes | bytearray] = []
        ghost_pages = self.policy.ghost_pages
        self._queue.expect(num_pages * self._num_nodes // self._evictable_pages, self._now_s)
        missing = num_pages
        while missing:
            node = self._victim()
            if node is None:
                break
            parent, end, steps = node.parent, node.end, node.steps
            assert parent is not None
            floor = (
                steps[-1][0] if steps else parent.end
            )  # above it pages have another history, and maybe their turn
            if node.wants:
                floor = max(floor, wants.deepest_below(node))
            count = end - floor
            if count > missing:
                count = missing
            missing -= count
            if ghost_pages and end // ghost_pages != (end - count) // ghost_pages:
                self.policy.evicted(node, count)
            if end - count == parent.end:
                taken.append(node.pages)
                self._remove_leaf(node, parent, thinned)
            else:
                taken.append(self._trim(node, count))
        self._queue.expect(0, self._now_s)
        return taken

    def _trim(self, node: Node, num_pages: int) -> bytes:
        """Cut pages off the end of a leaf; returns their ids."""
        end = node.end
        pages = node.trim(num_pages, self._page_bytes, self.policy.fold)
        if node.wants:
            wants.move(node, node, node.end, end, self._page_bytes, limit=node.end)
        if self._log is not None:
            self._log.removed(np.frombuffer(pages, np.int32).tolist())
        self._queue.add(node)
        return pages

    def _remove_leaf(self, node: Node, parent: Node, thinned: dict[Node, None]) -> None:
        """Take a leaf out; what is known of its uses goes to the page above."""
        parent.disown(bytes(node.key[: self._page_bytes]))
        self._num_nodes -= 1
        if parent.parent is not None:
            parent.mark = (
                node.mark if parent.mark is None else self.policy.fold(parent.mark, node.mark)
            )
        if node.wants:
            wants.move(node, parent, parent.end, node.end, self._page_bytes, limit=parent.end)
        if self._log is not None:
            self._log.removed(np.frombuffer(node.pages, np.int32).tolist())
        node.entry[2].take(node)
        node.leave_tree()
        if parent.children:
            thinned[parent] = None
        elif parent.parent is None:
            self._drop_root_if_idle(parent)
        elif not parent.lock_ref:
            self._queue.add(parent)

    def _order_is_free(self) -> bool:
        """Whether nobody could tell in which order everything was evicted: there are no ghosts.

        A listener must not matter: only one of several ranks has one, and marks fold to other
        floats in another order.
        """
        ghost_pages = self.policy.ghost_pages
        return not (ghost_pages and any(node.end >= ghost_pages for node in self.nodes()))

    def _strip(
        self, thinned: dict[Node, None], log: EventLog | None = None
    ) -> list[bytes | bytearray]:
        """Take out everything that no lock covers; page ids of it. What was known of it goes to the
        page above."""
        freed: list[bytes | bytearray] = []
        fold = self.policy.fold
        for root in list(self._roots.values()):
            for node in self._subtree(root, held=True):
                gone = [
                    (page, child) for page, child in node.children.items() if not child.lock_ref
                ]
                for first_page, child in gone:
                    node.disown(first_page)
                    branch = self._subtree(child) if child.children else [child]
                    if log is not None:
                        for below in reversed(branch):
                            log.removed(np.frombuffer(below.pages, np.int32).tolist())
                    for below in branch:
                        freed.append(below.pages)
                        if node is not root:
                            for _, mark in [*(below.steps or ()), (below.end, below.mark)]:
                                if mark is not None:
                                    node.mark = mark if node.mark is None else fold(node.mark, mark)
                        if below.wants:
                            wants.move(below, node, 0, below.end, self._page_bytes, limit=node.end)
                        below.leave_tree()
                        self._num_nodes -= 1
                if gone:
                    thinned[node] = None
            self._drop_root_if_idle(root)
        self._queue = self.policy.make_queue()  # whoever stood in the old ones is gone, or held
        self._wanted_queue = LeafHeap(self.policy.last_tick)
        return freed

    def _release_orphan(self, node: Node) -> Pages:
        """Let go of an orphaned path, and take the pages that nobody holds any more."""
        freed: list[bytes | bytearray] = []
        node.lock_ref -= 1
        while node.lock_ref == 0 and node.parent is not None:
            parent = node.parent
            freed.append(node.pages)
            parent.disown(bytes(node.key[: self._page_bytes]))
            node.leave_tree()
            node = parent
            node.lock_ref -= 1
        ids = np.frombuffer(bytearray().join(freed), np.int32)
        self._orphan_pages -= len(ids)
        if self._in_tree is not None:
            self._in_tree[ids] = False
        return ids
