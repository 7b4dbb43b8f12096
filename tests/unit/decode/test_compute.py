"""Requests whose missing part decode's engine computes itself: admitted, joined, ended, and carried
on with where prefill is gone."""

from typing import Any

import pytest

from prefixkv.config import ComputeConfig, ModelConfig
from prefixkv.decode.flights import Segment
from prefixkv.decode.request import DecodeRequest, DecodeState
from prefixkv.decode.rooms import Workers
from prefixkv.decode.sources import Sources
from prefixkv.errors import (
    AdmissionTimeoutError,
    CallerError,
    PeerLostError,
    RequestError,
    TransferError,
    TransferTimeoutError,
)
from tests.support.gates import Gate
from tests.unit.decode.desk import PAGE_SIZE, AbortRoom, Desk, OpenRoom, RefuseRoom


class Alone(Desk):
    """A desk whose engine computes what lacks at most `below` tokens."""

    def __init__(
        self, *, below: int = 100, fails_over: bool = False, ask: str = "late",
        down_below: int = 99, **more: Any,
    ) -> None:  # fmt: skip
        compute = ComputeConfig(below=below, ask=ask, down_below=down_below)  # type: ignore[arg-type]
        super().__init__(sources=Sources(compute, fails_over), **more)

    def local(self) -> list[str]:
        return self._checked([req.rid for req in self.scheduler.pop_local()])

    def computed(self, req: DecodeRequest, end: int, aux: bytes = b"") -> None:
        self.now_s += 0.01
        self._checked(self.scheduler.computed(req, end, aux))

    def whole(self, req: DecodeRequest, end: int) -> None:
        """The engine has computed all of it, and it may run."""
        self.computed(req, end)
        assert self.transferred() == [req.rid]

    def compute(self, rid: str, tokens: int | list[int] = 8, **fields: Any) -> DecodeRequest:
        """Add, admit, and have the engine begin with it."""
        req = self.add(rid, tokens, **fields)
        assert self.admit() == [rid]
        assert self.local() == [rid]
        return req

    def start_local(self, rid: str, tokens: int = 8, outputs: int = 1) -> DecodeRequest:
        req = self.compute(rid, tokens, max_new=9)
        self.computed(req, tokens)
        assert self.transferred() == [rid]
        for _ in range(outputs):
            self.token(req)
        return req

    def asked(self) -> list[tuple[str, int]]:
        asks = self.scheduler.pop_needs_prefill()
        return self._checked([(ask.rid, ask.generation) for ask in asks])


def kinds(desk: Desk) -> list[type]:
    return [type(command) for command in desk.commands()]


# --- what is computed ---------------------------------------------------------------------------


def test_a_request_that_lacks_little_is_computed_and_committed_like_any_other() -> None:
    desk = Alone()
    req = desk.compute("a", 10)
    assert desk.commands() == []
    assert desk.asked() == []
    assert (req.prefix_len, req.fill_len, req.state) == (0, 10, DecodeState.PREALLOCATED)
    desk.computed(req, 4)
    assert desk.transferred() == []
    desk.computed(req, 10, b"aux")
    assert desk.transferred() == ["a"]
    assert req.aux == b"aux"
    desk.token(req)
    desk.finish(req)
    assert desk.prefix_of(req) == 8
    counters = desk.scheduler.counters
    assert (counters["computed_requests"], counters["computed_tokens"]) == (1, 10)


