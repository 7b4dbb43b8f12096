"""Checkpoints of extra state on decode: from which its engine computes a prompt itself, or goes on
with an answer that was retracted.

Decode needs none for a hit, since prefill sends the state of a prompt's end. Only where decode
computes does it need a state to begin from. A prompt that is computed here saves one as prefill
does: at its end, and where its path leaves what is cached. A request that runs has one slot, which
gets its state at each page boundary in place of the one before, and is entered in the cache when
the request finishes or is retracted.

What is computed here begins at a checkpoint, and pages behind that are computed again though they
are cached: so the request takes pages of its own for them. What is sent begins where the cache
ends. Therefore the choice between both is made before pages are taken.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from math import lcm

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoint
from prefixkv.cache.results import MatchResult
from prefixkv.decode.request import CAN_RUN, DecodeRequest
from prefixkv.errors import RequestError, check_laws
from prefixkv.pages.manager import PageManager


class DecodeCheckpoints:
    """The checkpoints of a decode worker's page manager, as its requests use them. Owned by the
    scheduler's thread.

    Args:
        pages: with `num_slots` and `num_checkpoints`: the slots of the StatePool are those of the
            requests, then those of the checkpoints.
        tokens: the depth of each is a multiple of that number of tokens, and of a page.

    `cut_tokens` counts tokens whose KV was cached, and that are computed here again, since no
    checkpoint lay behind them.
    """

    def __init__(self, pages: PageManager, tokens: int) -> None:
        assert pages.checkpoints is not None
        assert pages.slots is not None
        self._pages, self._points = pages, pages.checkpoints
        self._first_slot = pages.slots.num_pages
        self._step = lcm(pages.page_size, tokens)
        self.cut_tokens = 0

    # --- where a request goes on ------------------------------------------------------------------

    def find(self, req: DecodeRequest, match: MatchResult | None) -> Checkpoint | None:
        """Return the deepest checkpoint on what is cached of a decode request, from which its
        engine can go on. Changes nothing.

        Behind it a token is left at least, from which the first of the answer is sampled; none
        needs to be for a resumed request, which has its next token.
        """
        if match is None:
            return None
        if not req.resumed and match.prefix_len == len(req.key):
            match = self._pages.match(req.key.prefix(len(req.key) - 1))
            assert match is not None
        return self._points.find(match)

    def tokens_behind(self, req: DecodeRequest, found: Checkpoint | None) -> int:
        """Return how many tokens decode has to compute of a request from a checkpoint on; from its
        beginning without one."""
        return req.kv_len - (0 if found is None else found.depth * self._pages.page_size)

    def hold(self, req: DecodeRequest, found: Checkpoint | None) -> None:
        """Lock the checkpoint that a decode request goes on from, which is opened next."""
        if found is not None:
            self._points.use(found)
            self._points.lock(found)
            req.holds_checkpoint = True
        req.checkpoint = found

    def begin(self, req: DecodeRequest, dense_pages: int) -> None:
        """Say where a decode request, just opened to be computed here, goes on from, and where it
        saves checkpoints. `dense_pages`: of its path, that are cached."""
        page_size = self._pages.page_size
        req.checkpoint_slot = NO_SLOT
        if req.checkpoint is not None:
            req.checkpoint_slot = self._first_slot + req.checkpoint.slot
        req.goes_on_at = req.prefix_len
        self.cut_tokens += max(0, dense_pages * page_size - req.prefix_len)
        if self._may_save(req):
            for tokens in (req.fill_len, dense_pages * page_size):
                at = tokens // self._step * self._step
                if at > req.prefix_len and at not in req.stops:
                    insort(req.stops, at)

    # --- what it saves ----------------------------------------------------------------------------

    def take(self, req: DecodeRequest, end: int) -> int:
        """Return the slot of the StatePool for the state of a decode request that is computed here,
        behind `end` tokens, one of its stops; -1 if none is free.

        Raises RequestError, with nothing changed, for another place.
        """
        if end not in req.stops:
            raise RequestError(f"request {req.rid!r} saves no state at {end}, but at {req.stops}")
        req.stops.remove(end)
        return self._take(req, end)

    def running(self, reqs: Iterable[DecodeRequest]) -> list[tuple[int, int]]:
        """Return the copies of states that are due before decode's engine makes a step: of each
        running request at a page boundary its slot, and the slot that keeps its state.

        O(requests), and a heap for those that have no such slot yet.
        """
        copies: list[tuple[int, int]] = []
        for req in reqs:
            at = req.kv_len
            if at % self._step or at <= req.goes_on_at or req.state not in CAN_RUN:
                continue
            if not self._may_save(req):
                continue
            if req.saved:
                # One slot a request: what it had before is a page behind.
                _, slot = req.saved.pop()
                req.saved.append((at // self._pages.page_size, slot))
                slot += self._first_slot
            else:
                slot = self._take(req, at)
            if slot != NO_SLOT:
                copies.append((req.state_slot, slot))
        return copies

    def _take(self, req: DecodeRequest, end: int) -> int:
        """Take a slot for a decode request's state behind `end` tokens."""
        slot = self._points.take()
        if slot == NO_SLOT:
            return slot
        req.saved.append((end // self._pages.page_size, slot))
        return self._first_slot + slot

    def _may_save(self, req: DecodeRequest) -> bool:
        """Return whether a decode request's pages go to the tree, so that a checkpoint can end on
        one: not after a flush, which they were computed before."""
        held = req.pages_held
        assert held is not None
        return self._pages.caching and req.request.cacheable and held.epoch == self._pages.epoch

    # --- ends -------------------------------------------------------------------------------------

    def computed(self, req: DecodeRequest, end: int) -> None:
        """Note that decode's engine has computed a request up to token `end`: it has copied the
        state that it goes on from, and stops behind it are over."""
        self._unlock(req)
        if req.stops:
            req.stops = [at for at in req.stops if at > end]

    def enter(self, req: DecodeRequest) -> None:
        """Enter the states that a decode request has saved, as far as their pages are in the tree,
        under its lock; give the other slots back."""
        held, saved = req.pages_held, req.saved
        req.saved = []
        if not saved:
            return
        assert held is not None
        for depth, slot in saved:
            # After a flush the pages that it has locked are in no tree.
            if depth > held.num_locked or held.epoch != self._pages.epoch:
                self._points.give_back(slot)
                continue
            page = int(self._pages.pages(held)[depth - 1])
            self._points.save(page, depth, slot, req.checkpoint)
            req.goes_on_at = max(req.goes_on_at, depth * self._pages.page_size)

    def leave(self, req: DecodeRequest) -> None:
        """Enter the state that a decode request leaves in the cache, and give back the rest. Under
        its lock, which has all its pages that are cached."""
        self.enter(req)
        self.end(req)

    def end(self, req: DecodeRequest) -> None:
        """Give back what a decode request has of checkpoints. Before its pages are released."""
        self._unlock(req)
        for _, slot in req.saved:
            self._points.give_back(slot)
        req.saved, req.stops = [], []
        req.checkpoint, req.checkpoint_slot, req.goes_on_at = None, NO_SLOT, 0

    def _unlock(self, req: DecodeRequest) -> None:
        """Unlock the checkpoint that a decode request goes on from, if it is locked."""
        if req.holds_checkpoint:
            assert req.checkpoint is not None
            req.holds_checkpoint = False
            self._points.unlock(req.checkpoint)

    def check_invariants(self, requests: Collection[DecodeRequest]) -> None:
        """Check the checkpoints against the decode requests that hold pages. Raises
        InternalError."""
        taken = sorted(slot for req in requests for _, slot in req.saved)
        laws = {
            "every lock of a checkpoint is a request's": self._points.num_locks
            == sum(req.holds_checkpoint for req in requests),
            "every taken slot is a request's": self._points.taken == taken,
            "only what holds pages has to do with checkpoints": all(
                req.pages_held is not None
                or not (req.stops or req.saved or req.holds_checkpoint or req.checkpoint)
                for req in requests
            ),
            "a request that runs has one slot": all(
                len(req.saved) <= 1 for req in requests if req.state in CAN_RUN
            ),
            "what is saved lies in the request's own KV": all(
                0 < depth * self._pages.page_size <= req.kv_len
                for req in requests
                for depth, _ in req.saved
            ),
        }
        check_laws(laws, requests)
