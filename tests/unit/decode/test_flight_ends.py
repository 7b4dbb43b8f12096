"""Ends of flights: each kind hands its pages on once, and those that waited ask again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefixkv.decode.flight_ends import FlightEnds
from prefixkv.decode.inflight import Flight
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import TransferError
from prefixkv.protocol.commands import AbortRoom
from tests.unit.decode.parts import Parts

BROKEN = TransferError("broken")


class Ending(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.aborted: list[tuple[str, str]] = []
        self.again: list[DecodeRequest] = []
        self.ends = FlightEnds(
            self.pages, self.flights, self.arriving, self.shares, self.rooms, self.sources,
            self.computing, None, None, self.commands,
            lambda prefill, how: self.aborted.append((prefill, how)), self.again.append,
            self.counters,
        )  # fmt: skip

    def sent(self, num_tokens: int, room: int = 1, **more: Any) -> Flight:
        flight = self.flight(self.request(num_tokens, prefill="p", room=room), **more)
        self.shares.promise(flight.room_key, "p", flight.num_pages)
        self.arriving.add(flight)
        return flight

    def pages_of(self) -> tuple[int, int, int]:
        """Owned, held by rooms, free."""
        allocator = self.pages.allocator
        return allocator.owned_pages, allocator.held_pages, allocator.free_pages


def _open(case: Ending) -> Flight:
    return case.sent(16)


def _arrived(case: Ending) -> Flight:
    flight = case.sent(16)
    case.arriving.succeed(flight.room_key, b"")
    return flight


def _computed(case: Ending) -> Flight:
    flight = case.flight(case.request(16))
    case.arriving.add_local(flight)
    case.computing.begin([flight], 0, 0.0)
    return flight


def _to_compute(case: Ending) -> Flight:
    flight = case.flight(case.request(16))
    case.arriving.add_local(flight)
    return flight


@pytest.mark.parametrize(
    ("begin", "left", "keeps_pages", "is_drained"),
    [
        (_open, (0, 4, 60), False, False),  # the room's, until it is drained
        (_arrived, (0, 0, 64), False, True),
        (_computed, (4, 0, 60), True, True),  # the request's, until the device is done
        (_to_compute, (0, 0, 64), False, True),  # not begun: nothing writes there
    ],
)
def test_the_pages_of_a_flight_that_ends(
    begin: Callable[[Ending], Flight], left: tuple[int, ...], keeps_pages: bool, is_drained: bool
) -> None:
    case = Ending()
    case.shares.most = 4  # pages
    flight = begin(case)
    owner = flight.owner
    assert owner is not None
    assert case.pages_of() == (4, 0, 60)
    case.ends.cancel(flight, BROKEN)
    assert case.pages_of() == left
    assert (owner.pages_held is not None) is keeps_pages
    assert not len(case.flights)
    aborts = [] if is_drained else [AbortRoom(flight.room_key, "broken")]
    assert case.commands == aborts
    assert case.aborted == [("p", "aborted")] * len(aborts)
    assert case.rooms.undrained() == (set() if is_drained else {flight.room_key})
    assert case.shares.is_hopeless("p", 1) is bool(left[1]), "until its proof has come"


def test_a_room_that_has_failed_is_not_aborted() -> None:
    case = Ending()
    flight = case.sent(16)
    case.ends.cancel(flight, None)
    assert case.pages_of() == (0, 4, 60)
    assert not case.commands
    assert not case.aborted
    assert case.rooms.undrained() == {flight.room_key}


def test_those_that_waited_ask_again_the_oldest_first_in_the_queue() -> None:
    """Each goes to the front, so the oldest is the last to be told."""
    case = Ending()
    first = case.sent(16)
    joined = [case.sent(32, room, joined=first, end=4) for room in (2, 3)]
    for flight, at in zip(joined, (2.0, 1.0), strict=True):
        assert flight.owner is not None
        flight.owner.arrived_s = at
    case.ends.cancel(first, BROKEN)
    assert [req.room for req in case.again] == [2, 3]
    assert case.counters["flight_fallbacks"] == 2
    assert case.pages_of() == (0, 12, 52), "all three rooms are open"
    assert {command.key.room for command in case.commands if isinstance(command, AbortRoom)} == {
        1, 2, 3,
    }  # fmt: skip


def test_a_flight_that_others_wait_for_outlives_its_request() -> None:
    case = Ending()
    first = case.sent(16)
    second = case.sent(32, 2, joined=first, end=4)
    owner = first.owner
    assert owner is not None
    case.ends.leave(first, BROKEN)
    assert first.owner is None
    assert owner.pages_held is None
    assert case.flights.all() == [first, second]
    assert case.pages_of() == (8, 0, 56), "nothing is released"
    assert first.room_key in case.rooms.undrained(), "its number outlives the request too"
    assert case.counters["flights_adopted"] == 1
    case.ends.leave(second, BROKEN)  # nothing waits for this one
    assert case.flights.all() == []
    assert case.pages_of() == (0, 8, 56), "nor for the first any more"
    assert not case.again


def test_nothing_goes_on_with_what_the_engine_was_to_compute() -> None:
    case = Ending()
    first = _computed(case)
    second = case.sent(32, 2, joined=first, end=4)
    case.ends.leave(first, BROKEN)
    assert case.again == [second.owner]
    assert case.counters["flights_adopted"] == 0