def test_what_decode_has_computed_prefill_has_to_compute_too_until_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conversation: its first prompt is computed here, the next ones are asked of prefill."""
    desk, told = Alone(below=10), []
    sources = desk.scheduler.sources["computed"].rule
    promised = sources.promised

    def noted(*args: Any) -> Any:
        told.append(args[3])
        return promised(*args)

    monkeypatch.setattr(sources, "promised", noted)
    tokens = list(range(40))
    for number, num_tokens in enumerate((10, 28, 40)):
        req = desk.add(f"{number}", tokens[:num_tokens])
        desk.admit()
        if not number:
            assert desk.local() == ["0"]
            desk.computed(req, num_tokens)
        else:
            desk.succeed(req.room_key)
        desk.transferred()
        desk.token(req)
        desk.finish(req)
    assert told == [8, 0], "two whole pages"


def test_one_that_lacks_more_is_asked_of_prefill_and_late_when_it_is_admitted() -> None:
    desk = Alone(below=8)
    req = desk.add("a", 9)
    assert desk.asked() == []
    desk.admit()
    assert desk.local() == []
    assert desk.asked() == [("a", 0)]
    assert kinds(desk) == [OpenRoom]
    desk.arrive(req)


def test_prefill_is_asked_for_one_request_where_only_decodes_own_rate_is_known() -> None:
    """Or decode would never know that prefill is sooner. What is on its way says how long it takes,
    also to the request after it."""
    desk = Alone(below=1000, num_pages=512, rows=16)
    for number in range(3):  # measures that are a rate
        first = desk.compute(f"own {number}", list(range(1000 * number, 1000 * number + 80)))
        desk.computed(first, 80)
    desk.transferred()
    for number in range(3):
        asked = desk.add(f"asked {number}", list(range(5000 * number + 9000, 5000 * number + 9080)))
        desk.add(f"own too {number}", list(range(5000 * number + 11000, 5000 * number + 11080)))
        assert sorted(desk.admit()) == [f"asked {number}", f"own too {number}"]
        assert desk.local() == [f"own too {number}"]
        assert kinds(desk) == [OpenRoom]
        desk.computed(desk.scheduler.requests[f"own too {number}"], 80)
        desk.now_s += 5.0
        desk.succeed(asked.room_key)
        assert sorted(desk.transferred()) == [f"asked {number}", f"own too {number}"]
    # It takes 5 s, and decode's own compute .01.
    desk.compute("last", list(range(30000, 30080)))
    assert kinds(desk) == []


def test_where_prefill_was_told_it_is_refused_there() -> None:
    desk = Alone(ask="both")
    req = desk.compute("a")
    (command,) = desk.commands()
    assert isinstance(command, RefuseRoom)
    assert command.key == req.room_key
    desk.computed(req, 8)
    desk.transferred()
    desk.token(req)
    desk.finish(req)
    assert req.room in desk.scheduler.rooms, "prefill may still have it"
    desk.drain(command.key)


def test_what_wants_more_of_prefill_than_kv_is_not_computed() -> None:
    desk = Alone()
    desk.add("a", may_compute=False)
    desk.admit()
    assert desk.local() == []
    assert kinds(desk) == [OpenRoom]


def test_of_a_whole_hit_the_last_page_is_left_to_compute() -> None:
    desk = Alone()
    first = desk.compute("a", 8)
    desk.computed(first, 8)
    desk.transferred()
    req = desk.compute("a2", 8)
    assert (req.prefix_len, req.fill_len) == (PAGE_SIZE, 8)
    again = desk.compute("a3", 8)
    desk.computed(req, 8)
    desk.computed(again, 8)
    assert desk.transferred() == ["a2", "a3"]
    for one in (first, req, again):
        desk.token(one)
        desk.finish(one)
    # The page that each computed for itself is there once.
    assert desk.states() == {"FREE": 14, "CACHED": 2}


def test_a_retracted_request_comes_back_without_prefill() -> None:
    desk = Alone()
    desk.start_local("o", 8)
    req = desk.start_local("a", 9, outputs=3)
    desk.retract(req)
    assert desk.admit() == desk.local() == ["a"]
    assert (req.prefix_len, req.fill_len) == (8, 11)
    with pytest.raises(CallerError):
        desk.computed(req, 10, b"early")
    desk.whole(req, 11)
    assert req.resumed
    assert desk.commands() == []


# --- joined -------------------------------------------------------------------------------------


def test_one_that_joins_is_computed_once_what_it_joined_is_there() -> None:
    desk = Alone()
    first = desk.compute("a", 9)
    second = desk.admitted("a2", 13)
    assert second.prefix_len == 8
    assert desk.local() == [], "what it continues is not there yet"
    desk.computed(first, 9)
    assert not desk.scheduler.has_results or desk.transferred() == ["a"]
    assert desk.local() == ["a2"]
    desk.whole(second, 13)


def test_it_may_join_what_prefill_sends_and_prefill_what_is_computed() -> None:
    desk = Alone(below=8)
    sent = desk.admitted("a", 12)
    near = desk.admitted("a2", 16)
    assert near.prefix_len == 12
    far = desk.admitted("a3", [*near.key.tokens().tolist(), *range(500, 520)])
    assert far.prefix_len == 16
    assert desk.local() == []
    assert desk.asked() == [("a", 0), ("a3", 0)]
    desk.succeed(far.room_key)
    desk.arrive(sent)
    assert desk.local() == ["a2"]
    desk.computed(near, 16)
    assert desk.transferred() == ["a2", "a3"]


def test_those_that_joined_ask_again_if_it_ends() -> None:
    desk = Alone(below=8)
    first = desk.compute("a", 8)
    near = desk.add("a2", 12)
    far = desk.add("a3", [*first.key.tokens().tolist(), *range(500, 520)])
    assert desk.admit() == ["a2", "a3"]
    assert desk.asked() == [("a3", 0)]
    desk.commands()
    desk.abort(first)
    assert (near.state, far.state) == (DecodeState.RETRACTED, DecodeState.RETRACTED)
    (command,) = desk.commands()
    assert isinstance(command, AbortRoom)
    # Again in order; the first of them brings what both need.
    assert desk.admit() == ["a2", "a3"]
    assert desk.asked() == [("a2", 1), ("a3", 1)]
    desk.fail(command.key, drained=True)
    for req in (near, far):
        desk.succeed(req.room_key)
    assert desk.transferred() == ["a2", "a3"]


# --- ends ---------------------------------------------------------------------------------------


def test_an_abort_frees_its_pages_once_the_device_is_done() -> None:
    desk, event = Alone(), Gate()
    req = desk.compute("a")
    desk.computed(req, 4)
    desk.abort(req, after=event)
    assert desk.states() == {"FREE": 14, "OWNED": 2}
    assert desk.pop_failed() == [req]
    desk.computed(req, 8)  # it may not have heard of it: no-op
    event.answer = True
    desk.admit()
    assert desk.states() == {"FREE": 16}


def test_a_deadline_keeps_its_pages_until_the_engine_has_heard_and_its_device_is_done() -> None:
    desk, event = Alone(), Gate()
    req = desk.compute("a", deadline_s=1.0)
    desk.admit(at_s=2.0)
    assert isinstance(req.error, TransferTimeoutError)
    assert desk.states() == {"FREE": 14, "OWNED": 2}, "its engine may be computing it"
    assert dict(desk.scheduler.holders()) == {"a": req.pages_held}
    assert not desk.scheduler.idle
    assert desk._checked(desk.scheduler.pop_failed(event)) == [req]
    assert desk.states() == {"FREE": 14, "OWNED": 2}
    event.answer = True
    desk.admit()
    assert desk.states() == {"FREE": 16}


def test_other_weights_end_it() -> None:
    desk, event = Alone(model=ModelConfig(weights_version="1")), Gate()
    req, waits = desk.compute("a", 9), desk.add("a2", 13)
    desk.admit()
    desk._checked(desk.scheduler.flush("2", event))
    desk.scheduler.flush()
    assert {one.rid for one in desk.pop_failed()} == {"a", "a2"}
    assert req.pages_held is not None
    assert waits.pages_held is None
    event.answer = True
    desk.admit()


@pytest.mark.parametrize("end", [0, 4, 9])
def test_an_end_out_of_range_is_refused(end: int) -> None:
    desk = Alone()
    req = desk.compute("a", 8)
    desk.computed(req, 4)
    before = desk.snapshot()
    with pytest.raises(RequestError):
        desk.computed(req, end)
    assert desk.snapshot() == before
    desk.computed(req, 8)
    with pytest.raises(RequestError):
        desk.computed(req, 8)


# --- without prefill ----------------------------------------------------------------------------


def _gone(**more: Any) -> Alone:
    """A desk whose prefill worker answers, until `down`."""
    desk = Alone(fails_over=True, below=0, workers=Workers(gated=True), **more)
    warm = desk.add("w")
    desk.commands()
    desk.up()
    assert desk.admit() == ["w"]
    desk.commands()
    desk.asked()
    desk.succeed(warm.room_key)
    desk.transferred()
    desk.token(warm)
    desk.finish(warm)
    return desk


def test_what_waits_and_what_is_on_its_way_is_computed_when_prefill_goes() -> None:
    desk = _gone(ask="both", rows=2)
    sent, waits = desk.add("a"), desk.add("b")
    blocks = desk.add("c")
    assert desk.admit() == ["a", "b"]
    desk.commands()
    desk.down()
    found = desk.commands()
    assert [type(one) for one in found] == [AbortRoom, AbortRoom, RefuseRoom]
    assert found[2].key.room == blocks.room
    # The pages that prefill may write are held, the requests have others.
    assert desk.states()["HELD"] == 4
    assert desk.admit() == ["a", "b"]
    assert desk.local() == ["a", "b"]
    desk.computed(sent, 8)
    desk.computed(waits, 8)
    assert desk.transferred() == ["a", "b"]
    assert desk.scheduler.counters["failovers"] == 3
    for req in (sent, waits):
        desk.token(req)
        desk.finish(req)
    assert desk.admit() == desk.local() == ["c"]
    new = desk.add("d")
    desk.computed(blocks, 8)
    desk.transferred()
    desk.admit()
    assert desk.local() == ["d"], "one that comes now does not wait for it either"
    desk.computed(new, 8)
    desk.transferred()


def test_the_pages_of_what_is_computed_here_come_back_though_its_worker_is_away() -> None:
    desk = Alone(workers=Workers(gated=True))
    req = desk.add("a", 8, max_new=1)
    big = desk.add("B", 64, max_new=1, prefill="q", may_compute=False)
    for address in "pq":
        desk.up(address)
    assert desk.admit() == desk.local() == ["a"]
    desk.down()
    assert desk.admit() == []
    assert desk.scheduler.waiting.aside()["pages"] == 0
    assert "for pages: it may need" not in desk.scheduler.waiting.why(big, 0.0)
    desk.whole(req, 8)
    desk.finish(req)
    assert desk.admit() == ["B"]


def test_one_that_carries_on_alone_and_lacks_too_much_by_then_is_asked_of_its_worker() -> None:
    """Of its 12 tokens 8 are cached when its transfer fails, and none when it is admitted again."""
    desk = _gone(ask="both", down_below=8)
    req = desk.admitted("w2", 12)
    desk.fail(req.room_key, drained=True)
    assert not req.asks
    desk.scheduler.flush()
    desk.commands()
    assert desk.admit() == ["w2"]
    assert [type(one) for one in desk.commands()] == [OpenRoom]
    assert [ask.rid for ask in desk.scheduler.pop_needs_prefill()] == ["w2"]
    assert desk.scheduler.workers.of("p").num_pages == 3
    desk.arrive(req)
    assert desk.scheduler.workers.of("p").num_pages == 0


def test_one_that_is_alone_waits_for_the_pages_of_its_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a state before what is cached. Sent it would fit, and its worker answers."""
    desk = _gone(num_pages=7, ask="both")
    holds = desk.admitted("w1", 12)
    desk.arrive(holds)
    req = desk.admitted("w2", 16)
    desk.fail(req.room_key, drained=True)
    assert not req.asks
    monkeypatch.setattr(
        "prefixkv.decode.compute_source.ComputeSource.reach",
        lambda source, need: Segment(source, 0, need.end),
    )
    desk.commands()
    assert desk.admit() == []
    desk.finish(holds)
    assert desk.admit() == desk.local() == ["w2"]
    assert desk.commands() == []


