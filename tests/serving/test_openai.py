"""What is taken of OpenAI's interface, what is refused and how, and the bodies that are sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixkv.serving.http import ApiError
from prefixkv.serving.openai import (
    Answers,
    ChatRequest,
    CompletionRequest,
    Usage,
    parse,
)
from prefixkv.serving.wire import SamplingParams

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**more: Any) -> ChatRequest:
    return parse(json.dumps({"model": "m", "messages": HELLO, **more}).encode(), ChatRequest)


def refusal(body: bytes, kind: Any = ChatRequest) -> dict[str, Any]:
    with pytest.raises(ApiError) as raised:
        parse(body, kind)
    assert raised.value.status == 400
    told = raised.value.body()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert told["type"] == "invalid_request_error"
    return told


def refused(**more: Any) -> tuple[str, str]:
    told = refusal(json.dumps({"model": "m", "messages": HELLO, **more}).encode())
    return told["param"], told["code"]


def test_what_is_left_out_is_as_with_openai() -> None:
    asked = chat()
    assert asked.sampling() == SamplingParams(temperature=1.0)
    assert (asked.num_samples, asked.streams, asked.most_tokens) == (1, False, None)
    plain = parse(b'{"model": "m", "prompt": [1, 2]}', CompletionRequest)
    assert (plain.prompt, plain.most_tokens) == ([1, 2], 16)


def test_what_is_said_becomes_how_tokens_are_chosen() -> None:
    asked = chat(
        temperature=0.5, top_k=7, top_p=0.9, seed=-1, stop="end", ignore_eos=True, n=3,
        max_tokens=5, max_completion_tokens=6, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert asked.sampling() == SamplingParams(0.5, 7, 0.9, 2**64 - 1, (), True, ("end",))
    assert (asked.num_samples, asked.most_tokens, asked.streams_usage) == (3, 6, True)
    assert chat(top_k=-1, stop=["a", "b"]).sampling().stop == ("a", "b")
    assert chat(top_k=-1).sampling().top_k == 0


def test_what_asks_for_nothing_is_taken_and_what_is_not_served_is_refused_by_name() -> None:
    chat(logprobs=False, tools=[], presence_penalty=0, response_format=None, user="u")
    for name, value in (
        ("logprobs", True), ("tools", [{"type": "function"}]), ("presence_penalty", 0.5),
        ("response_format", {"type": "json_object"}), ("logit_bias", {"5": 1}),
    ):  # fmt: skip
        assert refused(**{name: value}) == (name, "unsupported_parameter")
    assert refused(beams=2) == ("beams", "unknown_parameter")
    assert refusal(b'{"model": "m"}')["param"] == "messages"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -5), ("max_completion_tokens", -1), ("n", 0),
        ("n", 129), ("temperature", -0.1), ("top_p", 0), ("top_p", 1.1), ("top_k", -2),
        ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 17), ("cache_salt", ""),
        ("stream_options", {"include_usage": True}), ("seed", 2**64),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value}) == (name, "invalid_value")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": True}, "n"), ({"stream": 1}, "stream"), ({"model": None}, "model"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1]"),
    ],
)  # fmt: skip
def test_what_has_the_wrong_type_is_refused_where_it_stands(more: Any, param: str) -> None:
    told = refusal(json.dumps({"model": "m", "messages": HELLO, **more}).encode())
    assert told["param"].replace("...", "0") == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    refusal(body)


def test_only_text_is_taken_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "developer", "content": parts}])
    assert asked.messages[0].plain() == {"role": "system", "content": "ab"}
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ApiError, match="image_url"):
        chat(messages=[{"role": "user", "content": image}]).messages[0].plain()


def test_usage_says_where_the_prompts_kv_was() -> None:
    usage = Usage(100, 7, decode_hit_tokens=64, shared_tokens=16, prefill_hit_tokens=80).body()
    assert usage["total_tokens"] == 107
    assert usage["prompt_tokens_details"] == {"cached_tokens": 80}
    assert usage["prefixkv"] == {
        "decode_hit_tokens": 64, "shared_tokens": 16, "sent_tokens": 20,
        "prefill_hit_tokens": 80, "computed_tokens": 20,
    }  # fmt: skip


def test_pieces_of_a_stream_are_events() -> None:
    answers = Answers("r", "m", 5, chat=True)
    raw = answers.begin(0) + answers.piece(0, "Hi", None) + answers.piece(0, "", "stop")
    events = [json.loads(one.removeprefix("data: ")) for one in raw.decode().split("\n\n")[:-1]]
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""}, {"content": "Hi"}, {},
    ]  # fmt: skip
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    plain = Answers("r", "m", 5, chat=False)
    assert plain.begin(0) == b""
    assert json.loads(plain.piece(1, "Hi", None)[6:])["choices"] == [
        {"index": 1, "text": "Hi", "logprobs": None, "finish_reason": None}
    ]
