"""Of what prefill sends decode computes the end itself, where it keeps checkpoints: so each prompt
leaves one where the next turn finds it."""

from typing import Any

import pytest

from prefixkv.cache.checkpoints import Checkpoints
from prefixkv.config import ComputeConfig, PageOptions
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.sources import Sources
from prefixkv.digest import prompt_digest
from prefixkv.pages.groups import GroupSpec
from prefixkv.pages.manager import PageManager
from tests.support.schedulers import decode_scheduler
from tests.unit.decode.desk import PAGE_SIZE, Desk, OpenRoom

SLOTS = 4


def desk_of(
    below: int = 3, ask: str = "late", tokens: int = 1, window: int = 0, **more: Any
) -> Desk:
    """A desk whose engine computes ends of at most `below` tokens; with states, or a window."""
    desk = Desk(60)
    windows = [GroupSpec("w", window, 40, 2 * PAGE_SIZE)] if window else []
    desk.pages = PageManager(
        60,
        PAGE_SIZE,
        8,
        options=PageOptions(num_slots=0 if window else SLOTS, num_saved=4, windows=windows),
    )
    desk.scheduler = decode_scheduler(
        desk.pages,
        reserve_tokens=0,
        sources=Sources(ComputeConfig(below=below, ask=ask)),  # type: ignore[arg-type]
        checkpoint_tokens=tokens,
        **more,
    )
    return desk


def opened(desk: Desk) -> OpenRoom:
    (command,) = [one for one in desk.commands() if isinstance(one, OpenRoom)]
    return command


def depths(desk: Desk) -> list[int]:
    assert isinstance(desk.pages.saves, Checkpoints)
    return sorted(one.depth * PAGE_SIZE for one in desk.pages.saves._at.values())


def local(desk: Desk) -> list[DecodeRequest]:
    return desk._checked(desk.scheduler.pop_local())


def computed(desk: Desk, req: DecodeRequest, end: int) -> None:
    desk._checked(desk.scheduler.computed(req, end))


@pytest.mark.parametrize("window", [0, 6])
def test_what_was_sent_leaves_a_checkpoint_before_the_end_is_computed(window: int) -> None:
    desk = desk_of(window=window)
    req = desk.admitted("a", 26)
    command = opened(desk)
    (ask,) = desk.scheduler.pop_needs_prefill()
    assert (command.promise.fill_len, len(command.promise.page_ids())) == (24, 6)
    assert command.promise.digest == prompt_digest(req.key.prefix(24))
    assert (ask.tokens.tolist(), ask.known_token) == (req.tokens[:24].tolist(), req.tokens[24])
    assert local(desk) == []
    desk.succeed(req.room_key)
    assert desk.transferred() == []
    assert local(desk) == [req]
    assert (req.prefix_len, req.fill_len) == (24, 26)
    assert req.checkpoint_slot == req.state_slot
    if not window:
        assert req.stops == [24]
        assert desk.scheduler.save_state(req, 24) == SLOTS
    computed(desk, req, 26)
    assert desk.transferred() == ["a"]
    assert depths(desk) == [24]
    counters = desk.scheduler.counters
    assert (counters["computed_tokens"], counters["computed_requests"]) == (2, 0)
    assert req.hit_tokens == 0
    # The next turn leaves the answer out, as that of a model which thinks.
    desk.token(req)
    desk.finish(req, keep_tokens=26)
    more = desk.admitted("a2", [*req.tokens[:25].tolist(), 7, 8])
    assert local(desk) == [more]
    assert more.prefix_len == 24
    assert more.saves.checkpoint.locks == 1, (
        "no other checkpoint takes its slot before it is copied"
    )
    desk.abort(more)


@pytest.mark.parametrize("window", [0, 6])
def test_a_prompt_of_whole_pages_is_sent_whole_and_its_end_is_kept(window: int) -> None:
    """Also where the answer goes on past the next page boundaries, and is left out then."""
    desk = desk_of(window=window)
    req = desk.admitted("a", 24, 20)
    assert opened(desk).promise.fill_len == 24
    desk.arrive(req)
    for _ in range(10):
        desk.token(req)
        desk.scheduler.save_states([req])
    # A state is entered once its slot is wanted for the next one, or at the request's end.
    assert depths(desk) == [24]
    desk.finish(req, keep_tokens=24)
    assert depths(desk) == [24]