def test_what_waits_goes_back_to_prefill_when_it_answers_again() -> None:
    desk = _gone(ask="both", rows=1)
    first, second = desk.add("a"), desk.add("b")
    desk.down()
    assert desk.admit() == ["a"]
    assert desk.scheduler.waiting.why(second, 0.0).endswith("for pages, to be computed here")
    assert desk.local() == ["a"]
    desk.up()
    desk.computed(first, 8)
    desk.transferred()
    desk.token(first)
    desk.finish(first)
    assert desk.admit() == ["b"]
    assert desk.local() == []
    assert desk.asked() == [("b", 1)], "the first attempt was refused there"
    desk.arrive(second)


@pytest.mark.parametrize("prefill", ["", "p"])
def test_a_retracted_request_that_lacks_nothing_comes_back_alone(prefill: str) -> None:
    """Its KV ends with a page; its prefill worker is gone, or was never named."""
    desk = _gone()
    desk.down()
    desk.start_local("o", 8)
    req = desk.compute("a", 10, max_new=9, prefill=prefill)
    desk.whole(req, 10)
    for _ in range(3):
        desk.token(req)
    assert req.kv_len == 12
    desk.retract(req)
    assert desk.admit() == ["a"]
    assert desk.local() == []
    assert desk.transferred() == ["a"]
    assert (req.resumed, req.prefix_len, req.error) == (True, 12, None)
    assert (desk.commands(), desk.asked()) == ([], [])
    desk.token(req)


