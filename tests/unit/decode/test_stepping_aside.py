"""Requests that cannot be admitted, whatever the running ones give back: they wait aside, with a
reason, and end in time; all others go on. Running ones that need more than the pool take turns,
and all end."""

import math
from operator import attrgetter
from typing import Any

import pytest

from prefixkv.decode.admission import MAX_WALK, Admission, Waiter
from prefixkv.decode.plan import Planner
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.rooms import Workers
from prefixkv.errors import (
    AdmissionTimeoutError,
    OutOfPagesError,
    PeerLostError,
    RequestError,
    TransferTimeoutError,
)
from prefixkv.protocol.commands import MeetPrefill
from prefixkv.protocol.events import PrefillAway, PrefillLost, PrefillReady, RoomOverdue
from prefixkv.protocol.ids import RoomKey
from tests.support.gates import Gate
from tests.unit.decode.desk import Desk, OpenRoom, RefuseRoom

POLICIES = ["hit_aware", "fifo", "priority"]


def with_held_pages(num_pages: int = 16, held_tokens: int = 16, **settings: Any) -> Desk:
    """Pages of a failed room are held, and its deadline for proof has passed."""
    settings = {"patience_s": 5.0, "waiting_timeout_s": 600.0, **settings}
    desk = Desk(num_pages, rows=256, **settings)
    lost = desk.admitted("lost", held_tokens, 4, prefill="gone")
    desk.abort(lost)
    desk.scheduler.hear(RoomOverdue(lost.room_key), desk.now_s)
    desk.pop_failed()
    desk.commands()
    return desk


def serve(desk: Desk, rid: str) -> float:
    """A small request comes, and runs to its end; returns how long it waited for pages."""
    came_s = desk.now_s
    req = desk.add(rid, 8, 1)
    for _ in range(700):
        if rid in desk.admit():
            break
        desk.now_s += 1.0
    assert req.state is DecodeState.PREALLOCATED, "it is held up"
    waited_s = desk.now_s - came_s
    desk.succeed(req.room_key)
    assert desk.transferred() == [rid]
    desk.finish(req)
    return waited_s


# --- pages held without proof ---------------------------------------------------------------------


@pytest.mark.parametrize("admission", POLICIES)
def test_one_that_needs_every_page_comes_back_when_the_last_is_proved(admission: str) -> None:
    desk = with_held_pages(admission=admission)
    big = desk.add("B", 62, 3)
    assert big.max_pages == 16
    assert desk.admit() == []
    assert desk.scheduler.waiting.aside()["pages"] == 1
    desk.drain(RoomKey(1, 0))
    assert desk.scheduler.has_results
    assert desk.admit() == ["B"]


@pytest.mark.parametrize("admission", POLICIES)
def test_one_that_needs_held_pages_holds_up_no_small_ones_and_fails_with_the_reason(
    admission: str,
) -> None:
    desk = with_held_pages(admission=admission)
    big = desk.add("B", 50, 2)
    waits = []
    for number in range(60):
        waits.append(serve(desk, f"{chr(300 + number)}"))
        desk.now_s += 9.0
    assert waits == [0.0] * 60
    assert desk.scheduler.waiting.aside()["pages"] == 1
    assert desk.admit(at_s=600.0) == []
    (failed,) = desk.pop_failed()
    assert failed is big
    assert isinstance(big.error, AdmissionTimeoutError)
    for words in ("13 of the pool's 16 pages", "4 are held for failed rooms", "gone"):
        assert words in str(big.error)
    assert [type(command) for command in desk.commands()][-1] is RefuseRoom


@pytest.mark.parametrize("admission", POLICIES)
def test_it_comes_back_with_its_place_in_time_as_soon_as_the_pages_are_proved_free(
    admission: str,
) -> None:
    desk = with_held_pages(admission=admission)
    desk.add("B", 50, 2)
    running = desk.start("r", 16, 1)
    assert desk.admit(at_s=50.0) == []
    desk.drain(RoomKey(1, 0))
    late = desk.add("s", 8, 1)
    assert desk.admit() == [], "B fits once r has ended, and nothing overtakes it now"
    desk.finish(running)
    assert desk.admit()[0] == "B"
    assert late.state is not DecodeState.FAILED


