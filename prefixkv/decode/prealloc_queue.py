"""Requests that wait for pages, and the decision to admit one.

First come, first served; requests that were admitted before (retracted, or to be asked for again) come first of
all. A head that did not fit is not looked at again until something has changed that could let it fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.inflight import InFlight
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.paging import pages_for, whole_pages
from prefixkv.request_pages import PageBooks


class DecodePreallocQueue:
    """Owned by the scheduler's thread.

    Args:
        reserve_tokens: room kept for a request's output when it is admitted (never more than it may still
            generate).
    """

    def __init__(self, books: PageBooks, budget: PreallocBudget, flights: InFlight, reserve_tokens: int) -> None:
        self._books = books
        self._budget = budget
        self._flights = flights
        self._reserve_tokens = reserve_tokens
        self._waiting: OrderedDict[DecodeRequest, None] = OrderedDict()
        self._blocked_at = -1  # the books' version at which the head did not fit

    def add(self, req: DecodeRequest, *, first: bool = False) -> None:
        """Queue a request, at the front with `first`."""
        self._waiting[req] = None
        if first:
            self._waiting.move_to_end(req, last=False)
        if self._head() is req:
            self._blocked_at = -1

    def remove(self, req: DecodeRequest) -> None:
        """Take a request out, wherever it is. O(1)."""
        if self._head() is req:
            self._blocked_at = -1
        del self._waiting[req]

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req: object) -> bool:
        return req in self._waiting

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._waiting)

    @property
    def may_admit(self) -> bool:
        """Whether looking at the head may admit it. O(1)."""
        return bool(self._waiting and self._blocked_at != self._books.version and self._books.table.free_rows)

    def pop_preallocated(self, now_s: float) -> list[DecodeRequest]:
        """Admit while the head fits: its prefix is locked, its pages are taken, its row is written."""
        admitted = []
        while self.may_admit:
            req = self._head()
            if not self._admit(req, now_s):
                self._blocked_at = self._books.version
                break
            self._waiting.popitem(last=False)
            self._blocked_at = -1
            admitted.append(req)
        return admitted

    def _head(self) -> DecodeRequest:
        return next(iter(self._waiting))

    def _admit(self, req: DecodeRequest, now_s: float) -> bool:
        books, page_size = self._books, self._books.page_size
        match = books.match(req.key, req.request.cacheable)
        joined, prefix_pages, unprotected = None, 0, 0
        if match is not None:
            joined, prefix_pages = self._flights.find(req.key, whole_pages(match.prefix_len, page_size))
            unprotected = match.unprotected_pages
        reserve = min(self._reserve_tokens, req.max_new_tokens - len(req.output))
        first_len = req.fill_len + req.resumed  # the token sampled last is written by the first step after return
        need = pages_for(max(first_len, req.fill_len + reserve), page_size) - prefix_pages
        room = books.available_pages - unprotected
        if not self._budget.admits(need, req.max_pages - prefix_pages, room):
            return False
        # The match told what locking costs, so this cannot fail, and there is nothing to undo.
        num_new = pages_for(first_len, page_size) - prefix_pages
        theirs = joined.pages if joined is not None else None
        req.pages_held = books.open(req.key, match, num_new, now_s, theirs, prefix_pages)
        req.prefix_len = prefix_pages * page_size
        req.flight = self._flights.start(req, joined, shareable=match is not None)
        req.become(DecodeState.PREALLOCATED)
        self._budget.active += 1
        self._budget.start(req.rid, req.max_pages - req.pages_held.num_pages, 0)
        return True
