"""Text as tokens come: whole characters, and strings that end it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from prefixkv.engines.hf import PagedModel, Sampling, load_tokenizer, make_model
from prefixkv.engines.hf.text import AnswerText
from prefixkv.errors import ConfigError, RequestError
from tests.models.hf_world import TINY, Reference, World


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token a byte."""
    made = Tokenizer(
        BPE({one: i for i, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def said(tokenizer: Tokenizer, text: str, *stop: str) -> tuple[list[str], bool]:
    """The pieces, and whether a string ended it."""
    answer, pieces = AnswerText(tokenizer, stop), []
    for token in tokenizer.encode(text).ids:
        piece, stopped = answer.add(token)
        pieces.append(piece)
        if stopped:
            return [*pieces, answer.end()], True
    return [*pieces, answer.end()], False


def test_a_character_comes_when_all_its_tokens_are_there(tokenizer: Tokenizer) -> None:
    pieces, stopped = said(tokenizer, "a€é")
    assert pieces == ["a", "", "", "€", "", "é", ""]
    assert not stopped


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["four"], "one two three"),
        ("aab", ["ab"], "a"),
        ("aaab", ["aab", "b"], "a"),
        ("ababac", ["abac"], "ab"),
        ("x€", ["€"], "x"),
        ("one tw", ["two"], "one tw"),
    ],
)
def test_a_string_ends_it_and_no_part_of_it_is_shown(
    tokenizer: Tokenizer, text: str, stop: list[str], shown: str
) -> None:
    pieces, stopped = said(tokenizer, text, *stop)
    assert "".join(pieces) == shown
    assert stopped == (shown != text)


def test_the_pieces_make_the_text_that_the_tokens_make_together(tokenizer: Tokenizer) -> None:
    """Also of one that ends in the middle of a character."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice([*"ab ü€😀"], rng.integers(1, 20)))
        tokens = tokenizer.encode(text).ids
        tokens = tokens[: rng.integers(1, len(tokens) + 1)]
        answer = AnswerText(tokenizer)
        pieces = [answer.add(token)[0] for token in tokens]
        assert "".join([*pieces, answer.end()]) == tokenizer.decode(tokens)
        assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_are_no_text_are_not_waited_for(tokenizer: Tokenizer) -> None:
    answer = AnswerText(tokenizer)
    (token, *_) = [i for i in range(256) if tokenizer.decode([i, i]) == "\ufffd" * 2]
    pieces = [answer.add(token)[0] for _ in range(20)]
    assert "".join(pieces) == "\ufffd" * 16
    assert answer.end() == "\ufffd" * 4
    assert answer.add(tokenizer.encode("a").ids[0]) == ("a", False)


def test_an_answer_has_text_and_ends_at_a_string(tokenizer: Tokenizer) -> None:
    model = make_model("llama", seed=3, **TINY)
    prompt = list(range(40))
    tokens = Reference(model).greedy(prompt, 20)
    whole = tokenizer.decode(tokens)
    with World(model, tokenizer=tokenizer) as world:
        all_of_it = world.ask("a", prompt, max_new_tokens=20)
        world.run()
        assert all_of_it.text(0) == whole
        stop = next(one + two for one, two in pairwise(whole[5:]) if "\ufffd" not in one + two)
        cut = world.ask("b", prompt, max_new_tokens=20, sampling=Sampling(stop=(stop,)))
        world.run()
        assert cut.text(0) == whole[: whole.index(stop)]
        assert cut.ends[0].finish == "stop"


def test_strings_need_a_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model: PagedModel = make_model("llama", seed=3, trial=False, **TINY)
    with World(model) as world, pytest.raises(RequestError, match="need an engine with a token"):
        world.ask("a", [1], sampling=Sampling(stop=("x",)))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="is not read"):
        load_tokenizer(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a€").ids == tokenizer.encode("a€").ids
