"""A stand-in for the two halves of an inference engine: real bytes, real scheduling, no model.

Prefill "computes" a chunk by writing its KV pattern; decode "samples" a token from the hash of
everything before it, so that equal prompts get equal answers with the cache on, off, after a
retraction or on another day. Both are what an engine's scheduler loop looks like around a node;
each belongs to one thread. A benchmark derives from them, and overrides the calls that it has to
hear of. `patterns` are of each rank's pool: page ids are the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixkv.conformance.pattern import Hashes, KVPattern, PrefixHasher, extend, sample
from prefixkv.errors import OutOfPagesError
from prefixkv.request import Request


class Prefill:
    """Computes a chunk a step of each prompt that is `due`. The last chunk carries the first token,
    the `sample` of the prompt's hash."""

    def __init__(self, node: Any, patterns: Sequence[KVPattern], chunk_tokens: int) -> None:
        self.node, self.patterns, self.chunk_tokens = node, patterns, chunk_tokens
        self.hasher = PrefixHasher()
        self.open: dict[str, Hashes] = {}  # of the prompts that have not ended
        self.computing: dict[str, Any] = {}  # requests, in the order of their arrival
        self.computed: dict[str, int] = {}  # tokens of theirs that are computed or cached

    def add(self, request: Request) -> None:
        """Raises RequestError where the node does not take it."""
        self.node.add(request)
        self.open[request.rid] = self.hasher.prefixes(request.key.tokens())

    def step(self) -> bool:
        """Returns False if there is nothing to compute."""
        # Ended requests are taken out before a chunk is computed: none is for what has failed.
        for req in self.node.pop_bootstrapped():
            self.computing[req.rid], self.computed[req.rid] = req, req.prefix_len
            self.began(req)
        for req in (*self.node.pop_sent(), *self.node.pop_failed()):
            for table in (self.open, self.computing, self.computed):
                table.pop(req.rid, None)
            self.ended(req)
        for req in self.due():
            if req.error is None:  # else `pop_failed` is about to say so
                self.compute(req)
        return bool(self.due())

    def due(self) -> list[Any]:
        return list(self.computing.values())

    def compute(self, req: Any) -> None:
        """The next chunk."""
        hashes, start = self.open[req.rid], self.computed[req.rid]
        end = min(start + self.chunk_tokens, len(hashes))
        for pattern in self.patterns:
            pattern.fill(req.pages, start, hashes[:end])
        last = end == len(hashes)
        # The token travels with the last chunk alone: only then is the prompt's hash complete.
        aux = sample(hashes[-1:]).tobytes() if last else b""
        self.node.send_chunk(req, end, last, aux, self.ready(req))
        self.computed[req.rid] = end
        if last:
            del self.computing[req.rid]
        self.sent_chunk(req, start, end)

    def ready(self, req: Any) -> Any:
        """The device event that the next chunk waits for."""
        return None

    def began(self, req: Any) -> None: ...

    def sent_chunk(self, req: Any, start: int, end: int) -> None: ...

    def ended(self, req: Any) -> None: ...


@dataclass(slots=True, eq=False)
class Running:
    """`hash` is the prefix hash of all tokens whose KV is written."""

    req: Any
    hash: np.uint64


