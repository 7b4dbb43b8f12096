"""A moment in which the model computes NaN or infinity (law 10): each request that was computed
then ends with an error by name, the others go on, and whoever comes later, on either side, gets the
model's own tokens, as if there had been no such moment."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from prefixkv.config import ComputeConfig, HostConfig
from prefixkv.engines.hf import PagedModel, Sampling
from prefixkv.engines.hf.attention import Plan
from prefixkv.engines.hf.layers import Row
from prefixkv.engines.hf.models import _not_finite
from prefixkv.errors import NotFiniteError
from prefixkv.spi import as_pages
from tests.integration.hf.test_layers import STATES, WINDOWS
from tests.support.hf_world import BY_SIZE, Answer, Reference, World
from tests.support.hf_world import family as family_of

NAN, INF = float("nan"), float("inf")
GREEDY = Sampling(ignore_end=True)
COMPUTE = ComputeConfig(below=10_000, chunk_tokens=16, itl_share=BY_SIZE)
WHERE = {"prefill": {}, "decode": {"compute": COMPUTE}}
ALL = slice(None)


@contextmanager
def moment(weight: torch.Tensor, rows: Any = ALL, value: float = NAN) -> Iterator[None]:
    """Rows of a weight have that value, until the end."""
    before = weight.detach().clone()
    with torch.no_grad():
        weight[rows] = value
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


@contextmanager
def in_forward(
    model: PagedModel, number: int, weight: torch.Tensor, rows: Any = ALL
) -> Iterator[None]:
    """The moment is this forward, counted from 1; both sides of a world have one model."""
    forward, num = model.forward, 0

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        nonlocal num
        num += 1
        with moment(weight, rows) if num == number else nullcontext():
            return forward(*given, **named)

    model.forward = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


def embedding(model: PagedModel) -> torch.Tensor:
    weight: torch.Tensor = model.model.get_input_embeddings().weight
    return weight


def prompt_of(seed: int, num: int = 40, begin: Sequence[int] = ()) -> list[int]:
    """Tokens from 8 on: those before are free for what is to be NaN."""
    return [*begin, *np.random.default_rng(seed).integers(8, 256, num).tolist()]


def failed(answer: Answer, side: str = "") -> bool:
    """It ended with an error that names what was computed, and where."""
    end = answer.ends[0]
    says = f"{type(end.error).__name__}: {end.error}"
    return end.finish == "error" and NotFiniteError.__name__ in says and side in says


def check_later(
    world: World, reference: Reference, prompt: list[int], hits: int | None = None
) -> None:
    """The prompt and its next turns get the model's tokens; the first hits so many."""
    talk = prompt
    for turn in range(3):
        answer = world.ask(f"later{len(world.answers)}", talk, max_new_tokens=6, sampling=GREEDY)
        world.run()
        assert answer.tokens[0] == reference.greedy(talk, 6, answer.tokens[0])
        if not turn and hits is not None:
            assert answer.ends[0].hit_tokens == hits
        talk = [*talk, *answer.tokens[0], *prompt_of(turn, 5)]


def check_memory(world: World) -> None:
    """Nothing is held, and no page of either side has a number that is not finite: also those that
    are free again."""
    world.at_rest()
    for engine in (world.prefill, world.decode):
        pool = engine.node.pool
        for one in (pool, *(group.pool for group in pool.groups)):
            for layer in range(one.layout.num_layers):
                assert one.k(layer).isfinite().all()
                assert one.v(layer).isfinite().all()


@pytest.mark.parametrize(
    ("where", "value"), [("prefill", NAN), ("prefill", -INF), ("decode", INF), ("host memory", NAN)]
)
def test_a_prompt_of_a_bad_moment_leaves_nothing(
    model: PagedModel, reference: Reference, where: str, value: float
) -> None:
    decode = WHERE.get(where, {"host_memory": HostConfig(times=20, policy="lru")})
    prompt = prompt_of(3, begin=[7])
    with World(model, page_size=8, decode=decode) as world:
        with moment(embedding(model), 7, value):
            sick = world.ask("sick", prompt, max_new_tokens=6, sampling=GREEDY)
            well = world.ask("well", prompt_of(4), max_new_tokens=6, sampling=GREEDY)
            world.run()
        assert failed(sick, "decode" if where == "decode" else "prefill")
        assert not sick.tokens[0]
        assert well.tokens[0] == reference.greedy(well.ask.tokens, 6)
        check_later(world, reference, prompt, 0)
        check_memory(world)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_step_of_a_bad_moment_ends_only_whose_row_it_is(
    model: PagedModel, reference: Reference, value: float
) -> None:
    """What the answer has said is right, and not cached: the prompt is."""
    prompts = [prompt_of(seed) for seed in (5, 6, 7)]
    with World(model, page_size=8) as world:
        asks = [
            world.ask(f"a{at}", prompt, max_new_tokens=24, sampling=GREEDY)
            for at, prompt in enumerate(prompts)
        ]
        world.until(lambda: all(len(answer.tokens.get(0, ())) >= 12 for answer in asks))
        newest = [answer.tokens[0][-1] for answer in asks]
        assert newest.count(newest[1]) == 1
        with moment(embedding(model), newest[1], value):
            world.until(lambda: asks[1].done)
        world.run()
        assert failed(asks[1], "decode")
        for answer in (asks[0], asks[2]):
            assert answer.tokens[0] == reference.greedy(answer.ask.tokens, 24)
        said = asks[1].tokens[0]
        assert said == reference.greedy(prompts[1], len(said))
        check_later(world, reference, [*prompts[1], *said, 9], 40)
        check_memory(world)


