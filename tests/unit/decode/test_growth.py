"""Running requests grow: their tokens, their pages and their keys, against what a list says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import RequestError
from prefixkv.pages.manager import PageManager
from prefixkv.paging import pages_for
from tests.support.spelled import Event
from tests.unit.decode.desk import PAGE_SIZE, Desk


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.sets(st.integers(0, 3)), st.sampled_from(["", "look", "retract", "finish"])),
        max_size=25,
    ),
)
def test_every_token_is_where_it_belongs(
    prompts: list[tuple[int, int]], steps: list[tuple[set[int], str]]
) -> None:
    """Batches of any requests in any order; whoever is looked at, or taken back and resumed, has
    all its tokens."""
    desk = Desk(64)
    reqs = [desk.start("abcd"[at], length, most) for at, (length, most) in enumerate(prompts)]
    expected: list[list[int]] = [[] for _ in reqs]

    def check(at: int) -> None:
        req, output = reqs[at], expected[at]
        prompt = req.request.key.tokens().tolist()
        assert (req.output, req.tokens.tolist()) == (output, prompt + output)
        assert req.kv_len == len(prompt) + max(0, len(output) - 1)
        with_kv = min(len(output), req.max_new_tokens - 1)  # the last token has none
        assert len(req.pages) == pages_for(len(prompt) + with_kv, PAGE_SIZE)

    token = 0
    for chosen, then in steps:
        batch = [at for at in chosen if at < len(reqs) and reqs[at].state in CAN_RUN]
        full = [at for at in batch if len(expected[at]) == reqs[at].max_new_tokens]
        token += 1
        tokens = [100 * token + at for at in batch]
        if full:
            with pytest.raises(RequestError, match=f"{reqs[full[0]].rid!r} has its"):
                desk.scheduler.append_many([reqs[at] for at in batch], tokens)
        else:
            desk.scheduler.append_many([reqs[at] for at in batch], tokens)
            for at, new in zip(batch, tokens, strict=True):
                expected[at].append(new)
        desk.scheduler.check_invariants()
        for at in batch:
            check(at)
        last = reqs[batch[-1]] if batch else None
        if last is None or not then:
            continue
        known = last.tokens.tolist()[: last.kv_len]
        if then == "look":
            assert last.key.tokens().tolist() == known
        elif then == "retract" and last is not next(req for req in reqs if req.state in CAN_RUN):
            desk.retract(last)
            assert last.output_limit == 0
            assert (
                desk.pages.cache.match_prefix(known).prefix_len
                == len(known) // PAGE_SIZE * PAGE_SIZE
            )
            assert desk.admit() == [last.rid]
            for ask in desk.scheduler.pop_needs_prefill():
                assert ask.tokens.tolist() == known
                desk.succeed(last.room_key)
            assert desk.transferred() == [last.rid]
        elif then == "finish":
            desk.finish(last)
            assert (
                desk.pages.cache.match_prefix(known).prefix_len
                == len(known) // PAGE_SIZE * PAGE_SIZE
            )
    for at in range(len(reqs)):
        if reqs[at].state in CAN_RUN:
            check(at)
            desk.finish(reqs[at])
    desk.at_rest()


CAN_RUN = (DecodeState.TRANSFERRED, DecodeState.RUNNING)


@pytest.mark.parametrize("how", ["finish", "retract", "abort"])
def test_an_ended_request_gets_no_token_though_its_pages_have_room(how: str) -> None:
    desk = Desk()
    desk.start("old", 4)
    req, event = desk.start("a", 9, max_new=9, outputs=1), Event()
    assert req.output_limit == 3
    getattr(desk, how)(req, after=event)
    assert len(req.pages) == 3, "they wait for the device"
    before = desk.snapshot()
    # A step may be under way when a request is aborted: its token is dropped.
    dropped = nullcontext() if how == "abort" else pytest.raises(RequestError, match="not run")
    with dropped:
        desk.token(req)
    assert desk.snapshot() == before
    assert len(req.output) == 1


def test_one_that_grows_by_eviction_leaves_the_blocked_head_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taking pages makes no room for anybody else, so nothing is to be looked at."""
    desk = Desk(8)
    desk.finish(desk.start("i", 16, max_new=1))
    running = desk.start("a", 12, max_new=12, outputs=1)
    desk.add("big", 28, max_new=4)
    assert desk.admit() == []
    looks: list[Any] = []
    match = desk.pages.match
    monkeypatch.setattr(desk.pages, "match", lambda *args: looks.append(args) or match(*args))
    for _ in range(4):
        desk.token(running)
        assert desk.admit() == []
    assert (desk.pages.evicted_pages, len(running.pages)) == (1, 5)
    assert not looks


