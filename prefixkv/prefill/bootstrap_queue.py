"""Requests that have decode's promise and wait for pages here, first come, first served.

Source: SGLang's `PrefillBootstrapQueue`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator

from prefixkv.cache.results import MatchResult
from prefixkv.pages.manager import PageManager
from prefixkv.paging import page_floor, pages_for, whole_pages
from prefixkv.prefill.following import Following
from prefixkv.prefill.request import PrefillRequest, PrefillState
from prefixkv.prefill.send_plan import SendPlan

UsablePrefix = Callable[[PrefillRequest, int], int]
"""Given a request and the number of its cached tokens: how many of them the engine can go on from.
Behind the others it has no extra state."""


class PrefillBootstrapQueue:
    """Owned by the scheduler's thread. `usable_prefix` is called for each hit; None: every hit is
    used whole, and requests follow others (`Following`)."""

    def __init__(
        self, books: PageManager, following: Following, usable_prefix: UsablePrefix | None = None
    ) -> None:
        self._books = books
        self._following = following
        self._usable_prefix = usable_prefix
        self._ready: dict[PrefillRequest, None] = {}  # in the order of their promises
        self._blocked_at = -1  # the books' version at which the first that may start did not fit
        self._news = False  # since all were looked at: one came, or what one waits for has moved

    def add(self, req: PrefillRequest, decode_prefix_len: int) -> None:
        """Decode has `decode_prefix_len` tokens of the request and waits for the rest."""
        req.become(PrefillState.BOOTSTRAPPED)
        req.decode_prefix_len = decode_prefix_len
        self._ready[req] = None
        self._news = True

    def remove(self, req: PrefillRequest) -> None:
        del self._ready[req]
        self._following.forget(req)
        self.look_again()

    def look_again(self) -> None:
        """What one of them waits for may be there, or comes no more."""
        self._blocked_at = -1
        self._news = True

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(self._ready)

    @property
    def may_open(self) -> bool:
        """Whether looking may open one. O(1)."""
        may_fit = self._blocked_at != self._books.version and self._books.table.free_rows
        return bool(self._ready and self._news and may_fit)

    @property
    def wake_s(self) -> float:
        """When one of them waits for another's prefix no longer, and may be opened for that."""
        if self._blocked_at == self._books.version or not self._books.table.free_rows:
            return math.inf
        return self._following.wake_s

    def pop_bootstrapped(self, now_s: float, limit: int | None = None) -> list[PrefillRequest]:
        """Requests the engine may compute now: own prefix locked, pages for all of the prompt
        taken. At most `limit`.

        Those that follow another are passed over. One that does not fit is not: it would wait for
        ever.
        """
        popped: list[PrefillRequest] = []
        following = self._following
        if following.wake_s <= now_s:
            self._news = True
        if not self.may_open:
            return popped
        for req in list(self._ready):
            if limit is not None and len(popped) >= limit:
                return popped
            if following.waits(req, now_s):
                continue
            match = self._match(req)
            prefix_len = match.prefix_len if match is not None else 0
            if self._usable_prefix is None and following.follow(
                req, prefix_len // self._books.page_size, now_s
            ):
                continue
            if not self._books.table.free_rows or not self._open(req, match, now_s):
                self._blocked_at = self._books.version
                return popped
            del self._ready[req]
            self._blocked_at = -1
            following.handed_out(req, self._books.caching and req.request.cacheable)
            popped.append(req)
        self._news = False
        return popped

    def _open(self, req: PrefillRequest, match: MatchResult | None, now_s: float) -> bool:
        books, page_size = self._books, self._books.page_size
        prefix_len = match.prefix_len if match is not None else 0
        unprotected = match.unprotected_pages if match is not None else 0
        num_new = pages_for(req.num_tokens, page_size) - whole_pages(prefix_len, page_size)
        if num_new > books.available_pages - unprotected:
            return False
        req.pages_held = books.open(req.key, match, num_new, now_s)
        req.prefix_len = prefix_len
        req.plan = SendPlan(req.num_tokens, req.decode_prefix_len, page_size)
        req.become(PrefillState.COMPUTING)
        return True

    def _match(self, req: PrefillRequest) -> MatchResult | None:
        """The cached prefix that the engine can go on from. Never the last token: the engine has to
        compute that one to sample the next.
        """
        key = req.key
        if len(key) % self._books.page_size == 0:
            key = key.prefix(len(key) - 1)
        match = self._books.match(key, req.request.cacheable)
        if match is None or self._usable_prefix is None or not match.prefix_len:
            return match
        try:
            usable = max(0, operator.index(self._usable_prefix(req, match.prefix_len)))
            usable = page_floor(usable, self._books.page_size)
        except Exception as error:  # the engine's
            self._books.errors.caught(error)
            usable = 0
        if usable >= match.prefix_len:
            return match
        return self._books.match(key.prefix(usable))
