"""Requests that wait for pages, and the decision to admit one.

Three groups are tried, each only when the one before is empty:

    returned    admitted before (retracted, or to be asked for again): the last to return first
    overdue     the request that has waited longest, once that is `patience_s`
    the rest    in the order of an `AdmissionPolicy`, which may let requests overtake one that does
                not fit

The order rests on estimates: what a match said when the request came, or was last looked at. A
request is admitted only after another look, which matches anew if the tree has changed, and counts
anew what locking the match would take out of the evictable pages. A pass makes at most `MAX_LOOKS`
looks that admit nothing, and none at a request that did not fit before and for which nothing has
changed since (`PageManager.version`). A request that cannot fit by its estimate gets no look; where
that leaves looks over, the oldest estimates get them, so that none stays wrong for long.
A request whose prefill worker has its share of the pool (`shares.py`) waits, and holds nobody up.

What the tree has of a request that waits is evicted last (`RadixCache.want`). The tree is told
before an admission evicts, and after a pass that leaves requests waiting; it is not told of one
that is admitted from free pages in the first pass after it came.

Source: SGLang's `DecodePreallocQueue`, which admits first come, first served.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise

from sortedcontainers import SortedList

from prefixkv.cache.results import MatchResult
from prefixkv.config import Admission
from prefixkv.decode.admission import DEFAULT_ADMISSION, Rank, make_admission
from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.shares import PrefillShares
from prefixkv.errors import check_laws
from prefixkv.pages.manager import PageManager
from prefixkv.paging import pages_for
from prefixkv.protocol.timers import Timers

MAX_LOOKS = 16
MAX_WALK = 128  # requests of the order that a pass goes through
MAX_WANTS = 128  # prefixes that are said to be wanted at once
UNSAID, GONE = 0, -1  # instead of a want's number: the tree does not know yet; it waits no longer


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request in the queue, and what the last look at it found.

    Admitting it takes pages: `new` at once; `needed` have to be available, the reserve included;
    `most` it may come to take in the end. The last two include the evictable pages that its match
    would lock. `seen_at` is the version at which a look admitted nothing.
    """

    req: DecodeRequest
    arrival: int
    match: MatchResult | None = None
    new: int = 0
    needed: int = 0
    most: int = 0
    rank: Rank = None
    seen_at: int = -1
    want: int = UNSAID  # its number

    @property
    def place(self) -> tuple[Rank, int, _Waiter]:
        return self.rank, self.arrival, self


