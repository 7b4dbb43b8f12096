"""Checkpoints on decode, of extra state and of windows, where its engine begins to compute.

A hit needs none, since prefill sends the state and the window of a prompt's end. A prompt that is
computed here saves them as prefill does. A running request's slot takes its state at each page
boundary, and is cached at its finish or retraction, with the window before that boundary.

Computing begins at a checkpoint, so cached pages behind it are computed again, on pages of the
request. What is sent begins where the cache ends: the choice comes before pages are taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoint
from prefixkv.cache.results import MatchResult
from prefixkv.decode.request import CAN_RUN, DecodeRequest
from prefixkv.errors import check_laws
from prefixkv.pages.manager import PageManager
from prefixkv.pages.request_checkpoints import RequestCheckpoints


class DecodeCheckpoints(RequestCheckpoints[DecodeRequest]):
    """Checkpoints as a decode worker's requests use them. The slots of the StatePool are those of
    the requests, then those of the checkpoints."""

    def __init__(self, pages: PageManager, tokens: int) -> None:
        super().__init__(pages, 0 if pages.slots is None else pages.slots.num_pages, tokens)

    # --- where a request goes on ------------------------------------------------------------------

    def find(self, req: DecodeRequest, match: MatchResult | None) -> Checkpoint | None:
        """Return the deepest checkpoint on what is cached, to go on from. Behind it a token is left
        at least, from which the first of the answer is sampled; a resumed request needs none."""
        if match is None:
            return None
        if not req.resumed and match.prefix_len == len(req.key):
            match = self._pages.match(req.key.prefix(len(req.key) - 1))
            assert match is not None
        return self._points.find(match)

    def sent_len(self, req: DecodeRequest, shared_pages: int, most: int) -> int:
        """Return up to which token prefill is to send a request: to its end, or where that leaves a
        checkpoint with at most `most` tokens behind it. Not before the end of the `shared_pages`
        that are here or on their way."""
        at = req.fill_len // self._step * self._step
        can_save = self._pages.caching and req.request.cacheable and req.request.may_compute
        if can_save and req.fill_len - at <= most and at >= shared_pages * self._page_size:
            return at or req.fill_len
        return req.fill_len

    def go_on_from_sent(self, req: DecodeRequest, at: int) -> None:
        """Go on from `at`, where what was sent becomes a checkpoint before it moves on."""
        req.prefix_len, req.checkpoint_slot = at, req.state_slot
        if self._may_save(req):
            self.add_stop(req, req.prefix_len, 0)
        self.take_if_stop(req, req.prefix_len)

    # --- what it saves ----------------------------------------------------------------------------

    def running(self, reqs: Iterable[DecodeRequest]) -> list[tuple[int, int]]:
        """Return the copies of states that are due before a step: of each request at a page
        boundary its slot, and the slot that keeps its state. O(requests), and a heap for those
        without such a slot."""
        copies: list[tuple[int, int]] = []
        step = self._step
        for req in reqs if self._has_state else ():
            # Its `kv_len`, without a call: most are at no boundary.
            num_output = len(req.output)
            at = req.prompt_len + num_output - (num_output > 0)
            if at % step or at <= req.goes_on_at or req.state not in CAN_RUN:
                continue
            if not self._may_save(req):
                continue
            self._enter_sent(req)
            # One slot a request: what it had before is a page behind. Only where all was sent its
            # window is kept now.
            slot = req.saved.pop()[1] if req.saved else NO_SLOT
            keeps_window = at == req.fill_len and slot == NO_SLOT
            slot = self._save(req, at, req.max_pages if keeps_window else None, slot)
            if slot != NO_SLOT:
                copies.append((req.state_slot, slot))
        return copies

    # --- ends -------------------------------------------------------------------------------------

    def committed(self, req: DecodeRequest, was_sent: bool) -> None:
        """Enter what a request has saved that was just committed. One that was sent to its end
        keeps its window there; its state the engine has still to copy."""
        is_end = req.fill_len % self._step == 0
        if was_sent and is_end and not self._has_state and self._may_save(req):
            self._save(req, req.fill_len, req.max_pages)
        self.enter(req)
        self._give_back(req)

    def _enter_sent(self, req: DecodeRequest) -> None:
        if req.saved and req.saved[-1][0] * self._page_size == req.fill_len:
            self.enter(req)
            self._give_back(req)

    def leave(self, req: DecodeRequest) -> None:
        """Enter the state and window that a request leaves, and give back the rest. Under its lock,
        which has all its cached pages."""
        held = req.pages_held
        self._enter_sent(req)
        if self._pages.windows and held is not None and self._may_save(req):
            left = []
            if self._has_state:
                left, req.saved = req.saved, []
            elif not req.saved:
                left = [(held.num_locked // self.step_pages * self.step_pages, NO_SLOT)]
            for depth, slot in left:
                # What it leaves, it needs no more: it gets no pages in place of these.
                if slot != NO_SLOT or depth * self._page_size > req.goes_on_at:
                    self._save(req, depth * self._page_size, depth, slot)
        self.enter(req)
        self.end(req)

    def check_invariants(self, requests: Collection[DecodeRequest]) -> None:
        """Check the checkpoints against the requests that hold pages. Raises InternalError."""
        super().check_invariants(requests)
        laws = {
            "a request that runs has one slot": all(
                len(req.saved) <= 1 for req in requests if req.state in CAN_RUN
            ),
            "what is saved lies in the request's own KV": all(
                0 < depth * self._page_size <= req.kv_len
                for req in requests
                for depth, _ in req.saved
            ),
        }
        check_laws(laws, requests)
