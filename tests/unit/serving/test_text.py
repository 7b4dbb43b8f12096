"""Text to tokens, and chats as models' templates write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from prefixkv.engines.hf.small import save_tokenizer, small_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving.text import Texts, load_texts

CHAT = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüß Gott, 世界"},
]  # fmt: skip


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
    assert text_of(texts, texts.chat(CHAT)) == chat
    assert len(texts.chat(CHAT)) < len(chat)  # marks are one token each


def test_a_folder_without_a_template_has_a_plain_one(folder: Path) -> None:
    texts = load_texts(str(folder))
    said = "system: Be brief.\nuser: Grüß Gott, 世界\nassistant:"
    assert text_of(texts, texts.chat(CHAT)) == said


def test_a_folder_that_is_not_read_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not read"):
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
    longer = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for text in ("", "Grüß Gott,\n 世界\t!", " kaka rito tytyty<|end|><|user|> , 's .", "a" * 999):
        assert theirs.encode(text) == ours.plain(text) == again.plain(text)
        assert theirs.decode(theirs.encode(text)) == text
    for chat, more in ((CHAT, {}), (longer, {"tools": tools})):
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
