"""Running requests grow: their tokens, their pages and their keys, against what a list says; and
pages ahead of the tokens, for a step that writes more KV than that of the newest token."""

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.errors import CallerError, OutOfPagesError, RequestError
from prefixkv.paging import pages_for
from tests.support.gates import Gate
from tests.support.picture import picture
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


CAN_RUN = (DecodeState.TRANSFERRED, DecodeState.RUNNING)


@pytest.mark.parametrize("how", ["finish", "retract", "abort"])
def test_an_ended_request_gets_no_token_though_its_pages_have_room(how: str) -> None:
    desk = Desk()
    desk.start("old", 4)
    req, event = desk.start("a", 9, max_new=9, outputs=1), Gate()
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
    seen = picture(desk.scheduler)
    with pytest.raises(RequestError, match="0 tokens for 1 requests"):
        append([reqs[0]], [])
    assert picture(desk.scheduler) == seen
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


def reserve(desk: Desk, num_tokens: Any, *reqs: DecodeRequest) -> None:
    desk.scheduler.reserve_many(reqs, num_tokens)
    desk.scheduler.check_invariants()


@pytest.mark.parametrize("num_tokens", range(20))
def test_there_are_pages_for_so_much_kv_and_no_more(num_tokens: int) -> None:
    desk = Desk(32)
    req = desk.start("a", tokens=6, max_new=12, outputs=2)
    assert (req.kv_len, len(req.pages)) == (7, 2)
    reserve(desk, num_tokens, req)
    # The step writes kv_len .. kv_len + num_tokens; its last token of all has no KV.
    most = min(7 + num_tokens, 6 + 12 - 1)
    assert len(req.pages) == max(2, -(-most // PAGE_SIZE))


def test_the_tokens_grow_into_them() -> None:
    """No page is taken twice, and at the end all come back."""
    desk = Desk(8)
    req = desk.start("a", tokens=6, max_new=12)
    reserve(desk, 9, req)  # also before its first token
    pages = req.pages.tolist()
    assert len(pages) == 4
    free = desk.pages.allocator.free_pages
    for _ in range(10):
        desk.token(req)
    assert req.pages.tolist() == pages
    assert desk.pages.allocator.free_pages == free
    desk.token(req)
    desk.token(req)
    assert len(req.pages) == 5
    desk.finish(req)
    assert desk.pages.allocator.owned_pages == 0


def test_all_or_none_and_the_fewest_are_named() -> None:
    desk = Desk(9)
    oldest = desk.start("a", tokens=7, max_new=12, outputs=1)
    other = desk.start("b", tokens=7, max_new=12, outputs=1)
    young = desk.start("c", tokens=7, max_new=12, outputs=1)
    before = [req.pages.tolist() for req in (oldest, other, young)]
    assert desk.pages.allocator.free_pages == 3
    with pytest.raises(OutOfPagesError) as caught:
        reserve(desk, 9, oldest, other, young)  # two pages each
    assert (caught.value.needed, caught.value.free) == (6, 3)
    # One of them gives its two pages, and needs no two more.
    assert len(caught.value.retract) == 1
    assert caught.value.retract[0] in ("b", "c")
    assert [req.pages.tolist() for req in (oldest, other, young)] == before
    desk.token(oldest, other, young)  # a step without drafts still has its pages
    desk.retract(young)
    reserve(desk, 8, oldest, other)


def test_an_aborted_one_is_left_out_and_what_does_not_run_is_refused() -> None:
    desk = Desk(32)
    gone, stays = (desk.start(rid, tokens=6, max_new=12, outputs=1) for rid in "ab")
    desk.abort(gone)
    reserve(desk, 8, gone, stays)
    assert (len(gone.pages), len(stays.pages)) == (0, 4)
    waiting = desk.add("c")
    for reqs, num_tokens, error in (
        ([waiting], 1, RequestError), ([stays, stays], 1, RequestError),
        ([stays], -1, CallerError), ([stays], 1.5, CallerError), ([stays], True, CallerError),
    ):  # fmt: skip
        before = stays.pages.tolist()
        with pytest.raises(error):
            reserve(desk, num_tokens, *reqs)
        assert stays.pages.tolist() == before
    desk.finish(stays)
    with pytest.raises(RequestError, match="finished"):
        reserve(desk, 1, stays)
