"""Where an attempt at a request gets what it lacks: of a prefill worker by a promise, or of the
engine here.

    it waits              in the line of its worker. While that does not answer, a request that
                          decode may compute itself goes *alone*, to a line that always has a turn,
                          and comes back when the worker answers
    it is admitted        the engine computes it, without a room or a share; or nothing is missing,
                          of one that ran before; or a promise opens the room. Where prefill has not
                          got the request, the engine is asked to submit it there again. Where no
                          worker can be asked, and it is more than the engine computes, it has to
                          fail
    its transfer failed   it tries again: there, at another worker that the user names, or alone

A worker that may have a request already is told when that request goes elsewhere, since it waits
for a promise; what it still answers then is of a former generation.
"""

from __future__ import annotations

from prefixkv.decode.compute_choice import ComputeChoice
from prefixkv.decode.inflight import Flight
from prefixkv.decode.ledger import Ledger
from prefixkv.decode.prealloc_queue import DecodePreallocQueue
from prefixkv.decode.request import DecodeRequest, DecodeState, PrefillAsk, Retries
from prefixkv.decode.rooms import Rooms
from prefixkv.decode.workers import ALONE
from prefixkv.errors import AbortedError, RequestError
from prefixkv.paging import pages_for
from prefixkv.protocol.commands import MeetPrefill, OpenRoom
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Promise


