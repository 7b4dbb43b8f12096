"""A rate by the last measures, and what a prefill worker still has to answer."""

from __future__ import annotations

import pytest

from prefixkv.decode.sources import TRY_SHARE, Rate, Sources


def measured(*seconds: float, units: float = 100) -> Rate:
    rate = Rate()
    for each_s in seconds:
        rate.add(units, each_s)
    return rate


def test_a_rate_is_known_after_three_measures_of_which_one_may_be_a_stall() -> None:
    assert not measured(1.0, 1.0).is_known
    for stalls in ((30.0, 1.0, 1.0), (1.0, 30.0, 1.0), (1.0, 1.0, 30.0)):
        rate = measured(*stalls)
        assert rate.is_known
        assert rate.unit_s == pytest.approx(0.01)


@pytest.mark.parametrize("at", range(7))
def test_three_stalls_of_seven_measures_do_not_count(at: int) -> None:
    seconds = [1.0] * 7
    for stall in range(3):
        seconds[(at + 2 * stall) % 7] = 120.0
    assert measured(*seconds).unit_s == pytest.approx(0.01)


def test_a_change_is_known_after_four_measures() -> None:
    assert measured(*[1.0] * 50, *[5.0] * 3).unit_s == pytest.approx(0.01)
    assert measured(*[1.0] * 50, *[5.0] * 4).unit_s == pytest.approx(0.05)


def test_a_measure_that_grew_takes_the_place_of_the_last_one() -> None:
    rate = measured(1.0, 1.0)
    rate.add(200, 6.0, amends=True)
    assert len(rate) == 2
    assert rate.most_units == 200
    assert rate.unit_s == pytest.approx(0.01)


def test_a_rate_is_never_below_0() -> None:
    assert measured(-1.0, -1.0, -1.0).unit_s == 0.0


def test_what_is_decided_against_seems_ever_cheaper_until_it_is_measured() -> None:
    rate = measured(1.0, 1.0, 1.0)
    rate.declined = round(1 / TRY_SHARE)
    assert rate.price_s == pytest.approx(0.005)
    rate.add(100, 1.0)
    assert rate.price_s == pytest.approx(0.01)


def test_a_worker_answers_its_promises_in_turn() -> None:
    rule = Sources(loads=True)
    rooms = [rule.promised("p", 10.0, tokens) for tokens in (100, 50, 25)]
    assert rooms[0] is not None
    load = rooms[0].worker
    assert load.backlog_s(0.01, 10.25) == pytest.approx(1.75 - 0.25)
    # The answer is late: it takes as long again.
    assert load.backlog_s(0.01, 15.0) == pytest.approx(5.0 + 0.75)
    rule.arrived(rooms[0], 11.0)
    assert rule._sent.unit_s == pytest.approx(1.0 / 100)
    assert load.backlog_s(0.01, 11.1) == pytest.approx(0.75 - 0.1)
    assert load.tokens == 75
