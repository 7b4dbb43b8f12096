"""Nodes that take no new requests, for a restart; and requests given up before prefill was promised
anything."""

from __future__ import annotations

import pytest

from prefixkv.errors import AdmissionTimeoutError, DrainingError, RequestError
from prefixkv.request import Request
from tests.support.node_pair import NodePair, tokens_of
from tests.support.node_stages import queued
from tests.support.patience import SkippableClock
from tests.unit.runtime.conftest import MakePair


def test_a_node_that_is_drained_serves_what_it_has_and_takes_nothing_new(pair: NodePair) -> None:
    pair.p.hold = True
    for number in range(6):
        pair.submit(f"r{number}", tokens_of(number, 30))
    pair.until(lambda: bool(pair.p.computing))
    for node in (pair.decode, pair.prefill):
        assert not node.drain()
        before = {name: value for name, value in node.stats().items() if name == "requests"}
        with pytest.raises(DrainingError, match="'late' comes too late") as caught:
            node.add(Request("late", tokens_of(1, 8), room=77, prefill=pair.prefill.endpoint))
        assert isinstance(caught.value, RequestError), (
            "who looks for those it cannot place finds it"
        )
        assert {name: value for name, value in node.stats().items() if name == "requests"} == before
    pair.p.hold = False
    pair.until(lambda: pair.decode.drain() and pair.prefill.drain())
    assert [pair.d.ended[f"r{number}"] for number in range(6)] == [None] * 6
    assert pair.decode.drain(timeout_s=10.0), "at once"


def test_drain_waits_but_not_while_the_engine_has_something_to_do(pair: NodePair) -> None:
    assert pair.decode.drain(timeout_s=10.0), "nothing lives here"
    pair.decode.draining = False
    proceed = queued(pair)
    pair.decode.abort("big")
    pair.decode.abort("r")
    assert not pair.decode.drain(timeout_s=1000.0), "pop_failed has two, so it does not wait"
    proceed()
    pair.until(lambda: {"big", "r"} <= set(pair.d.ended))
    pair.until(lambda: pair.decode.drain(timeout_s=0.01))


def test_a_request_that_waits_too_long_for_pages_fails_on_both_sides(
    clock: SkippableClock, make_pair: MakePair
) -> None:
    pair = make_pair(decode={"waiting_timeout_s": 60.0})
    proceed = queued(pair)
    assert not pair.decode.wait(0.0)
    clock.skip(61.0, [pair.decode, pair.prefill])
    assert pair.decode.wait(None), "the deadline wakes whoever waits for news"
    pair.until(lambda: "r" in pair.d.ended and "r" in pair.p.failed)
    assert isinstance(pair.d.ended["r"], AdmissionTimeoutError)
    assert "decode: request 'r' waited" in str(pair.p.failed["r"])
    proceed()
    pair.run("big")
    assert pair.d.ended["big"] is None