def test_one_that_comes_back_alone_after_its_patience_ends_no_sleep() -> None:
    """`admit` looks at the time of the next wake-up."""
    desk = with_held_pages()
    desk.add("B", 50, 2)
    assert desk.admit(at_s=50.0) == []
    desk.drain(RoomKey(1, 0))
    assert desk.admit() == ["B"]


@pytest.mark.parametrize("admission", POLICIES)
def test_pages_that_come_to_be_held_while_it_is_first_let_the_others_pass(admission: str) -> None:
    desk = Desk(16, rows=16, admission=admission, patience_s=0.0)
    lost = desk.admitted("lost", 16, 4)
    desk.add("B", 60, 2)
    desk.add("s", 8, 1)
    assert desk.admit() == [], "lost may end, and give its pages back"
    desk.fail(lost.room_key)
    assert desk.admit() == ["s"]
    assert desk.scheduler.waiting.stepped_aside["pages"] == 1


def test_pages_whose_device_event_has_raised_are_no_hope_either() -> None:
    class Broken:
        def query(self) -> bool:
            if desk.now_s:
                raise RuntimeError("the device is gone")
            return False

    desk = Desk(16, rows=16, patience_s=5.0, waiting_timeout_s=60.0)
    desk.finish(desk.start("a", 16, 4), after=Broken())
    desk.now_s = 1.0
    with pytest.raises(RuntimeError):
        desk.admit()
    big = desk.add("B", 60, 2)
    desk.now_s = 20.0
    assert serve(desk, "s") == 0.0
    desk.admit(at_s=61.0)
    assert desk.pop_failed() == [big]
    assert "device event that has raised" in str(big.error)


# --- those that come back -------------------------------------------------------------------------


@pytest.mark.parametrize("admission", POLICIES)
def test_a_retry_that_needs_its_own_held_pages_steps_aside_and_ends_in_time(admission: str) -> None:
    desk = Desk(
        16, rows=16, admission=admission, patience_s=5.0, waiting_timeout_s=600.0, max_retries=1
    )
    retried = desk.admitted("b", 24, 30)
    desk.fail(retried.room_key)
    desk.scheduler.hear(RoomOverdue(RoomKey(retried.room, 0)), desk.now_s)
    for number in range(50):
        desk.now_s += 10.0
        assert serve(desk, f"{chr(300 + number)}") == 0.0
    assert retried.state is DecodeState.RETRACTED
    assert desk.admit(at_s=700.0) == []
    assert desk.pop_failed() == [retried]
    assert isinstance(retried.error, AdmissionTimeoutError)
    assert "6 are held" in str(retried.error)
    assert desk.scheduler.wake_s == math.inf


def test_a_retracted_request_waits_no_longer_than_one_that_is_new() -> None:
    """Three that grow to four pages each, in nine."""
    desk = Desk(9, rows=16, patience_s=5.0, waiting_timeout_s=60.0)
    reqs = [desk.add(rid, 8, 8) for rid in "abc"]
    assert len(desk.admit()) == 3
    for req in reqs:
        desk.succeed(req.room_key)
    desk.transferred()
    for _ in range(4):
        desk.token(*reqs)
    a, b, c = reqs
    desk.now_s = 100.0
    desk.retract(c)
    desk.scheduler.flush()
    for _ in range(3):
        desk.token(a, b)
    assert desk.admit() == []
    assert desk.scheduler.wake_s == 160.0, "its time begins when it has come back"
    assert desk.admit(at_s=160.0) == []
    assert desk.pop_failed() == [c]
    assert isinstance(c.error, AdmissionTimeoutError)
    assert "waited 60.000 s for pages" in str(c.error)


