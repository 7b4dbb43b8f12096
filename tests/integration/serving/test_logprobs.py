"""Log-probabilities over real workers, and by OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from prefixkv.serving.fleet import Fleet
from prefixkv.serving.wire import Ask, Logprob, SamplingParams
from tests.integration.serving.test_worker import KEY, PROMPT, info_of, said
from tests.support.patience import PATIENCE_S
from tests.support.served import Expected, Served


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
    for sample in range(asked.num_samples):
        of = [event for event in events if event.sample == sample]
        tokens = [event.token for event in of if event.token is not None]
        assert tokens == expected.tokens(asked.tokens, asked.max_new_tokens)
        assert [event.position for event in of] == list(range(asked.max_new_tokens))
        rows = expected.logprobs([*asked.tokens, *tokens])[len(asked.tokens) - 1 :]
        for event, row in zip(of, rows, strict=False):
            check_one(event.logprob, event.token or 0, row, num_top)


def test_workers_give_those_of_answers(expected: Expected) -> None:
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
            await check(fleet, expected, ask("two", PROMPT, 6))
            long = [*range(256, 500), *range(256, 400)]
            both = [ask(f"long {i}", long, 4, num_samples=2, logprobs=i) for i in range(2)]
            await asyncio.gather(*(check(fleet, expected, one) for one in both))
            await check(fleet, expected, ask("one token", [300], 1))
            async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}) as client:
                for info in infos:
                    assert (await client.post(f"{info.url}/audit")).status_code == 204
            await fleet.close()

        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


# --- by OpenAI's client ---------------------------------------------------------------------------

TEXT = "kaka tono mumu"
GREEDY = {"model": "small", "temperature": 0, "extra_body": {"ignore_eos": True}}


def check_legacy(expected: Expected, choice: Any, num_top: int, num: int) -> None:
    """A completion's log-probabilities against the model by itself."""
    prompt = expected.texts.plain(TEXT)
    said = expected.tokens(prompt, num)
    rows = expected.logprobs([*prompt, *said])[len(prompt) - 1 :]
    found = choice.logprobs
    assert choice.text == expected.text(said)
    assert "".join(found.tokens) == choice.text
    columns = (found.token_logprobs, found.top_logprobs, found.tokens, found.text_offset)
    assert {len(column) for column in columns} == {num}
    for (number, top, name, place), token, row in zip(
        zip(*columns, strict=True), said, rows, strict=False
    ):
        assert choice.text[place : place + len(name)] == name
        assert abs(number - row[token]) < NEAR
        assert top[name] == number
        assert num_top <= len(top) <= num_top + 1 or num_top > 1
        # As scorers do it: the greedy token is the one whose number is the largest.
        if num_top:
            assert (number == max(top.values())) == (row.argmax() == token)


def test_completions_have_them(client: Any, expected: Expected) -> None:
    for num_top in (0, 1, 5):
        for num in (6, 1):
            how = {"prompt": TEXT, "max_tokens": num, "logprobs": num_top, **GREEDY}
            answer = client.completions.create(**how)
            check_legacy(expected, answer.choices[0], num_top, num)
            assert answer.usage.completion_tokens == num
            pieces = list(client.completions.create(stream=True, **how))
            choice = answer.choices[0]
            assert "".join(one.choices[0].text for one in pieces) == choice.text
            parts = [one.choices[0].logprobs for one in pieces if one.choices[0].logprobs]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [x for part in parts for x in getattr(part, name)]
                if name in ("tokens", "text_offset"):
                    assert joined == getattr(choice.logprobs, name)
                assert len(joined) == len(choice.logprobs.tokens)


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
        ("completions", {"echo": True}, "echo"),
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
