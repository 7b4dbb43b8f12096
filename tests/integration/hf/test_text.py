"""Text as tokens come: whole characters, and strings that end it."""

import codecs
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from prefixkv.engines.hf import PagedModel, Sampling, load_tokenizer, make_model
from prefixkv.engines.hf.text import AnswerText
from prefixkv.errors import ConfigError, RequestError
from tests.support.hf_world import TINY, Reference, World
from tests.support.trained_tokenizers import KINDS, byte_fallback, trained

BYTE = re.compile("<0x(..)>")
TEXTS = [
    "the", " quick", "Hello", " world", ".", "\ufffd", "\ufffd\ufffd", "漢", "字é", "😀", "  ", " ",
    "\n", "👨\u200d👩\u200d👧", "</s>", "<think>", "A",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token a byte."""
    made = Tokenizer(
        BPE({one: i for i, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


# --- the law: the text of all tokens, less the prompt's -------------------------------------------


def whole_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of all the tokens: what `decode` says, except that the characters of a run of bytes
    stand where others of the run are none (each of these is U+FFFD, as SentencePiece has it)."""
    special = {i for i, one in tokenizer.get_added_tokens_decoder().items() if one.special}
    names = [tokenizer.id_to_token(one) or "" for one in tokens if one not in special]
    parts = re.split("((?:<0x..>)+)", "".join(names))
    if len(parts) == 1:
        return str(tokenizer.decode(tokens))
    codecs.register_error("each", lambda error: ("\ufffd" * (error.end - error.start), error.end))
    rewritten: list[int] = []
    run = b""
    mixed = False
    for name in [*filter(None, names), ""]:
        if found := BYTE.fullmatch(name):
            run += bytes.fromhex(found[1])
            continue
        text = run.decode("utf-8", "each")
        mixed |= text.encode() != run and run.decode("utf-8", "ignore") != ""
        rewritten += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        rewritten += [tokenizer.token_to_id(name)] if name else []
        run = b""
    made = str(tokenizer.decode(rewritten))
    if not mixed:
        assert made == tokenizer.decode(tokens)
    return made


def less(whole: str, prompt: str) -> str:
    """The whole without what it has in common with the prompt."""
    for at in range(len(prompt), -1, -1):
        if whole.startswith(prompt[:at]):
            break
    return whole[at:]


@st.composite
def token_lists(draw: Any, kind: str, most: int = 30) -> list[int]:
    """Any tokens: of texts, cut anywhere, and drawn from the vocabulary, bytes more than others."""
    tokenizer = trained(kind)
    size = tokenizer.get_vocab_size()
    pieces = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    some = st.sampled_from(pieces)
    cut = st.builds(lambda ids, at: ids[: at % (len(ids) + 1)], some, st.integers(0, 9))
    random = st.lists(st.integers(0, size + 1), max_size=4)  # two are in no vocabulary
    drawn = draw(st.lists(st.one_of(some, cut, random), max_size=most // 3))
    return [token for tokens in drawn for token in tokens][:most]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_stream_is_the_whole_text_less_the_prompts(kind: str, data: st.DataObject) -> None:
    """Whatever the tokens are, and wherever the prompt ends. On its way no more is kept back than
    one character that is not complete."""
    tokenizer = trained(kind)
    tokens = data.draw(token_lists(kind))
    at = data.draw(st.integers(0, len(tokens)))
    prompt = whole_text(tokenizer, tokens[:at])
    answer = AnswerText(tokenizer, (), tokens[:at])
    text = ""
    for num, token in enumerate(tokens[at:], at + 1):
        text += answer.add(token)[0]
        now = less(whole_text(tokenizer, tokens[:num]), prompt)
        assert now.startswith(text)
        assert now[len(text) :] in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)
    assert text + answer.end() == less(whole_text(tokenizer, tokens), prompt)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_stop_string_is_found_wherever_tokens_are_cut(kind: str, data: st.DataObject) -> None:
    tokenizer = trained(kind)
    tokens = data.draw(token_lists(kind))
    at = data.draw(st.integers(0, len(tokens)))
    text = less(whole_text(tokenizer, tokens), whole_text(tokenizer, tokens[:at]))
    begin = data.draw(st.integers(0, len(text)))
    stop = text[begin : begin + data.draw(st.integers(1, 6))] or "none"
    answer, made = AnswerText(tokenizer, (stop, "not in it"), tokens[:at]), ""
    for token in tokens[at:]:
        piece, stopped = answer.add(token)
        made += piece
        if stopped:
            assert answer.end() == ""
            break
    else:
        made += answer.end()
    assert made == text[: text.find(stop) if stop in text else None]


def test_a_prompts_last_space_and_character_go_on_in_the_answer() -> None:
    tokenizer = byte_fallback()

    def answered(prompt: str, text: str, *after: str) -> str:
        before = [tokenizer.token_to_id(one) for one in prompt.split()]
        answer = AnswerText(tokenizer, (), before)
        ids = [tokenizer.token_to_id(one) for one in text.split()]
        return "".join(answer.add(token)[0] for token in ids) + answer.end()

    assert answered("▁the", "▁f o x") == " fox"
    assert answered("", "▁f o x") == "fox"  # the model wrote no space here, the tokenizer did
    assert answered("<s>", "▁f o x") == "fox"
    assert answered("▁the </s>", "▁f o x") == " fox"
    assert answered("▁the <0x0A>", "f o x") == "fox"
    # A character belongs to the side that completes it. One that is never complete is the prompt's.
    assert answered("▁the <0xE6> <0xBC>", "<0xA2> x") == "漢x"
    assert answered("▁the <0xE6>", "</s> <0xBC> <0xA2> x") == "漢x"
    assert answered("▁the <0xE6> <0xBC>", "x") == "x"
    assert answered("▁the <0xE6>", "<0xBC> x") == "\ufffdx"


def test_the_cost_of_a_token_does_not_grow_with_prompt_and_answer() -> None:
    class Counting:
        """A tokenizer that counts the tokens that it decodes."""

        def __init__(self, made: Tokenizer) -> None:
            self.made, self.most, self.calls = made, 0, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.made, name)

        def decode(self, tokens: list[int], **options: Any) -> str:
            self.most, self.calls = max(self.most, len(tokens)), self.calls + 1
            return str(self.made.decode(tokens, **options))

    rng = np.random.default_rng(1)
    for kind in KINDS:
        counting = Counting(trained(kind))
        size = trained(kind).get_vocab_size()
        answer = AnswerText(counting, (), rng.integers(0, size, 500))
        for token in [*rng.integers(0, size, 500).tolist(), *[2] * 100]:  # special ones at the end
            answer.add(token)
        assert counting.most <= 40  # 9 characters of at most 4 tokens
        counting.calls = 0
        AnswerText(counting, (), [2] * 10_000)  # a prompt without a text, neither
        assert counting.calls <= 200


def test_the_cost_of_a_token_does_not_grow_with_the_stop_strings(tokenizer: Tokenizer) -> None:
    class Counting(str):
        """A text that counts the parts that are taken of it."""

        taken = 0

        def __getitem__(self, part: Any) -> str:
            Counting.taken += 1
            return super().__getitem__(part)

    answer = AnswerText(tokenizer, (Counting("x" + "y" * 1000), Counting("z" * 1000)))
    for token in tokenizer.encode("the xyzzy", add_special_tokens=False).ids:
        answer.add(token)
    assert 0 < Counting.taken <= 100


def test_an_answer_has_text_and_ends_at_a_string(tokenizer: Tokenizer) -> None:
    model = make_model("llama", seed=3, **TINY)
    prompt = list(range(40))
    tokens = Reference(model).greedy(prompt, 20)
    whole = less(tokenizer.decode(prompt + tokens), tokenizer.decode(prompt))
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
