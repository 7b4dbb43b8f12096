"""A page for the next token of each running request, or the names of those to retract for it.

Pages on their way back count first: those of requests that have ended, or were retracted, while the
device may still touch them. Only what these do not cover is taken from running requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prefixkv.cache.results import Releases
from prefixkv.decode.ending import Ending
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import CAN_RUN, CUT_SHORT, DecodeRequest, DecodeState
from prefixkv.errors import OutOfPagesError, RequestError, shown
from prefixkv.pages.manager import RequestPages
from prefixkv.pages.requests import check_own


class BatchGrowth:
    """Pages for what running requests write next. Owned by the scheduler's thread."""

    def __init__(self, ledger: Ledger, ending: Ending) -> None:
        self._ledger, self._pages, self._ending = ledger, ledger.pages, ending
        self._batch: list[DecodeRequest] = []  # of the last step: of this node, each once

    def running(self) -> Iterator[DecodeRequest]:
        """Iterate over the requests that run, the oldest first."""
        return (req for req in self._ledger.requests.values() if req.state in CAN_RUN)

    def for_next_token(self, reqs: Sequence[DecodeRequest], num_tokens: int, now_s: float) -> bool:
        """Give each running request the page for one more token, if it needs one. Returns True if
        some were cut short: they are left out.

        Cost: a comparison per request, and more only at the end of its pages. Raises as
        `DecodeScheduler.append_many` does, with nothing changed.
        """
        # The whole batch passes here at every step, so all but one comparison is left to the few
        # requests that are at their limit. Where the list is that of the step before, it names none
        # twice, and none of another node: neither ever changes.
        batch = self._batch
        if not (type(reqs) is list and reqs == batch):
            self.check_batch(reqs)
            batch = list(reqs)
        if num_tokens != len(reqs):
            raise RequestError(f"{num_tokens} tokens for {len(reqs)} requests")
        due: list[DecodeRequest] = []
        for req in reqs:  # in a loop: a comprehension is a call
            if len(req.output) >= req.output_limit:
                due.append(req)
        if not due:
            self._batch = batch
            return False
        running = self._running_of(due)
        lengths = []  # the step that gave the token has written the KV of the one before
        for req in running:
            if (num_output := len(req.output)) >= req.max_new_tokens:
                raise RequestError(f"request {req.rid!r} has its {req.max_new_tokens} tokens")
            lengths.append((req, req.prompt_len + num_output))
        self._take(lengths, 1, now_s)
        # Now nothing can fail any more: states and limits change.
        self._batch = batch
        runs = DecodeState.RUNNING  # looked up once: that costs more than to compare
        for req in running:
            if req.state is not runs:  # it gets its first token
                req.become(runs)
                self._ledger.journal.runs(req, now_s)
            req.output_limit = req.most_output
        return len(running) < len(due)

    def ahead(self, reqs: Sequence[DecodeRequest], num_tokens: int, now_s: float) -> None:
        """Grow requests so that the KV of `num_tokens` tokens fits, as far as they may still grow.
        O(requests + pages). Raises as `append_many` does, with nothing changed."""
        self.check_batch(reqs)
        running = self._running_of(reqs)
        for group in self._pages.windows:
            if num_tokens > group.step_tokens:
                most = f"group {group.name!r} has step_tokens {group.step_tokens}"
                raise RequestError(f"num_tokens is {num_tokens}, {most}")
        self._take([(req, req.kv_len) for req in running], num_tokens, now_s)
        for req in running:
            if req.state is DecodeState.RUNNING:
                req.output_limit = req.most_output

    def check_batch(self, reqs: Sequence[DecodeRequest]) -> None:
        """Raise RequestError unless these are requests of this node, each once."""
        try:
            if len(set(reqs)) != len(reqs):
                raise RequestError("a request is named twice")
        except TypeError:
            raise RequestError(f"reqs is {shown(reqs)}, no list of DecodeRequest") from None
        for req in reqs:
            if type(req) is not DecodeRequest or req.page_manager is not self._pages:
                check_own(req, DecodeRequest, self._pages)

    def _running_of(self, reqs: Sequence[DecodeRequest]) -> list[DecodeRequest]:
        """Leave out what was cut short: the engine may have sampled before it could hear of that.
        Raises RequestError for another that does not run."""
        running = [req for req in reqs if req.state not in CUT_SHORT]
        for req in running:
            req.check_state(CAN_RUN, "does not run")
        return running

    def _take(
        self, lengths: Sequence[tuple[DecodeRequest, int]], num_tokens: int, now_s: float
    ) -> None:
        """Take what each request lacks for the KV of `num_tokens` behind this length. Raises
        OutOfPagesError, with nothing changed."""
        pages, page_size = self._pages, self._pages.page_size
        missing: list[tuple[DecodeRequest, RequestPages, int]] = []  # and pages that it lacks
        num_missing = 0
        for req, kv_len in lengths:
            held = req.pages_held
            assert held is not None
            end = -(-(kv_len + num_tokens) // page_size)
            if end > req.max_pages:  # no step writes the KV of the last token: no page is for it
                end = req.max_pages
            if (lacks := end - held.num_pages) > 0:
                missing.append((req, held, lacks))
                num_missing += lacks
        # 1. All or none: if one page is missing, none is taken, so that the engine can retract and
        # repeat the call with the same tokens.
        if missing and num_missing > pages.available_pages:
            raise self._out_of_pages({req: num for req, _, num in missing})
        # 2. A page for each in turn, since a row takes one at a time. The budget follows at once:
        # pages move from what remains to what is private.
        while missing:
            pages.grow_many([held for _, held, _ in missing], now_s)
            self._ledger.budget.grow_many([req.rid for req, _, _ in missing])
            missing = [(req, held, left - 1) for req, held, left in missing if left > 1]
        # 3. No page more in a window group: what has fallen out of the window is written again.
        for req, kv_len in lengths if pages.windows else ():
            assert req.pages_held is not None
            pages.slide(req.pages_held, kv_len)

    def _out_of_pages(self, growing: Mapping[DecodeRequest, int]) -> OutOfPagesError:
        """Return the error of requests that lack these pages. It names the fewest to retract for
        that, the one with most first. Never the oldest, so that one always makes progress. None if
        all that is missing comes back by itself."""
        pages, needed = self._pages, sum(growing.values())
        # A shared prefix comes back only when the last lock on it ends; `releases` remembers the
        # locks that would have ended so far, so each call counts only what is added.
        releases = Releases()
        missing = needed - pages.available_pages - self._ending.coming_pages(releases)
        younger = list(self.running())[1:]
        younger.sort(key=lambda req: req.pages_held.num_own if req.pages_held else 0, reverse=True)
        retract: list[str] = []
        for req in younger:
            if missing <= 0:
                break
            retract.append(req.rid)
            # A retracted request does not need its own next pages either.
            missing -= growing.get(req, 0)
            if req.pages_held is not None:
                missing -= req.pages_held.num_own + releases.end(req.pages_held.lock)
        free, evictable = pages.allocator.free_pages, pages.cache.evictable_pages
        return OutOfPagesError(needed, free, evictable, tuple(retract))
