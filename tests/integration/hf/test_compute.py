"""Prompts that the decode engine computes itself: their answers are those of the model alone,
however much of them it computes. Random ones, and with prefill killed: test_layers, test_host."""

from typing import Any

import numpy as np
import pytest

from prefixkv.config import ComputeConfig
from prefixkv.engines.hf import PagedModel, Sampling
from tests.support.hf_workload import check_answers
from tests.support.hf_world import Reference, World
from tests.support.patience import until

ALL = 10_000


def _world(model: PagedModel, below: int, **options: Any) -> World:
    compute = ComputeConfig(below=below, chunk_tokens=options.pop("chunk", 24))
    more = options.pop("decode", {})
    return World(model, decode={"compute": compute, **more}, **options)


@pytest.mark.parametrize(("below", "sent"), [(64, 4), (ALL, 3)])
def test_conversations_are_answered_as_by_the_model_alone(
    model: PagedModel, reference: Reference, below: int, sent: int
) -> None:
    draw = np.random.default_rng(below)
    with _world(model, below, pages=160, prefill_pages=160) as world:
        talks = [draw.integers(0, 256, 90 + 7 * i).tolist() for i in range(4)]
        for turn in range(4):
            answers = [world.ask(f"{i}.{turn}", talk, max_new_tokens=6, sampling=Sampling())
                       for i, talk in enumerate(talks)]  # fmt: skip
            world.run()
            for i, answer in enumerate(answers):
                more = draw.integers(0, 256, 20).tolist()
                talks[i] = [*talks[i], *answer.tokens[0], *more]
        check_answers(world, reference)
        stats = world.decode.stats()
        # Whole first prompts are above 64 tokens, later turns lack less. While nothing is measured,
        # one of those is computed at a time.
        assert world.prefill.stats()["sent"] == sent
        assert stats["computed_requests"] == 16 - sent


def test_what_is_drawn_does_not_depend_on_who_computes(model: PagedModel) -> None:
    said = []
    for below in (0, ALL):
        with _world(model, below) as world:
            for i in range(4):
                sampling = Sampling(temperature=1.0, seed=i, ignore_end=True)
                world.ask(f"r{i}", range(7 * i, 7 * i + 40), max_new_tokens=9, num_samples=2,
                          sampling=sampling)  # fmt: skip
            world.run()
            said.append([answer.tokens for answer in world.answers])
    assert said[0] == said[1]


def test_a_job_of_a_former_attempt_is_given_up_for_nothing(model: PagedModel) -> None:
    with _world(model, 0, decode={"failure_policy": "local"}) as world:
        world.ask("r", range(40), max_new_tokens=3)
        jobs = []
        until(lambda: jobs.extend(world.decode.take_prefill_jobs()) or jobs,
              step=world.decode.step)  # fmt: skip
        assert world.decode.give_up_job(jobs[0], "no route")
        assert not world.decode.give_up_job(jobs[0], "no route")
        until(lambda: world.answers[0].done, step=world.decode.step)
        assert not world.decode.give_up_job(jobs[0], "no route")
        assert world.decode.stats()["computed_requests"] == 1


def test_a_step_that_has_to_go_without_a_chunk_computes_nothing(
    model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's KV may come while the engine takes in what came before."""
    with _world(model, ALL) as world:
        answer = world.ask("r", range(40), max_new_tokens=3)
        until(lambda: world.decode._computing, step=world.decode.step)
        with monkeypatch.context() as patched:
            patched.setattr(type(world.decode.node), "chunk_tokens", 0)
            world.decode.step()
        world.until(lambda: answer.done)
        check_answers(world, Reference(model))
