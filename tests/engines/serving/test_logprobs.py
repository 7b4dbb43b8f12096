"""Log-probabilities over real workers, and by OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import httpx
import openai
import pytest

from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import ApiError
from prefixkv.serving.wire import Ask, Logprob, SamplingParams
from tests.engines.serving.conftest import KEY as KEY_OF_CLIENTS
from tests.engines.serving.test_worker import KEY, PROMPT, info_of, said
from tests.models.patience import PATIENCE_S, until
from tests.models.served import Expected, Serve, Served, at_rest, client_of


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


# --- by OpenAI's client ---------------------------------------------------------------------------

TEXT = "kaka tono mumu"
GREEDY = {"model": "small", "temperature": 0, "extra_body": {"ignore_eos": True}}


def check_legacy(
    expected: Expected, choice: Any, num_top: int, num: int, echo: bool, text: str = TEXT
) -> None:
    """A completion's log-probabilities against the model by itself."""
    prompt = expected.texts.plain(text)
    said = expected.tokens(prompt, max(num, 1))[:num]
    tokens = [*prompt, *said]
    rows = [None, *expected.logprobs(tokens)]
    begin = 0 if echo else len(prompt)
    found = choice.logprobs
    assert choice.text == expected.text(tokens[begin:])
    assert "".join(found.tokens) == choice.text
    assert len(found.token_logprobs) == len(tokens) - begin
    columns = (found.token_logprobs, found.top_logprobs, found.tokens, found.text_offset)
    for at, (number, top, name, place) in enumerate(zip(*columns, strict=True), start=begin):
        assert choice.text[place : place + len(name)] == name
        if at == 0:
            assert number is top is None
            continue
        assert abs(number - rows[at][tokens[at]]) < NEAR
        assert top[name] == number
        assert num_top <= len(top) <= num_top + 1 or num_top > 1
        # As scorers do it: the greedy token is the one whose number is the largest.
        if num_top:
            assert (number == max(top.values())) == (rows[at].argmax() == tokens[at])


def test_completions_have_them(client: Any, expected: Expected) -> None:
    for num_top in (0, 1, 5):
        for echo, num in ((False, 6), (True, 6), (True, 1)):
            answer = client.completions.create(
                prompt=TEXT, max_tokens=num, logprobs=num_top, echo=echo, **GREEDY
            )
            check_legacy(expected, answer.choices[0], num_top, num, echo)
            assert answer.usage.completion_tokens == num
            pieces = list(
                client.completions.create(
                    prompt=TEXT, max_tokens=num, logprobs=num_top, echo=echo, stream=True, **GREEDY
                )
            )
            choice = answer.choices[0]
            assert "".join(one.choices[0].text for one in pieces) == choice.text
            parts = [one.choices[0].logprobs for one in pieces if one.choices[0].logprobs]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [x for part in parts for x in getattr(part, name)]
                if name in ("tokens", "text_offset"):
                    assert joined == getattr(choice.logprobs, name)
                assert len(joined) == len(choice.logprobs.tokens)


