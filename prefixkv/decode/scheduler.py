"""The decode side without threads or sockets: a request from `add` to its end.

    add -> waiting -> plan -> take -> begin -> on its way -> commit -> runs -> ending
              ^                                     |                    |
              '------------ ask again --------------'----- retract ------'

`plan.py` decides once where a request's pages come from, before any is taken. Sources bring them
(`flights.py`). `admission.py` says which plans fit, `ending.py` what becomes of a request's pages.
States, attempts and ends of requests are here. It asks the control plane for rooms
(`take_commands`), and hears of them by `hear`.

Source: SGLang's decode queues (`disaggregation/decode.py`), with the names of its pops.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from prefixkv.cache.events import EventFeed
from prefixkv.cache.radix_key import token_list
from prefixkv.cache.results import PrefixLock
from prefixkv.config import DecodeConfig, check_prefill
from prefixkv.decode.admission import Admission
from prefixkv.decode.ending import UNTOLD, End, Ending
from prefixkv.decode.flights import Flight, Source
from prefixkv.decode.growth import BatchGrowth
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.plan import Plan, Planner, PrefillSource
from prefixkv.decode.request import (
    ACTIVE,
    CAN_RUN,
    CUT_SHORT,
    DecodeJournal,
    DecodeRequest,
    DecodeState,
    PrefillAsk,
)
from prefixkv.decode.rooms import Rooms, Workers
from prefixkv.errors import (
    AbortedError,
    AdmissionTimeoutError,
    ConfigError,
    InternalError,
    PeerLostError,
    RequestError,
    TransferError,
    TransferTimeoutError,
    check_laws,
    ours,
)
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.pages.requests import (
    PagedScheduler,
    check_failure,
    check_own,
    check_reason,
    holding,
    not_done,
    still_pending,
)
from prefixkv.paging import pages_for
from prefixkv.protocol.commands import DecodeCommand, MeetPrefill, MoveWeights
from prefixkv.protocol.events import (
    PrefillAway,
    PrefillLost,
    PrefillReady,
    RoomDrained,
    RoomEnded,
    RoomOverdue,
)
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import MAX_PAGES
from prefixkv.request import (
    DeviceEvent,
    Request,
    check_event,
    check_request,
    check_rid,
    check_session,
)
from prefixkv.settings import Continues, check_continues, whole_count

_WAITS = frozenset({DecodeState.QUEUED, DecodeState.RETRACTED})


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """What stands around a scheduler.

    Args:
        workers: the prefill workers; by default all answer, and there are no shares. Where they are
            gated, `MeetPrefill` asks about each, and `PrefillReady`, `PrefillAway` and
            `PrefillLost` answer.
        ticket: draws a number for each use of a room, never twice the same. In a service no other
            process may guess it.
        organs: what sources are made of, by the setting that asks for one.
    """

    workers: Workers = field(default_factory=Workers)
    ticket: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    organs: Mapping[str, Any] = field(default_factory=dict)


class DecodeScheduler(PagedScheduler[DecodeRequest, DecodeCommand]):
    """The requests of one decode rank, from `add` to their end. Owned by the scheduler's thread.

    Each end of a request releases its lock and its pages, or hands them on, once (`ending.py`). Of
    `config` it takes what is about requests; without checkpoints in `pages` nothing is computed
    here of requests with extra state or windows.
    """

    # Each makes a source of the ledger, the config and the parts; None: they do not ask for it. In
    # the order in which sources are preferred; `assembly.py` puts them here.
    source_makers: ClassVar[list[Callable[[Ledger, DecodeConfig, DecodeParts], Source | None]]] = []
    journal: DecodeJournal
    max_waiting = 1_000_000

    def __init__(
        self, pages: PageManager, config: DecodeConfig, parts: DecodeParts | None = None
    ) -> None:
        parts = parts or DecodeParts()
        super().__init__(pages, DecodeJournal(), config.model.weights_version)
        self.name, self.workers = config.name, parts.workers
        # Rooms outlive requests: a number stays in use until the control plane has proved that its
        # room is drained, so that two requests never share one.
        self.rooms = Rooms(self._commands, parts.ticket, self.counters)
        self.ledger = Ledger(pages, config, self.journal, parts.workers, self.rooms, self.requests)
        self.budget, self.flights = self.ledger.budget, self.ledger.flights
        made = [make(self.ledger, config, parts) for make in self.source_makers]
        self._organs = self.ledger.organs = [source for source in made if source is not None]
        self.sources: dict[str, Any] = {source.name: source for source in self._organs}
        self._own = self.ledger.own = next(filter(lambda one: one.is_own, self._organs), Source())
        self._fails_over = any(source.fails_over for source in self._organs)
        for setting in config.source_settings - {source.setting for source in self._organs}:
            raise ConfigError(f"{setting}: this installation has no part for it")
        self.prefill = PrefillSource(self.ledger)
        self._planner = Planner(self.ledger, self.prefill)
        self._ending = Ending(self.ledger, self._ask_again)
        self._growth = BatchGrowth(self.ledger, self._ending)
        self.waiting = Admission(self.ledger, config, self._planner)
        self._max_retries, self._retarget = config.num_retries, config.retarget
        self._admitted: list[DecodeRequest] = []  # to be returned by `pop_preallocated`

    # --- calls of the engine ----------------------------------------------------------------------

    def add(self, request: Request) -> DecodeRequest:
        """Queue a request, where it waits for pages. O(log waiting), and a match of the prompt.

        Raises, with nothing changed, RequestError: a duplicate id, a room in use, no prefill
        address, the name of another decode worker, or more than the pool here or at prefill could
        ever hold; DrainingError after `drain`; and what a user's admission policy raises. Prefill
        does not hear of it: see `refuse`.
        """
        check_request(request)
        now_s = self._pump()
        # All checks come before the first change: a request that is refused leaves no trace.
        most_tokens = len(request.key) + request.max_new_tokens - 1  # the last one has no KV
        most = pages_for(most_tokens, self.pages.page_size)
        # Judged by the most that it may become, not by its prompt: a request that can never finish
        # would be admitted, and then retracted again and again.
        self._check_new(request, most, "may need {} pages (max_new_tokens included)")
        if most > MAX_PAGES:
            raise RequestError(f"may need {most} pages, a promise names at most {MAX_PAGES}")
        self._check_can_open(request)
        self.workers.check_holds(request.rid, most_tokens, request.prefill)
        if len(self.waiting) >= self.max_waiting:
            raise RequestError(f"{len(self.waiting)} requests wait already, that is the limit")
        req = DecodeRequest(request, self.pages, now_s)
        # From here on something changes. The queue comes first since it calls a user's policy,
        # which may raise: nothing else is noted then, and nothing has to be undone.
        match = self.waiting.add(req, now_s)
        if request.prefill:
            req.name_prompt(match)
        self.requests[req.rid] = req
        self.rooms.add(req.room)
        self._note_deadline(req)
        self._meet(req)
        self._tell()
        return req

    def pop_preallocated(self) -> list[DecodeRequest]:
        """Admit the requests that fit, and return them: prefix locked, pages taken, the rest asked
        of prefill. Ends what is past its deadline first.

        Call it once per pass. The first request to a prefill worker is admitted when that has
        answered, by a later call, and `wait` returns for it. Raises what a policy, a log handler or
        an event of the user's has raised since the last call, once all state is consistent again;
        the next call returns what was admitted then.
        """
        now_s = self._pump()
        # 1. Pages come back before any decision: what the device is done with, and what requests
        # hold that are past their deadlines.
        self.release_deferred(now_s)
        for req in self._deadlines.due(now_s):
            self._too_late(req)
        for source in self._organs:
            for req, error in source.new_pass(now_s):
                self._fail(req, ours(error))
        # 2. Admit, and only then end what has waited too long: a request that fits just when its
        # wait is over is admitted. It has left the queue, so the next two loops do not see it.
        for plan in self.waiting.plans(now_s):
            if plan.segments:
                self._admit(plan, now_s)
            else:
                self._fail(plan.req, self._lacks_source(plan))
        for req in reversed(self.waiting.unanswered(now_s)):  # each goes to the front
            late = TransferTimeoutError(f"request {req.rid!r} {self.waiting.why(req, now_s)}")
            self._try_again(req, late)
        for req, why in self.waiting.expired(now_s):
            self._fail(req, AdmissionTimeoutError(f"request {req.rid!r} {why}"))
        # 3. Raise last: by now every admitted request has its room, and the next call returns it,
        # unless it has failed or completed since.
        self._tell()
        self.pages.errors.raise_due()
        admitted, self._admitted = self._admitted, []
        return [req for req in admitted if req.state is DecodeState.PREALLOCATED]

    def pop_transferred(self) -> list[DecodeRequest]:
        """Commit the requests with complete KV to the tree, and return them. They run from now on,
        with `req.pages` and `req.aux`."""
        now_s = self._pump()
        committed = []
        for flight in self.ledger.commit(now_s):
            req = flight.owner
            assert req is not None
            assert req.pages_held is not None
            req.become(DecodeState.TRANSFERRED)
            committed.append(req)
            # Before anything is evicted: under its lock, which has just grown over their pages.
            for source in self._organs:
                source.committed(req, flight, now_s)
            self.counters["transferred"] += 1
            # `deadline_s` is about the arrival of the KV, which is over.
            self._deadlines.forget(req)
            remaining = req.max_pages - req.pages_held.num_pages
            # From now on it can be retracted, so its pages count as private; at its admission they
            # did not.
            self.budget.start(req.rid, remaining, req.pages_held.num_own)
            self.journal.committed(req, now_s)
        # Those that wait for the device have a deadline again, if it found them complete; but not
        # those that were retracted.
        for flight in self.flights.complete:
            if (owner := flight.owner) is not None and owner.committed_s is None:
                self._note_deadline(owner)
        return committed

    def pop_local(self) -> list[DecodeRequest]:
        """Return the requests that the engine computes itself from now on, from `prefix_len` to
        `fill_len` tokens (see `DecodeConfig.compute`).

        Compute chunks of at most `chunk_tokens` beside the running batch, and call `computed` after
        each. Call this once a pass: what is computed until the next call is measured as one. A
        request that came out of `pop_failed` is to be left.
        """
        now_s = self._pump()
        return list(self._own.pop_local(now_s))

    def computed(
        self, req: DecodeRequest, end: int, aux: bytes = b"", after: DeviceEvent | None = None
    ) -> None:
        """Note that a request of `pop_local` has KV in `req.pages` up to token `end`.

        At `req.fill_len` it is whole, and comes out of `pop_transferred` with `aux`, as if prefill
        had sent it. A request that lacks its extra state only has `end` at `prefix_len`. With
        window groups a chunk has at most `step_tokens`, and a checkpoint is kept where it ends at
        one of `req.stops`. A request that has ended meanwhile is left out.

        Args:
            after: an event behind the device's writes up to `end`; None: the device is done. Until
                then the pages are not copied to host memory, and a request that would free some of
                them stays out of `pop_transferred`. Later work on these pages has to come behind
                it.

        Raises, with nothing changed, RequestError: it is not computed here, or `end` is not behind
        the last one, or beyond `fill_len`; CallerError: an `aux` or `after` of the wrong kind, or
        an early `aux`.
        """
        now_s = self._pump()
        self.check_own(req)
        self._own.computed(req, end, aux, after, now_s)
        self._tell()

    def save_state(self, req: DecodeRequest, end: int) -> int:
        """Return the slot into which the engine copies the extra state behind `end` tokens of a
        request of `pop_local`, one of `req.stops`; -1 if it need not.

        Before `computed(req, end)` or a later one: with that its stops up to there are over. Raises
        RequestError, with nothing changed, for another place, or a request that is not computed
        here.
        """
        self._pump()
        end = whole_count("end", end)
        self.check_own(req)
        return -1 if req.state.ended else self._own.save_state(req, end)

    def save_states(self, reqs: Sequence[DecodeRequest]) -> list[tuple[int, int]]:
        """Return the copies of extra state to make before a step of these running requests: (from,
        to) slots of the StatePool, for those at a page boundary. O(requests).

        A request keeps one state so: the next one takes its place, and `finish` and `retract` enter
        the last in the cache. Call it where `req.state_slot` has the state behind `req.kv_len`
        tokens. Without `DecodeConfig.checkpoints` there are none. Raises RequestError, with nothing
        changed, for what is no request of this node, or is named twice.
        """
        self._pump()
        self._growth.check_batch(reqs)
        return list(self._own.save_states(reqs))

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of prompts to compute in the next step, so that running requests wait no
        longer for it than `ComputeConfig.itl_share` says; 0 where that step has to go without, and
        without a `DecodeConfig.compute`. O(1)."""
        return self._own.chunk_tokens()

    def pop_failed(self, after: DeviceEvent | None = None) -> list[DecodeRequest]:
        """Return the requests that failed or were aborted; `req.error` says why. Leave their pages.

        `after`: an event behind the engine's work on requests of `pop_local`: nothing of those that
        failed is released before it is done. None: the device is done with them.
        """
        now_s = self._pump()
        check_event("after", after)
        untold = [req for req, (event, _) in self.ledger.deferred.items() if event is UNTOLD]
        if untold:  # those that failed while the engine wrote their pages
            after = not_done(after)  # may raise: before anything changes
            for req in untold:
                self._ending.release_after(after, End(req), now_s)
        failed, self._failed = self._failed, []
        return failed

    def give_up_prefill(self, rid: str, reason: str = "prefill was not reached") -> bool:
        """Note that a request could not be brought to its prefill worker, so it need not wait for a
        deadline.

        It is tried again, computed here, or fails, as `DecodeConfig.failure_policy` says; that
        worker is told, since the request may have come there all the same. Returns False if nothing
        is asked of prefill for it, or no more.
        """
        check_reason(reason)
        self._pump()
        check_rid(rid)
        req, error = self.requests.get(rid), TransferError(reason)
        flight = None if req is None else self.flights.by_owner.get(req)
        is_asked = req is not None and req in self.waiting and bool(req.asks)
        if flight is not None:
            if is_asked := flight.room_key in self.prefill.open:
                self._fail_room(flight, error, error)
        elif is_asked and req is not None:
            if req.state is DecodeState.QUEUED:  # it may have come, and the answer was lost
                self._refuse_waiting(req, error)
            self._try_again(req, error)
        self._tell()
        return is_asked

    def pop_needs_prefill(self) -> list[PrefillAsk]:
        """Return the requests for the engine to submit to a prefill worker again."""
        self._pump()
        asks, self.prefill.asks = self.prefill.asks, []
        return asks

    def append_many(self, reqs: Sequence[DecodeRequest], token_ids: Sequence[int]) -> None:
        """Add the newly sampled token to each request; KV of the token before is written.

        Afterwards the page for its KV is there, except for the token that completes
        `max_new_tokens`: finish that request, no step writes its KV. An aborted or failed request
        is left out. Cost: a comparison per request, and more only at the end of its pages.

        Raises, with nothing changed, RequestError for a request that does not run, has its tokens
        or is named twice, or another number of tokens; TokenError; OutOfPagesError: its `retract`
        names the requests to retract, best first, and no more than are needed. It is empty if what
        is missing comes back by itself (a busy device, failed rooms): wait a step. Keep the tokens,
        and call again.
        """
        now_s = self._pump()
        # Tokens are checked before any is added: `DecodeRequest.key` later appends them without a
        # check.
        tokens = token_list(token_ids)
        # This takes pages, or raises before it takes any. So the tokens are appended only
        # afterwards.
        if self._growth.for_next_token(reqs, len(tokens), now_s):
            for req, token in zip(reqs, tokens, strict=True):
                if req.state not in CUT_SHORT:
                    req.output.append(token)
        else:
            for req, token in zip(reqs, tokens, strict=True):
                req.output.append(token)
        for source in self._organs:
            source.stepped(reqs, now_s)

    def reserve_many(self, reqs: Sequence[DecodeRequest], num_tokens: int) -> None:
        """Take pages for the KV of `num_tokens` tokens from each request's `kv_len` on, as far as
        its `max_new_tokens` goes. O(requests + pages).

        For a step that writes more than the newest token's KV, which counts: drafts, or a step
        launched before the last one's tokens are known. Unused pages stay with the request. Aborted
        requests are left out.

        Raises, with nothing changed, OutOfPagesError as `append_many` (a step without drafts always
        has pages enough), and RequestError for a request that does not run, or is named twice.
        """
        now_s = self._pump()
        num_tokens = whole_count("num_tokens", num_tokens)
        self._growth.ahead(reqs, num_tokens, now_s)

    def finish(
        self,
        req: DecodeRequest,
        after: DeviceEvent | None = None,
        continues: Continues = None,
        keep_tokens: int | None = None,
    ) -> None:
        """End a request that is done: what has KV becomes cached prefix.

        Nothing is released before `after.query()` is True. `continues` says whether the
        conversation will go on, if known: True or False, or within how many seconds; None leaves it
        to `Request.hints`. With `keep_tokens` only the whole pages of the first that many tokens of
        prompt and output are cached: for a model's thinking, which clients leave out of the next
        turn. The prompt stays cached in any case, as it was since it arrived. Raises RequestError
        if the request does not run.
        """
        self._pump()
        check_event("after", after)
        check_continues(continues)
        if keep_tokens is not None:
            keep_tokens = whole_count("keep_tokens", keep_tokens)
        self._check_runs(req)
        # The last call that may raise: `query` is the user's. Everything below only changes our own
        # state.
        after = not_done(after)
        if continues is None:
            continues = req.request.hints.continues
        self._end(End(req, continues, keep_tokens), DecodeState.FINISHED, after, None)
        self._tell()

    def retract(self, rid: str, after: DeviceEvent | None = None) -> None:
        """Take a running request's pages back; it queues again, in front, and resumes where it was.
        Raises RequestError if it does not run, or is the oldest that does: so one always makes
        progress."""
        self._pump()
        check_event("after", after)
        req = self._named(rid)
        self._check_runs(req)
        if req is next(self._growth.running()):
            raise RequestError(f"request {rid!r} is the oldest that runs; it is never retracted")
        after = not_done(after)
        req.retractions += 1
        self._end(End(req), DecodeState.RETRACTED, after, None)
        self._tell()

    def announce(self, session: str, namespace: Hashable = None) -> None:
        """Note that the next turn of a session (`Hints.session`) comes soon. What host memory has
        of it is loaded by the next passes, where that takes no page that is worth something."""
        check_session(session, namespace)
        now_s = self._pump()
        for source in self._organs:
            source.announced(session, namespace, now_s)
        self._tell()

    def abort(self, rid: str, after: DeviceEvent | None = None) -> bool:
        """End a request wherever it is; it comes out of `pop_failed`. Returns False if it is
        unknown or has ended. Nothing of it is cached but its prompt, and what a retraction has
        cached."""
        return self._cut_short_named(rid, DecodeState.ABORTED, None, after)

    def fail(self, rid: str, error: Exception, after: DeviceEvent | None = None) -> bool:
        """End a request of which the engine has computed what must not be used: NaN, say
        (`NotFiniteError`). It comes out of `pop_failed` with `error`; prefill is told its name and
        its text.

        Nothing is cached that the engine has computed of it since it came out of `pop_transferred`
        or was retracted; before, nothing of what `computed` was told. Otherwise as `abort`.
        """
        check_failure(error)
        return self._cut_short_named(rid, DecodeState.FAILED, error, after)

    def _cut_short_named(
        self, rid: str, state: DecodeState, error: Exception | None, after: DeviceEvent | None
    ) -> bool:
        self._pump()
        check_rid(rid)
        check_event("after", after)
        if (req := self.requests.get(rid)) is None:
            self.counters["aborts_of_unknown"] += 1
        else:
            error = error or AbortedError(f"request {rid!r} was aborted")
            # `not_done` is evaluated before the call, so an event that raises leaves the request as
            # it was.
            self._end(End(req), state, not_done(after), error)
        self._tell()
        return req is not None

    def retarget(self, rid: str, prefill: str) -> None:
        """Send a request to another prefill worker from its next attempt on.

        One that was never admitted is refused where it was submitted, and comes out of
        `pop_needs_prefill` once admitted. Raises RequestError, with nothing changed, if the request
        is not here, its KV is on its way, `prefill` is no address, or the worker there is known to
        hold too little.
        """
        self._pump()
        req = self._named(rid)
        check_prefill(rid, prefill)
        if req.state is DecodeState.PREALLOCATED:
            raise RequestError(f"request {rid!r} is on its way from {req.prefill!r}")
        if prefill != req.prefill:
            self._check_still_holds(req, prefill)
            req.prefill = prefill
            if req in self.waiting:
                self._move(req, prefill, "goes to another prefill worker")
                self._meet(req)
            else:  # it enters under the new address when it queues, and the worker is met then
                req.asks = prefill
        self._tell()

    def refuse(self, request: Request, reason: str = "refused") -> None:
        """Tell prefill at once that this request will not be taken, as when `add` has refused it;
        where a former request of its number has ended, once that room is drained.

        Its room's number is in use here until prefill has answered. Raises RequestError, with
        nothing changed: its room is a live request's here, the same refusal is still unanswered, it
        names no prefill worker, or it is for another decode worker.
        """
        check_request(request)
        check_reason(reason)
        self._pump()
        key = RoomKey(request.room, request.generation)
        self._check_can_open(request, to_refuse=not self.rooms.is_unanswered(key))
        self.rooms.note(key, request.prefill, AbortedError(reason), request.digest)
        self._tell()

    def flush(self, weights_version: str | None = None, after: DeviceEvent | None = None) -> int:
        """Empty the prefix cache, after a weight update. Returns the pages freed at once.

        Without `weights_version`, or with the node's own, running requests finish but cache
        nothing. With another version all that has KV or output of the former one (running, on its
        way, retracted) ends, and comes out of `pop_failed` with a WeightsVersionError; what only
        waits goes on. A prefill worker of another version refuses it by name, so both have to be
        moved, in any order. No step of the model may come between the change of the weights and
        this call. `after`: as of `abort`, for requests that end. Raises ConfigError, with nothing
        changed: no string, or over 256 characters.
        """
        check_event("after", after)
        return self._flush(weights_version, after)

    def _empty(self) -> int:
        # Flights first: they release their locks, so that the flush frees those pages at once.
        # Requests that wait for another's pages ask prefill again: those are of the old weights.
        self._ending.fall_back(self.flights.flush())
        freed = super()._empty()
        # After the device's, whose epoch tells a copy of before.
        for source in self._organs:
            source.flushed()
        return freed

    def _move_weights(self, error: Exception, now_s: float, after: DeviceEvent | None) -> None:
        # Before the aborts below, so that prefill learns this reason, and not that its rooms were
        # aborted.
        self.ledger.weights_version = self.weights_version
        self._commands.append(MoveWeights(self.weights_version))
        self._cut_all_short(error, after, but_waiting=True)

    def end_all(self, error: Exception, now_s: float, after: DeviceEvent | None = None) -> None:
        """Take no new request, and abort all with `error`: its worker computes no more. `after` is
        as for `abort`."""
        after = not_done(after)
        self.draining = True
        self._cut_all_short(error, after, but_waiting=False)

    def _cut_all_short(
        self, error: Exception, after: DeviceEvent | None, but_waiting: bool
    ) -> None:
        """Abort all; `but_waiting`: those stay that wait and have no output."""
        # Whole flights before requests: a request that is cut short alone would make those that
        # joined its flight ask again.
        for flight in self.flights.remove_all():
            self._ending.end(flight, error)
        for req in list(self.requests.values()):
            if not (but_waiting and req.state in _WAITS) or req.output:
                self._end(End(req), DecodeState.ABORTED, after, error)

    @property
    def has_results(self) -> bool:
        """True if a `pop_*` call returns something, or may admit. O(1)."""
        # Admitted: by a call that raised.
        left = self._failed or self._admitted or self.prefill.asks or self.flights.complete
        new = (source.has_new() for source in self._organs)
        return bool(left or self.waiting.may_admit or any(new))

    @property
    def idle(self) -> bool:
        """True if nothing is left: no request, nothing to pop, no undrained room, no copy."""
        left = self.requests or self._failed or self.prefill.asks or self.rooms
        kept = self.ledger.deferred or len(self.flights)
        return not (left or kept or any(any(source.keeps()) for source in self._organs))

    @property
    def wake_s(self) -> float:
        """Time at which the next request may pass its deadline, or be admitted since it is overdue;
        infinity if none waits."""
        wakes = (source.wake_s() for source in self._organs)
        return min(self.waiting.wake_s, self._deadlines.next_s, *wakes)

    # --- calls of the control plane ---------------------------------------------------------------

    def hear(self, event: Any, now_s: float) -> None:
        """Take what became of a room on all ranks, of a prefill worker, or of a source's order."""
        match event:
            # Success. If its flight is gone, or has lost its owner, the room number is what still
            # waits for the proof that every write has landed.
            case RoomEnded(key, KVPoll.SUCCESS):
                flight = self.prefill.arrived(key, event.aux, now_s)
                if flight is None or flight.owner is None:
                    self.room_drained(key)
            # Failure is no proof: writes may still be landing. The pages move to the room, which
            # holds them until `room_drained`. The request tries again with other pages. Where the
            # room was aborted here meanwhile, its pages are held already, and the request has
            # ended.
            case RoomEnded(key):
                if (flight := self.prefill.open.get(key)) is not None:
                    self.journal.transfer_ended(flight.prefill, "failed")
                    error = event.error or InternalError(f"{key} failed without a reason")
                    self._fail_room(flight, error, None)
            case RoomDrained(key):
                self.room_drained(key)
            case RoomOverdue(key):  # it is not drained by its deadline: its pages stay held
                self.counters["quarantined_pages"] += self.pages.quarantine(key)
            case PrefillReady(address, max_tokens):
                self.waiting.opens(self.workers.of(address), max_tokens)
                for req in self.waiting.at(""):  # not admitted since: nothing need stand in
                    if req.prefill == address:
                        self.waiting.move(req, address)
                for req in self.waiting.at(address):
                    try:  # before any page is promised
                        self._check_still_holds(req, address)
                    except RequestError as error:
                        self._fail(req, error)
            case PrefillAway(address):  # its requests hold up no others
                self.waiting.closes(self.workers.of(address), now_s)
                self._recall(address)
                for req in self.waiting.at(address):
                    self._stands_in(req)
            case PrefillLost(address):
                worker = self.workers.of(address)
                self.waiting.closes(worker, now_s)
                # Before the requests try again: one that comes back to this address has to ask for
                # it once more.
                worker.is_met = False
                for req in reversed(self.waiting.at(address)):  # each goes to the front
                    self._try_again(req, event.error)
            case _:
                # What was written may be what a request needs that its worker's share is too small
                # for.
                self.waiting.look_again()
                for source in self._organs:
                    if (flight := source.hear(event, now_s)) is not None:
                        self._ending.cancel(flight, event.error)
                        if flight.owner is not None:
                            self._fail(flight.owner, ours(event.error))

    def take_orders(self) -> list[Any]:
        """Return the copies that sources want to be made, and forget them; `hear` takes the end of
        each."""
        return [order for source in self._organs for order in source.take_orders()]

    def room_drained(self, key: RoomKey) -> None:
        """Release a room's held pages and its number: no write can land there any more."""
        self.workers.release(key)
        self.pages.release(key)
        self.rooms.drained(key)

    def release_deferred(self, now_s: float) -> None:
        """Release the pages of ended requests once the device is done with them. O(requests that
        wait for it)."""
        for event, end in list(self.ledger.deferred.values()):
            if (left := still_pending(event, self.pages.errors)) is None:
                self._ending.release(end, now_s)
            else:
                self.ledger.deferred[end.req] = left, end

    def feeds(self, worker: PeerId) -> list[EventFeed]:
        # The pool's counts whatever checkpoints there are: prefill sends what belongs to the end.
        more = [feed for source in self._organs for feed in source.feeds(worker)]
        return [EventFeed(self.pages.cache, *worker), *more]

    def holders(self) -> list[tuple[str, RequestPages]]:
        """Return what holds pages, by name: requests, and flights. Any thread may call it."""
        orphans = [one for one in self.flights if one.owner is None]
        named = [(f"{one.source.name} {one.room_key.room}", one.pages) for one in orphans]
        return super().holders() + holding(self.ledger.deferred) + named

    def check_invariants(self) -> None:
        """Check every part, and the parts against each other. Raises InternalError."""
        parts: list[Any] = [self.pages, self.budget, self.flights, self.waiting, self.rooms]
        for part in parts:
            part.check_invariants()
        requests, flights = self.requests.values(), self.flights
        # A request that was retracted, and waits for the device, is in both.
        live = list(dict.fromkeys([*requests, *self.ledger.deferred]))
        locks: set[PrefixLock] = set()
        held_by: set[RoomKey] = set()
        for source in (*self._organs, self.prefill):
            source.check_invariants(live)
            its_locks, its_keys = source.keeps()
            locks |= its_locks
            held_by |= its_keys
        # Pages have three kinds of owners: requests, flights that lost their request, and undrained
        # rooms. The last are the allocator's to count, as held.
        held = [req.pages_held for req in live if req.pages_held is not None]
        held += [flight.pages for flight in flights if flight.owner is None]
        self.pages.check_owners(held, locks)
        laws = {
            "only undrained rooms hold pages, and loads that nothing waits for": held_by
            <= set(self.pages.allocator.owners())
            <= self.rooms.undrained() | held_by,
            "what waits lives": set(self.waiting) <= set(requests),
            "the budget counts the admitted requests": len(self.budget)
            == sum(req.state in ACTIVE for req in requests),
        }
        check_laws(laws, list(requests))
        for req in live:
            check_laws(self._laws_of(req), req)

    def _laws_of(self, req: DecodeRequest) -> dict[str, bool]:
        """What its state says of a request: its queue, its flight, and its pages."""
        state, pages, waits = req.state, req.pages_held, req in self.ledger.deferred
        num_pages = 0 if pages is None else pages.num_pages
        least_len = min(req.prompt_len + len(req.output), req.most_kv_len)
        return {
            "what is queued holds nothing": req not in self.waiting
            or (pages is None and state in _WAITS),
            "what is preallocated has a flight, and no other has": (req in self.flights.by_owner)
            == (state is DecodeState.PREALLOCATED),
            "what waits for the device has ended, or was retracted, and holds its pages": not waits
            or (pages is not None and (state.ended or state is DecodeState.RETRACTED)),
            "no request has more pages than it may ever need": num_pages <= req.max_pages,
            "what runs has the page that the next step writes to": state not in CAN_RUN
            or num_pages * self.pages.page_size >= least_len,
            "what has a limit above 0 runs, with pages for that much output": not req.output_limit
            or (state is DecodeState.RUNNING and req.output_limit <= req.most_output),
            "its digest is its prompt's": state.ended or req.is_named_right,
        }

    # --- admission --------------------------------------------------------------------------------

    def _admit(self, plan: Plan, now_s: float) -> None:
        """Carry out a plan."""
        req = plan.req
        flights = self._planner.take(plan, now_s)
        req.become(DecodeState.PREALLOCATED)
        self.waiting.remove(req)
        self.journal.admitted(req, plan, now_s)
        fault: Exception | None = None
        try:
            for flight, segment in flights:
                flight.source.begin(flight, segment, now_s)
        except Exception as error:  # nothing would ever bring the rest
            fault = error
        # A worker may have the first attempt, where that is not asked late.
        if (fault or not plan.segments[0].source.sends) and self.prefill.may_have(req):
            here = AbortedError(f"request {req.rid!r} is brought by decode itself")
            self._refuse_waiting(req, fault or here)
        req.asks = req.prefill  # the next admission is decided by what is known then
        if fault is None:
            self._admitted.append(req)
        else:
            self._fail(req, ours(fault))

    def _lacks_source(self, plan: Plan) -> Exception:
        req, missing = plan.req, plan.req.fill_len - plan.look.start
        worker = f"prefill worker {req.prefill} does not answer" if req.prefill else "it names none"
        most = self._own.most_alone
        here = f"decode computes {most} of one alone" if most >= 0 else "no source has them all"
        return PeerLostError(f"request {req.rid!r} lacks {missing} tokens, {here}, and {worker}")

    def _meet(self, req: DecodeRequest) -> None:
        """Find out, once, whether the worker of a request that has just queued answers."""
        worker = self.workers.of(req.prefill)
        if self.workers.gated and req.prefill and not worker.is_met:
            worker.is_met = True
            self._commands.append(MeetPrefill(req.prefill))
        if worker.is_down:
            self._stands_in(req)

    # --- other attempts ---------------------------------------------------------------------------

    # A worker that may have a request already is told when that request goes elsewhere, since it
    # waits for a promise; what it still answers then is of a former generation.

    def _move(self, req: DecodeRequest, asks: str, why: str) -> None:
        """Let a waiting request ask another worker, or none (""). `why`, to the former one."""
        if req.state is DecodeState.QUEUED:  # else it has no open attempt
            self._refuse_waiting(req, AbortedError(f"request {req.rid!r} {why}"))
            req.generation += 1
        self.waiting.move(req, asks)

    def _refuse_waiting(self, req: DecodeRequest, error: Exception) -> None:
        if req.asks and not self.prefill.asks_late:
            self.rooms.refuse(req.room_key, req.asks, error, req.request.digest)

    def _recall(self, address: str) -> None:
        """Take what is on its way from a worker that does not answer, if other sources bring it
        all. What is more waits for its end."""
        error, rooms = PeerLostError(f"prefill worker {address} does not answer"), self.prefill.open
        # Each goes to the front of the queue, so the last one first. It may have ended with one
        # before it. Those that joined one without an owner ask again.
        for flight in reversed(list(rooms.values())) if self._fails_over else ():
            req = flight.owner
            if (flight.prefill == address and rooms.get(flight.room_key) is flight) and (
                req is None or self._planner.needs_no_prefill(req, self.now_s, joins=False)
            ):
                self._fail_room(flight, error, error)

    def _stands_in(self, req: DecodeRequest) -> bool:
        """Let a request ask no prefill worker, if other sources bring all of it, and may. Return
        whether."""
        may = req.asks and (self._fails_over or self.workers.of(req.prefill).is_down)
        if not may or not self._planner.needs_no_prefill(req, self.now_s):
            return False
        if req in self.waiting:  # its worker may have it, and be back before it is done
            self._move(req, "", "is brought by decode itself")
        req.asks = ""
        self.counters["failovers"] += 1
        return True

    def _fail_room(self, flight: Flight, cause: Exception, told: Exception | None) -> None:
        """End a flight whose room has failed; `told`: what prefill is to be told."""
        req = flight.owner
        self.counters["transfers_failed"] += 1
        self._ending.cancel(flight, told)
        if req is not None:
            self._try_again(req, cause)

    def _try_again(self, req: DecodeRequest, error: Exception) -> None:
        """Ask again after an attempt that failed, or could not begin; else end the request."""
        if req in self.waiting:
            self.waiting.remove(req)
        if req.retries < self._max_retries:
            self.counters["retries"] += 1
            req.retries += 1
            # Kept while it tries again, so that a request that ends by its deadline names the last
            # failure.
            req.error = error
            # The user's code runs in the middle of a change: what it raises, and what it returns
            # that is no address, must not stop that. The retry then goes where the last one went.
            try:
                prefill = None if self._retarget is None else self._retarget(req, error)
                if prefill is not None:
                    check_prefill(req.rid, prefill)
                    req.prefill = req.asks = prefill
            except Exception as fault:
                self.pages.errors.caught(fault)
            # The worker may be another one now, or its size be known only since the request came.
            try:
                self._check_still_holds(req, req.prefill)
                return self._ask_again(req)
            except RequestError as too_long:
                error = too_long
        req.error = error
        if self._stands_in(req):
            return self._ask_again(req)
        return self._fail(req, error)

    # --- ends -------------------------------------------------------------------------------------

    def _fail(self, req: DecodeRequest, error: Exception) -> None:
        # Where its engine was computing it, `pop_failed` tells when the device is done.
        self._end(End(req), DecodeState.FAILED, UNTOLD, error)

    def _end(
        self, end: End, state: DecodeState, after: DeviceEvent | None, error: Exception | None
    ) -> None:
        """End a request, or retract it, and hand on its flight, its place in the queue, its pages.
        `after`: None if the device is done. `error`: why it is cut short."""
        req = end.req
        before = req.state
        req.become(state)
        self.counters[state.value] += 1
        # 1. The flight, or the queue, gives the request up before anything is released: pages of an
        # open room go to that room, and `pages_held` is None afterwards. What the request then
        # still holds is its own.
        if error is not None:
            req.error = error
            self._failed.append(req)
            if (flight := self.flights.by_owner.get(req)) is not None:
                self._ending.leave(flight, error)
            elif req in self.waiting:
                self.waiting.remove(req)
                if before is DecodeState.QUEUED:  # else no prefill worker waits for it
                    self._refuse_waiting(req, error)
        # 2. One that was retracted comes back: it stays in `requests`, and its number is in use.
        self.budget.stop(req.rid)
        if state.ended:
            self._deadlines.forget(req)
            self.rooms.remove(req.room)  # not free where a room of it is not drained; see `Rooms`
            self.requests.pop(req.rid, None)
            self.journal.ended(req, self.now_s)
        # 3. One that was retracted, and waits for the device, is released by that entry. `Ending`
        # queues it again then, since a queued request holds nothing.
        if req.pages_held is not None and req not in self.ledger.deferred:
            self._ending.release_after(after, end, self.now_s)

    def _too_late(self, req: DecodeRequest) -> None:
        if any(one.owner is req and one.source.may_commit(one) for one in self.flights.complete):
            return
        by = f"by its deadline_s, {req.request.deadline_s}"
        error: Exception = TransferTimeoutError(f"request {req.rid!r}: its KV was not here {by}")
        if req in self.waiting:
            why = self.waiting.why(req, self.now_s)
            error = AdmissionTimeoutError(f"request {req.rid!r} was not admitted {by}: {why}")
        self._fail(req, error)

    def _check_can_open(self, request: Request, to_refuse: bool = False) -> None:
        """Raise RequestError if the room of `request` cannot be taken; or refused, which it can be
        while it is not drained yet."""
        if request.room in self.rooms and (not to_refuse or self.rooms.is_live(request.room)):
            raise RequestError(f"room {request.room} is in use")
        # Decode may carry on without any prefill worker, where it is told so.
        if request.prefill or to_refuse or not (self._fails_over and request.may_compute):
            check_prefill(request.rid, request.prefill)
        if request.decode not in ("", self.name):
            named = f"{request.decode!r}, this one is {self.name!r}"
            raise RequestError(f"request {request.rid!r} is for decode worker {named}")

    def _ask_again(self, req: DecodeRequest) -> None:
        if req.state is not DecodeState.RETRACTED:  # else it was not admitted since
            req.become(DecodeState.RETRACTED)
        # It may still be counted as admitted. The flight has handed its pages on, so there is
        # nothing to release.
        self.budget.stop(req.rid)
        # A new generation, so that what peers still send about the former attempt is not taken for
        # this one. All the tokens so far count as prompt; how many are cached is for the next
        # admission to find.
        req.generation += 1
        req.fill_len = req.kv_len
        req.prefix_len, req.aux = 0, b""
        self.waiting.add(req, self.now_s, first=True)
        self._meet(req)

    def _named(self, rid: str) -> DecodeRequest:
        check_rid(rid)
        req = self.requests.get(rid)
        if req is None:
            raise RequestError(f"request {rid!r} is not here")
        return req

    def check_own(self, req: DecodeRequest) -> None:
        """Raise RequestError for what is no request of this scheduler, whatever its state."""
        check_own(req, DecodeRequest, self.pages)

    def _check_still_holds(self, req: DecodeRequest, prefill: str) -> None:
        """Raise RequestError where a worker holds too few tokens for what it may be asked for from
        now on. Of a request that runs, or ran, that is what it has so far."""
        num_tokens = req.kv_len if req.resumed else req.most_kv_len
        self.workers.check_holds(req.rid, num_tokens, prefill)

    def _check_runs(self, req: DecodeRequest) -> None:
        self.check_own(req)
        req.check_state(CAN_RUN, "does not run")
