"""Token for token what `generate` says: over page sizes, layouts, models, chunks, with the cache
on, pages short, and requests aborted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefixkv.engines.hf import PagedModel, Sampling, make_model
from prefixkv.engines.hf.attention import FlatPool
from prefixkv.prefill.request import PrefillState
from tests.support.hf_workload import Found, compare, run_round
from tests.support.hf_world import TINY, Reference, World
from tests.support.patience import until


def prompts(seed: int, lens: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n, dtype=np.int32) for n in lens]


@pytest.mark.parametrize(
    ("page_size", "prefill_page_size", "order", "prefill_order"),
    [
        (1, 1, "layer_major", "layer_major"),
        (16, 16, "page_major", "page_major"),
        (32, 32, "layer_major", "page_major"),
        (16, 4, "page_major", "layer_major"),
        (8, 32, "layer_major", "page_major"),
    ],
)
def test_two_turns_over_pages_and_layouts(
    model: PagedModel, reference: Reference, page_size: int, prefill_page_size: int, order: str,
    prefill_order: str,
) -> None:  # fmt: skip
    pages, prefill_pages = 1024 // page_size, 1024 // prefill_page_size
    with World(
        model, pages=pages, page_size=page_size, order=order, prefill_pages=prefill_pages,
        prefill_page_size=prefill_page_size, prefill_order=prefill_order, chunk_tokens=24,
    ) as world:  # fmt: skip
        first = prompts(1, [1, 16, 33, 70])
        for i, tokens in enumerate(first):
            world.ask(f"a{i}", tokens, max_new_tokens=9)
        world.run()
        for i, answer in enumerate(world.answers[:]):
            tokens = [*answer.ask.tokens, *answer.tokens[0], 5, 6, 7]
            world.ask(f"b{i}", tokens, max_new_tokens=5)
        world.run()
        assert world.decode.stats()["skipped_tokens"] > 0
        for answer in world.answers:
            num = answer.ask.max_new_tokens
            said = answer.tokens[0]
            assert said == reference.greedy(answer.ask.tokens, num, said)
            assert answer.ends[0].finish == "length"
        world.at_rest()


def test_an_answer_with_another_token_is_not_the_model_s(reference: Reference) -> None:
    """The comparison itself: wherever that token stands, and where one is missing."""
    (tokens,) = prompts(6, [30])
    right = reference.greedy(tokens, 6)
    assert reference.greedy(tokens, 6, right) == right
    for at in range(6):
        wrong = [*right[:at], (right[at] + 1) % 256, *right[at + 1 :]]
        assert reference.greedy(tokens, 6, wrong) == right
    assert reference.greedy(tokens, 6, right[:5]) == right


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_other_models(kind: str) -> None:
    """Qwen3 has norms of queries and keys; Mistral's window is as long as its context here."""
    model = make_model(kind, seed=1, context=200, **TINY)
    reference = Reference(model)
    with World(model) as world:
        for i, tokens in enumerate(prompts(2, [40, 7])):
            world.ask(f"{i}", tokens, max_new_tokens=8)
        world.run()
        for answer in world.answers:
            assert answer.tokens[0] == reference.greedy(answer.ask.tokens, 8)


@pytest.mark.parametrize("seed", [2, 3])
def test_random_rounds(model: PagedModel, reference: Reference, seed: int) -> None:
    """Turns, shared prompts, samples with seeds, aborts, pools that are too small for all."""
    found = Found()
    run_round(model, reference, seed, found, num_requests=10)
    assert found.answers >= 8
    assert found.hit_tokens > 0


def test_a_pool_too_small_for_all_retracts_and_says_the_same(
    model: PagedModel, reference: Reference
) -> None:
    config = {"reserve_tokens": 0}
    with World(model, pages=12, page_size=8, decode=config) as world:
        for i, tokens in enumerate(prompts(3, [20, 21, 22])):
            world.ask(f"{i}", tokens, max_new_tokens=30, sampling=Sampling(ignore_end=True))
        world.run()
        assert world.decode.stats()["retractions"] > 0
        for answer in world.answers:
            said = answer.tokens[0]
            assert said == reference.greedy(answer.ask.tokens, 30, said)
        world.at_rest()


