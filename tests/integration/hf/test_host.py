"""A decode engine whose pool holds a tenth of what its clients come back to: the rest is in host
memory. Its answers are those of the model alone, whatever is loaded, computed here, cut off or
retracted meanwhile."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from prefixkv.config import ComputeConfig, HostConfig
from prefixkv.decode.host_tier import HostTier
from prefixkv.engines.hf import PagedModel, Sampling
from tests.integration.hf.test_thinking import OPEN, TOKENIZER
from tests.support.hf_workload import Storm, check_answers
from tests.support.hf_world import BY_SIZE, Reference, World, family

PAGES = 40
HOST = HostConfig(times=40, policy="lru")


def _world(model: PagedModel, below: int | None, **options: Any) -> World:
    decode: dict[str, Any] = {"host_memory": HOST, "reserve_tokens": 4}
    if below is not None:
        decode["compute"] = ComputeConfig(below=below, chunk_tokens=24, itl_share=BY_SIZE)
    decode |= options.pop("decode", {})
    return World(model, decode=decode, prefill_pages=200, **{"pages": PAGES, **options})


def _right(world: World, reference: Reference, aborted: Collection[str] = ()) -> None:
    check_answers(world, reference, aborted)
    for answer in world.answers:
        assert all(end.host_tokens <= end.hit_tokens for end in answer.ends.values())


def _written(world: World) -> None:
    """Until what has ended is in host memory."""
    host = world.decode.node.tier
    assert host is not None
    world.until(lambda: not host.due and not len(host))


@pytest.mark.parametrize("below", [pytest.param(None, marks=pytest.mark.slow), 96])
def test_random_workloads_with_host_memory_are_answered_as_by_the_model_alone(
    model: PagedModel, reference: Reference, below: int | None
) -> None:
    """Bursts that join a load, answers that outgrow the pool, and aborts at any time."""
    storm = Storm(
        talks=12, rounds=16, bursts=(1, 2, 3, 5), more=(5, 30, 60), longest=380, again=0.3,
        answers=(4, 12, 60), steps=40, abort=0.05,
    )  # fmt: skip
    with _world(model, below) as world:

        def counted(aborted: set[str]) -> list[int]:
            stats = world.decode.stats()
            names = ("host_loads", "shared_flights", "retractions", "host_pages_cached")
            return [len(aborted), *(stats[name] for name in names)]

        aborted = storm.run(world, 7, counted)
        _right(world, reference, aborted)
        assert all(counted(aborted)), counted(aborted)
        world.at_rest()


def test_thinking_that_is_left_out_is_not_in_host_memory(
    model: PagedModel, reference: Reference
) -> None:
    """Nor is what stands behind it; what stands before it comes back."""
    prompt = [*range(3 * 16), OPEN]
    with _world(model, None, tokenizer=TOKENIZER, thinking="off") as world:
        first = world.ask("a", prompt, max_new_tokens=48)
        world.run()
        assert first.tokens[0] == reference.greedy(prompt, 48)
        _written(world)
        assert world.decode.stats()["host_pages_cached"] == 3
        # Others need the pool.
        for i in range(8):
            world.ask(f"o{i}", np.full(100, i), max_new_tokens=2)
        world.run()
        for rid, turn in (("b", [*prompt[:-1], *range(9)]), ("c", [*prompt, *first.tokens[0], 7])):
            answer = world.ask(rid, turn, max_new_tokens=5)
            world.run()
            assert answer.tokens[0] == reference.greedy(turn, 5)
        assert world.answers[-2].ends[0].host_tokens == 48
        assert world.answers[-1].ends[0].hit_tokens == 48
        world.at_rest()


def test_prefill_ends_and_what_is_in_host_memory_is_still_of_use(
    model: PagedModel, reference: Reference
) -> None:
    with _world(model, 64, decode={"failure_policy": "local"}) as world:
        draw = np.random.default_rng(3)
        talks = [draw.integers(0, 256, 100).tolist() for _ in range(8)]
        for i, talk in enumerate(talks):
            world.ask(f"{i}.0", talk, max_new_tokens=6, sampling=Sampling(ignore_end=True))
        world.run()
        _written(world)
        talks = [[*talk, *one.tokens[0], *draw.integers(0, 256, 90).tolist()]
                 for talk, one in zip(talks, world.answers, strict=True)]  # fmt: skip
        for i in (0, 1):  # these lack more than is computed here: they are on their way to prefill
            world.ask(f"{i}.1", talks[i], max_new_tokens=6, sampling=Sampling(ignore_end=True))
        world.until(lambda: world.decode.stats()["host_loads"] > 0)
        world.prefill.close()
        for i in range(2, 8):
            world.ask(f"{i}.1", talks[i], max_new_tokens=6, sampling=Sampling(ignore_end=True))
        world.run_without_prefill()
        _right(world, reference)
        later = [answer.ends[0] for answer in world.answers[8:]]
        assert sum(one.host_tokens for one in later) > 5 * 96
        assert world.decode.stats()["computed_requests"] == 8
        world.decode.audit()


# --- models whose layers do not all keep everything -----------------------------------------------


@pytest.mark.parametrize(
    ("kind", "below"),
    [
        ("gemma3_text", None),
        ("granitemoehybrid", None),
        pytest.param("gpt_oss", 64, marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", 64, marks=pytest.mark.slow),
    ],
)
def test_what_other_layers_keep_is_sent_with_what_is_loaded(
    kind: str, below: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and states are not in host memory. Log-probabilities tell what
    is slightly wrong where tokens do not."""
    monkeypatch.setattr(HostTier, "load_s", lambda *_: 0.0)
    made, reference = family(kind)
    draw = np.random.default_rng(1)
    with _world(made, below, pages=22) as world:
        talks = [draw.integers(0, 256, 60 + i).tolist() for i in range(6)]
        # In the last turn, of three alone, the answers outgrow the pool.
        for turn, num, num_tokens, at_once in ((0, 6, 6, 2), (1, 6, 6, 2), (2, 3, 70, 3)):
            for at in range(0, num, at_once):
                answers = {
                    i: world.ask(
                        f"{i}.{turn}", talks[i], max_new_tokens=num_tokens,
                        sampling=Sampling(ignore_end=True, logprobs=5),
                    )
                    for i in range(at, at + at_once)
                }  # fmt: skip
                world.run()
                for i, answer in answers.items():
                    talks[i] = [*talks[i], *answer.tokens[0], *draw.integers(0, 256, 20).tolist()]
                _written(world)
            world.decode.audit()
        stats = world.decode.stats()
        _right(world, reference)
        assert stats["host_hit_tokens"] > 300
        assert stats["evicted_pages"] > 20
        assert stats["retractions"] > 0
        assert (stats["computed_requests"] > 0) == (below is not None)
        world.at_rest()
