"""Whose turn it is among waiting requests, lane by lane, without a queue or a pass."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.admission import AdmissionPolicy
from prefixkv.decode.admission_order import MAX_WALK, AdmissionOrder
from prefixkv.decode.lanes import Lane, Waiter
from tests.unit.decode.parts import Parts

P, Q = "p:1", "q:1"


class BySize(AdmissionPolicy):
    """Few pages first."""

    def __init__(self, overtakes: bool = True) -> None:
        self.overtakes = overtakes

    def rank(self, req: Any, new_pages: int) -> Any:
        if new_pages < 0:
            raise ValueError("no such size")
        return float("nan") if new_pages == 77 else new_pages


class Case(Parts):
    def __init__(self, overtakes: bool = True, patience_s: float = 10.0) -> None:
        super().__init__()
        self.limited: dict[Lane, None] = {}
        self.order = AdmissionOrder(
            BySize(overtakes), patience_s, self.lanes, self.limited, self.shares, self.pages.errors
        )
        self.num = 0

    def waiter(
        self, pages: int, prefill: str = P, returned: bool = False, came_s: float = 0.0
    ) -> Waiter:
        self.num += 1
        req = self.request(8, prefill=prefill)
        req.arrived_s = came_s
        waiter = Waiter(req, self.num, self.lanes.of(prefill), returned)
        waiter.new_pages = waiter.needed_pages = waiter.most_pages = pages
        waiter.rank = self.order.rank(req, pages)
        self.lanes.enter(waiter)
        return waiter

    def first_that_fits(self, space: int, most: int = 99) -> Waiter | None:
        return self.order.first_that_may_fit(1, (space, most), self.num)


def test_the_last_to_return_is_first_of_all() -> None:
    case = Case()
    case.waiter(1, came_s=-99.0)
    case.waiter(9, returned=True)
    last = case.waiter(9, Q, returned=True)
    assert case.order.first_of_all(0.0) is last
    case.limited[last.lane] = None
    assert case.order.first_of_all(0.0) is not last, "its worker has its share"


def test_the_oldest_is_overtaken_until_its_patience_is_over() -> None:
    case = Case(patience_s=10.0)
    oldest = case.waiter(9, Q)
    case.waiter(1, came_s=1.0)
    assert case.order.first_of_all(9.9) is None
    assert case.order.first_of_all(10.0) is oldest


def test_a_policy_that_lets_none_overtake_has_a_first() -> None:
    case = Case(overtakes=False)
    case.waiter(9)
    least = case.waiter(2, Q)
    assert case.order.first_of_all(0.0) is least


def test_the_first_that_fits_is_found_over_all_lanes() -> None:
    case = Case()
    large, small, middle = case.waiter(9), case.waiter(3, Q), case.waiter(5)
    assert case.first_that_fits(9) is small
    small.seen_at = 1  # a look at this version has admitted nothing
    assert case.first_that_fits(9) is middle
    middle.most_pages = 50
    assert case.first_that_fits(9, most=49) is large
    case.limited[large.lane] = None
    assert case.first_that_fits(9) is None


def test_one_that_waits_alone_is_tried_whatever_its_estimate() -> None:
    case = Case()
    only = case.waiter(9)
    assert case.first_that_fits(0) is only
    case.waiter(9)
    assert case.first_that_fits(0) is None


@pytest.mark.parametrize("lanes", [(P,), (P, Q)])
def test_a_search_looks_at_so_many_places(lanes: tuple[str, ...]) -> None:
    case = Case()
    for number in range(MAX_WALK):
        case.waiter(5, lanes[number % len(lanes)]).needed_pages = 50
    behind = case.waiter(6)
    assert case.first_that_fits(10) is None
    case.lanes.leave(behind.lane.order[0][-1])
    assert case.first_that_fits(10) is behind


@pytest.mark.parametrize(
    ("pages", "falls_back", "is_first"),
    [(2, False, True), (5, True, False), (4, False, False), (-1, False, False), (77, False, False)],
)
def test_a_new_estimate_moves_it_in_its_lane(pages: int, falls_back: bool, is_first: bool) -> None:
    """A policy that raises, or that names no place, leaves it where it was."""
    case = Case()
    other, waiter = case.waiter(3), case.waiter(4)
    third = case.waiter(4)
    waiter.new_pages = pages
    assert case.order.renew(waiter) is falls_back
    assert (case.order.lanes()[0].order[0][-1] is waiter) is is_first
    assert [*waiter.lane.estimated] == [other, third, waiter], "its estimate is the newest"
    ranks = [(place[0], place[-1].arrival) for place in waiter.lane.order]
    assert ranks == sorted(ranks)
    assert len(ranks) == 3
    assert (waiter.lane.order[-1][-1] is waiter) is falls_back
    assert third.rank == (4,)
    assert case.pages.errors.num == (pages in (-1, 77))
