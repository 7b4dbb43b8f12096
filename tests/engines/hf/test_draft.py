"""A draft head on an aligned group: whatever a slot of its KV went through (prefill, transfer, hits
on both sides, evictions, retractions, steps with guesses that are right or wrong), it is what one
pass of the draft over the text has there, and so are the logits of every guess. Answers are the
model's, with or without a guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.hybrid_models import config_of
from prefixkv import ComputeConfig, ControlConfig, PrefillConfig
from prefixkv.engines.hf import DecodeEngine, PagedModel, PrefillEngine, Sampling, make_model
from prefixkv.engines.hf import attention as attention_module
from prefixkv.engines.hf.draft import DraftHead, DraftPart, pack_hidden, unpack_hidden
from prefixkv.engines.hf.drafting import Drafting
from prefixkv.errors import ConfigError
from tests.models.devices import DEVICE
from tests.models.draft_pass import OFF, Watch, fit, hidden_states, one_pass, plain_draft
from tests.models.hf_workload import Found, Storm, compare, run_round
from tests.models.hf_world import TINY, Answer, Reference, World

SIZE = 8


@pytest.fixture(scope="module")
def made() -> PagedModel:
    """A model with a draft that guesses some tokens: it was trained for a second."""
    model = make_model("llama", seed=3, **TINY)
    model.add_draft(seed=5)
    assert model.draft is not None
    draw, reference = np.random.default_rng(0), Reference(model)
    prompts = [draw.integers(0, 256, 20).tolist() for _ in range(6)]
    fit(reference, model.draft, [one + reference.greedy(one, 60) for one in prompts], 60)
    return model


@pytest.fixture(scope="module")
def plain(made: PagedModel) -> Reference:
    return Reference(made)


def _exact(answer: Answer, reference: Reference) -> None:
    said, given = answer.tokens[0], answer.logprobs[0]
    assert said == reference.greedy(answer.ask.tokens, len(said), said)
    reference.check_logprobs([*answer.ask.tokens, *said], given, 5)


def _turns(world: World, reference: Reference, turns: int) -> None:
    """A conversation, with hits on both sides, whose answers are the model's."""
    talk = np.random.default_rng(0).integers(0, 256, 20).tolist()
    for turn in range(turns):
        sampling = Sampling(ignore_end=True, logprobs=5)
        answer = world.ask(f"{turn}", talk, max_new_tokens=24, sampling=sampling)
        world.run()
        _exact(answer, reference)
        assert (answer.ends[0].prefill_hit_tokens > 0) == (turn > 0)
        assert (answer.ends[0].hit_tokens > 0) == (turn > 0)
        talk = [*talk, *answer.tokens[0], *range(turn, turn + 7)]


