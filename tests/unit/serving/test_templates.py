"""Chats are rendered by transformers; what fails says where, and what a template of one kind cannot
read is given to it in another form."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from prefixkv.engines.hf.small import small_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving.openai import ChatRequest, parse
from prefixkv.serving.text import TextError, Texts
from tests.support.chat_templates import KINDS

CHAT = [{"role": "user", "content": "Grüß Gott <b> & 'x', 世界 "}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Tells the weather → anywhere.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}  # fmt: skip


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
CALLED = '<call>f\n{"a":  1}'


@pytest.mark.parametrize("content", [None, "missing"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        # Asks for null, and wants the arguments as the text that the client sent.
        ("deepseek", CALLED),
        # Need a text, and arguments that are an object.
        ("reasoner", '<|assistant|><call>f{"a": 1}<|end|>'),
        ("chatml", '\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>'),
        ("lengths", "<|assistant|>a=1;"),
        # Would write null as a text.
        ("phi", "<|assistant|>\n<|end|>"),
        # Look whether there is a text.
        ("llama", '{"name": "f", "parameters": {"a": 1}}'),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
        ("glm", "<tool_call>f<k>a<v>1"),
        ("gemma", None),
    ],
)  # fmt: skip
def test_a_call_of_a_tool_without_a_text_is_rendered(
    kind: str, said: str | None, content: str | None
) -> None:
    assistant = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
    if content == "missing":
        del assistant["content"]
    answer = {"role": "tool", "tool_call_id": "c", "content": "42"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}, assistant, answer]}
    asked = parse(json.dumps(body).encode(), ChatRequest)
    texts = Texts(small_tokenizer(), KINDS[kind])
    if kind == "gemma":  # knows no tools
        with pytest.raises(TextError, match="roles must alternate"):
            texts.chat(asked.messages)
        return
    text = texts.tokenizer.decode(texts.chat(asked.messages), skip_special_tokens=False)
    assert "None" not in text
    assert said is None or said in text


def test_a_template_that_takes_objects_gets_what_else_a_client_says() -> None:
    """Each part of a text, a call without arguments, no calls, and the developer."""
    part = {"type": "input_text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    calls = [
        {"type": "function", "function": {"name": "f", **more}}
        for more in ({"arguments": ""}, {"arguments": None}, {}, {"arguments": "{}"})
    ]
    messages = [
        {"role": "developer", "content": "be"}, {"role": "user", "content": [part]},
        {"role": "assistant", "content": "x", "tool_calls": [], "annotations": [], "audio": None},
        {"role": "user", "content": "more"}, {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": None},
    ]  # fmt: skip
    asked = parse(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest)
    texts = Texts(small_tokenizer(), KINDS["glm"])
    text = texts.tokenizer.decode(texts.chat(asked.messages), skip_special_tokens=False)
    assert text == (
        "[gMASK]<sop><|system|>\nbe<|user|>\nhi<|assistant|>\nx<|user|>\nmore<|assistant|>\n"
        + "<tool_call>f" * 4 + "<|tool|>\n<|assistant|>"
    )  # fmt: skip
    assert "tool_calls" not in asked.messages[2]


def test_a_chat_names_one_of_the_models_templates() -> None:
    texts = Texts(small_tokenizer(), {"default": "none", "rag": "rag", "tool_use": "tools"})
    for variables, said in (
        ({}, "none"), ({"tools": [TOOL]}, "tools"), ({"tools": []}, "tools"),
        ({"chat_template": "rag", "tools": [TOOL]}, "rag"),
    ):  # fmt: skip
        assert texts.tokenizer.decode(texts.chat(CHAT, variables=variables)) == said
    with pytest.raises(TextError, match=r"no chat template '\{\{ 1 \}\}', it has default, rag"):
        texts.chat(CHAT, variables={"chat_template": "{{ 1 }}"})
    with pytest.raises(TextError, match="no chat template 'default', it has rag"):
        Texts(small_tokenizer(), {"rag": "x"}).chat(CHAT)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("a\nb\n{{ raise_exception('users first') }}", r"\(line 3\): users first"),
        ("\n{{ missing.a }}", r"\(line 2\): 'missing' is undefined"),
        ("{% macro f() %}\n\n{{ 1 / 0 }}{% endmacro %}\n\n\n{{ f() }}", r"\(line 3\): division"),
        ("\n\n{{ {}['a']['b'] }}", r"\(line 3\)"),
        ("\n{% generation %}\n{{ messages.x.y }}{% endgeneration %}", r"\(line 3\)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", r"\(line 1\): maximum recursion"),
    ],
)
def test_a_template_that_fails_says_which_line(template: str, what: str) -> None:
    with pytest.raises(TextError, match=what):
        Texts(small_tokenizer(), template).chat(CHAT)


def test_a_template_that_is_not_read_says_which_line() -> None:
    for template in ("a\n\n{% if %}", "\n\n{% generation %}", "x\n\n{{ a | nofilter }}"):
        with pytest.raises(ConfigError, match="template is not read: line 3: "):
            Texts(small_tokenizer(), template)
    with pytest.raises(ConfigError, match="template 'rag' is not read: line 1: "):
        Texts(small_tokenizer(), {"default": "x", "rag": "{{"})


def test_what_is_no_variable_is_refused() -> None:
    texts = Texts(small_tokenizer(), "{{ messages[0].content }}")
    for variables in ({"messages": []}, {"continue_final_message": True}, {"tokenize": False}):
        with pytest.raises(TextError, match=f"{next(iter(variables))} is no variable"):
            texts.chat(CHAT, variables=variables)
    for variables in ({"tools": ["x"]}, {"tools": {}}, {"documents": "x"}, {"documents": [1]}):
        with pytest.raises(TextError, match=f"{next(iter(variables))} is no list of objects"):
            texts.chat(CHAT, variables=variables)


def test_rendering_changes_nothing_that_was_given() -> None:
    chat = [{"role": "user", "content": None, "reasoning": "r", "x": [1]}]
    variables = {"tools": [TOOL], "a": {"b": [1]}}
    before = json.dumps([chat, variables])
    source = "{{ messages[0].thinking }}{{ messages[0].update(a=1) }}"
    for template in (source, "{{ a.b.append(1) }}", "{% set a.b = 1 %}", "{{ a }}"):
        with suppress(TextError):
            Texts(small_tokenizer(), template).chat(chat, variables=variables)
        assert json.dumps([chat, variables]) == before
