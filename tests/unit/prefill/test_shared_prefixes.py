"""Requests that wait for a prefix which another computes: what that saves, and that it always
ends."""

from collections import deque
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from prefixkv.errors import CallerError
from prefixkv.prefill.request import PrefillRequest, PrefillState
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import SendChunk
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId
from prefixkv.request import Request
from tests.laws.auditor import assert_at_rest
from tests.support.schedulers import prefill_scheduler
from tests.support.steps import num_steps
from tests.unit.prefill.test_prefill_scheduler import PAGE_SIZE, Desk

SYSTEM = list(range(100, 100 + 4 * PAGE_SIZE))


def desk_of(**how: Any) -> Desk:
    return Desk(how.pop("num_pages", 64), follow_s=1.0, rows=how.pop("rows", 80), **how)


def burst(desk: Desk, size: int, system: list[int] = SYSTEM, **fields: Any) -> list[PrefillRequest]:
    """Promised, with one system prompt and a page and a bit of its own each."""
    return [desk.promised(f"r{at}", [*system, *[1000 + at] * 6], **fields) for at in range(size)]


def serve(desk: Desk, chunk: int, in_turn: bool, fails_at: int = 0) -> int:
    """To the end; returns the tokens computed. The first fails once so many of its are."""
    computing: dict[PrefillRequest, int] = {}
    total = 0
    while desk.scheduler.requests:
        for req in desk.scheduler.pop_bootstrapped():
            computing[req] = req.prefix_len
        assert computing, "all wait, and nothing is computed"
        first = next(iter(computing))
        if fails_at and computing[first] >= fails_at:
            fails_at = 0
            del computing[first]
            desk.end(first, ok=False)
            desk.source_free(first)
            assert desk.pop_failed() == [first]
            continue
        for req in list(computing)[: 1 if in_turn else None]:
            end = min(computing[req] + chunk, req.num_tokens)
            total += end - computing[req]
            computing[req] = end
            desk.send(req, end, last=end == req.num_tokens)
            if end == req.num_tokens:
                del computing[req]
                desk.done(req)
    return total


