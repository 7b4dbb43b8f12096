"""Pages ahead of the tokens: for a step that writes more KV than that of the newest token."""

from __future__ import annotations

from typing import Any

import pytest

from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import CallerError, OutOfPagesError, RequestError
from tests.unit.decode.desk import PAGE_SIZE, Desk


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
