"""Who is admitted first: policies by name, the bound on being overtaken, what a pass looks at, and
the budget's counters against sums made from scratch."""

import copy
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv import admission
from prefixkv.admission import AdmissionPolicy, admission_names, register_admission
from prefixkv.config import ComputeConfig
from prefixkv.decode.admission import MAX_LOOKS
from prefixkv.decode.ledger import PreallocBudget
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.sources import Sources
from prefixkv.errors import (
    AdmissionTimeoutError,
    CallerError,
    ConfigError,
    InternalError,
    RequestError,
    TransferTimeoutError,
)
from prefixkv.protocol.commands import AbortRoom, OpenRoom, RefuseRoom
from prefixkv.protocol.ids import RoomKey
from tests.unit.decode.desk import PAGE_SIZE, Desk
from tests.unit.decode.test_host_tier import HostDesk, prompt

POLICIES = ["fifo", "hit_aware", "priority"]


def blocked_desk(num_pages: int = 16, free: int = 2, **settings: Any) -> tuple[Desk, DecodeRequest]:
    """A desk whose pool one request has, but for `free` pages."""
    desk = Desk(num_pages, rows=32, **settings)
    return desk, desk.start("H", (num_pages - free) * PAGE_SIZE - 1, max_new=1, cacheable=False)


# --- the order ------------------------------------------------------------------------------------


def test_policies_are_named_and_an_unknown_one_is_refused_where_it_is_named() -> None:
    assert set(POLICIES) <= set(admission_names())
    with pytest.raises(ConfigError, match="admission: 'luck' is not one of fifo, hit_aware"):
        Desk(admission="luck")
    assert isinstance(Desk(admission=AdmissionPolicy()).scheduler.waiting._policy, AdmissionPolicy)


def test_what_is_cached_counts_not_what_is_asked_for() -> None:
    desk = Desk(24)
    desk.finish(desk.start("x", list(range(32)), max_new=1))
    desk.add("long", [*range(32), 7], max_new=1)
    desk.add("short", 8, max_new=1)
    assert desk.admit() == ["long", "short"], "one new page against two"


def test_what_was_evicted_since_the_request_came_is_not_counted_on() -> None:
    desk = Desk(24)
    for rid in "xz":
        desk.finish(desk.start(rid, 32, max_new=1))
    runs = desk.start("h", 32, max_new=8)
    req = desk.add("x2", 33, max_new=1)
    desk.pages.evict_reserve_pages = 16
    desk.token(runs)  # takes a page, for which both prompts go
    assert desk.pages.cache.num_pages == 8
    assert desk.admit() == ["x2"]
    assert (req.prefix_len, len(req.pages)) == (0, 9)


def test_priority_goes_before_arrival_and_is_waited_for() -> None:
    desk, hog = blocked_desk(16, 2, admission="priority")
    for rid, tokens, priority in (("a", 4, 0), ("b", 12, 5), ("c", 4, 5), ("d", 4, -1)):
        desk.add(rid, tokens, max_new=1, priority=priority)
    assert desk.admit() == [], "the first one needs three pages"
    desk.finish(hog)
    assert desk.admit() == ["b", "c", "a", "d"]


def test_one_of_your_own_is_registered_by_a_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_POLICIES", copy.deepcopy(admission._POLICIES))

    @register_admission
    class ShortestPrompt(AdmissionPolicy):
        name = "shortest_prompt"
        overtakes = True

        def rank(self, req: DecodeRequest, new_pages: int) -> int:
            return req.prompt_len

    desk, hog = blocked_desk(24, 0, admission="shortest_prompt")
    for rid, tokens in (("a", 16), ("b", 5), ("c", 12), ("d", 4)):
        desk.add(rid, tokens, max_new=1)
    desk.finish(hog)
    assert desk.admit() == ["d", "b", "c", "a"]


@pytest.mark.parametrize(
    ("rank", "error"),
    [("text", CallerError), (float("nan"), CallerError), (None, ZeroDivisionError)],
)
def test_a_rank_that_is_none_leaves_nothing_of_its_request(
    rank: Any, error: type[Exception]
) -> None:
    class Broken(AdmissionPolicy):
        def rank(self, req: DecodeRequest, new_pages: int) -> Any:
            return 1 if req.rid != "b" else 1 / 0 if rank is None else rank

    desk, _ = blocked_desk(16, 2, admission=Broken())
    desk.add("a", 40)
    before, workers = desk.snapshot(), desk.scheduler.workers.all()
    for _ in range(3):
        with pytest.raises(error):
            desk.scheduler.add(desk.request("b", room=50, prefill="q"))
        assert (desk.snapshot(), desk.scheduler.workers.all()) == (before, workers)
        desk.scheduler.check_invariants()


