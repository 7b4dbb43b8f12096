"""A request on the decode side: its states, its tokens, its pages, and the journal of its times."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixkv.cache.radix_key import RadixKey
from prefixkv.pages.manager import PageManager
from prefixkv.pages.requests import PagedRequest
from prefixkv.paging import pages_for
from prefixkv.request import DeviceEvent, Request
from prefixkv.stats import Journal


class DecodeState(enum.Enum):
    """The state of a request. The last three are terminal."""

    QUEUED = "queued"
    PREALLOCATED = "preallocated"
    TRANSFERRED = "transferred"
    RUNNING = "running"
    RETRACTED = "retracted"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"

    __hash__ = object.__hash__  # equal is identical here; Enum's own hashes the name, in Python

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({DecodeState.FINISHED, DecodeState.FAILED, DecodeState.ABORTED})
CUT_SHORT = frozenset({DecodeState.FAILED, DecodeState.ABORTED})
_STOPPED = {DecodeState.FINISHED, DecodeState.RETRACTED, *CUT_SHORT}
CAN_RUN = frozenset({DecodeState.TRANSFERRED, DecodeState.RUNNING})
ACTIVE = CAN_RUN | {DecodeState.PREALLOCATED}


class DecodeRequest(PagedRequest[DecodeState]):
    """One request on a decode worker. Made by `add`; the engine reads its fields, and changes none.

    `rid`, `request` (as added), `state`, `error` (why it ended early), `prompt_len`,
    `max_new_tokens`; `output`, a list of the answer's tokens so far; `kv_len`, tokens with KV, the
    first `prefix_len` of them found here; `aux`, prefill's bytes; `resumed`: it ran before.

    Up to `output_limit` tokens its pages suffice. It is 0 while the request does not run, so that
    `append_many` looks, and refuses it. `prefill` is the worker that it goes to, until `retarget`
    names another. With checkpoints, a request of `pop_local` goes on from the state in
    `checkpoint_slot` (-1 where `prefix_len` is 0) and saves states at `stops` (tokens, ascending).
    Where prefill has sent all but the end, the slot is `state_slot`, and the first stop is
    `prefix_len`.
    """

    __slots__ = (
        "_key", "admitted_s", "asks", "aux", "brought", "committed_s",
        "first_token_s", "hit_tokens", "max_new_tokens",
        "may_load", "most_kv_len", "new_pages", "output", "output_limit", "prefill", "prompt_len",
        "retractions", "retries", "shared_tokens", "transferred_s", "unwritten",
    )  # fmt: skip

    TRANSITIONS = {
        DecodeState.QUEUED: {DecodeState.PREALLOCATED, DecodeState.RETRACTED, *CUT_SHORT},
        DecodeState.PREALLOCATED: {DecodeState.TRANSFERRED, DecodeState.RETRACTED, *CUT_SHORT},
        DecodeState.TRANSFERRED: {DecodeState.RUNNING, *_STOPPED},
        DecodeState.RUNNING: _STOPPED,
        DecodeState.RETRACTED: {DecodeState.PREALLOCATED, *CUT_SHORT},
        **{state: set() for state in _ENDED},
    }
    TIMES = ("admitted_s", "transferred_s", "committed_s", "first_token_s", "ended_s")

    def __init__(self, request: Request, pages: PageManager, now_s: float) -> None:
        super().__init__(request, pages, DecodeState.QUEUED, now_s)
        # Tokens with KV. `_key` lags behind `output` until `key` is read; see there.
        self._key = RadixKey(request.key)
        self.prefill = request.prefill
        # The worker in whose line it waits, and that its next admission may ask; "": none.
        self.asks = request.prefill
        self.may_load = True  # from host memory; False once such a copy has failed
        self.max_new_tokens = request.max_new_tokens
        self.prompt_len = self.fill_len  # tokens
        # The largest `kv_len` that may be reached: the last token never gets KV.
        self.most_kv_len = self.prompt_len + self.max_new_tokens - 1
        self.max_pages = pages_for(self.most_kv_len, pages.page_size)
        self.output: list[int] = []
        self.output_limit = 0
        self.aux = b""
        # Until it is done, the device may write what the engine has computed of it here.
        self.unwritten: DeviceEvent | None = None
        self.retries = self.retractions = 0
        # Its journal: when each of these happened first; where the prompt's KV came
        # from, as of the last admission before the first token; and what was asked for, in sum.
        self.admitted_s: float | None = None
        self.transferred_s: float | None = None
        self.committed_s: float | None = None
        self.first_token_s: float | None = None
        self.hit_tokens = self.shared_tokens = self.new_pages = 0
        self.brought: dict[str, int] = {}  # tokens, by source; of prefill `new_pages`

    def become(self, state: DecodeState) -> None:
        """Raises InternalError if the table does not allow it."""
        super().become(state)
        # No state inherits the limit: the pages behind it may be gone. `append_many` sets it again.
        self.output_limit = 0

    @property
    def kv_len(self) -> int:
        """Tokens with KV that is written, or promised by the transfer under way: the prompt and all
        output but the last token, which has no KV until the engine's next step writes it."""
        return self.prompt_len + max(0, len(self.output) - 1)

    @property
    def key(self) -> RadixKey:
        """Tokens with KV that is written, or promised. O(output since the last call)."""
        key, output = self._key, self.output
        if len(output) > 1 and (missing := self.kv_len - len(key)) > 0:
            # All at once, here: so a step of the batch costs a request no more than its token.
            key.extend_checked(output[-1 - missing : -1])  # `append_many` checked them
        return key

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and output so far, int32, the caller's."""
        return np.concatenate([self.request.key.tokens(), np.array(self.output, dtype=np.int32)])

    @property
    def most_output(self) -> int:
        """Length that `output` may reach with the pages there are, at most `max_new_tokens`; the
        last token of all needs no page, since no step writes its KV."""
        assert self.pages_held is not None
        space = self.pages_held.num_pages * self.page_manager.page_size - self.prompt_len
        return self.max_new_tokens if space >= self.max_new_tokens - 1 else space

    @property
    def state_slot(self) -> int:
        """Slot of the StatePool, the same on all ranks; -1 without one, or before admission.

        Its state is there from `pop_transferred` on, and is the engine's to advance until the
        request ends or is retracted; a retracted one's state is sent again, or computed here from a
        checkpoint.
        """
        return -1 if self.row < 0 else self.page_manager.state_slot(self.row)

    @property
    def resumed(self) -> bool:
        """True if it ran before: its next token is known, the engine samples none from `aux`."""
        return bool(self.output)

    def __repr__(self) -> str:
        lengths = f"kv_len={self.kv_len}, {len(self.output)} out"
        return f"DecodeRequest({self.rid!r}, {self.state.value}, {lengths})"


