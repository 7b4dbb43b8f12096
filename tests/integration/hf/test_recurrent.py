"""Models with recurrent layers: logits and tokens are the model's by itself, whatever their states
went through, and prefill goes on from checkpoints."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.hybrid_models import FAMILIES, WINDOWED, config_of
from prefixkv.engines.hf import PagedModel, Sampling, make_model
from prefixkv.engines.hf.identity import identity_of
from prefixkv.engines.hf.models import unpaged_copy
from prefixkv.engines.hf.recurrent import NO_SLOT, StateRows
from prefixkv.errors import ConfigError
from tests.support.devices import DEVICE
from tests.support.hf_workload import Found, Storm, checkpoint_counts, compare, run_round
from tests.support.hf_world import TINY, Answer, Reference, World
from tests.support.patience import until

SERVED = ("qwen3_next", "nemotron_h", "granitemoehybrid")
# A state that is slightly wrong shows in the numbers long before it does in the tokens.
_SAMPLING = Sampling(ignore_end=True, logprobs=20)
FURTHER = tuple(name for name in FAMILIES if name not in (*SERVED, *WINDOWED))


def _check(answer: Answer, reference: Reference) -> None:
    """The answer is the model's, and so are the log-probabilities of its tokens."""
    asked, said = answer.ask.tokens.tolist(), answer.tokens[0]
    assert said == reference.greedy(asked, answer.ask.max_new_tokens, said)
    reference.check_logprobs([*asked, *said], answer.logprobs[0], 20)


@cache
def _made(family: str) -> tuple[PagedModel, Reference]:
    made = make_model(config_of(family), seed=3, device=DEVICE)
    return made, Reference(made)


@pytest.fixture(params=SERVED)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(family: str) -> PagedModel:
    return _made(family)[0]


@pytest.fixture
def reference(family: str) -> Reference:
    return _made(family)[1]


