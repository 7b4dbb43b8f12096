"""Requests that wait for pages, and the decision to admit one.

Each waits in the lane of its prefill worker (`lanes.py`), or aside (`aside.py`). A pass tries them
in an order of their own (`admission_order.py`).

Source: SGLang's `DecodePreallocQueue`, which admits first come, first served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from prefixkv.admission import DEFAULT_ADMISSION, Admission, make_admission
from prefixkv.cache.checkpoints import Checkpoint
from prefixkv.cache.results import MatchResult, PrefixLock
from prefixkv.decode.admission_order import AdmissionOrder, arrival_of
from prefixkv.decode.aside import Aside
from prefixkv.decode.audit import check_queue
from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.host_tier import HostTier
from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.lanes import ALONE, Lane, Lanes, Waiter
from prefixkv.decode.prospects import Prospects
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.shares import PrefillShares
from prefixkv.decode.sources import Lack, Sources
from prefixkv.decode.state_checkpoints import DecodeCheckpoints
from prefixkv.decode.wants import Wants
from prefixkv.errors import InternalError
from prefixkv.pages.manager import PageManager
from prefixkv.pages.windows import WindowStart
from prefixkv.paging import pages_for
from prefixkv.protocol.timers import Timers

MAX_LOOKS = 16

ChoosesHere = Callable[[DecodeRequest, MatchResult | None, int, int, float], bool]
"""Tells whether decode's engine computes a request: by its match, the tokens that it lacks from its
checkpoint on, those that prefill would send behind the match, and the time."""


class _Cut(NamedTuple):
    """What a request, computed here, takes, from a checkpoint on."""

    checkpoint: Checkpoint | None
    match: MatchResult | None
    depth: int  # of the match
    dense: int  # pages of its path that are cached
    new_pages: int
    needed_pages: int
    most_pages: int


class DecodePreallocQueue:
    """Waiting requests, and the passes that admit those that fit. Owned by the scheduler's thread.

    The order rests on estimates. A request is admitted only after another look, which repeats the
    match if the tree has changed. A pass makes at most `MAX_LOOKS` looks that admit nothing, and
    none where nothing has changed since the last (`PageManager.version`); spare looks go to the
    oldest estimates. Requests that the running ones cannot make room for step aside (`aside.py`).
    `add` and an admission cost O(log waiting), a pass without one that times the prefill workers
    that requests wait for.

    Args:
        reserve_tokens: space kept for a request's output when it is admitted.
        patience_s: a request that has waited this long is overtaken by nothing.
        waiting_timeout_s: for requests without a `deadline_s`, and for all that come back.
        protect: whether the cached prefixes of waiting requests are evicted last (`wants.py`).
        computes: a request that lacks nothing leaves its last page, since its first token needs a
            computed one.
        sources: says whether a load from `host` is worth it.
        points: checkpoints of extra state; `chooses_here` then says at admission whether a request
            is computed here.
    """

    def __init__(
        self,
        pages: PageManager,
        budget: PreallocBudget,
        flights: InFlight,
        reserve_tokens: int,
        shares: PrefillShares,
        lanes: Lanes,
        prospects: Prospects,
        *,
        policy: str | Admission = DEFAULT_ADMISSION,
        patience_s: float = math.inf,
        waiting_timeout_s: float = math.inf,
        protect: bool = True,
        computes: bool = False,
        host: HostTier[PrefixLock] | None = None,
        sources: Sources | None = None,
        points: DecodeCheckpoints | None = None,
        chooses_here: ChoosesHere | None = None,
    ) -> None:
        self._points = points
        self._chooses_here = chooses_here
        self._computes = computes and points is None
        self._host = host
        self._sources = sources or Sources()
        self._now_s = -math.inf  # of the last pass
        self._pages = pages
        self._budget = budget
        self._flights = flights
        self._reserve_tokens = reserve_tokens
        self._shares = shares
        self._lanes = lanes
        self._prospects = prospects
        self._policy = make_admission(policy)
        self._waiting_timeout_s = waiting_timeout_s
        # Every waiting request is in `_waiters`, and in its lane or aside.
        self._waiters: dict[DecodeRequest, Waiter] = {}
        self._aside = Aside(pages.num_pages, lanes, shares, prospects)
        self._order = AdmissionOrder(
            self._policy, patience_s, lanes, self._aside.limited, shares, pages.errors
        )
        self.stepped_aside = self._aside.stepped  # counts, by reason
        self._unstamped: list[Waiter] = []  # waiters that came back since the last pass
        self.wants = Wants(pages, protect)
        self._deadlines: Timers[DecodeRequest] = Timers()
        self._admitted: list[DecodeRequest] = []  # to be returned by `take_admitted`
        self._loads: list[Flight] = []  # to be returned by `take_loads`
        self._num_arrivals = 0
        self._num_started = 0
        self._all_back = True  # False: another pass has more to bring back
        self._spent_at = -1  # version at which a pass left nothing to look at

    def add(self, req: DecodeRequest, *, first: bool = False) -> None:
        """Queue a request. With `first` it was admitted before: it goes before all others, and its
        waiting time begins with the next pass.

        Cost: O(log waiting), and a match where the policy lets requests overtake. Raises what the
        policy raises, with nothing changed.
        """
        lane = self._lanes.of(ALONE if req.is_alone else req.prefill)
        waiter = Waiter(req, self._num_arrivals + 1, lane, first)
        # Ranks are the user's code. They come before the first count; only a lane that was made for
        # this request has to be undone.
        try:
            # One that comes back has no rank: the order among those is by return, which no policy
            # changes.
            if not first:
                waiter.since_s = req.arrived_s
                if self._policy.overtakes:
                    self._look(waiter)
                waiter.rank = self._order.rank(req, waiter.new_pages)
        except BaseException:
            self._lanes.forget_if_new(lane)
            raise
        self._aside.enter(waiter)
        self._num_arrivals += 1
        self._spent_at = -1
        self._waiters[req] = waiter
        lane.num_waiters += 1
        self.wants.enter_soon(waiter)
        # `add` is not given the time where a request comes back, so the next pass stamps it.
        if first:
            self._unstamped.append(waiter)
        elif req.request.deadline_s is None:  # else the scheduler has its deadline
            self._deadlines.wake(req, req.arrived_s + self._waiting_timeout_s)

    def match_of(self, req: DecodeRequest) -> MatchResult | None:
        """Return the last match of a request; matched now if there is none."""
        waiter = self._waiters[req]
        if waiter.match is None:
            waiter.match = self._pages.match(req.key, req.request.cacheable)
        return waiter.match

    def remove(self, req: DecodeRequest) -> None:
        # The next pass has to look again: this may be the request that held up the others.
        self._spent_at = -1
        waiter = self._waiters.pop(req)
        # Counted down first: `forget_if_idle` reads it, and keeps a lane with waiters aside.
        waiter.lane.num_waiters -= 1
        self._aside.leave(waiter)
        self._lanes.forget_if_idle(waiter.lane)
        self._deadlines.forget(req)
        self.wants.forget(waiter)

    def move(self, req: DecodeRequest, prefill: str) -> None:
        """Move a request to another lane. It keeps its place in time."""
        waiter = self._waiters[req]
        self._aside.leave(waiter)
        # Left before the lane changes, since `leave` finds the place by `waiter.lane`; the former
        # lane is forgotten only after its count.
        former, waiter.lane = waiter.lane, self._lanes.of(prefill)
        former.num_waiters -= 1
        waiter.lane.num_waiters += 1
        self._lanes.forget_if_idle(former)
        self._aside.enter(waiter)
        self.look_again()

    def look_again(self) -> None:
        """Make the next pass look again: a request may fit now that did not before."""
        self._num_started += 1

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, req: object) -> bool:
        return req in self._waiters

    def __iter__(self) -> Iterator[DecodeRequest]:
        """Iterate over the requests that came back, the last first, then the others by arrival."""
        waiters = self._waiters.values()
        returned = [waiter for waiter in waiters if waiter.is_returned]
        rest = [waiter for waiter in waiters if not waiter.is_returned]
        returned.sort(key=arrival_of, reverse=True)
        rest.sort(key=arrival_of)
        return iter([waiter.req for waiter in [*returned, *rest]])

    def at(self, prefill: str) -> list[DecodeRequest]:
        """Return the requests that wait for this worker, aside or not, by arrival. O(waiting)."""
        waiters = [one for one in self._waiters.values() if one.lane.address == prefill]
        return [waiter.req for waiter in sorted(waiters, key=arrival_of)]

    def aside(self) -> dict[str, int]:
        """Count the requests that hold up no others, by reason. Any thread may call it."""
        return self._aside.counts()

    @property
    def may_admit(self) -> bool:
        """True if a pass may admit a request. O(1)."""
        return bool(self._waiters and self._spent_at != self._version and self._pages.can_open)

    # --- deadlines --------------------------------------------------------------------------------

    @property
    def wake_s(self) -> float:
        """Time, behind the last pass, at which the next request has waited too long, or is overdue,
        or a little earlier; infinity if none waits. O(lanes)."""
        overdue_s = self._order.overdue_s(self._now_s)
        return min(self._deadlines.next_s, self._lanes.wake_s, overdue_s)

    def expired(self, now_s: float) -> list[tuple[DecodeRequest, str]]:
        """Return the requests that have waited too long, each with the reason in words. They still
        have to be removed. O(1) if there are none."""
        # It may have been removed, and even added again as another waiter, since it came back.
        for waiter in self._unstamped:
            if self._waiters.get(waiter.req) is waiter:
                self._lanes.stamp(waiter, now_s)
                # Its own deadline_s was for its KV to come the first time.
                if waiter.req.request.deadline_s is None or waiter.req.committed_s is not None:
                    self._deadlines.wake(waiter.req, now_s + self._waiting_timeout_s)
        self._unstamped.clear()
        if self._deadlines.next_s > now_s:
            return []
        # The reasons are read before any is removed: they name what holds the pages now.
        late = [self._waiters[req] for req in self._deadlines.due(now_s)]
        return [(waiter.req, self.why(waiter.req, now_s)) for waiter in late]

    def unanswered(self, now_s: float) -> list[DecodeRequest]:
        """Return those that have waited too long for a worker that does not answer. They still have
        to be removed. O(1) if there are none."""
        return [waiter.req for waiter in self._lanes.unanswered(now_s)]

    def why(self, req: DecodeRequest, now_s: float) -> str:
        """Describe in words for what a request has waited, and how long."""
        waiter = self._waiters[req]
        since_s = now_s if waiter.since_s is None else waiter.since_s
        waited = f"waited {now_s - since_s:.3f} s"
        # From the most particular reason to the general one:
        # 1. Aside: the pages cannot come back without a proof.
        # 2. Its worker does not answer.
        # 3. Its worker has its share of the pool.
        # 4. Other requests run with the pages.
        if self._aside.waits_for_pages(waiter):
            pages = f"{req.max_pages} of the pool's {self._pages.num_pages} pages"
            return f"{waited} for pages: it may need {pages}, and {self._prospects.why()}"
        if waiter.lane.address == ALONE:
            return f"{waited} for pages, to be computed here"
        if not waiter.lane.is_open:
            return f"{waited} for prefill worker {waiter.lane.address}, which does not answer"
        if self._aside.waits_for_share(waiter):
            has = f"{self._shares.pages(waiter.lane.address)} pages, its share of the pool"
            return f"{waited} for pages: prefill worker {waiter.lane.address} has {has}"
        windows = self._pages.windows
        if windows and (short := windows.short_of(WindowStart(req.fill_len, req.max_pages))):
            return f"{waited} for pages of window group {short!r}"
        return f"{waited} for pages"

    def check_invariants(self) -> None:
        waiters = list(self._waiters.values())
        check_queue(self._pages, self._lanes, waiters, self._aside.waiters(), self.wants)
        if len(self._deadlines) > len(self._waiters):
            raise InternalError("deadlines are of waiting requests")

    # --- a pass -----------------------------------------------------------------------------------

    def admit(self, now_s: float) -> None:
        """Make a pass: lock prefixes, take pages, write rows of what fits, for `take_admitted`.
        Where a user's policy fails, a request keeps its rank."""
        # `new_pass` sets it to False where more requests are aside than one pass may bring back.
        self._all_back = True
        self._now_s = now_s
        self._admit_what_fits(now_s)
        if not self._all_back:
            self._spent_at = -1  # the next pass brings more of them back
        # Only what still waits after the pass: telling the tree of one that was admitted would be
        # for nothing.
        if self.wants.not_entered:
            self.wants.enter()

    def _admit_what_fits(self, now_s: float) -> None:
        pages = self._pages
        if not self._waiters:
            return
        # 1. Something has changed since the last pass: forget what that one had found out, and let
        # those aside return that now have prospects, before anything is tried.
        if self._spent_at != self._version:
            self._all_back = self._aside.new_pass()
        # 2. The common case, without the orders.
        if len(self._waiters) == 1:
            self._admit_alone(now_s)
            return
        # 3. Requests that nothing may overtake, one after the other. The first that does not fit,
        # and does not step aside, ends the pass: all that comes behind it waits for it.
        while (first := self._order.first_of_all(now_s)) is not None and pages.can_open:
            if first.seen_at == self._version or not self._try(first, *self._look(first), now_s):
                if self._aside.step_aside(first):
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
        if waiter.lane.is_open and not waiter.is_aside and waiter.seen_at != version:
            if self._try(waiter, *self._look(waiter), now_s):
                return
            if self._policy.overtakes and not waiter.is_returned:
                # Its new estimate has to be in the order for those that may come.
                self._order.renew(waiter)
            self._aside.step_aside(waiter)
        self._spent_at = version

    def take_admitted(self) -> list[DecodeRequest]:
        """Return the requests admitted since the last call, in that order."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def take_loads(self) -> list[Flight]:
        """Return the flights of loads begun since the last call, in that order."""
        loads, self._loads = self._loads, []
        return loads

    def _admit_in_order(self, now_s: float) -> None:
        """Admit what fits by its estimates; if nothing does, renew the oldest estimates."""
        # Each round searches from the front again: `renew` may reorder, and an admission
        # leaves less space for all the others. Looks that admit nothing count down, so that a pass
        # is bounded.
        looks = MAX_LOOKS
        while looks and self.may_admit and (waiter := self._first_that_may_fit()) is not None:
            found = self._look(waiter)
            if self._order.renew(waiter) and self._first_that_may_fit() is not waiter:
                looks -= 1  # its new estimate ranks it behind another
            elif not self._try(waiter, *found, now_s):
                looks -= 1
        # An estimate that is too high gets no look above, however wrong it has become. So the looks
        # that are left go to the oldest ones, one per lane and round.
        # An admission may take the last row, and changes what the others would get: so it ends the
        # pass, and the next one looks at all again.
        lanes = self._order.lanes()
        while looks > 0 and lanes and not self._admitted:
            lanes = [lane for lane in lanes if not self._admitted and self._renew(lane, now_s)]
            looks -= len(lanes)

    def _first_that_may_fit(self) -> Waiter | None:
        return self._order.first_that_may_fit(self._version, self._limits(), len(self._waiters))

    def _renew(self, lane: Lane, now_s: float) -> bool:
        """Renew a lane's oldest estimate by another look. False if none is older."""
        waiter = next(iter(lane.estimated), None)
        if waiter is None or waiter.seen_at == self._version:
            return False
        found = self._look(waiter)
        # The look moved it to the end of `estimated`, so the next round takes the next oldest.
        self._order.renew(waiter)
        self._try(waiter, *found, now_s)
        return True

    @property
    def _version(self) -> int:
        pages, budget = self._pages.version, self._budget.version
        return pages + budget + self._num_started + self._shares.version + self._lanes.version

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
        first_len = min(req.fill_len + req.resumed, req.most_kv_len)
        kept = pages_for(max(first_len, min(req.fill_len + reserve, req.most_kv_len)), page_size)
        less = shared_pages - unprotected
        return pages_for(first_len, page_size) - shared_pages, kept - less, req.max_pages - less

    def _cut_to_compute(self, waiter: Waiter, shared_pages: int, now_s: float) -> _Cut | None:
        """Return what a request takes if it is computed here from a checkpoint on; None if prefill
        sends it. It joins and loads nothing: a flight brings pages, and no state behind them."""
        points, req, match = self._points, waiter.req, waiter.match
        assert points is not None
        assert self._chooses_here is not None
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
        """Return up to which token prefill would send a request: all where prefill has the whole
        prompt already, or no checkpoint is kept here."""
        is_asked = self._sources.asks_late or req.generation > req.request.generation
        if self._points is None or req.is_alone or not is_asked:
            return req.fill_len
        return self._points.sent_len(req, shared_pages, self._sources.least_tokens)

    def _is_worth_loading(self, waiter: Waiter, num_missing: int, num_pages: int) -> bool:
        assert self._host is not None
        address = waiter.lane.address
        if address == ALONE or not self._sources.weighs_loads(self._now_s):
            return True
        load_s = self._host.load_s(num_pages, self._now_s)
        if not load_s:
            return True
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
        new, prefill = waiter.new_pages, waiter.lane.address
        # In a window group what it needs is bounded, and taken now: it never grows there. What host
        # memory has prefill does not send.
        here_pages = max(shared_pages, waiter.load_end)
        windows, start, sent_len = pages.windows, None, self._sent_len(req, here_pages)
        if windows:
            start = WindowStart(sent_len, req.max_pages)
        if (
            waiter.needed_pages > space
            or waiter.most_pages > most
            or self._shares.refuses(prefill, new)
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
                if prefill == ALONE:
                    waiter.seen_at = self._version
                    return False
                cut = None
        # A page that was left is found elsewhere already.
        shareable = match is not None and not waiter.leaves_last
        # By the key that was matched: other ranks match it again.
        key = req.key.prefix(len(req.key) - 1) if waiter.leaves_last else req.key
        if cut is not None:
            assert self._points is not None
            # What is cached behind the checkpoint, or on its way, is found there.
            shareable = match is not None and shared_pages == cut.depth
            if match is not None and cut.depth < match.depth:
                key = req.key.prefix(cut.depth * pages.page_size)
            joined, shared_pages, match, new = None, cut.depth, cut.match, cut.new_pages
            start, sent_len = cut_start, req.fill_len
            # What is loaded has no checkpoint: it is computed from where there is one.
            req.computes, waiter.load_end = True, 0
        req.sent_len = sent_len
        # 2. Before an eviction the tree has to know what the others wait for, or it evicts just
        # that.
        num_loaded = max(0, waiter.load_end - shared_pages)
        if new + num_loaded > pages.allocator.free_pages:  # an eviction is due
            self.wants.admitting(waiter)
        # 3. Lock and take. The look has counted what locking costs, and nothing ran since, so this
        # cannot fail: there is nothing to undo below.
        if num_loaded:
            joined, shared_pages = self._load(waiter, joined, shared_pages, now_s), waiter.load_end
        joined_pages = joined.pages if joined is not None else None
        if cut is not None and self._points is not None:
            self._points.hold(req, cut.checkpoint)
        try:
            req.pages_held = pages.open(
                key,
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
        if prefill != ALONE:
            self._shares.promise(flight.room_key, prefill, new)
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
            key, waiter.match, num_pages, now_s, joined_pages, shared_pages, is_load=True
        )
        packed = pages.table.packed(loaded.row, shared_pages, waiter.load_end)
        new = np.frombuffer(packed, np.int32)
        room_key = self._host.load(waiter.found_in_host, key, new, now_s)
        load = self._flights.start_load(waiter.req, key, loaded, room_key, joined)
        self._loads.append(load)
        return load
