"""Requests that have decode's promise and wait here: for pages, first come, first served, or for a
prefix that another request computes.

Source: SGLang's `PrefillBootstrapQueue`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from sortedcontainers import SortedDict, SortedList

from prefixkv.cache.radix_key import TOKEN_BYTES, Starts, common_pages
from prefixkv.cache.results import MatchResult
from prefixkv.errors import check_laws
from prefixkv.pages.groups import GroupStart
from prefixkv.pages.manager import PageManager
from prefixkv.paging import page_floor
from prefixkv.prefill.request import PrefillRequest, PrefillState, Resume, SendPlan


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
        self._due[self._ready[req]] = req
        self._look_due = True

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
            self._due[self._ready[req]] = req
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
        num_new = req.max_pages - prefix_len // page_size
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
        for part in self._resume.savers:
            part.hold(req, found.more)
        req.opened(pages.open(match, num_new, now_s, start=start), prefix_len)
        for part in self._resume.savers:
            part.opened(req, found.dense_pages)
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


# --- prefixes that another request computes -------------------------------------------------------

# A request that the engine has *leads* from the pages that are computed and in the tree. A queued
# request with as many, and the same next page, *follows*: it is handed out when the leader has
# passed what they share. It holds nothing meanwhile, and a leader that ends early leaves its place
# to a follower.
#
# The wait costs nothing unless the engine passes the leader over: a later request has computed as
# much as the follower lacks, or nothing was computed for `stall_s`. Then the wait is over.


@dataclass(slots=True, eq=False)
class _Lead:
    """A request that the engine has; `number` counts those that were handed out."""

    number: int
    passed_pages: int = 0  # computed, and in the tree
    progress: int = 0  # tokens that it has computed itself
    followers: SortedList = field(default_factory=SortedList)  # by `_Wait.end`


@dataclass(slots=True, eq=False)
class _Wait:
    """The wait of a follower for its leader, up to the page where the common part ends."""

    req: PrefillRequest
    leader: PrefillRequest
    end_pages: int
    num_tokens: int  # length of the common part, to be computed
    handed_out: int  # requests handed out when the wait began
    number: int  # counts the waits
    since_s: float

    @property
    def end(self) -> tuple[int, int, _Wait]:
        return self.end_pages, self.number, self

    @property
    def place(self) -> tuple[int, int, int, _Wait]:
        return self.num_tokens, self.handed_out, self.number, self


class SharedPrefixes:
    """Leaders and followers of one rank. Owned by the scheduler's thread.

    With a `stall_s` of 0 no request follows another.
    """

    def __init__(
        self,
        page_size: int,
        counters: MutableMapping[str, int],
        stall_s: float,
        resume: Resume,
    ) -> None:
        self._resume = resume
        self._counters = counters  # "followed": requests that waited; "overtaken": waits cut short
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._stall_s = stall_s
        # `_starts` has the leaders that can be found: those with a next page. A follower is
        # in `_waits` and `_by_tokens`, then in `_released` until the queue looks at it.
        self._leads: dict[PrefillRequest, _Lead] = {}
        self._starts: Starts[PrefillRequest] = Starts(page_size)
        self._waits: dict[PrefillRequest, _Wait] = {}  # oldest first
        self._by_tokens: SortedList = SortedList()  # by `_Wait.place`
        self._released: list[PrefillRequest] = []
        # Requests in the queue that have waited, with the leaders that they must not wait for
        # again.
        self._passed_over: dict[PrefillRequest, set[PrefillRequest]] = {}
        self._handed_out = self._num_waits = 0
        self.progress_s = -math.inf  # time at which anything was computed last

    def __len__(self) -> int:
        """Followers that wait, or have waited and are to be looked at."""
        return len(self._waits) + len(self._released)

    @property
    def wake_s(self) -> float:
        """Time at which a wait ends unless something is computed. O(1)."""
        # The first has begun first, so it ends first.
        for wait in self._waits.values():
            return max(wait.since_s, self.progress_s) + self._stall_s
        return math.inf

    # --- those in the queue -----------------------------------------------------------------------

    def to_look_at(self, now_s: float) -> list[PrefillRequest]:
        """Return the followers to look at: what they waited for is there, or will not come, or
        nothing has been computed for long. O(those)."""
        released, self._released = self._released, []
        # Those that have left the queue since are forgotten here.
        found = [req for req in released if req in self._passed_over]
        # The first has begun first, so it ends first.
        for req, wait in self._waits.items():
            if now_s - max(wait.since_s, self.progress_s) < self._stall_s:
                break
            found.append(req)
        return found

    def waits(self, req: PrefillRequest, now_s: float) -> bool:
        """Return True if what a follower waits for is still to come. O(1). False makes the queue
        match it again."""
        wait = self._waits.get(req)
        if wait is None:
            return False
        if now_s - max(wait.since_s, self.progress_s) < self._stall_s:
            return True
        self._overtake(wait)
        return False

    def follow(self, req: PrefillRequest, num_pages: int, now_s: float) -> bool:
        """Let a request follow another that computes a prefix from the `num_pages` on that the tree
        has of it. Returns True if it waits. O(leaders at that page), and a memcmp each."""
        if not (self._starts and self._stall_s and req.request.cacheable):
            return False
        data, page_bytes = req.key.data, self._page_bytes
        # Never the page of the last token: that one the engine has to compute, to sample the next.
        last = (req.num_tokens - 1) // self._page_size
        if num_pages >= last:
            return False
        passed_over = self._passed_over.get(req)
        for leader in self._starts.at(req.key, num_pages):
            if passed_over and leader in passed_over:
                continue
            end = min(last, leader.num_tokens // self._page_size)
            end = common_pages(data, leader.key.data, num_pages + 1, end, page_bytes)
            end -= end % self._resume.step_pages
            # Nothing that the follower could go on from, or not any more.
            lead = self._leads[leader]
            if end <= max(num_pages, lead.passed_pages):
                continue
            num_tokens = (end - num_pages) * self._page_size
            self._num_waits += 1
            wait = _Wait(req, leader, end, num_tokens, self._handed_out, self._num_waits, now_s)
            self._waits[req] = wait
            self._by_tokens.add(wait.place)
            lead.followers.add(wait.end)
            assert leader.plan is not None
            done = max(leader.prefix_len, leader.plan.computed)
            for part in self._resume.savers:
                part.add_stop(leader, end * self._page_size, done)
            if passed_over is None:
                self._passed_over[req] = set()
                self._counters["followed"] += 1
            return True
        return False

    def _drop(self, wait: _Wait) -> None:
        del self._waits[wait.req]
        self._by_tokens.remove(wait.place)
        self._leads[wait.leader].followers.remove(wait.end)

    def _overtake(self, wait: _Wait) -> None:
        self._drop(wait)
        self._passed_over[wait.req].add(wait.leader)
        self._counters["overtaken"] += 1

    def _end_waits_for(self, lead: _Lead, passed_pages: float = math.inf) -> None:
        while lead.followers and lead.followers[0][0] <= passed_pages:
            wait = lead.followers[0][-1]
            self._drop(wait)
            self._released.append(wait.req)

    def forget(self, req: PrefillRequest) -> None:
        """Drop the wait of a follower that leaves the queue."""
        if (wait := self._waits.get(req)) is not None:
            self._drop(wait)
        self._passed_over.pop(req, None)

    # --- those that the engine has ----------------------------------------------------------------

    def handed_out(self, req: PrefillRequest, caches: bool) -> None:
        """Enter a leader. `caches`: what it computes goes to the tree, so others may follow it."""
        self._passed_over.pop(req, None)
        self._handed_out += 1
        self._leads[req] = lead = _Lead(self._handed_out)
        # Also one that caches nothing is counted: its progress shows that an older leader is passed
        # over.
        if caches:
            lead.passed_pages = req.prefix_len // self._page_size
            self._set_next_page(req, lead, req.prefix_len)

    def advance(self, req: PrefillRequest, computed: int, goes_on_at: int | None = None) -> None:
        """Note that the first `computed` tokens of a request are there: a leader leads from there,
        or from `goes_on_at`, behind which others can go on. Followers that it has overtaken, and
        those that lack as much as it has computed since, wait no longer."""
        lead = self._leads.get(req)
        if lead is None:
            return
        # A request handed out after a wait began, which has computed as much as the follower lacks:
        # by now the follower would have had it too. Those that lack less were looked at before.
        before, lead.progress = lead.progress, max(lead.progress, computed - req.prefix_len)
        at = self._by_tokens.bisect_left((before + 1,))
        while at < len(self._by_tokens) and self._by_tokens[at][0] <= lead.progress:
            num_tokens, handed_out, _, wait = self._by_tokens[at]
            if handed_out < lead.number:
                self._overtake(wait)
                self._released.append(wait.req)
            else:  # nor was it handed out after those that lack as much, and began later
                at = self._by_tokens.bisect_left((num_tokens + 1,))
        if req in self._starts:
            there = max(computed, req.prefix_len)
            lead.passed_pages = there // self._page_size
            self._end_waits_for(lead, lead.passed_pages)
            self._set_next_page(req, lead, there if goes_on_at is None else goes_on_at)

    def end(self, req: PrefillRequest) -> None:
        """Drop a leader that computes nothing any more. Repeated, or never handed out: no-op."""
        if (lead := self._leads.get(req)) is not None:
            self._starts.discard(req)
            self._end_waits_for(lead)
            del self._leads[req]

    def flush(self) -> None:
        """Let followers find no leader: what leaders compute goes to no tree any more."""
        for req, lead in self._leads.items():
            self._starts.discard(req)
            self._end_waits_for(lead)

    def _set_next_page(self, req: PrefillRequest, lead: _Lead, num_tokens: int) -> None:
        self._starts.discard(req)
        num_pages = num_tokens // self._page_size
        if (num_pages + 1) * self._page_size <= req.num_tokens:
            self._starts.add(req, req.key, num_pages)
        else:
            self._end_waits_for(lead)

    # --- checks -----------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Check every law. Raises InternalError with the state."""
        starts = self._starts
        starts.check_invariants({req: req.key for req in starts})
        laws = {
            "what is found leads": {*starts} <= self._leads.keys(),
            "only what is with the engine leads": all(
                req.pages_held is not None for req in self._leads
            ),
            "each wait has its place": list(self._by_tokens)
            == sorted(wait.place for wait in self._waits.values()),
            "a leader's followers wait": len(self._waits)
            == sum(len(lead.followers) for lead in self._leads.values()),
            "what has waited is in the queue, and holds nothing": all(
                req.state is PrefillState.BOOTSTRAPPED and req.pages_held is None
                for req in self._passed_over
            ),
        }
        check_laws(laws, list(self._leads), list(self._waits))
        for req, wait in self._waits.items():
            leader, end_bytes = wait.leader, wait.end_pages * self._page_bytes
            lead = self._leads.get(leader, _Lead(0))
            laws = {
                "what waits is known to have waited": req in self._passed_over,
                "what is waited for is of the same tokens": (
                    req.key.data.startswith(leader.key.data[:end_bytes])
                    and req.key.namespace == leader.key.namespace
                ),
                "its leader leads, and is to end it": (
                    leader in starts
                    and lead.passed_pages < wait.end_pages
                    and wait.end in lead.followers
                ),
            }
            check_laws(laws, req)
