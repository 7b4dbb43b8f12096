"""Log-probabilities in OpenAI's forms: texts and bytes of tokens, and places."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from prefixkv.engines.hf.requests import TokenLogprob
from prefixkv.engines.hf.small import small_tokenizer
from prefixkv.serving.openai import AnswerLogprobs, joined
from prefixkv.serving.text import TokenTexts
from prefixkv.serving.wire import TokenEvent
from tests.support import trained_tokenizers
from tests.support.trained_tokenizers import byte_fallback

TEXTS = ["the cat", " the 猫", "5 € 🐈‍⬛ and \ufffd", "x", "naïve  café", "日本"]


def byte_level() -> Tokenizer:
    tokenizer = trained_tokenizers.byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


@pytest.mark.parametrize("make", [small_tokenizer, byte_level, byte_fallback])
def test_bytes_of_tokens_make_up_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        data = b"".join(texts.data(token) for token in ids)
        assert data.decode().lstrip(" ") == text.lstrip(" ")
        for token in ids:
            shown = texts.text(token)
            if not shown.startswith("bytes:"):
                assert shown.encode() == texts.data(token)


def test_a_part_of_a_character_is_written_out() -> None:
    for make in (byte_level, byte_fallback):
        tokenizer = make()
        texts = TokenTexts(tokenizer)
        ids = tokenizer.encode("日", add_special_tokens=False).ids[-3:]
        assert [texts.text(token) for token in ids] == [r"bytes:\xe6", r"bytes:\x97", r"bytes:\xa5"]
        assert [list(texts.data(token)) for token in ids] == [[0xE6], [0x97], [0xA5]]


def test_a_character_for_broken_ones_by_itself_is_no_part() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("\ufffd", add_special_tokens=False).ids
    assert b"".join(texts.data(token) for token in ids) == "\ufffd".encode()


def test_special_tokens_have_a_text_and_no_part_in_the_answers() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    end = tokenizer.token_to_id("<|end|>")
    assert texts.text(end) == "<|end|>"
    assert not texts.is_shown(end)
    assert texts.is_shown(end - 1)
    assert texts.text(10**6) == ""  # a row of a model that the tokenizer does not know


def test_a_space_before_a_word_belongs_to_its_token() -> None:
    tokenizer = byte_fallback()
    texts = TokenTexts(tokenizer)
    assert texts.text(tokenizer.token_to_id("▁the")) == " the"
    assert texts.text(tokenizer.token_to_id("▁")) == " "
    assert texts.text(tokenizer.token_to_id("the")) == "the"


def outputs_of(tokenizer: Tokenizer, ids: list[int], sample: int = 0) -> list[TokenEvent]:
    """As a worker sends them: each with what it adds to the text, and two likely tokens."""
    found, before = [], ""
    for i, token in enumerate(ids):
        whole = tokenizer.decode(ids[: i + 1])
        certain = whole if i == len(ids) - 1 else whole.rstrip("\ufffd")
        text = certain[len(before) :]
        before = certain
        one = TokenLogprob(token, -1.0 - i, ((ids[0], -0.5), (token, -1.0 - i)))
        last = i == len(ids) - 1
        finish = "length" if last else None
        found.append(TokenEvent(sample, i, token, text, finish, logprob=one))
    return found


def shown(answer: AnswerLogprobs, outputs: list[TokenEvent]) -> tuple[str, dict[str, Any]]:
    """A sample's text and log-probabilities as a client joins them."""
    texts, bodies = [], []
    for output in outputs:
        texts.append(output.text)
        body = answer.show(output)
        if body is not None:
            bodies.append(body)
    return "".join(texts), joined(bodies)


def test_a_chat_has_an_entry_for_each_token() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("the 日").ids, tokenizer.token_to_id("<|end|>")]
    text, body = shown(AnswerLogprobs(TokenTexts(tokenizer), True), outputs_of(tokenizer, ids))
    assert text == "the 日"
    content = body["content"]
    assert [one["logprob"] for one in content] == [-1.0 - i for i in range(len(ids))]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == "the 日<|end|>"
    assert content[-1]["token"] == "<|end|>"
    assert all(set(one) == {"token", "logprob", "bytes", "top_logprobs"} for one in content)
    for one in content:
        first, own = one["top_logprobs"]
        assert (first["logprob"], own["logprob"]) == (-0.5, one["logprob"])
        assert own["bytes"] == one["bytes"]


def test_samples_have_their_own_places() -> None:
    tokenizer = small_tokenizer()
    answer = AnswerLogprobs(TokenTexts(tokenizer), False)
    for sample, text in enumerate(("cd", "e", "fgh")):
        outputs = outputs_of(tokenizer, tokenizer.encode(text).ids, sample)
        whole, body = shown(answer, outputs)
        assert whole == text
        assert body["tokens"] == [*text]
        assert body["text_offset"] == list(range(len(text)))


def test_the_token_itself_is_among_the_likely_ones_and_of_one_text_the_likelier_counts() -> None:
    tokenizer = small_tokenizer()
    a, b = tokenizer.encode("ab").ids
    answer = AnswerLogprobs(TokenTexts(tokenizer), False)
    output = TokenEvent(0, 0, a, "a", logprob=TokenLogprob(a, -3.0, ((b, -1.0),)))
    assert answer.show(output)["top_logprobs"] == [{"b": -1.0, "a": -3.0}]
    nameless = TokenLogprob(10**6, -3.0, ((10**6 + 1, -1.0),))
    output = TokenEvent(0, 1, 10**6, "", logprob=nameless)
    assert answer.show(output)["top_logprobs"] == [{"": -1.0}]


@pytest.mark.parametrize("make", [small_tokenizer, byte_level])
def test_random_texts_have_their_places(make: Callable[[], Tokenizer]) -> None:
    rng = np.random.default_rng(0)
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    chars = "ab 猫é€🐈\ufffd\n"
    for _ in range(100):
        text = "".join(chars[i] for i in rng.integers(len(chars), size=rng.integers(1, 20)))
        ids = tokenizer.encode(text).ids
        whole, body = shown(AnswerLogprobs(texts, False), outputs_of(tokenizer, ids))
        assert whole == text
        assert body["text_offset"] == sorted(body["text_offset"])
        for token, at in zip(body["tokens"], body["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert text[at : at + len(token)] == token


@pytest.mark.parametrize("make", [small_tokenizer, byte_level])
def test_random_tokens_have_their_places_beside_characters_that_are_none(
    make: Callable[[], Tokenizer],
) -> None:
    rng = np.random.default_rng(1)
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    shown_ids = [t for t in range(tokenizer.get_vocab_size()) if texts.is_shown(t)]
    for _ in range(200):
        ids = [shown_ids[i] for i in rng.integers(len(shown_ids), size=rng.integers(1, 20))]
        text, body = shown(AnswerLogprobs(texts, False), outputs_of(tokenizer, ids))
        for token, at in zip(body["tokens"], body["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert text[at : at + len(token)] == token
