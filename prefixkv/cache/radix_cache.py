"""A radix cache: which pages of the KV pool hold the KV of which tokens, by prefix.

Prompts that begin alike share the pages of what they have in common. The tree's edges are labelled
with runs of tokens, whole pages of them; a node owns the page ids of its run. Looking a prompt up
walks down from the root, comparing one run after the other, and what was walked is the cached
prefix. Four things happen to the tree:

    match_prefix   looks, and changes nothing
    lock, unlock   hold a prefix in place while a request uses it
    insert         adds what a request has computed
    evict          takes back the pages least worth keeping, from the ends of the branches

A node exists only where it must: where branches part, and where a lock ends. Everything else is
merged, so the shape of the tree says nothing about how it came about, and the walk is short.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import numpy as np

from prefixkv.cache import wants
from prefixkv.cache.events import CacheEvent, EventLog
from prefixkv.cache.eviction.policy import Use, forget
from prefixkv.cache.node import PAGE_ID_BYTES, Node, Root
from prefixkv.cache.radix_key import RadixKey, TokensLike
from prefixkv.cache.results import NO_PAGES, InsertResult, MatchResult, PrefixLock, as_page_ids
from prefixkv.cache.tree import Pages, RadixTree
from prefixkv.cache.wants import Want
from prefixkv.errors import CallerError, LockError, PageStateError

EVENT_LIMIT_PAGES = 1 << 20
"""How many pages of events wait for a listener before it is made to start afresh."""


class RadixCache(RadixTree):
    """See the module's text. One owner, no threads; every call leaves all laws of `audit.py` true.

    Sizes are properties: `num_pages` = `evictable_pages` + `protected_pages`; `orphan_pages`
    besides; `num_nodes`.

    Args:
        page_size: tokens a page.
        policy: a name (`eviction.policy_names()`) or a policy object of its own, not shared with
            another cache.
        pool_pages: how many pages the pool has; if given, ids out of range or in the tree already
            are refused.
    Raises:
        ConfigError: names the setting, the value and the bound.
    """

    # --- looking ---------------------------------------------------------------------------------

    def match_prefix(self, tokens: TokensLike, namespace: Hashable = None) -> MatchResult:
        """The longest cached prefix. Changes nothing, recency included.

        O(nodes on the path), and one memcmp over the tokens that match.

        Args:
            tokens: 1-D; a RadixKey costs no packing. Cut to whole pages.
            namespace: left out when `tokens` is a RadixKey, which carries its own.
        """
        key = self._key(tokens, namespace)
        data = key.data
        root = self._roots.get(key.namespace)
        if root is None:
            return MatchResult(self, data, key.namespace, None, 0)
        node, num_bytes = self._walk(root, data)
        return MatchResult(self, data, key.namespace, node, num_bytes // self._page_bytes)

    # --- holding ---------------------------------------------------------------------------------

    def lock(
        self, result: MatchResult | InsertResult, now_s: float = 0.0, *, visit: bool | None = None
    ) -> PrefixLock:
        """Keep what was matched or inserted from eviction until `unlock`. Counts as a use.

        If pages came or went since, walks again and locks what is there now: the lock's own
        `prefix_len` is what counts. Nothing matched makes an empty lock, a lock like any other.
        O(1) when the tree has not changed and somebody holds the path already, O(nodes not yet
        held) else.

        Args:
            result: of this cache.
            now_s: the caller's clock, for policies that need one.
            visit: whether the request is seen for the first time, which policies count; by default
                a lock of a match is a visit, and a lock of what was inserted is not.
        Raises:
            LockError: another cache's result.
        """
        found, depth = self.locate(result)
        node = found if found is not None else self._root(result.namespace)
        if depth < node.end:
            node = self._split(node, depth)  # a lock ends where a node ends
        self._hold(node)
        if depth:
            if visit is None:
                visit = type(result) is MatchResult
            use = self._next_use(result.data, node, depth, depth, visit, None, now_s)
            self._leave_mark(node, depth, use)
        lock = PrefixLock(self, node, depth * self.page_size, self._epoch, now_s)
        self._locks.add(lock)
        return lock

    def unlock(self, lock: PrefixLock) -> Pages:
        """End a lock, once. O(nodes that nobody else holds).

        Returns:
            The pages of an orphan (see `reset`) that this lock was the last to hold, now the
            caller's; usually none.
        Raises:
            LockError: unlocked already, or another cache's. Nothing was changed.
        """
        if lock not in self._locks:
            raise LockError(
                "the lock was unlocked before"
                if lock.cache is self
                else "the lock is another cache's"
            )
        self._locks.remove(lock)
        lock.held = False
        if lock.epoch != self._epoch:
            lock.freed = self._release_orphan(lock.node)
            return lock.freed
        node = lock.node
        self._release(node)
        if not node.children:
            if node.parent is None:
                self._drop_root_if_idle(node)
            elif not node.lock_ref:
                self._queue.add(node)
        else:
            self._merge_if_idle(node)  # nothing ends here any more, unless branches part
        return lock.freed

    def _next_use(
        self,
        data: bytes,
        node: Node,
        num_pages: int,
        old_pages: int,
        visit: bool,
        priority: int | None,
        now_s: float,
    ) -> Use:
        """A use of `num_pages`, of which `old_pages` are in the tree and end in `node`."""
        self._tick += 1
        if now_s > self._now_s:
            self._now_s = now_s
        use = self._use
        use.tick = self._tick
        use.now_s = self._now_s
        use.num_pages = num_pages
        use.old_pages = old_pages
        use.visit = visit
        use.priority = priority
        use.data = data
        use.before = node.mark if old_pages == node.end else node.mark_at(old_pages)
        use.tree_pages = self._evictable_pages + self._protected_pages
        return use

    def _leave_mark(self, node: Node, depth: int, use: Use) -> None:
        policy = self.policy
        node.leave_mark(depth, policy.mark(use), policy.fold, policy.supersedes)

    # --- adding ----------------------------------------------------------------------------------

    def insert(
        self,
        tokens: TokensLike,
        pages: Any,
        namespace: Hashable = None,
        priority: int = 0,
        now_s: float = 0.0,
        *,
        visit: bool | None = None,
        lock: PrefixLock | None = None,
    ) -> InsertResult:
        """Add what a request has computed. Counts as a use of all of it.

        The tree takes over the pages of what it did not have; for the rest see `InsertResult`.
        O(nodes on the path + tokens); a conversation that goes on grows its node in place.

        Args:
            tokens: as for `match_prefix`; every one in [0, 2**31).
            pages: int32 [whole pages of `tokens`] page ids, or one more (the partial page's,
                ignored). Copied.
            priority: for policies that rank by it; a page has the highest of those that inserted
                it.
            now_s, visit: as for `lock`; by default an insertion is a visit unless somebody holds
                the last page that was there already (the request itself, then, which has been
                seen).
            lock: the caller's, of the first of these tokens, which are not looked at again; `pages`
                are then those behind what it holds.
        Raises:
            TokenError, PageStateError: see there. Nothing was changed.
            LockError: the lock is not held, or not a lock of what is in this tree.
        """
        key = self._key(tokens, namespace)
        key.check()
        data = key.data
        num_pages, held_pages = len(data) // self._page_bytes, 0
        node: Node | None = self._roots.get(key.namespace)
        if lock is not None:
            node, held_pages = lock.node, lock.prefix_len // self.page_size
            if lock not in self._locks or lock.epoch != self._epoch or held_pages > num_pages:
                raise LockError(
                    f"{lock!r} is not a lock of the first of {len(key)} tokens in this tree"
                )
        ids = as_page_ids(pages, num_pages - held_pages)
        if not num_pages:
            return InsertResult(self, data, key.namespace, node, 0, 0)
        node, matched = (
            (None, 0) if node is None else self._walk(node, data, held_pages * self._page_bytes)
        )
        old_pages = matched // self._page_bytes
        ids = self._new_pages(
            ids, old_pages - held_pages
        )  # the last that may fail; from here on the tree changes
        if node is None:
            node = self._root(key.namespace)
        if visit is None:
            visit = not (old_pages and node.lock_ref)
        use = self._next_use(data, node, num_pages, old_pages, visit, priority, now_s)
        if old_pages == num_pages:
            self._leave_mark(node, num_pages, use)
            if num_pages == node.end and not node.lock_ref and not node.children:
                self._queue.add(node)
        else:
            new_key = data[matched : num_pages * self._page_bytes]
            node = self._attach(node, old_pages, new_key, ids, use)
        return InsertResult(self, data, key.namespace, node, num_pages, old_pages)

    def _attach(self, node: Node, depth: int, key: bytes, ids: Pages, use: Use) -> Node:
        """Put new pages at `depth` of `node`, and return the node that ends with them."""
        fold = self.policy.fold
        pages = ids.tobytes()
        *inner_marks, (_, mark) = self.policy.insertion_marks(use)
        if depth < node.end:
            node = self._split(node, depth)
        if inner_marks and inner_marks[0][0] == depth > 0:
            node.leave_mark(*inner_marks.pop(0), fold, False)  # what the old pages get
        parent, pages_above = node, node.pages[-PAGE_ID_BYTES:]
        if node.parent is not None and not node.children and not node.lock_ref:
            node.grow(key, pages, mark)  # a branch that goes on is the same branch
        else:
            node = Node(key, pages, depth + len(ids), parent)
            node.mark = mark
            parent.adopt(key[: self._page_bytes], node)
            self._num_nodes += 1
        for at, inner_mark in inner_marks:
            if at > depth:
                node.leave_mark(at, inner_mark, fold, False)
        if parent.wants:
            if parent is node:
                forget(node)  # it may stand among the wanted, and ends elsewhere now
            self._serve_wants(parent, depth, node, key)
        self._queue.add(node)
        self._evictable_pages += len(ids)
        self._inserted_pages += len(ids)
        self.version += 1
        if self._in_tree is not None:
            self._in_tree[ids] = True
        if self._log is not None:
            self._log_stored(node, pages_above, key, pages)
        return node

    # --- taking back -----------------------------------------------------------------------------

    def evict(self, num_pages: int, now_s: float = 0.0) -> Pages:
        """Take the pages least worth keeping: exactly `num_pages`, or all that are evictable.

        Always the last page of some leaf, so what is left is still prefixes; the policy says of
        which. A batch takes what single steps would. O(log leaves) a leaf, and O(1) a page.

        Returns:
            int32 page ids, now the caller's, in no particular order.
        Raises:
            CallerError: a negative count.
        """
        if num_pages < 0:
            raise CallerError(f"cannot evict {num_pages} pages")
        self._now_s = max(self._now_s, now_s)
        num_pages = min(num_pages, self._evictable_pages)
        if not num_pages:
            return NO_PAGES.copy()
        thinned: dict[Node, None] = {}  # lost a child, so may have become mergeable
        # All at once needs no order; but what is held is walked over then, so it has to be the
        # lesser part.
        if num_pages == self._evictable_pages >= self._protected_pages and self._order_is_free():
            taken = self._strip(thinned, self._log)
        else:
            taken = self._evict_in_order(num_pages, thinned)
        for node in thinned:
            self._merge_if_idle(node)
        ids = np.frombuffer(bytearray().join(taken), np.int32)
        self._evictable_pages -= len(ids)
        self._evicted_pages += len(ids)
        self.version += 1
        if self._in_tree is not None:
            self._in_tree[ids] = False
        return ids

    def reset(self) -> Pages:
        """Empty the tree, and forget all counts.

        Locked paths live on as orphans that no match finds: their pages are given back by the
        `unlock` that ends their last lock. What waits in a queue still waits. O(tree).

        Returns:
            int32 page ids of all that was not locked, now the caller's.
        """
        freed = self._strip({})
        for namespace, root in list(self._roots.items()):
            for node in self._subtree(root):  # what is still there is held
                node.wants = node.entry = None
            del self._roots[namespace]
        self.policy.reset()
        self._orphan_pages += self._protected_pages
        self._evictable_pages = self._protected_pages = self._num_nodes = 0
        self.version += 1
        self._epoch += 1
        if self._log is not None:
            self._log.cleared()
        for (namespace, _), want in self._wants.items():
            wants.hang(want, self._root(namespace), 0, self._page_bytes)
        ids = np.frombuffer(bytearray().join(freed), np.int32)
        if self._in_tree is not None:
            self._in_tree[ids] = False
        return ids

    # --- hints, all of them soft -----------------------------------------------------------------

    def hint(
        self, target: MatchResult | InsertResult | PrefixLock | Node, continues: bool | None
    ) -> None:
        """Say whether the session whose use ended there will go on: True, False, or None (unknown:
        ignored).

        It holds until the next use. A place that is gone, or where no use ended, is ignored.

        Raises:
            LockError: another cache's.
        """
        if isinstance(target, Node):
            node, depth = target, target.end
        elif isinstance(target, PrefixLock):
            if target.cache is not self:
                raise LockError("the lock is another cache's")
            node, depth = target.node, target.prefix_len // self.page_size
            if target.epoch != self._epoch or not node.start < depth <= node.end:
                return
        else:
            found, depth = self.locate(target)
            if found is None:
                return
            node = found
        if continues is None or depth < 1:
            return
        node.change_mark(depth, lambda mark: self.policy.hinted(mark, depth, continues))
        if depth == node.end and not node.lock_ref and not node.children:
            self._queue.add(node)

    def wanted(self, tokens: TokensLike, change: int, namespace: Hashable = None) -> None:
        """Say that a request with these tokens begins to wait (+1), or waits no longer (-1).

        Pages on the path of a waiting request go after all others, also those inserted while it
        waits. O(nodes on the path).

        Raises:
            CallerError: a change other than +1 and -1, or -1 for what nobody waits for.
        """
        key = self._key(tokens, namespace)
        data = key.data
        data = data[: len(data) - len(data) % self._page_bytes]
        want = self._wants.get((key.namespace, data))
        if change not in (1, -1) or (change == -1 and want is None):
            raise CallerError(
                f"{len(key)} tokens wanted by {want.count if want else 0}, a change by {change}"
            )
        if want is None:
            want = self._wants[(key.namespace, data)] = Want(data)
            node, num_bytes = self._walk(self._root(key.namespace), data)
            wants.hang(want, node, num_bytes // self._page_bytes, self._page_bytes)
        want.count += change
        if not want.count:
            del self._wants[(key.namespace, data)]
            home = want.node
            assert home is not None
            wants.unhang(want, self._page_bytes)
            if home.parent is None:
                self._drop_root_if_idle(home)
            elif not home.children and not home.lock_ref:
                forget(home)  # it may stand among the wanted
                self._queue.add(home)

    def _serve_wants(self, parent: Node, depth: int, node: Node, key: bytes) -> None:
        """New pages `key` came at `depth`: the wants that hang there and ask for them move down."""
        for want in wants.served_by(parent, depth, key[: self._page_bytes]):
            common = self._common_bytes(want.data, depth * self._page_bytes, len(want.data), key)
            wants.hang(want, node, depth + common // self._page_bytes, self._page_bytes)

    # --- listening and looking on ----------------------------------------------------------------

    def drain_events(self, afresh: bool = False) -> list[CacheEvent]:
        """What was stored and removed since the last call.

        The first call begins to listen and gives the tree as it is; a listener that fell too far
        behind, or asks to begin `afresh`, is given `Cleared`, and the tree as it is. Before the
        first call nothing is recorded.
        """
        if self._log is None or self._log.overrun or afresh:
            begun = self._log is not None
            self._log = EventLog(self._page_bytes, EVENT_LIMIT_PAGES)
            if begun or afresh:
                self._log.cleared()
            for node in self.nodes():
                assert node.parent is not None
                self._log_stored(node, node.parent.pages, node.key, node.pages)
        return self._log.drain()

    def _log_stored(
        self,
        node: Node,
        pages_above: bytes | bytearray,
        key: bytes | bytearray,
        pages: bytes | bytearray,
    ) -> None:
        assert self._log is not None
        parent_page = (
            int.from_bytes(pages_above[-PAGE_ID_BYTES:], sys.byteorder) if pages_above else None
        )
        root: Node = node
        while root.parent is not None:
            root = root.parent
        assert isinstance(root, Root)
        self._log.stored(root.namespace, parent_page, key, np.frombuffer(pages, np.int32).tolist())

    # --- shared ----------------------------------------------------------------------------------

    def _key(self, tokens: TokensLike, namespace: Hashable) -> RadixKey:
        if type(tokens) is not RadixKey:
            return RadixKey(tokens, namespace)
        if namespace is not None:
            raise CallerError(f"{tokens!r} carries its namespace, {namespace!r} was given besides")
        return tokens

    def _new_pages(self, ids: Pages, num_old: int) -> Pages:
        """The ids but the first `num_old`. Raises PageStateError if one cannot be new."""
        new = ids[num_old:]
        if self._in_tree is not None:
            try:
                in_tree = self._in_tree[ids]
            except IndexError:
                raise PageStateError(
                    f"page id {ids.max()} is not below pool_pages {len(self._in_tree)}"
                ) from None
            again = in_tree[num_old:]
            if np.count_nonzero(again):
                raise PageStateError(f"page id {new[int(again.argmax())]} is in the tree already")
        return new
