"""Decode's side of one room: promise pages, wait for every writer rank, know when nothing can land.

The *end* (SUCCESS or FAILED, once) is for the request. The *proof* is for the pages: they may be
used again when each rank that knows of them has proved that its writes are over (by its SUCCESS or
its Drained), or was fenced. Time ends rooms and never drains them; at a deadline each rank is first
asked whether it has the room, by repeating the promise.

SUCCESS needs the notification of every part, and they must add up to the outcome's unit pages. So a
write that was reported but not posted is found out; one to other pages of ours is not.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.errors import (
    TransferError,
    TransferTimeoutError,
    WeightsVersionError,
)
from prefixkv.protocol.events import DecodeEvent, RoomDrained, RoomEnded, RoomOverdue
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.machine import Fail, RoomTick, Step, Table, ignored, run
from prefixkv.protocol.messages import (
    Abort,
    AnyBody,
    Drained,
    Outcome,
    OutcomeAck,
    Promise,
    PromiseAck,
    error_of,
    failure,
)
from prefixkv.protocol.timers import Backoff, Wait

# --- events, besides the frames PromiseAck, Outcome and Drained -----------------------------------


class PeerReady(msgspec.Struct, frozen=True):
    """The prefill worker is known; the pages are promised to these ranks of it."""

    ranks: tuple[int, ...]


class ChunkLanded(msgspec.Struct, frozen=True):
    """One part of one chunk is in our pages; the chunk has `num_units` unit pages."""

    rank: int
    chunk: int
    part: int
    num_parts: int = 1
    num_units: int = 0


class UnitsRelayed(msgspec.Struct, frozen=True):
    """All bytes that this rank owes of `num_units` unit pages are in our staging memory."""

    rank: int
    num_units: int


class FencedOff(msgspec.Struct, frozen=True):
    """This rank can write no more, by proof from outside."""

    rank: int


Landed = ChunkLanded | UnitsRelayed
ReceiverEvent = PeerReady | PromiseAck | Landed | Outcome | Drained | Fail | FencedOff | RoomTick

# --- actions --------------------------------------------------------------------------------------


class SendToRank(msgspec.Struct, frozen=True):
    """Send `body` to this rank of the room's peer."""

    rank: int
    body: AnyBody


ReceiverAction = SendToRank | DecodeEvent


_LANDED = frozenset({KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED})


class _Landings:
    """Sum of the notifications of one prefill rank, as whole chunks. A peer may repeat them."""

    __slots__ = ("_done", "_open", "num_chunks", "num_units")

    def __init__(self) -> None:
        self.num_units = 0  # sum over whole chunks
        self.num_chunks = 0
        # Chunks move from `_open` to `_done`, which stays: a repeated notification must not count
        # twice.
        self._done: set[int] = set()
        self._open: dict[int, tuple[int, int, int]] = {}  # by chunk: parts, units, bits of parts

    def take(self, event: ChunkLanded) -> None:
        """Repeated or contradictory: no-op."""
        of_chunk = event.num_parts, event.num_units
        parts, units, landed = self._open.get(event.chunk, (*of_chunk, 0))
        # A part that disagrees with those before about its chunk is dropped; the chunk then stays
        # open, and the room fails by its deadline instead of succeeding on invented numbers.
        if event.chunk in self._done or (parts, units) != of_chunk:
            return
        landed |= 1 << event.part
        if landed != (1 << parts) - 1:
            self._open[event.chunk] = parts, units, landed
            return
        self._open.pop(event.chunk, None)
        self._done.add(event.chunk)
        self.num_chunks += 1
        self.num_units += units


def _error(failed: Outcome) -> TransferError:
    if failed.versions is not None:
        return WeightsVersionError(*failed.versions, "prefill")
    return error_of(failed.code, f"prefill rank {failed.rank}: {failed.error}", TransferError)


