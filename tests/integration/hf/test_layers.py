"""Models with recurrent layers, and with sliding windows: logits and tokens are the model's by
itself, whatever their states and pages went through, and both sides go on from checkpoints.

Tokens alone hide what is slightly wrong, so logits and log-probabilities are compared; controls
show by how much a window that is wrong would differ.
"""

import random
from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from prefixkv.config import ComputeConfig
from prefixkv.engines.hf import PagedModel, Sampling, make_model
from prefixkv.engines.hf import attention as attention_module
from prefixkv.engines.hf.attention import NAME
from prefixkv.engines.hf.layers import NO_SLOT, Row
from prefixkv.engines.hf.models import ExtraState, unpaged_copy
from prefixkv.errors import ConfigError
from prefixkv.pages.groups import GroupSpec, TailGroup
from tests.support.hf_workload import Found, Storm, check_answers, checkpoint_counts, run_round
from tests.support.hf_world import BY_SIZE, TINY, Reference, World
from tests.support.hf_world import family as family_of
from tests.support.hybrid_models import FAMILIES, WINDOWED, config_of
from tests.support.patience import until

RECURRENT = ("qwen3_next", "nemotron_h", "granitemoehybrid")
SERVED = (*RECURRENT, *WINDOWED)
FURTHER = tuple(name for name in FAMILIES if name not in SERVED)
OFF = 1e-2  # what is wrong differs by more, what is right by less than a tenth of that
SAMPLING = Sampling(ignore_end=True, logprobs=20)
ALL = 10_000
STATES, WINDOWS = "granitemoehybrid", "gpt_oss"  # what one family of each kind shows, others do too
of_each = pytest.mark.parametrize("family", SERVED)
of_states = pytest.mark.parametrize("family", [STATES])
of_windows = pytest.mark.parametrize("family", [WINDOWS])


@pytest.fixture(params=[STATES, WINDOWS])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(family: str) -> PagedModel:
    return family_of(family)[0]


@pytest.fixture
def reference(family: str) -> Reference:
    return family_of(family)[1]


# --- logits ---------------------------------------------------------------------------------------


class _Texts:
    """Sequences that grow by forwards of many at once, on one pool, one set of slots, and rows of
    the window group, whose pages are used again as windows move on."""

    def __init__(
        self, model: PagedModel, texts: list[list[int]], step: int = 70, size: int = 8
    ) -> None:
        self.model, self.texts = model, texts
        pages = [-(-len(text) // size) for text in texts]
        pool = model.make_pool(sum(pages), size, step_tokens=step, requests=len(texts))
        for one in (pool, *(group.pool for group in pool.groups)):
            for layer in range(one.layout.num_layers):
                one.k(layer).normal_(0, 3)
                one.v(layer).normal_(0, 3)
        self.flat = model.flat_pool(pool)
        ids = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        self.rows = np.split(ids, np.cumsum(pages)[:-1])
        self.memory = model.make_states(2 * len(texts)) if model.layers.parts else None
        for _, view in self.views():
            view.normal_(0, 3)
        for group in pool.groups:
            spec = GroupSpec(group.name, group.window, group.pool.layout.num_pages, step)
            self.windows = TailGroup(spec, size, len(texts))
            for at, num in enumerate(pages):
                self.windows.open(at, 0, min(num, self.windows.row_pages))
        self.done = [0] * len(texts)
        self.sources = [NO_SLOT] * len(texts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]

    def views(self) -> list[tuple[str, torch.Tensor]]:
        every = self.memory.views.values() if self.memory is not None else ()
        return [(part.name, view) for views in every for part, view in views]

    def forward(self, nums: dict[int, int], slots: dict[int, int] | None = None) -> None:
        """Compute so many more tokens of some texts; their states go to these slots."""
        slots = slots or {at: 2 * at for at in nums}
        rows = [
            Row(
                self.texts[at][self.done[at] : self.done[at] + num], self.done[at], self.rows[at],
                self.windows.row(at) if self.model.window else None, range(num),
                self.sources[at], slots[at],
            )
            for at, num in nums.items()
        ]  # fmt: skip
        logits, wrong = self.model.forward(self.flat, rows, self.memory)
        assert not wrong
        for at, row, part in zip(nums, rows, logits.split([*nums.values()]), strict=True):
            self.done[at], self.sources[at] = row.end, slots[at]
            self.logits[at].append(part)
            if self.model.window:
                self.windows.slide(at, row.end)

    def grow(self, chance: random.Random, choices: list[int]) -> None:
        """All to their ends. A state goes from one of its two slots to the other now and then."""
        while left := [at for at, text in enumerate(self.texts) if self.done[at] < len(text)]:
            which = chance.sample(left, chance.randint(1, len(left)))
            self.forward(
                {at: min(chance.choice(choices), len(self.texts[at]) - self.done[at])
                 for at in which},
                {at: 2 * at + (chance.random() < 0.3) for at in which},
            )  # fmt: skip

    def off(self, reference: Reference) -> float:
        """By how much logits differ from those of one forward, at most."""
        worst = 0.0
        for text, done, parts in zip(self.texts, self.done, self.logits, strict=True):
            if parts:
                found = torch.cat(parts).cpu()
                logits = reference.logits([*text[:done], 0], len(found))
                worst = max(worst, float((found - torch.from_numpy(logits).float()).abs().max()))
        return worst


def _texts() -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(256) for _ in range(num)] for num in (180, 90, 41)]