# --- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True])
def test_turns_guess_from_kv_that_was_sent_and_cached(
    made: PagedModel, plain: Reference, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU steps are padded batches."""
    if batched:
        monkeypatch.setattr(attention_module, "BATCHED", ("cpu", "cuda"))
    with World(made, page_size=SIZE, chunk_tokens=16) as world:
        watch = Watch(world, plain)
        _turns(world, plain, 4)
        watch.check()
        stats = world.decode.stats()
        assert 0 < stats["draft_tokens_accepted"] < stats["draft_tokens"]
        # A token of each answer comes from prefill.
        assert stats["steps"] == stats["tokens"] - 4 - stats["draft_tokens_accepted"]
        # One token behind each hit is computed again: the draft goes on from its hidden state.
        hits = sum(one.ends[0].prefill_hit_tokens for one in world.answers)
        prompts = sum(len(one.ask.tokens) for one in world.answers)
        assert world.prefill.stats()["computed_tokens"] == prompts - hits + 3
        world.at_rest()


def _without_states(drafting: Drafting, req: Any) -> bytes:
    rest, _ = unpack_hidden(req.aux, req.kv_len, drafting._head)
    drafting._states[req] = (
        req.kv_len - 1,
        torch.zeros(1, drafting._model.draft.width, device=DEVICE),
    )
    return rest


def _without_slots(drafting: Drafting, step: Any, accepted: Any) -> None:
    head, drafting._head = drafting._head, lambda *_: None  # type: ignore[assignment, return-value]
    Drafting_verified(drafting, step, accepted)
    drafting._head = head


Drafting_verified = Drafting.verified


@pytest.mark.parametrize(
    ("what", "name", "wrong"),
    [
        (PrefillEngine, "_again", lambda *_: 0),
        (Drafting, "begin", _without_states),
        (Drafting, "verified", _without_slots),
    ],
)
def test_a_hidden_state_or_a_slot_that_is_missing_would_be_seen(
    made: PagedModel, plain: Reference, what: Any, name: str, wrong: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Control: behind a hit of prefill, behind what was sent, behind an accepted guess. The answers
    are the model's all the same."""
    monkeypatch.setattr(what, name, wrong)
    with World(made, page_size=SIZE, chunk_tokens=16) as world:
        watch = Watch(world, plain)
        _turns(world, plain, 2)
        assert max(watch.worst_guess(), watch.worst_page()) > OFF


def test_wrong_kv_of_a_draft_costs_guesses_and_changes_no_token(
    made: PagedModel, plain: Reference
) -> None:
    assert made.draft is not None
    with World(made, page_size=SIZE) as world:
        _turns(world, plain, 2)
        right = world.decode.stats()["draft_tokens_accepted"]
    with World(made, page_size=SIZE) as world:
        drafting = world.decode._drafting
        assert drafting is not None
        step = drafting.step

        def spoiled(*given: Any) -> Any:
            for kind in (drafting._own.pool.k(0), drafting._own.pool.v(0)):
                kind.normal_(0, 3)
            return step(*given)

        drafting.step = spoiled  # type: ignore[method-assign]
        _turns(world, plain, 2)
        assert world.decode.stats()["draft_tokens_accepted"] < right


@pytest.mark.parametrize("rest", [0, 1])
def test_a_retracted_answer_guesses_on(made: PagedModel, plain: Reference, rest: int) -> None:
    """With whole pages prefill is not asked, and the last hidden state is computed again; else
    prefill sends it. In both cases what came with the prompt is out of date."""
    with World(made, page_size=4) as world:
        watch = Watch(world, plain)
        drafting = world.decode._drafting
        assert drafting is not None
        begin, sent = drafting.begin, []

        def beginning(req: Any) -> bytes:
            found: bytes = begin(req)
            sent.append(req in drafting._states)
            return found

        drafting.begin = beginning  # type: ignore[method-assign]
        sampling = Sampling(ignore_end=True, logprobs=5)
        # The oldest is never retracted.
        world.ask("old", range(60, 70), max_new_tokens=60, sampling=sampling)
        world.until(lambda: world.decode._running)
        answer = world.ask("r", range(20), max_new_tokens=30, sampling=sampling)

        def young() -> list[Any]:
            return world.decode._running[1:]

        world.until(lambda: any(one.kv_len > 24 and one.kv_len % 4 == rest for one in young()))
        [req] = young()
        world.decode._retract(req.rid)
        world.until(young)
        assert req.resumed
        assert sent == [True, True, bool(rest)]
        world.run()
        _exact(answer, plain)
        watch.check()
        world.at_rest()


def test_the_last_tokens_of_an_answer_are_not_guessed(made: PagedModel, plain: Reference) -> None:
    """There is no page for what comes behind them, and no client."""
    with World(made, page_size=4) as world:
        for num in (1, 2, 3):
            answer = world.ask(
                f"{num}", range(20), max_new_tokens=num,
                sampling=Sampling(ignore_end=True, logprobs=5),
            )  # fmt: skip
            world.run()
            _exact(answer, plain)
        assert world.decode.stats()["draft_tokens"] == 1
        world.at_rest()


def test_a_stop_token_behind_a_guess_ends_the_answer(made: PagedModel, plain: Reference) -> None:
    """Wherever it falls: as the guess, or behind it."""
    talk = np.random.default_rng(0).integers(0, 256, 20).tolist()
    said = plain.greedy(talk, 24)
    with World(made, page_size=SIZE) as world:
        for at in range(1, 24):
            first = said.index(said[at])
            answer = world.ask(
                f"{at}", talk, max_new_tokens=24, sampling=Sampling(stop_tokens=(said[at],))
            )
            world.run()
            assert answer.tokens[0] == said[: first + 1]
            assert answer.ends[0].finish == "stop"
        assert world.decode.stats()["draft_tokens_accepted"]
        world.at_rest()


def test_prompts_log_probabilities_come_with_a_draft(made: PagedModel, plain: Reference) -> None:
    """Beside a prompt of which a token is computed again."""
    with World(made, page_size=SIZE, chunk_tokens=200) as world:
        sampling = Sampling(ignore_end=True, logprobs=5)
        world.ask("a", range(40), max_new_tokens=2, sampling=sampling)
        world.run()
        world.ask("b", range(50), max_new_tokens=2, sampling=sampling)
        world.ask("c", range(5, 45), max_new_tokens=2, sampling=sampling, prompt_logprobs=True)
        world.run()
        plain.check_logprobs(range(5, 45), world.prompt_logprobs("c"), 5, first=True)
        for answer in world.answers:
            _exact(answer, plain)
        world.at_rest()


@pytest.mark.parametrize("seed", [1])
def test_random_requests_are_answered_as_by_the_model(
    made: PagedModel, plain: Reference, seed: int
) -> None:
    """Drawn tokens too: a guess is right if it is what is drawn."""
    found = Found()
    run_round(made, plain, seed, found)
    assert found.answers


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [(0, 4), pytest.param(1, 12, marks=pytest.mark.slow)],
)
def test_a_storm_of_conversations_with_few_pages(
    made: PagedModel, plain: Reference, seed: int, rounds: int
) -> None:
    """Pools that evict, aborts, retractions: every token of every answer, every guess, and every
    page that both trees hold."""
    storm = Storm(
        talks=5, rounds=rounds, bursts=(1, 2, 4), more=(1, 5, 17), longest=150, again=0.3,
        answers=(9, 40, 70), steps=30, abort=0.03, logprobs=5,
    )  # fmt: skip
    found = Found()
    with World(
        made, pages=32, page_size=SIZE, prefill_pages=50, chunk_tokens=48,
        decode={"reserve_tokens": 0},
    ) as world:  # fmt: skip
        watch = Watch(world, plain)

        def counted(_: set[str]) -> list[int]:
            stats = world.decode.stats()
            return [stats["retractions"], stats["evicted_pages"], stats["draft_tokens_accepted"]]

        storm.run(world, seed, counted)
        assert all(counted(set()))
        watch.check()
        world.at_rest()
    for answer in world.answers:
        compare(answer, made, plain, found)
    assert found.answers


