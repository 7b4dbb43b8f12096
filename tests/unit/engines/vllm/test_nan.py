"""Logits that are NaN, where vLLM counts them: what such a request has computed reaches no other
request, on neither side. And what a request that is given up leaves in host memory. The stand-ins
look at the KV of every token that a request goes on from, so a NaN that was kept ends a test."""

from collections.abc import Sequence
from typing import Any

import pytest

from prefixkv.engines.vllm.orders import StepOrders
from prefixkv.protocol.ids import RoomKey
from tests.support.patience import until
from tests.unit.engines.vllm.conftest import MakeServers, Servers
from tests.unit.engines.vllm.standin import BLOCK, Engine, Request, step_of
from tests.unit.engines.vllm.test_host import SMALL, evict, run
from tests.unit.engines.vllm.test_transfers import blocks_sent, error_of, offered, opened

PROMPT = list(range(100, 130))  # 7 blocks and a half, in 5 chunks
SPOILT = [0, 9, 27, 29]  # in the first chunk, the second, in the last one: cached; not cached


@pytest.fixture
def proving(servers: Servers) -> Servers:
    for engine in (servers.prefill, servers.decode):
        engine.scheduler.sends.proves = True
    return servers


def cached(engine: Engine, tokens: Sequence[int]) -> int:
    """Blocks of a prompt in vLLM's prefix cache."""
    return len(engine._cached(Request("look", [*tokens, 0])))


def go_on(servers: Servers, rid: str) -> None:
    """The next turn is right, and sent from the beginning. No memory holds NaN: kernels read a
    block beyond its last token."""
    servers.step()
    for engine in (servers.prefill, servers.decode):
        assert not engine.memory.isnan().any()
    turn = servers.ask(rid, PROMPT + list(range(10)))
    servers.until_ended(rid)
    assert servers.decode.wrong_tokens(turn, 40) == 0
    assert not turn.recomputed
    servers.settle()


@pytest.mark.parametrize("token", SPOILT)
def test_nan_on_prefill_fails_the_room_by_name(proving: Servers, token: int) -> None:
    """Whichever chunk it is, and decode computes the prompt itself."""
    proving.prefill.spoilt["1"] = token
    load = proving.ask("1", PROMPT)
    proving.until_ended("1")
    assert load.recomputed
    assert "NotFiniteError" in error_of(load)
    assert "NaN" in error_of(load)
    assert proving.decode.wrong_tokens(load, len(PROMPT)) == 0
    proving.settle()
    assert proving.prefill.outputs["1"].status == "FINISHED_ERROR"
    assert cached(proving.prefill, PROMPT) == 0
    assert proving.prefill.scheduler.take_counts()["requests_in_error"] == 1
    go_on(proving, "2")


@pytest.mark.parametrize("token", SPOILT)
def test_nan_on_prefill_ends_an_offer_before_any_worker_hears_of_it(
    proving: Servers, token: int
) -> None:
    proving.prefill.spoilt["1"] = token
    proving.prefill.step()  # its address has no port before it is bound
    proving.prefill.add(send := Request("1", PROMPT, {"do_remote_decode": True}))
    proving.until(lambda: "1" in proving.prefill.outputs)
    assert send.answer is None
    proving.settle()
    assert not any(orders.computed or orders.late for orders in proving.prefill.orders)
    assert cached(proving.prefill, PROMPT) == 0
    assert not proving.prefill.memory.isnan().any()
    load = opened(proving, "2", offered(proving, "2", PROMPT))
    assert (load.recomputed, proving.decode.wrong_tokens(load, len(PROMPT))) == (False, 0)
    proving.settle()


def test_what_is_finite_is_sent_by_either_way(proving: Servers) -> None:
    """All of a prompt, and once. The last chunk goes with the next step's orders."""
    load = proving.ask("1", PROMPT)
    proving.until_ended("1")
    assert (load.recomputed, blocks_sent(proving)) == (False, 8)
    load = opened(proving, "2", offered(proving, "2", list(range(200, 230))))
    assert (load.recomputed, blocks_sent(proving)) == (False, 16)
    assert proving.decode.wrong_tokens(load, 30) == 0
    proving.settle()
    offers = [bool(one.digest) for orders in proving.prefill.orders for one in orders.late]
    assert offers == [False, True]
    assert not any(one.last for orders in proving.prefill.orders for one in orders.computed)


