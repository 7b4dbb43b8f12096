"""A request on the prefill side: what its chunks send (a cursor that only grows, behind what decode
has), its state, where it goes on behind what is cached, and the journal of its times and counts.

arrived -- decode --> promised -- pages --> started -- compute --> computed -- send --> sent
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.cache.results import MatchResult
from prefixkv.config import UsablePrefix
from prefixkv.errors import AbortedError, AuxTooLargeError, RequestError, UserErrors, shown
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import PagedRequest
from prefixkv.paging import MAX_INDEX, Pages, pages_for
from prefixkv.protocol.commands import GroupChunk
from prefixkv.protocol.ids import RoomKey
from prefixkv.request import DeviceEvent, Request, check_event, whole_number
from prefixkv.stats import Journal


class Span(NamedTuple):
    """Pages [first_page, end_page) of a request, counted from its first token; may be empty."""

    first_page: int
    end_page: int


class WindowPlan:
    """The cursor of one request over its pages in a window group that are sent.

    These are those of the window behind the prompt, whatever prefix decode has. Each goes with the
    chunk that completes it.

    >>> plan = WindowPlan(first_page=5, page_size=16)
    >>> plan.send(70), plan.send(96), plan.send(100, last=True)
    (Span(first_page=5, end_page=5), Span(first_page=5, end_page=6), Span(first_page=6, end_page=7))
    """

    __slots__ = ("cursor_page", "first_page", "page_size")

    def __init__(self, first_page: int, page_size: int) -> None:
        self.first_page = self.cursor_page = first_page
        self.page_size = page_size

    def send(self, end: int, last: bool = False) -> Span:
        """Return the pages to send, now that KV is computed up to token `end`."""
        span = self.next(end, last)
        self.cursor_page = span.end_page
        return span

    def next(self, end: int, last: bool) -> Span:
        """Return what `send` would return, without a move of the cursor."""
        # A partly computed page waits for its rest, but for the last page of the request.
        end_page = pages_for(end, self.page_size) if last else end // self.page_size
        return Span(self.cursor_page, max(self.cursor_page, end_page))

    def chunk(self, span: Span, first_page: int, ids: Pages) -> GroupChunk:
        """Return a copy of this span of `ids`, those from page `first_page` on."""
        sent = ids[span.first_page - first_page : span.end_page - first_page].copy()
        return GroupChunk(span.first_page - self.first_page, sent)


class SendPlan(WindowPlan):
    """The cursor of one request over the pages that its chunks send.

    A chunk inside what decode has sends nothing. A page partly computed waits for its rest. The
    last send is always made, even without pages, since the outcome and aux travel with it. Where
    decode's pages are smaller, it may have the first part of one of ours: that page is in the span,
    and `SenderMachine` sends its rest.

    >>> plan = SendPlan(num_tokens=100, decode_prefix_len=32, page_size=16)
    >>> plan.send(20), plan.send(70), plan.send(100, last=True)
    (Span(first_page=2, end_page=2), Span(first_page=2, end_page=4), Span(first_page=4, end_page=7))
    """

    __slots__ = ("computed", "ended", "num_tokens", "windows")

    def __init__(
        self,
        num_tokens: int,
        decode_prefix_len: int,
        page_size: int,
        firsts: Iterable[int] = (),
    ) -> None:
        super().__init__(decode_prefix_len // page_size, page_size)
        self.num_tokens = num_tokens
        # By window group: from which page on.
        self.windows = tuple(WindowPlan(first_page, page_size) for first_page in firsts)
        self.computed = 0
        self.ended = False

    def send(self, end: int, last: bool = False) -> Span:
        """Return the pages to send, now that KV is computed up to token `end`. Raises RequestError,
        with nothing changed: after the last send; an `end` below the one before or beyond the
        request; a last send before its end."""
        if self.ended:
            raise RequestError("a chunk after the last one")
        if not self.computed <= end <= self.num_tokens:
            raise RequestError(
                f"a chunk ends at token {end}, it has to lie in [{self.computed}, "
                f"{self.num_tokens}]"
            )
        if last and end != self.num_tokens:
            raise RequestError(
                f"the last chunk ends at token {end}, the request has {self.num_tokens}"
            )
        self.computed, self.ended = end, last
        return super().send(end, last)


def state_of(state_slot: int) -> tuple[GroupChunk, ...]:
    """Return the extra state in this slot as what goes with a chunk; -1: none."""
    return (GroupChunk(0, np.array([state_slot], np.int32)),) if state_slot >= 0 else ()


def checked_chunk(
    end: int, state_slot: int, aux: bytes, last: bool, ready: DeviceEvent | None,
    num_slots: int, max_aux_bytes: int,
) -> tuple[int, int, bytes]:  # fmt: skip
    """Return `end`, `state_slot` and `aux` as the types that travel. Raises RequestError for
    another type, an `aux` without `last`, a slot that is none of `num_slots`, or not with `last`
    and only then, and a `ready` without `query()`. AuxTooLargeError."""
    end = whole_number("end", end, 0, MAX_INDEX + 1)
    state_slot = whole_number("state_slot", state_slot, -1, MAX_INDEX + 1)
    # A union is made anew by each call.
    if type(aux) is not bytes and not isinstance(aux, bytearray | memoryview | bytes):
        raise RequestError(f"aux is a {type(aux).__name__}, bytes are needed")
    if not isinstance(last, bool):
        raise RequestError(f"last is {shown(last)}, True or False is needed")
    check_event("ready", ready)
    try:
        aux = bytes(aux)
    except (ValueError, BufferError) as error:  # a memoryview that was released
        raise RequestError(f"aux cannot be read: {error}") from None
    if aux and not last:
        raise RequestError("aux travels with the last chunk")
    if len(aux) > max_aux_bytes:
        raise AuxTooLargeError(len(aux), max_aux_bytes)
    if not (0 <= state_slot < num_slots if last and num_slots else state_slot == -1):
        wanted = f"one of {num_slots} with the last chunk, and only then" if num_slots else "none"
        raise RequestError(f"state slot {state_slot} was handed over where {wanted} is needed")
    return end, state_slot, aux


class PrefillState(enum.Enum):
    """The state of a request. The last two are terminal."""

    BOOTSTRAPPING = "bootstrapping"  # decode has not promised pages yet
    BOOTSTRAPPED = "bootstrapped"  # promised; waits for pages of its own
    COMPUTING = "computing"  # with the engine
    SENDING = "sending"  # the last chunk is handed over
    SENT = "sent"
    FAILED = "failed"

    __hash__ = object.__hash__  # equal is identical here; Enum's own hashes the name, in Python

    @property
    def ended(self) -> bool:
        return self in (PrefillState.SENT, PrefillState.FAILED)


class PrefillRequest(PagedRequest[PrefillState]):
    """One request on a prefill worker. Made by `add`; its fields are for the engine to read.

    `rid`, `request` (as added), `state`, `error` (why it failed), `num_tokens` of its prompt.

    `decode_prefix_len` tokens are on the decode worker. `prefix_len` tokens have their KV in
    `pages` already, so the engine computes from there. With checkpoints it copies the state in
    `checkpoint_slot` (-1 where `prefix_len` is 0) before the first chunk, ends chunks at `stops`
    (tokens, ascending; more may come), and asks `save_state` there where the state goes. In window
    groups it has pages for the window behind `prefix_len` and for the next chunk (`window_pages`),
    of at most `step_tokens`. Without extra state it only ends chunks at `stops`.
    """

    __slots__ = (
        "computed_s", "decode_prefix_len", "given_up", "key", "num_chunks",
        "num_tokens", "peer", "plan", "popped", "promised_s", "sent_pages", "source_free",
        "started_s", "state_slot",
    )  # fmt: skip

    TRANSITIONS = {
        PrefillState.BOOTSTRAPPING: {PrefillState.BOOTSTRAPPED, PrefillState.FAILED},
        PrefillState.BOOTSTRAPPED: {PrefillState.COMPUTING, PrefillState.FAILED},
        PrefillState.COMPUTING: {PrefillState.SENDING, PrefillState.FAILED},
        PrefillState.SENDING: {PrefillState.SENT, PrefillState.FAILED},
        PrefillState.SENT: set(),
        PrefillState.FAILED: set(),
    }
    TIMES = ("promised_s", "started_s", "computed_s", "ended_s")

    def __init__(self, request: Request, pages: PageManager, now_s: float) -> None:
        super().__init__(request, pages, PrefillState.BOOTSTRAPPING, now_s)
        self.key = request.key
        self.num_tokens = len(request.key)
        self.max_pages = pages_for(self.num_tokens, pages.page_size)
        self.decode_prefix_len = 0
        self.plan: SendPlan | None = None
        # Its pages are released when all three are true: it has ended, `source_free`, `popped`.
        self.source_free = False  # no write reads its pages, and its state, any more
        self.state_slot = -1  # slot of extra state that the engine handed over
        self.popped = False  # the engine has seen its end
        # The error with which the engine has failed or aborted it: nothing more of it is cached.
        self.given_up: Exception | None = None
        # Its journal: when each of these happened, and what was sent.
        self.promised_s: float | None = None
        self.started_s: float | None = None
        self.computed_s: float | None = None
        self.peer = ""  # the decode worker
        self.num_chunks = self.sent_pages = 0

    @property
    def room_key(self) -> RoomKey:
        """With the decode worker's name."""
        return RoomKey(self.room, self.generation, self.request.decode)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt, int32, the caller's."""
        return self.key.tokens()

    def __repr__(self) -> str:
        return f"PrefillRequest({self.rid!r}, {self.state.value}, {self.num_tokens} tokens)"


