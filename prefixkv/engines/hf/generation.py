"""What a model's folder says of its answers: how their tokens are drawn, and where they end.

transformers reads the files. Nothing here imports torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from prefixkv.engines.hf.folder import TOKENIZER_FILE, check_folder, one_line
from prefixkv.engines.hf.text import load_auto_tokenizer
from prefixkv.errors import ConfigError

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

    def number(name: str, is_in: Callable[[Any], bool], bounds: str) -> dict[str, Any]:
        value = said.get(name)
        if value is None:
            return {}
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_in(value):
            raise ConfigError(f"{file}: {name} is {value!r:.50}, must be {bounds}")
        return {name: value}

    found = {
        **number("temperature", lambda one: 0 <= one < math.inf, "in [0, infinity)"),
        **number(
            "top_k", lambda one: one == int(one) and -1 <= one < 2**31, "a whole number from -1 on"
        ),
        **number("top_p", lambda one: 0 < one <= 1, "in (0, 1]"),
    }
    if "top_k" in found:
        found["top_k"] = max(int(found["top_k"]), 0)  # -1 is as good as 0
    return SamplingDefaults(**found)


def end_tokens(path: Path, model: Any) -> list[int]:
    """Return the tokens that end an answer, by the model's generation config, its config or the
    tokenizer in its folder, if there is one. Raises ConfigError."""
    config = model.config
    parts = [model.generation_config, config, config.get_text_config()]
    if (path / TOKENIZER_FILE).is_file():
        parts.append(load_auto_tokenizer(path))
    found: set[int] = set()
    for part in parts:
        ends = getattr(part, "eos_token_id", None)
        found.update(ends if isinstance(ends, Iterable) else () if ends is None else (ends,))
    return sorted(found)
