"""The decode side of the library, without threads or sockets: queues, budget and pages behind one
object.

It asks the control plane for rooms by commands (`take_commands`), and hears what became of them by
`room_ended`, `room_drained` and `room_overdue`. `runtime/nodes.py` joins it to threads; the tests
join it to a simulated network.

Each way out of a request releases its lock and its pages, or hands them on, once:

    finish, retract          cache_finished   whole pages to the tree, tail freed
    fail or abort, drained   drop             own pages freed
    fail or abort, not yet   hold             own pages belong to the room until it is drained
    abort, others wait       nothing          the flight has them, and goes on without an owner

Source: SGLang's decode queues (`disaggregation/decode.py`), whose names `pop_preallocated` and
`pop_transferred` keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import attrgetter

import numpy as np

from prefixkv.cache.radix_key import check_packed, pack
from prefixkv.config import Admission, Retarget, check_version
from prefixkv.decode.admission import DEFAULT_ADMISSION
from prefixkv.decode.audit import check_decode
from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.deferred import Deferred, not_done
from prefixkv.decode.growth import raise_output_limits
from prefixkv.decode.inflight import Flight, InFlight
from prefixkv.decode.journal import DecodeJournal
from prefixkv.decode.lanes import Lanes
from prefixkv.decode.prealloc_queue import DecodePreallocQueue
from prefixkv.decode.prospects import Prospects
from prefixkv.decode.request import CAN_RUN, DecodeRequest, DecodeState, PrefillAsk
from prefixkv.decode.retries import Retries, check_address
from prefixkv.decode.room_numbers import RoomNumbers
from prefixkv.decode.shares import PrefillShares
from prefixkv.decode.transfer_queue import DecodeTransferQueue
from prefixkv.digest import prompt_digest
from prefixkv.errors import (
    AbortedError,
    AdmissionTimeoutError,
    InternalError,
    RequestError,
    TransferTimeoutError,
    WeightsVersionError,
)
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.pages.requests import PagedScheduler, check_error, reason_of
from prefixkv.paging import pages_for
from prefixkv.protocol.commands import (
    AbortRoom,
    DecodeCommand,
    MeetPrefill,
    MoveWeights,
    OpenRoom,
    RefuseRoom,
)
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import MAX_PAGES, Promise
from prefixkv.request import DeviceEvent, Request
from prefixkv.settings import check_time


class DecodeScheduler(PagedScheduler[DecodeRequest, DecodeCommand]):
    """See the module's text. Owned by the scheduler's thread.

    Args:
        max_retries, retarget: how often prefill is asked again when a transfer fails, and which
            one: see DecodeConfig.
        admission, patience_s, waiting_timeout_s, shares, protect_waiting: see
            `DecodePreallocQueue`.
        lanes: which prefill workers answer; None: all are taken to. Where they are gated, it asks
            for each by `MeetPrefill`, and hears by `prefill_ready`, `prefill_away` and
            `prefill_lost`.
        name: this worker's; a request may name no other in `Request.decode`.
        ticket: draws a number, never one twice, for each use of a room; in a service one that no
            other process can guess. None: they are counted.
        weights_version: of the weights that it begins with.
    """

    def __init__(
        self,
        books: PageManager,
        *,
        reserve_tokens: int = 128,
        max_retries: int = 0,
        retarget: Retarget | None = None,
        max_waiting: int = 1_000_000,
        admission: str | Admission = DEFAULT_ADMISSION,
        patience_s: float = math.inf,
        waiting_timeout_s: float = math.inf,
        shares: PrefillShares | None = None,
        lanes: Lanes | None = None,
        protect_waiting: bool = True,
        name: str = "",
        ticket: Callable[[], int] | None = None,
        weights_version: str = "",
    ) -> None:
        self.name = name
        self.journal = DecodeJournal()
        super().__init__(books, self.journal, weights_version)
        self.budget = PreallocBudget(pages_for(reserve_tokens, books.page_size))
        self.flights = InFlight(books.page_size)
        self.shares = shares or PrefillShares()
        self.lanes = lanes or Lanes()
        self._deferred = Deferred(books, self._queue_again)
        self.prospects = Prospects(
            books, self.shares, self.lanes, self.flights, self._deferred.stuck_pages
        )
        self.waiting = DecodePreallocQueue(
            books,
            self.budget,
            self.flights,
            reserve_tokens,
            self.shares,
            self.lanes,
            self.prospects,
            policy=admission,
            patience_s=patience_s,
            waiting_timeout_s=waiting_timeout_s,
            protect=protect_waiting,
        )
        self.transfers = DecodeTransferQueue(books, self.flights)
        self._retries = Retries(max_retries, retarget, books.errors)
        self._max_waiting = max_waiting
        self.rooms = RoomNumbers()
        self._asks: list[PrefillAsk] = []
        self._refused: set[RoomKey] = set()  # by `refuse`, and prefill has not answered
        # Of these, while the room of a former request of the number is not drained.
        self._late_refusals: dict[RoomKey, tuple[str, Exception, bytes]] = {}
        self._ticket = ticket or count(1).__next__
        self._admitted: list[DecodeRequest] = []  # not returned by `pop_preallocated` yet

    # --- what the engine calls --------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> DecodeRequest:
        """Queue a request.

        Raises RequestError, with nothing changed: a duplicate id, a room in use, no prefill
        address, the name of another decode worker, a request that the pool could never hold, or
        the pool of its prefill worker, as far as that is known, or any while `draining`
        (DrainingError). So does a time that is no number: CallerError, as of each call here; and
        what a user's admission policy raises.
        """
        check_time(now_s)
        most_tokens = len(request.key) + request.max_new_tokens - 1  # the last one has no KV
        most = pages_for(most_tokens, self.books.page_size)
        self._check_new(request, most, "may need {} pages (max_new_tokens included)")
        if most > MAX_PAGES:
            raise RequestError(f"may need {most} pages, a promise names at most {MAX_PAGES}")
        self._check_can_open(request)
        self._check_prefill_holds(request.rid, most_tokens, request.prefill)
        if len(self.waiting) >= self._max_waiting:
            raise RequestError(f"{len(self.waiting)} requests wait already, that is the limit")
        req = DecodeRequest(request, self.books, now_s)
        self.waiting.add(req)  # first, since a user's policy may raise
        self.shares.name(request.prefill)
        self.requests[req.rid] = req
        self.rooms.add(req.room)
        self._note_deadline(req)
        self._meet(req.prefill)
        return req

    def pop_preallocated(self, now_s: float) -> list[DecodeRequest]:
        """Admit what fits: prefix locked, pages taken, prefill told what to skip.

        What a policy, a log handler or an event of the user's has raised since the last call is
        raised here, once all is in order again. Requests that were admitted are on their way; the
        next call returns them.
        """
        check_time(now_s)
        self.release_deferred(now_s)
        if self._deadlines.next_s <= now_s:
            for req in self._deadlines.due(now_s):
                self._too_late(req, now_s)
        if self._admitted:
            there = DecodeState.PREALLOCATED
            self._admitted = [req for req in self._admitted if req.state is there]
        self.waiting.admit(now_s)
        for req in self.waiting.unanswered(now_s):
            late = TransferTimeoutError(f"request {req.rid!r} {self.waiting.why(req, now_s)}")
            self._unmet(req, late, now_s)
        for req, why in self.waiting.expired(now_s):
            error = AdmissionTimeoutError(f"request {req.rid!r} {why}")
            self._end(req, DecodeState.FAILED, error, now_s)
        for req in self.waiting.take_admitted():
            self._ask(req, now_s)
            self._admitted.append(req)
        self.books.errors.raise_due()
        admitted, self._admitted = self._admitted, []
        return admitted

    def pop_transferred(self, now_s: float) -> list[DecodeRequest]:
        """Requests whose KV is complete, committed to the tree and ready to run."""
        check_time(now_s)
        committed = self.transfers.pop_transferred(now_s)
        for req in committed:
            assert req.pages_held is not None
            self.counters["transferred"] += 1
            self._deadlines.forget(req)
            remaining = req.max_pages - req.pages_held.num_pages
            self.budget.start(req.rid, remaining, req.pages_held.num_own)
            self.journal.committed(req, now_s)
        return committed

    def pop_failed(self) -> list[DecodeRequest]:
        """Requests that failed or were aborted since the last call; `error` says why."""
        failed, self._failed = self._failed, []
        return failed

    def pop_needs_prefill(self) -> list[PrefillAsk]:
        """Prompts that the engine should submit to a prefill worker again."""
        asks, self._asks = self._asks, []
        return asks

    def append_many(
        self, reqs: Sequence[DecodeRequest], token_ids: Sequence[int], now_s: float
    ) -> None:
        """Add each request's newly sampled token; the KV of the one before it is written by now.

        Afterwards every request has the page that the next step writes to; one that has its
        `max_new_tokens` is to be finished, and has no page for a step more. One that was aborted
        meanwhile is left out; `pop_failed` says why. Raises, with nothing
        changed: RequestError for a request that does not run, has its tokens already or is named
        twice, or another number of tokens; TokenError; OutOfPagesError, which names the requests to
        retract, best first, and no more of them than are needed. It names none if what is missing
        comes back by itself, so wait a step: pages that the device is still busy with (`after=`),
        and those held for failed rooms, which come back with their proof.
        """
        check_time(now_s)
        packed = pack(token_ids)
        check_packed(packed)
        tokens: list[int] = np.frombuffer(packed, "<i4").tolist()
        if len(tokens) != len(reqs):
            raise RequestError(f"{len(tokens)} tokens for {len(reqs)} requests")
        if len(set(reqs)) != len(reqs):
            raise RequestError("a request is named twice")
        # The whole batch passes here at every step, so all but a comparison is left to the few
        # requests that are at their limit.
        due = [req for req in reqs if len(req.output) >= req.output_limit]
        for req in due:
            if self.requests.get(req.rid) is not req and req.state is not DecodeState.ABORTED:
                raise RequestError(
                    f"request {req.rid!r} is {req.state.value}, it does not run here"
                )
        if due and raise_output_limits(
            self.books, self.budget, self.journal, due, self._running, self._deferred, now_s
        ):
            aborted = DecodeState.ABORTED  # looked up once: that costs more than to compare
            for req, token in zip(reqs, tokens, strict=True):
                if req.state is not aborted:
                    req.output.append(token)
            return
        for req, token in zip(reqs, tokens, strict=True):
            req.output.append(token)

    def finish(
        self,
        req: DecodeRequest,
        now_s: float,
        after: DeviceEvent | None = None,
        continues: bool | None = None,
    ) -> None:
        """The request is done: what has KV becomes cached prefix.

        `after`: nothing is released before its `query()` is True. `continues`: whether the
        conversation will go on, if known. Raises RequestError if the request does not run.
        """
        check_time(now_s)
        self._check_runs(req)
        after = not_done(after)
        req.become(DecodeState.FINISHED)
        self._leave(req, now_s)
        self.counters["finished"] += 1
        self._deferred.end(after, req, continues, now_s)

    def retract(self, rid: str, now_s: float, after: DeviceEvent | None = None) -> None:
        """Take a running request's pages back; it queues again, in front, and resumes where it was.

        Raises RequestError if the request does not run, or is the oldest that does: so one request
        always goes on.
        """
        check_time(now_s)
        req = self.requests.get(rid)
        if req is None:
            raise RequestError(f"request {rid!r} is not here")
        self._check_runs(req)
        if req is next(self._running()):
            raise RequestError(f"request {rid!r} is the oldest that runs; it is never retracted")
        after = not_done(after)
        req.become(DecodeState.RETRACTED)
        self.budget.stop(req.rid)
        self.counters["retracted"] += 1
        req.retractions += 1
        self._deferred.end(after, req, None, now_s)

    def abort(
        self,
        rid: str,
        now_s: float,
        error: Exception | None = None,
        after: DeviceEvent | None = None,
    ) -> bool:
        """End a request wherever it is. Unknown or ended: no-op, False."""
        check_time(now_s)
        check_error(error)
        req = self.requests.get(rid)
        if req is None or req.state.ended:
            self.counters["aborts_of_unknown"] += 1
            return False
        error = error or AbortedError(f"request {rid!r} was aborted")
        self._cut_short(req, error, now_s, not_done(after))
        return True

    def retarget(self, rid: str, prefill: str) -> None:
        """Send a request to another prefill worker from its next attempt on.

        One that was never admitted is refused at the worker that it named, and comes out of
        `pop_needs_prefill` when it is. Raises RequestError, with nothing changed: it is not here,
        its KV is on its way, the address is none, or the worker there is known to hold too little;
        and what comparing a user's ranks raises.
        """
        req = self.requests.get(rid)
        if req is None:
            raise RequestError(f"request {rid!r} is not here")
        check_address(rid, prefill)
        if req.state is DecodeState.PREALLOCATED:
            raise RequestError(f"request {rid!r} is on its way from {req.prefill!r}")
        if prefill == req.prefill:
            return
        self._check_prefill_holds(rid, _most_asked(req), prefill)
        self.waiting.check_move(req, prefill)
        if req.state is DecodeState.QUEUED:
            moved = AbortedError(f"request {rid!r} goes to another prefill worker")
            self._refuse(req.room_key, req.prefill, moved, req.request.digest)
            req.generation += 1
        self._go_to(req, prefill)

    def _go_to(self, req: DecodeRequest, prefill: str) -> None:
        self.shares.name(prefill)
        req.prefill = prefill
        if req in self.waiting:
            self.waiting.move(req, prefill)
            self._meet(prefill)

    def refuse(self, request: Request, error: Exception) -> None:
        """Tell prefill at once that decode will not take this request, for example after `add`
        refused it.

        Where a former request of its number has ended, prefill is told once that one's room is
        drained. Raises RequestError, with nothing changed: its room is a live request's here, or it
        names no prefill worker.
        """
        key = RoomKey(request.room, request.generation)
        if self._check_can_open(request, to_refuse=key not in self._refused):
            self._refuse(key, request.prefill, error, request.digest)
            self._refused.add(key)
        else:  # a former request of this number has ended, and its room is not drained yet
            self._refused.add(key)
            self._late_refusals[key] = request.prefill, error, request.digest

    def flush(self) -> int:
        """Empty the cache after a weight update. Returns the pages freed at once.

        Requests that wait for another's pages ask prefill again: those pages are of the old
        weights.
        """
        self._fall_back(self.flights.flush())
        return self.books.flush()

    def move_weights(
        self, weights_version: str, now_s: float, after: DeviceEvent | None = None
    ) -> None:
        """The weights are of another version from now on; `flush` is to follow at once.

        What has KV of the former one, or output, ends as aborted, with a WeightsVersionError: what
        runs, what is on its way, what was retracted. What only waits goes on. `after` is as for
        `abort`. Raises, with nothing changed: ConfigError for what is no version.
        """
        check_time(now_s)
        check_version(weights_version)
        after = not_done(after)
        error = WeightsVersionError(self.weights_version, weights_version)
        self.weights_version = weights_version
        # First, so that prefill hears this reason, and not that its rooms were aborted.
        self._commands.append(MoveWeights(weights_version))
        # Whole flights, not request by request: else those that joined one would ask again.
        for flight in self.flights.remove_all():
            self._end_flight(flight, error)
        for req in list(self.requests.values()):
            waits = req.state in (DecodeState.QUEUED, DecodeState.RETRACTED)
            if not waits or req.output:
                self._cut_short(req, error, now_s, after)

    @property
    def has_news(self) -> bool:
        """Whether one of the `pop_*` has something, or may admit. O(1)."""
        complete = self.transfers.num_complete
        return bool(self._failed or self._asks or complete or self.waiting.may_admit)

    @property
    def idle(self) -> bool:
        """Nothing lives here: no request, nothing to pop, no room that is not drained. O(1)."""
        left = self.requests, self._failed, self._asks, self._deferred, self.rooms.any_undrained
        return not any(left) and not len(self.flights)

    @property
    def wake_s(self) -> float:
        """When a request that waits may fail for it; infinity if none."""
        return min(self.waiting.wake_s, self._deadlines.next_s)

    # --- what the control plane calls -------------------------------------------------------------

    def room_ended(
        self, key: RoomKey, poll: KVPoll, error: Exception | None, aux: bytes, now_s: float
    ) -> None:
        """A room reached its terminal state."""
        if poll is KVPoll.SUCCESS:
            self.shares.back(key)
            flight = self.transfers.succeed(key, aux)
            if flight is not None:
                self.journal.transferred(flight, now_s)
            if flight is None or flight.owner is None:
                # It was aborted while its success was reported: nothing can land any more.
                self.room_drained(key)
            return
        flight = self.transfers.get(key)
        if flight is None:
            return
        self.counters["transfers_failed"] += 1
        self.journal.transfer_ended(flight.prefill, "failed")
        error = error or InternalError(f"{key} failed without a reason")
        req = flight.owner
        self._cancel(flight, None)
        if req is None:
            return
        self._try_again(req, error, now_s)

    def prefill_ready(self, address: str, max_tokens: int, now_s: float) -> None:
        """The prefill worker at this address answers, and its pool holds so many tokens (0: it does
        not say). Requests that it could never compute fail before any page is promised."""
        lane = self.lanes.get(address)
        if lane is None:
            return
        self.lanes.ready(lane, max_tokens)
        for req in self.waiting.at(address):
            try:
                self._check_prefill_holds(req.rid, _most_asked(req), address)
            except RequestError as error:
                self._end(req, DecodeState.FAILED, error, now_s)

    def prefill_away(self, address: str, now_s: float) -> None:
        """It answers no more. What waits for it holds up no other."""
        lane = self.lanes.get(address)
        if lane is not None:
            self.lanes.away(lane, now_s)

    def prefill_lost(self, address: str, error: Exception, now_s: float) -> None:
        """Nothing answers at this address, or what does is refused: what waits for it fails, or is
        asked for again."""
        lane = self.lanes.get(address)
        if lane is None:
            return
        self.lanes.away(lane, now_s)
        lane.is_met = False
        for req in self.waiting.at(address):
            self._unmet(req, error, now_s)
        self.lanes.forget_if_idle(lane)

    def room_drained(self, key: RoomKey) -> None:
        """No write can land in the room's pages any more."""
        self.shares.back(key)
        self.books.release(key)
        self.rooms.drained(key)
        if key not in self._late_refusals:
            self._refused.discard(key)
        if self._late_refusals and key.room not in self.rooms:
            for late in [one for one in self._late_refusals if one.room == key.room]:
                self._refuse(late, *self._late_refusals.pop(late))

    def room_overdue(self, key: RoomKey) -> None:
        """The room is not drained by its deadline."""
        self.counters["quarantined_pages"] += self.books.quarantine(key)

    def release_deferred(self, now_s: float) -> None:
        """Release what waited for the device, where it is done."""
        self._deferred.release(now_s)

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    def holders(self) -> list[tuple[str, RequestPages]]:
        """What holds pages: request ids, and flights whose request has gone. Any thread may ask."""
        orphans = [flight for flight in self.flights.all() if flight.owner is None]
        held = super().holders() + self._deferred.holders()
        return held + [(f"flight of room {one.room_key.room}", one.pages) for one in orphans]

    def check_invariants(self) -> None:
        """Check every part, and the parts against each other. Raises InternalError."""
        self.books.check_invariants()
        self.budget.check_invariants()
        self.waiting.check_invariants()
        self.transfers.check_invariants()
        flying = {flight.room_key for flight in self.flights if flight.is_open}
        self.shares.check_invariants(flying | self.rooms.undrained())
        parts = self.books, self.budget, self.flights, self.rooms, self.waiting
        check_decode(*parts, self.requests.values(), self._deferred.requests())

    # --- admission --------------------------------------------------------------------------------

    def _meet(self, address: str) -> None:
        """Have it said whether this prefill worker answers, unless that was asked already."""
        lane = self.lanes.get(address)
        if self.lanes.gated and lane is not None and not lane.is_met:
            lane.is_met = True
            self._commands.append(MeetPrefill(address))

    def _check_prefill_holds(self, rid: str, num_tokens: int, address: str) -> None:
        """Raise RequestError where the prefill worker is known not to hold so many tokens.

        All that the request may become counts, since a request that was retracted late may have to
        be computed anew: it would fail half answered.
        """
        most = self.lanes.max_tokens(address)
        if 0 < most < num_tokens:
            raise RequestError(
                f"request {rid!r} may have {num_tokens} tokens (max_new_tokens included), prefill "
                f"worker {address} holds {most}"
            )

    def _unmet(self, req: DecodeRequest, error: Exception, now_s: float) -> None:
        """Its prefill worker does not answer. It was promised nothing, and is told nothing."""
        self.waiting.remove(req)
        self._try_again(req, error, now_s)

    def _try_again(self, req: DecodeRequest, error: Exception, now_s: float) -> None:
        """Its transfer has failed, or could not begin: it is asked for again, or fails."""
        if req.retries < self._retries.most:
            self.counters["retries"] += 1
            req.retries += 1
            req.error = error
            if (prefill := self._retries.next_prefill(req, error)) is not None:
                self._go_to(req, prefill)
            try:
                self._check_prefill_holds(req.rid, _most_asked(req), req.prefill)
            except RequestError as too_long:
                error = too_long
            else:
                self._ask_again(req)
                return
        self._end(req, DecodeState.FAILED, error, now_s)

    def _ask(self, req: DecodeRequest, now_s: float) -> None:
        """A request was admitted: prefill is to send what it lacks."""
        flight = self.flights.of(req)
        assert flight is not None
        pages, page_size = flight.pages, self.books.page_size
        start, end = pages.num_shared, pages_for(req.fill_len, page_size)
        self.journal.admitted(req, end - start, pages.num_joined * page_size, now_s)
        if req.resumed and req.prefix_len == req.fill_len and pages.slot < 0:
            # All its KV is here, and it has no extra state, which is never cached: nothing to send.
            self.transfers.arrived(flight)
            self.shares.back(flight.room_key)
            return
        if req.generation > req.request.generation:
            self._asks.append(PrefillAsk(req, self.name))
        self.transfers.add(flight)
        page_ids = self.books.table.packed(pages.row, start, end)
        (room, generation, _), lens = flight.room_key, (req.fill_len, req.prefix_len)
        what = *lens, page_ids, self._ticket(), pages.slot
        promise = Promise(room, generation, *what, weights_version=self.weights_version)
        digest = req.request.digest if req.fill_len == req.prompt_len else prompt_digest(req.key)
        self._commands.append(OpenRoom(promise, req.prefill, digest))

    # --- ends -------------------------------------------------------------------------------------

    def _end(self, req: DecodeRequest, state: DecodeState, error: Exception, now_s: float) -> None:
        # The flight, or the queue, gives the request up first: what it holds after that is its own.
        before = req.state
        req.error = error
        req.become(state)
        self.counters[state.value] += 1
        self._failed.append(req)
        if (flight := self.flights.of(req)) is not None:
            self._leave_flight(flight, error)
        elif before in (DecodeState.QUEUED, DecodeState.RETRACTED) and req in self.waiting:
            self.waiting.remove(req)
            if before is DecodeState.QUEUED:  # else prefill is only asked at its next admission
                self._refuse(req.room_key, req.prefill, error, req.request.digest)
        self._leave(req, now_s)

    def _cut_short(
        self, req: DecodeRequest, error: Exception, now_s: float, after: DeviceEvent | None
    ) -> None:
        """End it wherever it is. `after`: None if the device is done with it."""
        self._end(req, DecodeState.ABORTED, error, now_s)
        if req.pages_held is not None and req not in self._deferred.requests():
            self._deferred.end(after, req, None, now_s)

    def _too_late(self, req: DecodeRequest, now_s: float) -> None:
        """Its KV is not here by its own deadline, unless it waits only to be popped."""
        flight = self.flights.of(req)
        if flight is not None and self.transfers.is_complete(flight):
            return
        by = f"by its deadline_s, {req.request.deadline_s}"
        error: Exception = TransferTimeoutError(f"request {req.rid!r}: its KV was not here {by}")
        if req in self.waiting:
            why = self.waiting.why(req, now_s)
            error = AdmissionTimeoutError(f"request {req.rid!r} was not admitted {by}: {why}")
        self._end(req, DecodeState.FAILED, error, now_s)

    def _check_can_open(self, request: Request, to_refuse: bool = False) -> bool:
        """Whether its room is free; with `to_refuse` it may also be one that is not drained yet.
        Raises RequestError."""
        is_free = request.room not in self.rooms
        if not is_free and not (to_refuse and not self.rooms.is_live(request.room)):
            raise RequestError(f"room {request.room} is in use")
        check_address(request.rid, request.prefill)
        if request.decode not in ("", self.name):
            named = f"{request.decode!r}, this one is {self.name!r}"
            raise RequestError(f"request {request.rid!r} is for decode worker {named}")
        return is_free

    def _refuse(self, key: RoomKey, prefill: str, error: Exception, digest: bytes) -> None:
        """Prefill may have the request, and hold KV for it. The room's number is in use until
        prefill has answered."""
        command = RefuseRoom(key, self._ticket(), prefill, reason_of(error), digest)
        self.counters["refused"] += 1
        self.rooms.await_drained(key)
        self._commands.append(command)

    def _leave_flight(self, flight: Flight, error: Exception) -> None:
        """The request ends while its KV is on its way. If others wait for it, it goes on for
        them."""
        if not flight.waiters:
            self._cancel(flight, error)
            return
        self.counters["flights_adopted"] += 1
        assert flight.owner is not None
        flight.owner.pages_held = None
        self.flights.disown(flight)
        if flight.is_open:
            self.rooms.await_drained(flight.room_key)

    def _cancel(self, flight: Flight, error: Exception | None) -> None:
        """The flight will not be committed: its room is aborted with `error`, or has failed (None).

        What becomes of its owner is the caller's decision. Flights that waited for it fall back.
        """
        # Out of the index first: a request that asks again must not join a flight that is ending.
        others = self.flights.remove(flight)
        self._end_flight(flight, error)
        self._fall_back(others)

    def _fall_back(self, flights: list[Flight]) -> None:
        """These will not be committed, though nothing went wrong with them; their owners ask again,
        in order of arrival."""
        for flight in flights:
            reason = "what it waited for will not come, or nothing waits for it anymore"
            error = AbortedError(reason)
            self._end_flight(flight, error)
        owners = [flight.owner for flight in flights if flight.owner is not None]
        owners.sort(key=attrgetter("arrived_s"))
        for req in reversed(owners):  # each goes to the front, so the last one first
            self.counters["flight_fallbacks"] += 1
            self._ask_again(req)

    def _end_flight(self, flight: Flight, error: Exception | None) -> None:
        """End its room, and hand on its pages: the room holds them as long as a peer may write
        them.

        The room's number stays in use as long, also without pages: the control plane still has to
        report its end.
        """
        key = flight.room_key
        if self.transfers.remove(flight):
            if error is not None:
                self._commands.append(AbortRoom(key, reason_of(error)))
                self.journal.transfer_ended(flight.prefill, "aborted")
            self.books.hold(flight.pages, key)
            self.shares.hold(key)
            self.rooms.await_drained(key)
        else:
            self.books.drop(flight.pages)
        if flight.owner is not None:
            flight.owner.pages_held = None

    def _ask_again(self, req: DecodeRequest) -> None:
        if req.state is not DecodeState.RETRACTED:  # else it was not admitted since
            req.become(DecodeState.RETRACTED)
        self.budget.stop(req.rid)
        self._queue_again(req)

    def _queue_again(self, req: DecodeRequest) -> None:
        req.generation += 1
        req.fill_len = req.kv_len
        req.prefix_len = 0
        self.waiting.add(req, first=True)
        self._meet(req.prefill)

    def _leave(self, req: DecodeRequest, now_s: float) -> None:
        self.budget.stop(req.rid)
        self._deadlines.forget(req)
        self.rooms.remove(req.room)
        self.requests.pop(req.rid, None)
        self.journal.ended(req, now_s)

    def _check_runs(self, req: DecodeRequest) -> None:
        if self.requests.get(req.rid) is not req or req.state not in CAN_RUN:
            raise RequestError(f"request {req.rid!r} is {req.state.value}, it does not run")

    def _running(self) -> Iterator[DecodeRequest]:
        """The requests that run, the oldest first."""
        return (req for req in self.requests.values() if req.state in CAN_RUN)


def _most_asked(req: DecodeRequest) -> int:
    """The tokens that its prefill worker has to hold. Of one that runs, or ran, what it has so far:
    it is half answered, so what it may still become refuses it no more."""
    return req.kv_len if req.resumed else req.most_kv_len