# --- slots ----------------------------------------------------------------------------------------


def test_a_page_of_a_draft_does_not_depend_on_the_page_behind_it(
    made: PagedModel, plain: Reference
) -> None:
    """Two texts that part behind whole pages have one draft there. Were a slot made of the token
    behind it, as drafts usually have it, the last slot of the shared pages would be two."""
    head = made.draft
    assert head is not None
    shared = np.random.default_rng(1).integers(0, 256, 3 * SIZE).tolist()
    texts = [[*shared, *([token] * 9)] for token in (5, 6)]
    for place in (1, 0):
        kept = []
        for text in texts:
            hidden = hidden_states(plain, text)
            with torch.no_grad():
                if place:
                    k, _, _ = one_pass(plain, head, text)
                else:
                    k, _, _ = plain_draft(head, hidden[:-1], text[1:])
            kept.append(k[: len(shared)])
        apart = (kept[0] - kept[1]).abs().amax((1, 2)) > OFF / 10
        assert apart.nonzero().flatten().tolist() == ([] if place else [len(shared) - 1])


@pytest.mark.parametrize("num", [1, 7, 300])
def test_a_token_that_is_computed_again_is_not_written(made: PagedModel, num: int) -> None:
    """Its page may be another request's, or on its way to decode. Its hidden state is as before."""
    pool = made.make_pool(64, SIZE)
    flat, row = made.flat_pool(pool), np.arange(63, -1, -1, dtype=np.int32)
    tokens = np.random.default_rng(2).integers(0, 256, 16 + num)
    hidden: list[torch.Tensor] = []
    made.forward(flat, tokens[:16], [row], [0], [16], [], hidden=hidden)
    before = pool.read_pages(row[:2])
    made.forward(flat, tokens[15:], [row], [15], [16 + num], [], again=[1], hidden=hidden)
    assert torch.equal(pool.read_pages(row[:2]), before)
    assert float((hidden[1][0] - hidden[0][15]).abs().max()) < 1e-4
    # Control: without `again` it is written, if with nearly the same numbers.
    made.forward(flat, [tokens[15] ^ 1, *tokens[16:]], [row], [15], [16 + num], [])
    assert not torch.equal(pool.read_pages(row[:2]), before)


def test_hidden_states_are_packed_behind_what_else_is_sent(made: PagedModel) -> None:
    head = made.draft
    assert head is not None
    state = torch.randn(head.width, device=DEVICE)
    aux = b"first" + pack_hidden(state, 40)
    rest, found = unpack_hidden(aux, 40, head)
    assert rest == b"first"
    assert found is not None
    assert torch.equal(found, state)
    assert unpack_hidden(aux, 41, head) == (b"first", None)  # of an attempt before
    for short in (b"", aux[: head.width * 4]):
        with pytest.raises(ValueError, match="a hidden state has"):
            unpack_hidden(short, 40, head)


