"""The passes over all that wait (`waiting.py`): each yields the plans that fit, in order.

Source: SGLang's `DecodePreallocQueue`, which admits first come, first served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prefixkv.cache.results import MatchResult, Releases
from prefixkv.config import DecodeConfig
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.plan import Look, Plan, Planner
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.waiting import PAGES, Waiter, Waiting
from prefixkv.errors import check_laws
from prefixkv.pages.groups import GroupStart

MAX_LOOKS: Final = 16

HELD = "are held for failed rooms until it is proved that nothing writes them"
AWAY = "are promised to prefill workers that do not answer"
STUCK = "wait for a device event that has raised"


class Admission(Waiting):
    """Waiting requests, and the passes that find what fits. Owned by the scheduler's thread.

    The order rests on estimates. A request is admitted only by a plan of a look at what there is
    now: another look, unless there are no organs and nothing has changed since the last. A pass
    makes at most `MAX_LOOKS` looks that admit nothing, and none where nothing has changed since the
    last pass (`PageManager.version`); spare looks go to the oldest estimates. `add` and an
    admission cost O(log waiting), a pass without one that times the prefill workers that requests
    wait for.

    Args:
        config: of it what is about admission. A request that has waited `admission_patience_s` is
            overtaken by nothing.
    """

    def __init__(self, ledger: Ledger, config: DecodeConfig, planner: Planner) -> None:
        super().__init__(ledger.workers, config, ledger.pages.errors)
        self._ledger, self._pages = ledger, ledger.pages
        self._planner = planner
        self._num_changes = 0
        self._spent_at = -1  # version at which a pass left nothing to look at

    def add(self, req: DecodeRequest, now_s: float, *, first: bool = False) -> None:
        """Queue a request. With `first` it was admitted before: it goes before all others.

        The tree evicts last what it has of it. Cost: O(log waiting), and a match. Raises what the
        policy raises, with nothing changed.
        """
        waiter = Waiter(req, next(self._arrivals), first, now_s)
        match = self._look(waiter, now_s).match
        # Ranks are the user's code: they come before the first change. One that comes back has no
        # rank: the order among those is by return, which no policy changes.
        if not first:
            waiter.rank = self._rank(waiter)
        self._spent_at = -1
        waiter.worker = self._workers.of(req.asks)
        # What could be taken now can come back in any case.
        available = self._pages.available_pages
        self._enter(waiter, available if req.max_pages <= available else self.most_pages)
        if match is not None:
            waiter.want = self._pages.cache.want(match)
        # Its own deadline_s was for its KV to come the first time.
        if req.request.deadline_s is None or req.committed_s is not None:
            self._late.wake(req, now_s + self._timeout_s)

    def match_of(self, req: DecodeRequest) -> MatchResult | None:
        """Return the last match of a request; None if it is not cached."""
        match: MatchResult | None = self._waiters[req].look.match
        return match

    def remove(self, req: DecodeRequest) -> None:
        # The next pass has to look again: this may be the request that held up the others.
        self._spent_at = -1
        waiter = self._waiters[req]
        self._exit(waiter)
        self._late.forget(req)
        if waiter.want:
            self._pages.cache.unwant(waiter.want)

    def move(self, req: DecodeRequest, asks: str) -> None:
        """Let a request wait for another worker, or for none. It keeps its place in time."""
        waiter = self._waiters[req]
        self._exit(waiter)
        req.asks = asks
        waiter.worker = self._workers.of(asks)
        self._enter(waiter, self.most_pages)
        self.look_again()

    def look_again(self) -> None:
        """Make the next pass look again: a request may fit now that did not before."""
        self._num_changes += 1

    @property
    def may_admit(self) -> bool:
        """True if a pass may admit a request. O(1)."""
        return bool(self._waiters and self._spent_at != self._version and self._pages.can_open)

    def expired(self, now_s: float) -> list[tuple[DecodeRequest, str]]:
        """Return the requests that have waited too long, each with the reason in words. They still
        have to be removed. O(1) if there are none."""
        # The reasons are read before any is removed: they name what holds the pages now.
        return [(req, self.why(req, now_s)) for req in self._late.due(now_s)]

    def why(self, req: DecodeRequest, now_s: float) -> str:
        """Describe in words for what a request has waited, and how long."""
        waiter = self._waiters[req]
        worker, windows = waiter.worker, self._pages.windows
        waited = f"waited {now_s - waiter.since_s:.3f} s for"
        # From the most particular reason to the general one.
        if waiter.blocked_by == PAGES:
            pages = f"{req.max_pages} of the pool's {self._pages.num_pages} pages"
            return f"{waited} pages: it may need {pages}, and {self._why_unproved()}"
        if not worker.address:
            return f"{waited} pages, to be computed here"
        if not worker.is_open:
            return f"{waited} prefill worker {worker.address}, which does not answer"
        if waiter.blocked_by or worker.has_share:
            has = f"{worker.num_pages} pages, its share of the pool"
            return f"{waited} pages: prefill worker {worker.address} has {has}"
        if windows and (short := windows.short_of(GroupStart(req.fill_len, req.max_pages))):
            return f"{waited} pages of window group {short.name!r}"
        return f"{waited} pages"

    # --- pages that can come back -----------------------------------------------------------------

    def unproved(self) -> dict[str, int]:
        """Count the pages that no running request gives back, by reason. O(workers, and requests
        that the device is busy with); where a worker does not answer, also O(flights)."""
        pages, away, releases = self._pages.allocator, 0, Releases()
        # A prefill worker that does not answer may keep its flights open, and their pages, without
        # limit. Both counts share `releases`, since a prefix with two locks comes back only with
        # both.
        if closed := self._workers.closed:
            for flight in self._ledger.flights:
                if flight.is_open and flight.source.sends and flight.prefill in closed:
                    away += flight.pages.num_own + releases.end(flight.pages.lock)
        stuck = self._ledger.deferred_pages(releases, is_broken=True)
        if held := pages.held_pages + pages.quarantined_pages:
            back = [key for source in self._ledger.organs for key in source.held_by]
            held -= sum(pages.held_by(key).size for key in back)
        return {HELD: held, AWAY: away, STUCK: stuck}

    @property
    def most_pages(self) -> int:
        """Pages that a single waiting request can come to have at most."""
        return self._pages.num_pages - sum(self.unproved().values())

    def _why_unproved(self) -> str:
        unproved, of = self.unproved(), ", ".join(self._workers.owners())
        missing = "; ".join(f"{num} {why}" for why, num in unproved.items() if num)
        if of and (unproved[HELD] or unproved[AWAY]):
            missing += f"; prefill workers that have pages in their power: {of}"
        return missing

    def check_invariants(self) -> None:
        super().check_invariants()
        cached = [one for one in self if self._pages.caching and one.request.cacheable]
        laws = {"what waits here is wanted": self._pages.cache.num_wants == len(cached)}
        check_laws(laws, cached)

    # --- one waiter -------------------------------------------------------------------------------

    def _look(self, waiter: Waiter, now_s: float) -> Look:
        req, version = waiter.req, self._version
        look: Look | None = waiter.look
        known = None if look is None else look.match
        is_same = waiter.looked_at == version and (known is None or known.is_current)
        if look is None or not is_same or self._ledger.organs:  # what those bring changes with time
            waiter.look = look = self._planner.look(req, known, now_s, can_ask=bool(req.asks))
            waiter.looked_at = version
        return look

    def _plan(self, waiter: Waiter, look: Look, now_s: float) -> Plan | None:
        """Return the plan of a request that was just looked at, if it fits."""
        # What it needs now has to leave what is kept back; and all that it may become could be had
        # by retracting.
        pages, limits = self._pages, self._ledger.limits()
        if waiter.is_returned:
            # All it had may still be cached, so that it needs almost nothing. It would come back at
            # once, and be retracted again for the page that was missing. So it has to leave a page
            # for each of the others: then these go on by a step first.
            limits = min(limits[0], pages.available_pages - self._ledger.budget.active), limits[1]
        plan = None
        if look.fits(limits) and not self._workers.refuses(waiter.worker, look.new_pages):
            plan = self._planner.plan(waiter.req, look, limits, now_s)
        if plan is None:
            waiter.seen_at = self._version
        return plan

    # --- a pass -----------------------------------------------------------------------------------

    def plans(self, now_s: float) -> Iterator[Plan]:
        """Make a pass: yield each plan that fits, or for which there is no source. The caller takes
        what it says, or ends its request, before it goes on. Where a user's policy fails, a request
        keeps its rank."""
        self._note_overdue(now_s)
        if (plan := self._of_one(now_s)) is not None:
            yield plan
        elif self._waiters:
            # Something has changed since the last pass: forget what that one had found out, and let
            # those aside return that now have prospects, before anything is tried.
            all_back = self._spent_at == self._version or self._bring_back(self.most_pages)
            yield from self._in_order(now_s)
            if not all_back:
                self._spent_at = -1  # the next pass brings more of them back

    def _of_one(self, now_s: float) -> Plan | None:
        """Plan the only request there is, if it fits: the common case, with nothing to overtake."""
        if len(self._waiters) != 1 or not self._pages.can_open:
            return None
        (waiter,) = self._waiters.values()
        if self._version in (self._spent_at, waiter.seen_at):
            return None
        if not waiter.worker.is_open or waiter.blocked_by:
            return None
        plan = self._plan(waiter, self._look(waiter, now_s), now_s)
        if plan is None:
            self._bring_back(self.most_pages)
            if self._policy.overtakes and not waiter.is_returned:
                # Its new estimate has to be in the order for those that may come.
                self._renew(waiter)
            self._step_aside(waiter)
            self._spent_at = self._version
        return plan

    def _in_order(self, now_s: float) -> Iterator[Plan]:
        pages, any_taken = self._pages, False
        self._note_overdue(now_s)  # also of those that have just come back
        # 1. Requests that nothing may overtake, one after the other. The first that does not fit,
        # and does not step aside, ends the pass: all that comes behind it waits for it.
        while (first := self._first_of_all()) is not None and pages.can_open:
            plan = None
            if first.seen_at != self._version:
                plan = self._plan(first, self._look(first, now_s), now_s)
            if plan is not None:
                any_taken = True
                yield plan
            elif not self._step_aside(first):
                self._spent_at = self._version
                return
        # 2. Then the policy's order decides. Each round searches from the front again: `_renew` may
        # reorder, and an admission leaves less space for all the others. An estimate that is too
        # high gets no look so, however wrong it has become: looks that are left go to the oldest
        # ones, unless an admission changes what they would get. Looks that admit nothing count
        # down, so that a pass is bounded.
        looks, oldest = MAX_LOOKS, self._oldest_looks()
        while looks and self.may_admit:
            waiter = self._next_that_may_fit() or (None if any_taken else next(oldest, None))
            if waiter is None:
                break
            look = self._look(waiter, now_s)
            is_behind = self._renew(waiter) and self._next_that_may_fit() is not waiter
            # Its new estimate may rank it behind another.
            if is_behind or (plan := self._plan(waiter, look, now_s)) is None:
                looks -= 1
            else:
                any_taken = True
                yield plan
        # After an admission the next pass looks again: others may join the flight that has just
        # started.
        if not any_taken and pages.can_open:
            self._spent_at = self._version

    def _next_that_may_fit(self) -> Waiter | None:
        """Return the first waiter that fits by its estimate and got no look at this version."""
        version, (space, most) = self._version, self._ledger.limits()
        for waiter in self._in_turn():
            if (
                waiter.look.most_pages <= most
                and waiter.look.needed_pages <= space
                and waiter.seen_at != version
                and not self._workers.refuses(waiter.worker, waiter.look.new_pages)
            ):
                return waiter
        return None

    def _oldest_looks(self) -> Iterator[Waiter]:
        """Iterate over those with the oldest looks, one of each line a round."""
        # A look moves it to the end of its line, so the next round takes the next oldest.
        lines = [worker.line for worker in self._turns()]
        while lines := [one for one in lines if one and next(iter(one)).seen_at != self._version]:
            for line in lines:
                if line:
                    yield next(iter(line))

    @property
    def _version(self) -> int:
        ledger = self._ledger
        pages, budget = ledger.pages.version, ledger.budget.version
        return pages + budget + self._num_changes + self._workers.version
