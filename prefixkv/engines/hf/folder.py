"""The folder that a model is loaded from, checked before anything costly is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from prefixkv.errors import ConfigError

MODEL_FILES: Final = ("config.json", "*.safetensors")
TOKENIZER_FILE: Final = "tokenizer.json"
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")


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
