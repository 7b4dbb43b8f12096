"""Both engines on threads of their own, as a process that serves has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prefixkv.engines.hf import (
    DecodeEngine,
    EngineLoop,
    Generate,
    PagedModel,
    PrefillEngine,
    make_model,
)
from prefixkv.errors import ClosedError, DrainingError
from tests.support.hf_world import TINY, Answer, Reference
from tests.support.patience import PATIENCE_S, until


@pytest.fixture(scope="module")
def models() -> list[PagedModel]:
    return [make_model("llama", seed=3, **TINY) for _ in range(2)]


@contextmanager
def loops(models: list[PagedModel]) -> Iterator[tuple[EngineLoop, EngineLoop]]:
    prefill = EngineLoop(PrefillEngine(models[0], models[0].make_pool(64)), name="prefill")
    engine = DecodeEngine(models[1], models[1].make_pool(64))

    def carry() -> None:
        for job in engine.take_prefill_jobs():
            prefill.post(lambda to, job=job: to.submit(job))

    decode = EngineLoop(engine, carry, "decode")
    prefill.start()
    decode.start()
    try:
        yield prefill, decode
    finally:
        for loop in (decode, prefill):
            loop.stop()
            assert loop.join(PATIENCE_S)


def ask(prefill: EngineLoop, decode: EngineLoop, rid: str, num: int) -> Answer:
    wanted = Generate(rid, range(30), prefill.engine.endpoint, max_new_tokens=num)
    answer = Answer(wanted)
    decode.post(lambda engine: engine.submit(wanted, answer))
    return answer


def test_answers_come_from_other_threads_and_a_drain_waits_for_them(
    models: list[PagedModel],
) -> None:
    with loops(models) as (prefill, decode):
        answers = [ask(prefill, decode, f"{i}", 100) for i in range(3)]
        until(lambda: answers[2].tokens)
        refused, go_on = threading.Event(), threading.Event()
        # Else all may be said, and the loop drained, before this thread goes on.
        decode.post(lambda engine: go_on.wait(PATIENCE_S))
        decode.drain()

        def late(engine: DecodeEngine) -> None:
            with pytest.raises(DrainingError):
                engine.submit(Generate("late", [1], "tcp://127.0.0.1:1"), print)
            refused.set()

        decode.post(late)
        go_on.set()
        assert decode.join(PATIENCE_S)
        assert refused.is_set()
        expected = Reference(models[0]).greedy(range(30), 100)
        assert [answer.tokens[0] for answer in answers] == [expected] * 3
        prefill.drain()
        assert prefill.join(PATIENCE_S)
        assert prefill.error is decode.error is None
        assert not decode.alive
        assert decode.draining
        with pytest.raises(ClosedError):
            decode.post(print)


def test_an_abort_reaches_a_loop_that_is_busy(models: list[PagedModel]) -> None:
    with loops(models) as (prefill, decode):
        answer = ask(prefill, decode, "r", 900)
        until(lambda: len(answer.tokens.get(0, ())) > 2)
        decode.post(lambda engine: engine.abort("r"))
        until(lambda: answer.done)
        assert answer.ends[0].finish == "abort"


def test_a_loop_ends_with_what_was_raised_on_its_thread(
    models: list[PagedModel], caplog: pytest.LogCaptureFixture
) -> None:
    with loops(models) as (_, decode):
        decode.post(lambda engine: 1 / 0)
        assert decode.join(PATIENCE_S)
        assert isinstance(decode.error, ZeroDivisionError)
        assert decode.engine.node.closed
        with pytest.raises(ClosedError) as raised:
            decode.post(print)
        assert raised.value.__cause__ is decode.error
