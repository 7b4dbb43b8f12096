"""Token for token what `generate` says: over page sizes, layouts, models, chunks, with the cache
on, pages short, and requests aborted."""

from __future__ import annotations

import numpy as np
import pytest

from prefixkv.engines.hf import PagedModel, make_model
from tests.models.hf_world import Reference, World

TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return make_model("llama", seed=3, **TINY)


@pytest.fixture(scope="module")
def reference(model: PagedModel) -> Reference:
    return Reference(model)


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
        assert world.decode.stats()["hit_tokens"] > 0
        for answer in world.answers:
            num = answer.ask.max_new_tokens
            assert answer.tokens[0] == reference.greedy(answer.ask.tokens, num)
            assert answer.ends[0].finish == "length"
        world.at_rest()