def test_a_retry_with_a_deadline_of_its_own_has_that_one() -> None:
    desk = with_held_pages(max_retries=1, waiting_timeout_s=60.0)
    req = desk.admitted("b", 24, 20, deadline_s=90.0)
    desk.fail(req.room_key)
    for now_s in (1.0, 70.0):
        desk.now_s = now_s
        desk.admit()
        assert desk.pop_failed() == []
    desk.admit(at_s=90.0)
    assert desk.pop_failed() == [req]
    assert "held for failed rooms" in str(req.error)


# --- prefill workers that do not answer -----------------------------------------------------------


def gated(num_pages: int = 16, **settings: Any) -> Desk:
    """Prefill workers are met first."""
    settings = {"workers": Workers(gated=True, patience_s=30.0), "patience_s": 5.0, **settings}
    return Desk(num_pages, rows=256, **settings)


def ready(desk: Desk, address: str, max_tokens: int = 0) -> None:
    desk._checked(desk.scheduler.hear(PrefillReady(address, max_tokens), desk.now_s))


def test_no_page_is_taken_for_a_worker_that_has_never_answered() -> None:
    desk = gated()
    for number in range(120):
        desk.add(f"{chr(300 + number)}", 8, 4, prefill="nowhere")
    desk.add("honest", 8, 4, prefill="p")
    assert desk.commands() == [MeetPrefill("nowhere"), MeetPrefill("p")]
    assert desk.admit() == []
    ready(desk, "p")
    assert desk.admit() == ["honest"]
    assert desk.states() == {"OWNED": 2, "FREE": 14}
    assert desk.scheduler.waiting.aside() == {"pages": 0, "share": 0, "prefill": 120}
    assert isinstance(desk.commands()[0], OpenRoom)


@pytest.mark.parametrize("admission", POLICIES)
def test_those_that_wait_for_a_silent_worker_are_many_and_old_and_hold_up_none(
    admission: str,
) -> None:
    desk = gated(admission=admission)
    ready(desk, "p")
    for number in range(2 * MAX_WALK):
        desk.add(f"{chr(300 + number)}", 4, 1, prefill="nowhere", priority=9)
    desk.now_s = 20.0
    desk.add("honest", 8, 4, prefill="p")
    ready(desk, "p")
    assert desk.admit() == ["honest"]


def test_requests_to_an_address_without_an_answer_fail_at_once_and_prefill_is_told_nothing() -> (
    None
):
    desk = gated()
    req = desk.add("a", 8, 4, prefill="nowhere")
    desk.commands()
    error = PeerLostError("nowhere: connection refused")
    desk.scheduler.hear(PrefillLost("nowhere", error), 1.0)
    assert desk.pop_failed() == [req]
    assert req.error is error
    assert desk.commands() == []
    desk.at_rest()
    again = desk.add("b", 8, 4, prefill="nowhere")
    assert desk.commands() == [MeetPrefill("nowhere")], "it may be there by now"
    ready(desk, "nowhere")
    assert desk.admit() == ["b"]
    assert again.error is None


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("is_lost", [True, False])
def test_those_that_a_worker_has_failed_are_asked_for_again_in_the_order_of_arrival(
    is_lost: bool, times: int
) -> None:
    """All at once: the last of them would go first, each time, or each second time."""
    desk = gated(1, max_retries=times)
    reqs = [desk.add(rid, 4, 1) for rid in "abc"]
    for time in range(1, times + 1):
        if is_lost:
            desk.scheduler.hear(PrefillLost("p", PeerLostError("refused")), 1.0)
        else:
            assert desk.admit(at_s=30.0 * time) == []
    assert [req.retries for req in reqs] == [times] * 3
    ready(desk, "p")
    for req in reqs:
        assert desk.admit() == [req.rid]
        desk.abort(req)
        desk.carry_out_aborts()


