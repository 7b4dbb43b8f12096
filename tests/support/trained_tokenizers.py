"""Tokenizers of every kind of decoder that models have, trained on a few lines in some
milliseconds."""

import json
from functools import cache
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

LINES: Final = [
    "the quick brown fox jumps over the lazy dog. Hello, world! How are you? I do n't know.",
    "def f(x):\n    return x + 1\n\n\tpass  # double  spaces", "naïve café déjà vu", "3.14159",
]  # fmt: skip
SPECIAL: Final = ["<unk>", "<s>", "</s>"]
_SIZE: Final = 330  # tokens, 256 of them bytes


def byte_level() -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's: bytes as characters of another alphabet."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(made, trainers.BpeTrainer, _SIZE, initial_alphabet=alphabet)


def byte_fallback(strip: bool = True) -> Tokenizer:
    """As Llama 2's and Gemma's (which does not strip): `_` for spaces, and tokens that name a
    byte."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁")] * strip + [normalizers.Replace(" ", "▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # words merge by themselves
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * strip
    )
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    _trained(made, trainers.BpeTrainer, _SIZE, special_tokens=[*SPECIAL, *names])
    # The trainer makes special tokens of the bytes; models have them as ordinary ones.
    config = json.loads(made.to_str())
    config["added_tokens"] = config["added_tokens"][: len(SPECIAL)]
    config["model"]["byte_fallback"] = True
    config["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(config))


def metaspace() -> Tokenizer:
    """As T5's and many newer models': the same spaces, by a decoder of their own."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return _trained(made, trainers.BpeTrainer, 120)


def word_piece() -> Tokenizer:
    """As BERT's: the decoder puts spaces between words, and takes some away before marks."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=True)
    return _trained(made, trainers.WordPieceTrainer, 120)


def suffixes() -> Tokenizer:
    """As CLIP's: the decoder puts a space after each word but the last."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.BPEDecoder(suffix="</w>")
    return _trained(made, trainers.BpeTrainer, 120, end_of_word_suffix="</w>")


KINDS: Final = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback without strip": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "suffixes": suffixes,
}


@cache
def trained(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind, with a token "<think>" that is added and has a text."""
    made: Tokenizer = KINDS[kind]()
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return made


def _trained(made: Tokenizer, trainer: Any, size: int, **options: Any) -> Tokenizer:
    """Train it on the lines."""
    options = {"special_tokens": SPECIAL, "show_progress": False, **options}
    made.train_from_iterator(LINES, trainer(vocab_size=size, **options))
    return made
