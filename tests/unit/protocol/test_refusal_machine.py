"""A room that decode refuses: it ends once, by an answer, by our word or by time, and takes
everything a peer may say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import AbortedError, InternalError
from prefixkv.protocol.events import RoomDrained
from prefixkv.protocol.messages import Abort, Outcome
from prefixkv.protocol.receiver_machine import (
    ChunkLanded,
    DrainedSaid,
    Fail,
    FencedOff,
    OutcomeSaid,
    PeerReady,
    PromiseAcked,
    RoomTick,
    SendToRank,
)
from prefixkv.protocol.refusal_machine import RefusalMachine
from tests.unit.protocol.rooms import KEY, TIMING

MEANS_NOTHING = [
    PromiseAcked(0),
    ChunkLanded(0, 0, 0),
    OutcomeSaid(Outcome(*KEY.numbers, 0, True, 1, 2, b"", "", True)),
]
EVENTS = [
    *MEANS_NOTHING, DrainedSaid(0), DrainedSaid(1), DrainedSaid(9), FencedOff(0), FencedOff(1),
    Fail(AbortedError("gone")), RoomTick(),
]  # fmt: skip


def refusal(reports_end: bool = True) -> RefusalMachine:
    return RefusalMachine(KEY, 9, "why", TIMING, 0.0, reports_end=reports_end)


@given(st.booleans(), st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 2)), max_size=20))
def test_any_sequence_ends_it_once_and_time_ends_it_at_last(
    reports_end: bool, events: list[tuple[Any, float]]
) -> None:
    machine, now_s, unanswered = refusal(reports_end), 0.0, {0, 1}
    said = machine.on(PeerReady((0, 1)), now_s)
    assert said == [SendToRank(rank, Abort(*KEY.numbers, "why", 9)) for rank in (0, 1)]
    ends = 0
    for event, after_s in [*events, (RoomTick(), 1000.0)]:
        now_s += after_s
        was_over = machine.over
        actions = machine.on(event, now_s)
        ends += machine.over and not was_over
        if was_over or event in MEANS_NOTHING:
            assert actions == []
        if isinstance(event, DrainedSaid | FencedOff):
            unanswered.discard(event.rank)
        words = [action for action in actions if isinstance(action, SendToRank)]
        assert {word.rank for word in words} in (set(), unanswered), "an answered rank is told"
        assert [a for a in actions if isinstance(a, RoomDrained)] == [RoomDrained(KEY)] * (
            reports_end and machine.over and not was_over
        )
        assert machine.over or (unanswered and machine.wake_s <= TIMING.bootstrap_timeout_s)
    assert ends == 1
    assert machine.wake_s == float("inf")


@pytest.mark.parametrize("over", [False, True])
def test_its_ranks_are_made_known_once(over: bool) -> None:
    machine = refusal()
    machine.on(PeerReady((0,)), 0.0)
    if over:
        machine.on(DrainedSaid(0), 0.0)
    with pytest.raises(InternalError, match="PeerReady must not come in FAILED"):
        machine.on(PeerReady((0,)), 0.0)
