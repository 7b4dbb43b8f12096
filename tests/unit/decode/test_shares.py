"""A prefill worker that takes promises and never gives its proof does not get the whole pool."""

import pytest

from prefixkv.decode.rooms import Workers
from prefixkv.protocol.events import PrefillAway, PrefillReady
from tests.unit.decode.desk import Desk


def desk(most: int = 8, **settings: object) -> Desk:
    return Desk(16, workers=Workers(share_pages=most), **settings)


@pytest.mark.parametrize("admission", ["hit_aware", "fifo"])
def test_a_worker_that_never_drains_holds_its_share_and_the_others_are_served(
    admission: str,
) -> None:
    d = desk(admission=admission, patience_s=5.0)
    held = [d.add(rid, 12, 4, prefill="a") for rid in "uvw"]
    d.add("x", 12, 4, prefill="b")
    assert d.admit() == ["u", "v", "x"], "w would be above the share, and x overtakes it"
    for req in held[:2]:
        d.abort(req)
    d.now_s = 100.0  # nor does it hold up what comes behind it when its patience has passed
    y = d.add("y", 4, 1, prefill="b")
    assert d.admit() == ["y"]
    d.drain(held[0].room_key)
    assert d.admit() == ["w"], "pages have come back"
    d.arrive(y)


def test_a_request_larger_than_the_share_is_admitted_where_nothing_else_is_held() -> None:
    d = desk(most=2)
    d.add("x", 4, 4, prefill="b")
    d.add("u", 12, 4, prefill="a")
    assert d.admit() == ["x", "u"]
    d.add("v", 4, 4, prefill="a")
    assert d.admit() == []


def test_what_came_back_by_success_counts_no_more() -> None:
    d = desk()
    first = d.start("u", 12, 4, prefill="a")
    second = d.start("v", 12, 4, prefill="a")
    d.add("w", 12, 4, prefill="b")
    d.admit()
    d.finish(first)
    d.finish(second)
    d.add("x", 12, 4, prefill="a")
    assert d.admit() == ["x"]
    assert d.scheduler.workers.of("a").num_pages == 3


def test_what_waits_for_its_share_is_looked_at_as_soon_as_some_of_it_is_back() -> None:
    d = desk()
    first, _, _ = (d.add(rid, 12, 4, prefill="a") for rid in "uvw")
    d.add("x", 4, 4, prefill="b")
    assert sorted(d.admit()) == ["u", "v", "x"]
    assert d.admit() == []
    version = d.pages.version
    d.succeed(first.room_key)
    assert d.pages.version == version, "no page has become free"
    assert d.admit() == ["w"]


def test_one_whose_share_is_held_without_proof_waits_alone() -> None:
    """The end of its worker's transfers would not help it. What is behind it needs less."""
    d = desk(most=4, admission="fifo")
    d.add("x", 4, 4, prefill="b")
    lost = d.add("u", 12, 1, prefill="a")
    assert d.admit() == ["x", "u"]
    d.abort(lost)
    d.add("v", 8, 1, prefill="a")
    d.add("w", 4, 1, prefill="a")
    assert d.admit() == ["w"]
    d.drain(lost.room_key)
    assert d.admit() == ["v"]


def test_a_share_binds_no_more_when_the_other_worker_goes_away() -> None:
    d = Desk(16, workers=Workers(gated=True, share_pages=4))
    lost = d.add("u", 12, 4, prefill="a")
    d.add("x", 4, 1, prefill="b")
    for address in "ab":
        d.scheduler.hear(PrefillReady(address), 0.0)
    assert sorted(d.admit()) == ["u", "x"]
    d.fail(lost.room_key)
    waits = d.add("w", 8, 1, prefill="a")
    assert d.admit() == []
    assert d.scheduler.waiting.aside()["share"] == 1
    why = "waited 0.000 s for pages: prefill worker a has 3 pages, its share of the pool"
    assert d.scheduler.waiting.why(waits, 0.0) == why
    d.scheduler.hear(PrefillAway("b"), 0.0)
    assert d.admit() == ["w"]


def test_a_worker_with_pages_in_its_power_is_known_beside_many_others() -> None:
    """Its request has left the line when its pages are promised: the end of that room once made the
    node forget the worker of the requests behind it."""
    desk = Desk(200, rows=80, workers=Workers(share_pages=1))
    for place in range(64):
        desk.admitted(chr(ord("a") + place), 4, 1, prefill=f"p{place}")
    first = desk.admitted("Y", 4, 1, prefill="q")
    second = desk.add("Z", 4, 1, prefill="q")
    assert desk.admit() == []
    desk.succeed(first.room_key)
    assert desk.admit() == ["Z"], second.error
