"""Where the KV of a prompt came from, as an answer's `usage` says it: of each prompt the parts add
up, and nothing is said of prefill that it has not done."""

from typing import Any

import numpy as np
import pytest

from prefixkv.config import ComputeConfig, HostConfig
from prefixkv.engines.hf import Output, PagedModel, Sampling
from prefixkv.serving.openai import Usage
from tests.support.hf_world import BY_SIZE, Answer, World

ALL = {"compute": ComputeConfig(below=10_000, chunk_tokens=24, itl_share=BY_SIZE)}
SOME = {"compute": ComputeConfig(below=40, chunk_tokens=24)}
HOST = {"host_memory": HostConfig(times=8, policy="lru")}


def usage_of(answer: Answer, end: Output) -> dict[str, int]:
    usage = Usage(len(answer.ask.tokens))
    usage.add_prompt(len(answer.ask.tokens), end)
    parts: dict[str, int] = usage.body()["prefixkv"]
    names = ("decode_hit_tokens", "shared_tokens", "decode_computed_tokens", "sent_tokens")
    assert sum(parts[name] for name in names) == len(answer.ask.tokens)
    assert min(parts.values()) >= 0
    assert parts["decode_host_tokens"] <= parts["decode_hit_tokens"]
    here = parts["decode_computed_tokens"] + parts["prefill_hit_tokens"]
    if parts["sent_tokens"]:
        assert here + parts["computed_tokens"] == len(answer.ask.tokens)
    else:
        assert parts["computed_tokens"] == parts["prefill_hit_tokens"] == 0
    return parts


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("decode", [{}, SOME, ALL, {**ALL, **HOST}, HOST])
def test_the_parts_of_a_prompt_are_what_was_computed_and_sent(
    model: PagedModel, decode: dict[str, Any], num_samples: int
) -> None:
    draw = np.random.default_rng(0)
    from_host = 0
    with World(model, decode=decode, pages=20, prefill_pages=300) as world:
        talks = [draw.integers(0, 256, 70).tolist() for _ in range(3)]
        for turn in range(3):
            for i, talk in enumerate(talks):
                before = world.prefill.stats(), world.decode.stats()
                answer = world.ask(f"{i}.{turn}", talk, max_new_tokens=5, num_samples=num_samples,
                                   sampling=Sampling(ignore_end=True))  # fmt: skip
                world.run()
                after = world.prefill.stats(), world.decode.stats()
                parts = [usage_of(answer, end) for end in answer.ends.values()]
                computed = sum(one["computed_tokens"] for one in parts)
                assert computed == after[0]["computed_tokens"] - before[0]["computed_tokens"]
                here = sum(one["decode_computed_tokens"] for one in parts)
                assert here == after[1].get("computed_tokens", 0) - before[1].get(
                    "computed_tokens", 0
                )
                sent = after[0]["sent"] - before[0]["sent"]
                assert sum(one["sent_tokens"] > 0 for one in parts) == sent
                from_host += parts[0]["decode_host_tokens"]
                talk += [*answer.tokens[0], *draw.integers(0, 256, 20).tolist()]
    assert bool(from_host) == ("host_memory" in decode)


def test_what_a_lost_transfer_was_to_bring_and_decode_computes(model: PagedModel) -> None:
    decode = {"compute": ComputeConfig(below=0, chunk_tokens=24), "failure_policy": "local"}
    with World(model, decode=decode) as world:
        first = world.ask("first", range(40), max_new_tokens=3)
        second = world.ask("second", range(70), max_new_tokens=3)  # joins, and has to compute alone
        world.run_without_prefill()
        for answer in (first, second):
            parts = usage_of(answer, answer.ends[0])
            assert parts["sent_tokens"] == 0
            assert parts["decode_computed_tokens"] > 0


def test_of_a_request_that_was_retracted_the_parts_are_those_of_its_first_token(
    model: PagedModel,
) -> None:
    draw = np.random.default_rng(1)
    with World(model, decode={**ALL, "reserve_tokens": 4}, pages=24, prefill_pages=300) as world:
        for i in range(4):
            world.ask(f"r{i}", draw.integers(0, 256, 60), max_new_tokens=60,
                      sampling=Sampling(ignore_end=True))  # fmt: skip
        world.run()
        assert world.decode.stats()["retractions"] > 0
        for answer in world.answers:
            assert usage_of(answer, answer.ends[0])["decode_computed_tokens"] == 60