class PrefillAsk:
    """A prompt that the engine should submit to a prefill worker again: KV that decode had, or
    should have had, is lost, or the request's extra state is.

    `tokens` are prompt and output but the last token; less the last ones where decode computes
    these itself. `known_token` is the next token if there is one already (it must not be sampled
    again). `namespace` and `cacheable` are the request's: prefill must not share its cache with
    another namespace. `decode` is this worker's name, `prefill` the address to submit it to.
    """

    def __init__(self, req: DecodeRequest, decode: str, end: int) -> None:
        self.rid = req.rid
        self.decode = decode
        tokens = req.key.tokens()
        self.tokens: Any = tokens[:end]
        self.namespace = req.key.namespace
        self.cacheable = req.request.cacheable
        self.room = req.room
        self.generation = req.generation
        self.known_token: int | None = req.output[-1] if req.output else None
        if end < len(tokens):
            self.known_token = int(tokens[end])
        self.prefill = req.prefill


REASONS = ("pages", "transfer", "compute", "flight", "load", "engine", "first_token")
"""Reasons of a wait; `first_token` is the sum of all."""


class DecodeJournal(Journal):
    """Times and counts, written down by the scheduler as it goes; no entry is made per token.

        arrived -- pages --> admitted -- transfer, or compute --> transferred
        transferred -- flight, or load --> committed -- engine --> first token

    A request keeps the first time of each. The wait between two is named by its reason. A request
    that joined no flight has no "flight".

    `counters` count every admission, also after a retraction; `tokens` counts each request once.
    """

    def __init__(self) -> None:
        super().__init__(REASONS)
        self.pages_received = 0

    def admitted(self, req: DecodeRequest, plan: Any, now_s: float) -> None:
        """A request's `Plan` is carried out: of the locked prefix, some tokens are on their way
        with another flight; sources bring the others."""
        look, first, last = plan.look, plan.segments[0], plan.segments[-1]
        page_size, counters = req.page_manager.page_size, self.counters
        num_joined = look.shared_pages - (0 if look.match is None else look.match.depth)
        shared_tokens = num_joined * page_size
        counters["admitted"] += 1
        counters["prompt_tokens"] += req.fill_len
        counters["skipped_tokens"] += req.prefix_len
        if shared_tokens:
            counters["shared_flights"] += 1
            counters["shared_tokens"] += shared_tokens
        if first.source.sends:
            req.new_pages += pages_for(first.end, page_size) - first.start // page_size
        # An attempt that has failed, or was retracted, has brought nothing of the prompt.
        if req.first_token_s is None:
            req.hit_tokens = req.prefix_len - shared_tokens
            req.shared_tokens = shared_tokens
            found = *look.loads, *(() if last.source.sends else (last,))
            req.brought = {one.source.name: one.end - one.start for one in found}
        # Counters above are of admissions; what follows is of requests, so a second admission adds
        # nothing.
        if req.admitted_s is not None:
            return
        req.admitted_s = now_s
        self.waited("pages", req.arrived_s, now_s)
        self.found(req.request.key.namespace, req.fill_len, req.hit_tokens, shared_tokens)

    def arrived(self, req: DecodeRequest, reason: str, now_s: float) -> None:
        """All that a request's own flight brings is there."""
        if req.transferred_s is None:
            req.transferred_s = now_s
            self.waited(reason, req.admitted_s, now_s)

    def committed(self, req: DecodeRequest, now_s: float) -> None:
        """A request's KV is whole in the tree."""
        if req.committed_s is not None:
            return
        req.committed_s = now_s
        is_loaded = "loaded" in req.brought
        if is_loaded or req.shared_tokens:
            self.waited("load" if is_loaded else "flight", req.transferred_s, now_s)

    def runs(self, req: DecodeRequest, now_s: float) -> None:
        """The engine has appended a request's first token. No-op after a retraction."""
        if req.first_token_s is None:
            req.first_token_s = now_s
            waits = "loaded" in req.brought or req.shared_tokens
            self.waited("engine", req.committed_s if waits else req.transferred_s, now_s)
            self.waited("first_token", req.arrived_s, now_s)