def test_logits_that_are_not_finite_end_an_answer_though_all_its_kv_is(
    model: PagedModel, reference: Reference
) -> None:
    """The head alone fails, for one token of the vocabulary: at the first token and at a later
    one, with logits of infinity too, and where a sampler would have looked at few of them."""
    head = model.model.get_output_embeddings().weight
    drawn = Sampling(temperature=0.8, top_k=3, ignore_end=True, logprobs=2, min_tokens=3)
    for at, sampling in enumerate((GREEDY, drawn)):
        with World(model, page_size=8) as world:
            with moment(head, 200):
                first = world.ask("first", prompt_of(at), max_new_tokens=6, sampling=sampling)
                world.run()
            assert failed(first, "prefill")
            later = world.ask("later", prompt_of(at), max_new_tokens=30, sampling=sampling)
            world.until(lambda later=later: len(later.tokens.get(0, ())) > 4)
            with moment(head, 200, INF):
                world.run()
            assert failed(later, "decode")
            check_later(world, reference, prompt_of(at), 40)


def test_a_token_that_the_model_rules_out_is_no_failure(model: PagedModel) -> None:
    """Logits of -inf, as of a padded vocabulary, are the model's to give; where all are, no token
    is left."""
    head = model.model.get_output_embeddings()
    columns: Any = slice(100, None)

    def rule_out(module: Any, given: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[..., columns] = -INF
        return logits

    hook = head.register_forward_hook(rule_out)
    try:
        with World(model, page_size=8) as world:
            sampling = Sampling(temperature=1.0, ignore_end=True)
            answer = world.ask("a", prompt_of(1), max_new_tokens=8, sampling=sampling)
            world.run()
            assert answer.ends[0].finish == "length"
            assert max(answer.tokens[0]) < 100
            columns = ALL
            none = world.ask("b", prompt_of(2), max_new_tokens=8, sampling=sampling)
            world.run()
            assert failed(none)
    finally:
        hook.remove()


@pytest.mark.parametrize("where", WHERE)
def test_samples_and_others_that_share_the_prompt_fail_or_get_it_from_elsewhere(
    model: PagedModel, reference: Reference, where: str
) -> None:
    """Three samples of one prompt, and two that begin alike, at once; the moment is one forward."""
    begin = prompt_of(8, 48)
    with World(model, page_size=8, pages=128, decode=WHERE[where]) as world:
        many = world.ask("many", begin, max_new_tokens=6, sampling=GREEDY, num_samples=3)
        others = [
            world.ask(f"o{at}", [*begin, *prompt_of(at, 9)], max_new_tokens=6, sampling=GREEDY)
            for at in range(2)
        ]
        with in_forward(model, 1, embedding(model), begin[3]):
            world.run()
        ends = [many.ends[sample] for sample in range(3)]
        assert any(end.finish == "error" for end in ends)
        for sample, end in enumerate(ends):
            assert end.finish in ("error", "length")
            if end.finish == "length":
                assert many.tokens[sample] == reference.greedy(begin, 6)
        for answer in others:
            assert answer.ends[0].finish in ("error", "length")
            if answer.ends[0].finish == "length":
                assert answer.tokens[0] == reference.greedy(answer.ask.tokens, 6)
        assert sum(answer.ends[0].finish == "length" for answer in (many, *others)), "some went on"
        check_later(world, reference, prompt_of(9), 0)
        answer = world.ask("again", begin, max_new_tokens=6, sampling=GREEDY)
        world.run()
        assert answer.tokens[0] == reference.greedy(begin, 6)
        check_memory(world)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("family", [STATES, WINDOWS])
def test_an_early_chunk_of_a_bad_moment_leaves_no_state_and_no_window(
    family: str, where: str
) -> None:
    """The moment is over before the last chunk; in the one case in the embedding, in the other in
    what a single layer keeps, the last that has a window or a state."""
    made, reference = family_of(family)
    layers = made.layers.sliding or [*dict.fromkeys(part.layer for part in made.layers.parts)]
    mixer = made.model.base_model.layers[layers[-1]]
    linear = next(one for one in mixer.modules() if isinstance(one, torch.nn.Linear))
    for at, weight in enumerate((embedding(made), linear.weight)):
        prompt = prompt_of(at, 90)
        with World(
            made, page_size=8, chunk_tokens=16, pages=160, prefill_pages=160, decode=WHERE[where]
        ) as world:
            with in_forward(made, 2, weight):
                sick = world.ask("sick", prompt, max_new_tokens=6, sampling=GREEDY)
                world.run()
            assert failed(sick, where)
            check_later(world, reference, prompt)
            check_memory(world)


def test_large_numbers_whose_sum_is_not_finite_end_nothing(model: PagedModel) -> None:
    pool = model.make_pool(4, 8)
    rows = [Row(range(2), 0, as_pages([0, 1])), Row(range(3), 0, as_pages([2, 3]))]
    plan = Plan(model.flat_pool(pool), rows)
    hidden, logits, keep = torch.full((5, 4), 2e38), torch.zeros(2, 7), torch.tensor([1, 4])
    assert _not_finite(plan, hidden, logits, keep) == []
    hidden[3, 1] = -INF
    assert _not_finite(plan, hidden, logits, keep) == [1]
    logits[0] = -INF
    assert _not_finite(plan, hidden, logits, keep) == [0, 1]
