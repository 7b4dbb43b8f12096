"""Prompts that the decode engine computes itself: their answers are those of the model alone,
however much of them it computes, with prefill there, killed, or never there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixkv.config import ComputeConfig
from prefixkv.engines.hf import PagedModel, Sampling
from tests.models.hf_world import Answer, Reference, World

ALL = 10_000


def _world(model: PagedModel, below: int, **options: Any) -> World:
    compute = ComputeConfig(below=below, chunk_tokens=options.pop("chunk", 24))
    more = options.pop("decode", {})
    return World(model, decode={"compute": compute, **more}, **options)


def _right(reference: Reference, answer: Answer) -> None:
    for sample, end in answer.ends.items():
        assert end.finish == "length", end.error
        tokens, got = answer.ask.tokens, answer.tokens[sample]
        said = reference.greedy(tokens, len(got))
        assert got == said or reference.is_near(tokens, said, got)


@pytest.mark.parametrize("below", [0, 64, 2048, ALL])
def test_conversations_are_answered_as_by_the_model_alone(
    model: PagedModel, reference: Reference, below: int
) -> None:
    draw = np.random.default_rng(below)
    with _world(model, below, pages=160, prefill_pages=160) as world:
        talks = [draw.integers(0, 256, 90 + 7 * i).tolist() for i in range(4)]
        for turn in range(4):
            answers = [world.ask(f"{i}.{turn}", talk, max_new_tokens=6, sampling=Sampling())
                       for i, talk in enumerate(talks)]  # fmt: skip
            world.run()
            for i, answer in enumerate(answers):
                _right(reference, answer)
                more = draw.integers(0, 256, 20).tolist()
                talks[i] = [*talks[i], *answer.tokens[0], *more]
        stats = world.decode.stats()
        jobs = world.prefill.stats()["sent"]
        # Whole first prompts are above 64 tokens, later turns lack less.
        expected = {0: 16, 64: 4, 2048: 0, ALL: 0}[below]
        assert jobs == expected
        assert stats["computed_requests"] == 16 - expected
