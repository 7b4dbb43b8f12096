"""A folder's tokens, templates and ends are what transformers reads from it, whatever its form."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from prefixkv.engines.hf import load_model, load_tokenizer
from prefixkv.engines.hf.folder import SamplingDefaults, load_sampling_defaults
from prefixkv.engines.hf.small import small_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving.openai import ChatRequest, parse
from prefixkv.serving.text import TextError, load_texts
from tests.support.chat_templates import KINDS

MARKS = ["<|im_start|>", "<|im_end|>", "<mark>", "<s>", "</s>"]
words = st.lists(st.sampled_from([*MARKS, "the", " cat", "kaka", "ü", "世", " ", "<|end|>"]))
texts = st.one_of(
    words.map("".join), st.text(max_size=40), words.map(lambda one: "".join(one) * 20)
)
templates = st.sampled_from(sorted(KINDS)).map(KINDS.__getitem__)
marks = st.lists(st.sampled_from(MARKS), max_size=2, unique=True)


@st.composite
def folders(draw: Any) -> dict[str, str]:
    """The files of a folder, by their names."""
    tokenizer = small_tokenizer()
    # 1. In tokenizer.json: added tokens, what it cuts and fills up, and what it puts around a text.
    tokenizer.add_tokens([AddedToken(one, special=draw(st.booleans())) for one in draw(marks)])
    if draw(st.booleans()):
        tokenizer.enable_truncation(draw(st.integers(4, 16)))
    if draw(st.booleans()):
        tokenizer.enable_padding(
            length=draw(st.none() | st.just(40)), pad_to_multiple_of=draw(st.none() | st.just(32))
        )
    around = draw(st.sampled_from(["$A", "<|user|> $A", "$A <|end|>", "<|user|> $A <|end|>", ""]))
    if around:
        special = [(one, tokenizer.token_to_id(one)) for one in ("<|user|>", "<|end|>")]
        tokenizer.post_processor = processors.TemplateProcessing(around, special_tokens=special)
    kinds = ("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast")
    config: dict[str, Any] = {"tokenizer_class": draw(st.sampled_from(kinds))}
    # 2. Beside it: further tokens, and which are special.
    config["additional_special_tokens"] = draw(marks)
    for name in draw(st.sets(st.sampled_from(["bos_token", "eos_token", "pad_token"]))):
        config[name] = draw(st.sampled_from([*MARKS, "<|end|>"]))
    for name in draw(st.sets(st.sampled_from(["add_bos_token", "add_eos_token"]))):
        config[name] = draw(st.booleans())
    # 3. The chat template, where it may be.
    files: dict[str, str] = {"tokenizer.json": tokenizer.to_str()}
    place = draw(st.sampled_from(["file", "list", "files"]))
    one, other = draw(templates), draw(templates)
    if place == "list":
        config["chat_template"] = [
            {"name": "default", "template": one},
            {"name": "tool_use", "template": other},
        ]
    else:
        files["chat_template.jinja"] = one
        config["chat_template"] = other
    if place == "files":
        files["additional_chat_templates/tool_use.jinja"] = other
    files["tokenizer_config.json"] = json.dumps(config)
    return files


def written(files: dict[str, str], folder: str) -> Path:
    for name, text in files.items():
        (Path(folder) / name).parent.mkdir(exist_ok=True)
        (Path(folder) / name).write_text(text)
    return Path(folder)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
calls = st.lists(
    st.fixed_dictionaries({"a": st.integers() | texts}).map(
        lambda one: {"id": "c", "function": {"name": "f", "arguments": json.dumps(one)}}
    ),
    min_size=1, max_size=2,
)  # fmt: skip
turns = st.one_of(
    st.tuples(texts, texts).map(
        lambda both: [
            {"role": "user", "content": both[0]}, {"role": "assistant", "content": both[1]},
        ]
    ),
    st.tuples(texts, texts, calls, texts, texts).map(
        lambda all: [
            {"role": "user", "content": all[0]},
            {"role": "assistant", "content": all[1], "tool_calls": all[2]},
            {"role": "tool", "tool_call_id": "c", "content": all[3]},
            {"role": "assistant", "content": all[4], "reasoning_content": all[0]},
        ]
    ),
)  # fmt: skip
histories = st.tuples(
    st.lists(texts.map(lambda one: {"role": "system", "content": one}), max_size=1),
    st.lists(turns, max_size=2).map(lambda them: [one for turn in them for one in turn]),
    texts.map(lambda one: [{"role": "user", "content": one}]),
).map(lambda parts: [*parts[0], *parts[1], *parts[2]])


variables = st.sampled_from([
    {}, {"tools": [TOOL]}, {"tools": [], "documents": [{"title": "T", "text": "ü"}]},
    {"chat_template_kwargs": {"add_generation_prompt": False, "bos_token": "<mine>"}},
    {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
])  # fmt: skip


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls as templates want them: OpenAI has them as texts."""
    calls = [
        {**call, "function": {"name": "f", "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


@given(files=folders(), text=texts, history=histories, more=variables)
def test_a_text_and_a_chat_have_the_tokens_of_transformers(
    files: dict[str, str], text: str, history: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = str(written(files, made))
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ours, answers = load_texts(folder), load_tokenizer(folder)
    assert ours.plain(text) == theirs(text)["input_ids"]
    tokens = ours.plain(text)
    assert answers.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    body = {"model": "m", "messages": history, **more}
    asked = parse(json.dumps(body).encode(), ChatRequest)
    try:
        options = {"add_generation_prompt": True, **asked.variables}
        chat = theirs.apply_chat_template(
            [*map(with_objects, asked.messages)], tokenize=True, return_dict=False, **options
        )
    except Exception:
        # Where arguments are wanted as a text, and else refused.
        for message in history:
            if "tool_calls" in message:
                break
        else:
            with pytest.raises(TextError):
                ours.chat(asked.messages, variables=asked.variables)
        return
    assert ours.chat(asked.messages, variables=asked.variables) == chat


ends = st.none() | st.sampled_from([0, 5, [5, 7], [512], [513, 5]])


@given(
    generation=ends, config=ends, eos=st.none() | st.sampled_from(["<|end|>", "<|user|>", "<s>"]),
    has_tokenizer=st.booleans(),
)  # fmt: skip
def test_an_answer_ends_at_the_end_tokens_of_three_files(
    generation: Any, config: Any, eos: str | None, has_tokenizer: bool
) -> None:
    tokenizer = small_tokenizer()
    sizes = {
        "vocab_size": 520, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "bos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=config)).save_pretrained(made)
        (Path(made) / "generation_config.json").unlink(missing_ok=True)
        files = {}
        if generation is not None:
            files["generation_config.json"] = json.dumps({"eos_token_id": generation})
        if has_tokenizer:
            files["tokenizer.json"] = tokenizer.to_str()
            files["tokenizer_config.json"] = json.dumps({"eos_token": eos} if eos else {})
        model = load_model(written(files, made), trial=False)
    expected = {*as_list(generation), *as_list(config)}
    if has_tokenizer and eos:
        known = tokenizer.token_to_id(eos)
        expected.add(tokenizer.get_vocab_size() if known is None else known)
    assert set(model.end_tokens) == expected


def as_list(ends: Any) -> list[int]:
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def test_tokens_declared_beside_the_tokenizer_are_tokens(tmp_path: Path) -> None:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 516, "<|im_end|>": 517}')
    tokens = load_texts(str(tmp_path)).plain("<|im_start|>cat<|im_end|>")
    assert (tokens[0], len(tokens), tokens[-1]) == (516, 5, 517)


@pytest.mark.parametrize(
    ("said", "defaults"),
    [
        ({}, (1.0, 0, 1.0)),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}, (0.6, 20, 0.95)),
        ({"top_k": 50}, (1.0, 50, 1.0)),
        ({"temperature": 0, "top_k": -1, "top_p": None}, (0, 0, 1.0)),
        ({"max_new_tokens": 5, "eos_token_id": [1, 2], "min_p": 0.0}, (1.0, 0, 1.0)),
    ],
)  # fmt: skip
def test_how_a_model_would_have_tokens_drawn(
    said: Any, defaults: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(*defaults)
    assert not [one for one in caplog.messages if "not served" in one]


def test_what_is_not_served_of_a_models_defaults_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_sampling_defaults(tmp_path) == SamplingDefaults()
    said = {"repetition_penalty": 1.1, "min_p": 0.1, "num_beams": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    load_sampling_defaults(tmp_path)
    (line,) = [one for one in caplog.messages if "not served" in one]
    assert line.endswith("answers come without: min_p, repetition_penalty")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('{"top_p": 0}', r"top_p is 0, must be in \(0, 1\]"),
        ('{"temperature": "hot"}', "temperature is 'hot', a number is needed"),
        ('{"top_k": 2.5}', "top_k is 2.5"), ("{", "is not read"),
    ],
)  # fmt: skip
def test_defaults_of_a_model_that_are_none_end_the_start(
    said: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(said)
    with pytest.raises(ConfigError, match=why):
        load_sampling_defaults(tmp_path)


def test_no_code_of_a_folder_is_run(tmp_path: Path) -> None:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_texts(str(tmp_path))
    assert not (tmp_path / "ran").exists()
