"""A stand-in for the two halves of an inference engine: real bytes, real scheduling, no model.

Prefill "computes" a chunk by writing its KV pattern; decode "samples" a token from the hash of
everything before it, so that equal prompts get equal answers with the cache on, off, after a
retraction or on another day. Both are what an engine's scheduler loop looks like around a node;
each belongs to one thread.
"""

from __future__ import annotations

import select
import struct
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from prefixkv.cli.rank_kv import DecodeKV, PrefillKV
from prefixkv.cli.report import Measured
from prefixkv.cli.workload import VOCABULARY, Call, Clients, Tokens
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import OutOfPagesError
from prefixkv.paging import pages_for
from prefixkv.request import Request
from prefixkv.testing.hashing import PrefixHasher, Words, extend, splitmix64

if TYPE_CHECKING:
    from prefixkv.prefill.request import PrefillRequest
    from prefixkv.runtime.groups import PrefillGroup
    from prefixkv.runtime.nodes import DecodeNode, PrefillNode

_AUX: Final = struct.Struct("<i")  # the first token
_IDLE_S: Final = 1.0  # the longest wait for something to happen
_WARM_UP_ROOM: Final = 2**64 - 1
_HELD_S: Final = 0.01
_STALLED_S: Final = (
    100.0  # without any event while calls are open: report it instead of waiting for ever
)


class Ask(NamedTuple):
    """What the router hands to prefill: compute these tokens for decode's room.

    `sampled`: the token after them is known. `warm_up`: neither cached nor counted.
    """

    room: int
    generation: int
    tokens: Tokens
    sampled: bool = False
    warm_up: bool = False


END_OF_PASS: Final = None  # in the place of an Ask


def sample(hashes: Words) -> Tokens:
    """The token that follows each prefix; int32 in [0, VOCABULARY)."""
    return (splitmix64(~hashes) % np.uint64(VOCABULARY)).astype(np.int32)


# --- prefill ------------------------------------------------------------------------------------


class _Prompt:
    """A prompt on prefill: its hashes, and how far it is computed once its pages are there."""

    def __init__(self, ask: Ask, hashes: Words) -> None:
        self.ask = ask
        self.hashes = hashes
        self.computed = 0


class PrefillEngine:
    """Computes prompts first come, first served, chunk by chunk, and sends each chunk as it is
    done."""

    def __init__(
        self,
        node: PrefillNode | PrefillGroup,
        kv: PrefillKV,
        asks: Connection,
        *,
        chunk_tokens: int,
        seconds_per_token: float = 0.0,
    ) -> None:
        self._node = node
        self._kv = kv
        self._asks = asks
        self._chunk_tokens = chunk_tokens
        self._seconds_per_token = seconds_per_token
        self._hasher = PrefixHasher()
        self._prompts: dict[str, _Prompt] = {}
        self._ready: deque[PrefillRequest] = deque()
        self._ended = False
        self._warm_up_bytes = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0

    @property
    def bytes_sent(self) -> int:
        """KV bytes of writes that ended, without the warm-up's."""
        return self._node.stats()["bytes_sent"] - self._warm_up_bytes

    def run(self) -> None:
        """Until the end of the pass is announced and nothing is left to send."""
        node = self._node
        while not self._ended or self._prompts:
            while self._asks.poll():
                self._take(self._asks.recv())
            for req in node.pop_bootstrapped():
                self._begin(req)
            for req in node.pop_sent():
                if self._prompts.pop(req.rid).ask.warm_up:
                    self._warm_up_bytes = node.stats()["bytes_sent"]
            for req in node.pop_failed():
                del self._prompts[req.rid]
            if self._ready:
                self._compute_chunk(self._ready[0])
            elif not self._ended or self._prompts:
                wait([self._asks, node.fileno()], _IDLE_S)

    def _take(self, ask: Ask | None) -> None:
        if ask is None:  # END_OF_PASS
            self._ended = True
            return
        rid = f"{ask.room}.{ask.generation}"
        self._prompts[rid] = _Prompt(ask, self._hasher.prefixes(ask.tokens))
        request = Request(
            rid, ask.tokens, room=ask.room, generation=ask.generation, cacheable=not ask.warm_up
        )
        self._node.add(request)

    def _begin(self, req: PrefillRequest) -> None:
        prompt = self._prompts[req.rid]
        prompt.computed = self._kv.computed(req)
        if prompt.ask.generation == 0 and not prompt.ask.warm_up:
            self.prompt_tokens += len(prompt.hashes)
            self.hit_tokens += prompt.computed
        self._ready.append(req)

    def _compute_chunk(self, req: PrefillRequest) -> None:
        prompt = self._prompts.get(req.rid)
        if prompt is None:  # failed meanwhile
            self._ready.popleft()
            return
        began_s = time.perf_counter()
        total = len(prompt.hashes)
        end = min(prompt.computed + self._chunk_tokens, total)
        self._kv.fill(req, prompt.computed, prompt.hashes[:end])
        if self._seconds_per_token:
            busy_s = self._seconds_per_token * (end - prompt.computed)
            time.sleep(max(0.0, busy_s - (time.perf_counter() - began_s)))
        prompt.computed = end
        last = end == total
        aux = b""
        if last:
            self._ready.popleft()
            if not prompt.ask.sampled:
                aux = _AUX.pack(int(sample(prompt.hashes[-1:])[0]))
        self._node.send_chunk(req, end=end, last=last, aux=aux)


