"""A radix cache: which pages of the KV pool hold the KV of which tokens, by prefix.

Edges are labelled with runs of tokens, in whole pages; a node owns the page ids of its run.

    match_prefix   looks, and changes nothing
    lock, unlock   hold a prefix in place while a request uses it
    insert         adds what a request has computed
    evict          takes back the pages least worth keeping, from the ends of the branches

A node exists only where branches part or a lock ends. Everything else is merged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from numbers import Real
from operator import attrgetter
from typing import Any

import numpy as np

from prefixkv.cache import audit
from prefixkv.cache.events import LOG_PAGES, Change, ChangeLog, Cleared, TakenOut
from prefixkv.cache.eviction.policy import Policy, Said, Use, forget
from prefixkv.cache.node import PAGE_ID_BYTES, TreeNode, Want
from prefixkv.cache.radix_key import RadixKey, TokensLike
from prefixkv.cache.results import (
    NO_PAGES,
    InsertResult,
    MatchResult,
    PrefixLock,
    as_page_ids,
    check_page_ids,
)
from prefixkv.cache.tree import RadixTree, inserted
from prefixkv.errors import (
    CallerError,
    LockError,
    UserErrors,
    check_laws,
    shown,
    shown_namespace,
)
from prefixkv.paging import Pages, Where
from prefixkv.settings import Continues, check_continues, check_flag, check_time, whole_count


class RadixCache(RadixTree):
    """The prefix cache of one worker: a radix tree over its pages. One owner, no threads.

    Every call leaves all laws of `audit.py` true, also a call that raises. The sizes are
    attributes: `num_pages` = `evictable_pages` + `protected_pages`, and besides `orphan_pages` and
    `num_nodes`.

    Args:
        page_size: tokens per page.
        policy: a name (`eviction.policy.policy_names()`), or a policy object with settings of its
            own. An object serves one cache.
        pool_pages: pages in the pool. If given, ids that are out of range or in the tree already
            are refused.
        errors: counts an exception of a user's policy. The cache goes on with `lru`, for good.

    Raises ConfigError: names the setting, the value and the bound.

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
        policy: str | Policy = "",
        pool_pages: int | None = None,
        errors: UserErrors | None = None,
    ) -> None:
        super().__init__(page_size, policy, pool_pages, errors or UserErrors())
        # All locks that are held, those of orphans included: `unlock` accepts no others.
        self._locks: set[PrefixLock] = set()
        # A lock of an earlier epoch holds an orphan.
        self._epoch = 0  # counts resets
        self._last_want = 0  # its number
        # One object for all uses, filled in by `_next_use`.
        self._use = Use()
        # What a full list of changes has behind the pages, of what lies on them.
        self.more_changes: Callable[[], list[Change]] = list

    # --- looking ---------------------------------------------------------------------------------

    def match_prefix(self, tokens: TokensLike, namespace: Hashable = None) -> MatchResult:
        """Find the longest prefix of the tokens. Changes nothing.

        O(nodes on the path), and one memcmp over the tokens that match. `tokens`: 1-D; a RadixKey
        costs no packing. Cut to whole pages. `namespace`: left out when `tokens` is a RadixKey,
        which carries its own.

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

    # --- hashes of paths -------------------------------------------------------------------------

    def keep_hash(self, lock: PrefixLock, depth: int, path_hash: Any) -> None:
        """Keep a hash of a lock's namespace and first `depth` pages; it goes with the pages.

        A prompt that goes on from there need not be hashed from its beginning. Ignored unless the
        lock ends at `depth`. O(1).
        """
        node = lock.node
        if node.end != depth or not lock.held or lock.cache is not self or node.parent is None:
            return
        if node.hashes is None:
            node.hashes = [(depth, path_hash)]
        elif node.hashes[-1][0] < depth:
            node.hashes.append((depth, path_hash))

    def hashed(self, result: MatchResult) -> tuple[int, Any] | None:
        """Return the deepest hash of `keep_hash` on a result's path, and its depth in pages, or
        None. O(nodes on the path). Raises LockError for another cache's result."""
        node, depth = self.locate(result)
        while node is not None:
            for end, path_hash in reversed(node.hashes or ()):
                if end <= depth:
                    return end, path_hash
            node = node.parent
        return None

    # --- holding ---------------------------------------------------------------------------------

    def lock(
        self, result: MatchResult, now_s: float = 0.0, *, visit: bool | None = None
    ) -> PrefixLock:
        """Keep what was matched or inserted from eviction until `unlock`. Counts as a use.

        If pages came or went since the match, it walks again and locks what is there now, so read
        `prefix_len` of the lock, not of the match. An empty match gives an empty lock, which has to
        be unlocked too. O(1) if the tree has not changed and the path is held already, else O(nodes
        not yet held).

        Args:
            result: a result of this cache.
            now_s: the caller's clock, for policies that need one.
            visit: True if the request is seen for the first time, which policies count. By default
                a lock of a match is a visit, and a lock of what was inserted is not.

        Raises LockError: the result is another cache's. CallerError: the time is no number. Nothing
        was changed.

        >>> cache = RadixCache(page_size=2)
        >>> lock = cache.lock(cache.insert([1, 2, 3, 4], [10, 11]))
        >>> cache.evict(2).tolist()
        []
        >>> _ = cache.unlock(lock)
        >>> cache.evict(1).tolist()
        [11]
        """
        check_time(now_s)
        check_flag("visit", visit, or_none=True)
        if visit is None:
            visit = type(result) is MatchResult
        return self.lock_at(result, self.locate(result), now_s, visit)

    def pin(self, result: MatchResult, now_s: float = 0.0) -> PrefixLock:
        """Lock a prefix without counting a use, as for a copy of its pages. Otherwise as `lock`."""
        return self.lock_at(result, self.locate(result), now_s, None)

    def lock_at(
        self,
        result: MatchResult,
        place: tuple[TreeNode | None, int],
        now_s: float,
        visit: bool | None,
    ) -> PrefixLock:
        """`lock`, or with None for `visit` `pin`, at a `place` that `locate` has just found."""
        # The namespace may be empty: the lock then holds its root, so that it is not dropped.
        node, depth = place
        if node is None:
            node = self._root(result.namespace)
        # Split before holding, or pages below the match would be protected too.
        elif depth < node.end:
            node = self._split(node, depth)
        self._hold(node)
        # A use, of the pages that the lock holds. An empty lock used nothing. The history is kept
        # in the lock, because others may use the page before this request inserts.
        if depth and visit is not None:
            use = self._next_use(result.data, node, depth, depth, visit, None, now_s)
            policy = self.policy
            node.leave_mark(depth, policy.mark(use), policy.fold, policy.supersedes)
        prefix_len = depth * self.page_size
        lock = PrefixLock(self, node, prefix_len, self._epoch, now_s, NO_PAGES, True, node.mark)
        self._locks.add(lock)
        return lock

    def unlock(self, lock: PrefixLock) -> Pages:
        """End a lock on a prefix. Allowed once per lock. O(nodes that no other lock holds).

        Returns:
            int32 ids of the pages of an orphan (see `reset`) that only this lock held, now the
            caller's; usually none.

        Raises LockError: the lock was unlocked already, or is another cache's. Nothing was changed.
        """
        if not isinstance(lock, PrefixLock):
            raise LockError(f"lock is a {type(lock).__name__}, a PrefixLock is needed")
        if lock not in self._locks:
            why = "was unlocked before" if lock.cache is self else "is another cache's"
            raise LockError(f"the lock {why}")
        # Out of the set first: whatever happens below, a second unlock is refused and cannot lower
        # a count that other locks rely on.
        self._locks.remove(lock)
        lock.held = False
        # An orphan is in no tree: what nothing else holds goes back to the caller.
        if lock.epoch != self._epoch:
            lock.freed = self._release_orphan(lock.node)
            return lock.freed
        node = lock.node
        self._release(node)
        # 1. An empty root is dropped.
        # 2. A leaf that nothing holds is evictable from now on.
        # 3. An inner node stood by itself only for this lock, unless branches part there.
        if not node.children:
            if node.parent is None:
                self._drop_root_if_idle(node)
            elif not node.lock_ref:
                self._queue.add(node)
        else:
            self._merge_if_idle(node)
        self.policy.work_ahead()
        return lock.freed

    def _next_use(
        self,
        data: bytes,
        node: TreeNode,
        num_pages: int,
        old_pages: int,
        visit: bool,
        priority: int | None,
        now_s: float,
    ) -> Use:
        """Return the next use; `old_pages` of its pages are in the tree and end in `node`. The
        object is the same for every use; policies copy what they keep."""
        self.tick += 1
        # Callers' clocks may step back. For policies time only goes on, so no age is negative.
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
    ) -> InsertResult:
        """Add what a request has computed. Counts as a use of all of it.

        The tree takes over the pages of tokens that it did not have; for the others see
        `InsertResult`. O(nodes on the path + tokens). A conversation that continues grows its node
        in place.

        Args:
            tokens: as for `match_prefix`; each in [0, 2**31).
            pages: int32 [whole pages of `tokens`] page ids, or one more (that of the partial page,
                which is ignored). Copied.
            priority: for policies that rank by it. A page has the highest priority that it was
                inserted with.
            now_s, visit: as for `lock`. By default an insertion is a visit unless the last page
                that was there already is held: then the request itself holds it, and was counted.
            lock: the caller's lock on the first of these tokens. They are not compared again, and
                `pages` begin behind what the lock holds.
            extend_lock: make `lock` hold all of the key, `prefix_len` included, as part of this
                use.
        Raises:
            TokenError: a token is no int in range.
            PageStateError: too few or too many ids, an id twice, out of range, or in the tree.
            LockError: the lock is not held, or is no lock on these tokens in this tree.
            CallerError: a time or a priority that is no number. Nothing was changed by any of them.

        >>> cache = RadixCache(page_size=2)
        >>> _ = cache.insert([1, 2, 3, 4], [10, 11])
        >>> result = cache.insert([1, 2, 5, 6], [20, 21])  # page 20 has what 10 has: still yours
        >>> result.prefix_len, result.pages.tolist()
        (2, [10, 21])
        """
        # 1. Everything that can be refused, before anything changes.
        check_time(now_s)
        if type(priority) is not int and not isinstance(priority, Real):
            raise CallerError(f"priority is {shown(priority)}, a number is needed")
        check_flag("visit", visit, or_none=True)
        check_flag("extend_lock", extend_lock)
        key = self._key(tokens, namespace)
        num_pages, held_pages = len(key.data) // self._page_bytes, 0
        if lock is not None:
            if not isinstance(lock, PrefixLock):
                raise LockError(f"lock is a {type(lock).__name__}, a PrefixLock is needed")
            held_pages = lock.prefix_len // self.page_size
            if lock not in self._locks or lock.epoch != self._epoch or held_pages > num_pages:
                raise LockError(
                    f"{lock!r} is not a lock of the first of {len(key)} tokens in this tree"
                )
        pages = as_page_ids(pages, num_pages - held_pages)
        check_page_ids(pages)
        return self.insert_owned(
            key, pages.tobytes(), None, priority, now_s, lock, visit, extend_lock
        )

    def insert_owned(
        self, key: RadixKey, pages: bytes, where: Where | None, priority: int, now_s: float,
        lock: PrefixLock | None, visit: bool | None = None, extend_lock: bool = True,
    ) -> InsertResult:  # fmt: skip
        """`insert` of what was checked, for a `PageManager`.

        `pages`: packed ids, one for each whole page of the key behind what the lock holds. `where`:
        the same as an index array, and none is in the tree; None: that is looked at here.
        """
        data, page_bytes = key.data, self._page_bytes
        # What the caller holds need not be walked again: its node ends where the lock ends. That
        # the tokens are the same is the caller's promise.
        node: TreeNode | None = self._roots.get(key.namespace)
        matched = held_pages = 0
        if lock is not None:
            held_pages = lock.node.end
            node, matched = self._walk(lock.node, data, held_pages * page_bytes)
        elif node is not None:
            node, matched = self._walk(node, data)
        num_pages, old_pages = len(data) // page_bytes, matched // page_bytes
        # Less than a page: nothing to share, and no use.
        if not num_pages:
            return InsertResult(self, data, key.namespace, node, 0, self.version, 0)
        # 2. The last check. Ids of pages that the tree has already are not taken over, so only the
        #    new ones may not be in the tree.
        if where is None:
            self._check_new(np.frombuffer(pages, np.int32), old_pages - held_pages)
        if node is None:
            node = self._root(key.namespace)
        if old_pages > held_pages:
            pages, where = pages[(old_pages - held_pages) * PAGE_ID_BYTES :], None
        # 3. The use, as the policy is to see it. `lock_ref` is read before `_attach` changes the
        #    node.
        if visit is None:
            visit = not (old_pages and node.lock_ref)
        use = self._next_use(data, node, num_pages, old_pages, visit, priority, now_s)
        if lock is not None and not visit and lock.mark is not None:
            # Others may have used these pages since: this request goes on from its own use.
            use.before = lock.mark
        # 4. The change: only a mark if all pages were there, else new pages below.
        extended = lock if extend_lock else None
        if old_pages == num_pages:
            policy = self.policy
            node.leave_mark(num_pages, policy.mark(use), policy.fold, policy.supersedes)
            # A mark at the very end of an evictable leaf changes its rank. A mark above its last
            # page does not, since a page's history is what lies at it or below.
            if num_pages == node.end and not node.lock_ref and not node.children:
                self._queue.add(node)
        else:
            new_key = data[matched : num_pages * page_bytes]
            node = self._attach(node, old_pages, new_key, pages, where, use, extended)
        if extended is not None:
            self._extend(extended, node, num_pages, now_s)
        return InsertResult(self, data, key.namespace, node, num_pages, self.version, old_pages)

    def _extend(self, lock: PrefixLock, node: TreeNode, depth: int, now_s: float) -> None:
        before = lock.node
        if node is not before:
            # The tree may go on below: the lock gets a node of its own, as in `lock`.
            if depth < node.end:
                node = self._split(node, depth)
            # Hold before releasing: the walk up then ends at `before`, which is held, and no page
            # is evictable in between. The other way round both walks would go up to the root.
            self._hold(node)
            lock.node = node
            self._release(before)
            self._merge_if_idle(before)
        # If the node grew under this lock, there was nothing to move: it still ends where the lock
        # does.
        lock.prefix_len, lock.taken_s = depth * self.page_size, now_s
        lock.mark, lock._pages = node.mark, None

    # --- taking back -----------------------------------------------------------------------------

    def evict(self, num_pages: int, now_s: float = 0.0, *, only_worthless: bool = False) -> Pages:
        """Take the pages least worth keeping: exactly `num_pages`, or all that are evictable.

        Each step takes the last page of the leaf that the policy ranks first, so what is left is
        still a set of prefixes. A batch takes the same pages as single steps would. O(log leaves)
        per leaf and O(1) per page. Returns int32 page ids, now the caller's, in no particular
        order. `only_worthless`: it ends where the next page is of a session that is neither ended
        nor parked. Raises CallerError: a count that is negative or no whole number; a time that is
        no number. Nothing was changed.

        >>> cache = RadixCache(page_size=1, policy="lru")
        >>> _ = cache.insert([1, 2, 3], [10, 11, 12])
        >>> _ = cache.insert([1, 9], [10, 20])
        >>> sorted(cache.evict(2).tolist())  # the branch used longest ago, and not what both share
        [11, 12]
        """
        num_pages = whole_count("num_pages", num_pages)
        check_time(now_s)
        self._now_s = max(self._now_s, now_s)
        num_pages = min(num_pages, self.evictable_pages)
        if not num_pages:
            return NO_PAGES.copy()
        merge_candidates: dict[TreeNode, None] = {}  # lost a child, so may have become mergeable
        taken = self._evict_in_order(num_pages, merge_candidates, only_worthless)
        if self._logs:
            self.note_change(TakenOut(taken))
        # Merge last. A node that lost one child may lose the others in the same call, and
        # `_evict_in_order` must not meet nodes that died in a merge.
        for node in merge_candidates:
            self._merge_if_idle(node)
        # Count what was taken, not what was asked for.
        ids = self._taken_out(taken)
        self.evictable_pages -= len(ids)
        self.evicted_pages += len(ids)
        self.version += 1
        return ids

    def reset(self, forget_locks: bool = False) -> Pages:
        """Empty the cache, and make the policy forget all it has learnt.

        Locked paths live on as orphans that no match finds: the `unlock` that ends their last lock
        gives their pages back. Wants stay. O(tree). `forget_locks`: for an engine that takes all
        pages back at once. Every lock ends here, those of orphans too (`held` is False, and
        unlocking it raises LockError).

        Returns:
            int32 page ids of all that was not locked, now the caller's; with `forget_locks` of
            everything, orphans included.
        """
        check_flag("forget_locks", forget_locks)
        if forget_locks:
            # Pages of former orphans come back here; all other pages are evictable then.
            orphans = [self.unlock(lock) for lock in list(self._locks)]
            return np.concatenate([*orphans, self.reset()])
        freed = self._clear()
        self.policy.reset()
        # Before the counters start again at 0. The flags of orphans stay set: a page that a lock
        # still holds must not be inserted.
        self.orphan_pages += self.protected_pages
        self.evictable_pages = self.protected_pages = self.num_nodes = 0
        for hints in self._hints:
            hints.clear()
        # Results become stale, and locks of before are orphans from here on.
        self.version += 1
        self._epoch += 1
        self.note_change(Cleared())
        # Waiting requests begin again at the top of their namespaces.
        for want in self._wants.values():
            want.attach(self._root(want.namespace), 0)
        return self._taken_out(freed)

    # --- hints, all of them soft -----------------------------------------------------------------

    def hint(
        self, target: MatchResult | PrefixLock, continues: Continues, *, is_parked: bool = False,
        keep_pages: int = 0,
    ) -> None:  # fmt: skip
        """Note whether the session that used `target` last will continue, and within how many
        seconds; soft, it changes only the order of evictions within its namespace.

        Leaves of ended sessions go first. Leaves of sessions that continue go last, those that are
        due last first, until they are used again or overdue (eviction/hints.py). A target that is
        gone, or where no use ended, is ignored, and so is None. `is_parked`: it has a copy
        elsewhere, so it goes right behind ended ones. `keep_pages`: the first ones of the path are
        not meant. Raises LockError: the target is another cache's. CallerError: `continues` is
        neither a flag nor seconds.
        """
        returns_s = check_continues(continues)
        # 1. Find the place. A lock of an earlier epoch, or after its end, may point to where
        #    nothing is.
        if isinstance(target, PrefixLock):
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
        # 2. The hint is about one use, so it needs that use's mark.
        if returns_s is None or depth < 1 or (mark := node.mark_at(depth)) is None:
            return
        due_s = self._now_s + returns_s if returns_s else inf
        self._hint(node, mark, Said(due_s, is_parked or not returns_s, keep_pages))
        # 3. The leaf may belong to another group of the queue now, also if the mark lies above its
        # end: one insertion may leave several marks, the last of them there.
        if not node.lock_ref and not node.children:
            self._queue.add(node)

    def want(self, match: MatchResult) -> int:
        """Register that a request waits for the tokens of `match`; soft, unlike a lock.

        Pages on the path of a waiting request are evicted after all others, also those inserted
        while it waits. O(1), for a stale match O(nodes on the path). Returns the number of the
        want, for `unwant`: 1, 2, 3, ... Raises LockError: the result is another cache's.
        """
        node, depth = self.locate(match)
        if node is None:
            node = self._root(match.namespace)
        self._last_want += 1
        want = Want(match.data, match.namespace, self._page_bytes)
        self._wants[self._last_want] = want
        want.attach(node, depth)
        return self._last_want

    def unwant(self, number: int) -> None:
        """End a want: its request waits no longer. O(wants of one prefix). Raises CallerError if no
        want has this number, or it has ended."""
        number = whole_count("number", number)
        want = self._wants.pop(number, None)
        if want is None:
            raise CallerError(f"want {shown(number)} is not here, {len(self._wants)} others are")
        home = want.detach()
        if home.parent is None:
            self._drop_root_if_idle(home)
        elif not home.children and not home.lock_ref:
            # It may stand in the queue of wanted leaves, which go last.
            forget(home)
            self._queue.add(home)

    # --- listening and looking on ----------------------------------------------------------------

    def record(self, limit_pages: int = LOG_PAGES) -> ChangeLog:
        """Return a log of what is stored and removed, for one more reader."""
        return ChangeLog(self._logs, self._whole, limit_pages)

    def _whole(self) -> list[Change]:
        # Parents before children, since an insertion names the page that it follows.
        stored = [
            inserted(node, above.pages, node.key, node.pages)
            for node in self.nodes()
            if (above := node.parent) is not None
        ]
        return [Cleared(), *stored, *self.more_changes()]

    @property
    def num_locks(self) -> int:
        return len(self._locks)

    @property
    def num_wants(self) -> int:
        return len(self._wants)

    @property
    def locks(self) -> frozenset[PrefixLock]:
        """All locks that are held, for audits."""
        return frozenset(self._locks)

    def oldest_lock(self) -> PrefixLock | None:
        """Return the lock that holds pages and was taken first. O(locks); from any thread."""
        # A copy, since the owner may lock and unlock meanwhile.
        holding = (lock for lock in self._locks.copy() if lock.prefix_len)
        return min(holding, key=attrgetter("taken_s"), default=None)

    def dump(self, max_nodes: int = 1000) -> str:
        """Return the tree as text, one node per line: its pages, lock_ref, children, and the mark
        of its last use."""
        max_nodes = whole_count("max_nodes", max_nodes)
        return "\n".join(audit.dump(self, max_nodes))

    def check_invariants(self) -> None:
        """Raise InternalError, with every broken law and the state. O(tree)."""
        if broken := audit.broken_laws(self, self._locks, self._epoch):
            state = f"{self.num_locks} locks, {self.num_pages} pages\n{self.dump()}"
            check_laws(dict.fromkeys(broken, False), state)

    # --- shared ----------------------------------------------------------------------------------

    def locate(self, result: MatchResult) -> tuple[TreeNode | None, int]:
        """Return where a result ends now: a node, None if the namespace is gone, and the depth in
        it (above its start, unless it is a root).

        O(1) if no page came or went since, apart from splits. LockError for another cache's result.
        """
        if not isinstance(result, MatchResult) or result.cache is not self:
            raise LockError(f"a {type(result).__name__} that is no result of this cache")
        node, depth = result.node, result.depth
        # 1. Pages came or went, or the node died in a merge (DEAD is below every depth): walk
        #    again.
        if node is None or result.version != self.version or node.end < depth:
            root = self._roots.get(result.namespace)
            if root is None:
                return None, 0
            node, num_bytes = self._walk(root, result.data)
            return node, num_bytes // self._page_bytes
        # 2. The content is the same, but splits may have moved the place into a node above.
        while (above := node.parent) is not None and depth <= above.end:
            node = above
        return node, depth

    def _key(self, tokens: TokensLike, namespace: Hashable) -> RadixKey:
        if type(tokens) is not RadixKey:
            key = RadixKey(tokens, namespace)
        elif namespace is None:
            key = tokens
        else:
            raise CallerError(
                f"{tokens!r} carries its namespace, {shown_namespace(namespace)} was given besides"
            )
        try:
            hash(key.namespace)
        except TypeError:
            named = shown_namespace(key.namespace)
            raise CallerError(f"namespace is {named}, it is not hashable") from None
        return key