class ReceiverMachine:
    """One (room, generation) on decode. Pure; owned by the control object that holds it.

    `TABLE` says which events each state of KVPoll takes. Once ended, the room stays until it is
    drained (`over`).
    """

    def __init__(
        self,
        promise: Promise,
        timing: ControlConfig,
        now_s: float,
        prefill: str = "",
        refused: TransferError | None = None,
    ) -> None:
        """Begin before any rank is known. `prefill`: its worker's address, for errors. With
        `refused` the room is none that opens, and its promise names no pages: it is drained once
        prefill has heard of it, or cannot."""
        self.key = promise.key
        self.promise = promise
        self.ticket = promise.ticket  # of this use of the room; frames of another carry another
        self.num_pages = promise.num_pages
        self.poll = KVPoll.BOOTSTRAPPING
        self.error: Exception | None = None
        self._timing = timing
        self._prefill = prefill
        # Ranks leave `_unacked` by any sign that they have the promise, and `_undrained` only by
        # proof.
        self.ranks: frozenset[int] = frozenset()  # ranks that know the pages
        self._unacked: set[int] = set()  # ranks that may not have the promise yet
        self._undrained: set[int] = set()  # ranks that may write, or be writing
        self._outcomes: dict[int, Outcome] = {}
        self._landings: dict[int, _Landings] = {}
        # A room that no rank has learned of owes prefill, whose engine may have the request, a word
        # that no promise will come. `_untold`: ranks that have it and have not answered.
        self._owes = False
        self._untold: set[int] = set()
        self._is_refusal = refused is not None
        self._drained_reported = False
        self._overdue_reported = False
        self._resend = Backoff(timing.resend_s)
        self._wait = Wait(timing.longest_wait_s)
        self._wait.start(now_s, timing.bootstrap_timeout_s)
        if refused is not None:
            self.poll, self.error, self._owes = KVPoll.FAILED, refused, True

    @property
    def drained(self) -> bool:
        """True if no write of the room can land any more (also before any peer knows its pages)."""
        return not self._undrained

    @property
    def is_written(self) -> bool:
        """True if a peer may be writing, or its last writes may not be notified yet. A promise
        without pages, of a full hit, lets nothing be written."""
        return (bool(self._undrained) or self.awaits_notifications) and bool(self.num_pages)

    @property
    def undrained(self) -> frozenset[int]:
        """Ranks that may be writing. Any thread may read it."""
        return frozenset(self._undrained)

    @property
    def over(self) -> bool:
        """True if nothing more can happen: the machine may be dropped."""
        return self.poll.ended and self.drained and not self._owes

    @property
    def is_only_owed(self) -> bool:
        """True if the room's number may be used again: only a word to prefill is left."""
        return self._owes and self._drained_reported

    @property
    def wake_s(self) -> float:
        """Latest time at which the next RoomTick is wanted."""
        if self.over:
            return float("inf")
        deadline_s = float("inf") if self._overdue_reported else self._wait.due_s
        # While open a promise awaits its answer, afterwards an Abort awaits its Drained.
        answers = self._undrained | self._untold
        waiting_for_answer = self._unacked if not self.poll.ended else answers
        return min(deadline_s, self._resend.due_s) if waiting_for_answer else deadline_s

    def on(self, event: ReceiverEvent, now_s: float) -> list[ReceiverAction]:
        """Take one event, as the table says; return the actions, in order."""
        actions: list[ReceiverAction] = run(self, self.TABLE, event, now_s)
        # Looked at after every event, since both halves can come last: the failure, or the proof.
        # RoomDrained therefore always follows RoomEnded. After SUCCESS the end itself is the proof.
        waits = not self.drained or (self._is_refusal and self._owes)
        if self.poll is KVPoll.FAILED and not waits and not self._drained_reported:
            self._drained_reported = True
            actions.append(RoomDrained(self.key))
        return actions

    # --- while open -------------------------------------------------------------------------------

    def _on_peer_ready(self, event: PeerReady, now_s: float) -> list[ReceiverAction]:
        self.poll = KVPoll.WAITING_FOR_INPUT
        self.ranks = frozenset(event.ranks)
        self._unacked = set(event.ranks)
        # Before the first promise leaves: from then on each rank may write at any time.
        self._undrained = set(event.ranks)
        self._landings = {rank: _Landings() for rank in event.ranks}
        self._wait.start(now_s, self._timing.waiting_timeout_s)
        return self._send_promise(now_s)

    def _send_promise(self, now_s: float) -> list[ReceiverAction]:
        self._resend.start(now_s)
        return [SendToRank(rank, self.promise) for rank in sorted(self._unacked)]

    def _on_promise_acked(self, event: PromiseAck, now_s: float) -> list[ReceiverAction]:
        self._unacked.discard(event.rank)
        return []

    def _on_landed(self, event: Landed, now_s: float) -> list[ReceiverAction]:
        # Of a rank that no promise went to: invented, or of another use of the number.
        if event.rank not in self.ranks:
            return []
        # A rank that writes has the promise, even if its answer was lost.
        self._unacked.discard(event.rank)
        self.poll = KVPoll.TRANSFERRING
        landings = self._landings[event.rank]
        if isinstance(event, UnitsRelayed):
            landings.num_units += event.num_units
        else:
            landings.take(event)
        self._wait.start(now_s, self._timing.transfer_timeout_s)
        return self._maybe_success(now_s)

    def _on_outcome(self, outcome: Outcome, now_s: float) -> list[ReceiverAction]:
        if outcome.rank not in self.ranks:
            return []
        ack = self._ack(outcome)
        self._unacked.discard(outcome.rank)
        # Before a failure below: the proof holds however the room ends.
        if outcome.drained:
            self._undrained.discard(outcome.rank)
        if not outcome.ok:
            return [ack, *self._fail(Fail(_error(outcome)), now_s)]
        # A success about other pages than those promised would commit pages that were never
        # written.
        if outcome.num_pages != self.num_pages:
            error = TransferError(
                f"{outcome.num_pages} pages were written where {self.num_pages} were promised"
            )
            return [ack, *self._fail(Fail(error), now_s)]
        self._outcomes[outcome.rank] = outcome
        if self._all_reported:
            self._wait.start(now_s, self._timing.transfer_timeout_s)
        return [ack, *self._maybe_success(now_s)]

    @property
    def _all_reported(self) -> bool:
        return bool(self.ranks) and len(self._outcomes) == len(self.ranks)

    @property
    def awaits_notifications(self) -> bool:
        """True if every rank reports that it has written all, but notifications are missing."""
        return self._all_reported and not self.poll.ended

    def _maybe_success(self, now_s: float) -> list[ReceiverAction]:
        if not self._all_reported:
            return []
        for rank, outcome in self._outcomes.items():
            # 1. Equal: this rank is done.
            # 2. More units than reported, or as many chunks with other units: more notifications
            # cannot mend it.
            # 3. Fewer: the rest may be on its way.
            landed = self._landings[rank]
            if landed.num_units == outcome.num_units:
                continue
            if landed.num_units > outcome.num_units or landed.num_chunks == outcome.num_chunks:
                return self._fail(Fail(self._shortfall_error(rank)), now_s)
            return []
        # Each write is notified, so none is under way: success is the proof of every rank at once.
        self.poll = KVPoll.SUCCESS
        self._undrained.clear()
        return [RoomEnded(self.key, self.poll, aux=self._outcomes[min(self.ranks)].aux)]

    def _shortfall_error(self, rank: int) -> TransferError:
        outcome, landed = self._outcomes[rank], self._landings[rank]
        return TransferError(
            f"prefill rank {rank} says that {outcome.num_units} unit pages are written, the "
            f"notifications that came are of {landed.num_units}"
        )

    def _ack(self, outcome: Outcome) -> SendToRank:
        return SendToRank(outcome.rank, OutcomeAck(*self.key.numbers, outcome.rank, self.ticket))

    def _on_fenced(self, event: FencedOff, now_s: float) -> list[ReceiverAction]:
        if event.rank not in self.ranks:
            return []
        self._undrained.discard(event.rank)
        error = TransferError(f"prefill rank {event.rank} was fenced")
        return self._fail(Fail(error, gone=event.rank), now_s)

    def _tick_open(self, event: RoomTick, now_s: float) -> list[ReceiverAction]:
        if now_s >= self._wait.due_s:
            # 1. All ranks report success, but notifications are missing: they were lost, or never
            # sent.
            if self._all_reported:
                short = [
                    rank for rank, outcome in sorted(self._outcomes.items())
                    if self._landings[rank].num_units != outcome.num_units
                ]  # fmt: skip
                return self._fail(Fail(self._shortfall_error(short[0])), now_s)
            # 2. A rank is silent, or the longest wait is over.
            if not self._wait.goes_on(event.heard_s, now_s):
                error = TransferTimeoutError(
                    f"prefill at {self._prefill!r}: {self._wait.limit} passed in {self.poll.name}"
                )
                return self._fail(Fail(error, tell=bool(self.ranks)), now_s)
            # 3. All are heard: the request may wait in a queue there. Ask by repeating the promise.
            # A rank that has lost the room, since its last frames on it were lost, answers with an
            # outcome. A rank with its outcome here is not asked: it may have dropped the room.
            self._unacked = set(self.ranks - self._outcomes.keys())
            return self._send_promise(now_s)
        if self._unacked and self._resend.take(now_s):
            return [SendToRank(rank, self.promise) for rank in sorted(self._unacked)]
        return []

    def _fail(self, event: Fail, now_s: float) -> list[ReceiverAction]:
        """The pages stay until they are proved free."""
        self.poll = KVPoll.FAILED
        self.error = event.error
        # The wait is now one for proof. When it is over the room is reported as overdue, and kept.
        # Where no rank has learned of the room, only prefill's patience is at stake: by then it has
        # given up by itself.
        self._owes = event.tell and not self.ranks
        timing = self._timing
        self._wait.start(
            now_s, timing.bootstrap_timeout_s if self._owes else timing.drain_timeout_s
        )
        self._resend.start(now_s)
        actions: list[ReceiverAction] = [RoomEnded(self.key, self.poll, error=event.error)]
        if event.tell:
            actions += self._aborts(event.gone)
        return actions

    # --- after the end ----------------------------------------------------------------------------

    def _aborts(self, gone: int | None = None) -> list[ReceiverAction]:
        assert self.error is not None
        reason, code, versions = failure(self.error)
        abort = Abort(*self.key.numbers, reason, self.ticket, versions, code=code)
        ranks = sorted(self._undrained | self._untold)
        return [SendToRank(rank, abort) for rank in ranks if rank != gone]

    def _on_late_ready(self, event: PeerReady, now_s: float) -> list[ReceiverAction]:
        """Tell the ranks what is owed. Else the room failed as its peer came to be known."""
        if not self._owes or self.ranks:
            return []
        self.ranks = frozenset(event.ranks)
        self._untold = set(event.ranks)
        self._resend.start(now_s)
        return self._aborts()

    def _on_late_fail(self, event: Fail, now_s: float) -> list[ReceiverAction]:
        """Prefill cannot be told. The first error stands."""
        self._owes = False
        self._untold.clear()
        return []

    def _on_late_outcome(self, outcome: Outcome, now_s: float) -> list[ReceiverAction]:
        """Acknowledge it; it may carry the proof."""
        if outcome.drained:
            self._undrained.discard(outcome.rank)
        return [self._ack(outcome)]

    def _on_late_proof(self, event: Drained | FencedOff, now_s: float) -> list[ReceiverAction]:
        self._undrained.discard(event.rank)
        if event.rank in self._untold:
            self._untold.discard(event.rank)
            self._owes = bool(self._untold)
        return []

    def _tick_draining(self, event: RoomTick, now_s: float) -> list[ReceiverAction]:
        actions: list[ReceiverAction] = []
        if self._owes:
            # Giving up on time is safe only here: no rank has ever known pages of this room.
            self._owes = self._wait.goes_on(event.heard_s, now_s)
            repeats = self._owes and self._untold and self._resend.take(now_s)
            return self._aborts() if repeats else actions
        if self.drained:
            return actions
        if now_s >= self._wait.due_s and not self._overdue_reported:
            self._overdue_reported = True
            actions.append(RoomOverdue(self.key))
        if self._resend.take(now_s):
            actions += self._aborts()
        return actions

    # --- the table: the events of each state, and the states that may follow ----------------------

    # A peer may repeat itself, be late, or send anything, so its frames stand in every row.
    # PeerReady is ours: once a room is promised, it must not come again.
    TABLE: ClassVar[Table] = {
        KVPoll.BOOTSTRAPPING: {
            PeerReady: Step(_on_peer_ready, {KVPoll.WAITING_FOR_INPUT}),
            # No rank knows the room: these are frames about an earlier use of its number.
            **ignored(PromiseAck, ChunkLanded, UnitsRelayed, Outcome, Drained, FencedOff),
            Fail: Step(_fail, {KVPoll.FAILED}),
            RoomTick: Step(_tick_open, {KVPoll.BOOTSTRAPPING, KVPoll.FAILED}),
        },
        KVPoll.WAITING_FOR_INPUT: {
            PromiseAck: Step(_on_promise_acked, {KVPoll.WAITING_FOR_INPUT}),
            # The last notification may come after the last outcome.
            ChunkLanded: Step(_on_landed, _LANDED | {KVPoll.WAITING_FOR_INPUT}),
            UnitsRelayed: Step(_on_landed, _LANDED | {KVPoll.WAITING_FOR_INPUT}),
            Outcome: Step(_on_outcome, {KVPoll.WAITING_FOR_INPUT, KVPoll.SUCCESS, KVPoll.FAILED}),
            # None was asked for, so it answers an abort of an earlier use of the number, and proves
            # nothing of the writes of this one.
            **ignored(Drained),
            FencedOff: Step(_on_fenced, {KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED}),
            Fail: Step(_fail, {KVPoll.FAILED}),
            RoomTick: Step(_tick_open, {KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED}),
        },
        KVPoll.TRANSFERRING: {
            PromiseAck: Step(_on_promise_acked, {KVPoll.TRANSFERRING}),
            ChunkLanded: Step(_on_landed, _LANDED),
            UnitsRelayed: Step(_on_landed, _LANDED),
            Outcome: Step(_on_outcome, {KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED}),
            **ignored(Drained),  # as above
            FencedOff: Step(_on_fenced, {KVPoll.TRANSFERRING, KVPoll.FAILED}),
            Fail: Step(_fail, {KVPoll.FAILED}),
            RoomTick: Step(_tick_open, {KVPoll.TRANSFERRING, KVPoll.FAILED}),
        },
        KVPoll.SUCCESS: {
            Outcome: Step(_on_late_outcome, {KVPoll.SUCCESS}),  # our answer was lost
            # Frames and notifications that outcomes have overtaken.
            **ignored(PromiseAck, ChunkLanded, UnitsRelayed, Drained),
            # An abort, a fence and a wake-up that were on their way as the room ended.
            **ignored(Fail, FencedOff, RoomTick),
        },
        KVPoll.FAILED: {
            Outcome: Step(_on_late_outcome, {KVPoll.FAILED}),
            Drained: Step(_on_late_proof, {KVPoll.FAILED}),
            FencedOff: Step(_on_late_proof, {KVPoll.FAILED}),
            RoomTick: Step(_tick_draining, {KVPoll.FAILED}),
            PeerReady: Step(_on_late_ready, {KVPoll.FAILED}),
            # Sent before the peer heard of our abort: neither proves anything.
            **ignored(PromiseAck, ChunkLanded, UnitsRelayed),
            Fail: Step(_on_late_fail, {KVPoll.FAILED}),
        },
    }
