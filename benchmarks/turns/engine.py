"""A stand-in for the two halves of an inference engine: real bytes, real scheduling, no model.

Prefill "computes" a chunk by writing its KV pattern; decode "samples" a token from the hash of
everything before it, so that equal prompts get equal answers with the cache on, off, after a
retraction or on another day. Both are what an engine's scheduler loop looks like around a node;
each belongs to one thread.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.turns.report import Measured
from benchmarks.turns.workload import Call, Clients
from prefixkv.cli.demo.workload import Tokens
from prefixkv.conformance.hashing import Hashes, PrefixHasher, extend, sample
from prefixkv.conformance.pattern import KVPattern
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import OutOfPagesError
from prefixkv.paging import pages_for
from prefixkv.request import Request

if TYPE_CHECKING:
    from prefixkv import PrefillRequest
    from prefixkv.spi import DecodeGroup, PrefillGroup

_IDLE_S: Final = 1.0  # the longest wait for something to happen
_WARM_UP: Final = "warm-up"
_WARM_UP_ROOM: Final = 2**64 - 1
_HELD_S: Final = 0.01
# Of a request, until its KV is there. A trace that asks for more than is served queues for long.
_DEADLINE_S: Final = 900.0
_STALLED_S: Final = 100.0  # without any event while calls are open: an error, instead of for ever


END_OF_PASS: Final = None  # to prefill, in the place of a request


# --- prefill ------------------------------------------------------------------------------------


class PrefillEngine:
    """Computes the prompts that come through a pipe, in order of arrival and chunk by chunk, by
    writing the pattern, until the end of the pass is announced. The last chunk carries the first
    token, the `sample` of the prompt's hash. `patterns` are of each rank's pool."""

    def __init__(
        self,
        node: PrefillGroup,
        patterns: Sequence[KVPattern],
        asks: Connection,
        *,
        chunk_tokens: int,
    ) -> None:
        self.node, self._patterns, self._asks = node, patterns, asks
        self._chunk_tokens = chunk_tokens
        self._hasher = PrefixHasher()
        self.open: dict[str, Hashes] = {}  # by rid: hashes of a prompt that is not sent yet
        self._computed: dict[str, int] = {}  # by rid: tokens computed or cached
        self._ready: deque[PrefillRequest] = deque()
        self.prompt_tokens = 0  # counts first attempts at cacheable prompts only
        self.hit_tokens = 0
        self._warm_up_bytes = 0

    @property
    def bytes_sent(self) -> int:
        """KV bytes of writes that ended, without the warm-up's."""
        return self.node.stats()["bytes_sent"] - self._warm_up_bytes

    def run(self) -> None:
        """Until the end of the pass is announced and nothing is left to send."""
        going = True
        while going or self.open:
            while self._asks.poll():
                request = self._asks.recv()
                if request is END_OF_PASS:
                    going = False
                else:
                    self.open[request.rid] = self._hasher.prefixes(request.key.tokens())
                    self.node.add(request)
            if not self.step() and (going or self.open):
                wait([self._asks, self.node.fileno()], _IDLE_S)

    def step(self) -> bool:
        """Compute one chunk at most. Returns False if there is none."""
        # Ended requests are taken out before a chunk is computed: none is computed for one that
        # failed.
        for req in self.node.pop_bootstrapped():
            self._begin(req)
        for req in (*self.node.pop_sent(), *self.node.pop_failed()):
            del self.open[req.rid]
            self._computed.pop(req.rid, None)
            if req.rid == _WARM_UP:
                self._warm_up_bytes = self.node.stats()["bytes_sent"]
        if self._ready:
            self._compute_chunk(self._ready[0])
            return True
        return False

    def _begin(self, req: PrefillRequest) -> None:
        known = req.prefix_len
        if req.request.generation == 0 and req.request.cacheable:
            self.prompt_tokens += len(self.open[req.rid])
            self.hit_tokens += known
        self._computed[req.rid] = known
        self._ready.append(req)

    def _compute_chunk(self, req: PrefillRequest) -> None:
        if req.rid not in self.open:  # failed meanwhile
            self._ready.popleft()
            return
        hashes, start = self.open[req.rid], self._computed[req.rid]
        end = min(start + self._chunk_tokens, len(hashes))
        for pattern in self._patterns:  # page ids are the same on all ranks
            pattern.fill(req.pages, start, hashes[:end])
        self._computed[req.rid] = end
        last = end == len(hashes)
        if last:
            self._ready.popleft()
        # The token travels with the last chunk alone: only then is the prompt's hash complete.
        aux = sample(hashes[-1:]).tobytes() if last else b""
        self.node.send_chunk(req, end=end, last=last, aux=aux)


