"""Prefill's side of one room: take decode's promises, post the engine's chunks, report the end.

Each *reader* (a decode rank with a part of our KV) promises its pages; the room begins when all
have. *Ended* (SUCCESS or FAILED, once) is for the engine. *Source free*: no write reads our pages
any more. *Drained* is for decode's pages: every write ended DONE or was refused at post. A write
that ended in an error proves nothing; the room is drained when its agent has been destroyed
(`JobDrained`), and decode is asked to let settle what kernels hold.

While readers are heard, a promise or chunk has no deadline; a write in flight has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from prefixkv.config import ControlConfig
from prefixkv.errors import (
    AbortedError,
    PeerLostError,
    PromptMismatchError,
    RequestError,
    TransferError,
    TransferTimeoutError,
    WeightsVersionError,
)
from prefixkv.paging import Pages, pages_for, unit_pages
from prefixkv.protocol.commands import SendChunk
from prefixkv.protocol.events import Bootstrapped, PrefillEvent, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.machine import Fail, RoomTick, Step, Table, fault, ignored, run
from prefixkv.protocol.messages import (
    Abort,
    AnyBody,
    Drained,
    FailureCode,
    Outcome,
    Promise,
    PromiseAck,
    error_of,
    failure,
)
from prefixkv.protocol.timers import Backoff, Wait
from prefixkv.request import DeviceEvent

# --- events ---------------------------------------------------------------------------------------


class Added(msgspec.Struct, frozen=True):
    """The engine has the request, and hands over KV of `num_tokens` tokens, of this digest."""

    num_tokens: int
    digest: bytes
    weights_version: str = ""


class Promised(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The promise `word` of rank `reader` of decode, which wants KV in `pages` of its pool:
    `num_units` unit pages of `unit_tokens`, `fold` of them per page.

    The control object has checked it. `readers` are all ranks that will promise. `writes` is False
    for a reader that gets none of our KV and only has to know how the room ends. `groups` are the
    pages promised in each group: `num_windows` of windows, then extra state's, if any;
    `takes_state` is False where none of ours goes there.
    """

    peer: PeerId
    word: Promise
    pages: Pages
    num_units: int
    reader: int = 0
    readers: tuple[int, ...] = (0,)
    writes: bool = True
    unit_tokens: int = 0  # 0: a page of ours
    fold: int = 1
    takes_state: bool = False
    groups: tuple[Pages, ...] = ()
    num_windows: int = 0

    def repeats(self, other: Promised) -> bool:
        same = self.peer == other.peer and self.word.digest == other.word.digest
        return same and _equal((self.pages, *self.groups), (other.pages, *other.groups))

    def agrees_with(self, other: Promised) -> bool:
        """Return True if two readers agree, each in its own pool's units."""
        mine, others = (
            (one.ticket, one.fill_len, one.prefix_len, one.weights_version)
            for one in (self.word, other.word)
        )
        same = mine == others and self.num_units == other.num_units
        same &= list(map(len, self.groups)) == list(map(len, other.groups))
        return same and _equal(self.groups[self.num_windows :], other.groups[other.num_windows :])


def _equal(mine: Sequence[Pages], others: Sequence[Pages]) -> bool:
    return len(mine) == len(others) and all(map(np.array_equal, mine, others))


class JobEnded(msgspec.Struct, frozen=True):
    """A job ended: DONE without `error`; else `drained` is False where some may still land."""

    job_id: int
    error: Exception | None = None
    drained: bool = True


class JobDrained(msgspec.Struct, frozen=True):
    """A job that had ended in an error can land no more: its agent was destroyed."""

    job_id: int


class AbortSaid(msgspec.Struct, frozen=True):
    """This reader wants no more of this room and waits for our Drained."""

    peer: PeerId
    abort: Abort
    reader: int = 0
    readers: tuple[int, ...] = (0,)


def abort_error(abort: Abort) -> TransferError:
    if abort.versions is None:
        return error_of(abort.code, f"decode: {abort.reason[:1000]}", AbortedError)
    return WeightsVersionError(*abort.versions, "decode")


class OutcomeAcked(msgspec.Struct, frozen=True):
    """This reader knows the outcome."""

    reader: int = 0


class LifeBegan(msgspec.Struct, frozen=True):
    """Decode was started after the request came: it has until `until_s` to promise."""

    peer: PeerId
    until_s: float


