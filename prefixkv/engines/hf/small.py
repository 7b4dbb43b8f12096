"""A small model and its tokenizer, made from a seed, to try everything without a download.

Its answers are words of no language. All its tokens are whole words, so that an answer's text
becomes the same tokens again in the next turn of a chat.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prefixkv.errors import ConfigError

NAME: Final = "small"

CHAT_TEMPLATE: Final = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% if documents %}<|system|>{{ documents | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SYLLABLES: Final = (
    "ka", "ri", "to", "mu", "ne", "so", "li", "va", "pe", "du", "ga", "hi", "no", "ze", "bo", "ty",
)  # fmt: skip
_SPECIAL: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_BYTES: Final = 256
WORDS: Final = range(_BYTES, _BYTES + len(_SYLLABLES) ** 2)
"""Token ids of the words."""
_SHARPNESS: Final = 4.0  # logits of tokens that never occur are 0, those of words spread by about 4


def small_tokenizer() -> Tokenizer:
    """256 bytes, 256 words of two syllables, marks of a chat. Any text decodes to itself."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += ["Ġ" + "".join(both) for both in product(_SYLLABLES, repeat=2)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], ignore_merges=True
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in _SPECIAL])
    return tokenizer


def save_tokenizer(folder: str | Path) -> None:
    """Write tokenizer and chat template for `AutoTokenizer.from_pretrained`. Raises ConfigError if
    files of another tokenizer are there, or nothing can be written."""
    system, user, assistant = _SPECIAL[1:]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _SPECIAL[0], "pad_token": _SPECIAL[0],
        "additional_special_tokens": [system, user, assistant],
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    files = {
        "tokenizer.json": small_tokenizer().to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        # All are looked at before one is written: a model's own folder stays as it is.
        for name, text in files.items():
            if (place / name).exists() and (place / name).read_text("utf-8") != text:
                raise ConfigError(f"tokenizer_folder: {place / name} is another tokenizer's")
        for name, text in files.items():
            (place / name).write_text(text, "utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer_folder: {folder!r} is not written: {error}") from None


def speak_words(head: Any, end: int) -> None:
    """Change the weights of a model's head, [vocabulary, size], in place, so that it generates
    words of the small tokenizer, and sometimes its token `end`."""
    import torch

    # Rows that are 0 give bytes and the marks of other roles a logit of 0, far below those of
    # likely words.
    with torch.no_grad():
        head[:_BYTES] = 0
        head[end + 1 :] = 0
        head *= _SHARPNESS


def small_model(seed: int = 0, **options: Any) -> Any:
    """Return the `PagedModel` for that tokenizer, which generates words and sometimes an end. Equal
    for equal seeds (and torch versions). `options`: see `make_model`. Raises ConfigError."""
    from prefixkv.engines.hf.models import PagedModel, make_model

    tokenizer = small_tokenizer()
    end = tokenizer.get_vocab()[_SPECIAL[0]]
    made = make_model(
        "llama", seed, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end,
        **{**options, "trial": False},
    )  # fmt: skip
    # The weights change here, so the model's identity is computed again.
    speak_words(made.model.lm_head.weight, end)
    name = f"{NAME} model made from seed {seed}"
    return PagedModel(made.model, made.context, trial=bool(options.get("trial", True)), name=name)