class Decode:
    """Runs what has arrived in steps at least `step_s` apart, which stands for the model's own
    time. A step writes the KV of every running request's newest token, then samples the next."""

    def __init__(self, node: Any, patterns: Sequence[KVPattern], step_s: float = 0.0) -> None:
        self.node, self.patterns, self.step_s = node, patterns, step_s
        self.page_size = patterns[0].page_size
        self.hasher = PrefixHasher()
        self.running: dict[str, Running] = {}
        self.step_due_s = 0.0  # on the monotonic clock

    def step(self) -> int:
        """Take all that the node has for its scheduler, and run; returns how much happened."""
        node = self.node
        admitted, asks = node.pop_preallocated(), node.pop_needs_prefill()
        for req in admitted:
            self.admitted(req)
        for ask in asks:
            self.ask(ask)
        arrived = node.pop_transferred()
        # All of them run before the first is appended to: any may be named for retraction.
        for req in arrived:
            hashes = self.hasher.prefixes(req.key.tokens())
            self.running[req.rid] = Running(req, hashes[-1])
            self.arrived(req, hashes)
        happened = len(admitted) + len(asks) + len(arrived) + self._drop_failed()
        # What is back from a retraction has its newest token.
        fresh = [state for state in self.running.values() if not state.req.output]
        if fresh:
            hashes = np.array([state.hash for state in fresh], dtype=np.uint64)
            happened += self._append(fresh, hashes) + self._drop_failed()
        if self.running and time.monotonic() >= self.step_due_s:
            self.step_due_s = time.monotonic() + self.step_s
            if states := [state for state in self.running.values() if state.req.output]:
                happened += self._run(states)
        return happened

    def _drop_failed(self) -> int:
        failed = self.node.pop_failed()
        for req in failed:
            self.running.pop(req.rid, None)
            self.failed(req)
        return len(failed)

    def _run(self, states: list[Running]) -> int:
        reqs = [state.req for state in states]
        at = np.array([req.prompt_len + len(req.output) - 1 for req in reqs], dtype=np.int64)
        page_at, slots = np.divmod(at, self.page_size)
        pages = [req.pages[i] for req, i in zip(reqs, page_at, strict=True)]
        newest = np.array([req.output[-1] for req in reqs], dtype=np.int32)
        hashes = extend(np.array([state.hash for state in states], dtype=np.uint64), newest)
        for pattern in self.patterns:
            pattern.fill_tokens(np.array(pages, dtype=np.int32), slots, hashes)
        return self._append(states, hashes)

    def _append(self, states: list[Running], hashes: Hashes) -> int:
        """Append what follows each hash, finish what is complete, and return how many went on.
        Requests are retracted until the others fit: they lose the token sampled here, which no
        client has seen, and which will be the same. Where that does not help, pages of rooms that
        failed are in the way, and the next step does the same again."""
        while states:
            try:
                self.node.append_many([state.req for state in states], sample(hashes).tolist())
                break
            except OutOfPagesError as error:
                if not error.retract:
                    return 0
                victim = self.running.pop(error.retract[0])
                self.retract(victim.req)
                kept = [number for number, state in enumerate(states) if state is not victim]
                states, hashes = [states[number] for number in kept], hashes[kept]
        for state, value in zip(states, hashes, strict=True):
            state.hash = value
            self.appended(state.req)
            if len(state.req.output) >= state.req.max_new_tokens:
                del self.running[state.req.rid]
                self.finish(state.req)
        return len(states)

    def pages_of(self, req: Any) -> Sequence[Any]:
        """Of each rank."""
        return [req.pages]

    def mismatches(self, req: Any, hashes: Hashes) -> int:
        """How many of its pages are wrong, on all ranks."""
        ranks = zip(self.patterns, self.pages_of(req), strict=True)
        return sum(pattern.mismatches(pages, hashes) for pattern, pages in ranks)

    def has_wrong_aux(self, req: Any, hashes: Hashes) -> bool:
        """Whether it came with another request's payload, or none."""
        return not req.output and bool(req.aux != sample(hashes[-1:]).tobytes())

    def ask(self, ask: Any) -> None:
        """Prefill is to be asked once more."""
        raise NotImplementedError

    def admitted(self, req: Any) -> None: ...

    def arrived(self, req: Any, hashes: Hashes) -> None: ...

    def appended(self, req: Any) -> None: ...

    def retract(self, req: Any) -> None:
        self.node.retract(req.rid)

    def finish(self, req: Any) -> None:
        self.node.finish(req)

    def failed(self, req: Any) -> None: ...
