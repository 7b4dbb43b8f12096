"""The pages of requests: on both sides every move between page table, allocator and tree is here.

A request's row of the page table, in pages, and what frees each region:

    0            num_locked      num_shared              len(key) // page_size          num_pages
    |  locked        |  joined       |  own, KV whole            |  own, tail                |
    |  the tree's    |  another      |  becomes the tree's when  |  partly written or empty; |
    |  (under our    |  request's,   |  cached, or is freed as   |  freed when the request   |
    |  PrefixLock)   |  on their way |  a duplicate              |  ends                     |

`len(key)` is the request's kv_len: its key holds the tokens with written KV, and no other. Joined
pages become locked (`lock_joined`) when the other request's pages have gone to the tree; nothing is
cached before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import numpy as np

from prefixkv.cache.node import PAGE_ID_BYTES, Root
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import TOKEN_BYTES, RadixKey
from prefixkv.cache.results import MatchResult, PrefixLock, Saves, packed_path
from prefixkv.config import PageOptions
from prefixkv.digest import PathHash, begin_hash
from prefixkv.errors import (
    CallerError,
    ConfigError,
    InternalError,
    OutOfPagesError,
    UserErrors,
    check_laws,
)
from prefixkv.pages.allocator import PageAllocator
from prefixkv.pages.groups import GroupStart, TailGroup, TailGroups, state_group
from prefixkv.pages.table import PageTable
from prefixkv.paging import Pages, pages_for
from prefixkv.settings import Continues, whole_count
from prefixkv.stats import MICROSECONDS, Histogram

HASH_EVERY_TOKENS: Final = 1024
"""Tokens that one path hash is away from the next on a path, at least. Hashing that many takes
3 us, and a path hash takes half a kilobyte."""


class KeptHash(NamedTuple):
    """A path hash of a request's prompt, of its first `depth` pages."""

    depth: int
    path_hash: PathHash


@dataclass(slots=True, eq=False)
class RequestPages:
    """One request's pages; what it has in groups is in the same row there.

    Made by `PageManager.open`; ended by exactly one of `cache_finished`, `drop` and `hold`.
    """

    row: int
    lock: PrefixLock | None
    num_locked: int
    num_joined: int
    num_pages: int
    epoch: int
    hashes: Sequence[KeptHash] = ()  # of its prompt's path; kept once its lock ends there
    duplicates: list[Pages] = field(default_factory=list)  # replaced, but writes may read them

    @property
    def num_shared(self) -> int:
        """Pages in front that are not its own: the tree's, or on their way there."""
        return self.num_locked + self.num_joined

    @property
    def num_own(self) -> int:
        """Pages that only it holds; ending it frees them."""
        return self.num_pages - self.num_locked - self.num_joined


