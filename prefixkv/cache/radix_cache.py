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

from collections.abc import Hashable
from numbers import Real
from operator import attrgetter
from typing import Any

import numpy as np

from prefixkv.cache import audit, dump, wants
from prefixkv.cache.events import Change, EventLog
from prefixkv.cache.eviction.policy import DEFAULT_POLICY, Policy, Use
from prefixkv.cache.eviction.queues import forget
from prefixkv.cache.node import PAGE_ID_BYTES, Node, Want
from prefixkv.cache.radix_key import RadixKey, TokensLike
from prefixkv.cache.results import (
    NO_PAGES,
    CacheStats,
    InsertResult,
    MatchResult,
    PrefixLock,
    as_page_ids,
)
from prefixkv.cache.tree import RadixTree
from prefixkv.errors import CallerError, LockError, PageStateError, UserErrors, check_laws
from prefixkv.paging import Pages, Where
from prefixkv.settings import check_time, whole_count

EVENT_LIMIT_PAGES = 1 << 20
"""How many pages of events wait for a listener before it is made to start afresh."""

NOTHING_CHANGED: list[Change] = []
"""Never written to."""


class RadixCache(RadixTree):
    """See the module's text. One owner, no threads; every call leaves all laws of `audit.py` true.

    Sizes are attributes: `num_pages` = `evictable_pages` + `protected_pages`; `orphan_pages`
    besides; `num_nodes`.

    Args:
        page_size: tokens a page.
        policy: a name (`eviction.policy.policy_names()`), or a policy object, for settings of its
            own. An object serves one cache.
        pool_pages: how many pages the pool has; if given, ids out of range or in the tree already
            are refused.
        errors: takes what the policy raises, and somebody else raises it. None: the next `lock`,
            `insert` or `evict` does, before it changes anything.
    Raises:
        ConfigError: names the setting, the value and the bound.

    A request finds what is cached of its prompt and holds it, computes the rest into pages 12 and
    13, and hands those over; 12 stays held while it runs:

    >>> cache = RadixCache(page_size=2, policy="lru")
    >>> cache.insert([1, 2, 3, 4], [10, 11])
    InsertResult(prefix_len=0)
    >>> prompt = [1, 2, 3, 4, 5, 6]
    >>> with cache.lock(cache.match_prefix(prompt)) as prefix:
    ...     inserted = cache.insert(prompt + [7, 8], [12, 13], lock=prefix)
    ...     lock = cache.lock(cache.match_prefix(prompt))
    >>> inserted.pages.tolist()
    [10, 11, 12, 13]
    >>> cache.evict(100).tolist()
    [13]
    >>> with lock:
    ...     cache.protected_pages
    3
    """

    def __init__(
        self,
        page_size: int = 16,
        policy: str | Policy = DEFAULT_POLICY,
        pool_pages: int | None = None,
        errors: UserErrors | None = None,
    ) -> None:
        super().__init__(page_size, policy, pool_pages, errors or UserErrors())
        self._raises = errors is None
        self._locks: set[PrefixLock] = set()
        self._epoch = 0  # counts resets
        self._last_want = 0  # its number
        self._use = Use()

    # --- looking ---------------------------------------------------------------------------------

    def match_prefix(self, tokens: TokensLike, namespace: Hashable = None) -> MatchResult:
        """The longest cached prefix. Changes nothing, recency included.

        O(nodes on the path), and one memcmp over the tokens that match.

        Args:
            tokens: 1-D; a RadixKey costs no packing. Cut to whole pages.
            namespace: left out when `tokens` is a RadixKey, which carries its own.

        >>> cache = RadixCache(page_size=2)
        >>> _ = cache.insert([1, 2, 3, 4], [10, 11])
        >>> cache.match_prefix([1, 2, 3]).pages.tolist()  # only whole pages match
        [10]
        """
        key = self._key(tokens, namespace)
        data = key.data
        root = self._roots.get(key.namespace)
        if root is None:
            return MatchResult(self, data, key.namespace, None, 0, self.version)
        node, num_bytes = self._walk(root, data)
        depth = num_bytes // self._page_bytes
        return MatchResult(self, data, key.namespace, node, depth, self.version)

    # --- holding ---------------------------------------------------------------------------------

    def lock(
        self, result: MatchResult, now_s: float = 0.0, *, visit: bool | None = None
    ) -> PrefixLock:
        """Keep what was matched or inserted from eviction until `unlock`. Counts as a use.

        If pages came or went since, walks again and locks what is there now: the lock's own
        `prefix_len` is what counts. Nothing matched makes an empty lock, a lock like any other.
        O(1) when the tree has not changed and the path is held already, O(nodes not yet held) else.

        Args:
            result: of this cache.
            now_s: the caller's clock, for policies that need one.
            visit: whether the request is seen for the first time, which policies count; by default
                a lock of a match is a visit, and a lock of what was inserted is not.
        Raises:
            LockError: another cache's result. CallerError: a time that is no number. Nothing was
                changed.

        >>> cache = RadixCache(page_size=2)
        >>> lock = cache.lock(cache.insert([1, 2, 3, 4], [10, 11]))
        >>> cache.evict(2).tolist()
        []
        >>> _ = cache.unlock(lock)
        >>> cache.evict(1).tolist()
        [11]
        """
        if self.errors.due is not None and self._raises:
            self.errors.raise_due()
        check_time(now_s)
        found, depth = self.locate(result)
        node = found if found is not None else self._root(result.namespace)
        if depth < node.end:
            node = self._split(node, depth)  # a lock ends where a node ends
        self._hold(node)
        lock = PrefixLock(self, node, depth * self.page_size, self._epoch, now_s, NO_PAGES)
        self._locks.add(lock)
        if depth:
            if visit is None:
                visit = type(result) is MatchResult
            use = self._next_use(result.data, node, depth, depth, visit, None, now_s)
            self._leave_mark(node, depth, use)
            lock.mark = node.mark
        return lock

    def unlock(self, lock: PrefixLock) -> Pages:
        """End a lock, once. O(nodes that no other lock holds).

        Returns:
            The pages of an orphan (see `reset`) that this lock was the last to hold, now the
            caller's; usually none.
        Raises:
            LockError: unlocked already, or another cache's. Nothing was changed.
        """
        if lock not in self._locks:
            why = "was unlocked before" if lock.cache is self else "is another cache's"
            raise LockError(f"the lock {why}")
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
                self._enqueue(node)
        else:
            self._merge_if_idle(node)  # no lock ends here any more; maybe branches part here
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
        self.tick += 1
        if now_s > self._now_s:
            self._now_s = now_s
        use = self._use
        use.tick = self.tick
        use.now_s = self._now_s
        use.num_pages = num_pages
        use.old_pages = old_pages
        use.visit = visit
        use.priority = priority
        use.data = data
        use.before = node.mark if old_pages == node.end else node.mark_at(old_pages)
        use.tree_pages = self.evictable_pages + self.protected_pages
        return use

    def _leave_mark(self, node: Node, depth: int, use: Use) -> None:
        policy = self.policy
        try:
            mark = policy.mark(use)
        except Exception as error:
            self.errors.caught(error)
            return
        node.leave_mark(depth, mark, self._fold, policy.supersedes)

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
        extend_lock: bool = False,
        checked: Where | None = None,
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
            now_s, visit: as for `lock`; by default an insertion is a visit unless the last page
                that was there already is held (by the request itself, then, which has been seen).
            lock: the caller's, of the first of these tokens, which are not looked at again; `pages`
                are then those behind what it holds.
            extend_lock: the lock holds all of it from then on, `prefix_len` included, by this same
                use.
            checked: the same pages as an index, from a caller that gives `pages` packed, as bytes,
                and has seen that they are below `pool_pages`, each named once and none in the tree:
                they are only counted.
        Raises:
            TokenError, PageStateError: see there.
            LockError: the lock is not held, or not a lock of what is in this tree.
            CallerError: a time or a priority that is no number. Nothing was changed by any of them.

        >>> cache = RadixCache(page_size=2)
        >>> _ = cache.insert([1, 2, 3, 4], [10, 11])
        >>> result = cache.insert([1, 2, 5, 6], [20, 21])  # page 20 has what 10 has: still yours
        >>> result.prefix_len, result.pages.tolist()
        (2, [10, 21])
        """
        if self.errors.due is not None and self._raises:
            self.errors.raise_due()
        check_time(now_s)
        if type(priority) is not int and not isinstance(priority, Real):
            raise CallerError(f"priority is {priority!r}, a number is needed")
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
        if checked is None:
            pages = as_page_ids(pages, num_pages - held_pages)
        elif len(pages) != (num_pages - held_pages) * PAGE_ID_BYTES:
            given = len(pages) / PAGE_ID_BYTES
            raise PageStateError(f"{given} page ids for {num_pages - held_pages} whole pages")
        if not num_pages:
            return InsertResult(self, data, key.namespace, node, 0, self.version, 0)
        extended = lock if extend_lock else None
        matched = 0
        if node is not None:
            node, matched = self._walk(node, data, held_pages * self._page_bytes)
        old_pages = matched // self._page_bytes
        # This is the last call that may fail; from here on the tree changes.
        new = old_pages - held_pages
        if checked is None:
            packed = self._new_pages(pages, new).tobytes()
        else:
            packed = pages[new * PAGE_ID_BYTES :]
        if node is None:
            node = self._root(key.namespace)
        if visit is None:
            visit = not (old_pages and node.lock_ref)
        use = self._next_use(data, node, num_pages, old_pages, visit, priority, now_s)
        if lock is not None and not visit and lock.mark is not None:
            use.before = lock.mark  # others may have used these pages since
        if old_pages == num_pages:
            self._leave_mark(node, num_pages, use)
            if num_pages == node.end and not node.lock_ref and not node.children:
                self._enqueue(node)
        else:
            new_key = data[matched : num_pages * self._page_bytes]
            where = None if new else checked
            node = self._attach(node, old_pages, new_key, packed, where, use, extended)
        if extended is not None:
            self._extend(extended, node, num_pages, now_s)
        return InsertResult(self, data, key.namespace, node, num_pages, self.version, old_pages)

    def _extend(self, lock: PrefixLock, node: Node, depth: int, now_s: float) -> None:
        """Let a lock hold what lies below it down to `depth`, which is in `node`."""
        before = lock.node
        if node is not before:
            if depth < node.end:
                node = self._split(node, depth)
            self._hold(node)
            lock.node = node
            self._release(before)
            self._merge_if_idle(before)
        lock.prefix_len, lock.taken_s = depth * self.page_size, now_s
        lock.mark, lock._pages = node.mark, None

    # --- taking back -----------------------------------------------------------------------------

    def evict(self, num_pages: int, now_s: float = 0.0) -> Pages:
        """Take the pages least worth keeping: exactly `num_pages`, or all that are evictable.

        A step takes the last page of a leaf, so what is left is still prefixes; the policy says of
        which leaf. A batch takes what single steps would. O(log leaves) a leaf, and O(1) a page.

        Returns:
            int32 page ids, now the caller's, in no particular order.
        Raises:
            CallerError: a negative count, or none; a time that is no number. Nothing was changed.

        >>> cache = RadixCache(page_size=1, policy="lru")
        >>> _ = cache.insert([1, 2, 3], [10, 11, 12])
        >>> _ = cache.insert([1, 9], [10, 20])
        >>> sorted(cache.evict(2).tolist())  # the branch used longest ago, and not what both share
        [11, 12]
        """
        num_pages = whole_count("num_pages", num_pages)
        check_time(now_s)
        if self.errors.due is not None and self._raises:
            self.errors.raise_due()
        self._now_s = max(self._now_s, now_s)
        num_pages = min(num_pages, self.evictable_pages)
        if not num_pages:
            return NO_PAGES.copy()
        thinned: dict[Node, None] = {}  # lost a child, so may have become mergeable
        # All at once needs no order. But `_strip` walks over what is held, so that has to be the
        # lesser part.
        if num_pages == self.evictable_pages >= self.protected_pages and self._order_is_free():
            taken = self._strip(thinned)
            if self._log is not None:
                self._log.removed(taken[::-1])
        else:
            taken = self._evict_in_order(num_pages, thinned)
            if self._log is not None:
                self._log.removed(taken)
        for node in thinned:
            self._merge_if_idle(node)
        ids = self._taken_out(taken)
        self.evictable_pages -= len(ids)
        self._evicted_pages += len(ids)
        self.version += 1
        return ids

    def reset(self, forget_locks: bool = False) -> Pages:
        """Empty the tree, and forget all counts.

        Locked paths live on as orphans that no match finds: their pages are given back by the
        `unlock` that ends their last lock. What waits in a queue still waits. O(tree).

        Args:
            forget_locks: for an engine that takes all pages back at once. Every lock ends here
                (`held` is False, and to unlock it is a LockError), also those of orphans.
        Returns:
            int32 page ids of all that was not locked, now the caller's; of everything, orphans
            included, with `forget_locks`.
        """
        if forget_locks:
            orphans = [self.unlock(lock) for lock in list(self._locks)]
            return np.concatenate([*orphans, self.reset()])
        freed = self._strip({})
        for namespace, root in list(self._roots.items()):
            for node in self._subtree(root):  # what is still there is held
                node.wants = node.entry = None
            del self._roots[namespace]
        try:
            self.policy.reset()
        except Exception as error:
            self.errors.caught(error)
        self.orphan_pages += self.protected_pages
        self.evictable_pages = self.protected_pages = self.num_nodes = 0
        if self._hints is not None:
            self._hints.clear()
        self.version += 1
        self._epoch += 1
        if self._log is not None:
            self._log.cleared()
        for want in self._wants.values():
            wants.hang(want, self._root(want.namespace), 0)
        return self._taken_out(freed)

    # --- hints, all of them soft -----------------------------------------------------------------

    def hint(self, target: MatchResult | PrefixLock | Node, continues: bool | None) -> None:
        """Say whether the session whose use ended at `target` will go on: True, False, or None
        (unknown: ignored).

        Leaves of sessions that are over go first, those of sessions that go on go last, until they
        are used again or `Policy.promise_s` have passed (eviction/hints.py). A place that is gone,
        or where no use ended, is ignored.

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
        mark = None if continues is None or depth < 1 else node.mark_at(depth)
        if continues is None or mark is None:
            return
        self._hint(mark, continues)
        # The use may have left its mark here on its way to the end of this leaf.
        if not node.lock_ref and not node.children:
            self._enqueue(node)

    def want(self, match: MatchResult) -> int:
        """A request begins to wait for what was matched, and for what will be there of its tokens.

        Pages on the path of a waiting request go after all others, also those inserted while it
        waits. O(1), for a stale match O(nodes on the path).

        Returns:
            The number of the want, for `unwant`: 1, 2, 3, ...
        Raises:
            LockError: another cache's result.
        """
        node, depth = self.locate(match)
        if node is None:
            node = self._root(match.namespace)
        self._last_want += 1
        want = Want(match.data, match.namespace, self._page_bytes)
        self._wants[self._last_want] = want
        wants.hang(want, node, depth)
        return self._last_want

    def unwant(self, number: int) -> None:
        """A request waits no longer. O(wants of one prefix).

        Raises:
            CallerError: there is no want of this number, or no more.
        """
        want = self._wants.pop(number, None)
        if want is None:
            raise CallerError(f"want {number} is not here, {len(self._wants)} others are")
        home = wants.unhang(want)
        if home.parent is None:
            self._drop_root_if_idle(home)
        elif not home.children and not home.lock_ref:
            forget(home)  # it may stand among the wanted
            self._enqueue(home)

    # --- listening and looking on ----------------------------------------------------------------

    def drain_changes(self, afresh: bool = False) -> list[Change]:
        """What was stored and removed since the last call, for an `EventFeed`.

        The first call begins to listen and gives the tree as it is; a listener that fell too far
        behind, or asks to begin `afresh`, is given `Cleared`, and the tree as it is. Before the
        first call nothing is recorded.
        """
        log = self._log
        if log is not None and not afresh and log.num_pages <= log.limit:
            return log.drain() if log.changes else NOTHING_CHANGED
        self._log = EventLog(EVENT_LIMIT_PAGES)
        if log is not None or afresh:
            self._log.cleared()
        for node in self.nodes():
            assert node.parent is not None
            self._log_stored(node, node.parent.pages, node.key, node.pages)
        return self._log.drain()

    def stats(self) -> CacheStats:
        return CacheStats(
            num_pages=self.num_pages,
            evictable_pages=self.evictable_pages,
            protected_pages=self.protected_pages,
            orphan_pages=self.orphan_pages,
            num_nodes=self.num_nodes,
            num_locks=len(self._locks),
            num_wants=self.num_wants,
            uses=self.tick,
            inserted_pages=self._inserted_pages,
            evicted_pages=self._evicted_pages,
        )

    @property
    def num_wants(self) -> int:
        """Of requests that wait."""
        return len(self._wants)

    @property
    def locks(self) -> frozenset[PrefixLock]:
        """All that are held, for audits."""
        return frozenset(self._locks)

    def oldest_lock(self) -> PrefixLock | None:
        """The first taken, by `now_s`, of the locks that hold pages. O(locks); from any thread."""
        holding = (lock for lock in self._locks.copy() if lock.prefix_len)
        return min(holding, key=attrgetter("taken_s"), default=None)

    def dump(self, max_nodes: int = 1000) -> str:
        """The tree as text, a node a line: depth, tokens, lock_ref, age in uses, and what the
        policy says of it."""
        return "\n".join(dump.lines(self, max_nodes))

    def check_invariants(self) -> None:
        """Hold the tree against its laws (`audit.py`). O(tree).

        Raises:
            InternalError: every law that is broken, and the state.
        """
        if broken := audit.broken_laws(self, self._locks, self._epoch):
            check_laws(dict.fromkeys(broken, False), self.stats(), audit.picture(self))

    # --- shared ----------------------------------------------------------------------------------

    def locate(self, result: MatchResult) -> tuple[Node | None, int]:
        """Where a result ends now: a node, and the depth in it (above its start, unless it is a
        root).

        Raises:
            LockError: another cache's result.
        """
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

    def _key(self, tokens: TokensLike, namespace: Hashable) -> RadixKey:
        if type(tokens) is not RadixKey:
            return RadixKey(tokens, namespace)
        if namespace is not None:
            raise CallerError(f"{tokens!r} carries its namespace, {namespace!r} was given besides")
        return tokens