def test_what_lacks_too_much_waits_and_fails_as_without() -> None:
    desk = _gone(down_below=7, waiting_timeout_s=5.0)
    req, near = desk.add("a"), desk.add("b", 7)
    desk.down()
    assert desk.admit() == desk.local() == ["b"]
    desk.now_s += 6.0
    desk.admit()
    assert isinstance(req.error, AdmissionTimeoutError)
    assert "which does not answer" in str(req.error)
    assert near.state is DecodeState.PREALLOCATED


def test_what_lacks_too_much_by_the_time_of_its_admission_fails_by_name() -> None:
    desk = _gone(down_below=7, ask="both")
    cached = desk.add("w2", [ord("w") * 1000 + i for i in range(8)] + [1, 2, 3])
    desk.down()
    desk.scheduler.flush()
    desk.admit()
    assert desk.local() == []
    assert isinstance(cached.error, PeerLostError)
    assert "lacks 11 tokens, decode computes 7" in str(cached.error)
    assert desk.pop_failed() == [cached]


def test_what_an_attempt_before_has_brought_is_not_left_in_aux() -> None:
    """Else an engine takes it for what prefill says of this one."""
    desk = _gone()
    first = desk.admitted("a", 12)
    joined = desk.admitted("a2", 16)
    desk.succeed(joined.room_key, b"token")
    desk.fail(first.room_key, drained=True)
    assert sorted(desk.admit()) == ["a", "a2"]
    assert desk.local() == ["a"]
    assert (joined.aux, joined.resumed) == (b"", False)