@pytest.mark.parametrize("answered", [True, False])
def test_the_wait_for_a_worker_that_goes_away_begins_then(answered: bool) -> None:
    """However long a request has waited before: for pages, or for its first answer."""
    desk = gated(waiting_timeout_s=600.0)
    if answered:
        hog = desk.add("h", 62, 1)
        ready(desk, "p")
        assert desk.admit() == ["h"]
        desk.arrive(hog)
    old = [desk.add(rid, 8, 1) for rid in "ab"]
    desk.now_s = 20.0
    desk.scheduler.hear(PrefillAway("p"), desk.now_s)
    desk.now_s = 25.0
    late = desk.add("c", 8, 1)
    for now_s, failed in ((30.0, []), (49.9, []), (50.0, old), (54.9, []), (55.0, [late])):
        desk.now_s = now_s
        assert desk.admit() == []
        assert sorted(desk.pop_failed(), key=attrgetter("rid")) == failed


def test_that_a_worker_goes_away_costs_no_look_where_nothing_could_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk, looks = gated(), []
    ready(desk, "p")
    for rid in "ab":
        desk.add(rid, 8, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "look", lambda *args, **more: looks.append(args))
        desk.scheduler.hear(PrefillAway("p"), desk.now_s)
    assert looks == []
    ready(desk, "p")
    assert desk.admit() == ["a", "b"]


def test_the_end_of_one_wait_for_an_answer_costs_no_look_at_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = gated(waiting_timeout_s=600.0)
    for second in range(20):
        desk.add(f"r{second}", 8, 1)
        desk.now_s += 1.0
    looks: list[Waiter] = []
    look = Admission._answer_due_s

    def counted(waiting: Admission, waiter: Waiter) -> float:
        looks.append(waiter)
        return look(waiting, waiter)

    monkeypatch.setattr(Admission, "_answer_due_s", counted)
    for second in range(20):
        desk.now_s = 30.0 + second
        desk.scheduler.pop_preallocated()
        assert [req.rid for req in desk.scheduler.pop_failed()] == [f"r{second}"]
    assert len(looks) == 20


def test_one_that_comes_back_to_a_worker_that_is_away_waits_no_longer_than_others() -> None:
    desk = gated(waiting_timeout_s=600.0)
    oldest = [desk.add(rid, 8, 4) for rid in "ab"]
    ready(desk, "p")
    assert desk.admit() == ["a", "b"]
    for req in oldest:
        desk.succeed(req.room_key)
    desk.transferred()
    desk.token(*oldest)
    desk.now_s = 10.0
    desk.scheduler.hear(PrefillAway("p"), desk.now_s)
    desk.retract(oldest[1])
    desk.scheduler.flush()
    assert desk.admit() == []
    assert desk.scheduler.wake_s <= 40.0
    assert desk.admit(at_s=40.0) == []
    assert desk.pop_failed() == [oldest[1]]


def test_what_is_never_answered_fails_in_time() -> None:
    desk = gated(waiting_timeout_s=600.0, patience_s=600.0)
    first = desk.add("a", 8, 4, prefill="mute")
    desk.now_s = 10.0
    second = desk.add("b", 8, 4, prefill="mute")
    assert desk.scheduler.wake_s == 30.0
    desk.admit(at_s=30.0)
    assert desk.pop_failed() == [first]
    assert isinstance(first.error, TransferTimeoutError)
    assert "waited 30.000 s for prefill worker mute, which does not answer" in str(first.error)
    desk.admit(at_s=40.0)
    assert desk.pop_failed() == [second]


def test_pages_promised_to_a_worker_that_answers_no_more_are_not_counted_on() -> None:
    desk = gated(patience_s=0.0)
    for address in ("p", "stopped"):
        desk.add(f"{address} first", 16, 1, prefill=address)
        ready(desk, address)
    assert len(desk.admit()) == 2
    big = desk.add("B", 50, 1, prefill="p")
    desk.add("s", 8, 1, prefill="p")
    assert desk.admit() == [], "the stopped one may answer still"
    desk.scheduler.hear(PrefillAway("stopped"), 6.0)
    assert desk.admit(at_s=6.0) == ["s"]
    assert "promised to prefill workers that do not answer" in desk.scheduler.waiting.why(big, 6.0)
    ready(desk, "stopped")
    assert desk.admit() == []
    assert desk.scheduler.waiting.aside()["pages"] == 0


