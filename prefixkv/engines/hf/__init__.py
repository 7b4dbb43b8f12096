"""Prefill and decode workers for Hugging Face models, with attention that uses the paged pool in
place. The extra `hf`; transformers is imported only when one of these names is used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prefixkv.engines.hf.decode import DecodeEngine as DecodeEngine
    from prefixkv.engines.hf.folder import load_tokenizer as load_tokenizer
    from prefixkv.engines.hf.loop import EngineLoop as EngineLoop
    from prefixkv.engines.hf.models import PagedModel as PagedModel
    from prefixkv.engines.hf.models import load_model as load_model
    from prefixkv.engines.hf.models import make_model as make_model
    from prefixkv.engines.hf.prefill import PrefillEngine as PrefillEngine
    from prefixkv.engines.hf.requests import Generate as Generate
    from prefixkv.engines.hf.requests import Output as Output
    from prefixkv.engines.hf.requests import PrefillJob as PrefillJob
    from prefixkv.engines.hf.requests import Sampling as Sampling

EXTRA: Final = ("safetensors", "tokenizers", "transformers")

_HOME: Final = {
    "DecodeEngine": "decode", "EngineLoop": "loop", "Generate": "requests", "Output": "requests",
    "PagedModel": "models", "PrefillEngine": "prefill", "PrefillJob": "requests",
    "Sampling": "requests", "load_model": "models", "load_tokenizer": "folder",
    "make_model": "models",
}  # fmt: skip
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # First, so that a missing package is one line with the remedy, and no chain of imports.
    check_extra()
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def check_extra() -> None:
    """Raise ImportError, in one line, if a package of the extra `hf` is missing."""
    if missing := [name for name in EXTRA if _is_missing(name)]:
        raise ImportError(
            f"prefixkv.engines.hf needs {', '.join(missing)}: pip install 'prefixkv[hf]'"
        )


def _is_missing(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ValueError:  # `sys.modules` has None for it, which blocks the import
        return True