# --- decode -------------------------------------------------------------------------------------


class _Open:
    """One open call on decode. From its first token on `req` is its request, and `hash` the prefix
    hash of all tokens whose KV is written.
    """

    __slots__ = ("call", "hash", "last_s", "req")
    req: DecodeRequest
    hash: np.uint64

    def __init__(self, call: Call) -> None:
        self.call = call
        self.last_s: float | None = None  # when the newest token came


class DecodeEngine:
    """Sends the clients' calls, runs what is ready in steps, and measures.

    A step writes the KV of every running request's newest token, then samples the next. Steps are
    at least `step_s` apart, which stands for the model's own time.
    """

    def __init__(
        self,
        node: DecodeNode,
        kv: DecodeKV,
        clients: Clients,
        asks: Connection,
        *,
        prefill: str,
        page_size: int,
        step_s: float,
        verify: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._node = node
        self._kv = kv
        self._clients = clients
        self._asks = asks
        self._prefill = prefill
        self._page_size = page_size
        self._step_s = step_s
        self._verify = verify
        self._progress = progress
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
        node = self._node
        tokens = np.zeros(1, dtype=np.int32)
        self._asks.send(Ask(_WARM_UP_ROOM, 0, tokens, warm_up=True))
        req = node.add(
            Request(
                "warm-up",
                tokens,
                max_new_tokens=1,
                room=_WARM_UP_ROOM,
                prefill=self._prefill,
                cacheable=False,
            )
        )
        node.pop_preallocated()
        while not node.pop_transferred():
            if node.pop_failed():
                raise RuntimeError("the warm-up failed") from req.error
            node.wait(_IDLE_S)
        node.append_many([req], [0])
        node.finish(req)

    def run(self) -> Measured:
        """The whole pass. Raises RuntimeError if nothing happens for long while calls are open."""
        clients, node = self._clients, self._node
        self._start_s = time.perf_counter()
        next_step_s = 0.0
        event_s = 0.0
        while not clients.done:
            now_s = self._now_s()
            happened = self._send(clients.take(now_s)) + self._poll()
            now_s = self._now_s()
            if self._running and now_s >= next_step_s:
                self._step()
                next_step_s = now_s + self._step_s
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
        self.measured.requests = clients.finished + clients.failed
        self.measured.failed = clients.failed
        return self.measured

    def _send(self, calls: list[Call]) -> int:
        for call in calls:
            rid = str(call.room)
            self._open[rid] = _Open(call)
            self._asks.send(Ask(call.room, 0, call.tokens))
            self._node.add(
                Request(
                    rid,
                    call.tokens,
                    max_new_tokens=call.output_len,
                    room=call.room,
                    prefill=self._prefill,
                )
            )
        return len(calls)

    def _poll(self) -> int:
        """Everything the node has for its scheduler; returns how much it was."""
        node = self._node
        happened = len(node.pop_preallocated())
        for ask in node.pop_needs_prefill():
            happened += 1
            tokens = np.asarray(ask.tokens, dtype=np.int32)
            self._asks.send(
                Ask(ask.room, ask.generation, tokens, sampled=ask.known_token is not None)
            )
        for req in node.pop_failed():
            happened += 1
            self._running.pop(req.rid, None)
            self._clients.fail(self._open.pop(req.rid).call)
            self._progress(self._clients.finished + self._clients.failed)
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
                self.measured.prompt_tokens += len(state.call.tokens)
                self.measured.hit_tokens += req.prefix_len
                state.last_s = arrived_s
            hashes = self._hasher.prefixes(
                np.concatenate([state.call.tokens, np.array(req.output[:-1], dtype=np.int32)])
            )
            state.hash = hashes[-1]
            if self._verify:
                self.measured.pages_verified += (
                    pages_for(len(hashes), self._page_size) * self._kv.num_ranks
                )
                self.measured.pages_mismatched += self._kv.mismatches(req, hashes)
            self._running[req.rid] = state
            if (
                not req.output
            ):  # else it is back from a retraction, and its newest token was sent before
                fresh.append((state, self._first_token(req, hashes)))
        # All of them run before the first is appended to: any may be named for retraction.
        if fresh:
            self._emit([state for state, _ in fresh], [token for _, token in fresh], first=True)

    def _first_token(self, req: DecodeRequest, hashes: Words) -> int:
        """What prefill sampled; it must be what decode would have."""
        expected = int(sample(hashes[-1:])[0])
        if req.aux != _AUX.pack(expected):
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
        self._kv.fill_tokens(pages, slots, hashes)
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
                self._node.append_many(
                    [state.req for state, _ in kept], [token for _, token in kept]
                )
                break
            except OutOfPagesError as error:
                if not error.retract and time.monotonic() < give_up_s:
                    self._node.wait(
                        _HELD_S
                    )  # pages of a room that failed are in the way: their proof will come
                    continue
                if not error.retract:
                    raise
                victim = error.retract[0]
                self._node.retract(victim)
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
        continues = self._clients.answer(state.call, state.req.output, now_s)
        self._node.finish(state.req, continues=continues)
        del self._running[rid], self._open[rid]
        self._progress(self._clients.finished + self._clients.failed)