def test_a_running_request_keeps_its_newest_state_under_its_own_depth() -> None:
    """And a prompt that ends there leaves nothing to compute the first token from: it goes on from
    no checkpoint."""
    desk = desk_of()
    req = desk.start("a", 24, 20)
    for _ in range(10):
        desk.token(req)
        desk.scheduler.save_states([req])
    tokens = req.tokens.tolist()
    desk.finish(req)
    assert depths(desk) == [24, 32]
    for num_tokens, goes_on_at in ((25, 24), (24, 0), (33, 32)):
        again = desk.admitted("a2", tokens[:num_tokens])
        assert local(desk) == ([again] if goes_on_at else [])
        assert not goes_on_at or again.prefix_len == goes_on_at
        desk.abort(again)
        desk.pop_failed()
        desk.carry_out_aborts()


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        ({"ask": "both"}, {}),
        ({"below": 1}, {}),
        ({}, {"cacheable": False}),
        ({}, {"may_compute": False}),
    ],
)
def test_a_prompt_is_sent_to_its_end_where_that_gives_nothing(
    make: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Prefill has it already; the end is more than is computed here; it is not to be cached; or
    prefill is to compute it."""
    desk = desk_of(**make)
    req = desk.admitted("a", 26, **fields)
    assert opened(desk).promise.fill_len == 26
    desk.arrive(req)


def test_what_was_told_to_prefill_is_cut_where_it_is_asked_again() -> None:
    desk = desk_of(ask="both", max_retries=1)
    req = desk.admitted("a", 26)
    desk.commands()
    desk.fail(req.room_key, drained=True)
    desk.admit()
    assert opened(desk).promise.fill_len == 24
    (ask,) = desk.scheduler.pop_needs_prefill()
    assert len(ask.tokens) == 24


def test_a_flush_while_it_is_sent_leaves_nothing() -> None:
    desk = desk_of()
    req = desk.admitted("a", 26)
    desk.scheduler.flush()
    desk.succeed(req.room_key)
    assert local(desk) == [req]
    assert (req.prefix_len, req.stops) == (24, [])
    computed(desk, req, 26)
    desk.transferred()
    desk.token(req)
    desk.finish(req)
    assert depths(desk) == []


def test_what_was_kept_before_a_flush_is_forgotten() -> None:
    desk = desk_of()
    req = desk.start("a", 24, 20, outputs=1)
    assert desk.scheduler.save_states([req]) == [(req.state_slot, SLOTS)]
    desk.scheduler.flush()
    desk.finish(req)
    assert depths(desk) == []


@pytest.mark.parametrize("tokens", [1, 16])
def test_its_request_may_end_while_others_wait_for_what_is_sent(tokens: int) -> None:
    """It goes on for them as far as it is sent; where that is less than its whole pages, whose rest
    nothing computes now, they ask again."""
    desk = desk_of(below=16, tokens=tokens)
    first = desk.admitted("a", 26)
    desk.commands()
    second = desk.admitted("a2", [*first.tokens[:24].tolist(), *range(40)])
    assert second.prefix_len == (24 if tokens == 1 else 16)
    desk.abort(first)
    if tokens == 1:
        desk.succeed(first.room_key)
        assert local(desk) == []
        desk.arrive(second)
    else:
        assert second.state is DecodeState.RETRACTED
        desk.carry_out_aborts()
    desk.abort(second)


@pytest.mark.parametrize("window", [0, 6])
def test_one_that_ends_when_it_is_whole_gives_its_slots_back_and_its_flight_ends(
    window: int,
) -> None:
    desk = desk_of(below=12, window=window)
    first = desk.admitted("a", 10)
    assert local(desk) == [first]
    second = desk.admitted("a2", [*first.tokens[:8].tolist(), *range(20)])
    assert second.prefix_len == 8
    if not window:
        assert desk.scheduler.save_state(first, 8) == SLOTS
        computed(desk, first, 10)
    else:
        computed(desk, first, 8)
        computed(desk, first, 10)
    assert isinstance(desk.pages.saves, Checkpoints)
    assert len(desk.pages.saves.taken) == 1
    desk.abort(first)
    assert second.state is DecodeState.RETRACTED, "this engine wrote it, and nothing is committed"
    assert desk.pages.saves.taken == []
    assert desk.transferred() == []
    assert desk.pages.cache.num_pages == 0
    desk.abort(second)
