"""What a model's folder says of its answers: how their tokens are drawn, and where they end.

transformers reads the files. Nothing here imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from prefixkv.engines.hf.folder import TOKENIZER_FILE, check_folder, one_line
from prefixkv.engines.hf.requests import Sampling
from prefixkv.engines.hf.text import load_auto_tokenizer
from prefixkv.errors import ConfigError, RequestError

logger = logging.getLogger("prefixkv.model")

_FILE: Final = "generation_config.json"
# What a model may say that changes its answers and is not served, and the values that change none.
_NOT_SERVED: Final[dict[str, tuple[Any, ...]]] = {
    "bad_words_ids": ([],), "begin_suppress_tokens": ([],), "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "guidance_scale": (1,),
    "min_length": (0,), "min_new_tokens": (0,), "min_p": (0,), "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,), "num_beams": (1,), "penalty_alpha": (), "repetition_penalty": (1,),
    "sequence_bias": (), "stop_strings": ([],), "suppress_tokens": ([],), "top_h": (),
    "typical_p": (1,), "watermarking_config": (),
}  # fmt: skip


class SamplingDefaults(NamedTuple):
    """How tokens are drawn where a request does not say."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


OPENAI: Final = SamplingDefaults()


def load_sampling_defaults(folder: str | Path) -> SamplingDefaults:
    """Logs once what the folder says that is not served. Raises ConfigError for other forms."""
    file = check_folder(folder, ()) / _FILE
    if not file.is_file():
        return OPENAI
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(file.parent, local_files_only=True)
        said = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    except Exception as error:  # a malformed file has any
        raise ConfigError(f"{file} is not read: {one_line(error)}") from error
    ignored = [
        name for name, neutral in _NOT_SERVED.items() if name in said and said[name] not in neutral
    ]
    if ignored:
        logger.warning("%s: not served, answers come without: %s", file, ", ".join(ignored))
    drawn = {name: said[name] for name in SamplingDefaults._fields if name in said}
    if drawn.get("top_k") == -1:  # as good as 0
        del drawn["top_k"]
    try:
        Sampling(**drawn)
    except RequestError as error:
        raise ConfigError(f"{file}: {error}") from None
    return SamplingDefaults(**drawn)


def end_tokens(path: Path, model: Any) -> list[int]:
    """Return the tokens that end an answer, by the model's generation config, its config or the
    tokenizer in its folder, if there is one. Raises ConfigError."""
    config = model.config
    parts = [model.generation_config, config, config.get_text_config()]
    if (path / TOKENIZER_FILE).is_file():
        parts.append(load_auto_tokenizer(path))
    return sorted({token for part in parts for token in token_ids(part)})


def token_ids(part: Any) -> list[int]:
    """Return the end tokens that a config or a tokenizer names."""
    ends = getattr(part, "eos_token_id", None)
    return [] if ends is None else list(ends) if isinstance(ends, Iterable) else [ends]