class RaisesOf(AdmissionPolicy):
    """The fewest new pages first; of the requests named it raises once the tree is not empty."""

    overtakes = True
    rids = ""
    cache: Any = None

    def rank(self, req: DecodeRequest, new_pages: int) -> Any:
        if req.rid in self.rids and self.cache.num_pages:
            raise ZeroDivisionError
        return new_pages


def desk_halfway() -> tuple[Desk, DecodeRequest, DecodeRequest]:
    """A pass has admitted "a", and "b" though a policy raised when it looked at it, and has raised
    that in the end."""
    policy = RaisesOf()
    desk = Desk(24, rows=32, admission=policy)
    hog = desk.start("H", 20, max_new=1)
    first, second = desk.add("a", 4, max_new=1), desk.add("b", 8, max_new=1)
    desk.finish(hog)
    policy.rids, policy.cache = "b", desk.pages.cache
    desk.commands()
    with pytest.raises(ZeroDivisionError):
        desk.admit()
    desk.scheduler.check_invariants()
    policy.rids = ""
    return desk, first, second


def test_a_request_admitted_before_a_policy_raised_is_in_flight() -> None:
    desk, first, second = desk_halfway()
    assert first.state is DecodeState.PREALLOCATED
    assert [
        command.promise.room for command in desk.commands() if isinstance(command, OpenRoom)
    ] == [first.room, second.room]
    assert desk.admit() == ["a", "b"], "the caller hears of it with the next call"
    assert desk.admit() == []
    for req in (first, second):
        desk.succeed(req.room_key)
    assert desk.transferred() == ["a", "b"]


@pytest.mark.parametrize("end", ["abort", "fail", "succeed"])
def test_a_request_admitted_before_a_policy_raised_may_end_before_the_caller_sees_it(
    end: str,
) -> None:
    desk, first, second = desk_halfway()
    if end == "abort":
        desk.abort(first)
        desk.carry_out_aborts()
    elif end == "fail":
        desk.fail(first.room_key, drained=True)
    else:
        desk.arrive(first)
        desk.finish(first)
    assert desk.admit() == ["b"]
    desk.succeed(second.room_key)
    desk.transferred()


def test_a_policy_that_raises_at_every_pass_stops_no_deadline() -> None:
    policy = RaisesOf()
    desk = Desk(24, rows=32, admission=policy)
    policy.cache = desk.pages.cache
    desk.finish(desk.start("H", 20, max_new=1))
    desk.start("hog", 60, max_new=1)
    late = desk.add("L", 80, max_new=1, deadline_s=1.0)
    policy.rids = "L"
    for now_s in (0.5, 0.6, 0.7, 2.0):
        desk.now_s = now_s
        desk.pages.version += 1  # so that it is looked at
        with suppress(ZeroDivisionError):
            desk.admit()
    assert desk.pages.errors.num > 0
    assert [req.rid for req in desk.pop_failed()] == ["L"]
    assert isinstance(late.error, AdmissionTimeoutError)


def test_a_policy_that_raises_at_every_look_keeps_no_request_waiting() -> None:
    """Every second call returns what was admitted, and requests of which it raises are among
    them."""
    policy = RaisesOf()
    desk = Desk(24, rows=32, admission=policy)
    policy.cache = desk.pages.cache
    hog = desk.start("H", 20, max_new=1)
    for rid in "abcd":
        desk.add(rid, 4, max_new=1)
    policy.rids = "abcd"
    desk.finish(hog)
    admitted: list[str] = []
    for _ in range(6):
        with suppress(ZeroDivisionError):
            admitted += desk.admit()
        desk.scheduler.check_invariants()
    assert sorted(admitted) == ["a", "b", "c", "d"]


def test_ranks_that_raise_where_they_are_compared_are_taken_as_plain_numbers() -> None:
    class Moody(float):
        def __lt__(self, other: object) -> bool:
            raise ZeroDivisionError

    class Broken(AdmissionPolicy):
        def rank(self, req: DecodeRequest, new_pages: int) -> Any:
            return Moody(-req.request.priority)

    desk = Desk(24, admission=Broken())
    for rid, priority in (("a", 0), ("b", 5)):
        desk.add(rid, 4, max_new=1, priority=priority)
    assert desk.admit() == ["b", "a"]