# --- what it saves --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("chunk", [3, PAGE_SIZE, 7, 1000])
def test_a_burst_behind_one_system_prompt_computes_it_once(chunk: int, in_turn: bool) -> None:
    desk = desk_of(num_pages=1000)
    burst(desk, 64)
    assert serve(desk, chunk, in_turn) == len(SYSTEM) + 64 * 6
    assert desk.scheduler.counters["followed"] == 63
    assert_at_rest(desk.scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize(("fails_at", "chunk"), [(1, 3), (101, 50), (399, 30)])
def test_a_burst_whose_first_fails_computes_what_that_had_no_second_time(
    fails_at: int, chunk: int, in_turn: bool
) -> None:
    """But for the page in which it ended."""
    system = list(range(100, 500))
    desk = desk_of(num_pages=1000)
    burst(desk, 64, system)
    total = serve(desk, chunk, in_turn, fails_at)
    assert total <= len(system) + 63 * 6 + PAGE_SIZE - 1
    assert total <= 1.05 * (len(system) + 64 * 6)
    assert_at_rest(desk.scheduler)


def test_followers_come_when_the_common_part_is_there_and_not_when_the_leader_is_done() -> None:
    desk = desk_of()
    first, *_ = burst(desk, 3)
    assert desk.next_pass() == ["r0"]
    assert desk.next_pass() == []
    desk.send(first, 7)
    assert desk.next_pass() == []
    desk.send(first, len(SYSTEM) + 1)
    assert desk.next_pass() == ["r1", "r2"]
    assert [req.prefix_len for req in desk.scheduler.requests.values()] == [0, 16, 16]


def test_one_that_waits_holds_nothing_and_what_came_later_passes_it() -> None:
    desk = desk_of(num_pages=8)
    burst(desk, 2)
    desk.promised("x", 8)
    assert desk.next_pass() == ["r0", "x"]
    assert desk.states() == {"OWNED": 8}
    assert not desk.scheduler.has_results, "nothing to look at before a chunk is computed"


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 9),
    st.booleans(),
)
def test_each_begins_where_all_that_was_handed_out_before_it_ends(
    prompts: list[tuple[list[int], int]], chunk: int, in_turn: bool
) -> None:
    """So nothing is computed twice, whether the engine works in turn or side by side."""
    desk = desk_of(num_pages=200)
    arrivals, computing = deque(prompts), dict[PrefillRequest, int]()
    order: list[PrefillRequest] = []
    pause = 0
    while arrivals or desk.scheduler.requests:
        while arrivals and not pause:
            tokens, pause = arrivals.popleft()
            desk.promised(f"r{len(prompts) - len(arrivals)}", tokens)
        pause = max(0, pause - 1)
        for req in desk.scheduler.pop_bootstrapped():
            common = [_common(req.tokens.tolist(), before.tokens.tolist()) for before in order]
            assert req.prefix_len == min(
                max(common, default=0), (req.num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
            )
            computing[req] = req.prefix_len
            order.append(req)
        for req in list(computing)[: 1 if in_turn else None]:
            computing[req] = end = min(computing[req] + chunk, req.num_tokens)
            desk.send(req, end, last=end == req.num_tokens)
            if end == req.num_tokens:
                del computing[req]
                desk.done(req)
    event(f"some followed: {desk.scheduler.counters['followed'] > 0}")
    assert desk.scheduler.counters["overtaken"] == 0
    assert_at_rest(desk.scheduler)


def _common(tokens: list[int], others: list[int]) -> int:
    """Whole pages, in tokens."""
    at = 0
    while tokens[at : at + PAGE_SIZE] == others[at : at + PAGE_SIZE] and at + PAGE_SIZE <= min(
        len(tokens), len(others)
    ):
        at += PAGE_SIZE
    return at


# --- what goes to the tree, and when --------------------------------------------------------------


def test_a_chunk_is_on_its_way_before_its_pages_go_to_the_tree() -> None:
    desk = desk_of()
    req = desk.computing("a", 10)
    desk.send(req, 9)
    assert [type(command) for command in desk.scheduler.take_commands()] == [SendChunk]
    assert desk.states() == {"FREE": 61, "OWNED": 3}
    assert desk.next_pass() == []
    assert desk.states() == {"FREE": 61, "CACHED": 2, "OWNED": 1}
    assert desk.pages.cache.protected_pages == 2, "its writes may read them"


# --- handing over ---------------------------------------------------------------------------------


def test_when_the_first_fails_one_goes_on_where_it_was_and_the_others_wait_for_that() -> None:
    desk = desk_of()
    first, second, *_ = burst(desk, 4)
    assert desk.next_pass() == ["r0"]
    desk.send(first, 10)
    desk.end(first, ok=False)
    assert desk.scheduler.has_results
    assert desk.next_pass() == ["r1"]
    assert second.prefix_len == 8, "what the first had computed is used"
    desk.send(second, 12)
    assert desk.next_pass() == []
    desk.scheduler.abort("r1")
    assert desk.next_pass() == ["r2"]
    assert desk.scheduler.requests["r2"].prefix_len == 12


def test_the_step_that_computed_the_first_as_it_failed_is_not_lost() -> None:
    """The engine hears of the end after it."""
    desk = desk_of()
    first, second, *_ = burst(desk, 4)
    assert desk.next_pass() == ["r0"]
    desk.send(first, 3)
    assert desk.next_pass() == []
    desk.end(first, ok=False)
    assert desk.send(first, 10) == 0
    assert desk.send(first, 2) == desk.send(first, 1000) == 0, "what cannot be says nothing"
    assert desk.next_pass() == ["r1"]
    assert second.prefix_len == 8
    assert desk.pop_failed() == [first]
    assert desk.send(first, 16) == 0, "its pages are the engine's no more"
    desk.source_free(first)
    assert desk.send(first, 16) == 0
    desk.scheduler.abort("r1")
    assert desk.next_pass() == ["r2"]
    assert desk.scheduler.requests["r2"].prefix_len == 8


def test_a_leader_that_is_passed_over_is_waited_for_as_long_as_computing_it_would_take() -> None:
    desk = desk_of()
    burst(desk, 3)
    assert desk.next_pass() == ["r0"]
    other = desk.computing("x", 100)
    desk.send(other, len(SYSTEM) - 1)
    assert desk.next_pass() == []
    desk.send(other, len(SYSTEM))
    assert desk.scheduler.has_results
    assert desk.next_pass() == ["r1"], "the next waits for this one now"
    assert desk.scheduler.counters["overtaken"] == 2


def test_what_was_handed_out_earlier_says_nothing_of_the_leader() -> None:
    desk = desk_of()
    long = desk.computing("x", 100)
    burst(desk, 2)
    assert desk.next_pass() == ["r0"]
    desk.send(long, 100, last=True)
    assert desk.next_pass() == []


def test_where_nothing_at_all_is_computed_one_goes_on_alone_after_follow_s() -> None:
    desk = desk_of()
    first, *_ = burst(desk, 3)
    scheduler = desk.scheduler
    scheduler.now_s = 5.0
    assert [req.rid for req in scheduler.pop_bootstrapped()] == ["r0"]
    assert scheduler.wake_s == 6.0
    scheduler.now_s = 5.5
    scheduler.send_chunk(first, 2)
    assert scheduler.wake_s == 6.5
    scheduler.now_s = 6.4
    assert scheduler.pop_bootstrapped() == []
    scheduler.now_s = 6.5
    assert [req.rid for req in scheduler.pop_bootstrapped()] == ["r1"]
    assert scheduler.wake_s == 7.5
    scheduler.now_s = 7.5
    assert [req.rid for req in scheduler.pop_bootstrapped()] == ["r2"]
    assert scheduler.wake_s == float("inf")


def test_one_that_does_not_fit_keeps_time_from_waking_those_behind_it() -> None:
    desk = desk_of(num_pages=12)
    burst(desk, 1)
    assert desk.next_pass() == ["r0"]
    desk.promised("b", 48)
    desk.promised("late", [*SYSTEM, 1])
    assert desk.next_pass() == []
    assert desk.scheduler.wake_s == float("inf")
    assert not desk.scheduler.has_results


# --- who waits for whom ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("desk", "fields"),
    [(desk_of(), {"cacheable": False}), (desk_of(caching=False), {}), (Desk(64, rows=80), {})],
    ids=["not cacheable", "no cache", "follow_s of 0"],
)
def test_where_nothing_would_be_found_nothing_is_waited_for(
    desk: Desk, fields: dict[str, Any]
) -> None:
    burst(desk, 3, **fields)
    assert desk.next_pass() == ["r0", "r1", "r2"]


