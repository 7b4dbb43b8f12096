"""Checkpoints on prefill, of extra state and of windows: where they are used, saved and cached.

A model with recurrent layers can go on behind a cached prefix only from a state. A state is saved
at the end of each prompt, where the next turn goes on, and where a path leaves what is cached,
since what branched there may do so again. A request that waits for a shared prefix has a state
saved where they part. With windows a checkpoint has the pages of the window before it, which are
read in place; new KV goes to own pages.
"""

from __future__ import annotations

from prefixkv.cache.checkpoints import Checkpoint, Windows
from prefixkv.cache.results import MatchResult
from prefixkv.pages.manager import PageManager
from prefixkv.pages.request_checkpoints import RequestCheckpoints
from prefixkv.paging import pages_for
from prefixkv.prefill.request import PrefillRequest


class StateCheckpoints(RequestCheckpoints[PrefillRequest]):
    """Checkpoints as a prefill worker's requests use them. Owned by the scheduler's thread. Slots
    of the StatePool before `first_slot` are the engine's."""

    def __init__(self, pages: PageManager, first_slot: int, tokens: int) -> None:
        super().__init__(pages, first_slot, tokens)
        self._found: Checkpoint | None = None  # of the request that was looked at last

    @property
    def step_pages(self) -> int:
        return self._step // self._pages.page_size

    def usable_tokens(self, req: PrefillRequest, match: MatchResult | None) -> int:
        """Tokens of a match's deepest checkpoint, which `begin` locks. Changes nothing."""
        self._found = None if match is None else self._points.find(match)
        req.dense_pages = 0 if match is None else match.depth
        return 0 if self._found is None else self._found.depth * self._pages.page_size

    @property
    def found_windows(self) -> Windows:
        """Window pages of the checkpoint that the request looked at last goes on from."""
        return () if self._found is None else self._found.windows

    def hold(self, req: PrefillRequest) -> None:
        """Lock the checkpoint of a request that was just looked at, and is opened next."""
        self._lock(req, self._found)

    def begin(self, req: PrefillRequest) -> None:
        """Say where a request, just opened, goes on from, and is to save checkpoints."""
        page_size = self._pages.page_size
        self._go_on(req)
        if self._pages.caching and req.request.cacheable:
            # The prompt's end, and where its path leaves what is cached.
            for tokens in (req.num_tokens, req.dense_pages * page_size):
                self.add_stop(req, tokens)

    def add_stop(self, req: PrefillRequest, tokens: int) -> None:
        """Save a checkpoint at `tokens`, rounded down, if the request has computed less."""
        done = max(req.prefix_len, req.plan.computed if req.plan is not None else 0)
        self._add_stop(req, tokens, done)

    def take(self, req: PrefillRequest, end: int) -> int:
        """Return a slot for the state behind `end` tokens, one of the request's stops, with its
        window pages; -1 if none is free."""
        req.stops.remove(end)
        return self._take(req, end, pages_for(req.num_tokens, self._pages.page_size))

    def take_if_stop(self, req: PrefillRequest, end: int) -> None:
        """Keep the window pages behind `end` tokens, a stop, of a request without extra state."""
        if not self._has_state and end in req.stops:
            self.take(req, end)

    def computed(self, req: PrefillRequest) -> None:
        """Note a computed chunk: the state it began from is copied, stops up to there are over."""
        self._unlock(req)
        if req.plan is not None:
            self._pass_stops(req, req.plan.computed)

    def enter(self, req: PrefillRequest) -> int:
        """Enter the saved states whose pages are in the tree. Return the depth, in tokens, of the
        deepest entered, or gone on from."""
        pages = req.pages_held
        if not req.saved or pages is None:
            return req.goes_on_at
        left = []
        for depth, slot in req.saved:
            # Not in the tree yet, or never: after a flush nothing more of the request goes there.
            if depth > pages.num_locked:
                left.append((depth, slot))
            else:
                self._save(req, depth, slot)
        req.saved = left
        return req.goes_on_at
