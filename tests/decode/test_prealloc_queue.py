"""Admission: in order, only what fits, and no look at a head for which nothing has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.decode.request import DecodeState
from prefixkv.paging import pages_for
from prefixkv.protocol.messages import Promise
from tests.decode.desk import PAGE_SIZE, Desk, OpenRoom


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
    assert len(looks) == 1
    desk.add("small", 4)
    desk.token(running)
    assert desk.admit() == []
    assert len(looks) == 1, (
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
    lost = desk.add("l", 4, max_new=1)
    desk.admit()
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
def test_it_is_matched_anew_only_if_the_tree_has_changed(
    flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(16)
    desk.finish(desk.start("x", 12, max_new=1))
    hog = desk.start("H", 40, max_new=1, cacheable=False)
    waits = desk.add("xy", 24, max_new=1)
    matches: list[Any] = []
    match = desk.books.match
    monkeypatch.setattr(desk.books, "match", lambda *args: matches.append(args) or match(*args))
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


def test_what_is_promised_skips_the_prefix_and_names_the_new_pages() -> None:
    desk = Desk()
    desk.finish(desk.start("a", list(range(8))))
    desk.commands()
    req = desk.add("b", [*range(8), 50, 51, 52], max_new=9, room=70)
    desk.admit()
    assert desk.commands() == [
        OpenRoom(
            Promise(70, 0, 11, 8, req.pages[2:3].astype("<i4").tobytes(), ticket=2), "p",
            req.request.digest,
        )
    ]  # fmt: skip
    assert (req.state, req.prefix_len, len(req.pages)) == (DecodeState.PREALLOCATED, 8, 3)
    assert desk.scheduler.counters["hit_tokens"] == 8


def test_a_prompt_that_is_cached_whole_promises_no_page_and_still_opens_its_room() -> None:
    desk = Desk()
    desk.finish(desk.start("a", list(range(8))))
    desk.commands()
    req = desk.add("b", list(range(8)))
    desk.admit()
    [command] = desk.commands()
    assert (command.promise.prefix_len, command.promise.pages) == (8, b"")
    desk.succeed(req.room_key, b"first")
    assert desk.transferred() == ["b"]
    assert req.aux == b"first"


def test_one_that_comes_to_run_first_finds_its_pages_also_when_nobody_can_be_retracted() -> None:
    desk = Desk(4)
    first = desk.add("a", 4, max_new=8)
    for rid in "bcd":
        desk.add(rid, 4, max_new=4)
    assert desk.admit() == ["a", "b"], "the last two pages are what the first may still need"
    desk.succeed(first.room_key)
    desk.transferred()
    for _ in range(8):
        desk.token(first)
    desk.finish(first)
    assert desk.admit() == ["c", "d"], (
        "of the three pages now, one is what any of them may still need"
    )


def test_what_the_match_itself_would_lock_is_no_room() -> None:
    desk = Desk(4)
    desk.finish(desk.start("a", list(range(8))))
    running = desk.start("r", 8, max_new=1, cacheable=False)
    req = desk.add("b", list(range(12)), max_new=1)
    assert desk.admit() == [], "the two evictable pages are its own prefix"
    desk.finish(running)
    assert (desk.admit(), req.prefix_len) == (["b"], 8)


def test_the_reserve_is_never_more_than_may_still_be_generated() -> None:
    desk = Desk(2, reserve_tokens=100)
    desk.add("a", 4, max_new=4)
    assert desk.admit() == ["a"]


def test_the_reserve_keeps_room_for_those_admitted_before() -> None:
    desk = Desk(5, reserve_tokens=8)
    desk.add("a", 4, max_new=8)
    desk.add("b", 4, max_new=8)
    assert desk.admit() == ["a"], (
        "a may need two pages more, so of four only two are b's to count on"
    )
    assert desk.states() == {"OWNED": 1, "FREE": 4}, "kept back, not taken"


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
        before = desk.books.available_pages
        for rid in desk.admit():
            admitted = desk.scheduler.requests[rid]
            assert len(admitted.pages) == pages_for(len(admitted.request.key), PAGE_SIZE)
            assert len(np.unique(admitted.pages)) == len(admitted.pages)
            desk.succeed(admitted.room_key)
        assert desk.books.available_pages <= before
        running += [desk.scheduler.requests[rid] for rid in desk.transferred()]
        if then == "abort":
            desk.abort(req)
            running = [other for other in running if other is not req]
        elif then == "finish" and running:
            desk.finish(running.pop(0))
    for req in list(desk.scheduler.requests.values()):
        desk.abort(req)
    desk.carry_out_aborts()
    desk.at_rest()
