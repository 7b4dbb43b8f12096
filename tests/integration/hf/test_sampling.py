"""Tokens from logits: against a plain sampler, over temperatures, cuts, ties and edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkv.engines.hf import Sampling
from prefixkv.engines.hf.engine import choose, draw
from prefixkv.engines.hf.requests import Choice
from prefixkv.errors import RequestError
from tests.support.hf_world import choose_plainly

CUTS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=1),
    Sampling(temperature=1.3, top_k=7),
    Sampling(temperature=0.9, top_k=1000),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=2.0, top_k=20, top_p=0.8),
]


def test_every_row_is_drawn_as_a_plain_sampler_draws_it() -> None:
    rng = np.random.default_rng(0)
    for seed in range(40):
        samplings = [CUTS[i] for i in rng.integers(len(CUTS), size=8)]
        logits = rng.normal(0, 3, (8, 50))
        choices = [Choice(one, seed, i, i * 7) for i, one in enumerate(samplings)]
        said = choose(torch.from_numpy(logits), choices)
        for row, choice, token in zip(logits, choices, said, strict=True):
            number = draw(choice.seed, choice.sample, choice.position)
            expected, distance = choose_plainly(row, choice.sampling, number)
            assert token == expected or distance < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_without_a_share_is_never_drawn(dtype: torch.dtype) -> None:
    logits = torch.full((64, 9), -torch.inf, dtype=dtype)
    logits[:, 3] = logits[:, 5] = 1.0
    said = choose(logits, [Choice(Sampling(temperature=1.0), 1, 0, i) for i in range(64)])
    assert {*said} == {3, 5}


def test_the_least_temperature_draws_the_largest_logit() -> None:
    logits = torch.tensor([[-3.0, 8.0, 20.0, 1.0]])
    assert choose(logits, [Choice(Sampling(temperature=5e-324), 1)]) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_would_end_it_is_not_chosen_before_its_least_tokens(temperature: float) -> None:
    """Neither a stop token nor an end of the model's; one beyond the vocabulary is no matter."""
    logits = torch.tensor([0.0, 9.0, 8.0, 1.0])
    early = Sampling(temperature, stop_tokens=(1, 7), min_tokens=3)
    said = choose(logits.expand(6, -1), [Choice(early, 0, 0, i) for i in range(6)], (2,))
    assert {*said[:3]} <= {0, 3}
    assert {*said[3:]} <= {1, 2}
    assert logits.tolist() == [0.0, 9.0, 8.0, 1.0]
    kept = Sampling(temperature, stop_tokens=(1,), min_tokens=3, ignore_end=True)
    assert choose(logits[None], [Choice(kept)], (2,)) == [2]  # it ends nothing


def test_draws_differ_by_seed_sample_and_position_and_are_uniform() -> None:
    drawn = [draw(s, i, p) for s in range(20) for i in range(20) for p in range(20)]
    assert len({*drawn}) == 20**3
    assert 0 <= min(drawn) < max(drawn) < 1
    assert np.abs(np.histogram(drawn, 8, (0, 1))[0] / 20**3 - 1 / 8).max() < 0.02


def test_without_a_seed_it_follows_from_the_request() -> None:
    free = Sampling(temperature=1.0)
    assert free.seeded("a") == free.seeded("a") != free.seeded("b")
    assert Sampling(seed=7).seeded("a") == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"temperature": "1"}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"top_k": 1.5},
        {"min_tokens": -1}, {"min_tokens": 1.5}, {"seed": -1}, {"seed": 2**64},
        {"stop_tokens": (-1,)}, {"logprobs": -1}, {"logprobs": 21}, {"logprobs": True},
        {"logprobs": 1.5}, {"logprobs": "1"},
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused(wrong: dict) -> None:
    with pytest.raises(RequestError):
        Sampling(**wrong)
