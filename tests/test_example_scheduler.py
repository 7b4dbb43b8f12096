"""The two schedulers of docs/integrate.md, run for real: it shows the lines between the markers."""

from __future__ import annotations

import inspect
import pathlib
import queue
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixkv import DecodeNode, PrefillNode
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.conformance.pattern import KVPattern, PrefixHasher
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import AbortedError, OutOfPagesError
from prefixkv.prefill.request import PrefillRequest
from prefixkv.request import Request
from tests.support.node_pair import SALT, first_token, make_pool, node_at_rest, tokens_of
from tests.support.patience import PATIENCE_S

_hasher = PrefixHasher()


def serve(node: DecodeNode, engine: StandIn) -> None:
    # fmt: off
    # example: begin
    batch: list[DecodeRequest] = []
    sampled: dict[DecodeRequest, int] = {}              # tokens that are not appended yet
    while engine.serving():
        for request in engine.arrivals():
            node.add(request)                           # its prefill worker gets the same room
        node.pop_preallocated()                         # prefix locked, prefill told what to skip
        batch += node.pop_transferred()                 # KV in req.pages, first token in req.aux
        for ask in node.pop_needs_prefill():
            engine.submit_to_prefill(ask)               # retracted, and not all of its KV is cached
        for req in node.pop_failed():
            engine.reject(req)                          # req.error says why
        batch = [req for req in batch if not req.state.ended]   # without those aborted meanwhile
        if not sampled:                                 # a step writes the newest tokens' KV
            sampled = dict(zip(batch, engine.step(batch), strict=True))
        try:
            node.append_many([*sampled], [*sampled.values()])
            sampled = {}
        except OutOfPagesError as error:                # nothing was appended: the tokens are kept
            for rid in error.retract[:1]:               # it comes back by itself
                node.retract(rid)
                batch = [req for req in batch if req.rid != rid]
                sampled = {req: token for req, token in sampled.items() if req.rid != rid}
            if not error.retract:                       # what is missing comes back by itself
                node.wait(timeout_s=0.01)
        for req in engine.done(batch):
            node.finish(req)                            # its KV stays: the next turn's prefix
            batch.remove(req)
        if not batch:
            node.wait(timeout_s=0.1)
    # example: end
    # fmt: on


def serve_prefill(node: PrefillNode, engine: PrefillEngine) -> None:
    # fmt: off
    # example: begin
    computing: dict[str, PrefillRequest] = {}
    while engine.serving():
        for request in engine.arrivals():
            node.add(request)                           # of the same room as on decode
        for req in node.pop_bootstrapped():             # decode has promised its pages
            computing[req.rid] = req                    # the KV of req.prefix_len tokens is here
        for req in [*node.pop_failed(), *node.pop_sent()]:
            computing.pop(req.rid, None)                # req.error says why, None: it was sent
        for req in list(computing.values()):
            end = engine.compute(req)                   # one more chunk; KV up to here is there
            last = end == req.num_tokens
            node.send_chunk(req, end, last, engine.first_token(req) if last else b"")
            if last:
                del computing[req.rid]
        if not computing:
            node.wait(timeout_s=0.01)
    # example: end
    # fmt: on


class StandIn:
    """An engine of no model: conversations of several turns, with KV that can be checked byte for
    byte."""

    def __init__(
        self, node: DecodeNode, prefill: PrefillEngine, conversations: int, turns: int
    ) -> None:
        self.node = node
        self.pattern = KVPattern(node.pool.layout, SALT, node.pool)
        self.prefill = prefill
        self.turns = turns
        self.histories = {i: tokens_of(i, 24 + i) for i in range(conversations)}
        self.turn = dict.fromkeys(self.histories, 0)
        self.due = list(self.histories)
        self.rooms = 0
        self.open = 0
        self.mismatches = 0
        self.rejected: list[Exception | None] = []
        self.prefix_lens: list[int] = []
        self.asked_again = 0

    def serving(self) -> bool:
        return bool(self.due or self.open)

    def arrivals(self) -> list[Request]:
        while len(
            self.node.prefill.open
        ):  # all that were admitted run at once, however slow the machine
            time.sleep(0.001)
            self.node.stats()  # as any call does, it takes in what has arrived
        requests = []
        for i in self.due:
            self.rooms += 1
            self.open += 1
            tokens = self.histories[i]
            rid = f"{i}.{self.turn[i]}"
            self.prefill.add(rid, tokens, self.rooms, 0)
            requests.append(
                Request(
                    rid, tokens, max_new_tokens=9, room=self.rooms, prefill=self.prefill.endpoint
                )
            )
        self.due.clear()
        return requests

    def submit_to_prefill(self, ask: Any) -> None:
        self.asked_again += 1
        self.prefill.add(
            f"{ask.rid}.{ask.generation}", np.asarray(ask.tokens), ask.room, ask.generation
        )

    def reject(self, req: DecodeRequest) -> None:
        self.open -= 1
        self.rejected.append(req.error)

    def step(self, batch: list[DecodeRequest]) -> list[int]:
        tokens = []
        for req in batch:
            hashes = _hasher.prefixes(req.tokens)
            if req.output:
                self.pattern.fill(req.pages, len(hashes) - 1, hashes)
                tokens.append(first_token(req.tokens))
            else:
                self.prefix_lens.append(req.prefix_len)
                tokens.append(int.from_bytes(req.aux, "little"))
            self.mismatches += self.pattern.mismatches(req.pages, hashes)
        return tokens

    def done(self, batch: list[DecodeRequest]) -> list[DecodeRequest]:
        done = [req for req in batch if len(req.output) == req.max_new_tokens]
        for req in done:
            self.open -= 1
            i, _, turn = req.rid.partition(".")
            self.histories[int(i)] = np.append(req.tokens, tokens_of(int(turn) + 77, 11))
            self.turn[int(i)] += 1
            if self.turn[int(i)] < self.turns:
                self.due.append(int(i))
        return done