def test_one_that_is_aborted_while_it_waits_is_gone() -> None:
    desk = desk_of()
    first, *_ = burst(desk, 2)
    assert desk.next_pass() == ["r0"]
    desk.scheduler.abort("r1")
    desk.scheduler.check_invariants()
    assert desk.scheduler.wake_s == float("inf")
    assert [req.rid for req in desk.pop_failed()] == ["r1"]
    desk.send(first, len(SYSTEM))
    assert not desk.scheduler.has_results


def test_one_whose_wait_was_over_and_that_did_not_fit_does_not_wait_for_that_again() -> None:
    desk = desk_of(num_pages=13)
    burst(desk, 2)
    assert desk.next_pass() == ["r0"]
    other = desk.computing("x", len(SYSTEM) + 4)
    desk.send(other, len(SYSTEM))
    for _ in range(2):
        assert desk.next_pass() == [], "there are no pages"
        assert desk.scheduler.wake_s == float("inf"), "and time brings none"
        desk.scheduler.bootstrapped.look_again()
    desk.scheduler.abort("x")
    desk.source_free(other)
    desk.pop_failed()
    assert desk.next_pass() == ["r1"]


def test_what_is_computed_across_a_flush_is_not_waited_for() -> None:
    desk = desk_of()
    first, *_ = burst(desk, 3)
    assert desk.next_pass() == ["r0"]
    desk.scheduler.flush()
    assert desk.scheduler.has_results
    assert desk.next_pass() == ["r1"]
    desk.send(first, 20)
    assert desk.next_pass() == [], "the third waits for the second, that the flush left alone"


