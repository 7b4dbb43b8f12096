"""Checkpoints as decode's requests use them, and own compute that goes on from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoint
from prefixkv.cache.radix_key import RadixKey
from prefixkv.cache.results import MatchResult
from prefixkv.config import DecodeConfig
from prefixkv.decode.compute_source import ComputeSource
from prefixkv.decode.flights import Flight, Need, Segment
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import CAN_RUN, DecodeRequest
from prefixkv.decode.sources import Sources
from prefixkv.errors import check_laws
from prefixkv.pages.request_checkpoints import RequestCheckpoints
from prefixkv.paging import Pages


class CheckpointStart(NamedTuple):
    """Where a request begins to be computed; of its path `dense_pages` are cached."""

    checkpoint: Checkpoint | None
    dense_pages: int

    @property
    def windows(self) -> tuple[tuple[Pages, ...], ...]:
        return () if self.checkpoint is None else (self.checkpoint.windows,)


class CheckpointedCompute(RequestCheckpoints[DecodeRequest], ComputeSource):
    """Own compute of requests with extra state or windows: from a checkpoint on. The slots of the
    StatePool are those of the requests, then those of the checkpoints.

    A hit needs none, since prefill sends the state and the window of a prompt's end. A prompt that
    is computed here saves them as prefill does. A running request's slot takes its state at each
    page boundary, and is cached at its finish or retraction, with the window before that boundary.

    Computing begins at a checkpoint, so cached pages behind it are computed again, on pages of the
    request. What is sent begins where the cache ends: the choice comes before pages are taken.
    """

    def __init__(
        self, ledger: Ledger, rule: Sources, asks_late: bool, config: DecodeConfig
    ) -> None:
        ComputeSource.__init__(self, ledger, rule, asks_late)
        num_slots = 0 if ledger.pages.slots is None else ledger.pages.slots.num_pages
        RequestCheckpoints.__init__(self, ledger.pages, num_slots, config)

    # --- the way of a request ---------------------------------------------------------------------

    def shared_key(self, req: DecodeRequest, key: RadixKey) -> RadixKey:
        return key

    def reach(self, need: Need) -> Segment | None:
        checkpoint = self._find(need.req, need.match)
        depth = 0 if checkpoint is None else checkpoint.depth
        dense = 0 if need.match is None else need.match.depth
        start = CheckpointStart(checkpoint, dense)
        return self._within(need, Segment(self, depth * self._ledger.page_size, need.end, start))

    def takes_over(self, need: Need) -> int:
        # Where prefill has the whole prompt already, it sends all.
        req = need.req
        if not need.can_ask or not (self.asks_late or req.generation > req.request.generation):
            return need.end
        shared_pages = need.start // self._ledger.page_size
        return self._sent_len(req, shared_pages, self.rule.least_tokens)

    def opening(self, req: DecodeRequest, segment: Segment) -> None:
        self.hold(req, segment.found.checkpoint)

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        super().begin(flight, segment, now_s)
        assert flight.owner is not None
        if segment.found is None:
            self._go_on_from_sent(flight.owner, segment.start)
        else:
            self.opened(flight.owner, segment.found.dense_pages)

    def _progressed(self, req: DecodeRequest, end: int) -> None:
        assert req.pages_held is not None
        self.passed(req, end)
        self._pages.slide(req.pages_held, end)

    def save_state(self, req: DecodeRequest, end: int) -> int:
        if req not in self._done:
            return super().save_state(req, end)
        return self.take(req, end)

    def _find(self, req: DecodeRequest, match: MatchResult | None) -> Checkpoint | None:
        """Return the deepest checkpoint on what is cached, to go on from. Behind it a token is left
        at least, from which the first of the answer is sampled; a resumed request needs none."""
        if match is None:
            return None
        if not req.resumed and match.prefix_len == len(req.key):
            match = self._pages.match(req.key.prefix(len(req.key) - 1))
            assert match is not None
        return self._points.find(match)

    def _sent_len(self, req: DecodeRequest, shared_pages: int, most: int) -> int:
        """Return up to which token prefill is to send a request: to its end, or where that leaves a
        checkpoint with at most `most` tokens behind it. Not before the end of the `shared_pages`
        that are here or on their way."""
        at = req.fill_len // self._step * self._step
        can_save = self._pages.caching and req.request.cacheable and req.request.may_compute
        if can_save and req.fill_len - at <= most and at >= shared_pages * self._page_size:
            return at or req.fill_len
        return req.fill_len

    def _go_on_from_sent(self, req: DecodeRequest, at: int) -> None:
        """Go on from `at`, where what was sent becomes a checkpoint before it moves on."""
        req.prefix_len, req.checkpoint_slot = at, req.state_slot
        if self._may_save(req):
            self.add_stop(req, req.prefix_len, 0)
        self.take_if_stop(req, req.prefix_len)

    # --- what it saves ----------------------------------------------------------------------------

    def save_states(self, reqs: Iterable[DecodeRequest]) -> list[tuple[int, int]]:
        """Return the copies of states that are due before a step: of each request at a page
        boundary its slot, and the slot that keeps its state. O(requests), and a heap for those
        without such a slot."""
        copies: list[tuple[int, int]] = []
        step = self._step
        for req in reqs if self._has_state else ():
            # Its `kv_len`, without a call: most are at no boundary.
            num_output = len(req.output)
            at = req.prompt_len + num_output - (num_output > 0)
            if at % step or req.state not in CAN_RUN:
                continue
            saved = self._of(req)
            if at <= saved.goes_on_at or not self._may_save(req):
                continue
            self._enter_sent(req)
            # One slot a request: what it had before is a page behind. Only where all was sent its
            # window is kept now.
            slot = saved.slots.pop()[1] if saved.slots else NO_SLOT
            keeps_window = at == req.fill_len and slot == NO_SLOT
            slot = self._save(req, at, req.max_pages if keeps_window else None, slot)
            if slot != NO_SLOT:
                copies.append((req.state_slot, slot))
        return copies

    # --- ends -------------------------------------------------------------------------------------

    def committed(self, req: DecodeRequest, flight: Flight, now_s: float) -> None:
        """Enter what a request has saved that was just committed. One that was sent to its end
        keeps its window there; its state the engine has still to copy."""
        super().committed(req, flight, now_s)
        is_end = req.fill_len % self._step == 0
        if flight.source.sends and is_end and not self._has_state and self._may_save(req):
            self._save(req, req.fill_len, req.max_pages)
        self.enter(req)
        self._give_back(req)

    def _enter_sent(self, req: DecodeRequest) -> None:
        slots = self._of(req).slots
        if slots and slots[-1][0] * self._page_size == req.fill_len:
            self.enter(req)
            self._give_back(req)

    def leaving(self, req: DecodeRequest, key: RadixKey, now_s: float) -> None:
        """Enter the state and window that a request leaves, and give back the rest. Under its lock,
        which has all its cached pages."""
        held = req.pages_held
        assert held is not None
        self._pages.cache_unfinished(held, key, now_s, priority=req.request.priority)
        self._enter_sent(req)
        if self._pages.windows and self._may_save(req):
            left, saved = [], self._of(req)
            if self._has_state:
                left, saved.slots = saved.slots, []
            elif not saved.slots:
                left = [(held.num_locked // self.step_pages * self.step_pages, NO_SLOT)]
            for depth, slot in left:
                # What it leaves, it needs no more: it gets no pages in place of these.
                if slot != NO_SLOT or depth * self._page_size > saved.goes_on_at:
                    self._save(req, depth * self._page_size, depth, slot)
        self.enter(req)
        self.dropped(req)

    def check_invariants(self, requests: Sequence[DecodeRequest]) -> None:
        ComputeSource.check_invariants(self, requests)
        super().check_invariants(requests)
        saving = [req for req in requests if req.saves is not None]
        laws = {
            "a request that runs has one slot": all(
                len(req.saves.slots) <= 1 for req in saving if req.state in CAN_RUN
            ),
            "what is saved lies in the request's own KV": all(
                0 < depth * self._page_size <= req.kv_len
                for req in saving
                for depth, _ in req.saves.slots
            ),
        }
        check_laws(laws, requests)