class PageManager:
    """One worker's tree, allocator and page table, in agreement. Owner: the scheduler's thread.

    `hash_every_pages`: distance of path hashes, at least; it changes only what `digest` costs.
    """

    # Of tree, pages, slots and window groups; `assembly.py` puts it here.
    make_saves: ClassVar[Callable[..., Saves] | None] = None

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        max_pages_per_request: int | None = None,
        options: PageOptions = PageOptions(),  # noqa: B008  it cannot change
    ) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self.num_pages = num_pages - options.reserved_pages  # that requests may have
        self.evict_reserve_pages = options.evict_reserve_pages
        self.caching = options.caching
        # What the policy raises: the scheduler raises it once, from a call where nothing is half
        # done. So the tree never raises it in the middle of a move.
        self.errors = UserErrors()
        self.allocator = PageAllocator(num_pages, options.reserved_pages)
        most_pages = max_pages_per_request or self.num_pages
        self.table = PageTable(max_requests, most_pages, options.spare_rows)
        num_slots, num_saved = options.num_slots, options.num_saved
        self.windows = TailGroups(
            TailGroup(spec, page_size, max_requests, num_saved > 0) for spec in options.windows
        )
        # All groups of a request's row: those of windows, then the state's.
        states = [state_group(num_slots, max_requests)] if num_slots else []
        self.groups = TailGroups([*self.windows, *states])
        self.slots = states[0].allocator if states else None
        # Last: a policy object serves one cache, so nothing that could fail may come after it.
        self.cache = RadixCache(page_size, options.policy, num_pages, self.errors)
        self.hash_every_pages = pages_for(HASH_EVERY_TOKENS, page_size)
        self.saves = Saves()
        if num_saved:
            if self.make_saves is None:
                raise ConfigError("checkpoints: this installation has no part for them")
            self.saves = self.make_saves(self.cache, num_pages, num_saved, self.windows)
        self.clock: Callable[[], float] | None = None
        self.evictions = Histogram(MICROSECONDS)  # seconds that each took, by `clock`, if set
        self.evicted_pages = 0
        self.epoch = 0  # flushes so far; a request of an earlier epoch caches nothing any more
        self.version = 0  # grows whenever more pages may be free, or match, than before

    @property
    def available_pages(self) -> int:
        """Pages that could be taken now: free, or cached without a lock."""
        return self.allocator.free_pages + self.cache.evictable_pages

    @property
    def can_open(self) -> bool:
        """True if there is a row, and a slot, for one request more."""
        return bool(self.table.free_rows and (self.slots is None or self.slots.free_pages))

    def state_slot(self, row: int) -> int:
        """Return the slot of extra state of a request's row; -1 where there is none."""
        return -1 if self.slots is None else int(self.groups[-1].array[row, 0])

    def pages(self, pages: RequestPages) -> Pages:
        """Return a read-only view of all page ids of a request, int32, in order."""
        return self.table.pages(pages.row)

    # --- a request's life -------------------------------------------------------------------------

    def match(self, key: RadixKey, cacheable: bool = True) -> MatchResult | None:
        """Return the longest cached prefix; None if caching is off. Changes nothing."""
        return self.cache.match_prefix(key) if self.caching and cacheable else None

    def digest(self, key: RadixKey, match: MatchResult | None) -> tuple[bytes, list[KeptHash]]:
        """Return the digest of a checked key (`prompt_digest`), worked out from the deepest path
        hash of its match, and new path hashes to keep. O(tokens behind that hash).

        New ones are of the match, where another path may part, and of all whole pages, where a next
        turn goes on.
        """
        data, page_bytes = key.data, self._page_bytes
        known = None if match is None else self.cache.hashed(match)
        if known is None:
            at, path_hash = 0, begin_hash(key.namespace)
        else:
            at, path_hash = known[0], known[1].copy()
        kept: list[KeptHash] = []
        if match is not None:
            for depth in (match.depth, len(data) // page_bytes):
                if depth - at >= self.hash_every_pages:
                    path_hash.update(memoryview(data)[at * page_bytes : depth * page_bytes])
                    kept.append(KeptHash(depth, path_hash.copy()))
                    at = depth
        path_hash.update(memoryview(data)[at * page_bytes :])
        return path_hash.digest(), kept

    def keep_hashes(self, pages: RequestPages) -> None:
        """Keep those path hashes of a request at which its lock ends now."""
        if pages.lock is not None:
            for depth, path_hash in pages.hashes:
                self.cache.keep_hash(pages.lock, depth, path_hash)

    def open(
        self,
        match: MatchResult | None,
        num_new_pages: int,
        now_s: float,
        joined: RequestPages | None = None,
        joined_end: int = 0,
        is_load: bool = False,
        is_used: bool = False,
        start: GroupStart | None = None,
    ) -> RequestPages:
        """Lock a match, take new pages behind it, and return the request's pages, in a new row.

        Args:
            joined: a request on its way that has the first `joined_end` pages, more than the match.
                The row names its pages from the match's end on; they stay its own until
                `lock_joined`.
            is_load: the new pages are loaded from host memory for a request that is opened next,
                and joins them. They get a spare row, and nothing in groups.
            is_used: the load that was opened for this request has counted the use of the cache.
            start: where it begins in the groups. What it goes on from is locked.

        Raises CapacityError: no row is left. OutOfPagesError. RequestError: more pages than
        a row has. Nothing is locked or taken then, and no use is counted.
        """
        # All that may fail is looked at before anything moves: a lock counts as a use, and what an
        # eviction has taken does not come back.
        place = (None, 0) if match is None else self.cache.locate(match)
        num_locked = place[1]
        joined_pages = b""
        if joined is not None:
            joined_pages = self.table.packed(joined.row, num_locked, max(num_locked, joined_end))
        num_joined = len(joined_pages) // PAGE_ID_BYTES
        missing = num_new_pages - self.allocator.free_pages
        if missing > 0:
            evictable = self.cache.evictable_pages
            evictable -= 0 if match is None else match.unprotected_pages
            if missing > evictable:
                raise OutOfPagesError(num_new_pages, self.allocator.free_pages, evictable)
        if start is not None:
            if (short := self.groups.short_of(start)) is not None:
                needed = short.own_pages(start, self.groups.index(short))
                free = short.allocator.free_pages
                raise OutOfPagesError(needed, free, short.available_pages() - free)
        elif self.groups and not is_load:
            raise CallerError("a request needs pages in the groups: start is None")
        # From here on only `lock` and `_take` could fail, and both undo below.
        row = self.table.alloc_row(num_locked + num_joined + num_new_pages, is_load)
        # A use of the cache is counted once, of all that was found: if the request joins another,
        # that is when it locks what it joined.
        visit = None if is_used else joined is None
        lock: PrefixLock | None = None
        # Lock first, then take: else the eviction could take the match itself.
        try:
            if match is not None:
                lock = self.cache.lock_at(match, place, now_s, visit)
            if start is not None:
                self.groups.open(row, start, self.saves.make_room)
            new = self._take(num_new_pages, now_s)
        except BaseException:
            self.groups.free(row)
            self.table.free_row(row)
            self._unlock(lock)
            raise
        # Nothing below can fail: that the row is long enough was seen above. The ids go to the
        # table packed, as the tree has them.
        runs: list[bytes | bytearray | Pages] = []
        if lock is not None and lock.prefix_len:
            runs += reversed(packed_path(lock.node))
        runs.append(joined_pages)
        runs.append(new)
        num_pages = self.table.fill(row, runs)
        return RequestPages(row, lock, num_locked, num_joined, num_pages, self.epoch)

    def lock_joined(
        self, pages: RequestPages, key: RadixKey, now_s: float, *, is_used: bool = False
    ) -> None:
        """Lock in the tree the pages that the request joined, now that they have gone there.

        With `is_used` no use is counted: they went there by this request's own load, as a use.
        Raises InternalError: the tree does not have them. CallerError: the request has ended.
        Nothing is locked then.
        """
        # Raises for a request that has ended, before anything is locked.
        self.table.length(pages.row)
        num_shared = pages.num_shared
        prefix = key.prefix(num_shared * self.page_size)
        match = self.cache.match_prefix(prefix)
        # The caller says that they are in the tree. If they are not, or a flush came between, the
        # pages may belong to anything by now.
        if match.prefix_len != len(prefix) or pages.epoch != self.epoch:
            raise InternalError(
                f"{num_shared} pages were joined, {match!r} is what the tree has of them"
            )
        # The new lock before the end of the old one, so that the prefix is never evictable in
        # between.
        lock = self.cache.pin(match, now_s) if is_used else self.cache.lock(match, now_s=now_s)
        # The tree may have had some of these pages already. Then it kept its own, and those that
        # were joined are free now, so the row must name the tree's.
        self.table.write(pages.row, pages.num_locked, lock.pages[pages.num_locked :])
        self._unlock(pages.lock)
        pages.lock = lock
        pages.num_locked = num_shared
        pages.num_joined = 0

    def grow_many(self, many: Sequence[RequestPages], now_s: float) -> None:
        """Take one page at the end of the row, which is not full, of each of these requests, named
        once. Raises OutOfPagesError, with nothing taken."""
        self.table.append([pages.row for pages in many], self._take(len(many), now_s))
        for pages in many:
            pages.num_pages += 1

    def cache_unfinished(
        self,
        pages: RequestPages,
        key: RadixKey,
        now_s: float,
        *,
        priority: int = 0,
        being_read: bool = False,
    ) -> None:
        """Give a running request's whole pages to the tree, and extend its lock over them.

        Where the tree has a page already, the row is repointed to it and the request's own page is
        freed. With `being_read` (writes to a peer may still read it) that waits until the request
        ends.
        """
        # What was joined is another request's to cache; the key would cover pages that are not
        # ours.
        if pages.num_joined:
            raise InternalError(
                f"row {pages.row} has {pages.num_joined} pages of another request, on their way"
            )
        num_whole = len(key) // self.page_size
        can_cache = self.caching and pages.epoch == self.epoch
        if not can_cache or num_whole <= pages.num_locked:
            return
        own = self.table.packed(pages.row, pages.num_locked, num_whole)
        # The one check of these ids, so that the tree need not repeat it: a page that is OWNED is
        # in the pool, named once, and not in the tree.
        owned, num_own = self.allocator.checked(own)
        result = self.cache.insert_owned(key, own, owned, priority, now_s, pages.lock)
        # Nothing can evict between the insertion and this: one thread owns the tree.
        if pages.lock is None:
            pages.lock = self.cache.lock(result, now_s=now_s)
        # The tree took over the pages that it did not have. For the others the request has
        # duplicates.
        num_there = result.old_depth
        num_duplicates = num_there - pages.num_locked
        if not num_duplicates:
            self.allocator.cache_owned(owned, num_own)
        else:
            # The row first: what it names must not be freed. The states last, duplicates and
            # published pages each as one move.
            ids = np.frombuffer(own, np.int32)
            duplicates, published = ids[:num_duplicates], ids[num_duplicates:]
            there = result.pages[pages.num_locked : num_there]
            self.table.write(pages.row, pages.num_locked, there)
            if being_read:
                pages.duplicates.append(duplicates)
            else:
                self.allocator.free(duplicates)
            self.allocator.cache(published)
        pages.num_locked = num_whole
        if pages.hashes:
            self.keep_hashes(pages)
        self.version += 1

    def cache_finished(
        self,
        pages: RequestPages,
        key: RadixKey,
        now_s: float,
        *,
        priority: int = 0,
        continues: Continues = None,
        shared_tokens: int = 0,
    ) -> None:
        """End the request: the whole pages of `key` become cached prefix, what follows is freed.
        What the tree has of it already stays. `continues` is not about the first `shared_tokens`.
        """
        self.cache_unfinished(pages, key, now_s, priority=priority)
        # Before `drop`, which ends the lock that says where the use ended.
        if continues is not None and pages.lock is not None and pages.epoch == self.epoch:
            keep_pages = shared_tokens // self.page_size
            self.cache.hint(pages.lock, continues, keep_pages=keep_pages)
        self.drop(pages)

    @property
    def may_load(self) -> bool:
        return bool(self.table.free_spare_rows)

    def find(self, key: RadixKey) -> MatchResult:
        """Return the longest cached prefix. Changes nothing."""
        return self.cache.match_prefix(key)

    def pin_key(self, key: RadixKey, now_s: float) -> PrefixLock:
        """Lock what is cached while its pages are copied, until `unpin`: no use is counted."""
        return self.cache.pin(self.cache.match_prefix(key), now_s)

    def unpin(self, lock: PrefixLock) -> None:
        """End a lock of `pin_key`, and free what only it held: pages of before a flush."""
        self._unlock(lock)
        self.version += 1

    def free_worthless(self, num_pages: int, now_s: float) -> None:
        """Free up to so many pages as long as those are next that hints say are worth nothing."""
        evicted = self._evict(num_pages, now_s, only_worthless=True)
        self.allocator.uncache(evicted)
        self.allocator.free(evicted)
        self.version += 1

    def slide(self, pages: RequestPages, num_tokens: int) -> None:
        """Move a request's window rows on: the device is done with what comes before the window
        behind `num_tokens` tokens. Raises CallerError, with nothing changed, for tokens beyond the
        rows, or a request that has ended."""
        self.windows.slide(pages.row, whole_count("num_tokens", num_tokens))

    def drop(self, pages: RequestPages) -> None:
        """End the request and free its own pages, which no peer can write."""
        self.groups.free(pages.row)
        self.allocator.free(self._close(pages))

    def hold(self, pages: RequestPages, owner: Hashable) -> None:
        """End the request while a peer may still write its pages: `owner` holds them until
        `release`."""
        # First: they raise for an owner without a hash, and a request that has ended, which must
        # change nothing.
        self.allocator.holds(owner)
        self.table.length(pages.row)
        self.groups.hold(pages.row, owner)
        own = self._close(pages)
        if own or self.groups:
            # With groups also for no pages: `release` asks the allocator if it knows the owner.
            self.allocator.hold(own, owner)

    def release(self, owner: Hashable) -> int:
        """Free what `owner` holds, and return how many dense pages; 0 if it is
        unknown. Only with proof that no write can land there any more."""
        if not self.allocator.holds(owner):
            return 0
        self.version += 1
        for group in self.groups:
            group.allocator.release(owner)
        return self.allocator.release(owner)

    def quarantine(self, owner: Hashable) -> int:
        """Mark what `owner` holds as overdue, and return how many pages: they stay held."""
        if not self.allocator.holds(owner):
            return 0
        for group in self.groups:
            group.allocator.quarantine(owner)
        return self.allocator.quarantine(owner)

    def holds_all(self, owner: Hashable, pages: Pages) -> bool:
        """Return whether the pages that `owner` holds are just these. O(pages in the pool)."""
        return np.array_equal(np.sort(pages), self.allocator.held_by(owner))

    def flush(self) -> int:
        """Empty the tree after a weight update, and return how many pages were freed at once.
        Running requests finish, but cache nothing. Locked pages come back as their requests end."""
        # The epoch first: from here on no request of before adds KV of the old weights.
        self.epoch += 1
        freed = self.cache.reset()
        self.saves.reset()
        self._free_cached(freed)
        return len(freed)

    # --- pages ------------------------------------------------------------------------------------

    def _take(self, num_pages: int, now_s: float) -> Pages:
        """Evicts what is missing and the reserve. Raises OutOfPagesError, with nothing evicted."""
        free = self.allocator.free_pages
        missing = num_pages - free
        if missing <= 0:
            return self.allocator.alloc(num_pages)
        evictable = self.cache.evictable_pages
        if missing > evictable:
            raise OutOfPagesError(num_pages, free, evictable)
        evicted = self._evict(min(missing + self.evict_reserve_pages, evictable), now_s)
        # The evicted pages left the tree, so they are ours. With a reserve free all and allocate
        # again: neighbours merge, and the allocator picks the longest runs.
        self.allocator.uncache(evicted)
        if len(evicted) > missing:
            self.allocator.free(evicted)
            return self.allocator.alloc(num_pages)
        # Without, all free pages and all evicted ones are needed: these need not become free first.
        taken = np.concatenate([self.allocator.alloc(free), evicted])
        taken.sort()
        return taken

    def _evict(self, num_pages: int, now_s: float, only_worthless: bool = False) -> Pages:
        began_s = self.clock() if self.clock is not None else 0.0
        evicted = self.cache.evict(num_pages, now_s, only_worthless=only_worthless)
        self.evicted_pages += len(evicted)
        self.saves.dropped(evicted)
        if self.clock is not None:
            self.evictions.observe(self.clock() - began_s)
        return evicted

    def _close(self, pages: RequestPages) -> bytes:
        # Read before the row is emptied. It raises for a request that has ended: its row is -1.
        own = self.table.packed(pages.row, pages.num_shared, pages.num_pages)
        self.table.free_row(pages.row)
        self._unlock(pages.lock)
        pages.lock = None
        pages.row = -1
        # The caller ends a request only when nothing reads its pages any more.
        for duplicates in pages.duplicates:
            self.allocator.free(duplicates)
        pages.duplicates.clear()
        self.version += 1
        return own

    def _unlock(self, lock: PrefixLock | None) -> None:
        if lock is not None and len(freed := self.cache.unlock(lock)):
            self._free_cached(freed)

    def _free_cached(self, pages: Pages) -> None:
        self.allocator.uncache(pages)
        self.allocator.free(pages)
        self.version += 1

    def check_invariants(self) -> None:
        """Audit tree, allocator and table, and that they agree. O(nodes x tokens of a path) for the
        path hashes."""
        self.cache.check_invariants()
        self._check_hashes()
        self.saves.check_invariants()
        self.allocator.check_invariants()
        self.table.check_invariants()
        for number, group in enumerate(self.groups):
            group.check_invariants(self.saves.kept(number) if group.is_shared else ())
            rows = len(group.rows_in_use)
            if rows != self.table.max_requests - self.table.free_rows or (
                group.allocator.owners() != self.allocator.owners()
            ):
                raise InternalError(
                    f"group {group.name!r} has {rows} rows and what is held by "
                    f"{group.allocator.owners()}; pages are held by {self.allocator.owners()}"
                )
        # After a flush the allocator also counts pages of orphans, which are in no tree.
        in_tree = self.cache.num_pages
        if in_tree > self.allocator.cached_pages or (
            self.epoch == 0 and in_tree != self.allocator.cached_pages
        ):
            raise InternalError(
                f"the tree has {in_tree} pages, the allocator {self.allocator.cached_pages} cached"
            )

    def check_owners(
        self, held: Sequence[RequestPages], locks: Collection[PrefixLock] = ()
    ) -> None:
        """Check that all that is taken is of these, and that `locks` are the only others. A page
        that no law finds an owner for has leaked; one that two find would be freed twice. Raises
        InternalError."""
        own = sum(pages.num_own + sum(map(len, pages.duplicates)) for pages in held)
        table, cache = self.table, self.cache
        laws = {
            "every owned page is a request's": own == self.allocator.owned_pages,
            "every lock is a request's": cache.locks
            == {pages.lock for pages in held if pages.lock is not None} | {*locks},
            "every row is a request's": table.free_rows + table.free_spare_rows
            == len(table.array) - len(held),
            "a row is as long as its pages": all(
                table.length(pages.row) == pages.num_pages for pages in held
            ),
        }
        check_laws(laws, f"{own} own", self.allocator)

    def _check_hashes(self) -> None:
        for node in self.cache.nodes():
            if node.hashes is None:
                continue
            runs, top = [bytes(node.key)], node
            while (above := top.parent) is not None:
                top = above
                runs.append(bytes(top.key))
            assert isinstance(top, Root)
            tokens = b"".join(reversed(runs))
            for depth, path_hash in node.hashes:
                expected = begin_hash(top.namespace)
                expected.update(tokens[: depth * self._page_bytes])
                if expected.digest() != path_hash.digest():
                    raise InternalError(f"the hash of {depth} pages is another path's: {node}")
