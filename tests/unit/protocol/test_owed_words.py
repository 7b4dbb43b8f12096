"""A room that owes prefill a word: it is over once, by an answer, by our word or by time, and takes
everything a peer may say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import AbortedError
from prefixkv.protocol.events import RoomDrained, RoomEnded
from prefixkv.protocol.messages import Abort, Drained, Outcome, OutcomeAck, PromiseAck
from prefixkv.protocol.receiver_machine import (
    ChunkLanded,
    Fail,
    FencedOff,
    PeerReady,
    ReceiverMachine,
    RoomTick,
    SendToRank,
)
from tests.unit.protocol.rooms import KEY, TIMING, promise, refusal

MEANS_NOTHING = [
    PromiseAck(*KEY.numbers, 0),
    ChunkLanded(0, 0, 0),
    Outcome(*KEY.numbers, 0, True, 1, 2, b"", "", True),
]
EVENTS = [
    *MEANS_NOTHING, *(Drained(*KEY.numbers, rank) for rank in (0, 1, 9)),
    FencedOff(0), FencedOff(1),
    Fail(AbortedError("gone")), RoomTick(),
]  # fmt: skip


def owed(is_refusal: bool) -> ReceiverMachine:
    """A room that owes prefill a word: refused, or aborted before any rank knew of it."""
    if is_refusal:
        return refusal()
    machine = ReceiverMachine(promise(), TIMING, 0.0)
    ended = machine.on(Fail(AbortedError("why")), 0.0)
    assert [type(action) for action in ended] == [RoomEnded, RoomDrained]
    return machine


@given(st.booleans(), st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 2)), max_size=20))
def test_any_sequence_ends_it_once_and_time_ends_it_at_last(
    is_refusal: bool, events: list[tuple[Any, float]]
) -> None:
    machine, now_s, unanswered = owed(is_refusal), 0.0, {0, 1}
    said = machine.on(PeerReady((0, 1)), now_s)
    abort = Abort(*KEY.numbers, "why", machine.ticket)
    assert said == [SendToRank(rank, abort) for rank in (0, 1)]
    ends = 0
    for event, after_s in [*events, (RoomTick(), 1000.0)]:
        now_s += after_s
        was_over = machine.over
        actions = machine.on(event, now_s)
        ends += machine.over and not was_over
        if event in MEANS_NOTHING:
            assert [a for a in actions if not isinstance(a.body, OutcomeAck)] == []
            continue
        if was_over:
            assert actions == []
        if isinstance(event, Drained | FencedOff):
            unanswered.discard(event.rank)
        words = [action for action in actions if isinstance(action, SendToRank)]
        assert {word.rank for word in words} in (set(), unanswered), "an answered rank is told"
        assert [a for a in actions if isinstance(a, RoomDrained)] == [RoomDrained(KEY)] * (
            is_refusal and machine.over and not was_over
        )
        assert machine.over or (unanswered and machine.wake_s <= TIMING.bootstrap_timeout_s)
    assert ends == 1
    assert machine.wake_s == float("inf")


@pytest.mark.parametrize("over", [False, True])
def test_its_ranks_are_made_known_once(over: bool) -> None:
    machine = refusal()
    machine.on(PeerReady((0,)), 0.0)
    if over:
        machine.on(Drained(*KEY.numbers, 0), 0.0)
    assert machine.on(PeerReady((0,)), 0.0) == []
    assert machine.over is over