@pytest.mark.parametrize(
    ("family", "size"), [*((name, 8) for name in (*SERVED, *FURTHER)), *product(WINDOWED, (1, 16))]
)
def test_logits_of_chunks_and_steps_are_those_of_one_forward(family: str, size: int) -> None:
    """Whatever the chunks (longer and shorter than a window, and than the kernels' own), whichever
    others are in the forward, and in whichever slot a state is."""
    made, reference = family_of(family)
    grown = _Texts(made, _texts(), size=size)
    grown.grow(random.Random(6), [1, 1, 2, 3, 8, 30, 70])
    assert grown.off(reference) < OFF / 10


@of_windows
def test_long_chunks_are_computed_in_blocks(made: PagedModel, reference: Reference) -> None:
    """More new tokens than share a mask, at the beginning and behind it."""
    text = np.random.default_rng(1).integers(0, 256, 900).tolist()
    grown = _Texts(made, [text], 600)
    for num in (300, 600):
        grown.forward({0: num})
    assert grown.off(reference) < OFF / 10


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("nums", [[2, 3, 8, 30, 70], [1]], ids=["chunks", "steps"])
def test_a_window_that_is_one_token_off_or_ignored_would_be_seen(
    made: PagedModel, reference: Reference, nums: list[int]
) -> None:
    """Control: by the same weights with a window of one token less, one more, or of all tokens."""
    grown = _Texts(made, [text[:90] for text in _texts()])
    grown.grow(random.Random(6), nums)
    assert grown.off(reference) < OFF / 10
    for wrong in (made.window - 1, made.window + 1, 4096):
        other = deepcopy(reference)
        other.model.config.sliding_window = wrong
        for module in other.model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = wrong
        assert grown.off(other) > OFF


# --- engines --------------------------------------------------------------------------------------


def _computing(below: int, **more: Any) -> dict[str, Any]:
    """Settings of a decode worker that computes: however fast it is here, all prompts go on in each
    step."""
    return {"compute": ComputeConfig(below=below, chunk_tokens=24, itl_share=BY_SIZE), **more}


