"""Decode's side of one room: promise pages, wait for every writer rank, know when nothing can land
any more.

How a room *ended* and whether it is *drained* are two things. Ended is for the request: SUCCESS or
FAILED, once. Drained is for the pages: they may be used again only when each rank that was told of
them has proved that its writes are over (its SUCCESS, its Drained) or was fenced. Time ends rooms;
it never drains them. Nor does it end one whose ranks are heard: where a deadline passes, each is
asked whether it has the room still, by the promise said again.

A rank's word that it has written is not enough for SUCCESS: our own side must have the notification
of every part of it, and these must add up to the unit pages that the rank says. So a transport that
takes a write for done, and has posted none of it or a part, is found out. One that writes other
bytes, or to other pages of ours, is not.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from prefixkv.config import ControlConfig
from prefixkv.errors import (
    PromptMismatchError,
    TransferError,
    TransferTimeoutError,
    WeightsVersionError,
)
from prefixkv.protocol.events import DecodeEvent, RoomDrained, RoomEnded, RoomOverdue
from prefixkv.protocol.ids import KVPoll
from prefixkv.protocol.machine import IGNORED, Step, Table, run
from prefixkv.protocol.messages import Abort, AnyBody, FailureCode, Outcome, OutcomeAck, Promise
from prefixkv.protocol.timers import Backoff, Wait

# --- events ---------------------------------------------------------------------------------------


class PeerReady(msgspec.Struct, frozen=True):
    """The prefill worker is known; these ranks of it are told of the pages."""

    ranks: tuple[int, ...]


class PromiseAcked(msgspec.Struct, frozen=True):
    rank: int


class ChunkLanded(msgspec.Struct, frozen=True):
    """One part of one chunk is in our pages; the chunk has `num_units` unit pages."""

    rank: int
    chunk: int
    part: int
    num_parts: int = 1
    num_units: int = 0


class UnitsStaged(msgspec.Struct, frozen=True):
    """All that this rank owes of so many unit pages is in our staging memory."""

    rank: int
    num_units: int


class OutcomeSaid(msgspec.Struct, frozen=True):
    outcome: Outcome


class DrainedSaid(msgspec.Struct, frozen=True):
    rank: int


class Fail(msgspec.Struct, frozen=True):
    """End the room from this side: aborted, refused, or its rank `lost` is gone. `tell` is False
    where no rank listens."""

    error: Exception
    tell: bool = True
    lost: int | None = None


class FencedOff(msgspec.Struct, frozen=True):
    """Proof from outside that this rank can write no more."""

    rank: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. By `heard_s` every rank that is told of the room had been heard."""

    heard_s: float = -math.inf


Landed = ChunkLanded | UnitsStaged
Event = PeerReady | PromiseAcked | Landed | OutcomeSaid | DrainedSaid | Fail | FencedOff | Tick

# --- actions --------------------------------------------------------------------------------------


class Say(msgspec.Struct, frozen=True):
    """Send `body` to this rank of the room's peer."""

    rank: int
    body: AnyBody


Action = Say | DecodeEvent


_LANDED = frozenset({KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED})
_MAX_OPEN_CHUNKS = 1024  # of one rank; a writer has fewer posts under way


class _Landings:
    """What the notifications of one rank add up to. A peer may repeat them, or make them up: what
    is kept for it is bounded by the units that it was promised."""

    __slots__ = ("_done", "_max_chunks", "_open", "num_chunks", "num_units")

    def __init__(self, max_chunks: int) -> None:
        self.num_units = 0  # of whole chunks
        self.num_chunks = 0
        self._max_chunks = max_chunks
        self._done: set[int] = set()
        self._open: dict[int, tuple[int, int, int]] = {}  # by chunk: parts, units, bits of parts

    def take(self, event: ChunkLanded) -> None:
        said = event.num_parts, event.num_units
        parts, units, landed = self._open.get(event.chunk, (*said, 0))
        is_known = event.chunk in self._open
        full = len(self._done) >= self._max_chunks or len(self._open) >= _MAX_OPEN_CHUNKS
        if event.chunk in self._done or (parts, units) != said or (full and not is_known):
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
    """What prefill's outcome means for the request here."""
    if failed.versions is not None:
        return WeightsVersionError(*failed.versions, "prefill")
    is_mismatch = failed.code is FailureCode.PROMPT_MISMATCH
    kind = PromptMismatchError if is_mismatch else TransferError
    return kind(f"prefill rank {failed.rank}: {failed.error}")


