"""What is taken of OpenAI's interface, what is refused and how, the bodies that are sent, and what
clients say of their sessions, wherever they say it. Any bytes as a body are refused in OpenAI's
form, or what is made of them can be done."""

import contextlib
import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from prefixkv import Hints
from prefixkv.engines.hf.requests import AnswerToken, Sampling
from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer
from prefixkv.serving import openai
from prefixkv.serving.api import HEADER, SessionFields
from prefixkv.serving.http import ApiError
from prefixkv.serving.openai import (
    _NEUTRAL,
    Answers,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    Usage,
    parse,
)
from prefixkv.serving.text import TextError, Texts
from prefixkv.serving.wire import TokenEvent
from tests.support.fronts import fronted
from tests.support.patience import PATIENCE_S
from tests.support.scenes import in_loop

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
    assert asked.sampling() == Sampling(temperature=1.0)
    assert (asked.n, asked.stream, asked.most_tokens) == (1, False, None)
    plain = parse(b'{"model": "m", "prompt": [1, 2]}', CompletionRequest)
    assert (plain.prompts, plain.most_tokens) == ([[1, 2]], 16)


def test_what_is_said_becomes_how_tokens_are_chosen() -> None:
    asked = chat(
        temperature=0.5, top_k=7, top_p=0.9, seed=-1, stop="end", ignore_eos=True, n=3,
        max_tokens=5, max_completion_tokens=6, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    assert asked.sampling() == Sampling(0.5, 7, 0.9, 2**64 - 1, (), True, ("end",))
    assert (asked.n, asked.most_tokens, asked.stream_options.include_usage) == (3, 6, True)
    assert chat(top_k=-1, stop=["a", "b"]).sampling().stop == ("a", "b")
    assert chat(top_k=-1).sampling().top_k == 0


def test_what_asks_for_nothing_is_taken() -> None:
    chat(
        logprobs=False, tools=[], presence_penalty=0, response_format=None, user="u", of_later=None
    )
    chat(skip_special_tokens=True, use_beam_search=False, guided_json=None, verbosity="medium")
    chat(best_of=3, n=3, stop=[], length_penalty=1.0, include_stop_str_in_output=False)
    assert completion("a", best_of=1, echo=False, add_special_tokens=True) == ["a"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("echo", True), ("presence_penalty", 0.5), ("frequency_penalty", 1), ("min_p", 0.1),
        ("repetition_penalty", 1.1), ("suffix", "x"), ("modalities", ["text", "audio"]),
        ("best_of", 3), ("response_format", {"type": "json_object"}), ("logit_bias", {"5": 1}),
        ("include_stop_str_in_output", True), ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}), ("add_special_tokens", True),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value}) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    "name", ["audio", "guided_json", "structured_outputs", "prediction", "chat_template", "beams"]
)
def test_what_is_not_known_is_refused_by_name(name: str) -> None:
    assert refused(**{name: {"a": 1}}) == (name, "unknown_parameter")


def test_what_changes_no_answer_is_taken_whatever_it_is_and_named_once_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    openai._warn.cache_clear()
    metadata = {"user": "u", "trace": {"a": [1, "x" * 1000]}}
    more = {
        "metadata": metadata, "store": True, "service_tier": "flex",
        "parallel_tool_calls": False, "priority": 5, "rid": "r",
        "data_parallel_rank": 1, "stream_interval": 4, "include_reasoning": False,
        "mm_processor_kwargs": {"a": 1},
    }  # fmt: skip
    assert chat(**more) == chat()
    body = json.dumps({"model": "m", "prompt": "x", **more}).encode()
    assert parse(body, CompletionRequest) == parse(b'{"model":"m","prompt":"x"}', CompletionRequest)
    assert sorted(line.partition(" ")[0] for line in caplog.messages) == sorted(more)


