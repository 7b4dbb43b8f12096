"""Decode's side of one room: promise pages, wait for every writer rank, know when nothing can land
any more.

How a room *ended* and whether it is *drained* are two things. Ended is for the request: SUCCESS or
FAILED, once. Drained is for the pages: they may be used again only when each rank that was told of
them has proved that its writes are over (its SUCCESS, its Drained) or was fenced. Time ends rooms;
it never drains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from prefixkv.config import ControlConfig
from prefixkv.errors import TransferError, TransferTimeoutError
from prefixkv.protocol.backoff import Backoff
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import Abort, AnyBody, Outcome, OutcomeAck, Promise

# --- events ---------------------------------------------------------------------------------------


class PeerReady(NamedTuple):
    """The prefill worker is known; these ranks of it are told of the pages."""

    ranks: tuple[int, ...]


class PromiseAcked(NamedTuple):
    rank: int


class ChunkLanded(NamedTuple):
    """One part of one chunk is in our pages: progress only, success rests on outcomes."""

    rank: int
    chunk: int
    part: int


class OutcomeSaid(NamedTuple):
    outcome: Outcome


class DrainedSaid(NamedTuple):
    rank: int


class Fail(NamedTuple):
    """End the room from this side: aborted, refused, or the rank `lost`. `tell` is False where
    nobody listens."""

    error: Exception
    tell: bool = True
    lost: int | None = None


class FencedOff(NamedTuple):
    """Proof from outside that this rank can write no more."""

    rank: int


class Tick(NamedTuple):
    pass


Event = PeerReady | PromiseAcked | ChunkLanded | OutcomeSaid | DrainedSaid | Fail | FencedOff | Tick

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """Send `body` to this rank of the room's peer."""

    rank: int
    body: AnyBody


@dataclass(frozen=True, slots=True)
class RoomEnded:
    """The room's one terminal state. `aux` is the lowest rank's on SUCCESS, `error` is set on
    FAILED."""

    key: RoomKey
    poll: KVPoll
    error: Exception | None = None
    aux: bytes = b""


@dataclass(frozen=True, slots=True)
class RoomDrained:
    """After FAILED: no write can land in the room's pages any more. Comes once."""

    key: RoomKey


@dataclass(frozen=True, slots=True)
class RoomOverdue:
    """After FAILED: not drained by its deadline. The pages stay; somebody should look at the
    peer."""

    key: RoomKey


Action = Say | RoomEnded | RoomDrained | RoomOverdue


