"""The choice of own compute: which of the requests on decode this worker's engine computes itself.

1. it never may: the request asks for something else of prefill, or has extra state or a window
   and no checkpoint is kept to compute from
2. nothing else can: no prefill worker can be asked for it, and it lacks no more than may be
   computed here then
3. both could: the rule of `sources.py`
"""

from __future__ import annotations

import numpy as np

from prefixkv.cache.results import MatchResult
from prefixkv.decode.inflight import Flight
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.sources import Source
from prefixkv.errors import PeerLostError, check_laws
from prefixkv.paging import Pages, pages_for


class ComputeChoice:
    """What the engine computes. Changes no request. Owned by the scheduler's thread."""

    def __init__(self, ledger: Ledger) -> None:
        pages = self._pages = ledger.pages
        self._sources, self._computing = ledger.sources, ledger.computing
        self._flights, self._arriving, self._budget = ledger.flights, ledger.arriving, ledger.budget
        points = self._points = ledger.points
        self._host = ledger.host
        self._counters = ledger.journal.counters
        has_more = bool(pages.groups)
        self.can_compute = not has_more or points is not None
        """True unless the requests have extra state or windows, and no checkpoint of those is kept
        to compute from."""
        # Pages with KV that decode has computed itself, and prefill has not.
        self._unsent = np.zeros(pages.allocator.num_pages, np.bool_)
        self.has_unsent = False

    @property
    def num_running(self) -> int:
        """Requests beside which chunks would be computed. O(1)."""
        return self._budget.active - self._flights.num_owned

    # --- pages that prefill does not have ---------------------------------------------------------

    # Where a later prompt goes on behind pages that decode has computed, and is asked of prefill,
    # prefill computes both, and the pages are noted no more. It only tells how long a transfer is
    # likely to take, so eviction leaves it alone: what is evicted and used again stays noted until
    # prefill is next asked for it.

    def computed(self, flight: Flight, req: DecodeRequest) -> None:
        """Note that the engine has computed a prompt to its end, from what was found on."""
        path = self._path(flight, req.fill_len)
        self._unsent[path[req.prefix_len // self._pages.page_size :]] = True
        self.has_unsent = True

    def sent(self, flight: Flight) -> None:
        """Note that prefill has computed a flight's whole prompt. O(1) unless `has_unsent`."""
        if self.has_unsent:
            self._unsent[self._path(flight, len(flight.key))] = False
            self.has_unsent = bool(self._unsent.any())

    def again_tokens(self, flight: Flight, prefix_len: int) -> int:
        """Count the tokens of a prefix that prefill would have to compute as well: of the pages
        from the first on that it has not. O(1) unless `has_unsent`."""
        return self._again_tokens(self._path(flight, prefix_len)) if self.has_unsent else 0

    def _path(self, flight: Flight, num_tokens: int) -> Pages:
        row = self._pages.table.pages(flight.pages.row)
        return row[: pages_for(num_tokens, self._pages.page_size)]

    def _again_tokens(self, path: Pages) -> int:
        unsent = self._unsent[path]
        if not unsent.any():
            return 0
        return (len(path) - int(unsent.argmax())) * self._pages.page_size

    # --- the choice -------------------------------------------------------------------------------

    def takes(self, req: DecodeRequest, flight: Flight, is_alone: bool, now_s: float) -> bool:
        """Decide whether the engine computes what a request lacks. `is_alone`: no prefill worker
        can be asked."""
        config, missing = self._sources.config, req.fill_len - req.prefix_len
        # 0. It was decided at its admission.
        if self._points is not None:
            return req.computes
        # 1. It never may. Or nothing is to be computed.
        if config is None or not self.can_compute or not req.request.may_compute or not missing:
            return False
        # 2. Nothing else can.
        if is_alone:
            return missing <= self._sources.most_tokens(is_down=True)
        # 3. Both could.
        again = self.again_tokens(flight, req.prefix_len)
        return self._is_best_here(req, missing, missing, again, now_s)

    def takes_from_checkpoint(
        self,
        req: DecodeRequest,
        match: MatchResult | None,
        missing: int,
        num_sent: int,
        now_s: float,
    ) -> bool:
        """Decide whether the engine computes a request with extra state or a window that is about
        to be admitted: `missing` tokens from a checkpoint on. Prefill would send `num_sent`, behind
        this match."""
        if not req.request.may_compute:
            return False
        # All is here, in a checkpoint and in the cache: nothing has to be computed.
        if not missing:
            return True
        if req.is_alone:
            return missing <= self._sources.most_tokens(is_down=True)
        again = self._again_tokens(match.pages) if match is not None and self.has_unsent else 0
        return self._is_best_here(req, missing, num_sent, again, now_s)

    def _is_best_here(
        self, req: DecodeRequest, missing: int, num_sent: int, again: int, now_s: float
    ) -> bool:
        config, due = self._sources.config, self._computing.due_tokens(self._arriving.local)
        assert config is not None
        chosen = self._sources.choose(
            missing, due, self.num_running, req.prefill, now_s, num_sent=num_sent, again=again,
            goes_on=num_sent < req.fill_len,
        )  # fmt: skip
        if chosen is Source.PREFILL and missing <= config.below:
            self._counters["compute_declined"] += 1
        return chosen is Source.HERE

    # --- where prefill cannot be asked ------------------------------------------------------------

    def may_take_alone(self, req: DecodeRequest) -> bool:
        """Return True if the engine may compute what a request lacks now, if its prefill worker
        cannot be asked."""
        if not req.request.may_compute or not self.can_compute:
            return False
        # O(1) where nothing is computed here, or everything may be.
        if (most := self._sources.most_tokens(is_down=True)) < 0 or most >= req.kv_len:
            return most >= 0
        match = self._pages.match(req.key, req.request.cacheable)
        if self._points is not None:
            return self._points.tokens_behind(req, self._points.find(req, match)) <= most
        num_shared = 0
        if match is not None:
            _, num_shared = self._flights.find(req.key, match.depth)
            if self._host is not None and (found := self._host.find(req.key)) is not None:
                num_shared = max(num_shared, found.depth)
        return req.kv_len - num_shared * self._pages.page_size <= most

    def may_take_back(self, req: DecodeRequest) -> bool:
        """Return True if the engine may compute what a silent prefill worker was to send."""
        if not req.request.may_compute or not self.can_compute:
            return False
        most = self._sources.most_tokens(is_down=True)
        if self._points is not None:
            match = self._pages.match(req.key, req.request.cacheable)
            return self._points.tokens_behind(req, self._points.find(req, match)) <= most
        assert req.pages_held is not None
        lock = req.pages_held.lock
        return req.fill_len - (0 if lock is None else lock.prefix_len) <= most

    def too_much(self, req: DecodeRequest) -> Exception:
        """Return the error of a request whose prefill worker cannot be asked, and lacks too
        much."""
        most, missing = self._sources.most_tokens(is_down=True), req.fill_len - req.prefix_len
        worker = f"prefill worker {req.prefill} does not answer" if req.prefill else "it names none"
        why = f"lacks {missing} tokens, decode computes {most} of one alone, and {worker}"
        return PeerLostError(f"request {req.rid!r} {why}")

    # --- laws -------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        local = self._arriving.local
        self._computing.check_invariants(local)
        law = "no extra state or window is computed here without checkpoints"
        check_laws({law: self.can_compute or not local}, local)
