"""The plan of a request: where it gets each page that it lacks. Made before any is taken.

    0         match.depth       shared_pages                    fill_len
    |  cached      |     joined      |  segments, each of a source  |
    |  (the tree)  |  (on their way) |  loaded | computed or sent   |

A look says what is there, and what the rest takes: the order of those that wait rests on it. A plan
is made of a look that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefixkv.cache.radix_key import RadixKey
from prefixkv.cache.results import MatchResult
from prefixkv.decode.flights import Flight, Need, Release, Segment, Source
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.request import DecodeRequest, PrefillAsk
from prefixkv.errors import CallerError, check_laws
from prefixkv.pages.groups import GroupStart
from prefixkv.pages.requests import reason_of
from prefixkv.paging import pages_for
from prefixkv.protocol.commands import AbortRoom, OpenRoom
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Promise


class Look(NamedTuple):
    """What is there of a request's `key`, as far as it may be shared, and what a load would bring:
    all up to token `start`. Admitting the request takes `new_pages` at once, besides those of a
    load; `needed_pages` have to be available, the reserve included; `most_pages` it may come to
    take. The last two include the evictable pages that its match would lock."""

    key: RadixKey
    match: MatchResult | None
    joined: Flight | None
    shared_pages: int
    loads: tuple[Segment, ...]
    start: int
    new_pages: int
    needed_pages: int
    most_pages: int

    def fits(self, limits: tuple[int, int]) -> bool:
        return self.needed_pages <= limits[0] and self.most_pages <= limits[1]


class Plan(NamedTuple):
    """What admitting a request takes: all that `look` names, and what lacks then. True until the
    tree or a flight changes.

    `segments` share one row: what is sent, or computed, or sent and then computed. Empty: no source
    has all that is lacking.
    """

    req: DecodeRequest
    look: Look
    segments: tuple[Segment, ...] = ()
    group_start: GroupStart | None = None
    shareable: bool = False


class CachedSource(Source):
    """Nothing is lacking: the request ran before, and all its KV is cached, or on its way."""

    name = "cached"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def reach(self, need: Need) -> Segment | None:
        # Extra state and windows are not cached.
        is_whole = need.start == need.end and not self._ledger.has_more
        return Segment(self, need.start, need.end) if is_whole else None

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        self._ledger.flights.arrived(flight)


class PrefillSource(Source):
    """What a prefill worker computes and sends, into pages that it was promised: a room.

    The organs hear of promises and answers. `asks` are the prompts that the engine submits again,
    in order.
    """

    name, sends = "sent", True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.asks_late = any(source.asks_late for source in ledger.organs)
        self.open: dict[RoomKey, Flight] = {}
        self.asks: list[PrefillAsk] = []

    def may_have(self, req: DecodeRequest) -> bool:
        """True if prefill may have the present attempt before it is asked for it."""
        return not self.asks_late and req.generation == req.request.generation

    def begin(self, flight: Flight, segment: Segment, now_s: float) -> None:
        req, key = flight.owner, flight.room_key
        assert req is not None
        # A later attempt: prefill has ended, or never had, the request of this generation.
        if not self.may_have(req):
            self.asks.append(PrefillAsk(req, self._ledger.name, segment.end))
        # Before the command leaves, so that an answer always finds its flight.
        self.open[key] = flight
        workers = self._ledger.workers
        workers.promise(key, workers.of(req.prefill), flight.pages.num_own)
        for source in self._ledger.organs:
            source.asked(flight, segment.end, now_s)
        pages, manager, fill_len = flight.pages, self._ledger.pages, segment.end
        end = pages_for(fill_len, manager.page_size)
        # After some output the tokens to compute are more than the prompt, and without its end they
        # are fewer, so their digest is another: it costs a match and a digest.
        digest = req.request.digest
        if fill_len != req.prompt_len:
            sent = req.key.prefix(fill_len)
            digest, _ = manager.digest(sent, manager.match(sent, req.request.cacheable))
        promise = Promise(
            *flight.room_key.numbers,
            fill_len=fill_len,
            prefix_len=req.prefix_len,
            pages=manager.table.packed(pages.row, flight.start_pages, end),
            ticket=self._ledger.rooms.ticket(),
            digest=digest,
            weights_version=self._ledger.weights_version,
            groups=manager.groups.promised(pages.row, end),
        )
        self._ledger.rooms.commands.append(OpenRoom(promise, req.prefill))

    def arrived(self, key: RoomKey, aux: bytes, now_s: float) -> Flight | None:
        """Note that prefill has sent all that a room was promised for. Return its flight; None if
        nothing waits for it any more."""
        # It proves that every write has landed, so the pages leave prefill's share at once.
        self._ledger.workers.release(key)
        flight = self.open.pop(key, None)
        if flight is None:
            return None
        journal, rest = self._ledger.journal, flight.rest
        journal.transfer_ended(flight.prefill, "success")
        journal.pages_received += flight.pages.num_own
        for source in self._ledger.organs:
            source.answered(flight, len(flight.key) if rest is None else rest.start, now_s)
        if flight.owner is not None:
            flight.owner.aux = aux
            journal.arrived(flight.owner, "transfer", now_s)
        if rest is None:
            self._ledger.flights.arrived(flight)
        else:
            flight.source = rest.source
            rest.source.begin(flight, rest, now_s)
        return flight

    def give_up(self, flight: Flight, error: Exception | None) -> Release:
        key = flight.room_key
        if self.open.pop(key, None) is None:  # it has succeeded: nothing can land
            return Release.DROP
        if error is not None:
            self._ledger.rooms.commands.append(AbortRoom(key, reason_of(error)))
            self._ledger.journal.transfer_ended(flight.prefill, "aborted")
        self._ledger.rooms.await_drained(key)
        for source in self._ledger.organs:
            source.unanswered(flight)
        return Release.HOLD

    def check_invariants(self, requests: Sequence[DecodeRequest]) -> None:
        flights, undrained = self._ledger.flights, self._ledger.rooms.undrained()
        is_mine = [one for one in flights if one.is_open and one.source is self]
        laws = {
            "an open room has a flight, and prefill brings it": self.open
            == {flight.room_key: flight for flight in is_mine},
            "the room of a flight without an owner is in use": all(
                one.owner is not None or one.room_key in undrained for one in is_mine
            ),
        }
        check_laws(laws, self.open)
        # Pages may be in a worker's power only while a room is open, or failed and not drained.
        self._ledger.workers.check_invariants(self.open.keys() | undrained)


class Planner:
    """Makes looks and plans of the sources that there are, and takes what a plan says."""

    def __init__(self, ledger: Ledger, prefill: PrefillSource) -> None:
        self._ledger = ledger
        self._prefill = prefill
        self._cached = CachedSource(ledger)
        self._loads = [source for source in ledger.organs if source.brings_pages_only]
        self._makers = [source for source in ledger.organs if not source.brings_pages_only]

    def look(
        self, req: DecodeRequest, known: MatchResult | None, now_s: float, *,
        can_ask: bool = True, joins: bool = True,
    ) -> Look:  # fmt: skip
        """Look at what is there. `known`: an earlier `match` of the request, right as long as the
        tree has not changed."""
        ledger, page_size = self._ledger, self._ledger.page_size
        key, match = req.key, known
        for source in self._makers:
            key = source.shared_key(req, key)
        # 1. What is cached, and behind that what is on its way.
        if match is None or not match.is_current:
            match = ledger.pages.match(key, req.request.cacheable)
        joined, shared_pages, unprotected = None, 0, 0
        if match is not None:
            shared_pages, unprotected = match.depth, match.unprotected_pages
            if joins:
                joined, shared_pages = ledger.flights.find(key, shared_pages)
        # 2. Behind both, what is loaded. That takes pages as what prefill sends does.
        loads: tuple[Segment, ...] = ()
        start = shared_pages * page_size
        if match is not None:
            for source in self._loads:
                if len(loads) == ledger.pages.table.free_spare_rows:  # each takes one
                    break
                need = Need(req, key, match, start, req.kv_len, can_ask, now_s)
                if (load := self._reach(source, need)) is not None:
                    loads, start = (*loads, load), load.end
        # 3. What is missing, now and in the end.
        new_pages, needed, most = ledger.count(req, shared_pages, unprotected)
        new_pages -= start // page_size - shared_pages  # a load has its own
        return Look(key, match, joined, shared_pages, loads, start, new_pages, needed, most)

    def plan(
        self, req: DecodeRequest, look: Look, limits: tuple[int, int], now_s: float
    ) -> Plan | None:
        """Plan where a request gets what it lacks: the best way that fits, within the most pages
        needed and the most ever needed. None if none does; not whole if there is no way."""
        is_open = req.prefill and self._ledger.workers.of(req.prefill).is_open
        sent = Segment(self._prefill, look.start, req.kv_len) if is_open else None
        if not self._makers and not req.output:  # there is no choice
            return self._fitting(req, look, (sent,), limits) if sent else Plan(req, look)
        need = Need(req, look.key, look.match, look.start, req.kv_len, bool(req.asks), now_s)
        ways = self._ways(need)
        if not ways and sent is None:
            return Plan(req, look)
        plans = (self._fitting(req, look, (way,), limits) for way in ways)
        plan = next((plan for plan in plans if plan is not None), None)
        if sent is None or (ways and not need.can_ask):
            return plan
        # A source is asked once, for a request that is admitted: it may count what it is asked.
        if plan is None or not plan.segments[0].source.is_best(need, plan.segments[0]):
            plan = self._fitting(req, look, self._sent(need, sent), limits) or plan
        return plan

    def needs_no_prefill(self, req: DecodeRequest, now_s: float, joins: bool = True) -> bool:
        """Tell whether the plan of a request would be whole with prefill closed. `joins`: whether
        it may wait for other flights."""
        if not self._makers:
            return False
        look = self.look(req, None, now_s, can_ask=False, joins=joins)
        need = Need(req, look.key, look.match, look.start, req.kv_len, False, now_s)
        return bool(self._ways(need))

    def _ways(self, need: Need) -> list[Segment]:
        sources = (self._cached, *self._makers) if need.req.resumed else self._makers
        return [segment for source in sources if (segment := self._reach(source, need))]

    def _reach(self, source: Source, need: Need) -> Segment | None:
        """A source that raises, or names what it cannot bring, brings nothing from then on; what it
        raises is said once."""
        try:
            if (segment := source.reach(need)) is None:
                return None
            is_load, size = source.brings_pages_only, self._ledger.page_size
            whole = range(need.start + size, len(need.key) + 1, size)
            low, ends = (need.start, whole) if is_load else (0, (need.end,))
            if segment.start not in range(low, need.start + 1, size) or segment.end not in ends:
                raise CallerError(f"it reaches {segment[1:3]}, of {need.start} to {need.end}")
            return segment
        except Exception as error:
            error.add_note(f"raised by the source {source.name!r}, which is not asked any more")
            self._ledger.pages.errors.caught(error)
            self._loads = [one for one in self._loads if one is not source]
            self._makers = [one for one in self._makers if one is not source]
            return None

    def _sent(self, need: Need, segment: Segment) -> tuple[Segment, ...]:
        for source in self._makers:
            if (at := source.takes_over(need)) < segment.end:
                return segment._replace(end=at), Segment(source, at, segment.end)
        return (segment,)

    def _fitting(
        self, req: DecodeRequest, look: Look, way: tuple[Segment, ...], limits: tuple[int, int]
    ) -> Plan | None:
        """Return the plan of one way; None if it does not fit."""
        ledger, first = self._ledger, way[0]
        start = look.start
        is_found = first.start < look.shared_pages * ledger.page_size or (
            # A last page that is not taken, since a token is sampled from it, may be on its way.
            look.key is not req.key
            and ledger.flights.find(req.key, start // ledger.page_size)[0] is not None
        )
        if first.start < start:
            # It begins before the end of what is there, so it joins and loads nothing. What is
            # cached behind its start, or on its way, is found there.
            match, depth = look.match, first.start // ledger.page_size
            if match is not None and match.depth > depth:
                match = ledger.pages.match(look.key.prefix(first.start))
            counts = ledger.count(req, depth, 0 if match is None else match.unprotected_pages)
            look = Look(look.key, match, None, depth, (), first.start, *counts)
            if not look.fits(limits):
                return None
        groups = None
        if ledger.has_more:
            at = first.end if first.source.sends else first.start
            groups = GroupStart(at, req.max_pages, *(first.found.windows if first.found else ()))
            if ledger.pages.groups.short_of(groups) is not None:
                return None
        return Plan(req, look, way, groups, look.match is not None and not is_found)

    def take(self, plan: Plan, now_s: float) -> list[tuple[Flight, Segment]]:
        """Lock what a plan has found, take its pages, and enter a flight for each of its segments;
        the last flight is the request's own, and joins those before.

        The plan has counted what this takes, and nothing ran since, so it cannot fail.
        """
        req, look, ledger = plan.req, plan.look, self._ledger
        pages, page_size = ledger.pages, ledger.page_size
        joined, shared_pages = look.joined, look.shared_pages
        above = None if joined is None else joined.pages
        flights: list[tuple[Flight, Segment]] = []
        for load in look.loads:
            key = req.key.prefix(load.end)
            start, shared_pages = shared_pages, load.end // page_size
            above = pages.open(look.match, shared_pages - start, now_s, above, start, is_load=True)
            joined = Flight(
                load.source, None, req.request, "", req.room_key, key, above, start, shared_pages,
                joined,
            )  # fmt: skip
            ledger.flights.enter(joined, shareable=True)
            flights.append((joined, load))
        first, rest = plan.segments[0], plan.segments[1:]
        first.source.opening(req, first)
        row = pages.open(
            look.match, look.new_pages, now_s, above, shared_pages,
            is_used=bool(flights), start=plan.group_start,
        )  # fmt: skip
        req.opened(row, shared_pages * page_size)
        own = Flight(
            first.source, req, req.request, req.prefill, req.room_key, req.key, row, shared_pages,
            first.end // page_size, joined, rest[0] if rest else None,
        )  # fmt: skip
        ledger.flights.enter(own, plan.shareable)
        ledger.budget.start(req.rid, req.max_pages - row.num_pages, 0)
        return [*flights, (own, first)]
