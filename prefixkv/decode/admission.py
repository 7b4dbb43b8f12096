"""Requests that wait to be admitted: a line for each prefill worker, and the order of all lines.

    returned    admitted before (retracted, or to be asked for again): the last to return first
    overdue     the request that has waited longest, once that is `patience_s`
    the rest    in the order of an `AdmissionPolicy`

The next group is tried when the one before is empty. A request that those that run cannot make room
for holds up no other, for one of three reasons:

    prefill     its worker does not answer: its whole line has no turn
    share       its worker has its share of the pool: neither has its line; where the share is held
                without proof, the request waits aside alone
    pages       it may need more pages than can come back: it waits aside until enough are proved
                free

Pages are in a worker's power from the promise until the transfer has succeeded, or until it is
proved that no write of it can land there any more. A worker that takes promises and never gives
that proof would come to have them all. So while another worker answers too, each has at most its
share: its requests wait for pages to come back, those of others do not.

Source: SGLang's `DecodePreallocQueue`, which admits first come, first served.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from operator import attrgetter
from typing import Any, Final

from sortedcontainers import SortedList

from prefixkv.admission import make_admission, rank_as_tuple
from prefixkv.cache.results import MatchResult, Releases
from prefixkv.config import DecodeConfig
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.plan import Look, Plan, Planner
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.rooms import Worker
from prefixkv.errors import check_laws
from prefixkv.pages.groups import GroupStart
from prefixkv.protocol.timers import Timers

MAX_LOOKS: Final = 16
"""Looks of a pass that admit nothing."""

MAX_WALK: Final = 128
"""Places of the order that a search looks at."""

MAX_BACK: Final = 128
"""Requests that a pass brings back from aside."""

PAGES, SHARE, PREFILL = "pages", "share", "prefill"

RETURNED, OVERDUE, RANKED = range(3)

HELD = "are held for failed rooms until it is proved that nothing writes them"
AWAY = "are promised to prefill workers that do not answer"
STUCK = "wait for a device event that has raised"


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits, and the last look at it (`plan.Look`).

    `since_s` is when it came, or came back. `looked_at` is the version of the last look, `seen_at`
    that at which a look admitted nothing.
    """

    req: DecodeRequest
    group: int  # RETURNED, OVERDUE or RANKED
    since_s: float
    turn: int  # by arrival; negative for those that came back, the last of them first
    worker: Worker = field(init=False)
    blocked_by: str = ""  # a reason of its own, PAGES or SHARE; "": it stands in its worker's line
    look: Any = None
    looked_at: int = -1
    rank: tuple[float, ...] = ()
    seen_at: int = -1
    want: int = 0  # number of its want in the tree; 0: it is not entered

    @property
    def place(self) -> tuple[int, tuple[float, ...], int, Waiter]:
        """Its entry in the line's order: its group, by number, and its place there."""
        # Turns differ, so a comparison never reaches the waiter itself, which has no order.
        return self.group, self.rank if self.group == RANKED else (), self.turn, self

    @property
    def place_aside(self) -> tuple[int, int, Waiter]:
        return self.req.max_pages, self.turn, self


