"""What the scheduler and its sources work on: pages, what is promised of them, what is on its way;
and the moves that need more than one of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prefixkv.cache.eviction.policy import Policy
from prefixkv.cache.results import MatchResult
from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.flights import Flight, Flights
from prefixkv.decode.journal import DecodeJournal
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.workers import Workers
from prefixkv.pages.manager import PageManager
from prefixkv.paging import pages_for


class HostPages(NamedTuple):
    """Pages of host memory behind the pool. `ready` says how many of them, from the first on, can
    be used by now; None: all."""

    num_pages: int
    policy: str | Policy
    ready: Callable[[], int] | None = None


class Ledger:
    """The books of one decode rank. Owned by the scheduler's thread.

    `reserve_tokens` is space kept for a request's output when it is admitted.
    """

    def __init__(
        self, pages: PageManager, workers: Workers, reserve_tokens: int, weights_version: str
    ) -> None:
        self.pages, self.page_size = pages, pages.page_size
        self.workers = workers
        self.reserve_tokens = reserve_tokens
        self.weights_version = weights_version
        self.budget = PreallocBudget(pages_for(reserve_tokens, pages.page_size))
        self.journal = DecodeJournal()
        self.flights = Flights(pages.page_size)
        # True where a request has more than pages of the tree: it is sent with each prompt.
        self.has_more = bool(pages.groups)

    @property
    def num_running(self) -> int:
        """Requests that run, or could: those whose KV is here. O(1)."""
        return self.budget.active - self.flights.num_owned

    def limits(self) -> tuple[int, int]:
        """Return the most pages that an admission may need now, and may ever need."""
        available = self.pages.available_pages
        return available - self.budget.kept_back, available + self.budget.private_pages

    def match(self, req: DecodeRequest) -> MatchResult | None:
        return self.pages.match(req.key, req.request.cacheable)

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
