"""Tokens from logits: against a plain sampler, over temperatures, cuts, ties and edges; and their
log-probabilities."""

import numpy as np
import pytest
import torch

from prefixkv.engines.hf import PagedModel, Sampling
from prefixkv.engines.hf.engine import choose, chosen_logprobs, draw
from prefixkv.engines.hf.requests import LEAST, Choice, TokenLogprob, pack_first, unpack_first
from prefixkv.errors import RequestError
from tests.support.hf_workload import check_answers
from tests.support.hf_world import Reference, World, choose_plainly

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


def test_each_request_of_a_batch_has_what_it_asked_for(
    model: PagedModel, reference: Reference
) -> None:
    with World(model) as world:
        for i, num in enumerate((None, 0, 1, 5, 20)):
            for kind, more in (("greedy", {}), ("drawn", {"temperature": 0.9, "top_k": 9})):
                prompt = range(i, i + 20 + i)
                how = Sampling(logprobs=num, seed=i, **more)
                world.ask(f"{kind} {num}", prompt, sampling=how, max_new_tokens=7)
        world.run()
        check_answers(world, reference)
        world.at_rest()


def test_without_them_none_are_computed(model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("computed, and not asked for")

    monkeypatch.setattr("torch.log_softmax", never)
    with World(model) as world:
        world.ask("r", range(20), max_new_tokens=5, num_samples=2)
        world.run()
        assert world.answers[0].ends[0].finish == "length"


# --- numbers --------------------------------------------------------------------------------------


def logprobs_of(logits: torch.Tensor, tokens: list[int], nums: list[int]) -> list[TokenLogprob]:
    found = chosen_logprobs(logits, tokens, [Choice(Sampling(logprobs=num)) for num in nums])
    return [one for one in found if one is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_finite_and_the_likeliest_come_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(150, 30) * 5).to(dtype)
    logits[3, 4:] = -torch.inf
    logits[7] = torch.nan
    tokens = [int(i) % 30 for i in range(150)]
    num_top = [i % 21 for i in range(150)]
    found = logprobs_of(logits, tokens, num_top)
    expected = torch.log_softmax(logits.float(), -1)
    for i, one in enumerate(found):
        assert one.token == tokens[i]
        assert len(one.top) == num_top[i]
        numbers = [one.logprob, *(value for _, value in one.top)]
        assert all(LEAST <= value <= 0 for value in numbers)
        if i not in (3, 7):
            assert one.logprob == expected[i, tokens[i]].item()
            best = expected[i].sort(descending=True).values[: num_top[i]].tolist()
            assert [value for _, value in one.top] == best
    assert found[3].logprob == expected[3, 3].item()
    assert logprobs_of(logits[3:4], [5], [0])[0] == TokenLogprob(5, LEAST)
    assert found[7].logprob == LEAST
    assert len(logprobs_of(logits, tokens, [20] * 150)[0].top) == 20
    assert len(logprobs_of(logits[:1, :5], [0], [20])[0].top) == 5  # no more than there are


def test_they_travel_with_the_first_token_and_a_wrong_one_is_refused() -> None:
    one = TokenLogprob(300, -0.5, ((300, -0.5), (7, -1.25)))
    aux = pack_first(300, 16, one)
    assert unpack_first(aux, 301, 16, 2) == (300, 16, one)
    least = TokenLogprob(1, LEAST)
    assert unpack_first(pack_first(1, 0, least), 301, 16, 0) == (1, 0, least)
    # A vocabulary of fewer tokens than are asked for gives all that it has.
    few = TokenLogprob(1, -0.5, ((1, -0.5),) * 3)
    assert unpack_first(pack_first(1, 0, few), 3, 16, 20)[2] == few
    wrong = [
        (aux, None), (aux, 1), (aux, 3), (aux[:-1], 2), (aux + b"1", 2), (pack_first(300, 16), 2),
        *[(pack_first(300, 16, TokenLogprob(300, x)), 0)
          for x in (float("nan"), 1.0, float("inf"), -float("inf"), -1e5)],
        *[(pack_first(300, 16, TokenLogprob(300, -1.0, ((token, x),))), 1)
          for token, x in ((301, -1.0), (-1, -1.0), (1, float("nan")))],
        (pack_first(301, 16), None), (pack_first(-1, 16), None), (pack_first(1, 17), None),
        (pack_first(1, -1), None), (b"", None), (b"1", None),
    ]  # fmt: skip
    for data, num_top in wrong:
        with pytest.raises(ValueError, match=r"^"):
            unpack_first(data, 301, 16, num_top)