# --- what prefill can hold ------------------------------------------------------------------------


def test_what_prefill_could_never_hold_is_refused_by_name_before_anything_is_promised() -> None:
    desk = gated()
    early = desk.add("early", 30, 4, prefill="p")
    fits = desk.add("fits", 20, 5, prefill="p")
    ready(desk, "p", max_tokens=24)
    assert desk.pop_failed() == [early]
    assert isinstance(early.error, RequestError)
    assert "may have 33 tokens (max_new_tokens included), prefill worker p holds 24" in str(
        early.error
    )
    assert desk.admit() == ["fits"]
    before = desk.snapshot()
    with pytest.raises(RequestError, match="prefill worker p holds 24"):
        desk.scheduler.add(desk.request("late", 20, 6, prefill="p"))
    with pytest.raises(RequestError, match="prefill worker p holds 24"):
        desk.scheduler.add(desk.request("prompt", 25, 1, prefill="p"))
    assert desk.snapshot() == before
    assert desk.add("another's", 20, 6, prefill="q").state is DecodeState.QUEUED
    assert fits.state is DecodeState.PREALLOCATED


def test_a_request_is_not_sent_to_a_worker_that_could_never_hold_it() -> None:
    desk = gated(max_retries=1, retarget=lambda req, error: "small")
    small = desk.add("s", 4, 4, prefill="small")
    ready(desk, "small", max_tokens=8)
    req = desk.add("a", 20, 4, prefill="p")
    ready(desk, "p")
    assert desk.admit() == ["s", "a"]
    desk.fail(req.room_key, drained=True)
    assert desk.pop_failed() == [req]
    assert "prefill worker small holds 8" in str(req.error)
    other = desk.add("b", 20, 4, prefill="q")
    with pytest.raises(RequestError, match="prefill worker small holds 8"):
        desk.scheduler.retarget("b", "small")
    assert (other.prefill, small.state) == ("q", DecodeState.PREALLOCATED)


# --- shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", POLICIES)
def test_many_that_wait_for_their_worker_s_share_hold_up_no_other_worker_s(admission: str) -> None:
    desk = Desk(
        16, rows=256, admission=admission, patience_s=0.0,
        workers=Workers(share_pages=8),
    )  # fmt: skip
    for number in range(2 * MAX_WALK):
        desk.add(f"{chr(300 + number)}", 12, 4, prefill="a")
    desk.add("y", 8, 1, prefill="b")
    assert "y" in desk.admit() + desk.admit()
    assert desk.scheduler.waiting.stepped_aside["share"]


@pytest.mark.parametrize("admission", POLICIES)
def test_one_that_waits_for_its_worker_s_share_is_not_overtaken_there_for_ever(
    admission: str,
) -> None:
    desk = Desk(
        32, rows=32, admission=admission, patience_s=10.0,
        workers=Workers(share_pages=16),
    )  # fmt: skip
    desk.add("b", 4, 1, prefill="b")
    small: list[DecodeRequest] = [desk.add("first", 16, 1, prefill="a")]
    desk.admit()
    large = desk.add("L", 56, 1, prefill="a", priority=-1)
    for step in range(60):
        desk.now_s = step * 1.0
        small.append(desk.add(f"{chr(300 + step)}", 16, 1, prefill="a"))
        admitted = desk.admit()
        if "L" in admitted:
            break
        for req in [one for one in small if one.state is DecodeState.PREALLOCATED][:1]:
            desk.succeed(req.room_key)
            desk.transferred()
            desk.finish(req)
    assert large.state is DecodeState.PREALLOCATED
    assert desk.now_s <= 20.0


# --- pages on their way back ----------------------------------------------------------------------


