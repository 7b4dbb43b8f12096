"""What decode's own engine computes of a prompt, and how long its passes take.

The engine takes prompts by `pop_local`, and says by `computed` how far each is. A prompt that ends
before is *left*: the device may write its pages until the engine says it is done. A pass is a
forward of the batch, of chunks of prompts, or both. It begins where the pass before ended, or when
there was work, so it is measured without a call of the engine's. The rule is in `sources.py`. With
extra state or windows computing begins at a checkpoint, and saves others
(`state_checkpoints.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import DecodeConfig
from prefixkv.decode.flights import Flight, Need, Release, Segment
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeParts
from prefixkv.decode.sources import MeasuringSource, Sources
from prefixkv.errors import (
    CallerError,
    ConfigError,
    RequestError,
    check_laws,
    shown,
)
from prefixkv.pages.requests import AllOf, BrokenEvent, not_done, still_pending
from prefixkv.paging import pages_for
from prefixkv.request import DeviceEvent, check_event
from prefixkv.settings import whole_count


class ComputeSource(MeasuringSource):
    """The prompts that the engine computes. Owned by the scheduler's thread.

    `rule` says what to compute, and is told how long chunks and steps take. A prompt is computed
    whole; none with extra state or windows is.
    """

    name, setting, outlives_request, is_own = "computed", "compute", False, True

    def __init__(self, ledger: Ledger, rule: Sources, asks_late: bool) -> None:
        super().__init__(ledger, rule)
        self.fails_over, self.asks_late = rule.fails_over, asks_late
        self.most_alone = rule.most_tokens(is_down=True)
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
        self._has_work(now_s)  # what the engine did before is no part of it
        self._chunked.clear()
        self.rule.next_pass(self._ledger.num_running)
        return found

    def chunk_tokens(self) -> int:
        return self.rule.chunk_tokens(self._ledger.num_running)

    def computed(
        self, req: DecodeRequest, end: int, aux: bytes, after: DeviceEvent | None, now_s: float
    ) -> None:
        end = whole_count("end", end)
        if not isinstance(aux, bytes) or (aux and end != req.fill_len):
            raise CallerError(f"aux is {shown(aux)} at {shown(end)} of {req.fill_len} tokens")
        check_event("after", after)
        after = not_done(after)  # may raise: before anything changes
        if req.state.ended:
            return
        if (done := self._done.get(req)) is None:
            raise self._not_mine(req)
        self._check_chunk(req, done, end)
        if end < req.fill_len:
            self._done[req] = end
        else:
            del self._done[req]
        if end > done:
            self._measure(req, end - done, now_s)
        if after is not None:
            size = self._ledger.page_size
            written = req.pages[done // size : pages_for(end, size)].copy()
            self._note_unwritten(req, after)
        self._progressed(req, end)
        if end == req.fill_len:
            flight = self._ledger.flights.by_owner.get(req)
            assert flight is not None
            del self.open[flight]
            self.rule.computed_pages(req.pages[req.prefix_len // self._ledger.page_size :])
            req.aux = aux
            self._ledger.flights.arrived(flight)
            if flight.rest is None:  # else most of it was sent
                self._ledger.journal.counters["computed_requests"] += 1
                self._ledger.journal.arrived(req, "compute", now_s)
        if after is not None:
            for source in self._ledger.organs:
                source.written(written, after)

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

    def still_writes(self, req: DecodeRequest, after: DeviceEvent | None) -> DeviceEvent | None:
        if req.unwritten is None:
            return after
        unwritten = still_pending(req.unwritten, self._ledger.pages.errors)
        if after is None or unwritten is None:
            return after or unwritten
        # Where its own has raised, a later one counts.
        return after if isinstance(unwritten, BrokenEvent) else AllOf(after, unwritten)

    def _progressed(self, req: DecodeRequest, end: int) -> None:
        pass

    def committed(self, req: DecodeRequest, flight: Flight, now_s: float) -> None:
        self._has_work(now_s)

    def _has_work(self, now_s: float) -> None:
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


def check_node(config: DecodeConfig, spec: Any, has_log: bool) -> None:
    """Raise ConfigError for a rank, a RankSpec, that computes no prompts. `has_log`: other ranks
    follow it."""
    if config.compute is None:
        return
    # They would have to compute the same chunks, and no log tells them.
    if has_log:
        raise ConfigError("compute: a decode worker with several ranks computes no prompts")
    if not config.checkpoints and spec.has_more:
        what = "extra state (state=)" if spec.state is not None else "window groups"
        raise ConfigError(f"compute: with {what} it needs checkpoints, which are 0")
    if not all(group.window for group in spec.pool.groups):
        raise ConfigError("compute: not with a pool of aligned groups of layers")


WITH_SAVES: list[Callable[..., ComputeSource]] = []
"""The one that goes on from what is saved, if any; `assembly.py` puts it here."""


def make_compute(ledger: Ledger, config: DecodeConfig, parts: DecodeParts) -> ComputeSource | None:
    if config.compute is None:
        return None
    rule = parts.organs.get("rule") or Sources(config.compute, config.failure_policy == "local")
    asks_late = config.compute.ask == "late"
    if not ledger.pages.saves.num_slots:
        return ComputeSource(ledger, rule, asks_late)
    return WITH_SAVES[0](ledger, rule, asks_late, config)
