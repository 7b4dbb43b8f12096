"""Models with sliding windows on window groups: logits and tokens are the model's by itself,
whatever pages a window went through, and prefill goes on from checkpoints.

Tokens alone hide a wrong window, so logits are compared; the controls show by how much a window
that is wrong would differ.
"""

from __future__ import annotations

import random
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from benchmarks.hybrid_models import WINDOWED, config_of
from prefixkv.config import TransportConfig
from prefixkv.engines.hf import PagedModel, Sampling, make_model
from prefixkv.engines.hf import attention as attention_module
from prefixkv.engines.hf.attention import NAME
from prefixkv.errors import ConfigError
from prefixkv.pages.windows import WindowGroup, WindowPages, WindowSpec
from tests.support.devices import DEVICE
from tests.support.hf_workload import Found, Storm, checkpoint_counts, compare, run_round
from tests.support.hf_world import TINY, Answer, Reference, World

OFF = 1e-2  # what is wrong differs by more, what is right by less than a tenth of that


@cache
def _made(family: str) -> tuple[PagedModel, Reference]:
    made = make_model(config_of(family), seed=3, device=DEVICE)
    return made, Reference(made)


@pytest.fixture(params=WINDOWED)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(family: str) -> PagedModel:
    return _made(family)[0]


@pytest.fixture
def reference(family: str) -> Reference:
    return _made(family)[1]


class _Texts:
    """Sequences that grow by forwards of many at once, on the window group's own rows, whose pages
    are used again as windows move on."""

    def __init__(self, model: PagedModel, texts: list[list[int]], step: int, size: int = 8) -> None:
        self.model, self.texts = model, texts
        pages = [-(-len(text) // size) for text in texts]
        pool = model.make_pool(sum(pages), size, step_tokens=step, requests=len(texts))
        (group,) = pool.groups
        for one in (pool, group.pool):
            for layer in range(one.layout.num_layers):
                one.k(layer).normal_(0, 3)
                one.v(layer).normal_(0, 3)
        self.flat = model.flat_pool(pool)
        ids = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        self.rows = np.split(ids, np.cumsum(pages)[:-1])
        spec = WindowSpec(group.name, group.window, group.pool.layout.num_pages, step)
        self.windows = WindowGroup(spec, size, len(texts))
        for at, num in enumerate(pages):
            self.windows.open(at, 0, min(num, self.windows.row_pages))
        self.done = [0] * len(texts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]

    def window_pages(self, at: int) -> WindowPages:
        return self.windows.row(at)

    def forward(self, nums: dict[int, int]) -> None:
        """Compute so many more tokens of some texts."""
        which = list(nums)
        starts = [self.done[at] for at in which]
        ends = [self.done[at] + nums[at] for at in which]
        new = [
            self.texts[at][start:end] for at, start, end in zip(which, starts, ends, strict=True)
        ]
        logits = self.model.forward(
            self.flat, np.concatenate(new), [self.rows[at] for at in which], starts, ends, [],
            list(range(sum(map(len, new)))), windows=[self.window_pages(at) for at in which],
        )  # fmt: skip
        for at, end, part in zip(which, ends, logits.split([len(one) for one in new]), strict=True):
            self.done[at] = end
            self.logits[at].append(part)
            self.windows.slide(at, end)

    def grow(self, chance: random.Random, choices: list[int]) -> None:
        while left := [at for at, text in enumerate(self.texts) if self.done[at] < len(text)]:
            which = chance.sample(left, chance.randint(1, len(left)))
            self.forward({
                at: min(chance.choice(choices), len(self.texts[at]) - self.done[at])
                for at in which
            })  # fmt: skip

    def off(self, reference: Reference) -> float:
        """By how much logits differ from those of one forward, at most."""
        worst = 0.0
        for text, done, parts in zip(self.texts, self.done, self.logits, strict=True):
            expected = torch.from_numpy(reference.logits([*text[:done], 0], done)).float()
            worst = max(worst, float((torch.cat(parts).cpu() - expected).abs().max()))
        return worst


def _texts() -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(256) for _ in range(num)] for num in (180, 90, 41)]


