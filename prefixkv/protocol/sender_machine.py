"""Prefill's side of one room: take decode's promise, post what the engine hands over, say how it ended.

Three ends are kept apart. *Ended* is for the engine: SUCCESS or FAILED, once. *Source free* is for our own
pages: no write reads them any more. *Drained* is for decode's pages: said only when every write of the room
has ended DONE or was refused at post, since a posted write cannot be called back. A write that ended in an
error proves nothing: such a room is drained when the agent that posted it has been destroyed (`WriteDrained`),
and decode is told to let settle what kernels hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.config import ControlConfig
from prefixkv.errors import AbortedError, RequestError, TransferError, TransferTimeoutError
from prefixkv.protocol.backoff import Backoff
from prefixkv.protocol.messages import AnyBody, Drained, Outcome, PromiseAck
from prefixkv.protocol.state import KVPoll, PeerId, RoomKey

Pages = npt.NDArray[np.int32]

# --- events ---------------------------------------------------------------------------------------


class Added(NamedTuple):
    """The engine has the request: KV of `num_tokens` tokens will be handed over."""

    num_tokens: int


class Promised(NamedTuple):
    """Decode has `prefix_len` tokens and wants the rest of `fill_len` in `pages` (checked by the endpoint)."""

    peer: PeerId
    fill_len: int
    prefix_len: int
    pages: Pages
    ticket: int = 0


class ChunkQueued(NamedTuple):
    """The engine hands over pages `first_page`.. of the request, counted from its first token; maybe none."""

    first_page: int
    src_pages: Pages
    last: bool
    aux: bytes
    ready: Any


class WriteEnded(NamedTuple):
    """A job ended: DONE if `error` is None; else `drained` says whether any of it may still land."""

    job_id: int
    error: Exception | None = None
    drained: bool = True


class WriteDrained(NamedTuple):
    """Of a job that had ended in an error, nothing can land any more: its agent was destroyed."""

    job_id: int


class AbortSaid(NamedTuple):
    """Decode wants no more of this room and waits for our Drained."""

    peer: PeerId
    reason: str
    ticket: int = 0


class Fail(NamedTuple):
    """End the room from this side: aborted by the engine, or the peer is gone."""

    error: Exception
    tell: bool = True


class OutcomeAcked(NamedTuple):
    pass


class Tick(NamedTuple):
    pass


Event = Added | Promised | ChunkQueued | WriteEnded | WriteDrained | AbortSaid | Fail | OutcomeAcked | Tick

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """Send `body` to the room's peer."""

    peer: PeerId
    body: AnyBody


@dataclass(frozen=True, slots=True, eq=False)
class PostWrite:
    """Queue this write with the transport."""

    job_id: int
    key: RoomKey
    peer: PeerId
    chunk: int
    src_pages: Pages
    dst_pages: Pages
    ready: Any


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """Post no further part of the job."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """Engine and decode have both named the room: computing may start."""

    key: RoomKey
    peer: PeerId
    prefix_len: int


@dataclass(frozen=True, slots=True)
class RoomEnded:
    """The room's one terminal state, for the engine."""

    key: RoomKey
    poll: KVPoll
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class SourceFree:
    """No write of the room reads our pages any more. Comes once, with RoomEnded or after it."""

    key: RoomKey


Action = Say | PostWrite | CancelWrite | Bootstrapped | RoomEnded | SourceFree