class Admission:
    """Waiting requests, and the passes over them that yield the plans that fit, in order. Owned by
    the scheduler's thread.

    The order rests on estimates. A request is admitted only by a plan of a look at what there is
    now: another look, unless there are no organs and nothing has changed since the last. A pass
    makes at most `MAX_LOOKS` looks that admit nothing, and none where nothing has changed since the
    last pass (`PageManager.version`); spare looks go to the oldest estimates. To enter or leave,
    and an admission, cost O(log waiting), a search O(workers) besides, a pass without an admission
    O(prefill workers that requests wait for).

    Args:
        config: of it what is about admission. A request that has waited `admission_patience_s` is
            overtaken by nothing; one without a `deadline_s`, and any that came back, may wait
            `admission_wait_s`.
    """

    def __init__(self, ledger: Ledger, config: DecodeConfig, planner: Planner) -> None:
        self._ledger, self._pages, self._workers = ledger, ledger.pages, ledger.workers
        self._planner = planner
        self._num_changes = 0
        self._spent_at = -1  # version at which a pass left nothing to look at
        self._policy = make_admission(config.admission)
        self._patience_s, self._timeout_s = config.admission_patience_s, config.admission_wait_s
        self._waiters: dict[DecodeRequest, Waiter] = {}
        # Those that no pass has left waiting: nothing in the tree is wanted for them.
        self._unwanted: dict[Waiter, MatchResult] = {}
        # Those aside, by reason: (pages it may need, turn, waiter).
        self._aside: dict[str, SortedList] = {PAGES: SortedList(), SHARE: SortedList()}
        self._shares_at = -1  # version of `workers` at which those over their share were tried
        self._most_pages: float = math.inf  # most that one request may get; set by each pass
        self.stepped_aside = {PAGES: 0, SHARE: 0, PREFILL: 0}
        self._arrivals = count(1)
        self._late: Timers[DecodeRequest] = Timers()
        self._overdue: Timers[Waiter] = Timers()  # of those in line, that have a place
        # Times at which one has waited long for a worker that does not answer, or a little earlier.
        self._unanswered: Timers[Waiter] = Timers()

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, req: object) -> bool:
        return req in self._waiters

    def __iter__(self) -> Iterator[DecodeRequest]:
        """Iterate over the requests that came back, the last first, then the others by arrival."""
        waiters = sorted(self._waiters.values(), key=attrgetter("turn"))
        return iter([waiter.req for waiter in waiters])

    def at(self, address: str) -> list[DecodeRequest]:
        """Return the requests that wait for this worker, aside or not, in turn. O(waiting)."""
        return [req for req in self if self._waiters[req].worker.address == address]

    # --- the scheduler's calls --------------------------------------------------------------------

    def add(self, req: DecodeRequest, now_s: float, *, first: bool = False) -> MatchResult | None:
        """Queue a request, and return its match. With `first` it was admitted before: it goes
        before all others.

        The tree evicts last what it has of it, of a new one once a pass begins that may leave it
        waiting. Cost: O(log waiting), and a match. Raises what the policy raises, with nothing
        changed.
        """
        turn = next(self._arrivals)
        waiter = Waiter(req, RETURNED, now_s, -turn) if first else Waiter(req, RANKED, now_s, turn)
        match = self._look(waiter, now_s).match
        # Ranks are the user's code: they come before the first change. One that comes back has no
        # rank: the order among those is by return, which no policy changes.
        if not first:
            waiter.rank = rank_as_tuple(self._policy.rank(req, waiter.look.new_pages))
        self._spent_at = -1
        waiter.worker = self._workers.of(req.asks)
        # What could be taken now can come back in any case.
        available = self._pages.available_pages
        self._enter(waiter, available if req.max_pages <= available else self.most_pages)
        if match is not None:
            # What was retracted made room for an append that may evict it before the next pass.
            if first:
                waiter.want = self._pages.cache.want(match)
            else:
                self._unwanted[waiter] = match
        # Its own deadline_s was for its KV to come the first time.
        if req.request.deadline_s is None or req.committed_s is not None:
            self._late.wake(req, now_s + self._timeout_s)
        return match

    def remove(self, req: DecodeRequest) -> None:
        # The next pass has to look again: this may be the request that held up the others.
        self._spent_at = -1
        waiter = self._waiters[req]
        self._exit(waiter)
        self._late.forget(req)
        if waiter.want:
            self._pages.cache.unwant(waiter.want)
        else:
            self._unwanted.pop(waiter, None)

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
        if closed := {one.address for one in self._workers.all() if not one.is_open}:
            for flight in self._ledger.flights:
                if flight.is_open and flight.source.sends and flight.prefill in closed:
                    away += flight.pages.num_own + releases.end(flight.pages.lock)
        stuck = self._ledger.deferred_pages(releases, is_broken=True)
        if held := pages.held_pages + pages.quarantined_pages:
            back = [key for source in self._ledger.organs for key in source.keeps()[1]]
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
        if waiter.group == RETURNED:
            # All it had may still be cached, so that it needs almost nothing. It would come back at
            # once, and be retracted again for the page that was missing. So it has to leave a page
            # for each of the others: then these go on by a step first.
            limits = min(limits[0], pages.available_pages - len(self._ledger.budget)), limits[1]
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
            for waiter, match in self._unwanted.items():
                waiter.want = self._pages.cache.want(match)
            self._unwanted.clear()
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
        is_seen = self._version in (self._spent_at, waiter.seen_at)
        if is_seen or waiter.blocked_by or not waiter.worker.is_open:
            return None
        plan = self._plan(waiter, self._look(waiter, now_s), now_s)
        if plan is None:
            self._bring_back(self.most_pages)
            if self._policy.overtakes and waiter.group != RETURNED:
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

    # --- coming and going -------------------------------------------------------------------------

    def _enter(self, waiter: Waiter, most_pages: int) -> None:
        """Let a request wait: in line, or aside if it may need more than `most_pages`."""
        worker = waiter.worker
        self._waiters[waiter.req] = waiter
        worker.num_waiters += 1
        if waiter.req.max_pages > most_pages:
            self._block(waiter, PAGES)
            return
        self._stand(waiter)
        self.stepped_aside[PREFILL] += not worker.is_open

    def _exit(self, waiter: Waiter) -> None:
        worker = waiter.worker
        del self._waiters[waiter.req]
        worker.num_waiters -= 1
        if waiter.blocked_by:
            self._aside[waiter.blocked_by].remove(waiter.place_aside)
        else:
            self._leave_line(waiter)

    def _stand(self, waiter: Waiter) -> None:
        worker = waiter.worker
        waiter.blocked_by = ""
        worker.line[waiter] = None
        worker.order.add(waiter.place)
        if waiter.group == RANKED:
            self._overdue.wake(waiter, waiter.req.arrived_s + self._patience_s)
        if not worker.is_open:
            self._unanswered.wake(waiter, self._answer_due_s(waiter))

    def _leave_line(self, waiter: Waiter) -> None:
        worker = waiter.worker
        del worker.line[waiter]
        self._unanswered.forget(waiter)
        self._overdue.forget(waiter)
        worker.order.remove(waiter.place)
        worker.has_share &= bool(worker.line)

    def _block(self, waiter: Waiter, reason: str) -> None:
        """Set a request that stands nowhere aside."""
        waiter.blocked_by = reason
        self.stepped_aside[reason] += 1
        self._aside[reason].add(waiter.place_aside)

    # --- workers ----------------------------------------------------------------------------------

    def opens(self, worker: Worker, max_tokens: int) -> None:
        """A worker answers, and its pool holds `max_tokens`: its line has its turn."""
        worker.is_open, worker.is_down, worker.max_tokens = True, False, max_tokens
        self._workers.version += 1

    def closes(self, worker: Worker, now_s: float) -> None:
        """A worker has stopped answering: those in its line wait for it from now on."""
        worker.is_open, worker.is_down, worker.away_s = False, True, now_s
        self._workers.version += 1
        for waiter in worker.line:
            self._unanswered.wake(waiter, self._answer_due_s(waiter))

    def _answer_due_s(self, waiter: Waiter) -> float:
        return max(waiter.since_s, waiter.worker.away_s) + self._workers.patience_s

    # --- whose turn it is -------------------------------------------------------------------------

    def _turns(self) -> list[Worker]:
        """Return the workers whose lines have a turn, in order."""
        workers = self._workers.all()
        return [one for one in workers if one.line and one.is_open and not one.has_share]

    def _note_overdue(self, now_s: float) -> None:
        """Let those whose patience is over go before all that did not come back."""
        for waiter in self._overdue.due(now_s):
            waiter.worker.order.remove(waiter.place)
            waiter.group = OVERDUE
            waiter.worker.order.add(waiter.place)

    def _first_of_all(self) -> Waiter | None:
        """Return the waiter that nothing may overtake now: the last to come back, the oldest that
        is overdue, or the first where the policy lets none overtake it. O(workers)."""
        place = min((worker.order[0] for worker in self._turns()), default=None)
        if place is None or (place[0] == RANKED and self._policy.overtakes):
            return None
        return place[-1]  # type: ignore[no-any-return]

    def _in_turn(self) -> Iterator[Waiter]:
        """Iterate over those whose turn it is, in order, `MAX_WALK` at most."""
        orders = [islice(worker.order, MAX_WALK) for worker in self._turns()]
        places = orders[0] if len(orders) == 1 else islice(heapq.merge(*orders), MAX_WALK)
        return (place[-1] for place in places)

    def _renew(self, waiter: Waiter) -> bool:
        """Rank a waiter in line, that did not come back, by its new estimate. Return True if its
        place is behind the old one. Where the policy raises it keeps its rank."""
        worker, before = waiter.worker, waiter.rank
        # Before the policy is called: one that raises each time would else stay the oldest, and get
        # all looks.
        worker.line.move_to_end(waiter)
        try:
            rank = rank_as_tuple(self._policy.rank(waiter.req, waiter.look.new_pages))
        except Exception as error:
            self._pages.errors.caught(error)
            return False
        if rank != before:
            worker.order.remove(waiter.place)
            waiter.rank = rank
            worker.order.add(waiter.place)
        return before < rank

    # --- aside ------------------------------------------------------------------------------------

    def _bring_back(self, most_pages: int) -> bool:
        """Begin a pass, in which one request may get `most_pages`: forget which lines have no turn
        for their share, and put those aside into line that may fit now. Of those that wait for
        pages `MAX_BACK` at most; returns False if more of them may."""
        self._most_pages = most_pages
        for worker in self._workers.all():
            worker.has_share = False
        # 1. Those over their share, all at once, and only when a worker has changed: before that
        # they would step aside again.
        if self._shares_at != self._workers.version:
            self._shares_at = self._workers.version
            waiters, self._aside[SHARE] = self._aside[SHARE], SortedList()
            for *_, waiter in waiters:
                self._stand(waiter)
        # 2. Those that need too many pages, by what they need: behind the first that cannot return
        # none can.
        for_pages = self._aside[PAGES]
        for _ in range(MAX_BACK):
            if not for_pages or for_pages[0][0] > most_pages:
                return True
            self._stand(for_pages.pop(0)[-1])
        return False

    def _step_aside(self, waiter: Waiter) -> bool:
        """Set a waiter in line that did not fit aside, if waiting for the running ones cannot help
        it. Return whether."""
        worker, workers = waiter.worker, self._workers
        # 1. More pages than can come back without a proof.
        if waiter.req.max_pages > self._most_pages:
            self._leave_line(waiter)
            self._block(waiter, PAGES)
            return True
        # 2. It does not fit for another reason than its worker's share: pages will come back, so it
        # waits where it is.
        if not workers.refuses(worker, waiter.look.new_pages):
            return False
        # 3. The share. If even the end of all its worker's transfers would not help, it waits
        # alone. Otherwise the whole line does: what comes behind it there, and needs less, would
        # overtake it each time.
        if workers.is_hopeless(worker, waiter.look.new_pages):
            self._leave_line(waiter)
            self._block(waiter, SHARE)
        else:
            self.stepped_aside[SHARE] += 1
            worker.has_share = True
        return True

    def aside(self) -> dict[str, int]:
        """Count the requests that hold up no others, by reason. Any thread may call it."""
        lines = self._workers.all()
        with_share = sum(len(one.line) for one in lines if one.is_open and one.has_share)
        return {
            PAGES: len(self._aside[PAGES]),
            SHARE: len(self._aside[SHARE]) + with_share,
            PREFILL: sum(len(worker.line) for worker in lines if not worker.is_open),
        }

    # --- deadlines --------------------------------------------------------------------------------

    @property
    def wake_s(self) -> float:
        """Time at which the next request has waited too long, or is overdue, or a little earlier;
        infinity if none waits. O(1)."""
        return min(self._late.next_s, self._unanswered.next_s, self._overdue.next_s)

    def unanswered(self, now_s: float) -> list[DecodeRequest]:
        """Return those that have waited too long for a worker that does not answer. They have to be
        removed. O(1) if there are none."""
        late = []
        for waiter in sorted(self._unanswered.due(now_s), key=attrgetter("turn")):
            if waiter.worker.is_open:
                continue
            if (due_s := self._answer_due_s(waiter)) <= now_s:
                late.append(waiter.req)
            else:  # it has answered, and stopped again since
                self._unanswered.wake(waiter, due_s)
        return late

    # --- laws -------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Check lines, orders and those aside against the waiters. Raises InternalError."""
        waiters = [*self._waiters.values()]
        of = {one: [w for w in waiters if w.worker is one] for one in self._workers.all()}
        lines = {one: {w for w in ones if not w.blocked_by} for one, ones in of.items()}
        laws = {
            "the worker of each is known": all(waiter.worker in of for waiter in waiters),
            "a worker counts its waiters": all(one.num_waiters == len(of[one]) for one in of),
            "all that are not aside stand in its line": all(
                {*one.line} == line and list(one.order) == sorted(waiter.place for waiter in line)
                for one, line in lines.items()
            ),
            "the others are aside, for a reason": all(
                list(places) == sorted(w.place_aside for w in waiters if w.blocked_by == why)
                for why, places in self._aside.items()
            ),
            "deadlines are of waiting requests": len(self._late) <= len(waiters),
            "what a pass has left waiting is wanted": self._pages.cache.num_wants
            == sum(one.want > 0 for one in waiters)
            and all(
                (one.want > 0) != (one in self._unwanted)
                for one in waiters
                if self._pages.caching and one.req.request.cacheable
            ),
            "a wait for an answer ends in time": all(
                self._answer_due_s(waiter) >= self._unanswered.next_s
                for one, line in lines.items()
                for waiter in line
                if not one.is_open
            ),
        }
        check_laws(laws, list(self._waiters))