class Attempts:
    """Attempts at requests. Owned by the scheduler's thread.

    `asks` are the prompts that the engine submits again, in order.
    """

    def __init__(
        self,
        ledger: Ledger,
        rooms: Rooms,
        waiting: DecodePreallocQueue,
        choice: ComputeChoice,
        retries: Retries,
        name: str,
    ) -> None:
        self._pages, self._flights, self._points = ledger.pages, ledger.flights, ledger.points
        self._arriving, self._workers = ledger.arriving, ledger.workers
        self._sources = ledger.sources
        self._journal, self._counters = ledger.journal, ledger.journal.counters
        self._rooms, self._waiting, self._choice = rooms, waiting, choice
        self._retries = retries
        self._name = name  # of this decode worker
        self.asks: list[PrefillAsk] = []

    # --- workers ----------------------------------------------------------------------------------

    def meet(self, address: str) -> None:
        """Command, once, that it be found out whether a prefill worker answers."""
        worker = self._workers.get(address)
        if self._workers.gated and address and worker is not None and not worker.is_met:
            worker.is_met = True
            self._rooms.commands.append(MeetPrefill(address))

    def check_holds(self, rid: str, num_tokens: int, address: str) -> None:
        """Raise RequestError where the worker is known to hold fewer than `num_tokens`, all that
        the request may become: retracted late, it would fail with half of its answer given."""
        worker = self._workers.get(address)
        if worker is not None and 0 < worker.max_tokens < num_tokens:
            raise RequestError(
                f"request {rid!r} may have {num_tokens} tokens (max_new_tokens included), prefill "
                f"worker {address} holds {worker.max_tokens}"
            )

    def check_still_holds(self, req: DecodeRequest, address: str) -> None:
        """Raise RequestError where a worker is known to hold too few tokens for what it may be
        asked for from now on. Of a request that runs, or ran, that is what it has so far."""
        self.check_holds(req.rid, req.kv_len if req.resumed else req.most_kv_len, address)

    # --- moves ------------------------------------------------------------------------------------

    def retarget(self, req: DecodeRequest, prefill: str) -> None:
        """Send a request that is not on its way to another worker from its next attempt on. One
        that was never admitted is refused at the former. Raises RequestError, with nothing changed,
        if the worker is known to hold too little."""
        self.check_still_holds(req, prefill)
        # The former worker may have computed the prompt, and waits for a promise that will not
        # come: a refusal ends it there. A new generation keeps its answer apart from the next
        # attempt. A retracted request has no open attempt, so nothing is refused.
        if req.state is DecodeState.QUEUED:
            moved = AbortedError(f"request {req.rid!r} goes to another prefill worker")
            self._withdraw(req, moved)
        self._go_to(req, prefill)

    def go_alone(self, req: DecodeRequest) -> None:
        """Let a request, whose worker does not answer, wait to be computed here, if it may."""
        if req.is_alone or not self._choice.may_take_alone(req):
            return
        # The worker may have it, and may be back before this request is done.
        if req.state is DecodeState.QUEUED:
            self._withdraw(req, AbortedError(f"request {req.rid!r} is computed by decode"))
        req.is_alone = True
        self._waiting.move(req, ALONE)
        self._counters["failovers"] += 1

    def come_back(self, req: DecodeRequest) -> None:
        """Let a request that went alone wait for its worker again."""
        req.is_alone = False
        self._waiting.move(req, req.prefill)

    def _go_to(self, req: DecodeRequest, prefill: str) -> None:
        req.prefill, req.is_alone = prefill, False
        # A request that runs, or still has to queue again, is in no line: when it queues it enters
        # under the new address, and the worker is met then.
        if req in self._waiting:
            self._waiting.move(req, prefill)
            self.meet(prefill)

    def _withdraw(self, req: DecodeRequest, error: Exception) -> None:
        """Refuse a waiting request where it may be. Its next attempt is another generation in any
        case, and is asked for late."""
        self.refuse_waiting(req, error)
        req.generation += 1

    def refuse_waiting(self, req: DecodeRequest, error: Exception) -> None:
        """Refuse a request that was not admitted yet at its worker, if one may have it."""
        if not req.is_alone and req.prefill and not self._sources.asks_late:
            self._rooms.refuse(req.room_key, req.prefill, error, req.request.digest)

    def next_attempt(self, req: DecodeRequest, error: Exception) -> Exception | None:
        """Point a request at its next attempt, after a failed transfer: then it has to queue again.
        Return None, or the error with which it is to end."""
        if req.retries < self._retries.most:
            self._counters["retries"] += 1
            req.retries += 1
            # Kept while it tries again, so that a request that ends by its deadline names the last
            # failure.
            req.error = error
            if (prefill := self._retries.next_prefill(req, error)) is not None:
                self._go_to(req, prefill)
            # The worker may be another one now, or its size be known only since the request came.
            try:
                self.check_still_holds(req, req.prefill)
            except RequestError as too_long:
                error = too_long
            else:
                return None
        # No other attempt at prefill: decode may carry on alone.
        fails_over = self._sources.fails_over or self._workers.is_down(req.prefill)
        if fails_over and self._choice.may_take_alone(req):
            self._counters["failovers"] += 1
            req.error, req.is_alone = error, True
            return None
        return error

    # --- what an admitted request lacks -----------------------------------------------------------

    def ask(self, req: DecodeRequest, weights_version: str, now_s: float) -> bool:
        """Choose the source of what an admitted request lacks, and open the room by which prefill
        sends it, or have the engine compute it. Returns False if there is no source: then it is to
        be failed."""
        flight = self._flights.of(req)
        assert flight is not None
        pages, page_size = flight.pages, self._pages.page_size
        start, end = pages.num_shared, pages_for(req.sent_len, page_size)
        # Of this admission: the next one is decided by what is known then.
        was_alone, req.is_alone = req.is_alone, not req.prefill
        is_local = self._choice.takes(req, flight, was_alone, now_s)
        num_asked = 0 if is_local else end - start
        num_loaded = 0
        if (joined := flight.joined) is not None and joined.is_load:
            # Its own load is a hit; one that it shares is on its way with another's flight.
            num_loaded = joined.num_pages if joined.request is req.request else 0
        shared_tokens = (pages.num_joined - num_loaded) * page_size
        num_computed = req.fill_len - (req.prefix_len if is_local else req.sent_len)
        self._journal.admitted(
            req, num_asked, shared_tokens, now_s, num_loaded * page_size, num_computed
        )
        if is_local:
            # Before the refusal: it has to find a flight without a room.
            self._arriving.add_local(flight)
            self._workers.release(flight.room_key)
            # A worker may have the first attempt, where that is not asked late.
            is_first = req.generation == req.request.generation
            if not was_alone and is_first:
                mine = AbortedError(f"request {req.rid!r} is computed by decode")
                self.refuse_waiting(req, mine)
            return True
        if req.resumed and req.prefix_len == req.fill_len and not self._pages.groups:
            # 1. A resumed request with all its KV in the tree, and no extra state and no window,
            # which are never cached: nothing is to be sent, so no room is opened, whether or not
            # prefill is there.
            self._arriving.arrived(flight)
            self._workers.release(flight.room_key)
            return True
        if was_alone:
            # It lacks more than when it began to wait, and prefill can still not be asked.
            worker = self._workers.get(req.prefill)
            if not req.prefill or worker is None or not worker.is_open:
                self._arriving.add_local(flight)  # so that it ends as one without a room
                return False
            self._workers.promise(flight.room_key, worker, end - start)
        # 2. A later attempt: prefill has ended, or never had, the request of this generation. The
        # engine has to submit it there again.
        if self._sources.asks_late or req.generation > req.request.generation:
            self.asks.append(PrefillAsk(req, self._name))
        # 3. Registered before the command leaves, so that an answer always finds its flight.
        self._arriving.add(flight)
        num_sent = req.sent_len - req.prefix_len
        again = self._choice.again_tokens(flight, req.prefix_len)
        self._sources.promised(
            req.prefill, flight.room_key, now_s, num_sent, num_loaded * page_size, again
        )
        self._rooms.commands.append(self._promise(req, flight, start, end, weights_version))
        return True

    def _promise(
        self, req: DecodeRequest, flight: Flight, start: int, end: int, weights_version: str
    ) -> OpenRoom:
        """Return the promise of the pages [start, end) of the flight's row. Costs a match and a
        digest, where that is not its whole prompt."""
        pages, page_manager = flight.pages, self._pages
        promise = Promise(
            *flight.room_key.numbers,
            fill_len=req.sent_len,
            prefix_len=req.prefix_len,
            pages=page_manager.table.packed(pages.row, start, end),
            ticket=self._rooms.ticket(),
            weights_version=weights_version,
            groups=page_manager.groups.promised(pages.row, end),
        )
        # After some output the tokens to compute are more than the prompt, and without its end they
        # are fewer, so their digest is another.
        digest = req.request.digest
        if req.sent_len != req.prompt_len:
            key = req.key if req.sent_len == len(req.key) else req.key.prefix(req.sent_len)
            digest, _ = page_manager.digest(key, page_manager.match(key, req.request.cacheable))
        return OpenRoom(promise, req.prefill, digest)

    def answered(self, key: RoomKey, aux: bytes, now_s: float) -> Flight | None:
        """Note that prefill has sent all that a room was promised for. Return its flight; None if
        nothing waits for it any more."""
        # It proves that every write has landed, so the pages leave prefill's share at once.
        self._workers.release(key)
        flight = self._arriving.succeed(key, aux)
        if flight is not None:
            self._journal.transferred(flight, now_s)
            num_tokens = len(flight.key) - flight.pages.num_shared * self._pages.page_size
            if flight.is_local:
                assert flight.owner is not None
                assert self._points is not None
                num_tokens = flight.owner.sent_len - flight.owner.prefix_len
                self._points.go_on_from_sent(flight.owner)
            self._sources.arrived(flight.prefill, key, num_tokens, now_s)
            self._choice.sent(flight)
        return flight
