"""The choice of what decode's engine computes, with the parts that it reads and no scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.config import ComputeConfig
from tests.unit.decode.parts import Parts

CONFIG = ComputeConfig(below=100, down_below=40)


@pytest.mark.parametrize(
    ("num_tokens", "is_alone", "fields", "takes"),
    [
        (60, False, {}, True),  # few enough, and nothing is measured
        (60, False, {"may_compute": False}, False),
        (120, False, {}, False),  # more than `below`
        (40, True, {}, True),
        (41, True, {}, False),  # more than `down_below`, and nobody to ask
    ],
)
def test_what_it_takes(num_tokens: int, is_alone: bool, fields: Any, takes: bool) -> None:
    parts = Parts(CONFIG)
    req = parts.request(num_tokens, **fields)
    flight = parts.flight(req)
    assert parts.choice.takes(req, flight, is_alone, 1.0) is takes
    none = Parts()
    req = none.request(num_tokens, **fields)
    assert not none.choice.takes(req, none.flight(req), is_alone, 1.0), "nothing is computed here"


def test_extra_state_without_checkpoints_is_never_taken() -> None:
    parts = Parts(CONFIG, num_slots=4)
    req = parts.request(8)
    assert not parts.choice.can_compute
    assert not parts.choice.takes(req, parts.flight(req), True, 1.0)
    assert not parts.choice.may_take_alone(req)
    assert not parts.choice.may_take_back(req)


def test_a_decline_is_counted_where_size_alone_would_have_allowed_it() -> None:
    parts = Parts(ComputeConfig(below=1_000_000))
    other = parts.request(8)
    parts.arriving.add_local(parts.flight(other))
    other.fill_len = 4_000  # due here: so much that the rest is left to prefill
    req = parts.request(80)
    assert not parts.choice.takes(req, parts.flight(req), False, 1.0)
    assert parts.counters["compute_declined"] == 1


def test_what_it_lacks_alone_is_what_is_neither_cached_nor_on_its_way() -> None:
    parts = Parts(CONFIG)
    req = parts.request(80)
    assert not parts.choice.may_take_alone(req)
    parts.cache(20)
    assert not parts.choice.may_take_alone(req), "60 of 40"
    parts.flight(parts.request(40))
    assert parts.choice.may_take_alone(req), "20 more are on their way"


def test_a_transfer_is_taken_back_by_what_is_not_cached() -> None:
    """What is on its way from the worker that is gone counts as lacking."""
    parts = Parts(CONFIG)
    parts.cache(20)
    req, more = parts.request(60), parts.request(64)
    parts.flight(req)
    parts.flight(more)
    assert parts.choice.may_take_back(req), "40 of 40"
    assert not parts.choice.may_take_back(more)


def test_prefill_computes_again_what_decode_has_computed_until_it_has_sent_beyond() -> None:
    parts = Parts(CONFIG)
    parts.cache(8)
    req = parts.request(20)
    flight = parts.flight(req)
    assert not parts.choice.unsent.has_any
    parts.choice.computed(flight, req)
    assert parts.choice.again_tokens(flight, 8) == 0, "prefill sent these"
    assert parts.choice.again_tokens(flight, 16) == 8
    parts.choice.sent(flight)
    assert parts.choice.again_tokens(flight, 16) == 0


def test_those_on_their_way_do_not_run() -> None:
    parts = Parts(CONFIG)
    req = parts.request(8)
    parts.budget.start("r", 1, 0)
    parts.budget.start("other", 1, 0)
    parts.flight(req)
    assert parts.choice.num_running == 1