# --- decode -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Open:
    """One open call on decode. From its first token on `req` is its request, and `hash` the prefix
    hash of all tokens whose KV is written.
    """

    call: Call
    req: DecodeRequest = field(init=False)
    hash: np.uint64 = field(init=False)
    last_s: float | None = None  # when the newest token came


@dataclass(eq=False, kw_only=True)
class DecodeEngine:
    """Sends the clients' calls, runs what is ready in steps, and measures.

    A step writes the KV of every running request's newest token, then samples the next. Steps are
    at least `step_s` apart, which stands for the model's own time. `patterns` are of each rank's
    pool, `prefill` is where it is.
    """

    node: DecodeGroup
    patterns: Sequence[KVPattern]
    clients: Clients
    asks: Connection
    prefill: str
    step_s: float
    verify: bool

    def __post_init__(self) -> None:
        self._page_size = self.patterns[0].page_size
        self._hasher = PrefixHasher()
        self._open: dict[str, _Open] = {}
        self._running: dict[str, _Open] = {}
        self._start_s = time.perf_counter()
        self.measured = Measured()

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def warm_up(self) -> None:
        """One request that is neither cached nor counted, so that the pass does not time the two
        nodes' wire-up.

        Raises RuntimeError if it fails.
        """
        node = self.node
        tokens = np.zeros(1, dtype=np.int32)
        req = self._add(_WARM_UP, _WARM_UP_ROOM, tokens, 1, cacheable=False)
        while node.pop_preallocated() or not node.pop_transferred():
            if node.pop_failed():
                raise RuntimeError("the warm-up failed") from req.error
            node.wait(_IDLE_S)
        node.append_many([req], [0])
        node.finish(req)

    def _add(
        self, rid: str, room: int, tokens: Tokens, output_len: int, cacheable: bool = True
    ) -> DecodeRequest:
        """A request to both sides."""
        request = Request(
            rid, tokens, output_len, room=room, prefill=self.prefill, decode=self.node.peer_id.name,
            cacheable=cacheable, deadline_s=_DEADLINE_S,
        )  # fmt: skip
        self.asks.send(request)
        return self.node.add(request)

    def run(self) -> Measured:
        """The whole pass. Raises RuntimeError if nothing happens for long while calls are open."""
        clients, node = self.clients, self.node
        self._start_s = time.perf_counter()
        next_step_s = 0.0
        event_s = 0.0
        while not clients.done:
            now_s = self._now_s()
            happened = self._send(clients.take(now_s)) + self._poll()
            now_s = self._now_s()
            if self._running and now_s >= next_step_s:
                self._step()
                next_step_s = now_s + self.step_s
                happened += 1
            if happened:
                event_s = now_s
                continue
            if self._open and now_s - event_s > _STALLED_S:
                raise RuntimeError(
                    f"nothing has happened for {_STALLED_S:.0f} s: {len(self._open)} calls are open"
                )
            until_s = now_s + _IDLE_S
            if self._running:
                until_s = min(until_s, next_step_s)
            arrival_s = clients.next_arrival_s()
            if arrival_s is not None:
                until_s = min(until_s, arrival_s)
            # Not `node.wait`, which counts in milliseconds: that would be half of a full hit's
            # TTFT.
            select.select([node], [], [], max(0.0, until_s - now_s))
        self.measured.duration_s = self._now_s()
        self.measured.requests = clients.ended
        self.measured.failed = clients.failed
        return self.measured

    def _send(self, calls: list[Call]) -> int:
        for call in calls:
            rid = str(call.room)
            self._open[rid] = _Open(call)
            self._add(rid, call.room, call.tokens, call.output_len)
        return len(calls)

    def _poll(self) -> int:
        """Everything the node has for its scheduler; returns how much it was."""
        node = self.node
        happened = len(node.pop_preallocated())
        for ask in node.pop_needs_prefill():
            happened += 1
            tokens = np.asarray(ask.tokens, dtype=np.int32)
            rid = f"{ask.rid}.{ask.generation}"
            self.asks.send(
                Request(
                    rid,
                    tokens,
                    room=ask.room,
                    generation=ask.generation,
                    decode=ask.decode,
                    deadline_s=_DEADLINE_S,
                )
            )
        for req in node.pop_failed():
            happened += 1
            self._running.pop(req.rid, None)
            self.clients.fail(self._open.pop(req.rid).call)
        arrived = node.pop_transferred()
        self._begin(arrived)
        return happened + len(arrived)

    def _begin(self, arrived: list[DecodeRequest]) -> None:
        """The KV of these is there, all but the newest token's: let them run, with their first
        token."""
        arrived_s = self._now_s()
        fresh = []
        for req in arrived:
            state = self._open[req.rid]
            state.req = req
            if state.last_s is None:
                self.measured.ttft_s.append(arrived_s - state.call.arrival_s)
                self.measured.admitted(state.call.turn, len(state.call.tokens), req.prefix_len)
                state.last_s = arrived_s
            output = np.array(req.output[:-1], dtype=np.int32)
            hashes = self._hasher.prefixes(np.concatenate([state.call.tokens, output]))
            state.hash = hashes[-1]
            if self.verify:
                own = list(zip(self.patterns, self.node.pages_of(req), strict=True))
                self.measured.pages_verified += pages_for(len(hashes), self._page_size) * len(own)
                self.measured.pages_mismatched += sum(
                    pattern.mismatches(pages, hashes) for pattern, pages in own
                )
            self._running[req.rid] = state
            if not req.output:  # else it is back from a retraction, and has its newest token
                fresh.append((state, self._first_token(req, hashes)))
        # All of them run before the first is appended to: any may be named for retraction.
        if fresh:
            self._emit([state for state, _ in fresh], [token for _, token in fresh], first=True)

    def _first_token(self, req: DecodeRequest, hashes: Hashes) -> int:
        """What prefill sampled; it must be what decode would have."""
        expected = int(sample(hashes[-1:])[0])
        if req.aux != sample(hashes[-1:]).tobytes():
            self.measured.pages_mismatched += 1  # another request's payload, or none
        return expected

    def _step(self) -> None:
        states = list(self._running.values())
        requests = [state.req for state in states]
        lengths = np.array([len(s.call.tokens) for s in states])
        outputs = np.array([len(req.output) for req in requests])
        newest = np.array([req.output[-1] for req in requests], dtype=np.int32)
        page_at, slots = np.divmod(lengths + outputs - 1, self._page_size)
        pages = np.array(
            [req.pages[i] for req, i in zip(requests, page_at, strict=True)], dtype=np.int32
        )
        hashes = extend(np.array([state.hash for state in states], dtype=np.uint64), newest)
        for pattern in self.patterns:  # page ids are the same on all ranks
            pattern.fill_tokens(pages, slots, hashes)
        tokens = sample(hashes).tolist()
        for state, value in zip(states, hashes, strict=True):
            state.hash = value
        self._emit(states, tokens)

    def _emit(self, states: list[_Open], tokens: list[int], first: bool = False) -> None:
        """Append the sampled tokens; retract requests until all the others fit; finish those that
        are complete.

        A retracted request loses the token sampled in this step: no client has seen it, and it
        will be the same.
        """
        kept = list(zip(states, tokens, strict=True))
        give_up_s = time.monotonic() + _STALLED_S
        while kept:
            try:
                self.node.append_many(
                    [state.req for state, _ in kept], [token for _, token in kept]
                )
                break
            except OutOfPagesError as error:
                if not error.retract:
                    if time.monotonic() >= give_up_s:
                        raise
                    # Pages of a room that failed are in the way: their proof will come.
                    self.node.wait(_HELD_S)
                    continue
                victim = error.retract[0]
                self.node.retract(victim)
                self._running.pop(victim)
                self.measured.retractions += 1
                kept = [(state, token) for state, token in kept if state.req.rid != victim]
        now_s = self._now_s()
        for state, _ in kept:
            if not first and state.last_s is not None:
                self.measured.itl_s.append(now_s - state.last_s)
            state.last_s = now_s
            if len(state.req.output) >= state.call.output_len:
                self._finish(state, now_s)

    def _finish(self, state: _Open, now_s: float) -> None:
        rid = state.req.rid
        continues = self.clients.answer(state.call, state.req.output, now_s)
        self.node.finish(state.req, continues=continues)
        del self._running[rid], self._open[rid]
