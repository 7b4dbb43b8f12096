"""The prefill side without threads or sockets.

A request that has ended keeps its lock and its own tail until the control plane reports that no
write reads them (`source_free`), and the engine has seen the end (`pop_sent`, `pop_failed`): it may
be computing into them. A chunk's KV goes to the tree at the next `pop_bootstrapped`, so the chunk
is on its way before. Requests that need a prefix which another computes wait
(`bootstrap_queue.py`).

Source: SGLang's prefill queues (`disaggregation/prefill.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, assert_never

from prefixkv.cache.events import EventFeed
from prefixkv.config import PrefillConfig, UsablePrefix
from prefixkv.errors import (
    AbortedError,
    InternalError,
    RequestError,
    TransferTimeoutError,
    check_laws,
)
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import (
    PagedScheduler,
    check_failure,
    check_own,
    check_reason,
    not_done,
    reason_of,
    still_pending,
)
from prefixkv.paging import pages_for
from prefixkv.prefill.bootstrap_queue import PrefillBootstrapQueue, SharedPrefixes
from prefixkv.prefill.request import (
    EnginePrefix,
    PrefillJournal,
    PrefillRequest,
    PrefillState,
    Resume,
    checked_chunk,
    state_of,
)
from prefixkv.protocol.commands import (
    AbortRoom,
    AddRoom,
    DeclineRoom,
    MoveWeights,
    PrefillCommand,
    SendChunk,
)
from prefixkv.protocol.events import Bootstrapped, PrefillEvent, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.request import DeviceEvent, Request, check_event, check_request, check_rid
from prefixkv.settings import whole_count


class PrefillScheduler(PagedScheduler[PrefillRequest, PrefillCommand]):
    """The requests of one prefill rank, from `add` until their pages are released. Owned by the
    scheduler's thread."""

    journal: PrefillJournal
    # Of the pages, the first slot of their `Saves`, and the config; `assembly.py` puts it here.
    resume_at_saves: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        pages: PageManager,
        config: PrefillConfig,
        num_slots: int = 0,
        usable_prefix: UsablePrefix | None = None,
    ) -> None:
        """Begin without requests. Of `config` it takes what is about requests.

        `num_slots`: of the engine's extra state, a slot of which is sent with every request; 0:
        there is none. Those of checkpoints come behind them.
        """
        super().__init__(pages, PrefillJournal(), config.model.weights_version)
        self.num_slots = num_slots
        self._resume = Resume()
        if pages.saves.num_slots:
            self._resume = self.resume_at_saves(pages, num_slots, config)
        elif pages.windows or num_slots or usable_prefix is not None:
            # No window is kept behind a prefix; a state may be by the engine.
            self._resume = EnginePrefix(None if pages.windows else usable_prefix, pages.errors)
        self.shared_prefixes = SharedPrefixes(
            pages.page_size, self.counters, config.follow_s, self._resume
        )
        self.bootstrapped = PrefillBootstrapQueue(pages, self.shared_prefixes, self._resume)
        # Requests: `requests` (of the base class) has all that live or hold pages; `_rooms` those
        # with a room that may still be spoken of; `_sent` and `_failed` what the engine has not
        # popped.
        self._computed: dict[PrefillRequest, None] = {}  # with KV that the tree has not yet
        self._max_aux_bytes = config.control.max_aux_bytes
        self._rooms: dict[RoomKey, PrefillRequest] = {}
        self._sent: list[PrefillRequest] = []
        self._deferred: list[tuple[DeviceEvent | None, PrefillRequest]] = []  # popped

    # --- calls of the engine ----------------------------------------------------------------------

    def add(self, request: Request) -> PrefillRequest:
        """Take a request; it waits for decode's promise.

        Raises RequestError, with nothing changed: a duplicate id, a room in use, a decode worker
        that is not named, a prompt that the pool could never hold; DrainingError for any request
        after `drain`. Where the room is not in use, decode gets the reason, as by `refuse`.
        """
        check_request(request)
        now_s = self._pump()
        needed = pages_for(len(request.key), self.pages.page_size)
        try:
            self._check_new(request, needed, "needs {} pages")
            self._check_room(request)
        except RequestError as error:
            # 1. It may wait on decode already: decline it, so that decode does not wait until its
            # deadline. Not where another request lives in the room: that one would end.
            former = self._rooms.get(self._key_of(request))
            if request.decode and (former is None or former.state.ended):
                self._decline(request, error)
                self._tell()
            raise
        # 2. Enter it everywhere, and only then ask for its room: the answer may come with the next
        # events.
        req = PrefillRequest(request, self.pages, now_s)
        self._note_deadline(req)
        self.requests[req.rid] = req
        self._rooms[req.room_key] = req
        req.name_prompt(self.pages.match(request.key, request.cacheable))
        self._commands.append(AddRoom(req.room_key, req.num_tokens, request.digest))
        self._tell()
        return req

    def refuse(self, request: Request, reason: str = "refused") -> None:
        """Tell decode at once that this request will not be taken; if it promises its pages later,
        it hears it then, for `parked_timeout_s`.

        Raises RequestError where the room is in use, the request names no decode worker, or the
        reason is no string.
        """
        check_request(request)
        check_reason(reason)
        self._pump()
        self._check_room(request)
        self._decline(request, reason)
        self._tell()

    def _decline(self, request: Request, reason: Exception | str) -> None:
        command = DeclineRoom(self._key_of(request), reason_of(reason), request.digest)
        self._commands.append(command)

    def _check_room(self, request: Request) -> None:
        if not request.decode:
            raise RequestError(f"request {request.rid!r} names no decode worker")
        former = self._rooms.get(self._key_of(request))
        # No event follows for a room that has ended with its source free, though the engine may
        # still have to pop its request: so its number may be used again.
        if former is not None and not (former.state.ended and former.source_free):
            of = f"{request.generation} of {request.decode!r}"
            raise RequestError(f"room {request.room} generation {of} is in use")

    def _key_of(self, request: Request) -> RoomKey:
        return RoomKey(request.room, request.generation, request.decode)

    def pop_bootstrapped(self, limit: int | None = None) -> list[PrefillRequest]:
        """Return the requests to compute now: `decode_prefix_len` and `prefix_len` are known,
        `pages` are there. KV that is computed goes to the tree before.

        At most `limit`, first come first served. But one that needs a prefix which another request
        computes comes when that is there, or will not come. Raises first, with nothing changed,
        what a policy, a log handler or an event of the user's has raised since the last call, and
        CallerError for a `limit` that is no whole number, or below 0.
        """
        now_s = self._pump()
        limit = None if limit is None else whole_count("limit", limit)
        self.pages.errors.raise_due()
        # 1. Pages come back: those that waited for the device, and those of requests past their
        # deadline.
        self.settle_deferred(now_s)
        for req in self._deadlines.due(now_s):
            what = f"{req.state.value} when its deadline_s, {req.request.deadline_s}, was over"
            self._cut_short(req, TransferTimeoutError(f"request {req.rid!r} was {what}"), now_s)
        # 2. To the tree, before the queue matches: so a request finds what the last step computed.
        # The chunks themselves were sent before, so caching does not delay them.
        while self._computed:
            self._cache(next(iter(self._computed)), now_s)
        # 3. Hand out.
        popped = self.bootstrapped.pop_bootstrapped(now_s, limit)
        for req in popped:
            self.journal.started(req, now_s)
        self._tell()
        return popped

    def send_chunk(
        self, req: PrefillRequest, end: int, last: bool = False, aux: bytes = b"",
        ready: DeviceEvent | None = None, state_slot: int = -1,
    ) -> int:  # fmt: skip
        """Send what decode lacks of a request's KV up to token `end`, computed once `ready.query()`
        is True. Returns the number of pages queued. With `last`, the extra state in `state_slot`,
        the outcome and `aux` follow.

        A request that has failed meanwhile takes no chunk: the call returns 0, and `pop_failed`
        says why; its computed KV goes to the tree all the same, unless the engine has failed or
        aborted it. Raises RequestError or AuxTooLargeError, with nothing changed.
        """
        now_s = self._pump()
        # 1. Check everything before anything moves: an error that is found later would leave the
        # room stuck.
        check_own(req, PrefillRequest, self.pages)
        end, state_slot, aux = checked_chunk(
            end, state_slot, aux, last, ready, self.num_slots, self._max_aux_bytes
        )
        # 2. Failed while the engine computed: no error of the engine's. What it computed is good
        # prefix, unless it has said otherwise; but not once it has popped the failure, since its
        # pages may be released then.
        if req.state is PrefillState.FAILED:
            held = req.pages_held is not None and req.given_up is None
            if held and req.plan is not None and not req.popped:
                with suppress(RequestError):
                    req.plan.send(end)
                    self._computed[req] = None
            return 0
        req.check_state({PrefillState.COMPUTING}, "takes no chunk")
        assert req.plan is not None
        assert req.pages_held is not None
        # 3. Send. The plan checks `end`, so it moves first; the ids are copied, since caching may
        # change the row.
        if req.plan.windows:
            computed = end - max(req.prefix_len, req.plan.computed)
            most = min(group.step_tokens for group in self.pages.windows)
            if computed > most:
                what = f"a chunk of {computed} tokens, step_tokens of its window groups is {most}"
                raise RequestError(f"request {req.rid!r} has {what}")
        span = req.plan.send(end, last)
        src_pages = req.pages[span.first_page : span.end_page].copy()
        groups = state_of(state_slot)
        if req.plan.windows:
            of_windows = zip(req.plan.windows, self.pages.windows, strict=True)
            row = req.pages_held.row
            sent = [plan.chunk(plan.send(end, last), *group.row(row)) for plan, group in of_windows]
            groups = (*sent, *groups)
        self.journal.chunk(req, len(src_pages), last, now_s)
        if last:
            req.state_slot = state_slot
            req.become(PrefillState.SENDING)
        for part in self._resume.savers:
            part.passed(req, end)
        if req.plan.windows:
            self.pages.slide(req.pages_held, end)
        # 4. Progress, for the tree and for those that follow this request.
        self._computed[req] = None
        self.shared_prefixes.progress_s = now_s
        if len(self.shared_prefixes):
            self.bootstrapped.look_again()
        # 5. A chunk without pages sends nothing, but the last one carries the outcome.
        if len(src_pages) or last or any(len(group.src_pages) for group in groups):
            chunk = SendChunk(
                req.room_key,
                first_page=span.first_page,
                src_pages=src_pages,
                last=last,
                aux=aux,
                ready=ready,
                groups=groups,
            )
            self._commands.append(chunk)
        self._tell()
        return len(src_pages)

    def save_state(self, req: PrefillRequest, end: int) -> int:
        """Return the slot of the StatePool into which the engine copies the extra state behind
        `end` tokens, one of the request's `stops`, just computed; -1 if it need not.

        Before the chunk up to there is handed over by `send_chunk`. The copy has to be queued
        before any later work on that slot, which is the library's from then on. Raises
        RequestError, with nothing changed, if `end` is none of its stops, or it is not computed.
        """
        self._pump()
        check_own(req, PrefillRequest, self.pages)
        end = whole_count("end", end)
        if req.state is PrefillState.FAILED:
            return -1
        req.check_state({PrefillState.COMPUTING}, "saves no state")
        return self._resume.take(req, end)

    def pop_sent(self) -> list[PrefillRequest]:
        """Return the requests that are done: decode has all of their KV."""
        return self._pop(self._sent, None)

    def pop_failed(self, after: DeviceEvent | None = None) -> list[PrefillRequest]:
        """Return the requests that failed or were aborted; `req.error` says why. The engine has to
        stop computing them.

        One with extra state handed over comes when no write reads that any more. `after`: device
        work launched for them before this call has ended once its `query()` is True.
        """
        return self._pop(self._failed, after)

    def abort(self, rid: str) -> bool:
        """End a request; it comes out of `pop_failed`. Returns False if it is unknown or has ended.
        What its chunks have brought is cached by the next `pop_bootstrapped`, unless this comes
        before that. With its last chunk handed over it may have succeeded, and decode may know:
        then it does succeed."""
        return self._end_named(rid, None)

    def fail(self, rid: str, error: Exception) -> bool:
        """End a request of which the engine has computed what must not be used: NaN, say
        (`NotFiniteError`). It comes out of `pop_failed` with `error`; decode is told its name and
        its text.

        Caches no more than `abort`, also of one that has ended. Before its last chunk is sent:
        decode goes on from that.
        """
        check_failure(error)
        return self._end_named(rid, error)

    def _end_named(self, rid: str, error: Exception | None) -> bool:
        now_s = self._pump()
        check_rid(rid)
        req = self.requests.get(rid)
        lives = req is not None and not req.state.ended
        if req is not None and (lives or error is not None):
            error = error or AbortedError(f"request {rid!r} was aborted")
            self._cut_short(req, error, now_s, given_up=True)
        elif error is None:
            self.counters["aborts_of_unknown"] += 1
        self._tell()
        return lives

    def _cut_short(
        self, req: PrefillRequest, error: Exception, now_s: float, given_up: bool = False
    ) -> None:
        """End a request, unless it has ended. `given_up`: nothing more of it is cached, also of one
        that has ended."""
        if given_up:
            req.given_up = error
            self._computed.pop(req, None)
        if req.state.ended:
            return
        self._commands.append(AbortRoom(req.room_key, reason_of(error)))
        # While it sends, only its room knows whether the last write was first: RoomEnded
        # decides.
        if req.state is not PrefillState.SENDING:
            self._end(req, error, now_s)

    def end_all(self, error: Exception, now_s: float) -> None:
        """Take no new request, and abort all with `error`. One that is all handed over ends as its
        room does."""
        self.draining = True
        for req in list(self.requests.values()):
            if not req.state.ended:
                self._cut_short(req, error, now_s, given_up=True)

    @property
    def has_results(self) -> bool:
        """True if one of the `pop_*` calls returns something. O(1)."""
        return bool(self._failed or self._sent or self.bootstrapped.may_open)

    @property
    def idle(self) -> bool:
        """True if nothing lives: no request, and nothing to pop. O(1)."""
        return not (self.requests or self._failed or self._sent or self._deferred)

    @property
    def wake_s(self) -> float:
        """Time at which a request may have waited long enough, for another's prefix or at all."""
        return min(self.bootstrapped.wake_s, self._deadlines.next_s)

    # --- calls of the control plane ---------------------------------------------------------------

    def hear(self, event: PrefillEvent, now_s: float) -> None:
        """Take what became of a room on all ranks."""
        req = self._rooms.get(event.key)
        if req is None:
            return
        match event:
            case Bootstrapped():
                # It may have been aborted while the event was on its way.
                if req.state is PrefillState.BOOTSTRAPPING:
                    self.bootstrapped.add(req, event.prefix_len)
                    self.journal.promised(req, event.peer.name, now_s)
            case RoomEnded():
                if not req.state.ended:
                    # What the engine has said goes before what became of the room then.
                    why = f"{event.key} failed without a reason"
                    error = req.given_up or event.error or InternalError(why)
                    self._end(req, None if event.poll is KVPoll.SUCCESS else error, now_s)
            case SourceFree():  # no write reads its pages: released once the engine is done
                # A failed request with a state slot was kept back: the engine may reuse the slot
                # once it is popped.
                if req.state is PrefillState.FAILED and req.state_slot >= 0 and not req.source_free:
                    self._failed.append(req)
                req.source_free = True
                self._maybe_release(req, now_s)
            case _:
                assert_never(event)

    def settle_deferred(self, now_s: float) -> None:
        """Release the pages of popped requests with which the device is done."""
        waiting, self._deferred = self._deferred, []
        for after, req in waiting:
            left = None if after is None else still_pending(after, self.pages.errors)
            if left is None:
                req.popped = True
                self._maybe_release(req, now_s)
            else:
                self._deferred.append((left, req))

    def flush(self, weights_version: str | None = None) -> int:
        """Empty the prefix cache, after a weight update. Returns the pages freed at once.

        Without `weights_version`, or with the node's own, running requests finish but cache
        nothing. With another version all that was promised or is computed under the former one
        fails: `pop_failed` gives a WeightsVersionError, and decode hears of it. What waits for
        decode's promise goes on; one with its last chunk handed over ends as its room does. No step
        of the model may come between the change of the weights and this call. Each rank of a mesh
        is moved by itself. Raises ConfigError, with nothing changed: no string, or over 256
        characters.
        """
        return self._flush(weights_version)

    def _empty(self) -> int:
        # First, so that no request waits for KV of the old weights.
        self.shared_prefixes.flush()
        self.bootstrapped.look_again()
        return super()._empty()

    def _move_weights(self, error: Exception, now_s: float, after: DeviceEvent | None) -> None:
        for req in list(self.requests.values()):
            if req.state in (PrefillState.BOOTSTRAPPED, PrefillState.COMPUTING):
                self._end(req, error, now_s)
        self._commands.append(MoveWeights(self.weights_version, ends_waiting=False))

    def feeds(self, worker: PeerId) -> list[EventFeed]:
        return [EventFeed(self.pages.cache, *worker, at_saves=not self._resume.is_whole)]

    def check_invariants(self) -> None:
        """Check the pages, rooms and requests against each other. Raises InternalError."""
        self.pages.check_invariants()
        self.shared_prefixes.check_invariants()
        self._resume.check_invariants(list(self.requests.values()))
        self.pages.check_owners([pages for _, pages in self.holders()])
        laws = {
            "nothing is held: peers do not write here": not self.pages.allocator.owners(),
            "a room is a request's": all(
                self.requests.get(req.rid) is req for req in self._rooms.values()
            ),
            "and a request has its room, until its number may be used again": all(
                self._rooms.get(req.room_key) is req or (req.state.ended and req.source_free)
                for req in self.requests.values()
            ),
            "a request's digest is its prompt's": all(
                req.is_named_right for req in self.requests.values()
            ),
        }
        check_laws(laws, self.requests)

    # --- ends -------------------------------------------------------------------------------------

    def _end(self, req: PrefillRequest, error: Exception | None, now_s: float) -> None:
        """End a request, as sent, or as failed with `error`."""
        if req.state is PrefillState.BOOTSTRAPPED:
            self.bootstrapped.remove(req)
        req.error = error
        req.become(PrefillState.SENT if error is None else PrefillState.FAILED)
        self.counters[req.state.value] += 1
        if error is None:
            self._sent.append(req)
        else:
            self._computes_no_more(req)
            # With a state slot that writes may still read, the engine must not hear of the end yet:
            # it would reuse the slot. `source_free` reports it then.
            if req.state_slot < 0 or req.source_free:
                self._failed.append(req)
        self.journal.ended(req, now_s)

    def _pop(self, ended: list[PrefillRequest], after: DeviceEvent | None) -> list[PrefillRequest]:
        now_s = self._pump()
        check_event("after", after)
        after = not_done(after)
        reqs = ended.copy()
        ended.clear()
        self._deferred += [(after, req) for req in reqs]
        self.settle_deferred(now_s)
        return reqs

    def _computes_no_more(self, req: PrefillRequest) -> None:
        """Those that followed it look again."""
        self.shared_prefixes.end(req)
        if len(self.shared_prefixes):
            self.bootstrapped.look_again()

    def _cache(self, req: PrefillRequest, now_s: float) -> None:
        del self._computed[req]
        if req.pages_held is None or req.plan is None:
            return
        pages_computed = req.plan.computed // self.pages.page_size
        if req.request.cacheable and pages_computed > req.pages_held.num_locked:
            # Writes, and steps on their way, may read what turns out to be there already.
            self.pages.cache_unfinished(
                req.pages_held, req.key.prefix(req.plan.computed), now_s,
                priority=req.request.priority, being_read=True,
            )  # fmt: skip
        # The leader moves to what it has computed: a follower finds those pages in the tree, and
        # where it can go on.
        goes_on_at = None
        for part in self._resume.savers:
            goes_on_at = part.enter(req)
        self.shared_prefixes.advance(req, req.plan.computed, goes_on_at)

    def _maybe_release(self, req: PrefillRequest, now_s: float) -> None:
        # All three, in whichever order they come: the last one releases.
        if not (req.source_free and req.popped and req.state.ended):
            return
        self.requests.pop(req.rid, None)
        self._deadlines.forget(req)
        if self._rooms.get(req.room_key) is req:  # else a later request has the number
            del self._rooms[req.room_key]
        self._computed.pop(req, None)
        self._computes_no_more(req)
        if req.pages_held is None:
            return
        key = req.key.prefix(req.plan.computed if req.plan is not None else 0)
        is_good = req.request.cacheable and req.given_up is None
        # What was computed is good prefix, even if the request failed; and so are the states of its
        # last chunks, once their pages are in the tree, and under its lock.
        if is_good and key:
            self.pages.cache_unfinished(req.pages_held, key, now_s, priority=req.request.priority)
            for part in self._resume.savers:
                part.enter(req)
        for part in self._resume.savers:
            part.dropped(req)
        self.pages.drop(req.pages_held)
        req.pages_held = None
