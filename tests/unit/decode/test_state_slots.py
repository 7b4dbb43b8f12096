"""A request's slot of extra state goes the way of its own pages, and its state is never taken from
the cache."""

import pytest

from prefixkv.errors import OutOfPagesError
from prefixkv.pages.allocator import PageState
from prefixkv.pages.groups import GroupStart
from prefixkv.protocol.events import RoomOverdue
from tests.unit.decode.desk import Desk, OpenRoom


def slots(desk: Desk) -> dict[str, int]:
    assert desk.pages.slots is not None
    counts = {state.name: len(desk.pages.slots.pages_in(state)) for state in PageState}
    return {name: count for name, count in counts.items() if count}


def test_a_slot_from_admission_to_the_end() -> None:
    desk = Desk(num_slots=2)
    req = desk.add("a")
    assert req.state_slot == -1
    assert desk.admit() == ["a"]
    (opened,) = desk.commands()
    assert isinstance(opened, OpenRoom)
    assert opened.promise.group_ids()[0].tolist() == [req.state_slot]
    assert req.state_slot >= 0
    desk.succeed(req.room_key)
    desk.transferred()
    assert slots(desk) == {"FREE": 1, "OWNED": 1}
    desk.finish(req)
    assert slots(desk) == {"FREE": 2}
    assert req.state_slot == -1


def test_a_request_without_a_free_slot_waits() -> None:
    desk = Desk(num_slots=1)
    first, second = desk.add("a"), desk.add("b")
    assert desk.admit() == ["a"]
    assert not desk.scheduler.waiting.may_admit
    assert desk.admit() == []
    desk.fail(first.room_key)
    assert slots(desk) == {"HELD": 1}
    assert desk.admit() == []
    desk.scheduler.hear(RoomOverdue(first.room_key), desk.now_s)
    assert slots(desk) == {"QUARANTINED": 1}
    assert desk.admit() == []
    desk.drain(first.room_key)
    assert desk.admit() == ["b"]
    assert second.state_slot == 0
    with pytest.raises(OutOfPagesError, match="1 pages needed, 0 free"):
        desk.pages.open(None, 1, 0.0, start=GroupStart(0, 1))


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_hit_holds_a_slot_and_has_a_room(shared: bool) -> None:
    """Also where all pages are another's, on their way: an abort holds the slot alone."""
    desk = Desk(num_slots=3)
    if shared:
        other = desk.admitted("a1")
    else:
        other = desk.start("a1")
    req = desk.admitted("a2")
    assert req.prefix_len == 8
    promises = [command.promise for command in desk.commands() if isinstance(command, OpenRoom)]
    assert promises[-1].pages == b""
    assert promises[-1].group_ids()[0].tolist() == [req.state_slot]
    assert req.state_slot != other.state_slot
    desk.abort(req)
    assert slots(desk) == {"FREE": 1, "OWNED": 1, "HELD": 1}
    desk.drain(req.room_key)
    assert slots(desk) == {"FREE": 2, "OWNED": 1}


def test_a_flight_that_goes_on_for_others_keeps_its_slot() -> None:
    desk = Desk(num_slots=3)
    gone = desk.admitted("a1")
    req = desk.admitted("a2")
    slot = gone.state_slot
    desk.abort(gone)
    assert desk.pages.slots is not None
    assert desk.pages.slots.state(slot) is PageState.OWNED
    desk.succeed(gone.room_key)
    desk.arrive(req)
    assert slots(desk) == {"FREE": 2, "OWNED": 1}


def test_a_retracted_request_asks_for_its_state_again() -> None:
    """Without extra state it comes back by itself, since all its KV is cached."""
    for num_slots in (0, 3):
        desk = Desk(num_slots=num_slots)
        desk.start("old", 4, outputs=1)
        req = desk.start("young", 8, outputs=1)
        desk.commands()
        desk.retract(req)
        assert desk.admit() == ["young"]
        assert (req.prefix_len, req.fill_len) == (8, 8)
        opened = [command for command in desk.commands() if isinstance(command, OpenRoom)]
        asks = desk.scheduler.pop_needs_prefill()
        if not num_slots:
            assert not opened
            assert not asks
            assert desk.transferred() == ["young"]
        else:
            assert [ask.generation for ask in asks] == [1]
            assert desk.transferred() == []
            desk.arrive(req)
