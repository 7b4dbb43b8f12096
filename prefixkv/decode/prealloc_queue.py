"""Requests that wait for pages, and the decision to admit one.

Three groups are tried, each only if nobody is left to wait for in the one before:

    returned    admitted before (retracted, or to be asked for again): the last to return first
    overdue     the one that has waited longest, once that is `patience_s`
    the rest    in the order of an `AdmissionPolicy`, which may let some overtake one that does not
    fit

The order rests on estimates: what a match said when the request came, or was last looked at.
Admission itself always looks again, at most `MAX_LOOKS` times in vain a pass, and never at one that
did not fit before tree or free list changed (`PageBooks.version`). Who cannot fit by its estimate
is not looked at at all; where that leaves looks over, they go to the oldest estimates, so that none
stays wrong for long. To look is to match anew if the tree has changed since; else the match is what
it was, and only what it would take out of the evictable is counted again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice, pairwise

from sortedcontainers import SortedList

from prefixkv.cache.results import MatchResult
from prefixkv.decode.admission import DEFAULT_ADMISSION, AdmissionPolicy, Rank, make_admission
from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import check_laws
from prefixkv.pages.manager import PageBooks
from prefixkv.paging import pages_for
from prefixkv.protocol.timers import Timers

MAX_LOOKS = 16
MAX_WALK = 128  # places of the order that a pass goes through


class _Waiter:
    """A request's place in the queue, and what the last look at it said; that was in vain at
    `seen_at`.

    `new`, `room` and `most` are what admitting it takes, in pages: taken at once; that have to be
    there, with the reserve; that it may come to take in the end. The last two are with what its
    match takes out of the evictable.
    """

    __slots__ = ("arrival", "match", "most", "new", "rank", "req", "room", "seen_at")

    def __init__(self, req: DecodeRequest, arrival: int) -> None:
        self.req = req
        self.arrival = arrival
        self.match: MatchResult | None = None
        self.new = self.room = self.most = 0
        self.rank: Rank = None
        self.seen_at = -1

    @property
    def place(self) -> tuple[Rank, int, _Waiter]:
        return self.rank, self.arrival, self


class DecodePreallocQueue:
    """Owned by the scheduler's thread. `add` and each admission cost O(log waiting), a pass in vain
    no more.

    Args:
        reserve_tokens: room kept for a request's output when it is admitted (never more than it may
            still generate).
        policy: a name, or an `AdmissionPolicy`.
        patience_s: who has waited so long is overtaken by nothing.
        waiting_timeout_s: how long a request may wait to be admitted for the first time, unless it
            says so itself.
    """

    def __init__(
        self,
        books: PageBooks,
        budget: PreallocBudget,
        flights: InFlight,
        reserve_tokens: int,
        *,
        policy: str | AdmissionPolicy = DEFAULT_ADMISSION,
        patience_s: float = math.inf,
        waiting_timeout_s: float = math.inf,
    ) -> None:
        self._books = books
        self._budget = budget
        self._flights = flights
        self._reserve_tokens = reserve_tokens
        self._policy = make_admission(policy)
        self._patience_s = patience_s
        self._waiting_timeout_s = waiting_timeout_s
        self._returned: OrderedDict[DecodeRequest, _Waiter] = OrderedDict()
        self._waiting: OrderedDict[DecodeRequest, _Waiter] = OrderedDict()  # by arrival
        self._order: SortedList = SortedList()  # their places
        self._estimated: OrderedDict[_Waiter, None] = OrderedDict()  # the oldest estimate first
        self._deadlines: Timers[DecodeRequest] = Timers()
        self._admitted: list[DecodeRequest] = []  # and not taken yet
        self._num_arrivals = 0
        self._num_started = 0
        self._spent_at = -1  # the version at which nobody is left to look at

    def add(self, req: DecodeRequest, *, first: bool = False) -> None:
        """Queue a request, before all others with `first`."""
        self._num_arrivals += 1
        self._spent_at = -1
        waiter = _Waiter(req, self._num_arrivals)
        if first:
            self._returned[req] = waiter
            self._returned.move_to_end(req, last=False)
            return
        if self._policy.overtakes:
            self._look(waiter)
        waiter.rank = self._policy.rank(req, waiter.new)
        self._order.add(waiter.place)
        self._waiting[req] = waiter
        self._estimated[waiter] = None
        timeout_s = req.request.deadline_s
        self._deadlines.wake(
            req, req.arrived_s + (self._waiting_timeout_s if timeout_s is None else timeout_s)
        )

    def remove(self, req: DecodeRequest) -> None:
        """Take a request out, wherever it is."""
        self._spent_at = -1
        if self._returned.pop(req, None) is None:
            waiter = self._waiting.pop(req)
            self._order.remove(waiter.place)
            del self._estimated[waiter]
            self._deadlines.forget(req)

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def __contains__(self, req: object) -> bool:
        return req in self._waiting or req in self._returned

    def __iter__(self) -> Iterator[DecodeRequest]:
        """Those that come first, then the others by arrival."""
        return chain(self._returned, self._waiting)

    @property
    def may_admit(self) -> bool:
        """Whether a pass may admit somebody. O(1)."""
        return bool(len(self) and self._spent_at != self._version and self._books.can_open)

    @property
    def wake_s(self) -> float:
        """When the next deadline passes, or a little earlier; infinity if none."""
        return self._deadlines.next_s

    def expired(self, now_s: float) -> list[DecodeRequest]:
        """Requests whose time to wait is over; they still have to be removed. O(1) if there are
        none."""
        return self._deadlines.due(now_s) if self._deadlines.next_s <= now_s else []

    def check_invariants(self) -> None:
        """Check the orders against each other. Raises InternalError."""
        waiters = list(self._waiting.values())
        laws = {
            "every place is that of one who waits": list(self._order)
            == sorted(waiter.place for waiter in waiters),
            "there is an estimate of each": set(self._estimated) == set(waiters),
            "they stand by arrival": all(a.arrival < b.arrival for a, b in pairwise(waiters)),
            "nobody waits twice": not self._waiting.keys() & self._returned.keys(),
            "deadlines are of those who wait": len(self._deadlines) <= len(waiters),
        }
        check_laws(laws, list(self._order), list(self))

    # --- a pass -----------------------------------------------------------------------------------

    def admit(self, now_s: float) -> None:
        """Admit what fits: its prefix is locked, its pages are taken, its row is written;
        `take_admitted` has it.

        If a user's policy raises, the pass ends with that. Who was admitted before is admitted all
        the same.
        """
        books = self._books
        while (first := self._first_of_all(now_s)) is not None and books.can_open:
            if first.seen_at == self._version or not self._try(first, *self._look(first), now_s):
                self._spent_at = self._version
                return
        if self._waiting and self._spent_at != self._version and books.can_open:
            self._admit_in_order(now_s)
            if (
                not self._admitted
            ):  # else the next pass looks whether somebody shares what is on its way now
                self._spent_at = self._version

    def take_admitted(self) -> list[DecodeRequest]:
        """Who was admitted since the last call, in that order."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def _first_of_all(self, now_s: float) -> _Waiter | None:
        """The one that nothing may overtake now, if there is one."""
        if self._returned:
            return next(iter(self._returned.values()))
        if self._waiting:
            oldest = next(iter(self._waiting.values()))
            if now_s - oldest.req.arrived_s >= self._patience_s:
                return oldest
            if not self._policy.overtakes:
                return self._order[0][-1]  # type: ignore[no-any-return]
        return None

    def _admit_in_order(self, now_s: float) -> None:
        """Those that overtake, and where nobody does, who could: the estimates that are oldest are
        made anew."""
        looks = MAX_LOOKS
        while looks and self.may_admit and (waiter := self._first_that_may_fit()) is not None:
            found = self._look(waiter)
            if self._falls_back(waiter) and self._first_that_may_fit() is not waiter:
                looks -= 1  # another one comes first now
            elif not self._try(waiter, *found, now_s):
                looks -= 1
        while looks and not self._admitted:
            waiter = next(iter(self._estimated))
            if waiter.seen_at == self._version:
                return
            found = self._look(waiter)
            self._falls_back(waiter)
            self._try(waiter, *found, now_s)
            looks -= 1

    def _first_that_may_fit(self) -> _Waiter | None:
        """The first of the order that has not been seen in vain, and fits by its estimate."""
        if len(self._order) == 1:  # nobody to choose between
            waiter: _Waiter = self._order[0][-1]
            return waiter if waiter.seen_at != self._version else None
        version, (room, most) = self._version, self._limits()
        for _, _, waiter in islice(self._order, MAX_WALK):
            if waiter.most <= most and waiter.room <= room and waiter.seen_at != version:
                return waiter
        return None

    @property
    def _version(self) -> int:
        """Grows whenever somebody may fit who did not before."""
        return self._books.version + self._num_started

    def _limits(self) -> tuple[int, int]:
        """`_Need.room` and `_Need.most` of what fits."""
        available = self._books.available_pages
        return available - self._budget.kept_back, available + self._budget.private_pages

    def _look(self, waiter: _Waiter) -> tuple[Flight | None, int]:
        """Find out what admitting a request takes now.

        Returns the flight that it would join, behind what is in the tree, and how many pages both
        are together.
        """
        req, match, page_size = waiter.req, waiter.match, self._books.page_size
        if match is None or not match.is_current:
            match = waiter.match = self._books.match(req.key, req.request.cacheable)
        joined, shared_pages, unprotected = None, 0, 0
        if match is not None:
            joined, shared_pages = self._flights.find(req.key, match.depth)
            unprotected = match.unprotected_pages
        reserve = min(self._reserve_tokens, req.max_new_tokens - len(req.output))
        first_len = (
            req.fill_len + req.resumed
        )  # the token sampled last is written by the first step after return
        kept = pages_for(max(first_len, req.fill_len + reserve), page_size)
        less = shared_pages - unprotected
        waiter.new = pages_for(first_len, page_size) - shared_pages
        waiter.room, waiter.most = kept - less, req.max_pages - less
        return joined, shared_pages

    def _falls_back(self, waiter: _Waiter) -> bool:
        """Enter a new estimate; True if its place in the order is behind the old one."""
        self._estimated.move_to_end(waiter)
        before, rank = waiter.rank, self._policy.rank(waiter.req, waiter.new)
        falls_back = bool(before < rank)
        if falls_back or rank < before:
            self._order.add(
                (rank, waiter.arrival, waiter)
            )  # first, since a user's ranks may not compare
            self._order.remove(waiter.place)
            waiter.rank = rank
        return falls_back

    def _try(self, waiter: _Waiter, joined: Flight | None, shared_pages: int, now_s: float) -> bool:
        """Admit a request that was just looked at, if it fits."""
        books, req, match = self._books, waiter.req, waiter.match
        room, most = self._limits()
        if req in self._returned:
            # All it had may be cached still, so that it needs next to nothing: then it would return
            # at once, and be taken back for the same page again. So it leaves a page for each of
            # the others, and they go on by a step.
            room = min(room, books.available_pages - self._budget.active)
        if waiter.room > room or waiter.most > most:
            waiter.seen_at = self._version
            return False
        # The match told what locking costs, so this cannot fail, and there is nothing to undo.
        joined_pages = joined.pages if joined is not None else None
        req.pages_held = books.open(req.key, match, waiter.new, now_s, joined_pages, shared_pages)
        req.prefix_len = shared_pages * books.page_size
        self._flights.start(req, joined, shareable=match is not None)
        self._num_started += 1
        req.become(DecodeState.PREALLOCATED)
        self.remove(req)
        self._budget.active += 1
        self._budget.start(req.rid, req.max_pages - req.pages_held.num_pages, 0)
        self._admitted.append(req)
        return True
