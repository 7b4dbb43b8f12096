"""Checkpoints on prefill, of extra state and of windows: where they are used, saved and cached.

A model with recurrent layers can go on behind a cached prefix only from a state. A state is saved
at the end of each prompt, where the next turn goes on, and where a path leaves what is cached,
since what branched there may do so again. A request that waits for a shared prefix has a state
saved where they part. With windows a checkpoint has the pages of the window before it, which are
read in place; new KV goes to own pages.
"""

from __future__ import annotations

from prefixkv.cache.checkpoints import Checkpoint
from prefixkv.cache.results import MatchResult
from prefixkv.pages.manager import PageManager
from prefixkv.pages.request_checkpoints import RequestCheckpoints
from prefixkv.prefill.request import PrefillRequest


class StateCheckpoints(RequestCheckpoints[PrefillRequest]):
    """Checkpoints as a prefill worker's requests use them. Owned by the scheduler's thread. Slots
    of the StatePool before `first_slot` are the engine's."""

    def __init__(self, pages: PageManager, first_slot: int, tokens: int) -> None:
        super().__init__(pages, first_slot, tokens)
        self.found: Checkpoint | None = None  # of the request that was looked at last

    @property
    def step_pages(self) -> int:
        return self._step // self._pages.page_size

    def usable_tokens(self, req: PrefillRequest, match: MatchResult | None) -> int:
        """Tokens of a match's deepest checkpoint, which is `found` then."""
        self.found = None if match is None else self._points.find(match)
        req.dense_pages = 0 if match is None else match.depth
        return 0 if self.found is None else self.found.depth * self._pages.page_size

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