def test_no_type_is_looked_at_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec evaluates all hints of a kind at each look: ten times what a request costs."""
    looks: list[Any] = []
    monkeypatch.setattr(msgspec.structs, "fields", looks.append)
    chat(temperature=0.5)
    completion("a")
    assert not looks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -5), ("max_completion_tokens", -1), ("n", 0),
        ("n", 129), ("temperature", -0.1), ("temperature", 2.1), ("top_p", 1.1),
        ("top_k", -2), ("seed", 10**40),
        ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 17), ("cache_salt", ""),
        ("seed", 2**64), ("min_tokens", -1), ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]), ("stop_token_ids", [1] * 129), ("messages", []),
        ("messages", HELLO * 4097),
        ("user", "u" * 300_000),
        ("top_logprobs", 2), ("top_logprobs", 21),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    told = refusal(json.dumps({"model": "m", "messages": HELLO, name: value}).encode())
    assert (told["param"].partition("[")[0], told["code"]) == (name, "invalid_value")
    assert told["message"].startswith(name)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": True}, "n"), ({"stream": 1}, "stream"), ({"model": 1}, "model"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [7]}, "messages[0]"), ({"messages": [{"content": ""}]}, "messages[0]"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "", "name": 1}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls"),
        ({"stop": [1]}, "stop[0]"), ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stream_options": {"odd": 1}}, "stream_options"), ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"), ({"logprobs": 3}, "logprobs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"), ({"session_id": 7}, "session_id"),
        ({"kv_hints": "ends"}, "kv_hints"), ({"kv_hints": {"ends": 1}}, "kv_hints.ends"),
        ({"kv_hints": {"returns_after": 45}}, "kv_hints.returns_after"),
        ({"kv_hints": {"session": "s" * 257}}, "kv_hints.session"),
        ({"kv_hints": {"version": 2}}, "kv_hints.version"),
        ({"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ],
)  # fmt: skip
def test_what_has_the_wrong_type_is_refused_where_it_stands(more: Any, param: str) -> None:
    told = refusal(json.dumps({"model": "m", "messages": HELLO, **more}).encode())
    assert told["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    refusal(body)


@pytest.mark.parametrize("thing", ["[],", '[[""]],', "{},", '{"[":"\\"{"},'])
def test_lists_objects_and_members_are_bounded_and_those_in_texts_are_none(thing: str) -> None:
    """While more and more of them are made Python's collector goes through all again and again."""
    with pytest.raises(ApiError, match="131072 lists, objects and members"):
        parse(
            f'{{"model":"m","prompt":"","metadata":[{thing * 131_072}0]}}'.encode(),
            CompletionRequest,
        )
    text = json.dumps(thing * 131_072)
    assert parse(f'{{"model":"m","prompt":{text}}}'.encode(), CompletionRequest).prompts == [
        thing * 131_072
    ]


def test_only_text_is_taken_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "developer", "content": parts}])
    assert asked.messages == [{"role": "system", "content": "ab"}]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ApiError, match="image_url"):
        chat(messages=[{"role": "user", "content": image}])


def test_calls_of_tools_are_given_to_the_template_as_they_stand() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    odd = {"id": "d", "type": "function", "function": {"name": "g", "arguments": "not json"}}
    assistant = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call, odd]}
    answer = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    asked = chat(messages=[*HELLO, assistant, answer], tools=tools, reasoning_effort="low",
                 documents=[{"text": "x"}], chat_template_kwargs={"thinking": True})  # fmt: skip
    assert asked.messages == [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call, odd]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    assert asked.variables == {
        "tools": tools, "documents": [{"text": "x"}], "reasoning_effort": "low", "thinking": True,
    }  # fmt: skip
    assert chat(tools=[], documents=None).variables == {}


def completion(prompt: Any, **more: Any) -> list[Any]:
    body = json.dumps({"model": "m", "prompt": prompt, **more}).encode()
    return parse(body, CompletionRequest).prompts


def test_a_prompt_is_one_or_several_texts_or_lists_of_tokens() -> None:
    assert completion("a, [b]") == ["a, [b]"]
    assert completion(["a", '"b\\'], n=64) == ["a", '"b\\']
    assert completion([1, 2]) == [[1, 2]]
    assert completion([[1], [2, 3]]) == [[1], [2, 3]]
    assert completion(["a"] * 128) == ["a"] * 128


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"), ({}, "prompt"), ([True], "prompt[0]"), (["a", 1], "prompt"),
        ([[1, "a"]], "prompt[0][1]"), ([1.5], "prompt[0]"), ([None], "prompt[0]"),
        (["a"] * 129, "prompt"), ([[1]] * 129, "prompt"), ([[1] * (1 << 20), [1]], "prompt"),
    ],
)  # fmt: skip
def test_a_prompt_of_another_kind_or_too_many_are_refused(prompt: Any, param: str) -> None:
    body = json.dumps({"model": "m", "prompt": prompt})
    with pytest.raises(ApiError) as raised:
        parse(body.encode(), CompletionRequest)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_prompts_times_samples_are_bounded() -> None:
    with pytest.raises(ApiError, match="n=65"):
        completion(["a", "b"], n=65)