class PrefillEngine:
    """Prefill's engine of no model: it computes a few tokens' KV a step, on a thread of its own."""

    CHUNK_TOKENS = 8

    def __init__(self) -> None:
        self._asks: queue.SimpleQueue[tuple[str, Any, int, int]] = queue.SimpleQueue()
        self._stopping = False
        self._error: BaseException | None = None
        self._computed: dict[str, int] = {}
        self.mismatches = 0
        self.node = PrefillNode(make_pool(), PrefillConfig())
        self.pattern = KVPattern(self.node.pool.layout, SALT, self.node.pool)
        self.endpoint = self.node.endpoint
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, rid: str, tokens: Any, room: int, generation: int) -> None:
        """From decode's thread."""
        self._asks.put((rid, tokens, room, generation))

    def serving(self) -> bool:
        return not self._stopping or bool(self.node.stats()["requests"])

    def arrivals(self) -> list[Request]:
        requests = []
        while not self._asks.empty():
            rid, tokens, room, generation = self._asks.get()
            attempt = {"room": room, "generation": generation, "decode": "decode-0"}
            requests.append(Request(rid, tokens, **attempt))
        return requests

    def compute(self, req: PrefillRequest) -> int:
        hashes = _hasher.prefixes(req.tokens)
        if req.rid not in self._computed:
            self._computed[req.rid] = req.prefix_len
            self.mismatches += self.pattern.mismatches(req.pages, hashes[: req.prefix_len])
        start = self._computed[req.rid]
        end = self._computed[req.rid] = min(start + self.CHUNK_TOKENS, req.num_tokens)
        self.pattern.fill(req.pages, start, hashes[:end])
        return end

    def first_token(self, req: PrefillRequest) -> bytes:
        return first_token(req.tokens).to_bytes(4, "little")

    def _run(self) -> None:
        try:
            serve_prefill(self.node, self)
            assert self.mismatches == 0
            node_at_rest(self.node)
        except BaseException as error:
            self._error = error

    def close(self) -> None:
        self._stopping = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.node.close()
        if self._error is not None:
            raise self._error


def test_the_loops_serve_conversations() -> None:
    """In a pool too small for all of them at once: with eviction, retraction and asking again."""
    prefill = PrefillEngine()
    try:
        with DecodeNode(make_pool(num_pages=36), DecodeConfig(reserve_tokens=0)) as node:
            engine = StandIn(node, prefill, conversations=6, turns=3)
            serve(node, engine)
            assert engine.rejected == []
            assert engine.mismatches == 0
            assert set(engine.turn.values()) == {3}
            for i, history in engine.histories.items():  # every token follows from all before it
                length = 24 + i
                assert np.array_equal(history[:length], tokens_of(i, length))
                for _ in range(3):
                    for at in range(length, length + 9):
                        assert history[at] == first_token(history[:at])
                    length += 20
            stats = node.stats()
            assert stats["evicted_pages"] > 0
            assert stats["skipped_tokens"] > 0
            assert stats["retracted"] > 0
            node_at_rest(node)
    finally:
        prefill.close()


class Leaving(StandIn):
    """Clients of running requests go away, between any two calls of the loop."""

    aborted = 0

    def leave(self, batch: list[DecodeRequest]) -> None:
        for req in batch:
            if int(req.rid.partition(".")[0]) % 2 and len(req.output) == 3:
                assert self.node.abort(req.rid)
                self.aborted += 1

    def arrivals(self) -> list[Request]:
        self.leave(self.running)
        return super().arrivals()

    def step(self, batch: list[DecodeRequest]) -> list[int]:
        assert not any(req.state.ended for req in batch)
        tokens = super().step(batch)
        self.running = list(batch)
        if self.aborted % 2:  # the others leave before the next step
            self.leave(batch)
        return tokens

    running: list[DecodeRequest] = []


def test_the_loop_goes_on_when_running_requests_are_aborted() -> None:
    prefill = PrefillEngine()
    try:
        with DecodeNode(make_pool(num_pages=64), DecodeConfig(reserve_tokens=0)) as node:
            engine = Leaving(node, prefill, conversations=6, turns=1)
            serve(node, engine)
            assert engine.aborted == 3
            assert [type(error) for error in engine.rejected] == [AbortedError] * 3
            assert sorted(i for i, turn in engine.turn.items() if turn) == [0, 2, 4]
            node_at_rest(node)
    finally:
        prefill.close()


def shown(loop: Callable[..., None]) -> str:
    """The lines of a loop that docs/integrate.md shows."""
    source = inspect.getsource(loop)
    return textwrap.dedent(source.partition("begin\n")[2].partition("    # example: end")[0])


@pytest.mark.parametrize("loop", [serve, serve_prefill])
def test_the_examples_are_short(loop: Callable[..., None]) -> None:
    """What a newcomer is shown has to be read at a glance."""
    lines = shown(loop).splitlines()
    assert 15 <= len(lines) <= 30
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("loop", [serve, serve_prefill])
def test_the_page_shows_these_lines(loop: Callable[..., None]) -> None:
    page = pathlib.Path(__file__).parents[1] / "docs" / "integrate.md"
    assert f"<!-- example -->\n```python\n{shown(loop)}```" in page.read_text(encoding="utf-8")