def test_without_the_policy_a_small_part_is_computed_while_prefill_does_not_answer() -> None:
    desk = Alone(below=8, workers=Workers(gated=True))
    near, far = desk.add("a", 8), desk.add("b", 9)
    assert desk.admit() == []
    desk.down()
    assert desk.admit() == desk.local() == ["a"]
    assert far.state is DecodeState.QUEUED
    desk.computed(near, 8)


def test_a_prompt_that_did_not_reach_prefill_is_computed_here() -> None:
    desk = _gone()
    req = desk.admitted("a")
    gave_up = desk.scheduler.give_up_prefill
    assert desk._checked(gave_up("a", "no route"))
    assert desk.admit() == desk.local() == ["a"]
    assert not desk._checked(gave_up("a", "no route"))
    assert not desk._checked(gave_up("nobody", "no route"))
    desk.carry_out_aborts()
    desk.whole(req, 8)


def test_without_the_policy_a_prompt_that_did_not_reach_prefill_fails_at_once() -> None:
    desk = Alone(below=7)
    req = desk.admitted("a")
    assert desk._checked(desk.scheduler.give_up_prefill("a", "no route"))
    assert isinstance(req.error, TransferError)
    waits = desk.add("b")
    assert desk._checked(desk.scheduler.give_up_prefill("b", "no route"))
    assert str(waits.error) == "no route"


def test_prefill_is_told_of_what_is_given_up_before_its_promise() -> None:
    """It may have come there after all, and only the answer was lost."""
    desk = Alone(below=7, ask="both")
    req = desk.add("b", 8)
    desk.commands()
    assert desk._checked(desk.scheduler.give_up_prefill("b", "no route"))
    digest = req.request.digest
    assert desk.commands() == [RefuseRoom(req.room_key, 1, "p", "no route", digest)]


def test_a_request_may_name_no_prefill_worker_where_decode_carries_on() -> None:
    desk = Alone(fails_over=True, below=0, workers=Workers(gated=True))
    req = desk.admitted("a", prefill="")
    assert desk.local() == ["a"]
    assert desk.commands() == []
    desk.computed(req, 8)
    desk.transferred()
    for other in (Alone(), Desk()):
        with pytest.raises(RequestError, match="names no prefill worker"):
            other.add("a", prefill="")
    with pytest.raises(RequestError, match="names no prefill worker"):
        desk.add("c", prefill="", may_compute=False)