class DecodePreallocQueue:
    """Owned by the scheduler's thread. `add` and each admission cost O(log waiting), a pass that
    admits nothing no more.

    Args:
        reserve_tokens: space kept for a request's output when it is admitted (never more than it
            may still generate).
        policy: a name, or an `AdmissionPolicy`.
        patience_s: a request that has waited this long is overtaken by nothing.
        waiting_timeout_s: how long a request may wait to be admitted for the first time, if it sets
            no `deadline_s` of its own.
        shares: of prefill workers; None: no bound.
        protect: whether the cached prefixes of waiting requests are evicted last.
    """

    def __init__(
        self,
        books: PageManager,
        budget: PreallocBudget,
        flights: InFlight,
        reserve_tokens: int,
        policy: str | Admission = DEFAULT_ADMISSION,
        patience_s: float = math.inf,
        waiting_timeout_s: float = math.inf,
        shares: PrefillShares | None = None,
        protect: bool = True,
    ) -> None:
        self._books = books
        self._budget = budget
        self._flights = flights
        self._reserve_tokens = reserve_tokens
        self._policy = make_admission(policy)
        self._patience_s = patience_s
        self._waiting_timeout_s = waiting_timeout_s
        self._shares = shares or PrefillShares()
        self._returned: OrderedDict[DecodeRequest, _Waiter] = OrderedDict()
        self._waiting: OrderedDict[DecodeRequest, _Waiter] = OrderedDict()  # by arrival
        self._order: SortedList = SortedList()  # their places
        self._estimated: OrderedDict[_Waiter, None] = OrderedDict()  # the oldest estimate first
        self._unsaid: list[_Waiter] = []  # the tree does not know yet that they wait, if they do
        self._protects = protect and books.caching
        self._deadlines: Timers[DecodeRequest] = Timers()
        self._admitted: list[DecodeRequest] = []  # and not taken yet
        self._num_arrivals = 0
        self._num_started = 0
        self._spent_at = -1  # the version at which no request is left to look at

    def add(self, req: DecodeRequest, *, first: bool = False) -> None:
        """Queue a request, before all others with `first`."""
        self._num_arrivals += 1
        self._spent_at = -1
        waiter = _Waiter(req, self._num_arrivals)
        if first:
            self._returned[req] = waiter
            self._returned.move_to_end(req, last=False)
            self._want_soon(waiter)
            return
        if self._policy.overtakes:
            self._look(waiter)
        waiter.rank = _checked(self._policy.rank(req, waiter.new))
        self._order.add(waiter.place)
        self._want_soon(waiter)
        self._waiting[req] = waiter
        self._estimated[waiter] = None
        if req.request.deadline_s is None:  # else the scheduler looks at it
            self._deadlines.wake(req, req.arrived_s + self._waiting_timeout_s)

    def remove(self, req: DecodeRequest) -> None:
        """Take a request out, wherever it is."""
        self._spent_at = -1
        waiter = self._returned.pop(req, None)
        if waiter is None:
            waiter = self._waiting.pop(req)
            if self._waiting:
                self._order.remove(waiter.place)
            else:
                self._order.clear()  # it was alone
            del self._estimated[waiter]
            self._deadlines.forget(req)
        if waiter.want > 0:
            self._books.unwant(waiter.want)
        waiter.want = GONE

    def look_again(self) -> None:
        """A request may fit that did not before."""
        self._num_started += 1

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def __contains__(self, req: object) -> bool:
        return req in self._waiting or req in self._returned

    def __iter__(self) -> Iterator[DecodeRequest]:
        """Those that come first, then the others by arrival."""
        return chain(self._returned, self._waiting)

    @property
    def may_admit(self) -> bool:
        """Whether a pass may admit a request. O(1)."""
        return bool(
            (self._waiting or self._returned)
            and self._spent_at != self._version
            and self._books.can_open
        )

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
        everyone = [*waiters, *self._returned.values()]
        laws = {
            "every place is that of a waiting request": list(self._order)
            == sorted(waiter.place for waiter in waiters),
            "there is an estimate of each": set(self._estimated) == set(waiters),
            "they stand by arrival": all(a.arrival < b.arrival for a, b in pairwise(waiters)),
            "no request waits twice": not self._waiting.keys() & self._returned.keys(),
            "deadlines are of waiting requests": len(self._deadlines) <= len(waiters),
            "what waits is wanted, or not said yet": not self._protects
            or {waiter for waiter in everyone if not waiter.want and waiter.req.request.cacheable}
            == {waiter for waiter in self._unsaid if waiter.want != GONE},
            "only what waits here is wanted": self._books.cache.num_wants
            == sum(waiter.want > 0 for waiter in everyone),
        }
        check_laws(laws, list(self._order), list(self))

    # --- a pass -----------------------------------------------------------------------------------

    def admit(self, now_s: float) -> None:
        """Admit what fits: lock its prefix, take its pages, write its row. `take_admitted` returns
        it.

        A request whose rank a user's policy cannot say keeps the one it has.
        """
        self._admit_what_fits(now_s)
        if self._unsaid:
            self._say_wants()

    def _admit_what_fits(self, now_s: float) -> None:
        books = self._books
        self._shares.new_pass()
        if len(self._waiting) == 1 and not self._returned:
            self._admit_alone(now_s)
            return
        while (first := self._first_of_all(now_s)) is not None and books.can_open:
            if first.seen_at == self._version or not self._try(first, *self._look(first), now_s):
                if self._is_limited(first):
                    continue  # by what is known now: the next one's turn
                self._spent_at = self._version
                return
        if self._waiting and self._spent_at != self._version and books.can_open:
            self._admit_in_order(now_s)
            # After an admission the next pass looks again: others may share what is now on its way.
            if not self._admitted:
                self._spent_at = self._version

    def _admit_alone(self, now_s: float) -> None:
        """`admit` where one request waits: there is nothing to overtake, and no choice to make."""
        (waiter,) = self._waiting.values()
        version = self._version
        if self._spent_at == version or not self._books.can_open:
            return
        if waiter.seen_at != version:
            if self._try(waiter, *self._look(waiter), now_s):
                return
            if self._policy.overtakes:
                self._falls_back(waiter)  # others may come
        self._spent_at = version

    def take_admitted(self) -> list[DecodeRequest]:
        """The requests admitted since the last call, in that order."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def _first_of_all(self, now_s: float) -> _Waiter | None:
        """The request that nothing may overtake now, if there is one."""
        if self._returned:
            for waiter in islice(self._returned.values(), MAX_WALK):
                if not self._is_limited(waiter):
                    return waiter
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values()))
        if now_s - oldest.req.arrived_s >= self._patience_s:
            for waiter in islice(self._waiting.values(), MAX_WALK):
                if now_s - waiter.req.arrived_s < self._patience_s:
                    break
                if not self._is_limited(waiter):
                    return waiter
        if not self._policy.overtakes:
            first: _Waiter = self._order[0][-1]  # mostly it is not limited
            if not self._is_limited(first):
                return first
            for _, _, first in islice(self._order, 1, MAX_WALK):
                if not self._is_limited(first):
                    return first
        return None

    def _is_limited(self, waiter: _Waiter) -> bool:
        """Whether its prefill worker has its share, so that it holds up none that comes after
        it."""
        return self._shares.refuses(waiter.req.prefill, waiter.new)

    def _admit_in_order(self, now_s: float) -> None:
        """Admit requests that fit by their estimates; if none does, renew the oldest estimates."""
        # `_falls_back` may reorder, so the first request is searched anew after each look.
        looks = MAX_LOOKS
        while looks and self.may_admit and (waiter := self._first_that_may_fit()) is not None:
            found = self._look(waiter)
            if self._falls_back(waiter) and self._first_that_may_fit() is not waiter:
                looks -= 1  # its new estimate ranks it behind another
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
        """The first of the order that fits by its estimate and got no look at this version."""
        if len(self._waiting) == 1:  # there is no choice to make
            alone = next(iter(self._waiting.values()))
            return alone if alone.seen_at != self._version else None
        waiter: _Waiter
        version, (space, most) = self._version, self._limits()
        for _, _, waiter in islice(self._order, MAX_WALK):
            if (
                waiter.most <= most
                and waiter.needed <= space
                and waiter.seen_at != version
                and not self._is_limited(waiter)
            ):
                return waiter
        return None

    @property
    def _version(self) -> int:
        """Grows whenever a request may fit that did not before."""
        return self._books.version + self._num_started + self._shares.version

    def _limits(self) -> tuple[int, int]:
        """The largest `_Waiter.needed` and `_Waiter.most` that fit, in pages."""
        available = self._books.available_pages
        return available - self._budget.kept_back, available + self._budget.private_pages

    def _look(self, waiter: _Waiter) -> tuple[Flight | None, int]:
        """Find out what admitting a request takes now.

        Returns the flight that it would join, behind what is in the tree, and how many pages both
        are together.
        """
        req, match, page_size = waiter.req, waiter.match, self._books.page_size
        key = req.key
        if match is None or not match.is_current:
            match = waiter.match = self._books.match(key, req.request.cacheable)
        joined, shared_pages, unprotected = None, 0, 0
        if match is not None:
            joined, shared_pages = self._flights.find(key, match.depth)
            unprotected = match.unprotected_pages
        reserve = min(self._reserve_tokens, req.max_new_tokens - len(req.output))
        # The token sampled last is written by the first step after the return, so it counts.
        first_len = req.fill_len + req.resumed
        kept = pages_for(max(first_len, req.fill_len + reserve), page_size)
        less = shared_pages - unprotected
        waiter.new = pages_for(first_len, page_size) - shared_pages
        waiter.needed, waiter.most = kept - less, req.max_pages - less
        return joined, shared_pages

    def _falls_back(self, waiter: _Waiter) -> bool:
        """Enter a new estimate; True if its place in the order is behind the old one."""
        self._estimated.move_to_end(waiter)
        before = waiter.rank
        try:
            rank = _checked(self._policy.rank(waiter.req, waiter.new))
            falls_back = bool(before < rank)
            if falls_back or rank < before:
                # Added before the old one is removed: ranks may not compare, and raise here.
                self._order.add((rank, waiter.arrival, waiter))
                self._order.remove(waiter.place)
                waiter.rank = rank
        except Exception as error:  # it keeps the rank that it has
            self._books.errors.caught(error)
            return False
        return falls_back

    def _try(self, waiter: _Waiter, joined: Flight | None, shared_pages: int, now_s: float) -> bool:
        """Admit a request that was just looked at, if it fits."""
        books, req, match = self._books, waiter.req, waiter.match
        space, most = self._limits()
        if self._returned and req in self._returned:
            # All it had may still be cached, so that it needs almost nothing. It would come back at
            # once, and be retracted again for the page that was missing. So it has to leave a page
            # for each of the others: then these go on by a step first.
            space = min(space, books.available_pages - self._budget.active)
        new, prefill = waiter.new, req.prefill
        if waiter.needed > space or waiter.most > most or self._shares.refuses(prefill, new):
            waiter.seen_at = self._version
            return False
        if new > books.allocator.free_pages and self._unsaid:  # an eviction is due
            if waiter.want == UNSAID:
                waiter.want = GONE  # as it is about to be
            self._say_wants()
        # The match told what locking costs, so this cannot fail, and there is nothing to undo.
        joined_pages = joined.pages if joined is not None else None
        req.pages_held = books.open(req.key, match, new, now_s, joined_pages, shared_pages)
        req.prefix_len = shared_pages * books.page_size
        flight = self._flights.start(req, joined, shareable=match is not None)
        self._shares.promise(flight.room_key, prefill, new)
        self._num_started += 1
        req.become(DecodeState.PREALLOCATED)
        self.remove(req)
        self._budget.start(req.rid, req.max_pages - req.pages_held.num_pages, 0)
        self._admitted.append(req)
        return True

    def _want_soon(self, waiter: _Waiter) -> None:
        if self._protects and waiter.req.request.cacheable:
            self._unsaid.append(waiter)

    def _say_wants(self) -> None:
        """Tell the tree what waits, the first to come first. O(1) a request, or a match."""
        books = self._books
        for waiter in self._unsaid[:MAX_WANTS]:
            if waiter.want == UNSAID:
                match = waiter.match
                if match is None:
                    match = waiter.match = books.match(waiter.req.key)
                    assert match is not None
                waiter.want = books.want(match)
        del self._unsaid[:MAX_WANTS]


def _checked(rank: Rank) -> Rank:
    """ValueError for NaN, which has no place in an order."""
    if rank != rank:
        raise ValueError(f"the admission policy ranks a request {rank!r}")
    return rank