@pytest.mark.parametrize("token", SPOILT)
def test_nan_on_decode_leaves_nothing(make_servers: MakeServers, token: int) -> None:
    """Neither in vLLM's cache nor in host memory, where a prompt's beginning was before."""
    servers = make_servers(decode=SMALL)
    decode = servers.decode
    decode.scheduler.sends.proves = True
    run(decode, "0", PROMPT[:8])
    decode.spoilt["1"] = max(token, 8)
    decode.add(Request("1", PROMPT))
    decode.add(Request("2", PROMPT))  # finds what is cached of it meanwhile
    servers.until_ended("1", "2")
    assert decode.outputs["1"].status == "FINISHED_ERROR"
    assert decode.outputs["2"].status == "done"
    servers.settle()
    evict(decode)
    go_on(servers, "3")


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_STOPPED"])
@pytest.mark.parametrize("num_output", [0, 1, 6])
@pytest.mark.parametrize("params", [None, {"hints": {"ends": True}}])
def test_a_request_that_is_given_up_leaves_its_prompt_in_host_memory(
    make_servers: MakeServers, status: str, num_output: int, params: Any
) -> None:
    """Where a token has come of the prompt, else nothing; all that was computed, where it ended
    well. Of its hints then none counts."""
    decode = make_servers(decode=SMALL).decode
    run(decode, "0", list(range(300, 312)))
    tokens = PROMPT[:18] + list(range(num_output))
    request = Request("1", tokens, params)
    request.num_prompt_tokens = 18
    decode.waiting.append(request)
    # vLLM computes all but the token that came last.
    computed = len(tokens) - bool(num_output)
    blocks = decode.pool.new_blocks(len(tokens) // BLOCK + 1)
    assert blocks is not None
    decode.waiting.remove(request)
    request.blocks, request.computed = blocks, computed
    decode._cache(request)
    before = decode.scheduler.gauges()["host_blocks"]
    decode._end(request, status)
    until(lambda: decode.idle, step=decode.step)
    left = decode.scheduler.gauges()["host_blocks"] - before
    given_up = 18 // BLOCK if num_output else 0
    ended_well = 0 if params else computed // BLOCK
    assert left == (ended_well if status == "FINISHED_STOPPED" else given_up)


def test_a_spoilt_block_is_cleared_when_nobody_has_it_and_it_is_not_written_anew(
    proving: Servers,
) -> None:
    """Not while a request has it, nor where it is cached: then another has written it since."""
    engine = proving.decode
    side, pool = engine.scheduler, engine.pool
    free, used, cached = pool.new_blocks(3) or []
    pool.cache(cached, b"x")
    pool.free_blocks([free, cached])
    side.spoilt([free.block_id, used.block_id, cached.block_id])
    side.clear_spoilt()
    assert side.orders(step_of()).cleared == [free.block_id]
    pool.free_blocks([used])
    side.clear_spoilt()
    side.clear_spoilt()
    assert side.busy
    assert side.orders(step_of()).cleared == [used.block_id]
    assert not side.busy


# --- steps that overlap: the next is scheduled before the result of the one before ----------------


class Overlapping:
    """Prefill's scheduler alone, of one prompt that is computed in two steps."""

    def __init__(self, engine: Engine, params: dict[str, Any]) -> None:
        self.side = engine.scheduler
        self.side.sends.proves = True
        self.request = Request("1", PROMPT[:8], params)
        self.side.on_new_request(self.request)
        self.side.orders(step_of())
        if (send := self.side.sends.sends.get("1")) is not None:
            send.unpromised = 0
        self.pages = [block.block_id for block in engine.pool.new_blocks(2) or []]
        self.side.allocated(self.request, (self.pages,), 0)

    def step(self, count: int, computed: int = 0) -> Any:
        return step_of({"1": (computed, count)}, self.pages)

    def both(self) -> tuple[Any, Any]:
        """Both steps are under way."""
        first, second = self.step(4), self.step(4, 4)
        assert [chunk.end for chunk in self.side.orders(first).computed] in ([4], [])
        assert not self.side.orders(second)
        return first, second

    def next(self) -> StepOrders:
        return self.side.orders(step_of())


PROMISED = {"do_remote_decode": True, "room": 1, "decode": "decode-0"}
DRAWN = {"do_remote_decode": True}


@pytest.fixture
def engine(make_servers: MakeServers) -> Engine:
    return make_servers(prefill={"advertise": "tcp://127.0.0.1:1"}).prefill


def test_the_log_has_one_line_a_minute_of_them(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(engine.scheduler.ledger, "now_s", lambda: now_s)
    for at_s, num_lines in ((1000.0, 1), (1059.9, 1), (1060.0, 2), (1061.0, 2)):
        now_s = at_s
        assert engine.scheduler.take_logits(step_of(), {"1": 3, "2": 4})[0].keys() == {"1", "2"}
        assert caplog.text.count("NotFiniteError") == num_lines


@pytest.mark.parametrize("params", [PROMISED, DRAWN])
def test_a_prompt_waits_for_the_result_of_its_last_step(
    engine: Engine, params: dict[str, Any]
) -> None:
    run = Overlapping(engine, params)
    first, second = run.both()
    run.side.take_logits(first, {"1": 0})
    assert not run.next().late
    run.side.take_logits(second, {"1": 0})
    assert len(run.next().late) == 1
    assert not run.next().late


@pytest.mark.parametrize("params", [PROMISED, DRAWN])
def test_nan_in_the_first_step_ends_what_the_second_completes(
    engine: Engine, params: dict[str, Any]
) -> None:
    run = Overlapping(engine, params)
    first, second = run.both()
    assert run.side.take_logits(first, {"1": 3}) == (
        {"1": "NotFiniteError: 3 of the logits of request 1 are NaN"}, set()
    )  # fmt: skip
    assert run.side.finished(run.request, run.pages) is None
    orders = run.next()
    assert [*orders.abort_sends] == ([RoomKey(1, 0, "decode-0")] if params is PROMISED else [])
    assert run.side.take_logits(second, {"1": 3})  # vLLM has ended it already
    assert not run.next().late
    assert ("1" in run.side.sends.sends) == (params is PROMISED)  # until the workers say "freed"


@pytest.mark.parametrize("params", [PROMISED, DRAWN])
def test_weights_that_move_meanwhile_leave_nothing_to_send(
    engine: Engine, params: dict[str, Any]
) -> None:
    run = Overlapping(engine, params)
    first, second = run.both()
    run.side.move_weights("2")
    run.next()
    run.side.take_logits(first, {"1": 0})
    run.side.take_logits(second, {"1": 0})
    assert not run.next().late
    assert ("1" in run.side.sends.sends) == (params is PROMISED)


def test_an_offer_whose_blocks_are_needed_meanwhile_is_dropped(engine: Engine) -> None:
    run = Overlapping(engine, DRAWN)
    _, second = run.both()
    run.side.sends.make_room(1)
    run.side.take_logits(second, {"1": 0})
    assert not run.next().late
    assert not run.side.sends.sends
    counts = run.side.take_counts()
    assert (counts["offers_withdrawn"], counts["sends_over"]) == (1, 1)
    assert "offers_failed" not in counts


@pytest.mark.parametrize("nans", [(0, 0), (0, 3), (3, 0)])
def test_a_request_that_has_ended_is_found_by_its_hashes_when_its_steps_have_come(
    engine: Engine, nans: tuple[int, int]
) -> None:
    """Its client has left between two steps and their results."""
    run = Overlapping(engine, PROMISED)
    steps = run.both()
    run.request.num_in_flight_tokens = 8
    run.side.finished(run.request, run.pages)
    found = [run.side.take_logits(step, {"1": n})[1] for step, n in zip(steps, nans, strict=True)]
    hashes = set(run.request.block_hashes)
    assert found == [hashes if n else set() for n in nans]
    assert not run.side._in_flight


def test_a_token_of_an_answer_says_nothing_of_a_prompt_that_was_sent(engine: Engine) -> None:
    run = Overlapping(engine, PROMISED)
    _, second = run.both()
    run.side.take_logits(second, {"1": 0})
    run.next()
    run.side.take_logits(run.step(1, 8), {"1": 5})
    assert not run.next().abort_sends
