"""Decode's scheduler where layers keep a window: what is admitted, promised, held and given back in
a window group, beside pages that are as ever."""

from typing import Any

import pytest

from prefixkv.cache.checkpoints import Checkpoints
from prefixkv.config import ComputeConfig, PageOptions
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.sources import Sources
from prefixkv.errors import RequestError
from prefixkv.pages.groups import GroupSpec
from prefixkv.pages.manager import PageManager
from prefixkv.protocol.commands import OpenRoom
from prefixkv.protocol.events import RoomOverdue
from prefixkv.protocol.messages import Promise
from tests.support.schedulers import decode_scheduler
from tests.unit.decode.desk import PAGE_SIZE, Desk

WINDOW = 6  # and a step of one token: three pages


def make(
    num_pages: int = 40, windows: tuple[int, ...] = (9,), step: int = 1, **settings: Any
) -> Desk:
    desk = Desk(num_pages)
    specs = [GroupSpec(f"w{at}", WINDOW, num, step) for at, num in enumerate(windows)]
    desk.pages = PageManager(num_pages, PAGE_SIZE, 8, options=PageOptions(windows=specs))
    desk.scheduler = decode_scheduler(desk.pages, reserve_tokens=0, **settings)
    return desk


def promises(desk: Desk) -> list[Promise]:
    return [one.promise for one in desk.commands() if isinstance(one, OpenRoom)]


def tokens_of(rid: str, count: int) -> list[int]:
    """The prompt that the desk gives a request of this name."""
    return [ord(rid[0]) * 1000 + place for place in range(count)]


def test_a_promise_names_the_pages_of_the_last_window_whatever_is_cached() -> None:
    desk = make()
    desk.finish(desk.start("a", 23))
    desk.commands()
    req = desk.admitted("a2", [*tokens_of("a", 23), 1, 2, 3])
    (promise,) = promises(desk)
    assert promise.prefix_len == 20
    assert len(promise.page_ids()) == 2
    first, ids = req.window_pages("w0")
    # Token 26 sees 21 to 26: of the pages 5 and 6, though 5 is whole and cached in the full group.
    assert first == 5
    assert promise.group_ids()[0].tolist() == ids[:2].tolist()
    assert promise.num_pages == 4


def test_a_request_needs_as_many_window_pages_whatever_its_length() -> None:
    desk = make(windows=(9, 30))
    for rid, length in (("a", 5), ("b", 20), ("c", 60)):
        desk.add(rid, length, max_new=40)
    assert desk.admit() == ["a", "b", "c"]
    for number, group in enumerate(desk.pages.windows):
        assert group.allocator.owned_pages == 9, number
    req = desk.add("d", 5)
    assert desk.admit() == [], "its pages would be there, in all groups but one"
    assert "for pages of window group 'w0'" in desk.scheduler.waiting.why(req, desk.now_s)
    desk.abort(desk.scheduler.requests["b"])
    desk.carry_out_aborts()
    assert desk.admit() == ["d"]


def test_it_never_runs_out_of_window_pages_as_it_grows() -> None:
    desk = make(windows=(3,))
    req = desk.start("a", 10, 60)
    (group,) = desk.pages.windows
    pages = set(req.window_pages("w0").ids.tolist())
    assert not group.allocator.free_pages
    for token in range(59):
        desk.token(req, token=token)
        first, ids = req.window_pages("w0")
        assert set(ids.tolist()) == pages
        assert first * PAGE_SIZE <= max(0, req.kv_len + 1 - WINDOW)
        assert (first + len(ids)) * PAGE_SIZE > min(req.kv_len, req.most_kv_len - 1)
    desk.finish(req)
    assert group.allocator.free_pages == 3


def test_a_step_of_several_tokens_has_its_pages() -> None:
    desk = make(windows=(20,), step=6)
    req = desk.start("a", 9, 60)
    for _ in range(6):
        desk.scheduler.reserve_many([req], 6)
        first, ids = req.window_pages("w0")
        assert (first + len(ids)) * PAGE_SIZE >= req.kv_len + 6
        for token in range(4):
            desk.token(req, token=token)
    with pytest.raises(RequestError, match="num_tokens is 7, group 'w0' has step_tokens 6"):
        desk.scheduler.reserve_many([req], 7)


def test_a_room_that_failed_holds_them_until_it_is_drained() -> None:
    desk = make(windows=(3,))
    req = desk.admitted("a", 10)
    desk.abort(desk.scheduler.requests["a"])
    (group,) = desk.pages.windows
    assert (group.allocator.held_pages, group.allocator.free_pages) == (3, 0)
    desk.scheduler.hear(RoomOverdue(req.room_key), desk.now_s)
    assert group.allocator.quarantined_pages == 3
    desk.add("b", 10)
    assert desk.admit() == [], "nothing has proved that prefill writes them no more"
    desk.drain(req.room_key)
    assert desk.admit() == ["b"]


def test_one_that_was_retracted_has_its_window_sent_again_though_all_its_kv_is_cached() -> None:
    desk = make()
    desk.start("old", 8, 8)
    young = desk.start("young", 15, 8, outputs=2)
    assert young.kv_len == 16
    desk.commands()
    desk.retract(young)
    assert young.window_pages("w0").ids.size == 0
    desk.admit()
    (promise,) = promises(desk)
    assert (promise.prefix_len, promise.fill_len, promise.pages) == (16, 16, b"")
    assert len(promise.group_ids()[0]) == 2
    assert [ask.rid for ask in desk.scheduler.pop_needs_prefill()] == ["young"]


# --- checkpoints of what decode computes itself ---------------------------------------------------


