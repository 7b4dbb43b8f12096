"""What the scheduler and its sources work on: pages, what is promised of them, what is on its way;
and the moves that need more than one of these."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

from prefixkv.cache.results import Releases
from prefixkv.config import DecodeConfig
from prefixkv.decode.flights import Flight, Flights, Source
from prefixkv.decode.request import DecodeJournal, DecodeRequest
from prefixkv.decode.rooms import Rooms, Workers
from prefixkv.errors import check_laws
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import BrokenEvent
from prefixkv.paging import pages_for
from prefixkv.request import DeviceEvent


class PreallocBudget:
    """Number of pages that admission may promise away. Owned by the scheduler's thread.

    Admitting a request takes its pages now; running requests take more as they grow. The budget
    keeps enough back for that, by sums over the admitted requests, in pages, that are updated as
    they come, grow and go: the cost of a decision does not depend on how many run.

        space = free + evictable - what locking the match takes out of the evictable
        admit if and only if  need <= space - max(reserved, single)
                         and  remaining <= space + private_pages

    `reserved` sums each request's `remaining`, at most `reserve_pages` of it. `single` is the most
    that any request may still need, less what retracting the others would free: max(remaining_i +
    private_i) - private_pages. A request with its KV on its way cannot be retracted, so its private
    pages count as 0; else several such requests could run with no page left.

    A page that is taken moves from `remaining` to `private`. So their sum is constant while a
    request runs, and a sorted list gives the maximum.
    """

    def __init__(self, reserve_pages: int) -> None:
        self.reserve_pages = reserve_pages
        self.version = 0  # grows whenever less may be kept back than before
        self.private_pages = 0  # pages that retracting the running requests would free
        self.reserved_pages = 0  # sum of what remains to each, at most reserve_pages each
        # Of each admitted request: remaining + private pages, constant while it runs; and private.
        self._pages: dict[str, list[int]] = {}
        self._reaches: list[int] = []  # those sums, ascending

    def start(self, rid: str, remaining_pages: int, private_pages: int) -> None:
        """Count a request that may grow by `remaining_pages`; retracting it frees `private_pages`.
        O(log active), but for a move of as many numbers.

        Called when it is admitted (with `private_pages` 0: it cannot be retracted yet), and again
        when its KV is complete.
        """
        # The second call replaces the first. The sum of both numbers may change here, and only
        # here.
        self.stop(rid)
        self.version += 1
        self._pages[rid] = [remaining_pages + private_pages, private_pages]
        self.private_pages += private_pages
        self.reserved_pages += min(self.reserve_pages, remaining_pages)
        insort(self._reaches, remaining_pages + private_pages)

    def grow_many(self, rids: Sequence[str]) -> None:
        """Count one page more for each of these running requests."""
        for rid in rids:
            pages = self._pages[rid]
            pages[1] += 1
            if pages[0] - pages[1] < self.reserve_pages:  # it took a page that was kept for it
                self.reserved_pages -= 1
        self.private_pages += len(rids)

    def stop(self, rid: str) -> None:
        """Take a request out of the sums. Unknown: no-op."""
        if (pages := self._pages.pop(rid, None)) is not None:
            reach, private = pages
            del self._reaches[bisect_left(self._reaches, reach)]
            self.version += 1
            self.private_pages -= private
            self.reserved_pages -= min(self.reserve_pages, reach - private)

    def __len__(self) -> int:
        """Number of requests that count: in transfer, waiting to run, or running."""
        return len(self._pages)

    @property
    def kept_back(self) -> int:
        """Pages kept back from new admissions, for admitted requests to grow into."""
        single = self._reaches[-1] - self.private_pages if self._reaches else 0
        return max(self.reserved_pages, single)

    def check_invariants(self) -> None:
        """Check the sums against the requests that they count. Raises InternalError."""
        pages = self._pages.values()
        laws = {
            "what retracting frees is counted": self.private_pages == sum(own for _, own in pages),
            "what is kept for growth is counted": self.reserved_pages
            == sum(min(self.reserve_pages, reach - own) for reach, own in pages),
            "the reach of each is known": self._reaches == sorted(reach for reach, _ in pages),
        }
        check_laws(laws, self._pages)


class Ledger:
    """The books of one decode rank, which its parts share. Owned by the scheduler's thread.

    `organs` are what brings pages besides prefill, in the order in which it is preferred.
    """

    def __init__(
        self, pages: PageManager, config: DecodeConfig, journal: DecodeJournal, workers: Workers,
        rooms: Rooms, requests: dict[str, DecodeRequest],
    ) -> None:  # fmt: skip
        self.pages, self.page_size = pages, pages.page_size
        self.name = config.name
        self.journal, self.workers, self.rooms = journal, workers, rooms
        workers.is_held = pages.allocator.holds
        self.requests = requests  # all that live, by rid, oldest first
        self.organs: list[Source] = []
        self.own = Source()  # of the organs, the one that the engine computes for, if any
        self.reserve_tokens = config.reserve_tokens  # kept for a request's output
        self.weights_version = config.model.weights_version
        self.budget = PreallocBudget(pages_for(config.reserve_tokens, pages.page_size))
        self.flights = Flights(pages.page_size)
        # Requests that have ended, or were retracted, and hold pages until an event; see `Ending`.
        self.deferred: dict[DecodeRequest, tuple[DeviceEvent, Any]] = {}
        # True where a request has more than pages of the tree: it is sent with each prompt.
        self.has_more = bool(pages.groups)

    @property
    def num_running(self) -> int:
        """Requests that run, or could: those whose KV is here. O(1)."""
        return len(self.budget) - len(self.flights.by_owner)

    def limits(self) -> tuple[int, int]:
        """Return the most pages that an admission may need now, and may ever need."""
        available = self.pages.available_pages
        return available - self.budget.kept_back, available + self.budget.private_pages

    def deferred_pages(self, releases: Releases, is_broken: bool = False) -> int:
        """Count the pages that come back with a device event; or those that a broken one keeps,
        since nothing proves that they do. `releases` collects the locks that end with them."""
        held = [
            req.pages_held
            for req, (event, _) in self.deferred.items()
            if isinstance(event, BrokenEvent) is is_broken
        ]
        return sum(pages.num_own + releases.end(pages.lock) for pages in held if pages is not None)

    def count(
        self, req: DecodeRequest, shared_pages: int, unprotected: int
    ) -> tuple[int, int, int]:
        """Count the pages that a request takes when admitted, that it needs with the reserve, and
        that it may ever need, besides those it shares. Locking the match takes `unprotected` pages
        out of the evictable ones, so they count as needed."""
        page_size = self.page_size
        reserve = min(self.reserve_tokens, req.max_new_tokens - len(req.output))
        # The token sampled last is written by the first step after the return, so it counts; unless
        # it is the last of all. Of what may still be generated, that one needs no space either.
        fill_len, most_len = req.fill_len, req.most_kv_len
        first_len = min(fill_len + req.resumed, most_len)
        kept = pages_for(max(first_len, min(fill_len + reserve, most_len)), page_size)
        less = shared_pages - unprotected
        return pages_for(first_len, page_size) - shared_pages, kept - less, req.max_pages - less

    def commit(self, now_s: float) -> list[Flight]:
        """Commit the complete flights, and return those with a request. Whole pages become cached
        prefix, which the request locks."""
        # A commit may complete flights that joined it, so the queue grows as it is worked off.
        flights, pages = self.flights, self.pages
        committed, unwritten = [], []
        while flights.complete:
            flight = flights.complete.popleft()
            if not flight.source.may_commit(flight):
                unwritten.append(flight)
                continue
            req, request = flight.owner, flight.request
            # 1. To the tree. A flight without an owner is there only for others, which find it in
            # the tree.
            if req is None or request.cacheable:
                pages.cache_unfinished(flight.pages, flight.key, now_s, priority=request.priority)
            # 2. Its waiters lock what they joined, before the flight's own lock may end below: in
            # between nothing may evict these pages.
            for waiter in flights.commit(flight):
                # A load was the use of the request that it was begun for.
                is_own = flight.source.brings_pages_only and waiter.request is request
                pages.lock_joined(waiter.pages, waiter.key, now_s, is_used=is_own)
            # 3. Without an owner nothing runs: the lock and the tail go.
            if req is None:
                pages.drop(flight.pages)
            else:
                committed.append(flight)
        flights.complete.extend(unwritten)
        return committed
