"""Checkpoints as the requests of one worker use them: a request locks the one that it goes on from,
fills slots where it saves others, and enters those in the cache."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from math import lcm
from typing import Any, Generic, TypeVar

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoint
from prefixkv.errors import RequestError, check_laws, shown
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import PagedRequest

R = TypeVar("R", bound=PagedRequest[Any])


class RequestCheckpoints(Generic[R]):
    """The checkpoints of a page manager, and what its requests have of them. Owned by the
    scheduler's thread. `first_slot`: of the StatePool, that is a checkpoint's; 0: there is no extra
    state. `tokens`: the depth of each is a multiple of that number of tokens, and of a page."""

    def __init__(self, pages: PageManager, first_slot: int, tokens: int) -> None:
        assert pages.checkpoints is not None
        self._pages, self._points = pages, pages.checkpoints
        self._first_slot = first_slot
        self._has_state = first_slot > 0
        self._step = lcm(pages.page_size, tokens)

    # --- where a request goes on, and where it saves ----------------------------------------------

    def hold(self, req: R, found: Checkpoint | None) -> None:
        """Lock the checkpoint that a request, which is opened next, goes on from."""
        if found is not None:
            self._points.use(found)
            self._points.lock(found)
            req.holds_checkpoint = True
        req.checkpoint = found

    def _unlock(self, req: R) -> None:
        if req.holds_checkpoint:
            assert req.checkpoint is not None
            req.holds_checkpoint = False
            self._points.unlock(req.checkpoint)

    def _go_on(self, req: R) -> None:
        """Say where a request, just opened, goes on from: its `prefix_len` is there."""
        req.goes_on_at, req.checkpoint_slot = req.prefix_len, NO_SLOT
        if req.checkpoint is not None and self._has_state:
            req.checkpoint_slot = self._first_slot + req.checkpoint.slot

    def _add_stop(self, req: R, tokens: int, done: int) -> None:
        """At `tokens`, rounded down, if the request has computed less: `done`."""
        at = tokens // self._step * self._step
        if at > done and at not in req.stops:
            insort(req.stops, at)

    def _pass_stops(self, req: R, end: int) -> None:
        if req.stops:
            req.stops = [at for at in req.stops if at > end]

    # --- what it saves ----------------------------------------------------------------------------

    def take(self, req: R, end: int) -> int:
        """Return a slot for the state behind `end` tokens, one of the request's stops, with its
        window pages; -1 if none is free. Raises RequestError, with nothing changed, for another
        place."""
        if end not in req.stops:
            where = f"{shown(end)}, but at {req.stops}"
            raise RequestError(f"request {req.rid!r} saves no state at {where}")
        req.stops.remove(end)
        return self._take(req, end)

    def take_if_stop(self, req: R, end: int) -> None:
        """Keep what is behind `end` tokens, a stop, where it is: without extra state nothing has to
        be copied."""
        if not self._has_state and end in req.stops:
            self.take(req, end)

    def _take(self, req: R, end: int, with_windows: bool = True) -> int:
        """Return a slot of the StatePool for what is behind `end` tokens; -1 if none is free. With
        the window pages, all or nothing: the request gets others in their place."""
        end_pages = req.max_pages
        depth = end // self._pages.page_size
        windows = with_windows and self._pages.windows
        if windows and not self._can_share(req, depth, end_pages):
            return NO_SLOT
        slot = self._points.take()
        if slot == NO_SLOT:
            return slot
        if windows:
            self._share(req, slot, depth, end_pages)
        req.saved.append((depth, slot))
        return self._first_slot + slot

    def _can_share(self, req: R, depth: int, end_pages: int) -> bool:
        windows, held = self._pages.windows, req.pages_held
        assert held is not None
        at = depth * self._pages.page_size
        if any(one.row(held.row).first_page > one.first_page(at) for one in windows):
            return False
        return windows.has_room(windows.num_replaced(held.row, depth, end_pages))

    def _share(self, req: R, slot: int, depth: int, end_pages: int) -> None:
        windows, held = self._pages.windows, req.pages_held
        assert held is not None
        self._points.make_room(windows.num_replaced(held.row, depth, end_pages))
        self._points.attach(slot, windows.share(held.row, depth, end_pages))

    def _save(self, req: R, depth: int, slot: int) -> None:
        assert req.pages_held is not None
        page = int(self._pages.pages(req.pages_held)[depth - 1])
        self._points.save(page, depth, slot, req.checkpoint)
        req.goes_on_at = max(req.goes_on_at, depth * self._pages.page_size)

    # --- ends -------------------------------------------------------------------------------------

    def end(self, req: R) -> None:
        self._unlock(req)
        for _, slot in req.saved:
            self._points.give_back(slot)
        req.saved, req.stops = [], []

    def check_invariants(self, requests: Collection[R]) -> None:
        """Check the checkpoints against the requests. Raises InternalError."""
        taken = sorted(slot for req in requests for _, slot in req.saved)
        laws = {
            "every lock of a checkpoint is a request's": self._points.num_locks
            == sum(req.holds_checkpoint for req in requests),
            "every taken slot is a request's": self._points.taken == taken,
            "only what holds pages has stops": all(
                not req.stops or req.pages_held is not None for req in requests
            ),
        }
        check_laws(laws, requests)