# --- limit ----------------------------------------------------------------------------------------


def test_no_more_than_the_limit_come_and_the_rest_is_news() -> None:
    desk = desk_of()
    reqs = [desk.promised(rid, 5) for rid in "abc"]
    with pytest.raises(CallerError, match="limit is -1"):
        desk.next_pass(limit=-1)
    assert desk.next_pass(limit=0) == []
    assert desk.next_pass(limit=2) == ["a", "b"]
    assert desk.scheduler.has_results
    assert [req.state for req in reqs][2] is PrefillState.BOOTSTRAPPED, "it holds nothing yet"
    assert desk.next_pass(limit=2) == ["c"]
    assert not desk.scheduler.has_results


# --- whatever happens -----------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "pop", "pop", "chunk", "chunk", "chunk", "end", "fail", "abort", "flush",
             "time"]
        ),
        st.integers(0, 255),
    ),
    max_size=80,
)  # fmt: skip
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=12)


@given(STEPS, PROMPTS, st.sampled_from([6, 9, 40]), st.sampled_from([1, 2, 8]))
def test_every_request_ends_whatever_happens_and_nothing_is_left(
    steps: list[tuple[str, int]], prompts: list[list[int]], pages: int, rows: int
) -> None:
    """Also in a pool that holds one request at a time, with an engine that passes some over."""
    desk = Desk(pages, rows=rows)
    desk.scheduler = scheduler = prefill_scheduler(desk.pages)
    run = Run(desk)
    for what, number in steps:
        run.step(what, number, prompts)
        scheduler.check_invariants()
    for _ in range(40 * len(run.reqs) + 40):
        run.step("pop", 0, prompts)
        if run.computing:
            run.step("chunk", 0, prompts)
        run.step("end", 0, prompts)
        scheduler.now_s += 0.3
        scheduler.check_invariants()
    assert not scheduler.requests, (scheduler.requests, run.computing)
    assert_at_rest(scheduler)
    assert run.computed <= sum(req.num_tokens for req in run.reqs)
    event(f"followed: {scheduler.counters['followed'] > 0}")
    event(f"overtaken: {scheduler.counters['overtaken'] > 0}")


