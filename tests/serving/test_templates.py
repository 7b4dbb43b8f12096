"""Chat templates render as transformers renders them, and what fails says where."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from prefixkv.engines.hf.small import small_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving import templates
from prefixkv.serving.templates import TextError
from prefixkv.serving.text import Texts, load_texts

LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|system|>" }}{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have these functions:\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|end|>" }}
    {%- else %}
        {{- "<|ipython|>" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|system|>\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|system|>' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "system" and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string %}
        {{- '<|assistant|>' }}
        {%- if reasoning and loop.index0 > ns.last_query_index %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}</tool_call>' }}
        {%- endfor %}
    {%- else %}{{- '<|' + message.role + '|>' + content }}{%- endif %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user and assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {%- for one in message.tool_calls %}{{- one.function|tojson }}{%- endfor %}{{- eos_token }}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- else %}{{- "[TOOL_RESULTS] " + message.content|string }}{%- endif %}
{%- endfor %}"""
TRAINING = """{% for m in messages %}
{% if m.role == "assistant" %}
  <|assistant|>{% generation %}{{ m.content }}<|end|>{%- endgeneration %}
{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
RAG = """{% for d in documents or [] %}[{{ loop.index }}] {{ d.title }}: {{ d['text'] }}
{% endfor %}{{ messages[-1].content }}"""
SMALL = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(ensure_ascii=True) }}{{ messages | tojson(ensure_ascii=False) }}",
    "{{ messages | tojson(indent=2, separators=(',', ':'), sort_keys=True) }}",
    "{{ messages | tojson(skipkeys=True) }}",
    "{{ messages[0] | tojson | upper }}{{ '<b>' | tojson }}{{ '<b>' }}",
    "{{ strftime_now('%Y-%m-%d %H:%M') }}",
    "{{ raise_exception('no') }}",
    "{{ dict(a=1) }}{{ dict.fromkeys(['b'], 2) }}{{ dict([('c', 3)], d=4) }}",
    "{{ dict.__class__ }}{{ dict.mro() }}",
    "{% set n = namespace(self=1, b=2) %}{% set n.b = 3 %}{{ n.self }}{{ n.b }}",
    "{% set n = namespace(_a=1) %}{{ n._a }}",
    "{% set n = namespace() %}{% set n.__init__ = 1 %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ ''.join.__self__ }}{{ '{0.__class__}'.format(1) }}",
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ unk_token }}",
    "{{ pad_token + 'x' }}",
    "{{ messages[0].thinking }}|{{ messages[-1].thinking }}|{{ messages[-1].reasoning_content }}",
    "{{ messages[0].content + messages[-1].content }}",
    "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ add_generation_prompt }}",
    "{{ 1 / 0 }}",
    "{{ {}['a'].b }}",
    "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{{ range(10**9) }}",
    "{% macro f(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call f(1) %}2{% endcall %}",
    "{% generation %}{% set a = 1 %}{{ a }}{% endgeneration %}{{ a }}",
    "{% include 'x' %}",
    "{{ messages[5] }}{{ messages | map(attribute='role') | join(',') }}",
    "{{ reasoning_effort }}{{ enable_thinking }}{{ nested.a[0].b }}",
    "  {% if true %}  \n  a\n  {% endif %}\n\n",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Grüß Gott <b> & 'x', 世界 "}],
    [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant", "content": None, "reasoning": "I ask.\n",
            "tool_calls": [
                {
                    "id": "c1", "type": "function",
                    "function": {"name": "weather", "arguments": {"at": "Köln", "n": [1, None]}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"t": 20}', "name": None},
    ],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "hm"}],
    [{"role": "user"}],
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Tells the weather → anywhere.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}  # fmt: skip
VARIABLES: list[dict[str, Any]] = [
    {},
    {"tools": [TOOL], "documents": [{"title": "T", "text": "ü"}, {"title": "U"}]},
    {"tools": [], "add_generation_prompt": False, "bos_token": "<mine>"},
    {"enable_thinking": False, "reasoning_effort": "high", "nested": {"a": [{"b": None}]}},
    {"args": 2, "context": 3, "date_string": "today", "raise_exception": 4},
]


class FixedDate(datetime):
    """So that both renderers read the same clock."""

    @classmethod
    def now(cls, tz: Any = None) -> FixedDate:
        return cls(2026, 11, 26, 21, 25)


def folder_of(path: Path, template: Any, **config: Any) -> Path:
    small_tokenizer().save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **config}
    config |= {
        "bos_token": {"content": "<|system|>", "__type": "AddedToken"},
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def compare(texts: Texts, theirs: Any, chat: Any, variables: dict[str, Any]) -> bool:
    """Both render the same tokens, or both refuse. True if they render."""
    options = {"add_generation_prompt": True, **variables}
    try:
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
    except Exception as error:
        with pytest.raises(TextError):
            texts.chat(chat, variables=variables)
        assert not isinstance(error, AssertionError)
        return False
    assert texts._templates.render(chat, variables) == text
    assert texts.chat(chat, variables=variables) == theirs.encode(text, add_special_tokens=False)
    return True


@pytest.mark.parametrize(
    "template", [LLAMA, QWEN, MISTRAL, TRAINING, RAG, *SMALL],
    ids=lambda template: template.split("\n")[0][:40],
)  # fmt: skip
def test_both_renderers_write_the_same_or_refuse(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (templates, chat_template_utils):
        monkeypatch.setattr(module, "datetime", FixedDate)
    texts = load_texts(str(folder_of(tmp_path, template)))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rendered = [
        compare(texts, theirs, chat, variables) for chat in CHATS for variables in VARIABLES
    ]
    # The long ones are to be rendered: equal refusals alone would prove little.
    assert sum(rendered) >= (10 if template in (LLAMA, QWEN, MISTRAL, TRAINING, RAG) else 0)


def test_templates_have_names_and_files(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "none"}]
    for files in ({}, {"rag": "rag of a file"}, {"rag": "rag", "tool_use": "tools of a file"}):
        folder_of(tmp_path, named)
        if files:
            (tmp_path / "chat_template.jinja").write_text("file")
        for name, text in files.items():
            (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
        texts = load_texts(str(tmp_path))
        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        for variables in ({}, {"tools": [TOOL]}, {"tools": []}, {"chat_template": "tool_use"}):
            if variables.get("chat_template") not in (None, *files) and files:
                continue  # to transformers it is a template itself
            assert compare(texts, theirs, CHATS[0], variables)
    with pytest.raises(
        TextError, match=r"no chat template '\{\{ 1 \}\}', it has default, rag, tool_us"
    ):
        texts.chat(CHATS[0], variables={"chat_template": "{{ 1 }}"})
    alone = Texts(small_tokenizer(), {"rag": "x"})
    with pytest.raises(TextError, match="no chat template 'default', it has rag"):
        alone.chat(CHATS[0])
    folder_of(tmp_path, [{"name": "default"}])
    (tmp_path / "chat_template.jinja").unlink()
    for file in (tmp_path / "additional_chat_templates").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"chat_template in .* is not read"):
        load_texts(str(tmp_path))


def test_special_tokens_of_an_older_folder(tmp_path: Path) -> None:
    folder_of(tmp_path, "{{ bos_token }}{{ sep_token }}{{ eos_token }}")
    old = {"bos_token": "<|user|>", "sep_token": {"content": "<|end|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(old))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert compare(load_texts(str(tmp_path)), theirs, CHATS[0], {})
    folder_of(tmp_path, "{{ bos_token }}{{ sep_token }}{{ eos_token }}", added_tokens_decoder={})
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert compare(load_texts(str(tmp_path)), theirs, CHATS[0], {})


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
        Texts(small_tokenizer(), template).chat(CHATS[0])


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
            texts.chat(CHATS[0], variables=variables)
    for variables in ({"tools": ["x"]}, {"tools": {}}, {"documents": "x"}, {"documents": [1]}):
        with pytest.raises(TextError, match=f"{next(iter(variables))} is no list of objects"):
            texts.chat(CHATS[0], variables=variables)


def test_rendering_changes_nothing_that_was_given() -> None:
    chat = [{"role": "user", "content": None, "reasoning": "r", "x": [1]}]
    variables = {"tools": [TOOL], "a": {"b": [1]}}
    before = json.dumps([chat, variables])
    source = "{{ messages[0].thinking }}{{ messages[0].update(a=1) }}"
    for template in (source, "{{ a.b.append(1) }}", "{% set a.b = 1 %}", "{{ a }}"):
        with suppress(TextError):
            Texts(small_tokenizer(), template).chat(chat, variables=variables)
        assert json.dumps([chat, variables]) == before