class ReceiverMachine:
    """One (room, generation) on decode. Pure; owned by the control object that holds it."""

    def __init__(
        self, promise: Promise, timing: ControlConfig, now_s: float, prefill: str = ""
    ) -> None:
        """`prefill`: the address of the prefill worker, for errors."""
        self.key = promise.key
        self.promise = promise
        self.num_pages = len(promise.pages) // 4
        self._has_target = bool(self.num_pages) or promise.state_slot >= 0
        self.poll = KVPoll.BOOTSTRAPPING
        self.error: Exception | None = None
        self._timing = timing
        self._prefill = prefill
        self.ranks: frozenset[int] = frozenset()  # that have been told of the pages
        self._unacked: set[int] = set()  # ranks that may not have the promise yet
        self._undrained: set[int] = set()  # ranks that may write, or be writing
        self._outcomes: dict[int, Outcome] = {}
        self._landings: dict[int, _Landings] = {}
        self._drained_said = False
        self._overdue_said = False
        self._resend = Backoff(timing.resend_s)
        self._wait = Wait(timing.longest_wait_s)
        self._wait.start(now_s, timing.bootstrap_timeout_s)

    @property
    def ticket(self) -> int:
        return self.promise.ticket

    @property
    def drained(self) -> bool:
        """No write of the room can land any more (also before any peer knows its pages)."""
        return not self._undrained

    @property
    def is_written(self) -> bool:
        """A peer may be writing, or what it has written may not be notified yet: a promise without
        pages, of a full hit, lets nothing be written."""
        return (bool(self._undrained) or self.awaits_notifications) and self._has_target

    @property
    def undrained(self) -> frozenset[int]:
        """The ranks that may write, or be writing. Any thread may ask."""
        return frozenset(self._undrained)

    @property
    def over(self) -> bool:
        """Nothing more can happen here: the machine may be dropped."""
        return self.poll.ended and self.drained

    @property
    def wake_s(self) -> float:
        """When the next Tick is wanted, at the latest."""
        if self.over:
            return float("inf")
        deadline_s = float("inf") if self._overdue_said else self._wait.due_s
        waiting_for_answer = self._unacked if not self.poll.ended else self._undrained
        return min(deadline_s, self._resend.due_s) if waiting_for_answer else deadline_s

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Take one event, as the table below says."""
        actions: list[Action] = run(self, self.TABLE, event, now_s)
        if self.poll is KVPoll.FAILED and self.drained and not self._drained_said:
            self._drained_said = True
            actions.append(RoomDrained(self.key))
        return actions

    # --- while open -------------------------------------------------------------------------------

    def _promise(self, event: PeerReady, now_s: float) -> list[Action]:
        self.poll = KVPoll.WAITING_FOR_INPUT
        self.ranks = frozenset(event.ranks)
        self._unacked = set(event.ranks)
        self._undrained = set(event.ranks)
        # A unit page has a token at least, and extra state is a chunk of its own.
        most = self.promise.fill_len - self.promise.prefix_len + 1
        self._landings = {rank: _Landings(most) for rank in event.ranks}
        self._wait.start(now_s, self._timing.waiting_timeout_s)
        return self._say_promise(now_s)

    def _say_promise(self, now_s: float) -> list[Action]:
        self._resend.start(now_s)
        return [Say(rank, self.promise) for rank in sorted(self._unacked)]

    def _acked(self, event: PromiseAcked, now_s: float) -> list[Action]:
        self._unacked.discard(event.rank)
        return []

    def _landed(self, event: Landed, now_s: float) -> list[Action]:
        if event.rank not in self.ranks:
            return []
        self._unacked.discard(event.rank)
        self.poll = KVPoll.TRANSFERRING
        landings = self._landings[event.rank]
        if isinstance(event, UnitsStaged):
            landings.num_units += event.num_units
        else:
            landings.take(event)
        self._wait.start(now_s, self._timing.transfer_timeout_s)
        return self._maybe_success(now_s)

    def _outcome(self, event: OutcomeSaid, now_s: float) -> list[Action]:
        outcome = event.outcome
        if outcome.rank not in self.ranks:
            return []
        ack = self._ack(outcome)
        self._unacked.discard(outcome.rank)
        if outcome.drained:
            self._undrained.discard(outcome.rank)
        if not outcome.ok:
            return [ack, *self._fail(Fail(_error(outcome)), now_s)]
        if outcome.num_pages != self.num_pages:
            error = TransferError(
                f"{outcome.num_pages} pages were written where {self.num_pages} were promised"
            )
            return [ack, *self._fail(Fail(error), now_s)]
        self._outcomes[outcome.rank] = outcome
        if self._all_said:
            self._wait.start(now_s, self._timing.transfer_timeout_s)
        return [ack, *self._maybe_success(now_s)]

    @property
    def _all_said(self) -> bool:
        """Every rank has said that it has written all. What it wrote was notified before, or is
        about to be."""
        return bool(self.ranks) and len(self._outcomes) == len(self.ranks)

    @property
    def awaits_notifications(self) -> bool:
        """Every rank has said that it has written all, and notifications of it are missing."""
        return self._all_said and not self.poll.ended

    def _maybe_success(self, now_s: float) -> list[Action]:
        if not self._all_said:
            return []
        for rank, outcome in self._outcomes.items():
            landed = self._landings[rank]
            if landed.num_units == outcome.num_units:
                continue
            if landed.num_units > outcome.num_units or landed.num_chunks == outcome.num_chunks:
                return self._fail(Fail(self._short(rank)), now_s)
            return []
        self.poll = KVPoll.SUCCESS
        self._undrained.clear()
        return [RoomEnded(self.key, self.poll, aux=self._outcomes[min(self.ranks)].aux)]

    def _short(self, rank: int) -> TransferError:
        said, landed = self._outcomes[rank], self._landings[rank]
        return TransferError(
            f"prefill rank {rank} says that {said.num_units} unit pages are written, the "
            f"notifications that came are of {landed.num_units}"
        )

    def _ack(self, outcome: Outcome) -> Say:
        return Say(outcome.rank, OutcomeAck(*self.key.numbers, outcome.rank, self.ticket))

    def _fenced(self, event: FencedOff, now_s: float) -> list[Action]:
        if event.rank not in self.ranks:
            return []
        self._undrained.discard(event.rank)
        error = TransferError(f"prefill rank {event.rank} was fenced")
        return self._fail(Fail(error, lost=event.rank), now_s)

    def _tick_open(self, event: Tick, now_s: float) -> list[Action]:
        if now_s >= self._wait.due_s:
            if self._all_said:
                short = [
                    rank for rank, said in sorted(self._outcomes.items())
                    if self._landings[rank].num_units != said.num_units
                ]  # fmt: skip
                return self._fail(Fail(self._short(short[0])), now_s)
            if not self._wait.goes_on(event.heard_s, now_s):
                error = TransferTimeoutError(
                    f"prefill at {self._prefill!r}: {self._wait.limit} passed in {self.poll.name}"
                )
                return self._fail(Fail(error), now_s)
            # It may wait in a queue there. A rank that has lost the room, as its last words on it
            # were lost, says so in answer; one whose outcome is here may have dropped it.
            self._unacked = set(self.ranks - self._outcomes.keys())
            return self._say_promise(now_s)
        if self._unacked and self._resend.take(now_s):
            return [Say(rank, self.promise) for rank in sorted(self._unacked)]
        return []

    def _fail(self, event: Fail, now_s: float) -> list[Action]:
        self.poll = KVPoll.FAILED
        self.error = event.error
        self._wait.start(now_s, self._timing.drain_timeout_s)
        self._resend.start(now_s)
        actions: list[Action] = [RoomEnded(self.key, self.poll, error=event.error)]
        if event.tell:
            actions += self._aborts(event.lost)
        return actions

    # --- after the end ----------------------------------------------------------------------------

    def _aborts(self, lost: int | None = None) -> list[Action]:
        error = self.error
        versions = error.versions if isinstance(error, WeightsVersionError) else None
        word = Abort(*self.key.numbers, str(error)[:1000], self.promise.ticket, versions)
        return [Say(rank, word) for rank in sorted(self._undrained) if rank != lost]

    def _outcome_again(self, event: OutcomeSaid, now_s: float) -> list[Action]:
        if event.outcome.drained:
            self._undrained.discard(event.outcome.rank)
        return [self._ack(event.outcome)]

    def _drained_late(self, event: DrainedSaid | FencedOff, now_s: float) -> list[Action]:
        self._undrained.discard(event.rank)
        return []

    def _tick_draining(self, event: Tick, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if self.drained:
            return actions
        if now_s >= self._wait.due_s and not self._overdue_said:
            self._overdue_said = True
            actions.append(RoomOverdue(self.key))
        if self._resend.take(now_s):
            actions += self._aborts()
        return actions

    # --- what each state takes, and the states that may follow ------------------------------------

    # A peer may repeat itself, be late, or say what it likes, so its words stand in every row.
    # PeerReady is ours: once a room is promised, it must not come again.
    TABLE: ClassVar[Table] = {
        KVPoll.BOOTSTRAPPING: {
            PeerReady: Step(_promise, {KVPoll.WAITING_FOR_INPUT}),
            # No rank knows the room: these are words on an earlier use of its number.
            PromiseAcked: IGNORED,
            ChunkLanded: IGNORED,
            UnitsStaged: IGNORED,
            OutcomeSaid: IGNORED,
            DrainedSaid: IGNORED,
            FencedOff: IGNORED,
            Fail: Step(_fail, {KVPoll.FAILED}),
            Tick: Step(_tick_open, {KVPoll.BOOTSTRAPPING, KVPoll.FAILED}),
        },
        KVPoll.WAITING_FOR_INPUT: {
            PromiseAcked: Step(_acked, {KVPoll.WAITING_FOR_INPUT}),
            # The last notification may come after the last outcome.
            ChunkLanded: Step(_landed, _LANDED | {KVPoll.WAITING_FOR_INPUT}),
            UnitsStaged: Step(_landed, _LANDED | {KVPoll.WAITING_FOR_INPUT}),
            OutcomeSaid: Step(_outcome, {KVPoll.WAITING_FOR_INPUT, KVPoll.SUCCESS, KVPoll.FAILED}),
            # None was asked for, so it answers an abort of an earlier use of the number, and proves
            # nothing of the writes of this one.
            DrainedSaid: IGNORED,
            FencedOff: Step(_fenced, {KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED}),
            Fail: Step(_fail, {KVPoll.FAILED}),
            Tick: Step(_tick_open, {KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED}),
        },
        KVPoll.TRANSFERRING: {
            PromiseAcked: Step(_acked, {KVPoll.TRANSFERRING}),
            ChunkLanded: Step(_landed, _LANDED),
            UnitsStaged: Step(_landed, _LANDED),
            OutcomeSaid: Step(_outcome, {KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED}),
            DrainedSaid: IGNORED,  # as above
            FencedOff: Step(_fenced, {KVPoll.TRANSFERRING, KVPoll.FAILED}),
            Fail: Step(_fail, {KVPoll.FAILED}),
            Tick: Step(_tick_open, {KVPoll.TRANSFERRING, KVPoll.FAILED}),
        },
        KVPoll.SUCCESS: {
            OutcomeSaid: Step(_outcome_again, {KVPoll.SUCCESS}),  # our answer was lost
            # Frames and notifications that outcomes have overtaken.
            PromiseAcked: IGNORED,
            ChunkLanded: IGNORED,
            UnitsStaged: IGNORED,
            DrainedSaid: IGNORED,
            # An abort, a fence and a wake-up that were on their way as the room ended.
            Fail: IGNORED,
            FencedOff: IGNORED,
            Tick: IGNORED,
        },
        KVPoll.FAILED: {
            OutcomeSaid: Step(_outcome_again, {KVPoll.FAILED}),
            DrainedSaid: Step(_drained_late, {KVPoll.FAILED}),
            FencedOff: Step(_drained_late, {KVPoll.FAILED}),
            Tick: Step(_tick_draining, {KVPoll.FAILED}),
            PeerReady: IGNORED,  # the room failed as its peer came to be known
            # Said before the peer heard of our abort: neither proves anything.
            PromiseAcked: IGNORED,
            ChunkLanded: IGNORED,
            UnitsStaged: IGNORED,
            Fail: IGNORED,  # a room fails once; the first error stands
        },
    }
