"""Token for token what `generate` says: over page sizes, layouts, models, chunks, with the cache
on, pages short, and requests aborted."""

import numpy as np
import pytest

from prefixkv.engines.hf import PagedModel, Sampling
from tests.support.hf_workload import Found, check_answers, run_round
from tests.support.hf_world import Reference, World
from tests.support.patience import until


def prompts(seed: int, lens: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n, dtype=np.int32) for n in lens]


@pytest.mark.parametrize(
    ("page_size", "prefill_page_size", "order", "prefill_order"),
    [
        (1, 1, "layer_major", "layer_major"),
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
        check_answers(world, reference)
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


def test_a_random_round(model: PagedModel, reference: Reference) -> None:
    """Turns, shared prompts, samples with seeds, aborts, pools that are too small for all."""
    found = Found()
    run_round(model, reference, 2, found, num_requests=10)
    assert found.answers >= 8
    assert found.hit_tokens > 0
    assert found.logprobs > 0


def test_a_stop_token_ends_the_answer_and_is_its_last(
    model: PagedModel, reference: Reference
) -> None:
    (prompt,) = prompts(6, [20])
    said = reference.greedy(prompt, 12)
    at = next(i for i in range(3, 12) if said[i] not in said[:i])
    with World(model) as world:
        answer, first = (
            world.ask(f"{end}", prompt, max_new_tokens=12,
                      sampling=Sampling(stop_tokens=(said[end],), logprobs=1))
            for end in (at, 0)
        )  # fmt: skip
        world.run()
        assert answer.tokens[0] == said[: at + 1]
        assert first.tokens[0] == said[:1]  # prefill has sampled it
        check_answers(world, reference)
        assert answer.ends[0].finish == first.ends[0].finish == "stop"


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