@pytest.mark.parametrize("stall_s", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("at", ["before each pass", "before its first chunk", "before its second"])
def test_what_an_engine_waits_for_before_a_chunk_is_not_the_chunk(at: str, stall_s: float) -> None:
    """A prompt of 40 tokens, in chunks of 1 ms beside steps of 20 ms."""
    desk = Alone(num_pages=4000, below=2048)
    running = [desk.start(rid, 9, max_new=3000, may_compute=False) for rid in "abcd"]

    def step() -> None:
        desk.now_s += 0.02
        desk.token(*running)

    for _ in range(20):
        desk.local()
        step()
    req = desk.admitted("x", 40)
    done, steps, chunks = 0, 0, 0
    while done < req.fill_len:
        desk.now_s += stall_s * (at == "before each pass")
        desk.local()
        if tokens := min(desk.scheduler.chunk_tokens, req.fill_len - done):
            is_late = at == ("before its first chunk", "before its second")[chunks > 0]
            desk.now_s += 0.011 + stall_s * (is_late and chunks < 2)  # `computed` adds 10 ms
            done, chunks = done + tokens, chunks + 1
            desk.computed(req, done)
        step()
        steps += 1
        assert steps < 40
    if at == "before each pass":
        assert steps == 3, "chunks of 8, 16 and 16 tokens, as without a stall"


@pytest.mark.parametrize("ask", ["both", "late"])
@pytest.mark.parametrize("named", ["", "p"])
@pytest.mark.parametrize("moves", ["q", "qr", "qrq", "qp"])
def test_what_is_sent_elsewhere_before_it_is_admitted_is_asked_for_there(
    moves: str, named: str, ask: str
) -> None:
    """Nothing else brings it there. Also where it named no prefill worker, or none that answers."""
    desk = Alone(num_pages=16, fails_over=True, ask=ask, below=4, workers=Workers(gated=True))
    hog = desk.add("h", 60, max_new=1, prefill="q", cacheable=False)
    desk.up("q")
    assert desk.admit() == ["h"]
    desk.arrive(hog)
    req = desk.add("a", 8, prefill=named)
    if named:
        desk.up(named)
        desk.down(named)  # it goes alone
    for prefill in moves:
        desk.scheduler.retarget("a", prefill)
        desk.up(prefill)
    with pytest.raises(RequestError, match="names no prefill worker"):
        desk.scheduler.retarget("a", "")
    desk.asked()
    desk.commands()
    assert desk.admit() == []
    desk.finish(hog)
    assert desk.admit() == ["a"]
    (opened,) = desk.commands()
    assert isinstance(opened, OpenRoom)
    (prompt,) = desk.scheduler.pop_needs_prefill()
    assert (opened.address, prompt.prefill) == (moves[-1], moves[-1])
    assert opened.promise.generation == prompt.generation == req.generation
    desk.arrive(req)


@pytest.mark.parametrize("ask", ["both", "late"])
def test_what_named_no_prefill_worker_is_asked_for_where_it_goes_after_a_retraction(
    ask: str,
) -> None:
    desk = Alone(num_pages=32, fails_over=True, ask=ask, below=8)
    desk.token(desk.start_local("h", 4))
    desk.commands()
    req = desk.add("a", 8, max_new=40, prefill="")
    assert (desk.admit(), desk.local()) == (["a"], ["a"])
    desk.whole(req, 8)
    for _ in range(2 * PAGE_SIZE):
        desk.token(req)
    desk.retract(req)
    desk.scheduler.flush()
    desk.scheduler.retarget("a", "q")
    assert desk.admit() == ["a"]
    assert desk.asked() == [("a", 1)]
    assert [command.address for command in desk.commands()] == ["q"]
    desk.arrive(req)


def test_retries_go_before() -> None:
    desk = _gone(max_retries=1)
    req = desk.admitted("a")
    desk.asked()
    desk.fail(req.room_key, drained=True)
    desk.admit()
    assert desk.asked() == [("a", 1)]
    desk.fail(req.room_key, drained=True)
    desk.admit()
    assert desk.asked() == []
    assert desk.local() == ["a"]


def test_the_rule_hears_what_is_due_here_and_what_a_worker_never_answered() -> None:
    desk = Alone(below=100)
    rule = desk.scheduler.sources["computed"].rule
    desk.computed(desk.compute("a", 20), 8)
    due: list[int] = []

    def is_here(missing: int, due_tokens: int, *more: Any, **others: Any) -> bool:
        return due.append(due_tokens) is not None

    rule.is_here = is_here
    sent = desk.admitted("b")
    assert due == [12]
    load = rule._workers["p"]
    assert load.tokens == 8
    desk.fail(sent.room_key, drained=True)
    assert (load.tokens, load.promises) == (0, {})


def test_prefill_sends_what_a_rule_that_raises_might_have_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Alone(fails_over=True)

    def most_tokens(is_down: bool) -> int:
        raise OSError("broken")

    monkeypatch.setattr(desk.scheduler.sources["computed"].rule, "most_tokens", most_tokens)
    desk.add("a")
    with pytest.raises(OSError, match="broken"):
        desk.admit()
    assert desk.admit() == ["a"]
    assert desk.admitted("b").error is None
    assert desk.asked() == [("a", 0), ("b", 0)]