def test_null_is_as_good_as_nothing() -> None:
    names = {field.name for field in msgspec.structs.fields(ChatRequest)} - {"model", "messages"}
    nothing = dict.fromkeys(names | _NEUTRAL.keys())
    assert chat(**nothing) == chat()
    assert refused(messages=None) == ("messages", "missing_required_parameter")


def test_options_of_a_stream_are_taken_without_one() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": None}
    asked = chat(stream_options=options, stream=False)
    assert asked.stream_options == StreamOptions(True, None, True)


def test_least_tokens_are_at_most_the_most() -> None:
    assert chat(min_tokens=5, stop_token_ids=[7]).sampling() == Sampling(
        1.0, stop_tokens=(7,), min_tokens=5
    )
    assert refused(min_tokens=5, max_tokens=4) == ("min_tokens", "invalid_value")
    assert chat().sampling(temperature=0.0).temperature == 0
    assert chat(temperature=0.5).sampling(temperature=0.0).temperature == 0.5


def test_usage_says_where_the_kv_of_prompts_was_and_what_prefill_has_done() -> None:
    usage = Usage(164, 7)
    assert usage.body()["prefixkv"]["sent_tokens"] == 0
    usage.add_prompt(100, AnswerToken(
        hit_tokens=64, shared_tokens=16, prefill_hit_tokens=80, host_tokens=48
    ))  # fmt: skip
    body = usage.body()
    assert body["total_tokens"] == 171
    assert body["prompt_tokens_details"] == {"cached_tokens": 80}
    assert body["prefixkv"] == {
        "decode_hit_tokens": 64, "decode_host_tokens": 48, "shared_tokens": 16, "sent_tokens": 20,
        "prefill_hit_tokens": 80, "computed_tokens": 20, "decode_computed_tokens": 0,
    }  # fmt: skip
    # Decode has all of it, and prefill computes the end for the first token.
    usage.add_prompt(64, AnswerToken(hit_tokens=64, prefill_hit_tokens=48))
    assert (usage.sent_tokens, usage.computed_tokens, usage.decode_hit_tokens) == (20, 36, 128)
    # Of each prompt the longer hit: 80, and then 64.
    assert usage.body()["prompt_tokens_details"] == {"cached_tokens": 144}


@pytest.mark.parametrize(
    ("computed", "hit", "sent", "by_prefill"), [(20, 0, 0, 0), (10, 48, 10, 42)]
)
def test_usage_of_a_prompt_that_decode_computes(
    computed: int, hit: int, sent: int, by_prefill: int
) -> None:
    usage = Usage(100)
    usage.add_prompt(100, AnswerToken(
        hit_tokens=64, shared_tokens=16, prefill_hit_tokens=hit, decode_computed_tokens=computed
    ))  # fmt: skip
    assert (usage.sent_tokens, usage.computed_tokens) == (sent, by_prefill)
    assert usage.decode_computed_tokens == computed


OUTPUTS = [TokenEvent(1, 0, 7, "Hi"), TokenEvent(0, 0, 8), TokenEvent(1, 1, 9, finish="stop"),
           TokenEvent(0, 1, 8, "Lo", "length")]  # fmt: skip


def test_pieces_of_a_stream_are_events() -> None:
    answers = Answers("r", chat(stream_options={"include_usage": True}), Usage(5, 4))
    raw = b"".join(map(answers.piece, OUTPUTS)) + answers.end()
    *events, done = raw.decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    *pieces, last = [json.loads(one.removeprefix("data: ")) for one in events]
    opening = {"role": "assistant", "content": ""}
    assert [(one["index"], one["delta"], one["finish_reason"]) for one in choices_of(pieces)] == [
        (1, opening, None), (1, {"content": "Hi"}, None), (0, opening, None), (1, {}, "stop"),
        (0, {"content": "Lo"}, "length"),
    ]  # fmt: skip
    assert {event["object"] for event in pieces} == {"chat.completion.chunk"}
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 9)
    plain = Answers("r", parse(b'{"model": "m", "prompt": "a"}', CompletionRequest), Usage(5))
    assert json.loads(plain.piece(OUTPUTS[0])[6:])["choices"] == [
        {"index": 1, "text": "Hi", "logprobs": None, "finish_reason": None}
    ]
    assert plain.piece(OUTPUTS[1]) == b""
    assert plain.end() == b"data: [DONE]\n\n"


