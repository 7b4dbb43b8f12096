"""Checkpoints as the requests of one worker use them: a request locks the one that it goes on from,
fills slots where it saves others, and enters those in the cache.

A prompt that is computed saves one at its end, where the next turn goes on, and where its path
leaves what is cached, since what branched there may do so again. With windows a checkpoint has the
pages of the window before it, which are read in place; new KV goes to own pages.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Final, Generic, TypeVar

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoint, Checkpoints
from prefixkv.cache.results import MatchResult
from prefixkv.errors import RequestError, check_laws, shown
from prefixkv.pages.groups import TailGroups
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import PagedRequest

_NO_WINDOWS: Final = TailGroups()

R = TypeVar("R", bound=PagedRequest[Any])


@dataclass(slots=True)
class Saved:
    """What a request has of checkpoints: the one that it goes on from, and whether it is locked for
    that; the depth in tokens of the deepest that it knows of; and slots that were filled at these
    depths, in pages, and are not entered in the cache yet."""

    checkpoint: Checkpoint | None = None
    is_locked: bool = False
    goes_on_at: int = 0
    slots: list[tuple[int, int]] = field(default_factory=list)


class RequestCheckpoints(Generic[R]):
    """The checkpoints of a page manager, and what its requests have of them. Owned by the
    scheduler's thread. `first_slot`: of the StatePool, that is a checkpoint's; 0: there is no extra
    state. The depth of each is a multiple of `checkpoint_tokens`, and of a page.

    On prefill it is what says where a request goes on (`prefill.request.Resume`), and its only
    saver."""

    follows, is_whole = True, False

    def __init__(self, pages: PageManager, first_slot: int, config: Any) -> None:
        assert isinstance(pages.saves, Checkpoints)
        self._pages, self._points = pages, pages.saves
        self.savers = [self]
        self._first_slot = first_slot
        self._has_state = first_slot > 0
        self._page_size = pages.page_size
        self._step = lcm(pages.page_size, config.checkpoint_tokens)
        self.step_pages = self._step // pages.page_size

    # --- where a request goes on, and where it saves ----------------------------------------------

    def find(self, req: R, match: MatchResult) -> tuple[int, Checkpoint | None]:
        """Return from which token of a match on a request can be computed, and its checkpoint."""
        found = self._points.find(match)
        return 0 if found is None else found.depth * self._page_size, found

    def hold(self, req: R, found: Checkpoint | None) -> None:
        """Lock the checkpoint that a request, which is opened next, goes on from."""
        req.saves = Saved(found, found is not None)
        if found is not None:
            self._points.use(found)
            self._points.lock(found)

    def _of(self, req: R) -> Saved:
        if req.saves is None:
            req.saves = Saved()
        saved: Saved = req.saves
        return saved

    def _unlock(self, req: R) -> None:
        saved = self._of(req)
        if saved.is_locked:
            assert saved.checkpoint is not None
            saved.is_locked = False
            self._points.unlock(saved.checkpoint)

    def opened(self, req: R, dense_pages: int) -> None:
        """Say where a request, just opened to be computed, goes on from, `prefix_len`, and where it
        saves checkpoints. `dense_pages`: of its path, that are cached."""
        saved = self._of(req)
        saved.goes_on_at, req.checkpoint_slot = req.prefix_len, NO_SLOT
        if saved.checkpoint is not None and self._has_state:
            req.checkpoint_slot = self._first_slot + saved.checkpoint.slot
        self._points.cut_tokens += max(0, dense_pages * self._page_size - req.prefix_len)
        if self._may_save(req):
            for tokens in (req.fill_len, dense_pages * self._page_size):
                self.add_stop(req, tokens, req.prefix_len)

    def add_stop(self, req: R, tokens: int, done: int) -> None:
        """Save a checkpoint at `tokens`, rounded down, if the request has computed less: `done`."""
        at = tokens // self._step * self._step
        if at > done and at not in req.stops:
            insort(req.stops, at)

    def passed(self, req: R, end: int) -> None:
        """Note progress to token `end`: the state it began from is copied, stops up to there are
        over."""
        self._unlock(req)
        self.take_if_stop(req, end)
        if req.stops:
            req.stops = [at for at in req.stops if at > end]

    # --- what it saves ----------------------------------------------------------------------------

    def _may_save(self, req: R) -> bool:
        """False after a flush, which its pages were computed before: they do not go to the tree."""
        held = req.pages_held
        assert held is not None
        return self._pages.caching and req.request.cacheable and held.epoch == self._pages.epoch

    def take(self, req: R, end: int) -> int:
        """Return a slot for the state behind `end` tokens, one of the request's stops, with its
        window pages; -1 if none is free. Raises RequestError, with nothing changed, for another
        place."""
        if end not in req.stops:
            where = f"{shown(end)}, but at {req.stops}"
            raise RequestError(f"request {req.rid!r} saves no state at {where}")
        req.stops.remove(end)
        return self._save(req, end, req.max_pages)

    def take_if_stop(self, req: R, end: int) -> None:
        """Keep what is behind `end` tokens, a stop, where it is: without extra state nothing has to
        be copied."""
        if not self._has_state and end in req.stops:
            self.take(req, end)

    def _save(self, req: R, end: int, end_pages: int | None, slot: int = NO_SLOT) -> int:
        """Keep what is behind `end` tokens in `slot`, or in a new one: the state, and the window
        pages before, for which the request gets others up to `end_pages`; None: the state alone.
        Return the slot, of the StatePool; -1, and `slot` is free, if there is no room."""
        windows = _NO_WINDOWS if end_pages is None else self._pages.windows
        held, depth = req.pages_held, end // self._page_size
        assert held is not None
        needs = windows.num_replaced(held.row, depth, end_pages or 0)
        if needs is None:
            if slot != NO_SLOT:
                self._points.give_back(slot)
            return NO_SLOT
        if slot == NO_SLOT and (slot := self._points.take()) == NO_SLOT:
            return NO_SLOT
        self._points.make_room(needs)
        self._points.attach(slot, windows.share(held.row, depth, end_pages or 0))
        self._of(req).slots.append((depth, slot))
        return self._first_slot + slot

    def enter(self, req: R) -> int:
        """Enter the saved states whose pages are in the tree, under the request's lock. Return the
        depth, in tokens, of the deepest entered, or gone on from."""
        held, saved, waiting = req.pages_held, self._of(req), []
        for depth, slot in saved.slots:
            assert held is not None
            # After a flush the pages that it has locked are in no tree.
            if depth > held.num_locked or held.epoch != self._pages.epoch:
                waiting.append((depth, slot))
                continue
            page = int(self._pages.pages(held)[depth - 1])
            self._points.save(page, depth, slot, saved.checkpoint)
            saved.goes_on_at = max(saved.goes_on_at, depth * self._page_size)
        saved.slots = waiting
        return saved.goes_on_at

    # --- ends -------------------------------------------------------------------------------------

    def dropped(self, req: R) -> None:
        self._unlock(req)
        self._give_back(req)
        req.stops, req.checkpoint_slot, req.saves = [], NO_SLOT, None

    def _give_back(self, req: R) -> None:
        saved = self._of(req)
        for _, slot in saved.slots:
            self._points.give_back(slot)
        saved.slots = []

    def check_invariants(self, requests: Sequence[R]) -> None:
        """Check the checkpoints against the requests. Raises InternalError."""
        saved = [req.saves for req in requests if req.saves is not None]
        taken = sorted(slot for one in saved for _, slot in one.slots)
        laws = {
            "every lock of a checkpoint is a request's": self._points.num_locks
            == sum(one.is_locked for one in saved),
            "every taken slot is a request's": self._points.taken == taken,
            "only what holds pages has to do with checkpoints": all(
                req.pages_held is not None or not (req.stops or req.saves) for req in requests
            ),
        }
        check_laws(laws, requests)
