"""The decision to admit a waiting request, and the passes over all that wait (`waiting.py`).

Source: SGLang's `DecodePreallocQueue`, which admits first come, first served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from prefixkv.admission import make_admission
from prefixkv.cache.checkpoints import Checkpoint
from prefixkv.cache.results import MatchResult, Releases
from prefixkv.config import DecodeConfig
from prefixkv.decode.ending import Deferred
from prefixkv.decode.inflight import Flight
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.sources import Lack
from prefixkv.decode.waiting import LEFT, NOT_ENTERED, PAGES, Waiter, Waiting
from prefixkv.decode.workers import ALONE, Worker
from prefixkv.errors import check_laws
from prefixkv.pages.windows import WindowStart
from prefixkv.paging import pages_for

MAX_LOOKS = 16

MAX_WANTS = 128
"""Wanted prefixes that the tree learns of at once."""

ChoosesHere = Callable[[DecodeRequest, MatchResult | None, int, int, float], bool]
"""Tells whether decode's engine computes a request: by its match, the tokens that it lacks from its
checkpoint on, those that prefill would send behind the match, and the time."""


class Unproved(NamedTuple):
    """Pages that no request gives back, by reason."""

    held: int  # by rooms that have failed, until they are drained
    away: int  # promised to prefill workers that do not answer, and the prefixes locked for them
    stuck: int  # by requests with a broken device event, and the prefixes that they lock


class _Cut(NamedTuple):
    """What a request, computed here, takes, from a checkpoint on."""

    checkpoint: Checkpoint | None
    match: MatchResult | None
    depth: int  # of the match
    dense: int  # pages of its path that are cached
    new_pages: int
    needed_pages: int
    most_pages: int


class DecodePreallocQueue(Waiting):
    """Waiting requests, and the passes that admit those that fit. Owned by the scheduler's thread.

    The order rests on estimates. A request is admitted only after another look, which repeats the
    match if the tree has changed. A pass makes at most `MAX_LOOKS` looks that admit nothing, and
    none where nothing has changed since the last (`PageManager.version`); spare looks go to the
    oldest estimates. `add` and an admission cost O(log waiting), a pass without one that times the
    prefill workers that requests wait for.

    Args:
        config: of it what is about admission. A request that has waited `admission_patience_s` is
            overtaken by nothing, `reserve_tokens` is space kept for its output.
        deferred: requests that wait for the device.
        chooses_here: with checkpoints of extra state, whether a request is computed here.
    """

    def __init__(
        self,
        ledger: Ledger,
        config: DecodeConfig,
        deferred: Deferred,
        chooses_here: ChoosesHere,
    ) -> None:
        self._ledger = ledger
        pages = self._pages = ledger.pages
        super().__init__(
            ledger.workers, make_admission(config.admission), config.admission_patience_s,
            config.admission_wait_s, pages.errors,
        )  # fmt: skip
        self._budget, self._flights = ledger.budget, ledger.flights
        self._points, self._host, self._sources = ledger.points, ledger.host, ledger.sources
        self._deferred = deferred
        self._chooses_here = chooses_here
        # A request that lacks nothing leaves its last page, since its first token needs a computed
        # one.
        self._computes = self._sources.config is not None and self._points is None
        self._reserve_tokens = config.reserve_tokens
        self._unwanted: list[Waiter] = []  # not entered in the tree yet; some may have left
        self._admitted: list[DecodeRequest] = []  # to be returned by `take_admitted`
        self._num_started = 0
        self._all_back = True  # False: another pass has more to bring back
        self._spent_at = -1  # version at which a pass left nothing to look at

    def add(self, req: DecodeRequest, *, first: bool = False) -> None:
        """Queue a request. With `first` it was admitted before: it goes before all others, and its
        waiting time begins with the next pass.

        Cost: O(log waiting), and a match where the policy lets requests overtake. Raises what the
        policy raises, with nothing changed.
        """
        worker = self._workers.of(ALONE if req.is_alone else req.prefill)
        waiter = Waiter(req, self._num_arrivals + 1, worker, first)
        # Ranks are the user's code: they come before the first change. One that comes back has no
        # rank: the order among those is by return, which no policy changes.
        if not first:
            waiter.since_s = req.arrived_s
            if self._policy.overtakes:
                self._look(waiter)
            waiter.rank = self._rank(waiter)
        self._num_arrivals += 1
        self._spent_at = -1
        self._enter(waiter, self.most_pages)
        if self._pages.caching and req.request.cacheable:
            self._unwanted.append(waiter)
        # `add` is not given the time where a request comes back, so the next pass stamps it.
        if first:
            self._unstamped.append(waiter)
        elif req.request.deadline_s is None:  # else the scheduler has its deadline
            self._late.wake(req, req.arrived_s + self._timeout_s)

    def match_of(self, req: DecodeRequest) -> MatchResult | None:
        """Return the last match of a request; matched now if there is none."""
        waiter = self._waiters[req]
        if waiter.match is None:
            waiter.match = self._pages.match(req.key, req.request.cacheable)
        return waiter.match

    def remove(self, req: DecodeRequest) -> None:
        # The next pass has to look again: this may be the request that held up the others.
        self._spent_at = -1
        waiter = self._waiters[req]
        self._exit(waiter)
        self._late.forget(req)
        if waiter.want > 0:
            self._pages.cache.unwant(waiter.want)
        # It may still be in `_unwanted`, where this mark makes `_enter_wants` pass over it.
        waiter.want = LEFT
        if self._unwanted and self._unwanted[-1] is waiter:
            self._unwanted.pop()

    def move(self, req: DecodeRequest, prefill: str) -> None:
        """Let a request wait for another worker. It keeps its place in time."""
        waiter = self._waiters[req]
        self._exit(waiter)
        waiter.worker = self._workers.of(prefill)
        self._enter(waiter, self.most_pages)
        self.look_again()

    def look_again(self) -> None:
        """Make the next pass look again: a request may fit now that did not before."""
        self._num_started += 1

    @property
    def may_admit(self) -> bool:
        """True if a pass may admit a request. O(1)."""
        return bool(self._waiters and self._spent_at != self._version and self._pages.can_open)

    def expired(self, now_s: float) -> list[tuple[DecodeRequest, str]]:
        """Return the requests that have waited too long, each with the reason in words. They still
        have to be removed. O(1) if there are none."""
        if self._unstamped:
            self._stamp(now_s)
        if self._late.next_s > now_s:
            return []
        # The reasons are read before any is removed: they name what holds the pages now.
        return [(req, self.why(req, now_s)) for req in self._late.due(now_s)]

    def why(self, req: DecodeRequest, now_s: float) -> str:
        """Describe in words for what a request has waited, and how long."""
        waiter = self._waiters[req]
        worker, windows = waiter.worker, self._pages.windows
        since_s = now_s if waiter.since_s is None else waiter.since_s
        waited = f"waited {now_s - since_s:.3f} s for"
        # From the most particular reason to the general one.
        if waiter.blocked_by == PAGES:
            pages = f"{req.max_pages} of the pool's {self._pages.num_pages} pages"
            return f"{waited} pages: it may need {pages}, and {self._why_unproved()}"
        if worker.address == ALONE:
            return f"{waited} pages, to be computed here"
        if not worker.is_open:
            return f"{waited} prefill worker {worker.address}, which does not answer"
        if waiter.blocked_by or worker.has_share:
            has = f"{worker.num_pages} pages, its share of the pool"
            return f"{waited} pages: prefill worker {worker.address} has {has}"
        if windows and (short := windows.short_of(WindowStart(req.fill_len, req.max_pages))):
            return f"{waited} pages of window group {short!r}"
        return f"{waited} pages"

    # --- pages that can come back -----------------------------------------------------------------

    def unproved(self) -> Unproved:
        """Count the pages that no running request gives back. O(workers, and requests that the
        device is busy with); where a worker does not answer, also O(flights)."""
        pages, away, releases = self._pages.allocator, 0, Releases()
        # A prefill worker that does not answer may keep its flights open, and their pages, without
        # limit. Both counts share `releases`, since a prefix with two locks comes back only with
        # both.
        if closed := self._workers.closed:
            for flight in self._flights:
                if flight.is_open and flight.has_room and flight.prefill in closed:
                    away += flight.pages.num_own + releases.end(flight.pages.lock)
        stuck = self._deferred.num_pages(releases, is_broken=True)
        held = pages.held_pages + pages.quarantined_pages
        if held and self._host is not None:
            held -= self._host.held_pages  # for copies, which end by themselves
        return Unproved(held, away, stuck)

    @property
    def most_pages(self) -> int:
        """Pages that a single waiting request can come to have at most."""
        pages = self._pages.allocator
        may_lack = pages.held_pages or pages.quarantined_pages or self._deferred
        if not may_lack and not self._workers.closed:
            return self._pages.num_pages
        return self._pages.num_pages - sum(self.unproved())

    def _why_unproved(self) -> str:
        held, away, stuck = self.unproved()
        of = ", ".join(self._workers.owners())
        parts = [
            (held, "are held for failed rooms until it is proved that nothing writes them"),
            (away, "are promised to prefill workers that do not answer"),
            (stuck, "wait for a device event that has raised"),
        ]
        missing = "; ".join(f"{num} {what}" for num, what in parts if num)
        if of and (held or away):
            missing += f"; prefill workers that have pages in their power: {of}"
        return missing

    # --- prefixes that the tree evicts last -------------------------------------------------------

    # Entered before an admission evicts, and after a pass that leaves requests waiting. A request
    # that is admitted from free pages in the first pass after it came is never entered.

    def _enter_wants(self) -> None:
        """Tell the tree which prefixes are wanted. O(1) or a match for each."""
        pages = self._pages
        # At most `MAX_WANTS` per call, which bounds the cost of a pass; the rest follow with later
        # passes.
        for waiter in self._unwanted[:MAX_WANTS]:
            if waiter.want == NOT_ENTERED:
                if waiter.match is None:
                    waiter.match = pages.match(waiter.req.key)
                    assert waiter.match is not None
                waiter.want = pages.cache.want(waiter.match)
        del self._unwanted[:MAX_WANTS]

    def check_invariants(self) -> None:
        super().check_invariants()
        waiters = [one for one in self._waiters.values() if one.req.request.cacheable]
        laws = {
            "what waits is wanted, or not entered yet": not self._pages.caching
            or {one for one in waiters if one.want == NOT_ENTERED}
            == {one for one in self._unwanted if one.want != LEFT},
            "only what waits here is wanted": self._pages.cache.num_wants
            == sum(one.want > 0 for one in waiters),
        }
        check_laws(laws, waiters)

    # --- a pass -----------------------------------------------------------------------------------

    def admit(self, now_s: float) -> None:
        """Make a pass: lock prefixes, take pages, write rows of what fits, for `take_admitted`.
        Where a user's policy fails, a request keeps its rank."""
        # `_bring_back` returns False where more requests are aside than one pass may bring back.
        self._all_back = True
        self._now_s = now_s
        self._admit_what_fits(now_s)
        if not self._all_back:
            self._spent_at = -1  # the next pass brings more of them back
        # Only what still waits after the pass: telling the tree of one that was admitted would be
        # for nothing.
        if self._unwanted:
            self._enter_wants()

    def _admit_what_fits(self, now_s: float) -> None:
        pages = self._pages
        if not self._waiters:
            return
        # 1. Something has changed since the last pass: forget what that one had found out, and let
        # those aside return that now have prospects, before anything is tried.
        if self._spent_at != self._version:
            self._all_back = self._bring_back(self.most_pages)
        # 2. The common case, without the orders.
        if len(self._waiters) == 1:
            self._admit_alone(now_s)
            return
        # 3. Requests that nothing may overtake, one after the other. The first that does not fit,
        # and does not step aside, ends the pass: all that comes behind it waits for it.
        while (first := self._first_of_all(now_s)) is not None and pages.can_open:
            if first.seen_at == self._version or not self._try(first, *self._look(first), now_s):
                if self._step_aside(first):
                    continue  # the next one's turn
                self._spent_at = self._version
                return
        # 4. Nothing is first of all any more: the policy's order decides.
        if self._spent_at != self._version and pages.can_open:
            self._admit_in_order(now_s)
            # After an admission the next pass looks again: others may join the flight that has just
            # started.
            if not self._admitted:
                self._spent_at = self._version

    def _admit_alone(self, now_s: float) -> None:
        """There is nothing to overtake, and no choice."""
        (waiter,) = self._waiters.values()
        version = self._version
        if self._spent_at == version or not self._pages.can_open:
            return
        if waiter.worker.is_open and not waiter.blocked_by and waiter.seen_at != version:
            if self._try(waiter, *self._look(waiter), now_s):
                return
            if self._policy.overtakes and not waiter.is_returned:
                # Its new estimate has to be in the order for those that may come.
                self._renew(waiter)
            self._step_aside(waiter)
        self._spent_at = version

    def take_admitted(self) -> list[DecodeRequest]:
        """Return the requests admitted since the last call, in that order."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def _admit_in_order(self, now_s: float) -> None:
        """Admit what fits by its estimates; if nothing does, renew the oldest estimates."""
        # Each round searches from the front again: `_renew` may reorder, and an admission
        # leaves less space for all the others. Looks that admit nothing count down, so that a pass
        # is bounded.
        looks = MAX_LOOKS
        while looks and self.may_admit and (waiter := self._next_that_may_fit()) is not None:
            found = self._look(waiter)
            if self._renew(waiter) and self._next_that_may_fit() is not waiter:
                looks -= 1  # its new estimate ranks it behind another
            elif not self._try(waiter, *found, now_s):
                looks -= 1
        # An estimate that is too high gets no look above, however wrong it has become. So the looks
        # that are left go to the oldest ones, one per line and round.
        # An admission may take the last row, and changes what the others would get: so it ends the
        # pass, and the next one looks at all again.
        workers = self._turns()
        while looks > 0 and workers and not self._admitted:
            workers = [one for one in workers if not self._admitted and self._relook(one, now_s)]
            looks -= len(workers)

    def _relook(self, worker: Worker, now_s: float) -> bool:
        """Renew the oldest estimate of a line by another look. False if none is older."""
        waiter: Waiter | None = next(iter(worker.looks), None)
        if waiter is None or waiter.seen_at == self._version:
            return False
        found = self._look(waiter)
        # The look moved it to the end of `looks`, so the next round takes the next oldest.
        self._renew(waiter)
        self._try(waiter, *found, now_s)
        return True

    def _next_that_may_fit(self) -> Waiter | None:
        return self._first_that_may_fit(self._version, self._limits())

    @property
    def _version(self) -> int:
        pages, budget = self._pages.version, self._budget.version
        return pages + budget + self._num_started + self._workers.version

    def _limits(self) -> tuple[int, int]:
        available = self._pages.available_pages
        return available - self._budget.kept_back, available + self._budget.private_pages

    def _look(self, waiter: Waiter) -> tuple[Flight | None, int]:
        """Note in the waiter the pages that admitting it takes now. Returns the flight that it
        would join behind its match, and the end of both in pages."""
        req, match, page_size = waiter.req, waiter.match, self._pages.page_size
        key = req.key
        # 1. What is cached. A match of a tree that has not changed since is still right.
        if match is None or not match.is_current or waiter.leaves_last:
            match = waiter.match = self._pages.match(key, req.request.cacheable)
        # 2. What is on its way already, behind it.
        joined, shared_pages, unprotected = None, 0, 0
        if match is not None:
            joined, shared_pages = self._flights.find(key, match.depth)
            waiter.leaves_last = (
                self._computes
                and shared_pages * page_size == len(key)
                and not req.resumed
                and req.request.may_compute
            )
            if waiter.leaves_last:
                shorter = key.prefix(len(key) - 1)
                match = waiter.match = self._pages.match(shorter)
                assert match is not None
                joined, shared_pages = self._flights.find(shorter, match.depth)
            unprotected = match.unprotected_pages
        # It takes pages as those that prefill sends do, so it changes only what is to be sent.
        load_pages = waiter.load_end = 0
        if self._host is not None and match is not None and req.may_load:
            found = waiter.found_in_host = self._host.find(key, waiter.found_in_host)
            if found is not None and found.depth > shared_pages:
                # With the last page left, where something has to be computed.
                samples = self._computes and not req.resumed and req.request.may_compute
                load_end = min(found.depth, (len(key) - samples) // page_size)
                if load_end > shared_pages and self._is_worth_loading(
                    waiter, len(key) - shared_pages * page_size, load_end - shared_pages
                ):
                    waiter.load_end, load_pages = load_end, load_end - shared_pages
        # 3. What is missing, now and in the end.
        new_pages, waiter.needed_pages, waiter.most_pages = self._count_pages(
            req, shared_pages, unprotected
        )
        waiter.new_pages = new_pages - load_pages
        return joined, shared_pages

    def _count_pages(
        self, req: DecodeRequest, shared_pages: int, unprotected: int
    ) -> tuple[int, int, int]:
        """Count the pages that a request takes when admitted, that it needs with the reserve, and
        that it may ever need, besides those it shares. Locking the match takes `unprotected` pages
        out of the evictable ones, so they count as needed."""
        page_size = self._pages.page_size
        reserve = min(self._reserve_tokens, req.max_new_tokens - len(req.output))
        # The token sampled last is written by the first step after the return, so it counts; unless
        # it is the last of all. Of what may still be generated, that one needs no space either.
        fill_len, most_len = req.fill_len, req.most_kv_len
        first_len = min(fill_len + req.resumed, most_len)
        kept = pages_for(max(first_len, min(fill_len + reserve, most_len)), page_size)
        less = shared_pages - unprotected
        return pages_for(first_len, page_size) - shared_pages, kept - less, req.max_pages - less

    def _cut_to_compute(self, waiter: Waiter, shared_pages: int, now_s: float) -> _Cut | None:
        """Return what a request takes if it is computed here from a checkpoint on; None if prefill
        sends it. It joins and loads nothing: a flight brings pages, and no state behind them."""
        points, req, match = self._points, waiter.req, waiter.match
        assert points is not None
        found = points.find(req, match)
        missing = points.tokens_behind(req, found)
        num_sent = req.fill_len - shared_pages * self._pages.page_size
        if not self._chooses_here(req, match, missing, num_sent, now_s):
            return None
        depth = 0 if found is None else found.depth
        cut = match
        if match is not None and match.depth > depth:
            cut = self._pages.match(req.key.prefix(depth * self._pages.page_size))
        unprotected = 0 if cut is None else cut.unprotected_pages
        counted = self._count_pages(req, depth, unprotected)
        return _Cut(found, cut, depth, 0 if match is None else match.depth, *counted)

    def _sent_len(self, req: DecodeRequest, shared_pages: int) -> int:
        """Return up to which token prefill would send a request, where decode keeps checkpoints:
        all where prefill has the whole prompt already."""
        is_asked = self._sources.asks_late or req.generation > req.request.generation
        assert self._points is not None
        if req.is_alone or not is_asked:
            return req.fill_len
        return self._points.sent_len(req, shared_pages, self._sources.least_tokens)

    def _is_worth_loading(self, waiter: Waiter, num_missing: int, num_pages: int) -> bool:
        assert self._host is not None
        address = waiter.worker.address
        if address == ALONE:
            return True
        load_s = self._host.load_s(num_pages, self._now_s)
        num_loaded = num_pages * self._pages.page_size
        loaded = Lack(num_missing - num_loaded, num_loaded, load_s)
        return self._sources.worth_loading(Lack(num_missing), loaded, address, self._now_s)

    def _try(self, waiter: Waiter, joined: Flight | None, shared_pages: int, now_s: float) -> bool:
        """Admit a request that was just looked at, if it fits. Return whether."""
        pages, req, match = self._pages, waiter.req, waiter.match
        # 1. Measure. It fits if what it needs now leaves what is kept back, and all that it may
        # become could be had by retracting.
        space, most = self._limits()
        if waiter.is_returned:
            # All it had may still be cached, so that it needs almost nothing. It would come back at
            # once, and be retracted again for the page that was missing. So it has to leave a page
            # for each of the others: then these go on by a step first.
            space = min(space, pages.available_pages - self._budget.active)
        new, worker = waiter.new_pages, waiter.worker
        # In a window group what it needs is bounded, and taken now: it never grows there. What host
        # memory has prefill does not send.
        here_pages = max(shared_pages, waiter.load_end)
        windows, start, sent_len = pages.windows, None, req.fill_len
        if self._points is not None:
            sent_len = self._sent_len(req, here_pages)
        if windows:
            start = WindowStart(sent_len, req.max_pages)
        if (
            waiter.needed_pages > space
            or waiter.most_pages > most
            or self._workers.refuses(worker, new)
            or (start is not None and not windows.fit(start))
        ):
            waiter.seen_at = self._version
            return False
        req.computes, cut = False, None
        cut_start: WindowStart | None = None
        if self._points is not None:
            cut = self._cut_to_compute(waiter, here_pages, now_s)
            if cut is not None and windows:
                behind = cut.depth * pages.page_size
                held = () if cut.checkpoint is None else cut.checkpoint.windows
                cut_start = WindowStart(behind, req.max_pages, held)
            # It takes more pages than what is sent. Prefill can still be asked, except for one that
            # is alone.
            if cut is not None and (
                cut.needed_pages > space
                or cut.most_pages > most
                or (cut_start is not None and not windows.fit(cut_start))
            ):
                if worker.address == ALONE:
                    waiter.seen_at = self._version
                    return False
                cut = None
        # A page that was left is found elsewhere already.
        shareable = match is not None and not waiter.leaves_last
        if cut is not None:
            assert self._points is not None
            # What is cached behind the checkpoint, or on its way, is found there.
            shareable = match is not None and shared_pages == cut.depth
            joined, shared_pages, match, new = None, cut.depth, cut.match, cut.new_pages
            start, sent_len = cut_start, req.fill_len
            # What is loaded has no checkpoint: it is computed from where there is one.
            req.computes, waiter.load_end = True, 0
        req.sent_len = sent_len
        # 2. Before an eviction the tree has to know what the others wait for, or it evicts just
        # that.
        num_loaded = max(0, waiter.load_end - shared_pages)
        if self._unwanted and new + num_loaded > pages.allocator.free_pages:
            # Its own match is about to be locked, so it needs no protection.
            if waiter.want == NOT_ENTERED:
                waiter.want = LEFT
            self._enter_wants()
        # 3. Lock and take. The look has counted what locking costs, and nothing ran since, so this
        # cannot fail: there is nothing to undo below.
        if num_loaded:
            joined, shared_pages = self._load(waiter, joined, shared_pages, now_s), waiter.load_end
        joined_pages = joined.pages if joined is not None else None
        if cut is not None and self._points is not None:
            self._points.hold(req, cut.checkpoint)
        try:
            req.pages_held = pages.open(
                match,
                new,
                now_s,
                joined_pages,
                shared_pages,
                is_used=num_loaded > 0,
                window_start=start,
            )
        except BaseException:
            if self._points is not None:
                self._points.end(req)
            raise
        req.prefix_len = shared_pages * pages.page_size
        if cut is not None and self._points is not None:
            self._points.begin(req, cut.dense)
        if req.hashes:
            req.pages_held.hashes, req.hashes = req.hashes, []
            pages.keep_hashes(req.pages_held)
        # 4. Enter the flight, so that the next look of this pass can join it; then the sums that
        # the next `_limits` reads.
        flight = self._flights.start(req, joined, shareable)
        if worker.address != ALONE:
            self._workers.promise(flight.room_key, worker, new)
        self._num_started += 1
        req.become(DecodeState.PREALLOCATED)
        self.remove(req)
        self._budget.start(req.rid, req.max_pages - req.pages_held.num_pages, 0)
        self._admitted.append(req)
        return True

    def _load(
        self, waiter: Waiter, joined: Flight | None, shared_pages: int, now_s: float
    ) -> Flight:
        assert self._host is not None
        assert waiter.found_in_host is not None
        pages, num_pages = self._pages, waiter.load_end - shared_pages
        key = waiter.req.key.prefix(waiter.load_end * pages.page_size)
        joined_pages = joined.pages if joined is not None else None
        loaded = pages.open(
            waiter.match, num_pages, now_s, joined_pages, shared_pages, is_load=True
        )
        packed = pages.table.packed(loaded.row, shared_pages, waiter.load_end)
        new = np.frombuffer(packed, np.int32)
        room_key = self._host.load(waiter.found_in_host, key, new, now_s)
        load = self._flights.start_load(waiter.req, key, loaded, room_key, joined)
        self._ledger.arriving.add(load)
        return load