_CHOICES = {"chunks": [2, 3, 8, 30, 70], "steps": [1], "both": [1, 1, 2, 3, 8, 30, 70]}


@pytest.mark.parametrize("size", [1, 8, 16])
def test_logits_of_chunks_and_steps_are_those_of_one_forward(
    made: PagedModel, reference: Reference, size: int
) -> None:
    """Whatever the chunks, longer and shorter than the window, and whichever others are in the
    forward."""
    grown = _Texts(made, _texts(), 70, size)
    grown.grow(random.Random(6), _CHOICES["both"])
    assert grown.off(reference) < OFF / 10


@pytest.mark.parametrize("family", WINDOWED)
def test_long_chunks_are_computed_in_blocks(family: str) -> None:
    """More new tokens than share a mask, at the beginning and behind it."""
    made, reference = _made(family)
    text = np.random.default_rng(1).integers(0, 256, 900).tolist()
    grown = _Texts(made, [text], 600)
    for num in (300, 600):
        grown.forward({0: num})
    assert grown.off(reference) < OFF / 10


@pytest.mark.parametrize("path", ["chunks", "steps"])
@pytest.mark.parametrize("window", [-1, 1, 0])
def test_a_window_that_is_one_token_off_or_ignored_would_be_seen(
    family: str, path: str, window: int
) -> None:
    """Control: by the same weights with a window of one token less, one more, or of all tokens."""
    made, reference = _made(family)
    other = deepcopy(reference)
    wrong = made.window + window if window else 4096
    other.model.config.sliding_window = wrong
    for module in other.model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = wrong
    grown = _Texts(made, _texts(), 70)
    grown.grow(random.Random(6), _CHOICES[path])
    assert grown.off(reference) < OFF / 10
    assert grown.off(other) > OFF


