"""The identity of a model: a digest of its config, and one of every number of its weights.

Two models may use each other's KV where both digests are equal. Neither depends on the location of
the files, or on how the tensors are spread over them.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from prefixkv import ModelConfig

_DIGEST_BYTES: Final = 16
_NOT_THE_MODELS: Final = frozenset({"_name_or_path", "transformers_version", "architectures"})
"""Keys of a config, at any depth, that describe its origin and not the model."""


def identity_of(model: Any) -> ModelConfig:
    """Return name and version, by config and weights. Reads all weights: see `weights_digest`."""
    kind = type(model).__name__
    return ModelConfig(f"{kind} {config_digest(model.config)}", weights_digest(model))


def config_digest(config: Any) -> str:
    """Equal wherever the config was loaded from."""
    text = json.dumps(_without_origin(config.to_dict()), sort_keys=True, default=str)
    return _digest(text.encode())


def weights_digest(model: Any) -> str:
    """Return a digest of the names, dtypes, shapes and bytes of all tensors. Reads all weights, by
    several threads; from a GPU each copies a tensor to the host at a time."""
    # Sorted by name: the order of a state dict is that of the model's construction.
    entries = sorted(model.state_dict().items())
    with ThreadPoolExecutor(4, "prefixkv-digest") as pool:
        return _digest(b"".join(pool.map(_hash_entry, entries)))


def _hash_entry(entry: tuple[str, Any]) -> bytes:
    name, value = entry
    if not isinstance(value, torch.Tensor):  # a module's own kind of state (`get_extra_state`)
        return hashlib.blake2b(repr(entry).encode()).digest()
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = hashlib.blake2b(repr((name, str(value.dtype), tuple(value.shape))).encode())
    whole.update(memoryview(raw))  # type: ignore[arg-type]  # numpy's stub says no Buffer
    return whole.digest()  # without the GIL


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _without_origin(value: Any) -> Any:
    """Return the value without the keys that describe its origin, at any depth."""
    if isinstance(value, dict):
        kept = {str(key): _without_origin(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if key not in _NOT_THE_MODELS}
    if isinstance(value, list | tuple):
        return [_without_origin(one) for one in value]
    return value