def test_what_is_taken_by_eviction_is_all_that_was_free_and_what_was_evicted() -> None:
    pages = PageManager(8, PAGE_SIZE, 4)
    desk = Desk(8)
    pages = desk.pages
    idle = desk.start("i", 20, max_new=1)
    cached = idle.pages[:5].tolist()
    desk.finish(idle)
    free = pages.allocator.pages_in(0).tolist()
    assert len(free) == 3
    req = desk.admitted("a", 20, max_new=1)
    assert desk.states() == {"OWNED": 5, "CACHED": 3}
    assert req.pages.tolist() == sorted(req.pages.tolist()), (
        "neighbours side by side: they travel as one"
    )
    assert set(free) < set(req.pages.tolist()) <= set(free + cached)


def test_the_queue_keeps_its_order_whoever_leaves_it() -> None:
    desk = Desk(8, admission="fifo")
    running = desk.start("r", 20, max_new=1)
    reqs: dict[str, DecodeRequest] = {rid: desk.add(rid, 16) for rid in "abcde"}
    assert desk.admit() == []
    waiting = desk.scheduler.waiting
    desk.abort(reqs["c"])
    assert desk.admit() == []
    assert reqs["c"] not in waiting
    waiting.add(reqs.pop("c"), first=True)
    assert waiting.may_admit
    assert [req.rid for req in waiting] == ["c", "a", "b", "d", "e"]
    assert len(waiting) == 5
    waiting.remove(next(iter(waiting)))
    assert desk.admit() == []
    desk.abort(reqs["a"])
    assert waiting.may_admit, "the next one may be smaller"
    assert [req.rid for req in waiting] == ["b", "d", "e"]
    desk.finish(running)
    assert desk.admit() == ["b"]


def test_a_batch_that_was_checked_before_is_checked_for_what_may_have_changed() -> None:
    """The same list step after step, then one like it that names one twice, one of another node, or
    one that has ended."""
    desk, other = Desk(64), Desk(64)
    reqs = [desk.start(rid, 3, 9) for rid in "abc"]
    foreign = other.start("x", 3, 9, outputs=1)
    append = desk.scheduler.append_many
    for step in range(3):
        append(reqs, [step] * 3)
    before, others = desk.snapshot(), other.snapshot()
    for batch in ([*reqs, reqs[0]], [reqs[0], reqs[1], reqs[1]], [*reqs[:2], foreign]):
        for _ in range(2):  # what was refused is not taken for what was checked
            with pytest.raises(RequestError, match=r"named twice|another node's"):
                append(batch, [9] * len(batch))
        assert (desk.snapshot(), other.snapshot()) == (before, others)
    for again in (tuple(reqs), reqs[::-1]):
        append(again, [9] * 3)
    assert [req.output for req in reqs] == [[0, 1, 2, 9, 9]] * 3
    desk.finish(reqs[1])
    for batch in (reqs, [reqs[0], reqs[1], reqs[2]]):
        with pytest.raises(RequestError, match="is finished"):
            append(batch, [9] * 3)
    for req in (reqs[0], reqs[2]):
        desk.finish(req)
    other.finish(foreign)
    desk.at_rest()