class _Texts:
    """Sequences that grow by forwards of many at once, on one pool and one set of slots."""

    def __init__(self, model: PagedModel, texts: list[list[int]], size: int = 8) -> None:
        self.model, self.texts = model, texts
        pages = [-(-len(text) // size) for text in texts]
        pool = model.make_pool(sum(pages), size)
        self.memory = model.make_states(2 * len(texts))
        for place in range(model.num_layers):
            pool.k(place).normal_(0, 3)
            pool.v(place).normal_(0, 3)
        for views in self.memory.views.values():
            for _, view in views:
                view.normal_(0, 3)
        self.flat = model.flat_pool(pool)
        ids = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        self.rows = np.split(ids, np.cumsum(pages)[:-1])
        self.done = [0] * len(texts)
        self.sources = [NO_SLOT] * len(texts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]

    def forward(self, nums: dict[int, int], slots: dict[int, int]) -> None:
        """Compute so many more tokens of some texts; their states go to these slots."""
        which = list(nums)
        starts = [self.done[at] for at in which]
        ends = [self.done[at] + nums[at] for at in which]
        new = [
            self.texts[at][start:end] for at, start, end in zip(which, starts, ends, strict=True)
        ]
        states = StateRows(
            self.memory, [self.sources[at] for at in which], [slots[at] for at in which]
        )
        logits = self.model.forward(
            self.flat, np.concatenate(new), [self.rows[at] for at in which], starts, ends, [],
            list(range(sum(map(len, new)))), states,
        )  # fmt: skip
        for at, end, part in zip(which, ends, logits.split([len(one) for one in new]), strict=True):
            self.done[at], self.sources[at] = end, slots[at]
            self.logits[at].append(part)


@pytest.mark.parametrize("family", [*SERVED, *FURTHER])
def test_logits_of_chunks_and_steps_are_those_of_one_forward(family: str) -> None:
    """Whatever the chunks, whichever others are in the forward, and in whichever slot a state is:
    chunks are longer and shorter than the kernels' own (64 tokens, and 16)."""
    made, reference = _made(family)
    chance = random.Random(5)
    texts = [[chance.randrange(256) for _ in range(num)] for num in (180, 90, 41)]
    grown = _Texts(made, texts)
    while left := [at for at, text in enumerate(texts) if grown.done[at] < len(text)]:
        which = chance.sample(left, chance.randint(1, len(left)))
        nums = {
            at: min(chance.choice([1, 1, 2, 3, 8, 30, 70]), len(texts[at]) - grown.done[at])
            for at in which
        }
        # A text has two slots, and its state goes from one to the other now and then.
        slots = {at: 2 * at + (chance.random() < 0.3) for at in which}
        grown.forward(nums, slots)
    for text, parts in zip(texts, grown.logits, strict=True):
        expected = torch.from_numpy(reference.logits([*text, 0], len(text))).float().to(DEVICE)
        assert (torch.cat(parts) - expected).abs().max() < 1e-3


def test_a_state_goes_on_from_where_it_was_copied_twice(
    made: PagedModel, reference: Reference
) -> None:
    """A source is only read: two texts go on from one, and it is the same afterwards."""
    begin = list(range(40))
    texts = [begin, [*begin, 7, 8, 9], [*begin, 200, 100, 50, 3]]
    grown = _Texts(made, texts)
    grown.forward({0: 40}, {0: 5})
    before = {name: view[5].clone() for name, view in _views(grown)}
    for at in (1, 2):  # its pages too, since attention reads them
        for layer in grown.flat.pages:
            for both in zip(*(grown.flat.rows(grown.rows[one][:5]).flatten().tolist()
                              for one in (0, at)), strict=True):  # fmt: skip
                grown.flat.pages[layer][both[1]] = grown.flat.pages[layer][both[0]]
        grown.done[at], grown.sources[at] = 40, 5
    grown.forward({1: 3, 2: 1}, {1: 1, 2: 2})
    grown.forward({2: 3}, {2: 0})
    for at in (1, 2):
        new = len(texts[at]) - 40
        expected = torch.from_numpy(reference.logits([*texts[at], 0], new)).float().to(DEVICE)
        assert (torch.cat(grown.logits[at]) - expected).abs().max() < 1e-3
    assert all(torch.equal(before[name], view[5]) for name, view in _views(grown))


def _views(grown: _Texts) -> list[tuple[str, torch.Tensor]]:
    return [(part.name, view) for views in grown.memory.views.values() for part, view in views]


def test_turns_hit_on_both_sides_and_prefill_computes_what_is_new(
    made: PagedModel, reference: Reference
) -> None:
    """In later turns prefill computes the answer before, what is said now, and less than a page."""
    size, said = 8, 14
    with World(made, page_size=size, chunk_tokens=64) as world:
        talk = list(range(60))
        for turn in range(6):
            before = world.prefill.stats()["computed_tokens"]
            answer = world.ask(f"{turn}", talk, max_new_tokens=said, sampling=_SAMPLING)
            world.run()
            _check(answer, reference)
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
    """The second prompt with the same system prompt saves one where they part; the third has it."""
    system = [3 * i % 256 for i in range(83)]
    with World(made, page_size=8) as world:
        for number, hit in enumerate((0, 0, 80, 80)):
            prompt = [*system, number, *range(50, 70)]
            answer = world.ask(f"{number}", prompt, max_new_tokens=6, sampling=_SAMPLING)
            world.run()
            _check(answer, reference)
            assert answer.ends[0].prefill_hit_tokens == hit
            assert answer.ends[0].hit_tokens == (80 if number else 0)
        world.at_rest()


def test_a_small_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    _storm("granitemoehybrid", 7, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_conversations_with_few_slots_and_pages(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _storm(family, 14, monkeypatch, seed)


def _storm(family: str, rounds: int, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Pools that evict, fewer slots than prompts and fewer checkpoints than conversations, aborts,
    retractions: every token of every answer."""
    monkeypatch.setattr("prefixkv.engines.hf.prefill._STATE_SLOTS", 3)
    made, reference = _made(family)
    storm = Storm(
        talks=6, rounds=rounds, bursts=(1, 2, 4), more=(1, 5, 17), longest=200, again=0.3,
        answers=(9, 30, 50), steps=30, abort=0.03, logprobs=20,
    )  # fmt: skip
    found = Found()
    with World(
        made, pages=36, page_size=8, prefill_pages=60, chunk_tokens=48,
        decode={"max_running": 5, "reserve_tokens": 0}, prefill={"checkpoints": 4},
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
    assert found.answers > rounds
    assert found.near_ties <= 1
    assert hits > 0


def test_a_retracted_answer_gets_its_state_again(made: PagedModel, reference: Reference) -> None:
    """Two answers grow until the pool has pages for one: the other goes on from its newest token,
    and from the state there."""
    with World(
        made, pages=14, page_size=8, prefill_pages=40, decode={"reserve_tokens": 0}
    ) as world:
        for number in range(2):
            world.ask(
                f"{number}", range(number, number + 20), max_new_tokens=60,
                sampling=_SAMPLING,
            )  # fmt: skip
        world.run()
        for answer in world.answers:
            _check(answer, reference)
        assert world.decode.stats()["retractions"] > 0
        world.at_rest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_have_the_dtypes_of_the_models_own_cache(family: str, dtype: str) -> None:
    """What recurs is float32 whatever the weights are, as transformers has it."""
    made = make_model(config_of(family), seed=3, dtype=dtype)
    dtypes = {part.kind: part.dtype for part in made.layers.parts}
    assert dtypes == {"conv": dtype, "recurrent": "float32"}
    with World(made, page_size=8) as world:
        talk = list(range(40))
        for hit in (0, 40):
            answer = world.ask(f"{hit}", talk, max_new_tokens=9, sampling=_SAMPLING)
            world.run()
            assert len(answer.tokens[0]) == 9
            assert answer.ends[0].prefill_hit_tokens == hit
            talk = [*talk, *answer.tokens[0], 1, 2, 3]
        world.at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_rounds_of_all_page_sizes_layouts_and_samplings(
    made: PagedModel, reference: Reference, seed: int
) -> None:
    found = Found()
    run_round(made, reference, 300 + seed, found)
    assert found.answers > 0


@pytest.mark.parametrize("family", FURTHER)
def test_further_families_are_answered_over_turns(family: str) -> None:
    made, reference = _made(family)
    with World(made, page_size=8) as world:
        talk = list(range(50))
        for turn in range(3):
            answer = world.ask(f"{turn}", talk, max_new_tokens=9, sampling=_SAMPLING)
            world.run()
            _check(answer, reference)
            assert (answer.ends[0].prefill_hit_tokens > 0) == (turn > 0)
            talk = [*talk, *answer.tokens[0], *range(turn, turn + 12)]
        world.at_rest()


# --- slots ----------------------------------------------------------------------------------------


def test_more_prompts_than_slots_wait_for_one(
    made: PagedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixkv.engines.hf.prefill._STATE_SLOTS", 1)
    with World(made, decode={"max_running": 2}) as world:
        for number in range(5):
            world.ask(f"{number}", [number, *range(30)], max_new_tokens=4, num_samples=2)
        world.run()
        for answer in world.answers:
            expected = reference.greedy(answer.ask.tokens, 4)
            assert answer.tokens[0] == answer.tokens[1] == expected[: len(answer.tokens[0])]
        world.at_rest()


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
        first = world.ask("first", range(20), max_new_tokens=3)
        until(lambda: world.step() or world.prefill.stats()["computed_tokens"] == 20)
        second = world.ask("second", range(100, 130), max_new_tokens=3)
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
        for answer in (first, second):
            assert (
                answer.tokens[0] == reference.greedy(answer.ask.tokens, 3)[: len(answer.tokens[0])]
            )
        world.at_rest()


def test_a_slot_of_an_aborted_prompt_comes_back(
    made: PagedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixkv.engines.hf.prefill._STATE_SLOTS", 1)
    with World(made, chunk_tokens=8) as world:
        for side in ("decode", "prefill"):
            gone = world.ask(f"{side} goes", range(100), max_new_tokens=3)
            until(lambda: world.step() or world.prefill.stats()["computing"])
            if side == "decode":
                assert world.decode.abort(gone.ask.rid)
            else:
                assert world.prefill.abort(f"decode-0/{gone.ask.rid}/0.0")
            world.run()
            stays = world.ask(f"after {side}", range(90), max_new_tokens=3)
            world.run()
            expected = reference.greedy(range(90), 3)
            assert stays.tokens[0] == expected[: len(stays.tokens[0])]
        world.at_rest()


def test_there_are_checkpoints_by_default_and_none_without_a_cache(made: PagedModel) -> None:
    def num_of(pages: int, **prefill: Any) -> int:
        with World(made, prefill_pages=pages, prefill=prefill) as world:
            states = world.prefill.states
            assert states is not None
            points = world.prefill.node.config.checkpoints
            assert states.pool.num_slots == 32 + points
            return points

    assert num_of(64) == 16
    layout = made.make_pool(2000, 16).layout
    quarter = 2000 * 16 * layout.kv_bytes_per_token // 4 // made.state_bytes
    assert num_of(2000) == max(16, min(256, quarter))
    assert num_of(64, checkpoints=5) == 5
    assert num_of(64, cache=False) == 0


def test_a_prompt_is_computed_anew_without_a_cache(made: PagedModel, reference: Reference) -> None:
    with World(made, prefill={"cache": False}) as world:
        for turn in range(2):
            answer = world.ask(f"{turn}", range(40), max_new_tokens=4)
            world.run()
            assert answer.tokens[0] == reference.greedy(range(40), 4)[: len(answer.tokens[0])]
            assert answer.ends[0].prefill_hit_tokens == 0
        world.at_rest()


# --- what is known of the model -------------------------------------------------------------------


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
    family: str, full: tuple[int, ...], states: dict[int, int]
) -> None:
    made, _ = _made(family)
    assert made.layers.full == full
    assert made.num_layers == made.make_pool(4).layout.num_layers == len(full)
    found: dict[int, int] = {}
    for part in made.layers.parts:
        found[part.layer] = found.get(part.layer, 0) + 1
    assert found == states
    memory = made.make_states(3)
    assert {view.shape[0] for views in memory.views.values() for _, view in views} == {3}
    assert made.state_bytes == sum(entry.num_bytes for entry in memory.pool.layout.entries)


def test_paging_changes_no_identity_and_no_copy(made: PagedModel, reference: Reference) -> None:
    """Twice paged it is as once, and a copy without pages computes by itself."""
    assert identity_of(made.model) == made.identity
    again = PagedModel(unpaged_copy(made))
    assert (again.identity, again.layers.parts) == (made.identity, made.layers.parts)
    assert Reference(again).greedy(range(30), 5) == reference.greedy(range(30), 5)


def test_a_model_without_states_has_no_checkpoints() -> None:
    with pytest.raises(ConfigError, match="checkpoints: 3 are of states and windows, and the"):
        World(make_model("llama", **TINY), prefill={"checkpoints": 3})


def test_a_cache_of_another_interface_is_refused_by_name(
    made: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an older transformers, say, whose layers have no such method."""
    copy = unpaged_copy(made)
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