# --- nobody starves -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["hit_aware", "priority"])
def test_a_stream_of_small_ones_passes_a_large_one_only_until_its_patience_ends(
    policy: str,
) -> None:
    desk = Desk(16, rows=32, admission=policy, patience_s=10.0)
    small = [desk.start("s", 16, max_new=1, cacheable=False)]
    large = desk.add("L", 56, max_new=1, priority=-1)
    overtook = 0
    for step in range(200):
        desk.now_s = step * 1.0
        desk.add(f"t{step}", 16, max_new=1, cacheable=False)
        overtook += len([rid for rid in desk.admit() if rid != "L"])
        if large.state is not DecodeState.QUEUED:
            break
        for req in [
            req for req in desk.scheduler.requests.values() if req.state is DecodeState.PREALLOCATED
        ]:
            desk.succeed(req.room_key)
        small += [desk.scheduler.requests[rid] for rid in desk.transferred()]
        if small:
            desk.finish(small.pop(0))
    assert large.state is DecodeState.PREALLOCATED
    assert 10 <= desk.now_s <= 16, "nothing has overtaken it since it had waited for 10 s"
    assert overtook >= 5


def test_the_oldest_is_looked_at_when_its_patience_ends_though_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk, _ = blocked_desk(16, 4, patience_s=5.0)
    late = desk.add("L", 40, max_new=1)
    looks = desk.count_looks(monkeypatch)
    assert desk.admit() == []
    assert len(looks) == 1
    desk.now_s = 6.0
    desk.add("s", 4, max_new=1)
    assert desk.admit() == [], "it would fit, but is overtaking"
    assert late.state is DecodeState.QUEUED
    desk.abort(late)
    assert desk.admit() == ["s"]


def test_an_engine_that_only_sleeps_wakes_when_the_patience_of_the_oldest_ends() -> None:
    """It lacks one page, but its estimate is of a time when nothing of it was cached, and the looks
    go to others: it fits by nothing but its age."""
    desk = Desk(13, rows=8, admission="hit_aware", patience_s=5.0)
    hogs = [
        desk.start(rid, tokens, max_new=1, cacheable=False) for rid, tokens in (("h", 16), ("g", 4))
    ]
    late = desk.add("L", [*range(32), 99], max_new=1)
    for number in range(60):
        desk.add(f"b{number}", [1000 * number + place for place in range(48)], max_new=1)
    assert desk.admit() == []
    start = desk.admitted("z", list(range(32)), max_new=1)
    desk.arrive(start)
    assert desk.admit() == []
    desk.finish(hogs[1])
    assert desk.admit() == []
    assert not desk.scheduler.has_results, "it may sleep"
    assert desk.scheduler.wake_s == 5.0
    assert desk.admit(at_s=5.0) == ["L"]
    assert late.prefix_len == 32


# --- estimates ------------------------------------------------------------------------------------


def test_an_estimate_that_was_too_high_is_found_out() -> None:
    """What a request needs gets cached, and locked, while it waits: so its estimate is too high."""
    desk = Desk(16)
    desk.start("H", 27, max_new=1, cacheable=False)
    grows = desk.start("r", [0, 1], max_new=24)
    for token in range(2, 26):
        desk.token(grows, token=token)
    desk.add("y", [*range(24), 90, 91, 92, 93, 94], max_new=1)
    desk.add("x", 40, max_new=1)
    assert desk.admit() == [], "eight pages, and ten"
    desk.finish(grows)
    desk.add("z", [*range(24), 80], max_new=1)
    assert desk.admit() == ["z"], "which holds six of those pages now"
    assert desk.pages.available_pages == 2
    assert desk.admit() == ["y"], "two new pages"


def test_an_estimate_that_was_too_low_puts_it_behind_those_that_need_less() -> None:
    desk = Desk(24)
    desk.finish(desk.start("x", list(range(32)), max_new=1))
    hog = desk.start("H", 60, max_new=1, cacheable=False)
    desk.add("was cached", [*range(32), 7], max_new=1)
    desk.add("b", 8, max_new=1)
    desk.evict(8)
    desk.finish(hog)
    assert desk.admit() == ["b", "was cached"], "nine pages now, not one"