# --- where a request goes on ---------------------------------------------------------------------


class Resume:
    """A request goes on at the end of what is cached. A scheduler has one; a part that keeps more
    of requests than pages takes its place.

    `follows`: whether a request may wait for a prefix that another request computes. `is_whole`:
    whether all that is cached is of use, for routers. A request goes on at a multiple of
    `step_pages`. `savers`: what saves more of requests than pages, and hears of each (see
    `RequestCheckpoints`).
    """

    follows, is_whole, step_pages = True, True, 1
    savers: Sequence[Any] = ()

    def find(self, req: PrefillRequest, match: MatchResult) -> tuple[int, Any]:
        """Return how many tokens of a match are of use, and what is there to go on from, which may
        have pages in the window groups (`windows`)."""
        return match.prefix_len, None

    def take(self, req: PrefillRequest, end: int) -> int:
        """Return a slot for the state behind `end` tokens, -1 if none is free."""
        raise RequestError(f"request {req.rid!r} is {req.state.value}, it saves no state")

    def check_invariants(self, requests: Sequence[PrefillRequest]) -> None:
        """Raise InternalError if a law is broken."""


class EnginePrefix(Resume):
    """A request goes on where the engine says (`PrefillConfig.usable_prefix`); None: it begins
    anew, since what it needs besides pages is not kept."""

    follows = False

    def __init__(self, usable_prefix: UsablePrefix | None, errors: UserErrors) -> None:
        self._usable_prefix = usable_prefix or (lambda req, num_tokens: 0)
        self._errors, self.is_whole = errors, usable_prefix is not None

    def find(self, req: PrefillRequest, match: MatchResult) -> tuple[int, Any]:
        # The engine's code: what it raises is reported by the scheduler, and the request is
        # computed whole.
        try:
            return max(0, operator.index(self._usable_prefix(req, match.prefix_len))), None
        except Exception as error:
            self._errors.caught(error)
            return 0, None