class Run:
    """An engine that does whatever it is told."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.scheduler = desk, desk.scheduler
        self.reqs: list[PrefillRequest] = []
        self.computing: dict[PrefillRequest, int] = {}
        self.computed = 0

    def step(self, what: str, number: int, prompts: list[list[int]]) -> None:
        scheduler, now_s = self.scheduler, self.scheduler.now_s
        live = list(scheduler.requests.values())
        if what == "add":
            self.desk.num_rooms += 1
            request = Request(
                f"r{len(self.reqs)}",
                prompts[number % len(prompts)],
                room=self.desk.num_rooms,
                decode="decode-0",
            )
            self.reqs.append(scheduler.add(request))
            scheduler.hear(Bootstrapped(self.reqs[-1].room_key, PeerId("", 1), 0), now_s)
        elif what == "pop":
            for req in scheduler.pop_bootstrapped((None, 0, 1, 2)[number % 4]):
                self.computing[req] = req.prefix_len
            for req in scheduler.pop_failed():
                self.computing.pop(req, None)
            scheduler.pop_sent()
        elif what == "chunk" and self.computing:
            req = list(self.computing)[number % len(self.computing)]
            end = min(self.computing[req] + 1 + number % 7, req.num_tokens)
            last = end == req.num_tokens
            self.computed += end - self.computing[req]
            scheduler.send_chunk(req, end, last=last)
            self.computing[req] = end
            if last:
                del self.computing[req]
        elif what in ("end", "fail"):
            for req in live:
                if req.state.ended:
                    scheduler.hear(SourceFree(req.room_key), now_s)
                elif what == "fail" and number % 5 == 0:
                    scheduler.hear(RoomEnded(req.room_key, KVPoll.FAILED, None), now_s)
                elif req.state is PrefillState.SENDING:
                    scheduler.hear(RoomEnded(req.room_key, KVPoll.SUCCESS, None), now_s)
        elif what == "abort" and live:
            scheduler.abort(live[number % len(live)].rid)
        elif what == "flush":
            scheduler.flush()
        elif what == "time":
            scheduler.now_s += number / 100


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("sender", ["the leader", "one that was handed out later", "one before"])
def test_a_chunk_looks_at_no_follower_that_goes_on_waiting(sender: str) -> None:
    steps = []
    for size in (4, 200):
        desk = desk_of(num_pages=100)
        scheduler = desk.scheduler
        others = [desk.add(f"x{at}", [2000 + at] * 40) for at in range(2)]
        scheduler.hear(Bootstrapped(others[0].room_key, PeerId("", 1), 0), 0.0)
        assert desk.next_pass() == ["x0"]
        leader, *_ = burst(desk, size, list(range(100, 130)))
        assert desk.next_pass() == ["r0"]
        scheduler.hear(Bootstrapped(others[1].room_key, PeerId("", 1), 0), 0.0)
        assert desk.next_pass() == ["x1"]
        req = dict(zip(["one before", "one that was handed out later"], others, strict=True)).get(
            sender, leader
        )

        def chunk_and_pass(
            scheduler: PrefillScheduler = scheduler, req: PrefillRequest = req
        ) -> None:
            scheduler.send_chunk(req, 9)
            assert scheduler.pop_bootstrapped() == []

        steps.append(num_steps(chunk_and_pass))
    assert steps[1] <= steps[0] + 50


def test_followers_come_back_in_the_order_of_their_promises() -> None:
    """Whichever of them was released first, and whatever came meanwhile."""
    desk = desk_of()
    system = list(range(100, 124))
    lengths = {"a": 24, "b": 16, "c": 8, "d": 20}  # that each has in common with the first
    for name, length in {"first": 24, **lengths}.items():
        desk.promised(name, [*system[:length], *[ord(name[0])] * 6])
    first = desk.scheduler.requests["first"]
    assert desk.next_pass() == ["first"]
    desk.send(first, 20)
    desk.promised("x", 8)
    assert desk.next_pass() == ["b", "c", "d", "x"]
    desk.send(first, 25)
    assert desk.next_pass() == ["a"]
    assert desk.scheduler.counters["followed"] == 4
    assert desk.scheduler.counters["overtaken"] == 0


def test_one_that_may_not_use_the_cache_waits_for_none_that_may() -> None:
    desk = desk_of()
    for rid, cacheable in (("a", True), ("b", False), ("c", True)):
        desk.promised(rid, [*SYSTEM, 1], cacheable=cacheable)
    assert desk.next_pass() == ["a", "b"]


def test_a_chunk_within_what_was_cached_moves_no_leader_back() -> None:
    """As on a rank that had more in its cache than another."""
    desk = desk_of()
    desk.done(desk.sending("cached", SYSTEM[:8]))
    first, *_ = burst(desk, 3)
    assert desk.next_pass() == ["r0"]
    assert first.prefix_len == 8
    desk.send(first, 4)
    assert desk.next_pass() == []
    late = desk.add("late", [*SYSTEM, 1])
    assert desk.bootstrap(late) == [], "it finds the leader where it was"
    desk.send(first, len(SYSTEM))
    assert desk.next_pass() == ["r1", "r2", "late"]


def test_only_the_common_part_but_for_the_last_token_is_waited_for() -> None:
    desk = desk_of()
    for rid, tokens in (("a", SYSTEM), ("b", SYSTEM[:4]), ("c", SYSTEM[:5])):
        desk.promised(rid, tokens)
    assert desk.next_pass() == ["a", "b"], "b has one page, and has to compute its last token"
    desk.send(desk.scheduler.requests["a"], 4)
    assert desk.next_pass() == ["c"]


def test_an_engine_that_says_what_it_can_go_on_from_waits_for_nothing() -> None:
    desk = desk_of()
    desk.scheduler = prefill_scheduler(
        desk.pages, usable_prefix=lambda req, num_tokens: num_tokens, follow_s=1.0
    )
    burst(desk, 2)
    assert desk.next_pass() == ["r0", "r1"]