class SenderMachine:
    """One (room, generation) on one prefill rank. Pure; owned by the endpoint that holds it."""

    def __init__(
        self,
        key: RoomKey,
        rank: int,
        page_size: int,
        next_job_id: Callable[[], int],
        timing: ControlConfig,
        now_s: float,
    ) -> None:
        self.key = key
        self.poll = KVPoll.BOOTSTRAPPING
        self.error: Exception | None = None
        self.peer: PeerId | None = None
        self.prefix_len = 0
        self.ticket = 0  # of the promise, or of the abort that came without one
        self.in_flight: set[int] = set()
        self.undrained: set[int] = set()  # jobs that ended in an error after they were posted
        self.settle = False  # there were some
        self._rank = rank
        self._page_size = page_size
        self._next_job_id = next_job_id
        self._timing = timing
        self._num_tokens: int | None = None
        self._promise: Promised | None = None
        self._num_chunks = 0
        self._pages_written = 0
        self._last_queued = False
        self._aux = b""
        self._abort_said = False
        self._answered = False  # decode knows the outcome, or nobody is left to tell
        self._source_freed = False
        self._resend = Backoff(timing.resend_s)
        self._deadline_s = now_s + timing.bootstrap_timeout_s

    @property
    def added(self) -> bool:
        """The engine knows this room."""
        return self._num_tokens is not None

    @property
    def drained(self) -> bool:
        """No write of ours for this room can land any more."""
        return self.poll.ended and not self.in_flight and not self.undrained

    @property
    def over(self) -> bool:
        """Nothing more can happen here: the machine may be dropped."""
        return self.drained and self._answered

    @property
    def wake_s(self) -> float:
        """When the next Tick is wanted, at the latest."""
        if not self.poll.ended:
            return self._deadline_s
        return float("inf") if self._answered else min(self._resend.due_s, self._deadline_s)

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Take one event. Events that mean nothing in this state are ignored, as the table says."""
        handler = self._TABLE[self.poll].get(type(event))
        if handler is None:
            return []
        actions: list[Action] = getattr(self, handler)(event, now_s)
        if self.poll.ended and not self.in_flight and not self._source_freed:
            self._source_freed = True
            actions.append(SourceFree(self.key))
        return actions

    # What each state listens to; what is absent is ignored there. Tests hold every state to have a row.
    _TABLE: ClassVar[dict[KVPoll, dict[type, str]]] = {
        KVPoll.BOOTSTRAPPING: {
            Added: "_added",
            Promised: "_promised",
            AbortSaid: "_abort_said_open",
            Fail: "_fail",
            Tick: "_tick_open",
        },
        KVPoll.WAITING_FOR_INPUT: {
            Promised: "_promised_again",
            ChunkQueued: "_chunk",
            AbortSaid: "_abort_said_open",
            Fail: "_fail",
            Tick: "_tick_open",
        },
        KVPoll.TRANSFERRING: {
            Promised: "_promised_again",
            ChunkQueued: "_chunk",
            WriteEnded: "_write_ended",
            AbortSaid: "_abort_said_open",
            Fail: "_fail",
            Tick: "_tick_open",
        },
        KVPoll.SUCCESS: {
            Promised: "_repeat_outcome",
            AbortSaid: "_abort_said_late",
            Fail: "_fail_late",
            OutcomeAcked: "_acked",
            Tick: "_tick_unanswered",
        },
        KVPoll.FAILED: {
            Promised: "_promised_late",
            WriteEnded: "_write_ended_late",
            WriteDrained: "_write_drained",
            AbortSaid: "_abort_said_late",
            Fail: "_fail_late",
            OutcomeAcked: "_acked",
            Tick: "_tick_unanswered",
        },
    }

    # --- before anything is written ---------------------------------------------------------------

    def _added(self, event: Added, now_s: float) -> list[Action]:
        self._num_tokens = event.num_tokens
        return self._maybe_bootstrapped(now_s)

    def _promised(self, event: Promised, now_s: float) -> list[Action]:
        if self._promise is not None:
            return self._promised_again(event, now_s)
        self._promise = event
        self.peer = event.peer
        self.ticket = event.ticket
        self.prefix_len = event.prefix_len
        if not self.added:
            self._deadline_s = now_s + self._timing.parked_timeout_s
        return [self._promise_ack(event.peer), *self._maybe_bootstrapped(now_s)]

    def _promised_again(self, event: Promised, now_s: float) -> list[Action]:
        # Within a generation the promise stands: a repeat is answered, a different one is not taken.
        assert self._promise is not None
        return [self._promise_ack(event.peer)]

    def is_other_use(self, ticket: int) -> bool:
        """Whether a frame with this ticket is about another use of the room's number than the one promised here."""
        return self._promise is not None and self.ticket != ticket

    def same_promise(self, event: Promised) -> bool:
        """Whether this is the promise we have (or the first)."""
        ours = self._promise
        return ours is None or (
            (ours.peer, ours.ticket, ours.fill_len, ours.prefix_len)
            == (event.peer, event.ticket, event.fill_len, event.prefix_len)
            and np.array_equal(ours.pages, event.pages)
        )

    def _promise_ack(self, peer: PeerId) -> Say:
        return Say(peer, PromiseAck(*self.key, self._rank, self.ticket))

    def _maybe_bootstrapped(self, now_s: float) -> list[Action]:
        promise = self._promise
        if promise is None or self._num_tokens is None:
            return []
        if promise.fill_len != self._num_tokens:
            error = RequestError(f"decode waits for {promise.fill_len} tokens, the request here has {self._num_tokens}")
            return self._fail(Fail(error), now_s)
        self.poll = KVPoll.WAITING_FOR_INPUT
        self._deadline_s = now_s + self._timing.waiting_timeout_s
        return [Bootstrapped(self.key, promise.peer, promise.prefix_len)]

    # --- writing ----------------------------------------------------------------------------------

    def _chunk(self, event: ChunkQueued, now_s: float) -> list[Action]:
        promise = self._promise
        assert promise is not None
        if self._last_queued:
            return self._fail(Fail(RequestError("a chunk after the last one")), now_s)
        self.poll = KVPoll.TRANSFERRING
        self._deadline_s = now_s + self._timing.transfer_timeout_s
        actions: list[Action] = []
        first = event.first_page - promise.prefix_len // self._page_size
        count = len(event.src_pages)
        if count:
            if first != self._pages_written or first + count > len(promise.pages):
                error = TransferError(
                    f"pages {first} to {first + count} handed over where page {self._pages_written} of "
                    f"{len(promise.pages)} is next"
                )
                return self._fail(Fail(error), now_s)
            job_id = self._next_job_id()
            self.in_flight.add(job_id)
            dst = promise.pages[first : first + count]
            actions.append(
                PostWrite(job_id, self.key, promise.peer, self._num_chunks, event.src_pages, dst, event.ready)
            )
            self._num_chunks += 1
            self._pages_written += count
        if event.last:
            self._last_queued = True
            self._aux = event.aux
            if self._pages_written != len(promise.pages):
                error = TransferError(f"{self._pages_written} of {len(promise.pages)} pages handed over")
                return actions + self._fail(Fail(error), now_s)
        return actions + self._maybe_success(now_s)

    def _write_ended(self, event: WriteEnded, now_s: float) -> list[Action]:
        if event.job_id not in self.in_flight:
            return []
        self.in_flight.discard(event.job_id)
        if event.error is None:
            self._deadline_s = now_s + self._timing.transfer_timeout_s
            return self._maybe_success(now_s)
        self._note_undrained(event)
        return self._fail(Fail(event.error), now_s)

    def _maybe_success(self, now_s: float) -> list[Action]:
        if not self._last_queued or self.in_flight:
            return []
        self.poll = KVPoll.SUCCESS
        return [RoomEnded(self.key, self.poll), *self._tell(now_s)]

    # --- ends -------------------------------------------------------------------------------------

    def _fail(self, event: Fail, now_s: float) -> list[Action]:
        self.poll = KVPoll.FAILED
        self.error = event.error
        actions: list[Action] = [RoomEnded(self.key, self.poll, error=event.error)]
        actions += [CancelWrite(job_id) for job_id in sorted(self.in_flight)]
        if not event.tell:
            self._answered = True
        elif self.peer is not None:
            actions += self._tell(now_s)
        else:
            self._deadline_s = now_s + self._timing.parked_timeout_s  # for a promise that is on its way
        return actions

    def _abort_said_open(self, event: AbortSaid, now_s: float) -> list[Action]:
        # Decode ended the room itself, so it waits for no outcome, only for our Drained.
        self.peer, self.ticket = event.peer, event.ticket
        actions = self._fail(Fail(AbortedError(f"decode: {event.reason}"), tell=False), now_s)
        return actions + self._abort_said_late(event, now_s)

    def _tick_open(self, event: Tick, now_s: float) -> list[Action]:
        if now_s < self._deadline_s:
            return []
        what = "the request never came" if not self.added else f"the deadline passed in {self.poll.name}"
        return self._fail(Fail(TransferTimeoutError(what)), now_s)

    def _tell(self, now_s: float) -> list[Action]:
        assert self.peer is not None
        self._resend.start(now_s)
        self._deadline_s = now_s + self._timing.ack_timeout_s
        return [self._outcome()]

    def _outcome(self) -> Say:
        assert self.peer is not None
        ok = self.poll is KVPoll.SUCCESS
        error = "" if ok else str(self.error)[:1000]
        aux = self._aux if ok else b""
        drained = self.drained and not self.settle  # else Drained will say it
        written = (self._num_chunks, self._pages_written)
        return Say(self.peer, Outcome(*self.key, self._rank, ok, *written, aux, error, drained, self.ticket))

    def _repeat_outcome(self, event: Promised, now_s: float) -> list[Action]:
        return [] if self.peer is None else [self._outcome()]

    def _promised_late(self, event: Promised, now_s: float) -> list[Action]:
        if self.peer is not None:
            return self._repeat_outcome(event, now_s)
        self._promise, self.peer, self.ticket = event, event.peer, event.ticket
        return self._tell(now_s)

    def _acked(self, event: OutcomeAcked, now_s: float) -> list[Action]:
        self._answered = True
        return []

    def _tick_unanswered(self, event: Tick, now_s: float) -> list[Action]:
        if self._answered:
            return []
        if now_s >= self._deadline_s:
            self._answered = True  # decode will ask with an Abort if it still cares
            return []
        return [self._outcome()] if self._resend.take(now_s) else []

    def _write_ended_late(self, event: WriteEnded, now_s: float) -> list[Action]:
        if event.job_id not in self.in_flight:
            return []
        self.in_flight.discard(event.job_id)
        self._note_undrained(event)
        return self._say_drained()

    def _note_undrained(self, event: WriteEnded) -> None:
        if event.error is not None and not event.drained:
            self.undrained.add(event.job_id)
            self.settle = True

    def _write_drained(self, event: WriteDrained, now_s: float) -> list[Action]:
        if event.job_id not in self.undrained:
            return []
        self.undrained.discard(event.job_id)
        return self._say_drained()

    def _abort_said_late(self, event: AbortSaid, now_s: float) -> list[Action]:
        self._abort_said = True
        self._answered = True
        return self._say_drained()

    def _say_drained(self) -> list[Action]:
        if not (self._abort_said and self.drained and self.peer is not None):
            return []
        return [Say(self.peer, Drained(*self.key, self._rank, self.ticket, self.settle))]

    def _fail_late(self, event: Fail, now_s: float) -> list[Action]:
        # The peer is gone (or the engine aborts what has ended): nobody waits for the outcome.
        if not event.tell:
            self._answered = True
        return []