def computing(num_window_pages: int, step: int = 4, below: int = 1000, tokens: int = 1) -> Desk:
    """A desk whose engine computes prompts, from checkpoints at multiples of `tokens`."""
    desk = Desk(60)
    specs = [GroupSpec("w0", WINDOW, num_window_pages, step)]
    desk.pages = PageManager(60, PAGE_SIZE, 8, options=PageOptions(windows=specs, num_saved=4))
    desk.scheduler = decode_scheduler(
        desk.pages,
        reserve_tokens=0,
        sources=Sources(ComputeConfig(below=below)),
        checkpoint_tokens=tokens,
    )
    return desk


def compute(desk: Desk, rid: str, tokens: int | list[int], max_new: int = 4) -> DecodeRequest:
    """A request that runs, its prompt computed in chunks of 4 tokens."""
    req = desk.add(rid, tokens, max_new)
    assert desk.admit() == [rid]
    assert desk.scheduler.pop_local() == [req]
    while (done := desk.scheduler.sources["computed"]._done.get(req)) is not None:
        desk.scheduler.computed(req, min(done + 4 - done % 4, req.fill_len))
        desk.scheduler.check_invariants()
    assert desk.transferred() == [rid]
    return req


def depths(desk: Desk) -> list[int]:
    """Of the checkpoints, in tokens."""
    assert isinstance(desk.pages.saves, Checkpoints)
    return sorted(one.depth * PAGE_SIZE for one in desk.pages.saves._at.values())


def test_a_prompt_that_runs_has_left_a_checkpoint_at_its_end() -> None:
    desk = computing(20)
    compute(desk, "a", 24)
    assert depths(desk) == [24]
    more = compute(desk, "a2", [*tokens_of("a", 24), 1, 2, 3])
    assert more.prefix_len == 24


def test_a_prompt_leaves_none_for_which_its_window_would_have_to_grow() -> None:
    """A page comes for each that a checkpoint gets, and no more are free."""
    row_pages = computing(20).pages.windows[0].row_pages
    desk = computing(row_pages)
    req = compute(desk, "a", 24, 30)
    assert depths(desk) == []
    desk.finish(req)
    assert depths(desk) == [24]


def test_an_answer_leaves_none_at_a_depth_that_its_window_has_left() -> None:
    desk = computing(20, tokens=16)
    req = compute(desk, "a", 10, 40)
    for token in range(20):
        desk.token(req, token=token)
    # Of its 29 tokens with KV the last 16 end at 16: there it has no window any more.
    desk.finish(req)
    assert depths(desk) == []
    short = compute(desk, "b", 10, 40)
    for token in range(8):
        desk.token(short, token=token)
    desk.finish(short)
    assert depths(desk) == [16]


def test_a_chunk_beyond_the_step_of_a_window_group_is_refused() -> None:
    desk = computing(20, step=8)
    req = desk.admitted("a", 24)
    assert desk.scheduler.pop_local() == [req]
    desk.scheduler.computed(req, 3)
    before = desk.snapshot()
    with pytest.raises(RequestError, match="9 tokens, step_tokens of its window groups is 8"):
        desk.scheduler.computed(req, 12)
    assert desk.snapshot() == before
    desk.scheduler.computed(req, 11)


def test_what_was_computed_before_a_flush_leaves_none() -> None:
    desk = computing(20)
    req = desk.admitted("a", 24)
    desk.scheduler.pop_local()
    for end in range(4, 25, 4):
        desk.scheduler.computed(req, end)
    desk.scheduler.flush()
    assert desk.transferred() == ["a"]
    desk.finish(req)
    assert depths(desk) == []


def test_a_state_that_was_kept_before_a_flush_is_not_entered() -> None:
    """Its pages were cached, and are in no tree any more."""
    desk = Desk(60)
    desk.pages = PageManager(60, PAGE_SIZE, 8, options=PageOptions(num_slots=4, num_saved=4))
    sources = Sources(ComputeConfig(below=0))
    desk.scheduler = decode_scheduler(desk.pages, reserve_tokens=0, sources=sources)
    for flushes in (True, False):
        req = desk.start("a", 24)
        assert desk.scheduler.save_states([req]) == [(req.state_slot, 4)]
        desk.token(req)
        if flushes:
            desk.scheduler.flush()
        desk.finish(req)
        assert depths(desk) == ([] if flushes else [24])


def test_one_whose_window_does_not_fit_is_sent_if_that_takes_less() -> None:
    """What is sent has its last window alone; what is computed begins at the front."""
    row_pages = computing(20, step=8).pages.windows[0].row_pages
    desk = computing(2 * row_pages, step=8)
    compute(desk, "a", 8, 40)
    desk.commands()
    sent = desk.admitted("b", 28, 1)
    assert desk.scheduler.pop_local() == []
    (promise,) = promises(desk)
    assert promise.prefix_len == 0
    desk.arrive(sent)


def test_the_rule_is_asked_once_for_one_whose_windows_do_not_fit_for_long() -> None:
    """It counts what it is asked as requests that come."""
    row_pages = computing(20, step=8).pages.windows[0].row_pages
    desk = computing(row_pages + 1, step=8)
    rule, asked = desk.scheduler.sources["computed"].rule, []
    rule.is_here = lambda *args, **more: asked.append(args) or True
    other = compute(desk, "a", 8, 40)
    waits = desk.add("c", 28, 1)
    asked.clear()
    for _ in range(4):
        assert desk.admit() == []
        desk.scheduler.waiting.look_again()
    assert asked == []
    desk.finish(other)
    assert desk.admit() == ["c"]
    assert len(asked) == 1
    assert desk.scheduler.pop_local() == [waits]
