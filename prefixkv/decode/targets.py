"""The prefill worker that each request on decode is for, and what happens where it cannot be asked.

    it answers       the request waits in its lane, and is asked of it when it is admitted
    it does not      its lane is closed. A request that decode may compute itself goes *alone*, to a
                     lane that is always open, and comes back when the worker answers
    it has failed    the request tries again: there, at another one that the user names, or alone

A worker that may have a request already is told when that request goes elsewhere, since it waits
for a promise; what it still answers then is of a former generation.
"""

from __future__ import annotations

from collections import Counter

from prefixkv.decode.compute_choice import ComputeChoice
from prefixkv.decode.lanes import ALONE, Lanes
from prefixkv.decode.prealloc_queue import DecodePreallocQueue
from prefixkv.decode.refusals import Refusals
from prefixkv.decode.request import DecodeRequest, DecodeState, Retries
from prefixkv.decode.shares import PrefillShares
from prefixkv.decode.sources import Sources
from prefixkv.errors import AbortedError, RequestError
from prefixkv.protocol.commands import DecodeCommand, MeetPrefill


class PrefillTargets:
    """What moves requests between prefill workers, and to decode's own compute. Owned by the
    scheduler's thread."""

    def __init__(
        self,
        lanes: Lanes,
        shares: PrefillShares,
        waiting: DecodePreallocQueue,
        choice: ComputeChoice,
        sources: Sources,
        refusals: Refusals,
        retries: Retries,
        commands: list[DecodeCommand],
        counters: Counter[str],
    ) -> None:
        self._lanes, self._shares, self._waiting = lanes, shares, waiting
        self._choice, self._sources = choice, sources
        self._refusals = refusals
        self._retries = retries
        self._commands = commands
        self._counters = counters

    # --- workers ----------------------------------------------------------------------------------

    def meet(self, address: str) -> None:
        """Command, once, that it be found out whether a prefill worker answers."""
        lane = self._lanes.get(address)
        if self._lanes.gated and address and lane is not None and not lane.is_met:
            lane.is_met = True
            self._commands.append(MeetPrefill(address))

    def check_holds(self, rid: str, num_tokens: int, address: str) -> None:
        """Raise RequestError where the worker is known to hold fewer than `num_tokens`, all that
        the request may become: retracted late, it would fail with half of its answer given."""
        most = self._lanes.max_tokens(address)
        if 0 < most < num_tokens:
            raise RequestError(
                f"request {rid!r} may have {num_tokens} tokens (max_new_tokens included), prefill "
                f"worker {address} holds {most}"
            )

    def check_still_holds(self, req: DecodeRequest, address: str) -> None:
        """Raise RequestError where a worker is known to hold too few tokens for what it may be
        asked for from now on. Of a request that runs, or ran, that is what it has so far."""
        self.check_holds(req.rid, req.kv_len if req.resumed else req.most_kv_len, address)

    def may_have(self, req: DecodeRequest) -> bool:
        """Return True if a worker may have this attempt at a request that was not admitted yet."""
        is_first = req.generation == req.request.generation
        return is_first and bool(req.prefill) and not self._sources.asks_late

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
        if not req.is_alone and self._choice.may_take_alone(req):
            self._move(req, is_alone=True)
            self._counters["failovers"] += 1

    def come_back(self, req: DecodeRequest) -> None:
        """Let a request that went alone wait for its worker again."""
        self._move(req, is_alone=False)

    def _go_to(self, req: DecodeRequest, prefill: str) -> None:
        self._shares.name(prefill)
        req.prefill, req.is_alone = prefill, False
        # A request that runs, or still has to queue again, is in no lane: when it queues it enters
        # under the new address, and the worker is met then.
        if req in self._waiting:
            self._waiting.move(req, prefill)
            self.meet(prefill)

    def _move(self, req: DecodeRequest, is_alone: bool) -> None:
        # The worker may have it, and may be back before this request is done.
        if is_alone and req.state is DecodeState.QUEUED:
            self._withdraw(req, AbortedError(f"request {req.rid!r} is computed by decode"))
        req.is_alone = is_alone
        self._waiting.move(req, ALONE if is_alone else req.prefill)

    def _withdraw(self, req: DecodeRequest, error: Exception) -> None:
        """Refuse a waiting request where it may be. Its next attempt is another generation in any
        case, and is asked for late."""
        self.refuse_waiting(req, error)
        req.generation += 1

    def refuse_waiting(self, req: DecodeRequest, error: Exception) -> None:
        """Refuse a request that was not admitted yet at its worker, if one may have it."""
        if not req.is_alone and req.prefill and not self._sources.asks_late:
            self._refusals.send(req.room_key, req.prefill, error, req.request.digest)

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
        fails_over = self._sources.fails_over or self._lanes.is_down(req.prefill)
        if fails_over and self._choice.may_take_alone(req):
            self._counters["failovers"] += 1
            req.error, req.is_alone = error, True
            return None
        return error