# --- its journal ----------------------------------------------------------------------------------

REASONS = ("decode", "pages", "compute", "send")
"""Reasons of a wait: decode's promise, pages of its own, the engine, and the writes with their
acknowledgement."""


class PrefillJournal(Journal):
    """The steps that the module lists."""

    def __init__(self) -> None:
        super().__init__(REASONS)

    def promised(self, req: PrefillRequest, peer: str, now_s: float) -> None:
        """Decode (`peer`) has named the pages."""
        req.peer = peer
        req.promised_s = now_s
        self.waited("decode", req.arrived_s, now_s)

    def started(self, req: PrefillRequest, now_s: float) -> None:
        """The engine may compute a request."""
        self.counters["prompt_tokens"] += req.num_tokens
        self.counters["hit_tokens"] += req.prefix_len
        self.counters["decode_hit_tokens"] += req.decode_prefix_len
        req.started_s = now_s
        self.waited("pages", req.promised_s, now_s)
        self.found(req.key.namespace, req.num_tokens, req.prefix_len)

    def chunk(self, req: PrefillRequest, pages: int, last: bool, now_s: float) -> None:
        req.num_chunks += 1
        req.sent_pages += pages
        if last:
            req.computed_s = now_s
            self.waited("compute", req.started_s, now_s)

    def ended(self, req: PrefillRequest, now_s: float) -> None:
        if req.state is PrefillState.SENT:
            self.waited("send", req.computed_s, now_s)
        if req.peer:
            is_sent = req.state is PrefillState.SENT
            self.transfer_ended(req.peer, "success" if is_sent else outcome(req))
        super().ended(req, now_s)


def outcome(req: PrefillRequest) -> str:
    """Return how a request ended, as a label of metrics."""
    if req.state is PrefillState.FAILED and isinstance(req.error, AbortedError):
        return "aborted"
    return req.state.value


def timeline(req: PrefillRequest, page_bytes: int, page_size: int) -> dict[str, Any]:
    """Return the history of a request for the log, with fields of this side alone:

    - `decode_hit_tokens`: Tokens that decode had already.
    - `chunks`: Chunks that the engine handed over.
    - `sent_bytes`: KV that was sent.
    - `promised_s`: Decode has named its pages. The wait before it is for decode.
    - `started_s`: The engine may compute it. The wait before it is for pages, or for a prefix
      that another request computes.
    - `computed_s`: The last chunk was handed over.
    """
    return req.timeline(
        "prefill",
        outcome(req),
        req.peer,
        prompt_tokens=req.num_tokens,
        hit_tokens=req.prefix_len,
        decode_hit_tokens=req.decode_prefix_len,
        chunks=req.num_chunks,
        sent_bytes=req.sent_pages * page_bytes,
        skipped_bytes=req.decode_prefix_len // page_size * page_bytes,
    )