def test_matches_in_vain_are_bounded_and_none_is_repeated_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk, _ = blocked_desk(64, 2)
    for number in range(100):
        desk.add(f"{chr(300 + number)}", 20 + 4 * (number % 8), max_new=1)
    looks = desk.count_looks(monkeypatch)
    seen = set()
    for _ in range(7):
        looks.clear()
        assert desk.admit() == []
        assert len(looks) == MAX_LOOKS
        seen |= set(looks)
        looks.clear()
        assert desk.admit() == []
        assert not looks, "neither the tree nor the free pages have changed"
        desk.pages.version += 1
    assert len(seen) == 100, "the oldest estimates are renewed first"


def test_those_that_may_grow_too_large_do_not_hide_one_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They need few pages now, and come first; what keeps them out is all they may come to need."""
    desk = Desk(64, rows=8)
    in_transfer = desk.add("T", 200, max_new=1)  # of whose pages retraction could free none
    assert desk.admit() == ["T"]
    for number in range(100):
        desk.add(chr(300 + number), 4, max_new=100)
    desk.add("fits", 8, max_new=1)
    looks = desk.count_looks(monkeypatch)
    assert desk.admit() == ["fits"]
    assert len(looks) == 1, "what cannot be is not looked at"
    assert in_transfer.state is DecodeState.PREALLOCATED


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_may_outgrow_the_pool_is_not_admitted(policy: str) -> None:
    desk = Desk(64, rows=8, admission=policy)
    in_transfer = desk.admitted("T", 200, max_new=1)
    desk.add("g", 4, max_new=100)
    assert desk.admit() == [], "no retraction would free any of its pages"
    desk.succeed(in_transfer.room_key)
    desk.transferred()
    desk.finish(in_transfer)
    assert desk.admit() == ["g"]


@pytest.mark.parametrize(
    ("lanes", "kind"),
    [(lanes, "rows") for lanes in ("pq", "qp", "p-", "-p", "pqr", "p-qp", "ppqqrr")]
    + [(lanes, "slots") for lanes in ("pq", "pqr", "ppqqrr")],
)
def test_the_last_row_or_slot_goes_to_one_of_all_lanes(lanes: str, kind: str) -> None:
    """Whose estimates are all too high: what they lack is a page each, since what they begin with
    was on its way when they came. `-` names no prefill worker, its prompt is computed here."""
    sources = Sources(ComputeConfig(ask="late"), fails_over=True) if "-" in lanes else Sources()
    number = {"rows": 2} if kind == "rows" else {"num_slots": 2}
    desk = Desk(10 if kind == "rows" else 11, admission="hit_aware", sources=sources, **number)
    start = list(range(32))
    small = desk.start("y", 4, max_new=1, may_compute=False)
    first = desk.add("z", start, max_new=1, may_compute=False)
    waiting = {
        f"{number}": desk.add(
            f"{number}",
            [*start, number],
            max_new=1,
            prefill=prefill.strip("-"),
            may_compute=prefill == "-",
        )
        for number, prefill in enumerate(lanes)
    }
    assert desk.admit() == ["z"]
    desk.arrive(first)
    assert desk.admit() == []
    desk.finish(small)
    for _ in lanes:
        (rid,) = desk.admit()
        req = waiting.pop(rid)
        if not req.prefill:
            assert desk.scheduler.pop_local() == [req]
            desk.scheduler.computed(req, req.fill_len)
        desk.succeed(req.room_key)
        assert desk.transferred() == [rid]
        assert desk.admit() == []
        desk.finish(req)


# --- deadlines ------------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_fails_and_prefill_is_told() -> None:
    desk, hog = blocked_desk(16, 2, waiting_timeout_s=20.0)
    late = desk.add("L", 40, max_new=1)
    own = desk.add("o", 40, max_new=1, deadline_s=5.0)
    desk.now_s = 4.9
    assert (desk.admit(), desk.pop_failed()) == ([], [])
    assert desk.scheduler.wake_s == 5.0
    desk.commands()
    assert desk.admit(at_s=5.0) == []
    assert desk.pop_failed() == [own]
    assert isinstance(own.error, AdmissionTimeoutError)
    assert str(own.error) == (
        "request 'o' was not admitted by its deadline_s, 5.0: waited 5.000 s for pages"
    )
    assert desk.commands() == [RefuseRoom(own.room_key, 2, "p", str(own.error), own.request.digest)]
    desk.admit(at_s=20.0)
    assert desk.pop_failed() == [late]
    with pytest.raises(RequestError, match=f"room {late.room} is in use"):
        desk.add("again", 4, room=late.room)
    for req in (own, late):
        desk.drain(req.room_key)
    desk.finish(hog)
    desk.at_rest()
    assert desk.scheduler.wake_s == float("inf")


def test_an_admitted_request_whose_kv_is_not_here_by_its_own_deadline_fails() -> None:
    desk = Desk(16)
    late = desk.add("L", 8, deadline_s=5.0)
    here = desk.add("H", 8, deadline_s=5.0)
    assert sorted(desk.admit()) == ["H", "L"]
    desk.succeed(here.room_key)
    desk.now_s = 4.9
    assert (desk.admit(), desk.pop_failed(), desk.scheduler.wake_s) == ([], [], 5.0)
    desk.now_s = 5.0
    assert (desk.admit(), desk.pop_failed()) == ([], [late])
    assert isinstance(late.error, TransferTimeoutError)
    assert str(late.error) == "request 'L': its KV was not here by its deadline_s, 5.0"
    assert desk.commands()[-1] == AbortRoom(late.room_key, str(late.error))
    assert desk.transferred() == ["H"], "which only waited to be popped"
    desk.now_s = 1000.0
    assert (desk.admit(), desk.pop_failed()) == ([], [])
    desk.finish(here)
    desk.fail(late.room_key, drained=True)


def test_a_deadline_ends_no_request_that_ran_before() -> None:
    desk = Desk(16)
    desk.token(desk.start("o", 4))
    req = desk.start("a", 8, outputs=1, deadline_s=5.0)
    desk.retract(req)
    desk.now_s = 10.0
    assert (desk.admit(), desk.pop_failed()) == (["a"], [])


def test_what_fits_when_its_time_is_over_is_admitted_and_has_no_deadline_any_more() -> None:
    desk = Desk(16, waiting_timeout_s=20.0)
    hog = desk.start("H", 40, max_new=20)
    late = desk.add("L", 40, max_new=8)
    assert desk.admit() == []
    desk.now_s = 25.0
    desk.finish(hog)
    assert (desk.admit(), desk.pop_failed()) == (["L"], [])
    desk.succeed(late.room_key)
    desk.transferred()
    desk.token(late)
    second = desk.start("s", 4, max_new=12)
    desk.token(second)
    desk.retract(second)
    assert desk.admit(at_s=1000.0) == ["s"]
    assert desk.pop_failed() == []


def test_a_room_of_its_own_is_refused_by_an_explicit_call_only_while_it_is_free() -> None:
    desk = Desk()
    req = desk.add("a")
    before = desk.snapshot()
    with pytest.raises(RequestError, match="room 1 is in use"):
        desk.scheduler.refuse(req.request, "no")
    assert desk.snapshot() == before
    other = desk.request("b")
    desk.scheduler.refuse(other, "no")
    assert desk.commands() == [RefuseRoom(RoomKey(2, 0), 1, "p", "no", other.digest)]
    with pytest.raises(RequestError, match="room 2 is in use"):
        desk.scheduler.add(other)
    desk.drain(RoomKey(2, 0))
    assert desk.scheduler.add(other).state is DecodeState.QUEUED
    assert not desk.scheduler.idle


def test_what_is_idle_has_nothing_to_pop_and_no_room_that_a_peer_may_write_for() -> None:
    desk = Desk()
    assert desk.scheduler.idle
    req = desk.admitted("a")
    assert not desk.scheduler.idle
    desk.abort(req)
    assert not desk.scheduler.idle
    desk.pop_failed()
    assert not desk.scheduler.idle, "its room is not drained"
    desk.fail(req.room_key)
    desk.drain(req.room_key)
    assert desk.scheduler.idle
    desk.fail(desk.start("b").room_key)
    [running] = desk.scheduler.requests.values()
    desk.abort(running)
    assert not desk.scheduler.idle, "nobody has popped it"
    desk.pop_failed()
    assert desk.scheduler.idle


@pytest.mark.parametrize("admission", ["fifo", "hit_aware", "priority"])
@pytest.mark.parametrize("patience_s", [0.0, 1e9])
def test_no_pass_admits_beyond_the_last_row(admission: str, patience_s: float) -> None:
    desk = Desk(40, rows=2, admission=admission, patience_s=patience_s)
    reqs = [desk.add(rid, 4, max_new=1, priority=place) for place, rid in enumerate("abcde")]
    desk.now_s = 1.0
    left = {req.rid for req in reqs}
    while left:
        admitted = desk.admit()
        assert len(admitted) == min(2, len(left))
        assert desk.admit() == []
        for req in reqs:
            if req.rid in admitted:
                desk.succeed(req.room_key)
        for rid in desk.transferred():
            desk.finish(next(req for req in reqs if req.rid == rid))
            left.remove(rid)
    desk.commands()


def test_what_may_not_be_cached_is_not_loaded() -> None:
    desk = HostDesk()
    desk.leave_in_host_memory()
    alone = desk.add("b", prompt("a", 22), cacheable=False)
    shares = desk.add("c", prompt("a", 22))
    assert desk.admit() == ["b", "c"]
    assert [len(order.host_pages) for order in desk.orders() if order.is_load] == [4]
    assert (alone.prefix_len, shares.prefix_len) == (0, 16)


def test_one_that_names_no_worker_and_lacks_too_much_fails_once_its_pages_are_there() -> None:
    sources = Sources(ComputeConfig(below=4, down_below=7), fails_over=True)
    desk = Desk(8, sources=sources, admission="fifo")
    running = desk.start("R", 24, max_new=1)
    req = desk.add("a", 16, max_new=1, prefill="")
    behind = desk.add("b", 4, max_new=1, prefill="")
    assert desk.admit() == []
    desk.finish(running)
    assert desk.admit() == ["b"]
    assert "it names none" in str(req.error)
    assert desk.pop_failed() == [req]
    assert desk.scheduler.pop_local() == [behind]


def test_one_that_waited_and_is_cached_whole_leaves_its_last_page_to_be_computed() -> None:
    """Though the tree was told what it waits for, by all of its pages."""
    sources = Sources(ComputeConfig(below=64, down_below=64), fails_over=True)
    desk = Desk(8, sources=sources, admission="fifo")
    for rid, num_tokens in ("a", 8), ("R", 20):
        first = desk.admitted(rid, num_tokens, max_new=1, prefill="")
        assert desk.scheduler.pop_local() == [first]
        desk.scheduler.computed(first, num_tokens)
        assert desk.transferred() == [rid]
        if rid == "a":
            desk.finish(first)
    head = desk.add("H", 20, max_new=1)
    req = desk.add("ab", 8, max_new=1, prefill="")
    assert desk.admit() == []
    desk.abort(head)
    assert desk.admit() == ["ab"], req.error
    assert req.prefix_len == 4
    assert desk.scheduler.pop_local() == [req]


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("grow"), st.integers(0, 4), st.integers(1, 3), st.none()),
        st.tuples(st.just("stop"), st.integers(0, 4), st.none(), st.none()),
    ),
    max_size=40,
)


@given(_STEPS, st.integers(0, 3))
def test_counters_are_the_sums(steps: list[tuple[Any, ...]], reserve: int) -> None:
    budget = PreallocBudget(reserve)
    running: dict[str, tuple[int, int]] = {}  # (may still need, private)
    for what, number, a, b in steps:
        rid = str(number)
        if what == "start":  # maybe anew: its KV has arrived
            budget.start(rid, a, b)
            running[rid] = (a, b)
        elif what == "grow" and rid in running and running[rid][0] >= a:
            budget.grow_many([rid] * a)
            running[rid] = (running[rid][0] - a, running[rid][1] + a)
        elif what == "stop":
            budget.stop(rid)
            running.pop(rid, None)
        private = sum(own for _, own in running.values())
        single = max([0, *(needs - (private - own) for needs, own in running.values())])
        assert budget.private_pages == private
        assert len(budget) == len(running)
        reserved = sum(min(reserve, needs) for needs, _ in running.values())
        assert budget.kept_back == max(reserved, single)
        budget.check_invariants()


@pytest.mark.parametrize("field", ["private_pages", "_pages", "_reaches"])
def test_a_counter_that_is_off_is_found(field: str) -> None:
    budget = PreallocBudget(0)
    budget.start("a", 3, 2)
    budget.check_invariants()
    off = {"private_pages": 1, "_pages": {"a": [5, 3]}, "_reaches": []}
    setattr(budget, field, off[field])
    with pytest.raises(InternalError):
        budget.check_invariants()
