"""Where a waiting request stands: in its lane, or aside for as long as nothing can make room."""

from __future__ import annotations

from itertools import count

import pytest

from prefixkv.decode.aside import MAX_BACK, Aside
from prefixkv.decode.lanes import Waiter
from prefixkv.decode.shares import PrefillShares
from prefixkv.protocol.ids import RoomKey
from tests.unit.decode.parts import PAGE_SIZE, Parts

P, Q = "p:1", "q:1"


class Case(Parts):
    """64 pages, of which rooms that have failed hold some."""

    def __init__(self, held: int = 0) -> None:
        super().__init__(shares=PrefillShares(ready=lambda: [P, Q]))
        if held:
            self.pages.allocator.hold(self.pages.allocator.alloc(held), "room")
        self.aside = Aside(64, self.lanes, self.shares, self.prospects)
        self.numbers = count(1)

    def waiter(self, pages: int, prefill: str = P, returned: bool = False) -> Waiter:
        tokens = pages * PAGE_SIZE
        req = self.request(tokens, prefill=prefill, max_new_tokens=1)
        waiter = Waiter(req, next(self.numbers), self.lanes.of(prefill), returned)
        waiter.rank, waiter.new_pages = 0, pages
        self.aside.enter(waiter)
        return waiter

    def share(self, most: int, held: int = 0) -> None:
        """`P` has four pages in its power, `held` of them for failed rooms; `Q` answers too."""
        self.shares.most = most
        for address in (P, Q):
            self.shares.name(address)
        for number, pages in enumerate((held, 4 - held)):
            self.shares.promise(RoomKey(number, 0), P, pages)
        self.shares.hold(RoomKey(0, 0))

    def places(self, waiter: Waiter) -> tuple[bool, bool]:
        """In line, and aside; never both."""
        return waiter in list(waiter.lane.waiters()), waiter in self.aside.waiters()


@pytest.mark.parametrize("returned", [False, True])
def test_it_waits_aside_until_so_many_pages_are_proved_free(returned: bool) -> None:
    case = Case(held=60)
    small, large = case.waiter(4, returned=returned), case.waiter(5, returned=returned)
    assert case.places(small) == (True, False)
    assert case.places(large) == (False, True)
    assert case.aside.waits_for_pages(large)
    assert case.aside.new_pass(), "all are back that may come back"
    assert case.places(large) == (False, True)
    case.pages.allocator.release("room")
    assert case.aside.new_pass()
    assert case.places(large) == (True, False)
    assert case.aside.stepped == {"pages": 1, "share": 0, "prefill": 0}


def test_one_in_line_steps_aside_once_too_little_can_come_back() -> None:
    case = Case()
    waiter = case.waiter(5)
    case.aside.new_pass()
    assert not case.aside.step_aside(waiter), "others run with the pages: it waits where it is"
    case.pages.allocator.hold(case.pages.allocator.alloc(60), "room")
    case.aside.new_pass()
    assert case.aside.step_aside(waiter)
    assert case.places(waiter) == (False, True)
    case.aside.leave(waiter)
    assert case.places(waiter) == (False, False)
    assert case.aside.counts() == {"pages": 0, "share": 0, "prefill": 0}


def test_a_worker_over_its_share_holds_up_its_own_lane_alone() -> None:
    case = Case()
    case.share(most=4)
    first, other = case.waiter(2), case.waiter(2, Q)
    case.aside.new_pass()
    assert case.aside.step_aside(first)
    assert not case.aside.step_aside(other)
    assert list(case.aside.limited) == [first.lane]
    assert case.places(first) == (True, False), "its lane waits"
    assert case.aside.waits_for_share(first)
    assert case.aside.counts()["share"] == 1
    case.shares.release(RoomKey(1, 0))
    case.aside.new_pass()
    assert not case.aside.waits_for_share(first)


def test_a_share_that_is_held_without_proof_holds_up_one_request_alone() -> None:
    case = Case()
    case.share(most=4, held=3)
    first, small = case.waiter(2), case.waiter(1)
    case.aside.new_pass()
    assert case.aside.step_aside(first)
    assert case.places(first) == (False, True)
    assert case.aside.waits_for_share(first)
    assert not case.aside.waits_for_pages(first)
    assert case.places(small) == (True, False), "what needs less has its turn"
    second = case.waiter(2)
    assert case.aside.step_aside(second)
    case.aside.leave(second)
    assert case.aside.waiters() == [first]
    case.aside.new_pass()
    assert case.places(first) == (False, True), "no share has changed"
    case.shares.release(RoomKey(0, 0))
    case.aside.new_pass()
    assert case.places(first) == (True, False)


def test_a_pass_brings_back_so_many_and_the_next_one_the_rest() -> None:
    case = Case(held=60)
    waiters = [case.waiter(5) for _ in range(MAX_BACK + 2)]
    case.pages.allocator.release("room")
    assert not case.aside.new_pass()
    assert sum(case.places(waiter) == (True, False) for waiter in waiters) == MAX_BACK
    assert case.aside.new_pass()
    assert not case.aside.waiters()


def test_a_closed_lane_counts_as_aside() -> None:
    case = Case()
    case.lanes.away(case.lanes.of(P), 1.0)
    waiter = case.waiter(1)
    assert case.places(waiter) == (True, False)
    assert case.aside.stepped["prefill"] == case.aside.counts()["prefill"] == 1