def test_usage_is_told_all_along_if_that_is_asked_for() -> None:
    usage = Usage(5)
    answers = Answers("r", chat(stream_options={"continuous_usage_stats": True}), usage)
    opening = answers.piece(OUTPUTS[0])
    usage.output_tokens += 1
    *events, _ = (opening + answers.piece(OUTPUTS[2])).decode().split("\n\n")
    told = [json.loads(one.removeprefix("data: "))["usage"]["total_tokens"] for one in events]
    assert told == [5, 5, 6]
    assert answers.end() == b"data: [DONE]\n\n"


def choices_of(events: list[Any]) -> list[Any]:
    return [one for event in events for one in event["choices"]]


def test_an_answer_in_one_piece_has_its_samples_in_order() -> None:
    body = Answers("r", chat(), Usage(5, 4)).whole(OUTPUTS)
    assert body["id"] == "chatcmpl-r"
    shown = [(one["message"]["content"], one["finish_reason"]) for one in body["choices"]]
    assert shown == [("Lo", "length"), ("Hi", "stop")]


def hints(header: str = "", **body: Any) -> Hints:
    headers = [(HEADER.lower().encode(), header.encode())] if header else []
    asked = Request({"type": "http", "headers": headers})
    return msgspec.convert(body, SessionFields).hints(asked)


def test_a_session_is_named_by_the_most_precise_word() -> None:
    assert hints() == Hints()
    words: dict[str, Any] = {"prompt_cache_key": "key"}
    assert hints(**words).session == "key"
    assert hints("header", **words).session == "header"
    words["session_id"] = "body"
    assert hints("header", **words).session == "body"
    words["kv_hints"] = {"session": "hints", "ends": True, "of_later_versions": [1]}
    assert hints("header", **words) == Hints(session="hints", ends=True)


@pytest.mark.parametrize(
    ("retention", "said", "returns_after"),
    [
        ("24h", {}, 600), ("24h", {"returns_after": 30}, 30), ("24h", {"ends": True}, None),
        ("in_memory", {}, None), ("in-memory", {"returns_after": 120}, 120),
    ],
)  # fmt: skip
def test_24_hours_are_the_longest_class_where_nothing_else_is_said(
    retention: str, said: dict[str, Any], returns_after: int | None
) -> None:
    found = hints(prompt_cache_retention=retention, kv_hints=said)
    assert found == msgspec.convert({**said, "returns_after": returns_after}, Hints)