class ReceiverMachine:
    """One (room, generation) on decode. Pure; owned by the endpoint that holds it."""

    def __init__(self, promise: Promise, timing: ControlConfig, now_s: float) -> None:
        self.key = RoomKey(promise.room, promise.generation)
        self.promise = promise
        self.num_pages = len(promise.pages) // 4
        self.poll = KVPoll.BOOTSTRAPPING
        self.error: Exception | None = None
        self.chunks_landed: set[tuple[int, int, int]] = set()
        self._timing = timing
        self.ranks: frozenset[int] = frozenset()  # that have been told of the pages
        self._unacked: set[int] = set()  # ranks that may not have the promise yet
        self._undrained: set[int] = set()  # ranks that may write, or be writing
        self._outcomes: dict[int, Outcome] = {}
        self._drained_said = False
        self._overdue_said = False
        self._resend = Backoff(timing.resend_s)
        self._deadline_s = now_s + timing.bootstrap_timeout_s

    @property
    def ticket(self) -> int:
        return self.promise.ticket

    @property
    def drained(self) -> bool:
        """No write of the room can land any more (also before any peer knows its pages)."""
        return not self._undrained

    @property
    def over(self) -> bool:
        """Nothing more can happen here: the machine may be dropped."""
        return self.poll.ended and self.drained

    @property
    def wake_s(self) -> float:
        """When the next Tick is wanted, at the latest."""
        if self.over:
            return float("inf")
        deadline_s = float("inf") if self._overdue_said else self._deadline_s
        waiting_for_answer = self._unacked if not self.poll.ended else self._undrained
        return min(deadline_s, self._resend.due_s) if waiting_for_answer else deadline_s

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Take one event. Events that mean nothing in this state are ignored, as the table says."""
        handler = self._TABLE[self.poll].get(type(event))
        if handler is None:
            return []
        actions: list[Action] = getattr(self, handler)(event, now_s)
        if self.poll is KVPoll.FAILED and self.drained and not self._drained_said:
            self._drained_said = True
            actions.append(RoomDrained(self.key))
        return actions

    # What each state listens to; what is absent is ignored there. Tests hold every state to have a
    # row. An open room takes no DrainedSaid: none was asked for, so it answers an abort of an
    # earlier use of the room number, and proves nothing of the writes of this one.
    _TABLE: ClassVar[dict[KVPoll, dict[type, str]]] = {
        KVPoll.BOOTSTRAPPING: {
            PeerReady: "_promise",
            Fail: "_fail",
            Tick: "_tick_open",
        },
        KVPoll.WAITING_FOR_INPUT: {
            PromiseAcked: "_acked",
            ChunkLanded: "_landed",
            OutcomeSaid: "_outcome",
            Fail: "_fail",
            FencedOff: "_fenced",
            Tick: "_tick_open",
        },
        KVPoll.TRANSFERRING: {
            ChunkLanded: "_landed",
            PromiseAcked: "_acked",
            OutcomeSaid: "_outcome",
            Fail: "_fail",
            FencedOff: "_fenced",
            Tick: "_tick_open",
        },
        KVPoll.SUCCESS: {
            OutcomeSaid: "_outcome_again",
        },
        KVPoll.FAILED: {
            OutcomeSaid: "_outcome_again",
            DrainedSaid: "_drained_late",
            FencedOff: "_fenced_late",
            Tick: "_tick_draining",
        },
    }

    # --- while open -------------------------------------------------------------------------------

    def _promise(self, event: PeerReady, now_s: float) -> list[Action]:
        self.poll = KVPoll.WAITING_FOR_INPUT
        self.ranks = frozenset(event.ranks)
        self._unacked = set(event.ranks)
        self._undrained = set(event.ranks)
        self._deadline_s = now_s + self._timing.waiting_timeout_s
        self._resend.start(now_s)
        return [Say(rank, self.promise) for rank in event.ranks]

    def _acked(self, event: PromiseAcked, now_s: float) -> list[Action]:
        self._unacked.discard(event.rank)
        return []

    def _landed(self, event: ChunkLanded, now_s: float) -> list[Action]:
        if event.rank not in self.ranks:
            return []
        self.chunks_landed.add(event)
        self._unacked.discard(event.rank)
        self.poll = KVPoll.TRANSFERRING
        self._deadline_s = now_s + self._timing.transfer_timeout_s
        return []

    def _outcome(self, event: OutcomeSaid, now_s: float) -> list[Action]:
        outcome = event.outcome
        if outcome.rank not in self.ranks:
            return []
        ack = Say(outcome.rank, OutcomeAck(*self.key, outcome.rank, self.promise.ticket))
        self._unacked.discard(outcome.rank)
        if outcome.drained:
            self._undrained.discard(outcome.rank)
        if not outcome.ok:
            return [
                ack,
                *self._fail(
                    Fail(TransferError(f"prefill rank {outcome.rank}: {outcome.error}")), now_s
                ),
            ]
        if outcome.num_pages != self.num_pages:
            error = TransferError(
                f"{outcome.num_pages} pages were written where {self.num_pages} were promised"
            )
            return [ack, *self._fail(Fail(error), now_s)]
        self._outcomes[outcome.rank] = outcome
        if len(self._outcomes) < len(self.ranks):
            return [ack]
        self.poll = KVPoll.SUCCESS
        self._undrained.clear()
        return [ack, RoomEnded(self.key, self.poll, aux=self._outcomes[min(self.ranks)].aux)]

    def _fenced(self, event: FencedOff, now_s: float) -> list[Action]:
        if event.rank not in self.ranks:
            return []
        self._undrained.discard(event.rank)
        return self._fail(
            Fail(TransferError(f"prefill rank {event.rank} was fenced"), lost=event.rank), now_s
        )

    def _tick_open(self, event: Tick, now_s: float) -> list[Action]:
        if now_s >= self._deadline_s:
            return self._fail(
                Fail(TransferTimeoutError(f"the deadline passed in {self.poll.name}")), now_s
            )
        if self._unacked and self._resend.take(now_s):
            return [Say(rank, self.promise) for rank in sorted(self._unacked)]
        return []

    def _fail(self, event: Fail, now_s: float) -> list[Action]:
        self.poll = KVPoll.FAILED
        self.error = event.error
        self._deadline_s = now_s + self._timing.drain_timeout_s
        self._resend.start(now_s)
        actions: list[Action] = [RoomEnded(self.key, self.poll, error=event.error)]
        if event.tell:
            actions += self._aborts(event.lost)
        return actions

    # --- after the end ----------------------------------------------------------------------------

    def _aborts(self, lost: int | None = None) -> list[Action]:
        word = Abort(*self.key, str(self.error)[:1000], self.promise.ticket)
        return [Say(rank, word) for rank in sorted(self._undrained) if rank != lost]

    def _outcome_again(self, event: OutcomeSaid, now_s: float) -> list[Action]:
        if event.outcome.drained:
            self._undrained.discard(event.outcome.rank)
        return [
            Say(event.outcome.rank, OutcomeAck(*self.key, event.outcome.rank, self.promise.ticket))
        ]

    def _drained_late(self, event: DrainedSaid, now_s: float) -> list[Action]:
        self._undrained.discard(event.rank)
        return []

    def _fenced_late(self, event: FencedOff, now_s: float) -> list[Action]:
        self._undrained.discard(event.rank)
        return []

    def _tick_draining(self, event: Tick, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if self.drained:
            return actions
        if now_s >= self._deadline_s and not self._overdue_said:
            self._overdue_said = True
            actions.append(RoomOverdue(self.key))
        if self._resend.take(now_s):
            actions += self._aborts()
        return actions
