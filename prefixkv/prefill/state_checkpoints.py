"""Checkpoints on prefill, of extra state and of windows: where a request goes on from one, where it
saves one, and when that is entered in the cache.

A model with recurrent layers can go on computing behind a cached prefix only from a state. A state
is saved where it will be wanted: at the end of each prompt, since the next turn goes on there; and
where the path of a prompt leaves what is cached, since what branched there once may do so again.
A request that waits for a prefix which another computes has it save one where they part.

Where layers keep a window, a checkpoint has the pages of the window before it. A request that goes
on from it reads them where they are; what it computes goes to pages of its own.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from math import lcm

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoint, Windows
from prefixkv.cache.results import MatchResult
from prefixkv.errors import check_laws
from prefixkv.pages.manager import PageManager
from prefixkv.paging import pages_for, whole_pages
from prefixkv.prefill.request import PrefillRequest


class StateCheckpoints:
    """The checkpoints of a prefill worker's page manager, as its requests use them. Owned by the
    scheduler's thread.

    Args:
        pages: with `num_checkpoints`.
        first_slot: of the StatePool, that is a checkpoint's; those before it are the engine's.
        tokens: the depth of each is a multiple of that number of tokens, and of a page.
    """

    def __init__(self, pages: PageManager, first_slot: int, tokens: int) -> None:
        assert pages.checkpoints is not None
        self._pages, self._points = pages, pages.checkpoints
        self._first_slot = first_slot
        self._has_state = first_slot > 0
        self._step = lcm(pages.page_size, tokens)
        self._found: Checkpoint | None = None  # of the request that was looked at last

    @property
    def step_pages(self) -> int:
        """Pages of which the depth of each of prefill's checkpoints is a multiple."""
        return self._step // self._pages.page_size

    def usable_tokens(self, req: PrefillRequest, match: MatchResult | None) -> int:
        """Return how many tokens of a match prefill can continue from: those of the deepest
        checkpoint on it, which `begin` locks. Changes nothing in the cache."""
        self._found = None if match is None else self._points.find(match)
        req.dense_pages = 0 if match is None else match.depth
        return 0 if self._found is None else self._found.depth * self._pages.page_size

    @property
    def found_windows(self) -> Windows:
        """Pages in each window group of the checkpoint that the request of prefill looked at last
        goes on from."""
        return () if self._found is None else self._found.windows

    def hold(self, req: PrefillRequest) -> None:
        """Lock the checkpoint that a request of prefill goes on from, which was just looked at, and
        is opened next."""
        found = self._found
        if found is not None:
            self._points.use(found)
            self._points.lock(found)
            req.checkpoint, req.holds_checkpoint = found, True

    def begin(self, req: PrefillRequest) -> None:
        """Say where a request of prefill, just opened, goes on from, and is to save checkpoints."""
        page_size = self._pages.page_size
        req.goes_on_at = req.prefix_len
        if req.checkpoint is not None and self._has_state:
            req.checkpoint_slot = self._first_slot + req.checkpoint.slot
        if self._pages.caching and req.request.cacheable:
            # The prompt's end, and where its path leaves what is cached.
            for tokens in (req.num_tokens, req.dense_pages * page_size):
                self.add_stop(req, tokens)

    def add_stop(self, req: PrefillRequest, tokens: int) -> None:
        """Have a request of prefill save a checkpoint at `tokens`, rounded down, if it has not
        computed as much."""
        at = tokens // self._step * self._step
        done = max(req.prefix_len, req.plan.computed if req.plan is not None else 0)
        if at > done and at not in req.stops:
            insort(req.stops, at)

    def take(self, req: PrefillRequest, end: int) -> int:
        """Return the slot of the StatePool for the state of a request of prefill behind `end`
        tokens, one of its stops; -1 if none is free. In the window groups its pages there are kept
        too."""
        req.stops.remove(end)
        pages, depth = self._pages, whole_pages(end, self._pages.page_size)
        windows, held = pages.windows, req.pages_held
        # All or nothing: a page comes for each that the request gives to the checkpoint.
        end_pages = pages_for(req.num_tokens, pages.page_size)
        needs: list[int] = []
        if windows:
            assert held is not None
            needs = windows.num_replaced(held.row, depth, end_pages)
            if not windows.has_room(needs):
                return NO_SLOT
        slot = self._points.take()
        if slot == NO_SLOT:
            return slot
        if windows:
            assert held is not None
            self._points.make_room(needs)
            self._points.attach(slot, windows.share(held.row, depth, end_pages))
        req.saved.append((depth, slot))
        return self._first_slot + slot

    def take_if_stop(self, req: PrefillRequest, end: int) -> None:
        """Keep the window pages of a request of prefill behind `end` tokens, if that is one of its
        stops and it has no extra state, which its engine would have to copy."""
        if not self._has_state and end in req.stops:
            self.take(req, end)

    def computed(self, req: PrefillRequest) -> None:
        """Note that a request of prefill has computed a chunk: it has copied the state that it goes
        on from, and stops behind it are over."""
        self._unlock(req)
        if req.plan is not None and req.stops:
            req.stops = [at for at in req.stops if at > req.plan.computed]

    def enter(self, req: PrefillRequest) -> int:
        """Enter the states that a request of prefill has saved, and whose pages are in the tree by
        now. Return the depth, in tokens, of the deepest that it has entered, or went on from."""
        pages, page_size = req.pages_held, self._pages.page_size
        if not req.saved or pages is None:
            return req.goes_on_at
        left = []
        for depth, slot in req.saved:
            # Not in the tree yet, or never: after a flush nothing more of the request goes there.
            if depth > pages.num_locked:
                left.append((depth, slot))
                continue
            page = int(self._pages.pages(pages)[depth - 1])
            self._points.save(page, depth, slot, req.checkpoint)
            req.goes_on_at = max(req.goes_on_at, depth * page_size)
        req.saved = left
        return req.goes_on_at

    def end(self, req: PrefillRequest) -> None:
        """Give back what a request of prefill has of checkpoints. Before its pages are released."""
        self._unlock(req)
        for _, slot in req.saved:
            self._points.give_back(slot)
        req.saved, req.stops = [], []

    def _unlock(self, req: PrefillRequest) -> None:
        """Unlock the checkpoint that a request of prefill goes on from, if it is locked."""
        if req.holds_checkpoint:
            assert req.checkpoint is not None
            req.holds_checkpoint = False
            self._points.unlock(req.checkpoint)

    def check_invariants(self, requests: Collection[PrefillRequest]) -> None:
        """Check the checkpoints against the requests of prefill. Raises InternalError."""
        held = [req for req in requests if req.holds_checkpoint]
        taken = sorted(slot for req in requests for _, slot in req.saved)
        laws = {
            "every lock of a checkpoint is a request's": self._points.num_locks == len(held),
            "every taken slot is a request's": self._points.taken == taken,
            "only what computes has stops": all(
                not req.stops or req.pages_held is not None for req in requests
            ),
        }
        check_laws(laws, requests)
