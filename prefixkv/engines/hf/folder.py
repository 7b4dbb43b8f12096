"""The folder that a model is loaded from: checked before anything costly is loaded, its tokenizer,
and what it says of answers: how their tokens are drawn, and where they end.

transformers reads the files. Nothing here imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from prefixkv.engines.hf.requests import Sampling
from prefixkv.errors import ConfigError, RequestError

logger = logging.getLogger("prefixkv.model")

MODEL_FILES: Final = ("config.json", "*.safetensors")
TOKENIZER_FILE: Final = "tokenizer.json"
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")
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


def check_folder(
    folder: str | Path, needed: tuple[str, ...] = (*MODEL_FILES, TOKENIZER_FILE)
) -> Path:
    """Return the path of a folder that has all files of these names or patterns. Reads none. Raises
    ConfigError, which says what is missing."""
    if not isinstance(folder, str | Path):
        raise ConfigError(f"the model is {folder!r}, the path of a folder is needed")
    path = Path(folder)
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"model {path} is no folder")
        if not path.is_dir():  # what is meant may be a name on a hub
            raise ConfigError(f"there is no model folder {path} (nothing is downloaded)")
        missing = [name for name in needed if not any(map(Path.is_file, path.glob(name)))]
        others = [one.name for pattern in _OTHER_WEIGHTS for one in sorted(path.glob(pattern))]
    except OSError as error:  # it may not be read
        raise ConfigError(f"model folder {path} is not read: {error.strerror}") from None
    if missing:
        text = f"model folder {path} has no {' and no '.join(missing)}"
        if MODEL_FILES[1] in missing and others:
            text += f"; {others[0]} is of a format that is not loaded"
        raise ConfigError(text)
    return path


def one_line(error: BaseException) -> str:
    """Return another package's error as one line, cut to 500 characters."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a model's folder. Raises ConfigError if it is missing or unreadable."""
    tokenizer: Tokenizer = load_auto_tokenizer(folder).backend_tokenizer
    return tokenizer


def template_renderer() -> Any:
    """Return transformers' `render_jinja_template`, which is loaded here."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def load_auto_tokenizer(folder: str | Path) -> Any:
    """Nothing outside is read, and no code is run. The `backend_tokenizer` neither cuts a text nor
    fills it up, whatever the folder says. Raises as `load_tokenizer`."""
    path = check_folder(folder, (TOKENIZER_FILE,))
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a malformed file has any
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"the tokenizer of {path} is not read: {why}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        why = f"{type(loaded).__name__} is none of the package tokenizers"
        raise ConfigError(f"the tokenizer of {path} is not served: {why}")
    # As transformers does before each text, which asks for neither.
    backend.no_truncation()
    backend.no_padding()
    return loaded


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
