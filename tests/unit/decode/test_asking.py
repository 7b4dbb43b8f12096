"""How an admitted request gets what it lacks: by a promise, by the engine, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixkv.config import ComputeConfig
from prefixkv.decode.asking import Asking
from prefixkv.decode.lanes import Lanes
from prefixkv.decode.request import DecodeState, PrefillAsk, Retries
from prefixkv.decode.targets import PrefillTargets
from prefixkv.digest import prompt_digest
from prefixkv.protocol.commands import OpenRoom, RefuseRoom
from tests.unit.decode.parts import Parts


class Desk(Parts):
    def __init__(self, compute: ComputeConfig | None = None) -> None:
        super().__init__(compute, lanes=Lanes(gated=True))
        self.targets = PrefillTargets(
            self.lanes, self.shares, self.waiting, self.choice, self.sources, self.refusals,
            Retries(0, None, self.pages.errors), self.commands, self.counters,
        )  # fmt: skip
        self.asks: list[PrefillAsk] = []
        self.asking = Asking(
            self.pages, self.flights, self.arriving, self.shares, self.lanes, self.choice,
            self.sources, self.targets, self.refusals, None, self.journal, "d", self.commands,
            self.asks, lambda: 77,
        )  # fmt: skip


def test_a_promise_names_what_is_there_and_the_pages_for_the_rest() -> None:
    desk = Desk()
    desk.cache(8)
    req = desk.request(18, prefill="p:1")
    flight = desk.flight(req)
    assert desk.asking.ask(req, "w", 1.0)
    (opened,) = desk.commands
    assert isinstance(opened, OpenRoom)
    promise = opened.promise
    assert (promise.prefix_len, promise.fill_len, promise.ticket) == (8, 18, 77)
    assert promise.weights_version == "w"
    pages = np.frombuffer(promise.pages, np.int32)
    assert pages.tolist() == req.pages.tolist()[2:]
    assert opened.digest == req.request.digest
    assert desk.arriving.get(req.room_key) is flight
    assert not desk.asks, "prefill has the first attempt"
    assert desk.journal.counters["skipped_tokens"] == 8
    # The answer takes the pages out of the worker's power.
    desk.shares.promise(flight.room_key, "p:1", 3)
    assert desk.asking.answered(flight.room_key, b"aux", 2.0) is flight
    assert desk.shares.pages("p:1") == 0
    assert req.aux == b"aux"
    assert desk.arriving.is_complete(flight)
    assert desk.asking.answered(flight.room_key, b"", 3.0) is None, "nothing waits for it"


def test_a_later_attempt_is_submitted_to_prefill_again_by_what_it_is_now() -> None:
    desk = Desk()
    req = desk.request(8, prefill="p:1")
    req.output += [5, 6]
    req.generation, req.fill_len = 1, req.kv_len
    req.sent_len = req.fill_len
    desk.flight(req)
    assert desk.asking.ask(req, "", 1.0)
    (ask,) = desk.asks
    assert (ask.tokens.tolist(), ask.known_token, ask.generation) == ([*range(8), 5], 6, 1)
    (opened,) = desk.commands
    assert isinstance(opened, OpenRoom)
    assert opened.digest == prompt_digest(req.key) != req.request.digest


@pytest.mark.parametrize("ask", ["both", "late"])
def test_what_the_engine_computes_is_refused_where_prefill_may_have_it(ask: Any) -> None:
    desk = Desk(ComputeConfig(below=100, ask=ask))
    req = desk.request(8, prefill="p:1")
    flight = desk.flight(req)
    desk.shares.promise(flight.room_key, "p:1", 2)
    assert desk.asking.ask(req, "", 1.0)
    assert flight.is_local
    assert desk.shares.pages("p:1") == 0
    assert [type(one) for one in desk.commands] == [RefuseRoom] * (ask == "both")
    assert not desk.asks


def test_nothing_is_asked_where_nothing_is_missing() -> None:
    desk = Desk()
    desk.cache(8)
    req = desk.request(8, prefill="p:1")
    req.output.append(5)
    flight = desk.flight(req)
    assert desk.asking.ask(req, "", 1.0)
    assert not desk.commands
    assert desk.arriving.is_complete(flight)


@pytest.mark.parametrize("is_back", [False, True])
def test_one_that_is_alone_and_lacks_too_much_needs_its_worker(is_back: bool) -> None:
    desk = Desk(ComputeConfig(below=8, down_below=8))
    lane = desk.lanes.of("p:1")
    if is_back:
        desk.lanes.ready(lane, 0)
    req = desk.request(12, prefill="p:1")
    req.is_alone = True
    flight = desk.flight(req)
    assert desk.asking.ask(req, "", 1.0) is is_back
    assert flight.is_local is not is_back
    assert [type(one) for one in desk.commands] == [OpenRoom] * is_back
    assert desk.shares.pages("p:1") == 3 * is_back, "alone it was promised to nothing"
    assert req.state is DecodeState.PREALLOCATED