def test_several_prompts_are_computed_in_one_forward(
    model: PagedModel, reference: Reference
) -> None:
    with World(model, chunk_tokens=64) as world:
        for i, tokens in enumerate(prompts(4, [20, 21, 30, 9])):
            world.ask(f"{i}", tokens, max_new_tokens=2)
        for job in world.decode.take_prefill_jobs():
            world.prefill.submit(job)
        until(lambda: _promised(world) == 4)
        world.run()
        assert world.prefill.stats()["forwards"] == 2  # 80 tokens
        assert world.prefill.stats()["computed_tokens"] == 80
        for answer in world.answers:
            assert answer.tokens[0] == reference.greedy(answer.ask.tokens, 2)


def _promised(world: World) -> int:
    """Rooms that decode has promised pages for, and prefill has heard of it."""
    world.decode.node.pop_preallocated()
    world.prefill.node.stats()
    reqs = world.prefill.node.requests.values()
    return sum(req.state is PrefillState.BOOTSTRAPPED for req in reqs)


def test_samples_of_one_prompt_share_its_whole_pages(
    model: PagedModel, reference: Reference
) -> None:
    """Each draws its own tokens, all from one seed; the pages are computed and sent once."""
    (prompt,) = prompts(5, [70])
    with World(model, page_size=16) as world:
        sampling = Sampling(temperature=1.0, seed=9)
        answer = world.ask("r", prompt, sampling=sampling, num_samples=3, max_new_tokens=6)
        world.run()
        assert world.decode.stats()["shared_tokens"] == 2 * 64
        assert len({tuple(tokens) for tokens in answer.tokens.values()}) == 3
        found = Found()
        compare(answer, model, reference, found)
        assert found.answers == 3
        world.at_rest()


def test_a_stop_token_ends_the_answer_and_is_its_last(
    model: PagedModel, reference: Reference
) -> None:
    (prompt,) = prompts(6, [20])
    said = reference.greedy(prompt, 12)
    at = next(i for i in range(3, 12) if said[i] not in said[:i])
    with World(model) as world:
        answer = world.ask(
            "r", prompt, max_new_tokens=12, sampling=Sampling(stop_tokens=(said[at],))
        )
        first = world.ask("s", prompt, max_new_tokens=12, sampling=Sampling(stop_tokens=(said[0],)))
        world.run()
        assert answer.tokens[0] == said[: at + 1]
        assert first.tokens[0] == said[:1]  # prefill has sampled it
        assert answer.ends[0].finish == first.ends[0].finish == "stop"


def test_a_step_beside_chunks_says_the_same_as_alone(model: PagedModel) -> None:
    """Wherever the sequences with one new token stand in the packed row."""
    flat = FlatPool(model.make_pool(64, 4))
    rows = [np.arange(at, at + 12, dtype=np.int32) for at in range(0, 48, 12)]
    texts = prompts(11, [21, 30, 9, 40])
    starts = [20, 13, 8, 0]  # one, 17, one and 40 new tokens
    for text, row, start in zip(texts, rows, starts, strict=True):
        if start:
            model.forward(flat, text[:start], [row], [0], [start])
    alone = [
        model.forward(flat, text[start:], [row], [start], [len(text)])
        for text, row, start in zip(texts, rows, starts, strict=True)
    ]
    news = [text[start:] for text, start in zip(texts, starts, strict=True)]
    together = model.forward(flat, np.concatenate(news), rows, starts, [len(one) for one in texts])
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


def test_a_long_prompt_in_long_chunks(model: PagedModel, reference: Reference) -> None:
    """Chunks of more queries than share a mask, at the beginning and behind it."""
    with World(model, chunk_tokens=300) as world:
        (prompt,) = prompts(8, [650])
        answer = world.ask("r", prompt, max_new_tokens=4)
        world.run()
        assert answer.tokens[0] == reference.greedy(prompt, 4)


def test_a_retracted_answer_whose_pages_stay_goes_on_at_once(
    model: PagedModel, reference: Reference
) -> None:
    """Prefill is not asked, and the first token is not taken twice."""
    with World(model, page_size=1, pages=512, prefill_pages=512) as world:
        for i, tokens in enumerate(prompts(9, [20, 21])):
            world.ask(f"{i}", tokens, max_new_tokens=12)
        until(lambda: world.step() or len(world.answers[1].tokens.get(0, ())) > 4)
        computed = world.prefill.stats()["computed_tokens"]
        world.decode._retract("1/0")
        world.run()
        assert world.prefill.stats()["computed_tokens"] == computed
        for answer in world.answers:
            assert answer.tokens[0] == reference.greedy(answer.ask.tokens, 12)