@pytest.mark.parametrize("path", ["chunks", "steps"])
@pytest.mark.parametrize("which", [0, -1])
def test_a_window_page_of_another_request_would_be_seen(
    made: PagedModel, reference: Reference, path: str, which: int
) -> None:
    """Control: for one forward, the oldest page that is read, or the newest, is another text's."""
    grown = _Texts(made, _texts()[:2], 32)
    rest = {"chunks": 16, "steps": 1}[path]
    for _ in range(3):
        grown.forward({0: 24, 1: 24})
    right = grown.window_pages

    def wrong(at: int) -> WindowPages:
        first, ids = right(at)
        if at == 0:
            start, size = grown.done[0], grown.windows.page_size
            read = range(max(0, start + 1 - made.window) // size, (start - 1) // size + 1)
            place, ids = read[which] - first, ids.copy()
            ids[place] = right(1).ids[place]
        return WindowPages(first, ids)

    grown.window_pages = wrong  # type: ignore[method-assign]
    grown.forward({0: rest, 1: rest})
    assert grown.off(reference) > OFF


def test_too_few_window_pages_are_no_answer(made: PagedModel) -> None:
    grown = _Texts(made, _texts(), 32)
    for _ in range(3):
        grown.forward({0: 24})
    right = grown.window_pages
    for wrong in (
        lambda at: WindowPages(right(at).first_page + 1, right(at).ids[1:]),
        lambda at: WindowPages(right(at).first_page, right(at).ids[:3]),
    ):
        grown.window_pages = wrong  # type: ignore[method-assign]
        with pytest.raises(AssertionError):
            grown.forward({0: 32})


# --- engines --------------------------------------------------------------------------------------


def _exact(answer: Answer, reference: Reference) -> None:
    said = answer.tokens[0]
    assert said == reference.greedy(answer.ask.tokens, len(said), said)
    given = answer.logprobs[0]
    reference.check_logprobs([*answer.ask.tokens, *said], given, 5)


def test_turns_hit_on_both_sides_and_prefill_computes_what_is_new(
    made: PagedModel, reference: Reference
) -> None:
    """In later turns prefill computes the answer before, what is said now, and less than a page.
    Log-probabilities tell a window that is not right where tokens do not."""
    size, said = 8, 14
    with World(made, page_size=size, chunk_tokens=64) as world:
        talk = list(range(60))
        for turn in range(6):
            before = world.prefill.stats()["computed_tokens"]
            answer = world.ask(
                f"{turn}", talk, max_new_tokens=said,
                sampling=Sampling(ignore_end=True, logprobs=5),
            )  # fmt: skip
            world.run()
            _exact(answer, reference)
            new = len(talk) if not turn else said + 30
            computed = world.prefill.stats()["computed_tokens"] - before
            assert new <= computed < 1.1 * new + size
            end = answer.ends[0]
            assert end.hit_tokens == (0 if not turn else (len(talk) - 31) // size * size)
            assert end.prefill_hit_tokens == len(talk) - computed
            talk = [*talk, *answer.tokens[0], *((7 * turn + i) % 256 for i in range(30))]
        world.at_rest()


def test_a_branch_of_a_prompt_gets_a_checkpoint_where_it_leaves(
    made: PagedModel, reference: Reference
) -> None:
    """The second prompt with the same system prompt keeps one where they part; the third has it."""
    system = [3 * i % 256 for i in range(83)]
    with World(made, page_size=8) as world:
        for number, hit in enumerate((0, 0, 80, 80)):
            prompt = [*system, number, *range(50, 70)]
            answer = world.ask(
                f"{number}", prompt, max_new_tokens=6,
                sampling=Sampling(ignore_end=True, logprobs=5),
            )  # fmt: skip
            world.run()
            _exact(answer, reference)
            assert answer.ends[0].prefill_hit_tokens == hit
            assert answer.ends[0].hit_tokens == (80 if number else 0)
        world.at_rest()


def test_a_long_answer_takes_no_more_window_pages(made: PagedModel, reference: Reference) -> None:
    """Its window moves over pages of its own many times, and prefill's chunks do too."""
    with World(
        made, page_size=8, pages=80, prefill_pages=80, chunk_tokens=16, window_pages=4,
        prefill_window_pages=10, prefill={"checkpoints": 1},
    ) as world:  # fmt: skip
        sampling = Sampling(ignore_end=True, logprobs=5)
        answer = world.ask("r", range(200), max_new_tokens=150, sampling=sampling)
        world.run()
        _exact(answer, reference)
        world.at_rest()


def test_chunks_of_a_prompt_are_no_longer_than_the_groups_steps(
    made: PagedModel, reference: Reference
) -> None:
    """Several prompts share a forward of more tokens."""
    with World(made, page_size=8, chunk_tokens=64, step_tokens=20) as world:
        sampling = Sampling(ignore_end=True, logprobs=5)
        for number in range(3):
            prompt = range(number, number + 60)
            world.ask(f"{number}", prompt, max_new_tokens=3, sampling=sampling)
        world.run()
        for answer in world.answers:
            _exact(answer, reference)
        # To 20, 40, 56, where a checkpoint is kept, and 60.
        assert 4 <= world.prefill.stats()["forwards"] <= 8
        world.at_rest()


def test_a_retracted_answer_gets_its_window_again(made: PagedModel, reference: Reference) -> None:
    """Two answers grow until the pool has pages for one: the other goes on from its newest token,
    and from the window there."""
    with World(
        made, pages=14, page_size=8, prefill_pages=40, decode={"reserve_tokens": 0}
    ) as world:
        for number in range(2):
            world.ask(
                f"{number}", range(number, number + 20), max_new_tokens=60,
                sampling=Sampling(ignore_end=True, logprobs=5),
            )  # fmt: skip
        world.run()
        for answer in world.answers:
            _exact(answer, reference)
        assert world.decode.stats()["retractions"] > 0
        world.at_rest()


def test_a_small_storm() -> None:
    _storm("gpt_oss", 7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_conversations_with_few_pages(family: str, seed: int) -> None:
    _storm(family, 14, seed)


def _storm(family: str, rounds: int, seed: int = 0) -> None:
    """Pools that evict, windows for fewer requests than there are and fewer checkpoints than
    conversations, aborts, retractions: every token of every answer, and its log-probabilities."""
    made, reference = _made(family)
    storm = Storm(
        talks=6, rounds=rounds, bursts=(1, 2, 4), more=(1, 5, 17), longest=200, again=0.3,
        answers=(9, 40, 70), steps=30, abort=0.03, logprobs=5,
    )  # fmt: skip
    found = Found()
    with World(
        made, pages=36, page_size=8, prefill_pages=60, chunk_tokens=48, window_pages=19,
        prefill_window_pages=30, decode={"max_running": 5, "reserve_tokens": 0},
        prefill={"checkpoints": 4},
    ) as world:  # fmt: skip

        def counted(aborted: set[str]) -> list[int]:
            counts = checkpoint_counts(world)
            return counts if rounds < 10 else [*counts, len(aborted)]

        aborted = storm.run(world, seed, counted)
        assert all(counted(aborted)), counted(aborted)
        for answer in world.answers:
            compare(answer, made, reference, found)
        hits = sum(answer.ends[0].prefill_hit_tokens for answer in world.answers)
        world.at_rest()
        for engine in (world.decode, world.prefill):
            assert engine.stats()["window_pages_owned"] == 0
    assert found.answers > rounds
    assert found.near_ties <= 1
    assert hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_rounds_of_all_layouts_and_samplings(
    made: PagedModel, reference: Reference, seed: int
) -> None:
    found = Found()
    run_round(made, reference, 300 + seed, found)
    assert found.answers > 0


def test_a_prompt_is_computed_anew_without_a_cache(made: PagedModel, reference: Reference) -> None:
    with World(made, prefill={"cache": False}) as world:
        for turn in range(2):
            sampling = Sampling(ignore_end=True, logprobs=5)
            answer = world.ask(f"{turn}", range(70), max_new_tokens=4, sampling=sampling)
            world.run()
            _exact(answer, reference)
            assert answer.ends[0].prefill_hit_tokens == 0
        assert world.prefill.node.config.checkpoints == 0
        world.at_rest()


_ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("olmo3", _ALTERNATE),
        ("cohere2", _ALTERNATE),
        ("exaone4", _ALTERNATE),
        ("ministral", {**_ALTERNATE, "head_dim": 16}),
        ("qwen3", {**_ALTERNATE, "head_dim": 16, "use_sliding_window": True}),
        ("smollm3", {**_ALTERNATE, "use_sliding_window": True}),
        ("afmoe", {"sliding_window": 24}),
    ],
)
def test_further_families_are_answered_over_turns(kind: str, sizes: dict) -> None:
    _turns(make_model(kind, **{**TINY, "num_hidden_layers": 4, **sizes}))


@pytest.mark.slow
def test_a_model_of_texts_and_pictures_is_served_with_texts() -> None:
    """Gemma 3 from 4B on, whose text config is one of several."""
    text = config_of("gemma3_text").to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    _turns(make_model(config, seed=3))


def _turns(made: PagedModel) -> None:
    assert 0 < len(made.layers.sliding) < made.config.num_hidden_layers
    reference = Reference(made)
    with World(made, page_size=8) as world:
        talk = list(range(50))
        for turn in range(3):
            sampling = Sampling(ignore_end=True, logprobs=5)
            answer = world.ask(f"{turn}", talk, max_new_tokens=9, sampling=sampling)
            world.run()
            _exact(answer, reference)
            assert (answer.ends[0].prefill_hit_tokens > 0) == (turn > 0)
            talk = [*talk, *answer.tokens[0], *range(turn, turn + 12)]
        world.at_rest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_half_precision_go_on_from_checkpoints(family: str, dtype: str) -> None:
    made = make_model(config_of(family), seed=3, dtype=dtype)
    with World(made, page_size=8) as world:
        talk = list(range(40))
        for hit in (0, 40):
            answer = world.ask(f"{hit}", talk, max_new_tokens=9, sampling=Sampling(ignore_end=True))
            world.run()
            assert len(answer.tokens[0]) == 9
            assert answer.ends[0].prefill_hit_tokens == hit
            talk = [*talk, *answer.tokens[0], 1, 2, 3]
        world.at_rest()


def test_workers_with_staging_write_windows_in_place(
    made: PagedModel, reference: Reference
) -> None:
    staging = {"transport": TransportConfig(staging_bytes=64 << 20)}
    with World(made, decode=staging, prefill=staging) as world:
        sampling = Sampling(ignore_end=True, logprobs=5)
        answer = world.ask("r", range(70), max_new_tokens=4, sampling=sampling)
        world.run()
        _exact(answer, reference)
        world.at_rest()


def test_workers_with_unequal_pages_refuse_each_other(made: PagedModel) -> None:
    with World(made, page_size=8, prefill_page_size=16) as world:
        answer = world.ask("r", range(70), max_new_tokens=4)
        world.run()
        why = "page_size must be equal where a model has groups of layers: ours 8, theirs 16"
        assert answer.ends[0].finish == "error"
        assert why in str(answer.ends[0].error)


# --- pools ----------------------------------------------------------------------------------------


def test_pools_have_what_requests_and_checkpoints_need(made: PagedModel) -> None:
    """Of a window group: at most as many pages as the pool, at least those of one request."""

    def group(**given: Any) -> int:
        pool = made.make_pool(100, 8, **given)
        assert pool.layout.num_layers == made.num_layers == len(made.layers.full)
        (one,) = pool.groups
        assert (one.window, one.step_tokens) == (made.window, given.get("step_tokens", 1))
        assert one.pool.layout.num_layers == len(made.layers.sliding)
        return one.pool.layout.num_pages

    one, kept = (made.window + 6) // 8 + 1, -(-(made.window - 1) // 8)
    assert group(requests=3) == 3 * one
    assert group(requests=3, checkpoints=5) == 3 * one + 5 * kept
    assert group(requests=300) == 100
    assert group(window_pages=500) == 500
    assert group(step_tokens=2000) == (made.window + 2005) // 8 + 1 + kept


def test_by_default_prefill_keeps_checkpoints(made: PagedModel) -> None:
    with World(made) as world:
        assert world.prefill.node.config.checkpoints == made.num_checkpoints(64, 16) == 16
    assert 16 < made.num_checkpoints(2000, 16) < 256 == made.num_checkpoints(10**6, 16)


def test_a_pool_of_another_window_is_refused(made: PagedModel) -> None:
    plain = make_model("llama", **TINY)
    with pytest.raises(ConfigError, match=r"windows of \[\], the model has a window of"):
        made.flat_pool(plain.make_pool(8))
    with pytest.raises(ConfigError, match=r"windows of \[2.\], the model has a window of None"):
        plain.flat_pool(made.make_pool(8))


@pytest.mark.parametrize("less", [0, 4])
def test_a_context_within_the_window_needs_no_group(family: str, less: int) -> None:
    window = _made(family)[0].window
    assert make_model(config_of(family), seed=3, context=window + 1, trial=False).window == window
    short = make_model(config_of(family), seed=3, context=window - less)
    assert (short.window, short.keeps) == (0, "")
    assert short.num_layers == short.config.num_hidden_layers
    assert not short.make_pool(8).groups
    with World(short) as world:
        world.ask("r", range(9), max_new_tokens=7, sampling=Sampling(ignore_end=True, logprobs=5))
        world.run()
        _exact(world.answers[0], Reference(short))
        world.at_rest()


# --- what is refused ------------------------------------------------------------------------------


def test_the_trial_finds_a_window_that_is_one_token_off(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention_module._mask
    monkeypatch.setattr(
        attention_module, "_mask",
        lambda *tokens, window, device: right(*tokens, window and window - 1, device),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="on pages its logits differ by"):
        make_model(config_of(family), seed=3)


def test_a_layer_with_another_window_than_the_config_says_is_refused(made: PagedModel) -> None:
    model = deepcopy(made.model)
    model.set_attn_implementation(NAME)
    layer = made.layers.sliding[0]
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer:
            module.sliding_window = made.window + 1
    with pytest.raises(ConfigError, match=f"attends to {made.window + 1} tokens, the engine to"):
        PagedModel(model)