def test_half_precision_guesses_too() -> None:
    model = make_model("qwen3", seed=3, **{**TINY, "dtype": "bfloat16"})
    model.add_draft(seed=5, num_heads=2, num_kv_heads=1, head_dim=32)
    with World(model, page_size=SIZE) as world:
        for number in range(2):
            answer = world.ask(f"{number}", range(30), max_new_tokens=9)
            world.run()
            assert answer.ends[0].finish in ("length", "stop")
        assert world.decode.stats()["draft_tokens"]
        world.at_rest()


# --- pairs ----------------------------------------------------------------------------------------


def _error_of(prefill: PagedModel, decode: PagedModel) -> str:
    with World(decode) as world:
        other = PrefillEngine(prefill, prefill.make_pool(64))
        try:
            world.prefill.close()
            world.prefill = other
            answer = world.ask("r", range(30), max_new_tokens=4)
            world.run()
        finally:
            other.close()
    assert answer.ends[0].finish == "error"
    return str(answer.ends[0].error)


def test_a_pair_of_which_one_has_the_draft_refuses_by_name() -> None:
    one, two, other = (make_model("llama", seed=3, **TINY) for _ in range(3))
    two.add_draft(seed=5)
    other.add_draft(seed=6)
    assert two.draft is not None
    assert other.draft is not None
    for pair in ((one, two), (two, one)):
        error = _error_of(*pair)
        assert "groups[0]" in error
        assert two.draft.name in error
        assert "None" in error
    error = _error_of(two, other)
    assert "groups[0].name" in error
    assert two.draft.name in error
    assert other.draft.name in error


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen3_next", "recurrent layers, whose states a draft cannot go on from"),
        ("gpt_oss", "layers with a window, whose last tokens a draft cannot go on from"),
    ],
)
def test_models_that_go_on_from_checkpoints_have_no_draft(family: str, why: str) -> None:
    model = make_model(config_of(family), seed=3, trial=False)
    with pytest.raises(ConfigError, match=f"draft: the model has {why}"):
        model.add_draft()
    assert model.draft is None


def test_what_a_draft_does_not_go_with_is_refused_by_name(made: PagedModel) -> None:
    with pytest.raises(ConfigError, match="compute: not with a pool of aligned"):
        World(made, decode={"compute": ComputeConfig()})


def test_a_pool_without_the_drafts_group_is_refused(made: PagedModel) -> None:
    plain = make_model("llama", seed=3, **TINY)
    with pytest.raises(ConfigError, match="the pool has no group 'draft "):
        DecodeEngine(made, plain.make_pool(8))
    with pytest.raises(ConfigError, match="groups with windows of"):
        DecodeEngine(plain, made.make_pool(8))


def test_a_hidden_state_that_does_not_fit_its_room_is_refused_at_once(made: PagedModel) -> None:
    control = ControlConfig(max_aux_bytes=500)
    with pytest.raises(ConfigError, match=r"control.max_aux_bytes"):
        PrefillEngine(made, made.make_pool(8), PrefillConfig(control=control))


def test_a_head_has_sizes_that_can_be(made: PagedModel) -> None:
    with pytest.raises(ConfigError, match="head_dim of a draft is 7"):
        DraftHead(made.model, head_dim=7)
    with pytest.raises(ConfigError, match="num_heads"):
        DraftHead(made.model, num_heads=0)
    with pytest.raises(ConfigError, match="num_heads of a draft is 3"):
        DraftHead(made.model, num_heads=3, num_kv_heads=2)


def test_parts_of_several_texts_are_written_at_once(made: PagedModel, plain: Reference) -> None:
    """Several slots of one beside one of another, on pages out of order."""
    head = made.draft
    assert head is not None
    flat = made.flat_pool(made.make_pool(16, SIZE))
    assert flat.draft is not None
    draw = np.random.default_rng(3)
    texts = [draw.integers(0, 256, num).tolist() for num in (20, 9)]
    rows = [np.array(ids, np.int32) for ids in ([7, 2, 9], [4, 0])]
    for firsts, ends in (((0, 0), (12, 8)), ((12, 8), (20, 9))):
        parts = []
        for text, row, first, end in zip(texts, rows, firsts, ends, strict=True):
            hidden = hidden_states(plain, text)
            before = torch.cat([hidden.new_zeros(1, head.width), hidden])[first:end]
            parts.append(DraftPart(row, first, text[first:end], before))
        logits = head.logits(head(flat.draft, parts))
        for text, first, end in zip(texts, firsts, ends, strict=True):
            expected = one_pass(plain, head, text)[2][first:end]
            assert float((logits[: end - first] - expected).abs().max()) < OFF / 10
            logits = logits[end - first :]
