"""Admission: in order, only what fits, and no look at a head for which nothing has changed."""

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.decode.request import DecodeRequest
from prefixkv.paging import pages_for
from tests.unit.decode.desk import PAGE_SIZE, Desk


def test_first_come_first_served_and_a_head_that_does_not_fit_is_waited_for() -> None:
    desk = Desk(8, admission="fifo")
    first = desk.start("a", 16)
    desk.add("big", 20)
    desk.add("small", 4)
    assert desk.admit() == [], "the small one would fit, but came later"
    desk.finish(first)
    assert desk.admit() == ["big", "small"]
    assert desk.admit() == []


def test_a_blocked_head_is_not_matched_again_while_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(8, admission="fifo")
    running = desk.start("a", 16, 8, outputs=1)
    head = desk.add("big", 20)
    looks = desk.count_looks(monkeypatch)
    for _ in range(5):
        assert desk.admit() == []
        assert not desk.scheduler.waiting.may_admit
        desk.pages.cache.version += 1  # a change of the tree by which nothing has come back
    assert len(looks) == 1
    small = desk.add("small", 4)  # it is looked at as it comes
    desk.token(running)
    assert desk.admit() == []
    assert looks == [head, small], (
        "one behind the head and a token in a page that is there change nothing for it"
    )
    desk.abort(head)
    assert desk.admit() == ["small"]