@of_each
def test_turns_hit_on_both_sides_and_prefill_computes_what_is_new(
    made: PagedModel, reference: Reference
) -> None:
    """In later turns prefill computes the answer before, what is said now, and less than a page."""
    size, said = 8, 14
    with World(made, page_size=size, chunk_tokens=64) as world:
        talk = list(range(60))
        for turn in range(6):
            before = world.prefill.stats()["computed_tokens"]
            answer = world.ask(f"{turn}", talk, max_new_tokens=said, sampling=SAMPLING)
            world.run()
            new = len(talk) if not turn else said + 30
            computed = world.prefill.stats()["computed_tokens"] - before
            assert new <= computed < 1.1 * new + size
            end = answer.ends[0]
            assert end.hit_tokens == (0 if not turn else (len(talk) - 31) // size * size)
            assert end.prefill_hit_tokens == len(talk) - computed
            talk = [*talk, *answer.tokens[0], *((7 * turn + i) % 256 for i in range(30))]
        check_answers(world, reference)
        world.at_rest()


def test_a_branch_of_a_prompt_gets_a_checkpoint_where_it_leaves(
    made: PagedModel, reference: Reference
) -> None:
    """The second prompt with the same system prompt saves one where they part; the third has it."""
    system = [3 * i % 256 for i in range(83)]
    with World(made, page_size=8) as world:
        for number, hit in enumerate((0, 0, 80, 80)):
            prompt = [*system, number, *range(50, 70)]
            answer = world.ask(f"{number}", prompt, max_new_tokens=6, sampling=SAMPLING)
            world.run()
            assert answer.ends[0].prefill_hit_tokens == hit
            assert answer.ends[0].hit_tokens == (80 if number else 0)
        check_answers(world, reference)
        world.at_rest()


@pytest.mark.parametrize(
    ("family", "below"), [(STATES, 64), (STATES, ALL), (WINDOWS, ALL), ("gemma3_text", 64)]
)
def test_turns_go_on_from_the_checkpoints_that_answers_leave(
    made: PagedModel, reference: Reference, below: int
) -> None:
    """Decode computes what is new. Of the first prompt prefill sends whole pages, or all of it: of
    90, 97 and 104 tokens. The second talk has short answers; the others go on without them, as
    where a model's thinking is left out."""
    draw = np.random.default_rng(below)
    with World(made, page_size=8, decode=_computing(below), pages=160, prefill_pages=160) as world:
        talks = [draw.integers(0, 256, 90 + 7 * i).tolist() for i in range(3)]
        for turn in range(4):
            before = world.decode.stats()["computed_tokens"]
            answers = [world.ask(f"{i}.{turn}", talk, max_new_tokens=(11, 3, 11)[i],
                                 sampling=SAMPLING) for i, talk in enumerate(talks)]  # fmt: skip
            world.run()
            computed = world.decode.stats()["computed_tokens"] - before
            for i, answer in enumerate(answers):
                more = draw.integers(0, 256, 20).tolist()
                talks[i] = [*talks[i], *(answer.tokens[0] if i == 1 else ()), *more]
            if turn:
                # What is new is the end of what was kept, and what was said: less than a page, and
                # 20, and a short answer.
                assert computed <= 3 * (20 + 8)
                assert all(answer.ends[0].hit_tokens >= 88 for answer in answers)
            elif below < ALL:
                assert computed == 90 % 8 + 97 % 8, "behind what was sent"
        check_answers(world, reference)
        stats, sent = world.decode.stats(), {64: 3, ALL: 0}[below]
        assert world.prefill.stats()["sent"] == sent
        assert (stats["computed_requests"], stats["cut_tokens"]) == (12 - sent, 0)
        world.at_rest()


@pytest.mark.parametrize("below", [0, 64])
def test_a_retracted_answer_gets_its_state_and_its_window_again(
    made: PagedModel, reference: Reference, below: int
) -> None:
    """Two answers grow until the pool lacks a page: one leaves it to the other, and goes on from
    its newest token, with prefill or from what decode had at its last page boundary."""
    decode = {"reserve_tokens": 0, **(_computing(below) if below else {})}
    pages = 19 if below else 14
    with World(made, page_size=8, pages=pages, prefill_pages=40, decode=decode) as world:
        for number in range(2):
            world.ask(f"{number}", range(number, number + 20), max_new_tokens=60,
                      sampling=SAMPLING)  # fmt: skip
        world.run()
        check_answers(world, reference)
        stats = world.decode.stats()
        assert stats["retractions"] > 0
        if below:
            assert world.prefill.stats()["sent"] == 0
            # Each goes on from less than a page before where it was.
            assert stats["computed_tokens"] <= 40 + 8 * stats["retractions"]
        world.at_rest()


@pytest.mark.parametrize(
    ("family", "below"), [("granitemoehybrid", 0), ("gpt_oss", 0), ("granitemoehybrid", 150)]
)
def test_a_small_storm(family: str, below: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _storm(family, 6, below, 0, monkeypatch)


@pytest.mark.slow
@of_each
@pytest.mark.parametrize(("below", "seed"), [(0, 0), (0, 1), (0, 2), (150, 0)])
def test_a_storm_of_conversations_with_few_slots_and_pages(
    family: str, below: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _storm(family, 6 if below else 14, below, seed, monkeypatch)


def _storm(
    family: str, rounds: int, below: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools that evict, fewer slots than prompts, windows for fewer requests and fewer checkpoints
    than there are conversations, aborts, retractions: every token of every answer. With own compute
    some prompts are sent, the longest ones, without a hit."""
    monkeypatch.setattr("prefixkv.engines.hf.prefill._STATE_SLOTS", 3)
    made, reference = family_of(family)
    storm = Storm(
        talks=6, rounds=rounds, bursts=(1, 2, 4), more=(1, 5, 17, *[60] * bool(below)), longest=200,
        again=0.3, answers=(9, 40, 70) if made.window else (9, 30, 50), steps=30, abort=0.03,
        logprobs=20,
    )  # fmt: skip
    computes = _computing(below, checkpoints=3) if below else {}
    windows = {} if below or not made.window else {"window_pages": 19, "prefill_window_pages": 30}
    with World(
        made, page_size=8, pages=36, prefill_pages=44, chunk_tokens=48,
        prefill={"checkpoints": 4},
        decode={"max_running": 5, "reserve_tokens": 0, **computes}, **windows,
    ) as world:  # fmt: skip

        def counted(aborted: set[str]) -> list[int]:
            if below:
                names = ("retractions", "skipped_tokens", "computed_requests")
                stats = world.decode.stats()
                return [world.prefill.stats()["sent"], *(stats[name] for name in names)]
            return [*checkpoint_counts(world), *([len(aborted)] if rounds > 10 else ())]

        aborted = storm.run(world, seed, counted)
        assert all(counted(aborted)), counted(aborted)
        assert check_answers(world, reference, aborted).answers > rounds
        hits = sum(answer.ends[0].prefill_hit_tokens for answer in world.answers)
        assert below or hits > 0
        world.at_rest()
        for engine in (world.decode, world.prefill) if made.window else ():
            assert engine.stats()["window_pages_owned"] == 0


@pytest.mark.slow
@of_each
@pytest.mark.parametrize("seed", range(4))
def test_random_rounds_of_all_page_sizes_layouts_and_samplings(
    made: PagedModel, reference: Reference, seed: int
) -> None:
    found = Found()
    run_round(made, reference, 300 + seed, found)
    assert found.answers > 0


def test_prefill_ends_and_every_answer_is_right(made: PagedModel, reference: Reference) -> None:
    """What is on its way, what waits, and what comes afterwards: next turns among it."""
    decode = _computing(32, failure_policy="local")
    with World(made, page_size=8, pages=160, prefill_pages=160, decode=decode) as world:
        draw = np.random.default_rng(1)
        prompts = [draw.integers(0, 256, 60).tolist() for _ in range(5)]
        for i, prompt in enumerate(prompts[:3]):
            world.ask(f"r{i}", prompt, max_new_tokens=20, sampling=SAMPLING)
        world.until(lambda: len(world.answers[0].tokens.get(0, ())) > 3)
        world.ask("lost", prompts[3], max_new_tokens=6, sampling=SAMPLING)
        world.prefill.close()
        world.run_without_prefill()
        before = world.decode.stats()["computed_tokens"]
        talk = [*prompts[0], *world.answers[0].tokens[0], 1, 2, 3]
        world.ask("later", talk, max_new_tokens=6, sampling=SAMPLING)
        world.run_without_prefill()
        assert world.decode.stats()["computed_tokens"] - before <= 3 + 8
        world.ask("new", prompts[4], max_new_tokens=6, sampling=SAMPLING)
        world.run_without_prefill()
        check_answers(world, reference)
        assert world.decode.stats()["failovers"] >= 1
        world.decode.audit()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_half_precision_go_on_from_checkpoints(family: str, dtype: str) -> None:
    """What recurs is float32 whatever the weights are, as transformers has it."""
    made = make_model(config_of(family), seed=3, dtype=dtype)
    dtypes = {part.kind: part.dtype for part in made.layers.parts}
    assert dtypes == ({} if made.window else {"conv": dtype, "recurrent": "float32"})
    with World(made, page_size=8) as world:
        talk = list(range(40))
        for hit in (0, 40):
            answer = world.ask(f"{hit}", talk, max_new_tokens=9, sampling=SAMPLING)
            world.run()
            assert len(answer.tokens[0]) == 9
            assert answer.ends[0].prefill_hit_tokens == hit
            talk = [*talk, *answer.tokens[0], 1, 2, 3]
        world.at_rest()


_ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}


def _pictures() -> PagedModel:
    """Gemma 3 from 4B on, whose text config is one of several."""
    text = config_of("gemma3_text").to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    return make_model(config, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("olmo3", _ALTERNATE), ("cohere2", _ALTERNATE), ("exaone4", _ALTERNATE),
        ("ministral", {**_ALTERNATE, "head_dim": 16}),
        ("qwen3", {**_ALTERNATE, "head_dim": 16, "use_sliding_window": True}),
        ("smollm3", {**_ALTERNATE, "use_sliding_window": True}),
        ("afmoe", {"sliding_window": 24}), ("texts and pictures", {}),
    ],
)  # fmt: skip
def test_trials_of_further_families_with_windows_find_them_right(kind: str, sizes: dict) -> None:
    made = make_model(kind, **{**TINY, "num_hidden_layers": 4, **sizes}) if sizes else _pictures()
    assert 0 < len(made.layers.sliding) < made.config.num_hidden_layers


def test_a_prompt_is_computed_anew_without_a_cache(made: PagedModel, reference: Reference) -> None:
    with World(made, prefill={"cache": False}) as world:
        for turn in range(2):
            world.ask(f"{turn}", range(70), max_new_tokens=4, sampling=SAMPLING)
            world.run()
        found = check_answers(world, reference)
        assert [answer.ends[0].prefill_hit_tokens for answer in world.answers] == [0, 0]
        assert found.answers == 2
        assert world.prefill.node.config.checkpoints == 0
        world.at_rest()


def test_checkpoints_by_default_take_a_share_of_the_pool(made: PagedModel) -> None:
    for more, points in (({}, 16), ({"checkpoints": 5}, 5)):
        with World(made, prefill=more) as world:
            assert world.prefill.node.config.checkpoints == points
            if (states := world.prefill.states) is not None:
                assert states.pool.num_slots == 32 + points
    some = made.num_checkpoints(2000, 16)
    assert 16 < some < 256 == made.num_checkpoints(10**6, 16)
    if made.state_bytes:
        per_token = made.make_pool(2000, 16).layout.kv_bytes_per_token
        assert some == 2000 * 16 * per_token // 4 // made.state_bytes


# --- slots ----------------------------------------------------------------------------------------


@of_states
def test_more_prompts_than_slots_wait_for_one(
    made: PagedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is aborted here, one at prefill: their slots come back."""
    monkeypatch.setattr("prefixkv.engines.hf.prefill._STATE_SLOTS", 1)
    gone = []
    with World(made, chunk_tokens=8, decode={"max_running": 2}) as world:
        for side in ("decode", "prefill"):
            gone.append(world.ask(f"{side} goes", range(100), max_new_tokens=3).ask.rid)
            until(lambda: world.step() or world.prefill.stats()["computing"])
            if side == "decode":
                assert world.decode.abort(gone[-1])
            else:
                assert world.prefill.abort(f"decode-0/{gone[-1]}/0.0")
            world.run()
        for number in range(5):
            world.ask(f"{number}", [number, *range(30)], max_new_tokens=4, num_samples=2,
                      sampling=SAMPLING)  # fmt: skip
        world.run()
        check_answers(world, reference, gone)
        world.at_rest()


@of_states
def test_a_slot_is_not_used_again_while_its_state_is_sent(
    made: PagedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Work:
        is_over = False

        def query(self) -> bool:
            return self.is_over

    monkeypatch.setattr("prefixkv.engines.hf.prefill._STATE_SLOTS", 1)
    work = Work()  # of the device, without whose end nothing is sent
    with World(made) as world, monkeypatch.context() as slower:
        slower.setattr(made, "event", lambda: work)
        world.ask("first", range(20), max_new_tokens=3)
        until(lambda: world.step() or world.prefill.stats()["computed_tokens"] == 20)
        world.ask("second", range(100, 130), max_new_tokens=3)
        for _ in range(50):
            world.step()
        assert world.prefill.stats()["computed_tokens"] == 20
        work.is_over = True
        # A worker sleeps where a step says that there is no more to do: not with a slot for the
        # next prompt.
        until(lambda: world.prefill.step() or (world.decode.step() and False))
        assert world.prefill.stats()["computed_tokens"] == 20
        assert world.prefill.step()
        assert world.prefill.stats()["computed_tokens"] == 50
        world.run()
        check_answers(world, reference)
        world.at_rest()


# --- windows --------------------------------------------------------------------------------------


@of_windows
def test_a_long_answer_takes_no_more_window_pages(made: PagedModel, reference: Reference) -> None:
    """Its window moves over pages of its own many times, and prefill's chunks do too. Chunks of a
    prompt are no longer than the group's steps; several prompts share a forward of more tokens."""
    with World(
        made, page_size=8, pages=80, prefill_pages=80, chunk_tokens=16, window_pages=4,
        prefill_window_pages=10, prefill={"checkpoints": 1},
    ) as world:  # fmt: skip
        world.ask("r", range(200), max_new_tokens=150, sampling=SAMPLING)
        world.run()
        check_answers(world, reference)
        world.at_rest()
    with World(made, page_size=8, chunk_tokens=64, step_tokens=20) as world:
        for number in range(3):
            world.ask(f"{number}", range(number, number + 60), max_new_tokens=3, sampling=SAMPLING)
        world.run()
        check_answers(world, reference)
        # To 20, 40, 56, where a checkpoint is kept, and 60.
        assert 4 <= world.prefill.stats()["forwards"] <= 8
        world.at_rest()


@of_windows
def test_workers_with_unequal_pages_refuse_each_other(made: PagedModel) -> None:
    with World(made, page_size=8, prefill_page_size=16) as world:
        answer = world.ask("r", range(70), max_new_tokens=4)
        world.run()
        why = "page_size must be equal where a model has groups of layers: ours 8, theirs 16"
        assert answer.ends[0].finish == "error"
        assert why in str(answer.ends[0].error)


@of_windows
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
    plain = make_model("llama", **TINY)
    with pytest.raises(ConfigError, match=r"windows of \[\], the model has a window of"):
        made.flat_pool(plain.make_pool(8))
    with pytest.raises(ConfigError, match=r"windows of \[2.\], the model has a window of None"):
        plain.flat_pool(made.make_pool(8))


@of_windows
@pytest.mark.parametrize("less", [0, 4])
def test_a_context_within_the_window_needs_no_group(family: str, less: int) -> None:
    window = family_of(family)[0].window
    assert make_model(config_of(family), seed=3, context=window + 1, trial=False).window == window
    short = make_model(config_of(family), seed=3, context=window - less)
    assert (short.window, short.extra_state) == (0, ExtraState.NONE)
    assert short.num_layers == short.config.num_hidden_layers
    assert not short.make_pool(8).groups
    with World(short) as world:
        world.ask("r", range(9), max_new_tokens=7, sampling=SAMPLING)
        world.run()
        check_answers(world, Reference(short))


# --- what is known of a model, and what is refused ------------------------------------------------


@pytest.mark.parametrize(
    ("family", "full", "states"),
    [
        ("qwen3_next", (3,), {0: 2, 1: 2, 2: 2}),
        ("nemotron_h", (1, 5), {0: 2, 2: 2, 4: 2}),
        ("granitemoehybrid", (1, 3), {0: 2, 2: 2}),
        ("falcon_h1", (0, 1, 2), {0: 2, 1: 2, 2: 2}),
        ("lfm2", (1, 3), {0: 1, 2: 1}),
    ],
)
def test_layers_are_known_by_what_they_keep(
    made: PagedModel, full: tuple[int, ...], states: dict[int, int]
) -> None:
    assert made.layers.full == full
    assert made.num_layers == made.make_pool(4).layout.num_layers == len(full)
    found: dict[int, int] = {}
    for part in made.layers.parts:
        found[part.layer] = found.get(part.layer, 0) + 1
    assert found == states
    memory = made.make_states(3)
    assert {view.shape[0] for views in memory.views.values() for _, view in views} == {3}
    assert made.state_bytes == sum(entry.num_bytes for entry in memory.pool.layout.entries)


def test_a_model_without_states_has_no_checkpoints() -> None:
    with pytest.raises(ConfigError, match="checkpoints: 3 are of states and windows, and the"):
        World(make_model("llama", **TINY), prefill={"checkpoints": 3})


def test_a_cache_of_another_interface_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an older transformers, say, whose layers have no such method."""
    copy = unpaged_copy(family_of("granitemoehybrid")[0])
    monkeypatch.delattr("transformers.cache_utils.LinearAttentionLayer.update_conv_state")
    monkeypatch.delattr("transformers.cache_utils.LinearAttentionCacheLayerMixin.update_conv_state")
    with pytest.raises(ConfigError, match="is not served: "):
        PagedModel(copy)


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 1, "context": 99},
         "mamba2 is not served: none of its layers has KV"),
        ("jamba", {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                   "num_experts": 2, "use_mamba_kernels": False, "mamba_dt_rank": 8},
         "jamba is not served: on pages its logits differ"),
        ("kimi_linear", {}, "kimi_linear is not served: kv_lora_rank is 512"),
    ],
)  # fmt: skip
def test_recurrent_models_that_are_not_served_are_refused_by_name(
    kind: str, sizes: dict, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make_model(kind, **{**TINY, **sizes})


@of_windows
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


@of_windows
def test_a_layer_with_another_window_than_the_config_says_is_refused(made: PagedModel) -> None:
    model = deepcopy(made.model)
    model.set_attn_implementation(NAME)
    layer = made.layers.sliding[0]
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer:
            module.sliding_window = made.window + 1
    with pytest.raises(ConfigError, match=f"attends to {made.window + 1} tokens, the engine to"):
        PagedModel(model)