def test_only_one_is_retracted_late() -> None:
    """The next token takes a page of each of five; what the device is still busy with counts."""
    desk = Desk(20, rows=8)
    reqs = [desk.start(rid, 15, 8, outputs=1) for rid in "abcde"]
    with pytest.raises(OutOfPagesError) as missing:
        desk.token(*reqs)
    assert len(missing.value.retract) == 1, "its four pages, and it does not grow"
    (rid,) = missing.value.retract
    event = Gate()
    desk.retract(desk.scheduler.requests[rid], after=event)
    rest = [req for req in reqs if req.rid != rid]
    with pytest.raises(OutOfPagesError) as coming:
        desk.token(*rest)
    assert coming.value.retract == ()
    event.answer = True
    desk.admit()
    desk.token(*rest)
    assert desk.scheduler.counters["retracted"] == 1


# --- what a request may still write ---------------------------------------------------------------


@pytest.mark.parametrize(("length", "most"), [(64, 1), (63, 2), (61, 4), (60, 5), (1, 64)])
def test_a_request_that_fills_the_pool_to_its_last_token_runs_to_its_end(
    length: int, most: int
) -> None:
    desk = Desk(16)
    req = desk.start("a", length, most)
    for _ in range(most):
        desk.token(req)
    assert len(req.pages) == 16
    desk.finish(req)
    assert desk.states() == {"CACHED": 16}
    with pytest.raises(RequestError, match="17 pages"):
        desk.scheduler.add(desk.request("b", length, most + 1))


class Engine:
    """The loop of docs/integrate.md: one token a step for all that run; transfers take one step.

    `tries_again`: it takes back as many as it must within a step; that one takes back one, and
    sees to the rest in its next pass, after admission.
    """

    def __init__(self, desk: Desk, tries_again: bool = True) -> None:
        self.desk = desk
        self.tries_again = tries_again
        self.batch: list[DecodeRequest] = []
        self.retractions = 0
        self.steps = 0
        self.order: list[str] = []  # in which they were first admitted
        self.finished: list[str] = []

    def step(self) -> None:
        desk, scheduler = self.desk, self.desk.scheduler
        self.steps += 1
        desk.now_s += 1.0
        self.order += [rid for rid in desk.admit() if rid not in self.order]
        scheduler.pop_needs_prefill()
        for command in desk.commands():
            if isinstance(command, OpenRoom):
                desk.succeed(RoomKey(command.promise.room, command.promise.generation))
        self.batch += [scheduler.requests[rid] for rid in desk.transferred()]
        self._append()
        for req in [req for req in self.batch if len(req.output) == req.max_new_tokens]:
            self.batch.remove(req)
            desk.finish(req)
            self.finished.append(req.rid)

    def _append(self) -> None:
        while self.batch:
            try:
                self.desk.token(*self.batch)
                return
            except OutOfPagesError as error:
                [victim, *_] = error.retract
                self.retractions += 1
                self.desk.retract(self.desk.scheduler.requests[victim])
                self.batch = [req for req in self.batch if req.rid != victim]
                if not self.tries_again:
                    return

    def run(self, most_steps: int) -> None:
        while self.desk.scheduler.requests:
            self.step()
            assert self.steps <= most_steps, "it goes on for ever"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reserve_tokens", [0, 8])
def test_twice_the_pool_runs_to_its_end(policy: str, reserve_tokens: int) -> None:
    """Eight requests grow to eight pages each, in a pool of 32 that takes all their prompts at
    once."""
    desk = Desk(32, rows=8, admission=policy, reserve_tokens=reserve_tokens)
    for rid in "abcdefgh":
        desk.add(rid, 8, max_new=24)
    engine = Engine(desk)
    engine.run(most_steps=100)
    assert len(engine.finished) == 8
    assert 1 <= engine.retractions <= 4, "four of the eight, once each, under every policy"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_taken_back_returns_only_once_the_others_can_go_on(policy: str) -> None:
    """All it had is cached still, so it could return at once, take the page that was freed, and be
    taken back again."""
    desk = Desk(9, rows=4, admission=policy, reserve_tokens=0)
    for rid in "abc":
        desk.add(rid, 8, max_new=8)
    engine = Engine(desk, tries_again=False)
    engine.run(most_steps=100)
    assert len(engine.finished) == 3
