"""Log-probabilities over real workers, and by OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import ApiError
from prefixkv.serving.wire import Ask, Logprob, SamplingParams
from tests.engines.serving.test_worker import KEY, PROMPT, info_of, said
from tests.models.patience import PATIENCE_S
from tests.models.served import Expected, Served


def ask(rid: str, tokens: list[int], num: int, **more: Any) -> Ask:
    how = SamplingParams(ignore_end=True, logprobs=more.pop("logprobs", 3))
    return Ask(rid, tokens, "", "", num, sampling=how, **more)


NEAR = 1e-4  # float32, and sums in another order


def check_one(one: Logprob | None, token: int, row: Any, num_top: int) -> None:
    """One position against the model's own distribution there."""
    assert one is not None
    assert one.token == token
    assert len({other for other, _ in one.top}) == len(one.top) == num_top
    for other, number in ((one.token, one.logprob), *one.top):
        assert abs(number - row[other]) < NEAR
    best = sorted(row, reverse=True)[:num_top]
    assert all(abs(a - b) < NEAR for a, (_, b) in zip(best, one.top, strict=True))


async def check(fleet: Fleet, expected: Expected, asked: Ask) -> None:
    """All that a fleet says of a request is what the model says by itself."""
    events = await said(fleet, asked)
    num_top = asked.sampling.logprobs
    assert num_top is not None
    # The prompt's, all of them and first.
    num = sum(event.prompt is not None for event in events)
    assert all(event.prompt is not None for event in events[:num])
    assert bool(num) == asked.prompt_logprobs
    prompt = [one for event in events[:num] for one in event.prompt or ()]
    if asked.prompt_logprobs:
        assert len(prompt) == len(asked.tokens)
        assert prompt[0] is None
        rows = expected.logprobs(asked.tokens)
        for token, one, row in zip(asked.tokens[1:], prompt[1:], rows, strict=False):
            check_one(one, token, row, num_top)
    for sample in range(asked.num_samples):
        of = [event for event in events[num:] if event.sample == sample]
        tokens = [event.token for event in of if event.token is not None]
        assert tokens == expected.tokens(asked.tokens, asked.max_new_tokens)
        assert [event.position for event in of] == list(range(asked.max_new_tokens))
        rows = expected.logprobs([*asked.tokens, *tokens])[len(asked.tokens) - 1 :]
        for event, row in zip(of, rows, strict=False):
            check_one(event.logprob, event.token or 0, row, num_top)


def test_workers_give_those_of_answers_and_prompts(expected: Expected) -> None:
    options = ("--page-size", "8", "--threads", "1")
    with (
        Served("worker", "decode", "--name", "d", *options, **KEY) as decode,
        Served("worker", "prefill", "--name", "p", "--chunk-tokens", "16", *options, **KEY) as pre,
    ):
        infos = info_of(decode), info_of(pre)

        async def main() -> None:
            fleet = Fleet("secret")
            for info in infos:
                fleet.add(info)
            # Cold; hit on both sides; two at once, with samples that join a flight.
            await check(fleet, expected, ask("one", PROMPT, 6))
            await check(fleet, expected, ask("two", PROMPT, 6, prompt_logprobs=True))
            long = [*range(256, 500), *range(256, 400)]
            both = [
                ask(f"long {i}", long, 4, prompt_logprobs=True, num_samples=2, logprobs=i)
                for i in range(2)
            ]
            await asyncio.gather(*(check(fleet, expected, one) for one in both))
            await check(fleet, expected, ask("one token", [300], 1, prompt_logprobs=True))
            wrong = ask("wrong", PROMPT, 1, prompt_logprobs=True, logprobs=None)
            with pytest.raises(ApiError, match=r"need sampling\.logprobs") as raised:
                await said(fleet, wrong)
            assert raised.value.status == 400
            # A client that leaves while its prompt is computed: prefill is told, and rests.
            for i in range(3):
                stream = fleet.generate(ask(f"left {i}", long * 5, 4, prompt_logprobs=True))
                task = asyncio.create_task(anext(stream))
                await asyncio.sleep(0.02 * i)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await stream.aclose()
            await check(fleet, expected, ask("after", PROMPT, 6, prompt_logprobs=True))
            async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}) as client:
                for info in infos:
                    assert (await client.post(f"{info.url}/audit")).status_code == 204
            await fleet.close()

        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
