"""Prefill's side of one room: take decode's promises, post what the engine hands over, say how it
ended.

Each decode rank that takes a part of our KV (a *reader*) promises its pages, all of them the same;
the room begins when all have, and ends for all of them alike.

Three ends are kept apart. *Ended* is for the engine: SUCCESS or FAILED, once. *Source free* is for
our own
pages: no write reads them any more. *Drained* is for decode's pages: said only when every write of
the room has ended DONE or was refused at post, since a posted write cannot be called back. A write
that ended in an error proves nothing: such a room is drained when the agent that posted it has been
destroyed (`WriteDrained`), and decode is told to let settle what kernels hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from prefixkv.config import ControlConfig
from prefixkv.errors import AbortedError, RequestError, TransferError, TransferTimeoutError
from prefixkv.paging import pages_for, unit_pages
from prefixkv.protocol.backoff import Backoff
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.messages import Drained, Outcome, PromiseAck
from prefixkv.protocol.sender_events import (
    AbortSaid,
    Action,
    Added,
    Bootstrapped,
    CancelWrite,
    ChunkQueued,
    Event,
    Fail,
    OutcomeAcked,
    Pages,
    PostWrite,
    Promised,
    RoomEnded,
    Say,
    SourceFree,
    Tick,
    WriteDrained,
    WriteEnded,
)


class _Reader:
    """A decode rank of the room. `answered`: it knows the outcome, or waits for none."""

    __slots__ = ("abort_said", "answered", "peer", "promise")

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.promise: Promised | None = None
        self.abort_said = False
        self.answered = False


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
        self.readers: dict[int, _Reader] = {}  # that have spoken
        self.ticket = 0  # of the promise, or of the abort that came without one
        self.in_flight: set[int] = set()
        self.undrained: set[int] = set()  # jobs that ended in an error after they were posted
        self.settle = False  # there were some
        self._rank = rank
        self._page_size = page_size
        self._next_job_id = next_job_id
        self._timing = timing
        self._num_tokens: int | None = None
        self._expected: tuple[int, ...] = ()  # the readers, once one has spoken
        self._promise: Promised | None = None  # the first: all are alike but for the peer
        self._num_chunks = 0
        self._units_written = 0
        self._last_queued = False
        self._aux = b""
        self._nobody = False  # is left to tell how it ended
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
    def _complete(self) -> bool:
        """All readers have spoken."""
        return bool(self.readers) and len(self.readers) == len(self._expected)

    @property
    def _answered(self) -> bool:
        """All readers know the outcome, or nobody is left to tell."""
        return self._nobody or (
            self._complete and all(reader.answered for reader in self.readers.values())
        )

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

    # What each state listens to; what is absent is ignored there. Tests hold every state to have a
    # row.
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
        reader = self._enter(event)
        if reader.promise is None:
            reader.promise = event
            self._promise = self._promise or event
            self.ticket = event.ticket
            if not self.added:
                self._deadline_s = now_s + self._timing.parked_timeout_s
            return [self._promise_ack(event), *self._maybe_bootstrapped(now_s)]
        return self._promised_again(event, now_s)

    def _enter(self, event: Promised | AbortSaid) -> _Reader:
        self._expected = event.readers
        return self.readers.setdefault(event.reader, _Reader(event.peer))

    def _promised_again(self, event: Promised, now_s: float) -> list[Action]:
        # Within a generation the promise stands: a repeat is answered, a different one is not
        # taken.
        return [self._promise_ack(event)]

    def is_other_use(self, ticket: int) -> bool:
        """Whether a frame with this ticket is about another use of the room's number than the one
        promised here."""
        return self._promise is not None and self.ticket != ticket

    def is_strange(self, peer: PeerId, reader: int) -> bool:
        """Whether another peer than this has spoken as this reader of the room."""
        known = self.readers.get(reader)
        return known is not None and known.peer != peer

    def same_promise(self, event: Promised) -> bool:
        """Whether this is the promise we have (or the reader's first, and like the others')."""
        reader, first = self.readers.get(event.reader), self._promise
        ours = reader.promise if reader is not None else None
        return (
            ours is None or (ours.peer == event.peer and np.array_equal(ours.units, event.units))
        ) and (
            first is None
            or (
                (first.ticket, first.fill_len, first.prefix_len, first.state_slot)
                == (event.ticket, event.fill_len, event.prefix_len, event.state_slot)
                and len(first.units) == len(event.units)
            )
        )

    def _promise_ack(self, event: Promised) -> Say:
        return Say(event.peer, PromiseAck(*self.key, self._rank, self.ticket))

    def _maybe_bootstrapped(self, now_s: float) -> list[Action]:
        promise = self._promise
        if promise is None or self._num_tokens is None:
            return []
        if promise.fill_len != self._num_tokens:
            error = RequestError(
                f"decode waits for {promise.fill_len} tokens, the request here has "
                f"{self._num_tokens}"
            )
            return self._fail(Fail(error), now_s)
        if not self._complete:
            return []
        self.poll = KVPoll.WAITING_FOR_INPUT
        self._deadline_s = now_s + self._timing.waiting_timeout_s
        return [Bootstrapped(self.key, self.readers[min(self.readers)].peer, promise.prefix_len)]

    # --- writing ----------------------------------------------------------------------------------

    def _chunk(self, event: ChunkQueued, now_s: float) -> list[Action]:
        promise = self._promise
        assert promise is not None
        if self._last_queued:
            return self._fail(Fail(RequestError("a chunk after the last one")), now_s)
        self.poll = KVPoll.TRANSFERRING
        self._deadline_s = now_s + self._timing.transfer_timeout_s
        actions: list[Action] = []
        num_units = len(promise.units)
        if len(event.src_pages):
            # In units behind the prefix. The first page may hold units that decode has, the last
            # some beyond the end.
            unit_tokens = promise.unit_tokens or self._page_size
            fold = self._page_size // unit_tokens
            first = event.first_page * fold - promise.prefix_len // unit_tokens
            end = first + len(event.src_pages) * fold
            start, stop = max(first, 0), min(end, num_units)
            if (
                first > start
                or start - first >= fold
                or end - stop >= fold
                or start != self._units_written
            ):
                error = TransferError(
                    f"units {first} to {end} handed over where unit {self._units_written} of "
                    f"{num_units} is next"
                )
                return self._fail(Fail(error), now_s)
            if start < stop:
                src = unit_pages(event.src_pages, fold, start - first, stop - first)
                actions += self._post(src, start, event.ready)
                self._units_written = stop
        if event.last:
            self._last_queued = True
            self._aux = event.aux
            if self._units_written != num_units:
                error = TransferError(f"{self._units_written} of {num_units} units handed over")
                return actions + self._fail(Fail(error), now_s)
            if (event.state_slot < 0) != (promise.state_slot < 0):
                error = TransferError(
                    f"decode wants extra state in slot {promise.state_slot}, slot "
                    f"{event.state_slot} was handed over "
                    "(-1: none)"
                )
                return actions + self._fail(Fail(error), now_s)
            actions += self._post_state(event.state_slot, event.ready)
        return actions + self._maybe_success(now_s)

    def _post(self, src: Pages, first_unit: int, ready: Any) -> Iterator[Action]:
        """A write to each reader that has a share in ours."""
        for reader in self.readers.values():
            promise = reader.promise
            assert promise is not None
            if promise.writes:
                job_id = self._next_job_id()
                self.in_flight.add(job_id)
                dst = promise.units[first_unit : first_unit + len(src)]
                chunk = self._num_chunks
                yield PostWrite(
                    job_id, self.key, reader.peer, chunk, src, dst, ready, first_unit, self.ticket
                )
        self._num_chunks += 1

    def _post_state(self, slot: int, ready: Any) -> Iterator[Action]:
        """A write to each reader that has a share in ours of the extra state."""
        for reader in self.readers.values():
            promise = reader.promise
            assert promise is not None
            if promise.takes_state:
                job_id = self._next_job_id()
                self.in_flight.add(job_id)
                src, dst = np.array([slot], np.int32), np.array([promise.state_slot], np.int32)
                chunk = self._num_chunks
                yield PostWrite(
                    job_id,
                    self.key,
                    reader.peer,
                    chunk,
                    src,
                    dst,
                    ready,
                    0,
                    self.ticket,
                    state=True,
                )
        self._num_chunks += slot >= 0

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
        self._fail_late(event, now_s)
        return actions + self._tell(now_s)

    def _abort_said_open(self, event: AbortSaid, now_s: float) -> list[Action]:
        # Decode ended the room itself, so this reader waits for no outcome, only for our Drained.
        self.ticket = event.ticket
        self._enter(event)
        actions = self._fail(
            Fail(AbortedError(f"decode: {event.reason}"), gone=event.reader), now_s
        )
        return actions + self._abort_said_late(event, now_s)

    def _tick_open(self, event: Tick, now_s: float) -> list[Action]:
        if now_s < self._deadline_s:
            return []
        what = (
            "the request never came"
            if not self.added
            else f"the deadline passed in {self.poll.name}"
        )
        return self._fail(Fail(TransferTimeoutError(what)), now_s)

    def _tell(self, now_s: float) -> list[Action]:
        """Say the outcome to all who have not answered it yet, and wait: also for promises that are
        on their way."""
        if self._answered:
            return []
        wait_s = self._timing.ack_timeout_s if self._complete else self._timing.parked_timeout_s
        self._deadline_s = now_s + wait_s
        if self.readers:
            self._resend.start(now_s)
        return self._outcomes()

    def _outcomes(self) -> list[Action]:
        return [self._outcome(reader) for reader in self.readers.values() if not reader.answered]

    def _outcome(self, reader: _Reader) -> Say:
        ok = self.poll is KVPoll.SUCCESS
        error = "" if ok else str(self.error)[:1000]
        aux = self._aux if ok else b""
        drained = self.drained and not self.settle  # else Drained will say it
        num_pages = (
            pages_for(self._units_written, self._promise.fold) if self._promise is not None else 0
        )
        written = (self._num_chunks, num_pages)
        return Say(
            reader.peer,
            Outcome(*self.key, self._rank, ok, *written, aux, error, drained, self.ticket),
        )

    def _repeat_outcome(self, event: Promised, now_s: float) -> list[Action]:
        return [self._outcome(self.readers[event.reader])]

    def _promised_late(self, event: Promised, now_s: float) -> list[Action]:
        if event.reader in self.readers:
            return self._repeat_outcome(event, now_s)
        self._enter(event).promise = event
        self._promise, self.ticket = self._promise or event, event.ticket
        return self._tell(now_s)

    def _acked(self, event: OutcomeAcked, now_s: float) -> list[Action]:
        if event.reader in self.readers:
            self.readers[event.reader].answered = True
        return []

    def _tick_unanswered(self, event: Tick, now_s: float) -> list[Action]:
        if self._answered:
            return []
        if now_s >= self._deadline_s:
            self._nobody = True  # decode will ask with an Abort if it still cares
            return []
        return self._outcomes() if self._resend.take(now_s) else []

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
        reader = self._enter(event)
        reader.abort_said = reader.answered = True
        return self._say_drained(reader)

    def _say_drained(self, only: _Reader | None = None) -> list[Action]:
        if not self.drained:
            return []
        word = Drained(*self.key, self._rank, self.ticket, self.settle)
        asked = [
            reader
            for reader in self.readers.values()
            if reader.abort_said and only in (None, reader)
        ]
        return [Say(reader.peer, word) for reader in asked]

    def _fail_late(self, event: Fail, now_s: float) -> list[Action]:
        # Who is gone waits for no outcome; nor does anybody, where all are.
        if event.gone in self.readers:
            self.readers[event.gone].answered = True
        self._nobody |= not event.tell
        return []