PeerSaid = Promised | AbortSaid | OutcomeAcked
SenderEvent = PeerSaid | Added | SendChunk | JobEnded | JobDrained | Fail | LifeBegan | RoomTick

# --- actions --------------------------------------------------------------------------------------


class SendToReader(msgspec.Struct, frozen=True):
    """Send `body` to this reader of the room."""

    peer: PeerId
    body: AnyBody


class PostWrite(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Queue a write with the transport: unit pages, from `first_unit` behind the prefix on; with
    a `group`, pages of the one of this number."""

    job_id: int
    key: RoomKey
    peer: PeerId
    chunk: int
    src_pages: Pages
    dst_pages: Pages
    ready: DeviceEvent | None
    first_unit: int
    ticket: int
    group: int = -1


class CancelWrite(msgspec.Struct, frozen=True):
    """Post no further part of the job."""

    job_id: int


SenderAction = SendToReader | PostWrite | CancelWrite | PrefillEvent


# --- the machine ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _RoomReader:
    """A decode rank of the room. `answered`: it knows the outcome, or waits for none. `counted` are
    the pages and parked promises that its control counts for it."""

    peer: PeerId
    promise: Promised | None = None
    abort_said: bool = False
    answered: bool = False
    num_chunks: int = 0  # chunks written to it
    num_units: int = 0
    counted: tuple[int, int] = (0, 0)

    @property
    def num_pages(self) -> int:
        return self.promise.word.num_pages if self.promise is not None else 0


class SenderMachine:
    """One (room, generation) on one prefill rank. Pure; owned by its `PrefillControl`. `TABLE` says
    which events each state of KVPoll takes."""

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
        # Decode's side: the ranks that have spoken, and under which ticket.
        self.readers: dict[int, _RoomReader] = {}  # by decode rank, from its first frame on
        self.met_before = 0  # count of decode ranks, kept by its control
        self.worker: PeerId | None = None  # the life of decode that they are of, kept by it too
        self.streams: dict[PeerId, Any] = {}  # of the relay, by reader
        self.ticket = 0  # that of the promise, or of an abort that came without one
        # Jobs that read our pages or may write decode's. A job leaves `in_flight` when it ends, for
        # `undrained` if it may still land.
        self.in_flight: set[int] = set()
        self.undrained: set[int] = set()  # jobs that ended in an error after they were posted
        self.settle = False  # True once a job was in `undrained`
        self._rank = rank
        self._page_size = page_size
        self._next_job_id = next_job_id
        self._timing = timing
        # The engine's side of the room, and the promise.
        self.added = False
        self.added_s = math.inf  # time at which the engine's request came
        self._newborn: LifeBegan | None = None
        self._num_tokens = 0
        self.digest = b""  # digest of the prompt; b"": not known
        self.weights_version = ""  # version of the KV that the engine will hand over
        self._expected: tuple[int, ...] = ()  # decode ranks that take part, once one has spoken
        self._promise: Promised | None = None  # the first: all are alike but for the peer
        self._last_promise: Promised | None = None  # it began the room
        self._ack_due_s = math.inf  # when that is acknowledged, if the room is open still
        self._early_chunks: list[SendChunk] = []  # chunks handed over before the promise
        # Progress of the writing; units are counted behind the promised prefix.
        self._num_chunks = 0
        self._units_written = 0
        self._groups_written: list[int] = []  # pages, by group
        self._last_queued = False
        self._aux = b""
        self._no_listener = False  # True if no reader is left that waits for the outcome
        self._source_freed = False
        self._resend = Backoff(timing.resend_s)
        self._wait = Wait(timing.longest_wait_s)
        self._wait.start(now_s, timing.bootstrap_timeout_s)

    @property
    def has_begun(self) -> bool:
        """True if there is a promise or a chunk, so the engine may have computed."""
        return self._promise is not None or bool(self._early_chunks)

    @property
    def awaits_promise(self) -> bool:
        """True if the engine has added the room, and a reader has yet to promise."""
        return self.added and self.poll is KVPoll.BOOTSTRAPPING

    def may_be_about(self, digest: bytes) -> bool:
        """True if a frame with this digest may be about the room's request: False only where both
        name a prompt, and the two differ."""
        return not (digest and self.digest) or digest == self.digest

    @property
    def prompt(self) -> bytes:
        """Digest of the request's prompt, else of the one that was promised; b"": not known."""
        return self.digest or (self._promise.word.digest if self._promise is not None else b"")

    def promises(self) -> list[Promised]:
        return [reader.promise for reader in self.readers.values() if reader.promise]

    @property
    def is_parked(self) -> bool:
        return not self.added and not self.poll.ended and self._promise is not None

    @property
    def drained(self) -> bool:
        return self.poll.ended and not self.in_flight and not self.undrained

    @property
    def expected(self) -> tuple[int, ...]:
        """Ranks of decode that read, as far as known; rank 0 always does."""
        return self._expected or (0,)

    @property
    def _complete(self) -> bool:
        return bool(self.readers) and len(self.readers) == len(self._expected)

    @property
    def _answered(self) -> bool:
        return self._no_listener or (
            self._complete and all(reader.answered for reader in self.readers.values())
        )

    @property
    def over(self) -> bool:
        """True if nothing more can happen: the machine may be dropped."""
        return self.drained and self._answered

    @property
    def wake_s(self) -> float:
        """Latest time at which the next RoomTick is wanted."""
        if not self.poll.ended:
            newborn_s = math.inf if self._newborn is None else self._newborn.until_s
            return min(self._wait.due_s, newborn_s, self._ack_due_s)
        return float("inf") if self._answered else min(self._resend.due_s, self._wait.due_s)

    def on(self, event: SenderEvent, now_s: float) -> list[SenderAction]:
        """Take one event, as the table says; return the actions, in order."""
        actions: list[SenderAction] = run(self, self.TABLE, event, now_s)
        # After every event, since either half can come last: the end of the room, or that of its
        # last write. SourceFree frees the pages for other requests, so it comes once, and never
        # before RoomEnded.
        if self.poll.ended and not self.in_flight and not self._source_freed:
            self._source_freed = True
            actions.append(SourceFree(self.key))
        return actions

    # --- before anything is written ---------------------------------------------------------------

    def _on_added(self, event: Added, now_s: float) -> list[SenderAction]:
        if self.added:
            raise fault(self, event, "it was added already")
        self.added, self.added_s = True, now_s
        self._num_tokens, self.digest = event.num_tokens, event.digest
        self.weights_version = event.weights_version
        self._wait.start(now_s, self._timing.bootstrap_timeout_s)
        return self._maybe_bootstrapped(now_s)

    def _on_promised(self, event: Promised, now_s: float) -> list[SenderAction]:
        """Begins if it was the last promise missing."""
        reader = self._reader_of(event)
        if reader.promise is not None:
            return self._on_promise_repeated(event, now_s)
        reader.promise = event
        self._promise = self._promise or event
        # A decode worker that promises knows the request: the doubt about its restart is over.
        self._newborn = None
        self.ticket = event.word.ticket
        # The engine's request is still to come. A parked promise costs memory, and may be for no
        # request at all, so it has a limit of its own.
        if not self.added:
            self._wait.start(now_s, self._timing.parked_timeout_s)
        # What follows may answer a promise that begins the room. It is acknowledged if that takes
        # long, but before decode repeats it: a promise costs far more than its acknowledgement.
        self._last_promise, self._ack_due_s = event, now_s + self._timing.resend_s / 2
        return self._maybe_bootstrapped(now_s) or self._on_promise_repeated(event, now_s)

    def _reader_of(self, event: Promised | AbortSaid) -> _RoomReader:
        self._expected = event.readers
        return self.readers.setdefault(event.reader, _RoomReader(event.peer))

    def _on_promise_repeated(self, event: Promised, now_s: float) -> list[SenderAction]:
        # Within a generation the promise stands: the control object lets only repeats through.
        self._ack_due_s = math.inf
        return [SendToReader(event.peer, PromiseAck(*self.key.numbers, self._rank, self.ticket))]

    def is_other_use(self, ticket: int) -> bool:
        """Return True if a frame with this ticket is about another use of the room's number. False
        as long as no reader has spoken: then no ticket is known here."""
        return bool(self.readers) and self.ticket != ticket

    def admits(self, peer: PeerId, reader: int, worker: PeerId) -> bool:
        """Return whether this rank may speak about this use of the room. Not if another process has
        spoken as this rank, or another life of the worker has spoken: pages of two lives must not
        meet."""
        known = self.readers.get(reader)
        return (known is None or known.peer == peer) and self.worker in (None, worker)

    def has_reader(self, peer: PeerId) -> bool:
        return any(reader.peer == peer for reader in self.readers.values())

    def same_promise(self, event: Promised) -> bool:
        """Return True if this repeats a reader's promise, or is its first and like the others."""
        reader, first = self.readers.get(event.reader), self._promise
        before = reader.promise if reader is not None else None
        repeats = before is None or before.repeats(event)
        return repeats and (first is None or first.agrees_with(event))

    def _maybe_bootstrapped(self, now_s: float) -> list[SenderAction]:
        promise = self._promise
        if promise is None or not self.added:
            return []
        # Checked for each promise as it comes, before anything is written: KV of another prompt, or
        # of other weights, must not land in a page that decode caches.
        if (mismatch := self._mismatch(promise)) is not None:
            return self._fail(Fail(mismatch), now_s)
        if not self._complete:
            return []
        self.poll = KVPoll.WAITING_FOR_INPUT
        self._wait.start(now_s, self._timing.waiting_timeout_s)
        peer = self.readers[min(self.readers)].peer
        actions: list[SenderAction] = [Bootstrapped(self.key, peer, promise.word.prefix_len)]
        # Behind Bootstrapped, and in the order in which they were handed over: units are sent in
        # order.
        early, self._early_chunks = self._early_chunks, []
        for chunk in early:
            if not self.poll.ended:  # an earlier one may have failed the room
                actions += self._on_chunk(chunk, now_s)
        return actions

    def _mismatch(self, first: Promised) -> PromptMismatchError | WeightsVersionError | None:
        if (theirs := first.word.weights_version) != self.weights_version:
            return WeightsVersionError(theirs, self.weights_version)
        if (fill_len := first.word.fill_len) != self._num_tokens:
            return PromptMismatchError(
                f"decode waits for {fill_len} tokens, the request here has {self._num_tokens}"
            )
        # The lengths agree; now the content.
        promises = [reader.promise for reader in self.readers.values()]
        if all(one is None or one.word.digest == self.digest for one in promises):
            return None
        return PromptMismatchError(
            f"decode waits for other tokens, or another namespace, than the request here has: "
            f"{fill_len} tokens, the digests differ"
        )

    def _on_early_chunk(self, event: SendChunk, now_s: float) -> list[SenderAction]:
        if self.added and not event.clip:
            raise fault(self, event, "without `clip` a chunk must not come before Bootstrapped")
        if self.added:  # else it has crossed the end of an earlier use of the number
            self._early_chunks.append(event)
        return []

    # --- writing ----------------------------------------------------------------------------------

    def _on_chunk(self, event: SendChunk, now_s: float) -> list[SenderAction]:
        promise = self._promise
        assert promise is not None
        if self._last_queued:
            return self._fail(Fail(RequestError("a chunk after the last one")), now_s)
        self.poll = KVPoll.TRANSFERRING
        self._wait.start(now_s, self._timing.transfer_timeout_s)
        actions: list[SenderAction] = []
        num_units = promise.num_units
        # 1. Pages to units, and the units to those that are still to be sent.
        if len(event.src_pages):
            # The first page may hold units that decode has, the last some beyond the end. A whole
            # page that decode has is left out, if it is to be clipped; none is sent twice.
            unit_tokens = promise.unit_tokens or self._page_size
            fold = self._page_size // unit_tokens  # of our page
            # Counted behind the promised prefix, so `first` is negative where decode has some.
            first = event.first_page * fold - promise.word.prefix_len // unit_tokens
            end = first + len(event.src_pages) * fold
            start, stop = max(first, 0), min(end, num_units)
            has_all = start - first >= fold and not event.clip
            if has_all or end - stop >= fold or start != self._units_written:
                error = TransferError(
                    f"units {first} to {end} handed over where unit {self._units_written} of "
                    f"{num_units} is next"
                )
                return self._fail(Fail(error), now_s)
            if start < stop:
                src = unit_pages(event.src_pages, fold, start - first, stop - first)
                actions += self._post(src, start, event.ready)
                self._units_written = stop
        # 2. The same for each group; a page that decode promised there is sent once.
        wanted = [len(pages) for pages in promise.groups]
        self._groups_written = self._groups_written or [0] * len(wanted)
        for number, (first, src) in enumerate(event.groups):
            if not len(src):
                continue
            end, begin, most = first + len(src), 0, 0
            if number < len(wanted):
                begin, most = self._groups_written[number], wanted[number]
            if first != begin or end > most:
                error = TransferError(
                    f"pages {first} to {end} of group {number} handed over where page {begin} of "
                    f"{most} is next"
                )
                return actions + self._fail(Fail(error), now_s)
            actions += self._post(src, first, event.ready, number)
            self._groups_written[number] = end
        # 3. The last chunk: everything must have been handed over, or decode would commit pages
        # without KV.
        if event.last:
            self._last_queued = True
            self._aux = event.aux
            if self._units_written != num_units:
                error = TransferError(f"{self._units_written} of {num_units} units handed over")
                return actions + self._fail(Fail(error), now_s)
            if self._groups_written != wanted:
                error = TransferError(
                    f"{self._groups_written} of {wanted} pages of groups handed over"
                )
                return actions + self._fail(Fail(error), now_s)
        return actions + self._maybe_success(now_s)

    def _post(
        self, src: Pages, first_unit: int, ready: DeviceEvent | None, group: int = -1
    ) -> Iterator[SenderAction]:
        """Yield a write to each reader with a share in our KV: of these unit pages, or of these
        pages of a `group`."""
        for reader in self.readers.values():
            promise = reader.promise
            assert promise is not None
            is_state = promise.num_windows <= group
            if not (promise.takes_state if is_state else promise.writes):
                continue
            stop = first_unit + len(src)
            if group >= 0:
                dst = promise.groups[group][first_unit:stop]
            else:
                dst = unit_pages(promise.pages, promise.fold, first_unit, stop)
            job_id = self._next_job_id()
            # Counted before the action is carried out: from here on the room is neither drained nor
            # its source free, until JobEnded.
            self.in_flight.add(job_id)
            reader.num_chunks += 1
            reader.num_units += len(dst)
            yield PostWrite(
                job_id=job_id, key=self.key, peer=reader.peer, chunk=self._num_chunks,
                src_pages=src, dst_pages=dst, ready=ready, first_unit=first_unit,
                ticket=self.ticket, group=group,
            )  # fmt: skip
        self._num_chunks += 1

    def _on_job_ended(self, event: JobEnded, now_s: float) -> list[SenderAction]:
        # Of a job that has ended already: a second end must not prove anything.
        if event.job_id not in self.in_flight:
            return []
        self.in_flight.discard(event.job_id)
        # First of all, whatever the room's state is: the error is no proof, so the job moves to
        # `undrained` before any Drained could be sent below.
        if event.error is not None and not event.drained:
            self.undrained.add(event.job_id)
            self.settle = True
        if self.poll is KVPoll.FAILED:
            return self._send_drained()
        if event.error is not None:
            return self._fail(Fail(event.error), now_s)
        self._wait.start(now_s, self._timing.transfer_timeout_s)
        return self._maybe_success(now_s)

    def _maybe_success(self, now_s: float) -> list[SenderAction]:
        if not self._last_queued or self.in_flight:
            return []
        self.poll = KVPoll.SUCCESS
        return [RoomEnded(self.key, self.poll), *self._send_outcomes(now_s)]

    # --- ends -------------------------------------------------------------------------------------

    def _fail(self, event: Fail, now_s: float) -> list[SenderAction]:
        self.poll = KVPoll.FAILED
        self.error = event.error
        self._early_chunks.clear()
        actions: list[SenderAction] = [RoomEnded(self.key, self.poll, event.error)]
        # Cancelling only keeps further parts from being posted: the jobs stay in flight until they
        # end, since what is posted can still land.
        actions += [CancelWrite(job_id) for job_id in sorted(self.in_flight)]
        self._on_late_fail(event, now_s)
        return actions + self._send_outcomes(now_s)

    def _on_abort(self, event: AbortSaid, now_s: float) -> list[SenderAction]:
        # Decode ended the room itself, so this reader waits for no outcome, only for our Drained.
        # The other readers get the outcome.
        self.ticket = event.abort.ticket
        self._reader_of(event)
        actions = self._fail(Fail(abort_error(event.abort), gone=event.reader), now_s)
        return actions + self._on_late_abort(event, now_s)

    def _on_life_began(self, event: LifeBegan, now_s: float) -> list[SenderAction]:
        """The new life may not know the request."""
        # The first of several lives counts: a worker that is killed again and again would have the
        # request wait on.
        if self._promise is None:
            self._newborn = self._newborn or event
        return []

    def _tick_open(self, event: RoomTick, now_s: float) -> list[SenderAction]:
        # 1. A new life of decode does not ask for the request: it was lost with the former life.
        if (newborn := self._newborn) is not None and now_s >= newborn.until_s:
            what = f"{newborn.peer} was started after the request had come, and does not ask for it"
            return self._fail(Fail(PeerLostError(what, newborn.peer)), now_s)
        if now_s < self._wait.due_s:
            last = self._last_promise if now_s >= self._ack_due_s else None
            return self._on_promise_repeated(last, now_s) if last is not None else []
        # 2. A queue is waited for, here or there, while the readers are heard. A write under way is
        # not: it has its deadline, since a stuck transport looks like a slow one.
        if self.added and not self.in_flight and self._wait.goes_on(event.heard_s, now_s):
            return []
        # 3. Time is over. The error names the step that is missing.
        peer = self._promise.peer.name if self._promise is not None else "?"
        what = f"decode worker {peer!r}: {self._wait.limit} passed in {self.poll.name}"
        if self._promise is None:
            what = (
                f"decode worker {self.key.decode!r} (Request.decode) has promised no pages: it has "
                "no such request, or another name"
            )
        elif not self.added:
            what = (
                f"decode worker {peer!r} has promised pages, the request never came, or names "
                "another decode worker (Request.decode)"
            )
        return self._fail(Fail(TransferTimeoutError(what)), now_s)

    def _send_outcomes(self, now_s: float) -> list[SenderAction]:
        """To all readers that have not answered. Waits also for promises that are on their way."""
        if self._answered:
            return []
        wait_s = self._timing.ack_timeout_s if self._complete else self._timing.parked_timeout_s
        self._wait.start(now_s, wait_s)
        if self.readers:
            self._resend.start(now_s)
        return self._outcomes()

    def _outcomes(self) -> list[SenderAction]:
        return [
            self._outcome_for(reader) for reader in self.readers.values() if not reader.answered
        ]

    def _outcome_for(self, reader: _RoomReader) -> SendToReader:
        ok = self.error is None
        error, code, versions = failure(self.error) if self.error else ("", FailureCode.OTHER, None)
        fold = self._promise.fold if self._promise is not None else 1
        body = Outcome(
            *self.key.numbers,
            rank=self._rank,
            ok=ok,
            num_chunks=reader.num_chunks,
            num_pages=pages_for(self._units_written, fold) + sum(self._groups_written),
            aux=self._aux if ok else b"",
            error=error,
            # Only where nothing needs to settle; else a Drained follows, which can ask for that.
            drained=self.drained and not self.settle,
            ticket=self.ticket,
            code=code,
            num_units=reader.num_units,
            versions=versions,
        )
        return SendToReader(reader.peer, body)

    def _on_late_promise(self, event: Promised, now_s: float) -> list[SenderAction]:
        known = self.readers.get(event.reader)
        # 1. A reader that we know repeats itself: our outcome was lost.
        # 2. An unknown one after SUCCESS: no reader of this room.
        # 3. An unknown one after a failure: it gets the outcome, and acknowledges it, like the
        # others.
        if known is not None:
            return [self._outcome_for(known)]
        if self.poll is KVPoll.SUCCESS:
            return []
        self._reader_of(event).promise = event
        self._promise, self.ticket = self._promise or event, event.word.ticket
        return self._send_outcomes(now_s)

    def _on_outcome_acked(self, event: OutcomeAcked, now_s: float) -> list[SenderAction]:
        if event.reader in self.readers:
            self.readers[event.reader].answered = True
        return []

    def _tick_unanswered(self, event: RoomTick, now_s: float) -> list[SenderAction]:
        if not self._answered and now_s >= self._wait.due_s:
            self._no_listener = True  # decode will ask with an Abort if it still cares
        return self._outcomes() if not self._answered and self._resend.take(now_s) else []

    def _on_job_drained(self, event: JobDrained, now_s: float) -> list[SenderAction]:
        if event.job_id not in self.undrained:
            return []
        self.undrained.discard(event.job_id)
        return self._send_drained()

    def _on_late_abort(self, event: AbortSaid, now_s: float) -> list[SenderAction]:
        reader = self._reader_of(event)
        reader.abort_said = reader.answered = True
        return self._send_drained(reader)

    def _send_drained(self, only: _RoomReader | None = None) -> list[SenderAction]:
        if not self.drained:
            return []
        drained = Drained(*self.key.numbers, self._rank, self.ticket, self.settle)
        readers = self.readers.values() if only is None else (only,)
        return [SendToReader(reader.peer, drained) for reader in readers if reader.abort_said]

    def _on_late_fail(self, event: Fail, now_s: float) -> list[SenderAction]:
        # A reader that is gone waits for no outcome. Without `tell`, none is left that does.
        if event.gone in self.readers:
            self.readers[event.gone].answered = True
        self._no_listener |= not event.tell
        return []

    # --- the table: the events of each state, and the states that may follow ----------------------

    # A peer may repeat itself, be late, or send anything, so its frames stand in every row. Ours
    # are Added, which must not come twice, and JobEnded and JobDrained, which must not come where
    # no write can be under way.
    TABLE: ClassVar[Table] = {
        KVPoll.BOOTSTRAPPING: {
            Added: Step(_on_added, {KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED}),
            Promised: Step(_on_promised, set(KVPoll)),  # with kept chunks it may go all the way
            SendChunk: Step(_on_early_chunk, {KVPoll.BOOTSTRAPPING}),
            AbortSaid: Step(_on_abort, {KVPoll.FAILED}),
            Fail: Step(_fail, {KVPoll.FAILED}),
            **ignored(OutcomeAcked),  # no outcome was said
            LifeBegan: Step(_on_life_began, {KVPoll.BOOTSTRAPPING}),
            RoomTick: Step(_tick_open, {KVPoll.BOOTSTRAPPING, KVPoll.FAILED}),
        },
        KVPoll.WAITING_FOR_INPUT: {
            Promised: Step(_on_promise_repeated, {KVPoll.WAITING_FOR_INPUT}),
            SendChunk: Step(_on_chunk, {KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED}),
            AbortSaid: Step(_on_abort, {KVPoll.FAILED}),
            Fail: Step(_fail, {KVPoll.FAILED}),
            **ignored(OutcomeAcked, LifeBegan),  # no outcome was said; the life has promised
            RoomTick: Step(_tick_open, {KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED}),
        },
        KVPoll.TRANSFERRING: {
            Promised: Step(_on_promise_repeated, {KVPoll.TRANSFERRING}),
            SendChunk: Step(_on_chunk, {KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED}),
            JobEnded: Step(_on_job_ended, {KVPoll.TRANSFERRING, KVPoll.SUCCESS, KVPoll.FAILED}),
            **ignored(JobDrained),  # an undrained job has failed the room
            AbortSaid: Step(_on_abort, {KVPoll.FAILED}),
            Fail: Step(_fail, {KVPoll.FAILED}),
            **ignored(OutcomeAcked, LifeBegan),
            RoomTick: Step(_tick_open, {KVPoll.TRANSFERRING, KVPoll.FAILED}),
        },
        KVPoll.SUCCESS: {
            Promised: Step(_on_late_promise, {KVPoll.SUCCESS}),
            **ignored(SendChunk, LifeBegan),  # after the last chunk: too late to fail the room
            AbortSaid: Step(_on_late_abort, {KVPoll.SUCCESS}),
            Fail: Step(_on_late_fail, {KVPoll.SUCCESS}),
            OutcomeAcked: Step(_on_outcome_acked, {KVPoll.SUCCESS}),
            RoomTick: Step(_tick_unanswered, {KVPoll.SUCCESS}),
        },
        KVPoll.FAILED: {
            # It failed while it was parked; or the engine has not heard of the end yet.
            **ignored(Added, SendChunk, LifeBegan),
            Promised: Step(_on_late_promise, {KVPoll.FAILED}),
            JobEnded: Step(_on_job_ended, {KVPoll.FAILED}),
            JobDrained: Step(_on_job_drained, {KVPoll.FAILED}),
            AbortSaid: Step(_on_late_abort, {KVPoll.FAILED}),
            Fail: Step(_on_late_fail, {KVPoll.FAILED}),
            OutcomeAcked: Step(_on_outcome_acked, {KVPoll.FAILED}),
            RoomTick: Step(_tick_unanswered, {KVPoll.FAILED}),
        },
    }
