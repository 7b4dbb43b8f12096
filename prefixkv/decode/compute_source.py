"""What decode's own engine computes of a prompt, and how long its passes take.

The engine takes prompts by `pop_local`, and says by `computed` how far each is. A prompt that ends
before is *left*: the device may write its pages until the engine says it is done. A pass is a
forward of the batch, of chunks of prompts, or both. It begins where the pass before ended, or when
there was work, so it is measured without a call of the engine's. The rule is in `sources.py`. With
extra state or windows computing begins at a checkpoint, and saves others (`DecodeCheckpoints`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoint
from prefixkv.cache.radix_key import RadixKey
from prefixkv.cache.results import MatchResult
from prefixkv.config import DecodeConfig
from prefixkv.decode.flights import Flight, Need, Release, Segment
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import CAN_RUN, DecodeRequest
from prefixkv.decode.scheduler import DecodeParts
from prefixkv.decode.sources import MeasuringSource, Sources
from prefixkv.errors import RequestError, check_laws, shown
from prefixkv.pages.manager import PageManager
from prefixkv.pages.request_checkpoints import RequestCheckpoints
from prefixkv.pages.requests import AllOf, BrokenEvent, still_pending
from prefixkv.paging import Pages, pages_for
from prefixkv.request import DeviceEvent


class ComputeSource(MeasuringSource):
    """The prompts that the engine computes. Owned by the scheduler's thread.

    `rule` says what to compute, and is told how long chunks and steps take. A prompt is computed
    whole; none with extra state or windows is.
    """

    name, setting, outlives_request, is_own = "computed", "compute", False, True

    def __init__(self, ledger: Ledger, rule: Sources, asks_late: bool) -> None:
        super().__init__(ledger, rule)
        self.fails_over, self.asks_late = rule.fails_over, asks_late
        self._step_tokens = min(
            (group.step_tokens for group in ledger.pages.windows), default=math.inf
        )
        self.open: dict[Flight, None] = {}  # oldest first
        self._done: dict[DecodeRequest, int] = {}  # tokens with KV, of those handed out
        self._pass_s = 0.0  # when the engine's last pass ended
        # The prompts that have a chunk in this pass, its tokens and seconds.
        self._chunked: set[DecodeRequest] = set()
        self._tokens, self._seconds = 0, 0.0

    # --- the way of a request ---------------------------------------------------------------------

    def shared_key(self, req: DecodeRequest, key: RadixKey) -> RadixKey:
        # The first token of an answer is sampled from a computed one: so one that lacks nothing
        # leaves its last page.
        is_sampled = req.request.may_compute and not req.resumed and not self._ledger.has_more
        if is_sampled and not len(key) % self._ledger.page_size:
            return key.prefix(len(key) - 1)
        return key

    def reach(self, need: Need) -> Segment | None:
        is_lacking = need.end > need.start and not self._ledger.has_more
        return self._within(need, Segment(self, need.start, need.end)) if is_lacking else None

    def _within(self, need: Need, segment: Segment) -> Segment | None:
        most = self.rule.most_tokens(is_down=not need.can_ask)
        fits = need.req.request.may_compute and segment.end - segment.start <= most
        return segment if fits else None

    def is_best(self, need: Need, segment: Segment) -> bool:
        if not need.can_ask or segment.start == segment.end:
            return True
        again = 0 if need.match is None else self.rule.again_pages(need.match.pages)
        is_here = self.rule.is_here(
            segment.end - segment.start, self._due_tokens, self._ledger.num_running,
            need.req.prefill, need.now_s, num_sent=need.end - need.start,
            again=again * self._ledger.page_size, goes_on=need.start > 0,
        )  # fmt: skip
        if not is_here:
            self._ledger.journal.counters["compute_declined"] += 1
        return is_here

    @property
    def _due_tokens(self) -> int:
        owners = [flight.owner for flight in self.open if flight.owner is not None]
        return sum(req.fill_len - self._done.get(req, req.prefix_len) for req in owners)

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        self.open[flight] = None

    def give_up(self, flight: Flight, error: Exception | None) -> Release:
        self.open.pop(flight, None)
        req = flight.owner
        assert req is not None
        was_begun = self._done.pop(req, None) is not None
        return Release.AFTER_DEVICE if was_begun or req.unwritten is not None else Release.DROP

    def may_commit(self, flight: Flight) -> bool:
        # The commit frees own copies of what the tree has by now, and prefill could write there
        # next.
        req, pages = flight.owner, self._ledger.pages
        if req is not None and req.unwritten is not None:
            req.unwritten = still_pending(req.unwritten, pages.errors)
        if req is None or req.unwritten is None or not req.request.cacheable:
            return True
        return pages.find(flight.key).depth <= flight.pages.num_locked

    def new_pass(self, now_s: float) -> list[tuple[DecodeRequest, Exception]]:
        """Those whose device event has raised, and would free what the device may still write."""
        stuck = []
        for flight in self._ledger.flights.complete:
            req = flight.owner
            event = None if req is None else req.unwritten
            if req is not None and isinstance(event, BrokenEvent) and not self.may_commit(flight):
                stuck.append((req, event.error))
        return stuck

    def stepped(self, reqs: Sequence[DecodeRequest], now_s: float) -> None:
        """Measure a step of the batch, unless it computed a chunk too, or only first tokens have
        come."""
        # A first token came with the KV: no step gave it.
        if any(len(req.output) > 1 for req in reqs):
            if not self._chunked and not self._done:
                self.rule.step(max(0.0, now_s - self._pass_s))
            self._chunked.clear()
        self._pass_s = now_s

    # --- the engine's calls -----------------------------------------------------------------------

    @property
    def has_new(self) -> bool:
        return bool(self._new())

    def _new(self) -> list[DecodeRequest]:
        """Requests that the engine may begin: those that wait for no other flight."""
        return [
            flight.owner
            for flight in self.open
            if flight.joined is None and flight.owner is not None and flight.owner not in self._done
        ]

    def pop_local(self, now_s: float) -> list[DecodeRequest]:
        found = self._new()
        for req in found:
            self._done[req] = req.prefix_len
        self.has_work(now_s)  # what the engine did before is no part of it
        self._chunked.clear()
        self.rule.next_pass(self._ledger.num_running)
        return found

    def chunk_tokens(self) -> int:
        return self.rule.chunk_tokens(self._ledger.num_running)

    def most_alone(self) -> int:
        return self.rule.most_tokens(is_down=True)

    def computed(
        self, req: DecodeRequest, end: int, aux: bytes, after: DeviceEvent | None, now_s: float
    ) -> Pages | None:
        """Note that a prompt has KV up to token `end`; at its `fill_len` it is whole. Return the
        pages that the device may write until `after`, which it has taken.

        Raises RequestError, with nothing changed.
        """
        done = self._done.get(req)
        if done is None:
            return super().computed(req, end, aux, after, now_s)
        self._check_chunk(req, done, end)
        if end < req.fill_len:
            self._done[req] = end
        else:
            del self._done[req]
        if end > done:
            self._measure(req, end - done, now_s)
        written = None
        if after is not None:
            size = self._ledger.page_size
            written = req.pages[done // size : pages_for(end, size)].copy()
            self._note_unwritten(req, after)
        self._progressed(req, end)
        if end == req.fill_len:
            flight = self._ledger.flights.of(req)
            assert flight is not None
            del self.open[flight]
            self.rule.computed_pages(req.pages[req.prefix_len // self._ledger.page_size :])
            req.aux = aux
            self._ledger.flights.arrived(flight)
            if flight.rest is None:  # else most of it was sent
                self._ledger.journal.counters["computed_requests"] += 1
                self._ledger.journal.arrived(req, "compute", now_s)
        return written

    def _check_chunk(self, req: DecodeRequest, done: int, end: int) -> None:
        if end - done > self._step_tokens:
            most = self._step_tokens
            what = f"{shown(end - done)} tokens, step_tokens of its window groups is {most}"
            raise RequestError(f"request {req.rid!r} has a chunk of {what}")
        # With extra state it may lack nothing else: then its end is where it begins.
        if not (done < end <= req.fill_len or done == end == req.fill_len):
            least, most = done + 1, req.fill_len
            raise RequestError(
                f"request {req.rid!r}: end is {shown(end)}, not in [{least}, {most}]"
            )

    def _measure(self, req: DecodeRequest, num_tokens: int, now_s: float) -> None:
        # An engine may compute chunks of several prompts in one pass, and tells of one after the
        # other: what a pass costs is known of all of it.
        if req in self._chunked:
            self._chunked.clear()
        goes_on = bool(self._chunked)
        if not goes_on:
            self._tokens, self._seconds = 0, 0.0
        self._chunked.add(req)
        self._tokens += num_tokens
        self._seconds += max(0.0, now_s - self._pass_s)
        self.rule.chunk(self._tokens, self._seconds, self._ledger.num_running, goes_on)
        self._pass_s = now_s
        self._ledger.journal.counters["computed_tokens"] += num_tokens

    def _note_unwritten(self, req: DecodeRequest, after: DeviceEvent) -> None:
        errors = self._ledger.pages.errors
        before, req.unwritten = req.unwritten, after
        if before is not None and (before := still_pending(before, errors)):
            req.unwritten = AllOf(before, after)
            if isinstance(before, BrokenEvent):
                req.unwritten = BrokenEvent(req.unwritten, before.error)

    def _progressed(self, req: DecodeRequest, end: int) -> None:
        pass

    def has_work(self, now_s: float) -> None:
        """Note that the engine gets something to do: its next pass begins no earlier."""
        self._pass_s = max(self._pass_s, now_s)

    # --- laws -------------------------------------------------------------------------------------

    def check_invariants(self, requests: Sequence[DecodeRequest]) -> None:
        local = {flight.owner: flight for flight in self.open}
        allocator = self._ledger.pages.allocator
        laws = {
            "what is computed here is somebody's: a request's": None not in local,
            "what is computed here is a flight that is open": set(self.open)
            == {one for one in self._ledger.flights if one.is_open and one.source is self},
            "what prefill may write, it does not compute here": not any(
                allocator.held_by(flight.room_key).size for flight in self.open
            ),
            "what the engine computes has a flight of its own, and waits for none": all(
                req in local and local[req].joined is None for req in self._done
            ),
            "what is computed lies in its request": all(
                req.prefix_len <= done < req.fill_len or done == req.prefix_len == req.fill_len
                for req, done in self._done.items()
            ),
        }
        check_laws(laws, list(self._done))


class DecodeCheckpoints(RequestCheckpoints[DecodeRequest]):
    """Checkpoints as a decode worker's requests use them. The slots of the StatePool are those of
    the requests, then those of the checkpoints.

    A hit needs none, since prefill sends the state and the window of a prompt's end. A prompt that
    is computed here saves them as prefill does. A running request's slot takes its state at each
    page boundary, and is cached at its finish or retraction, with the window before that boundary.

    Computing begins at a checkpoint, so cached pages behind it are computed again, on pages of the
    request. What is sent begins where the cache ends: the choice comes before pages are taken.
    """

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


class CheckpointStart(NamedTuple):
    """Where a request begins to be computed; of its path `dense_pages` are cached."""

    checkpoint: Checkpoint | None
    dense_pages: int

    @property
    def windows(self) -> tuple[tuple[Pages, ...], ...]:
        return () if self.checkpoint is None else (self.checkpoint.windows,)


class CheckpointedCompute(ComputeSource):
    """Own compute of requests with extra state or windows: from a checkpoint on."""

    def __init__(
        self, ledger: Ledger, rule: Sources, asks_late: bool, points: DecodeCheckpoints
    ) -> None:
        super().__init__(ledger, rule, asks_late)
        self.points = points

    def shared_key(self, req: DecodeRequest, key: RadixKey) -> RadixKey:
        return key

    def reach(self, need: Need) -> Segment | None:
        checkpoint = self.points.find(need.req, need.match)
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
        return self.points.sent_len(req, shared_pages, self.rule.least_tokens)

    def opening(self, req: DecodeRequest, segment: Segment) -> None:
        self.points.hold(req, segment.found.checkpoint)

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        super().begin(flight, segment, now_s)
        assert flight.owner is not None
        if segment.found is None:
            self.points.go_on_from_sent(flight.owner, segment.start)
        else:
            self.points.begin(flight.owner, segment.found.dense_pages)

    def _progressed(self, req: DecodeRequest, end: int) -> None:
        self.points.computed(req, end)

    def save_state(self, req: DecodeRequest, end: int) -> int:
        if req not in self._done:
            return super().save_state(req, end)
        return self.points.take(req, end)

    def save_states(self, reqs: Iterable[DecodeRequest]) -> list[tuple[int, int]]:
        return self.points.running(reqs)

    def committed(self, req: DecodeRequest, flight: Flight) -> None:
        self.points.committed(req, flight.source.sends)

    def leaving(self, req: DecodeRequest) -> None:
        self.points.leave(req)

    def dropped(self, req: DecodeRequest) -> None:
        self.points.end(req)

    def check_invariants(self, requests: Sequence[DecodeRequest]) -> None:
        super().check_invariants(requests)
        self.points.check_invariants(requests)


def make_compute(ledger: Ledger, config: DecodeConfig, parts: DecodeParts) -> ComputeSource | None:
    if config.compute is None:
        return None
    rule = parts.organs.get("rule") or Sources(config.compute, config.failure_policy == "local")
    asks_late = config.compute.ask == "late"
    if ledger.pages.checkpoints is None:
        return ComputeSource(ledger, rule, asks_late)
    points = DecodeCheckpoints(ledger.pages, config.checkpoint_tokens)
    return CheckpointedCompute(ledger, rule, asks_late, points)
