"""Requests that have decode's promise and wait for pages here, first come, first served.

Source: SGLang's `PrefillBootstrapQueue`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

from sortedcontainers import SortedDict

from prefixkv.cache.results import MatchResult
from prefixkv.pages.groups import GroupStart
from prefixkv.pages.manager import PageManager
from prefixkv.paging import page_floor, whole_pages
from prefixkv.prefill.request import PrefillRequest, PrefillState, Resume, SendPlan
from prefixkv.prefill.shared_prefixes import SharedPrefixes


class _Found(NamedTuple):
    """What is there of a request: as far as the engine can go on from it, what more is there to go
    on from, and all pages that are cached."""

    match: MatchResult | None
    more: Any = None
    dense_pages: int = 0


class PrefillBootstrapQueue:
    """Requests that wait for pages here. Owned by the scheduler's thread."""

    def __init__(self, pages: PageManager, shared_prefixes: SharedPrefixes, resume: Resume) -> None:
        self._pages, self._shared_prefixes, self._resume = pages, shared_prefixes, resume
        # All, with a number in the order of their promises. Those to be looked at are in `_due`, by
        # number; the others follow.
        self._ready: dict[PrefillRequest, int] = {}
        self._due: SortedDict = SortedDict()
        self._numbers = count()
        self._blocked_at = -1  # version of the pages at which the first that may start did not fit
        self._look_due = False  # one came, or a leader moved, since a whole pass

    def add(self, req: PrefillRequest, decode_prefix_len: int) -> None:
        """Enter a promised request, of which decode has `decode_prefix_len` tokens."""
        req.become(PrefillState.BOOTSTRAPPED)
        req.decode_prefix_len = decode_prefix_len
        self._ready[req] = next(self._numbers)
        self._enter(req)
        self._look_due = True

    def _enter(self, req: PrefillRequest) -> None:
        self._due[self._ready[req]] = req

    def remove(self, req: PrefillRequest) -> None:
        self._due.pop(self._ready.pop(req), None)
        self._shared_prefixes.forget(req)
        # It may be the one that did not fit, and held up those behind it.
        self.look_again()

    def look_again(self) -> None:
        """Make the next pass look at all: a prefix may be there now, or will not come."""
        self._blocked_at = -1
        self._look_due = True

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(self._ready)

    @property
    def may_open(self) -> bool:
        """True if a pass may hand out a request. O(1)."""
        may_fit = self._blocked_at != self._pages.version and self._pages.table.free_rows
        return bool(self._ready and self._look_due and may_fit)

    @property
    def wake_s(self) -> float:
        """Time at which a wait for another's prefix ends, so that a request may be handed out."""
        # Waking earlier would be for nothing: the first that may start lacks pages or a row.
        if self._blocked_at == self._pages.version or not self._pages.table.free_rows:
            return math.inf
        return self._shared_prefixes.wake_s

    def pop_bootstrapped(self, now_s: float, limit: int | None = None) -> list[PrefillRequest]:
        """Hand out at most `limit` requests to compute: prefix locked, pages for the prompt taken.

        One that follows another is passed over. One that does not fit is not: others would overtake
        it each time. O(requests that do not follow another).
        """
        popped: list[PrefillRequest] = []
        shared_prefixes = self._shared_prefixes
        # A request in `_due` waits for another only if one did when the pass began.
        may_wait = len(shared_prefixes) > 0
        if may_wait and shared_prefixes.wake_s <= now_s:
            self._look_due = True
        if not self.may_open:
            return popped
        # 1. Those that follow another hold no pages, so nothing behind them waits for them. They
        # are passed over until there is a reason to look.
        for req in shared_prefixes.to_look_at(now_s) if may_wait else ():
            self._enter(req)
        while self._due:
            if limit is not None and len(popped) >= limit:
                return popped
            number, req = self._due.peekitem(0)
            if may_wait and shared_prefixes.waits(req, now_s):
                del self._due[number]
                continue
            # 2. Look what is cached, before `follow` is asked: only behind that does another's
            # prefix help.
            found = self._find(req)
            num_cached = 0 if found.match is None else found.match.depth
            if self._resume.follows and shared_prefixes.follow(req, num_cached, now_s):
                del self._due[number]
                continue
            # 3. Does not fit: the pass ends, first come, first served. Nothing is tried again at
            # this version.
            if not self._pages.table.free_rows or not self._open(req, found, now_s):
                self._blocked_at = self._pages.version
                return popped
            del self._due[number], self._ready[req]
            self._blocked_at = -1
            # After `_open`, which sets the prefix: it leads from there. Others in this pass may
            # follow it at once.
            shared_prefixes.handed_out(req, self._pages.caching and req.request.cacheable)
            popped.append(req)
        self._look_due = False
        return popped

    def _open(self, req: PrefillRequest, found: _Found, now_s: float) -> bool:
        """Return False, and change nothing, if too few pages are available."""
        pages, page_size, match = self._pages, self._pages.page_size, found.match
        prefix_len = match.prefix_len if match is not None else 0
        unprotected = match.unprotected_pages if match is not None else 0
        num_new = req.max_pages - whole_pages(prefix_len, page_size)
        # Measured with the lock counted in, so that `open` below cannot fail: a request is never
        # half open.
        if num_new > pages.available_pages - unprotected:
            return False
        start = None
        if pages.windows:
            shared = () if found.more is None else found.more.windows
            start = GroupStart(prefix_len, req.max_pages, shared)
            if not pages.windows.fit(start):
                return False
        # First: an eviction for what is taken must not take what it goes on from.
        self._resume.hold(req, found.more)
        req.opened(pages.open(match, num_new, now_s, start=start), prefix_len)
        self._resume.opened(req, found.dense_pages)
        firsts = [group.first_page(req.num_tokens) for group in pages.windows]
        req.plan = SendPlan(req.num_tokens, req.decode_prefix_len, page_size, firsts)
        req.become(PrefillState.COMPUTING)
        return True

    def _find(self, req: PrefillRequest) -> _Found:
        """Never the last token: the engine has to compute that one to sample the next."""
        key, page_size = req.key, self._pages.page_size
        if len(key) % page_size == 0:
            key = key.prefix(len(key) - 1)
        match = self._pages.match(key, req.request.cacheable)
        if match is None or not match.prefix_len:
            return _Found(match)
        dense_pages = match.depth
        usable, more = self._resume.find(req, match)
        if usable < match.prefix_len:  # for a lock that covers the usable part and no more
            match = self._pages.match(key.prefix(page_floor(usable, page_size)))
        return _Found(match, more, dense_pages)
