"""What clients of other engines and of OpenAI send, to a real server: parameters, several prompts
in one call, histories with tools, ids of requests."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Serve, ask_and_leave, at_rest, under_way

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Once upon a time"}]
GOOD: dict[str, Any] = {"model": "small", "max_tokens": 4, "temperature": 0}
TEXTS = ["Once upon", "a time", "there was"]


@pytest.fixture(scope="module")
def http(serve: Serve) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve.url.removesuffix("/v1"), timeout=PATIENCE_S) as client:
        yield client


def said(http: httpx.Client, path: str = CHAT, **more: Any) -> dict[str, Any]:
    base = {**GOOD, "messages": HELLO} if path == CHAT else GOOD
    answer = http.post(path, json={**base, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, path: str = CHAT, **more: Any) -> list[dict[str, Any]]:
    base = {**GOOD, "messages": HELLO} if path == CHAT else GOOD
    answer = http.post(path, json={**base, "stream": True, **more})
    assert answer.status_code == 200, answer.text
    *found, done = [one.removeprefix("data: ") for one in answer.text.split("\n\n")[:-1]]
    assert done == "[DONE]"
    return [json.loads(one) for one in found]


# --- several prompts ------------------------------------------------------------------------------


def test_several_prompts_are_answered_in_their_order(
    serve: Serve, http: httpx.Client, expected: Expected
) -> None:
    lists = [expected.texts.plain(text) for text in TEXTS]
    wanted = [expected.text(expected.tokens(tokens, 4)) for tokens in lists]
    for prompt in (TEXTS, lists):
        made = said(http, "/v1/completions", prompt=prompt, n=2)
        choices = made["choices"]
        assert [choice["index"] for choice in choices] == [*range(6)]
        assert [choice["text"] for choice in choices] == [one for one in wanted for _ in range(2)]
        usage = made["usage"]
        assert usage["prompt_tokens"] == sum(map(len, lists))
        assert usage["completion_tokens"] == 6 * 4
    assert said(http, "/v1/completions", prompt=TEXTS[:1])["choices"][0]["text"] == wanted[0]
    texts = [""] * 3
    for event in events(http, "/v1/completions", prompt=TEXTS):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == wanted
    at_rest(serve)


def test_all_prompts_end_where_their_client_leaves(serve: Serve, http: httpx.Client) -> None:
    name = 'prefixkv_front_requests_total{outcome="aborted"}'
    before = serve.figures().get(name, 0)
    body = {**GOOD, "prompt": TEXTS, "n": 2, "max_tokens": 3000, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    until(lambda: serve.figures().get(name, 0) == before + 1)
    at_rest(serve)
    # One is still being computed: 3,400 tokens, 64 at a time.
    body["prompt"] = [*TEXTS, "".join(f"{i % 10}" for i in range(3400))]
    body["max_tokens"] = 600
    ask_and_leave(serve, "/completions", body, lambda: under_way(serve))
    until(lambda: serve.figures().get(name, 0) == before + 2)
    at_rest(serve)
    figures = serve.figures("decode-0")
    assert figures['prefixkv_oldest_lock_age_seconds{node="decode-0"}'] == 0


# --- parameters -----------------------------------------------------------------------------------


def test_an_answer_has_its_least_tokens(http: httpx.Client, expected: Expected) -> None:
    """Whatever would end it: its own first token as a stop token, or all the text that it says."""
    first = expected.tokens(expected.texts.chat(HELLO), 1)[0]
    made = said(http, stop_token_ids=[first])
    assert made["choices"][0]["finish_reason"] == "stop"
    assert made["usage"]["completion_tokens"] == 1
    made = said(http, stop_token_ids=[first], min_tokens=3, max_tokens=3)
    assert made["choices"][0]["finish_reason"] == "length"
    assert made["usage"]["completion_tokens"] == 3
    assert said(http, stop=[" "])["usage"]["completion_tokens"] == 1
    made = said(http, stop=[" "], min_tokens=3, max_tokens=9)
    assert made["choices"][0]["finish_reason"] == "stop"
    assert made["usage"]["completion_tokens"] == 4
    text = expected.chat(HELLO, 3)
    assert made["choices"][0]["message"]["content"] == text


# --- ids ------------------------------------------------------------------------------------------


def test_requests_of_one_id_do_not_meet(http: httpx.Client, client: openai.OpenAI) -> None:
    """Two at once: each is answered, by an id of its own on the workers."""
    headers = {"x-request-id": "same"}
    kept = {**GOOD, "messages": HELLO, "stream": True, "max_tokens": 500, "ignore_eos": True}
    with http.stream("POST", CHAT, json=kept, headers=headers) as first:
        lines = first.iter_lines()
        one = json.loads(next(lines).removeprefix("data: "))
        other = client.chat.completions.create(
            model="small", messages=HELLO, max_tokens=4, extra_headers=headers
        )
        assert other.id != one["id"]
        assert other.id.startswith("chatcmpl-same-")
