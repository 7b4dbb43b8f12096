"""The README's decode scheduler, run for real: the lines between the markers are the ones it
shows."""

from __future__ import annotations

import inspect
import pathlib
import queue
import textwrap
import threading
import time
from typing import Any

import numpy as np

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import OutOfPagesError
from prefixkv.request import Request
from prefixkv.runtime.nodes import DecodeNode, PrefillNode
from prefixkv.testing.hashing import PrefixHasher
from prefixkv.testing.pattern import KVPattern
from tests.models.node_pair import (
    SALT,
    PrefillDriver,
    first_token,
    make_pool,
    node_at_rest,
    tokens_of,
)
from tests.models.patience import PATIENCE_S

_hasher = PrefixHasher()


def serve(node: DecodeNode, engine: StandIn) -> None:
    # fmt: off
    # example: begin
    batch: list[DecodeRequest] = []
    while engine.serving():
        for request in engine.arrivals():
            node.add(request)                           # its prefill worker gets the same room
        node.pop_preallocated()                         # prefix locked, prefill told what to skip
        batch += node.pop_transferred()                 # KV in req.pages, first token in req.aux
        for ask in node.pop_needs_prefill():
            engine.submit_to_prefill(ask)               # evicted while the request was retracted
        for req in node.pop_failed():
            engine.reject(req)                          # req.error says why
        try:                                            # a step writes the newest tokens' KV
            node.append_many(batch, engine.step(batch))
        except OutOfPagesError as error:                # nothing was appended
            for rid in error.retract[:1]:               # it comes back by itself
                node.retract(rid)
                batch = [req for req in batch if req.rid != rid]
        for req in engine.done(batch):
            node.finish(req)                            # its KV stays: the next turn's prefix
            batch.remove(req)
        if not batch:
            node.wait(timeout_s=0.1)
    # example: end
    # fmt: on


class StandIn:
    """An engine of no model: conversations of several turns, with KV that can be checked byte for
    byte."""

    def __init__(
        self, node: DecodeNode, prefill: PrefillSide, conversations: int, turns: int
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
        while (
            self.node.scheduler.transfers.num_open
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


class PrefillSide:
    """A PrefillNode and its engine on a thread of their own."""

    def __init__(self) -> None:
        self._asks: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._stopping = False
        self._error: BaseException | None = None
        self.node = PrefillNode(make_pool(), PrefillConfig())
        self.endpoint = self.node.endpoint
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, *ask: Any) -> None:
        self._asks.put(ask)

    def _run(self) -> None:
        try:
            driver = PrefillDriver(self.node)
            while not self._stopping or self.node.stats()["requests"]:
                while not self._asks.empty():
                    driver.add(*self._asks.get())
                driver.step()
                if not driver.computing:
                    self.node.wait(0.001)
            assert driver.mismatches == 0
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


def test_the_loop_serves_conversations() -> None:
    """In a pool too small for all of them at once: with eviction, retraction and asking again."""
    prefill = PrefillSide()
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
            assert stats["hit_tokens"] > 0
            assert stats["retracted"] > 0
            node_at_rest(node)
    finally:
        prefill.close()


def test_the_example_is_short() -> None:
    """What the README shows has to be read at a glance."""
    lines = (
        inspect.getsource(serve)
        .partition("# example: begin\n")[2]
        .partition("    # example: end")[0]
        .splitlines()
    )
    assert 15 <= len(lines) <= 24
    assert max(map(len, lines)) <= 100


def test_the_readme_shows_these_lines() -> None:
    shown = textwrap.dedent(
        inspect.getsource(serve)
        .partition("    # example: begin\n")[2]
        .partition("    # example: end")[0]
    )
    assert f"```python\n{shown}```" in (pathlib.Path(__file__).parents[1] / "README.md").read_text()