@pytest.mark.parametrize("change", ["finish", "flush", "release", "abort"])
def test_whatever_makes_room_lets_the_head_be_looked_at_again(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(9)
    idle = desk.start("i", 4, max_new=1)
    desk.finish(idle)
    lost = desk.admitted("l", 4, max_new=1)
    desk.fail(lost.room_key)
    running = desk.start("a", 12, max_new=1)
    desk.add("big", 28, max_new=1)
    assert desk.admit() == []
    looks = desk.count_looks(monkeypatch)
    {
        "finish": lambda: desk.finish(running),
        "flush": desk.scheduler.flush,
        "release": lambda: desk.drain(lost.room_key),
        "abort": lambda: desk.abort(running),
    }[change]()
    desk.admit()
    assert len(looks) == 1


@pytest.mark.parametrize("flushed", [False, True])
def test_it_is_matched_again_only_if_the_tree_has_changed(
    flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(16)
    desk.finish(desk.start("x", 12, max_new=1))
    hog = desk.start("H", 41, max_new=1, cacheable=False)
    waits = desk.add("xy", 24, max_new=1)
    matches: list[Any] = []
    match = desk.pages.match
    monkeypatch.setattr(desk.pages, "match", lambda *args: matches.append(args) or match(*args))
    assert desk.admit() == []
    assert not matches, "what `add` found holds"
    desk.start(
        "xz", 13, max_new=1
    )  # its match is locked by another now, which is no change of the tree
    assert len(matches) == 1, "of the other"
    if flushed:
        desk.scheduler.flush()
    desk.finish(hog)
    assert desk.admit() == ["xy"]
    assert len(matches) == 1 + flushed
    assert waits.prefix_len == (0 if flushed else 12)


def test_rows_are_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(rows=1)
    first = desk.add("a", 4)
    desk.add("b", 4)
    assert desk.admit() == ["a"]
    looks = desk.count_looks(monkeypatch)
    assert desk.admit() == []
    assert not looks, "without a row there is nothing to look for"
    desk.abort(first)
    assert desk.admit() == ["b"]


def test_a_prompt_that_is_cached_whole_promises_no_page_and_still_opens_its_room() -> None:
    desk = Desk()
    desk.finish(desk.start("a", list(range(8))))
    desk.commands()
    req = desk.admitted("b", list(range(8)))
    [command] = desk.commands()
    assert (command.promise.prefix_len, command.promise.pages) == (8, b"")
    desk.succeed(req.room_key, b"first")
    assert desk.transferred() == ["b"]
    assert req.aux == b"first"


def test_what_the_match_itself_would_lock_is_no_room() -> None:
    desk = Desk(4)
    desk.finish(desk.start("a", list(range(8))))
    running = desk.start("r", 8, max_new=1, cacheable=False)
    req = desk.add("b", list(range(12)), max_new=1)
    assert desk.admit() == [], "the two evictable pages are its own prefix"
    desk.finish(running)
    assert (desk.admit(), req.prefix_len) == (["b"], 8)


def test_the_reserve_keeps_room_for_those_admitted_before() -> None:
    desk = Desk(5, reserve_tokens=8)
    desk.add("a", 4, max_new=8)
    desk.add("b", 4, max_new=8)
    assert desk.admit() == ["a"], (
        "a may need two pages more, so of four only two are b's to count on"
    )
    assert desk.states() == {"OWNED": 1, "FREE": 4}, "kept back, not taken"


# --- what waits is evicted last -------------------------------------------------------------------


def waiting_behind_a_hog(admission: str) -> tuple[Desk, DecodeRequest]:
    """8 pages: "a" and then "b" left 2 each in the tree, a hog has 3, and "a" has come again, with
    more than there is room for."""
    desk = Desk(8, policy="lru", admission=admission)
    for rid in "ab":
        desk.finish(desk.start(rid, 8, max_new=1))
    desk.start("H", 11, max_new=1)
    waits = desk.add("a again", 24, max_new=1)
    assert desk.admit() == []
    return desk, waits


@pytest.mark.parametrize("admission", ["hit_aware", "fifo", "priority"])
def test_what_a_waiting_request_has_cached_is_evicted_last(admission: str) -> None:
    desk, waits = waiting_behind_a_hog(admission)
    assert desk.pages.cache.num_wants == 1
    desk.evict(2)  # as another's growth would
    assert desk.prefix_of(waits) == 8
    desk.evict(1)
    assert desk.prefix_of(waits) == 4, "softly: nothing else was left"


def test_what_comes_in_the_same_pass_is_protected_from_its_evictions() -> None:
    desk = Desk(8, policy="lru", admission="fifo")
    for rid in "ab":
        desk.finish(desk.start(rid, 8, max_new=1))
    desk.add("new", 23, max_new=1)  # takes 6 pages: 4 are free
    waits = desk.add("a again", 12, max_new=1)
    assert desk.admit() == ["new"]
    assert desk.prefix_of(waits) == 8


def test_what_was_retracted_is_protected_from_the_append_that_it_made_room_for() -> None:
    desk = Desk(policy="lru")
    old, young = desk.start("a", 7, max_new=40), desk.start("b", 8, max_new=4)
    desk.finish(desk.start("c", 8, max_new=1))
    desk.token(old, young)
    desk.retract(young)
    desk.evict(2)  # those of "c", which were used last
    assert desk.prefix_of(young) == 8


@pytest.mark.parametrize("end", ["admitted", "aborted", "flushed"])
def test_a_request_that_waits_no_longer_protects_nothing(end: str) -> None:
    desk, waits = waiting_behind_a_hog("hit_aware")
    hog = next(iter(desk.scheduler.requests.values()))
    if end == "aborted":
        desk.abort(waits)
    elif end == "admitted":
        desk.finish(hog)
        assert desk.admit() == ["a again"]
    else:
        desk.scheduler.flush()
        assert desk.pages.cache.num_wants == 1, "it waits still"
        desk.abort(waits)
    assert desk.pages.cache.num_wants == 0


@pytest.mark.parametrize("how", ["uncacheable", "no cache"])
def test_what_is_not_cached_is_not_wanted(how: str) -> None:
    desk = Desk(8, caching=how != "no cache")
    desk.start("H", 27, max_new=1)
    desk.add("a", 8, max_new=1, cacheable=how != "uncacheable")
    assert desk.admit() == []
    assert desk.pages.cache.num_wants == 0


@given(
    st.integers(4, 14), st.sampled_from([0, 3]),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 6),
            st.sampled_from(["run", "finish", "abort"]),
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_what_is_admitted_fits_as_the_match_said(
    num_pages: int, reserve: int, prompts: list[tuple[list[int], int, str]]
) -> None:
    """Over trees of all shapes: opening never fails, and a request has exactly the pages of its
    prompt."""
    desk = Desk(num_pages, rows=3, reserve_tokens=reserve)
    running = []
    for number, (tokens, max_new, then) in enumerate(prompts):
        if pages_for(len(tokens) + max_new, PAGE_SIZE) > num_pages:
            continue
        req = desk.add(f"r{number}", tokens, max_new)
        before = desk.pages.available_pages
        for rid in desk.admit():
            admitted = desk.scheduler.requests[rid]
            assert len(admitted.pages) == pages_for(len(admitted.request.key), PAGE_SIZE)
            assert len(np.unique(admitted.pages)) == len(admitted.pages)
            desk.succeed(admitted.room_key)
        assert desk.pages.available_pages <= before
        running += [desk.scheduler.requests[rid] for rid in desk.transferred()]
        if then == "abort":
            desk.abort(req)
            running = [other for other in running if other is not req]
        elif then == "finish" and running:
            desk.finish(running.pop(0))
    for req in list(desk.scheduler.requests.values()):
        desk.abort(req)


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [None, 500.0])
def test_a_request_that_has_ended_is_not_held_until_its_deadline_would_have_come(
    deadline_s: float | None,
) -> None:
    """It holds its prompt, and a service has many in the ten minutes of `longest_wait_s`."""
    desk = Desk(waiting_timeout_s=600.0)
    for number in range(300):
        req = desk.start(f"ended {deadline_s} {number}", max_new=1, deadline_s=deadline_s)
        desk.finish(req)
        desk.commands()
    gc.collect()
    held = [one for one in gc.get_objects() if type(one) is DecodeRequest]
    assert sum(one.rid.startswith(f"ended {deadline_s} ") for one in held) < 100