def test_a_scorer_gets_the_prompts_of_a_batch_without_answers(
    client: Any, expected: Expected
) -> None:
    """As lm-eval's `local-completions` asks."""
    texts = [TEXT, "tono", TEXT + " mumu"]
    prompts = [expected.texts.plain(text) for text in texts]
    for num in (0, 1):
        answer = client.completions.create(
            prompt=prompts, max_tokens=num, logprobs=1, echo=True, seed=1, **GREEDY
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice, text in zip(answer.choices, texts, strict=True):
            check_legacy(expected, choice, 1, num, True, text)
            assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == num * 3
    plain = client.completions.create(prompt=TEXT, max_tokens=0, echo=True, n=2, **GREEDY)
    assert [(one.text, one.logprobs) for one in plain.choices] == [(TEXT, None)] * 2


def test_chats_have_them(client: Any, expected: Expected) -> None:
    messages = [{"role": "user", "content": TEXT}]
    prompt = expected.texts.chat(messages)
    said = expected.tokens(prompt, 6)
    rows = expected.logprobs([*prompt, *said])[len(prompt) - 1 :]
    asked = {"messages": messages, "max_tokens": 6, "logprobs": True, **GREEDY}
    for more in ({}, {"top_logprobs": 4}):
        num_top = more.get("top_logprobs", 0)
        answer = client.chat.completions.create(n=2, **asked, **more)
        stream = client.chat.completions.create(stream=True, **asked, **more)
        parts = [one.choices[0].logprobs for one in stream if one.choices]
        streamed = [entry for part in parts if part for entry in part.content]
        for content in (*(choice.logprobs.content for choice in answer.choices), streamed):
            assert len(content) == 6
            for entry, token, row in zip(content, said, rows, strict=False):
                assert (
                    bytes(entry.bytes).decode()
                    == entry.token
                    == expected.texts.tokenizer.decode([token], skip_special_tokens=False)
                )
                assert abs(entry.logprob - row[token]) < NEAR
                assert len(entry.top_logprobs) == num_top
    plain = client.chat.completions.create(messages=messages, max_tokens=2, **GREEDY)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat/completions", {"logprobs": 3}, "logprobs"),
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(
    serve: Any, path: str, wrong: dict[str, Any], param: str
) -> None:
    body = {"model": "small", "max_tokens": 2} | wrong
    body |= (
        {"prompt": TEXT}
        if path == "completions"
        else {"messages": [{"role": "user", "content": TEXT}]}
    )
    answer = httpx.post(f"{serve.url}/{path}", json=body, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


# --- a prefill worker that is lost ----------------------------------------------------------------


@pytest.mark.parametrize("num_prefill", [1, 2])
def test_prefill_is_killed_while_the_log_probabilities_of_a_prompt_come(
    num_prefill: int, request: pytest.FixtureRequest, expected: Expected
) -> None:
    """Nothing hangs, no page is kept, and the client gets them all, or is told what is missing."""
    num, streams = (0, True) if num_prefill == 1 else (4, False)
    names = [f"prefill-{number}" for number in range(num_prefill)]
    more = ("--chunk-tokens", "64", "--prefill", "2", "--api-key", KEY_OF_CLIENTS)
    served = nullcontext(request.getfixturevalue("guarded")) if num_prefill == 1 else Serve(*more)
    with (
        served as serve,
        client_of(serve, KEY_OF_CLIENTS) as client,
        ThreadPoolExecutor(1) as pool,
    ):

        def score(tokens: list[int], num: int) -> list[float | None]:
            made = client.completions.create(
                prompt=tokens, max_tokens=num, logprobs=1, echo=True, stream=streams, **GREEDY
            )
            pieces = list(made) if streams else [made]
            parts = [choice.logprobs for piece in pieces for choice in piece.choices]
            return [number for part in parts if part for number in part.token_logprobs]

        def check(numbers: list[float | None], tokens: list[int]) -> None:
            rows = expected.logprobs(tokens)
            assert numbers[0] is None
            for number, token, row in zip(numbers[1:], tokens[1:], rows, strict=False):
                assert number is not None
                assert abs(number - row[token]) < NEAR
            assert len(numbers) == len(tokens)

        def sent_bytes(name: str) -> float:
            return serve.figures(name).get(f'prefixkv_sent_bytes_total{{node="{name}"}}', 0)

        def sending() -> list[str]:
            return [name for name in names if sent_bytes(name) > before[name]]

        for number in range(20):  # one may have ended before this process looks
            prompt = [300 + (number + i) % 100 for i in range(3400)]  # 54 chunks
            before = {name: sent_bytes(name) for name in names}
            waiting = pool.submit(score, prompt, num)
            until(lambda: bool(sending()))
            (name,) = sending()
            pid = serve.workers()[name]["pid"]
            os.kill(pid, signal.SIGSTOP)
            if not waiting.done():
                break
            os.kill(pid, signal.SIGCONT)
        else:
            raise AssertionError("each has ended before the kill")
        os.kill(pid, signal.SIGKILL)
        error = waiting.exception(timeout=PATIENCE_S)
        if num_prefill == 1:  # none is left to ask, unless the next has started already
            if error is not None:
                assert isinstance(error, openai.APIError)
                assert "prefill" in str(error)
        else:
            assert error is None
        if error is None:
            check(waiting.result(), [*prompt, *(expected.tokens(prompt, num) if num else ())])
        until(lambda: serve.workers().get(name, {"pid": pid})["pid"] != pid)
        at_rest(serve)
        check(score(prompt[:300], 0), prompt[:300])
        at_rest(serve)