@pytest.mark.parametrize(
    ("header", "said", "param"),
    [("x" * 257, {}, HEADER), ("", {"ends": True, "returns_after": 30}, "kv_hints.returns_after")],
)
def test_what_cannot_be_is_refused_by_name(header: str, said: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        hints(header, kv_hints=said)
    assert (raised.value.status, raised.value.param) == (400, param)


@in_loop
async def test_a_front_s_workers_hear_of_a_session_in_its_salt_alone() -> None:
    async with (
        fronted(Texts(small_tokenizer(), CHAT_TEMPLATE)) as (front, asked),
        httpx.AsyncClient(base_url=front.server.url, timeout=PATIENCE_S) as client,
    ):
        body: dict[str, Any] = {
            "model": "small", "messages": [{"role": "user", "content": "Hello"}],
            "cache_salt": "tenant", "kv_hints": {"returns_after": 120},
        }  # fmt: skip
        answer = await client.post("/v1/chat/completions", json=body, headers={HEADER: "a/b"})
        assert answer.status_code == 200
        said = {"json": {"cache_salt": "tenant"}}, {}
        for more in said:
            answer = await client.post("/v1/sessions/a%2Fb", **more)
            assert (answer.status_code, answer.content) == (202, b"")
        generated, *announced = asked
        assert generated["hints"] == msgspec.to_builtins(Hints(session="a/b", returns_after=120))
        assert announced == [
            {"session": "a/b", "namespace": generated["namespace"]},
            {"session": "a/b", "namespace": ""},
        ]
        for path, content in (("a", b'{"ends": true}'), ("a" * 257, b"")):
            answer = await client.post(f"/v1/sessions/{path}", content=content)
            assert answer.status_code == 400
        assert len(asked) == 3


KINDS = (ChatRequest, CompletionRequest)
KNOWN = sorted({field.name for kind in KINDS for field in msgspec.structs.fields(kind)})
TEXTS = Texts(small_tokenizer(), CHAT_TEMPLATE)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**40]),
    st.floats(), st.text(max_size=20), st.sampled_from(["", "\0", "small", "user", "{{ 1/0 }}"]),
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | anything},
        optional={
            "content": st.text(max_size=30) | anything,
            "name": anything,
            "more": anything,
            "tool_calls": anything
            | st.lists(
                st.fixed_dictionaries({"function": st.fixed_dictionaries({"arguments": anything})}),
                max_size=2,
            ),
        },
    ),
    max_size=4,
)
prompts = (
    st.text(max_size=30) | anything
    | st.lists(st.text(max_size=3) | st.integers() | st.lists(st.integers() | anything, max_size=3))
)  # fmt: skip
names = st.sampled_from([*KNOWN, *_NEUTRAL]) | st.text(max_size=8)
bodies = st.builds(
    lambda base, more: {**base, **more},
    st.fixed_dictionaries(
        {"model": st.just("small")}, optional={"messages": messages, "prompt": prompts}
    ),
    st.dictionaries(names, anything, max_size=4),
)
plausible = st.fixed_dictionaries(
    {"model": st.just("small"), "messages": messages, "prompt": st.just("x")},
    optional={
        "max_tokens": st.integers(-2, 2**32), "temperature": st.floats(-1, 101),
        "top_p": st.floats(-0.1, 1.1), "top_k": st.integers(-3, 2**32), "n": st.integers(-1, 200),
        "seed": st.integers(-(2**64), 2**65), "stop": st.text(max_size=3) | st.lists(st.text()),
        "stream": st.booleans() | st.none(), "ignore_eos": st.booleans(),
        "min_tokens": st.integers(-1, 9), "stop_token_ids": st.lists(st.integers(-1, 2**31)),
        "chat_template_kwargs": anything, "reasoning_effort": anything, "tools": anything,
        "documents": anything, "stream_options": anything,
    },
)  # fmt: skip


def check(body: bytes, kind: type[Any]) -> bool:
    """Whether it is taken."""
    try:
        asked = parse(body, kind)
        if isinstance(asked, ChatRequest):
            with contextlib.suppress(TextError):
                assert TEXTS.chat(asked.messages, variables=asked.variables) is not None
    except ApiError as error:
        told = json.loads(msgspec.json.encode(error.body()))
        assert error.status == 400
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert error.response().status_code == 400
        return False
    Sampling(**msgspec.structs.asdict(asked.sampling()))  # the engine takes it
    assert asked.most_tokens is None or asked.most_tokens >= 1
    assert 1 <= asked.n <= 128
    assert isinstance(asked.stream, bool)
    return True


@pytest.mark.parametrize("kind", KINDS)
@given(body=st.binary(max_size=200))
def test_any_bytes(kind: type[Any], body: bytes) -> None:
    assert not check(body, kind), "a model's name and a prompt do not come about so"


@pytest.mark.parametrize("kind", KINDS)
@given(body=bodies)
def test_any_object(kind: type[Any], body: dict[str, Any]) -> None:
    check(json.dumps(body).encode("utf-8", "surrogatepass"), kind)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_what_is_nested_deeply(opening: bytes, closing: bytes) -> None:
    for depth in (2_000, 1_000_000):
        nested = opening * depth + b"1" + closing * depth
        assert not check(b'{"model":"small","messages":' + nested + b"}", ChatRequest)


@given(body=plausible)
def test_what_is_nearly_right(body: dict[str, Any]) -> None:
    for kind, other in ((ChatRequest, "prompt"), (CompletionRequest, "messages")):
        check(json.dumps({k: v for k, v in body.items() if k != other}).encode(), kind)


@given(body=plausible, cut=st.integers(0, 400), byte=st.integers(0, 255))
def test_what_was_right_with_a_byte_changed(body: dict[str, Any], cut: int, byte: int) -> None:
    raw = bytearray(json.dumps(body).encode())
    raw[cut % len(raw)] = byte
    check(bytes(raw), ChatRequest)
