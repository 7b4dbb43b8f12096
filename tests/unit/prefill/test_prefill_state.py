"""Extra state on prefill: which slot is handed over when, when it is the engine's again, and what a
hit is worth."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixkv.errors import RequestError
from prefixkv.prefill.request import PrefillRequest
from prefixkv.protocol.commands import SendChunk
from tests.support.schedulers import prefill_scheduler
from tests.unit.prefill.test_prefill_scheduler import Desk


def state_desk(
    usable: Callable[[PrefillRequest, int], int] | None = None, num_slots: int = 2
) -> Desk:
    desk = Desk()
    desk.scheduler = prefill_scheduler(desk.pages, num_slots=num_slots, usable_prefix=usable)
    return desk


def handed_over(desk: Desk, slot: int = 1) -> PrefillRequest:
    req = desk.computing("a")
    desk.send(req, req.num_tokens, last=True, state_slot=slot)
    (chunk,) = desk.scheduler.take_commands()
    assert isinstance(chunk, SendChunk)
    assert [(one.first, one.src_pages.tolist()) for one in chunk.groups] == [(0, [slot])]
    return req


@pytest.mark.parametrize(
    ("end", "last", "slot"), [(4, False, 0), (10, True, -1), (10, True, 2), (10, True, -2)]
)
def test_a_slot_that_is_none_changes_nothing(end: int, last: bool, slot: int) -> None:
    desk = state_desk()
    req = desk.computing("a")
    with pytest.raises(RequestError, match=f"state.slot.* {slot}\\b"):
        desk.send(req, end, last=last, state_slot=slot)
    assert not desk.scheduler.take_commands()
    desk.send(req, 10, last=True, state_slot=0)


def test_without_extra_state_no_slot_is_taken() -> None:
    desk = Desk()
    req = desk.computing("a")
    with pytest.raises(RequestError, match="where none is needed"):
        desk.send(req, 10, last=True, state_slot=0)


@pytest.mark.parametrize("is_free_first", [False, True])
def test_a_request_with_its_state_handed_over_fails_once_no_write_reads_it(
    is_free_first: bool,
) -> None:
    desk = state_desk()
    req = handed_over(desk)
    if is_free_first:
        desk.source_free(req)
        desk.end(req, ok=False)
    else:
        desk.end(req, ok=False)
        assert desk.pop_failed() == []
        assert not desk.scheduler.has_results
        desk.source_free(req)
        desk.source_free(req)
    assert (desk.pop_failed(), desk.pop_failed()) == ([req], [])
    assert desk.scheduler.idle


def test_a_request_that_has_kept_its_state_fails_at_once() -> None:
    desk = state_desk()
    req = desk.computing("a")
    desk.end(req, ok=False)
    assert desk.pop_failed() == [req]


@pytest.mark.parametrize(
    ("answer", "expected"), [(None, 0), (0, 0), (-3, 0), (3, 0), (7, 4), (8, 8), (100, 8)]
)  # fmt: skip
def test_a_hit_is_worth_what_the_engine_can_go_on_from(answer: int | None, expected: int) -> None:
    asked: list[int] = []

    def usable(req: PrefillRequest, prefix_len: int) -> int:
        asked.append(prefix_len)
        return answer or 0

    desk = state_desk(None if answer is None else usable)
    desk.done(handed_over(desk))
    req = desk.computing("a")
    assert req.prefix_len == expected
    assert asked == ([] if answer is None else [8])
    desk.send(req, req.num_tokens, last=True, state_slot=0)
    desk.done(req)
    assert desk.states() == {"FREE": 14, "CACHED": 2}
