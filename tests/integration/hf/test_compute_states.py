"""Models with recurrent layers, and with windows, whose decode worker computes prompts itself, from
checkpoints of its own, and goes on with retracted answers without prefill: every token is the
model's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.hybrid_models import WINDOWED
from prefixkv.config import ComputeConfig
from prefixkv.engines.hf import PagedModel, Sampling
from tests.integration.hf import test_recurrent, test_windows
from tests.support.hf_workload import Found, Storm, compare
from tests.support.hf_world import Reference, World
from tests.support.patience import until

ALL = 10_000
_FAMILIES = (*test_recurrent.SERVED, *WINDOWED)


def _made(family: str) -> tuple[PagedModel, Reference]:
    module = test_windows if family in WINDOWED else test_recurrent
    return module._made(family)


_SAMPLING = Sampling(ignore_end=True, logprobs=20)


def _world(made: PagedModel, below: int, **options: Any) -> World:
    chunk = options.pop("chunk", 24)
    # However fast it is here, all prompts go on in each step.
    compute = ComputeConfig(below=below, chunk_tokens=chunk, itl_share=100.0)
    more = options.pop("decode", {})
    return World(made, page_size=8, decode={"compute": compute, **more}, **options)


@pytest.fixture(params=_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


_MOST = pytest.mark.parametrize(
    ("family", "below"), list(zip(_FAMILIES, (64, ALL, ALL, 64, ALL), strict=True))
)


@_MOST
def test_turns_go_on_from_the_checkpoints_that_answers_leave(family: str, below: int) -> None:
    """Of the first prompt prefill sends whole pages, or all of it: of 90, 97 and 104 tokens. The
    second talk has short answers; the others go on without them, as where a model's thinking is
    left out."""
    made, reference = _made(family)
    found = Found()
    draw = np.random.default_rng(below)
    with _world(made, below, pages=160, prefill_pages=160) as world:
        talks = [draw.integers(0, 256, 90 + 7 * i).tolist() for i in range(3)]
        for turn in range(4):
            before = world.decode.stats()["computed_tokens"]
            answers = [world.ask(f"{i}.{turn}", talk, max_new_tokens=(11, 3, 11)[i],
                                 sampling=_SAMPLING) for i, talk in enumerate(talks)]  # fmt: skip
            world.run()
            computed = world.decode.stats()["computed_tokens"] - before
            for i, answer in enumerate(answers):
                compare(answer, made, reference, found)
                more = draw.integers(0, 256, 20).tolist()
                talks[i] = [*talks[i], *(answer.tokens[0] if i == 1 else ()), *more]
            if turn:
                # What is new is the end of what was kept, and what was said: less than a page, and
                # 20, and a short answer.
                assert computed <= 3 * (20 + 8)
                assert all(answer.ends[0].hit_tokens >= 88 for answer in answers)
            elif below < ALL:
                assert computed == 90 % 8 + 97 % 8, "behind what was sent"
        stats = world.decode.stats()
        expected = {64: 3, ALL: 0}[below]
        assert world.prefill.stats()["sent"] == expected
        assert stats["computed_requests"] == 12 - expected
        assert stats["cut_tokens"] == 0
        world.at_rest()
    assert found.answers == 12


@_MOST
def test_a_retracted_answer_goes_on_without_prefill(family: str, below: int) -> None:
    """Two answers grow until the pool lacks a page: one leaves it to the other, and goes on from
    its newest token, and from the state that it had at its last page boundary."""
    made, reference = _made(family)
    found = Found()
    with _world(made, below, pages=19, prefill_pages=40, decode={"reserve_tokens": 0}) as world:
        for number in range(2):
            world.ask(f"{number}", range(number, number + 20), max_new_tokens=60,
                      sampling=_SAMPLING)  # fmt: skip
        world.run()
        for answer in world.answers:
            compare(answer, made, reference, found)
        stats = world.decode.stats()
        assert stats["retractions"] > 0
        assert world.prefill.stats()["sent"] == 0
        # Each goes on from less than a page before where it was.
        assert stats["computed_tokens"] <= 40 + 8 * stats["retractions"]
        world.at_rest()
    assert found.answers == 2


def test_a_small_storm() -> None:
    _storm("granitemoehybrid", 5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
def test_a_storm_of_conversations_with_few_slots_and_pages(family: str) -> None:
    _storm(family, 6)


def _storm(family: str, rounds: int, seed: int = 0) -> None:
    """Some prompts computed here, of which the first do not ask what that takes, and some sent, the
    longest ones without a hit; pools that evict, fewer checkpoints than
    conversations, aborts, retractions: every token of every answer."""
    made, reference = _made(family)
    storm = Storm(
        talks=6, rounds=rounds, bursts=(1, 2, 4), more=(1, 5, 17, 60), longest=200, again=0.3,
        answers=(9, 30, 50), steps=30, abort=0.03, logprobs=20,
    )  # fmt: skip
    found = Found()
    with _world(
        made, 150, pages=36, prefill_pages=60, chunk_tokens=48, prefill={"checkpoints": 4},
        decode={"max_running": 5, "reserve_tokens": 0, "checkpoints": 3},
    ) as world:  # fmt: skip

        def counted(aborted: set[str]) -> list[int]:
            stats = world.decode.stats()
            names = ("retractions", "skipped_tokens", "computed_requests")
            return [world.prefill.stats()["sent"], *(stats[name] for name in names)]

        aborted = storm.run(world, seed, counted)
        assert all(counted(aborted)), counted(aborted)
        for answer in world.answers:
            compare(answer, made, reference, found)
        world.at_rest()
    assert found.answers > rounds
    assert found.near_ties <= 1


def test_prefill_ends_and_every_answer_is_right(family: str) -> None:
    """What is on its way, what waits, and what comes afterwards: next turns among it."""
    made, reference = _made(family)
    found = Found()
    with _world(made, 32, pages=160, prefill_pages=160,
                decode={"failure_policy": "local"}) as world:  # fmt: skip
        draw = np.random.default_rng(1)
        prompts = [draw.integers(0, 256, 60).tolist() for _ in range(5)]
        for i, prompt in enumerate(prompts[:3]):
            world.ask(f"r{i}", prompt, max_new_tokens=20, sampling=_SAMPLING)
        world.until(lambda: len(world.answers[0].tokens.get(0, ())) > 3)
        world.ask("lost", prompts[3], max_new_tokens=6, sampling=_SAMPLING)
        world.prefill.close()

        def step() -> None:
            for one in world.decode.take_prefill_jobs():
                world.decode.give_up_job(one, "prefill has gone")
            if not world.decode.step():
                world.decode.wait(0.005)

        until(lambda: all(answer.done for answer in world.answers), step=step)
        before = world.decode.stats()["computed_tokens"]
        first = world.answers[0]
        talk = [*prompts[0], *first.tokens[0], 1, 2, 3]
        later = world.ask("later", talk, max_new_tokens=6, sampling=_SAMPLING)
        until(lambda: later.done, step=step)
        assert world.decode.stats()["computed_tokens"] - before <= 3 + 8
        new = world.ask("new", prompts[4], max_new_tokens=6, sampling=_SAMPLING)
        until(lambda: new.done, step=step)
        for answer in world.answers:
            compare(answer, made, reference, found)
        assert world.decode.stats()["failovers"] >= 1
        world.decode.audit()
