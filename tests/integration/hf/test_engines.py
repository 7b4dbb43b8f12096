"""The two engines as a worker's loop drives them: aborts, prefill's refusals and failures, drains,
pages that are missing for a while; and both on threads of their own, as a process that serves has
them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from prefixkv.engines.hf import (
    DecodeEngine,
    EngineLoop,
    Generate,
    PagedModel,
    PrefillEngine,
    Sampling,
    make_model,
)
from prefixkv.engines.hf.requests import pack_first
from prefixkv.errors import AbortedError, ClosedError, DrainingError, OutOfPagesError, RequestError
from tests.support.hf_workload import check_answers
from tests.support.hf_world import TINY, Answer, Reference, World
from tests.support.patience import PATIENCE_S, lasting_address, until


def test_an_abort_ends_what_runs_and_what_waits_and_all_its_samples(
    model: PagedModel, reference: Reference
) -> None:
    with World(model) as world:
        runs = world.ask("runs", range(20), max_new_tokens=100, num_samples=2)
        until(lambda: world.step() or len(runs.tokens.get(1, ())) > 3)
        waits = world.ask("waits", range(30), max_new_tokens=5)
        assert world.decode.abort("runs")
        assert world.decode.abort("waits")
        world.run()
        assert not world.decode.abort("runs")
        for answer in (runs, waits):
            for end in answer.ends.values():
                assert (end.finish, end.token) == ("abort", None)
                assert isinstance(end.error, AbortedError)
        assert runs.tokens[0] == reference.greedy(range(20), len(runs.tokens[0]))
        world.at_rest()


def test_a_client_may_abort_and_ask_while_it_is_told(model: PagedModel) -> None:
    with World(model) as world:
        later: list[Answer] = []

        def on_output(output) -> None:
            first(output)
            if output.position == 2 and not later:
                assert world.decode.abort("first")
                later.append(world.ask("later", [1, 2, 3], max_new_tokens=3))

        ask = Generate("first", range(20), world.prefill.endpoint, max_new_tokens=50)
        first = Answer(ask)
        world.answers.append(first)
        world.decode.submit(ask, on_output)
        world.run()
        assert first.ends[0].finish == "abort"
        assert later[0].ends[0].finish == "length"
        world.at_rest()


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (lambda *_: b"no", "aux of 2 bytes"),
        (lambda *one: pack_first(*one[:2]), "log-probabilities with None likely"),
    ],
)
def test_a_first_token_that_is_none_ends_the_answer(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch, packed, why: str
) -> None:
    monkeypatch.setattr("prefixkv.engines.hf.prefill.pack_first", packed)
    with World(model) as world:
        answer = world.ask("r", range(20), sampling=Sampling(logprobs=1))
        world.run()
        assert answer.ends[0].finish == "error"
        assert why in str(answer.ends[0].error)
        world.at_rest()


def test_sampled_tokens_are_kept_while_pages_are_held_elsewhere(
    model: PagedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`append_many` says that nothing is to be retracted: the step is said again, not computed
    again."""
    with World(model) as world:
        answer = world.ask("r", range(20), max_new_tokens=12, sampling=Sampling(logprobs=2))
        until(lambda: world.step() or len(answer.tokens.get(0, ())) > 3)
        right, refusals = world.decode.node.append_many, [3]

        def append_many(reqs, tokens) -> None:
            if refusals[0]:
                refusals[0] -= 1
                raise OutOfPagesError(1, 0)
            right(reqs, tokens)

        monkeypatch.setattr(world.decode.node, "append_many", append_many)
        world.run()
        assert world.decode.stats()["blocked_steps"] == 3
        assert world.decode.stats()["steps"] == 11
        check_answers(world, reference)


def test_a_drain_ends_what_lives_and_takes_nothing_new(
    model: PagedModel, reference: Reference
) -> None:
    with World(model) as world:
        answer = world.ask("r", range(20), max_new_tokens=8)
        assert not world.decode.drain()
        with pytest.raises(DrainingError):
            world.ask("s", range(20))
        world.run()
        assert answer.tokens[0] == reference.greedy(range(20), 8)
        world.at_rest()