def timeline(req: DecodeRequest, page_bytes: int, page_size: int) -> dict[str, Any]:
    """Return the history of a request for the log, with fields of this side alone:

    - `host_tokens`: Hit tokens that were loaded from host memory.
    - `shared_tokens`: Tokens that were on their way with the flight of another request.
    - `decode_computed_tokens`: Tokens that decode's engine was to compute. This, `hit_tokens`,
      `host_tokens` and `shared_tokens` are of the last admission before the first token.
    - `output_tokens`: Tokens that were generated.
    - `asked_bytes`: KV that prefill was asked for.
    - `retractions`: How often its pages were taken back.
    - `retries`: How often prefill was asked again after a failure.
    - `admitted_s`: Its pages are taken and prefill is told. The wait before it is for pages.
    - `transferred_s`: Its own KV is here.
    - `committed_s`: All its KV is in the tree.
    - `first_token_s`: The engine appended a token.
    """
    found = {
        "prompt_tokens": req.prompt_len,
        "hit_tokens": req.hit_tokens,
        "host_tokens": req.brought.get("loaded", 0),
        "shared_tokens": req.shared_tokens,
        "decode_computed_tokens": req.brought.get("computed", 0),
        "output_tokens": len(req.output),
        "asked_bytes": req.new_pages * page_bytes,
        "skipped_bytes": (req.hit_tokens + req.shared_tokens) // page_size * page_bytes,
        "retractions": req.retractions,
        "retries": req.retries,
    }
    return req.timeline("decode", req.state.value, req.prefill, **found)
