"""Chats are rendered by transformers; what fails says where, and what a template of one kind cannot
read is given to it in another form."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from prefixkv.engines.hf.small import save_tokenizer, small_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving.openai import ChatRequest, parse
from prefixkv.serving.text import TextError, Texts, load_texts
from tests.support.chat_templates import KINDS

TALK = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüß Gott, 世界"},
]  # fmt: skip
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
        ("{{ raise_exception('users first') }}", "refuses it: users first"),
        ("{{ missing.a }}", "'missing' is undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion"),
    ],
)
def test_a_template_that_fails_says_why(template: str, what: str) -> None:
    with pytest.raises(TextError, match=what):
        Texts(small_tokenizer(), template).chat(CHAT)


@pytest.mark.parametrize("template", ["a\n\n{% if %}", "x\n\n{{ a | nofilter }}"])
def test_a_template_that_is_not_read_says_which_line(template: str) -> None:
    with pytest.raises(ConfigError, match="template 'rag' is not read: line 3: "):
        Texts(small_tokenizer(), {"default": "x", "rag": template})


@pytest.mark.parametrize(
    "variables", [{"messages": []}, {"conversations": []}, {"tools": ["x"]}, {"documents": "x"}]
)
def test_what_is_no_variable_is_refused(variables: dict[str, Any]) -> None:
    with pytest.raises(TextError):
        Texts(small_tokenizer(), "{{ messages[0].content }}").chat(CHAT, variables)


# --- texts and folders ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def text_of(texts: Texts, tokens: list[int]) -> str:
    return texts.tokenizer.decode(tokens, skip_special_tokens=False)


def test_the_small_models_words_become_the_same_tokens_again() -> None:
    texts = load_texts("")
    words = [*range(256, 512), *range(511, 255, -3)]
    assert texts.plain(texts.tokenizer.decode(words)) == words
    assert texts.tokenizer.decode(texts.plain("Grüß Gott,\n 世界\t!")) == "Grüß Gott,\n 世界\t!"
    chat = "<|system|>Be brief.<|end|><|user|>Grüß Gott, 世界<|end|><|assistant|>"
    assert text_of(texts, texts.chat(TALK)) == chat
    assert len(texts.chat(TALK)) < len(chat)  # marks are one token each


def test_a_folder_without_a_template_has_a_plain_one_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = load_texts(str(folder))
    assert [one.message for one in caplog.records] == [
        f"{folder}: without a chat template: chats are written as ROLE: TEXT"
    ]
    said = "system: Be brief.\nuser: Grüß Gott, 世界\nassistant:"
    assert text_of(texts, texts.chat(TALK)) == said
    # With the token that a model wants before every text.
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|system|>"}')
    texts = load_texts(str(folder))
    assert text_of(texts, texts.chat(TALK)) == "<|system|>" + said


def test_a_folder_that_is_not_read_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the tokenizer of .* is not read"):
        load_texts(str(folder))
    with pytest.raises(ConfigError, match="there is no model folder"):
        load_texts(str(tmp_path / "none"))


def test_transformers_reads_the_small_models_tokenizer_as_the_front_does(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    save_tokenizer(folder)
    save_tokenizer(folder)  # a second start writes the same
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_texts("")
    again = load_texts(str(folder))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"ü": 1}}}
    longer = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for text in ("", "Grüß Gott,\n 世界\t!", " kaka rito tytyty<|end|><|user|> , 's .", "a" * 999):
        assert theirs.encode(text) == ours.plain(text) == again.plain(text)
        assert theirs.decode(theirs.encode(text)) == text
    for chat, more in ((TALK, {}), (longer, {"tools": tools})):
        ids = theirs.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False, **more
        )
        assert ids == ours.chat(chat, variables=more) == again.chat(chat, variables=more)
    assert theirs.eos_token_id == ours.tokenizer.token_to_id("<|end|>")
    assert set(theirs.all_special_ids) == {*range(512, 516)}


def test_another_tokenizers_folder_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is another tokenizer's"):
        save_tokenizer(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["tokenizer_config.json"]
    with pytest.raises(ConfigError, match="is not written"):
        save_tokenizer(tmp_path / "tokenizer_config.json" / "below")
