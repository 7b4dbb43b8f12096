"""What decode's own vLLM computes by `compute_below`: the measurements by a clock that the test
holds, and whole requests between two stand-ins."""

import itertools
from typing import Any
from unittest.mock import Mock, call

import pytest

from prefixkv.engines.vllm.compute import OwnCompute
from tests.unit.engines.vllm.conftest import MakeServers
from tests.unit.engines.vllm.standin import Engine
from tests.unit.engines.vllm.test_transfers import PROMPT, blocks_sent, offered, opened

FAR = "tcp://127.0.0.1:1"  # nothing listens there


class Steps:
    """vLLM's steps, and a clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.compute = OwnCompute(1000, 500, lambda: self.now_s)

    def is_here(self, num_tokens: int) -> bool:
        """Whether a request that lacks so many tokens, and is not heard of again, is computed. A
        minute later none waits for it."""
        self.now_s += 60.0
        found = self.compute.is_here("new", num_tokens, FAR)
        self.compute.ended("new")
        return found

    def begin(self, **requests: tuple[int, int]) -> None:
        """A step is scheduled: where each request begins, and how many tokens it computes."""
        for rid, (start, count) in requests.items():
            self.compute.scheduled(rid, start, count)
        self.compute.step_scheduled()
        self.compute.check_invariants()

    def end(self, after_s: float) -> None:
        self.now_s += after_s
        self.compute.step_ended()

    def step(self, seconds: float, **requests: tuple[int, int]) -> None:
        self.begin(**requests)
        self.end(seconds)

    def compute_prompts(self) -> None:
        """Decode computes as many prompts as make it sure that 500 tokens take a second."""
        for number in range(10):
            self.compute.admitted(str(number), 500, 500)
            self.step(1.0, **{str(number): (0, 500)})
            self.compute.ended(str(number))

    def load(self, room: int, num_tokens: int, seconds: float) -> None:
        """A load of a room takes so long."""
        self.compute.promised(FAR, room, num_tokens)
        self.now_s += seconds
        self.compute.arrived(room)


def chunk_s(compute: OwnCompute, num_tokens: int) -> float:
    """What a chunk of so many tokens is thought to take, alone or beside a batch."""
    sources = compute.sources
    return num_tokens * max(sources._alone.unit_s, sources._beside.unit_s)


def test_a_step_begins_where_the_one_before_ended() -> None:
    """Also where vLLM has scheduled it before that."""
    steps = Steps()
    steps.compute.admitted("a", 1000, 1000)
    steps.begin(a=(0, 500))
    steps.begin(a=(500, 500))
    steps.end(1.0)
    steps.end(1.0)  # not two seconds
    assert chunk_s(steps.compute, 500) == pytest.approx(1.0, rel=0.05)


def test_beside_a_batch_a_chunk_costs_what_the_step_is_longer() -> None:
    steps = Steps()
    for rid in "ab":
        steps.compute.admitted(rid, 500, 500)
    steps.step(1.0, a=(0, 500))
    for i in range(5):
        steps.step(0.2, a=(500 + i, 1))
    steps.step(1.2, a=(505, 1), b=(0, 500))
    assert chunk_s(steps.compute, 500) == pytest.approx(1.0, rel=0.05)


def test_the_last_token_of_a_loaded_prompt_is_no_chunk() -> None:
    """vLLM computes it again, which says nothing of how fast it computes prompts."""
    steps = Steps()
    steps.compute.admitted("a", 500, 500)
    steps.step(1.0, a=(0, 500))
    steps.compute.admitted("b", 500, 0)
    for _ in range(10):
        steps.step(0.1, b=(499, 1))
    assert chunk_s(steps.compute, 500) == pytest.approx(1.0, rel=0.05)


def test_what_is_due_counts_from_the_admission_until_it_is_computed() -> None:
    """500 tokens of decode take a second, of prefill five."""
    steps = Steps()
    steps.compute_prompts()
    for room in range(5):
        steps.load(room, 500, 5.0)
    assert steps.is_here(200)
    steps.compute.admitted("a", 1100, 1000)  # 100 are cached
    assert not steps.is_here(200)
    steps.begin(a=(100, 500))
    assert steps.is_here(200)
    steps.compute.ended("a")
    assert not steps.compute.rids
    steps.compute.check_invariants()


def test_a_preempted_prompt_is_due_again() -> None:
    steps = Steps()
    steps.compute_prompts()
    for room in range(5):
        steps.load(room, 500, 3.0)
    steps.compute.admitted("a", 900, 900)
    steps.begin(a=(0, 900))
    assert steps.is_here(200)
    steps.compute.admitted("a", 900, 0)  # as it comes back
    steps.begin(a=(0, 200))
    assert not steps.is_here(200)


def test_a_request_that_waits_is_decided_once() -> None:
    """vLLM asks for it in each step; to the rule it is another one if it lacks other tokens."""
    steps = Steps()
    assert steps.compute.is_here("a", 1000, FAR)
    steps.compute.admitted("b", 1000, 1000)
    assert steps.compute.is_here("a", 1000, FAR)
    assert not steps.compute.is_here("a", 999, FAR)
    assert steps.compute.rids == {"a", "b"}
    steps.compute.admitted("a", 1000, 0)
    steps.compute.check_invariants()
    for rid in "ab":
        steps.compute.ended(rid)
    assert not steps.compute.rids


def test_an_engine_that_does_not_say_when_steps_end_is_not_measured() -> None:
    steps = Steps()
    for rid in range(1000):
        steps.compute.admitted(str(rid), 100, 100)
        steps.begin(**{str(rid): (0, 100)})
        steps.compute.ended(str(rid))
    assert chunk_s(steps.compute, 500) == 0.0
    assert steps.is_here(1000)
    assert len(steps.compute._steps) < 100


# --- between two servers --------------------------------------------------------------------------


def counts(engine: Engine) -> dict[str, int]:
    return engine.scheduler.take_counts()


@pytest.mark.parametrize("option", ["compute_below", "recompute_below"])
def test_a_little_is_computed_here_and_prefill_computes_nothing(
    make_servers: MakeServers, option: str
) -> None:
    servers = make_servers(decode={option: 10})
    first = servers.ask("1", PROMPT)
    servers.until_ended("1")
    assert first.loaded_from == 0
    servers.settle()
    assert counts(servers.decode) == {"loads_done": 1}
    counts(servers.prefill)
    second, send = servers.requests("2", [*PROMPT, 1, 2])  # 28 are cached, 4 are missing
    servers.decode.add(second)
    servers.prefill.add(send)
    servers.until_ended("2")
    assert second.loaded_from is None
    assert servers.decode.wrong_tokens(second, 32) == 0
    servers.settle()
    assert counts(servers.decode) == {
        "loads_refused": 1, "computed_requests": 1, "computed_tokens": 4,
    }  # fmt: skip
    assert (send.status, send.computed) == ("FINISHED_ABORTED", 0)
    assert counts(servers.prefill)["requests_ended"] == 1
    assert blocks_sent(servers) == 8
    assert second.answer == {"prefixkv": {"room": 2, "loaded_tokens": 0, "cached_tokens": 28}}


def test_steps_and_loads_are_measured(make_servers: MakeServers) -> None:
    """By a clock on which a step with tokens of prompts takes a second, and all else nothing."""
    servers = make_servers(
        decode={"compute_below": 250, "num_blocks": 256}, prefill={"num_blocks": 256}
    )
    decode, compute, now_s = servers.decode, servers.decode.scheduler.compute, 100.0
    compute.now_s = lambda: now_s
    forward = decode._forward

    def take_a_second(*args: Any) -> None:
        nonlocal now_s
        now_s += 1.0
        forward(*args)

    vars(decode).update(CHUNK=50, _forward=take_a_second)
    numbers, promised, gave_up = itertools.count(1), Mock(), Mock()
    promised.side_effect, gave_up.side_effect = compute.promised, compute.gave_up
    vars(compute).update(promised=promised, gave_up=gave_up)

    def is_computed(num_tokens: int) -> bool:
        number = next(numbers)
        asked = servers.ask(str(number), [*range(1000 * number, 1000 * number + num_tokens)])
        servers.until_ended(str(number))
        servers.settle()
        return asked.loaded_from is None

    assert is_computed(200)
    assert chunk_s(compute, 50) == pytest.approx(1.0, rel=0.05)
    assert not any(is_computed(300) for _ in range(3))
    assert not is_computed(200)  # 4 s here
    assert counts(decode)["compute_declined"] == 1
    assert [asked.args[2] for asked in promised.mock_calls] == [300, 300, 300, 200]
    left = servers.requests("left", [*range(300)])[0]
    decode.add(left)
    servers.step()
    decode.abort("left")
    servers.until(lambda: not any(decode.scheduler.gauges().values()))
    assert gave_up.mock_calls == [call(left.kv_transfer_params["room"])]


def test_what_is_on_its_way_is_waited_for(make_servers: MakeServers) -> None:
    servers = make_servers(decode={"compute_below": 12})
    first = servers.ask("1", PROMPT)
    second = servers.ask("2", PROMPT[:12])  # the first brings these
    third = servers.ask("3", [*range(12)])
    servers.until_ended("1", "2", "3")
    assert (first.loaded_from, second.loaded_from, third.loaded_from) == (0, None, None)
    found = counts(servers.decode)
    assert found["flights_joined"] == 1
    assert found["computed_tokens"] == 4 + 12  # of the second only what is left
    servers.settle()


def test_a_room_that_prefill_has_drawn_is_loaded(make_servers: MakeServers) -> None:
    """Its prompt is computed: to compute it again would cost, and save nothing."""
    servers = make_servers(decode={"compute_below": 1000})
    load = opened(servers, "1", offered(servers, "1", PROMPT))
    assert (load.loaded_from, load.recomputed) == (0, False)
    assert blocks_sent(servers) == 8
    assert counts(servers.decode) == {"loads_done": 1}
    servers.settle()


def test_the_choices_of_a_prompt_are_computed_once(make_servers: MakeServers) -> None:
    """`n` choices come as requests of one room: one of them refuses it."""
    servers = make_servers(decode={"compute_below": 1000})
    load, send = servers.requests("1", PROMPT)
    other = type(load)("2", PROMPT, load.kv_transfer_params)
    servers.decode.add(load)
    servers.decode.add(other)
    servers.prefill.add(send)
    servers.until_ended("1", "2")
    assert (load.loaded_from, other.loaded_from) == (None, None)
    assert counts(servers.decode)["computed_requests"] == 1
    servers.settle()