def refuse(number: int, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode's node does not take the request of this number, from 1."""
    right, num = world.decode.node.add, [0]

    def add(request):
        num[0] += 1
        if num[0] == number:
            raise RequestError("no")
        return right(request)

    monkeypatch.setattr(world.decode.node, "add", add)


def test_least_tokens_hold_through_a_retraction(model: PagedModel, reference: Reference) -> None:
    """The first two tokens that it would say end the answer: the first comes from prefill."""
    prompts = [range(20 * i, 20 * i + 20) for i in range(4)]
    answers = []
    for pages in (64, 10):
        with World(model, pages=pages) as world:
            for i, prompt in enumerate(prompts):
                ends = tuple(reference.greedy(prompt, 2))
                sampling = Sampling(0.9, seed=i, stop_tokens=ends, min_tokens=30)
                world.ask(f"{i}", prompt, max_new_tokens=40, sampling=sampling)
            world.run()
            assert (world.decode.stats()["retractions"] > 0) == (pages == 10)
            answers.append([answer.tokens[0] for answer in world.answers])
            for prompt, tokens in zip(prompts, answers[-1], strict=True):
                assert len(tokens) >= 30
                assert not {*tokens[:30]} & {*reference.greedy(prompt, 2)}
    assert answers[0] == answers[1]


def test_no_answer_waits_behind_the_many_samples_of_others(model: PagedModel) -> None:
    sampling = Sampling(temperature=1.0, ignore_end=True)
    with World(model, pages=40) as world:
        for i in range(3):
            world.ask(f"many{i}", range(i, i + 30), num_samples=20, max_new_tokens=20,
                      sampling=sampling)  # fmt: skip
        world.until(lambda: world.answers[0].tokens)
        chat = world.ask("chat", range(50, 90), max_new_tokens=3)
        world.until(lambda: chat.done)
        assert sum(len(one.ends) for one in world.answers) < 30
        # Each request has its turn.
        world.until(lambda: sum(len(one.ends) for one in world.answers) > 30)
        assert min(len(one.ends) for one in world.answers[:3]) > 5
        world.run()
        world.at_rest()
        for answer in world.answers[:3]:
            assert {end.finish for end in answer.ends.values()} == {"length"}


def test_a_forward_on_a_cpu_has_few_samples_of_one_request(model: PagedModel) -> None:
    """A chat waited for three forwards of all samples of another client's request: 1 to 5 s, where
    these were 128 with a prompt of 3,000 tokens. All of them took as long then."""
    sampling, most = Sampling(temperature=1.0, ignore_end=True), 0
    with World(model, pages=80) as world:
        many = world.ask("many", range(30), num_samples=40, max_new_tokens=30, sampling=sampling)
        while not many.done:
            world.step()
            most = max(most, world.decode.stats()["running"])
        assert most == 16
        world.at_rest()


def test_samples_for_a_worker_that_stands_still_hold_up_its_own_alone(model: PagedModel) -> None:
    with World(model, pages=60) as world:
        here, still = world.prefill.endpoint, lasting_address()

        def step() -> None:
            for job in world.decode.take_prefill_jobs():
                if job.prefill == here:
                    world.prefill.submit(job)
            world.prefill.step()
            if not world.decode.step():
                world.decode.wait(0.005)

        stuck = Answer(Generate("stuck", np.arange(30, dtype=np.int32), still, num_samples=32))
        world.decode.submit(stuck.ask, stuck)
        fine = world.ask("fine", range(40, 70), num_samples=16, max_new_tokens=4)
        until(lambda: fine.done, step=step, state=world.state)
        assert {end.finish for end in fine.ends.values()} <= {"stop", "length"}
        assert not stuck.ends
        assert world.decode.abort("stuck")
        until(lambda: stuck.done, step=step, state=world.state)


def test_samples_that_are_held_end_once_however_they_end(model: PagedModel) -> None:
    with World(model, pages=40) as world:
        many = [world.ask(f"r{i}", range(i, i + 30), num_samples=40, max_new_tokens=8)
                for i in range(2)]  # fmt: skip
        world.until(lambda: many[0].tokens)
        assert world.decode.abort("r0")
        again = world.ask("r2", range(20), num_samples=30, max_new_tokens=4)
        world.until(lambda: many[0].done)
        assert {end.finish for end in many[0].ends.values()} == {"abort"}
        assert not world.decode.abort("r0")
        # What is accepted is answered though the engine drains.
        world.at_rest()
        for answer in (many[1], again):
            assert answer.done
            assert {end.finish for end in answer.ends.values()} <= {"stop", "length"}
        with pytest.raises(DrainingError):
            world.ask("late", range(20), num_samples=9)


def test_a_held_sample_that_the_node_does_not_take_ends_with_its_error(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(model) as world:
        refuse(7, world, monkeypatch)
        answer = world.ask("r", range(20), num_samples=9, max_new_tokens=2)
        world.run()
        failed = [end for end in answer.ends.values() if end.finish == "error"]
        assert [(end.sample, str(end.error)) for end in failed] == [(6, "no")]
        world.at_rest()


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
